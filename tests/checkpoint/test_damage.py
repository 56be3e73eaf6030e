"""A checkpoint that was damaged, tampered with or made up gets one sentence: no traceback, no code run, nothing read
outside its folder. What only reading every byte can tell, `megalite checkpoint verify --deep` does."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import struct
from collections.abc import Callable
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from launch.checkpoint_tools.facts import facts_of
from launch.checkpoint_tools.listing import list_place
from launch.checkpoint_tools.report import facts_lines, listing_table
from launch.checkpoint_tools.verification import verify_checkpoint
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import MANIFEST, Manifest, entry, find_latest, read_manifest
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import Block, commit, start, write_blocks

NUMBERS = {
    ("weight", "layers.0.mlp.weight"): torch.randn(6, 4, generator=torch.Generator().manual_seed(1)),
    ("weight", "norm.weight"): torch.arange(3.0),
    ("exp_avg", "layers.0.mlp.weight"): torch.randn(6, 4, generator=torch.Generator().manual_seed(2)),
    ("exp_avg", "norm.weight"): torch.arange(3.0) / 7,
}
FIRST, SECOND = "rank_00000_000.safetensors", "rank_00001_000.safetensors"
FILES = (MANIFEST, FIRST, SECOND)


def write(folder: Path, step: int = 1, numbers: dict[tuple[str, str], Tensor] = NUMBERS) -> Path:
    """A checkpoint of two ranks, each with half of every matrix."""
    temporary = start(folder)
    cuts = [(slice(0, 3), slice(0, 1)), (slice(3, 6), slice(1, 3))]  # rows of the matrix and of the vector
    files = {}
    for rank, (of_matrix, of_vector) in enumerate(cuts):
        blocks = []
        for (kind, name), whole in numbers.items():
            rows = of_matrix if whole.dim() == 2 else of_vector
            source = (rows, *(slice(0, n) for n in whole.shape[1:]))
            blocks.append(Block(entry(kind, name, source), whole[source].contiguous()))
        files |= write_blocks(temporary, f"rank_{rank:05d}", blocks)
    manifest = Manifest(
        step=step,
        config={"model": {"hidden_size": 4}},
        tokenizer=None,
        state={"consumed_samples": 80},
        moments=("exp_avg",),
        tensors={name: tuple(whole.shape) for (_, name), whole in numbers.items()},
        files=files,
    )
    commit(folder, manifest)
    return folder


def read_all(folder: Path) -> dict[tuple[str, str], Tensor]:
    """Everything a resume would read. CheckpointError is the only way to fail, and is one line about this folder."""
    try:
        reader = CheckpointReader(folder)
        kinds = ("weight", *reader.manifest.moments)
        return {(kind, name): reader.read(name, kind=kind) for kind in kinds for name in reader.manifest.tensors}
    except CheckpointError as error:
        sentence = str(error)
        assert sentence.isprintable() and len(sentence) < 1000, repr(sentence)
        assert str(folder) in sentence
        raise


def is_refused(folder: Path) -> bool:
    try:
        read_all(folder)
    except CheckpointError:
        return True
    return False


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whole") / "step_00000001")


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    return shutil.copytree(whole, tmp_path / whole.name)


reusing_folders = settings(max_examples=250, suppress_health_check=[HealthCheck.function_scoped_fixture])


def restored(whole: Path, folder: Path) -> None:
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
        shutil.copyfile(whole / name, folder / name)


def test_what_is_not_damaged_is_read_and_verified(folder: Path) -> None:
    """Or the tests below would show nothing."""
    assert all(torch.equal(value, NUMBERS[key]) for key, value in read_all(folder).items())
    assert verify_checkpoint(folder, deep=True).passed


@reusing_folders
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True), flipped=st.integers(1, 255))
@example(file=MANIFEST, place=0.0, flipped=1)
def test_any_byte_that_flips_is_found(whole: Path, folder: Path, file: str, place: float, flipped: int) -> None:
    """In a manifest at once, for a flipped digit of the consumed samples would show nowhere else; in a tensor file by
    the digest, and without one it is refused or read as numbers of the right shapes."""
    restored(whole, folder)
    data = bytearray((folder / file).read_bytes())
    data[int(place * len(data))] ^= flipped
    (folder / file).write_bytes(data)
    refused = is_refused(folder)
    if file == MANIFEST:
        assert refused or read_manifest(folder) == read_manifest(whole)  # white space
    else:
        problems = verify_checkpoint(folder, deep=True).problems
        assert problems and file in problems[0] and "digest differs" in problems[0]


@reusing_folders
@given(header=st.binary(min_size=1, max_size=60), place=st.floats(0, 1, exclude_max=True))
def test_any_header_is_refused_or_read(whole: Path, folder: Path, header: bytes, place: float) -> None:
    """Bytes written over a header, by someone who also fits size and digest."""
    restored(whole, folder)
    data = bytearray((folder / FIRST).read_bytes())
    length = struct.unpack("<Q", data[:8])[0]
    first = int(place * (8 + length))
    data[first : first + len(header)] = header
    put(folder, FIRST, bytes(data))
    is_refused(folder)
    verify_checkpoint(folder, deep=True)


@reusing_folders
@given(file=st.sampled_from(FILES), place=st.floats(0, 1, exclude_max=True))
@example(file=FIRST, place=0.0)
@example(file=MANIFEST, place=0.0)
def test_a_file_cut_anywhere_is_refused(whole: Path, folder: Path, file: str, place: float) -> None:
    restored(whole, folder)
    os.truncate(folder / file, int(place * (folder / file).stat().st_size))
    assert is_refused(folder)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@reusing_folders
@given(field=st.sampled_from(sorted(Manifest.model_fields)), value=json_values)
def test_any_value_of_any_field_is_refused_or_read(whole: Path, folder: Path, field: str, value: Any) -> None:
    restored(whole, folder)
    forge(folder, lambda m: m.update({field: value}))
    is_refused(folder)
    verify_checkpoint(folder, deep=True)
    table = listing_table(list_place(str(folder.parent)).rows(datetime.now(UTC)))
    assert table.row_count == 1
    if find_latest(folder)[0]:
        assert all(line.isprintable() for line in facts_lines("", facts_of(read_manifest(folder)), None))


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes the manifest as one who wants to be believed."""
    manifest = json.loads((folder / MANIFEST).read_bytes())
    change(manifest)
    manifest.pop("digest", None)
    (folder / MANIFEST).write_text(json.dumps(manifest))


def put(folder: Path, name: str, data: bytes) -> None:
    """Replaces a file, and what the manifest says of it."""
    (folder / name).write_bytes(data)
    facts = {"size": len(data), "sha256": sha256(data).hexdigest()}
    forge(folder, lambda m: m["files"].update({name: facts}))


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


def deeply_nested(folder: Path) -> None:
    text = (folder / MANIFEST).read_text()
    nested = '{"a":' * 100_000 + "1" + "}" * 100_000
    (folder / MANIFEST).write_text(text.replace('"config": {', f'"config": {{"x": {nested}, ', 1))


def huge_manifest(folder: Path) -> None:
    os.truncate(folder / MANIFEST, 8 << 30)  # a hole: it takes no room


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
    "eight gigabytes": huge_manifest,
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


def test_files_that_change_places_tell_themselves_where_they_belong(folder: Path) -> None:
    one, other = folder / FIRST, folder / SECOND
    put_first, put_second = other.read_bytes(), one.read_bytes()
    put(folder, FIRST, put_first)
    put(folder, SECOND, put_second)
    assert all(torch.equal(value, NUMBERS[key]) for key, value in read_all(folder).items())
    assert verify_checkpoint(folder, deep=True).passed


def test_a_file_of_another_step_is_found_by_its_digest(folder: Path, tmp_path: Path) -> None:
    """Same names, shapes and size: as a restore from a back-up might mix them."""
    other = write(tmp_path / "step_00000002", 2, {key: value + 1 for key, value in NUMBERS.items()})
    shutil.copyfile(other / SECOND, folder / SECOND)
    assert verify_checkpoint(folder, deep=False).passed, "nothing but the numbers differs"
    problems = verify_checkpoint(folder, deep=True).problems
    assert len(problems) == 1 and SECOND in problems[0] and "digest differs" in problems[0]


def test_a_dropped_file_is_named_and_the_gap_it_leaves_too(folder: Path) -> None:
    (folder / SECOND).unlink()
    assert f"{SECOND} is missing" in verify_checkpoint(folder, deep=False).problems[0]
    forge(folder, lambda m: m["files"].pop(SECOND))
    problems = verify_checkpoint(folder, deep=False).problems
    assert [problem.partition(": ")[2] for problem in problems] == [
        "weight of layers.0.mlp.weight is not whole: 12 of its 24 numbers are missing",
        "weight of norm.weight is not whole: 2 of its 3 numbers are missing",
        "exp_avg of layers.0.mlp.weight is not whole: 12 of its 24 numbers are missing",
        "exp_avg of norm.weight is not whole: 2 of its 3 numbers are missing",
    ]


def test_moments_that_the_manifest_leaves_out_are_found(folder: Path) -> None:
    """A resume would start with fresh ones and say nothing."""
    forge(folder, lambda m: m.update(moments=[]))
    problems = verify_checkpoint(folder, deep=False).problems
    assert problems and all("exp_avg" in problem and "manifest does not" in problem for problem in problems)


def test_every_file_that_is_wrong_has_its_line(folder: Path) -> None:
    for name in (FIRST, SECOND):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert len(verify_checkpoint(folder, deep=True).problems) == 2


@pytest.mark.parametrize("strange", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_found_when_every_byte_is_read(strange: float, tmp_path: Path) -> None:
    numbers = {key: value.clone() for key, value in NUMBERS.items()}
    numbers["exp_avg", "layers.0.mlp.weight"][4, 1:3] = strange
    folder = write(tmp_path / "step_00000001", 1, numbers)
    assert verify_checkpoint(folder, deep=False).passed
    problems = verify_checkpoint(folder, deep=True).problems
    assert len(problems) == 1 and "exp_avg of layers.0.mlp.weight has 2 numbers that are not finite" in problems[0]


def test_a_resume_passes_over_all_of_them(whole: Path, tmp_path: Path) -> None:
    """One line each, newest first, and the whole one behind them is taken."""
    shutil.copytree(whole, tmp_path / "step_00000001")
    harms = [harm for name, harm in HOSTILE_MANIFESTS.items() if name in AT_ONCE]
    for step, harm in enumerate(harms, start=2):
        harm(shutil.copytree(whole, tmp_path / f"step_{step:08d}"))
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "step_00000001"
    assert len(skipped) == len(harms) and all(line.isprintable() for line in skipped)


AT_ONCE = set(HOSTILE_MANIFESTS) - {
    "shape of another rank",
    "larger than stored",
    "smaller than stored",
    "many dimensions",
    "moments that are not there",
    "tensor that is not there",
    "tensor left out of the manifest",
    "file left out of the manifest",
}
"""Those that the manifest and the sizes tell; the others need the files' headers."""
