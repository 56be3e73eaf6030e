"""One connection to each host, and the agent at its other end."""
