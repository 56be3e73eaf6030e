"""The files of a tokenizer in a Hugging Face folder: which there are, and copies of them. No torch here."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from megalite.checkpoint.errors import CheckpointError

TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    *(TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "chat_template.json", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model"),
    *("tekken.json", "vocab.json", "vocab.txt", "merges.txt"),
)
MORE_TEMPLATES = "additional_chat_templates"  # a folder of .jinja files


def tokenizer_files(tokenizer: Path) -> list[Path]:
    """Lists the files of a tokenizer with its chat templates; `tokenizer` is its folder or its tokenizer.json."""
    folder = tokenizer.parent if tokenizer.name == TOKENIZER else tokenizer
    named = [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()]
    return named + sorted(path for path in (folder / MORE_TEMPLATES).glob("*.jinja") if path.is_file())


def copy_tokenizer(files: Iterable[Path], folder: Path) -> None:
    """Copies a tokenizer's files unchanged. Raises CheckpointError for a link that leads out of its folder."""
    listed = list(files)
    check_tokenizer_links(listed)
    for path in listed:
        target = folder / MORE_TEMPLATES if path.parent.name == MORE_TEMPLATES else folder
        target.mkdir(exist_ok=True)
        shutil.copyfile(path, target / path.name)


def check_tokenizer_links(files: Iterable[Path]) -> None:
    """Raises CheckpointError for a link that leads out of its folder.

    The hub's cache is made of links to its folder of blobs; any other could put a private file into an export.
    """
    for path in files:
        real, home = path.resolve(), path.parent.resolve()
        if home not in real.parents and not any(parent / "blobs" == real.parent for parent in home.parents):
            raise CheckpointError(f"{path}: is a link that leads out of its folder: copy the file itself")
