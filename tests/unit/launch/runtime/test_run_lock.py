"""The lock of a run's folder: who holds it is known, and looking at it disturbs nobody."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from launch.runtime.run_lock import LOCK, LockHolder, is_locked, lock_holder, take_lock

HOLDER = """
import sys, time
from pathlib import Path
from launch.runtime.run_lock import take_lock
lock = take_lock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(60)
"""


def test_who_holds_a_lock_is_seen_from_another_process_until_it_is_killed(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is False and lock_holder(tmp_path) is None
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        holder = lock_holder(tmp_path)
        assert holder is not None and holder.process == process.pid and 0 <= time.time() - holder.time < 60
        assert is_locked(tmp_path) is True and holder.is_alive() is True
        with pytest.raises(BlockingIOError):
            take_lock(tmp_path)
        assert lock_holder(tmp_path) == holder, "a start that is refused does not put its name there"
        process.kill()
    assert is_locked(tmp_path) is False and lock_holder(tmp_path) == holder and holder.is_alive() is False


def test_a_reader_never_makes_a_start_fail(tmp_path: Path) -> None:
    """A shared lock is in the way of an exclusive one for the moment in which it is held."""
    (tmp_path / LOCK).touch()
    with (tmp_path / LOCK).open() as looked_at:
        fcntl.flock(looked_at, fcntl.LOCK_SH)
        moment = threading.Timer(0.1, fcntl.flock, (looked_at, fcntl.LOCK_UN))
        moment.start()
        take_lock(tmp_path).close()
        moment.join()


def test_an_older_version_s_empty_lock_names_nobody_and_another_host_is_not_judged(tmp_path: Path) -> None:
    for text in ("", "[1]", '{"host": 3, "process": "x", "time": null}'):
        (tmp_path / LOCK).write_text(text)
        assert lock_holder(tmp_path) is None
    assert LockHolder("elsewhere", os.getpid(), time.time()).is_alive() is None


def test_a_process_id_that_was_used_again_is_another_process(tmp_path: Path) -> None:
    take_lock(tmp_path).close()
    holder = lock_holder(tmp_path)
    assert holder is not None and holder.is_alive() is True
    assert LockHolder(holder.host, holder.process, holder.time - 1e6).is_alive() is False
