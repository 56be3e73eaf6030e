"""Work units: the stretches of the sources that worker processes read and encode by themselves.

    a file of lines             ranges of bytes; a line belongs to the range in which it begins
    a text file                 the same, from one place at which a document may be cut to another; whole if it may not
    a Parquet file              row groups
    a saved data set            ranges of rows
    a data set of many files    its files
    anything else               the whole file: compressed ones, arrays of JSON, CSV tables, where reading begins at 0
    small files                 as many as come to the size of a unit

The units follow from the plan alone: never from the number of workers. So the number of a unit identifies its text, and
a run that goes on leaves out the units that are finished without reading them.
"""

import codecs
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from data_pipeline.document import Document, OnBadRow
from data_pipeline.encoding.cutting import LONGEST_PIECE, CutPlace, TextPiece, cannot_be_cut, cut_document
from data_pipeline.sources import Source
from data_pipeline.sources.compressed import is_compressed
from data_pipeline.sources.remote_file import Place, open_file
from data_pipeline.sources.stretch import Stretch, byte_stretches
from data_pipeline.sources.text import TextFile

_SHORTEST_RANGE = 1 << 22  # bytes of a text: any character after it is far enough to be a document of several pieces
_LARGE_FILE = 1 << 26  # bytes: a minute or more
_LOOKED_AHEAD_BYTES = 1 << 18
_INSIDE_CHARACTERS = bytes(range(0x80, 0xC0))  # bytes that go on with a character of UTF-8


class SourceStretch(NamedTuple):
    """A stretch of one source."""

    source: int  # its place among the sources of the plan
    stretch: Stretch


WorkUnit = tuple[SourceStretch, ...]


def work_units(sources: Sequence[Source], places: Sequence[CutPlace], unit_bytes: int) -> list[WorkUnit]:
    """Cuts the sources into units of about `unit_bytes`, in their order; reads no text."""
    units: list[WorkUnit] = []
    unit: list[SourceStretch] = []
    size = 0
    for number, source in enumerate(sources):
        for stretch in _stretches(source, places, unit_bytes):
            if unit and size + stretch.size_bytes > unit_bytes:
                units.append(tuple(unit))
                unit, size = [], 0
            unit.append(SourceStretch(number, stretch))
            size += stretch.size_bytes
    return [*units, tuple(unit)] if unit else units


def undivided_files(sources: Sequence[Source], units: Sequence[WorkUnit], workers: int) -> list[Place]:
    """Returns the files that keep one of the workers busy when the others have nothing left to do."""
    sizes = [sum(stretch.size_bytes for _, stretch in unit) for unit in units]
    found: list[Place] = []
    for unit, size in zip(units, sizes, strict=True):
        path = sources[unit[0].source].path
        if path is not None and len(unit) == 1 and size > max(sum(sizes) // workers, _LARGE_FILE):
            found.append(path)
    return found


def unit_pieces(
    sources: Sequence[Source], places: Sequence[CutPlace], unit: WorkUnit, first_document: int, on_bad_row: OnBadRow
) -> Iterator[TextPiece]:
    """Reads a unit, and yields the pieces of its documents, which are numbered from `first_document` on."""
    number = first_document
    for which, stretch in unit:
        for document in _documents(sources[which], stretch, places, on_bad_row):
            for piece in cut_document(document, number, places, on_bad_row):
                yield piece
                number += piece.ends_document


def _stretches(source: Source, places: Sequence[CutPlace], unit_bytes: int) -> list[Stretch]:
    if isinstance(source, TextFile) and places and not is_compressed(source.path):
        return byte_stretches(source.path, max(unit_bytes, _SHORTEST_RANGE))
    return source.stretches(unit_bytes)


def _documents(
    source: Source, stretch: Stretch, places: Sequence[CutPlace], on_bad_row: OnBadRow
) -> Iterator[Document]:
    if isinstance(source, TextFile) and (stretch.begin or stretch.end is not None):
        yield from _text_range(source, stretch, places)
    else:
        yield from source.documents(on_bad_row, stretch)


def _text_range(file: TextFile, stretch: Stretch, places: Sequence[CutPlace]) -> Iterator[Document]:
    """Yields a text from where it may first be cut in a stretch, or its beginning, to that place of the next one."""
    begin = _first_place(file, stretch.begin, places) if stretch.begin else 0
    if begin is None or (stretch.end is not None and begin >= stretch.end):
        return
    end = None if stretch.end is None else _first_place(file, stretch.end, places)
    blocks = file.blocks(begin, end, about_bytes=stretch.size_bytes if end is None else end - begin)
    yield Document(str(file.path), blocks, begins=begin == 0, ends=end is None)


def _first_place(file: TextFile, start: int, places: Sequence[CutPlace]) -> int | None:
    """Returns the first byte after `start` at which the text may be cut; None if there is none to its end.

    Raises DataError if the next one is so far that the text between is too long for a piece.
    """
    text, decoder = "", codecs.getincrementaldecoder("utf-8")("surrogateescape")  # whoever reads it refuses such bytes
    with open_file(file.path, _LOOKED_AHEAD_BYTES) as stream:
        stream.seek(start)
        block = stream.read(_LOOKED_AHEAD_BYTES)
        start += len(block) - len(block.lstrip(_INSIDE_CHARACTERS))
        block = block.lstrip(_INSIDE_CHARACTERS)
        while block:
            searched = max(0, len(text) - 2)  # a place needs the characters on both sides
            text += decoder.decode(block)
            found = [
                match.start() + place.offset for place in places if (match := place.pattern.search(text, searched))
            ]
            if found:
                return start + len(text[: min(found)].encode("utf-8", "surrogateescape"))
            if len(text) > LONGEST_PIECE:
                raise cannot_be_cut(str(file.path))
            block = stream.read(_LOOKED_AHEAD_BYTES)
    return None
