"""A run that is looked at while it trains: the server of `megalite watch`, and what it shows on a terminal."""
