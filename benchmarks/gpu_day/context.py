"""The context of a part inside its own process: its folder, how it runs megalite, and items that are done once."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.gpu_day.process import print_line
from benchmarks.gpu_day.process import run as run_process
from benchmarks.gpu_day.store import ROOT, ResultStore, now

Facts = dict[str, Any]
TOLD_LINES = 25  # of a command that fails


class CommandFailed(Exception):
    """A command that did not end as it should: what it said last, and some of what it said before."""

    def __init__(self, command: str, code: int | None, output: str) -> None:
        self.output = output.strip().splitlines()[-TOLD_LINES:]
        self.code, said = code, self.output[-1] if self.output else "it said nothing"
        super().__init__(f"{command} ended with exit code {code}: {said}")


@dataclass
class Context:
    """One part at work."""

    part: str
    device: str
    tiny: bool
    work: Path  # for data and runs
    overrides: Sequence[str]  # of every training's config
    store: ResultStore
    record: Facts
    say: Callable[[str], None] = print_line

    def __post_init__(self) -> None:
        self._lock = Lock()

    def item(self, name: str, make: Callable[[], Facts]) -> Facts:
        """Returns the result of `make` and keeps it under this name; an item that is kept already is not made again.

        `passed` in it is False where something was found wrong. What it raises is kept too, and fails the part.
        """
        if name in self.record["items"]:
            self.say(f"{self.part}: {name}: done before")
            return dict(self.record["items"][name])
        self.say(f"{self.part}: {name} ...")
        started = time.monotonic()
        try:
            made: Facts = {"passed": True, **make()}
        except Exception as error:
            made = {"passed": False, "problem": str(error) or type(error).__name__}
            if isinstance(error, CommandFailed):
                made["output"] = error.output
            else:
                traceback.print_exc()
        made |= {"seconds": round(time.monotonic() - started, 1), "ended": now()}
        with self._lock:  # items may be made side by side
            self.record["items"][name] = made
            self.store.write(self.part, self.record)
        self.say(f"{self.part}: {name}: {'ended well' if made['passed'] else 'FAILED'} ({made['seconds']:.0f} s)")
        return made

    def megalite(self, *words: str | Path) -> None:
        """Runs `megalite WORDS`. Raises CommandFailed where it does not end with 0."""
        self._run(["-m", "launch", *words])

    def json_of(self, *words: str | Path, allowed: Sequence[int] = (0,)) -> Facts:
        """The JSON that a Python program prints last, or any object that begins a line; its stderr is told."""
        with tempfile.NamedTemporaryFile(dir=self.work, suffix=".json") as file:
            self._run(words, allowed, Path(file.name))
            return last_json(Path(file.name).read_text(errors="replace"))

    def _run(self, words: Sequence[str | Path], allowed: Sequence[int] = (0,), result: Path | None = None) -> None:
        command = [sys.executable, *map(str, words)]
        name = str(words[2] if words[1] == "launch" else words[1]).rpartition(".")[2]
        ended = run_process(command, None, lambda line: self.say(f"  {line}"), name, folder=ROOT, result=result)
        if ended.code not in allowed:
            raise CommandFailed(name, ended.code, ended.output)

    def write_config(self, name: str, values: Facts) -> Path:
        """A config file; JSON is YAML."""
        path = self.work / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(values, indent=1))
        return path

    def fresh_folder(self, name: str) -> Path:
        """Returns an empty folder for a run; deletes what an earlier call has left there."""
        folder = self.work / re.sub(r"[^A-Za-z0-9]+", "_", name)
        shutil.rmtree(folder, ignore_errors=True)
        return folder

    def data(self) -> Path:
        """Prefix of a prepared corpus: sources of Python's standard library, which are on every machine."""
        folder = self.work / "data"
        prefix = folder / "text"
        if not prefix.with_suffix(".idx").is_file():
            some_package = Path(json.__file__).parent
            source = f"{some_package}/*.py" if self.tiny else "python-stdlib"
            vocabulary = "320" if self.tiny else "2048"
            self.megalite("prepare", source, "--train-vocab-size", vocabulary, "-t", folder / "tokenizer", "-o", prefix)
        return prefix


def last_json(output: str) -> Facts:
    """The JSON object that a program has printed last, after whatever else it has said."""
    lines = output.splitlines()
    for start in [number for number, line in enumerate(lines) if line.startswith("{")][::-1]:
        with suppress(ValueError):
            found = json.loads("\n".join(lines[start:]))
            if isinstance(found, dict):
                return found
    raise ValueError("no JSON in what the command printed")
