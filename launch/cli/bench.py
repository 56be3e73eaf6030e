"""The command `megalite bench`; launch/experiments implements it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.cli.series import Rounds, SeriesFolder, Steps, WarmUp, end_with_code_of, make_runs, print_planned
from launch.output import print_json, write_file
from launch.runtime.printing import say

if TYPE_CHECKING:
    from launch.experiments.variants import VariedOption
    from megalite.config import Config


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
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check and list the runs; start nothing.")] = False,
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
    from launch.trainer.start.run_config import load_run_config

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
        series.refuse_other_series(checked)
        print_planned(series, checked, as_json=as_json)
        return
    series.open(checked)
    results = make_runs(series, as_json=as_json)
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
