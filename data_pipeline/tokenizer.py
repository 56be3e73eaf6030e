"""Trains a small byte-level BPE tokenizer, or inspects an existing one.

A tokenizer is given as a folder with `tokenizer.json` (as `transformers` writes it), or as the path of that file.
Training is deterministic; an earlier result is reused if texts, size and version of the library are the same.
"""

import hashlib
import json
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data_pipeline.errors import DataError
from data_pipeline.files import sha256_of_file, write_atomically

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
_KNOWN_END_TOKENS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
_SMALLEST_VOCABULARY = 257  # 256 bytes and END_OF_TEXT
_NOT_TRAINING_TEXT = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo", "__pycache__",
}  # fmt: skip

_TRANSFORMERS_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END_OF_TEXT,
    "eos_token": END_OF_TEXT,
    "clean_up_tokenization_spaces": False,
    "model_max_length": 1_000_000_000,  # the model decides
}


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer's file, and what prepared data records of it."""

    given: str  # the path as the user wrote it
    path: Path  # tokenizer.json
    sha256: str
    vocab_size: int  # largest id + 1
    eos_token_id: int | None


def inspect_tokenizer(tokenizer: Path) -> TokenizerFile:
    """Reads the tokenizer of a folder or `tokenizer.json`. Raises DataError if it is missing, broken or empty."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if not path.is_file():
        raise DataError(
            f"tokenizer {tokenizer} has no tokenizer.json: give a folder written by `save_pretrained`, or train one "
            "with `megalite prepare --train-vocab-size`"
        )
    vocabulary = load_tokenizer(path).get_vocab(with_added_tokens=True)
    if not vocabulary:
        raise DataError(f"{path} has an empty vocabulary: give a trained tokenizer")
    end = _configured_end_token(path.parent / "tokenizer_config.json")
    candidates = (end,) if end is not None else _KNOWN_END_TOKENS
    ids = [vocabulary[token] for token in candidates if token in vocabulary]
    return TokenizerFile(
        given=str(tokenizer),
        path=path,
        sha256=sha256_of_file(path),
        vocab_size=max(vocabulary.values()) + 1,
        eos_token_id=ids[0] if ids else None,
    )


def load_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """Loads a tokenizer without the truncation and padding that its file may switch on."""
    import tokenizers

    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # `tokenizers` raises bare Exception for every fault of a file
        raise DataError(f"{path} is not a tokenizer that `tokenizers` can load ({error}): save it again") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def train_tokenizer(texts: Iterable[str], output: Path, vocab_size: int) -> Path:
    """Trains a byte-level BPE of exactly `vocab_size` entries and writes it as a folder; returns the folder.

    The folder loads in `transformers.AutoTokenizer`. `<|endoftext|>` has id 0. An identical earlier result (same texts,
    size and library) is reused. Raises DataError if the folder holds a tokenizer that was not trained here.
    """
    import tokenizers

    if vocab_size < _SMALLEST_VOCABULARY:
        raise DataError(
            f"a vocabulary of {vocab_size} is too small for byte-level BPE: ask for at least {_SMALLEST_VOCABULARY}"
        )
    texts = list(texts)
    record_path, tokenizer_path = output / "trained_from.json", output / "tokenizer.json"
    if tokenizer_path.exists() and not record_path.exists():
        raise DataError(
            f"{tokenizer_path} was not trained here, and training would overwrite it: name another folder, or leave "
            "out the vocabulary size to use it as it is"
        )
    digest = hashlib.sha256()
    for text in texts:
        content = text.encode()
        digest.update(len(content).to_bytes(8, "little") + content)
    origin = {"text_sha256": digest.hexdigest(), "vocab_size": vocab_size, "tokenizers": tokenizers.__version__}
    if _is_result_of(record_path, tokenizer_path, origin):
        return output
    trained = _train(texts, vocab_size)
    found = trained.get_vocab_size()
    if found != vocab_size:
        raise DataError(
            f"the text is too small for a vocabulary of {vocab_size}: only {found} entries can be made from it; give "
            "more text or ask for fewer entries"
        )
    output.mkdir(parents=True, exist_ok=True)
    written = trained.to_str(pretty=True).encode()
    # The record comes first: it marks what an interrupted training leaves as ours, to be made again.
    write_atomically(record_path, _as_json({**origin, "sha256": hashlib.sha256(written).hexdigest()}))
    write_atomically(output / "tokenizer_config.json", _as_json(_TRANSFORMERS_CONFIG))
    write_atomically(tokenizer_path, written)
    return output


def python_stdlib_sources() -> list[Path]:
    """Returns the files of Python's standard library, sorted: text that every machine has."""
    root = Path(sysconfig.get_path("stdlib"))
    sources = [
        path
        for path in sorted(root.rglob("*.py"))
        if not _NOT_TRAINING_TEXT.intersection(path.relative_to(root).parts) and _is_utf8(path)
    ]
    if not sources:
        raise DataError(f"the Python standard library at {root} has no .py sources: give text files of your own")
    return sources


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


def _is_result_of(record_path: Path, tokenizer_path: Path, origin: Mapping[str, object]) -> bool:
    if not (record_path.is_file() and tokenizer_path.is_file()):
        return False
    try:
        record = json.loads(record_path.read_text(encoding="utf-8"))
    except ValueError:
        return False  # an unreadable record only costs a new training
    return bool(record == {**origin, "sha256": sha256_of_file(tokenizer_path)})


def _configured_end_token(path: Path) -> str | None:
    if not path.is_file():
        return None
    try:
        token = json.loads(path.read_text(encoding="utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise DataError(f"{path} is not readable as JSON ({error}): save the tokenizer again") from error
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _as_json(content: object) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def _is_utf8(path: Path) -> bool:
    try:
        path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True
