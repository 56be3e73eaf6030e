"""The file of a rank that does not answer: only what a rank itself writes is believed."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from megalite.resilience.hang_report import NoResponse
from megalite.resilience.rank_registry import FOLDER, look_for

LINE: dict[str, Any] = {"host": socket.gethostname(), "process": 1, "born": 1.0, "ended": ""}


def found(folder: Path, text: str) -> NoResponse:
    (folder / FOLDER).mkdir(exist_ok=True)
    (folder / FOLDER / "rank_0001.txt").write_text(text)
    return look_for(folder, 1)[0]


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200_000,
        *(json.dumps(LINE | {"process": number}) for number in (-1, True, "1", 1.5, 10**30, float("inf"))),
        json.dumps(LINE).replace("1.0", "1e999"),
        *(json.dumps(LINE | {name: "\x1b[31m"}) for name in ("host", "ended")),
        json.dumps(LINE | {"surplus": 1}),
    ],
    ids=lambda text: text[:99],
)
def test_a_planted_file_says_nothing_and_loses_no_explanation(tmp_path: Path, text: str) -> None:
    assert found(tmp_path, f"{text}\n") == NoResponse()
    assert found(tmp_path, f"{json.dumps(LINE | {'ended': 'KeyError'})}\n").condition == "it ended with KeyError"
