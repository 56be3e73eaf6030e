"""The rounds in which ranks wait for copies of data: nothing that ends between two of them is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from data_pipeline.errors import DataError
from launch.trainer.data import host_copies
from launch.trainer.data.remote_data import Work
from megalite.config import Config
from megalite.distributed import agreement

PROBLEM = "text.bin is not the file that was written"


def test_a_copy_that_fails_while_ranks_meet_is_told_of(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its problem came after this rank had said that it still copies: the run went on without the data."""
    may_end, threads, told = Event(), list[Any](), list[bool]()

    class Watched(Work[None]):
        def __init__(self, action: Callable[[], None]) -> None:
            super().__init__(action)
            threads.append(self)

    def fail() -> None:
        may_end.wait(10)
        raise DataError(PROBLEM)

    def meet(own: host_copies.HostState, kind: type) -> list[host_copies.HostState]:
        may_end.set()
        threads[0].join()
        told.append(own.is_done)
        return [own]

    tiny["data"]["path"], tiny["data"]["cache"] = f"file://{tmp_path}/text", str(tmp_path / "cache")
    monkeypatch.setattr(host_copies, "Work", Watched)
    monkeypatch.setattr(host_copies, "HostFetch", lambda *_: SimpleNamespace(run=fail, sentence=str))
    monkeypatch.setattr(host_copies, "places_of", lambda *_: {})
    monkeypatch.setattr(agreement, "from_rank_0", lambda *_: [])
    monkeypatch.setattr(agreement, "from_all_ranks", meet)
    progress: Any = SimpleNamespace(begin=lambda _: None, begin_waiting=lambda *_, **__: None)
    rank: Any = SimpleNamespace(local_rank=0)
    with pytest.raises(DataError, match=PROBLEM):
        host_copies.copy_to_all_hosts(Config.model_validate(tiny), rank, progress)
    assert told == [False, True]
