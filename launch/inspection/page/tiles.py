"""The tiles at the top of a run's page: its most important numbers, as `megalite status` counts them."""

from __future__ import annotations

import numpy as np

from launch.inspection.page.page_data import PageData
from launch.inspection.state import RunState
from megalite.units import count, digits, percent, rounded, seconds

UNKNOWN = "\N{EN DASH}"


def tiles_of(found: PageData) -> dict[str, str]:
    """Returns the numbers by their names, as `megalite status` counts them; what is not known is a dash."""
    status = found.status
    goodput = found.receipt.goodput.goodput
    if goodput is None or status.state is RunState.RUNNING:
        goodput = status.goodput
    total = f" of {status.total_steps:,}" if status.total_steps is not None else ""
    tiles = {
        "state": str(status.state),
        f"step{total}": f"{status.step:,}" if status.step is not None else UNKNOWN,
        "loss, nats per token": f"{status.loss:.4f}" if status.loss is not None else UNKNOWN,
        "tokens/s": count(status.tokens_per_second) if status.tokens_per_second is not None else UNKNOWN,
        "samples/s": digits(status.samples_per_second) if status.samples_per_second is not None else UNKNOWN,
        "from step to step": seconds(status.step_s) if status.step_s is not None else UNKNOWN,
        "goodput": percent(goodput) if goodput is not None else UNKNOWN,
    }
    if found.history.has("tokens_seen"):
        tiles["tokens seen"] = count(float(np.nanmax(found.history.column("tokens_seen"))))
    skipped = float(np.nan_to_num(found.history.column("skipped_steps")).max(initial=0.0))
    if skipped and status.step:
        tiles["steps skipped"] = f"{skipped:,.0f} ({percent(skipped / status.step)})"
    if status.model_flops_utilization is not None:  # unknown on a CPU
        tiles["MFU"] = percent(status.model_flops_utilization)
    if status.left_s is not None:
        tiles["left"] = rounded(status.left_s)
    return tiles
