"""Ranks that agree on values, one of which may be a stranger: it is told in a sentence, and nothing it sends is run."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from launch.errors import USER_ERRORS, LaunchError, sentences_of
from megalite.config import ConfigError
from megalite.distributed.agreement import from_all_ranks, from_rank_0, is_same_on_all_ranks
from megalite.distributed.errors import MessageRefused
from tests.helpers.rank_pool import run_ranks
from tests.unit.megalite.distributed.test_agreement import Payload


def _sends(message: bytes, length: int | None = None) -> None:
    """Takes part as a stranger: in the collectives of one message, whose bytes travel if their length is taken."""
    length = len(message) if length is None else length
    lengths = [torch.empty(1, dtype=torch.int64) for _ in range(2)]
    dist.all_gather(lengths, torch.tensor([length]))
    if length == len(message):
        longest = max(int(one) for one in lengths)
        own = torch.zeros(longest, dtype=torch.uint8)
        own[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        dist.all_gather([torch.empty_like(own) for _ in range(2)], own)


def _strangers(rank: int, marker: Path) -> list[str]:
    """What rank 0 says of each message of rank 1."""
    payload = pickle.dumps(Payload(marker))
    said = []
    for message, length in ((payload, None), (b"\xff garbage", None), (b"[[1]]", None), (b"", 1 << 30), (b"", 1 << 62)):
        if rank == 1:
            _sends(message, length)
            continue
        with pytest.raises(MessageRefused) as refused:
            is_same_on_all_ranks("fingerprint")
        said.append(str(refused.value))
    return said


def test_a_stranger_in_a_ranks_place_is_told_in_a_sentence(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    said, _ = run_ranks(_strangers, 2, marker)
    assert len(said) == 5 and not marker.exists()
    for sentence in said:
        assert sentence.startswith("rank 1 was to send str | None and announced or sent ") and "\n" not in sentence
    assert "1,073,741,824 bytes" in said[3]


def _fail(error: Exception) -> Any:
    raise error


DECISIONS: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: _fail(ConfigError("use 4", "and 5")), ConfigError, "use 4|and 5"),
    (
        lambda: _fail(ZeroDivisionError("a bug")),
        LaunchError,
        "rank 0 could not decide for all ranks (ZeroDivisionError: a bug)",
    ),
    (lambda: _fail(LaunchError("no file \udcff")), LaunchError, r"no file \udcff"),
    (threading.Lock, LaunchError, "rank 0 could not decide for all ranks (PydanticSerializationError: "),
]


def _agreed(rank: int) -> list[Any]:
    agreed: list[Any] = [
        from_all_ranks({f"rank {rank}": "x" * rank * 1000}, dict[str, str]),
        [is_same_on_all_ranks(value) for value in ("same", None, f"{rank}")],
        from_rank_0(lambda: (rank, None), tuple[int, None]),
    ]
    for find, kind, _ in DECISIONS:
        with pytest.raises(kind) as error:
            from_rank_0(find, int, USER_ERRORS, LaunchError)
        agreed.append("|".join(sentences_of(error.value)))
    try:
        from_all_ranks("one" if rank else 1, int)
    except (ValueError, MessageRefused) as error:
        agreed.append(type(error).__name__)
    agreed.append(from_all_ranks(rank, int))
    return agreed


def test_all_ranks_have_what_each_sends_and_what_rank_0_decides() -> None:
    """Rank 0 takes part in the collective whatever becomes of its decision: the others are in it."""
    ours, theirs = run_ranks(_agreed, 2)
    assert ours[:3] == theirs[:3] == [[{"rank 0": ""}, {"rank 1": "x" * 1000}], [True, True, False], (0, None)]
    for mine, yours, (_, _, sentence) in zip(ours[3:7], theirs[3:7], DECISIONS, strict=True):
        assert mine == yours and mine.startswith(sentence) and "\n" not in mine
    assert ours[7:] == ["MessageRefused", [0, 1]] and theirs[7:] == ["PydanticSerializationError", [0, 1]]
