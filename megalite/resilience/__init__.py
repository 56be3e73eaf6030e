"""Guards, watchdog, heartbeat, requests to stop, checks of replicas."""
