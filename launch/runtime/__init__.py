"""Processes, rank environments, logs, network, hostfile, the host's probe; names of modules that are started."""
