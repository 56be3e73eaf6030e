"""The files of a tokenizer: all of them are copied, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.tokenizer_folder import copy_tokenizer, tokenizer_files


def test_every_file_of_a_tokenizer_is_carried(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    (source / "additional_chat_templates").mkdir(parents=True)
    target.mkdir()
    names = ["tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "tokenizer.model", "spiece.model"]
    names += ["special_tokens_map.json", "added_tokens.json", "chat_template.jinja", "chat_template.json"]
    names += ["additional_chat_templates/tools.jinja"]
    for name in (*names, "README.md", "additional_chat_templates/notes.txt"):
        (source / name).write_text(name)
    copy_tokenizer(tokenizer_files(source), target)
    assert {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()} == set(names)
    assert all((target / name).read_text() == name for name in names)


def test_a_link_of_the_hubs_cache_is_followed_and_one_to_elsewhere_is_not(tmp_path: Path) -> None:
    """A downloaded folder must not put a private file into what is exported, and perhaps published."""
    snapshot, blobs, target = (
        tmp_path / "models--a" / "snapshots" / "1",
        tmp_path / "models--a" / "blobs",
        tmp_path / "t",
    )
    for folder in (snapshot, blobs, target):
        folder.mkdir(parents=True)
    (blobs / "ab12").write_text("{}")
    (snapshot / "tokenizer.json").symlink_to("../../blobs/ab12")
    copy_tokenizer(tokenizer_files(snapshot), target)
    assert (target / "tokenizer.json").read_text() == "{}" and not (target / "tokenizer.json").is_symlink()
    (tmp_path / "secret").write_text("key")
    (snapshot / "vocab.json").symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match="a link that leads out of its folder"):
        copy_tokenizer(tokenizer_files(snapshot), target)
    assert not (target / "vocab.json").exists()
