"""Small JSON files beside a corpus may have been written by anybody: each field has its type, or is named."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.errors import DataError
from data_pipeline.storage.meta import CorpusMeta, parsed_meta
from data_pipeline.tokenizers.training import train_tokenizer
from tests.helpers.commands import command_line

VALID = asdict(
    CorpusMeta("ab", "tok", 9, 0, 5, 1, "uint16", "ab", "ab", sources=["a.txt"], job_sha256="ab", train_on=None)
)
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=4,
)


@given(name=st.sampled_from([field.name for field in fields(CorpusMeta)] + ["surprise"]), value=ANYTHING)
def test_a_field_of_another_type_is_named(name: str, value: Any) -> None:
    try:
        meta = parsed_meta(json.dumps(VALID | {name: value}).encode(), "d.meta.json")
    except DataError as error:
        assert str(error).startswith("d.meta.json ") and (name in str(error) or "JSON" in str(error)), error
        return
    known = VALID.get(name)
    assert value is None or known is None or isinstance(value, type(known)) or type(known) is float
    Path(meta.tokenizer, "tokenizer.json").is_file()  # does not raise, as for a name longer than any file's
    assert 0 <= meta.vocab_size < 1 << 63


@given(st.binary(max_size=20))
def test_bytes_that_are_no_metadata_are_one_sentence(content: bytes) -> None:
    with pytest.raises(DataError, match=r"^d.meta.json is not readable as metadata of a corpus \("):
        parsed_meta(content, "d.meta.json")


@pytest.mark.parametrize(("name", "value"), [("tokenizer_sha256", ["x"]), ("vocab_size", {})])
def test_commands_name_file_and_field(name: str, value: Any, tiny: dict[str, Any], tmp_path: Path) -> None:
    """They ended in a traceback."""
    prefix = tmp_path / "copied"
    given = Path(tiny["data"]["path"])
    for ending in (".bin", ".idx"):
        Path(f"{prefix}{ending}").write_bytes(Path(f"{given}{ending}").read_bytes())
    meta = json.loads(Path(f"{given}.meta.json").read_text())
    Path(f"{prefix}.meta.json").write_text(json.dumps(meta | {name: value}))
    config = tmp_path / "c.yaml"
    config.write_text(json.dumps(tiny | {"data": tiny["data"] | {"path": str(prefix)}}))
    for arguments in (["train", str(config), "--dry-run"], ["data", "check", str(prefix)]):
        done = command_line(*arguments)
        said = " ".join((done.stdout + done.stderr).split())
        assert done.returncode in (1, 2) and f"is not readable as metadata of a corpus ({name}: " in said, said


@pytest.mark.parametrize("value", [{"vocab_size": []}, {"sources": 3}, {"surprise": 1}])
def test_a_record_of_a_training_has_types_too(value: dict[str, Any], tmp_path: Path) -> None:
    folder = train_tokenizer(["abc " * 9], tmp_path / "t", 258)
    record = folder / "trained_from.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | value))
    with pytest.raises(DataError, match=r"trained_from.json is not readable"):
        train_tokenizer(["abc " * 9], folder, 258)
