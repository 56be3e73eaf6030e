"""The HTML page of `megalite plan`: its figures and tables."""
