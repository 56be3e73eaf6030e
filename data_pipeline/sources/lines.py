"""Lines of a file that is read in stretches of bytes: where they begin, and their numbers for sentences.

Who reads a stretch does not know how many lines are before it, and does not count them: the file would be read once for
each stretch. So a sentence about a line, as "rows.jsonl, line 3 after byte 4194304 is not JSON", gets the number that a
reader needs only when it is shown (`numbered_from_the_first`).
"""

import re
from collections.abc import Sequence
from io import BufferedReader
from pathlib import Path

from data_pipeline.sources.remote_file import Place
from data_pipeline.sources.stretch import Stretch

_BLOCK_BYTES = 1 << 20
_PLACE = re.compile(r"(?P<path>.+?), line (?P<number>\d+) after byte (?P<begin>\d+)", re.DOTALL)


def first_line(stream: BufferedReader, stretch: Stretch) -> int:
    """Moves to the first line that begins at or after the start of the stretch, and returns its place.

    Does not read on behind the end of the stretch: a line of gigabytes would be read again for each stretch inside it.
    """
    if not stretch.begin:
        return 0
    position = stream.seek(stretch.begin - 1)
    while stretch.end is None or position < stretch.end:
        line = stream.readline(_BLOCK_BYTES)
        position += len(line)
        if not line or line.endswith(b"\n"):
            break
    return position


def place_of_line(path: Place, number: int, stretch: Stretch) -> str:
    """Returns the words for line `number`, from 1 on, of those that begin in a stretch."""
    return f"{path}, line {number}" + (f" after byte {stretch.begin}" if stretch.begin else "")


def numbered_from_the_first(sentences: Sequence[str]) -> list[str]:
    """Returns sentences with the number of their line in the file; reads what is before the stretches of the lines."""
    counted = dict[Path, tuple[int, int]]()  # a place of a file, and the lines that begin up to there
    return [_numbered(sentence, counted) for sentence in sentences]


def _numbered(sentence: str, counted: dict[Path, tuple[int, int]]) -> str:
    found = _PLACE.match(sentence)
    if found is None or not Path(found["path"]).is_file():
        return sentence
    path, last = Path(found["path"]), int(found["begin"]) - 1
    place, count = counted.get(path, (0, 1))
    if place > last:
        place, count = 0, 1
    with path.open("rb") as stream:
        stream.seek(place)
        while place < last and (block := stream.read(min(last - place, _BLOCK_BYTES))):
            count += block.count(b"\n")
            place += len(block)
    counted[path] = place, count
    return f"{found['path']}, line {int(found['number']) + count}{sentence[found.end() :]}"
