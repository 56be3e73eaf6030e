"""What rank 0 decides for all: everybody hears of it, whatever becomes of the decision."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest

from launch.errors import USER_ERRORS, LaunchError
from megalite.config import ConfigError
from megalite.engine import distributed


def fail(error: Exception) -> Callable[[], Any]:
    def find() -> Any:
        raise error

    return find


@pytest.mark.parametrize(
    ("find", "kind", "sentence"),
    [
        (fail(ConfigError("use 4")), ConfigError, "use 4"),
        (
            fail(ZeroDivisionError("a bug")),
            LaunchError,
            r"^rank 0 could not .*\(ZeroDivisionError: a bug\)$",
        ),
        (fail(RuntimeError("no home directory")), LaunchError, "RuntimeError: no home directory"),
        (threading.Lock, LaunchError, "TypeError: cannot pickle"),
    ],
    ids=["user", "bug", "runtime", "cannot be sent"],
)
def test_whatever_rank_0_meets_reaches_every_rank(
    find: Callable[[], Any], kind: type[Exception], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 takes part in the collective in any case: the others are in it."""
    sent: list[bytes] = []

    def broadcast(told: list[Any]) -> None:
        if not sent:
            sent.append(pickle.dumps(told))
        told[:] = pickle.loads(sent[0])

    monkeypatch.setattr("torch.distributed.broadcast_object_list", broadcast)
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        with pytest.raises(kind, match=sentence) as error:
            distributed.from_rank_0(find, USER_ERRORS, LaunchError)
        assert type(error.value) is kind and "\n" not in str(error.value)
    sent.clear()
    for rank in (0, 1):
        monkeypatch.setattr("torch.distributed.get_rank", lambda rank=rank: rank)
        assert distributed.from_rank_0(lambda: None, USER_ERRORS, LaunchError) is None
