"""Shared parts of benchmarks: the page of results, its tables, the tree of another revision, and small runs."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from launch.parity.problem import Batch
    from megalite.config import Config

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BY_HAND = "\n<!-- below: written by hand, kept when the table is renewed -->\n"


class Load:
    """The machine's load at the start of a benchmark and when the page is written."""

    def __init__(self) -> None:
        self.before = os.getloadavg()[0]

    def __str__(self) -> str:
        return f"Load before and after: {self.before:.1f} and {os.getloadavg()[0]:.1f}."


def machine(*packages: str) -> str:
    """Returns the day, the processor and its cores, and the versions of packages and Python."""
    from launch.prediction.this_machine import cpu_name

    versions = [f"{name} {version(name)}" for name in packages]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return ", ".join([f"{date.today()}: {cpu_name()}", cores, *versions, f"Python {platform.python_version()}"])


def mount_of(folder: Path) -> str:
    """Returns the device of a folder and its file system."""
    command = ["df", "--output=source,fstype", str(folder)]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-2:])


def page(title: str, command: str, measured: str, *body: str) -> str:
    """Returns a page of results: where and how it was measured, and the lines of its tables and texts."""
    how = f"`python -m {command}`, {measured} What is measured and how: the script's docstring."
    return "\n".join([f"# {title}", "", how, "", *body, ""])


def renew_page(path: Path, text: str) -> None:
    """Writes `text` to the page, and keeps what it has below the mark."""
    notes = path.read_text().partition(BY_HAND)[2] if path.exists() else ""
    path.write_text(text + BY_HAND + notes)


def show(text: str, path: Path, *, renews: bool) -> None:
    """Prints a page of results; with `renews`, where all was measured, it takes the place of the old one too."""
    print(text)
    if renews:
        renew_page(path, text)


def header(*columns: str, words: int = 1) -> list[str]:
    """Returns the head of a table, in which the first columns hold `words` and the others numbers."""
    return [row(columns), f"|{'---|' * words}{'---:|' * (len(columns) - words)}"]


def row(cells: Iterable[object]) -> str:
    """Returns a line of a table."""
    return f"| {' | '.join(map(str, cells))} |"


def quartiles(values: Sequence[float], digits: int = 2) -> str:
    """Returns the median with the quartiles behind it, none of which is beyond what was measured."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


def spread(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """Returns the median with the smallest and the largest value behind it."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}} to {max(values):{form}})"


@contextmanager
def tree_of(revision: str) -> Iterator[Path]:
    """A checkout of a revision of this repository, for as long as it is used."""
    with tempfile.TemporaryDirectory() as temporary:
        tree, git = Path(temporary) / "other", ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", "--quiet", str(tree), revision], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def config_of(
    model: dict[str, Any], rows: int, sequence: int, *, micro_batch: int = 1, steps: int = 1, **sections: Any
) -> Config:
    """Returns the config of a run without a folder and data; `sections` are the others, and more of training."""
    from megalite.config import Config

    sizes = {
        "global_batch_size": rows,
        "micro_batch_size": micro_batch,
        "sequence_length": sequence,
        "steps": steps,
        **sections.pop("training", {}),
    }
    run = {"run_dir": tempfile.gettempdir(), "data": {"path": "unused"}, "model": model, "training": sizes}
    return Config.model_validate(run | sections)


def random_batches(draw: np.random.Generator, vocabulary: int, shape: tuple[int, int, int]) -> list[Batch]:
    """Draws tokens of so many micro-batches, rows and positions."""
    import numpy as np

    from launch.parity.problem import Batch

    micro_batches, rows, sequence = shape
    tokens = draw.integers(0, vocabulary, (micro_batches, rows, sequence + 1))
    return [Batch(each[:, :-1], each[:, 1:], None, np.zeros(rows, dtype=np.int64)) for each in tokens]


def drop_from_cache(*paths: Path) -> None:
    """Writes files to the disk, and drops them from the page cache where no process maps them."""
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
