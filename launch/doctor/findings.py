"""What the doctor was told, and what it makes of it: plain records that checks read and reports show."""

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

from launch.hostfile import Host
from megalite.config import Config

HERE = "this machine"  # beside the names of hosts: where the command was typed, which need not be one of them
NUMBERED = re.compile(r"(.*?)([0-9]+)((?:\.[A-Za-z][\w.-]*)?)")
Facts = Mapping[str, Any]  # as `facts` in launch/doctor/facts.py returns them


class Verdict(enum.StrEnum):
    """How bad it is; only FAIL keeps a host out of a run."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True)
class Judgement:
    """What is so on a host. Equal judgements of several hosts are one finding."""

    verdict: Verdict
    sentence: str  # reads well after the host's name
    remedy: str = ""


@dataclass(frozen=True)
class Finding:
    """One thing that is so on some hosts. No hosts: it is about this machine, or about all together."""

    check: str
    verdict: Verdict
    hosts: tuple[str, ...]
    sentence: str  # reads well after the hosts' names
    remedy: str = ""

    def __str__(self) -> str:
        where = f"{fold(self.hosts)}: " if self.hosts else ""
        return f"{where}{self.sentence}{f': {self.remedy}' if self.remedy else ''}"


@dataclass(frozen=True)
class Settings:
    """What of a run the hosts are asked about."""

    run_dir: Path | None = None  # absolute; None: not known
    data_files: tuple[Path, ...] = ()
    layout_of: Config | None = None  # its layout must fit the slots of all hosts together
    on_cpu: bool = field(default_factory=lambda: os.environ.get("DS_ACCELERATOR") == "cpu")

    @classmethod
    def of(cls, config: Config) -> Settings:
        """Relative paths are meant from where the command was typed, as on every host later."""
        prefixes = [Path(prefix).absolute() for prefix in config.data.path]
        files = tuple(path.with_name(f"{path.name}{end}") for path in prefixes for end in (".bin", ".idx"))
        return cls(config.run_dir.absolute(), files)


@dataclass
class Answers:
    """All that was asked. What a host that stopped answering did not say is missing."""

    hosts: tuple[Host, ...]
    settings: Settings
    root: str  # of our code
    here: Facts
    facts: dict[str, Facts] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)  # host -> why it cannot be asked
    clocks: dict[str, tuple[float, float]] = field(default_factory=dict)  # seconds ahead of here, give or take
    changed_files: dict[str, list[str]] = field(default_factory=dict)  # host -> what of our code is not as elsewhere
    token_problems: dict[str, str | None] = field(default_factory=dict)  # host or HERE -> why it could not write
    tokens_seen: dict[str, set[str]] = field(default_factory=dict)  # host or HERE -> whose tokens it could read
    links: dict[str, dict[str, Facts]] = field(default_factory=dict)  # from -> to -> as `connect` returns it

    @property
    def there(self) -> list[str]:
        """Hosts that answered, in the hostfile's order."""
        return [host.name for host in self.hosts if host.name in self.facts and host.name not in self.errors]


def gather(check: str, names: Sequence[str], judged: Iterable[tuple[str, Judgement]], fine: str) -> list[Finding]:
    """A finding for each judgement, with all hosts that share it; of `names`, those without one are fine."""
    groups: dict[Judgement, list[str]] = {}
    for name, judgement in judged:
        groups.setdefault(judgement, []).append(name)
    bad = {name for group in groups.values() for name in group}
    good = tuple(name for name in names if name not in bad)
    findings = [Finding(check, Verdict.OK, good, fine)] if good else []
    for one, group in groups.items():
        findings.append(Finding(check, one.verdict, tuple(group), one.sentence, one.remedy))
    return findings


def usual(values: Mapping[str, Any], here: Any = None) -> Any:
    """What most hosts have that have something; of two that as many have, what this machine has, or the first host."""
    counts = Counter(value for value in values.values() if value) or Counter([here])
    candidates = [value for value, count in counts.items() if count == max(counts.values())]
    return here if here in candidates else candidates[0]


def fold(names: Sequence[str]) -> str:
    """node1, node[3-5].rack2: names that count on are put together."""
    matches = [NUMBERED.fullmatch(name) for name in names]
    parts = [match.groups() if match else (name, "", "") for name, match in zip(names, matches, strict=True)]
    words = []
    for (stem, suffix), group in groupby(parts, key=lambda part: (part[0], part[2])):
        runs: list[list[str]] = []
        for _, number, _ in group:
            if runs and number and number == str(int(runs[-1][-1]) + 1).zfill(len(runs[-1][-1])):
                runs[-1].append(number)
            else:
                runs.append([number])
        numbers = [run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
        is_one = len(runs) == 1 and len(runs[0]) == 1
        words.append(f"{stem}{numbers[0]}{suffix}" if is_one else f"{stem}[{','.join(numbers)}]{suffix}")
    return ", ".join(words)
