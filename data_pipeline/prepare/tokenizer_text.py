"""The text of the sources on which `prepare` trains a tokenizer of its own, before it encodes them with it."""

import re
from collections.abc import Callable, Iterator, Sequence

from data_pipeline.document import BadRows
from data_pipeline.encoding.cutting import CUT_PLACES, cut_document
from data_pipeline.prepare.plan import PrepareOptions, known_bytes
from data_pipeline.sources import Source, open_sources

_LONG_WORD = re.compile(r"(?<![^\W\d_])[^\W\d_]{20000,}")  # letters alone: a tokenizer cuts words at everything else


def training_text(
    specs: list[str], options: PrepareOptions, notice: Callable[[str], None]
) -> tuple[Iterator[str], int | None]:
    """Opens the sources; returns their text and, if known, its bytes. `notice` is told of a word that trains slowly."""
    sources = open_sources(specs, options.text_field, options.longest_row)
    return _pieces(sources, BadRows(options.skip_bad_rows), notice), known_bytes(sources)


def _pieces(sources: Sequence[Source], on_bad_row: BadRows, notice: Callable[[str], None]) -> Iterator[str]:
    is_told = False
    for document in (document for source in sources for document in source.documents(on_bad_row)):
        for piece in cut_document(document, 0, CUT_PLACES, on_bad_row):
            if not is_told and (word := _LONG_WORD.search(piece.text)):
                is_told = True
                notice(
                    f"{document.where} holds a word of {len(word[0]):,} letters without a space, and the time to train "
                    "a tokenizer grows with the square of a word's length: break such words, or leave the document out"
                )
            yield piece.text
