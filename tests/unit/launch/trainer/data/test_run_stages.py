"""Stages of training on a resume: what is done stays as it was, wherever it was done with other batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launch.trainer.data.run_stages import check_past_batches
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config

LENGTH, DONE = 32, 20
LATER: dict[str, Any] = {"from_tokens": 4000, "global_batch_size": 16}


def checked(tiny: dict[str, Any], then: list[Any], now: list[Any], tokens_seen: int, step: int = DONE) -> None:
    """Resumes a run that had the stages `then` with the stages `now`."""
    tiny["training"] |= {"global_batch_size": 8, "sequence_length": LENGTH, "stages": now}
    saved = {"training": tiny["training"] | {"stages": then}}
    state = {"step": step, "tokens_seen": tokens_seen}
    manifest = Manifest(step=step, config=saved, tokenizer=None, state=state, tensors={}, files={})
    check_past_batches(manifest, Config.model_validate(tiny), Path("step_20"), "stop")


def test_a_run_whose_batch_was_changed_by_hand_takes_stages_of_its_future(tiny: dict[str, Any]) -> None:
    """Ten steps of 4 sequences, then ten of 8: a walk with 8 from the start finds token 4,000 at step 16, which is
    done, where the run is at token 3,840."""
    seen = (10 * 4 + 10 * 8) * LENGTH
    checked(tiny, [], [LATER], seen)
    further = {"from_tokens": 9000, "global_batch_size": 32}
    later = seen + 8 * LENGTH + 4 * 16 * LENGTH
    checked(tiny, [LATER], [LATER, further], later, DONE + 5)
    with pytest.raises(CheckpointError, match=r"with 8 sequences of 32 tokens, then 16 .*\(from_tokens 4000\), and"):
        checked(tiny, [LATER], [further], later, DONE + 5)


def test_a_stage_of_the_past_is_refused_where_a_walk_finds_it_in_the_future(tiny: dict[str, Any]) -> None:
    """Ten steps of 16 sequences, then ten of 8: the run is at token 7,680, and a walk with 8 at token 5,120."""
    seen, stage = (10 * 16 + 10 * 8) * LENGTH, LATER | {"from_tokens": 6000}
    with pytest.raises(CheckpointError, match=r"20 steps \(7,680 tokens\) with 8 sequences of 32 tokens, and"):
        checked(tiny, [], [stage], seen)
    checked(tiny, [], [LATER | {"from_tokens": seen}], seen)


def test_places_may_be_written_in_another_way_where_all_steps_stay_the_same(tiny: dict[str, Any]) -> None:
    seen = (16 * 8 + 4 * 16) * LENGTH
    checked(tiny, [LATER], [{"from_steps": 16, "global_batch_size": 16}], seen)
    with pytest.raises(CheckpointError, match="has done step 16 "):
        checked(tiny, [LATER], [{"from_steps": 15, "global_batch_size": 16}], seen)
