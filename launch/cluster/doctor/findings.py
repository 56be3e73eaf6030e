"""Data classes of the doctor: the answers of hosts that checks read, and the findings that reports show."""

from __future__ import annotations

import enum
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from launch.runtime.hostfile import Host
from megalite.config import Config
from megalite.config.deepspeed import compiled_extensions

HERE = "this machine"  # where the command runs, which need not be one of the hosts
NUMBERED = re.compile(r"(.*?)([0-9]+)((?:\.[A-Za-z][\w.-]*)?)")
Facts = Mapping[str, Any]  # as `facts` in launch/runtime/host_probe.py returns them


class Severity(enum.StrEnum):
    """Severity of a finding; only FAIL excludes a host from a run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


OK, WARN, FAIL = Severity
STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


@dataclass(frozen=True)
class Finding:
    """Result of a check for some hosts; without hosts, it concerns this machine or the run as a whole."""

    check: str
    verdict: Severity
    hosts: tuple[str, ...]
    sentence: str  # continues a sentence that begins with the hosts' names
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{fold(self.hosts)}: " if self.hosts else ""
        return f"{where}{self.sentence}{f': {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True)
class Settings:
    """Properties of a run that the hosts are checked against."""

    run_dir: Path | None = None  # absolute; None: unknown
    data_files: tuple[Path, ...] = ()
    extensions: tuple[str, ...] = ()  # of torch, which its ranks compile where a cache lacks them
    layout_of: Config | None = None  # its layout must fit the slots of all hosts
    on_cpu: bool = field(default_factory=lambda: os.environ.get("DS_ACCELERATOR") == "cpu")

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Takes the settings from a config; relative paths start at the working directory, on every host."""
        data = config.data  # of what is at URLs each host makes a copy itself
        prefixes = [Path(prefix).absolute() for prefix in data.all_prefixes if prefix not in data.urls]
        files = tuple(path.with_name(f"{path.name}{end}") for path in prefixes for end in (".bin", ".idx"))
        return cls(config.run_dir.absolute(), files, compiled_extensions(config.deepspeed))


@dataclass
class Answers:
    """Answers of all hosts; those that a host did not give before it stopped answering are missing."""

    hosts: tuple[Host, ...]
    settings: Settings
    root: str  # the folder of our code
    here: Facts
    facts: dict[str, Facts] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # host -> why it does not answer
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)  # host -> seconds ahead of here, uncertainty
    changed_files: dict[str, list[str]] = field(default_factory=dict)  # host -> source files unlike the other hosts'
    token_problems: dict[str, str | None] = field(default_factory=dict)  # host or HERE -> why it wrote no token
    tokens_seen: dict[str, set[str]] = field(default_factory=dict)  # host or HERE -> owners of the tokens it could read
    links: dict[str, dict[str, Facts]] = field(default_factory=dict)  # from -> to -> result of `connect`

    @property
    def there(self) -> dict[str, Facts]:
        """The facts of the hosts that answered, in the hostfile's order."""
        names = (host.name for host in self.hosts if host.name not in self.errors)
        return {name: self.facts[name] for name in names if name in self.facts}


class Problems:
    """Collects what one check finds wrong with hosts; those with the same problem share a finding."""

    def __init__(self, check: str) -> None:
        self._check = check
        self._hosts: dict[tuple[Severity, str, str], list[str]] = {}  # verdict, sentence, remedy -> hosts

    def add(self, host: str, verdict: Severity, sentence: str, remedy: str = "") -> None:
        """Adds a problem; `sentence` continues one that begins with the host's name."""
        self._hosts.setdefault((verdict, sentence, remedy), []).append(host)

    def findings(self, names: Iterable[str], fine: str) -> list[Finding]:
        """Returns a finding per problem; before them, hosts in `names` without one share an OK finding, `fine`."""
        bad = {host for hosts in self._hosts.values() for host in hosts}
        good = tuple(name for name in names if name not in bad)
        findings = [Finding(self._check, OK, good, fine)] if good else []
        for (verdict, sentence, remedy), hosts in self._hosts.items():
            findings.append(Finding(self._check, verdict, tuple(hosts), sentence, remedy))
        return findings


def usual(values: Mapping[str, Any], here: Any = None) -> Any:
    """Returns the most frequent value that is not empty; in a tie that of this machine, else of the first host."""
    counts = Counter(value for value in values.values() if value) or Counter([here])
    candidates = [value for value, count in counts.items() if count == max(counts.values())]
    return here if here in candidates else candidates[0]


def fold(names: Sequence[str]) -> str:
    """Abbreviates host names with consecutive numbers: node1, node[3-5].rack2."""
    matches = [NUMBERED.fullmatch(name) for name in names]
    parts = [match.groups() if match else (name, "", "") for name, match in zip(names, matches, strict=True)]
    ranges = []
    for (stem, suffix), group in groupby(parts, key=lambda part: (part[0], part[2])):
        runs: list[list[str]] = []
        for _, number, _ in group:
            if runs and number and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][-1])):
                runs[-1].append(number)
            else:
                runs.append([number])
        numbers = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        is_one = len(runs) == 1 and len(runs[0]) == 1
        ranges.append(f"{stem}{numbers[0]}{suffix}" if is_one else f"{stem}[{','.join(numbers)}]{suffix}")
    return ", ".join(ranges)
