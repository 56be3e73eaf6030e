"""Data of a run that lies at URLs: looked up before a rank starts, and copied once to each host that reads it.

In: a config whose `data` names URLs. Out: the same config with the prefixes of proven copies in `data.cache`, for
whatever opens data; the config of the run, and with it its checkpoints, keeps the URLs. The samples depend on the
content alone, so that a run may go on with a copy elsewhere. No torch at import.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Generic, TypeVar

from data_pipeline.errors import DataError, first_names
from data_pipeline.samples.packing_plan import plan_ending
from data_pipeline.storage.paths import decimal_size, user_path
from data_pipeline.storage.token_cache import CorpusCopy, free_bytes
from launch.trainer.data.packing import packed_splits
from megalite.checkpoint.errors import StorageError
from megalite.checkpoint.remote.storage import PATIENCE, Store
from megalite.checkpoint.remote.transfer import with_retries
from megalite.config.data import DataConfig
from megalite.config.user_folders import cache_folder, may_be_written

TELL_EVERY_S = 8.0
LARGEST_META = 1 << 24  # bytes
META = ".meta.json"
Result = TypeVar("Result")


@dataclass(frozen=True)
class RemoteCorpus:
    """A corpus at a URL, by the metadata that lay there when the run started: all hosts must read the same."""

    url: str
    meta: str

    def copy_in(self, cache: Path) -> CorpusCopy:
        return CorpusCopy(cache, self.url, self.meta.encode(), cache_folder() / "proven")


def cache_of(data: DataConfig) -> Path:
    """Returns the folder of copies on this host."""
    return (user_path(str(data.cache)) if data.cache is not None else cache_folder() / "data").absolute()


def look_up(urls: Sequence[str]) -> list[RemoteCorpus]:
    """Reads the metadata of corpora at URLs. Raises DataError or StorageError if there is none."""
    found = []
    for url in urls:
        store, name = _store_of(url)
        size = _retried(partial(store.size_of, f"{name}{META}"))
        if size is None:
            raise DataError(
                f"{url}{META} does not exist, without which no copy of {url} could be proven: correct the URL, or "
                f"upload the .meta.json that `megalite prepare` has written too"
            )
        content = _retried(partial(store.read, f"{name}{META}")) if size <= LARGEST_META else None
        if content is None:
            raise DataError(f"{url}{META} is no metadata of a corpus: upload it again")
        CorpusCopy(Path(), url, content, Path())  # on rank 0, whose error all ranks hear
        found.append(RemoteCorpus(url, content.decode()))
    return found


def places_of(data: DataConfig, corpora: Sequence[RemoteCorpus]) -> dict[str, str]:
    """Returns the prefix of the copy on this host for each URL."""
    cache = cache_of(data)
    return {corpus.url: str(corpus.copy_in(cache).prefix) for corpus in corpora}


def with_copies(data: DataConfig, places: Mapping[str, str]) -> DataConfig:
    """Returns the section with the prefixes of copies in place of URLs."""

    def local(prefixes: list[str] | None) -> list[str] | None:
        return prefixes and [places.get(prefix, prefix) for prefix in prefixes]

    sources = {name: one.model_copy(update={"path": local(one.path)}) for name, one in data.sources.items()}
    validation = {name: one.model_copy(update={"path": local(one.path)}) for name, one in data.validation.items()}
    return data.model_copy(update={"path": local(data.path), "sources": sources, "validation": validation})


class HostFetch:
    """Copies corpora to this host, if they are not there; another thread may ask for a sentence about it meanwhile."""

    def __init__(self, data: DataConfig, sequence_length: int, corpora: Sequence[RemoteCorpus]) -> None:
        self.cache = cache_of(data)
        copies = [corpus.copy_in(self.cache) for corpus in corpora]
        self._plans = {copy.url: _plans_of(copy, data, sequence_length) for copy in copies}
        self.missing = [copy for copy in copies if not copy.is_complete]
        self._to_visit = [copy for copy in copies if copy in self.missing or self._lacks_plan(copy)]
        self._sizes = dict[str, int]()  # of files to fetch, by URL
        self._current: CorpusCopy | None = None
        self._done = 0
        self._is_waiting = False

    def _lacks_plan(self, copy: CorpusCopy) -> bool:
        return any(not Path(f"{copy.prefix}{ending}").exists() for ending in self._plans[copy.url])

    def look(self) -> None:
        """Asks for the sizes of what is to be fetched. Raises DataError if it cannot be what the metadata promises, and
        StorageError."""
        for copy in self._to_visit:
            store, name = _store_of(copy.url)
            for ending in copy.digests if copy in self.missing else ():
                size = _retried(partial(store.size_of, name + ending))
                copy.check_size(ending, size)
                self._sizes[copy.url + ending] = size or 0
            for ending in self._plans[copy.url]:
                if (size := _retried(partial(store.size_of, name + ending))) is not None:
                    self._sizes[copy.url + ending] = size

    def check_room(self) -> None:
        """Raises DataError if this host's disk has no room for what is to be fetched."""
        needed = self.total - sum(copy.bytes_here() for copy in self.missing)
        if needed > (free := free_bytes(self.cache)):
            if not may_be_written(self.cache):  # a disk that nobody may write has no free bytes either
                raise DataError(f"{self.cache} cannot be written: set data.cache to a folder of yours")
            raise DataError(
                f"{self.cache} has room for {decimal_size(free)}, and the copy of {self.names()} takes "
                f"{decimal_size(needed)} more: remove copies there that no run uses, or set data.cache to a folder "
                "on a larger disk"
            )

    @property
    def total(self) -> int:
        """Bytes of all files to fetch, once they have been checked."""
        return sum(self._sizes.values())

    def run(self) -> None:
        """Fetches what is missing. Raises DataError or StorageError."""
        self.look()
        self.check_room()
        for copy in self._to_visit:
            self._current, self._is_waiting = copy, True
            with copy.locked():
                self._is_waiting = False
                self._fetch(copy)

    def _fetch(self, copy: CorpusCopy) -> None:
        store, name = _store_of(copy.url)

        def read(ending: str, first: int, stop: int) -> bytes:
            return _retried(partial(store.read_part, name + ending, first, stop))

        was_complete = copy.is_complete  # by another process, since this one has looked
        for ending in copy.digests:
            size = self._sizes.get(copy.url + ending, 0)
            if was_complete:
                self._advance(size)
            elif not copy.is_foreign:
                copy.fetch(ending, size, partial(read, ending), self._advance)
        if not was_complete:
            finish = partial(copy.prove_foreign, self._advance) if copy.is_foreign else copy.finish
            finish()
        for ending in self._plans[copy.url]:
            if (size := self._sizes.get(copy.url + ending, 0)) > 0:
                copy.fetch_unproven(ending, size, partial(read, ending), self._advance)

    def _advance(self, count: int) -> None:
        self._done += count

    def sentence(self) -> str:
        """Says how far the copy has come."""
        copy = self._current
        if copy is None:
            return f"looking at {self.names()}"
        done, total = self._done, self.total
        if self._is_waiting:
            done += copy.bytes_here()
            return f"another process copies {copy.url} to {copy.folder}: {decimal_size(done)} of {decimal_size(total)}"
        return f"copying {copy.url} to {copy.folder}: {decimal_size(done)} of {decimal_size(total)}"

    def names(self) -> str:
        """Names the corpora without a copy, or else those that were looked for."""
        return first_names([copy.url for copy in self.missing or self._to_visit])


def _plans_of(copy: CorpusCopy, data: DataConfig, sequence_length: int) -> list[str]:
    """Returns the endings of the packing plans that a run may read of a corpus."""
    if data.packing != "best_fit":
        return []
    leaves_out = copy.meta.loss_sha256 is not None and data.too_long == "skip"
    splits = packed_splits(copy.url, data)
    return [plan_ending(sequence_length, split, fraction, leaves_out) for split, fraction in splits]


def _store_of(url: str) -> tuple[Store, str]:
    folder, _, name = url.rpartition("/")
    return _opened_store(folder), name


_opened_store = lru_cache(maxsize=64)(Store)  # which takes a good part of a second, for all corpora in a folder


def _retried(action: Callable[[], Result]) -> Result:
    """Repeats requests that fail for now. Raises DataError for what a user has to mend first."""
    try:
        return with_retries(PATIENCE, action)
    except StorageError as error:
        if error.is_lasting:
            raise DataError(str(error)) from None
        raise


def find_or_fetch_copies(
    data: DataConfig,
    sequence_length: int,
    *,
    only: Collection[str] | None = None,
    may_fetch: bool,
    tell: Callable[[str], None],
) -> dict[str, str]:
    """Returns the prefix of this host's copy for each URL in `data`, or each in `only`; fetches it first if it may.

    `tell` hears how that goes, at least every 10 s. Raises DataError if there is no copy, or none that is right, and
    StorageError if the store fails.
    """
    urls = [url for url in data.urls if only is None or url in only]
    if not urls:
        return {}
    corpora = _told(partial(look_up, urls), _looking(urls), tell) or []
    fetch = HostFetch(data, sequence_length, corpora)
    if fetch.missing and not may_fetch:
        _told(fetch.look, fetch.sentence, tell)
        raise DataError(
            f"{fetch.cache} holds no copy of {fetch.names()} yet ({decimal_size(fetch.total)}), and this command makes "
            "none: `megalite data fetch CONFIG` does"
        )
    if may_fetch:
        _told(fetch.run, fetch.sentence, tell)
    return places_of(data, corpora)


class Work(threading.Thread, Generic[Result]):
    """Does something that may take long; `result` is what it returns, `problem` what it raises."""

    def __init__(self, action: Callable[[], Result]) -> None:
        super().__init__(name="copies of data", daemon=True)
        self._action = action
        self.result: Result | None = None
        self.problem: Exception | None = None

    def run(self) -> None:
        try:
            self.result = self._action()
        except Exception as error:  # told by the thread that waits
            self.problem = error


def _told(action: Callable[[], Result], sentence: Callable[[], str], tell: Callable[[str], None]) -> Result | None:
    """Returns what `action` returns, and tells of it as long as it takes. Raises what it raises."""
    work = Work(action)
    work.start()
    while work.is_alive():
        work.join(TELL_EVERY_S)
        if work.is_alive():
            tell(sentence())
    if work.problem is not None:
        raise work.problem
    return work.result


def _looking(urls: Sequence[str]) -> Callable[[], str]:
    return lambda: f"waiting for an answer about {first_names(urls)}"


def check_remote_data(data: DataConfig, sequence_length: int, tell: Callable[[str], None]) -> str | None:
    """Checks data at URLs as far as that is quick, for a command that starts ranks on other hosts.

    Returns a notice if this host has no copy, without which data and checkpoint are not checked here; None if it has.
    `tell` is as in `find_or_fetch_copies`. Raises DataError or StorageError.
    """
    if not data.urls:
        return None
    corpora = _told(partial(look_up, data.urls), _looking(data.urls), tell) or []
    fetch = HostFetch(data, sequence_length, corpora)
    if not fetch.missing:
        return None
    _told(fetch.look, fetch.sentence, tell)
    return (
        f"this host has no copy of {fetch.names()} in {fetch.cache}: each host of the run makes its own "
        f"({decimal_size(fetch.total)}) before it trains, and data and checkpoint are checked then"
    )
