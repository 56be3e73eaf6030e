"""`megalite prepare`: text to token files, in units that a restart does not do again."""
