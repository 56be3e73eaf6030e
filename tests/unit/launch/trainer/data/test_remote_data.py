"""Data at a URL is the same data: proven before it is used, copied once, and asked for again only where it changed."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.samples.dataset import PackedSamples
from launch.trainer.data import remote_data
from launch.trainer.data.opening import open_data
from launch.trainer.data.packing import pack_data
from launch.trainer.data.remote_data import check_remote_data, find_or_fetch_copies, with_copies
from launch.trainer.start.checks import find_position
from launch.trainer.start.flags import NO_FLAGS
from megalite.config import Config, ConfigError
from megalite.config.data import DataConfig
from tests.conftest import write_config
from tests.helpers.commands import command_line
from tests.helpers.fetching import start_fetch
from tests.helpers.mirrors import until
from tests.helpers.s3_fixtures import own_client
from tests.helpers.s3_server import Fault, Gate, Request

LENGTH = 32


@pytest.fixture(autouse=True)
def _stores_of_this_server() -> Iterator[None]:
    """The endpoint is another one in each module of tests."""
    yield
    remote_data._opened_store.cache_clear()


@pytest.fixture
def url(corpus: Path, place: str) -> str:
    """The corpus on a store."""
    own_client().put(
        [str(path) for path in corpus.parent.glob("text.*")],
        [f"{place}/{path.name}" for path in corpus.parent.glob("text.*")],
    )
    return f"{place}/text"


@pytest.fixture
def data(url: str, tmp_path: Path) -> DataConfig:
    return DataConfig.model_validate({"path": url, "cache": tmp_path / "cache"})


def fetched(data: DataConfig) -> Path:
    (prefix,) = find_or_fetch_copies(data, LENGTH, may_fetch=True, tell=print).values()
    return Path(prefix)


def is_read_of_tokens(request: Request) -> bool:
    return request.method == "GET" and request.path.endswith("/text.bin")


def reads_of(s3: Gate, name: str) -> int:
    return sum(request.method == "GET" and request.path.endswith(f"/{name}") for request in s3.seen)


def test_a_run_reads_the_same_samples_from_a_copy(corpus: Path, url: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    """A fingerprint of the place, by which no run could go on with the same data elsewhere."""
    here = Config.model_validate(tiny | {"training": tiny["training"] | {"evaluation": {"interval": 1, "samples": 4}}})
    there = here.model_copy(update={"data": here.data.model_copy(update={"path": [url], "cache": tmp_path / "cache"})})
    places = find_or_fetch_copies(there.data, LENGTH, may_fetch=True, tell=print)
    found, expected = open_data(there.model_copy(update={"data": with_copies(there.data, places)})), open_data(here)
    assert isinstance(found.training, PackedSamples) and isinstance(expected.training, PackedSamples)
    assert found.training.fingerprint == expected.training.fingerprint
    assert found.training.sample(3).tokens.tolist() == expected.training.sample(3).tokens.tolist()
    assert found.tokenizer == expected.tokenizer and there.data.prefixes == [url]


def test_sources_and_validation_sets_at_urls_are_copied_too(corpus: Path, url: str, tmp_path: Path) -> None:
    data = DataConfig.model_validate(
        {
            "sources": {"far": {"path": [url, str(corpus)], "weight": 1}, "near": {"path": str(corpus), "weight": 1}},
            "validation": {"far": {"path": url}, "near": {"source": "near"}},
            "cache": tmp_path / "cache",
        }
    )
    places = find_or_fetch_copies(data, LENGTH, may_fetch=True, tell=print)
    local = with_copies(data, places)
    assert list(places) == [url] and not local.urls
    assert local.sources["far"].path == [places[url], str(corpus)] and local.validation["far"].path == [places[url]]
    assert local.sources["near"] == data.sources["near"] and local.validation["near"] == data.validation["near"]


def test_what_is_there_is_not_fetched_again_and_what_has_changed_is(
    data: DataConfig, url: str, corpus: Path, s3: Gate
) -> None:
    first = fetched(data)
    assert {path.name: path.read_bytes() for path in first.parent.glob("text.*")} == {
        # plans beside the corpus are of whichever tests have packed it
        path.name: path.read_bytes()
        for path in corpus.parent.glob("text.*")
        if ".pack-" not in path.name
    }
    s3.seen.clear()
    assert fetched(data) == first and reads_of(s3, "text.meta.json") == 1
    assert not [request.path for request in s3.seen if request.path.endswith((".bin", ".idx"))]
    meta = json.loads(Path(f"{corpus}.meta.json").read_bytes()) | {"sources": ["others"]}
    own_client().pipe(f"{url}.meta.json", json.dumps(meta).encode())
    assert fetched(data) != first and first.with_name("text.bin").is_file(), "another run may use it"


def test_two_processes_of_a_host_fetch_each_file_once(data: DataConfig, s3: Gate) -> None:
    """Without a lock both write into one part, whose digest is wrong then, or each fetches everything."""

    def waits_for_the_other(request: Request) -> bool:
        if is_read_of_tokens(request):
            until(lambda: reads_of(s3, "text.meta.json") == 2)
            time.sleep(1)
        return False

    s3.faults = [Fault(waits_for_the_other, "error")]
    processes = [start_fetch(data, LENGTH) for _ in range(2)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    assert [reads_of(s3, f"text{ending}") for ending in (".bin", ".idx")] == [1, 1]


def test_a_copy_waits_for_a_store_that_fails_for_now(
    data: DataConfig, s3: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    s3.faults = [Fault(lambda request: request.path.endswith(".bin"), "error", 4)]
    assert fetched(data).with_name("text.bin").is_file() and s3.faults[0].times == 0


def test_progress_is_told_while_a_copy_is_made(data: DataConfig, s3: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten seconds of silence look like a hang."""
    monkeypatch.setattr(remote_data, "TELL_EVERY_S", 0.02)
    told, has_told = list[str](), threading.Event()

    def tell(sentence: str) -> None:
        told.append(sentence)
        if sentence.startswith("copying"):
            has_told.set()

    s3.faults = [Fault(lambda request: is_read_of_tokens(request) and not has_told.wait(30), "error")]
    find_or_fetch_copies(data, LENGTH, may_fetch=True, tell=tell)
    progress = re.escape(f"copying {data.urls[0]} to {data.cache}") + r".*: [\d.]+ (bytes|kB) of [\d.]+ kB"
    assert any(re.fullmatch(progress, sentence) for sentence in told), told


def test_what_is_wrong_at_a_url_is_a_sentence_and_leaves_nothing(
    data: DataConfig, url: str, corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    client = own_client()

    def refused(sentence: str) -> None:
        with pytest.raises(DataError, match=sentence):
            fetched(data)
        assert not list(tmp_path.glob("cache/*/complete.json"))
        with pytest.raises(DataError):
            find_or_fetch_copies(data, LENGTH, may_fetch=False, tell=print)

    with monkeypatch.context() as patch:
        patch.setattr(remote_data, "free_bytes", lambda _: 10)
        refused(r"cache has room for [\d.]+ \w+, and the copy of s3://.*/text takes [\d.]+ (bytes|kB|MB) more")
        patch.setattr(os, "access", lambda path, mode: path != tmp_path)  # a disk of which all files are read alone
        refused(r"cache cannot be written: set data.cache to a folder of yours")
    assert not (tmp_path / "cache").exists()
    content = Path(f"{corpus}.bin").read_bytes()
    client.pipe(f"{url}.bin", content[:-2])
    refused(r"text\.bin has [\d,]+ bytes, and by .*text\.meta\.json it must have")
    client.pipe(f"{url}.bin", content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(DataError, match=r"text\.bin is not the file that was written"):
        fetched(data)
    assert not list(tmp_path.glob("cache/*/text.bin")) and not list(tmp_path.glob("cache/*/complete.json"))
    client.rm(f"{url}.bin")
    refused(r"text\.bin does not exist, but .*text\.meta\.json names it")
    client.pipe(f"{url}.meta.json", b"{")
    refused(r"text\.meta\.json is not readable as metadata")
    client.rm(f"{url}.meta.json")
    refused(r"text\.meta\.json does not exist, without which no copy of .* could be proven")
    with pytest.raises(DataError, match="there is no such bucket"):
        fetched(data.model_copy(update={"path": ["s3://bucket-of-nobody/text"]}))


def test_plans_of_packing_come_with_the_tokens(corpus: Path, place: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    packed = {"packing": "best_fit", "document_mask": True}
    tiny["data"] |= packed
    config = Config.model_validate(tiny)
    (plan, *_) = [one.path for one in pack_data(config, print) if one.split == "train"]
    for path in (*(Path(f"{corpus}{ending}") for ending in (".bin", ".idx", ".meta.json")), plan):
        own_client().put(str(path), f"{place}/{path.name}")
    far = {"path": [f"{place}/text"], "cache": tmp_path / "cache"}
    there = config.model_copy(update={"data": config.data.model_copy(update=far)})
    places = find_or_fetch_copies(there.data, LENGTH, may_fetch=True, tell=print)
    found = open_data(there.model_copy(update={"data": with_copies(there.data, places)}))
    assert found.training.sample(0).tokens.tolist() == open_data(config).training.sample(0).tokens.tolist()
    assert Path(places[f"{place}/text"]).with_name(plan.name).read_bytes() == plan.read_bytes()


def test_commands_fetch_use_a_copy_or_say_what_to_do(
    url: str, tiny: dict[str, Any], tmp_path: Path, corpus: Path
) -> None:
    """A dry run that downloads, a plan that reads another place, or a traceback."""
    tiny["data"] |= {"path": url, "cache": str(tmp_path / "cache")}
    config = str(write_config(tmp_path / "far.yaml", tiny))
    for words in (["train", config, "--dry-run"], ["data", "plan", config]):
        done = command_line(*words)
        assert done.returncode == 2 and f"holds no copy of {url} yet (" in done.stderr
        assert "`megalite data fetch CONFIG` does" in done.stderr and not (tmp_path / "cache").exists()
    notice = check_remote_data(Config.model_validate(tiny).data, LENGTH, print)
    assert notice is not None and f"this host has no copy of {url}" in notice
    done = command_line("data", "fetch", config)
    assert done.returncode == 0 and f"{url} is copied to {tmp_path / 'cache'}/text-" in done.stdout
    assert check_remote_data(Config.model_validate(tiny).data, LENGTH, print) is None
    done = command_line("train", config, "--dry-run")
    assert done.returncode == 0 and url in done.stdout, done.stderr
    done = command_line("data", "plan", config)
    assert done.returncode == 0 and url[:20] in done.stdout, done.stderr
    done = command_line("data", "check", url)
    assert done.returncode == 2 and f"{url} is a URL: `megalite data fetch CONFIG` copies" in done.stderr
    done = command_line("data", "fetch", config, f"data.path={corpus}")
    assert done.returncode == 2 and "names no data at a URL" in done.stderr


def test_a_start_copies_before_it_checks_and_keeps_the_url(
    corpus: Path, url: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """A config with the path of a copy in it, which a checkpoint would carry to hosts that have none there."""
    here = find_position(Config.model_validate(tiny), NO_FLAGS).data.training
    tiny["data"] |= {"path": url, "cache": str(tmp_path / "cache")}
    with pytest.raises(DataError, match="this command makes none"):
        find_position(Config.model_validate(tiny), NO_FLAGS, is_dry=True)
    found = find_position(Config.model_validate(tiny), NO_FLAGS)
    assert (
        found.config.data.path == [url]
        and found.data.training.sample(0).tokens.tolist() == here.sample(0).tokens.tolist()
    )
    assert find_position(Config.model_validate(tiny), NO_FLAGS, is_dry=True).config == found.config


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"path": "s3://me:hunter2@bucket/web"}, "a prefix of data on s3:// has credentials in it: remove them"),
        ({"path": "https://host/web?sig=hunter2"}, "a prefix of data on https:// has a query, where tokens stand"),
        ({"path": "s3://bucket"}, "data at s3://bucket is a folder or a bucket: add the prefix of its files"),
        ({"path": "s3://bucket/folder/c*"}, "is a pattern, and patterns match files of this machine alone"),
        ({"path": "s3://bucket/folder/"}, "data at s3://bucket/folder/ is a folder or a bucket"),
        ({"path": "a", "cache": "s3://bucket/cache"}, "data.cache s3://bucket/cache is a URL"),
    ],
)
def test_urls_that_cannot_be_data_are_refused_with_the_config(
    tiny: dict[str, Any], options: dict[str, str], sentence: str
) -> None:
    from megalite.config.rules.rules import check_rules

    with pytest.raises(ConfigError) as caught:
        check_rules(Config.model_validate(tiny | {"data": options}), None, None)
    assert sentence in str(caught.value) and "hunter2" not in str(caught.value)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")
def test_a_copy_of_another_user_is_proven_before_it_is_used(
    data: DataConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever could write a shared cache chose what was trained on, under the fingerprint of the right data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "private"))
    prefix = fetched(data)
    for path in (prefix.parent, *prefix.parent.iterdir()):
        os.chown(path, 65534, 65534)
    with pytest.raises(DataError, match="holds no copy of"):
        find_or_fetch_copies(data, LENGTH, may_fetch=False, tell=print)
    found = fetched(data)
    assert found.is_relative_to(tmp_path / "private") and found == fetched(data)
    tokens = Path(f"{prefix}.bin")
    assert Path(f"{found}.bin").read_bytes() == tokens.read_bytes()
    tokens.write_bytes(bytes(tokens.stat().st_size))
    with pytest.raises(DataError, match=r"belongs to user number 65534, not to you, and its text\.bin is not the file"):
        fetched(data)
