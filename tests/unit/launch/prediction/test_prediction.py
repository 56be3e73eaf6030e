"""The measured MFU is of the same FLOPs and peak as the predicted one, and is told only where the peak is known."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launch.prediction.prediction import Prediction
from launch.runtime.rank_environment import Rank
from launch.trainer.prediction_tracker import MachineLookup, PredictionTracker
from megalite.config import Config, resolve_layout
from tests.unit.launch.planning.test_calibration import MODEL, machine


@pytest.fixture
def config() -> Config:
    training = {"global_batch_size": 32, "micro_batch_size": 2, "sequence_length": 2048, "steps": 50}
    return Config.model_validate(
        {
            "run_dir": "unused",
            "model": MODEL,
            "data": {"path": "unused"},
            "parallel": {"tensor_parallel_size": 2},
            "training": training,
        }
    )


def test_a_step_as_long_as_predicted_has_the_predicted_mfu(config: Config) -> None:
    layout = resolve_layout(config, 8, "cuda")
    prediction = Prediction.of(config, layout, machine())
    assert prediction.step is not None
    expected, took = prediction.step.model_flops_utilization, prediction.step.seconds
    assert expected is not None and 0.01 < expected < 1
    assert prediction.model_flops_utilization(took) == pytest.approx(expected)
    assert prediction.model_flops_utilization(4 * took) == pytest.approx(expected / 4)
    # PaLM, appendix B: 6 N + 12 L H Q T operations a token, with N parameters without embeddings but with the head
    layers, hidden, tokens = MODEL["num_hidden_layers"], MODEL["hidden_size"], 32 * 2048
    block = hidden * hidden * 2 + 2 * hidden * hidden // 2 + 3 * hidden * MODEL["intermediate_size"]
    parameters = layers * block + MODEL["vocab_size"] * hidden
    flops = tokens * (6 * parameters + 12 * layers * hidden * 2048)
    peak = machine().whole.peak_tflops["bf16"] * 1e12 * 8
    assert prediction.model_flops_utilization(took) == pytest.approx(flops / took / peak, rel=1e-3)


def test_an_mfu_without_a_known_peak_is_not_told(config: Config) -> None:
    layout = resolve_layout(config, 8, "cuda")
    gpu = machine()
    on_cpu = gpu.cluster.model_copy(update={"accelerator": gpu.whole.model_copy(update={"device": "cpu"})})
    for unknown in (None, replace(gpu, cluster=on_cpu, is_cpu=True)):
        assert Prediction.of(config, layout, unknown, "unknown GPU").model_flops_utilization(1.0) is None
    assert Prediction.of(config, layout, gpu).model_flops_utilization(0.0) is None, "a clock that stands still"


@pytest.mark.parametrize(
    ("error", "told"),
    [(KeyError("b300"), "KeyError: 'b300'"), (AssertionError(), "AssertionError")],
)
def test_why_there_is_no_step_time_has_the_kind_of_the_error(
    config: Config, monkeypatch: pytest.MonkeyPatch, error: Exception, told: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("launch.prediction.prediction.step_time", fail)
    said = Prediction.of(config, resolve_layout(config, 8, "cuda"), machine()).sentences()
    assert said[-1] == f"predicted: no step time, because {told}"


def test_the_best_published_speed_stands_beside_ours(config: Config) -> None:
    layout = resolve_layout(config, 8, "cuda")
    prediction = Prediction.of(config, layout, machine())
    assert prediction.step is not None
    tflops = prediction.step.model_flops / 8 / 1e12
    assert f"predicted {tflops / prediction.step.seconds:.4g} model TFLOP/s" in prediction.sentences()[-1]
    said = prediction.beside_published(2.0)
    assert said is not None and said.startswith(
        f"measured {tflops / 2:.4g} model TFLOP/s of each H100 in bf16; published"
    )
    assert "published" not in prediction.facts()["whole_accelerator"], "a receipt has the sentence alone"
    assert Prediction.of(config, layout, None, "unknown GPU").beside_published(2.0) is None
    float8 = config.model_copy(update={"precision": config.precision.model_copy(update={"float8": "rowwise"})})
    said = Prediction.of(float8, layout, machine()).beside_published(2.0)
    assert said is not None and "in fp8; published best: 744 in fp8 (Megatron-Bridge" in said


def test_the_record_of_a_step_gets_it(config: Config) -> None:
    tracker = PredictionTracker(config, resolve_layout(config, 8, "cuda"), Rank(1, 1, 8), "cuda")
    record = {"step_time_s": 1.0, "data_wait_s": 0.0}
    tracker.on_start()
    assert tracker.measure(record) == {}
    tracker.lookup = MachineLookup(machine)
    tracker.on_start()
    assert 0 < tracker.measure(record)["model_flops_utilization"] < 1


def test_a_stage_of_other_micro_batches_alone_has_a_prediction_of_its_own(config: Config) -> None:
    """Records name the global batch, which stays the same: steps were held against those of other micro-batches."""
    staged = config.model_dump(mode="json")
    staged["training"]["stages"] = [{"from_steps": 2, "micro_batch_size": 1}]
    both = Config.model_validate(staged)
    sizes = [one.training.micro_batch_size for one in both.in_each_stage()]
    assert sizes[1] == 1 != sizes[0]
    layout = resolve_layout(both, 8, "cuda")
    tracker = PredictionTracker(both, layout, Rank(1, 1, 8), "cuda")
    tracker.lookup = MachineLookup(machine)
    tracker.on_start()
    known, training = [], both.training
    for step in range(1, 5):
        tokens = step * training.global_batch_size * training.sequence_length
        record = {"step": step, "tokens_seen": tokens, "step_time_s": 1.0, "data_wait_s": 0.0}
        record |= {"global_batch_size": training.global_batch_size, "sequence_length": training.sequence_length}
        record |= tracker.measure(record)
        assert tracker.prediction is not None and tracker.prediction.step is not None
        known.append(tracker.prediction.step.seconds)
    steps = [Prediction.of(one, layout, machine()).step for one in both.in_each_stage()]
    seconds = [step.seconds for step in steps if step is not None]
    assert known == [seconds[0]] * 2 + [seconds[1]] * 2 and seconds[0] != seconds[1]


def test_a_stage_of_training_has_a_prediction_of_its_own(config: Config) -> None:
    """Twice the sequences make twice the operations: an MFU of the former batch would be half of what it is. What the
    receipt measures are steps of one batch, and the memory is that of the largest from the start."""
    staged = config.model_dump(mode="json")
    staged["model"]["max_position_embeddings"] = 4096
    staged["training"]["stages"] = [{"from_steps": 10, "global_batch_size": 64, "sequence_length": 4096}]
    both = Config.model_validate(staged)
    layout = resolve_layout(both, 8, "cuda")
    tracker = PredictionTracker(both, layout, Rank(1, 1, 8), "cuda")
    tracker.lookup = MachineLookup(machine)
    tracker.on_start()
    known, tokens = [], 0
    for step in (*range(1, 21), 9):  # and back over the change, as after a rollback
        size, length = (32, 2048) if step <= 10 else (64, 4096)
        tokens = (min(step, 10) * 32 * 2048) + max(0, step - 10) * 64 * 4096
        record = {"step": step, "global_batch_size": size, "sequence_length": length, "tokens_seen": tokens}
        record |= {"step_time_s": 1.0, "data_wait_s": 0.0}
        record |= tracker.measure(record)
        assert tracker.prediction is not None and tracker.prediction.step is not None
        known.append((tracker.prediction.step.seconds, record["model_flops_utilization"]))
        if step == 20:
            assert tracker.facts()["measured"]["steps"] == 10 - 3, "of this stage, without its warm-up"
    alone = Prediction.of(both.in_each_stage()[0], layout, machine())
    larger = Prediction.of(both.in_each_stage()[1], layout, machine())
    assert alone.step is not None and larger.step is not None
    first, last = (alone.step.seconds, alone.step.model_flops), (larger.step.seconds, larger.step.model_flops)
    assert [seconds for seconds, _ in known] == [*[first[0]] * 10, *[last[0]] * 10, first[0]]
    assert known[-2][1] / known[0][1] == pytest.approx(last[1] / first[1], rel=1e-2)
    assert tracker.prediction.memory == larger.memory
