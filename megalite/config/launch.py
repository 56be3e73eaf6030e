"""Section `launch`: what the local launcher sets for ranks on a CPU before they start."""

from __future__ import annotations

from typing import Literal

from megalite.config.base import PositiveInt, Section


class LaunchConfig(Section):
    """Process settings of local CPU ranks; none of them changes a result."""

    threads_per_rank: PositiveInt | Literal["auto"] = "auto"
    """Compute threads of one rank; `auto` divides this machine's cores among its ranks."""

    malloc_tunables: bool = True
    """Let glibc's malloc keep freed memory instead of returning it: fewer page faults, faster steps."""

    spin_threads: Literal["auto"] | bool = "auto"
    """OpenMP threads spin between parallel regions; `auto`: only when ranks x threads fit the cores."""
