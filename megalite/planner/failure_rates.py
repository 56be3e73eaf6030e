"""Failure rates: from the components of a node, or as observed in large runs. Pure arithmetic, no torch.

A job stops when any of its nodes fails. Failures are independent and equally likely at any time, so rates add up, and
the mean time between failures (MTBF) falls as 1/N.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.yaml_text import parse_yaml

HOURS_PER_DAY = 24.0
NODE_HOURS = 1000 * HOURS_PER_DAY  # of 1,000 node-days, the unit in which runs publish failures
GPUS_PER_NODE = 8  # of all published runs

DEFAULT_RATE = 4.0  # failures per 1,000 node-days
PUBLISHED_BAND = (2.0, 14.0)  # from RSC-2 to OPT-175B; single figures lie outside: see OBSERVATIONS


@dataclass(frozen=True)
class Components:
    """Mean time to failure (MTTF) of one part each, in hours, and how many of them a node has; infinite: never fails.

    Figures of the worked example of a DGX H100; Llama 3's own run, 16,384 GPUs over 54 days, gives `LLAMA_3`.
    """

    gpu_mttf_hours: float = 50_000.0
    nic_mttf_hours: float = 150_000.0
    psu_mttf_hours: float = 100_000.0
    node_mttf_hours: float = math.inf  # host, switches and software: whatever else stops a node
    gpus_per_node: int = GPUS_PER_NODE
    nics_per_node: int | None = None  # None: one per GPU
    psus_per_node: int = 2
    redundant_psu: bool = False

    def failures_per_hour(self) -> Mapping[str, float]:
        """Failures per hour of one node, by component.

        A redundant power supply is replaced while the node runs on. Two of n out at once, n (n - 1) x repair / MTTF^2,
        is left out: with two supplies and a day to repair, 5e-9 per hour beside 2e-4.
        """
        nics = self.gpus_per_node if self.nics_per_node is None else self.nics_per_node
        return {
            "GPU": self.gpus_per_node / self.gpu_mttf_hours,
            "NIC": nics / self.nic_mttf_hours,
            "PSU": 0.0 if self.redundant_psu else self.psus_per_node / self.psu_mttf_hours,
            "node": 1 / self.node_mttf_hours,
        }

    @property
    def rate_per_1000_node_days(self) -> float:
        return NODE_HOURS * sum(self.failures_per_hour().values())

    @property
    def mttf_hours(self) -> float:
        """MTTF of a node: 1 / sum of the rates."""
        rate = sum(self.failures_per_hour().values())
        return 1 / rate if rate else math.inf


LLAMA_3_GPU_HOURS = 16_384 * 54 * HOURS_PER_DAY
# Llama 3 (arXiv:2407.21783), Table 5: of 419 unexpected interruptions 268 by GPUs and their memory, 7 by network
# adapters, 144 by everything else: software, switches, hosts, among them 3 by power supplies.
LLAMA_3 = Components(
    gpu_mttf_hours=LLAMA_3_GPU_HOURS / 268,
    nic_mttf_hours=LLAMA_3_GPU_HOURS / 7,
    psu_mttf_hours=math.inf,
    node_mttf_hours=LLAMA_3_GPU_HOURS / GPUS_PER_NODE / 144,
)


@dataclass(frozen=True)
class Observation:
    """Published failure rate of one run or cluster."""

    system: str
    rate_per_1000_node_days: float
    reckoned: str  # how the rate comes from what was printed
    source: str


def rate_of_count(failures: float, gpus: int, days: float) -> float:
    """Returns the rate per 1,000 node-days."""
    return 1000 * failures / (gpus / GPUS_PER_NODE * days)


def rate_of_mtbf(mtbf_hours: float, gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> float:
    """Returns the rate per 1,000 node-days from the MTBF of a job on `gpus`."""
    return NODE_HOURS / (mtbf_hours * gpus / gpus_per_node)


def _rate(row: dict[str, Any]) -> float:
    """Returns the rate of a row of the file: `printed`, or reckoned from failures, GPUs and days, or an MTBF."""
    if "printed" in row:
        return float(row["printed"])
    if "failures" in row:
        return rate_of_count(row["failures"], row["gpus"], row["days"])
    hours = row["mtbf_hours"] if "mtbf_hours" in row else HOURS_PER_DAY * row["mtbf_days"]
    return rate_of_mtbf(hours, row["gpus"])


OBSERVATIONS = tuple(
    Observation(row["system"], _rate(row), row["reckoned"], row["source"])
    for row in parse_yaml(Path(__file__).with_name("failure_rates.yaml").read_text())[0]
)

MISFITS = (
    "Not every published figure fits one rate: RSC-1's measured mean of 7.9 h at 1,024 GPUs implies about "
    f"{rate_of_mtbf(7.9, 1024):.0f} per 1,000 node-days and that of its 8-GPU jobs, 47.7 days, about "
    f"{rate_of_mtbf(47.7 * HOURS_PER_DAY, GPUS_PER_NODE):.0f}, where the same paper prints 6.5, which its projection "
    "of 1.8 h at 16,384 GPUs follows; 40 failures of OPT-175B in two weeks, from a survey, imply "
    f"{rate_of_count(40, 992, 14):.0f}."
)


def mtbf_hours(rate_per_1000_node_days: float, nodes: int) -> float:
    """Returns the MTBF of a job that stops when the first of so many nodes fails."""
    if nodes < 1 or not 0 < rate_per_1000_node_days < math.inf:
        raise ValueError(f"{rate_per_1000_node_days} failures per 1,000 node-days on {nodes} nodes")
    return NODE_HOURS / (rate_per_1000_node_days * nodes)


def failure_probability(probability: float, nodes: float) -> float:
    """Returns the probability that at least one of N nodes fails if each does with `probability`: 1 - (1 - p)^N."""
    if not 0 <= probability <= 1 or nodes < 0:
        raise ValueError(f"a probability of {probability} on {nodes} nodes")
    if probability == 1:
        return 1.0 if nodes else 0.0
    return -math.expm1(nodes * math.log1p(-probability))


def whole_nodes(gpus: int, gpus_per_node: int) -> int:
    """Returns the number of nodes. Raises ConfigError if the GPUs are no whole number of nodes."""
    if gpus > 0 and gpus % gpus_per_node == 0:
        return gpus // gpus_per_node
    below, above = gpus // gpus_per_node * gpus_per_node, -(-max(gpus, 1) // gpus_per_node) * gpus_per_node
    nearest = f"{below} or {above}" if below > 0 else f"{above}"
    raise ConfigError(
        f"{gpus} GPUs are no whole number of nodes with {gpus_per_node} GPUs each: take {nearest}, or give "
        "--gpus-per-node"
    )
