"""The points of `megalite scaling`: one config on more and more ranks, and runs that others have made.

Weak scaling holds the batch of a replica and adds replicas; strong scaling holds the global batch. No torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from launch.errors import USER_ERRORS, LaunchError
from launch.experiments.efficiency import ScalingPoint
from launch.experiments.measurement import RunMeasurement
from launch.experiments.series import SeriesPoint
from launch.inspection.files import check_is_run
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
MADE_ALIKE = {  # what runs must have in common, so that a token is the same work in each
    "model": lambda config: config.model,
    "training.sequence_length": lambda config: config.training.sequence_length,
    "precision.dtype": lambda config: config.precision.dtype,
}


def parse_ranks(text: str) -> list[int]:
    """Reads `1,2,4,8`. Raises LaunchError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 0 < int(word) < 10**7 for word in words):
        raise LaunchError(f"--ranks {text}: write numbers of ranks from 1 up with commas, such as --ranks 1,2,4,8")
    return sorted({int(word) for word in words})


def scaling_points(config: Config, ranks: Sequence[int], grow: Grow, *, is_weak: bool) -> tuple[SeriesPoint, ...]:
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
    held = 1
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


def points_of_runs(run_dirs: Sequence[Path], warm_up: int) -> list[ScalingPoint]:
    """Reads runs that any launcher has made; those of one layout are rounds of one point.

    Raises LaunchError for a folder that is no run's, and where a token is not the same work in all of them.
    """
    runs: dict[tuple[int, ...], list[RunMeasurement]] = {}
    failed = []
    for run_dir in run_dirs:
        check_is_run(run_dir)
        try:
            run = RunMeasurement.read(run_dir, warm_up)
        except USER_ERRORS as error:
            failed.append(ScalingPoint(str(run_dir), 0, (), str(error)))
            continue
        runs.setdefault((run.samples_per_step, *run.layout.values()), []).append(run)
    measured = [run for alike in runs.values() for run in alike]
    if not measured:
        raise LaunchError(*(point.failure for point in failed))
    for run in measured[1:]:
        for name, value_of in MADE_ALIKE.items():
            if value_of(run.config) != value_of(measured[0].config):
                raise LaunchError(
                    f"{run.run_dir} and {measured[0].run_dir} differ in {name}: a token is not the same work in both, "
                    "so their speeds say nothing about scaling"
                )
    points = []
    for alike in runs.values():
        name = " ".join(f"{size_of[0]}p{size}" for size_of, size in alike[0].layout.items())
        points.append(ScalingPoint(name, alike[0].ranks, tuple(alike)))
    return [*sorted(points, key=lambda point: point.ranks), *failed]


def kind_of(points: Sequence[ScalingPoint]) -> str:
    """Returns which scaling runs show: `strong`, `weak`, or `mixed` where no batch is held."""
    runs = [point.runs[0] for point in points if point.runs]

    def is_held(batch: Callable[[RunMeasurement], float]) -> bool:
        return len({batch(run) for run in runs}) == 1

    if is_held(lambda run: run.samples_per_step):
        return "strong"
    return "weak" if is_held(lambda run: run.samples_per_step / run.layout["data_parallel_size"]) else "mixed"
