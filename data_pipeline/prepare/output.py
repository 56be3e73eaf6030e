"""Turns the words after `prepare --output` into the prefix of its files, or says why they are none."""

from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.storage.files import is_url

_ENDINGS = (".bin", ".idx", ".meta.json")


def output_prefix(given: str) -> Path:
    """Returns the prefix of OUTPUT.bin and its companions. Raises DataError for words that name no such files.

    Takes the words as typed: a `Path` no longer has an ending slash, nor the two of a URL.
    """
    if is_url(given):
        raise DataError(f"-o {given} is a URL, to which nothing is written: give a local prefix, such as data/text")
    name = given.rpartition("/")[2]
    if name in ("", ".", ".."):
        raise DataError(f"-o {given or repr(given)} names no file: give a prefix, such as {Path(given) / 'text'}")
    for ending in _ENDINGS:
        if name.endswith(ending):
            prefix = given.removesuffix(ending)
            raise DataError(f"-o {given}: a prefix has no ending: give {prefix if name != ending else 'data/text'}")
    for folder in Path(given).parents:
        if folder.is_dir():
            break
        if folder.exists():
            raise DataError(f"-o {given}: {folder} is a file, not a folder: choose another prefix")
    return Path(given)
