"""Signals that ask a run to save and end. No torch: a rank handles them before it imports anything."""

from __future__ import annotations

import signal

PREEMPTION = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)  # Slurm's --signal sends what one asks for
