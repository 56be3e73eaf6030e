"""Every typer command, thin: it reads options, calls a room below, prints."""
