"""Chooses the options of a config that are `auto` when a run starts: those of the layout, and those for a layout.

One process chooses and sends the result to the others, so that all ranks have the same layout: `megalite train` and
`megalite launch` before they start ranks, and rank 0 under any other launcher.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from launch.errors import USER_ERRORS, LaunchError
from launch.prediction.cluster import cluster_of_nodes, search_here, shares
from launch.prediction.device_facts import RankDevice, bytes_for_each, most_demanding_allocator, ranks_of_hosts
from launch.prediction.hardware_catalogue import known_hardware
from launch.prediction.this_machine import MeasurementLimits, describe_machine, gpu_in_catalogue, start_patience_s
from launch.runtime.devices import Device, gpu_count
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout, wanted_world_size
from megalite.config.auto import PIPELINE, SCHEDULE
from megalite.config.layout import unchecked_layout
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.config.suggestions import OptionPath, dotted
from megalite.planner.cost import memory
from megalite.planner.explanation import main_parts, why_nothing_fits
from megalite.planner.hardware import Cluster, is_guess
from megalite.planner.open_options import choose_open, without_choice
from megalite.planner.search import TENSOR, Check, Ranks, SearchResult, divisors, first_legal, search
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

    def followed_by(
        self, config: Config, machine: Callable[[], Cluster], allocator: memory.Device | None = None
    ) -> ChosenLayout:
        """Returns the choice with the options that `config`, which has it, leaves open. A schedule that its newest
        checkpoint was trained with in the same layout is kept, and 1F1B taken where no accelerators are known."""
        if not config.open_options:
            return self
        try:
            cluster = machine()
            check = known_good(cluster.accelerator.device)
            former = _former_schedule(config, cluster.accelerators)
            options, sentences = choose_open(config, cluster, check, allocator, former)
        except (LaunchError, ConfigError) as error:
            options, sentences = without_choice(config, error)
        return ChosenLayout(self.options | options, "; ".join(filter(None, (self.sentence, *sentences))))


def choose_here(config: Config, device: Device) -> ChosenLayout:
    """Chooses a layout for ranks on this machine. Raises LaunchError or ConfigError where nothing fits."""
    chosen = ChosenLayout({}, "")
    if config.unresolved_options:
        chosen = _best(config, search_here(config, config.unresolved_options, known_good(device)))
        config = config.with_resolved(chosen.options)
    count = wanted_world_size(config, gpu_count() if device == "cuda" else None) if config.open_options else 1
    limits, on_cpu = MeasurementLimits(only_typical=True), device == "cpu"
    return chosen.followed_by(config, lambda: describe_machine(count, on_cpu=on_cpu, limits=limits).cluster)


def choose_on(config: Config, cluster: Cluster, allocator: memory.Device | None = None) -> ChosenLayout:
    """Chooses a layout for one rank per accelerator of `cluster`, with `allocator` as `needs` takes it. Raises as
    `choose_here`."""
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
    schedule = " (schedule chosen at the start)" if SCHEDULE in config.open_options else schedule
    return (
        f"tensor {layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}{schedule} x data "
        f"{layout.data_parallel_size}"
        + (f" x context {layout.context_parallel_size}" if layout.context_parallel_size > 1 else "")
        + (f", experts over {layout.expert_parallel_size}" if layout.expert_parallel_size > 1 else "")
    )


def most_ranks(config: Config, slots: int, per_node: int, device: Device) -> int:
    """The largest number of ranks, up to `slots`, that any layout of a config which is `auto` can use. Raises
    ConfigError where there is none."""
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
    """The numbers of ranks up to `slots`, largest first, that the sizes of a layout may multiply to, of which none is
    larger than the dimension that it divides. The caller checks whether a layout is legal."""
    parallel, replicas, free = config.parallel, config.parallel.data_parallel_size, config.unresolved_options
    heads, stages = config.model.num_attention_heads, range(1, config.model.num_hidden_layers + 1)
    tensor = divisors(heads) if TENSOR in free else (parallel.tensor_parallel_size,)
    pipeline = stages if PIPELINE in free else (parallel.pipeline_parallel_size,)
    data = divisors(config.training.global_batch_size) if replicas == "auto" else (replicas,)
    counts = {tp * pp * dp * parallel.context_parallel_size for tp in tensor for pp in pipeline for dp in data}
    return sorted(count for count in counts if count <= slots)[::-1]


def _choose_for(config: Config, devices: Sequence[RankDevice]) -> ChosenLayout:
    """Chooses on rank 0 while the others wait: a CPU that is not known yet is measured within their timeout."""
    nodes, per_node = shares(list(ranks_of_hosts(devices).values()), len(devices))
    allocator = most_demanding_allocator(devices)

    def described(limits: MeasurementLimits) -> tuple[Cluster, str]:
        machine = describe_machine(per_node, on_cpu=allocator.kind == "cpu", nodes=nodes, limits=limits)
        memory_gib = min(machine.cluster.accelerator.memory_gib, min(bytes_for_each(devices)) / 2**30)
        return machine.cluster.with_figures(memory_gib=memory_gib), machine.rough

    chosen = ChosenLayout({}, "")
    if config.unresolved_options:
        cluster, rough = described(MeasurementLimits(timeout_s=start_patience_s(config), allow_typical=True))
        chosen = choose_on(config, cluster, allocator)
        chosen = replace(chosen, sentence=f"{chosen.sentence} ({rough})") if rough else chosen
        config = config.with_resolved(chosen.options)
    return chosen.followed_by(config, lambda: described(MeasurementLimits(only_typical=True))[0], allocator)


def _former_schedule(config: Config, ranks: int) -> str | None:
    """Returns the schedule of a run's newest checkpoint, if the run goes on from it in the same layout."""
    newest = find_latest(config.run_dir)[0] if config.checkpoint.resume else None
    if newest is None:
        return None
    manifest, layout = read_manifest(newest), unchecked_layout(config, ranks)
    is_same = all(getattr(layout, name, None) == size for name, size in manifest.layout.items())
    return (manifest.config.get("parallel") or {}).get(SCHEDULE[1]) if is_same and manifest.layout else None


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
