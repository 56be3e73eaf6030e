"""All steps of a run as read from files that are whole, cut, hostile or of an older version."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launch.inspection import history
from launch.inspection.history import RunHistory, read_columns
from launch.inspection.run_files import RunFiles
from megalite.config import ConfigError, load_config
from tests.unit.launch.inspection.conftest import MakeRun


def columns_of(tmp_path: Path, *lines: object) -> dict[str, np.ndarray]:
    path = tmp_path / "metrics.jsonl"
    texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    path.write_bytes(b"\n".join(texts) + b"\n")
    return read_columns(path, [])


def test_every_number_of_every_step_has_its_place(tmp_path: Path) -> None:
    """Blocks meet: a name that appears late, or ends early, must not shift the steps that have it."""
    steps = range(1, 8292)  # of some blocks
    late, early = 5000, 50
    records = [
        {"step": step, "loss": 1 / step, "parts_s": {"forward": step * 2.0}, "skipped": step % 2 == 0}
        | ({"evaluation_loss": step + 0.5} if step == late else {})
        | ({"save_blocked_s": step + 0.25} if step == early else {})
        for step in steps
    ]
    columns = columns_of(tmp_path, *records)
    assert columns["step"].tolist() == list(steps)
    assert columns["loss"].tolist() == [1 / step for step in steps]
    assert columns["parts_s/forward"].tolist() == [2.0 * step for step in steps]
    assert columns["skipped"].tolist() == [step % 2 == 0 for step in steps]
    for name, step, value in (("evaluation_loss", late, late + 0.5), ("save_blocked_s", early, early + 0.25)):
        assert np.flatnonzero(np.isfinite(columns[name])).tolist() == [step - 1], name
        assert columns[name][step - 1] == value, name


def test_sources_have_columns_those_with_the_most_targets_first(tmp_path: Path) -> None:
    """A run on thousands of sources must not push the other numbers out."""
    names = [f"s{place:03}" for place in range(300)]
    records = [
        {"step": 100 * number, "loss": 3.0, "tokens_seen": number}
        | {"source_losses": {name: number + place / 1000 for place, name in enumerate(names)}}
        | {"source_targets": {name: 1 + place for place, name in enumerate(names)}}
        for number in (1, 2)
    ]
    quiet = {
        "step": 150,
        "loss": 3.0,
        "tokens_seen": 9,
        "source_losses": {"s299": 0.5, "s298": "x"},
        "source_targets": 3,
    }
    columns = columns_of(tmp_path, records[0], quiet, records[1])
    kept = sorted(name for name in columns if "/" in name)
    assert kept == [f"source_losses/{name}" for name in names[-history.MOST_SOURCES :]]
    assert columns["source_losses/s299"].tolist() == [1.299, 0.5, 2.299]
    assert np.isnan(columns["source_losses/s298"][1]) and columns["tokens_seen"].tolist() == [1, 9, 2]


def test_the_last_record_of_a_step_counts(tmp_path: Path) -> None:
    columns = columns_of(tmp_path, *({"step": step, "loss": loss} for step, loss in [(1, 9), (2, 8), (3, 7), (2, 5)]))
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["loss"].tolist() == [9, 5, 7]


def test_what_is_no_number_is_unknown_and_costs_no_other(tmp_path: Path) -> None:
    nested = b'{"step": 9, "loss": ' + b"[" * 100_000
    columns = columns_of(
        tmp_path,
        *(b"\xff\xfe", b"[1]", b'"step"', b"{", nested, b'{"step": 1e999, "loss": 1}', b'{"step": NaN}'),
        *({"step": value, "loss": 1} for value in (None, "3", [3], {}, -1, 0, 2.5, 10**400)),
        {"step": 1, "loss": "<script>", "grad_norm": 10**400, "samples": [0, 4], "parts_s": 3, "tokens_seen": 1e300},
        {"step": 2, "loss": 2.0, "grad_norm": 1, "parts_s": {"forward": "x", "backward": 2, "hostile": 1}},
        b'{"step": 3, "loss": NaN, "grad_norm": Infinity}',
        b'{"step": 4, "lo',
    )
    assert columns["step"].tolist() == [1, 2, 3]
    assert columns["loss"].tolist() == pytest.approx([np.nan, 2.0, np.nan], nan_ok=True)
    assert columns["grad_norm"].tolist() == pytest.approx([np.nan, 1.0, np.nan], nan_ok=True)
    assert columns["parts_s/backward"].tolist() == pytest.approx([np.nan, 2.0, np.nan], nan_ok=True)
    assert not {"samples", "tokens_seen", "parts_s/hostile", "parts_s/forward"} & set(columns)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@given(st.lists(st.dictionaries(st.sampled_from(["step", "loss", "parts_s", "time", "\x00"]), ANY), max_size=6))
def test_no_value_ends_the_reading(tmp_path_factory: pytest.TempPathFactory, records: list[dict[str, object]]) -> None:
    columns = columns_of(tmp_path_factory.mktemp("run"), *records)
    assert {len(column) for column in columns.values()} == {len(columns["step"])}
    assert all(np.isfinite(columns["step"]))


def test_of_a_huge_file_lines_are_left_out_but_no_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    records = [{"step": step, "loss": 1.0} | ({"evaluation_loss": 2.0} if step == 8 else {}) for step in range(1, 101)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    monkeypatch.setattr(history, "LARGEST_BYTES", path.stat().st_size // 3 - 1)
    columns = read_columns(path, problems)
    assert columns["step"].tolist() == sorted({*range(1, 101, 4), 8})
    assert columns["evaluation_loss"][columns["step"] == 8].tolist() == [2.0]
    assert problems == [f"{path} is large: one line of 4 was read"]


def test_a_run_of_an_older_version_has_no_parts(make_run: MakeRun) -> None:
    found = RunHistory.read(make_run(steps=30))
    assert found.steps.tolist() == list(range(1, 31))
    assert (found.parts_s, found.breakdowns, found.problems) == ({}, [], ())
    assert not found.has("evaluation_loss") and np.isnan(found.column("evaluation_loss")).all()
    assert found.elapsed_s.tolist() == pytest.approx([0.9 + step for step in range(30)])


def test_time_never_falls_where_a_clock_was_set_back(make_run: MakeRun) -> None:
    folder = make_run(steps=4)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    lines[2]["time"] -= 5000
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert RunHistory.read(folder).elapsed_s.tolist() == pytest.approx([0.9, 1.9, 2.8, 5002.8 + 1])


def test_a_config_of_an_older_version_is_read_without_what_is_refused_since(make_run: MakeRun) -> None:
    """These keys of DeepSpeed were taken: `status` and `compare` would call such a run's config broken."""
    folder = make_run(steps=3)
    values = yaml.safe_load((folder / "config.yaml").read_text())
    refused = {"tensorboard": {"enabled": True}, "timers": {"throughput": {"enabled": False}}, "csv_monitor": {}}
    kept = {"steps_per_print": 9, "zero_optimization": {"sub_group_size": 7}}
    values["deepspeed"] = {**refused, "autotuning": {"enabled": False}, **kept}
    values["deepspeed"]["zero_optimization"] |= {"stage": 1}
    (folder / "config.yaml").write_text(yaml.safe_dump(values))
    found = RunFiles.read(folder)
    assert found.problems == () and found.config is not None
    assert found.config.deepspeed == {"steps_per_print": 9, "zero_optimization": {"sub_group_size": 7}}
    with pytest.raises(ConfigError) as raised:  # a new run is told all of them
        load_config(folder / "config.yaml")
    told = [next(key for key in values["deepspeed"] if f"deepspeed.{key}" in line) for line in raised.value.sentences]
    assert sorted(told) == sorted([*refused, "autotuning", "zero_optimization"])


@pytest.mark.parametrize("contents", [None, b"", b"\0" * 100, b'{"step": 1'])
def test_damaged_files_are_told_apart_from_missing_ones(make_run: MakeRun, contents: bytes | None) -> None:
    folder = make_run(steps=3)
    for name in ("metrics.jsonl", "steps.jsonl", "receipt.json", "config.yaml", "events.jsonl"):
        (folder / name).unlink(missing_ok=True)
        if contents is not None:
            (folder / name).write_bytes(contents)
    found = RunHistory.read(folder)
    assert len(found.steps) == len(found.elapsed_s) == 0
    assert found.breakdowns == []
    told = {name for name in ("receipt.json", "config.yaml", "events.jsonl") if name in " ".join(found.problems)}
    assert told == (set() if contents is None else {"receipt.json", "config.yaml", "events.jsonl"})


def test_a_file_of_more_numbers_than_memory_is_for_is_thinned_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of 127 names and millions of short ones took a gigabyte and more, of each number once for each name."""
    monkeypatch.setattr(history, "MOST_NUMBERS", 20_000)
    lines = [{"step": step, "loss": float(step)} | ({"evaluation_loss": 1.0} if step % 5000 == 1 else {})
             for step in range(1, 60_000)]  # fmt: skip
    path, problems = tmp_path / "metrics.jsonl", list[str]()
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    columns = read_columns(path, problems)
    assert sum(map(len, columns.values())) < 3 * 20_000 + 3 * 9000  # and a block
    assert problems and "not all are drawn" in problems[0]
    assert (columns["step"] == columns["loss"]).all() and columns["step"][-1] == 59_999
    evaluated = columns["step"][np.isfinite(columns["evaluation_loss"])]
    assert evaluated.tolist() == list(range(1, 60_000, 5000))
