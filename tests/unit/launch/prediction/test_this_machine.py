"""What this machine computes on, as the planner takes it, and what a run says of itself."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import tempfile
import threading
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import LaunchError
from launch.prediction import measure_cpu
from launch.prediction import this_machine as machine_module
from launch.prediction.prediction import Prediction, comparison, format_error, format_rough_error
from launch.prediction.this_machine import (
    Machine,
    MeasurementLimits,
    describe_machine,
    gpu_in_catalogue,
    mark_contradicted,
    start_patience_s,
)
from launch.runtime.rank_environment import Rank
from launch.trainer import prediction_tracker as prediction_tracker
from launch.trainer.prediction_tracker import MachineLookup, PredictionTracker, ranks_of_a_host
from megalite.config import Config, resolve_layout
from megalite.parallel.mesh import Mesh
from megalite.planner.cost import memory
from megalite.planner.cost.stage_parameters import stages_of
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import catalogue
from megalite.units import about
from tests.helpers.odd_sizes import config_of

MEASURED = {
    "core_flops": {"fp32": 1e11, "bf16": 2e11},
    "attention_flops": 4e10,
    "memory_bytes_per_s": 2e10,
    "layer_s": 2e-4,
    "link_bytes_per_s": 1.5e9,
    "message_s": 4e-5,
}
NAMES = {
    "NVIDIA H100 80GB HBM3": "H100",
    "NVIDIA H200": "H200",
    "NVIDIA B200": "B200",
    "NVIDIA A100-SXM4-80GB": "A100-80GB",
    "NVIDIA A100-SXM4-40GB": "A100-40GB",
    "Tesla V100-SXM2-32GB": "V100-32GB",
    "Tesla V100-SXM2-16GB": None,
    "NVIDIA A100-SXM-64GB": None,
    "NVIDIA H100 PCIe": None,  # slower than the H100 of the catalogue, and without NVLink
    "NVIDIA H100 NVL": None,
    "NVIDIA A100 80GB PCIe": None,
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb": None,
    "NVIDIA GH200 480GB": None,
    "NVIDIA L4": None,
}


@pytest.fixture
def four_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No GPU, four cores, an empty home; the number of times that the CPU was measured, in a list."""
    times: list[int] = []

    def measure(timeout_s: float) -> dict[str, Any]:
        times.append(1)
        return dict(MEASURED)

    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.setenv(name, str(tmp_path / name))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine_module, "_measure", measure)
    monkeypatch.setattr(machine_module, "cpu_count", lambda: 4)
    monkeypatch.setattr(machine_module, "gpu_count", lambda: 0)
    monkeypatch.setattr(os, "getloadavg", lambda: (1.0, 1.0, 1.0))
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 4)
    return times


@pytest.fixture
def config() -> Config:
    return _config(2)


def _config(stages: int) -> Config:
    training = {"global_batch_size": 8, "micro_batch_size": 2, "sequence_length": 128, "steps": 5}
    model = {"num_hidden_layers": max(4, stages), "max_position_embeddings": 128}
    return config_of(model=model, parallel={"pipeline_parallel_size": stages}, training=training)


def _calibrate(machine: Machine, home: Path) -> None:
    own = home / "XDG_CONFIG_HOME" / "megalite" / "hardware.yaml"
    own.parent.mkdir(parents=True)
    entry = machine.whole.model_dump(mode="json") | {"efficiency": 0.33, "calibrated_on": "a run"}
    links = {machine.whole.intra_node: machine.link.model_dump(mode="json")}
    own.write_text(json.dumps({"accelerators": {machine.name: entry}, "links": links}))


def test_gpus_are_found_by_the_words_of_their_names() -> None:
    assert {name: gpu_in_catalogue(name, catalogue()) for name in NAMES} == NAMES


def test_ranks_share_the_cores(four_cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    whole, two, eight = (describe_machine(ranks) for ranks in (1, 2, 8))
    assert whole.cluster.peak_flops("fp32") == pytest.approx(4e11)
    assert two.cluster.peak_flops("bf16") == pytest.approx(4e11)
    assert eight.cluster.peak_flops("fp32") == pytest.approx(0.5e11)
    for each in (whole, two, eight):
        assert each.is_cpu and each.whole == whole.whole and each.cluster.accelerator.device == "cpu"
        share = each.cluster.accelerators
        assert share * each.cluster.accelerator.memory_gib == pytest.approx(whole.whole.memory_gib)
    assert (whole.cluster.ranks_per_core, eight.cluster.ranks_per_core) == (0.25, 2.0)
    assert eight.cluster.intra_node.gb_per_s == pytest.approx(two.cluster.intra_node.gb_per_s / 2)
    bandwidths = [each.cluster.accelerator.memory_gb_per_s for each in (whole, two, eight)]
    assert bandwidths == pytest.approx([whole.whole.memory_gb_per_s / ranks for ranks in (1, 2, 8)])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as torchrun sets it
    assert describe_machine(2).cluster.peak_flops("fp32") == pytest.approx(1e11)
    assert len(four_cores) == 1, "measured again, though it is in the cache"


def test_a_broken_cache_is_measured_again(four_cores: list[int], tmp_path: Path) -> None:
    cache = tmp_path / "XDG_CACHE_HOME" / "megalite" / "this_cpu.json"
    name = describe_machine(1).name
    key = next(iter(json.loads(cache.read_text())))
    assert key.startswith(name)
    for content in ("{", "[]", json.dumps({key: 3}), json.dumps({key: MEASURED | {"layer_s": "fast"}})):
        cache.write_text(content)
        before = len(four_cores)
        assert describe_machine(1).whole.launch_us == pytest.approx(200)
        assert len(four_cores) == before + 1, content


def test_a_home_that_cannot_be_written_is_no_obstacle(
    four_cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert describe_machine(1).cluster.peak_flops("fp32") == pytest.approx(4e11)


def test_a_calibrated_cpu_is_taken_from_the_catalogue(four_cores: list[int], tmp_path: Path) -> None:
    measured = describe_machine(2)
    _calibrate(measured, tmp_path)
    found = describe_machine(2)
    assert (found.whole.efficiency, found.cluster.accelerator.efficiency) == (0.33, 0.33)
    assert found.cluster.intra_node == measured.cluster.intra_node


def test_gpus_that_nobody_knows_are_told_how_to_describe(
    four_cores: list[int], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine_module, "gpu_count", lambda: 2)
    found: list[str] = []
    monkeypatch.setattr(machine_module, "gpu_names", lambda: found)
    for names, sentence in (
        (["NVIDIA L4"] * 2, r"the catalogue has no GPU 'NVIDIA L4': describe it in .*hardware.yaml under accelerators"),
        (["NVIDIA H200", "NVIDIA L4"], "GPUs of several kinds"),
    ):
        found[:] = names
        with pytest.raises(LaunchError, match=sentence) as caught:
            describe_machine()
        assert "\n" not in str(caught.value)
        own = PredictionTracker(config, resolve_layout(config, 2, "cpu"), Rank(0, 0, 2), "cuda")
        assert own.lookup is not None and own.lookup.found(10) == (None, str(caught.value))
        assert own.process_bytes == 0
    found[:] = ["NVIDIA H200"] * 2
    assert (describe_machine().name, describe_machine().cluster.accelerators) == ("H200", 2)
    assert describe_machine(2, nodes=4).cluster.accelerators == 8
    assert describe_machine(2, on_cpu=True).is_cpu


def test_measuring_that_fails_is_one_sentence(four_cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for outcome in (subprocess.TimeoutExpired("x", 1), OSError("no python"), "Traceback", '{"core_flops": 3}'):

        def run(*_: Any, outcome: Any = outcome, **__: Any) -> Any:
            if isinstance(outcome, Exception):
                raise outcome
            return subprocess.CompletedProcess("x", 0, stdout=outcome)

        monkeypatch.setattr(subprocess, "run", run)
        with pytest.raises(LaunchError, match=r"this machine's CPU could not be measured (\(|in 3 s)"):
            machine_module._measure(3)


@pytest.mark.slow
def test_this_cpu_is_really_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    measured = machine_module._measure(60)
    assert 1e8 < measured["core_flops"]["fp32"] < 1e13 and 1e8 < measured["memory_bytes_per_s"] < 1e13
    assert 1e-6 < measured["layer_s"] < 0.1 and 1e6 < measured["link_bytes_per_s"] < 1e12
    assert 0 < measured["message_s"] < 0.1 and measured["attention_flops"] > 1e7
    assert list(tmp_path.iterdir()) == [], "nothing is left behind"


def test_the_meeting_of_two_ranks_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever torch leaves of it; how long things take is not looked at here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(measure_cpu, "core_flops", lambda dtype: 1.0)
    monkeypatch.setattr(measure_cpu, "copied_bytes_per_s", lambda threads: 1.0)
    monkeypatch.setattr(measure_cpu, "attention_flops", lambda: 1.0)
    monkeypatch.setattr(measure_cpu, "layer_s", lambda: 1.0)

    def between_ranks(meeting: str) -> tuple[float, float]:
        Path(meeting).write_text("")
        assert list(tmp_path.iterdir())
        return 1.0, 1.0

    monkeypatch.setattr(measure_cpu, "between_ranks", between_ranks)
    measure_cpu.main(1)
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_is_the_best_of_several_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A moment in which something else computes does not stay with the machine."""
    times = iter((3.0, 0.5, 2.0))
    monkeypatch.setattr(measure_cpu, "best_s", lambda *_: next(times))
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(measure_cpu, "COPIED", 2**12)
    assert measure_cpu.copied_bytes_per_s(1) == 2 * 2**12 / 0.5


def test_what_a_busy_machine_did_is_measured_again_when_it_is_idle(
    four_cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(of: float) -> None:
        monkeypatch.setattr(os, "getloadavg", lambda: (of, 0.0, 0.0))

    load(9.0)
    describe_machine(1)
    describe_machine(1)
    assert len(four_cores) == 1, "still as busy"
    load(3.0)
    describe_machine(1, limits=MeasurementLimits(busy_ranks=8))
    assert len(four_cores) == 1, "ranks start beside it"
    describe_machine(1)
    load(9.0)
    describe_machine(1)
    assert len(four_cores) == 2, "once more, and that is good"
    (entry,) = json.loads((tmp_path / "XDG_CACHE_HOME" / "megalite" / "this_cpu.json").read_text()).values()
    assert entry["load"] == 3.0 and datetime.fromisoformat(entry["date"]).tzinfo is not None


def test_what_was_measured_beside_a_start_is_measured_again_by_one_who_starts_nothing(
    four_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank on four cores is no high load, but its imports disturb the measurement of them all."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.0, 0.0))
    for _ in range(2):
        describe_machine(1, limits=MeasurementLimits(busy_ranks=1))
    assert len(four_cores) == 1, "another start disturbs as much"
    for _ in range(2):
        describe_machine(1)
    assert len(four_cores) == 2


def test_measuring_again_may_fail(four_cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(timeout_s: float) -> Any:
        raise LaunchError(f"not in {timeout_s:g} s")

    describe_machine(1, limits=MeasurementLimits(busy_ranks=8))
    monkeypatch.setattr(machine_module, "_measure", fail)
    found = describe_machine(1)
    assert found.whole.launch_us == pytest.approx(200) and found.rough == ""
    monkeypatch.setattr(machine_module, "_read_cache", lambda path: {})
    with pytest.raises(LaunchError, match="not in 60 s"):
        describe_machine(1)
    rough = describe_machine(1, limits=MeasurementLimits(timeout_s=7, allow_typical=True))
    assert rough.rough == "by rough figures of a CPU: not in 7 s" and rough.cluster.peak_flops("fp32") > 0


def test_a_user_without_a_home_is_no_obstacle(four_cores: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container, where nobody has an entry for the number that one runs under."""

    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr(machine_module, "write_durably", lambda *_: pytest.fail("there is no place for it"))
    monkeypatch.setattr(Path, "mkdir", Mock(side_effect=PermissionError(13, "Permission denied")))
    assert describe_machine(1).cluster.peak_flops("fp32") == pytest.approx(4e11)


@pytest.fixture
def run_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    """What a rank logs, whether logging has been configured in this process or not."""
    monkeypatch.setattr(logging.getLogger("launch"), "propagate", True)
    caplog.set_level(logging.INFO, "launch")
    return caplog


def test_nobody_waits_for_a_look_at_the_machine(
    config: Config, monkeypatch: pytest.MonkeyPatch, run_log: pytest.LogCaptureFixture
) -> None:
    """The run begins, and says that its CPU is still being measured; later it is known, which is said once."""
    measured, asked = threading.Event(), []

    def slow(ranks: int, *, on_cpu: bool, nodes: int, limits: MeasurementLimits) -> Machine:
        asked.append((ranks, on_cpu, nodes, limits.busy_ranks))
        measured.wait(30)
        raise LaunchError("it has taken too long")

    monkeypatch.setattr(prediction_tracker, "describe_machine", slow)
    monkeypatch.setattr(prediction_tracker, "PRINTED_AFTER_S", 0.05)
    layout = resolve_layout(config, 2, "cpu")
    own = PredictionTracker(config, layout, Rank(0, 0, 2), "cpu")
    began = time.monotonic()
    own.on_start()
    own.measure({"step_time_s": 1.0, "data_wait_s": 0.0})
    assert time.monotonic() - began < 20
    assert run_log.messages[-1] == "predicted: no step time, because this machine is still being measured"
    measured.set()
    assert own.lookup is not None and own.lookup.found(10) == (None, "it has taken too long")
    said = len(run_log.messages)
    for _ in range(2):
        own.measure({"step_time_s": 1.0, "data_wait_s": 0.0})
    own.on_end("ended")
    assert run_log.messages[said:] == ["predicted: no step time, because it has taken too long"]
    assert asked == [(2, True, 1, 2)] and PredictionTracker(config, layout, Rank(1, 1, 2), "cpu").lookup is None


@pytest.mark.parametrize(("ending", "is_told"), [("ended", True), ("preempted", False)])
def test_a_run_of_few_steps_is_predicted_at_its_end(
    four_cores: list[int],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
    run_log: pytest.LogCaptureFixture,
    ending: str,
    is_told: bool,
) -> None:
    """Only one that is done waits for it: a machine that has asked a run to end will not."""
    may_end = threading.Event()

    def measure() -> Machine:
        may_end.wait(30)
        return describe_machine(2, on_cpu=True)

    monkeypatch.setattr(prediction_tracker, "PRINTED_AFTER_S", 0.0)
    layout, lookup = resolve_layout(config, 2, "cpu"), MachineLookup(measure)
    own = PredictionTracker(config, layout, Rank(0, 0, 2), "cpu", lookup)
    own.on_start()
    own.measure({"step_time_s": 1.0, "data_wait_s": 0.0})
    threading.Timer(0.3, may_end.set).start()
    own.on_end(ending)
    assert ("a step on" in run_log.messages[-1]) == is_told
    assert (own.facts()["prediction"]["problem"] is None) == is_told
    lookup.found(10)


def test_short_limits_of_the_watchdog_are_kept(config: Config) -> None:
    def limits(timeout: float, startup: float) -> Config:
        watchdog = config.watchdog.model_copy(update={"timeout_minutes": timeout, "startup_minutes": startup})
        return config.model_copy(update={"watchdog": watchdog})

    patience = [start_patience_s(limits(*pair)) for pair in ((30, 30), (0.2, 0.1), (0.1, 0.2))]
    assert patience == pytest.approx([60, 1.5, 1.5])


@given(st.integers(2, 64), st.floats(0.25, 16))
def test_shared_cores_idle_in_less_of_the_bubble(stages: int, ranks_per_core: float) -> None:
    """No less than nothing, no more than all; all of it where each rank has a core of its own."""
    job = _config(stages)
    from megalite.planner.hardware import ClusterFile, cluster_of
    from megalite.planner.workload import TrainingWorkload

    planned = TrainingWorkload.of(job, resolve_layout(job, stages, "cpu"))
    cluster = cluster_of(ClusterFile(accelerator="H100", nodes=1, accelerators_per_node=stages), "x")
    alone, shared = (
        step_time(planned, cluster),
        step_time(planned, cluster.model_copy(update={"ranks_per_core": ranks_per_core})),
    )
    assert 0 <= shared.parts[BUBBLE] <= alone.parts[BUBBLE]
    if ranks_per_core <= 1:
        assert shared == alone
    if ranks_per_core >= stages:
        assert shared.parts[BUBBLE] == 0
    assert shared.seconds - shared.parts[BUBBLE] == pytest.approx(alone.seconds - alone.parts[BUBBLE])


BUBBLE = "pipeline bubble"


def test_how_many_ranks_a_host_has() -> None:
    def rank(several: bool | None) -> Rank:
        return Rank(0, 0, 16, has_several_hosts=several)

    assert ranks_of_a_host(rank(False), {"LOCAL_WORLD_SIZE": "8"}) == 16
    assert ranks_of_a_host(rank(None), {}) == 16
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE"):
        assert ranks_of_a_host(rank(True), {name: "8"}) == 8
    for told in ("8", "8(x2)", "8(x2),4", "8,4(x2)"):
        for name in ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE"):
            assert ranks_of_a_host(rank(True), {name: told}) == 8, "of the first host, where rank 0 is"
    step = {"SLURM_STEP_TASKS_PER_NODE": "4(x4)", "SLURM_TASKS_PER_NODE": "8(x2)", "SLURM_NTASKS_PER_NODE": "8"}
    assert ranks_of_a_host(rank(True), step) == 4, "a step may have fewer than its job"
    assert ranks_of_a_host(rank(True), {"LOCAL_SIZE": "0"}) == 1
    assert ranks_of_a_host(rank(True), {"LOCAL_SIZE": "many"}) == 16


def test_what_a_run_says(four_cores: list[int], config: Config) -> None:
    layout, machine = resolve_layout(config, 2, "cpu"), describe_machine(2)
    prediction = Prediction.of(config, layout, machine, "", 300 * 2**20)
    first, second = prediction.sentences()
    assert first.startswith("predicted: peak memory stage 0 ") and "stage 1" in first
    assert (
        f"a step on {machine.name} (the efficiency of this machine is a guess, " in second
        and "matrix products" in second
    )
    facts = prediction.facts()
    assert facts["model_flops_utilization"] is None and facts["rough"] == machine.why_rough, "of a measured peak"
    for stage in facts["memory"]:
        assert stage["peak_mib"] == pytest.approx(sum(stage["parts_mib"].values()), abs=0.1)
        assert stage["parts_mib"]["process"] == 300 and stage["parts_mib"]["checkpoint copy"] > 0
    assert facts["step_time_s"] == pytest.approx(sum(facts["parts_s"].values()))
    ranks = [{"peak_mib": 400.0, "process_mib": 300.0}, {"peak_mib": 410.0, "process_mib": 300.0}]
    measured = {"steps": 7, "step_time_s": 2 * facts["step_time_s"], "data_wait_s": 1.0, "ranks": ranks}
    step, memory = comparison(prediction, measured, Mesh.of(layout))
    assert "(measured 2 times as long as predicted; median of 7, and waited 1.00 s for data)" in step
    assert f"predicted roughly {about(facts['step_time_s'])}, measured" in step
    assert "more than measured)" in memory or "less than measured)" in memory
    assert "stage 0 predicted" in memory and "measured 400 MiB" in memory and "measured 410 MiB" in memory
    unknown = comparison(prediction, measured | {"ranks": [None, ranks[1]], "step_time_s": None}, Mesh.of(layout))
    assert len(unknown) == 1 and "stage 0" not in unknown[0] and "stage 1" in unknown[0]
    assert comparison(prediction, measured | {"ranks": [], "step_time_s": None}, Mesh.of(layout)) == []


@pytest.mark.parametrize(
    ("predicted", "measured", "exact", "rough"),
    [
        (1.031, 1.0, "predicted 3.1 % more than measured", "within a factor of 2"),
        (0.9, 1.0, "predicted 10.0 % less than measured", "within a factor of 2"),
        (2.11, 0.105, "predicted 1909.5 % more than measured", "predicted 20 times as long as measured"),
        (0.1, 0.553, "predicted 81.9 % less than measured", "measured 6 times as long as predicted"),
    ],
)
def test_an_error_says_relative_to_what(predicted: float, measured: float, exact: str, rough: str) -> None:
    assert format_error(predicted, measured) == exact
    assert format_rough_error(predicted, measured) == rough


def test_predictions_are_rough_until_calibrated_and_while_others_compute(
    four_cores: list[int], config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One digit of a guess; three of a CPU that was fitted to its runs, unless somebody else computes on it."""
    layout, machine = resolve_layout(config, 2, "cpu"), describe_machine(2)
    _, said = Prediction.of(config, layout, machine).sentences()
    assert re.match(r"predicted: roughly \d+ m?s a step on ", said) and "calibrate" in said
    _calibrate(machine, tmp_path)
    _, said = Prediction.of(config, layout, describe_machine(2)).sentences()
    assert "roughly" not in said and "efficiency 0.33, a run" in said
    monkeypatch.setattr(os, "getloadavg", lambda: (7.4, 0.0, 0.0))
    _, said = Prediction.of(config, layout, describe_machine(2)).sentences()
    assert "roughly" in said and "(somebody else computes here too, at a load of 7 on 4 cores)" in said


def test_a_measurement_that_a_run_contradicts_is_repeated_once(
    four_cores: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = describe_machine(1).name
    assert not mark_contradicted(name, 1.0, 3.0) and not mark_contradicted(name, 3.0, 1.0), (
        "that far off is a guess anyway"
    )
    monkeypatch.setattr(os, "getloadavg", lambda: (9.0, 0.0, 0.0))
    assert not mark_contradicted(name, 1.0, 50.0), "somebody else computes"
    assert mark_contradicted(name, 20.0, 1.0), "which makes no step faster"
    describe_machine(1)
    assert len(four_cores) == 2
    assert not mark_contradicted(name, 20.0, 1.0), "measured twice alike: the model is wrong, not the measurement"
    describe_machine(1)
    assert len(four_cores) == 2


def test_a_repeated_measurement_may_be_contradicted_where_it_differs(
    four_cores: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = describe_machine(1).name
    assert mark_contradicted(name, 20.0, 1.0)
    faster = {**MEASURED, "core_flops": {"fp32": 1e11, "bf16": 2e12}}
    monkeypatch.setattr(machine_module, "_measure", lambda timeout_s: dict(faster))
    assert describe_machine(1).cluster.peak_flops("bf16") == pytest.approx(8e12)
    assert mark_contradicted(name, 20.0, 1.0)
    assert not mark_contradicted("another CPU", 20.0, 1.0)


def test_entries_of_an_earlier_way_to_measure_are_measured_again(four_cores: list[int], tmp_path: Path) -> None:
    describe_machine(1)
    cache = tmp_path / "XDG_CACHE_HOME" / "megalite" / "this_cpu.json"
    ((key, entry),) = json.loads(cache.read_text()).items()
    cache.write_text(json.dumps({key: {name: value for name, value in entry.items() if name != "measurement"}}))
    describe_machine(1)
    assert len(four_cores) == 2


@pytest.mark.parametrize("replicas", [1, 2])
def test_copies_of_checkpoints_are_counted_where_they_are_made(config: Config, replicas: int) -> None:
    """In the background: fp32 weights and two moments, of which each replica has its share."""

    def copy(background: bool) -> list[float | None]:
        checkpoint = config.checkpoint.model_copy(update={"background": background})
        settled = config.model_copy(update={"checkpoint": checkpoint})
        layout = resolve_layout(settled, 2 * replicas, "cpu")
        return [one.parts.get(memory.COPY) for one in Prediction.of(settled, layout, None, "", 2**20).memory]

    assert copy(background=False) == [None, None]
    parameters = [stage.parameters for stage in stages_of(config, resolve_layout(config, 2, "cpu"))]
    assert copy(background=True) == [4.0 * 3 * count / replicas for count in parameters]
    assert Prediction.of(config, resolve_layout(config, 2, "cpu"), None).memory[0].parts.get(memory.COPY) is None, (
        "on a GPU"
    )


def test_what_allocates_the_tensors_is_told_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "has_bf16_units", lambda: False)
    ours = machine_module.cpu_memory({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=1"})
    assert (ours.kind, ours.keeps_freed, ours.widens_bf16) == ("cpu", True, True)
    monkeypatch.setattr(machine_module, "has_bf16_units", lambda: True)
    plain = machine_module.cpu_memory({})
    assert (plain.kind, plain.keeps_freed, plain.widens_bf16) == ("cpu", False, False)


def test_rank_0_predicts_for_its_own_allocator(
    four_cores: list[int], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")
    tracker = PredictionTracker(config, resolve_layout(config, 2, "cpu"), Rank(0, 0, 2), "cpu")
    assert tracker.allocator == machine_module.cpu_memory(os.environ) != memory.TENSORS
    bf16 = config.model_copy(update={"precision": config.precision.model_copy(update={"dtype": "bf16"})})
    layout, peaks = resolve_layout(bf16, 2, "cpu"), []
    for widens in (False, True):
        own = PredictionTracker(bf16, layout, Rank(1, 1, 2), "cpu")
        own.process_bytes, own.allocator = 2**20, replace(memory.CPU, widens_bf16=widens)
        own.on_start()
        peaks.append(own.facts()["prediction"]["memory"][0]["peak_mib"])
    assert peaks[1] > peaks[0]


def test_a_run_without_a_known_machine_is_predicted_as_far_as_can_be(
    config: Config, run_log: pytest.LogCaptureFixture
) -> None:
    def unknown() -> Machine:
        raise LaunchError("the catalogue has no GPU 'L4'")

    own = PredictionTracker(config, resolve_layout(config, 2, "cpu"), Rank(1, 1, 2), "cuda")
    own.lookup = MachineLookup(unknown)
    assert own.facts()["prediction"] is None
    own.on_start()
    memory, step = run_log.messages
    assert memory.startswith("predicted: peak memory") and step.endswith("because the catalogue has no GPU 'L4'")
    facts = own.facts()["prediction"]
    assert "step_time_s" not in facts and "cluster" not in facts and facts["memory"]
    assert "process" not in facts["memory"][0]["parts_mib"]


def test_memory_that_cannot_be_told_is_none(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that raised instead would leave the others waiting in the collective."""
    from megalite.monitor import memory

    def broken() -> float:
        raise RuntimeError("CUDA error: the launch timed out")

    own = PredictionTracker(config, resolve_layout(config, 2, "cpu"), Rank(1, 1, 2), "cuda")
    own.process_bytes = 2**20
    told = own.memory()
    assert told is not None and told["process_mib"] == 1 and told["peak_mib"] > 50
    monkeypatch.setattr(memory, "peak_memory_mib", broken)
    assert own.memory() is None


def test_a_format_without_a_peak_leaves_the_memory(four_cores: list[int], config: Config) -> None:
    machine = describe_machine(2)
    fp32_alone = machine.cluster.with_figures(peak_tflops={"fp32": 0.1})  # type: ignore[arg-type]
    bf16 = config.model_copy(update={"precision": config.precision.model_copy(update={"dtype": "bf16"})})
    prediction = Prediction.of(bf16, resolve_layout(bf16, 2, "cpu"), replace(machine, cluster=fp32_alone), "", 0)
    assert prediction.step is None and "no peak_tflops for precision.dtype bf16" in prediction.problem
    assert "no step time, because" in prediction.sentences()[-1] and prediction.memory
