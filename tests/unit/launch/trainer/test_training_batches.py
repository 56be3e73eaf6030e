"""The batches of a run from a position on: as many as the loop takes, wherever a rollback leads."""

from __future__ import annotations

from typing import Any

import pytest

from launch.trainer.data.opening import open_data, training_batches
from launch.trainer.data.run_mix import DataPosition
from megalite.config import Config
from megalite.config.layout import resolve_layout

LENGTH = 32


@pytest.mark.parametrize("stages", [[], [{"from_steps": 12, "global_batch_size": 4}]])
def test_a_rollback_before_a_session_with_a_larger_batch_has_batches_to_the_end(
    tiny: dict[str, Any], stages: list[Any]
) -> None:
    """Ten steps of 4 sequences, then a session of 8 that goes back to step 6. Counted from there with 8, the run would
    end two steps before the loop does, which would ask for a batch that never comes."""
    del tiny["training"]["steps"]
    tiny["training"] |= {"global_batch_size": 8, "tokens": 80 * LENGTH, "sequence_length": LENGTH, "stages": stages}
    config = Config.model_validate(tiny)
    session = config.counted_from(10, 40 * LENGTH)
    layout = resolve_layout(session, 1, "cpu")
    batches = training_batches(open_data(session), session, layout, 0, DataPosition(6, 24 * LENGTH, 40))
    sizes = [sum(len(one.tokens) for one in step) for step in batches]
    assert len(sizes) == session.total_steps - 6
    assert session.total_steps == (15 if not stages else 18)
    assert sizes == [8] * 9 if not stages else [8] * 6 + [4] * 6
