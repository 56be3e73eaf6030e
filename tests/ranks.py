"""Ranks for tests: on the CPU, one thread each, because they share few cores."""

from __future__ import annotations

from launch.warm_ranks import RankFailure, run_ranks, warm_up

warm_up({"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})

__all__ = ["RankFailure", "run_ranks"]
