"""Recomputation that the planner chooses stage by stage: as little as fits."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.published import nodes_of
from megalite.config import Config, ModelConfig, resolve_layout
from megalite.planner.cost.stage_parameters import recompute_of_blocks, stages_of
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import Cluster
from megalite.planner.layout_choice import RECOMPUTE_MODES, ROOMY
from megalite.planner.search import RECOMPUTE, fitted, needs
from megalite.planner.workload import ParallelLayout, Recompute, TrainingWorkload
from megalite.schedules.in_flight import most_in_flight

FREE = frozenset({RECOMPUTE})
# so few tokens that embedding and head, on the ends, weigh next to nothing
SIZES = {
    "vocab_size": 8,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
}
MODEL = ModelConfig.model_validate(SIZES)
SCHEDULES = (("1f1b", 1), ("interleaved", 2), ("zero-bubble", 1), ("zb-v", 2), ("dualpipev", 2))


def job_of(schedule: Any, chunks: int, stages: int = 4, vocab: int = 8) -> TrainingWorkload:
    layout = ParallelLayout(
        pipeline_parallel_size=stages, pipeline_schedule=schedule, pipeline_chunks=chunks, micro_batch_size=2
    )
    return TrainingWorkload(MODEL.model_copy(update={"vocab_size": vocab}), layout, 2048, 64)


def gpus(stages: int, memory_bytes: float) -> Cluster:
    cluster = nodes_of(stages, "A100-80GB")
    return cluster.model_copy(
        update={"accelerator": cluster.accelerator.model_copy(update={"memory_gib": memory_bytes / 2**30})}
    )


def modes_of(job: TrainingWorkload) -> tuple[Recompute, ...]:
    modes = job.layout.recompute
    return (modes,) * job.layout.pipeline_parallel_size if isinstance(modes, str) else modes


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SCHEDULES),
    st.sampled_from([1, 2, 4, 8]),
    st.sampled_from([8, 100_000]),
    st.floats(0.95, 1.12),
    st.floats(0.0, 1.0),
)
def test_each_stage_recomputes_as_little_as_fits(
    schedule: tuple[Any, int], stages: int, vocab: int, factor: float, between: float
) -> None:
    """Against every mode of every stage, each taken alone."""
    job = job_of(*(schedule if stages > 1 else SCHEDULES[0]), stages, vocab)
    alone = {mode: needs(job.with_recompute(mode), gpus(stages, 1)) for mode in RECOMPUTE_MODES}
    totals = [[alone[mode][stage].total for mode in RECOMPUTE_MODES] for stage in range(stages)]
    least, most = min(map(min, totals)), max(map(max, totals))
    cluster = gpus(stages, factor * (least + between * (most - least)))
    limit = ROOMY * cluster.memory_bytes  # with memory to spare
    chosen, memory = fitted(job, cluster, FREE)
    assert memory == needs(chosen, cluster), "as predicted for the layout that is chosen"
    for mode, one, of_modes in zip(modes_of(chosen), memory, totals, strict=True):
        place = RECOMPUTE_MODES.index(mode)
        assert one.total == of_modes[place]
        if min(of_modes) <= limit:
            assert one.total <= limit and all(faster > limit for faster in of_modes[:place])
        else:
            assert one.total == min(of_modes), "nearest to fitting"


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_what_holds_more_recomputes_no_less(schedule: Any, chunks: int) -> None:
    """Of stages with equally many equal blocks the one that holds more micro-batches, which under 1F1B is the earlier.
    The ends pass fewer messages, so they are left out."""
    job, stages = job_of(schedule, chunks, 8), 8
    held = [most_in_flight(job.layout.schedule, stages, stage, job.micro_batches, chunks) for stage in range(stages)]
    if schedule == "1f1b":
        assert [moments[0].total for moments in held] == list(range(8, 0, -1)), "micro-batches, stage by stage"
    most, few = (max(stage.total for stage in needs(job.with_recompute(mode), gpus(8, 1))) for mode in ("none", "full"))
    seen = set()
    for tenth in range(-1, 12):
        memory_bytes = (few + tenth / 10 * (most - few)) / ROOMY
        modes = modes_of(fitted(job, gpus(stages, memory_bytes), FREE)[0])
        seen.add(modes)
        for one, other in itertools.permutations(range(1, stages - 1), 2):
            holds_more = all(
                any(all(map(int.__ge__, (*a.whole, *a.postponed), (*b.whole, *b.postponed))) for a in held[one])
                for b in held[other]
            )
            if holds_more:
                assert RECOMPUTE_MODES.index(modes[one]) >= RECOMPUTE_MODES.index(modes[other]), (tenth, modes)
    assert ("none",) * stages in seen
    if schedule == "1f1b":
        assert any(len(set(modes)) > 1 for modes in seen), "some stages recompute while others do not"


def test_a_stage_is_timed_with_its_own_recomputation() -> None:
    cluster, job = gpus(4, 80 * 2**30), job_of("1f1b", 1)
    modes: tuple[Recompute, ...] = ("full", "none", "selective", "full")
    mixed = step_time(job.with_recompute(modes), cluster)
    alone = {mode: step_time(job.with_recompute(mode), cluster) for mode in RECOMPUTE_MODES}
    assert mixed.stages == tuple(alone[mode].stages[stage] for stage, mode in enumerate(modes))
    assert alone["none"].seconds < mixed.seconds < alone["full"].seconds


@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_blocks_do_what_their_stage_does(schedule: str, chunks: int) -> None:
    """Also where a stage holds pieces from both ends of the model."""
    modes = ["full", "none", "selective"]
    config = Config.model_validate(
        {
            "run_dir": "x",
            "model": SIZES | {"num_hidden_layers": 7},
            "data": {"path": "x"},
            "parallel": {"pipeline_parallel_size": 3, "pipeline_schedule": schedule},
            "training": {"global_batch_size": 12, "micro_batch_size": 1, "sequence_length": 8, "steps": 1},
            "recompute": {"mode": modes},
        }
    )
    layout = resolve_layout(config, 3, "cpu")
    assert layout.pipeline_chunks == chunks
    found = recompute_of_blocks(config, layout)
    for shape, mode in zip(stages_of(config, layout), modes, strict=True):
        assert {found[layer] for layer in shape.layers} == {mode}
    alike = config.with_resolved({RECOMPUTE: "selective"})
    assert recompute_of_blocks(alike, layout) == ("selective",) * 7


def test_a_layout_names_the_stages_that_recompute() -> None:
    layout = ParallelLayout(1, 4, recompute=("full", "full", "none", "selective"))
    assert str(layout) == "tp 1 pp 4 dp 1 recompute (stages 0-1 full, stage 2 none, stage 3 selective) micro-batch 1"
    assert str(replace(layout, recompute="full")) == "tp 1 pp 4 dp 1 full recompute micro-batch 1"
