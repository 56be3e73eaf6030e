"""Runs that cannot fit are refused, and those that were measured to run are not."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch.errors import LaunchError
from launch.prediction.auto_layout import ChosenLayout, _choose_for, choose_on
from launch.prediction.device_facts import RankDevice
from launch.prediction.memory_check import MARGIN, MemoryForecast, forecast_memory, refuse_what_cannot_fit
from launch.prediction.this_machine import ROUGH, UNMEASURED, describe_machine
from launch.runtime.local_ranks import MALLOC_TUNABLES
from launch.trainer.start.rank_devices import check_memory_of_ranks, format_devices
from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout
from megalite.config.auto import CHOOSABLE
from megalite.planner.cost.memory import CPU, CUDA
from megalite.planner.cost.stage_parameters import parameters
from megalite.planner.explanation import BUCKET, SMALL_BUCKET
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of
from megalite.planner.search import search
from tests.helpers.machines import cpus

RESULTS = Path("benchmarks/results")
GIB = 2**30


def config_of(tiny: dict[str, Any], **parallel: Any) -> Config:
    """Some 0.2 G parameters."""
    tiny["model"] |= {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 12}
    return Config.model_validate(tiny | {"parallel": parallel})


def forecast_of(config: Config, ranks: int, available: int, device: Any = CPU) -> MemoryForecast:
    found = forecast_memory(config, resolve_layout(config, ranks, device.kind), device, available, ranks)
    assert found is not None
    return found


def measured_ranks() -> list[tuple[str, float, float, float]]:
    """Layout, predicted and measured MiB of the process, and MiB before its model, of each measured rank."""
    rows = (re.split(r" *\| *", line) for line in (RESULTS / "planner_memory.md").read_text().splitlines())
    return [
        (row[1], float(row[7]), float(row[8]), float(row[9])) for row in rows if len(row) == 12 and row[2].isdigit()
    ]


def test_no_run_that_was_measured_would_have_been_refused() -> None:
    """On a host that has just what its ranks together took, though the memory of libraries were shared by all."""
    hosts = defaultdict(list)
    for layout, predicted, measured, before in measured_ranks():
        hosts[layout].append((predicted - before, measured - before))
    assert len(hosts) > 25
    for layout, ranks in hosts.items():
        least = (1 - MARGIN) * sum(predicted for predicted, _ in ranks)
        assert least < sum(measured for _, measured in ranks), layout


def test_what_is_needed_is_that_of_all_ranks_of_a_host(tiny: dict[str, Any]) -> None:
    """Stages differ: the fullest of them times their number would refuse what fits."""
    found = forecast_of(config_of(tiny, pipeline_parallel_size=5), 5, 1)
    sizes = [stage.total for stage in found.stages]
    assert found.needed == pytest.approx(sum(sizes)) and max(sizes) * 5 > 1.02 * sum(sizes)
    assert found.least < (1 - MARGIN) * found.needed


@pytest.mark.parametrize(
    ("share", "words"), [(0.85, None), (0.95, "it may not fit"), (1.1, "more than there is: the run may be killed")]
)
def test_a_nearly_full_host_is_warned_of(tiny: dict[str, Any], share: float, words: str | None) -> None:
    config = config_of(tiny, data_parallel_size=2)
    needed = forecast_of(config, 2, 1).needed
    found = forecast_of(config, 2, round(needed / share))
    assert not found.cannot_fit
    assert (words is None) == (found.warning is None) and (words or "") in (found.warning or "")


def test_a_refusal_names_the_nearest_layout_that_fits(tiny: dict[str, Any]) -> None:
    """And its advice is right: what it names is not refused."""
    tiny["training"] = {"global_batch_size": 16, "micro_batch_size": 8, "sequence_length": 2048, "steps": 1}
    tiny["model"]["max_position_embeddings"] = 2048
    config = config_of(tiny, data_parallel_size=2)
    layout, needed = resolve_layout(config, 2, "cpu"), forecast_of(config, 2, 1).needed
    found = forecast_of(config, 2, round(0.6 * needed))

    def machine() -> Cluster:
        return describe_machine(2, on_cpu=True, limits=UNMEASURED).cluster

    with pytest.raises(LaunchError, match=r"tp 1 pp 1 dp 2 .* for its 2 ranks: it fits with .*--force") as told:
        refuse_what_cannot_fit(config, layout, found, machine, 2)
    advice = re.findall(r"(\w+)\.(\w+) (\w+)", str(told.value).partition("it fits with")[2])
    assert advice, told.value
    advised = config.with_resolved({(section, option): yaml.safe_load(value) for section, option, value in advice})
    assert not forecast_of(advised, 2, found.available).cannot_fit
    with pytest.raises(LaunchError, match=r"fits in no layout on 2 x .*--force starts it all the same"):
        refuse_what_cannot_fit(config, layout, forecast_of(config, 2, 2**20), machine, 2)


def test_gpu_ranks_are_refused_where_the_host_does_not_hold_what_is_offloaded(tiny: dict[str, Any]) -> None:
    """AdamW's two moments and the fp32 weights of two replicas: 12 bytes a parameter, beside nothing else of size."""
    config = config_of(tiny | {"offload": {"optimizer": "cpu"}, "precision": {"dtype": "bf16"}}, data_parallel_size=2)
    layout = resolve_layout(config, 2, "cuda")
    found = forecast_memory(config, layout, CUDA, 2**40, 2)
    assert found is not None
    on_host = 2 * found.stages[0].on_host
    assert on_host >= 12 * parameters(config.model)
    refuse_what_cannot_fit(config, layout, found, no_machine, 2, round(on_host))
    with pytest.raises(LaunchError, match=r"^2 ranks need .* of this host's own memory, which has .*--force"):
        refuse_what_cannot_fit(config, layout, found, no_machine, 2, round((1 - 1.01 * MARGIN) * on_host))


def no_machine() -> Cluster:
    raise AssertionError("nothing is searched")


def test_advice_is_searched_with_the_malloc_that_ranks_have(tiny: dict[str, Any]) -> None:
    """Without our settings of malloc a layout fits where, with them, none would."""
    tiny["training"] = {"global_batch_size": 16, "micro_batch_size": 8, "sequence_length": 2048, "steps": 1}
    tiny["model"]["max_position_embeddings"] = 2048
    config = config_of(tiny | {"checkpoint": {"background": False}})
    untuned, machine = replace(CPU, keeps_freed=False), cpus(1, memory_gib=1000)
    least, tuned = (
        min(one.fullest.total for one in search(config, machine, allocator=malloc).candidates)
        for malloc in (untuned, CPU)
    )
    assert tuned > 1.02 * least, "the case that this test is for"
    found = forecast_of(config, 1, round((least + tuned) / 2), untuned)
    with pytest.raises(LaunchError, match=r"it fits with recompute\.mode \w+, training\.micro_batch_size 1;"):
        refuse_what_cannot_fit(config, resolve_layout(config, 1, "cpu"), found, lambda: machine, 1)


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_advice_counts_processes_and_the_copy_of_checkpoints(tiny: dict[str, Any], mode: str, ranks: int) -> None:
    """Where weights, and not activations, take the memory; each way that is named fits by itself."""
    tiny["recompute"] = {"mode": mode}
    config = config_of(tiny, pipeline_parallel_size=ranks)
    layout, least = resolve_layout(config, ranks, "cpu"), forecast_of(config, ranks, 1).least
    named = set()
    for share in (0.99, 0.9, 0.8, 0.7, 0.5, 0.1):
        found = forecast_of(config, ranks, round(share * least))
        with pytest.raises(LaunchError) as told:
            refuse_what_cannot_fit(
                config, layout, found, lambda: describe_machine(ranks, on_cpu=True, limits=UNMEASURED).cluster, ranks
            )
        ways = str(told.value).partition("it fits with")[2].partition(";")[0]
        assert ways.strip() or "fits in no layout" in str(told.value), told.value
        for way in filter(None, ways.split(", or with")):
            advice = re.findall(r"(\w+)\.(\w+) (\w+)", way)
            advised = config.with_resolved({(section, one): yaml.safe_load(value) for section, one, value in advice})
            after = forecast_of(advised, ranks, found.available)
            assert advice and after.needed <= after.available, told.value
            named |= {one for _, one, _ in advice}
    assert "background" in named


def test_a_large_gradient_bucket_is_named(tiny: dict[str, Any]) -> None:
    """Two of them are there at once, and what is on the wire."""
    config = config_of(tiny, data_parallel_size=2, zero_stage=3, gradient_bucket_size=2_000_000_000)
    tiny["model"] |= {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 24}
    config = Config.model_validate(tiny | {"parallel": config.parallel.model_dump(exclude_unset=True)})
    enough = forecast_of(config.with_resolved({BUCKET: SMALL_BUCKET}), 2, 1, CUDA).needed
    found = forecast_of(config, 2, round(1.2 * enough), CUDA)
    h100 = cluster_of(ClusterFile(accelerator="H100", nodes=1, accelerators_per_node=2), "one")
    with pytest.raises(LaunchError, match=r"it fits with parallel\.gradient_bucket_size 5000000;"):
        refuse_what_cannot_fit(config, resolve_layout(config, 2, "cuda"), found, lambda: h100, 2)
    assert "recompute.mode full or a smaller parallel.gradient_bucket_size needs less" in str(found.warning)
    kind = h100.accelerator.model_copy(update={"memory_gib": 2.5})
    options = {option: "auto" for section, option in CHOOSABLE if section == "parallel"}
    tiny["model"] |= {"num_hidden_layers": 1, "num_attention_heads": 31, "num_key_value_heads": 31, "head_dim": 64}
    tiny |= {"parallel": options | {"gradient_bucket_size": 2_000_000_000}}  # of one block and an odd number of heads
    with pytest.raises(LaunchError, match=r"in no layout .*: it fits with parallel\.gradient_bucket_size 5000000$"):
        choose_on(Config.model_validate(tiny), h100.model_copy(update={"accelerator": kind}))


def test_what_auto_chooses_is_not_refused(tiny: dict[str, Any]) -> None:
    """On a CPU that has room for the tensors, and not for the copy of a checkpoint beside them."""
    config = config_of(tiny).with_resolved({("recompute", "mode"): "none"})
    needed = forecast_of(config.with_resolved({("checkpoint", "background"): False}), 1, 1).needed
    roomy = describe_machine(1, on_cpu=True, limits=UNMEASURED).cluster
    kind = roomy.accelerator.model_copy(update={"memory_gib": 1.01 * needed / GIB})
    machine = roomy.model_copy(update={"accelerator": kind})
    assert forecast_of(config, 1, machine.memory_bytes).cannot_fit
    tiny["parallel"] = "auto"
    auto = Config.model_validate(tiny)
    with pytest.raises(LaunchError, match=r"fits in no layout .*it fits with checkpoint\.background false"):
        choose_on(auto, machine)
    saves_wait = auto.with_resolved({("checkpoint", "background"): False})
    chosen = saves_wait.with_resolved(choose_on(saves_wait, machine).options)
    assert not forecast_of(chosen, 1, machine.memory_bytes).cannot_fit


def test_gpus_are_refused_by_their_tensors_alone(tiny: dict[str, Any]) -> None:
    config = config_of(tiny)
    found = forecast_of(config, 1, 1, CUDA)
    assert found.least < (1 - MARGIN) * found.needed and found.cannot_fit

    def unknown() -> Cluster:
        raise ConfigError("the catalogue has no such GPU")

    with pytest.raises(LaunchError, match=r"each GPU has .*: cut it over more GPUs"):
        refuse_what_cannot_fit(config, resolve_layout(config, 1, "cuda"), found, unknown, 1)
    h100 = cluster_of(ClusterFile(accelerator="H100", nodes=1, accelerators_per_node=1), "one")
    refuse_what_cannot_fit(
        config, resolve_layout(config, 1, "cuda"), forecast_of(config, 1, 80 * GIB, CUDA), lambda: h100, 1
    )


def test_what_the_planner_does_not_know_is_not_refused(tiny: dict[str, Any]) -> None:
    tiny["deepspeed"] = {"zero_optimization": {"allgather_bucket_size": 1000}}
    config = config_of(tiny)
    found = forecast_of(config, 1, 2**20)
    assert found.warning is not None and not found.cannot_fit
    tiny["deepspeed"] = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}
    assert forecast_memory(config_of(tiny), resolve_layout(config, 1, "cuda"), CUDA, 1, 1) is None


def test_ranks_look_at_the_host_with_least_memory_for_each(tiny: dict[str, Any]) -> None:
    """As under torchrun, which checks nothing before; the names of hosts may be equal."""
    tiny["training"]["global_batch_size"] = 6
    config = config_of(tiny, data_parallel_size=3)
    layout, large = resolve_layout(config, 3, "cpu"), RankDevice("node", "1", "EPYC", 1000 * GIB, CPU)
    small = RankDevice("node", "2", "EPYC", GIB, CPU)
    assert check_memory_of_ranks(config, layout, [large] * 3, force=False) is None
    with pytest.raises(LaunchError, match="the host has 1 GiB for its 2 ranks"):
        check_memory_of_ranks(config, layout, [large, small, small], force=False)
    warning = check_memory_of_ranks(config, layout, [large, small, small], force=True)
    assert warning is not None and "for its 2 ranks" in warning
    assert format_devices([large, small, small]) == "3 ranks on 2 hosts (EPYC)"


def test_the_environment_of_a_rank_does_not_decide_whether_it_starts(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else one rank leaves and the others wait for it; malloc as `megalite train` sets it up needs most."""
    tuned, plain = CPU, replace(CPU, keeps_freed=False)
    config = config_of(tiny, data_parallel_size=2)
    layout = resolve_layout(config, 2, "cpu")
    least = {one: found.least for one in (tuned, plain) if (found := forecast_memory(config, layout, one, 1, 1))}
    assert least[tuned] > 1.05 * least[plain]
    between = round((least[tuned] + least[plain]) / 2)

    def starts(*allocators: Any) -> list[bool]:
        devices = [RankDevice(str(host), "", "EPYC", between, one) for host, one in enumerate(allocators)]
        found = []
        for tunables in ("", MALLOC_TUNABLES):
            monkeypatch.setenv("GLIBC_TUNABLES", tunables)
            try:
                check_memory_of_ranks(config, layout, devices, force=False)
                found.append(True)
            except LaunchError:
                found.append(False)
        return found

    assert starts(plain, plain) == [True, True]
    assert starts(plain, tuned) == starts(tuned, plain) == [False, False]


def test_what_rank_0_chooses_fits_the_host_with_least_memory_for_each_rank(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That host is not its own; and hosts of the same name are two, each with its memory for its own ranks."""
    tiny["training"] = {"global_batch_size": 16, "sequence_length": 512, "steps": 1}
    tiny["model"] |= {"max_position_embeddings": 512, "hidden_size": 1024, "intermediate_size": 4096}
    auto, large = Config.model_validate(tiny | {"parallel": "auto"}), 64 * GIB
    monkeypatch.setattr("launch.prediction.this_machine.host_memory_bytes", lambda: large)  # of rank 0's host
    monkeypatch.setattr("launch.prediction.this_machine.measured_cpu", lambda *_: (ROUGH, ""))
    asked, allocators = [], []

    def choose(config: Config, cluster: Cluster, allocator: Any) -> ChosenLayout:
        asked.append(cluster)
        allocators.append(allocator)
        return choose_on(config, cluster, allocator)

    monkeypatch.setattr("launch.prediction.auto_layout.choose_on", choose)

    def devices(*memory: int) -> list[RankDevice]:
        return [RankDevice("node", str(size), "EPYC", size, CPU) for size in memory]

    def chosen(*memory: int) -> tuple[Config, ResolvedLayout]:
        config = auto.with_resolved(_choose_for(auto, devices(*memory)).options)
        return config, resolve_layout(config, len(memory), "cpu")

    roomy = chosen(large, large + 1)
    forecast = forecast_memory(*roomy, CPU, large, 1)
    assert forecast is not None
    small = round(0.9 * forecast.least)
    with pytest.raises(LaunchError, match="this layout"):
        check_memory_of_ranks(*roomy, devices(large, small), force=False)
    check_memory_of_ranks(*chosen(large, small), devices(large, small), force=False)
    chosen(large, large, large // 2, large // 2)
    found = [(one.nodes, one.accelerators_per_node, round(one.accelerator.memory_gib, 3)) for one in asked]
    assert found[0] == (2, 1, 64) and found[-1] == (2, 2, 16)
    plain, wide = (replace(CPU, keeps_freed=False, widens_bf16=widens) for widens in (False, True))
    _choose_for(auto, [replace(*devices(large), allocator=own) for own in (plain, wide)])
    assert allocators[0] == CPU and allocators[-1] == wide, "what each rank needs at most"
