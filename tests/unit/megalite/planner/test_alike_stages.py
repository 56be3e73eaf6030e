"""Stages that are alike are judged once: the figures are those of judging each by itself, to the last digit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.published import nodes_of
from megalite.config import ModelConfig
from megalite.planner.cost import stage_parameters
from megalite.planner.cost.memory import CPU, CUDA, memory_of
from megalite.planner.cost.stage_parameters import stage_shapes
from megalite.planner.cost.step_time import step_time
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from megalite.schedules import simulation
from megalite.schedules.in_flight import moments_of, most_in_flight
from megalite.schedules.simulation import PipelineTimes, last_gradients
from megalite.schedules.tables import Schedule

DENSE: dict[str, Any] = {
    "vocab_size": 50_257,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 19,
    "num_attention_heads": 16,
}
MODELS = {
    "uneven": DENSE,
    "tied": DENSE | {"tie_word_embeddings": True, "num_hidden_layers": 24},
    "experts here and there": DENSE
    | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512, "mlp_only_layers": [0, 1, 5, 9]},
}
MIXED = ("full", "selective", "none", "none", "none", "none")
JOBS: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "stage by stage": {"recompute": MIXED},
    "interleaved": {"pipeline_schedule": "interleaved", "pipeline_chunks": 3},
    "zero-bubble": {"pipeline_schedule": "zero-bubble", "recompute": "selective", "zero_stage": 2},
    "zb-v": {"pipeline_schedule": "zb-v", "pipeline_chunks": 2},
    "dualpipev": {"pipeline_schedule": "dualpipev", "pipeline_chunks": 2},
    "zero-3": {"zero_stage": 3, "tensor_parallel_size": 2, "sequence_parallel": True},
}


@pytest.mark.parametrize("layout", JOBS.values(), ids=JOBS)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_alike_stages_share_their_figures(
    model: dict[str, Any], layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kind that holds stages which differ would give one of them the figures of another."""
    whole = ParallelLayout(**{"pipeline_parallel_size": 6, "data_parallel_size": 4, "micro_batch_size": 2} | layout)
    plain = TrainingWorkload(ModelConfig.model_validate(model), whole, 1024, 96)
    cluster = nodes_of(whole.world_size, "A100-80GB")
    jobs = [plain, replace(plain, offloads_activations=True, offloads_optimizer=True, optimizer="muon")]

    def figures() -> list[Any]:
        return [(memory_of(job, CUDA), memory_of(job, CPU), step_time(job, cluster)) for job in jobs]

    shared = figures()
    kinds = {shape.like for shape in stage_parameters.stages_of_job(plain)}

    def each_by_itself(*arguments: Any) -> Any:
        return tuple(replace(shape, like=stage) for stage, shape in enumerate(stage_shapes(*arguments)))

    monkeypatch.setattr(stage_parameters, "stage_shapes", each_by_itself)
    assert [shape.like for shape in stage_parameters.stages_of_job(plain)] == list(range(6))
    assert figures() == shared
    assert 2 <= len(kinds) < 6 or "mlp_only_layers" in model


def test_stages_of_a_deep_pipeline_are_few_kinds() -> None:
    """80 equal blocks on 40 stages: with the embedding, with the head, and those between, of two lengths at most."""
    model = ModelConfig.model_validate(DENSE | {"num_hidden_layers": 80})
    assert len({shape.like for shape in stage_shapes(model, 1, 40)}) <= 4


@given(st.integers(1, 9), st.integers(1, 40), st.integers(0, 1000), st.sampled_from([0, 1, 40, 900, 4000]))
def test_closed_forms_of_1f1b_are_those_of_its_table(stages: int, count: int, forward: int, travel: int) -> None:
    """Messages, which may take longer than passes, are what a closed form most easily gets wrong."""
    schedule, times = Schedule.ONE_F_ONE_B, PipelineTimes((forward,) * stages, (1000 - forward,) * stages, travel)
    assert times.are_equal
    steps = simulation._steps_of(schedule, stages, count, 1)
    starts_s, ends_s = simulation._run_times(steps, times, 1)
    assert simulation._makespan_s(schedule, times, count, 1) == max(ends_s)
    begins_s = {stage: start_s - max(ends_s) for stage, start_s in zip(steps.stage, starts_s, strict=True)}
    assert {stage: one.start_s for stage, (one,) in enumerate(last_gradients(schedule, times, count, 1))} == begins_s
    for stage in range(stages):
        assert most_in_flight(schedule, stages, stage, count, 1) == moments_of(schedule, stages, stage, count, 1)
