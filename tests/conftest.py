"""Tiers of tests by folder, their time budgets, and what many tests need: a small corpus, a config that trains on it.

`tests/unit` mirrors the sources and starts no ranks; `tests/performance` counts what a training step costs;
`tests/ranks` runs functions on ranks; `tests/e2e` runs whole commands; `tests/cluster` needs several hosts. A test
marked `exhaustive` belongs to a full matrix: `make test` runs a part of that matrix, which covers every pair of its
axes' values or is drawn anew each time, `make test-all` runs all of it.
"""

from __future__ import annotations

import functools
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import settings

from tests.helpers import durations
from tests.helpers.house import limits
from tests.helpers.sizes import TINY_SIZES, VOCAB_SIZE

# before numpy and torch are imported: tests, workers and ranks share few cores, where a second thread only spins
os.environ.setdefault("OMP_NUM_THREADS", "1")

# no deadline: an example may wait for a core that ranks have
settings.register_profile("default", deadline=None, max_examples=25)
settings.register_profile("exhaustive", deadline=None, max_examples=200)

TIMEOUT_S = {"unit": 120, "performance": 300, "ranks": 300, "e2e": 300, "cluster": 300, "device": 600}
"""Longest time of one test by tier, on a machine that other work keeps busy."""

BUDGET_S = {tier: limits()[f"worker-seconds, {tier}"] for tier in TIMEOUT_S}
"""Sum of the times of a tier's tests, over all workers, beyond which a run fails: some third more than they take where
three workers share two cores and nobody else computes. A slower machine has as much more time."""


_seconds: Counter[str] = Counter()  # by test; set up, call and tear down
_slowness = durations.Slowness()


def tier_of(nodeid: str) -> str:
    """The tier of a test by its folder; files beside the tiers are unit tests."""
    folder = nodeid.split("/")[1]
    return folder if folder in TIMEOUT_S else "unit"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run full matrices and long property tests as well")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("exhaustive" if config.getoption("--exhaustive") else "default")
    if not hasattr(config, "workerinput"):
        _slowness.start()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests with their tier, and mixes the tiers."""
    if not config.getoption("--exhaustive") and "exhaustive" not in config.getoption("markexpr"):
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("exhaustive")])
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
    for item in items:
        tier = tier_of(item.nodeid)
        item.add_marker(tier)
        if not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(TIMEOUT_S[tier]))
    if hasattr(config, "workerinput") and any(tier_of(item.nodeid) == "cluster" for item in items):
        raise pytest.UsageError("tests/cluster shares one set of hosts: run it without -n")
    places = durations.order_of_files([item.nodeid for item in items], tier_of)
    items.sort(key=lambda item: places[durations.file_of(item.nodeid)])


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def _seconds_by_tier() -> Counter[str]:
    tiers: Counter[str] = Counter()
    for nodeid, seconds in _seconds.items():
        tiers[tier_of(nodeid)] += seconds
    return tiers


def _is_over_budget(config: pytest.Config, tier: str, seconds: float) -> bool:
    return seconds > _slowness.factor() * BUDGET_S[tier] and not config.getoption("--exhaustive")


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Keeps every test's time, a file for each tier, and fails a run whose tiers take much longer than they should."""
    if hasattr(session.config, "workerinput"):
        return
    for tier, total in _seconds_by_tier().items():
        durations.keep(tier, {nodeid: seconds for nodeid, seconds in _seconds.items() if tier_of(nodeid) == tier})
        if _is_over_budget(session.config, tier, total):
            session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    terminalreporter.write_line(f"this machine is {_slowness.factor():.2f} times as slow as that of the budgets")
    for tier, seconds in sorted(_seconds_by_tier().items()):
        is_over = _is_over_budget(config, tier, seconds)
        verdict = f": OVER BUDGET, see {durations.FOLDER / tier}.json" if is_over else ""
        terminalreporter.write_line(
            f"{tier}: {seconds:.0f} s of tests, budget {BUDGET_S[tier]} s{verdict}", red=is_over
        )


@pytest.fixture(scope="session", autouse=True)
def commands_are_built_once() -> Iterator[None]:
    """As in a user's process; else this is most of what a command that prints a sentence takes."""
    import typer.main
    import typer.testing

    build = functools.cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", build)
        patch.setattr(typer.testing, "_get_command", build)
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """For models whose matrices are tiny: a second thread would only spin, on a core that ranks want."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefix of a prepared corpus: some of the Python standard library's own sources."""
    from data_pipeline.prepare.prepare import prepare
    from data_pipeline.sources.python_stdlib import python_stdlib_sources
    from data_pipeline.tokenizers.training import train_tokenizer

    folder = tmp_path_factory.mktemp("corpus")
    sources = [path for path in python_stdlib_sources() if path.stat().st_size < 20_000][:40]
    train_tokenizer((path.read_text(encoding="utf-8") for path in sources), folder / "tokenizer", VOCAB_SIZE)
    prepare([str(path) for path in sources], folder / "text", folder / "tokenizer", workers=1)
    return folder / "text"


@pytest.fixture
def tiny(corpus: Path, tmp_path: Path) -> dict[str, Any]:
    """A config, as YAML holds it, of a model that steps in milliseconds."""
    return {
        "run_dir": str(tmp_path / "run"),
        "model": dict(TINY_SIZES),
        "data": {"path": str(corpus), "held_out_fraction": 0.3},
        "precision": {"dtype": "fp32"},
        "training": {"global_batch_size": 4, "micro_batch_size": 2, "sequence_length": 32, "steps": 4},
        "monitor": {"report": False},  # a process of a second or two
    }


def write_config(path: Path, config: dict[str, Any]) -> Path:
    """`config` as a YAML file."""
    path.write_text(yaml.safe_dump(config))
    return path
