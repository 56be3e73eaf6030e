"""Escape sequences in every file and from every host that a command reads: none reaches the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cli.app import main
from tests.helpers.damaging import forge, write
from tests.helpers.hub_models import HUB_MODELS

TITLE, CURSOR = "\x1b]0;owned\x07", "\x9b2J\u202e"
HARM = TITLE + CURSOR


def config(text: str) -> Callable[[Path], list[str]]:
    def write(folder: Path) -> list[str]:
        (folder / "c.yaml").write_text(text)
        return ["config", "show", str(folder / "c.yaml")]

    return write


def override(folder: Path) -> list[str]:
    (folder / "c.yaml").write_text("run_dir: x\n")
    return ["config", "show", str(folder / "c.yaml"), f"{HARM}.a=1"]


def word(folder: Path) -> list[str]:
    return ["config", "show", f"--{HARM}"]


def config_json(key: str, value: object) -> Callable[[Path], list[str]]:
    def make(folder: Path) -> list[str]:
        path = HUB_MODELS[0].save(folder / "hf") / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
        return ["import", str(folder / "hf"), str(folder / "out"), "--dry-run"]

    return make


def manifest(folder: Path) -> list[str]:
    forge(write(folder / "step_00000001"), lambda values: values.update({HARM: 1}))
    return ["checkpoint", "show", str(folder / "step_00000001")]


def hostfile(folder: Path) -> list[str]:
    (folder / "hosts").write_text(f"{HARM} slots=1\n")
    return ["doctor", "--hostfile", str(folder / "hosts")]


def ssh(folder: Path) -> list[str]:
    (folder / "ssh").write_text(f"#!/bin/sh\nprintf '%s\\n' '{HARM}' >&2\nexit 255\n")
    (folder / "ssh").chmod(0o755)
    (folder / "hosts").write_text("owned.invalid slots=1\n")
    return ["doctor", "--hostfile", str(folder / "hosts")]


def prepared(source: str, folder: Path) -> list[str]:
    out, tokenizer = str(folder / "out"), str(folder / "t")
    return ["prepare", source, "--output", out, "--tokenizer", tokenizer, "--train-vocab-size", "300"]


def name_of_a_file(folder: Path) -> list[str]:
    (folder / f"owned{HARM}.txt").write_bytes(b"\xff")
    return prepared(str(folder), folder)


def columns(folder: Path) -> list[str]:
    (folder / "rows.jsonl").write_text(json.dumps({HARM: "a"}))
    return prepared(f"dataset:{folder}/rows.jsonl", folder)


SOURCES: dict[str, Callable[[Path], list[str]]] = {
    "unknown option": config('run_dir: x\n"\\e]0;owned\\a\\x9b2J": 1\ntraining: {"\\e]0;owned\\a\\u202e": 2}\n'),
    "values of a config": config('run_dir: "\\e]0;owned\\a"\nmodel: {hidden_size: "\\e]0;owned\\a\\u202e"}\n'),
    "tag of YAML": config("a: !%1B%5D0;owned%07 1\n"),
    "override": override,
    "word of the command": word,
    "unknown key of config.json": config_json(HARM, 1),
    "value of config.json": config_json("hidden_act", HARM),
    "architecture of config.json": config_json("architectures", [HARM]),
    "size of config.json": config_json("hidden_size", HARM),
    "manifest": manifest,
    "hostfile": hostfile,
    "ssh": ssh,
    "name of a file": name_of_a_file,
    "columns of a data set": columns,
}


@pytest.mark.parametrize("source", SOURCES)
def test_no_escape_sequence_reaches_the_terminal(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(sys, "argv", ["megalite", *SOURCES[source](tmp_path)])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    said = "".join(capfd.readouterr())
    assert stopped.value.code and "owned" in said, "the text was not told, so nothing is shown"
    assert not any(character in said for character in "\x1b\x07\x9b\u202e"), said
    assert "Traceback" not in said
