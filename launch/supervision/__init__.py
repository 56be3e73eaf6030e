"""`megalite supervise`: restarts, liveness, the reaper of what a run leaves behind."""
