"""Refuses to replace prepared data that was made from other sources, with another tokenizer or with other options."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.encoding.cutting import CUT_PLACES
from data_pipeline.errors import DataError, first_names
from data_pipeline.prepare.parts import PartStore
from data_pipeline.prepare.plan import PreparationPlan
from data_pipeline.sources.row_text import LONGEST_ROW
from data_pipeline.storage.loss_file import loss_path
from data_pipeline.storage.meta import CorpusMeta, meta_path, read_meta
from data_pipeline.storage.paths import with_ending

_INSTEAD = "choose another output, or replace it with --overwrite"


def check_replaceable(output: Path, job: PreparationPlan, overwrite: bool) -> None:
    """Raises DataError if the output exists and is not to be replaced by that of `job`.

    Unfinished or damaged output of the same job is; that of another job only with `overwrite`; files that `prepare`
    did not write never. Its own output has metadata, or a journal if a run was stopped between its renames.
    """
    ours = meta_path(output).exists() or PartStore(output, job.parts_sha256).journal.exists()
    for path in (with_ending(output, ".bin"), with_ending(output, ".idx"), loss_path(output)):
        if path.exists() and not ours:
            raise DataError(f"{path} exists and was not written by prepare: choose another output, or move it away")
    former = None if overwrite else _former(output)
    if former is not None and former.job_sha256 != job.job_sha256:
        raise DataError(f"{_there(output, former)}; asked is {_asked(former, job)}: {_INSTEAD}")


def check_vocabulary(output: Path, specs: Sequence[str], tokenizer: Path, vocab_size: int) -> None:
    """Raises DataError if the output was prepared with another vocabulary; call it before a tokenizer is trained."""
    former = _former(output)
    if former is not None and former.vocab_size != vocab_size:
        asked = f"{first_names(specs)} with the tokenizer {tokenizer}, vocabulary {vocab_size:,}"
        raise DataError(f"{_there(output, former)}; asked is {asked}: {_INSTEAD}")


def _former(output: Path) -> CorpusMeta | None:
    """Returns the metadata of the output that is there; None without. Raises DataError if it is not readable."""
    try:
        return read_meta(output)
    except DataError:
        raise DataError(
            f"{meta_path(output)} is not readable, so it is not known what {output} was prepared from: {_INSTEAD}"
        ) from None


def _there(output: Path, former: CorpusMeta) -> str:
    documents = f"{former.document_count:,} document{'s' * (former.document_count != 1)}"
    return (
        f"{output} holds {documents} prepared from {first_names(former.sources)} with the tokenizer "
        f"{former.tokenizer}, vocabulary {former.vocab_size:,}"
    )


def _asked(former: CorpusMeta, job: PreparationPlan) -> str:
    """Returns what is asked in words, with what differs from `former` and does not show in them."""
    asked = (
        f"{first_names(job.specs)} with the tokenizer {job.tokenizer.given}, vocabulary {job.tokenizer.vocab_size:,}"
    )
    options, notes = job.options, []
    if former.text_field not in (None, options.text_field):
        notes.append(f"--text-field {options.text_field} (not {former.text_field})")
    if former.append_eos not in (None, options.append_eos):
        notes.append("--append-eos" if options.append_eos else "--no-append-eos")
    if former.begin_token_id != job.encoder.begin_token:
        notes.append("--begin-token" if options.begin_token else "--no-begin-token")
    if former.special_tokens != options.special_tokens:
        notes.append(f"--special-tokens {options.special_tokens} (not {former.special_tokens})")
    if former.train_on != options.train_on:
        notes.append(f"--chat --train-on {options.train_on}" if options.train_on else "no --chat")
    elif isinstance(job.encoder, ChatEncoder) and former.chat_template_sha256 != job.encoder.template.digest():
        notes.append("whose chat template or --chat-date is another one since")
    if former.fill_in_the_middle != options.fill_in_the_middle:
        notes.append(f"--fill-in-the-middle {options.fill_in_the_middle:g} (not {former.fill_in_the_middle:g})")
    if former.tokenizers is None and not options.train_on and job.places != CUT_PLACES:
        notes.append("long documents not cut where that changes their tokens (older versions did)")
    is_alike = (former.tokenizer, former.vocab_size) == (job.tokenizer.given, job.tokenizer.vocab_size)
    if former.tokenizer_sha256 != job.tokenizer.sha256 and is_alike:
        notes.append("whose tokenizer is another one since")
    if options.longest_row != LONGEST_ROW:
        notes.append(f"--longest-row {options.longest_row >> 20}")
    if not notes and former.sources == job.specs and former.tokenizer_sha256 == job.tokenizer.sha256:
        rows = ", or hold rows, which older versions read as one text" if former.tokenizers is None else ""
        notes.append(f"whose files are others or have changed since{rows}")
    return ", ".join([asked, *notes])
