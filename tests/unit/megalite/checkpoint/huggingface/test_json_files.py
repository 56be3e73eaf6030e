"""JSON of a model's folder, which anyone may have made."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import LARGEST, read_json

HARM: dict[str, tuple[Callable[[Path], object], str]] = {
    "nested too deeply": (lambda path: path.write_bytes(b"[" * 1_000_000), "not readable as JSON"),
    "a number of too many digits": (lambda path: path.write_bytes(b"9" * 5000), "not readable as JSON"),
    "half a surrogate pair as a name": (lambda path: path.write_bytes(b'["\\ud800"]'), "not a JSON object"),
    "too large": (lambda path: path.touch() or os.truncate(path, LARGEST + 1), "bytes are too many"),
    "a pipe": (os.mkfifo, "is no file"),
    "a folder": (Path.mkdir, "is no file"),
    "without end": (lambda path: path.symlink_to("/dev/zero"), "is no file"),
}


@pytest.mark.parametrize("case", HARM)
def test_a_harmful_file_is_one_sentence(case: str, tmp_path: Path) -> None:
    write, sentence = HARM[case]
    write(tmp_path / "config.json")
    with pytest.raises(CheckpointError, match=sentence) as caught:
        read_json(tmp_path / "config.json")
    assert str(caught.value).isprintable()
