"""Reads runs that exist, of any launcher, as measured points for `megalite scaling --from`. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from launch.errors import USER_ERRORS, LaunchError
from launch.experiments.efficiency import ScalingPoint
from launch.experiments.measurement import RunMeasurement
from launch.inspection.run_files import check_is_run

MADE_ALIKE = {  # what runs must have in common, so that a token is the same work in each
    "model": lambda config: config.model,
    "training.sequence_length": lambda config: config.training.sequence_length,
    "precision.dtype": lambda config: config.precision.dtype,
}


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


def scaling_kind(points: Sequence[ScalingPoint]) -> str:
    """Returns which scaling runs show: `strong`, `weak`, or `mixed` where no batch is held."""
    runs = [point.runs[0] for point in points if point.runs]

    def is_held(batch: Callable[[RunMeasurement], float]) -> bool:
        return len({batch(run) for run in runs}) == 1

    if is_held(lambda run: run.samples_per_step):
        return "strong"
    return "weak" if is_held(lambda run: run.samples_per_step / run.layout["data_parallel_size"]) else "mixed"
