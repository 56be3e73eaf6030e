"""From text to token files: exact, whole or absent, and the same bytes after a kill at any moment."""

import hashlib
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.errors import DataError
from data_pipeline.prepare.plan import USUAL_OPTIONS, PrepareOptions
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.samples.dataset import PackedSamples
from data_pipeline.sources import open_sources
from data_pipeline.sources.text import TextFile
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer, trained_tokenizer

REPOSITORY = Path(__file__).parents[4]


@pytest.fixture(scope="session")
def corpus(stdlib_files: list[Path]) -> list[str]:
    """About 0.8 MB of text: some three chunks."""
    chosen, size = [], 0
    for path in stdlib_files:
        if size < 800_000:
            chosen.append(str(path))
            size += path.stat().st_size
    return chosen


@pytest.fixture(scope="session")
def reference(corpus: list[str], tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("reference") / "corpus"
    prepare(corpus, output, tokenizer_folder, workers=1)
    return output


def written(output: Path) -> dict[str, str]:
    """Digests of the token files beside `output`, by ending."""
    return {
        path.name.removeprefix(output.name): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in output.parent.glob(f"{output.name}.*")
        if path.suffix in (".bin", ".idx")
    }


def test_documents_are_the_tokenizers_ids_and_an_end_token(
    corpus: list[str], tokenizer_folder: Path, reference: Path
) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    texts = [text for text in (Path(path).read_bytes().decode() for path in corpus) if text]
    tokens = IndexedTokens(reference)
    assert len(tokens) == len(texts)
    for i, text in enumerate(texts[:25]):
        assert tokens.document(i).tolist() == [*tokenizer.encode(text).ids, 0]
    for i, text in enumerate(texts[25:], start=25):
        assert tokenizer.decode(tokens.document(i)[:-1].tolist()) == text


def test_meta_data_describes_the_files(corpus: list[str], tokenizer_folder: Path, reference: Path) -> None:
    meta = json.loads(Path(f"{reference}.meta.json").read_text())
    tokens = IndexedTokens(reference)
    tokenizer_bytes = (tokenizer_folder / "tokenizer.json").read_bytes()
    assert meta["tokenizer_sha256"] == hashlib.sha256(tokenizer_bytes).hexdigest()
    assert (meta["sha256"], meta["idx_sha256"]) == (written(reference)[".bin"], written(reference)[".idx"])
    assert (meta["token_count"], meta["document_count"]) == (tokens.token_count, len(tokens))
    assert (meta["vocab_size"], meta["eos_token_id"], meta["dtype"]) == (600, 0, "uint16")
    assert (meta["sources"], meta["tokenizer"]) == (corpus, str(tokenizer_folder))
    samples = PackedSamples([reference], 128, seed=0)
    assert (samples.vocab_size, samples.eos_token_id) == (600, 0)


def test_processes_write_the_same_bytes_and_report_progress(
    corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    reports: list[PrepareProgress] = []
    output = tmp_path / "corpus"
    summary = prepare(corpus, output, tokenizer_folder, workers=2, progress=reports.append)
    assert written(output) == written(reference)
    assert [report.doing for report in reports] == sorted(report.doing for report in reports)  # encoding, joining
    for doing in ("encoding", "joining"):
        told = [report for report in reports if report.doing == doing]
        assert told[-1].parts_done == told[-1].part_count > 1
        assert (told[-1].tokens, told[-1].documents) == (summary.token_count, summary.document_count)
        assert [report.tokens for report in told] == sorted(report.tokens for report in told)
    assert not Path(f"{output}.parts").exists()


KILLED = """
import sys
from pathlib import Path
from data_pipeline.prepare.prepare import prepare
if __name__ == "__main__":
    prepare(sys.argv[4:], Path(sys.argv[1]), Path(sys.argv[2]), workers=int(sys.argv[3]))
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_rerun_after_a_kill_goes_on_and_writes_the_same_bytes(
    workers: int, corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    output, parts = tmp_path / "corpus", tmp_path / "corpus.parts"
    (tmp_path / "corpus.bin.tmp").write_bytes(b"left by a run that was killed while it joined its parts")
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, "run.py", str(output), str(tokenizer_folder), str(workers), *corpus]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
        while not list(parts.glob("part-*.npz")):
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.005)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        process.send_signal(signal.SIGKILL)
    assert written(output) == {}
    assert bool(children) == (workers > 1)
    deadline = time.monotonic() + 5
    while any(map(is_running, children)):  # otherwise every killed run would leave processes that wait for ever
        assert time.monotonic() < deadline, "workers outlive their parent"
        time.sleep(0.02)
    summary = prepare(corpus, output, tokenizer_folder, workers=1)
    assert summary.resumed_parts >= 1
    assert not summary.reused
    assert written(output) == written(reference)
    assert not parts.exists()
    assert not list(tmp_path.glob("*.tmp"))


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("workers", [1, 2, 4])
def test_fifty_kills_at_random_moments_cost_nothing_but_time(
    workers: int, corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    """Most units are ranges inside of files; what was finished before a kill is never made again."""
    output, source, draw = tmp_path / "corpus", tmp_path / "rows.jsonl", random.Random(workers)
    texts = [Path(path).read_bytes().decode() for path in corpus]
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "run.py").write_text(KILLED)
    command = [sys.executable, "run.py", str(output), str(tokenizer_folder), str(workers), str(source)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    kept: dict[str, int] = {}  # finished parts by time of writing
    for _ in range(50):
        with subprocess.Popen(command, cwd=tmp_path, env=environment) as process:
            try:
                process.wait(draw.uniform(0, 4))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGKILL)
        found = {path.name: path.stat().st_mtime_ns for path in Path(f"{output}.parts").glob("part-*.npz")}
        if not Path(f"{output}.meta.json").exists():
            assert kept.items() <= found.items()
            kept = found
        elif process.returncode == 0:
            assert written(output) == written(reference)
            for path in tmp_path.glob("corpus.*"):
                path.unlink()
            kept = {}
    prepare([str(source)], output, tokenizer_folder, workers=1)
    assert written(output) == written(reference) and not list(tmp_path.glob("*.tmp"))


@pytest.mark.parametrize("workers", [1, *(pytest.param(count, marks=pytest.mark.exhaustive) for count in (2, 4))])
def test_a_run_without_room_names_the_file_and_goes_on_when_there_is_some(
    workers: int, corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    """The limit of a file's size fails as a full disk does: in the journal, in a part, and in what joins the parts."""
    output, before = tmp_path / "corpus", resource.getrlimit(resource.RLIMIT_FSIZE)
    size = Path(f"{reference}.bin").stat().st_size
    names = []
    for limit in (50, 9_000, size // 2, size * 3 // 4, size - 1):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            with pytest.raises(OSError) as failed:
                prepare(corpus, output, tokenizer_folder, workers=workers)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        names.append(re.sub(r"\d+", "N", Path(failed.value.filename).name))
        assert written(output) == {} and not list(tmp_path.glob("*.tmp"))
    assert names == ["journal.json", "part-N.npz", "corpus.bin", "corpus.bin", "corpus.bin"]
    summary = prepare(corpus, output, tokenizer_folder, workers=workers)
    assert summary.resumed_parts > 1 and written(output) == written(reference)


def test_a_finished_job_is_reused_and_a_changed_one_is_not(tokenizer_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "a.txt", tmp_path / "out" / "c.v1"
    source.write_text("one two three")
    first = prepare([str(source)], output, tokenizer_folder)
    again = prepare([str(source)], output, tokenizer_folder, workers=1)
    assert (first.reused, again.reused) == (False, True)
    assert (again.sha256, again.token_count, again.document_count) == (first.sha256, first.token_count, 1)
    without_end = prepare([str(source)], output, tokenizer_folder, PrepareOptions(append_eos=False), overwrite=True)
    assert not without_end.reused and without_end.token_count == first.token_count - 1
    source.write_text("one two four!")
    changed = prepare([str(source)], output, tokenizer_folder, overwrite=True)
    assert not changed.reused
    assert changed.sha256 != first.sha256
    Path(f"{output}.bin").write_bytes(b"")
    assert prepare([str(source)], output, tokenizer_folder).sha256 == changed.sha256


def test_parts_that_a_kill_left_behind_a_finished_job_are_removed(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The journal went first, and without it nobody knew whose the other parts were: they stayed for ever."""
    source, output = tmp_path / "a.txt", tmp_path / "corpus"
    source.write_text("one two three")

    def killed(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("shutil.rmtree", killed)
        prepare([str(source)], output, tokenizer_folder)
    left = sorted(path.name for path in (tmp_path / "corpus.parts").iterdir())
    assert "journal.json" in left and not any(name.startswith("part-") for name in left)
    assert prepare([str(source)], output, tokenizer_folder).reused and not (tmp_path / "corpus.parts").exists()


@pytest.mark.parametrize("name", ["a.csv", "a.json", "a.ndjson"])
def test_rows_that_an_older_version_read_as_one_text_are_another_job(
    name: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, output = tmp_path / name, tmp_path / "c"
    source.write_text({"a.csv": "text\none\ntwo\n"}.get(name, '{"text": "one"}\n{"text": "two"}\n'))
    with monkeypatch.context() as older:
        for reader in ("CsvTable", "JsonRows"):
            older.setattr(f"data_pipeline.sources.{reader}", lambda path, *_: TextFile(path))
        assert prepare([str(source)], output, tokenizer_folder).document_count == 1
    meta = read_meta(output)
    assert meta is not None
    replace(meta, tokenizers=None).write(output)
    with pytest.raises(DataError, match="changed since, or hold rows, which older versions read as one text: choose"):
        prepare([str(source)], output, tokenizer_folder)
    made = prepare([str(source)], output, tokenizer_folder, overwrite=True)
    assert (made.reused, made.document_count) == (False, 2)
    assert prepare([str(source)], output, tokenizer_folder).reused


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.jsonl.gz", "a.parquet"])
def test_sources_that_older_versions_read_the_same_way_keep_their_identity(name: str, tmp_path: Path) -> None:
    """A finished output of an older version is not made again."""
    path = tmp_path / name
    path.write_bytes(b"1")
    os.utime(path, ns=(5, 7))
    (source,) = open_sources([str(path)], "text")
    assert source.identity() == [*([f"dataset:{path}"] if name == "a.parquet" else []), str(path), "1", "7"]


def test_parts_of_another_job_are_thrown_away(tokenizer_folder: Path, tmp_path: Path) -> None:
    source, output = tmp_path / "a.txt", tmp_path / "c"
    source.write_text("new text")
    parts = tmp_path / "c.parts"
    parts.mkdir()
    (parts / "journal.json").write_text('{"job_sha256": "another"}')
    np.savez(parts / "part-000000.npz", tokens=np.array([1, 2], dtype=np.uint16), document_ends=np.array([2]))
    summary = prepare([str(source)], output, tokenizer_folder)
    assert (summary.resumed_parts, summary.discarded_parts) == (0, 1)
    assert IndexedTokens(output).document(0).tolist() != [1, 2]


def test_a_dry_run_writes_nothing(tokenizer_folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "a.txt"
    source.write_text("some text")
    summary = prepare([str(source)], tmp_path / "c", tokenizer_folder, dry_run=True)
    assert (summary.dry_run, summary.source_count, summary.source_bytes, summary.dtype) == (True, 1, 9, "uint16")
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_large_vocabularies_are_int32(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"w{i}": i for i in range(70000)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(2)  # as many a tokenizer.json from elsewhere does: it must not cut documents
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("w69999 w1 w5 w7")
    prepare([str(tmp_path / "a.txt")], tmp_path / "c", tmp_path / "tokenizer.json", PrepareOptions(append_eos=False))
    tokens = IndexedTokens(tmp_path / "c")
    assert (tokens.dtype, tokens.document(0).tolist()) == (np.dtype(np.int32), [69999, 1, 5, 7])
    with pytest.raises(DataError, match="names no end-of-document token"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "c", tmp_path / "tokenizer.json")


def test_bad_input_is_one_sentence_and_leaves_no_output(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "good.txt").write_text("text")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    good, output = [str(tmp_path / "good.txt")], tmp_path / "c"
    with pytest.raises(DataError, match=r"empty.txt holds no text at all"):
        prepare([str(tmp_path / "empty.txt")], output, tokenizer_folder)
    with pytest.raises(DataError, match=r"bad.txt is not UTF-8"):
        prepare([*good, str(tmp_path / "bad.txt")], output, tokenizer_folder)
    with pytest.raises(DataError, match=r"brokn does not exist \(did you mean .*broken\?\): give a folder written by"):
        prepare(good, output, tmp_path / "brokn")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"has no tokenizer.json"):
        prepare(good, output, tmp_path / "empty")
    with pytest.raises(DataError, match="not a tokenizer that `tokenizers` can load"):
        prepare(good, output, tmp_path / "broken")
    with pytest.raises(DataError, match="0 workers cannot encode"):
        prepare(good, output, tokenizer_folder, workers=0)
    assert not list(tmp_path.glob("c.bin"))


def test_a_foreign_corpus_is_not_overwritten(tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.bin").write_bytes(b"precious")
    for overwrite in (False, True):
        with pytest.raises(DataError, match=r"c.bin exists and was not written by prepare"):
            prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder, overwrite=overwrite)
    assert (tmp_path / "c.bin").read_bytes() == b"precious" and not (tmp_path / "c.parts").exists()
    (tmp_path / "c.meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta.json is not readable, so it is not known what"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder)
    assert (tmp_path / "c.bin").read_bytes() == b"precious"


def everything(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


OTHER_JOBS: dict[str, tuple[dict[str, Any], str]] = {
    "other sources": ({"sources": ["b.txt"]}, r"from a.txt .*; asked is b.txt with the tokenizer .*, vocabulary 600: "),
    "another tokenizer": ({"tokenizer": "small"}, r"vocabulary 600; asked is a.txt with the tokenizer small, .* 258: "),
    "a tokenizer made again": ({"tokenizer": "copy"}, "600, whose tokenizer is another one since: "),
    "another option": ({"append_eos": False}, "600, --no-append-eos: choose another output"),
    "another field": ({"text_field": "content"}, r"600, --text-field content \(not text\): "),
    "a begin token": ({"begin_token": True}, "600, --begin-token: choose another output"),
    "special tokens": ({"special_tokens": "as-text"}, r"600, --special-tokens as-text \(not keep\): "),
    "a file that has changed": ({"change": True}, "600, whose files are others or have changed since: "),
}


@pytest.mark.parametrize("other", OTHER_JOBS)
def test_prepared_data_is_replaced_by_another_job_only_if_asked(
    other: str, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs that use it could not go on."""
    options, says = OTHER_JOBS[other]
    monkeypatch.chdir(tmp_path)
    shutil.copytree(tokenizer_folder, "copy")
    train_tokenizer(["abc " * 9], Path("small"), 258)
    for name in ("a.txt", "b.txt"):
        Path(name).write_text(f"the text of {name}")
    used = Path("copy") if options.get("tokenizer") == "copy" else tokenizer_folder
    prepare(["a.txt"], Path("c"), used)
    if options.get("tokenizer") == "copy":
        Path("copy/tokenizer.json").write_text(json.dumps(json.loads(Path("copy/tokenizer.json").read_text())))
    if options.get("change"):
        Path("a.txt").write_text("another text")
    sources, tokenizer = options.get("sources", ["a.txt"]), Path(options.get("tokenizer", used))
    choice = PrepareOptions(**{key: value for key, value in options.items() if hasattr(USUAL_OPTIONS, key)})
    before = everything(tmp_path)
    for dry_run in (True, False):
        with pytest.raises(DataError, match=f"c holds 1 document prepared .*{says}") as caught:
            prepare(sources, Path("c"), tokenizer, choice, dry_run=dry_run)
        assert "\n" not in str(caught.value) and "--overwrite" in str(caught.value)
    assert everything(tmp_path) == before and not Path("c.parts").exists()
    assert not prepare(sources, Path("c"), tokenizer, choice, overwrite=True).reused
    assert prepare(sources, Path("c"), tokenizer, choice).reused


def test_an_overwriting_run_that_is_killed_leaves_the_old_data_and_goes_on(
    corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("some text")
    output, first = tmp_path / "c", [str(tmp_path / "a.txt")]
    prepare(first, output, tokenizer_folder)
    before = written(output)

    def die(_: PrepareProgress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, output, tokenizer_folder, workers=1, overwrite=True, progress=die)
    assert written(output) == before
    assert prepare(first, output, tokenizer_folder).reused, "the old data is whole"
    with pytest.raises(DataError, match="holds 1 document prepared from"):
        prepare(corpus, output, tokenizer_folder)
    summary = prepare(corpus, output, tokenizer_folder, workers=1, overwrite=True)
    assert summary.resumed_parts == 1 and written(output) == written(reference)


def test_a_trained_tokenizer_is_written_with_the_data_or_not_at_all(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abc " * 9)
    output, texts = tmp_path / "c", ["abc " * 9]
    prepare([str(tmp_path / "a.txt")], output, trained_tokenizer(texts, tmp_path / "one", 258))
    assert inspect_tokenizer(tmp_path / "one").vocab_size == 258
    with pytest.raises(DataError, match=r"vocabulary 258; asked is .*vocabulary 259"):
        prepare([str(tmp_path / "a.txt")], output, trained_tokenizer(texts, tmp_path / "two", 259))
    prepare([str(tmp_path / "a.txt")], tmp_path / "d", trained_tokenizer(texts, tmp_path / "two", 259), dry_run=True)
    assert not (tmp_path / "two").exists()
    shutil.rmtree(tmp_path / "one")
    again = prepare([str(tmp_path / "a.txt")], output, trained_tokenizer(texts, tmp_path / "one", 258))
    assert again.reused and inspect_tokenizer(tmp_path / "one").vocab_size == 258


def test_two_runs_at_once_are_refused(tokenizer_folder: Path, tmp_path: Path) -> None:
    import fcntl

    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.parts").mkdir()
    with (tmp_path / "c.parts" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process is preparing"):
            prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder)
    assert prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder).document_count == 1


@pytest.mark.parametrize("plant", [lambda path, victim: path.symlink_to(victim), lambda path, _: os.mkfifo(path)])
def test_what_stands_in_the_place_of_temporary_files_is_neither_written_to_nor_waited_for(
    plant: Callable[[Path, Path], None], corpus: list[str], tokenizer_folder: Path, reference: Path, tmp_path: Path
) -> None:
    """Others may write into the folder of the data."""
    output, victim = tmp_path / "out", tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out.parts").mkdir()
    names = ["out.bin.tmp", "out.idx.tmp", f".out.meta.json.{os.getpid()}.tmp", "out.parts/journal.json"]
    for name in names:
        plant(tmp_path / name, victim)
    prepare(corpus, output, tokenizer_folder, workers=1)
    assert victim.read_text() == "precious"
    assert all(Path(f"{output}{ending}").is_file() for ending in (".bin", ".idx", ".meta.json"))
    assert not any(path.is_symlink() for path in tmp_path.iterdir()) and written(output) == written(reference)


def test_a_run_waits_for_the_workers_of_a_killed_one(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would give its unfinished files the names of finished ones."""
    import fcntl

    monkeypatch.setattr("data_pipeline.prepare.parts._WORKERS_END_WITHIN_S", 0.2)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "c.parts").mkdir()
    (tmp_path / "c.parts" / ".part-000000.bin.tmp").write_bytes(b"being written")
    with (tmp_path / "c.parts" / "workers").open("w") as worker:
        fcntl.flock(worker, fcntl.LOCK_SH)
        with pytest.raises(DataError, match=r"processes of a killed run of prepare still write into .*c.parts: end"):
            prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder)
    assert prepare([str(tmp_path / "a.txt")], tmp_path / "c", tokenizer_folder).document_count == 1


@pytest.mark.parametrize("place", ["out.parts", "out.parts/lock", "out.parts/workers"])
@pytest.mark.parametrize("leads_to", ["folder", "file", "nothing"])
def test_a_lock_that_leads_elsewhere_is_refused(
    place: str, leads_to: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("hello")
    victim = tmp_path / "victim"
    if leads_to == "folder":
        victim.mkdir()
    elif leads_to == "file":
        victim.write_text("precious")
    (tmp_path / place).parent.mkdir(exist_ok=True)
    (tmp_path / place).symlink_to(victim)
    with pytest.raises(DataError, match=rf"{place} is nothing that prepare makes: remove it, or"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_folder, workers=1)
    if leads_to == "file":
        assert victim.read_text() == "precious"
    else:
        assert victim.is_dir() == (leads_to == "folder") and not list(victim.glob("*"))


def test_a_damaged_part_is_named(corpus: list[str], tokenizer_folder: Path, tmp_path: Path) -> None:
    """A part whose file system lost its content: said, not concatenated."""
    source, output = tmp_path / "a.txt", tmp_path / "c"
    source.write_text("text")

    def damage(_: PrepareProgress) -> None:
        (tmp_path / "c.parts" / "part-000000.npz").write_bytes(b"garbage")

    with pytest.raises(DataError, match=r"part-000000.npz is damaged"):
        prepare([str(source)], output, tokenizer_folder, workers=1, progress=damage)
    assert written(output) == {}


def test_the_package_imports_neither_torch_nor_slow_libraries() -> None:
    modules = "prepare.prepare", "samples.dataset", "storage.indexed", "loader", "tokenizers.training"
    imports = f"import sys, {', '.join(f'data_pipeline.{module}' for module in modules)}"
    script = f"{imports}; print(sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert "'numpy'" in loaded.stdout
    for slow in ("torch", "tokenizers", "datasets", "transformers", "megalite"):
        assert f"'{slow}'" not in loaded.stdout
