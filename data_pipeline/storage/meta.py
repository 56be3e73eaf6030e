"""`PREFIX.meta.json` records what a prepared corpus is made of. A corpus from elsewhere may have none."""

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from data_pipeline.errors import DataError
from data_pipeline.storage.file_io import write_atomically
from data_pipeline.storage.paths import with_ending
from data_pipeline.typed_json import STRICT, Count, PathText, of_json

FORMAT = "megatron-indexed-1"
WRITER_VERSION = 1  # raise it when the same sources and tokenizer would give other tokens


@dataclass(frozen=True)
class CorpusMeta:
    """Contents of `PREFIX.meta.json`."""

    __pydantic_config__: ClassVar = STRICT
    tokenizer_sha256: str  # of tokenizer.json; of the files together where these make other ids of a text
    tokenizer: PathText  # the path as given
    vocab_size: Count
    eos_token_id: Count | None
    token_count: Count
    document_count: Count
    dtype: str
    sha256: str  # of the .bin
    idx_sha256: str  # of the .idx
    sources: list[str]  # as given
    job_sha256: str  # sources with sizes and times, tokenizer, options: equal means nothing to do
    text_field: str | None = None  # this and the next are None in files of older versions
    append_eos: bool | None = None
    loss_sha256: str | None = None  # of the .loss.bin; None: every token carries loss
    loss_token_count: int | None = None  # tokens that carry loss; None in files of older versions too
    train_on: str | None = None  # of conversations, as is the next; None for text
    chat_template_sha256: str | None = None
    end_of_turn_id: Count | None = None  # the token that ends an answer; None also in files of older versions
    begin_token_id: Count | None = None  # this and the next four are missing in files of older versions
    special_tokens: str = "keep"
    fill_in_the_middle: Annotated[float, Field(ge=0, le=1)] = 0.0  # share of the documents
    skipped_rows: Count = 0
    tokenizer_files: bool = False  # all files of the tokenizer were read; by older versions tokenizer.json alone
    tokenizers: str | None = None  # version of the library that encoded
    gigatoken: str | None = None  # version of the fast encoder of the run that finished; None: the exact one
    format: str = FORMAT
    writer_version: int = WRITER_VERSION

    def write(self, prefix: Path) -> None:
        content = json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"
        write_atomically(meta_path(prefix), content.encode())


def meta_path(prefix: Path) -> Path:
    return with_ending(prefix, ".meta.json")


def read_meta(prefix: Path) -> CorpusMeta | None:
    """Returns the metadata beside a corpus, or None if there is none."""
    path = meta_path(prefix)
    if not path.is_file():
        return None
    return parsed_meta(path.read_bytes(), str(path))


def parsed_meta(content: bytes, where: str) -> CorpusMeta:
    """Returns the metadata in the bytes of a file. Raises DataError, which names `where` they are from."""
    try:
        meta = of_json(CorpusMeta, content)
    except ValueError as error:
        raise DataError(
            f"{where} is not readable as metadata of a corpus ({error}): delete it or prepare again"
        ) from error
    if meta.format != FORMAT:
        raise DataError(
            f"{where} has format {meta.format!r}, but this version knows {FORMAT!r}: prepare the corpus again"
        )
    return meta
