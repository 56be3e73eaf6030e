"""How long each test took: kept from run to run, and by it the order in which workers take files; and how slow the
machine was meanwhile."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

FOLDER = Path("build") / "test_durations"
GUESS_S = {
    "device": 10.0,
    "cluster": 10.0,
    "e2e": 5.0,
    "ranks": 2.0,
    "performance": 1.0,
    "unit": 0.1,
}  # a test that is not kept
BEGUN_BY = {"e2e": 0.8, "ranks": 0.9}  # part of a run in which all files of a tier begin: short ones are its end


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


def keep(tier: str, seconds: Mapping[str, float]) -> None:
    """Writes the times of a run's tests of a tier, slowest first, in place of what was kept of their files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = set(map(file_of, seconds))
    others = {nodeid: taken for nodeid, taken in kept(tier).items() if file_of(nodeid) not in files}
    tests = dict(Counter({**others, **seconds}).most_common())
    made = FOLDER / f".{tier}.{os.getpid()}.tmp"
    made.write_text(json.dumps({"total": sum(seconds.values()), "tests": tests}, indent=1))
    made.replace(FOLDER / f"{tier}.json")  # whole, as workers of another run may read it now and must agree


def kept(tier: str) -> dict[str, float]:
    """The times of a tier's tests in earlier runs of this checkout, as far as there are any."""
    try:
        return dict(json.loads((FOLDER / f"{tier}.json").read_text())["tests"])
    except (OSError, ValueError, KeyError):
        return {}


def order_of_files(nodeids: Sequence[str], tier_of: Callable[[str], str]) -> dict[str, float]:
    """A number for each file, by which workers take them: the part of its tier's time that the files before it take.

    So all tiers run side by side: tests of whole commands mostly wait, and others compute meanwhile; and three files of
    ranks do not share two cores. Within a tier the longest come first, so that none of them is the last that runs.
    """
    tiers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    known = {tier: kept(tier) for tier in GUESS_S}
    for nodeid in nodeids:
        tier = tier_of(nodeid)
        tiers[tier][file_of(nodeid)] += known[tier].get(nodeid, GUESS_S[tier])
    places = {}
    for tier, files in tiers.items():
        before, total = 0.0, sum(files.values())
        for file, seconds in files.most_common():
            places[file] = BEGUN_BY.get(tier, 1.0) * before / total
            before += seconds
    return places


class Slowness(threading.Thread):
    """How many times as long as the machine of docs/limits.md's budgets this one takes for the same work.

    Virtual machines of one name differ by a factor of two. A small piece of work is timed every few seconds, in
    processor time, as tests beside it must not count; what the host of a virtual machine withholds does.
    """

    _REFERENCE_S = 6e-3

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._taken_s: list[float] = []
        self._began_s, self._withheld_s = time.monotonic(), self._withheld()

    def run(self) -> None:
        while True:
            began = time.thread_time()
            sorted(map(str, range(60_000)))
            self._taken_s.append(time.thread_time() - began)
            time.sleep(5)

    def factor(self) -> float:
        """Returns 1 on a faster machine too."""
        machine_s = psutil.cpu_count() * (time.monotonic() - self._began_s)
        given = 1 - (self._withheld() - self._withheld_s) / machine_s
        return max(1.0, sum(self._taken_s) / max(len(self._taken_s), 1) / self._REFERENCE_S / given)

    @staticmethod
    def _withheld() -> float:
        return float(getattr(psutil.cpu_times(), "steal", 0.0))
