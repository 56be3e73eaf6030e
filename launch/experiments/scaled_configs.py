"""The configs of `megalite scaling`: one config laid out for more and more ranks, as points of a series still to run.

Weak scaling holds the batch of a replica and adds replicas; strong scaling holds the global batch. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from launch.errors import LaunchError
from launch.experiments.series import SeriesPoint
from launch.prediction.auto_layout import choose_on
from launch.prediction.cluster import here
from megalite.config import Config
from megalite.config.suggestions import either, multiples_near
from megalite.units import plural

Grow = Literal["data", "tensor", "pipeline", "auto"]
SIZES = {  # what grows -> its option
    "data": "data_parallel_size",
    "tensor": "tensor_parallel_size",
    "pipeline": "pipeline_parallel_size",
}


def parse_ranks(text: str) -> list[int]:
    """Reads `1,2,4,8`. Raises LaunchError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) < 10**7 for word in words):
        raise LaunchError(f"--ranks {text}: write numbers of ranks from 1 up with commas, such as --ranks 1,2,4,8")
    return sorted({int(word) for word in words})


def scaled_configs(config: Config, ranks: Sequence[int], grow: Grow, *, is_weak: bool) -> tuple[SeriesPoint, ...]:
    """Returns a point for each number of ranks. Raises LaunchError if the layout cannot have one of them."""
    if is_weak and grow != "data":
        why = "leaves the number of replicas to the planner" if grow == "auto" else "adds no replica"
        raise LaunchError(
            f"--weak holds the batch of a replica and adds replicas, and --grow {grow} {why}: use --grow data, or "
            "--strong"
        )
    if grow == "auto":
        return tuple(_chosen(config, count) for count in ranks)
    parallel = config.parallel
    sizes = {option: getattr(parallel, option) for option in SIZES.values()}
    if sizes["data_parallel_size"] == "auto":
        sizes["data_parallel_size"] = 1
    own = SIZES[grow]
    held = parallel.context_parallel_size
    for option, size in sizes.items():
        held *= 1 if option == own else size
    points = []
    for count in ranks:
        if count % held:
            others = " x ".join(f"parallel.{option} {size}" for option, size in sizes.items() if option != own)
            raise LaunchError(
                f"--ranks {count}: {others} makes {held} ranks, and --grow {grow} multiplies them: use "
                f"{multiples_near(count, held)} ranks, or give these options other values"
            )
        grown = sizes | {own: count // held}
        batch = config.training.global_batch_size * (count // ranks[0] if is_weak else 1)
        if is_weak and count % ranks[0]:
            raise LaunchError(
                f"--ranks {count}: --weak multiplies the replicas of the smallest point, {plural(ranks[0], 'rank')}: "
                f"use {either([count // ranks[0] * ranks[0], (count // ranks[0] + 1) * ranks[0]])} ranks"
            )
        overrides = [f"parallel.{option}={size}" for option, size in grown.items()]
        points.append(SeriesPoint(plural(count, "rank"), (*overrides, f"training.global_batch_size={batch}")))
    return tuple(points)


def _chosen(config: Config, ranks: int) -> SeriesPoint:
    """Returns a point with the layout that the planner takes to be the fastest on so many ranks of this machine."""
    values = config.model_dump(mode="json")
    free = Config.model_validate(values | {"parallel": values["parallel"] | dict.fromkeys(SIZES.values(), "auto")})
    return SeriesPoint(plural(ranks, "rank"), tuple(choose_on(free, here(ranks)).overrides))
