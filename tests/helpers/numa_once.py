"""Asks for the machine's NUMA nodes once in each process: DeepSpeed's accelerator of a CPU starts `numactl` for each
count of its devices (accelerator/cpu_accelerator.py), and ZeRO-3 counts them at every reduction: a seventh of its time
with tiny models."""

from __future__ import annotations

import functools

from deepspeed.utils import numa

numa.get_numa_cores = functools.cache(numa.get_numa_cores)
