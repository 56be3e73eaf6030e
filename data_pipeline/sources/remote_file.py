"""Files of text at a URL: on an object store, a web server or the hub. They are read through fsspec, as local ones are.

A place of text is a local path or a `RemoteFile`, which has the same `name` and `suffix`; `open_file`, `size_of` and
`document.file_identity` treat both alike. Nothing is copied to this machine: a file is read a block ahead.
"""

import io
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from data_pipeline.errors import DataError

_BLOCK_BYTES = 8 << 20  # fetched ahead, at most
_BUFFER_BYTES = 1 << 18
_ATTEMPTS = 4  # to read on where a connection broke, with 1, 2 and 4 s between them
_CONNECT_S, _ANSWER_S = 10, 30
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "http": "http", "https": "http"}
_OF_ONE_HOST = ("ftp", "sftp", "ssh", "smb")  # for which fsspec wants the host, and its password, apart from the URL
_HADOOP = ("hdfs", "arrow_hdfs")
_WEB = ("http", "https")
OF_WEB = ("http://", "https://")  # a file that a web server has, and no object store or hub
_MARKS = ("ETag", "etag", "blob_id", "md5Hash", "content_md5", "Content-MD5", "crc32c", "generation")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "mtime", "updated", "modified")
_NO_ACCESS = re.compile("Credential|PermissionError|ProfileNotFound|SSOToken|TokenRetrieval|RefreshError|GatedRepo")
_NO_ENDPOINT = re.compile("EndpointResolution|Invalid endpoint")
_NOT_THERE = re.compile("FileNotFound|NoSuchBucket|EntryNotFound|RepositoryNotFound|RevisionNotFound")


@dataclass(frozen=True)
class RemoteFile:
    """A file at a URL as it was when it was looked at first."""

    url: str
    size_bytes: int | None  # None where the server does not say
    version: str = field(repr=False)  # checksum or date by the server's account; changes with the content

    @property
    def name(self) -> str:
        return PurePosixPath(self.url).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.url).suffix

    def __str__(self) -> str:
        return self.url

    def identity(self) -> list[str]:
        """Returns URL, size and checksum or date, which change when the content may have changed."""
        return [self.url, str(self.size_bytes), self.version]

    def open(self, about_bytes: int = 0) -> io.BufferedReader:
        """Opens the file for reading. Raises DataError, there or where it is read, if it is another one by now.

        about_bytes: that will be read, so that hardly more are fetched; 0 if it is not known.
        """
        return io.BufferedReader(_RemoteStream(self, about_bytes), _BUFFER_BYTES)


def remote_files(spec: str) -> list[RemoteFile]:
    """Finds the file at a URL, all files of a folder there, or those that a pattern matches; sorted, no hidden ones.

    A URL of a web server is always one file. Raises DataError, in which no credential is repeated.
    """
    protocol = _checked_protocol(spec)
    with _one_sentence(spec):
        system = _filesystem(protocol)
        system.invalidate_cache()
        path = system._strip_protocol(spec)
        if protocol in _WEB or system.isfile(path):  # first: its name may have a bracket in it
            found = {path: system.info(path)}
        elif any(sign in path for sign in "*?["):
            found = system.glob(path, detail=True)
        else:
            found = system.find(path, detail=True)
            root = path.rstrip("/") + "/"
            found = {name: info for name, info in found.items() if "/." not in f"/{name.removeprefix(root)}"}
    infos = [(name, found[name]) for name in sorted(found) if found[name]["type"] == "file"]
    if not infos:
        raise DataError(f"source {spec}: there is no such file, and no folder or pattern with files: check the URL")
    return [_remote_file(name if protocol in _WEB else f"{protocol}://{name}", info) for name, info in infos]


def _remote_file(url: str, info: dict[str, Any]) -> RemoteFile:
    version = next((f"{key} {info[key]}" for key in (*_MARKS, *_TIMES) if info.get(key)), None)
    if version is None:
        raise DataError(
            f"source {url}: the server tells neither a checksum nor a date of it, so that a change would not be "
            "noticed: download it and give the file"
        )
    return RemoteFile(url, info.get("size"), version)


def _checked_protocol(spec: str) -> str:
    """Returns the protocol of a URL. Raises DataError if it is not known, holds a secret, or lacks its package."""
    import fsspec

    protocol, _, rest = spec.partition("://")
    secrets = "credentials come from environment variables, a profile or the machine's role, never from the URL"
    shown = f"{protocol}://{rest.rpartition('@')[2] if protocol in _WEB else rest.partition(':')[0]}"
    shown = re.split("[?#]", shown)[0]
    try:
        parts = urlsplit(spec)
        has_user = parts.password is not None or (protocol in _WEB and "@" in parts.netloc)
    except ValueError:
        raise DataError(f"source {shown} is not a URL that can be read: check its brackets") from None
    if has_user:
        raise DataError(f"source {shown} has a user or password in its URL: remove them, {secrets}")
    if protocol in _WEB and ("?" in rest or "#" in rest):
        raise DataError(f"source {shown} has a query in its URL, where tokens stand: remove it, {secrets}")
    if "::" in spec:
        raise DataError(f"source {shown} chains protocols: use one, as in s3://bucket/folder")
    if not rest.strip("/"):
        raise DataError(f"source {shown} names no file: write it as s3://bucket/folder/file.jsonl")
    if protocol not in fsspec.available_protocols():
        raise DataError(f"source {spec}: there is no protocol {protocol}: use s3://, gs://, hf:// or https://")
    if protocol in _OF_ONE_HOST:
        raise DataError(f"source {shown}: {protocol}:// is not read here: download it and give the file")
    _check_library(protocol, shown)
    return protocol


def _check_library(protocol: str, place: str) -> None:
    """Raises DataError if what fsspec needs for a protocol is not there."""
    import fsspec

    try:
        fsspec.get_filesystem_class(protocol)
        if protocol not in (*_EXTRAS, "hf"):  # whose libraries look for credentials
            _filesystem(protocol)
    except ImportError as error:
        remedy = f"pip install 'megalite[{_EXTRAS[protocol]}]'" if protocol in _EXTRAS else str(error)
        raise DataError(f"source {place}: {protocol} needs a package that is not installed: {remedy}") from None
    except Exception as error:  # each library has its own
        if protocol in _HADOOP and "lib" not in str(error):
            return  # its server does not answer, and will not later
        if protocol in _HADOOP:
            raise DataError(
                f"source {place}: {protocol} needs Java and Hadoop's libhdfs, which are not found here: install both "
                "and set JAVA_HOME, HADOOP_HOME and CLASSPATH, or download it and give the file"
            ) from None
        raise DataError(f"source {place}: {protocol}:// is not read here: download it and give the file") from None


@lru_cache(maxsize=8)
def _filesystem(protocol: str) -> Any:
    """Returns the file system of a protocol, whose requests end: no server may hold up a run for good."""
    import fsspec

    options: dict[str, Any] = {}
    if protocol in ("s3", "s3a"):
        options = {"config_kwargs": {"connect_timeout": _CONNECT_S, "read_timeout": _ANSWER_S}}
        options["use_listings_cache"] = False
    elif protocol in _WEB:
        import aiohttp

        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_ANSWER_S)
        # a server may call a .gz file "encoded" text, which aiohttp would decompress on the way
        headers = {"Accept-Encoding": "identity"}
        options = {"client_kwargs": {"timeout": timeout, "auto_decompress": False, "headers": headers}}
    return fsspec.filesystem(protocol, skip_instance_cache=True, **options)


class _RemoteStream(io.RawIOBase):
    """The bytes of a remote file, which are read on from the same place after a connection broke."""

    def __init__(self, file: RemoteFile, about_bytes: int) -> None:
        self._file, self._place, self._about_bytes = file, 0, about_bytes
        self._stream: Any = None
        self._stream_place, self._is_plain = 0, False
        with _one_sentence(file.url):
            self._system = _filesystem(file.url.partition("://")[0])
            self._path = self._system._strip_protocol(file.url)
            self._check_version()
        self.size, self._was_checked = file.size_bytes, True

    def _check_version(self) -> None:
        """Raises DataError if the file is another one by now."""
        self._system.invalidate_cache()
        info, kind = self._system.info(self._path), self._file.version.partition(" ")[0]
        if (info.get("size"), f"{kind} {info.get(kind)}") != (self._file.size_bytes, self._file.version):
            raise DataError(
                f"{self._file.url} was replaced while it was in use: start again, with the data as it is now"
            )

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return self.size is not None

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._place, io.SEEK_END: self.size or 0}[whence]
        self._place = base + offset
        return self._place

    def tell(self) -> int:
        return self._place

    def readinto(self, buffer: Any) -> int:
        with _one_sentence(self._file.url):
            for attempt in range(1, _ATTEMPTS + 1):
                try:
                    content = self._read(len(buffer))
                    break
                except Exception as error:  # each library has its own
                    self._let_go()
                    if attempt == _ATTEMPTS or isinstance(error, FileNotFoundError | PermissionError | DataError):
                        raise
                    time.sleep(2.0 ** (attempt - 1))
        buffer[: len(content)] = content
        self._place += len(content)
        return len(content)

    def _read(self, count: int) -> bytes:
        if self._stream is not None and self._stream_place != self._place and self._is_plain:
            self._let_go()
        if self._stream is None:
            if not self._was_checked:  # a store refuses to go on with another file, which opening it anew would do
                self._check_version()
            self._was_checked = False
            # one plain request reads a web server's file from its beginning: many know no ranges
            self._is_plain = self._file.url.startswith(OF_WEB) and not self._place
            ahead = {"block_size": self._ahead(count), "cache_type": "readahead"}
            blocks = {"block_size": 0} if self._is_plain else ahead
            self._stream, self._stream_place = self._system.open(self._path, "rb", **blocks), 0
        if self._stream_place != self._place:
            self._stream.seek(self._place)
        content: bytes = self._stream.read(count)
        if not content and count and self.size is not None and self._place < self.size:
            raise ConnectionError(f"it ended after {self._place:,} of {self.size:,} bytes")
        self._stream_place = self._place + len(content)
        return content

    def _ahead(self, count: int) -> int:
        """Returns how much to fetch beside `count` bytes, so that what will be read comes in requests of one size."""
        about_bytes = self._about_bytes + _BUFFER_BYTES if self._about_bytes else _BLOCK_BYTES  # and ends in a buffer
        requests = -(-about_bytes // _BLOCK_BYTES)
        return max(_BUFFER_BYTES, -(-about_bytes // requests) - count)

    def _let_go(self) -> None:
        stream, self._stream = self._stream, None
        try:
            if stream is not None:
                stream.close()
        except Exception:  # a broken connection may fail to close, too
            pass

    def close(self) -> None:
        self._let_go()
        super().close()


@contextmanager
def _one_sentence(url: str) -> Iterator[None]:
    """Turns what fsspec and its libraries raise into one sentence without their texts, which may repeat signed URLs."""
    try:
        yield
    except DataError:
        raise
    except Exception as caught:
        # fsspec says of every problem with a web server's file that it is not there
        is_vague = isinstance(caught, FileNotFoundError) and url.startswith(("http://", "https://"))
        error = caught.__cause__ if is_vague and caught.__cause__ is not None else caught
        chain = [one for one in (error, error.__cause__) if one is not None]
        names = " ".join(kind.__name__ for one in chain for kind in type(one).__mro__)
        statuses = [
            getattr(one, "status", getattr(getattr(one, "response", None), "status_code", None)) for one in chain
        ]
        status = next((one for one in statuses if isinstance(one, int)), None)
        if _NOT_THERE.search(names) or status == 404:
            raise DataError(f"source {url} does not exist: check the URL") from None
        if _NO_ACCESS.search(names) or status in (401, 403):
            raise DataError(
                f"source {url} may not be read: set credentials for it as its provider documents (environment "
                "variables, a profile, the machine's role), never in the URL"
            ) from None
        if isinstance(error, ValueError) and "range requests" in str(error):
            raise DataError(
                f"source {url} can only be read from its beginning to its end at once, as its server knows no ranges, "
                "and that did not do: download it and give the file"
            ) from None
        if _NO_ENDPOINT.search(f"{names} {error if isinstance(error, ValueError) else ''}"):
            raise DataError(
                f"source {url} cannot be read, because the endpoint that is set for its store is no URL: begin "
                "AWS_ENDPOINT_URL, or endpoint_url in ~/.aws/config, with http:// or https://"
            ) from None
        why = f"{type(error).__name__}{f', status {status}' if status else ''}"
        raise DataError(
            f"source {url} cannot be read ({why}): check the network and the server, and give the same command again"
        ) from None


Place = Path | RemoteFile


def open_file(place: Place, about_bytes: int = 0) -> io.BufferedReader:
    """Opens a local or remote file, of which `about_bytes` will be read, for reading from its beginning."""
    return place.open(about_bytes) if isinstance(place, RemoteFile) else place.open("rb")


def size_of(place: Place) -> int | None:
    """Returns the size of a file in bytes; None if a server does not say it."""
    return place.size_bytes if isinstance(place, RemoteFile) else place.stat().st_size
