"""The plan of a `prepare`, fixed before it starts: sources, options, tokenizer, how the text is cut into units.

The digest of a plan covers everything that determines the bytes of its output; equal digests mean equal output. What is
done with bad rows is not in it: either way the others give the same bytes, so a run that met one goes on without it.
The other way round, parts that lack rows are encoded again.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from data_pipeline.chat.encoder import ChatEncoder, chat_encoder
from data_pipeline.chat.turns import TrainOn
from data_pipeline.document import BadRows
from data_pipeline.encoding.cutting import CUT_PLACES, CutPlace, cut_document, safe_places
from data_pipeline.encoding.encoders import (
    EncoderName,
    LoadedTokenizer,
    SpecialTokens,
    TextEncoder,
    check_as_text,
    loaded_tokenizer,
)
from data_pipeline.encoding.fast_encoder import check_installed
from data_pipeline.encoding.fill_in_the_middle import FillInTheMiddle, fill_in_the_middle
from data_pipeline.errors import DataError
from data_pipeline.prepare.units import WorkUnit, work_units
from data_pipeline.sources import Source, open_sources
from data_pipeline.sources.row_text import LONGEST_ROW
from data_pipeline.storage.meta import WRITER_VERSION
from data_pipeline.tokenizers.reading import TokenizerFile, inspect_tokenizer, with_limits
from data_pipeline.tokenizers.training import TrainedTokenizer

_LONG_WORD = re.compile(r"(?<![^\W\d_])[^\W\d_]{20000,}")  # letters alone: a tokenizer cuts words at everything else
_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 18, 1 << 24  # bytes of text
_UNITS_PER_JOB = 1024  # aimed at, between the two limits
_UNIT_OF_UNKNOWN_SIZE = 1 << 22
_UNITS = 4  # raise it when the same plan would cut other units: the parts of an unfinished run no longer fit


@dataclass(frozen=True)
class PrepareOptions:
    """Choices about the text that is read, and the tokens that stand around and in it."""

    text_field: str = "text"
    append_eos: bool = True
    begin_token: bool = False
    special_tokens: SpecialTokens = "keep"
    skip_bad_rows: bool = False
    fill_in_the_middle: float = 0.0  # share of the documents
    train_on: TrainOn | None = None  # rows are conversations, whose template writes all special tokens; None: text
    chat_date: str | None = None  # that a chat template writes for today's, as 2026-01-31
    encoder: EncoderName = "exact"  # of text; not in the digest of a job, as both write the same
    longest_row: int = LONGEST_ROW  # bytes of a line of JSON, or of a row of a table

    @property
    def keeps_lacking(self) -> bool:
        """True if rows that an earlier run has left out stay out: not where longer ones are allowed by now."""
        return self.skip_bad_rows and self.longest_row <= LONGEST_ROW


USUAL_OPTIONS = PrepareOptions()


@dataclass(frozen=True)
class PreparationPlan:
    """Sources, encoder and units of one `prepare`."""

    specs: list[str]
    sources: list[Source]
    source_bytes: int | None
    options: PrepareOptions
    encoder: TextEncoder | ChatEncoder
    places: tuple[CutPlace, ...]  # at which long documents are cut
    unit_bytes: int  # about, of text
    text_sha256: str  # of the job but for the rows that are too long

    @property
    def tokenizer(self) -> TokenizerFile:
        return self.encoder.tokenizer

    @cached_property
    def sha256(self) -> str:
        """Digest of the job."""
        if self.options.longest_row == LONGEST_ROW:
            return self.text_sha256
        return hashlib.sha256(f"{self.text_sha256} {self.options.longest_row}".encode()).hexdigest()

    @cached_property
    def units(self) -> list[WorkUnit]:
        """The units of the job; looks into data sets, but reads no text."""
        return work_units(self.sources, self.places, self.unit_bytes)

    @cached_property
    def parts_sha256(self) -> str:
        """Digest of the job and of how its text is cut into units."""
        # text files do without it
        reader = next((found.version for found in distributions(name="datasets")), "none")
        return hashlib.sha256(f"{self.sha256} {_UNITS} {reader}".encode()).hexdigest()


def plan_job(specs: list[str], tokenizer: Path | TrainedTokenizer, options: PrepareOptions) -> PreparationPlan:
    """Opens sources and tokenizer. Raises DataError if one is missing or lacks what the options ask for."""
    sources = open_sources(specs, None if options.train_on else options.text_field, options.longest_row)
    encoder, places = _encoder(tokenizer, options)
    source_bytes = _known_bytes(sources)
    unit = _UNIT_OF_UNKNOWN_SIZE
    if source_bytes is not None:
        unit = min(max(source_bytes // _UNITS_PER_JOB, _SMALLEST_UNIT), _LARGEST_UNIT)
    digest = _digest(sources, encoder, places, options, unit)
    return PreparationPlan(list(specs), sources, source_bytes, options, encoder, places, unit, digest)


def _encoder(
    tokenizer: Path | TrainedTokenizer, options: PrepareOptions
) -> tuple[TextEncoder | ChatEncoder, tuple[CutPlace, ...]]:
    """Returns the encoder, and the places where it can cut documents."""
    inspected = inspect_tokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer.file
    if options.train_on is not None:
        with_limits(inspected, lambda: _check_merges(inspected, loaded_tokenizer(inspected, False)))
        return chat_encoder(inspected, options.train_on, options.special_tokens, options.chat_date), ()
    if options.encoder == "fast":
        check_installed()
    begin, end = inspected.bos_token_id, inspected.eos_token_id
    if options.append_eos and end is None:
        raise DataError(
            f"tokenizer {inspected.given} names no end-of-document token: set eos_token in its tokenizer_config.json, "
            "or prepare without one (--no-append-eos)"
        )
    if options.begin_token and begin is None:
        raise DataError(
            f"tokenizer {inspected.given} names no token that begins a text: set bos_token in its "
            "tokenizer_config.json, or prepare without one"
        )
    encoder = TextEncoder(
        inspected, begin if options.begin_token else None, end if options.append_eos else None, options.special_tokens
    )
    if isinstance(tokenizer, TrainedTokenizer):  # not written yet; byte-level BPE, as it is made here
        if options.fill_in_the_middle:
            raise DataError("a tokenizer trained here has no tokens for --fill-in-the-middle: leave it out")
        return encoder, CUT_PLACES
    middle, names = with_limits(inspected, partial(_tried_out, encoder, options.fill_in_the_middle))
    if middle is not None:
        encoder = replace(encoder, fill_in_the_middle=FillInTheMiddle(*middle))
    return encoder, tuple(place for place in CUT_PLACES if place.name in names)


def _tried_out(encoder: TextEncoder, rate: float) -> tuple[tuple[float, int, int, int] | None, list[str]]:
    """Checks what is asked of a tokenizer. Returns the fields of its fill-in-the-middle, and where it can be cut."""
    inspected, loaded = encoder.tokenizer, loaded_tokenizer(*encoder.loading)
    _check_merges(inspected, loaded)
    if encoder.special_tokens == "as-text":
        check_as_text(inspected, loaded)
    middle = astuple(fill_in_the_middle(rate, loaded.tokenizer, inspected.given)) if rate else None
    return middle, _places(*encoder.loading)


@lru_cache(maxsize=4)
def _places(tokenizer: TokenizerFile, special_as_text: bool) -> list[str]:
    """Returns the names of the places where documents can be cut, which takes a while to find out."""
    return [place.name for place in safe_places(loaded_tokenizer(tokenizer, special_as_text).tokenizer)]


def _check_merges(file: TokenizerFile, loaded: LoadedTokenizer) -> None:
    """Raises DataError for a tokenizer that gives a text other tokens each time."""
    if getattr(loaded.tokenizer.model, "dropout", None):
        raise DataError(
            f"tokenizer {file.given} leaves out merges at random, so that no two runs would write the same: set "
            "dropout in its tokenizer.json to null"
        )


def _digest(
    sources: Sequence[Source],
    encoder: TextEncoder | ChatEncoder,
    places: tuple[CutPlace, ...],
    options: PrepareOptions,
    unit_bytes: int,
) -> str:
    """Returns the digest of a job. What is as it was before there was a choice leaves no trace in it."""
    tokenizer = encoder.tokenizer
    identity: dict[str, Any] = {
        "writer": WRITER_VERSION,
        "sources": [source.identity() for source in sources],
        "tokenizer": [tokenizer.sha256, tokenizer.vocab_size, tokenizer.eos_token_id],
        "options": [options.text_field, options.append_eos, unit_bytes],
    }
    if isinstance(encoder, ChatEncoder):
        identity["chat"] = [encoder.train_on, encoder.template.digest()]
    if places != CUT_PLACES:  # an older version cut documents all the same, and gave them other tokens
        identity["cut"] = [place.name for place in places]
    if encoder.begin_token is not None:
        identity["begin_token"] = encoder.begin_token
    if options.special_tokens != "keep":
        identity["special_tokens"] = options.special_tokens
    if options.fill_in_the_middle:
        identity["fill_in_the_middle"] = options.fill_in_the_middle
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()


def training_text(
    specs: list[str], options: PrepareOptions, notice: Callable[[str], None]
) -> tuple[Iterator[str], int | None]:
    """Opens the sources, and returns their text, for the training of a tokenizer, and its size in bytes if known.

    `notice` is told of the first word that makes the training very slow.
    """
    sources = open_sources(specs, options.text_field, options.longest_row)
    return _pieces_for_training(sources, BadRows(options.skip_bad_rows), notice), _known_bytes(sources)


def _pieces_for_training(
    sources: Sequence[Source], on_bad_row: BadRows, notice: Callable[[str], None]
) -> Iterator[str]:
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


def _known_bytes(sources: Sequence[Source]) -> int | None:
    """Returns the bytes of all sources; None if one has a size that is not known before it is read."""
    sizes = [source.size_bytes for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
