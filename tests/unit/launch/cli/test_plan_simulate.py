"""`megalite plan simulate` and `megalite plan schedule`: tables for people, values for programs, a sentence for
mistakes."""

from __future__ import annotations

import csv
import io
import json

import pytest

from tests.helpers.commands import command_line

SIMULATE = ("plan", "simulate", "--gpus", "1024", "--days", "30", "--seeds", "3")
SCHEDULE = ("plan", "schedule", "--stages", "4", "--micro-batches", "8")


@pytest.mark.parametrize("command", ["simulate", "schedule"])
def test_help_has_an_example(command: str) -> None:
    done = command_line("plan", command, "--help")
    assert done.returncode == 0
    assert f"megalite plan {command}" in " ".join(done.stdout.split("Example:")[1].split())


def test_without_a_rate_the_published_band_is_simulated_too() -> None:
    done = command_line(*SIMULATE, "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert [each["rate_per_1000_node_days"] for each in answer["rates"]] == [4.0, 2.0, 14.0]
    for each in answer["rates"]:
        assert sum(part["mean"] for part in each["hours"].values()) == pytest.approx(720)
        assert each["goodput"]["mean"] == pytest.approx(each["closed_form_goodput"], abs=0.015)
    assert len(answer["runs"]) == 9 and answer["assumptions"]["nodes"] == 128


def test_no_failures_are_fewer_than_the_config_has() -> None:
    """Not the rate of the config, of which a run would be three times as long."""
    words = ["checkpoint.mean_hours_between_failures=0.5", "checkpoint.interval=auto", "training.steps=10000000"]
    answers = []
    for rate in ("0", "0.0001"):
        asked = ("--accelerator", "H100", "--gpus", "8", "--rate-per-1000-node-days", rate, "--json", "--seeds", "1")
        done = command_line("plan", "simulate", "configs/quickstart.yaml", *words, *asked)
        assert done.returncode == 0, done.stderr
        answers.append(json.loads(done.stdout)["assumptions"])
    assert answers[0]["duration_s"] == pytest.approx(answers[1]["duration_s"], rel=1e-3)
    assert answers[0]["interval_s"] == answers[1]["interval_s"]


def test_the_same_seed_is_the_same_run() -> None:
    words = (*SIMULATE, "--rate-per-1000-node-days", "14", "--csv")
    first, again, other = command_line(*words), command_line(*words), command_line(*words, "--seed", "100")
    assert first.stdout == again.stdout != other.stdout
    rows = list(csv.DictReader(io.StringIO(first.stdout)))
    assert [row["seed"] for row in rows] == ["0", "1", "2"]
    hours = [sum(float(value) for name, value in row.items() if name.endswith("_hours")) for row in rows]
    assert hours == pytest.approx([720.0] * 3)


def test_the_table_says_where_the_hours_go() -> None:
    done = command_line(
        *SIMULATE, "--gpus", "16384", "--spare-nodes", "4", "--hang-share", "0.1", "--slow-node-share", "0.001",
        "--step-jitter", "0.01", "--rate-per-1000-node-days", "14", "--interval", "20", "--save-seconds", "300",
        "--blocked-seconds", "20",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for words in (
        "useful, h", "stragglers, h", "checkpoints, h", "rework, h", "detection, h", "waiting for nodes, h",
        "restart, h", "goodput", "after every 20 min", "usable 280 s later", "what one failure costs", "Erlang B",
        "holds up every step", "standard deviations late",
    ):  # fmt: skip
        assert words in done.stdout
    assert max(len(line) for line in done.stdout.splitlines() if not line.startswith(("megalite:", "16,384"))) <= 100


def test_auto_is_dalys_interval() -> None:
    done = command_line(*SIMULATE, "--json", "--rate-per-1000-node-days", "4", "--save-seconds", "60")
    assert json.loads(done.stdout)["assumptions"]["interval_s"] == pytest.approx(4459, rel=0.01)


def test_hours_have_no_exponent() -> None:
    done = command_line("plan", "simulate", "--gpus", "32", "--days", "3", "--seeds", "1")
    assert "one every 1,500 h" in done.stdout and "e+" not in done.stdout, done.stderr
    assert "a save of 60 s, for which training waits, is assumed" in done.stdout


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--accelerator", "H100"), "--accelerator H100 predicts the steps of a CONFIG.yaml: give one"),
        (("--gpus", "1001"), "take 1000 or 1008"),
        (("--days", "0"), "--days 0: must be a finite number above 0"),
        (("--interval", "often"), "--interval often: give minutes, such as 30, or auto"),
        (("--interval", "nan"), "--interval nan: must be a finite number above 0"),
        (("--rate-per-1000-node-days", "0"), "give minutes, such as 60"),
        (("--save-seconds", "0"), "if they cost nothing"),
        (("--blocked-seconds", "61"), "give at most 60"),
        (("--hang-share", "5"), "a share is between 0 and 1"),
        (("--detection-minutes", "-1"), "--detection-minutes -1: must be a finite number from 0 up"),
        (("--days", "300", "--seeds", "5000"), "take up to 3906 seeds or fewer days"),
        (("--days", "1e9", "--seeds", "1", "--rate-per-1000-node-days", "0.01"), "1,000,000 simulated at most"),
        (("--json", "--csv"), "give one of them"),
        (("--interval", "1e-300"), "--interval 1e-300: 6e-299 s between checkpoints are less than a step takes"),
        (("--interval", "30", "--save-seconds", "1e30"), "--blocked-seconds 1e+30: they leave no time for training"),
        (("--repair-hours", "12"), "--repair-hours 12 is for a number of spare nodes: add --spare-nodes"),
    ],
)
def test_a_mistake_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = command_line(*SIMULATE, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_a_schedule_is_drawn() -> None:
    done = command_line(*SCHEDULE, "--schedule", "1f1b")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    drawn = [line for line in lines if line.startswith("stage ")]
    assert len(drawn) == 4 and drawn[0].startswith("stage 0 0-1-2-3-....")
    assert "37.5%" in done.stdout and max(map(len, lines)) <= 100


def test_all_schedules_are_compared() -> None:
    answer = json.loads(command_line(*SCHEDULE, "--schedule", "all", "--chunks", "4", "--json").stdout)
    by_name = {each["schedule"]: each for each in answer}
    assert by_name["1f1b"]["makespan_s"] == pytest.approx(0.033)
    assert by_name["1f1b"]["bubble_fraction"] == pytest.approx(3 / 8)
    assert by_name["interleaved"]["bubble_fraction"] == pytest.approx(3 / 32)
    assert by_name["zero-bubble"]["bubble_fraction"] == pytest.approx(1 / 8)
    assert by_name["zb-v"]["bubble_fraction"] == by_name["dualpipev"]["bubble_fraction"] == pytest.approx(1 / 16)
    assert len(by_name["zero-bubble"]["work"]) == 4 * 8 * 3
    assert by_name["1f1b"]["work"][0] == {
        "stage": 0, "start_s": 0.0, "end_s": 0.001, "kind": "forward", "micro_batch": 0, "chunk": 0,
    }  # fmt: skip


def test_schedules_that_do_not_go_are_left_out_with_the_reason() -> None:
    few = ("plan", "schedule", "--schedule", "all", "--stages", "3", "--micro-batches", "5")
    done = command_line(*few)
    assert done.returncode == 0, done.stderr
    interleaved, dualpipev = [line for line in done.stdout.splitlines() if line.startswith("left out: ")]
    assert "interleaved takes micro-batches in groups of 3" in interleaved and "5 is no multiple" in interleaved
    assert "dualpipev needs at least two micro-batches per stage, 6 for 3 stages" in dualpipev
    done = command_line(*few, "--json")
    assert [each["schedule"] for each in json.loads(done.stdout)] == ["1f1b", "zero-bubble", "zb-v"]
    assert len(done.stderr.splitlines()) == 2 and done.stderr.startswith("left out: interleaved takes")


def test_each_stage_has_its_time() -> None:
    done = command_line(*SCHEDULE, "--forward-ms", "1,1,1,1.5", "--backward-ms", "2,2,2,3", "--csv")
    rows = list(csv.DictReader(io.StringIO(done.stdout)))
    assert len(rows) == 64
    last = next(row for row in rows if row["stage"] == "3")
    assert float(last["end_s"]) - float(last["start_s"]) == pytest.approx(0.0015)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--schedule", "interleaved", "--micro-batches", "10"), "use 8"),
        (("--chunks", "2"), "add --schedule interleaved"),
        (("--schedule", "interleaved", "--chunks", "1"), "use 1f1b"),
        (("--schedule", "dualpipev", "--micro-batches", "7"), "two micro-batches per stage, 8 for 4 stages"),
        (("--forward-ms", "1,2"), "2 numbers for 4 stages: give one, or 4"),
        (("--backward-ms", "fast"), "give milliseconds"),
        (("--between-stages-ms", "-1"), "--between-stages-ms -1: give milliseconds of at least 0, such as 0.5\n"),
        (("--weight-gradient-ms", "1"), "is for schedules that split backward: leave it out, or add"),
        (
            ("--schedule", "all", "--weight-gradient-ms", "1e300"),
            "--weight-gradient-ms 1e300: the weight gradient is a part of the backward pass",
        ),
        (("--forward-ms", "0", "--backward-ms", "0"), "a schedule needs work"),
        (("--micro-batches", "1000000"), "take --micro-batches 83333 or fewer"),
        (("--stages", "100000000000"), "--stages 100000000000 are too many to draw: take up to 1,000"),
        (("--stages", "1001", "--micro-batches", "100000"), "--stages 1001 are too many to draw: take up to 1,000"),
        (("--schedule", "interleaved", "--chunks", "10000", "--stages", "100"), "take up to 66"),
    ],
)
def test_a_schedule_that_cannot_be_is_one_sentence(words: tuple[str, ...], sentence: str) -> None:
    done = command_line(*SCHEDULE, *words)
    assert done.returncode == 2 and done.stdout == ""
    assert sentence in done.stderr and len(done.stderr.splitlines()) == 1


def test_units_of_the_command_line_are_those_of_the_simulation() -> None:
    done = command_line(
        *SIMULATE, "--hang-timeout-minutes", "30", "--detection-minutes", "2", "--restart-minutes", "3", "--days", "4",
        "--spare-nodes", "2", "--repair-hours", "6", "--interval", "7", "--seeds", "1", "--json",
    )  # fmt: skip
    run = json.loads(done.stdout)["assumptions"]
    seconds = [run[f"{name}_s"] for name in ("hang_timeout", "detection", "restart", "duration", "repair", "interval")]
    assert seconds == [1800, 120, 180, 4 * 86_400, 6 * 3600, 420]
