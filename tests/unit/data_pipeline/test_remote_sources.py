"""Text at a URL is what the same files give here; a change of them, or a connection that breaks, never passes."""

import bz2
import gzip
import http.server
import io
import json
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pytest
from pyarrow.parquet import write_table
from s3fs.core import S3File

from data_pipeline.document import refuse_bad_row
from data_pipeline.errors import DataError
from data_pipeline.prepare.encoder_check import SAMPLE_CHARACTERS, sample
from data_pipeline.prepare.plan import PrepareOptions, plan_job
from data_pipeline.prepare.prepare import prepare
from data_pipeline.prepare.units import unit_pieces
from data_pipeline.sources import open_sources, remote_file
from data_pipeline.sources.folders import repeated_files
from data_pipeline.storage.meta import read_meta
from tests.helpers.s3_fixtures import own_client
from tests.helpers.s3_server import Fault, Gate
from tests.unit.data_pipeline.test_sources import documents

ROWS = [{"n": number, "text": f"row {number}: thïs is text " * (number % 50)} for number in range(2500)]
TEXTS = [str(row["text"]) for row in ROWS if row["text"]]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS).encode()


@pytest.fixture(autouse=True)
def _systems_of_this_server() -> Iterator[None]:
    """The endpoint is another one in each module of tests, and file systems are kept."""
    remote_file._filesystem.cache_clear()
    yield
    remote_file._filesystem.cache_clear()


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """One folder with every format."""
    folder = tmp_path / "files"
    (folder / "sub").mkdir(parents=True)
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(LINES))
    (folder / "tape.jsonl.gz").write_bytes(gzip.compress(LINES) + b"\0" * 1000)
    (folder / "c.csv").write_text('n,text\n1,"one, two"\n2,three\n')
    (folder / "d.txt.bz2").write_bytes(bz2.compress("plain téxt\n".encode() * 9000))
    write_table(pa.Table.from_pylist(ROWS), folder / "e.parquet", row_group_size=700)
    (folder / "f.json").write_text(json.dumps([{"text": "in an array"}]))
    with pa.CompressedOutputStream(str(folder / "sub" / "g.jsonl.zst"), "zstd") as stream:
        stream.write(LINES)
    with pa.CompressedOutputStream(str(folder / "sub" / "h.txt.lz4"), "lz4") as stream:
        stream.write(b"in a frame of lz4")
    (folder / "sub" / ".hidden.txt").write_bytes(b"\xff")
    return folder


def test_every_format_on_an_object_store_gives_the_documents_of_the_same_files_here(files: Path, place: str) -> None:
    """Finds files in another order, hidden ones, a block read twice or left out, and rows of a group lost."""
    own_client().put(str(files), place, recursive=True)
    names = "a.jsonl b.jsonl.gz c.csv d.txt.bz2 e.parquet f.json sub/g.jsonl.zst sub/h.txt.lz4 tape.jsonl.gz"
    for name in names.split():
        assert documents([f"{place}/{name}"]) == documents([str(files / name)]), name
    assert documents([place]) == documents([str(files)]) == documents([f"{place}/"])
    assert documents([f"{place}/*.jsonl*"]) == documents([f"{files}/*.jsonl*"])
    assert documents([f"{place}/**/[gh].*"]) == documents([f"{files}/**/[gh].*"])
    own_client().pipe(f"{place}/[gh].txt", b"a name with brackets")
    assert documents([f"{place}/[gh].txt"]) == ["a name with brackets"]
    assert documents([f"file://{files}/c.csv"]) == ["one, two", "three"]
    (first, again) = open_sources([f"{place}/c.csv", f"{place}/*.csv"], "text")
    assert first.path and again.path and repeated_files([first.path, again.path]) == [[f"{place}/c.csv"] * 2]


def test_conversations_at_a_url_are_read_from_lines_and_from_columns(place: str, tmp_path: Path) -> None:
    rows = [
        {"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": f"b{n}"}]} for n in range(3)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    write_table(pa.Table.from_pylist(rows), tmp_path / "chats.parquet")
    own_client().put(str(tmp_path), place, recursive=True)
    for name in ("chats.jsonl", "chats.parquet"):
        found, expected = (
            ["".join(one.blocks) for source in open_sources([spec], None) for one in source.documents(refuse_bad_row)]
            for spec in (f"{place}/{name}", str(tmp_path / name))
        )
        assert found == expected and len(found) == 3


def test_a_changed_object_is_another_source_and_an_unchanged_one_is_not(place: str) -> None:
    """An identity of the URL, or of the size alone, would keep tokens of a text that is gone."""
    url, client = f"{place}/a.txt", own_client()
    client.pipe(url, b"one text")
    (before,) = open_sources([url], "text")
    (same,), (listed,) = open_sources([url], "text"), open_sources([f"{place}/*.txt"], "text")
    assert before.identity() == same.identity() == listed.identity()
    client.pipe(url, b"two text")
    (after,) = open_sources([url], "text")
    assert after.identity() != before.identity()
    with pytest.raises(DataError, match=r"a\.txt was replaced while it was in use: start again"):
        ["".join(one.blocks) for one in before.documents(refuse_bad_row)]
    assert ["".join(one.blocks) for one in after.documents(refuse_bad_row)] == ["two text"]


def test_an_object_that_is_replaced_while_it_is_read_is_refused(place: str) -> None:
    """Reading on where a connection broke took the rest from the new object."""
    url, client = f"{place}/a.txt", own_client()
    client.pipe(url, b"1" * (4 << 20))
    (source,) = open_sources([url], "text")
    assert isinstance(source.path, remote_file.RemoteFile)
    with source.path.open(1) as stream:
        assert stream.read(10) == b"1" * 10
        client.pipe(url, b"2" * (4 << 20))
        with pytest.raises(DataError, match=r"a\.txt was replaced while it was in use: start again"):
            stream.read()


def test_prepare_writes_the_same_tokens_from_a_store_and_knows_them_again(
    place: str, s3: Gate, tmp_path: Path, tokenizer_folder: Path
) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    url = f"{place}/a.jsonl"
    own_client().put(str(tmp_path / "a.jsonl"), url)
    here = prepare([str(tmp_path / "a.jsonl")], tmp_path / "here", tokenizer_folder, workers=1)
    s3.faults = [Fault(lambda request: request.method == "GET" and "a.jsonl" in request.path, "error", 1)]
    there = prepare([url], tmp_path / "there", tokenizer_folder, workers=1)
    assert s3.faults[0].times == 0, "no request has failed, so that none was repeated"
    assert (there.sha256, there.document_count) == (here.sha256, len(TEXTS))
    s3.seen.clear()
    assert prepare([url], tmp_path / "there", tokenizer_folder, workers=1).reused
    assert all(request.method != "GET" or "list-type" in request.path for request in s3.seen), "it was read again"
    meta = read_meta(tmp_path / "there")
    assert meta is not None and meta.sources == [url]
    own_client().pipe(url, LINES[:-1] + b" ")
    with pytest.raises(DataError, match="whose files are others or have changed since"):
        prepare([url], tmp_path / "there", tokenizer_folder, workers=1)
    new = prepare([url], tmp_path / "there", tokenizer_folder, workers=1, overwrite=True)
    assert new.sha256 == here.sha256 and not new.reused and not new.resumed_parts


def test_units_of_an_object_fetch_hardly_more_than_their_bytes(
    place: str, monkeypatch: pytest.MonkeyPatch, tokenizer_folder: Path
) -> None:
    """A block of 8 MB ahead for each unit of 256 kB fetched an object 26 times."""
    fetched, fetch = [0], S3File._fetch_range

    def counted(file: S3File, start: int, end: int) -> bytes:
        fetched[0] += end - start
        return fetch(file, start, end)

    monkeypatch.setattr(S3File, "_fetch_range", counted)
    for name, line in {"a.jsonl": json.dumps({"text": "the of and code " * 99}), "a.txt": "a line of text"}.items():
        content = f"{line}\n".encode() * ((9 << 20) // len(line))
        own_client().pipe(f"{place}/{name}", content)
        job = plan_job([f"{place}/{name}"], tokenizer_folder, PrepareOptions())
        fetched[0] = 0
        read = [list(unit_pieces(job.sources, job.places, unit, 0, refuse_bad_row)) for unit in job.units]
        assert len(read) >= 3 and sum(len(piece.text) for pieces in read for piece in pieces) > 0.9 * len(content)
        assert fetched[0] < 1.5 * len(content), name
        fetched[0] = 0
        assert sum(len(text) for _, text in sample(job.sources)) == SAMPLE_CHARACTERS
        assert fetched[0] < 3 * SAMPLE_CHARACTERS, name


class _WebServer(http.server.BaseHTTPRequestHandler):
    """Serves one content; may know ranges, and may break a connection in the middle of it."""

    content = LINES
    knows_ranges = True
    breaks = 0  # answers with content that still end too early
    headers_sent: dict[str, str] = {"ETag": '"one"'}  # noqa: RUF012
    status = 200

    def do_GET(self) -> None:
        first, status = 0, self.status
        if self.knows_ranges and (wanted := self.headers.get("Range")):
            first, status = int(wanted.removeprefix("bytes=").partition("-")[0]), 206
        last = len(self.content)
        if status == 206 and (end := self.headers["Range"].partition("-")[2]):
            last = min(last, int(end) + 1)
        body = self.content[first:last] if status in (200, 206) else b""
        self.send_response(status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {first}-{last - 1}/{len(self.content)}")
        self.end_headers()
        if self.command == "HEAD":
            return
        if type(self).breaks and body:
            type(self).breaks -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


Served = Callable[..., str]


@pytest.fixture
def web(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Starts a web server with attributes of the class above; returns its address."""
    monkeypatch.setattr(remote_file.time, "sleep", lambda _: None)
    servers = []

    def start(**attributes: Any) -> str:
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_WebServer,), attributes))
        servers.append(server)
        threading.Thread(target=partial(server.serve_forever, 0.02), daemon=True).start()
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("knows_ranges", [True, False])
def test_a_web_server_is_read_whether_it_knows_ranges_or_not(web: Served, knows_ranges: bool) -> None:
    assert documents([f"{web(knows_ranges=knows_ranges)}/a.jsonl"]) == TEXTS


def test_a_compressed_file_that_a_server_calls_encoded_text_is_decompressed_once(web: Served) -> None:
    """aiohttp would decompress it too, and the reader then find no gzip file."""
    encoded = {"ETag": '"one"', "Content-Encoding": "gzip"}
    assert documents([f"{web(content=gzip.compress(LINES), headers_sent=encoded)}/a.jsonl.gz"]) == TEXTS


def test_reading_goes_on_where_a_connection_broke_and_never_takes_a_part_for_the_whole(web: Served) -> None:
    assert documents([f"{web(breaks=2)}/a.jsonl"]) == TEXTS
    for name in ("a.jsonl", "a.txt"):
        with pytest.raises(DataError, match=r"cannot be read \(\w+\): check the network"):
            documents([f"{web(breaks=100)}/{name}"])
    with pytest.raises(DataError, match=r"as its server knows no ranges, and that did not do: download it"):
        documents([f"{web(breaks=1, knows_ranges=False)}/a.jsonl"])


def test_a_stream_that_ends_early_without_an_error_is_read_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries take a connection that was closed for the end of the file."""

    class Ending(fsspec.AbstractFileSystem):  # type: ignore[misc]
        opened = 0

        def info(self, path: str, **_: Any) -> dict[str, Any]:
            return {"name": path, "type": "file", "size": len(LINES), "etag": "one"}

        def open(self, path: str, mode: str, **_: Any) -> io.BytesIO:
            self.opened += 1
            return io.BytesIO(LINES[: self.opened * len(LINES) // 3])

    system = Ending(skip_instance_cache=True)
    monkeypatch.setattr(remote_file, "_filesystem", lambda protocol: system)
    monkeypatch.setattr(remote_file.time, "sleep", lambda _: None)
    assert documents(["s3://bucket/a.jsonl"]) == TEXTS and system.opened == 3
    system.opened = -10
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read \(ConnectionError\)"):
        documents(["s3://bucket/a.jsonl"])


def test_parquet_wants_a_server_that_sends_pieces(web: Served, tmp_path: Path) -> None:
    write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet", row_group_size=700)
    content = (tmp_path / "a.parquet").read_bytes()
    assert documents([f"{web(content=content)}/a.parquet"]) == TEXTS
    with pytest.raises(DataError, match=r"has no column 'body' \(it has 'n', 'text'\): name the column"):
        documents([f"{web(content=content)}/a.parquet"], "body")
    with pytest.raises(DataError, match=r"as its server knows no ranges, and that did not do: download it"):
        documents([f"{web(content=content, knows_ranges=False)}/a.parquet"])
    with pytest.raises(DataError, match=r"is not a whole parquet file"):
        documents([f"{web(content=content[:-9])}/a.parquet"])


SECRET = "hunter2"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        (f"https://me:{SECRET}@host.example/a.txt", "source https://host.example/a.txt has a user or password"),
        (f"s3://me:{SECRET}@bucket/a.txt", "has a user or password in its URL: remove them"),
        (f"https://host.example/a.txt?sig={SECRET}", "source https://host.example/a.txt has a query in its URL"),
        (f"https://host.example/a.txt#{SECRET}", "has a query in its URL, where tokens stand"),
        ("zip://a.txt::s3://bucket/x.zip", "chains protocols"),
        ("s3://", "names no file"),
        ("nosuch://bucket/a.txt", "there is no protocol nosuch: use s3://"),
        ("ftp://host.example/a.txt", "ftp:// is not read here: download it"),
        ("webhdfs://host.example/a.txt", "webhdfs:// is not read here: download it"),
        ("hdfs://host.example/a.txt", "hdfs needs Java and Hadoop's libhdfs, which are not found here: install both"),
        ("https://[::1/a.txt", "is not a URL that can be read"),
        ("http://127.0.0.1:1/a.txt", "cannot be read"),
        ("s3://bucket/nothing/here.txt", "there is no such file, and no folder or pattern with files"),
        ("s3://bucket/nothing/*.txt", "there is no such file, and no folder or pattern with files"),
        ("s3://nobucket-of-mine/a.txt", "does not exist: check the URL"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_sentence_without_its_secret(spec: str, sentence: str, place: str) -> None:
    with pytest.raises(DataError) as caught:
        documents([spec])
    told = str(caught.value)
    assert sentence in told and SECRET not in told and "\n" not in told
    assert caught.value.__suppress_context__ or caught.value.__context__ is None, "a traceback would repeat it"


def test_what_a_server_refuses_or_does_not_tell_is_one_sentence(web: Served, s3: Gate, place: str) -> None:
    with pytest.raises(DataError, match=r"a\.txt does not exist: check the URL"):
        documents([f"{web(status=404)}/a.txt"])
    with pytest.raises(DataError, match=r"a\.txt may not be read: set credentials for it"):
        documents([f"{web(status=403)}/a.txt"])
    with pytest.raises(DataError, match=r"neither a checksum nor a date of it, so that a change would not be noticed"):
        documents([f"{web(headers_sent={})}/a.txt"])
    with pytest.raises(DataError, match=r"is an arrow file, which is read from this machine alone"):
        documents([f"{web()}/a.arrow"])
    s3.faults = [Fault(lambda _: True, "error", None, 403)]
    with pytest.raises(DataError, match=r"may not be read: set credentials for it"):
        documents([f"{place}/a.txt"])


@pytest.mark.parametrize("endpoint", ["localhost:9000", "htp://minio.example"])
def test_an_endpoint_that_is_no_url_is_named(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network was blamed."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    remote_file._filesystem.cache_clear()
    with pytest.raises(DataError, match=r"its store is no URL: begin AWS_ENDPOINT_URL, .* with http:// or https://"):
        documents(["s3://bucket/a.txt"])
    remote_file._filesystem.cache_clear()


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    for protocol, extra in (("s3", "s3"), ("gs", "gcs"), ("https", "http")):
        sentence = f"{protocol} needs a package that is not installed: pip install 'megalite[{extra}]'"
        with pytest.raises(DataError, match=re.escape(sentence)):
            documents([f"{protocol}://bucket/a.txt"])


def test_options_of_bad_rows_hold_for_rows_at_a_url(web: Served, tmp_path: Path, tokenizer_folder: Path) -> None:
    url = f"{web(content=LINES + b'{}' + bytes([10]))}/a.jsonl"
    with pytest.raises(DataError, match=r"a\.jsonl, line 2501 has no field 'text'"):
        prepare([url], tmp_path / "out", tokenizer_folder, workers=1)
    summary = prepare([url], tmp_path / "out", tokenizer_folder, PrepareOptions(skip_bad_rows=True), workers=1)
    assert (summary.skipped_rows, summary.document_count) == (1, len(TEXTS))
