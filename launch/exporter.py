"""Hugging Face folders of a run's checkpoints, made while training goes on: `checkpoint.export_hf`.

Each is made by a process of its own at low priority, which streams a committed checkpoint from disk: it takes nothing
of the ranks but processor time that they leave, and about as much disk traffic as a save. Nothing that fails here ends
a run: the checkpoint is there, and `megalite export` makes the same folder of it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.rank_environment import VARIABLES
from megalite.checkpoint.files import remove
from megalite.checkpoint.manifest import step_folder
from megalite.config import Config

if TYPE_CHECKING:
    from megalite.training.checkpoints import Voice

TELL_EVERY_S = 15.0  # while the end of a run waits for the last one
CANCEL_S = 10.0  # for what is half-written to be removed


def exports_of(config: Config) -> Path:
    """Folder of the run's Hugging Face folders, which are named as the checkpoints they are made of."""
    return config.run_dir / "hugging_face"


def clear_exports(config: Config) -> None:
    """Before a run starts: removes what interrupted exports and deletions left."""
    from megalite.checkpoint.new_folder import recover  # pulls in torch

    root = exports_of(config)
    if root.is_dir():
        recover(root)
        for hidden in root.glob(".step_*.deleted"):
            remove(hidden)


class Exporter:
    """Exports what it is offered, in order, one at a time. No method but `close` waits; any thread may call."""

    def __init__(self, config: Config, voice: Voice) -> None:
        self._mode, self._dtype = config.checkpoint.export_hf, config.checkpoint.export_hf_dtype
        self._root, self._voice = exports_of(config), voice
        self._last_name = step_folder(config.total_steps)
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[Path] = []
        self._busy: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelled = False

    def offer(self, checkpoint: Path) -> None:
        """Takes a complete checkpoint; a step that was saved anew is exported anew."""
        if self._mode == "off" or (self._mode == "last" and checkpoint.name != self._last_name):
            return
        with self._changed:
            self._waiting = [path for path in self._waiting if path != checkpoint] + [checkpoint]
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="export", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def protected(self) -> set[Path]:
        """The checkpoint that is being read. Those that wait are not: where exports take longer than saves, retention
        goes on, or the disk would fill up."""
        with self._changed:
            return set() if self._busy is None else {self._busy}

    def delete(self, checkpoints: Sequence[Path]) -> None:
        """Deletes the folders that were made of checkpoints which retention has deleted."""
        for checkpoint in checkpoints:
            folder = self._root / checkpoint.name
            hidden = folder.with_name(f".{folder.name}.deleted")
            try:
                if folder.is_dir():
                    remove(hidden)
                    folder.rename(hidden)
                    remove(hidden)
            except OSError as error:
                self._voice.say(f"{folder} stays, though its checkpoint is deleted: {error.strerror or error}")

    def close(self, *, is_done: bool) -> None:
        """Waits for what was offered, telling how far it is; or cancels it, where training is not done."""
        with self._changed:
            self._is_closing, self._is_cancelled = True, not is_done
            if self._is_cancelled and self._process is not None:
                self._process.terminate()
            self._changed.notify_all()
        if self._thread is None:
            return
        self._thread.join(TELL_EVERY_S if is_done else CANCEL_S)
        while is_done and self._thread.is_alive():
            self._tell_progress()
            self._thread.join(TELL_EVERY_S)

    def _tell_progress(self) -> None:
        checkpoint = next(iter(self.protected()), None)
        if checkpoint is None:
            return
        folder = self._root / checkpoint.name
        from megalite.checkpoint.writer import temporary_folder

        written = 0
        with suppress(OSError):  # it gets its name at this moment
            written = sum(path.stat().st_size for path in temporary_folder(folder).glob("*.safetensors"))
        self._voice.say(f"waiting for {folder}: {written / 1e6:,.1f} MB so far")

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self._export(checkpoint)
            except Exception as error:  # no process can be started, for one; the next may fare better
                self._failed(checkpoint, str(error) or repr(error))

    def _next(self) -> Path | None:
        """Waits for it; None: there will be none."""
        with self._changed:
            self._busy = self._process = None
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if self._is_cancelled or not self._waiting:
                return None
            self._busy = self._waiting.pop(0)
            return self._busy

    def _export(self, checkpoint: Path) -> None:
        started, folder = time.monotonic(), self._root / checkpoint.name
        is_last = checkpoint.name == self._last_name
        # the comparison of logits loads the model once more: only when no training goes on beside it
        words = [str(os.getpid()), str(checkpoint), str(folder), self._dtype or "-", str(is_last)]
        process = subprocess.Popen(
            [sys.executable, "-m", "launch.export_process", *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={key: value for key, value in os.environ.items() if key not in VARIABLES}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            process_group=0,  # Ctrl-C is for the ranks
        )
        with self._changed:
            self._process = process
            if self._is_cancelled:
                process.terminate()
        out, err = process.communicate()
        if process.returncode == 0:
            self._exported(folder, json.loads(out.splitlines()[-1]), time.monotonic() - started)
        elif self._is_cancelled:
            self._voice.say(f"{folder} is not made, the run ends before: the next one makes it")
        elif not checkpoint.exists():
            self._failed(checkpoint, "the checkpoint was deleted before, exports take longer than saves")
        else:
            said = err.strip().splitlines() or [f"its process ended with code {process.returncode}"]
            self._failed(checkpoint, said[-1])

    def _exported(self, folder: Path, summary: Mapping[str, Any], seconds: float) -> None:
        size = sum(path.stat().st_size for path in folder.iterdir())
        facts = {"folder": str(folder), "seconds": round(seconds, 3), "bytes": size, "dtype": summary["dtype"]}
        self._voice.event("exported", **facts, logit_difference=summary["logit_difference"])
        compared = "logits compared with transformers'" if summary["logit_difference"] is not None else "not validated"
        self._voice.say(f"exported {folder} ({size / 1e6:.1f} MB {summary['dtype']}, {compared}; {seconds:.1f} s)")
        for notice in summary["notices"]:
            self._voice.say(f"{folder}: {notice}")

    def _failed(self, checkpoint: Path, why: str) -> None:
        folder = self._root / checkpoint.name
        self._voice.event("export_failed", folder=str(folder), reason=why)
        goes_on = "" if self._is_closing else ", training goes on"
        by_hand = f"; by hand: megalite export {checkpoint} {folder}" if checkpoint.exists() else ""
        self._voice.say(f"{folder} is NOT made{goes_on}: {why}{by_hand}")
