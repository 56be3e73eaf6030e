"""`parallel: auto`: what a config says, who chooses, and that all ranks have the same layout."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.backends.job_generation import fit_layout
from launch.cluster.doctor.preflight import PreflightReport
from launch.cluster.host_selection import NotEnoughHosts, choose_hosts, likely_layout, per_node, wanted_ranks
from launch.cluster.hosts_supervisor import HostAssignment, HostsSupervisor, Options
from launch.errors import LaunchError
from launch.prediction import auto_layout as automatic
from launch.prediction import cluster as places
from launch.prediction.auto_layout import (
    DECIDED_LATER,
    choose_here,
    choose_on,
    hosts_cluster,
    known_good,
    layout_or_likely,
    most_ranks,
    why_fewer,
)
from launch.prediction.device_facts import RankDevice
from launch.prediction.this_machine import Machine
from launch.runtime.hostfile import Host
from launch.supervision.supervisor import Policy
from launch.trainer.start.checks import choose_layout
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config, ConfigError, load_config, resolve_layout, wanted_world_size
from megalite.config.auto import CHOOSABLE
from megalite.config.suggestions import OptionPath
from megalite.planner.cost.memory import CPU, CUDA, Device
from megalite.planner.hardware import Cluster
from megalite.planner.layout_choice import ROOMY
from megalite.planner.search import RECOMPUTE, Ranks, first_legal, needs
from megalite.planner.workload import TrainingWorkload
from models.hub.config_parts import FamilyError
from tests.conftest import write_config
from tests.helpers.commands import BIN, metrics, run
from tests.helpers.machines import cpus
from tests.unit.launch.cli.test_mistakes import command

STATED = ["parallel={}", "training.micro_batch_size=1"]
SMALL = {
    "vocab_size": 64,
    "hidden_size": 24,
    "intermediate_size": 10,
    "num_hidden_layers": 5,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "max_position_embeddings": 16,
}
TENSOR, MICRO_BATCH = ("parallel", "tensor_parallel_size"), ("training", "micro_batch_size")


@pytest.fixture
def auto(tiny: dict[str, Any], tmp_path: Path) -> Path:
    """A config that leaves all of the layout open."""
    del tiny["training"]["micro_batch_size"]
    return write_config(tmp_path / "auto.yaml", tiny | {"parallel": "auto"})


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(places, "here", cpus)
    monkeypatch.setattr(places, "cpu_count", lambda: 4)


def test_everything_that_is_left_out_is_open(auto: Path) -> None:
    assert load_config(auto).unresolved_options == CHOOSABLE
    assert load_config(auto, ["parallel.tensor_parallel_size=2"]).unresolved_options == CHOOSABLE - {TENSOR}
    assert load_config(auto, ["parallel.tensor_parallel_size=2"]).parallel.tensor_parallel_size == 2
    stated = load_config(auto, ["training.micro_batch_size=2", "recompute.mode=full"])
    assert stated.unresolved_options == {path for path in CHOOSABLE if path[0] == "parallel"}
    assert stated.training.micro_batch_size == 2 and stated.recompute.mode == "full"


def test_single_options_may_be_open_too(tiny: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tiny)
    assert load_config(path).unresolved_options == frozenset()
    assert load_config(path, ["training.micro_batch_size=auto"]).unresolved_options == {MICRO_BATCH}
    assert load_config(path, ["recompute=auto"]).unresolved_options == {("recompute", "mode")}
    assert load_config(path, ["recompute=auto", "recompute.mode=full"]).unresolved_options == frozenset()
    assert load_config(path, ["parallel.data_parallel_size=auto"]).unresolved_options == frozenset(), (
        "a number, once ranks are counted"
    )
    with pytest.raises(ConfigError, match=r"training.micro_batch_size is required"):
        load_config(path, ["training={global_batch_size: 4, sequence_length: 8, steps: 1}"])
    with pytest.raises(ConfigError, match=r"parallel.tensor_parallel_size must be a valid integer or auto, got 'much'"):
        load_config(path, ["parallel.tensor_parallel_size=much"])


def test_an_open_config_is_written_as_it_is(auto: Path, tmp_path: Path) -> None:
    config = load_config(auto, ["parallel.tensor_parallel_size=2"])
    again = tmp_path / "again.yaml"
    again.write_text(config.to_yaml())
    assert yaml.safe_load(config.to_yaml())["parallel"]["pipeline_parallel_size"] == "auto"
    assert load_config(again) == config
    assert config.with_resolved({}) == config and config != load_config(auto)


def test_no_run_trains_with_placeholders(auto: Path) -> None:
    with pytest.raises(ConfigError, match=r"the layout is not chosen yet .*megalite plan CONFIG.yaml --write"):
        resolve_layout(load_config(auto), 1, "cpu")


def test_this_machine_chooses_before_it_starts_ranks(auto: Path, four_cores: None) -> None:
    """The words that ranks are given make the very config that was checked here."""
    config = load_run_config(auto)
    settled, words, said = choose_layout(config)
    assert not settled.unresolved_options
    layout = resolve_layout(settled, wanted_world_size(settled, None), "cpu")
    assert load_run_config(auto, words) == settled
    for overrides in (["parallel=auto"], ["parallel.tensor_parallel_size=1"], ["recompute=auto"]):
        assert load_run_config(auto, [*overrides, *words]) == settled
    (sentence,) = said
    assert "\n" not in sentence and "chose" in sentence and "bound by" in sentence
    assert f"tp {layout.tensor_parallel_size} pp {layout.pipeline_parallel_size}" in sentence
    assert choose_layout(settled) == (settled, [], [])


def test_stages_are_told_what_to_recompute(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Where the first of two stages, which holds two micro-batches, has room for one alone."""
    tiny["parallel"] = {"pipeline_parallel_size": 2}
    tiny["training"] |= {"global_batch_size": 16, "micro_batch_size": 8}
    path = write_config(tmp_path / "stages.yaml", tiny | {"recompute": "auto"})
    config = load_run_config(path)
    layout = resolve_layout(config.with_resolved({RECOMPUTE: "none"}), 2, "cpu")
    first, second = needs(TrainingWorkload.of(config.with_resolved({RECOMPUTE: "none"}), layout), cpus(2))
    assert first.total > second.total, "the case that this test is for"
    memory_gib = (first.total + second.total) / 2 / ROOMY / 2**30  # with memory to spare
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(places, "here", lambda ranks: cpus(ranks, memory_gib=memory_gib))
    monkeypatch.setattr(places, "cpu_count", lambda: 2)
    settled, words, (sentence,) = choose_layout(config)
    assert settled.recompute.mode == ("full", "none") and load_run_config(path, words) == settled
    assert "recompute (stage 0 full, stage 1 none)" in sentence and f"with {memory_gib:.3g} GiB each" in sentence
    code, out, err = command(["train", str(path), "--dry-run", "--json"], monkeypatch, capfd)
    assert code == 0, err
    assert [stage["recompute"] for stage in json.loads(out)["summary"]["stages"]] == ["full", "none"]
    settled_path = tmp_path / "settled.yaml"
    settled_path.write_text(settled.to_yaml())
    assert load_run_config(settled_path) == settled, "the config of the run's folder names what was chosen"


def test_what_is_known_to_go_wrong_is_not_chosen(auto: Path, four_cores: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config, layout: Any, versions: Any, device: str) -> None:
        if layout.data_parallel_size > 1 or config.parallel.tensor_parallel_size > 1:
            raise ConfigError("known to hang")

    monkeypatch.setattr(automatic, "check_known_bad", refuse)
    options = choose_here(load_run_config(auto, ["parallel.data_parallel_size=auto"]), "cpu").options
    assert options["parallel", "data_parallel_size"] == options[TENSOR] == 1


def test_the_same_facts_give_the_same_layout(auto: Path) -> None:
    config = load_run_config(auto)
    first = choose_on(config, cpus(2, nodes=2))
    assert choose_on(config, cpus(2, nodes=2)) == first
    assert resolve_layout(config.with_resolved(first.options), 4, "cpu").world_size == 4
    kept = choose_on(load_run_config(auto, ["parallel.pipeline_parallel_size=3"]), cpus(3))
    assert kept.options["parallel", "pipeline_parallel_size"] == 3


def test_hosts_that_differ_count_as_the_smallest_and_slowest() -> None:
    cluster = hosts_cluster([8, 8], 16, "cuda", ["NVIDIA H100 80GB HBM3"] * 8 + ["NVIDIA A100-SXM4-40GB"] * 8)
    assert (cluster.nodes, cluster.accelerators_per_node) == (2, 8)
    assert cluster.accelerator_name == "A100-40GB"
    assert cluster.accelerator.memory_gib == pytest.approx(39.5, abs=0.5)
    uneven = hosts_cluster([8, 4], 12, "cuda", ["NVIDIA H100 80GB HBM3"])
    assert (uneven.nodes, uneven.accelerators_per_node) == (3, 4)
    with pytest.raises(ValueError, match="no NVIDIA Nonesuch"):
        hosts_cluster([1], 1, "cuda", ["NVIDIA Nonesuch"])


def test_commands_that_start_nothing_here_check_and_leave_it_open(auto: Path) -> None:
    config = load_run_config(auto)
    likely, layout, later = layout_or_likely(config, Ranks(4, 2, "cpu"))
    assert later == [DECIDED_LATER] and layout.world_size == 4 and not likely.unresolved_options
    with pytest.raises(ConfigError, match="global_batch_size 4 is not a multiple"):
        layout_or_likely(config, Ranks(7, 7, "cpu"))
    assert most_ranks(config, 11, 1, "cpu") == 8, "4 replicas of 2: tensor parallelism over 9 to 11 cuts no head"
    with pytest.raises(ConfigError, match="processes of this run"):
        most_ranks(load_run_config(auto, ["parallel.tensor_parallel_size=4"]), 3, 1, "cpu")


@given(
    st.integers(1, 40),
    st.sampled_from(("cpu", "cuda")),
    st.sampled_from((None, TENSOR, ("parallel", "pipeline_parallel_size"), ("parallel", "data_parallel_size"))),
    st.integers(1, 4),
    st.integers(1, 12),
)
def test_the_most_ranks_are_the_largest_legal_number(
    slots: int, device: Any, stated: OptionPath | None, size: int, batch: int
) -> None:
    """Held against every number of ranks in turn."""
    parallel = {option: "auto" for section, option in CHOOSABLE if section == "parallel"}
    config = Config.model_validate(
        {
            "run_dir": "run",
            "model": SMALL,
            "data": {"path": "x"},
            "parallel": parallel | ({} if stated is None else {stated[1]: size}),
            "training": {"global_batch_size": batch, "sequence_length": 12, "steps": 1},
        }
    )
    expected = None
    for count in range(slots, 0, -1):
        with suppress(ConfigError):
            first_legal(config, Ranks(count, 1, device), known_good(device))
            expected = count
            break
    if expected is None:
        with pytest.raises(ConfigError):
            most_ranks(config, slots, 1, device)
    else:
        assert most_ranks(config, slots, 1, device) == expected


def test_thousands_of_slots_are_counted_at_once(auto: Path) -> None:
    config = load_run_config(auto, ["training.global_batch_size=6"])
    began = time.process_time()
    assert most_ranks(config, 4096, 8, "cpu") == 72, "4 heads x 3 layers x 6 sequences"
    assert time.process_time() - began < 0.3


def test_ranks_that_go_wrong_are_not_counted(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config, layout: Any, versions: Any, device: str) -> None:
        if layout.world_size > 2:
            raise ConfigError("known to hang")

    monkeypatch.setattr(automatic, "check_known_bad", refuse)
    config = load_run_config(auto)
    assert most_ranks(config, 8, 1, "cpu") == 2
    with pytest.raises(ConfigError, match="known to hang"):
        layout_or_likely(config, Ranks(4, 2, "cpu"))


def test_slots_that_stay_unused_are_told(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(auto)
    (notice,) = why_fewer(config, 8, 11, 1, "cpu")
    assert notice.startswith("auto uses 8 of 11 slots, because no layout works on all of them: ")
    assert "global_batch_size 4 is not a multiple" in notice
    assert why_fewer(config, 8, 8, 1, "cpu") == [] and why_fewer(load_run_config(auto, STATED), 1, 3, 1, "cpu") == []
    hosts = (Host("a", tuple(range(5))), Host("b", tuple(range(6))))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert likely_layout(config, hosts, 0)[2] == [DECIDED_LATER, notice]


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "-N", "2", "--gpus-per-node", "2", "--dry-run"],
        [
            "k8s",
            *("--image", "registry/megalite:1", "--nodes", "2", "--gpus-per-node", "2"),
            *("--output-claim", "runs", "run_dir=runs/auto"),
        ],
    ],
    ids=lambda words: words[0],
)
def test_schedulers_are_handed_the_open_config(
    words: list[str], auto: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    name, *options = words
    code, out, err = command([name, str(auto), *options], monkeypatch, capfd)
    assert code == 0, err
    assert "layout chosen at the start" in out and DECIDED_LATER in err
    assert name == "slurm" or "tensor_parallel_size: auto" in out, "pods read the config from here"


@pytest.mark.parametrize(
    "words",
    [
        ["slurm", "-N", "2", "--gpus-per-node", "0", "--dry-run"],
        ["k8s", "--image", "a:1", "--nodes", "2", "--gpus-per-node", "0", "--output-claim", "runs", "run_dir=runs/a"],
    ],
    ids=lambda words: words[0],
)
def test_schedulers_are_not_told_of_placeholders(
    words: list[str], auto: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nobody has said how many ranks a host has: that is asked, not that one rank cannot be shared by two hosts."""
    name, *options = words
    code, _, err = command([name, str(auto), *options], monkeypatch, capfd)
    assert code == 2 and err.startswith("megalite: error: parallel is auto, so nothing says how many ranks"), err
    assert err.count("\n") == 1 and (
        "give --ntasks-per-node" in err or "on the CPU: state parallel.tensor_parallel_size" in err
    )
    if name == "slurm":
        code, out, err = command([name, str(auto), *options, "--ntasks-per-node", "2"], monkeypatch, capfd)
        assert code == 0 and "layout chosen at the start" in out, err


def test_schedulers_refuse_what_goes_wrong(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: Config, layout: Any, versions: Any, device: str) -> None:
        if device == "cuda":
            raise ConfigError("known to hang")

    monkeypatch.setattr(automatic, "check_known_bad", refuse)
    with pytest.raises(ConfigError, match="known to hang"):
        fit_layout(load_run_config(auto), 2, 2)


def test_show_prints_auto_and_place_says_what_to_do(
    auto: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(["config", "show", str(auto)], monkeypatch, capfd)
    assert code == 0 and yaml.safe_load(out)["training"]["micro_batch_size"] == "auto", err
    code, _, err = command(["place", str(auto), "--nodes", "a:2"], monkeypatch, capfd)
    assert code == 2 and err.count("\n") == 1 and "megalite plan CONFIG.yaml --write" in err


def test_a_dry_run_shows_what_would_be_chosen(
    auto: Path, four_cores: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = command(["train", str(auto), "--dry-run", "--json"], monkeypatch, capfd)
    assert code == 0, err
    facts = json.loads(out)
    assert facts["config"]["training"]["micro_batch_size"] != "auto"
    assert len(facts["ranks"]) == facts["layout"]["world_size"]


HOSTS = (Host("node1", (0, 1)), Host("node2", (0, 1)), Host("node3", (0, 1)))


def supervisor_of(config: Config, attempts: int, monkeypatch: pytest.MonkeyPatch) -> HostsSupervisor:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    made = HostsSupervisor(config, HOSTS, Policy(), Options())
    made._attempts = attempts
    return made


def report_on(hosts: Sequence[Host]) -> PreflightReport:
    facts: dict[str, dict[str, Any]] = {host.name: {"gpus": []} for host in hosts}
    return PreflightReport(tuple(facts), (), {}, facts, "cpu", 0.0)


def small_cpus(slots: Sequence[int], ranks: int, device: str, gpus: Sequence[str]) -> Cluster:
    return cpus(2, nodes=ranks // 2)


def test_hosts_choose_anew_when_some_are_lost(
    auto: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Six ranks cut a batch of 12; two hosts that are left make another layout, which the run says."""
    monkeypatch.setattr("launch.cluster.hosts_supervisor.hosts_cluster", small_cpus)
    config = load_run_config(auto, ["training.global_batch_size=12"])
    assert wanted_ranks(config, HOSTS, 0, "cpu") == 6 and likely_layout(config, HOSTS, 0)[1].world_size == 6
    first, ranks = supervisor_of(config, 1, monkeypatch)._with_layout(HOSTS, report_on(HOSTS))
    assert ranks == 6 and resolve_layout(first, 6, "cpu").world_size == 6
    left = HOSTS[1:]
    later, ranks = supervisor_of(config, 2, monkeypatch)._with_layout(left, report_on(left))
    layout = resolve_layout(later, 4, "cpu")
    assert ranks == 4 and not later.unresolved_options
    chosen = choose_hosts(later, left, "cpu", wanted=4, may_shrink=True, spares=0, topology=None, why_not=[])
    assert chosen.hosts == left and chosen.layout == layout
    assert "auto: chose" in "".join(capfd.readouterr())


def test_the_first_attempt_must_have_what_was_asked_for(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_run_config(auto, ["training.global_batch_size=12"])
    settled, ranks = supervisor_of(config, 1, monkeypatch)._with_layout(HOSTS[1:], report_on(HOSTS[1:]))
    assert ranks == 6
    with pytest.raises(NotEnoughHosts, match="6 ranks are needed, and hosts that are fit have 4 slots"):
        choose_hosts(settled, HOSTS[1:], "cpu", wanted=ranks, may_shrink=False, spares=0, topology=None, why_not=[])
    assert per_node((Host("a", (0, 1, 2, 3)), Host("b", (0, 1)))) == 2


def test_hosts_that_are_too_few_for_any_layout_are_waited_for(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hosts, of which one comes back: neither what no rule allows nor what fits nowhere ends the supervisor."""
    monkeypatch.setattr("launch.cluster.hosts_supervisor.hosts_cluster", small_cpus)
    four = load_run_config(auto, ["parallel.tensor_parallel_size=4"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    made = HostsSupervisor(four, HOSTS[:2], Policy(), Options())
    made._attempts = 2
    with pytest.raises(NotEnoughHosts, match=r"no layout for the hosts that are fit: .*tensor_parallel_size 4"):
        made._with_layout(HOSTS[:1], report_on(HOSTS[:1]))
    assert made._with_layout(HOSTS[:2], report_on(HOSTS[:2]))[1] == 4

    def too_small(slots: Sequence[int], ranks: int, device: str, gpus: Sequence[str]) -> Cluster:
        return cpus(2, nodes=ranks // 2, memory_gib=0.001 if ranks < 4 else 4.0)

    monkeypatch.setattr("launch.cluster.hosts_supervisor.hosts_cluster", too_small)
    made = HostsSupervisor(load_run_config(auto), HOSTS[:2], Policy(), Options())
    made._attempts = 2
    with pytest.raises(NotEnoughHosts, match="fits in no layout"):
        made._with_layout(HOSTS[:1], report_on(HOSTS[:1]))
    made._attempts = 1
    monkeypatch.setattr("launch.cluster.hosts_supervisor.hosts_cluster", lambda *_: cpus(2, nodes=2, memory_gib=0.001))
    with pytest.raises(LaunchError, match="fits in no layout") as error:
        made._with_layout(HOSTS[:2], report_on(HOSTS[:2]))
    assert not isinstance(error.value, NotEnoughHosts)


def test_the_hosts_device_decides_how_many_ranks_there_are(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before hosts are asked they are taken to have GPUs."""
    monkeypatch.setattr("launch.cluster.hosts_supervisor.hosts_cluster", small_cpus)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)

    def only_two_on_a_cpu(config: Config, layout: Any, versions: Any, device: str) -> None:
        if device == "cpu" and layout.world_size > 2:
            raise ConfigError("known to hang")

    monkeypatch.setattr(automatic, "check_known_bad", only_two_on_a_cpu)
    made = HostsSupervisor(load_run_config(auto), HOSTS[:2], Policy(), Options())
    made._attempts = 1
    assert made._world_size == 4
    assert made._with_layout(HOSTS[:2], report_on(HOSTS[:2]))[1] == 2


def test_ranks_on_hosts_are_given_the_chosen_layout(auto: Path, tmp_path: Path) -> None:
    config = load_run_config(auto)
    made = HostsSupervisor(config, HOSTS[:1], Policy(), Options())
    chosen = config.with_resolved(choose_on(config, cpus(2)).options)
    made._command(HostAssignment(HOSTS[:1], chosen, "cpu", 2, ("localhost", 1)), {}, tmp_path / "attempt")
    assert load_config(tmp_path / "attempt" / "config.yaml") == chosen and not chosen.unresolved_options


def test_ranks_of_unequal_gpus_choose_for_the_smallest(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the hosts that they are on: a network lies between these."""
    asked: list[Cluster] = []

    def machine(ranks: int, *, on_cpu: bool, nodes: int, limits: Any) -> Machine:
        cluster = hosts_cluster([ranks] * nodes, ranks * nodes, "cuda", ["NVIDIA H100 80GB HBM3"])
        return Machine("H100", cluster.accelerator, cluster.intra_node, cluster, on_cpu)

    def choose(config: Config, cluster: Cluster, allocator: Device) -> automatic.ChosenLayout:
        asked.append(cluster)
        return choose_on(config, cluster, allocator)

    def gpus(*found: tuple[str, int]) -> list[RankDevice]:
        return [RankDevice(host, "", "H100", gib * 2**30, CUDA) for host, gib in found]

    monkeypatch.setattr(automatic, "describe_machine", machine)
    monkeypatch.setattr(automatic, "choose_on", choose)
    config = load_run_config(auto)
    automatic._choose_for(config, gpus(("a", 79), ("a", 40), ("b", 79), ("b", 79)))
    automatic._choose_for(config, gpus(("a", 200), ("a", 200)))
    assert [(one.nodes, one.accelerators_per_node) for one in asked] == [(2, 2), (1, 2)]
    assert asked[0].accelerator.memory_gib == 40, "what the smallest GPU has"
    assert asked[1].accelerator.memory_gib < 81, "no more than the catalogue says"


def test_the_choice_waits_no_longer_than_ranks_do(auto: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[float] = []

    def slow(at_most_s: float) -> Any:
        waited.append(at_most_s)
        raise LaunchError(f"this machine's CPU could not be measured in {at_most_s:g} s")

    monkeypatch.setattr("launch.prediction.this_machine._measure", slow)
    monkeypatch.setattr("launch.prediction.this_machine._read_cache", lambda path: {})
    config = load_run_config(auto, ["watchdog.timeout_minutes=0.5", "watchdog.startup_minutes=0.2"])
    chosen = automatic._choose_for(config, [RankDevice("a", "", "EPYC", 2**30, CPU)] * 2)
    assert waited == [3.0]
    assert chosen.sentence.endswith("(by rough figures of a CPU: this machine's CPU could not be measured in 3 s)")


def test_this_machine_is_asked_what_can_be_said_anywhere(auto: Path, four_cores: None) -> None:
    """Before a layout is chosen: a model that no family takes is told as such."""
    config = load_run_config(auto)
    with pytest.raises(FamilyError):
        choose_layout(config.model_copy(update={"model": config.model.model_copy(update={"model_type": "gpt2"})}))


TORCHRUN = (BIN / "torchrun", "--standalone", "--nproc-per-node")


@pytest.mark.slow
def test_ranks_of_a_launcher_agree_and_a_resume_plans_again(auto: Path, tiny: dict[str, Any]) -> None:
    """torchrun knows nothing of the layout: rank 0 chooses. The second start has one rank instead of two."""
    folder = Path(tiny["run_dir"])
    for ranks, steps in ((2, 2), (1, 4)):
        done = run(*TORCHRUN, str(ranks), "-m", "launch.train", auto, f"training.steps={steps}")
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout.count("auto: chose") == 1, "said once"
        stated = load_config(folder / "config.yaml")
        assert not stated.unresolved_options and resolve_layout(stated, ranks, "cpu").world_size == ranks
        layout = json.loads((folder / "receipt.json").read_text())["layout"]
        assert layout["data_parallel_size"] == stated.parallel.data_parallel_size
    assert [record["step"] for record in metrics(folder) if "loss" in record] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_works_nowhere_is_said_once_by_ranks_too(auto: Path) -> None:
    stated = ["training.global_batch_size=1", "parallel.pipeline_parallel_size=1", "training.sequence_length=31"]
    heads = ["model.num_attention_heads=1", "model.num_key_value_heads=1"]
    done = run(*TORCHRUN, "2", "-m", "launch.train", auto, *stated, *heads)
    assert done.returncode
    assert done.stderr.count("megalite: error: no layout works on 2 x") == 1, done.stderr[-2000:]
