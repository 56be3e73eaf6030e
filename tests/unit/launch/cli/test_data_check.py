"""`megalite data check` as it is typed: a sentence and exit code 1 for damage, 2 for what is not there."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.storage.indexed_writer import IndexedWriter
from tests.unit.launch.cli.test_mistakes import command


def test_sound_and_damaged_data_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sound", "cut"):
        with IndexedWriter(name, np.uint16) as writer:
            writer.append(np.array([1, 2, 3], dtype=np.uint16), np.array([1, 3]))
    Path("cut.bin").write_bytes(b"123")
    code, out, _ = command(["data", "check", "sound"], monkeypatch, capfd)
    assert code == 0 and out.startswith("sound: 2 documents, 3 tokens, the largest id 3, nothing wrong; it has no")
    assert "its ids against no vocabulary (--vocab-size)" in out
    code, out, _ = command(["data", "check", "sound", "--vocab-size", "3"], monkeypatch, capfd)
    assert code == 1 and "sound.bin holds token id 3, outside the vocabulary of 3" in out
    code, out, _ = command(["data", "check", "sound", "cut"], monkeypatch, capfd)
    assert code == 1 and "cut.bin has 3 bytes, but its index counts 3 tokens" in out
    code, out, _ = command(["data", "check", "sound", "cut", "--json"], monkeypatch, capfd)
    facts = json.loads(out)
    assert (code, facts["passed"], [len(each["problems"]) for each in facts["corpora"]]) == (1, False, [0, 1])
    code, _, err = command(["data", "check", "none"], monkeypatch, capfd)
    assert code == 2 and "none.bin does not exist" in err
