"""The batch of each step, held against a walk over all steps; and what is refused about stages, in one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config, ConfigError, load_config
from megalite.config.batch_stages import BatchSchedule, shapes_of
from megalite.config.sections import TrainingConfig


@st.composite
def staged(draw: st.DrawFn) -> TrainingConfig:
    """A batch with up to four stages that begin one after the other, some of them in the same step."""
    stages: list[dict[str, int]] = []
    step = token = 0
    for _ in range(draw(st.integers(0, 4))):
        change = {
            name: draw(values)
            for name, values in (
                ("global_batch_size", st.sampled_from([4, 8, 12])),
                ("sequence_length", st.sampled_from([8, 16, 32])),
            )
            if draw(st.booleans())
        }
        if draw(st.booleans()):
            step += draw(st.integers(0, 6))
            stages.append({"from_steps": step, **change})
        else:
            token += draw(st.integers(0, 1500))
            stages.append({"from_tokens": token, **change})
    values = {"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 8, "steps": 1, "stages": stages}
    return TrainingConfig.model_validate(values)


def walked(training: TrainingConfig, steps: int) -> list[tuple[int, int, int]]:
    """Tokens before each step, its sequences and their length: the last stage that has begun, each after those before
    it."""
    shapes, found, tokens, current = shapes_of(training), [], 0, 0
    for step in range(steps):
        while current < len(training.stages):
            stage = training.stages[current]
            begins = stage.from_steps <= step if stage.from_steps is not None else (stage.from_tokens or 0) <= tokens
            if not begins:
                break
            current += 1
        shape = shapes[current]
        found.append((tokens, shape.global_batch_size, shape.sequence_length))
        tokens += shape.global_batch_size * shape.sequence_length
    return found


@given(staged(), st.integers(0, 30))
def test_each_step_is_that_of_a_walk_from_the_start_and_from_any_position(
    training: TrainingConfig, position: int
) -> None:
    steps = 40
    expected = walked(training, steps)
    schedules = BatchSchedule(training), BatchSchedule(training, position, expected[position][0])
    for schedule in schedules:
        for step in range(schedule.step, steps):
            shape = schedule.shape_after(step)
            assert (schedule.tokens_after(step), shape.global_batch_size, shape.sequence_length) == expected[step]
            tokens = expected[step][0]
            assert schedule.steps_until(tokens) == step and schedule.steps_at(tokens) == step
            assert schedule.steps_until(tokens + 1) == step + 1 and schedule.steps_at(tokens + 1) == step
    longest = max(shape.sequence_length for shape in shapes_of(training))
    assert all(shape.parts * shape.sequence_length == longest for shape in shapes_of(training))


def config_of(minimal: Path, stages: Any, *overrides: str) -> Config:
    return load_config(minimal, [f"training.stages={stages}", *overrides])


def test_a_length_in_tokens_counts_the_tokens_of_each_stage(minimal: Path) -> None:
    """8 x 32 tokens a step, from step 4 on 16 x 32: 4 * 256 + 3 * 512 = 2,560."""
    tokens = ("training.steps=null", "training.tokens=2560")
    config = config_of(minimal, "[{from_steps: 4, global_batch_size: 16}]", *tokens)
    assert config.total_steps == 7
    assert config.counted_from(5, 1536).total_steps == 7 and config.counted_from(9, 2560).total_steps == 9
    assert [one.training.global_batch_size for one in config.in_each_stage()] == [8, 16]
    assert Config.model_validate(config.model_dump(mode="json")) == config, "as a checkpoint keeps it"


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("[{global_batch_size: 16}]", "stage 0 of training.stages has neither of from_tokens and from_steps: give one"),
        ("[{from_steps: 1, from_tokens: 9, global_batch_size: 16}]", "stage 0 of training.stages has both of"),
        ("[{from_steps: 3}]", "stage 0 of training.stages changes nothing: give it a global_batch_size, a"),
        (
            "[{from_steps: 3, global_batch_size: 16}, {from_tokens: 700, global_batch_size: 8}]",
            "stage 1 of training.stages (from_tokens 700) begins at token 700, not after stage 0 (from_s",
        ),
        (
            "[{from_steps: 3, global_batch_size: 16}, {from_steps: 3, global_batch_size: 8}]",
            "stage 1 of training.stages (from_steps 3) begins at token 768, not after",
        ),
        (
            "[{from_steps: 3, global_batch_size: 9}]",
            "in stage 0 of training.stages: training.global_batch_size 9 is not a multiple of "
            "training.micro_batch_size 2: use a global_batch_size of 8 or 10",
        ),
        (
            "[{from_steps: 3, micro_batch_size: 3}]",
            "in stage 0 of training.stages: training.global_batch_size 8 is not a multiple of "
            "training.micro_batch_size 3: use a global_batch_size of 6 or 9",
        ),
        (
            "[{from_steps: 3, sequence_length: 8192}]",
            "in stage 0 of training.stages: training.sequence_length 8192 is longer than model.max_position_embeddings",
        ),
        (
            "[{from_steps: 3, sequence_length: 80}]",
            "training.sequence_length 32 does not divide 80, the longest of the run, whose samples it is cut from: use "
            "40",
        ),
        (
            "[{from_steps: 3, sequence_length: 128, global_batch_size: 4}, {from_steps: 5, sequence_length: 64, "
            "global_batch_size: 6}, {from_steps: 6, sequence_length: 16}]",
            "training.global_batch_size 6 in stage 2 of training.stages is not a multiple of 8, the sequences of 16 in "
            "a sample of 128, the longest of the run: use 8",
        ),
        ("[{from_steps: 3, batch_size: 16}]", "training.stages.0.batch_size"),
        ("[{from_steps: 3, global_batch_size: 0}]", "training.stages.0.global_batch_size"),
    ],
)
def test_stages_that_cannot_be_followed_are_refused(minimal: Path, stages: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config_of(minimal, stages)
    assert said in str(refused.value), refused.value


def test_every_stage_has_the_micro_batches_that_its_schedule_needs(minimal: Path) -> None:
    pipeline = ("parallel.pipeline_parallel_size=2", "parallel.data_parallel_size=1")
    options = (*pipeline, "parallel.pipeline_schedule=dualpipev")
    config_of(minimal, "[{from_steps: 3, global_batch_size: 16}]", *options)
    with pytest.raises(ConfigError, match=r"in stage 0 of training.stages: parallel.pipeline_schedule dualpipev needs"):
        config_of(minimal, "[{from_steps: 3, global_batch_size: 4}]", *options)


def test_a_micro_batch_of_a_stage_is_not_chosen_and_does_not_concern_evaluations(minimal: Path) -> None:
    evaluated = ("training.evaluation.interval=5", "training.evaluation.samples=6")
    shapes = shapes_of(config_of(minimal, "[{from_steps: 3, micro_batch_size: 8}]", *evaluated).training)
    assert [shape.micro_batch_size for shape in shapes] == [2, 8]
    with pytest.raises(ConfigError, match=r"stage 0 of training.stages states a micro_batch_size, and training.micro"):
        config_of(minimal, "[{from_steps: 3, micro_batch_size: 1}]", "training.micro_batch_size=auto")


def test_whole_documents_have_one_length(minimal: Path) -> None:
    packed = ("data.packing=best_fit", "data.document_mask=true")
    config_of(minimal, "[{from_steps: 3, global_batch_size: 16}]", *packed)
    with pytest.raises(ConfigError, match="best_fit packs whole documents for one length"):
        config_of(minimal, "[{from_steps: 3, sequence_length: 64}]", *packed)
