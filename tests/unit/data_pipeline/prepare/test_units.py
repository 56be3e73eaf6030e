"""Units hold every document once, whatever their size; a run that goes on reads none of those that are finished."""

import gzip
import json
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from data_pipeline.document import refuse_bad_row
from data_pipeline.encoding.cutting import CUT_PLACES, cut_document
from data_pipeline.errors import DataError
from data_pipeline.prepare.parts import PartStore
from data_pipeline.prepare.plan import PrepareOptions, plan_job
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.prepare.units import unit_pieces, work_units
from data_pipeline.prepare.workers import UnitTask, UnitWork
from data_pipeline.sources import open_sources


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """A function that sets the size of units in bytes; pieces of documents are a thousandth of the real ones."""
    monkeypatch.setattr("data_pipeline.encoding.cutting.PIECE_CHARACTERS", 1000)
    monkeypatch.setattr("data_pipeline.encoding.cutting._CUT_WINDOW", 60)
    monkeypatch.setattr("data_pipeline.prepare.units._SHORTEST_RANGE", 4000)
    monkeypatch.setattr("data_pipeline.prepare.units._LOOKED_AHEAD_BYTES", 7)  # ends within characters and places

    def set_size(size: int) -> None:
        for name in ("_SMALLEST_UNIT", "_LARGEST_UNIT", "_UNIT_OF_UNKNOWN_SIZE"):
            monkeypatch.setattr(f"data_pipeline.prepare.plan.{name}", size)

    return set_size


def drawn_text(draw: random.Random, most: int) -> str:
    words = [
        "word",
        "wörd",
        "漢字" * draw.randrange(9),
        "🙂" * draw.randrange(60),
        "\n",
        " ",
        "  ",
        "\n\n",
        "\r\n",
        "x" * 90,
    ]
    return "".join(draw.choice(words) for _ in range(draw.randrange(most)))


def drawn_lines(draw: random.Random) -> bytes:
    """Rows of very different lengths, blank lines, both kinds of line break, and no line break at the end."""
    rows = [json.dumps({"text": drawn_text(draw, 40)}, ensure_ascii=draw.random() < 0.5) for _ in range(60)]
    rows += [json.dumps({"text": "long " * 900}), "", "  "]
    draw.shuffle(rows)
    return draw.choice(["\n", "\r\n"]).join(rows).encode()


def write_sources(folder: Path, draw: random.Random) -> None:
    from datasets import Dataset

    folder.mkdir()
    for number in range(3):
        (folder / f"a{number}.jsonl").write_bytes(drawn_lines(draw))
        (folder / f"b{number}.txt").write_bytes(drawn_text(draw, 9).encode())
        (folder / f"c{number}.txt").write_bytes(b"\xef\xbb\xbf" * (number == 1) + drawn_text(draw, 1200).encode())
    (folder / "d.txt").write_text("one " + "ä" * 9000 + "\ntwo " + "z" * 9000)
    (folder / "e.json").write_text(json.dumps([{"text": "row"}] * 9))
    (folder / "f.csv").write_text('text\n"a\nb"\nc\n')
    rows = [{"text": f"row {number} " * 9} for number in range(50)]
    Dataset.from_list(rows).to_parquet(folder / "g.parquet", batch_size=7)
    (folder / "many").mkdir()
    for number in range(3):
        Dataset.from_list(rows[number:20]).to_parquet(folder / "many" / f"{number}.parquet")
    Dataset.from_list(rows).save_to_disk(str(folder / "saved"))


@pytest.mark.parametrize("seed", range(3))
def test_every_document_is_in_one_unit(seed: int, small_units: Callable[[int], None], tmp_path: Path) -> None:
    """Lost and doubled documents are at the edges of ranges, so there are many ranges, also inside of long lines."""
    small_units(1)
    write_sources(tmp_path / "all", random.Random(seed))
    folders = [f"dataset:{tmp_path}/all/many", f"dataset:{tmp_path}/all/saved"]
    sources = open_sources([f"{tmp_path}/all/*.*", *folders], "text")
    whole = [
        "".join(piece.text for piece in cut_document(document, 0, CUT_PLACES, refuse_bad_row))
        for source in sources
        for document in source.documents(refuse_bad_row)
    ]
    for size in (50, 700, 9000, 10**7):
        units = work_units(sources, CUT_PLACES, size)
        texts, is_open = [""], False
        for unit in units:
            for piece in unit_pieces(sources, CUT_PLACES, unit, 0, refuse_bad_row):
                assert piece.text and piece.begins_document != is_open
                texts[-1] += piece.text
                is_open = not piece.ends_document
                texts += [""] * piece.ends_document
        assert texts[:-1] == [text for text in whole if text], size
        assert (len(units) == 1) == (size == 10**7) or len(units) > 9000 // size


def test_units_do_not_depend_on_reading(tmp_path: Path) -> None:
    """Their numbers are all that a run which goes on has; a unit of several files holds whole files."""
    for number in range(30):
        (tmp_path / f"{number:02}.txt").write_text("x" * 10)
    (tmp_path / "97.txt.gz").write_bytes(b"z" * 20)
    (tmp_path / "98.txt.gz").write_bytes(b"z" * 20)  # a text of some 80 bytes
    (tmp_path / "99.jsonl").write_bytes(b"\n" * 250)
    sources = open_sources([str(tmp_path)], "text")
    units = work_units(sources, CUT_PLACES, 100)
    assert [len(unit) for unit in units] == [10, 10, 10, 1, 1, 1, 1, 1]
    assert [(unit[0].stretch.begin, unit[0].stretch.end) for unit in units[5:]] == [(0, 100), (100, 200), (200, None)]


def test_a_file_that_keeps_others_waiting_is_said_before_it_is_read(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dump in one compressed file would be encoded on one core without a word."""
    monkeypatch.setattr("data_pipeline.prepare.units._LARGE_FILE", 30)
    content = json.dumps({"text": "one two"}).encode() + b"\n"
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(content))
    (tmp_path / "b.jsonl").write_bytes(content)
    said: list[str] = []
    for names in (["b.jsonl"] * 9, ["b.jsonl", "a.jsonl.gz"]):
        assert said == []
        specs = [str(tmp_path / name) for name in names]
        choice = {"workers": 2, "overwrite": True, "notice": said.append}
        monkeypatch.setattr("data_pipeline.prepare.plan._UNIT_OF_UNKNOWN_SIZE", 30)
        prepare(specs, tmp_path / "out", tokenizer_folder, **choice)  # type: ignore[arg-type]
    assert [sentence.partition(" is read by one process")[0] for sentence in said] == [str(tmp_path / "a.jsonl.gz")]
    for name, text in {"rows.txt": content, "words.txt": b"{one} two\n"}.items():  # rows would be one document
        (tmp_path / name).write_bytes(text)
        prepare([str(tmp_path / name)], tmp_path / name, tokenizer_folder, notice=said.append, workers=1)
    assert len(said) == 2 and "rows.txt: a file of text is one document, but the first line is a JSON" in said[1]


@pytest.mark.parametrize("only_count", [False, True])
def test_a_worker_hears_a_stop_while_it_finds_nothing_but_bad_rows(
    only_count: bool, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C would wait for the end of a file of which every row is left out."""
    monkeypatch.setattr("data_pipeline.prepare.workers._REPORT_EVERY_S", 0)
    (tmp_path / "rows.jsonl").write_text('{"other": 1}\n' * 50)
    job = plan_job([str(tmp_path / "rows.jsonl")], tokenizer_folder, PrepareOptions(skip_bad_rows=True))
    reports = list[tuple[int, int]]()
    store = PartStore(tmp_path / "out", job.parts_sha256)
    store.folder.mkdir()
    UnitWork(job, store).do(UnitTask(0, 0, only_count), lambda documents, tokens: reports.append((documents, tokens)))
    assert len(reports) >= 50 and set(reports) == {(0, 0)}


def written(output: Path) -> list[bytes]:
    return [Path(f"{output}{ending}").read_bytes() for ending in (".bin", ".idx")]


@pytest.fixture
def fim_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> Path:
    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    folder = tmp_path / "tok"
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    return folder


@pytest.mark.parametrize("options", [{}, {"fill_in_the_middle": 0.5}, {"special_tokens": "refuse"}], ids=str)
def test_the_bytes_depend_on_neither_units_nor_workers(
    options: dict[str, Any], small_units: Callable[[int], None], fim_tokenizer: Path, tmp_path: Path
) -> None:
    """One unit of everything, read by this process, is the reference; bad rows and refused texts reach over units."""
    draw, source = random.Random(5), tmp_path / "source"
    write_sources(source, draw)
    lines = (source / "a0.jsonl").read_bytes()
    (source / "a0.jsonl").write_bytes(lines.replace(b"\n", b"\n{\n", 9))
    refused = "".join(drawn_text(draw, 99) + "<|endoftext|>" * (number == 20) for number in range(50))
    (source / "h.txt").write_text(refused)
    choice = PrepareOptions(skip_bad_rows=True, **options)
    made = []
    processes = 1 if options else 2  # others have pieces of the usual size
    for number, (size, workers) in enumerate([(10**7, 1), (3000, 1), (20_000, processes)]):
        small_units(size)
        specs = [f"{source}/*.*", f"dataset:{source}/many", f"dataset:{source}/saved"]
        summary = prepare(specs, tmp_path / f"out{number}", fim_tokenizer, choice, workers=workers)
        made.append((summary.skipped_rows, summary.first_skipped, *written(summary.output)))
    assert made[0][0] == (10 if options.get("special_tokens") else 9) and len(made[0][1]) == 3
    assert made[1] == made[0] and made[2] == made[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_row_in_any_range_is_named_by_its_line(
    workers: int, small_units: Callable[[int], None], tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A range knows only how many lines are in itself."""
    small_units(500)
    rows = ['{"text": "one two"}', ""] * 200
    rows[333] = "{"
    source = tmp_path / "a.jsonl"
    for end in ("\n", "\r\n"):
        source.write_text(end.join(rows), newline="")
        with pytest.raises(DataError, match=rf"^{source}, line 334 is not JSON .*with --on-bad-row skip") as said:
            prepare([str(source)], tmp_path / "out", tokenizer_folder, workers=workers)
        assert "after byte" not in str(said.value)
    choice = PrepareOptions(skip_bad_rows=True)
    summary = prepare([str(source)], tmp_path / "out", tokenizer_folder, choice, workers=workers)
    assert summary.first_skipped[0].startswith(f"{source}, line 334 is not JSON")


def test_a_bad_row_in_any_row_group_is_named_by_its_number(
    small_units: Callable[[int], None], tokenizer_folder: Path, tmp_path: Path
) -> None:
    from datasets import Dataset

    small_units(50)
    rows = Dataset.from_dict({"text": ["one two"] * 40 + [None] + ["three"] * 9})
    rows.to_parquet(tmp_path / "a.parquet", batch_size=7)
    rows.save_to_disk(str(tmp_path / "saved"))
    for name in (f"{tmp_path}/a.parquet", f"dataset:{tmp_path}/saved"):
        with pytest.raises(DataError, match=f"^{name}, row 40 has NoneType in field 'text'"):
            prepare([name], tmp_path / "out", tokenizer_folder, workers=1)


def bytes_read() -> int:
    """Bytes that this process has read from files so far, as the kernel counts them."""
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


@pytest.mark.parametrize("options", [{}, {"fill_in_the_middle": 0.5}], ids=str)
def test_a_run_that_goes_on_reads_at_most_two_finished_units(
    options: dict[str, Any], small_units: Callable[[int], None], fim_tokenizer: Path, tmp_path: Path
) -> None:
    unit, source, output, draw = 30_000, tmp_path / "a.jsonl", tmp_path / "out", random.Random(1)
    small_units(unit)
    source.write_text("".join(json.dumps({"text": f"one two {number} " * 30}) + "\n" for number in range(2500)))
    count = -(-source.stat().st_size // unit)
    assert count > 30
    choice = PrepareOptions(skip_bad_rows=True, **options)  # otherwise it is looked up which parts lack rows
    (tmp_path / "b.txt").write_text("what every run reads: the tokenizer, and the first one modules")
    for name in ("first", "second"):
        fixed = -bytes_read()
        prepare([str(tmp_path / "b.txt")], tmp_path / name, fim_tokenizer, choice, workers=1)
        fixed += bytes_read()
    done = 0
    for stop in [*sorted(draw.sample(range(2, count - 1), 2)), count]:
        reads, doing = list[int](), set[str]()

        def look(
            progress: PrepareProgress, stop: int = stop, reads: list[int] = reads, doing: set[str] = doing
        ) -> None:
            doing.add(progress.doing)
            if progress.doing != "joining":
                reads.append(bytes_read())
            if progress.doing == "encoding" and progress.parts_done == stop < count:
                raise KeyboardInterrupt

        before = bytes_read() + fixed
        with suppress(KeyboardInterrupt):
            prepare([str(source)], output, fim_tokenizer, choice, workers=1, progress=look)
        assert ("counting" in doing) == (bool(options) and done == 0), "the documents of finished units are known"
        of_text = (stop - done) * unit + count * unit * ("counting" in doing)
        buffered = 4096 * of_text // unit  # what is read beyond the end of a range
        assert reads[-1] - before < of_text + buffered + 2 * unit
        done = stop
    assert prepare([str(source)], tmp_path / "alone", fim_tokenizer, choice, workers=1).resumed_parts == 0
    assert written(output) == written(tmp_path / "alone")


def test_a_run_that_goes_on_looks_once_at_each_finished_part(
    small_units: Callable[[int], None], tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Corpora of terabytes have a hundred thousand parts, and a look takes a millisecond or more."""
    small_units(300)
    (tmp_path / "rows.jsonl").write_text('{"text": "a row of text"}\n' * 100)
    source, output = [str(tmp_path / "rows.jsonl")], tmp_path / "out"

    def stop(progress: PrepareProgress) -> None:
        if progress.parts_done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(source, output, tokenizer_folder, workers=1, progress=stop)
    looked, lacks_rows = list[int](), PartStore._lacks_rows

    def counted(store: PartStore, number: int) -> bool:
        looked.append(number)
        return lacks_rows(store, number)

    monkeypatch.setattr(PartStore, "_lacks_rows", counted)
    assert prepare(source, output, tokenizer_folder, workers=1).resumed_parts == 5
    assert sorted(looked) == [0, 1, 2, 3, 4]


def test_a_disk_without_room_for_the_output_is_said_before_it_is_written(
    tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the output would only take what room there is; the parts are kept."""
    (tmp_path / "a.txt").write_text("one two three")
    with monkeypatch.context() as full:
        full.setattr("shutil.disk_usage", lambda _: type("usage", (), {"free": 30}))
        with pytest.raises(
            DataError, match=r"out.bin and .idx take \d\d bytes beside the finished parts, but 30 are fr"
        ):
            prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_folder, workers=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.txt", "out.parts"]
    assert prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_folder, workers=1).resumed_parts == 1


@pytest.mark.parametrize("damage", ["cut short", "removed", "a link"])
def test_damaged_tokens_of_a_part_are_named(damage: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one two three")
    tokens = tmp_path / "out.parts" / "part-000000.bin"

    def hurt(progress: PrepareProgress) -> None:
        if progress.doing == "encoding" and tokens.is_file() and not tokens.is_symlink():
            content = tokens.read_bytes()
            tokens.unlink()
            if damage == "cut short":
                tokens.write_bytes(content[:-1])
            elif damage == "a link":
                (tmp_path / "elsewhere").write_bytes(content)
                tokens.symlink_to(tmp_path / "elsewhere")

    with pytest.raises(DataError, match=r"part-000000.bin is damaged .*: delete part-000000.npz beside it and run pre"):
        prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_folder, workers=1, progress=hurt)
    (tmp_path / "out.parts" / "part-000000.npz").unlink()
    assert prepare([str(tmp_path / "a.txt")], tmp_path / "out", tokenizer_folder, workers=1).document_count == 1
