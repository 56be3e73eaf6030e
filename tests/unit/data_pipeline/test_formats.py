"""A file is read by its ending, compressed or not, and never taken for text where it is none."""

import bz2
import gzip
import json
import lzma
import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from data_pipeline.document import refuse_bad_row
from data_pipeline.errors import DataError
from data_pipeline.sources import open_sources
from data_pipeline.sources.folders import repeated_files
from tests.unit.data_pipeline.test_sources import documents

TEXTS = ["first", "NA", 'thïrd\n"line", 漢字', "007", ""]
LINES = "\n".join(json.dumps({"id": number, "text": text}) for number, text in enumerate(TEXTS)).encode()
TABLE = b'id,text\r\n0,first\r\n1,NA\r\n2,"th\xc3\xafrd\n""line"", \xe6\xbc\xa2\xe5\xad\x97"\r\n3,007\r\n4,\r\n'
FILES: dict[str, bytes] = {
    "rows.jsonl": LINES,
    "rows.ndjson": LINES,
    "lines.json": b"\n" + LINES,  # as many data sets call JSON lines
    "array.json": b'\xef\xbb\xbf [{"text": "first"},\n' + LINES.partition(b"\n")[2].replace(b"\n", b",") + b"]",
    "table.csv": TABLE,
    "marked.csv": b'\xef\xbb\xbftext\nfirst\nNA\n"th\xc3\xafrd\n""line"", \xe6\xbc\xa2\xe5\xad\x97"\n007\n',
}


def compressed(content: bytes, codec: str) -> bytes:
    sink = pyarrow.BufferOutputStream()
    with pyarrow.CompressedOutputStream(sink, codec) as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


COMPRESSED = {
    ".gz": lambda content: gzip.compress(content[:9]) + gzip.compress(content[9:]),  # in two members, as pigz writes
    ".zst": lambda content: compressed(content[:9], "zstd") + compressed(content[9:], "zstd"),
    ".bz2": lambda content: bz2.compress(content[:9]) + bz2.compress(content[9:]),
    ".lz4": lambda content: compressed(content, "lz4"),
    ".xz": lambda content: lzma.compress(content[:9]) + bytes(4) + lzma.compress(content[9:]),  # filled up between
}


def test_gzip_that_is_filled_up_with_zeros_is_read_as_gzip_itself_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(COMPRESSED[".gz"](LINES) + bytes(512))
    assert documents([str(path)]) == TEXTS[:-1]
    for content, sentence in {bytes(512): "is no gzip file", gzip.compress(LINES)[:20] + bytes(512): "gzip"}.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=rf"rows.jsonl.gz .*{sentence}"):
            documents([str(path)])


@pytest.mark.parametrize("name", FILES)
def test_rows_of_json_and_of_tables_are_documents(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(FILES[name])
    assert documents([str(tmp_path / name)]) == TEXTS[:-1]


def test_objects_over_several_lines_are_rows(tmp_path: Path) -> None:
    """Line 1 was said to be no JSON; json.dump with an indent writes such a file, and it may be appended to."""
    (tmp_path / "indented.json").write_text("\n".join(json.dumps({"text": text}, indent=2) for text in TEXTS[:-1]))
    (tmp_path / "by_hand.json").write_text('\ufeff\n{"text": "a",\n"id": 1}\n', encoding="utf-8")
    assert documents([str(tmp_path / "indented.json")]) == TEXTS[:-1]
    assert documents([str(tmp_path / "by_hand.json")]) == ["a"]


@pytest.mark.parametrize("ending", COMPRESSED)
def test_compressed_files_are_read_by_their_ending(ending: str, tmp_path: Path) -> None:
    for name, content in {**FILES, "notes.txt": b"\xef\xbb\xbf" + LINES}.items():
        (tmp_path / f"{name}{ending}").write_bytes(COMPRESSED[ending](content))
        expected = [LINES.decode()] if name == "notes.txt" else TEXTS[:-1]
        assert documents([str(tmp_path / f"{name}{ending}")]) == expected, name
    assert [source.size_bytes for source in open_sources([str(tmp_path)], "text")] == [None] * 7


DAMAGE = {
    "cut short": "is not a complete {codec} file, it ends after {size:,} bytes inside its data: it was cut short",
    "changed inside": "is damaged inside \\({codec}: .+\\): fetch it again, or compress the text again",
    "a page": "is no {codec} file, it is a web page: give it the ending of what it is, or fetch it again",
    "text": "is no {codec} file, its first bytes are no such data: give it the ending of what it is",
    "another format": "is no {codec} file, it is a 7z file: give it the ending of what it is",
    "something behind": "has something else than {codec} data behind its first part \\(.+\\): unpack it and give",
}


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("ending", COMPRESSED)
def test_the_reason_for_which_a_file_is_not_decompressed_is_the_true_one(
    ending: str, damage: str, tmp_path: Path
) -> None:
    """A file that was only named wrongly, or has something behind it, must not be fetched again for hours."""
    content = bytearray(
        COMPRESSED[ending](b"".join(json.dumps({"text": f"{n * 7919}"}).encode() + b"\n" for n in range(9999)))
    )
    middle = len(content) // 2
    match damage:
        case "cut short":
            del content[-9:]
        case "changed inside" if ending == ".lz4":
            return  # pyarrow writes no checksum, so that it is not seen
        case "changed inside":
            content[middle : middle + 40] = bytes(40)
        case "a page":
            content = bytearray(b"\n<html>Not Found</html>")
        case "text":
            content = bytearray(LINES)
        case "another format":
            content[:4] = b"7z\xbc\xaf"
        case "something behind":
            content += b"signature of somebody"
    codec = {".gz": "gzip", ".zst": "zstd"}.get(ending, ending[1:])
    sentence = DAMAGE[damage].format(codec=codec, size=len(content))
    for name in ("rows.jsonl", "notes.txt"):
        (tmp_path / f"{name}{ending}").write_bytes(content)
        with pytest.raises(DataError, match=rf"{name}{ending} {sentence}") as caught:
            documents([str(tmp_path / f"{name}{ending}")])
        assert "\n" not in str(caught.value)


def long_window(content: bytes, exponent: int) -> bytes:
    """A frame of zstd with one block as it stands, whose window is 2**exponent bytes, as `zstd --long` writes."""
    return (
        b"\x28\xb5\x2f\xfd" + bytes([0, (exponent - 10) << 3]) + struct.pack("<I", len(content) << 3 | 1)[:3] + content
    )


@pytest.mark.parametrize("exponent", [27, 28, 31])
def test_zstd_is_read_with_every_window_that_its_format_has(exponent: int, tmp_path: Path) -> None:
    """Archives of forum posts are published with windows of 2 GiB, which pyarrow takes for damage."""
    path = tmp_path / "posts.jsonl.zst"
    path.write_bytes(long_window(LINES, exponent) + long_window(b'\n{"text": "more"}', exponent))
    assert documents([str(path)]) == [*TEXTS[:-1], "more"]
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"posts\.jsonl\.zst is not a complete zstd file, it ends after"):
        documents([str(path)])


def test_a_later_frame_of_zstd_with_a_larger_window_says_how_to_unpack(tmp_path: Path) -> None:
    path = tmp_path / "posts.jsonl.zst"
    path.write_bytes(long_window(LINES, 20) + long_window(LINES, 31))
    with pytest.raises(DataError, match=r"takes too much memory to be read: unpack it with `zstd -d --long=31`"):
        documents([str(path)])


NO_TEXT = {
    "dump.jsonl.br": "is compressed in a way that is not read: compress it anew, as .zst or .gz",
    "dump.jsonl.gpg": "is encrypted: decrypt it and give the result",
    "pages.zip": "is an archive, which is not read: unpack it",
    "pages.tar.gz": "is an archive",
    "pages.tgz": "is an archive",
    "rows.feather": "is a table in a format that is not read",
    "rows.orc": "is a table in a format that is not read",
    "rows.parquet.gz": "is compressed a second time",
    "ids.npy": "holds arrays or objects, no text: write the text",
    "rows.pkl": "holds arrays or objects, no text",
    "table.tsv": "is a table in a format that is not read: save it as .csv",
    "table.tsv.gz": "is a table in a format",
}


@pytest.mark.parametrize("name", NO_TEXT)
def test_what_is_no_text_is_not_taken_for_it(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"text\tlabel\nsome words\t1\n")
    for spec in (name, "", "*"):
        with pytest.raises(DataError, match=rf"{name} {NO_TEXT[name]}"):
            documents([str(tmp_path / spec)])


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "other.csv": (b"label,body\n1,a\n", r"other.csv has no column 'text' \(it has 'label', 'body'\): name the column"),
    "twice.csv": (b"text,id,text\na,1,b\n", r"twice.csv has more than one column 'text': give them names of their own"),
    "semicolons.csv": (b"text;label\na;1\n", r"its columns seem to be parted by ';': write the table with commas, or"),
    "array.jsonl": (b'[{"text": "a"}]', r"on each line, or name the file .json, which may hold one array"),
    "indented.jsonl": (b'[\n  {"text": "a"}\n]', r"on each line, or name the file .json, which may hold one array"),
    "ragged.csv": (b"text,label\na,1\nsome, words,2\n", "line 3 has more cells than the first line names: put cells"),
    "short.csv": (b"label,text\n1,a\n2\n", "line 3 has fewer cells than"),
    "quote.csv": (b'text\n"a"b\n', r"line 2 is not CSV \(.*\): write the table again"),
    "latin.csv": (b"text\n\xe4\n", "latin.csv, line 2 is not UTF-8 text: convert"),
    "other.json": (b'[{"text": "a"}, {"body": "b"}]', r"row 1 has no field 'text' \(it has 'body'\)"),
    "strings.json": (b'["a", "b"]', "row 0 is not a JSON object"),
    "wrapped.json": (
        b'{\n  "data": [\n{"text": "a"}]\n}',
        "row 0 holds rows in its list 'data': write that list alone",
    ),
    "open.json": (b'{\n  "text": "a"\n}\n{\n', r"open.json, row 1 is not JSON \(.*\): put one array of JSON objects"),
    "open.jsonl": (b'{\n  "text": "a"\n}', r"on each line, or name the file .json, .* objects over several lines"),
    "torn.json": (b'{"text": "a,\n{"text": "b"}\n', "torn.json, line 1 is not JSON"),
    "cut.json": (b'[{"text": "a"},', r"row 1 is not JSON \(.*, it ends too early\): put one array of JSON objects"),
    "torn_array.json": (b'[{"text": "a"}, {"te', r"row 1 is not JSON \(.*, it ends too early\)"),
    "open_array.json": (b'[{"text": "a"}', "row 0 ends a cut array: put"),
    "latin.json": (b'[{"text": "a"}, {"text": "\xe9"}]', r"latin.json is not UTF-8 text \(byte 26\): convert"),
    "wide.jsonl": (
        '{"text": "a"}\n'.encode("utf-16"),
        "wide.jsonl is not UTF-8 text, it looks like UTF-16: convert it",
    ),
    "plain.jsonl": ('{"text": "a"}\n'.encode("utf-16-be"), "plain.jsonl is not UTF-8 text, it looks like UTF-16: conv"),
    "wider.jsonl": ('{"text": "a"}\n'.encode("utf-32-le"), "wider.jsonl is not UTF-8 text, it looks like UTF-16"),
    "wide.json": ('[{"text": "a"}]'.encode("utf-16"), "wide.json is not UTF-8 text, it looks like UTF-16"),
    "wide.csv": ("text\na\n".encode("utf-16"), "wide.csv is not UTF-8 text, it looks like UTF-16"),
    "wide.txt": ("a".encode("utf-16"), r"wide.txt is not UTF-8 text, it looks like UTF-16: convert it"),
    "no_mark.txt": ("漢字 and all that".encode("utf-16-le"), "no_mark.txt is not UTF-8 text, it looks like UTF-16"),
    "no_mark.csv": ("text\na\n".encode("utf-16-be"), "no_mark.csv is not UTF-8 text, it looks like UTF-16"),
    "no_mark.json": ('[{"text": "a"}]'.encode("utf-16-le"), "no_mark.json is not UTF-8 text, it looks like UTF-16"),
    "no_mark.txt.gz": (gzip.compress("a b".encode("utf-16-le")), "no_mark.txt.gz is not UTF-8 text, it looks like"),
    "short.txt": (b"a\0b\0\n", "short.txt is not UTF-8 text, it looks like UTF-16"),
    "zero.txt": (b"some words\0and more", r"zero.txt has the character 0 in it \(byte 10\), so it is no text"),
    **{
        f"pointer{ending}": (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n",
            f"pointer{ending} is a pointer of Git LFS, not the file itself: run `git lfs pull`",
        )
        for ending in (".txt", ".jsonl", ".json", ".csv", ".parquet", ".arrow", ".txt.gz", ".jsonl.zst")
    },
    "twice.txt.gz": (gzip.compress(gzip.compress(b"a")), "holds gzip data again inside its gzip data: unpack"),
    "packed.jsonl": (gzip.compress(b'{"text": "a"}'), "packed.jsonl is a gzip file by its first bytes"),
    "packed.txt": (b"PAR1\x15\x04\xff\x00" * 9, "packed.txt is a Parquet file by its first bytes"),
    "rows.jsonl": (b"PAR1\x15\x04\xff\x00" * 9, "rows.jsonl is a Parquet file by its first bytes"),
    "packed.csv": (b"PK\x03\x04\x14\x00", "packed.csv is a zip file by its first bytes"),
    "number.json": (b"7", "line 1 is not a JSON object"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_tables_and_arrays_name_the_place(name: str, tmp_path: Path) -> None:
    content, sentence = BAD_FILES[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=sentence) as caught:
        documents([str(tmp_path / name)])
    assert str(tmp_path / name) in str(caught.value) and "\n" not in str(caught.value)


def test_two_columns_of_one_name_are_refused_in_a_table_of_any_kind(tmp_path: Path) -> None:
    """The rows would hold one of them, and nobody could say which."""
    path = tmp_path / "twice.parquet"
    columns = [pyarrow.array([text]) for text in ("a", "b")]
    pyarrow.parquet.write_table(pyarrow.Table.from_arrays(columns, names=["text", "text"]), path)
    for spec in (str(path), f"dataset:{path}"):
        with pytest.raises(DataError, match=r"twice.parquet has more than one column 'text': give them names"):
            documents([spec])


@pytest.mark.parametrize("block", [1, 2, 7, 100])
def test_an_array_is_read_element_by_element_wherever_its_blocks_end(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An array of 600 MB, as data sets are, must not be in memory whole; a number may go on behind a block."""
    monkeypatch.setattr("data_pipeline.sources.json_array._BLOCK_BYTES", block)
    path = tmp_path / "array.json"
    path.write_text(
        '\ufeff [ {"text": "ä]"},\n\n{"n": -12.5e3, "text": "b\\n\\""} , {"text":"c","x":[[],{"a":[1]}]}]\n', "utf-8"
    )
    assert documents([str(path)]) == ["ä]", 'b\n"', "c"]
    for content, sentence in {
        '[{"text": "a"}, 12345': "row 1 ends a cut array|row 1 is not a JSON object",
        '[{"text": "a"}, {"text": tru}]': r"row 1 is not JSON \(.*\): put one array of JSON objects",
        '[{"text": "a"} {"text": "b"}]': "row 0 is not followed by a comma or the end of the array",
        '[{"text": "a"}] {"text": "b"}': "has something behind its array of JSON",
        '[{"text": "a"},]': r"row 1 is not JSON \(.*\)",
    }.items():
        path.write_text(content)
        with pytest.raises(DataError, match=sentence):
            documents([str(path)])
    path.write_bytes(b'\xef\xbb\xbf[{"text": "' + "é".encode() * 60 + b'\xe9"}]')
    with pytest.raises(DataError, match=r"\(byte 134\)"):
        documents([str(path)])
    path.write_text("[]")
    assert documents([str(path)]) == []


def test_every_folder_that_a_link_leads_to_is_read_once(tmp_path: Path) -> None:
    """A folder of links must not be taken for an empty one, nor a loop of links for one without end."""
    corpus = tmp_path / "corpus"
    for name in ("a", "z", ".store/b"):
        (corpus / name).mkdir(parents=True)
        (corpus / name / "text.txt").write_text(name)
    (corpus / "again").symlink_to("z")
    (corpus / "b").symlink_to(".store/b")
    (corpus / "z" / "loop").symlink_to("..")
    (corpus / "gone").symlink_to("nowhere")
    (corpus / "itself").symlink_to("itself")
    files = [source.path for source in open_sources([str(corpus)], "text")]
    assert files == [corpus / "a" / "text.txt", corpus / "b" / "text.txt", corpus / "z" / "text.txt"]
    links = tmp_path / "links"
    links.mkdir()
    (links / "away").symlink_to(corpus / "a")
    with pytest.raises(DataError, match=rf"{links}/away leads outside its folder, to {corpus}/a: copy it into"):
        documents([str(links)])
    assert documents([f"{links}/**/*.txt"]) == ["a"], "a pattern follows links"


def test_a_file_that_is_named_more_than_once_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.txt").write_text("a")
    Path("b.txt").write_text("a")
    Path("link.txt").symlink_to("a.txt")
    Path("sub").mkdir()
    sources = open_sources(["a.txt", "b.txt", "./a.txt", "sub/../a.txt", "link.txt"], "text")
    paths = [source.path for source in sources if source.path is not None]
    assert repeated_files(paths) == [["a.txt", "a.txt", "sub/../a.txt", "link.txt"]]
    assert [document.where for source in sources for document in source.documents(refuse_bad_row)][1] == "b.txt"
