"""A checkpoint that was tampered with or made up gets one sentence: no traceback, no code run, nothing read outside
its folder."""

from __future__ import annotations

import json
import os
import pickle
import re
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from launch.checkpoints.verification import verify_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, find_latest
from tests.helpers.damaging import FILES, FIRST, SECOND, forge, put, read_all


def set_shape(*shape: Any) -> Callable[[Path], None]:
    return lambda folder: forge(folder, lambda m: m["tensors"].update({"norm.weight": shape}))


def set_field(**values: Any) -> Callable[[Path], None]:
    return lambda folder: forge(folder, lambda m: m.update(values))


def name_file(name: str) -> Callable[[Path], None]:
    """The manifest names a file elsewhere, which exists there, with its size and digest."""

    def change(folder: Path) -> None:
        elsewhere = folder.parent / "secret.safetensors"
        shutil.copyfile(folder / FIRST, elsewhere)
        name_there = name.replace("ELSEWHERE", str(elsewhere))
        forge(folder, lambda m: m["files"].update({name_there: m["files"].pop(FIRST)}))

    return change


def manifest_text(text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / MANIFEST).write_text(text) and None


def replace_text(folder: Path, old: str, new: str) -> None:
    """Without the digest, which a forger would compute anew."""
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(re.sub('"digest": ?"[0-9a-f]*"', '"digest": ""', text.replace(old, new, 1)))


def deeply_nested(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    (folder / MANIFEST).write_text(text.replace('"config": {', f'"config": {{"x": {nested}, ', 1))


HOSTILE_MANIFESTS: dict[str, Callable[[Path], object]] = {
    "negative shape": set_shape(-3),
    "huge shape": set_shape(1 << 62),
    "shape beyond 64 bits": set_shape(1 << 70),
    "huge product": set_shape(*[1 << 40] * 5),
    "more than can be printed": set_shape(*[1 << 62] * 5000),
    "claims of a terabyte": set_shape(1 << 38),
    "shape of no dimensions": set_shape(),
    "empty dimension": set_shape(0),
    "shape that is a fraction": set_shape(1.5),
    "shape of another rank": set_shape(3, 1),
    "larger than stored": set_shape(4),
    "smaller than stored": set_shape(2),
    "many dimensions": set_shape(*[1] * 5000),
    "NaN step": set_field(step=float("nan")),
    "a key twice": lambda f: replace_text(f, '"state": {', '"state": {"a": 1, "a": 2, '),
    "a field twice": lambda f: replace_text(f, '"state": {', '"step": 7, "state": {'),
    "NaN in the state": set_field(state={"losses": [float("nan")]}),
    "infinity in the config": set_field(config={"a": float("-inf")}),
    "a number beyond all floats": lambda f: replace_text(f, '"state": {', '"state": {"a": 1e999, '),
    "infinite step": set_field(step=float("inf")),
    "negative step": set_field(step=-1),
    "step of 5,000 digits": manifest_text('{"step": ' + "9" * 5000 + "}"),
    "optimizer steps beyond 64 bits": set_field(optimizer_steps=1 << 80),
    "no steps": lambda f: forge(f, lambda m: m.pop("step")),
    "unknown field": set_field(surprise=1),
    "another format": set_field(format="megalite-checkpoint-2"),
    "another version": set_field(version=3),
    "moments that are not there": set_field(moments=["exp_avg", "exp_avg_sq"]),
    "moment with an escape sequence": set_field(moments=["\x1b[2J"]),
    "tensor with a newline": lambda f: forge(f, lambda m: m["tensors"].update({"a\nb": [1]})),
    "tensor that is not there": lambda f: forge(f, lambda m: m["tensors"].update({"lm_head.weight": [1]})),
    "tensor left out of the manifest": lambda f: forge(f, lambda m: m["tensors"].pop("norm.weight")),
    "path to the folder above": name_file("../secret.safetensors"),
    "absolute path": name_file("ELSEWHERE"),
    "path that is the folder": name_file("."),
    "path that is the folder above": name_file(".."),
    "empty path": name_file(""),
    "path with a null byte": name_file("a\0b"),
    "path with an escape sequence": name_file("\x1b[2Ja"),
    "path too long": name_file("a" * 5000),
    "size of a file that is negative": lambda f: forge(f, lambda m: m["files"][FIRST].update(size=-1)),
    "file left out of the manifest": lambda f: forge(f, lambda m: m["files"].pop(SECOND)),
    "deeply nested": deeply_nested,
    "eight gigabytes": lambda folder: os.truncate(folder / MANIFEST, 8 << 30),  # a hole: it takes no room
    "empty": manifest_text(""),
    "a list": manifest_text("[]"),
    "not UTF-8": lambda f: (f / MANIFEST).write_bytes(b'{"format": "\xff"}'),
    "half a surrogate": manifest_text('{"format": "\\ud800"}'),
    "a folder": lambda f: (f / MANIFEST).unlink() or (f / MANIFEST).mkdir(),
    "a pipe": lambda f: (f / MANIFEST).unlink() or os.mkfifo(f / MANIFEST),
}


@pytest.mark.parametrize("harm", HOSTILE_MANIFESTS)
def test_a_hostile_manifest_gets_one_sentence(harm: str, folder: Path) -> None:
    """Within 2 GB of address space more than now: no claim is believed before it is checked."""
    HOSTILE_MANIFESTS[harm](folder)
    with at_most(2 << 30), pytest.raises(CheckpointError):
        read_all(folder)
    assert not verify_checkpoint(folder, deep=False).passed


class at_most:
    """Limits how much memory this process may ask for besides what it has."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        self._before = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + self._size, self._before[1]))

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_AS, self._before)


MARKER = "MEGALITE_WAS_RUN"


class Payload:
    """Unpickled, it leaves a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self._path,))


def header_of(folder: Path, name: str) -> tuple[dict[str, Any], bytes]:
    data = (folder / name).read_bytes()
    length = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def forge_header(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Changes the header of the first file, whose size and digest are made to fit."""

    def forged(folder: Path) -> None:
        header, numbers = header_of(folder, FIRST)
        change(header)
        text = json.dumps(header).encode()
        put(folder, FIRST, struct.pack("<Q", len(text)) + text + numbers)

    return forged


def rename_entry(key: str, new: str) -> Callable[[Path], None]:
    return forge_header(lambda header: header.update({new: header.pop(key)}))


MATRIX, VECTOR = "weight/layers.0.mlp.weight@0,0", "weight/norm.weight@0"

HOSTILE_FILES: dict[str, Callable[[Path], object]] = {
    "a pickle": lambda f: put(f, FIRST, pickle.dumps(Payload(f.parent / MARKER))),
    "a pickled torch file": lambda f: (
        torch.save(Payload(f.parent / MARKER), f / FIRST) or put(f, FIRST, (f / FIRST).read_bytes())
    ),
    "empty": lambda f: put(f, FIRST, b""),
    "a header of a gigabyte": lambda f: put(f, FIRST, struct.pack("<Q", 1 << 30) + b"{}"),
    "a header of 2**64": lambda f: put(f, FIRST, b"\xff" * 64),
    "a header of nothing": lambda f: put(f, FIRST, struct.pack("<Q", 2) + b"{}"),
    "a header deeply nested": lambda f: put(f, FIRST, struct.pack("<Q", 200_000) + b"[" * 200_000),
    "numbers outside the file": forge_header(lambda h: h[MATRIX].update(data_offsets=[0, 1 << 40])),
    "numbers before the file": forge_header(lambda h: h[MATRIX].update(data_offsets=[-8, 40])),
    "a claim of a terabyte": forge_header(lambda h: h[MATRIX].update(shape=[1 << 38, 1])),
    "another dtype": forge_header(lambda h: h[MATRIX].update(dtype="I32")),
    "a block twice": lambda f: put(f, SECOND, (f / FIRST).read_bytes()),
    "overlapping blocks": rename_entry(MATRIX, "weight/layers.0.mlp.weight@1,0"),
    "a block outside": rename_entry(MATRIX, "weight/layers.0.mlp.weight@4,0"),
    "a block far outside": rename_entry(MATRIX, f"weight/layers.0.mlp.weight@{1 << 70},0"),
    "a block before the start": rename_entry(MATRIX, "weight/layers.0.mlp.weight@-1,0"),
    "a corner of another rank": rename_entry(MATRIX, "weight/layers.0.mlp.weight@0"),
    "a corner that is no number": rename_entry(MATRIX, "weight/layers.0.mlp.weight@0,x"),
    "a corner of 5,000 digits": rename_entry(VECTOR, f"weight/norm.weight@{'9' * 5000}"),
    "an unknown tensor": rename_entry(VECTOR, "weight/\x1b[2J\n@0"),
    "an unknown kind": rename_entry(VECTOR, "grad/norm.weight@0"),
    "no key at all": rename_entry(VECTOR, ""),
}


@pytest.mark.parametrize("harm", HOSTILE_FILES)
def test_a_hostile_file_gets_one_sentence(harm: str, folder: Path) -> None:
    HOSTILE_FILES[harm](folder)
    with at_most(2 << 30), pytest.raises(CheckpointError):
        read_all(folder)
    verified = verify_checkpoint(folder, deep=True)
    assert not verified.passed and all(problem.isprintable() for problem in verified.problems)
    assert not (folder.parent / MARKER).exists(), "code of the file was run"


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("target", ["a file like it", "a device", "nothing", "itself"])
def test_a_link_is_not_followed(name: str, target: str, folder: Path, tmp_path: Path) -> None:
    """A link to a file with the right bytes outside the folder is refused for being one."""
    outside = shutil.move(folder / name, tmp_path / "outside")
    places = {"a file like it": outside, "a device": "/dev/zero", "nothing": "/nowhere", "itself": folder / name}
    (folder / name).symlink_to(places[target])
    with pytest.raises(CheckpointError) as told:
        read_all(folder)
    if target == "a file like it":
        assert f"{name} is a link" in str(told.value) or f"{name}: is a link" in str(told.value)


def test_a_resume_passes_over_all_of_them(whole: Path, tmp_path: Path) -> None:
    """One line each, newest first, and the whole one behind them is taken."""
    shutil.copytree(whole, tmp_path / "step_00000001")
    harms = [harm for name, harm in HOSTILE_MANIFESTS.items() if name in AT_ONCE]
    for step, harm in enumerate(harms, start=2):
        folder = shutil.copytree(whole, tmp_path / f"step_{step:08d}")
        forge(folder, lambda m, step=step: m.update(step=step))
        harm(folder)
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "step_00000001"
    assert len(skipped) == len(harms) and all(line.isprintable() for line in skipped)


AT_ONCE = set(HOSTILE_MANIFESTS) - {
    *("shape of another rank", "larger than stored", "smaller than stored", "many dimensions"),
    *("moments that are not there", "tensor that is not there", "tensor left out of the manifest"),
    "file left out of the manifest",
}
"""Those that the manifest and the sizes tell; the others need the files' headers."""
