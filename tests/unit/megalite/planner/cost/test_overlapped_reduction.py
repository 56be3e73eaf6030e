"""Reduction beside backward against a bucket-by-bucket account of the same links, and limits that need no model."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.planner.published import gpt, nodes_of
from megalite.planner.cost.communication_time import Ring
from megalite.planner.cost.communication_volumes import data_moved
from megalite.planner.cost.overlapped_reduction import gathers_wait_s, reduction_ends_s
from megalite.planner.cost.stage_parameters import stages_of_job
from megalite.planner.cost.step_time import step_time
from megalite.planner.workload import BYTES, ParallelLayout, TrainingWorkload
from megalite.schedules.simulation import LastGradients, PipelineTimes, last_gradients
from megalite.schedules.tables import Schedule

JOB = TrainingWorkload(
    gpt(1024, 24, 16, 64),
    ParallelLayout(1, 2, 4, 3, pipeline_schedule="interleaved"),
    512,
    64,
    gradient_bucket_size=5_000_000,
)
NONE = Ring(1, 1.0, 0.0)  # of experts that no replica holds alone
LAST = (LastGradients(-1.0, -0.4), LastGradients(-2.1, -1.5), LastGradients(-3.2, -2.6))  # of a stage's three chunks


@pytest.mark.parametrize("bytes_per_s", [1e7, 3e8, 1e9, 1e10, 1e12])
def test_buckets_are_reduced_one_after_the_other(bytes_per_s: float) -> None:
    """Would catch a bucket that is reduced before its gradients, two on the links at once, and a chunk left out. The
    second stage holds no embedding."""
    shape, ring = stages_of_job(JOB)[1], Ring(4, bytes_per_s, 0.0)
    assert not shape.has_embedding
    numbers = shape.parameters / 3
    buckets = math.ceil(numbers / 5_000_000)  # no matrix has as many
    free_s = -10.0
    for begin_s, end_s in reversed(LAST):
        for number in range(buckets):
            ready_s = begin_s + (number + 1) / buckets * (end_s - begin_s)
            free_s = max(free_s, ready_s) + 3 / 4 * 4 * numbers / buckets / bytes_per_s
    assert reduction_ends_s(JOB, shape, (ring, NONE), LAST, 0.0) == pytest.approx(free_s, rel=1e-6)


def test_the_first_stage_reduces_its_embedding_last() -> None:
    model = gpt(1024, 24, 16, 51200)
    job = replace(JOB, model=model)
    shape, ring = stages_of_job(job)[0], Ring(4, 1e12, 0.0)
    embedding_s = 3 / 4 * 4 * 51200 * 1024 / 1e12
    assert reduction_ends_s(job, shape, (ring, NONE), LAST, 0.0) == pytest.approx(-0.4 + embedding_s, abs=1e-4)


def test_what_else_uses_the_links_comes_on_top() -> None:
    shape, ring = stages_of_job(JOB)[1], Ring(4, 1e7, 0.0)
    alone, shared = (reduction_ends_s(JOB, shape, (ring, NONE), LAST, others_s) for others_s in (0.0, 0.5))
    assert shared - alone == pytest.approx(3 * 0.5)


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "waits_for_tensors", "waits_for_messages"),
    [(2, 1, 4, True, False), (2, 2, 2, True, True), (2, 2, 4, True, False), (8, 2, 2, False, True)],
)
def test_reductions_beside_backward_wait_for_messages_on_the_same_links(
    tp: int, pp: int, dp: int, waits_for_tensors: bool, waits_for_messages: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inside a node, or between nodes. Reductions themselves and gathers take no time here."""
    monkeypatch.setattr("megalite.planner.cost.step_time.reduction_ends_s", lambda *arguments: arguments[-1])
    monkeypatch.setattr("megalite.planner.cost.step_time.gathers_wait_s", lambda *arguments: 0.0)
    job, cluster = TrainingWorkload(JOB.model, ParallelLayout(tp, pp, dp), 512, 64), nodes_of(tp * pp * dp, "A100-80GB")
    time = step_time(job, cluster)
    tensors_s = waits_for_tensors * sum(stage.tensor_links_s for stage in time.stages) / pp
    assert time.parts["replicas"] == pytest.approx(tensors_s + waits_for_messages * time.between_stages_s) != 0.0


@pytest.mark.parametrize("forward_s", [0.0, 0.03, 10.0])
def test_forward_waits_for_its_first_bucket_and_for_what_it_does_not_hide(forward_s: float) -> None:
    """JOB's buckets take 5 million numbers at most, and its first stage begins with the embedding, which is larger."""
    model, ring = gpt(1024, 24, 16, 51200), Ring(4, 1e9, 0.0)
    for stage, first in enumerate((51200 * 1024, 5_000_000)):
        shape = stages_of_job(replace(JOB, model=model))[stage]
        all_s, first_s = (3 / 4 * BYTES[JOB.dtype] * numbers / 1e9 for numbers in (shape.parameters, first))
        found_s = gathers_wait_s(replace(JOB, model=model), shape, (ring, NONE), forward_s)
        assert found_s == pytest.approx(max(first_s, all_s - forward_s)) and found_s >= first_s


def test_dealt_experts_are_reduced_among_their_own_copies() -> None:
    """Would catch experts that are reduced over all replicas, or left out. One bucket holds all of a chunk."""
    model = JOB.model.model_copy(update={"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512})
    job = replace(JOB, model=model, gradient_bucket_size=10**9)
    job = replace(job, layout=replace(job.layout, expert_parallel_size=2))
    shape, rings = stages_of_job(job)[1], (Ring(4, 1e9, 0.0), Ring(2, 2e9, 0.0))
    assert shape.experts == 12 * 4 * 3 * 512 * 1024
    each_s = 4 * ((shape.parameters - shape.experts) * 3 / 4 / 1e9 + shape.experts / 2 / 2e9) / 3
    assert reduction_ends_s(job, shape, rings, LAST, 0.0) == pytest.approx(LAST[0].end_s + each_s)


@pytest.mark.parametrize("stages", [2, 5])
def test_later_stages_of_1f1b_end_earlier(stages: int) -> None:
    """Stage s makes its last gradients s backward passes and messages before the first stage does."""
    times = PipelineTimes((1.0,) * stages, (2.0,) * stages, 0.25)
    found = last_gradients(Schedule.ONE_F_ONE_B, times, 40, 1)
    assert [last for (last,) in found] == [LastGradients(-2.25 * s - 2, -2.25 * s) for s in range(stages)]


def test_interleaved_chunks_have_their_gradients_a_round_earlier() -> None:
    times = PipelineTimes((3.0,) * 4, (6.0,) * 4)
    first_stage = last_gradients(Schedule.INTERLEAVED, times, 16, 3)[0]
    assert [last.end_s for last in first_stage] == pytest.approx([0.0, -4 * 2.0, -8 * 2.0])


def test_nothing_hides_without_gradients_to_make() -> None:
    """All parts are at most those of a reduction behind backward; with one huge bucket they are equal."""
    layout = ParallelLayout(1, 1, 16)
    job = TrainingWorkload(gpt(2048, 24, 16, 64), layout, 512, 64, gradient_bucket_size=10**12)
    cluster = nodes_of(16, "A100-80GB")
    whole, cut = step_time(job, cluster), step_time(replace(job, gradient_bucket_size=20_000_000), cluster)
    assert whole.hidden_s == pytest.approx(0.0, abs=1e-9)
    assert cut.hidden_s > 0
    assert cut.parts["replicas"] + cut.hidden_s == pytest.approx(whole.parts["replicas"], rel=0.01)
    assert data_moved(job, stages_of_job(job)[0]).reduce_scatter == 4 * stages_of_job(job)[0].parameters
