"""A tokenizer trained here is exact in size, reproducible, reused, and at home in transformers."""

import json
from pathlib import Path

import pytest

import data_pipeline.tokenizers.training
from data_pipeline.errors import DataError
from data_pipeline.sources.python_stdlib import python_stdlib_sources
from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer

TEXT = 'def f(x):\n\treturn {"ä": x * 1234567}  # ünïcode 漢字 🙂\r\n\n\n    end'


def test_transformers_loads_it_and_round_trips_text(tokenizer_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT
    assert len(tokenizer) == 600
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)


def test_transformers_and_prepare_see_the_same_ids(tokenizer_folder: Path) -> None:
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    ours = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json")).encode(TEXT).ids
    assert AutoTokenizer.from_pretrained(tokenizer_folder)(TEXT)["input_ids"] == ours


def test_training_is_reproducible_and_reused(stdlib_files: list[Path], tmp_path: Path) -> None:
    texts = [path.read_text(encoding="utf-8") for path in stdlib_files[:12]]
    first = train_tokenizer(texts, tmp_path / "a", 600)
    second = train_tokenizer(iter(texts), tmp_path / "b", 600)
    assert [(first / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")] == [
        (second / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json")
    ]
    written = (first / "tokenizer.json").stat().st_mtime_ns
    train_tokenizer(texts, first, 600)
    assert (first / "tokenizer.json").stat().st_mtime_ns == written
    train_tokenizer(texts[:11], first, 600, overwrite=True)
    assert (first / "tokenizer.json").stat().st_mtime_ns != written
    (first / "trained_from.json").write_text("not json")
    train_tokenizer(texts, first, 600, overwrite=True)
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def test_a_record_of_an_older_version_is_known_again(tmp_path: Path) -> None:
    """It has neither sources nor the number of bytes; another version of `tokenizers` is no other training."""
    train_tokenizer(["abc " * 9], tmp_path / "t", 258)
    record = tmp_path / "t" / "trained_from.json"
    facts = json.loads(record.read_text())
    del facts["sources"], facts["text_bytes"]
    record.write_text(json.dumps(facts | {"tokenizers": "0.1"}))
    before = contents(tmp_path / "t")
    train_tokenizer(["abc " * 9], tmp_path / "t", 258)
    assert contents(tmp_path / "t") == before
    with pytest.raises(DataError, match="vocabulary of 258, trained on text that is not named; asked is"):
        train_tokenizer(["xyz " * 9], tmp_path / "t", 258)


OTHERS = {
    "another size": (lambda folder: None, ["abc " * 9], 259, "vocabulary of 258, .*one with a vocabulary of 259"),
    "another text": (lambda folder: None, ["xyz " * 7], 258, r"\(36 bytes\); asked is one with .*\(28 bytes\): name"),
    "text that has changed": (lambda folder: None, ["xyz " * 9], 258, "which has changed since: name another folder"),
    "an unreadable record": (
        lambda folder: (folder / "trained_from.json").write_text("[1]"), ["abc " * 9], 258, "not known what",
    ),
    "a tokenizer.json of somebody": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"), ["abc " * 9], 258, "changed since, or its",
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_a_tokenizer_of_other_text_or_size_is_replaced_only_if_asked(other: str, tmp_path: Path) -> None:
    """Every model that was trained with it would lose its words."""
    change, texts, vocab_size, says = OTHERS[other]
    folder = train_tokenizer(["abc " * 9], tmp_path / "t", 258)
    change(folder)
    before = contents(folder)
    with pytest.raises(DataError, match=says) as caught:
        train_tokenizer(texts, folder, vocab_size)
    assert "\n" not in str(caught.value) and "--overwrite" in str(caught.value)
    assert contents(folder) == before
    train_tokenizer(texts, folder, vocab_size, overwrite=True)
    train_tokenizer(texts, tmp_path / "fresh", vocab_size)
    assert contents(folder) == contents(tmp_path / "fresh")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_tokenizer_from_elsewhere_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    for overwrite in (False, True):  # a mistyped folder must not cost a model's tokenizer
        with pytest.raises(DataError, match=r"tokenizer.json was not trained here") as caught:
            train_tokenizer(["text"], tmp_path, 300, overwrite=overwrite)
        assert "\n" not in str(caught.value)
    assert contents(tmp_path) == {"tokenizer.json": b"{}"}


def test_an_interrupted_training_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill before any of the three files must not leave a tokenizer that counts as someone else's."""
    write = data_pipeline.tokenizers.training.write_atomically
    for name in ("trained_from.json", "tokenizer_config.json", "tokenizer.json"):

        def killed(path: Path, content: bytes, at: str = name) -> None:
            if path.name == at:
                raise KeyboardInterrupt
            write(path, content)

        monkeypatch.setattr(data_pipeline.tokenizers.training, "write_atomically", killed)
        with pytest.raises(KeyboardInterrupt):
            train_tokenizer(["abc " * 9], tmp_path / name, 258)
        monkeypatch.setattr(data_pipeline.tokenizers.training, "write_atomically", write)
        assert inspect_tokenizer(train_tokenizer(["abc " * 9], tmp_path / name, 258)).vocab_size == 258


def test_size_and_end_token_are_found(tokenizer_folder: Path, tmp_path: Path) -> None:
    folder, file = inspect_tokenizer(tokenizer_folder), inspect_tokenizer(tokenizer_folder / "tokenizer.json")
    assert (folder.vocab_size, folder.eos_token_id, folder.sha256) == (600, 0, file.sha256)
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    assert inspect_tokenizer(tmp_path).eos_token_id is None  # as transformers has it: no file names one
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": "a"}))
    assert inspect_tokenizer(tmp_path).eos_token_id not in (0, None)
    config.write_text("{")
    with pytest.raises(DataError, match="not readable as JSON"):
        inspect_tokenizer(tmp_path)


def test_bad_training_input_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="too small for a vocabulary of 5000: only"):
        train_tokenizer(["a few words, a few more words"], tmp_path / "t", 5000)
    with pytest.raises(DataError, match="ask for at least 257"):
        train_tokenizer(["text"], tmp_path / "t", 256)
    assert not (tmp_path / "t").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="file is a file: name a folder"):
        train_tokenizer(["text"], tmp_path / "file", 300)
    with pytest.raises(DataError, match="file of another name"):
        inspect_tokenizer(tmp_path / "file")


def test_the_standard_library_is_text_without_tests(stdlib_files: list[Path]) -> None:
    assert stdlib_files == sorted(python_stdlib_sources())
    names = {path.name for path in stdlib_files}
    assert {"dataclasses.py", "argparse.py"} <= names
    assert not any({"test", "site-packages", "idlelib"} & set(path.parts) for path in stdlib_files)
    assert sum(path.stat().st_size for path in stdlib_files) > 5_000_000


def test_a_tokenizer_at_which_the_library_panics_is_one_sentence(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Its exception is no `Exception`."""
    content = json.loads((tokenizer_folder / "tokenizer.json").read_text())
    content["normalizer"] = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match="is not a tokenizer that `tokenizers` can load"):
        inspect_tokenizer(tmp_path)
