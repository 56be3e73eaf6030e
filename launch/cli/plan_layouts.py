"""The command `megalite plan CONFIG.yaml`: layouts that fit a cluster, and which to take. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from shlex import quote

from typer import Option

from launch.cli.options import (
    MOST_ACCELERATORS,
    AsJson,
    CommandOptions,
    ConfigPath,
    Overrides,
    PricePerAcceleratorHour,
    check_one_format,
    checked_price,
    taking,
)
from launch.errors import LaunchError
from launch.output import check_writable, print_csv, print_json, progress_lines, write_file
from launch.planning.tables.forecast import forecast_as_json, forecast_lines
from launch.planning.tables.layouts import (
    LayoutRow,
    context_rows,
    contexts_table,
    layouts_table,
    row_of,
    rows_of,
    search_as_json,
)
from launch.prediction.cluster import cluster_at, here, search_here
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config, ConfigError, resolve_layout, wanted_world_size
from megalite.config.auto import PLACEHOLDERS, SCHEDULE
from megalite.config.batch_stage_text import format_stage, stage_facts
from megalite.config.known_models import origin, run_of
from megalite.config.loading.load import stated_values
from megalite.config.suggestions import dotted
from megalite.config.yaml_text import to_yaml
from megalite.planner.explanation import caveats, explain, why_nothing_fits
from megalite.planner.forecast import forecast_of
from megalite.planner.hardware import Cluster, is_guess
from megalite.planner.longest_context import ContextLength, context_lengths
from megalite.planner.open_options import choose_open
from megalite.planner.search import DATA, MICRO_BATCH, SearchResult, judged, search
from megalite.units import plural

log = get_logger(__name__)
ALL_AUTO = tuple(f"{dotted(path)}=auto" for path in (*PLACEHOLDERS, DATA) if path != SCHEDULE)


class LayoutOptions(CommandOptions):
    """The config, the cluster, and what is written."""

    config_path: ConfigPath
    overrides: Overrides = None
    cluster: Path | None = Option(None, help="YAML file with accelerator, nodes and accelerators_per_node.")
    hostfile: Path | None = Option(None, "--hostfile", "-H", help="Alternative: a file of hosts with their slots.")
    gpus: int | None = Option(None, min=1, help="Alternative: a number of --accelerator.")
    gpus_per_node: int | None = Option(None, min=1, help="GPUs per node, with --gpus; default: 8.")
    accelerator: str | None = Option(
        None, help="Accelerator of the hosts, such as H100; required with --gpus and --hostfile."
    )
    top: int = Option(10, min=1, help="Number of layouts to show.")
    write: Path | None = Option(None, metavar="FILE.yaml", help="Write the config with the best layout to a file.")
    overwrite: bool = Option(False, "--overwrite", help="Replace the files of --write and --html.")
    html: Path | None = Option(None, metavar="FILE.html", help="Write a report with figures.")
    price: PricePerAcceleratorHour = None
    longest_context: bool = Option(
        False, "--longest-context", help="Also find the longest sequences that fit, with their MFU."
    )
    as_csv: bool = Option(False, "--csv", help="Print the layouts as CSV.")
    as_json: AsJson = False


@taking(LayoutOptions)
def layouts(options: LayoutOptions) -> None:
    """Predict which layouts of a config fit, how fast each is and why, and how long the run takes. Starts nothing.

    Plans for this machine unless --cluster, --hostfile or --gpus is given. Layout options that are given as overrides
    are kept, and so are those that a config with `parallel: auto` states; all others are chosen. A pipeline schedule
    that the config states is kept, and layouts that cannot have it are dropped.

    Example: `megalite plan configs/quickstart.yaml --accelerator H100 --gpus 16 --write best.yaml`
    """
    path, overrides, write, html = options.config_path, options.overrides or [], options.write, options.html
    check_one_format(as_json=options.as_json, as_csv=options.as_csv)
    checked_price(options.price)
    _check_paths(write, html, [path, options.cluster, options.hostfile], options.overwrite)
    there = cluster_at(options.cluster, options.hostfile, options.accelerator, options.gpus, options.gpus_per_node)
    if there is not None and there.accelerators > MOST_ACCELERATORS:
        raise LaunchError(
            f"a cluster of {there.accelerators:,} accelerators: a plan is for {MOST_ACCELERATORS:,} at most"
        )
    config, own, problem = _load_with_auto(path, overrides, there)
    result, lengths = _searched(config, there, is_longer_wanted=options.longest_context)
    _show(options, config, result, lengths, own, problem)
    beside_result = options.as_json or options.as_csv
    if write is not None:
        write_file(write, best_config(path, overrides, result))
        _report(f"wrote {write}; train with: megalite train {quote(str(write))}", beside_result=beside_result)
    if html is not None:
        from launch.planning.report.page import write_report

        write_report(html, result, result.cluster, path.stem, config, options.price)
        _report(f"wrote {html}", beside_result=beside_result)


def _searched(
    config: Config, there: Cluster | None, *, is_longer_wanted: bool
) -> tuple[SearchResult, list[ContextLength] | None]:
    """The layouts, and the longest sequences where they are wanted. Raises LaunchError where nothing fits."""
    free = config.unresolved_options
    where = "this machine" if there is None else f"{there.accelerators:,} x {there.accelerator_name}"
    with progress_lines(f"judging layouts on {where}", every_s=1.0):
        result = search_here(config, free) if there is None else search(config, there, free=free)
    if result.best is None:
        raise LaunchError(why_nothing_fits(config, result, free))
    if not is_longer_wanted:
        return result, None
    with progress_lines("judging longer sequences", every_s=1.0) as describe:
        return result, context_lengths(config, result.cluster, free, describe)


def _show(
    options: LayoutOptions,
    config: Config,
    result: SearchResult,
    lengths: list[ContextLength] | None,
    own: LayoutRow | None,
    problem: str | None,
) -> None:
    """Prints the result in the form that is asked for."""
    assert result.best is not None
    cluster, best, price = result.cluster, result.best, options.price
    forecast = forecast_of(config, best.job, best.time.seconds, cluster.accelerators_per_node)
    if options.as_csv:
        print_csv(rows_of(result, own, options.top))
        return
    if options.as_json:
        values = search_as_json(result, forecast_as_json(forecast, config, price), own, problem, options.top)
        print_json(values | ({} if lengths is None else {"contexts": context_rows(lengths, cluster)}))
        return
    say(f"cluster: {_cluster_text(cluster)}")
    layouts_table(rows_of(result, own, options.top), result).print()
    if lengths is not None:
        contexts_table(lengths, cluster).print()
    if problem is not None:
        say(f"as written it does not work: {problem}")
    stages = [f"batch: {format_stage(stage)}" for stage in stage_facts(config)]
    lines = [*explain(result), *stages, *forecast_lines(forecast, config, price, rough=is_guess(cluster.accelerator))]
    name = str(options.config_path)
    known = [origin(name)] if run_of(name) and not options.config_path.exists() else []
    say("\n".join([*lines, *(f"note: {line}" for line in [*known, *caveats(config, result)])]))


def _check_paths(write: Path | None, html: Path | None, read: Sequence[Path | None], overwrite: bool) -> None:
    """Checks before the search that no result replaces an input or another result. Raises LaunchError."""
    results = {option: path for option, path in (("--write", write), ("--html", html)) if path is not None}
    for path in (*read, *results.values()):
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise LaunchError(f"the name {str(path)!r} is not UTF-8: rename it") from None
    if write is not None and html is not None and write.resolve() == html.resolve():
        raise LaunchError(f"--write and --html both name {write}: give each a file of its own")
    for option, path in results.items():
        kept = read[1:] if option == "--write" else read  # a config may get the layout that is found for it
        if any(one is not None and path.resolve() == one.resolve() for one in kept):
            raise LaunchError(f"{option} {path} would replace what the plan is made from: write another file")
        if path.exists() and not overwrite:
            raise LaunchError(f"{path} is there already: give --overwrite, or write another file")
        check_writable(path)


def best_config(config_path: Path, overrides: Sequence[str], result: SearchResult) -> str:
    """The given config with the best layout filled in, below a comment with the prediction."""
    assert result.best is not None

    values, _ = stated_values(config_path, overrides)
    for (section, option), value in result.best.options.items():
        old = values.get(section)
        values[section] = {**(old if isinstance(old, dict) else {}), option: value}
    row = row_of(result.best, result.cluster, 1)
    utilization = "" if row["model_flops_utilization"] is None else f"MFU {row['model_flops_utilization']:.1%}, "
    lines = [
        f"{config_path} with the layout that `megalite plan` has chosen for {_cluster_text(result.cluster)}.",
        f"Predicted: {row['step_s']:.3g} s a step, {row['tokens_per_s']:,.0f} tokens/s, {utilization}"
        f"{row['memory_gib']:.3g} GiB of each accelerator's {result.cluster.accelerator.memory_gib:.3g}.",
        *explain(result),
    ]
    printable = (line if line.isprintable() else repr(line) for line in lines)  # a path may have a line break
    return "".join(f"# {line}\n" for line in printable) + to_yaml(values)


def _load_with_auto(
    path: Path, overrides: Sequence[str], cluster: Cluster | None
) -> tuple[Config, LayoutRow | None, str | None]:
    """Loads the config with every layout option `auto` that no override states. A config that has `auto` options is
    taken as it is.

    Returns with it the figures of the layout as written, or the reason why it cannot run.
    """
    try:
        written = load_run_config(path, overrides)
    except ConfigError as error:
        try:
            return load_run_config(path, [*ALL_AUTO, *overrides]), None, str(error)
        except ConfigError:  # its message may name overrides that the user has not given
            raise error from None
    if written.unresolved_options:
        return written, None, None
    options = ALL_AUTO
    if any(stage.micro_batch_size is not None for stage in written.training.stages):  # each states its own
        options = tuple(option for option in options if not option.startswith(dotted(MICRO_BATCH)))
    config = load_run_config(path, [*options, *overrides])
    try:
        return config, _as_written(written, cluster), None
    except ConfigError as error:
        return config, None, str(error)


def _as_written(config: Config, cluster: Cluster | None) -> LayoutRow:
    """Predicts the layout as written, on this machine if there is no cluster. Raises ConfigError if it cannot run."""
    from launch.runtime.devices import gpu_count

    gpus = gpu_count() or None if cluster is None else cluster.accelerators
    count = wanted_world_size(config, gpus)
    there = here(count) if cluster is None else cluster
    if gpus is not None and count > gpus:
        raise ConfigError(f"it needs {count} processes, and there are {gpus} accelerators")
    config = config.with_resolved(choose_open(config, there)[0])
    layout = resolve_layout(config, count, there.accelerator.device)
    return row_of(judged(config, layout, there), there, None)


def _cluster_text(cluster: Cluster) -> str:
    nodes = plural(cluster.nodes, "node")
    between = f", {cluster.inter_node.gb_per_s:g} GB/s per adapter between nodes" if cluster.nodes > 1 else ""
    return (
        f"{cluster.name}, {nodes} x {cluster.accelerators_per_node} {cluster.accelerator_name}, "
        f"{cluster.intra_node.gb_per_s:.3g} GB/s inside a node{between}"
    )


def _report(sentence: str, *, beside_result: bool) -> None:
    if beside_result:  # programs read stdout
        say(f"megalite: {sentence}", file=sys.stderr)
    else:
        log.info(sentence)
