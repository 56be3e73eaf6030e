"""Damage that a run would not notice, because it reads its data only where samples lie, is found by the check."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data_pipeline.audit.corpus_check import bytes_to_check, check_corpus
from data_pipeline.errors import DataError
from tests.unit.data_pipeline.samples.test_dataset import give_meta

DOCUMENTS = [[5, 6, 7], [], [9], [1, 2]]


@pytest.fixture
def prefix(write_corpus: Callable[..., Path]) -> Path:
    prefix = write_corpus(DOCUMENTS)
    digests = {
        name: hashlib.sha256(Path(f"{prefix}{ending}").read_bytes()).hexdigest()
        for name, ending in {"sha256": ".bin", "idx_sha256": ".idx"}.items()
    }
    marks = hashlib.sha256(bytes([0, 1, 1, 0, 1, 1])).hexdigest()
    give_meta(prefix, vocab_size=10, loss_sha256=marks, **digests)
    return prefix


def test_sound_data_has_no_problem_and_is_read_once(prefix: Path) -> None:
    Path(f"{prefix}.loss.bin").write_bytes(bytes([0, 1, 1, 0, 1, 1]))
    read: list[int] = []
    found = check_corpus(prefix, read.append)
    assert (found.problems, found.document_count, found.token_count, found.has_metadata) == ((), 4, 6, True)
    assert sum(read) == bytes_to_check(prefix)


DAMAGE: dict[str, tuple[str, Callable[[bytes], bytes], str]] = {
    "another token": (".bin", lambda b: b[:2] + b"\x03" + b[3:], r"\.bin is not the file that was written"),
    "an id too large": (".bin", lambda b: b[:2] + b"\x0a" + b[3:], "token id 10, outside the vocabulary of 10"),
    "a cut file": (".bin", lambda b: b[:-2], r"\.bin has 10 bytes, but its index counts 6 tokens"),
    "documents of other lengths": (".idx", lambda b: b[:34] + b[38:42] + b[34:38] + b[42:], "is damaged"),
    "an index of other documents": (".idx", lambda b: b[:-16] + b[-24:-16] + b[-8:], r"\.idx is not the file"),
    "no metadata": (".meta.json", lambda b: b"{", "not readable as metadata"),
    "a mark missing": (".loss.bin", lambda b: b[:-1], r"\.loss\.bin has 5 bytes, but there are 6 tokens"),
    "another mark": (".loss.bin", lambda b: b"\x01" + b[1:], r"\.loss\.bin is not the file that was written"),
    "a mark of 2": (".loss.bin", lambda b: b[:-1] + b"\x02", "a mark of 2"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_sentence(case: str, prefix: Path) -> None:
    ending, change, sentence = DAMAGE[case]
    Path(f"{prefix}.loss.bin").write_bytes(bytes([0, 1, 1, 0, 1, 1]))
    path = Path(f"{prefix}{ending}")
    path.write_bytes(change(path.read_bytes()))
    problems = check_corpus(prefix, lambda size: None).problems
    assert any(sentence.replace("\\", "") in problem for problem in problems), problems
    assert all("\n" not in problem for problem in problems)


def test_a_mask_that_is_missing_or_that_no_metadata_names_is_a_problem(prefix: Path) -> None:
    """A run refuses both."""
    mask, meta = Path(f"{prefix}.loss.bin"), Path(f"{prefix}.meta.json")
    missing = check_corpus(prefix, lambda size: None).problems
    mask.write_bytes(bytes([0, 1, 1, 0, 1, 1]))
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "loss_sha256": None}))
    unnamed = check_corpus(prefix, lambda size: None).problems
    meta.unlink()
    alone = check_corpus(prefix, lambda size: None).problems
    assert [len(problems) for problems in (missing, unnamed, alone)] == [1, 1, 1]
    assert f"{mask}, the loss mask of the corpus, is missing" in missing[0]
    assert f"{mask} is a loss mask that no {meta} names" in unnamed[0] and alone == unnamed


def test_a_negative_id_needs_no_vocabulary_to_be_wrong(write_corpus: Callable[..., Path]) -> None:
    prefix = write_corpus([[1, -1]], dtype=np.int32)
    found = check_corpus(prefix, lambda size: None)
    assert not found.has_metadata
    assert found.problems == (
        f"{prefix}.bin holds token id -1, outside the vocabulary of any tokenizer: prepare it again",
    )


def test_missing_files_are_a_mistake_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nothing\.bin does not exist"):
        bytes_to_check(tmp_path / "nothing")
