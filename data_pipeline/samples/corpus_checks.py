"""Checks corpora as they are opened, and takes the digests that tell their content from another's."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_pipeline.errors import DataError
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.meta import CorpusMeta, read_meta


def check_arguments(prefixes: Sequence[Path], sequence_length: int, split: str, held_out_fraction: float) -> None:
    if not prefixes:
        raise DataError("no corpus is given: name at least one prefix written by `megalite prepare`")
    if sequence_length < 1:
        raise DataError(f"sequence_length {sequence_length} is impossible: it must be at least 1")
    if split not in ("train", "held_out"):
        raise DataError(f"split {split!r} does not exist: it is 'train' or 'held_out'")
    if not 0 <= held_out_fraction < 1:
        raise DataError(f"held_out_fraction {held_out_fraction:g} is impossible: it must be at least 0 and below 1")


def matching_meta(corpus: IndexedTokens) -> CorpusMeta | None:
    """Returns the metadata of a corpus, None if it has none; only then is the whole index read, and checked."""
    meta = read_meta(corpus.prefix)
    check_loss_mask(corpus, meta)
    if meta is None:
        corpus.check()
        return None
    promised = (meta.token_count, meta.document_count, meta.dtype)
    found = (corpus.token_count, len(corpus), str(corpus.dtype))
    if promised != found:
        raise DataError(
            f"{corpus.prefix}.meta.json describes another corpus (tokens, documents, dtype {promised}, found {found}): "
            "prepare it again, or delete the meta file to use the token files as they are"
        )
    corpus.trust()
    return meta


def check_loss_mask(corpus: IndexedTokens, meta: CorpusMeta | None) -> None:
    """Raises DataError if the mask that the metadata names is missing, or one is there that it does not name."""
    is_named = meta is not None and meta.loss_sha256 is not None
    if is_named and not corpus.has_loss_mask:
        raise DataError(f"{corpus.prefix}.loss.bin, the loss mask of the corpus, is missing: prepare the corpus again")
    if corpus.has_loss_mask and not is_named:
        raise DataError(
            f"{corpus.prefix}.loss.bin is a loss mask that no {corpus.prefix}.meta.json names, so that it may be of "
            "other tokens: prepare the corpus again, or move the mask away to train on every token"
        )


def content_digests(corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]) -> list[list[str]]:
    """Returns what tells each corpus's content from another's; the last of each is the SHA-256 of its index."""
    return [
        [meta.sha256, *([meta.loss_sha256] if meta.loss_sha256 else []), meta.idx_sha256]
        if meta
        else [str(corpus.token_count), corpus.index_digest()]
        for corpus, meta in zip(corpora, metas, strict=True)
    ]


def sampled_digest(corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]) -> str:
    """Returns a digest of tokens here and there in corpora without metadata, of which `content_digests` knows lengths.

    Empty if all have metadata. It is no part of the fingerprint, so that older runs keep theirs.
    """
    found = [corpus.sampled_digest() for corpus, meta in zip(corpora, metas, strict=True) if meta is None]
    return hashlib.sha256("".join(found).encode()).hexdigest() if found else ""


def common_vocabulary(
    corpora: Sequence[IndexedTokens], metas: Sequence[CorpusMeta | None]
) -> tuple[int | None, int | None]:
    known: dict[str, Any] = {meta.tokenizer_sha256: meta for meta in metas if meta is not None}
    if len(known) > 1:
        names = ", ".join(str(corpus.prefix) for corpus in corpora)
        raise DataError(f"the corpora {names} were made with different tokenizers: prepare them with the same one")
    for meta in known.values():
        return meta.vocab_size, meta.eos_token_id
    return None, None
