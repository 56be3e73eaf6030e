"""`megalite checkpoint ls|show|verify|diff|prune`, on real checkpoints, as people and programs meet it."""

from __future__ import annotations

import json
import math
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from torch import Tensor

from launch.checkpoints.difference import difference
from launch.checkpoints.report import age_text
from launch.checkpoints.summary import age_seconds
from launch.trainer.start.run_folder import lock_run_folder
from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.huggingface import folder as hugging_face
from megalite.checkpoint.manifest import WEIGHT, Manifest, entry
from megalite.checkpoint.reader import CheckpointReader
from megalite.checkpoint.writer import Block, commit, start, write_blocks
from megalite.config import load_config
from tests.conftest import write_config
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save
from tests.unit.launch.cli.test_app import MEGALITE
from tests.unit.launch.cli.test_mistakes import command

LAYOUT = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 1}
CONFIG = {"model": {"model_type": "llama", "hidden_size": 4}, "precision": {"dtype": "bf16"}}
HOUR = 3600


def write(
    root: Path,
    step: int,
    tensors: dict[str, Tensor] | None = None,
    moments: dict[str, Tensor] | None = None,
    **facts: Any,
) -> Path:
    """A checkpoint `root/step_XXXXXXXX` of one rank; `moments` are exp_avg."""
    folder = root / f"step_{step:08d}"
    tensors = {"a.weight": torch.arange(12.0).view(3, 4), "b.bias": torch.arange(5.0)} if tensors is None else tensors
    blocks = [
        Block(entry(kind, name, tuple(slice(0, n) for n in value.shape)), value)
        for kind, named in ((WEIGHT, tensors), ("exp_avg", moments or {}))
        for name, value in named.items()
    ]
    files = write_blocks(start(folder), "rank_00000", blocks)
    defaults: dict[str, Any] = {
        "written": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(time.time() - 3.5 * HOUR)),
        "layout": LAYOUT,
        "config": CONFIG,
        "tokenizer": None,
        "state": {"step": step, "consumed_samples": 8 * step, "tokens_seen": 80_000 * step},
        "moments": ("exp_avg",) if moments else (),
    }
    shapes = {name: tuple(value.shape) for name, value in tensors.items()}
    commit(folder, Manifest(step=step, tensors=shapes, files=files, **(defaults | facts)))
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder: steps 1 (damaged), 2, 3 (weights only), 10, and what an interrupted save left."""
    root = tmp_path / "run" / "checkpoints"
    write(root, 2, evaluation_loss=2.5)
    write(root, 3, layout={}, state={}, config={})
    next(write(root, 1).glob("*.safetensors")).unlink()
    write(root, 10, evaluation_loss=1.25)
    (root / ".step_00000011.tmp").mkdir()
    return tmp_path / "run"


class Command:
    """`megalite checkpoint ...` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._patch, self._capture = monkeypatch, capfd

    def __call__(self, *words: object, code: int = 0) -> str:
        """What it prints to stdout, or, where it exits with 2, to stderr."""
        found, out, err = command(["checkpoint", *map(str, words)], self._patch, self._capture)
        assert found == code, (out, err)
        return err if code == 2 else out

    def json(self, *words: object, code: int = 0) -> Any:
        return json.loads(self(*words, "--json", code=code))


@pytest.fixture
def checkpoint(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    return Command(monkeypatch, capfd)


def test_a_listing_has_a_row_per_checkpoint_and_a_line_on_what_is_none(run: Path, checkpoint: Command) -> None:
    shown = checkpoint("ls", run)
    rows = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ step")}
    assert list(rows) == ["step_00000001", "step_00000002", "step_00000003", "step_00000010"]
    assert all(
        word in rows["step_00000010"] for word in ("(latest)", "3 h", "tp2 pp2 dp2 zero1 bf16", "1.2500", "full")
    )
    assert "(latest)" not in rows["step_00000002"] and "2.5000" in rows["step_00000002"]
    assert "weights only" in rows["step_00000003"] and "one process" in rows["step_00000003"]
    assert "complete" in rows["step_00000003"] and "not a complete" in rows["step_00000001"]
    assert "rank_00000_000.safetensors is missing" in " ".join(shown.replace("│", "").split())
    assert "an interrupted save left a folder, .step_00000011.tmp" in shown


@pytest.mark.parametrize("place", ["{run}", "{run}/", "{run}/checkpoints", "file://{run}", "memory://listed"])
def test_a_listing_for_programs_is_the_same_from_any_place(place: str, run: Path, checkpoint: Command) -> None:
    if place.startswith("memory"):
        store = fsspec.filesystem("memory")
        store.rm("/listed", recursive=True) if store.exists("/listed") else None
        store.put(str(run), "/listed", recursive=True)
    listing = checkpoint.json("ls", place.format(run=run))
    rows = listing["checkpoints"]
    assert [row["step"] for row in rows] == [1, 2, 3, 10]
    assert [row["problem"] is None for row in rows] == [False, True, True, True]
    assert [row["is_latest"] for row in rows] == [False, False, False, True]
    assert [row["holds"] for row in rows[1:]] == ["full", "weights only", "full"]
    assert rows[3]["evaluation_loss"] == 1.25 and 3 * HOUR < rows[3]["age_s"] < 4 * HOUR
    files = (run / "checkpoints" / "step_00000010").iterdir()
    assert rows[3]["size"] == sum(path.stat().st_size for path in files)
    if not place.startswith("memory"):  # it has no empty folders
        assert listing["left_overs"] == [".step_00000011.tmp"]


@pytest.mark.parametrize(
    ("written", "age"),
    [
        ("2024-05-06T10:00:00+0000", "2 h"),
        ("2024-05-06T14:00:01+0200", "59 s"),
        ("2024-05-01T10:00:00Z", "5 d"),
        ("2024-05-06T12:01:01+00:00", "in the future"),  # a clock was set back
        ("2024-05-06T10:00:00", ""),  # of some time zone
        ("yesterday", ""),
        ("", ""),
    ],
)
def test_an_age_is_told_where_it_is_known(written: str, age: str) -> None:
    manifest = Manifest(step=1, written=written, config={}, tokenizer=None, state={}, tensors={}, files={})
    assert age_text(age_seconds(manifest, datetime(2024, 5, 6, 12, 1, tzinfo=UTC))) == age


def test_one_checkpoint_is_listed_under_its_name(
    run: Path, checkpoint: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run / "checkpoints" / "step_00000010")
    for place in (".", run / "checkpoints" / "step_00000010"):
        (row,) = checkpoint.json("ls", place)["checkpoints"]
        assert row["name"] == "step_00000010" and row["is_latest"]


def test_the_facts_of_the_newest_whole_one_are_shown(run: Path, checkpoint: Command) -> None:
    (run / "checkpoints" / "step_00000010" / "manifest.json").write_text("{")
    shown = checkpoint("show", run, "--tensors")
    assert "passed over:" in shown and "step_00000010" in shown.split("checkpoint:")[0]
    for fact in ("step_00000003", "weights only: 17 parameters in 2 tensors", "a.weight", "3 x 4", "3 h ago"):
        assert fact in shown, fact
    shown = checkpoint("show", run / "checkpoints" / "step_00000002")
    for fact in (
        "consumed_samples 16",
        "tokens_seen 160,000",
        "tp2 pp2 dp2",
        "2.500000",
        "model_type llama, hidden_size 4",
    ):
        assert fact in shown, fact
    assert "3 x 4" not in shown
    facts = checkpoint.json("show", f"file://{run}", "--tensors")
    assert facts["step"] == 3 and facts["tensor_shapes"] == {"a.weight": [3, 4], "b.bias": [5]}
    assert facts["size"] == sum(facts["files"].values())


def test_looking_needs_no_torch(run: Path) -> None:
    """It is what one does while a run goes on."""
    code = (
        "import sys; from launch.cli.app import app\n"
        f"for line in ('ls {run}', 'show {run}', 'ls file://{run}', 'prune {run} --keep-last 1 --dry-run'):\n"
        "    app(['checkpoint', *line.split()], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules and 'deepspeed' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_names_are_printed_as_they_are(tmp_path: Path, checkpoint: Command) -> None:
    """Not as markup of rich, whose unknown colours raise, and not as escape sequences of the terminal."""
    folder = write(tmp_path, 1, {"[red]a[/blue]": torch.ones(1)}, config={"model": {"model_type": "[/x]\x1b[2J\n"}})
    shown = checkpoint("show", folder, "--tensors") + checkpoint("ls", tmp_path)
    assert "[red]a[/blue]" in shown and "[/x]?[2J?" in shown and "\x1b" not in shown


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_verify_tells_a_whole_checkpoint_from_a_damaged_one(run: Path, checkpoint: Command) -> None:
    """What else can be wrong: tests/unit/megalite/checkpoint/test_hostile_checkpoints.py."""
    bad = checkpoint("verify", run, code=1)
    assert bad.count(": good:") == 3 and "step_00000001: not a complete checkpoint" in bad
    shutil.rmtree(run / "checkpoints" / "step_00000001")
    assert checkpoint("verify", run, "--deep").count("every digest and number") == 3
    flip(next((run / "checkpoints" / "step_00000003").glob("*.safetensors")))
    assert checkpoint("verify", run).count(": good:") == 3
    lines = checkpoint("verify", run, "--deep", code=1).splitlines()
    assert len(lines) == 3 and sum("digest differs" in line for line in lines) == 1
    verdict = checkpoint.json("verify", run / "checkpoints" / "step_00000003", "--deep", code=1)
    assert not verdict["passed"] and len(verdict["checkpoints"][0]["problems"]) == 1


A, B = torch.tensor([[1.0, -8.0], [2.0, 0.0]]), torch.tensor([4.0, 5.0])


def changed(tensor: Tensor, place: tuple[int, ...], value: float) -> Tensor:
    result = tensor.clone()
    result[place] = value
    return result


def test_equal_states_are_equal_whatever_wrote_them(tmp_path: Path, checkpoint: Command) -> None:
    """Layout, config and what guards remember of past losses may differ: a run goes on alike from both."""
    one = write(tmp_path / "one", 2, {"a": A, "b": B}, {"a": A, "b": B}, state={"seed": 1, "guard": {"mean": 0.1}})
    other = write(
        tmp_path / "other",
        2,
        {"b": B, "a": A},
        {"a": A, "b": B},
        state={"seed": 1, "guard": {"mean": 0.2}},
        layout={},
        config={"model": {"model_type": "llama", "hidden_size": 4}, "precision": {"dtype": "fp32"}},
    )
    shown = checkpoint("diff", one, tmp_path / "other")
    assert "equal: 4 of 4 tensors have the same bits" in shown
    assert "precision.dtype: bf16 | fp32" in shown and "layout.zero_stage: 1 | (none)" in shown
    found = checkpoint.json("diff", one, other)
    assert found["equal"] and found["progress"] == [] and len(found["settings"]) == 6


@pytest.mark.parametrize("block_bytes", [1, 1 << 20])
def test_a_difference_is_measured_and_the_worst_comes_first(
    block_bytes: int, tmp_path: Path, checkpoint: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relative to the tensor's largest number, which may lie in another block of rows than the difference."""
    monkeypatch.setattr(hugging_face, "BLOCK_BYTES", block_bytes)
    one = write(tmp_path / "one", 2, {"a": A, "b": B, "c": B}, {"a": A, "b": B, "c": B})
    two = write(
        tmp_path / "two",
        2,
        {"a": changed(A, (1, 1), 0.5), "b": changed(B, (0,), 3.0), "c": changed(B, (1,), math.nan)},
        {"a": changed(A, (1, 1), -0.0), "b": B, "c": B},
    )
    found = checkpoint.json("diff", one, two, code=1)["tensors"]
    assert [(t["kind"], t["name"]) for t in found[:4]] == [
        (WEIGHT, "c"),
        (WEIGHT, "b"),
        (WEIGHT, "a"),
        ("exp_avg", "a"),
    ]
    assert [t["max_abs"] for t in found] == ["nan", 1.0, 0.5, 0.0, 0.0, 0.0]
    assert [t["max_rel"] for t in found] == ["nan", 0.2, 0.0625, 0.0, 0.0, 0.0]
    assert [t["different"] for t in found] == [1, 1, 1, 1, 0, 0]  # -0.0 is another zero
    lines = checkpoint("diff", one, two, "--tolerance", 0.1, code=1).splitlines()
    verdicts = [line.split("│")[-2].strip() for line in lines if line.startswith("│")]
    assert verdicts == ["differs", "differs", "within", "within"]
    assert lines[-1].startswith("different: 2 tensors are beyond the tolerance 0.1")


def test_strange_numbers_are_equal_to_themselves_and_hide_no_difference(tmp_path: Path, checkpoint: Command) -> None:
    """A checkpoint of a run that diverged: neither is its NaN a difference, nor infinity the measure of the others."""
    strange = torch.tensor([math.nan, math.inf, 4.0])
    one = write(tmp_path / "one", 2, {"a": strange})
    assert checkpoint.json("diff", one, write(tmp_path / "same", 2, {"a": strange}))["equal"]
    other = write(tmp_path / "other", 2, {"a": changed(strange, (2,), 3.0)})
    assert checkpoint.json("diff", one, other, code=1)["tensors"][0]["max_rel"] == 0.25


def test_a_tolerance_is_kept(tmp_path: Path, checkpoint: Command) -> None:
    one = write(tmp_path / "one", 2, {"a": A})
    two = write(tmp_path / "two", 2, {"a": changed(A, (0, 1), -8.5)})
    assert "max rel" in checkpoint("diff", one, two, "--tolerance", 0.05, code=1)
    assert "within the tolerance 0.06" in checkpoint("diff", one, two, "--tolerance", 0.06)


def test_what_only_one_has_and_other_progress_are_differences(tmp_path: Path, checkpoint: Command) -> None:
    one = write(tmp_path / "one", 2, {"a": A, "b": B}, {"a": A, "b": B})
    two = write(tmp_path / "two", 3, {"a": A.view(4), "c": B})
    shown = checkpoint("diff", one, two, code=1)
    for line in (
        f"only in {one}: weight b",
        f"only in {one}: exp_avg a",
        f"only in {two}: weight c",
        "shape of weight a: [2, 2] | [4]",
        "step: 2 | 3",
        "state.consumed_samples: 16 | 24",
    ):
        assert line in shown, line
    assert "their progress is not the same" in shown


def test_much_that_differs_is_cut_short_unless_all_is_asked_for(tmp_path: Path, checkpoint: Command) -> None:
    names = [f"t{i:02d}" for i in range(30)]
    one = write(tmp_path / "one", 2, {name: torch.zeros(2) for name in names})
    two = write(tmp_path / "two", 2, {name: torch.full((2,), 1.0 + i) for i, name in enumerate(names)})
    for words, count in (((), 10), (("--all",), 30)):
        shown = checkpoint("diff", one, two, *words, code=1)
        assert sum(line.startswith("│ t") for line in shown.splitlines()) == count
        assert "different: 30 tensors" in shown


def test_a_large_tensor_is_compared_a_few_rows_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hugging_face, "BLOCK_BYTES", 4 * 7 * 10)
    folder = write(tmp_path, 1, {"a": torch.randn(100, 7)})
    at_once: list[int] = []
    found = difference(CheckpointReader(folder), CheckpointReader(folder), at_once.append)
    assert found.is_equal(0.0) and sum(at_once) == 700 and max(at_once) == 70


def save_here(rank: int, case: Case, root: Path, source: Path | None) -> None:
    """Two steps, or what a checkpoint holds, saved on the case's layout; then a step more, saved too."""
    engine = engine_of(case)
    batches = [micro_batches_of(engine, case, batch) for batch in global_batches(case)]
    if source is None:
        for batch in batches[:2]:
            engine.train_step(batch, case.learning_rate)
    else:
        load_engine(engine, CheckpointReader(source), weights_only=False)
    config = case.config().model_dump(mode="json")
    assert save(engine, root, 2, config=config).failure is None
    engine.train_step(batches[2], case.learning_rate)
    assert save(engine, root, 3, config=config).failure is None


@pytest.mark.slow
def test_a_state_saved_on_another_layout_is_the_same_to_the_bit(tmp_path: Path, checkpoint: Command) -> None:
    """And a step later equal but for rounding: other sums of fp32 numbers, and Adam's division by small moments."""
    one, two = (Case(tp=2, pp=2, global_batch=6), Case(dp=2, zero=3, global_batch=6))
    run_ranks(save_here, one.world_size, one, tmp_path / "one", None)
    run_ranks(save_here, two.world_size, two, tmp_path / "two", tmp_path / "one" / "step_00000002")
    shown = checkpoint("diff", tmp_path / "one" / "step_00000002", tmp_path / "two" / "step_00000002")
    assert re.search(r"equal: (\d+) of \1 tensors have the same bits", shown)
    assert "parallel.tensor_parallel_size: 2 | 1" in shown
    checkpoint("diff", tmp_path / "one", tmp_path / "two", code=1)
    checkpoint("diff", tmp_path / "one", tmp_path / "two", "--tolerance", 1e-4)
    checkpoint("verify", tmp_path / "two", "--deep")


def steps_in(run: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("step_*"))


def test_a_dry_run_of_prune_tells_fates_and_deletes_nothing(run: Path, checkpoint: Command) -> None:
    before = sorted(run.rglob("*"))
    shown = checkpoint("prune", run, "--keep-last", 1, "--keep-every", 3, "--dry-run")
    fates = {line.split()[1]: line for line in shown.splitlines() if line.startswith("│ step")}
    assert "not complete, so no rule applies" in fates["step_00000001"]
    assert "goes" in fates["step_00000002"]
    assert "stays: a multiple of 3 steps" in fates["step_00000003"]
    assert "stays: among the newest 1" in fates["step_00000010"]
    assert "1 of 4 checkpoints go" in shown and "1 folders that interrupted saves left go" in shown
    assert sorted(run.rglob("*")) == before
    plan = checkpoint.json("prune", run, "--keep-last", 1, "--keep-best", 2, "--dry-run")
    assert [fate["name"] for fate in plan["fates"] if fate["goes"]] == ["step_00000003"] and not plan["deleted"]
    assert "among the best 2" in plan["fates"][1]["why"]


@pytest.mark.parametrize("place", ["run", "run/checkpoints"])
def test_prune_deletes_what_it_said(place: str, run: Path, checkpoint: Command) -> None:
    done = checkpoint.json("prune", run.parent / place, "--keep-last", 1, "--keep-best", 2, "--yes")
    assert done["deleted"] and steps_in(run) == [1, 2, 10]
    assert not list((run / "checkpoints").glob(".step*"))
    assert "nothing to delete" in checkpoint("prune", run, "--keep-last", 1, "--keep-best", 2, "--yes")


def test_the_newest_whole_one_stays_though_there_are_newer_damaged_ones(run: Path, checkpoint: Command) -> None:
    (run / "checkpoints" / "step_00000010" / "manifest.json").unlink()
    checkpoint("prune", run, "--keep-last", 1, "--yes")
    assert steps_in(run) == [1, 3, 10]


def test_nothing_is_deleted_where_the_newest_one_cannot_be_read(run: Path, checkpoint: Command) -> None:
    """Its sizes hold, so it counts as complete; but its header is gone, and the older ones may be all there is."""
    path = next((run / "checkpoints" / "step_00000010").glob("*.safetensors"))
    path.write_bytes(b"\xff" * path.stat().st_size)
    told = checkpoint("prune", run, "--keep-last", 1, "--yes", code=2)
    assert "nothing was deleted" in told and "not readable as safetensors" in told
    assert steps_in(run) == [1, 2, 3, 10]


def test_prune_refuses_while_a_run_has_the_folder(
    run: Path, tiny: dict[str, Any], tmp_path: Path, checkpoint: Command
) -> None:
    config = load_config(write_config(tmp_path / "c.yaml", tiny | {"run_dir": str(run)}))
    with lock_run_folder(config):
        for place in (run, run / "checkpoints"):
            told = checkpoint("prune", place, "--keep-last", 1, "--yes", code=2)
            assert "a run is using" in told and str(run) in told
        checkpoint("prune", run, "--keep-last", 1, "--dry-run")
        assert steps_in(run) == [1, 2, 3, 10]
    checkpoint("prune", run, "--keep-last", 1, "--yes")
    assert steps_in(run) == [1, 10]


@pytest.mark.parametrize(("answer", "left"), [("n", [1, 2, 3, 10]), ("y", [1, 10])])
def test_prune_asks_on_a_terminal(answer: str, left: list[int], run: Path) -> None:
    ours, theirs = pty.openpty()
    os.write(ours, f"{answer}\n".encode())
    words = [MEGALITE, "checkpoint", "prune", str(run), "--keep-last", "1"]
    done = subprocess.run(words, stdin=theirs, capture_output=True, text=True, timeout=60, check=False)
    os.close(ours)
    os.close(theirs)
    assert done.returncode == (0 if answer == "y" else 1) and "Delete them?" in done.stderr, done.stderr
    assert steps_in(run) == left


MISTAKES: dict[str, tuple[list[str], str]] = {
    "ls of nothing": (["ls", "nowhere"], "there is no such folder"),
    "ls of a file": (["ls", "file"], "is a file"),
    "ls of a foreign folder": (["ls", "foreign"], "holds no checkpoints"),
    "ls of an interrupted save": (["ls", "step_00000005"], "no manifest.json"),
    "ls of an unknown protocol": (["ls", "gopher://x"], "gopher"),
    "ls of an empty store": (["ls", "memory://nothing"], "there are no checkpoints"),
    "show of nothing": (["show", "nowhere"], "there is no such folder"),
    "show of a URL that lost a slash": (["show", "s3:/bucket/run"], "a URL has two slashes: s3://bucket/run"),
    "show of a foreign manifest": (["show", "alien"], "not a manifest of this version"),
    "verify of nothing": (["verify", "nowhere"], "there is no such folder"),
    "verify of a URL": (["verify", "s3://bucket/run"], "copy the checkpoint here first"),
    "diff with nothing": (["diff", "run", "nowhere"], "nowhere"),
    "diff with a URL": (["diff", "run", "s3://bucket/run"], "copy the checkpoint here first"),
    "diff with a damaged one": (["diff", "run", "run/checkpoints/step_00000001"], "is missing"),
    "prune of a URL": (["prune", "s3://bucket/run", "--keep-last", "1"], "--yes"),
    "prune of a URL, sure": (["prune", "s3://bucket/run", "--keep-last", "1", "--yes"], "tools of that storage"),
    "prune of one checkpoint": (
        ["prune", "run/checkpoints/step_00000002", "--keep-last", "1", "--yes"],
        "is one checkpoint",
    ),
    "prune of a foreign folder": (["prune", "foreign", "--keep-last", "1", "--yes"], "holds no checkpoints"),
    "prune with nobody to ask": (["prune", "run", "--keep-last", "1"], "add --yes"),
    "prune for a program, unasked": (["prune", "run", "--keep-last", "1", "--json"], "add --yes"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(
    mistake: str, run: Path, checkpoint: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, fragment = MISTAKES[mistake]
    monkeypatch.chdir(run.parent)
    monkeypatch.setattr(sys, "stdin", open(os.devnull))  # noqa: SIM115, PTH123
    Path("file").touch()
    for folder in ("foreign", "alien", "step_00000005"):
        Path(folder).mkdir()
    Path("foreign/notes.txt").touch()
    Path("alien/manifest.json").write_text('{"format": "another"}')
    told = checkpoint(*words, code=2)
    assert told.startswith("megalite: error: ") and told.count("\n") == 1 and fragment in told, told
    assert steps_in(run) == [1, 2, 3, 10]


def test_prune_needs_to_be_told_how_many_stay(run: Path, checkpoint: Command) -> None:
    assert "--keep-last" in checkpoint("prune", run, "--yes", code=2)
    assert "--keep-last" in checkpoint("prune", run, "--keep-last", 0, "--yes", code=2)
    assert steps_in(run) == [1, 2, 3, 10]
