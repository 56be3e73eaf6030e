"""Rows of the table of what the data costs, each with its goal, and ratios of times that are measured in turns."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness import quartiles


class DataGoal(NamedTuple):
    """A bound that the measured number is to keep."""

    bound: float
    is_least: bool = False  # else it is the most
    where: str = ""  # what the number must be measured on to count, if it is not this

    def __str__(self) -> str:
        return f"{'>=' if self.is_least else '<='} {self.bound:.3g}{self.where}"


class DataCost(NamedTuple):
    """A row of the table. Without a number its text says why it was not measured."""

    what: str
    number: float | None
    text: str
    goal: DataGoal | None = None

    @property
    def verdict(self) -> str:
        if self.goal is None:
            return ""
        if self.number is None:
            return "not measured"
        keeps = self.number >= self.goal.bound if self.goal.is_least else self.number <= self.goal.bound
        return "met" if keeps else "missed"

    def __str__(self) -> str:
        return " | ".join((self.what, self.text, str(self.goal or ""), self.verdict))


def number(what: str, value: float, digits: int, goal: DataGoal | None = None) -> DataCost:
    return DataCost(what, value, f"{value:,.{digits}f}", goal)


def ratio(what: str, ratios: list[float], digits: int, goal: DataGoal | None = None) -> DataCost:
    """Returns the row of the median of ratios, with their quartiles."""
    return DataCost(what, statistics.median(ratios), quartiles(ratios if len(ratios) > 1 else ratios * 2, digits), goal)


def paired(
    one: Callable[[], Any],
    other: Callable[[], Any],
    turns: int,
    *,
    clock: Callable[[], float] = time.process_time,
    warms_up: bool = True,
) -> list[float]:
    """Returns the ratios of the time of pairs of calls, the one or the other first by turns."""
    ratios = []
    for turn in range(turns + warms_up):
        seconds = {}
        for call in (one, other) if turn % 2 else (other, one):
            began = clock()
            call()
            seconds[call] = clock() - began
        ratios.append(seconds[one] / seconds[other])
    return ratios[warms_up:]


def own_process(module: str, function: str, *arguments: object) -> str:
    """Calls a function of a benchmark in a process of its own, and returns what it prints."""
    code = f"import {module}; {module}.{function}(*{arguments!r})"
    return subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True).stdout


def of_proc_self(file: str, name: str) -> int:
    """Returns a number that /proc/self counts, as `read_bytes` of `io` or `RssAnon` of `status`."""
    lines = Path(f"/proc/self/{file}").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))
