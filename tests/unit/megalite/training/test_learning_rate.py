"""The learning rate by tokens and scaled with the batch: closed forms, and the same from any position of the run."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalite.config import Config
from megalite.training.learning_rate import rate_factors, rate_lines

NAMES = st.sampled_from(["cosine", "linear", "wsd", "constant"])
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
STAGES = [
    {"from_tokens": 200, "global_batch_size": 8},
    {"from_steps": 6, "global_batch_size": 2, "sequence_length": 64},
]
# Tokens of a step by 4 x 16 = 64 up to token 256, then 8 x 16 = 128 up to step 6, then 2 x 64 = 128.


def config(steps: int = 10, stages: Any = (), optimizer: Any = None, length: Any = None, **schedule: Any) -> Config:
    return Config.model_validate(
        {
            "run_dir": "run",
            "model": SIZES | {"max_position_embeddings": 64},
            "data": {"path": "text"},
            "optimizer": optimizer or {},
            "schedule": schedule,
            "training": {
                **{"global_batch_size": 4, "micro_batch_size": 1, "sequence_length": 16, "stages": list(stages)},
                **(length or {"steps": steps}),
            },
        }
    )


def curve(of: Config, first: int = 0) -> list[float]:
    factor = rate_factors(of, of.total_steps)
    return [factor(step) for step in range(first, of.total_steps)]


@given(name=NAMES, steps=st.integers(1, 60), warmup=st.integers(0, 30), decay=st.integers(1, 30))
def test_with_one_batch_tokens_samples_epochs_and_steps_are_equal_to_the_bit(
    name: str, steps: int, warmup: int, decay: int
) -> None:
    """4 sequences of 16 tokens a step: a step too early or late at either end of a phase would differ."""
    by_steps = curve(config(steps, name=name, warmup_steps=warmup, decay_steps=decay))
    by_tokens = config(steps, name=name, warmup_tokens=64 * warmup, decay_tokens=64 * decay)
    by_samples = config(steps, name=name, warmup_samples=4 * warmup, decay_tokens=64 * decay)
    assert curve(by_tokens) == curve(by_samples) == by_steps
    if warmup:
        by_epochs = config(steps, name=name, warmup_epochs=warmup / 32, decay_tokens=64 * decay)
        assert by_epochs.phases is None, "the data is not open"
        assert curve(by_epochs.counted_from(0, 0, samples_per_epoch=128)) == by_steps


def test_by_tokens_a_step_goes_as_far_as_its_batch() -> None:
    """Places of the steps: 0, 64, 128, 192, 256, 384, 512, 640, ..."""
    warm = curve(config(8, STAGES, name="constant", warmup_tokens=512))
    assert warm == [0.125, 0.25, 0.375, 0.5, 0.75, 1, 1, 1]
    line = curve(config(8, STAGES, name="linear", warmup_tokens=0, min_learning_rate_ratio=0.0))
    assert line == pytest.approx([1 - place / 640 for place in (0, 64, 128, 192, 256, 384, 512, 640)])
    turned = curve(config(8, STAGES, name="cosine", warmup_samples=1, min_learning_rate_ratio=0.2))  # of 64 tokens
    places = [math.pi * max(0, place - 64) / 576 for place in (0, 64, 128, 192, 256, 384, 512, 640)]
    assert turned == pytest.approx([0.2 + 0.4 * (1 + math.cos(angle)) for angle in places])


def test_the_rate_follows_the_tokens_of_a_batch() -> None:
    """Twice the sequences, or the same tokens in fewer, longer ones, are the same batch to the noise of a mean over
    tokens."""
    options = {"reference_batch_size": 8}
    assert curve(config(8, STAGES, {"scale_with_batch": "linear", **options}, name="constant")) == [0.5] * 4 + [1.0] * 4
    root = curve(config(8, STAGES, {"scale_with_batch": "sqrt", **options}, name="constant"))
    assert root == pytest.approx([math.sqrt(0.5)] * 4 + [1.0] * 4)
    both = curve(config(8, STAGES, {"scale_with_batch": "sqrt", **options}, name="linear", warmup_tokens=256))
    alone = curve(config(8, STAGES, name="linear", warmup_tokens=256))
    assert both == pytest.approx([a * b for a, b in zip(alone, root, strict=True)])


@given(
    **{"name": NAMES, "position": st.integers(0, 12), "warmup": st.integers(0, 1000), "decay": st.integers(1, 1000)},
    rule=st.sampled_from(["none", "linear", "sqrt"]),
    length=st.sampled_from([{"steps": 13}, {"tokens": 1300}]),
)
def test_a_resume_has_the_rates_of_the_whole_run(
    name: str, position: int, warmup: int, decay: int, rule: str, length: dict[str, int]
) -> None:
    """To the bit, from before, between, at and behind changes of the batch; what is counted anew must not shift it."""
    optimizer = {"scale_with_batch": rule, "reference_batch_size": 3}
    whole = config(0, STAGES, optimizer, length, name=name, warmup_tokens=warmup, decay_tokens=decay)
    position = min(position, whole.total_steps)
    resumed = whole.counted_from(position, whole.batches.tokens_after(position))
    assert curve(resumed, position) == curve(whole)[position:]


def test_the_turns_of_a_rate_are_told() -> None:
    optimizer = {"learning_rate": 0.01, "scale_with_batch": "linear", "reference_batch_size": 4}
    shown = config(9, STAGES, optimizer, name="wsd", warmup_tokens=128, decay_tokens=128, min_learning_rate_ratio=0.5)
    assert rate_lines(shown) == [
        "step 1: 5.000e-03, the first",
        "step 2: 1.000e-02, the warm-up is over",
        "step 5: 2.000e-02, the stage from_tokens 200 begins, of 128 tokens a step",
        "step 7: 2.000e-02, the stage from_steps 6 begins, of 128 tokens a step",
        "step 8: 2.000e-02, the decay begins behind it",
        "step 9: 1.000e-02, the last",
    ]
    assert "--dry-run" in rate_lines(config(warmup_epochs=1.0))[0]
