"""Checks what the files of a tokenizer's folder state against what transformers makes of them.

transformers gives an added token the next free id where its stated one is not that, and says nothing: a model would be
trained on other ids than its own.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import DataError

if TYPE_CHECKING:
    import tokenizers

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"
_ADDED_TOKENS = "added_tokens.json"
_IDS = 1 << 32  # a tokenizer's ids are below it


def configuration(path: Path) -> dict[str, Any]:
    """Returns the object in a JSON file of a tokenizer's folder; empty without the file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable as JSON ({error}): save the tokenizer again") from error
    if not isinstance(content, dict):
        raise DataError(f"{path} is not readable as JSON (it is no object): save the tokenizer again")
    return content


def check_types(folder: Path) -> None:
    """Raises DataError for a value of a type that transformers would break at, which would not say where it is."""
    for path in (folder / TOKENIZER_CONFIG, folder / "special_tokens_map.json"):
        for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
            if not isinstance(value := configuration(path).get(key), str | dict | None):
                raise DataError(f"{path} has {type(value).__name__} in {key!r}: write the text of one token there")
    for _ in _stated(folder):
        pass


def check_stated_ids(folder: Path, read: "tokenizers.Tokenizer") -> None:
    """Raises DataError for an added token that a file gives another id than it has."""
    alone = configuration(folder / TOKENIZER).get("added_tokens") or []
    own = [(folder / TOKENIZER, token["content"], token["id"]) for token in alone]
    for path, token, number in [*own, *_stated(folder)]:
        made = read.token_to_id(token)
        is_there = 0 <= number < _IDS and read.id_to_token(number) == token  # a spelling may have two ids
        if made is not None and made != number and not is_there:
            raise DataError(
                f"{path} gives {token!r} the id {number}, and transformers gives it {made}: the ids of added tokens "
                "must follow the vocabulary without a gap, each token with one of its own: correct the id, or take "
                "the token from the model's source with all files of its tokenizer"
            )


def _stated(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Yields file, spelling and id of each added token that a file beside tokenizer.json states."""
    path = folder / _ADDED_TOKENS
    for token, number in configuration(path).items():
        if not isinstance(number, int) or isinstance(number, bool):
            raise DataError(f"{path} has {type(number).__name__} as the id of {token!r}: write a number")
        yield path, token, number
    path = folder / TOKENIZER_CONFIG
    decoder = configuration(path).get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise DataError(
            f"{path} has {type(decoder).__name__} in 'added_tokens_decoder': write an object, ids to tokens"
        )
    for number, token in decoder.items():
        content = token.get("content") if isinstance(token, dict) else token
        if not number.isdecimal() or not isinstance(content, str):
            raise DataError(
                f"{path} has {number!r} in 'added_tokens_decoder', which is no id with the 'content' of a token: "
                "write one"
            )
        yield path, content, int(number)
