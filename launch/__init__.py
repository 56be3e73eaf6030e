"""The command line and everything around ranks: the only place where all rooms meet."""
