"""A command for a supervisor: each start of it does what its plan says next, and leaves in its run folder what a real
run would. `python attempts.py RUN_DIR`, with RUN_DIR/plan.json a list of attempts:

events: what it writes to events.jsonl, in this order, `started` with `resumed`, the step where it begins; without, it
writes none, as a command that is no run of megalite's; steps: last step it logs; save: step it saves; spoil: nobody can
read its events until the next attempt; daemons: it starts so many helpers that leave it and end; code: how it ends;
signal: it ends itself so; wait: "signal", until it gets one, ending with 75 as a rank that has saved, or "for ever";
stubborn: before that it starts a process that outlives
SIGTERM, and notes it, which starts another in a session of its own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", file=open(sys.argv[1], "a")))
if len(sys.argv) == 2:
    subprocess.Popen([sys.executable, *sys.orig_argv[1:], "second"], start_new_session=True)
for _ in range(600):
    time.sleep(1)
"""

GOT: list[int] = []


def main(run_dir: Path) -> None:
    starts = run_dir / "starts"
    number = len(starts.read_text().splitlines()) if starts.exists() else 0
    attempt: dict[str, Any] = json.loads((run_dir / "plan.json").read_text())[number]
    if attempt.get("stubborn"):
        subprocess.Popen([sys.executable, "-c", STUBBORN, str(run_dir / "stubborn")])
        time.sleep(0.3)  # until they are both there
    for _ in range(attempt.get("daemons", 0)):
        subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)
    train(run_dir, attempt)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if "wait" in attempt:
            signal.signal(getattr(signal, name), lambda number, frame: note(run_dir, number))
    with starts.open("a") as file:
        file.write(f"{time.time()} {os.getpid()}\n")
    while "wait" in attempt:
        time.sleep(0.02)
        if GOT and attempt["wait"] == "signal":
            sys.exit(75)
    if "signal" in attempt:
        os.kill(os.getpid(), getattr(signal, attempt["signal"]))
    sys.exit(attempt["code"])


def train(run_dir: Path, attempt: dict[str, Any]) -> None:
    """What an attempt leaves in its folder."""
    if (run_dir / "events.kept").exists():
        (run_dir / "events.kept").replace(run_dir / "events.jsonl")
    for event in attempt.get("events", [])[:1]:
        write_event(run_dir, event, step=attempt.get("resumed", 0))
    if "steps" in attempt:
        with (run_dir / "metrics.jsonl").open("w") as metrics:
            records = [{"step": step, "time": time.time()} for step in range(1, attempt["steps"] + 1)]
            metrics.writelines(json.dumps(record) + "\n" for record in records)
    if "save" in attempt:
        save(run_dir, attempt["save"])
    if attempt.get("spoil"):
        (run_dir / "events.jsonl").rename(run_dir / "events.kept")  # until the next attempt
        write_event(run_dir, "started", step="?")
    for event in attempt.get("events", [])[1:]:
        write_event(run_dir, event)


def note(run_dir: Path, number: int) -> None:
    GOT.append(number)
    with (run_dir / "got").open("a") as file:
        file.write(f"{os.getpid()} {signal.Signals(number).name}\n")


def write_event(run_dir: Path, event: str, **facts: Any) -> None:
    with (run_dir / "events.jsonl").open("a") as file:
        file.write(json.dumps({"time": time.time(), "event": event, **facts}) + "\n")


def save(run_dir: Path, step: int) -> None:
    from megalite.checkpoint.manifest import MANIFEST, Manifest, step_folder

    folder = run_dir / "checkpoints" / step_folder(step)
    folder.mkdir(parents=True)
    manifest = Manifest(step=step, config={}, tokenizer=None, state={}, tensors={}, files={})
    (folder / MANIFEST).write_text(manifest.model_dump_json())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
