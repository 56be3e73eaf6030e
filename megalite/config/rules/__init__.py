"""Checks of a config over several options: what contradicts, what is not built, what is known to be broken."""
