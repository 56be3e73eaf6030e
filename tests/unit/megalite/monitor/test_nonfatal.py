"""A sink may fail for ever, the run never hears of it; what must end the run still does."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from megalite.monitor.observer import Nonfatal


def test_failures_are_swallowed_counted_and_told_seldom() -> None:
    said: list[str] = []
    nonfatal = Nonfatal(said.append)
    done = []
    for step in range(1234):
        with nonfatal("metrics.jsonl"):
            raise OSError(28, "No space left on device", "run/metrics.jsonl")
        with nonfatal("wandb"):
            done.append(step)
    with nonfatal("loss.png"):
        raise ValueError("two\nlines")
    assert done == list(range(1234))
    full = "OSError: [Errno 28] No space left on device: 'run/metrics.jsonl'"
    assert said == [
        f"metrics.jsonl failed once, training goes on: {full}",
        *(f"metrics.jsonl failed {n} times, training goes on: {full}" for n in (10, 100, 1000)),
        "loss.png failed once, training goes on: ValueError: two",
    ]
    assert nonfatal.summary() == {
        "metrics.jsonl": {"count": 1234, "last": full},
        "loss.png": {"count": 1, "last": "ValueError: two"},
    }
    assert nonfatal.sentence() == (
        f"failed while training went on: loss.png once (last: ValueError: two); metrics.jsonl 1234 times (last: {full})"
    )


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit(4), GeneratorExit])
def test_what_ends_a_run_is_not_held_up(error: type[BaseException] | BaseException) -> None:
    nonfatal = Nonfatal(print)
    with pytest.raises(BaseException) as raised, nonfatal("wandb"):
        raise error
    assert raised.value is error or raised.type is error
    assert nonfatal.summary() == {} and nonfatal.sentence() == ""


def test_a_report_that_fails_is_not_fatal_either(tmp_path: Path) -> None:
    console = (tmp_path / "console").open("w")
    console.close()
    nonfatal = Nonfatal(lambda sentence: print(sentence, file=console))
    with nonfatal("wandb"):
        raise RuntimeError
    assert nonfatal.summary() == {"wandb": {"count": 1, "last": "RuntimeError"}}


def test_threads_are_counted_together() -> None:
    """The mirror fails in its own thread while sinks fail in the loop's."""
    said: list[str] = []
    nonfatal = Nonfatal(said.append)

    def fail() -> None:
        for _ in range(500):
            with nonfatal("mirror"):
                raise ConnectionError("refused")

    threads = [threading.Thread(target=fail) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert nonfatal.summary()["mirror"]["count"] == 2000 and len(said) == 4
