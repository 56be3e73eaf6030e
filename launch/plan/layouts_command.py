"""`megalite plan CONFIG.yaml`: which layouts fit a cluster and which is fastest. Starts nothing. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.arguments import AsJson, ConfigPath, Overrides
from launch.errors import LaunchError
from launch.plan.limits import LARGEST
from launch.plan.output import check_writable, print_json, write_file
from launch.run_config import load_run_config
from megalite.config import Config, ConfigError
from megalite.config.load import stated_values
from megalite.config.text import to_yaml
from megalite.planner.explanation import caveats, explain, why_nothing_fits
from megalite.planner.hardware import Cluster
from megalite.planner.search import SearchResult, judged, search

OPEN = ("parallel=auto", "training.micro_batch_size=auto", "recompute=auto")


@dataclass(frozen=True)
class Own:
    """The config's layout as written: its figures, or why it has none."""

    row: Any = None  # tables.Row
    problem: str | None = None


def layouts(
    config_path: ConfigPath,
    overrides: Overrides = None,
    *,
    cluster: Annotated[Path | None, typer.Option(help="YAML: accelerator, nodes, accelerators_per_node.")] = None,
    hostfile: Annotated[Path | None, typer.Option("--hostfile", "-H", help="Instead: hosts with their slots.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="Instead: so many of --accelerator.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(min=1, help="With --gpus; default: 8.")] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="What hosts have, such as H100; needed with --gpus and --hostfile.")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Layouts to show.")] = 10,
    write: Annotated[
        Path | None, typer.Option(metavar="FILE.yaml", help="Write the config with the best layout.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the files of --write and --html.")] = False,
    html: Annotated[Path | None, typer.Option(metavar="FILE.html", help="Write a page with pictures.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the layouts as CSV.")] = False,
    as_json: AsJson = False,
) -> None:
    """Which layouts of a config fit, how fast each would be, and why the best one is. Starts nothing.

    Without --cluster, --hostfile and --gpus: for this machine. Options of the layout that are given as overrides are
    kept, and so is what a config with `parallel: auto` states; all others are chosen.

    Example: `megalite plan configs/quickstart.yaml --accelerator H100 --gpus 16 --write best.yaml`
    """
    from launch.plan.cluster import Where, cluster_at, search_here

    if as_csv and as_json:
        raise LaunchError("--csv and --json are two ways to print the result: give one of them")
    _check_paths(write, html, [config_path, cluster, hostfile], overwrite)
    words = overrides or []
    there = cluster_at(Where(cluster, hostfile, accelerator, gpus, gpus_per_node))
    if there is not None and there.accelerators > LARGEST:
        raise LaunchError(f"a cluster of {there.accelerators:,} accelerators: a plan is for {LARGEST:,} at most")
    config, own = _open_and_own(config_path, words, there)
    result = search_here(config, config.open) if there is None else search(config, there, free=config.open)
    if result.best is None:
        raise LaunchError(why_nothing_fits(config, result, config.open))
    if as_json or as_csv:
        _print_for_programs(result, own, top, as_csv=as_csv)
    else:
        _print_for_people(result, own, top)
    if write is not None:
        write_file(write, best_config(config_path, words, result))
        _tell(f"wrote {write}; train with: megalite train {write}", as_json or as_csv)
    if html is not None:
        from launch.plan.report import write_report

        write_report(html, result, result.cluster, f"{config_path} on {_words(result.cluster)}")
        _tell(f"wrote {html}", as_json or as_csv)


def _check_paths(write: Path | None, html: Path | None, read: Sequence[Path | None], overwrite: bool) -> None:
    """Before the search: what is read must not be lost, nor one result below the other."""
    results = {option: path for option, path in (("--write", write), ("--html", html)) if path is not None}
    for path in (*read, *results.values()):
        if path is not None and not _is_utf_8(str(path)):
            raise LaunchError(f"the name {str(path)!r} is not UTF-8: rename it")
    if write is not None and html is not None and write.resolve() == html.resolve():
        raise LaunchError(f"--write and --html both name {write}: give each a file of its own")
    for option, path in results.items():
        kept = read[1:] if option == "--write" else read  # a config may get the layout that is found for it
        if any(one is not None and path.resolve() == one.resolve() for one in kept):
            raise LaunchError(f"{option} {path} would replace what the plan is made from: write another file")
        if path.exists() and not overwrite:
            raise LaunchError(f"{path} is there already: give --overwrite, or write another file")
        check_writable(path)


def _is_utf_8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def best_config(config_path: Path, overrides: Sequence[str], result: SearchResult) -> str:
    """The given config with the best layout filled in, and above it what is predicted."""
    assert result.best is not None
    from launch.plan.tables import row_of

    values, _ = stated_values(config_path, overrides)
    for (section, option), value in result.best.options.items():
        old = values.get(section)
        values[section] = {**(old if isinstance(old, dict) else {}), option: value}
    row = row_of(result.best, result.cluster, 1)
    lines = [
        f"{config_path} with the layout that `megalite plan` has chosen for {_words(result.cluster)}.",
        f"Predicted: {row.step_s:.3g} s a step, {row.tokens_per_s:,.0f} tokens/s, MFU "
        f"{row.model_flops_utilization:.1%}, {row.memory_gib:.3g} GiB of each accelerator's "
        f"{result.cluster.accelerator.memory_gib:.3g}.",
        *explain(result),
    ]
    told = (line if line.isprintable() else repr(line) for line in lines)  # a path may have a line break
    return "".join(f"# {line}\n" for line in told) + to_yaml(values)


def _open_and_own(path: Path, overrides: Sequence[str], cluster: Cluster | None) -> tuple[Config, Own]:
    """The config with all to be chosen that no override states, or, where it is `auto`, nothing else; and its layout
    as written, which may be one that works nowhere."""
    try:
        written = load_run_config(path, overrides)
    except ConfigError as error:
        try:
            return load_run_config(path, [*OPEN, *overrides]), Own(problem=str(error))
        except ConfigError:  # may speak of overrides that nobody has typed
            raise error from None
    if written.open:
        return written, Own()
    return load_run_config(path, [*OPEN, *overrides]), _as_written(written, cluster)


def _as_written(config: Config, cluster: Cluster | None) -> Own:
    """On this machine where there is no cluster."""
    from launch.devices import gpu_count
    from launch.plan.cluster import here
    from launch.plan.tables import row_of

    try:
        gpus = gpu_count() or None if cluster is None else cluster.accelerators
        count = config.world_size_wanted(gpus)
        there = here(count) if cluster is None else cluster
        if gpus is not None and count > gpus:
            return Own(problem=f"it needs {count} processes, and there are {gpus} accelerators")
        layout = config.check_world(count, there.accelerator.device)
        return Own(row_of(judged(config, layout, there), there, None))
    except ConfigError as error:
        return Own(problem=str(error))


def _print_for_programs(result: SearchResult, own: Own, top: int, *, as_csv: bool) -> None:
    from launch.plan import tables

    if as_csv:
        print(tables.as_csv(tables.rows_of(result, own.row, top)), end="")
    else:
        print_json(tables.as_json(result, own.row, own.problem, top))


def _print_for_people(result: SearchResult, own: Own, top: int) -> None:
    from launch.plan.tables import rows_of, show_layouts

    print(f"cluster: {_words(result.cluster)}")
    show_layouts(rows_of(result, own.row, top), result)
    if own.problem is not None:
        print(f"as written it does not work: {own.problem}")
    for line in explain(result):
        print(line)
    for line in caveats(result):
        print(f"note: {line}")


def _words(cluster: Cluster) -> str:
    nodes = f"{cluster.nodes} node{'s' * (cluster.nodes > 1)}"
    between = f", {cluster.inter_node.gb_per_s:g} GB/s per adapter between nodes" if cluster.nodes > 1 else ""
    return (
        f"{cluster.name}, {nodes} x {cluster.accelerators_per_node} {cluster.accelerator_name}, "
        f"{cluster.intra_node.gb_per_s:.3g} GB/s inside a node{between}"
    )


def _tell(sentence: str, beside_a_result: bool) -> None:
    """Programs read stdout."""
    print(f"megalite: {sentence}", file=sys.stderr if beside_a_result else sys.stdout)
