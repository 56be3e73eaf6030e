"""Reads the files that a run leaves in its folder, without a change in it and without torch.

They may be missing, cut by a kill, of another version, or still being written: what cannot be read is unknown.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from shlex import quote
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator, model_validator

from data_pipeline.path_suggestions import did_you_mean
from launch.errors import LaunchError
from launch.output import check_local
from launch.runtime.run_lock import LockHolder, lock_holder
from megalite.checkpoint.safe_files import read_small_file
from megalite.config import Config, ConfigError, load_saved_config
from megalite.config.path_or_url import url_of
from megalite.monitor.events import EVENTS
from megalite.monitor.line_files import object_of, whole_lines
from megalite.monitor.sinks.jsonl import METRICS, is_record
from megalite.units import plural

Facts = Mapping[str, Any]
CONFIG, RECEIPT = "config.yaml", "receipt.json"
METRICS_BYTES = 1 << 19  # at the end of the file: the last thousand steps
EVENTS_BYTES = 1 << 23
SETTINGS_BYTES = 1 << 22  # of config.yaml or receipt.json
LATEST_S = 1e11  # that any clock shows


def number(value: Any) -> float | None:
    """Returns a value from a file if it is a number of sensible size."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 1e18 else None


Number = Annotated[float | None, BeforeValidator(number)]


class _Known(BaseModel):
    """Facts of a receipt: what is of another type is unknown, and what another version has written beside it stays."""

    model_config = ConfigDict(extra="allow", frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, values: Any) -> Any:
        return values if isinstance(values, Mapping) else {}

    @field_validator("*", mode="wrap")
    @classmethod
    def _default(cls, value: Any, validate: Any, about: Any) -> Any:
        try:
            return validate(value)
        except ValidationError:
            return cls.model_fields[about.field_name].get_default(call_default_factory=True)


class RecordedMemory(_Known):
    """The peak memory of a rank, as measured, or of a stage, as predicted."""

    stage: int | None = None
    peak_mib: Number = None


class RecordedStep(_Known):
    """The prediction of a step at the start, or its measurement at the end."""

    problem: str | None = None  # why there is no prediction of its time
    rough: str = ""  # why it is; empty where it is not
    step_time_s: Number = None
    parts_s: dict[str, Number] = {}
    memory: list[RecordedMemory] = []  # of stages, as predicted
    ranks: list[RecordedMemory] = []  # as measured


class RecordedGoodput(_Known):
    """The account of the run's time."""

    goodput: Number = None
    sessions: int | None = None
    lost_steps: int | None = None
    seconds: dict[str, Number] = {}


class Receipt(_Known):
    """The facts of `receipt.json`; each may be missing."""

    versions: dict[str, Any] = {}
    machine: dict[str, Any] = {}
    git: dict[str, Any] = {}
    command: list[Any] = []
    layout: dict[str, Any] = {}  # sizes, as in the manifests of checkpoints, and those of 1 that these leave out
    seed: Any = None
    data_fingerprint: Any = None
    written: Any = None
    outcome: dict[str, Any] = {}
    prediction: RecordedStep = RecordedStep()
    measured: RecordedStep = RecordedStep()
    published: str | None = None  # a sentence: the best known speed on these accelerators
    goodput: RecordedGoodput = RecordedGoodput()

    @field_validator("layout", mode="after")
    @classmethod
    def _whole(cls, layout: dict[str, Any]) -> dict[str, Any]:
        return {"context_parallel_size": 1, "expert_parallel_size": 1} | layout if layout else {}


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's files: steps and events as far back as they were read."""

    config: Config | None
    receipt: Receipt
    records: Sequence[Facts]  # of metrics.jsonl
    events: Sequence[Facts]
    holder: LockHolder | None
    problems: tuple[str, ...]  # sentences: what could not be read

    @classmethod
    def read(cls, run_dir: Path) -> RunFiles:
        """Reads the files. Raises OSError where steps or events cannot be read."""
        problems: list[str] = []
        records = _objects(run_dir / METRICS, METRICS_BYTES, is_record, problems)
        events = _objects(run_dir / EVENTS, EVENTS_BYTES, lambda one: isinstance(one.get("event"), str), problems)
        return cls(
            config=_config(run_dir / CONFIG, problems),
            receipt=_receipt(run_dir / RECEIPT, problems),
            records=records,
            events=events,
            holder=lock_holder(run_dir),
            problems=tuple(problems),
        )

    @property
    def session(self) -> Sequence[Facts]:
        """The events of the last session, `started` first; empty if there was none."""
        starts = [place for place, event in enumerate(self.events) if event["event"] == "started"]
        return self.events[starts[-1] :] if starts else []

    @property
    def session_records(self) -> Sequence[Facts]:
        """The records of the steps that the last session has done."""
        began = time_of(self.session[0]) if self.session else 0.0
        return [record for record in self.records if time_of(record) >= began]

    @property
    def slow_ranks(self) -> Sequence[Facts]:
        """The events of ranks that have become slow in the last session and are so still."""
        slow: dict[str, Facts] = {}
        for event in self.session:
            if event["event"] == "slow_rank":
                slow[str(event.get("rank"))] = event
            elif event["event"] == "slow_rank_over":
                slow.pop(str(event.get("rank")), None)
        return list(slow.values())

    @property
    def host(self) -> str | None:
        """Host of rank 0."""
        if self.holder is not None:
            return self.holder.host
        found = self.receipt.machine.get("host")
        return found if isinstance(found, str) else None

    @property
    def layout(self) -> dict[str, int]:
        """The sizes of the layout; empty if unknown."""
        return self.receipt.layout


def is_run(folder: Path) -> bool:
    """Returns whether a folder is that of a run, also of one whose first start has just begun."""
    has_receipt = all((folder / name).is_file() for name in (CONFIG, RECEIPT))
    return has_receipt or (folder / EVENTS).is_file() or lock_holder(folder) is not None


def check_is_run(folder: Path) -> None:
    """Raises LaunchError, with what was perhaps meant, where a folder is not that of a run."""
    if is_run(folder):
        return
    check_local_folder(folder)
    if not folder.is_dir():
        what = "is a file" if folder.exists() else f"does not exist{did_you_mean(folder)}"
        raise LaunchError(f"{folder} {what}: give the folder of a run, its run_dir; `megalite ls FOLDER` lists runs")
    for above in folder.resolve().parents:
        if is_run(above):
            raise LaunchError(f"{folder} is a part of the run {above}: give that folder")
    raise LaunchError(
        f"{folder} is no folder of a run, which has {CONFIG}, {RECEIPT} and {EVENTS}; "
        f"`megalite ls {quote(str(folder))}` lists the runs below it"
    )


def check_local_folder(folder: Path) -> None:
    """Raises LaunchError for a URL, of which only checkpoints can be listed."""
    listing = f"`megalite checkpoint ls {quote(str(url_of(folder)))}` lists the checkpoints there"
    check_local(folder, f"give a local folder; {listing}")


def known(records: Sequence[Facts], name: str) -> list[float]:
    """Returns the numbers of that name in the records that have one."""
    return [found for record in records if (found := number(record.get(name))) is not None]


def listed(value: Any) -> list[Any]:
    """Returns a value from a file if it is a list, else an empty one."""
    return value if isinstance(value, list) else []


def time_of(entry: Facts) -> float:
    """Returns when a record or event was written, in unix seconds; 0 if it does not say, or what no clock shows."""
    at = number(entry.get("time"))
    return at if at is not None and abs(at) < LATEST_S else 0.0


def seconds_between(records: Sequence[Facts]) -> list[float]:
    """Returns the seconds from step to step, with all that came between; of a single one what it took itself."""
    gaps = [max(0.0, time_of(b) - time_of(a)) for a, b in pairwise(records)]
    return gaps or known(records[-1:], "step_time_s")


def _config(path: Path, problems: list[str]) -> Config | None:
    try:
        read_small_file(path, SETTINGS_BYTES)  # `load_saved_config` would wait for a named pipe, and read any size
        return load_saved_config(path)
    except FileNotFoundError:
        return None
    except (OSError, ConfigError) as error:
        problems.append(str(error))
        return None


def _objects(path: Path, last_bytes: int, is_one: Callable[[Facts], bool], problems: list[str]) -> list[Facts]:
    """Returns what the lines at the end of a file hold; metrics.jsonl is empty until a step has ended."""
    if not path.is_file():
        problems += [f"{path} is a folder"] if path.is_dir() else []
        return []
    with path.open("rb") as file:
        lines = [line for line in whole_lines(file, max(0, file.seek(0, os.SEEK_END) - last_bytes)) if line.strip()]
    found: list[Facts] = [value for line in lines if (value := object_of(line)) is not None and is_one(value)]
    if not found and (path.name == EVENTS or path.stat().st_size):
        problems.append(f"{path} has no line that can be read")
    elif found and len(lines) > len(found):
        problems.append(f"{path}: {plural(len(lines) - len(found), 'line')} that are no records")
    return found


def _receipt(path: Path, problems: list[str]) -> Receipt:
    try:
        return Receipt.model_validate(json.loads(read_small_file(path, SETTINGS_BYTES)))
    except FileNotFoundError:
        return Receipt()
    except (OSError, ValueError, RecursionError) as error:
        problems.append(f"{path} cannot be read: {error}")
        return Receipt()
