"""The activity of a rank, now and before, for the watchdog and the recorder."""
