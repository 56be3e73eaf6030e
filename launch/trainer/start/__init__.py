"""Makes a run that may begin of a config and a run folder: checks, resume, devices."""
