"""Slowdown of synchronous steps by the slowest node, and spare nodes for repairs. No torch.

Every step ends when its last node does, so a step takes the longest of N node times, not their mean: a node that is
always slow holds up all others, and so does whichever node happens to be late in this step.
"""

from __future__ import annotations

import math
from functools import lru_cache

MOST = 100_000


def spare_nodes_for(longest_share: float, under_repair: float) -> int:
    """Returns the fewest spare nodes with which a job waits for at most this share of its time (Erlang's loss
    formula)."""
    blocked = 1.0
    for places in range(1, MOST):
        blocked = under_repair * blocked / (places + under_repair * blocked)
        if blocked <= longest_share:
            return places - 1
    return MOST


HALF_WIDTH = 9.0  # standard deviations around a mean beyond which nothing is
INTERVALS = 600  # of Simpson's rule


@lru_cache(maxsize=4096)
def expected_slowdown(nodes: int, slow_nodes: int, slow_by: float, jitter: float) -> float:
    """Returns the mean duration of a step relative to one on identical nodes, at least 1.

    `slow_nodes` of the nodes take `1 + slow_by` times as long in every step; besides, each node's time varies from step
    to step with a standard deviation of `jitter` (both are parts of a step), normally and independently. The mean of
    the largest of independent numbers: E[max] = integral of 1 - product of F_i (David & Nagaraja, Order Statistics).
    """
    usual = nodes - slow_nodes
    if jitter == 0:
        return 1.0 + slow_by * (slow_nodes > 0)
    top = slow_by if slow_nodes else 0.0
    low, high = -HALF_WIDTH * jitter, top + HALF_WIDTH * jitter

    def all_done(at: float) -> float:
        """Returns the probability that no node needs longer than 1 + `at`."""
        return _normal(at / jitter) ** usual * _normal((at - slow_by) / jitter) ** slow_nodes

    width = (high - low) / INTERVALS
    inner = sum((4 if i % 2 else 2) * (1.0 - all_done(low + i * width)) for i in range(1, INTERVALS))
    area = (2.0 - all_done(low) - all_done(high) + inner) * width / 3
    return 1.0 + max(top, low + area)


def expected_maximum(count: int) -> float:
    """Returns the mean of the largest of `count` standard normal numbers: 0.564 of 2, 2.51 of 100; near sqrt(2 ln N)
    for many."""
    return expected_slowdown(count, 0, 0.0, 1.0) - 1.0


def probability_of_any(nodes: int, share: float) -> float:
    """Returns the probability that at least one node is slow: 1 - (1 - share)^N."""
    return -math.expm1(nodes * math.log1p(-share)) if share < 1 else 1.0


def _normal(at: float) -> float:
    """Returns the standard normal distribution function."""
    return 0.5 * math.erfc(-at / math.sqrt(2))
