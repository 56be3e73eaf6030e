"""`megalite prepare` as it is typed: what is there is kept, and a second time costs nothing."""

from __future__ import annotations

import argparse
import errno
import json
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from data_pipeline.prepare.prepare import PrepareProgress
from launch.cli.prepare_output import words_of
from tests.unit.launch.cli.test_mistakes import command

USUAL = ["prepare", "corpus", "-t", "tok", "-o", "data/mine", "--train-vocab-size", "300"]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of texts in three formats, and the working directory."""
    import datasets

    (tmp_path / "corpus").mkdir()
    source = Path(argparse.__file__).read_text(encoding="utf-8")
    texts = [source[place : place + 3000] for place in range(0, 36_000, 3000)]
    (tmp_path / "corpus" / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[:6]))
    (tmp_path / "corpus" / "b.md").write_text(texts[6])
    datasets.Dataset.from_dict({"text": texts[7:]}).to_parquet(tmp_path / "corpus" / "c.parquet")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


REFUSED = {
    "another vocabulary": (
        [*USUAL[:5], "data/none", "--train-vocab-size", "301"],
        ["tok holds a tokenizer with a vocabulary of 300, trained on corpus (", "asked is one with", "301, trained on"],
    ),
    "another text": (
        ["prepare", "corpus/b.md", *USUAL[2:5], "data/none", *USUAL[6:]],
        ["vocabulary of 300, trained on corpus (", "asked is one with a vocabulary of 300, trained on corpus/b.md ("],
    ),
    "other sources": (
        ["prepare", "corpus/a.jsonl", *USUAL[2:6]],
        ["data/mine holds 12 documents prepared from corpus with", "asked is corpus/a.jsonl with the tokenizer"],
    ),
    "another tokenizer for the same data": (
        [*USUAL[:3], "new", *USUAL[4:7], "310"],
        ["data/mine holds 12 documents prepared from corpus", "asked is corpus with the tokenizer new, vocabulary 310"],
    ),
}


@pytest.mark.parametrize("dry", [[], ["--dry-run"]], ids=["", "dry run"])
def test_what_is_there_is_not_replaced(
    dry: list[str], workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(USUAL, monkeypatch, capfd)
    assert (code, err) == (0, "") and "12 documents" in out and "prepared in" in out
    before = everything(workplace)
    for words, says in REFUSED.values():
        code, out, err = run([*words, *dry], monkeypatch, capfd)
        assert code == 2 and err.startswith("megalite: error: ") and err.count("\n") == 1 and not out, err
        assert all(part in err for part in [*says, "--overwrite"]), err
    assert everything(workplace) == before
    code, out, err = run([*USUAL, *dry], monkeypatch, capfd)
    assert code == 0 and "already prepared" in out and everything(workplace) == before


def test_the_fast_encoder_is_an_option_of_the_same_job(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gigatoken", reason="the extra [fast] is not installed")
    code, out, _ = run([*USUAL, "--encoder", "fast"], monkeypatch, capfd)
    assert code == 0 and "12 documents" in out and "prepared in" in out
    before = everything(workplace)
    assert json.loads(before["data/mine.meta.json"])["gigatoken"] is not None
    code, out, _ = run(USUAL, monkeypatch, capfd)
    assert code == 0 and "already prepared" in out and everything(workplace) == before
    assert run([*USUAL[:5], "data/exact", *USUAL[6:]], monkeypatch, capfd)[0] == 0
    after = everything(workplace)
    assert all(after[f"data/exact{ending}"] == after[f"data/mine{ending}"] for ending in (".bin", ".idx"))


def test_it_is_replaced_where_that_is_asked_for(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(USUAL, monkeypatch, capfd)[0] == 0
    other = ["prepare", "corpus/a.jsonl", *USUAL[2:6], "--train-vocab-size", "301"]
    assert run([*other, "--dry-run", "--overwrite"], monkeypatch, capfd)[1].startswith(
        "dry run: would encode 1 source,"
    )
    code, out, _ = run([*other, "--overwrite"], monkeypatch, capfd)
    assert code == 0 and "6 documents" in out and "vocabulary 301, prepared in" in out
    meta = json.loads((workplace / "data" / "mine.meta.json").read_text())
    assert meta["sources"] == ["corpus/a.jsonl"] and (meta["text_field"], meta["append_eos"]) == ("text", True)
    assert "already prepared" in run(other, monkeypatch, capfd)[1]


def test_ctrl_c_is_one_line_and_the_same_command_goes_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.prepare.prepare._merge", interrupt)
        code, out, err = run(USUAL, monkeypatch, capfd)
    assert (code, out) == (130, "") and err.count("\n") == 1 and "the same command goes on" in err, err
    assert [path.name for path in (workplace / "data").iterdir()] == ["mine.parts"]
    code, out, _ = run([*USUAL, "--json"], monkeypatch, capfd)
    assert code == 0 and json.loads(out)["resumed_parts"] == 1


def run(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Exit code, 0 for None, stdout and stderr of `megalite WORDS` on one core, but for progress on a slow machine."""
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    code, out, err = command(words, monkeypatch, capfd)
    return code or 0, out, re.sub(r"(?m)^megalite: .*\(\d+ s\)\n", "", err)


ATTACKS: dict[str, tuple[bytes, list[str], str]] = {
    "a.jsonl": (b'{"text": "a"}\n{"text": "\\ud800"}\n', [], "a.jsonl, line 2 has half of a surrogate pair in field"),
    "b.jsonl": (b'{"text": "a"}\n{"text": 1}\n', [], "b.jsonl, line 2 has int in field 'text': it must hold a string"),
    "c.jsonl.gz": (b"\x1f\x8b\x08\0\0\0\0\0\0\xffgarbage", [], "c.jsonl.gz is damaged inside (gzip: "),
    "d.jsonl.zst": (b'{"text": "a"}\n', [], "d.jsonl.zst is no zstd file, its first bytes are"),
    "e.csv": (b"body,label\na,1\n", [], "e.csv has no column 'text' (it has 'body', 'label'): name the column"),
    "f.json": (b'[{"text": "a"}, {"text": null}]', [], "f.json, row 1 has NoneType in field 'text'"),
    "g.tar": (b"text", [], "g.tar is an archive, which is not read: unpack it and give its files"),
    "h.txt.gz": (b"text", [], "h.txt.gz is no gzip file, its first bytes are"),
    "i.txt": (b"a <|endoftext|> b", ["--special-tokens", "refuse"], "i.txt contains the special token '<|endoftext|>'"),
    "j.csv": (b'text\n"a\n', [], "j.csv, line 2: a quote that is opened in this row is never closed: close it"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_file_that_cannot_be_read_is_one_sentence_that_names_the_place(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    content, options, sentence = ATTACKS[name]
    Path("bad").mkdir()
    (Path("bad") / name).write_bytes(content)
    assert run(USUAL, monkeypatch, capfd)[0] == 0
    code, out, err = run(["prepare", f"bad/{name}", "-t", "tok", "-o", "new/er/bad", *options], monkeypatch, capfd)
    assert (code, out) == (2, "") and err.startswith(f"megalite: error: bad/{sentence}") and err.count("\n") == 1, err
    assert not Path("new").exists(), "nothing may be left behind"


def test_bad_rows_and_repeated_files_are_said(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(USUAL, monkeypatch, capfd)[0] == 0
    Path("bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    words = ["prepare", "bad.jsonl", "./bad.jsonl", "-t", "tok", "-o", "data/bad", "--on-bad-row", "skip"]
    code, out, err = run(words, monkeypatch, capfd)
    assert code == 0 and "2 documents" in out
    assert (
        "2 bad rows left out, listed in data/bad.left_out.txt; the first: bad.jsonl, line 2 has no field 'text' (it"
        in err
    )
    assert "1 file read more than once, which counts as more documents: bad.jsonl (2 times)" in err
    summary = json.loads(run([*words, "--json"], monkeypatch, capfd)[1])
    assert (summary["reused"], summary["skipped_rows"], summary["repeated"]) == (True, 2, [["bad.jsonl", "bad.jsonl"]])
    code, out, err = run(words[:-2], monkeypatch, capfd)
    assert (code, out) == (2, "") and "line 2 has no field" in err and "with --on-bad-row skip" in err


def test_a_full_disk_is_one_sentence_and_the_same_command_goes_on(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The error of a stream that is written has no name of a file."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("data_pipeline.storage.indexed_writer.IndexedWriter._write_index", full)
        code, out, err = run(USUAL, monkeypatch, capfd)
    assert (code, out) == (2, "") and err == (
        "megalite: error: data/mine.bin: the disk is full: free some space and give the same command, which goes on: "
        "finished parts are kept\n"
    )
    code, out, _ = run([*USUAL, "--json"], monkeypatch, capfd)
    assert code == 0 and json.loads(out)["resumed_parts"] == 1


def test_the_words_of_progress_say_what_is_being_done() -> None:
    """Counting for hours was "0 tokens, 0 tokens/s", and joining began at none of the documents again."""
    done = (1, 2, 1234, 5000, 2.5, 0.25, 1200.0)
    told = [words_of(PrepareProgress(doing, *done)) for doing in ("counting", "encoding", "joining")]
    assert told == [
        "counting the documents for --fill-in-the-middle: 1,234 (25%, about 20 min left)",
        "25%, about 20 min left: 1,234 documents, 5,000 tokens, 2,000 tokens/s",
        "joining the encoded parts: 1 of 2",
    ]


def test_text_that_has_no_room_is_said_before_it_is_encoded(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=20_000))
    monkeypatch.setattr("data_pipeline.prepare.joining._check_space", lambda *_: None)
    _, _, err = run(USUAL, monkeypatch, capfd)
    assert "kB more until they are joined" in err and "where data/mine is: free some" in err
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**9))
    assert run([*USUAL[:5], "data/other", *USUAL[6:]], monkeypatch, capfd)[2] == ""


def test_what_was_probably_meant_is_named(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """`python_stdlb` beside `python_stdlib` only did not exist; a wrong folder above hides the file as well."""
    (workplace / "chats.jsonl").write_text('{"conversations": []}\n')
    (workplace / "runs").mkdir()
    (workplace / "nomix.yaml").touch()
    (workplace / "mine.idx").touch()
    assert (
        run(["prepare", "corpus/b.md", "-t", "tok", "-o", "y", "--train-vocab-size", "300"], monkeypatch, capfd)[0] == 0
    )
    Path("hf").mkdir()
    Path("hf/config.json").write_text("{}")
    for name in ("generate", "evaluate"):
        monkeypatch.setitem(sys.modules, f"launch.inference.{name}", None)  # seconds of PyTorch, for a wrong path
    for words, says in {
        "generate rns -p a": "there is no such checkpoint folder (did you mean runs?)",
        "generate hf -p a --top-p 4": "top_p 4.0 is not above 0 and at most 1",
        "evaluate hf --text corpus/a.json": "source corpus/a.json does not exist (did you mean corpus/a.jsonl?)",
        "evaluate hf --data mnie": "mnie.bin does not exist (did you mean mine?)",
        "prepare corpus/a.json -t tok -o x": "source corpus/a.json does not exist (did you mean corpus/a.jsonl?)",
        "prepare corpsu/a.jsonl -t tok -o x": "source corpsu/a.jsonl does not exist (did you mean corpus?)",
        "prepare python-stdlb -t tok -o x": "does not exist (did you mean python-stdlib?)",
        "prepare chats.jsonl -t tok -o x": "(it has 'conversations'): these are conversations, give --chat, or name",
        "prepare chats.jsonl --show 1 -t tok -o x": "--show shows conversations and what of them carries loss: give",
        "export rns out": "there is no such checkpoint folder (did you mean runs?)",
        "data check mnie": "mnie.bin does not exist (did you mean mine?)",
        "config show nomix.yml": "nomix.yml does not exist (did you mean nomix.yaml?)",
        "ls rnus": "rnus does not exist (did you mean runs?)",
        "status rnus/one": "rnus/one does not exist (did you mean runs?)",
        "checkpoint ls rns": "there is no such folder (did you mean runs?)",
    }.items():
        code, _, err = run(words.split(), monkeypatch, capfd)
        assert code == 2 and says in err, err
