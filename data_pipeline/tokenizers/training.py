"""Trains a small byte-level BPE tokenizer, and writes it as a folder that `transformers` loads.

Training is deterministic; an earlier result is reused if texts and size are the same. Beside it stands
`trained_from.json`, which says what it was trained on; a tokenizer without it is never replaced, and one that was
trained on other text or has another size only if that is asked for.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from data_pipeline.errors import DataError, first_names
from data_pipeline.ownership import make_folder
from data_pipeline.storage.file_io import sha256_of_file, write_atomically
from data_pipeline.tokenizers.folder_checks import TOKENIZER, TOKENIZER_CONFIG
from data_pipeline.tokenizers.reading import TokenizerFile, inspect_tokenizer
from data_pipeline.typed_json import STRICT, Count, of_json

if TYPE_CHECKING:
    import tokenizers

TRAINED_FROM = "trained_from.json"
END_OF_TEXT = "<|endoftext|>"
_INSTEAD = "name another folder, leave out --train-vocab-size to take it as it is, or replace it with --overwrite"
_SMALLEST_VOCABULARY = 257  # 256 bytes and END_OF_TEXT

_TRANSFORMERS_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1_000_000_000,  # the model decides
}


@dataclass(frozen=True)
class TrainingRecord:
    """Contents of `trained_from.json`."""

    __pydantic_config__: ClassVar = STRICT
    text_sha256: str
    vocab_size: Count
    tokenizers: str  # version of the library
    sha256: str  # of tokenizer.json
    text_bytes: Count | None = None  # None in records of older versions
    sources: tuple[str, ...] = ()  # as given

    def describe(self) -> str:
        """Returns the tokenizer in words: vocabulary and text."""
        size = "" if self.text_bytes is None else f" ({self.text_bytes:,} bytes)"
        text = f"{first_names(self.sources)}{size}" if self.sources else f"text that is not named{size}"
        return f"a vocabulary of {self.vocab_size:,}, trained on {text}"


@dataclass(frozen=True)
class TrainedTokenizer:
    """A tokenizer that has been trained and is in memory, or that an identical earlier training has written."""

    file: TokenizerFile
    record: TrainingRecord
    content: bytes | None  # of tokenizer.json; None if it is written already

    def write(self) -> None:
        """Writes the folder, unless it is there. A kill leaves the former tokenizer.json whole, or none."""
        if self.content is None:
            return
        folder = self.file.path.parent
        make_folder(folder)
        # The record comes first: it marks what an interrupted training leaves as ours, to be made again.
        write_atomically(folder / TRAINED_FROM, _as_json(asdict(self.record)))
        write_atomically(folder / TOKENIZER_CONFIG, _as_json(_TRANSFORMERS_CONFIG))
        write_atomically(self.file.path, self.content)


def train_tokenizer(texts: Iterable[str], output: Path, vocab_size: int, *, overwrite: bool = False) -> Path:
    """Trains a byte-level BPE of exactly `vocab_size` entries and writes it as a folder; returns the folder.

    The folder loads in `transformers.AutoTokenizer`. `<|endoftext|>` has id 0. Raises DataError as `trained_tokenizer`.
    """
    trained_tokenizer(texts, output, vocab_size, overwrite=overwrite).write()
    return output


def trained_tokenizer(
    texts: Iterable[str], output: Path, vocab_size: int, *, sources: Sequence[str] = (), overwrite: bool = False
) -> TrainedTokenizer:
    """Trains a tokenizer for the folder `output`, or takes the one there if it is the result of the same training.

    Writes nothing. `sources` names the texts in the record. Raises DataError if the text is too small, or if the folder
    holds another tokenizer: one trained here is replaced only with `overwrite`, any other never.
    """
    import tokenizers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small for byte-level BPE: ask for at least {_SMALLEST_VOCABULARY}"
        )
    former = _former_training(output, overwrite)
    asked = TrainingRecord("", vocab_size, tokenizers.__version__, "", sources=tuple(sources))
    if former is not None and former.vocab_size != vocab_size and not overwrite:
        raise _other_tokenizer(output, former, asked)  # before the text is read
    texts = list(texts)
    asked = replace(asked, **_text_facts(texts))
    if former is not None and (former.text_sha256, former.vocab_size) == (asked.text_sha256, vocab_size):
        if former.sha256 == sha256_of_file(output / TOKENIZER):
            return TrainedTokenizer(inspect_tokenizer(output), former, None)
        if not overwrite:
            raise DataError(
                f"{output / TOKENIZER} is not the one that {TRAINED_FROM} beside it describes (changed since, or its "
                f"replacement was interrupted): {_INSTEAD}"
            )
    elif former is not None and not overwrite:
        raise _other_tokenizer(output, former, asked)
    trained = _train(texts, vocab_size)
    found = trained.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"the text is too small for a vocabulary of {vocab_size}: only {found} entries can be made from it; give "
            "more text or ask for fewer entries"
        )
    content = trained.to_str(pretty=True).encode()
    sha256 = hashlib.sha256(content).hexdigest()
    end = trained.token_to_id(END_OF_TEXT)
    file = TokenizerFile(str(output), output / TOKENIZER, sha256, vocab_size, end, end, is_harmless=True)
    return TrainedTokenizer(file, replace(asked, sha256=sha256), content)


def _train(texts: Sequence[str], vocab_size: int) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _former_training(folder: Path, overwrite: bool) -> TrainingRecord | None:
    """Returns the record of the tokenizer in `folder`; None if there is no tokenizer.

    Raises DataError for a tokenizer without a record, and, unless it may be overwritten, for an unreadable record.
    """
    record, tokenizer = folder / TRAINED_FROM, folder / TOKENIZER
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file: name a folder, into which the trained tokenizer is written")
    if not record.exists():
        for path in filter(Path.exists, (tokenizer, folder / TOKENIZER_CONFIG)):  # never, however it is asked for
            raise DataError(
                f"{path} was not trained here, and training would overwrite it: name another folder, or leave out "
                "--train-vocab-size to take the tokenizer as it is"
            )
    if not (record.exists() and tokenizer.exists()):
        return None
    try:
        return of_json(TrainingRecord, record.read_bytes())
    except ValueError:
        if overwrite:
            return None
        raise DataError(
            f"{record} is not readable, so it is not known what the tokenizer beside it was trained on: {_INSTEAD}"
        ) from None


def _other_tokenizer(folder: Path, former: TrainingRecord, asked: TrainingRecord) -> DataError:
    there, wanted = former.describe(), asked.describe()
    changed = ", which has changed since" if there == wanted else ""
    return DataError(f"{folder} holds a tokenizer with {there}; asked is one with {wanted}{changed}: {_INSTEAD}")


def _text_facts(texts: Sequence[str]) -> dict[str, Any]:
    """Returns digest and size of the texts, as the record has them."""
    digest, size = hashlib.sha256(), 0
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
        size += len(content)
    return {"text_sha256": digest.hexdigest(), "text_bytes": size}


def _as_json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
