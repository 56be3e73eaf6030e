"""Finds the files of a data folder, through the links in it, and the files that are named more than once."""

import os
from collections import deque
from collections.abc import Iterable
from pathlib import Path

from data_pipeline.sources.containment import check_inside
from data_pipeline.sources.remote_file import Place, RemoteFile


def files_in(folder: Path) -> list[Path]:
    """Returns all files of a folder, sorted, without hidden ones; each folder is read once, however it is reached.

    Folders that stand there come before those that links lead to, so that a file keeps the name it has without them.
    Raises DataError for a link that leads out of the folder: what it leads to may be a whole disk.
    """
    files: list[Path] = []
    entered: set[tuple[int, int]] = set()
    pending, linked = [folder], deque[Path]()
    while pending or linked:
        current = pending.pop() if pending else linked.popleft()
        status = current.stat()
        if (status.st_dev, status.st_ino) in entered:
            continue
        entered.add((status.st_dev, status.st_ino))
        with os.scandir(current) as entries:
            for entry in sorted(entries, key=lambda each: each.name):
                if entry.name.startswith("."):
                    continue
                path = current / entry.name
                if entry.is_dir(follow_symlinks=False):
                    pending.append(path)
                elif path.is_dir():
                    check_inside(folder, [path])
                    linked.append(path)
                elif path.is_file():
                    files.append(path)
    check_inside(folder, files)
    return sorted(files)


def repeated_files(places: Iterable[Place]) -> list[list[str]]:
    """Returns the names of every file that has several among `places`: as it was typed, through links, as it stands."""
    names: dict[object, list[str]] = {}
    for place in places:
        if isinstance(place, RemoteFile):
            names.setdefault(place.url, []).append(place.url)
            continue
        status = place.stat()
        names.setdefault((status.st_dev, status.st_ino), []).append(str(place))
    return [found for found in names.values() if len(found) > 1]
