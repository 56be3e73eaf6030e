"""The plan of a `prepare`, fixed before it starts: sources, options, tokenizer, how the text is cut into units.

A plan has two digests. `job_sha256` covers all that determines the bytes of the output: if the output that is there
has it, nothing is to be done. `parts_sha256` also covers which text is in which unit: if the parts of an unfinished run
have it, they are kept. What is done with bad rows is in neither, since the others give the same bytes either way: a run
that met one goes on without it. The other way round, parts that lack rows are encoded again.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass, replace
from functools import cached_property, lru_cache, partial
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from data_pipeline.chat.encoder import ChatEncoder, chat_encoder
from data_pipeline.chat.turns import TrainOn
from data_pipeline.encoding.cutting import CUT_PLACES, CutPlace, safe_places
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

_SMALLEST_UNIT, _LARGEST_UNIT = 1 << 18, 1 << 24  # bytes of text
_UNITS_PER_JOB = 1024  # aimed at, between the two limits
_UNIT_OF_UNKNOWN_SIZE = 1 << 22
_UNITS_VERSION = 4  # raise it when the same plan would cut other units: parts of an unfinished run no longer fit


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
    job_sha256: str

    @property
    def tokenizer(self) -> TokenizerFile:
        return self.encoder.tokenizer

    @cached_property
    def units(self) -> list[WorkUnit]:
        """The units of the job; looks into data sets, but reads no text."""
        return work_units(self.sources, self.places, self.unit_bytes)

    @cached_property
    def parts_sha256(self) -> str:
        reader = next((found.version for found in distributions(name="datasets")), "none")  # text files do without it
        return hashlib.sha256(f"{self.job_sha256} {_UNITS_VERSION} {reader}".encode()).hexdigest()


def plan_job(specs: list[str], tokenizer: Path | TrainedTokenizer, options: PrepareOptions) -> PreparationPlan:
    """Opens sources and tokenizer. Raises DataError if one is missing or lacks what the options ask for."""
    sources = open_sources(specs, None if options.train_on else options.text_field, options.longest_row)
    encoder, places = _encoder(tokenizer, options)
    source_bytes = known_bytes(sources)
    unit = _UNIT_OF_UNKNOWN_SIZE
    if source_bytes is not None:
        unit = min(max(source_bytes // _UNITS_PER_JOB, _SMALLEST_UNIT), _LARGEST_UNIT)
    job_sha256 = _job_digest(sources, encoder, places, options, unit)
    return PreparationPlan(list(specs), sources, source_bytes, options, encoder, places, unit, job_sha256)


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


def _job_digest(
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
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    if options.longest_row == LONGEST_ROW:
        return digest
    return hashlib.sha256(f"{digest} {options.longest_row}".encode()).hexdigest()


def known_bytes(sources: Sequence[Source]) -> int | None:
    """Returns the bytes of all sources; None if one has a size that is not known before it is read."""
    sizes = [source.size_bytes for source in sources]
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None
