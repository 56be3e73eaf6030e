"""`PREFIX.loss.bin` beside a token file: a byte for each token, 1 where the token carries loss when it is predicted.

The mask belongs to tokens, not to the places that predict them, so that it moves with them through packing; a sample
takes its targets and their bytes from the same places.
"""

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from data_pipeline.ownership import make_folder
from data_pipeline.storage.file_io import open_anew, publish
from data_pipeline.storage.paths import with_ending


def loss_path(prefix: Path) -> Path:
    return with_ending(prefix, ".loss.bin")


class LossWriter:
    """Streams a mask into a temporary file, which gets its name at the end of the `with`, unless an error ends it."""

    def __init__(self, prefix: Path) -> None:
        self._path, self._temporary = loss_path(prefix), with_ending(prefix, ".loss.bin.tmp")
        self._digest, self.count = hashlib.sha256(), 0  # tokens that carry loss
        make_folder(prefix.parent)
        self._stream = open_anew(self._temporary)

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()

    def append(self, loss: NDArray[np.uint8]) -> None:
        content = np.ascontiguousarray(loss).data
        self._stream.write(content)
        self._digest.update(content)
        self.count += int(np.count_nonzero(loss))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._stream:
                self._stream.flush()
                os.fsync(self._stream.fileno())
            if kind is None:
                publish(self._temporary, self._path)
        finally:
            self._temporary.unlink(missing_ok=True)
