"""`megalite generate` and `megalite evaluate`: a run or a folder, on one process or on ranks."""
