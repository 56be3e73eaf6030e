"""The file of a rank's step: what is written comes back, and what is no timeline is refused in one sentence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megalite.checkpoint.safe_files import UnsafeFile
from megalite.monitor.steps.timeline import (
    Owner,
    RankTimeline,
    read_timeline,
    remove_steps,
    step_folder,
    steps_of,
    write_timeline,
)
from megalite.tracing.activity import Note, Operation, Phase
from megalite.tracing.tape import Collective
from tests.helpers.kept_timelines import read_step

OWNER = Owner(
    rank=3,
    stage=1,
    data=0,
    tensor=1,
    host="node [b]1[/b]\n",
    boot="1f",
    tensor_parallel_size=2,
    pipeline_parallel_size=2,
    data_parallel_size=1,
    schedule="zb-v",
    chunks=2,
    micro_batches=4,
)
TIMELINE = RankTimeline(
    OWNER,
    step=100,
    ended=12.5,
    unix=1.7e9,
    notes=[
        Note(1 / 3, 7, 100, Phase.STEP, Operation.FORWARD, 2, (2, 3), 1),
        Note(2.5, 8, 100, Phase.LOGGING, Operation.MEET, None, (0, 1, 2, 3), None),
    ],
    collectives=[Collective(0.4, 0.1, "tensor", "all_reduce", 1 << 40)],
    is_cut=True,
    meetings={98: 0.1, 99: 0.2},
)


def test_a_timeline_comes_back_as_it_was(tmp_path: Path) -> None:
    path = write_timeline(tmp_path, TIMELINE)
    assert path == tmp_path / "timeline/step_00000100/rank_0003.jsonl"
    assert read_timeline(path) == TIMELINE
    write_timeline(tmp_path, replace(TIMELINE, step=9, owner=OWNER.model_copy(update={"rank": 10_000})))
    assert steps_of(tmp_path) == [9, 100]
    assert list(read_step(tmp_path, 9)) == [10_000]
    assert [span.seconds for span in TIMELINE.spans()] == pytest.approx([2.5 - 1 / 3, 10.0])


def test_there_may_be_no_timelines(tmp_path: Path) -> None:
    (tmp_path / "timeline/step_x").mkdir(parents=True)
    (tmp_path / "timeline/step_5").touch()
    assert steps_of(tmp_path) == [] and read_step(tmp_path, 1) == {}


@pytest.mark.parametrize(
    ("line", "replacement", "sentence"),
    [
        (0, b"", "is no timeline"),
        (0, b'{"version": 2}', "is no timeline"),
        (1, b'["note", 1.0, 7, "step", "juggle", 1, null, []]', "is no timeline"),
        (1, b'["note", NaN, 7, "step", "forward", 1, null, []]', "is no timeline"),
        (2, b'["note", 1.0, 7, "st', "is no timeline"),
        (3, b'["collective", 1.0, 1.0, "tensor", "all_reduce"]', "is no timeline"),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, line: int, replacement: bytes, sentence: str) -> None:
    path = write_timeline(tmp_path, TIMELINE)
    lines = path.read_bytes().splitlines()
    lines[line] = replacement
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=sentence) as caught:
        read_timeline(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_file_without_records_is_named(tmp_path: Path) -> None:
    path = write_timeline(tmp_path, replace(TIMELINE, notes=[], collectives=[]))
    for content, sentence in ((path.read_bytes(), "holds no record"), (b"", "it is empty")):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=sentence):
            read_step(tmp_path, 100)


def test_files_of_a_step_are_found_by_its_number(tmp_path: Path) -> None:
    assert step_folder(tmp_path, 123_456_789).name == "step_123456789"


def test_timelines_behind_a_link_are_not_removed(tmp_path: Path) -> None:
    """Somebody else's folder would lose all that is called like a step."""
    (tmp_path / "run").mkdir()
    write_timeline(tmp_path, TIMELINE)
    (tmp_path / "run/timeline").symlink_to(tmp_path / "timeline")
    with pytest.raises(UnsafeFile, match="is a symbolic link, where a run has a folder"):
        remove_steps(tmp_path / "run", [100])
    assert steps_of(tmp_path) == [100]
    remove_steps(tmp_path, [100])
    remove_steps(tmp_path / "nothing", [100])
    assert steps_of(tmp_path) == []
