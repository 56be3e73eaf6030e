"""`parallel: auto`: chooses the layout when a run starts, for the options of a config that are `auto`.

One process chooses and sends the result to the others, so that all ranks have the same layout: `megalite train` and
`megalite launch` before they start ranks, and rank 0 under any other launcher.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from launch.errors import USER_ERRORS, LaunchError
from launch.prediction.cluster import cluster_of_nodes, search_here, shares
from launch.prediction.device_facts import RankDevice, bytes_for_each, most_demanding_allocator, ranks_of_hosts
from launch.prediction.hardware_catalogue import known_hardware
from launch.prediction.this_machine import MeasurementLimits, describe_machine, gpu_in_catalogue, start_patience_s
from launch.runtime.devices import Device
from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.config.suggestions import OptionPath, dotted
from megalite.planner.cost import memory
from megalite.planner.explanation import main_parts, why_nothing_fits
from megalite.planner.hardware import Cluster, is_guess
from megalite.planner.search import PIPELINE, TENSOR, Check, Ranks, SearchResult, divisors, first_legal, search
from megalite.units import about, seconds

DECIDED_LATER = "the layout is auto: rank 0 chooses it when the run starts, by the accelerators it finds"
ChosenOption = tuple[tuple[str, str], bool | int | str | tuple[str, ...]]


@dataclass(frozen=True)
class ChosenLayout:
    """Values for the options that were `auto`."""

    options: dict[OptionPath, Any]
    sentence: str  # the layout that was chosen, and why

    @property
    def overrides(self) -> list[str]:
        """The values as overrides for the command line of a rank."""
        return [f"{dotted(path)}={json.dumps(value)}" for path, value in self.options.items()]


def choose_here(config: Config, device: Device) -> ChosenLayout:
    """Chooses a layout for ranks on this machine. Raises LaunchError or ConfigError where nothing fits."""
    return _best(config, search_here(config, config.unresolved_options, known_good(device)))


def choose_on(config: Config, cluster: Cluster, allocator: memory.Device | None = None) -> ChosenLayout:
    """Chooses a layout for one rank per accelerator of `cluster`. Raises as `choose_here`.

    `allocator` is that of CPU ranks, by default the one that `megalite train` sets up.
    """
    check = known_good(cluster.accelerator.device)
    return _best(config, search(config, cluster, free=config.unresolved_options, check=check, allocator=allocator))


def choose_together(config: Config, devices: Sequence[RankDevice]) -> ChosenLayout:
    """Chooses a layout on rank 0 for all ranks of the process group, which have these devices; collective."""
    from megalite.distributed.agreement import from_rank_0

    def choose() -> tuple[list[tuple[OptionPath, Any]], str]:
        chosen = _choose_for(config, devices)
        return list(chosen.options.items()), chosen.sentence

    options, sentence = from_rank_0(choose, tuple[list[ChosenOption], str], USER_ERRORS, LaunchError)
    return ChosenLayout(dict(options), sentence)


def hosts_cluster(
    slots: Sequence[int], ranks: int, device: Device, gpus: Sequence[str], limits: MeasurementLimits | None = None
) -> Cluster:
    """Describes hosts with these slots, of which `ranks` are used; `gpus`: names as their drivers report them."""
    nodes, per_node = shares(slots, ranks)
    if device == "cpu":
        return describe_machine(per_node, on_cpu=True, nodes=nodes, limits=limits).cluster
    known = known_hardware()
    kinds = dict.fromkeys(gpu_in_catalogue(name, known) or name for name in gpus)
    unknown = [name for name in kinds if name not in known.accelerators]
    if unknown or not kinds:
        raise LaunchError(
            f"parallel is auto, and the catalogue has no {unknown[0] if unknown else 'GPU of these hosts'}: describe "
            "it as docs/planner.md says, or state the layout"
        )
    # a step takes as long as the slowest of them, and must fit the smallest
    clusters = [cluster_of_nodes(name, nodes, per_node, "hosts") for name in kinds]
    slowest = min(clusters, key=lambda one: one.accelerator.fastest_tflops * one.accelerator.efficiency)
    return slowest.with_figures(memory_gib=min(one.accelerator.memory_gib for one in clusters))


def layout_or_likely(config: Config, ranks: Ranks) -> tuple[Config, ResolvedLayout, list[str]]:
    """The layout of a config, for commands that start nothing themselves; for a config that is `auto`, any layout that
    is legal on `ranks`, and a notice that rank 0 chooses it later. Raises ConfigError."""
    if not config.unresolved_options:
        return config, resolve_layout(config, ranks.count, ranks.device), []
    likely, layout = first_legal(config, ranks, known_good(ranks.device))
    return likely, layout, [DECIDED_LATER]


def format_sizes(config: Config, layout: ResolvedLayout) -> str:
    """The sizes of a layout, for a heading."""
    if config.unresolved_options:
        return "layout chosen at the start"
    schedule = f" ({layout.pipeline_schedule})" if layout.pipeline_schedule != "1f1b" else ""
    return (
        f"tensor {layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}{schedule} x data "
        f"{layout.data_parallel_size}"
    )


def most_ranks(config: Config, slots: int, per_node: int, device: Device) -> int:
    """The largest number of ranks, up to `slots`, that any layout of a config which is `auto` can use.

    Raises ConfigError where there is none.
    """
    check = known_good(device)
    for count in _products(config, slots):
        with suppress(ConfigError):
            first_legal(config, Ranks(count, per_node, device), check)
            return count
    first_legal(config, Ranks(slots, per_node, device), check)  # which says why
    raise ConfigError("there are no slots for ranks: name more hosts")


def why_fewer(config: Config, ranks: int, slots: int, per_node: int, device: Device) -> list[str]:
    """Explains why a layout that is `auto` leaves slots unused; empty where it does not."""
    if not config.unresolved_options or ranks >= slots:
        return []
    try:
        first_legal(config, Ranks(slots, per_node, device), known_good(device))
    except ConfigError as error:
        return [f"auto uses {ranks} of {slots} slots, because no layout works on all of them: {error}"]
    return []


def known_good(device: Device) -> Check:
    """A check that refuses layouts known to fail with the installed versions."""
    versions = installed_versions()
    return lambda config, layout: check_known_bad(config, layout, versions, device)


def _products(config: Config, slots: int) -> list[int]:
    """The numbers of ranks up to `slots`, largest first, that the sizes of a layout may multiply to.

    No size is larger than the dimension that it divides; whether a layout is legal is checked by the caller.
    """
    parallel, replicas = config.parallel, config.parallel.data_parallel_size
    tensor = (
        divisors(config.model.num_attention_heads)
        if TENSOR in config.unresolved_options
        else (parallel.tensor_parallel_size,)
    )
    stages = range(1, config.model.num_hidden_layers + 1)
    pipeline = stages if PIPELINE in config.unresolved_options else (parallel.pipeline_parallel_size,)
    data = divisors(config.training.global_batch_size) if replicas == "auto" else (replicas,)
    return sorted({tp * pp * dp for tp in tensor for pp in pipeline for dp in data if tp * pp * dp <= slots})[::-1]


def _choose_for(config: Config, devices: Sequence[RankDevice]) -> ChosenLayout:
    """Chooses on rank 0 while the others wait: a CPU that is not known yet is measured within their timeout."""
    nodes, per_node = shares(list(ranks_of_hosts(devices).values()), len(devices))
    allocator = most_demanding_allocator(devices)
    limits = MeasurementLimits(timeout_s=start_patience_s(config), allow_typical=True)
    machine = describe_machine(per_node, on_cpu=allocator.kind == "cpu", nodes=nodes, limits=limits)
    memory_gib = min(machine.cluster.accelerator.memory_gib, min(bytes_for_each(devices)) / 2**30)
    chosen = choose_on(config, machine.cluster.with_figures(memory_gib=memory_gib), allocator)
    return replace(chosen, sentence=f"{chosen.sentence} ({machine.rough})") if machine.rough else chosen


def _best(config: Config, result: SearchResult) -> ChosenLayout:
    best = result.best
    if best is None:
        raise LaunchError(why_nothing_fits(config, result, config.unresolved_options))
    cluster, count, step_s = result.cluster, len(result.candidates), best.time.seconds
    step = f"roughly {about(step_s)}" if is_guess(cluster.accelerator) else seconds(step_s)
    sentence = (
        f"auto: chose {best.layout} for {cluster.accelerators} x {cluster.accelerator_name} with "
        f"{cluster.accelerator.memory_gib:.3g} GiB each, the best of {count} layout{'s' * (count > 1)} that fit: "
        f"{step} a step, bound by {main_parts(best)}"
    )
    return ChosenLayout(best.options, sentence)
