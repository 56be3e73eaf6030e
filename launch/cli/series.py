"""The commands `megalite bench` and `megalite scaling`: series of runs, which launch/experiments implements."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.errors import LaunchError
from launch.output import Table, print_json, progress_bar, write_file
from launch.runtime.devices import cpu_count, gpu_count
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config
from megalite.resilience.signals import exit_code_for
from megalite.units import count, plural, seconds

if TYPE_CHECKING:
    from launch.experiments.measurement import RunMeasurement
    from launch.experiments.scaling_report import ScalingReport
    from launch.experiments.series import RunSeries, SeriesRun
    from launch.experiments.series_runs import SeriesResults
    from launch.experiments.variants import VariedOption
    from launch.trainer.start.checks import CheckedRun
    from megalite.config import Config

log = get_logger(__name__)
NONE_WORKED_CODE = 1

Steps = Annotated[int, typer.Option(min=1, help="Steps of each run that are measured.")]
WarmUp = Annotated[int, typer.Option(min=0, help="Steps of each run before them, which do not count.")]
Rounds = Annotated[int, typer.Option(min=1, help="Runs of each point; their spread says what a difference is worth.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start nothing.")]
SeriesFolder = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FOLDER", help="Folder of the runs and their comparison; default: beside run_dir."
    ),
]


def print_planned(series: RunSeries, checked: Sequence[CheckedRun], *, as_json: bool) -> None:
    """Prints the points and runs of a series, and how many of them are there already."""
    series.refuse_other_series(checked)
    runs = list(series.runs())
    done = sum(map(series.is_done, runs))
    rows: list[dict[str, Any]] = [
        {
            "point": point.name,
            "ranks": run.layout.world_size,
            "overrides": list(point.overrides),
            "folder": str(series.folder_of(place)),
        }
        for place, (point, run) in enumerate(zip(series.points, checked, strict=True))
    ]
    if as_json:
        print_json({"folder": str(series.folder), "runs": len(runs), "done": done, "points": rows})
        return
    cells = [[row["point"], str(row["ranks"]), " ".join(row["overrides"]) or "none"] for row in rows]
    Table(("point", "ranks", "overrides"), cells, text_columns=(0, 2)).print()
    steps = plural(series.warm_up + series.steps, "step")
    say(f"dry run: {plural(len(runs), 'run')} of {steps} each in {series.folder}, of which {done} are done")


def make_runs(series: RunSeries, checked: Sequence[CheckedRun], *, as_json: bool) -> SeriesResults:
    """Makes the runs that are missing, with a bar of their progress and a sentence about each on stderr."""
    from launch.experiments.series_runs import run_series

    series.open(checked)
    total = series.warm_up + series.steps
    all_runs = list(series.runs())
    missing = sum(not series.is_done(run) for run in all_runs)
    tell = log.debug if as_json else log.info  # which writes to standard output
    tell(f"{missing} of {plural(len(all_runs), 'run')} to make, of {plural(total, 'step')} each")

    def name_of(run: SeriesRun) -> str:
        return f"round {run.round} of {series.rounds}, {series.points[run.place].name}"

    def finished(run: SeriesRun, found: RunMeasurement | str) -> None:
        if isinstance(found, str):
            log.warning(f"{name_of(run)}: {found}")
        else:
            tell(f"{name_of(run)}: {seconds(found.step_s)} a step, {count(found.tokens_per_s)} tokens/s")

    with progress_bar() as show:
        return run_series(series, lambda run, step: show(name_of(run), step, total), finished)


def end_with_code_of(results: SeriesResults) -> None:
    """Ends the command with the exit code of its results, after they have been shown."""
    if results.stopped_by is not None:
        log.warning("stopped: the same command again goes on with the runs that are missing")
        raise typer.Exit(exit_code_for(results.stopped_by))
    if not any(results.measured.values()):
        log.error("none of the runs worked")
        raise typer.Exit(NONE_WORKED_CODE)


def bench(
    config_path: ConfigPath,
    overrides: Overrides = None,
    vary: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=A,B,C", help="An option and its values; the first ones are compared with."),
    ] = None,
    buckets: Annotated[
        bool, typer.Option("--buckets", help="Vary the size of gradient buckets, under ZeRO-2 and 3 overlap too.")
    ] = False,
    micro_batch: Annotated[
        bool, typer.Option("--micro-batch", help="Vary training.micro_batch_size over powers of two.")
    ] = False,
    recompute: Annotated[bool, typer.Option("--recompute", help="Vary recompute.mode: none, selective, full.")] = False,
    steps: Steps = 20,
    warm_up: WarmUp = 5,
    rounds: Rounds = 3,
    folder: SeriesFolder = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Measure variants of a config against each other on this machine: which value of an option is fastest.

    Runs them in turns as ordinary short runs, without evaluations and checkpoints unless OVERRIDES ask for them, and
    compares within each round. Several --vary make all combinations. A second call with the same folder goes on with
    the runs that are missing. Ctrl-C prints the table of those that are done (exit code 130); exit code 1 if no variant
    worked.

    Example: `megalite bench configs/quickstart.yaml --vary parallel.zero_stage=1,2,3 --micro-batch`
    """
    from launch.experiments.bench_table import bench_table, conclusion
    from launch.experiments.comparison import compare
    from launch.experiments.series import RunSeries, length_free
    from launch.experiments.variants import VariedOption, variants

    base = load_run_config(config_path, overrides or [])
    varied = [VariedOption.parse(text) for text in vary or []]
    varied += _presets(base, buckets=buckets, micro_batch=micro_batch, recompute=recompute)
    series = RunSeries(
        "bench",
        folder or base.run_dir.with_name(f"{base.run_dir.name}_bench"),
        config_path,
        (*length_free(base), *(overrides or [])),
        variants(varied),
        steps,
        warm_up,
        rounds,
    )
    checked = series.check()
    if dry_run:
        print_planned(series, checked, as_json=as_json)
        return
    results = make_runs(series, checked, as_json=as_json)
    compared = compare(series.points, results)
    facts = series.definition(checked) | {"points": [one.facts() for one in compared]}
    write_file(series.folder / "bench.json", json.dumps(facts, indent=2) + "\n")
    if as_json:
        print_json(facts)
    else:
        bench_table(compared, steps).print()
        if sentence := conclusion(compared):
            say(sentence)
    end_with_code_of(results)


def _presets(config: Config, *, buckets: bool, micro_batch: bool, recompute: bool) -> list[VariedOption]:
    from launch.experiments.variants import bucket_sizes, micro_batch_sizes, recompute_modes
    from launch.trainer.start.checks import choose_layout, resolve

    found: list[VariedOption] = []
    if buckets:
        found += bucket_sizes(config)
    if micro_batch:
        layout, _ = resolve(choose_layout(config)[0])
        found += micro_batch_sizes(config, layout)
    if recompute:
        found += recompute_modes(config)
    return found


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
    dry_run: DryRun = False,
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
        print_planned(series, checked, as_json=as_json)
        return
    results = make_runs(series, checked, as_json=as_json)
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
    from launch.experiments.scaled_configs import parse_ranks, scaled_configs
    from launch.experiments.series import RunSeries, length_free

    base = load_run_config(config_path, overrides)
    numbers = parse_ranks(ranks)
    on_cpu, cores = not gpu_count(), cpu_count()
    points = scaled_configs(base, numbers, grow, is_weak=kind == "weak")
    common = [*length_free(base), *overrides]
    if on_cpu and base.launch.threads_per_rank == "auto":  # which would give a rank alone all cores
        common.append(f"launch.threads_per_rank={max(1, cores // max(numbers))}")
    default = base.run_dir.with_name(f"{base.run_dir.name}_scaling_{kind}")
    series = RunSeries(f"scaling --{kind}", folder or default, config_path, tuple(common), points, *lengths)
    return series, [number for number in numbers if on_cpu and number > cores]


def _report_on(run_dirs: list[Path], warm_up: int, folder: Path | None, *, as_json: bool) -> None:
    """Reports on runs that exist."""
    from launch.experiments.existing_runs import points_of_runs, scaling_kind
    from launch.experiments.scaling_report import ScalingReport

    if folder is None:
        raise LaunchError("--from needs a folder for the report: -o FOLDER")
    points = points_of_runs(run_dirs, warm_up)
    folder.mkdir(parents=True, exist_ok=True)
    _show(ScalingReport(scaling_kind(points), points), folder, "Scaling of runs", as_json=as_json)


def _show(report: ScalingReport, folder: Path, title: str, *, as_json: bool) -> None:
    report.write(folder, title)
    if as_json:
        print_json(report.facts())
        return
    report.table().print()
    for sentence in report.sentences()[1:]:
        say(sentence)
    log.info(f"wrote scaling.html, scaling.csv and scaling.json to {folder}")
