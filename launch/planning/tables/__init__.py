"""The tables of `megalite plan`."""
