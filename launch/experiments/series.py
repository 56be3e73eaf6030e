"""A series: runs of one config that differ in a few options, each in a folder of its own below that of the series.

In: points and the number of rounds. Out: the runs to make, in turns, so that what the machine does meanwhile falls on
all points alike; `series.json`, by which a later call knows the folder again. No torch.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import USER_ERRORS, LaunchError, sentences_of
from launch.inspection.run_files import RunFiles
from launch.output import check_local
from launch.runtime.run_lock import is_locked
from launch.trainer.start.checks import CheckedRun, check_start
from launch.trainer.start.flags import StartFlags
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.durable_files import write_durably
from megalite.checkpoint.safe_files import read_small_file
from megalite.config import Config

SERIES = "series.json"
SERIES_BYTES = 1 << 22
LENGTH_OPTIONS = {  # set for each run by the series itself -> how to say it instead
    "run_dir": "-o names the folder of them all",
    "training.steps": "--steps is the number of steps that are measured",
    "training.tokens": "--steps is the number of steps that are measured",
}
QUIET = (  # nothing but steps
    "checkpoint.interval=0",
    "checkpoint.save_last=false",
    "checkpoint.resume=false",
    "checkpoint.keep_best=0",
    "checkpoint.export_hf=off",
    "checkpoint.mirror=null",
    "training.evaluation.interval=0",
    "training.max_minutes=null",
    "training.tokens=null",
    "training.stages=[]",  # the batch that the run begins with is measured
    "monitor.log_interval=1",
    "monitor.plot=false",
    "monitor.report=false",  # it would be written beside the next run
    "monitor.wandb.enabled=false",
)


@dataclass(frozen=True)
class SeriesPoint:
    """One point of a series: a variant of the config."""

    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class SeriesRun:
    """One run of a point."""

    place: int  # of its point in the series
    round: int  # from 1
    run_dir: Path
    log: Path  # the output of its command


@dataclass(frozen=True)
class RunSeries:
    """Runs of one config. Each trains `warm_up` steps and then the `steps` that are measured."""

    kind: str  # the command that makes it
    folder: Path
    config_path: Path
    overrides: tuple[str, ...]  # of all points, before their own
    points: tuple[SeriesPoint, ...]
    steps: int
    warm_up: int
    rounds: int

    def runs(self) -> Iterator[SeriesRun]:
        """Yields all runs in order: one round forwards, the next one backwards."""
        for number in range(1, self.rounds + 1):
            places = range(len(self.points))
            for place in places if number % 2 else reversed(places):
                folder = self.folder_of(place)
                yield SeriesRun(place, number, folder / f"round_{number}", folder / f"round_{number}.log")

    def folder_of(self, place: int) -> Path:
        """Returns the folder of the runs of one point."""
        slug = re.sub(r"[^A-Za-z0-9.]+", "-", self.points[place].name).strip("-.")[:60]
        return self.folder / f"{place + 1:02}_{slug}"

    def arguments(self, run: SeriesRun) -> list[str]:
        """Returns the config and the overrides of a run, as a command line has them."""
        return [str(self.config_path), *self._overrides(self.points[run.place], run.run_dir)]

    def _overrides(self, point: SeriesPoint, run_dir: Path) -> list[str]:
        length = f"training.steps={self.warm_up + self.steps}"
        return [*QUIET, length, *self.overrides, *point.overrides, f"run_dir={json.dumps(str(run_dir))}"]

    def check(self) -> list[CheckedRun]:
        """Makes the checks of a start for every point, but whether its memory fits: that is found when it is run.

        Raises LaunchError with one sentence per mistake, in whichever points it is.
        """
        for override in self.overrides:
            name = override.partition("=")[0]
            if name in LENGTH_OPTIONS and name != "run_dir":  # which names the default folder
                raise LaunchError(f'override "{override}": {LENGTH_OPTIONS[name]}: leave this one out')
        checked, sentences = [], list[str]()
        for place, point in enumerate(self.points):
            try:
                overrides = self._overrides(point, self.folder_of(place) / "checked")
                config = load_run_config(self.config_path, overrides)
                checked.append(check_start(config, StartFlags(force=True), is_dry=True))
            except USER_ERRORS as error:
                sentences += sentences_of(error)
        if sentences:
            # one for all values of an option that there is not: they differ in the override before the colon alone
            told = {sentence.partition('": ')[2] or sentence: sentence for sentence in reversed(sentences)}
            raise LaunchError(*reversed(told.values()))
        return checked

    def open(self, checked: Sequence[CheckedRun]) -> None:
        """Creates the folder, or goes on with it. Raises LaunchError if it belongs to another series."""
        self.refuse_other_series(checked)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_durably(self.folder / SERIES, json.dumps(self.definition(checked), indent=2).encode() + b"\n")

    def refuse_other_series(self, checked: Sequence[CheckedRun]) -> None:
        """Raises LaunchError if the folder holds something else than the runs of this series; creates nothing."""
        check_local(self.folder, "give a local folder")
        if not self.folder.exists():
            return
        elsewhere = "name another folder with -o"
        if not self.folder.is_dir():
            raise LaunchError(f"{self.folder} is a file: {elsewhere}")
        try:
            found = json.loads(read_small_file(self.folder / SERIES, SERIES_BYTES))
        except FileNotFoundError:
            if any(self.folder.iterdir()):
                raise LaunchError(f"{self.folder} is not empty and no folder of a series: {elsewhere}") from None
            return
        except (ValueError, RecursionError):
            raise LaunchError(f"{self.folder / SERIES} cannot be read: {elsewhere}") from None
        own = self.definition(checked)
        theirs = found if isinstance(found, dict) else {}
        if different := [name.replace("_", " ") for name in own if theirs.get(name) != own[name]]:
            raise LaunchError(
                f"{self.folder} belongs to another series, which differs in its {', '.join(different)}: {elsewhere}, "
                "or remove that folder"
            )

    def definition(self, checked: Sequence[CheckedRun]) -> dict[str, Any]:
        """Returns what a later call must have in common, so that its runs may stand beside those that are there."""
        return {
            "command": self.kind,
            "steps": self.steps,
            "warm_up": self.warm_up,
            "points": [{"name": point.name, "overrides": list(point.overrides)} for point in self.points],
            "configs": [_digest(run.config) for run in checked],
        }

    def is_done(self, run: SeriesRun) -> bool:
        """Returns whether a run has ended as it should, in this call or an earlier one."""
        try:
            files = RunFiles.read(run.run_dir)
        except OSError:
            return False
        return any(event["event"] == "ended" for event in files.session)

    def clear(self, run: SeriesRun) -> None:
        """Removes what an earlier attempt at a run has left. Raises LaunchError if it still runs."""
        if is_locked(run.run_dir):
            raise LaunchError(f"{run.run_dir} is in use: another command makes the runs of {self.folder}")
        if run.run_dir.is_symlink():
            raise LaunchError(f"{run.run_dir} is a link: remove it, a run makes its folder itself")
        if run.run_dir.is_dir():
            shutil.rmtree(run.run_dir)
        run.log.unlink(missing_ok=True)
        run.log.parent.mkdir(parents=True, exist_ok=True)


def _digest(config: Config) -> str:
    """Returns a digest of all options but the run's folder."""
    values = config.model_dump(mode="json") | {"run_dir": ""}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:16]


def length_free(config: Config) -> list[str]:
    """Returns overrides without which a short run of `config` without checkpoints would be refused."""
    overrides = []
    if config.schedule.name == "wsd":  # its decay may be longer than the run; the rate changes no time
        overrides += ["schedule.name=constant", "schedule.decay_steps=null", "schedule.decay_tokens=null"]
    for name in ("not_finite", "loss_spike"):
        if getattr(config.guards, name) == "rollback":
            overrides.append(f"guards.{name}=skip")
    return overrides
