"""`OUTPUT.parts/` keeps the finished parts of an unfinished `prepare`, so that a rerun resumes.

journal.json      the digest of the job the parts belong to; parts of other jobs are deleted
part-000042.npz   chunk 42, encoded; chunks are cut by a fixed rule, so the number identifies the text
lock              held by the running process; the kernel releases it however the process ends
"""

import fcntl
import json
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.files import with_ending, write_atomically
from data_pipeline.prepare.encode import EncodedPart, read_part


class PartStore:
    """The part files of one job."""

    def __init__(self, output: Path, job_sha256: str) -> None:
        self.output, self.folder, self.job_sha256 = output, with_ending(output, ".parts"), job_sha256

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Locks the folder for this process and deletes the parts of other jobs."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise DataError(
                    f"another process is preparing {self.output} right now: wait for it or choose another output"
                ) from error
            if not self._belongs():
                for file in self.folder.glob("part-*.npz"):
                    file.unlink()
                write_atomically(self._journal, json.dumps({"job_sha256": self.job_sha256}).encode())
            for leftover in self.folder.glob(".part-*.tmp"):
                leftover.unlink()
            yield

    def path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}.npz"

    def finished(self) -> set[int]:
        """Returns the numbers of the complete parts of this job; changes nothing on disk."""
        if not self._belongs():
            return set()
        return {int(file.stem.removeprefix("part-")) for file in self.folder.glob("part-*.npz")}

    def read(self, number: int) -> EncodedPart:
        path = self.path(number)
        try:
            return read_part(path)
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise DataError(f"part file {path} is damaged ({error}): delete it and run prepare again") from error

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _journal(self) -> Path:
        return self.folder / "journal.json"

    def _belongs(self) -> bool:
        try:
            return bool(json.loads(self._journal.read_bytes())["job_sha256"] == self.job_sha256)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False
