"""What counts as a document, in which order, and one sentence for everything that cannot be read."""

import gzip
import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.document import refuse_bad_row
from data_pipeline.errors import DataError
from data_pipeline.sources import arrow_rows, open_sources, parquet
from data_pipeline.sources.row_text import LONGEST_ROW

ROWS = [{"text": "first"}, {"text": ""}, {"text": "thïrd\nline"}]


def documents(specs: list[str], text_field: str = "text", longest: int = LONGEST_ROW) -> list[str]:
    texts = [
        "".join(document.blocks)
        for source in open_sources(specs, text_field, longest)
        for document in source.documents(refuse_bad_row)
    ]
    return [text for text in texts if text]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_text("bé")
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\r\n")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / ".hidden").write_bytes(b"\xff")
    lines = "\n\n".join(json.dumps(row) for row in ROWS)
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "rows.jsonl").write_text(lines)
    (tmp_path / "sub" / "rows.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return tmp_path


def test_files_folders_globs_and_json_lines(folder: Path) -> None:
    rows = ["first", "thïrd\nline"]
    assert documents([f"{folder}/b.txt", f"{folder}/a.txt"]) == ["bé", "a\r\n"]
    assert documents([f"{folder}/*.txt"]) == ["a\r\n", "bé"]
    assert documents([f"{folder}/**/*.jsonl*"]) == rows + rows
    assert documents([str(folder)]) == ["a\r\n", "bé", *rows, *rows]


@pytest.mark.parametrize("name", ["x[1]", "x*", "x?", "x:1", "[!x]", "x**"])
@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_a_file_named_like_a_pattern_is_read_alone(
    name: str, ending: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`datasets` read the files that match it, with their text a second time, or none."""
    import datasets

    monkeypatch.chdir(tmp_path)
    for path, text in ((Path(f"{name}{ending}"), "a"), (Path(f"xx{ending}"), "b"), (Path(f"x1{ending}"), "c")):
        rows = datasets.Dataset.from_dict({"text": [text]})
        with path.open("wb") as file:  # a name would be read as a pattern, or as a URL
            rows.to_parquet(file) if ending == ".parquet" else rows.to_json(file)
    assert documents([f"{name}{ending}"]) == ["a"] == documents([f"dataset:{name}{ending}"])
    folder = tmp_path / name
    folder.mkdir()
    (tmp_path / f"x1{ending}").rename(folder / f"y{ending}")
    assert documents([f"{name}/y{ending}"]) == ["c"]
    if name != "x:1":
        with pytest.raises(DataError, match=r"takes for a pattern: rename the folder, or give its files"):
            documents([f"dataset:{name}"])


def test_datasets_on_disk_and_parquet(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict  # type: ignore[import-untyped]

    data = Dataset.from_list(ROWS)
    data.save_to_disk(tmp_path / "saved")
    DatasetDict({"train": data, "test": data.select([0])}).save_to_disk(tmp_path / "dict")
    data.to_parquet(tmp_path / "rows.parquet")
    rows = ["first", "thïrd\nline"]
    assert documents([f"dataset:{tmp_path}/saved"]) == rows
    assert documents([f"dataset:{tmp_path}/dict"]) == rows
    assert documents([f"dataset:{tmp_path}/dict:test"]) == ["first"]
    assert documents([f"dataset:{tmp_path}/rows.parquet"]) == rows
    assert documents([f"{tmp_path}/rows.parquet"]) == rows
    with pytest.raises(DataError, match=r"no split 'validation' .it has 'train', 'test'"):
        documents([f"dataset:{tmp_path}/dict:validation"])
    with pytest.raises(DataError, match=r"no column 'body' .it has 'text'"):
        documents([f"dataset:{tmp_path}/rows.parquet"], text_field="body")
    with pytest.raises(DataError, match=r"rows.parquet:test cannot be loaded"):
        documents([f"dataset:{tmp_path}/rows.parquet:test"])
    Dataset.from_dict({"text": [1]}).save_to_disk(tmp_path / "numbers")
    with pytest.raises(DataError, match="row 0 has int in field 'text'"):
        documents([f"dataset:{tmp_path}/numbers"])


BAD: dict[str, tuple[bytes, str]] = {
    "missing field": (
        b'{"text": "a"}\n\n{"body": "b", "id": 1}',
        r"line 3 has no field 'text' \(it has 'body', 'id'\)",
    ),
    "not json": (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
    "not an object": (b'["a"]', "line 1 is not a JSON object"),
    "not a string": (b'{"text": null}', "line 1 has NoneType in field 'text'"),
    "not utf-8": (b'{"text": "a"}\n{"text": "\xe4"}', "line 2 is not UTF-8"),
    "nested too deeply": (b"[" * 100_000, r"line 1 is not JSON \(maximum recursion depth exceeded"),
    "a number of too many digits": (b'{"n": ' + b"9" * 5000 + b"}", r"line 1 is not JSON \(Exceeds the limit"),
    "half a surrogate pair": (b'{"text": "\\ud800"}', "line 1 has half of a surrogate pair in field 'text'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_json_lines_name_the_line(case: str, tmp_path: Path) -> None:
    content, sentence = BAD[case]
    (tmp_path / "rows.jsonl").write_bytes(content)
    with pytest.raises(DataError, match=rf"rows.jsonl, {sentence}") as caught:
        documents([str(tmp_path / "rows.jsonl")])
    assert "\n" not in str(caught.value)


LONG = "long " * 300


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("a.jsonl", "line 2"),
        ("a.json", "row 1"),
        ("a.csv", "line 3"),
        ("lines.csv", r"line \d+"),
        ("a.parquet", "row 1"),
        ("a.arrow", "row 1"),
        ("saved", "row 1"),
        ("folder", "row 1"),
    ],
)
def test_a_row_that_is_too_long_is_refused_with_its_place_and_read_where_more_is_allowed(
    name: str, where: str, tmp_path: Path
) -> None:
    """A kilobyte of gzip may hold a line of gigabytes, and each byte of JSON takes 26 as objects of Python."""
    from datasets import Dataset

    rows, path = [{"text": "short"}, {"text": LONG}], tmp_path / name
    match name:
        case "a.jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case "a.json":
            path.write_text(json.dumps(rows))
        case "a.csv" | "lines.csv":
            path.write_text(f'text\nshort\n"{LONG if name == "a.csv" else LONG.replace(" ", chr(10))}"\n')
        case "a.parquet":
            Dataset.from_list(rows).to_parquet(path)
        case "a.arrow":
            Dataset.from_list(rows).save_to_disk(tmp_path / "made")
            path = next((tmp_path / "made").glob("*.arrow"))
        case "saved":
            Dataset.from_list(rows).save_to_disk(path)
        case "folder":
            path.mkdir()
            Dataset.from_list(rows).to_parquet(path / "rows.parquet")
    spec = f"dataset:{path}" if path.is_dir() else str(path)
    with pytest.raises(
        DataError, match=rf"{where} has more than 1,000 bytes: cut the document, or raise --longest-row"
    ):
        documents([spec], longest=1000)
    assert [text.split() for text in documents([spec], longest=2000)] == [["short"], LONG.split()]


def test_a_line_of_gigabytes_in_a_small_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * (8 << 20)))
    with pytest.raises(DataError, match="line 2 has more than 1,048,576 bytes: cut the document"):
        documents([str(tmp_path / "bomb.jsonl.gz")], longest=1 << 20)


def test_texts_of_parquet_that_are_not_repeated_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read by a dictionary, each batch had all texts before it: a million took minutes, and the memory of them all."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    texts = [f"{number} {'x' * 200}" for number in range(4000)]
    write_table(pa.table({"text": texts}), tmp_path / "rows.parquet")
    sizes = []

    def documents_of(batch: Any, *arguments: Any) -> Any:
        sizes.append(batch.nbytes)
        return arrow_rows.documents_of(batch, *arguments)

    monkeypatch.setattr(parquet, "documents_of", documents_of)
    assert documents([str(tmp_path / "rows.parquet")]) == texts
    assert max(sizes) < sum(map(len, texts)) / 8

    sizes.clear()
    table = pa.table({"text": pa.array(texts).dictionary_encode()})  # as pandas writes a column of categories
    write_table(table, tmp_path / "coded.parquet")
    assert documents([str(tmp_path / "coded.parquet")]) == texts
    assert len(sizes) <= 8, "each batch has all texts, whatever its rows"


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_text_that_parquet_holds_once_for_all_rows_is_not_multiplied(is_chat: bool, tmp_path: Path) -> None:
    """A file of 774 bytes took gigabytes: a thousand rows of one dictionary of a megabyte were read at once."""
    import pyarrow as pa
    from pyarrow.parquet import write_table

    text, rows = "x" * (1 << 18), 400
    answers = pa.array([[{"role": "user", "content": text}, {"role": "assistant", "content": text}]] * 40 * is_chat)
    table = pa.table({"messages": answers} if is_chat else {"text": pa.array([text] * rows)})
    write_table(table, tmp_path / "bomb.parquet", compression="zstd", use_dictionary=True)
    del table, answers
    (source,) = open_sources([str(tmp_path / "bomb.parquet")], None if is_chat else "text")
    before, most, count = pa.total_allocated_bytes(), 0, 0
    for stretch in source.stretches(1 << 20):
        for document in source.documents(refuse_bad_row, stretch):
            most, count = max(most, pa.total_allocated_bytes() - before), count + 1
            assert text in "".join(document.blocks)
    assert count == (40 if is_chat else rows) and most < 24 << 20


@pytest.mark.parametrize("kind", ["numpy", "pandas", "arrow", "torch", "shuffled", "of conversations", "with pictures"])
def test_the_state_in_which_a_data_set_was_saved_has_no_say(kind: str, tmp_path: Path) -> None:
    """A format is for its owner's code: `pandas` ended in a TypeError, and columns of pictures were decoded."""
    from datasets import Dataset, Image

    texts = [f"row {number} of the data set" for number in range(20)]
    rows, field = Dataset.from_dict({"text": texts, "n": list(range(20))}), "text"
    if kind == "shuffled":
        rows = rows.shuffle(seed=1)
        texts = rows["text"][:]
    elif kind == "of conversations":
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in texts]
        rows, field = Dataset.from_dict({"messages": chats}).with_format("pandas"), None
    elif kind == "with pictures":
        (tmp_path / "no.png").write_bytes(b"none")
        rows = (
            rows.add_column("picture", [str(tmp_path / "no.png")] * 20)
            .cast_column("picture", Image())
            .with_format("numpy")
        )
    else:
        rows = rows.with_format(kind, columns=["n"])
    rows.save_to_disk(tmp_path / "saved")
    (source,) = open_sources([f"dataset:{tmp_path}/saved"], field)
    found = ["".join(document.blocks) for document in source.documents(refuse_bad_row)]
    assert len(found) == 20 and all(text in one for text, one in zip(texts, found, strict=True))


def test_files_of_a_folder_may_have_different_columns_and_the_one_without_the_text_is_named(tmp_path: Path) -> None:
    from datasets import Dataset

    Dataset.from_dict({"text": ["a"], "n": [1]}).to_parquet(tmp_path / "a.parquet")
    Dataset.from_dict({"text": ["b"], "source": ["web"]}).to_parquet(tmp_path / "b.parquet")
    assert documents([f"dataset:{tmp_path}"]) == documents([str(tmp_path)]) == ["a", "b"]
    Dataset.from_dict({"body": ["c"]}).to_parquet(tmp_path / "c.parquet")
    for spec in (f"dataset:{tmp_path}", str(tmp_path)):
        with pytest.raises(DataError, match=r"c\.parquet has no column 'text' \(it has 'body'\): name the column that"):
            documents([spec])
    (tmp_path / "json").mkdir()
    (tmp_path / "json" / "a.jsonl").write_text('{"text": "a", "n": 1}\n')
    (tmp_path / "json" / "b.jsonl").write_text('{"body": "b"}\n')
    with pytest.raises(
        DataError,
        match=r"json, b\.jsonl cannot be loaded \(it has the columns 'body', .*, and the first file 'text', 'n'\)",
    ):
        documents([f"dataset:{tmp_path}/json"])


LINES = st.lists(
    st.sampled_from(
        ['{"text": ', '"a"', "}", "[", "]", "null", "1e9", "\n", '"', "\\ud800", "\\u0041", "{", ":", "NaN", ","]
    ),
    max_size=12,
).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=LINES.map(str.encode) | st.binary(max_size=60))
def test_any_json_lines_are_text_or_a_sentence(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_bytes(content)
    try:
        found = documents([str(tmp_path / "rows.jsonl")])
    except DataError as error:
        assert str(tmp_path) in str(error) and "\n" not in str(error)
    else:
        "".join(found).encode()


def test_sources_that_are_not_there_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"missing.txt does not exist"):
        documents([str(tmp_path / "missing.txt")])
    (tmp_path / "link.txt").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"link.txt does not exist \(it is a link to nowhere, which is not there\)"):
        documents([str(tmp_path / "link.txt")])
    (tmp_path / "link.txt").unlink()
    with pytest.raises(DataError, match="/dev/null is a pipe or device, no file: write its text into one"):
        documents(["/dev/null"])
    with pytest.raises(DataError, match=r"no file matches the source pattern '.*\*.md'"):
        documents([f"{tmp_path}/*.md"])
    with pytest.raises(DataError, match="holds no files"):
        documents([str(tmp_path)])
    with pytest.raises(DataError, match=r"source - .stdin. is not read: write the text into a file"):
        documents(["-"])
    from datasets import Dataset

    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    state = tmp_path / "saved" / "state.json"
    state.write_text(json.dumps(json.loads(state.read_bytes()) | {"_data_files": []}))
    with pytest.raises(DataError, match=r"state.json names no files in _data_files: save the data set again"):
        documents([f"dataset:{tmp_path / 'saved'}"])
    with pytest.raises(DataError, match="no source is given"):
        documents([])
    with pytest.raises(DataError, match="names no data set"):
        documents(["dataset:"])
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 50)[:-10])
    with pytest.raises(DataError, match=r"cut.jsonl.gz is not a complete gzip file, it ends"):
        documents([f"{tmp_path}/cut.jsonl.gz"])


@pytest.mark.parametrize("is_cut_inside", [False, True])
def test_a_damaged_parquet_file_is_one_sentence(
    is_cut_inside: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """`datasets` logs the damage before it raises; damage that its footer does not show is found only while reading."""
    from datasets import Dataset, logging

    path = tmp_path / "rows.parquet"
    Dataset.from_dict({"text": [f"text {number}" for number in range(1000)]}).to_parquet(path)
    content = bytearray(path.read_bytes())
    content[4:1000] = b"\xff" * 996
    path.write_bytes(content if is_cut_inside else b"no parquet")
    verbosity = logging.get_verbosity()
    capfd.readouterr()
    with pytest.raises(DataError, match=rf"^{path} is not a whole parquet file \(.*\): fetch or write it again"):
        documents([str(path)])
    assert capfd.readouterr().err == "" and logging.get_verbosity() == verbosity


def test_a_hub_that_does_not_answer_is_said_before_datasets_tries_again_and_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    unreachable = Mock(side_effect=TimeoutError("Name or service not known\nmore about it"))
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", unreachable)
    monkeypatch.setattr("datasets.load_dataset", Mock(side_effect=AssertionError("retries for half a minute")))
    for spec in ("dataset:some/thing", "dataset:./thing:test"):
        with pytest.raises(
            DataError, match=r"did not answer \(Name or service not known\): check the name and the network, or"
        ):
            documents([spec])


@pytest.mark.parametrize("bad_byte", [0, 5, (1 << 20) + 2, (3 << 20) - 1])
def test_text_that_is_not_utf8_names_the_byte(bad_byte: int, tmp_path: Path) -> None:
    content = bytearray(b"\xc3\xa4" * (3 << 19))
    content[bad_byte] = 0xFF
    (tmp_path / "latin.txt").write_bytes(content)
    first_bad = bad_byte - bad_byte % 2  # an odd byte ends a character that then began in vain
    with pytest.raises(DataError, match=rf"latin.txt is not UTF-8 text \(byte {first_bad}\)"):
        documents([str(tmp_path / "latin.txt")])


@pytest.mark.parametrize("form", ["{}", "file://{}", "dataset:{}"])
@pytest.mark.parametrize("name", ["~notes.jsonl", "~/notes.jsonl"])
def test_a_tilde_is_the_home_folder_or_a_letter(
    form: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Editors call copies `~NAME`; where no user has that name, such a source has ended in a traceback."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / name.removeprefix("~/")).write_text('{"text": "a"}\n')
    assert documents([form.format(name)]) == ["a"]
