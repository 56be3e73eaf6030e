"""Runs on data at a URL: every host copies it once while all ranks wait, and the numbers are those of the data here."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.commands import metrics
from tests.helpers.s3_fixtures import own_client
from tests.helpers.s3_server import Fault, Gate, Request
from tests.helpers.warm_runs import session, train

AWS = "AWS_"


def as_hosts(folder: Path, rank: int, environment: dict[str, str], caches: list[str]) -> None:
    """Makes each rank the first one of a host of its own, with a cache of its own."""
    os.environ |= environment | {"LOCAL_RANK": "0", "XDG_CACHE_HOME": caches[rank]}


@pytest.fixture
def far(tiny: dict[str, Any], corpus: Path, place: str) -> dict[str, Any]:
    """A config whose data lies on a store."""
    for ending in (".bin", ".idx", ".meta.json"):
        own_client().put(f"{corpus}{ending}", f"{place}/text{ending}")
    tiny["schedule"] = {"name": "constant"}
    return tiny | {"data": tiny["data"] | {"path": f"{place}/text"}}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    environment = {name: value for name, value in os.environ.items() if name.startswith(AWS)}
    yield as_hosts, (environment, [str(tmp_path / "host_0"), str(tmp_path / "host_1")])


def is_read_of_tokens(request: Request) -> bool:
    return request.method == "GET" and request.path.endswith("/text.bin")


def losses(config: dict[str, Any]) -> list[float]:
    return [record["loss"] for record in metrics(config["run_dir"])]


def test_two_hosts_copy_the_data_once_each_and_a_run_goes_on_with_the_data_here(
    far: dict[str, Any], tiny: dict[str, Any], hosts: Any, s3: Gate, tmp_path: Path
) -> None:
    """Other samples, or a resume that is refused because a place has entered the fingerprint. The losses are equal to
    the bit, as data and layout are."""
    here = tiny | {"run_dir": str(tmp_path / "here")}
    train(tmp_path / "session", here)
    first = train(tmp_path / "session", far, "training.steps=2", fault=hosts)
    assert f"{far['data']['path']}" in first
    assert sum(map(is_read_of_tokens, s3.seen)) == 2, "two hosts have two caches"
    copies = [list((tmp_path / host).glob("megalite/data/text-*/complete.json")) for host in ("host_0", "host_1")]
    assert [len(found) for found in copies] == [1, 1]
    train(tmp_path / "session", here | {"run_dir": far["run_dir"]}, "training.steps=3")
    train(tmp_path / "session", far, "training.steps=4", fault=hosts)
    assert losses(far) == losses(here) and len(losses(here)) == 4
    assert sum(map(is_read_of_tokens, s3.seen)) == 2, "a copy that is complete was fetched again"


def test_a_host_that_cannot_copy_ends_all_ranks_with_its_sentence(
    far: dict[str, Any], hosts: Any, tmp_path: Path
) -> None:
    """Ranks of other hosts that wait for good, or train without it."""
    (tmp_path / "host_1").touch()
    with session(tmp_path / "session", far, fault=hosts) as running:
        assert running.wait() == [2, 2], running.output()
        assert "host_1/megalite/data" in running.output(0) and "cannot be written (Not a directory)" in running.output(
            0
        )
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_a_digest_that_is_wrong_ends_the_run_before_its_first_step(
    far: dict[str, Any], hosts: Any, corpus: Path, tmp_path: Path
) -> None:
    content = Path(f"{corpus}.bin").read_bytes()
    own_client().pipe(f"{far['data']['path']}.bin", content[:-1] + bytes([content[-1] ^ 1]))
    with session(tmp_path / "session", far, fault=hosts) as running:
        assert running.wait() == [2, 2], running.output()
        assert "text.bin is not the file that was written: its SHA-256 is" in running.output()
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_ranks_say_what_they_wait_for(far: dict[str, Any], hosts: Any, s3: Gate, tmp_path: Path) -> None:
    """Silence of more than 10 s, while one host is slow."""
    output = tmp_path / "session" / "output_0.txt"

    def is_held(request: Request) -> bool:
        """Holds each request of tokens until rank 0 has told that it copies."""
        if is_read_of_tokens(request):
            s3.is_open.wait(15)
        return False

    s3.faults = [Fault(is_held, "error")]
    with session(tmp_path / "session", far, "training.steps=1", fault=hosts) as running:
        running.wait_until(lambda: "copying s3://bucket/" in output.read_text(), 60)
        s3.is_open.set()
        assert running.wait() == [0, 0], running.output()
    assert re.search(r"\d [kMG]B", output.read_text())
