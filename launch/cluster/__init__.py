"""The hosts of a run: a connection to each that stays open, and the program at its other end."""
