"""`megalite verify` as its user meets it: table, JSON, exit codes, one sentence for a mistake."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

from launch.cli.app import app
from launch.parity import verify as command
from launch.parity.verify import ParityReport, Plan
from tests.helpers import defects
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.commands import BIN, ROOT, command_line, run

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
SMALL = ["model.num_hidden_layers=2", "model.hidden_size=32", "model.intermediate_size=50", "model.vocab_size=131"]


def verify(*words: str, cwd: Path = ROOT) -> tuple[int, str, str]:
    done = run(BIN / "megalite", "verify", QUICKSTART, *SMALL, *words, cwd=cwd)
    return done.returncode, done.stdout, done.stderr


def verify_here(*words: str) -> tuple[int, str, str]:
    """In this process, whose server of ranks is warm."""
    done = command_line("verify", str(QUICKSTART), *SMALL, *words)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_table_for_people() -> None:
    layouts = "tp=2,sequence_parallel;pp=2,accumulation=2"
    code, out, err = verify_here("--layouts", layouts, "--steps", "2", "--seed", "5")
    assert code == 0, out + err
    assert "all 2 layouts compute what transformers computes" in out
    for words in ("tp=2 sequence_parallel", "pp=2 accumulation=2", "bound", "pass"):
        assert words in out
    assert "seed 5" in err and "sequence_length 128 -> 96" in err and "[2/2] fp32 pp=2,accumulation=2: pass" in err


@pytest.mark.slow
def test_json_for_programs(tmp_path: Path) -> None:
    """From a folder whose modules nobody may load, not even the server from which ranks are forked."""
    download, words = plant(tmp_path), ("--layouts", "dp=2,zero=3", "--steps", "2", "--json", "precision.dtype=bf16")
    code, out, err = verify(*words, cwd=download)
    assert code == 0, out + err
    assert loaded_from(download) == []
    report = json.loads(out)
    assert report["passed"] is True and report["steps"] == 2
    assert [(layout["layout"], layout["dtype"]) for layout in report["layouts"]] == [
        ("dp=2,zero=3", "fp32"),
        ("dp=2,zero=3", "bf16"),
    ]
    worst = report["layouts"][0]["worst"]
    assert 0 < worst["error"] <= worst["bound"] and worst["name"]


def test_a_dry_run_starts_nothing_and_needs_no_torch() -> None:
    code = (
        "import sys; from launch.cli.app import app; from typer.testing import CliRunner;"
        f"done = CliRunner().invoke(app, ['verify', {str(QUICKSTART)!r}, '--dry-run']);"
        "print(done.output); assert done.exit_code == 0; assert 'torch' not in sys.modules"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing was started" in done.stdout and "tp=2,pp=2,dp=2" in done.stdout


@pytest.mark.slow
def test_a_difference_is_exit_code_1_and_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    solve = partial(defects.planted, defects.row_parallel_without_all_reduce)
    monkeypatch.setattr(command, "Session", partial(command.Session, solve=solve))
    reports: list[ParityReport] = []

    def verified_once(plan: Plan) -> ParityReport:
        reports[:] = reports or [verified(plan)]
        return reports[0]

    verified = command.verify
    monkeypatch.setattr(command, "verify", verified_once)
    words = ["verify", str(QUICKSTART), *SMALL, "--layouts", "dp=2;tp=2,dp=2;tp=2,pp=2", "--seed", "5"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 1, done.output
    assert "2 of 3 layouts do NOT compute what transformers computes" in done.output
    assert "--seed 5 repeats it" in done.output
    assert done.output.count("caused by tensor parallelism: tp=2 fails") == 1, "one cause is explained once"
    reported = CliRunner().invoke(app, [*words, "--json"])
    report = json.loads(reported.stdout)
    assert reported.exit_code == 1 and report["passed"] is False
    assert [diagnosis["axes"] for diagnosis in report["diagnoses"]] == [["tensor parallelism"]]
    assert report["layouts"][1]["failures"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--layouts", "tq=2"], '"tq=2" is not understood'),
        (["--layouts", "tp=3"], "--layouts: tp=3: model.num_attention_heads 4 cannot be shared evenly"),
        (["--layouts", "dp=16"], "dp=16 needs 16 ranks, and 8 fit on this machine's cpu"),
        (
            ["--layouts", "pp=2,zero=3,schedule=zero-bubble"],
            "parallel.zero_stage 3 does not go with pipeline_schedule zero-bubble",
        ),
        (["model.model_type=gpt5"], "model_type 'gpt5' is not a family known here"),
        (["model.hidden_sise=3"], 'did you mean "model.hidden_size"'),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_a_mistake_is_one_sentence(words: list[str], said: str) -> None:
    code, out, err = verify_here(*words)
    assert code == 2 and not out, out + err
    assert said in err and len(err.strip().splitlines()) == 1, err


def test_layouts_that_the_model_cannot_have_are_left_out_of_auto_and_said() -> None:
    code, _, err = verify_here("--dry-run", "model.num_attention_heads=2", "model.num_key_value_heads=1")
    assert code == 0
    assert "left out: tp=4,sequence_parallel: model.num_attention_heads 2 cannot be shared evenly" in err
