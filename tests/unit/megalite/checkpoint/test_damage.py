"""A checkpoint that was damaged by accident gets one sentence, and no number of it is believed. What only reading
every byte can tell, `megalite checkpoint verify --deep` does."""

from __future__ import annotations

import os
import shutil
import struct
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from launch.checkpoints.listing import list_place
from launch.checkpoints.report import listing_table, summary_lines
from launch.checkpoints.summary import summarize_checkpoint, summarize_folder
from launch.checkpoints.verification import verify_checkpoint
from megalite.checkpoint.manifest import MANIFEST, Manifest, find_latest, read_manifest
from tests.helpers.damaging import FILES, FIRST, NUMBERS, SECOND, forge, is_refused, put, read_all, write

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
    (listed,) = list_place(str(folder.parent)).checkpoints
    assert len(listing_table([summarize_folder(listed, None, datetime.now(UTC))]).rows) == 1
    if find_latest(folder)[0]:
        assert all(line.isprintable() for line in summary_lines("", summarize_checkpoint(read_manifest(folder)), None))


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
        "exp_avg of layers.0.mlp.weight is not whole: 12 of its 24 numbers are missing",
        "weight of norm.weight is not whole: 2 of its 3 numbers are missing",
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


def test_a_copy_under_another_steps_name_is_not_that_step(whole: Path, tmp_path: Path) -> None:
    """A back-up of step 1 that was put back as step 7 would win every resume, and six steps were trained twice."""
    shutil.copytree(whole, tmp_path / "step_00000001")
    shutil.copytree(whole, tmp_path / "step_00000007")
    latest, skipped = find_latest(tmp_path)
    assert latest == tmp_path / "step_00000001"
    assert len(skipped) == 1 and "step_00000007" in skipped[0] and "is of step 1" in skipped[0]
