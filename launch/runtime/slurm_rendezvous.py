"""The place where the tasks of a Slurm step meet, by the standard library alone: a rank that lacks a package asks too.

Slurm itself knows no such place, so that all tasks derive the same one from the step's variables.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, MutableMapping

FIRST_PORT, PORTS = 10_000, 19_997  # below the ephemeral ports of the kernel
FIRST_SPECIAL_STEP = 0xFFFFFFF0  # step ids from here on are batch scripts, interactive shells and the like


def is_step(environment: Mapping[str, str]) -> bool:
    """Returns whether `srun` started this process; batch scripts and `salloc` shells have most of its variables too."""
    step = environment.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < FIRST_SPECIAL_STEP and "SLURM_PROCID" in environment


def master(environment: Mapping[str, str]) -> tuple[str, int]:
    """Returns address and port of rank 0 of a step; the address is "" if it is not known, or no host is named."""
    port = port_of(16 * int(environment["SLURM_JOB_ID"]) + int(environment["SLURM_STEP_ID"]))
    if environment["SLURM_STEP_NUM_NODES"] == "1":
        return "127.0.0.1", port
    # the list is sorted; with an arbitrary distribution rank 0 may be on any of its hosts
    is_arbitrary = environment.get("SLURM_DISTRIBUTION", "").startswith("arbitrary")
    return "" if is_arbitrary else first_host(environment.get("SLURM_STEP_NODELIST", "")), port


def first_host(nodelist: str) -> str:
    """Returns the first host of a node list: "a" for "a,b", "node07" for "node[07-12],other"; else ""."""
    first = re.match(r"(?:[\w.-]|\[\d[\d,-]*\])+", nodelist)
    return "" if first is None else re.sub(r"\[(\d+)[^\]]*\]", r"\1", first[0])


def port_of(number: int) -> int:
    """Derives a port that all ranks of a job compute alike, and another job on the same host hardly ever."""
    return FIRST_PORT + number % PORTS


def set_variables(environment: MutableMapping[str, str]) -> None:
    """Sets the variables that torch reads to what a step says, unless they are set."""
    if is_step(environment):
        address, port = master(environment)
        own = {"RANK": environment["SLURM_PROCID"], "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"]}
        for name, value in (own | {"MASTER_ADDR": address, "MASTER_PORT": str(port)}).items():
            if value:
                environment.setdefault(name, value)
