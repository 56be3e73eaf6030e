"""How many spare nodes a job needs so that it seldom waits for a repair. Pure arithmetic, no torch."""

from __future__ import annotations

MOST = 100_000


def waiting_share(spare_nodes: int, under_repair: float) -> float:
    """Part of the time that a job waits for a node, where `under_repair` nodes would be under repair on average if it
    never waited: rate of lost nodes x duration of a repair.

    Erlang's loss formula (Erlang B) with spare_nodes + 1 places: a job with S spare nodes stops when S + 1 are out, and
    loses no more until one is back. It holds for any distribution of repair times (Sevast'yanov 1957), and for
    restarts that are short against the time between failures.
    """
    blocked = 1.0
    for places in range(1, spare_nodes + 2):
        blocked = under_repair * blocked / (places + under_repair * blocked)
    return blocked


def spare_nodes_for(longest_share: float, under_repair: float) -> int:
    """The fewest spare nodes with which a job waits no longer than this part of its time."""
    blocked = 1.0
    for places in range(1, MOST):
        blocked = under_repair * blocked / (places + under_repair * blocked)
        if blocked <= longest_share:
            return places - 1
    return MOST
