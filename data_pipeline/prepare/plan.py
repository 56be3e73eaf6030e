"""The plan of a `prepare`, fixed before it starts: sources, tokenizer, how the text is cut into chunks.

The digest of a plan covers everything that determines the bytes of its output; equal digests mean equal output.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.meta import WRITER_VERSION
from data_pipeline.prepare.encoding import TextEncoder
from data_pipeline.sources import Source, open_sources
from data_pipeline.sources.text import TextPiece
from data_pipeline.tokenizer import TokenizerFile, TrainedTokenizer, inspect_tokenizer

_SMALLEST_CHUNK, _LARGEST_CHUNK = 1 << 18, 1 << 24  # characters
_CHUNKS_PER_JOB = 1024  # aimed at, between the two limits
_CHUNK_OF_UNKNOWN_SIZE = 1 << 22


@dataclass(frozen=True)
class PreparationPlan:
    """Sources, tokenizer and chunk size of one `prepare`."""

    specs: list[str]
    sources: list[Source]
    source_bytes: int | None
    tokenizer: TokenizerFile
    text_field: str
    encoder: TextEncoder
    chunk_characters: int
    sha256: str


def plan_job(
    specs: list[str], tokenizer: Path | TrainedTokenizer, text_field: str, append_eos: bool
) -> PreparationPlan:
    """Opens sources and tokenizer. Raises DataError if one is missing or the tokenizer has no end-of-document token."""
    sources = open_sources(specs, text_field)
    inspected = inspect_tokenizer(tokenizer) if isinstance(tokenizer, Path) else tokenizer.file
    end_token = inspected.eos_token_id if append_eos else None
    if append_eos and end_token is None:
        raise DataError(
            f"tokenizer {inspected.given} names no end-of-document token: set eos_token in its tokenizer_config.json, "
            "or prepare without one (--no-append-eos)"
        )
    encoder = TextEncoder(inspected, begin_token=None, end_token=end_token, special_tokens="keep")
    sizes = [source.size_bytes for source in sources]
    known = [size for size in sizes if size is not None]
    source_bytes = sum(known) if len(known) == len(sizes) else None
    chunk = _CHUNK_OF_UNKNOWN_SIZE
    if source_bytes is not None:
        chunk = min(max(source_bytes // _CHUNKS_PER_JOB, _SMALLEST_CHUNK), _LARGEST_CHUNK)
    identity = {
        "writer": WRITER_VERSION,
        "sources": [source.identity() for source in sources],
        "tokenizer": [inspected.sha256, inspected.vocab_size, inspected.eos_token_id],
        "options": [text_field, append_eos, chunk],
    }
    digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()
    return PreparationPlan(list(specs), sources, source_bytes, inspected, text_field, encoder, chunk, digest)


def chunks(job: PreparationPlan) -> Iterator[list[TextPiece]]:
    """Yields all pieces in order, grouped into chunks of `chunk_characters`; depends on nothing but the plan."""
    chunk: list[TextPiece] = []
    characters = 0
    for source in job.sources:
        for piece in source.pieces():
            chunk.append(piece)
            characters += len(piece.text)
            if characters >= job.chunk_characters:
                yield chunk
                chunk, characters = [], 0
    if chunk:
        yield chunk
