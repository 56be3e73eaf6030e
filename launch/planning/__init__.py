"""`megalite plan`: tables and pages about layouts, reliability and cost."""
