"""Reads the folder of a tokenizer as transformers does, so that everything here sees the same ids and end token.

`tokenizer.json` alone is not what a model is asked with: `tokenizer_config.json`, `added_tokens.json`,
`special_tokens_map.json` and the class that these or `config.json` name may add tokens and change rules. transformers
puts them together, and what it makes of them is taken, unless that cannot be written as a `tokenizer.json`. Only the
folder of a tokenizer that was trained here is read without it, because that takes seconds to import.

The rules of a tokenizer are a stranger's program: they run without limits only if they are of the kind trained here.
"""

import hashlib
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import DataError, DataLimitError, first_names
from data_pipeline.limited_process import LimitedProcess, ProcessRefusal
from data_pipeline.path_suggestions import did_you_mean
from data_pipeline.storage.file_io import refuse_lfs_pointer, sha256_of_file
from data_pipeline.tokenizers.folder_checks import (
    TOKENIZER,
    TOKENIZER_CONFIG,
    check_stated_ids,
    check_types,
    configuration,
)

if TYPE_CHECKING:
    import tokenizers

PROCESSOR_S = 60.0  # to load a tokenizer, to try it out, and to encode a short text
CHARACTERS_PER_S = 20_000  # that a slow tokenizer encodes; the slowest known do ten times as many
MEMORY_BYTES = 4 << 30  # for each of these
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")  # the classes that take tokenizer.json as it is
_WITHOUT_EFFECT = {"tokenizer_class", "clean_up_tokenization_spaces", "model_max_length", "chat_template"}
_READ_TOO = ("config.json", "added_tokens.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.model", "tek*")
_SMALL = 1 << 20  # bytes of a file that is looked at without limits
_COMPONENTS = ("added_tokens", "normalizer", "pre_tokenizer", "model")  # that decide about ids


@dataclass(frozen=True)
class TokenizerFile:
    """A tokenizer, and what prepared data records of it."""

    given: str  # the path as the user wrote it
    path: Path  # tokenizer.json
    sha256: str  # of tokenizer.json; where transformers makes other ids of the folder, of it and what differs
    vocab_size: int  # largest id + 1
    eos_token_id: int | None
    bos_token_id: int | None
    is_harmless: bool = False  # its rules are of the kind that is trained here
    content: str | None = field(default=None, repr=False, compare=False)  # a tokenizer.json instead of that at `path`

    def load(self) -> "tokenizers.Tokenizer":
        """Loads the tokenizer as transformers reads its folder."""
        return load_tokenizer(self.path) if self.content is None else _without_limits_on_length(self.content)

    def json(self) -> bytes:
        """Returns the tokenizer as a `tokenizer.json`."""
        return self.path.read_bytes() if self.content is None else self.content.encode()


def inspect_tokenizer(tokenizer: Path) -> TokenizerFile:
    """Reads the tokenizer of a folder or `tokenizer.json`, with the files beside it.

    Raises DataError if it is missing, broken or empty, or if it is one only together with a program.
    """
    path = tokenizer / TOKENIZER if tokenizer.is_dir() else tokenizer
    if path.is_file() and path.name != TOKENIZER:
        raise DataError(f"tokenizer {tokenizer} is a file of another name: give tokenizer.json, or its folder")
    if not path.is_file():
        there = "has no tokenizer.json" if tokenizer.exists() else f"does not exist{did_you_mean(tokenizer)}"
        raise DataError(
            f"tokenizer {tokenizer} {there}: give a folder written by `save_pretrained`, or train one "
            "with `megalite prepare --train-vocab-size`"
        )
    files = [path, path.parent / TOKENIZER_CONFIG, *_others(path.parent)]
    for file in files:
        refuse_lfs_pointer(file)
    stamps = [(str(file), status.st_size, status.st_mtime_ns, status.st_ino) for file, status in _existing(files)]
    return replace(_inspected(path, tuple(stamps)), given=str(tokenizer))


def _others(folder: Path) -> list[Path]:
    return sorted(path for pattern in _READ_TOO for path in folder.glob(pattern))


def _existing(files: list[Path]) -> list[tuple[Path, Any]]:
    return [(file, file.stat()) for file in files if file.is_file()]


@lru_cache(maxsize=8)
def _inspected(path: Path, stamps: tuple[Any, ...]) -> TokenizerFile:
    """Inspects a tokenizer once per process; `stamps` are in the cache key because its files may be replaced."""
    harmless = is_harmless(path)
    loaded = load_tokenizer(path) if harmless else None
    if loaded is not None and (ends := _plain_ends(path, configuration(path.parent / TOKENIZER_CONFIG))) is not None:
        check_stated_ids(path.parent, loaded)
        facts = {"vocab_size": vocabulary_size(loaded), "sha256": sha256_of_file(path), **ends}
    else:
        with HubTokenizer(path.parent) as reader:
            facts = reader.facts()
    if not facts["vocab_size"]:
        raise DataError(f"{path} has an empty vocabulary: give a trained tokenizer")
    return TokenizerFile(str(path), path, is_harmless=harmless, **facts)


def vocabulary_size(tokenizer: "tokenizers.Tokenizer") -> int:
    """Returns the largest id + 1."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1


def is_harmless(path: Path) -> bool:
    """True if the rules in a `tokenizer.json` are of the kind that is trained here: byte-level BPE, nothing else.

    The time and memory of such a tokenizer are those of its text. The files beside it are small.
    """
    small = [path.parent / TOKENIZER_CONFIG, *_others(path.parent)]
    if path.stat().st_size > 32 * _SMALL or any(status.st_size > _SMALL for _, status in _existing(small)):
        return False
    try:
        content = json.loads(path.read_bytes())
        splits, kinds = content["pre_tokenizer"], [content[name]["type"] for name in ("model", "decoder")]
        rules = (content.get("normalizer"), splits["type"], splits.get("use_regex", True), *kinds)
        is_known = rules == (None, "ByteLevel", True, "BPE", "ByteLevel")
        return is_known and len(content.get("added_tokens") or []) < 10_000
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return False


def _plain_ends(path: Path, config: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the tokens of begin and end that the folder of a harmless tokenizer names, where nothing else matters.

    None if transformers has to be asked.
    """
    names = {"eos_token", "bos_token"}
    if _others(path.parent) or config.get("tokenizer_class") not in (None, *_GENERIC):
        return None
    if not config.keys() <= _WITHOUT_EFFECT | names:
        return None
    added = json.loads(path.read_bytes()).get("added_tokens") or []
    plain = {"special": True, "lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    ids = {token["content"]: token["id"] for token in added if plain.items() <= token.items()}
    tokens = {name: config.get(name) for name in names}
    if not all(token is None or (isinstance(token, str) and token in ids) for token in tokens.values()):
        return None
    return {f"{name}_id": None if token is None else ids[token] for name, token in tokens.items()}


def load_tokenizer(path: Path) -> "tokenizers.Tokenizer":
    """Loads a `tokenizer.json` alone, without the truncation and padding that it may switch on."""
    try:
        return _without_limits_on_length(path.read_text(encoding="utf-8"))
    except BaseException as error:  # bare Exception for most faults of a file, and pyo3's PanicException, which is none
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise DataError(f"{path} is not a tokenizer that `tokenizers` can load ({error}): save it again") from error


def _without_limits_on_length(content: str) -> "tokenizers.Tokenizer":
    import tokenizers

    tokenizer = tokenizers.Tokenizer.from_str(content)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class UnusableTokenizer(DataLimitError):
    """Raised for a tokenizer that breaks at a text; the place of the text is still to be added."""


def encoded(tokenizer: "tokenizers.Tokenizer", text: str, *, offsets: bool = False) -> "tokenizers.Encoding":
    """Encodes a text without adding special tokens. Raises UnusableTokenizer where the tokenizer's rules break."""
    # One text per call: a batch starts rayon's threads in every process, and is no faster on one core. Unlike `encode`
    # it lets other threads run, of which one watches (prepare/workers.py).
    encode = tokenizer.encode_batch if offsets else tokenizer.encode_batch_fast
    try:
        return encode([text], add_special_tokens=False)[0]
    except BaseException as error:  # pyo3's PanicException is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UnusableTokenizer(
            f"the tokenizer breaks at a text of {len(text):,} characters ({reason}): it is not usable"
        ) from None


def with_limits(file: TokenizerFile, make: Callable[[], Any]) -> Any:
    """Returns what `make` makes with a tokenizer, a value of JSON; in a process with limits, unless it is harmless.

    Raises DataError if `make` does, and for a tokenizer that takes too much time or memory.
    """
    if file.is_harmless:
        return make()
    process = LimitedProcess(lambda: lambda _: make(), MEMORY_BYTES, DataError)
    try:
        return process.ask(None, PROCESSOR_S)
    except ProcessRefusal as error:
        raise UnusableTokenizer(f"tokenizer {file.given} is not usable, {error}") from None
    finally:
        process.end()


class HubTokenizer:
    """The tokenizer that transformers makes of a folder.

    It is in a process with limits, unless its rules are harmless and this process has transformers.
    """

    def __init__(self, folder: Path) -> None:
        """Loads it. Raises DataError if transformers cannot, or would need a program that the folder brings."""
        self.folder = folder
        self._process: LimitedProcess | None = None
        self._reader: _Reader | None = None
        path = folder / TOKENIZER
        if "transformers.models.auto" in sys.modules and path.is_file() and is_harmless(path):
            self._reader = _Reader(folder)
        else:
            self._process = LimitedProcess(lambda: _first_reader(folder).answer, MEMORY_BYTES, DataError)
        described = self._ask("described")
        self.eos_token_id: int | None = described["eos_token_id"]
        self.bos_token_id: int | None = described["bos_token_id"]
        self.special_tokens: dict[str, Any] = described["special_tokens"]
        self.templates: list[str] | None = described["templates"]  # without and with tools; None without a template
        self.added: dict[int, tuple[str, bool]] = {  # spelling of each added token, and whether it is special
            int(number): (content, special) for number, (content, special) in described["added"].items()
        }
        self.normalizes: bool = described["normalizes"]

    def __enter__(self) -> "HubTokenizer":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.end()

    def facts(self) -> dict[str, Any]:
        """Returns the fields of a TokenizerFile. Raises DataError if no `tokenizer.json` has these ids."""
        return dict(self._ask("facts"))

    def ids(self, text: str, *, with_special: bool = True) -> list[int]:
        """Encodes a text, with or without the special tokens that the tokenizer puts around each."""
        return list(self._ask("ids", text, with_special))

    def spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Encodes a text without special tokens around it. Returns ids, and begin and end of each in the text."""
        ids, offsets = self._ask("spans", text)
        return ids, [(begin, end) for begin, end in offsets]

    def decode(self, ids: list[int]) -> str:
        """Returns the text of tokens, without those that are special."""
        return str(self._ask("decode", ids))

    def _ask(self, method: str, *arguments: Any) -> Any:
        if self._reader is not None:
            return self._reader.answer([method, *arguments])
        assert self._process is not None
        size = sum(len(argument) for argument in arguments if isinstance(argument, str | list))
        try:
            return self._process.ask([method, *arguments], PROCESSOR_S + size / CHARACTERS_PER_S)
        except ProcessRefusal as error:
            what = f"for a text of {size:,} characters or tokens" if size else "when it is loaded"
            raise UnusableTokenizer(f"the tokenizer of {self.folder} is not usable: {what}, {error}") from None


def _first_reader(folder: Path) -> "_Reader":
    """Returns the reader of a process that may have no transformers yet, and does nothing else with it."""
    if "transformers" not in sys.modules:
        sys.modules["torch"] = None  # type: ignore[assignment]  # three quarters of the import, and of no use here
    return _Reader(folder)


class _Reader:
    """The tokenizer in memory, wherever it is; every answer is a value of JSON."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoTokenizer

        self._folder = folder
        path = folder / TOKENIZER  # loaded first to say what is wrong with it: transformers names the missing key alone
        self._alone = load_tokenizer(path) if path.is_file() else None
        check_types(folder)
        try:
            self._hub = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever the files lead it to
            if "trust_remote_code" in str(error):
                raise DataError(
                    f"{folder}: 'auto_map' in its {TOKENIZER_CONFIG} or config.json names a program for its tokenizer, "
                    "and none that a model brings is run: take 'auto_map' out and set 'tokenizer_class' to "
                    f'"PreTrainedTokenizerFast", if {TOKENIZER} is all of it'
                ) from None
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]  # of a KeyError the text is the key
            raise DataError(
                f"{folder}: transformers cannot load its tokenizer ({reason}): save it again with save_pretrained, or "
                "copy its files from the model's source"
            ) from None

    def answer(self, request: Any) -> Any:
        method, *arguments = request
        try:
            return getattr(self, f"_{method}")(*arguments)
        except (DataError, MemoryError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # pyo3's PanicException is no Exception
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise DataError(f"the tokenizer of {self._folder} is not usable: {reason}") from None

    def _described(self) -> dict[str, Any]:
        hub, backend = self._hub, getattr(self._hub, "backend_tokenizer", None)
        templates = None
        if hub.chat_template:
            try:
                templates = [hub.get_chat_template(), hub.get_chat_template(tools=[])]
            except ValueError:  # several, and none is named "default"
                raise DataError(
                    f"{self._folder}: its chat templates are named {first_names(sorted(hub.chat_template))}, and none "
                    "of them 'default': copy the one that is meant into chat_template.jinja"
                ) from None
        added = {} if backend is None else backend.get_added_tokens_decoder()
        return {
            "eos_token_id": hub.eos_token_id,
            "bos_token_id": hub.bos_token_id,
            "special_tokens": {
                name: list(map(str, token)) if isinstance(token, list) else str(token)
                for name, token in hub.special_tokens_map.items()
            },
            "templates": templates,
            "added": {number: [token.content, token.special] for number, token in added.items()},
            "normalizes": backend is None or backend.normalizer is not None,
        }

    def _facts(self) -> dict[str, Any]:
        import tokenizers

        hub, backend, path = self._hub, getattr(self._hub, "backend_tokenizer", None), self._folder / TOKENIZER
        if not isinstance(backend, tokenizers.Tokenizer) or self._alone is None:
            raise DataError(
                f"{self._folder}: transformers reads it as {type(hub).__name__}, not by its tokenizer.json: save it "
                "again with save_pretrained, as a tokenizer of the library `tokenizers`"
            )
        backend.no_truncation()
        backend.no_padding()
        content, own = backend.to_str(), self._alone.to_str()
        read = self._alone if content == own else _without_limits_on_length(content)
        check_stated_ids(self._folder, read)
        self._check_agreement(read)
        digest, differing = sha256_of_file(path), {}
        if content != own:
            parsed = json.loads(content), json.loads(own)
            differing = {name: parsed[0][name] for name in _COMPONENTS if parsed[0][name] != parsed[1][name]}
        if differing:
            identity = json.dumps([digest, differing], sort_keys=True)
            digest = hashlib.sha256(identity.encode()).hexdigest()
        return {
            "vocab_size": vocabulary_size(read),
            "sha256": digest,
            "content": content if differing else None,
            "eos_token_id": hub.eos_token_id,
            "bos_token_id": hub.bos_token_id,
        }

    def _check_agreement(self, read: "tokenizers.Tokenizer") -> None:
        """Raises DataError if transformers does more than the rules of its tokenizer, as with split_special_tokens."""
        added = [token.content for token in read.get_added_tokens_decoder().values()]
        together = "".join(map(_probe, added))
        apart = [] if self._agrees(together, read) else [*map(_probe, added), together]
        for text in (_PROBE, *apart):
            if not self._agrees(text, read):
                token = text.splitlines()[0]
                raise DataError(
                    f"{self._folder / self._names(token)}: transformers encodes {token!r} otherwise than the rules of "
                    f"its tokenizer, by an option or a class ({type(self._hub).__name__}) that no tokenizer.json can "
                    "have: take the option out, or save the tokenizer again with save_pretrained"
                )

    def _agrees(self, text: str, read: "tokenizers.Tokenizer") -> bool:
        return self._ids(text, False) == encoded(read, text).ids

    def _names(self, token: str) -> str:
        """Returns the name of the first file beside tokenizer.json that names a token."""
        for path in [self._folder / TOKENIZER_CONFIG, *_others(self._folder)]:
            if path.suffix == ".json" and path.is_file() and token in path.read_text("utf-8", errors="replace"):
                return path.name
        return TOKENIZER_CONFIG

    def _ids(self, text: str, with_special: bool) -> list[int]:
        return list(self._hub(text, add_special_tokens=with_special, verbose=False)["input_ids"])

    def _spans(self, text: str) -> list[Any]:
        encoding = encoded(self._hub.backend_tokenizer, text, offsets=True)
        return [encoding.ids, encoding.offsets]

    def _decode(self, ids: list[int]) -> str:
        return str(self._hub.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


_PROBE = "A b  c\n\n\td 12345 naïve 漢字 🙂 it's <s> </s> x."


def _probe(token: str) -> str:
    """Returns a text that shows what stands around an added token: the token first, and alone on its line."""
    return f"{token}\na{token}b {token} c\t{token}{token}  {token}\n d{token}"
