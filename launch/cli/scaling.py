"""The command `megalite scaling`; launch/experiments implements it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from launch.cli.options import AsJson
from launch.cli.series import SeriesFolder, Steps, WarmUp, end_with_code_of, make_runs, print_planned
from launch.errors import LaunchError
from launch.output import print_json
from launch.runtime.devices import cpu_count, gpu_count
from launch.runtime.logs import get_logger
from launch.runtime.printing import say

if TYPE_CHECKING:
    from launch.experiments.scaling_report import ScalingReport
    from launch.experiments.series import RunSeries

log = get_logger(__name__)


def scaling(
    words: Annotated[
        list[str],
        typer.Argument(
            help="Config and section.option=value ...; with --from run folders.",
            metavar="CONFIG.yaml [OVERRIDES]... | RUN_DIR...",
        ),
    ],
    ranks: Annotated[str | None, typer.Option(metavar="1,2,4,8", help="Numbers of ranks.")] = None,
    weak: Annotated[
        bool, typer.Option("--weak", help="Hold the batch of a replica: more ranks train larger batches.")
    ] = False,
    strong: Annotated[
        bool, typer.Option("--strong", help="Hold the global batch: more ranks train it faster.")
    ] = False,
    grow: Annotated[
        Literal["data", "tensor", "pipeline", "auto"],
        typer.Option(help="Size of the layout that grows; auto: the layout that the planner takes to be the fastest."),
    ] = "data",
    from_runs: Annotated[
        bool, typer.Option("--from", help="Report on runs that exist, of any launcher; start nothing.")
    ] = False,
    oversubscribe: Annotated[
        bool, typer.Option("--oversubscribe", help="Allow more ranks than this machine has cores.")
    ] = False,
    steps: Steps = 20,
    warm_up: WarmUp = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Runs of each point, of which the median counts.")] = 1,
    folder: SeriesFolder = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure how a config scales over ranks: efficiency, predicted beside measured, and where the loss goes by part.

    Makes an ordinary short run on each number of ranks of this machine, or takes runs of a cluster (`--from`). Writes
    scaling.html, scaling.csv and scaling.json to FOLDER. A second call with the same folder goes on with the runs that
    are missing; Ctrl-C reports on those that are done (exit code 130); exit code 1 if no run worked.

    Example: `megalite scaling configs/quickstart.yaml parallel.tensor_parallel_size=1 parallel.pipeline_parallel_size=1
    --ranks 1,2,4 --strong`
    """
    from launch.experiments.efficiency import ScalingPoint
    from launch.experiments.scaling_report import ScalingReport

    if from_runs:
        if ranks is not None or weak or strong or dry_run:
            raise LaunchError(
                "--from reports on runs that exist: give it their folders and -o FOLDER, and none of --ranks, --weak, "
                "--strong and --dry-run"
            )
        _report_on([Path(word) for word in words], warm_up, folder, as_json=as_json)
        return
    if ranks is None or weak == strong:
        raise LaunchError(
            "say on which numbers of ranks and what is held: --ranks 1,2,4,8 and either --weak or --strong"
        )
    kind = "weak" if weak else "strong"
    series, crowded = _series(Path(words[0]), words[1:], ranks, kind, grow, (steps, warm_up, rounds), folder)
    checked = series.check()
    if crowded and not oversubscribe:
        raise LaunchError(
            f"--ranks {crowded[0]}: this machine has {cpu_count()} cores, and ranks that share one show nothing about "
            "scaling: use fewer ranks, or insist with --oversubscribe, which the report will say"
        )
    if dry_run:
        series.refuse_other_series(checked)
        print_planned(series, checked, as_json=as_json)
        return
    series.open(checked)
    results = make_runs(series, as_json=as_json)
    sizes = [run.layout.world_size for run in checked]
    points = [
        ScalingPoint(point.name, sizes[place], tuple(results.measured[place].values()), results.failures.get(place, ""))
        for place, point in enumerate(series.points)
    ]
    _show(ScalingReport(kind, points, crowded), series.folder, f"Scaling of {words[0]}", as_json=as_json)
    end_with_code_of(results)


def _series(
    config_path: Path,
    overrides: list[str],
    ranks: str,
    kind: str,
    grow: Literal["data", "tensor", "pipeline", "auto"],
    lengths: tuple[int, int, int],
    folder: Path | None,
) -> tuple[RunSeries, list[int]]:
    """Returns the series, and the numbers of ranks that are more than the cores of this machine."""
    from launch.experiments.scaling_points import parse_ranks, scaling_points
    from launch.experiments.series import RunSeries, length_free
    from launch.trainer.start.run_config import load_run_config

    base = load_run_config(config_path, overrides)
    numbers = parse_ranks(ranks)
    on_cpu, cores = not gpu_count(), cpu_count()
    points = scaling_points(base, numbers, grow, is_weak=kind == "weak")
    common = [*length_free(base), *overrides]
    if on_cpu and base.launch.threads_per_rank == "auto":  # which would give a rank alone all cores
        common.append(f"launch.threads_per_rank={max(1, cores // max(numbers))}")
    default = base.run_dir.with_name(f"{base.run_dir.name}_scaling_{kind}")
    series = RunSeries(f"scaling --{kind}", folder or default, config_path, tuple(common), points, *lengths)
    return series, [number for number in numbers if on_cpu and number > cores]


def _report_on(run_dirs: list[Path], warm_up: int, folder: Path | None, *, as_json: bool) -> None:
    """Reports on runs that exist."""
    from launch.experiments.scaling_points import kind_of, points_of_runs
    from launch.experiments.scaling_report import ScalingReport

    if folder is None:
        raise LaunchError("--from needs a folder for the report: -o FOLDER")
    points = points_of_runs(run_dirs, warm_up)
    folder.mkdir(parents=True, exist_ok=True)
    _show(ScalingReport(kind_of(points), points), folder, "Scaling of runs", as_json=as_json)


def _show(report: ScalingReport, folder: Path, title: str, *, as_json: bool) -> None:
    report.write(folder, title)
    if as_json:
        print_json(report.facts())
        return
    report.table().print()
    for sentence in report.sentences()[1:]:
        say(sentence)
    log.info(f"wrote scaling.html, scaling.csv and scaling.json to {folder}")
