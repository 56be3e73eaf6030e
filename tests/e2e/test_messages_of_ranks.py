"""What ranks of a whole run send each other: no pickle of ours, DeepSpeed's or torch's, and none of a stranger's."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from launch.errors import FAILED_CODE
from tests.helpers.warm_runs import session, train
from tests.unit.megalite.distributed.test_agreement import Payload

pytestmark = pytest.mark.slow

LAYOUTS: list[dict[str, int]] = [
    {"tensor_parallel_size": 2},
    {"pipeline_parallel_size": 2},
    {"zero_stage": 2},
    {"zero_stage": 3},
]


def note_pickles(folder: Path, rank: int) -> None:
    """Writes down each object that torch pickles or unpickles for a collective in this rank."""
    from torch.distributed import distributed_c10d

    def noted(name: str) -> None:
        whole = getattr(distributed_c10d, name)

        def note(*arguments: Any, **named: Any) -> Any:
            with (folder / "pickles").open("a") as file:
                file.write(f"{name} on rank {rank}\n")
            return whole(*arguments, **named)

        setattr(distributed_c10d, name, note)

    for name in ("_object_to_tensor", "_tensor_to_object"):
        noted(name)


def test_a_run_on_any_layout_pickles_nothing_between_ranks(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Starts, saves, evaluates, compares weights and resumes. The list of object collectives on these paths is empty:
    a version of DeepSpeed or torch that begins to use one shows here."""
    for sessions, layout in enumerate(LAYOUTS, start=1):
        more = {"steps": 2 * sessions, "self_check_every": 1, "evaluation": {"interval": 1, "samples": 4}}
        tiny["training"] |= more
        train(tmp_path, tiny | {"parallel": layout, "checkpoint": {"interval": 1}}, fault=(note_pickles, ()))
    assert not (tmp_path / "pickles").exists(), (tmp_path / "pickles").read_text()


def send_a_pickle(folder: Path, rank: int, marker: Path) -> None:
    """Makes rank 1 a stranger, who sends a pickle at the first meeting of all ranks."""
    if rank != 1:
        return
    from megalite.distributed import agreement

    agreement._encoded = lambda value, adapter: pickle.dumps(Payload(marker))


def test_a_stranger_among_the_ranks_ends_the_run_in_one_sentence(tiny: dict[str, Any], tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    with session(tmp_path, tiny, fault=(send_a_pickle, (marker,))) as running:
        running.wait_until(lambda: running.ranks[0].exitcode is not None or "error" in running.output(0))
        assert running.end(30.0)[0] == FAILED_CODE
        said = [line for line in running.output(0).splitlines() if "error" in line]
    assert len(said) == 1 and said[0].startswith("megalite: error: rank 1 was to send RankDevice"), said
    assert "Traceback" not in running.output(0) and not marker.exists()
