"""The manifest of a run's checkpoints, and the hooks that follow a commit: the mirror and `checkpoint.export_hf`.

Each export is made by a process of its own at low priority, which streams a committed checkpoint from disk. It costs
the ranks only idle processor time, and about as much disk traffic as a save. Nothing that fails here ends a run: the
checkpoint exists, and `megalite export` makes the same folder from it.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from shlex import join
from tempfile import TemporaryFile
from typing import IO, TYPE_CHECKING, Any

from launch.runtime.rank_environment import VARIABLES
from launch.runtime.started_modules import EXPORT_PROCESS, python_command
from launch.trainer.run_tokenizer import tokenizer_in_manifests
from launch.trainer.start.resume import RunSetup, checkpoints_of, exports_of
from launch.trainer.start.run_folder import layout_facts
from megalite.checkpoint.durable_files import remove
from megalite.checkpoint.manifest import Manifest, step_folder
from megalite.config import Config
from megalite.config.sections import CheckpointConfig
from megalite.training.state import TrainState
from megalite.units import rounded

if TYPE_CHECKING:
    from launch.trainer.run_logger import RunLogger
    from megalite.checkpoint.remote.mirror import Mirror, Notify
    from megalite.training.checkpoints import RunLog

PROGRESS_EVERY_S = 10.0  # while the end of a run waits for the last export
CANCEL_S = 10.0  # time for a cancelled export to remove what it has written


def manifest_maker(setup: RunSetup) -> Callable[[TrainState], Manifest]:
    """Returns the function that makes the manifest of a checkpoint, without the entries of its files."""
    config = setup.config
    folder, sha256 = tokenizer_in_manifests(setup.data, setup.start.tokenizer)

    def manifest(state: TrainState) -> Manifest:
        return Manifest(
            step=state.step,
            layout=layout_facts(setup.layout),
            config=config.model_dump(mode="json") | setup.start.inherited,
            tokenizer=folder,
            tokenizer_sha256=sha256,
            state=state.model_dump(mode="json"),
            tensors={},
            files={},
        )

    return manifest


class Exporter:
    """Exports committed checkpoints in order, one at a time. Only `close` waits; any thread may call."""

    def __init__(self, config: Config, run_log: RunLog) -> None:
        self._mode, self._dtype = config.checkpoint.export_hf, config.checkpoint.export_hf_dtype
        self._root, self._run_log = exports_of(config), run_log
        self._last_name = step_folder(config.total_steps)
        self._changed = threading.Condition()  # guards all below
        self._waiting: list[Path] = []
        self._busy: Path | None = None
        self._process: subprocess.Popen[str] | None = None
        self._progress = ""  # of the checkpoint that is being exported
        self._thread: threading.Thread | None = None
        self._is_closing = self._is_cancelled = False

    def on_commit(self, checkpoint: Path) -> None:
        """Queues a complete checkpoint; a step that was saved again is exported again."""
        if self._mode == "off" or (self._mode == "last" and checkpoint.name != self._last_name):
            return
        with self._changed:
            self._waiting = [path for path in self._waiting if path != checkpoint] + [checkpoint]
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="export", daemon=True)
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def pinned(self) -> set[Path]:
        """Returns the checkpoint that is being read.

        Queued ones are not pinned: if exports take longer than saves, pinning them would fill the disk.
        """
        with self._changed:
            return set() if self._busy is None else {self._busy}

    def delete(self, checkpoints: Sequence[Path]) -> None:
        """Deletes the Hugging Face folders of checkpoints that retention has deleted."""
        for checkpoint in checkpoints:
            folder = self._root / checkpoint.name
            hidden = folder.with_name(f".{folder.name}.deleted")
            try:
                if folder.is_dir():
                    remove(hidden)
                    folder.rename(hidden)
                    remove(hidden)
            except OSError as error:
                self._run_log.log_notice(f"{folder} stays, though its checkpoint is deleted: {error.strerror or error}")

    def close(self, *, is_done: bool, at_most_s: float = math.inf) -> None:
        """Waits for the queued exports if training is done, at most so long, and reports progress; cancels the rest."""
        deadline = time.monotonic() + (at_most_s if is_done else 0.0)
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if self._thread is None:
            return
        while self._thread.is_alive() and (left_s := deadline - time.monotonic()) > 0:
            self._thread.join(min(left_s, PROGRESS_EVERY_S))
            with self._changed:
                checkpoint, progress = self._busy, self._progress
            if checkpoint is not None:
                self._run_log.log_notice(f"waiting for {self._root / checkpoint.name}: {progress}")
        with self._changed:
            self._is_cancelled = True
            if self._process is not None:
                self._process.terminate()
        self._thread.join(CANCEL_S)

    def _work(self) -> None:
        while (checkpoint := self._next()) is not None:
            try:
                self._export(checkpoint)
            except Exception as error:  # no process can be started, for one; the next may fare better
                self._failed(checkpoint, f"{type(error).__name__}: {error}")

    def _next(self) -> Path | None:
        """Waits for the next checkpoint; returns None when there will be no more."""
        with self._changed:
            self._busy = self._process = None
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            if self._is_cancelled or not self._waiting:
                return None
            self._busy = self._waiting.pop(0)
            return self._busy

    def _export(self, checkpoint: Path) -> None:
        started, folder = time.monotonic(), self._root / checkpoint.name
        with TemporaryFile("w+", errors="replace") as errors:
            code, summary = self._run_process(checkpoint, folder, errors)
            errors.seek(0)
            lines = errors.read().strip().splitlines() or [f"its process ended with code {code}"]
        if code == 0:
            try:
                self._exported(folder, summary, time.monotonic() - started)
            except Exception as error:
                why = f"its size and type cannot be told: {type(error).__name__}: {error}"
                self._run_log.log_warning(f"{folder} is made, but {why}")
        elif self._is_cancelled:
            self._run_log.log_warning(f"{folder} is not made, the run ends before: the next one makes it")
        elif not checkpoint.exists():
            self._failed(checkpoint, "the checkpoint was deleted before, exports take longer than saves")
        else:
            self._failed(checkpoint, lines[-1])

    def _run_process(self, checkpoint: Path, folder: Path, errors: IO[str]) -> tuple[int, Mapping[str, Any]]:
        """Runs the process that exports and follows its progress; returns its exit code and its summary."""
        is_last = checkpoint.name == self._last_name
        # the comparison of logits loads the model once more: only when no training goes on beside it
        arguments = [str(os.getpid()), str(checkpoint), str(folder), self._dtype or "-", str(is_last)]
        process = subprocess.Popen(
            python_command(EXPORT_PROCESS, *arguments),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={key: value for key, value in os.environ.items() if key not in VARIABLES}
            | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            process_group=0,  # Ctrl-C is for the ranks
        )
        with self._changed:
            self._process, self._progress = process, "starting a process for it"
            if self._is_cancelled:
                process.terminate()
        summary: Mapping[str, Any] = {}
        assert process.stdout is not None
        for line in process.stdout:
            try:
                said = json.loads(line)
            except ValueError:
                continue  # a library's line
            if isinstance(said, dict) and "activity" in said:
                with self._changed:
                    activity = said["activity"].removesuffix(f" {folder}")
                    self._progress = f"{activity}, {said['done'] / max(1, said['total']):.0%}"
            elif isinstance(said, dict):
                summary = said
        return process.wait(), summary

    def _exported(self, folder: Path, summary: Mapping[str, Any], seconds: float) -> None:
        size = sum(path.stat().st_size for path in folder.iterdir())
        facts = {"folder": str(folder), "seconds": round(seconds, 3), "bytes": size, "dtype": summary["dtype"]}
        difference = summary["logit_difference"]
        self._run_log.event("exported", **facts, logit_difference=difference)
        compared = "digests compared" if difference is None else "logits compared with transformers'"
        compared = compared if summary["compared"] else "not validated"
        self._run_log.log_notice(
            f"exported {folder} ({size / 1e6:.1f} MB {summary['dtype']}, {compared}; {seconds:.1f} s)"
        )
        for notice in summary["notices"]:
            self._run_log.log_notice(f"{folder}: {notice}")

    def _failed(self, checkpoint: Path, why: str) -> None:
        folder = self._root / checkpoint.name
        self._run_log.event("export_failed", folder=str(folder), reason=why)
        goes_on = "" if self._is_closing else ", training goes on"
        command = join(["megalite", "export", str(checkpoint), str(folder)])
        by_hand = f"; by hand: {command}" if checkpoint.exists() else ""
        self._run_log.log_warning(f"{folder} is NOT made{goes_on}: {why}{by_hand}")


class CheckpointHooks:
    """The hooks that the config asks for; none on ranks other than 0."""

    def __init__(self, setup: RunSetup, run_logger: RunLogger) -> None:
        """Opens the hooks and queues what an interrupted session left undone."""
        self._config, self._run_logger = setup.config, run_logger
        self.mirror: Mirror | None = None
        self.exporter: Exporter | None = None
        if setup.rank.rank != 0:
            return
        options, own = setup.config.checkpoint, setup.start.checkpoint if setup.start.is_resume else None
        if options.mirror is not None:
            self.mirror = open_mirror(options.mirror, options, run_logger.log_upload)
            if own is not None:
                self.mirror.on_commit(own)
        if options.export_hf != "off":
            self.exporter = Exporter(setup.config, run_logger)
            if own is not None and not (exports_of(setup.config) / own.name).exists():
                self.exporter.on_commit(own)

    def close(self, *, is_done: bool, at_most_s: float = math.inf) -> None:
        """Waits for exports if `is_done`, then for the mirror up to `checkpoint.mirror_wait_minutes`.

        Both together get `at_most_s`. What is not exported then is cancelled, and the next session starts it again.
        """
        deadline = time.monotonic() + at_most_s
        if self.exporter is not None:
            self.exporter.close(is_done=is_done, at_most_s=at_most_s)
        say = self._run_logger.log_notice
        if self.mirror is not None and (missing := wait_for_mirror(self.mirror, self._config, say, deadline)):
            self._run_logger.log_warning(missing)


def open_mirror(url: str, options: CheckpointConfig, notify: Notify) -> Mirror:
    """Opens the mirror that a run asks for; `notify` as in `Mirror`. Raises CheckpointError."""
    from megalite.checkpoint.remote.mirror import Mirror
    from megalite.checkpoint.retention import Retention

    return Mirror(url, Retention.of(options), notify)


def wait_for_mirror(mirror: Mirror, config: Config, say: Callable[[str], None], deadline: float = math.inf) -> str:
    """Closes a mirror after at most `checkpoint.mirror_wait_minutes`; returns what it lacks, as a sentence, or "".

    `deadline` is a reading of `time.monotonic`. `say` gets the progress.
    """
    began, options = time.monotonic(), config.checkpoint
    if mirror.close(min(60 * options.mirror_wait_minutes, max(0.0, deadline - began)), say):
        return ""
    waited = f"{rounded(time.monotonic() - began)} (checkpoint.mirror_wait_minutes: {options.mirror_wait_minutes:g})"
    where = f"it is in {checkpoints_of(config)}, and the next run sends it"
    return f"{options.mirror} has not got the last checkpoint after {waited}: {where}"
