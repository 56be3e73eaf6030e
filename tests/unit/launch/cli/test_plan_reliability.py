"""`megalite plan reliability`: tables for people, JSON and CSV for programs, one sentence for a mistake."""

from __future__ import annotations

import csv
import io
import json
import math
from datetime import date, timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from click.testing import Result
from typer.testing import CliRunner

from launch import output
from launch.cli.plan import plan_app
from launch.cli.plan_reliability import parse_gpus
from launch.errors import LaunchError
from launch.planning.prediction_by_size import COMMUNICATION, communication_share, job_on, step_on
from launch.prediction.cluster import cluster_of_nodes
from launch.trainer.start.run_config import load_run_config
from megalite.config import ConfigError
from megalite.planner.failure_rates import LLAMA_3, OBSERVATIONS, Components
from megalite.planner.hardware import find_accelerator
from megalite.planner.reliability.goodput_model import Reliability, at_scale
from megalite.planner.search import search
from tests.conftest import write_config
from tests.unit.launch.cli.test_app import megalite

TUTORIAL_GPUS = [8, 32, 64, 128, 256, 512, 1024]


def invoked(*words: str) -> Result:
    """A command that ends well; what is raised goes to the caller."""
    with patch.object(output, "terminal_width", lambda: 200):
        done = CliRunner().invoke(plan_app, ["reliability", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done


def plan(*words: str) -> str:
    return invoked(*words).output


def answer(*words: str) -> dict[str, Any]:
    return json.loads(invoked(*words, "--json").stdout)  # what takes long is told on stderr


def test_dots_double_up_to_the_next_number() -> None:
    assert parse_gpus("8,32,...,1024", 8) == TUTORIAL_GPUS
    assert parse_gpus("8, 16", 8) == [8, 16] and parse_gpus("96,...,1000", 8) == [96, 192, 384, 768, 1000]
    assert parse_gpus("8,8,...,16", 8) == [8, 16]
    assert parse_gpus("1024,8", 8) == [8, 1024], "the last is the largest"


def test_without_options_the_sweep_comes_with_its_band_and_sources() -> None:
    told = plan()
    for gpus in TUTORIAL_GPUS:
        assert f"│ {gpus:>5,} │" in told
    scale = at_scale(Reliability(), 1024)
    assert (
        f"{scale.mtbf_hours:.1f}" in told and f"{scale.goodput:.1%}" in told and f"{scale.interval_s / 60:.1f}" in told
    )
    assert "4 per 1,000 node-days" in told and "published: 2 to 14" in told
    assert "13.4 to 93.8" in told, "the MTBF at 14 and 2 failures per 1,000 node-days"
    rates = [f"{row.system.replace(', ', ' ')} {row.rate_per_1000_node_days:.3g}" for row in OBSERVATIONS]
    assert ", ".join(rates) in told, "one line: the answer is above it"
    assert [row["source"] for row in answer()["observations"]] == [row.source for row in OBSERVATIONS]
    assert "about 24 per 1,000 node-days" in told
    assert "checkpoint.mean_hours_between_failures=46.9" in told


def test_json_has_what_the_tables_show() -> None:
    found = answer("--gpus", "64,1024", "--days", "10", "--communication-share", "0.2")
    assert [scale["gpus"] for scale in found["scales"]] == [64, 1024]
    here, expected = found["scales"][1], at_scale(Reliability(days=10, communication_share=0.2), 1024)
    assert here["goodput"] == pytest.approx(expected.goodput)
    parts = ("computation", "communication", "writes", "rework", "restarts")
    assert sum(here[f"{part}_hours"] for part in parts) == pytest.approx(240)
    assert here["communication_hours"] == pytest.approx(0.2 * 240 * here["goodput"])
    assert here["goodput_at_high_rate"] < here["goodput"] < here["goodput_at_low_rate"]
    assert found["published_band"] == [2, 14] and len(found["observations"]) == len(OBSERVATIONS)


def test_csv_has_a_row_for_each_number_of_gpus() -> None:
    rows = list(csv.DictReader(io.StringIO(plan("--csv"))))
    assert [int(row["gpus"]) for row in rows] == TUTORIAL_GPUS
    assert float(rows[-1]["mtbf_hours"]) == pytest.approx(46.875)
    with pytest.raises(LaunchError, match="two ways"):
        plan("--csv", "--json")


def test_components_make_the_rate() -> None:
    """As in the worked example; redundant supplies leave 4,687.5 h."""
    found = answer("--gpus", "1024", "--gpu-mttf-hours", "50000")
    assert found["scales"][0]["mtbf_hours"] == pytest.approx(33.482, abs=1e-3)
    found = answer("--gpus", "8", "--redundant-psu", "--gpu-mttf-hours", "50000")
    assert found["scales"][0]["mtbf_hours"] == pytest.approx(4687.5) and found["failures_per_node_hour"]["PSU"] == 0
    found = answer("--gpus", "8", "--nic-mttf-hours", "inf", "--psus-per-node", "6", "--node-mttf-hours", "1e4")
    expected = Components(nic_mttf_hours=float("inf"), psus_per_node=6, node_mttf_hours=1e4).mttf_hours
    assert found["scales"][0]["mtbf_hours"] == pytest.approx(expected)
    assert "node MTTF 4,285.7 h" in plan("--psus-per-node", "2", "--gpu-mttf-hours", "50000")


def test_llama_3_s_components_give_its_failures() -> None:
    found = answer("--preset", "llama3", "--gpus", "16384", "--days", "54")
    assert found["scales"][0]["expected_failures"] == pytest.approx(419)
    better = answer("--preset", "llama3", "--gpus", "16384", "--days", "54", "--node-mttf-hours", "inf")
    assert better["scales"][0]["expected_failures"] == pytest.approx(268 + 7)
    assert LLAMA_3.node_mttf_hours < float("inf")


def test_storage_writers_and_background_decide_what_a_save_takes() -> None:
    base = ("--gpus", "1024", "--parameters", "70.6B", "--contents", "mixed", "--storage-gb-per-s", "inf")
    one = answer(*base, "--writers", "1")["scales"][0]
    many = answer(*base)["scales"][0]
    behind = answer(*base, "--writers", "1", "--background", "--copy-gb-per-s", "20")["scales"][0]
    assert one["save_duration_s"] == one["save_blocked_s"] == pytest.approx(141.2)
    assert many["save_duration_s"] == pytest.approx(141.2 / 128)
    assert behind["save_blocked_s"] == pytest.approx(988.4 / 1024 / 20)
    assert behind["interval_s"] >= behind["save_duration_s"]
    assert "storage sets the interval" in plan(*base, "--writers", "1", "--background", "--copy-gb-per-s", "1e6")


def test_the_cheapest_number_that_ends_by_a_date_is_named() -> None:
    """The fewest accelerator-hours among those that are in time, not the first of them, nor the fastest."""
    words = ("llama3.2-1b", "training.tokens=2e11", "--accelerator", "H100", "--price-per-accelerator-hour", "2")
    runs = answer(*words, "--gpus", "8,32,128")["scales"]
    by = date.today() + timedelta(days=math.ceil(runs[1]["days"]))
    found = answer(*words, "--gpus", "8,32,128", "--by", by.isoformat())
    in_time = [run for run in runs if run["days"] <= runs[1]["days"]]
    best = min(in_time, key=lambda run: run["accelerator_hours"])
    assert 1 < len(in_time) < len(runs) and found["cheapest"]["gpus"] == best["gpus"]
    assert found["cheapest"]["price"] == 2 * found["cheapest"]["accelerator_hours"]
    chosen = answer(*words, "--by", by.isoformat())
    assert len(chosen["scales"]) > 1 and chosen["cheapest"]["accelerator_hours"] <= best["accelerator_hours"]
    said = plan(*words, "--gpus", "8", "--by", by.isoformat())
    assert f"none of these numbers of GPUs ends by {by}: the largest ends on " in said
    for wrong, why in (("2001-01-01", "cannot end by then"), ("soon", "is no date"), ("9999-12-31", "is too late")):
        with pytest.raises(LaunchError, match=why):
            invoked(*words, "--by", wrong)
    with pytest.raises(LaunchError, match="needs the length of a run"):
        invoked("--by", by.isoformat())


def test_an_interval_of_one_s_own_is_taken() -> None:
    found = answer("--gpus", "1024", "--interval-minutes", "240", "--restart-minutes", "0", "--detection-minutes", "0")
    scale = found["scales"][0]
    assert scale["interval_s"] == 14_400 and scale["restarts_hours"] == 0
    assert scale["goodput"] < answer("--gpus", "1024")["scales"][0]["goodput"]


def test_a_config_says_how_large_its_checkpoints_are(tiny: dict[str, Any], tmp_path: Path) -> None:
    path = write_config(tmp_path / "c.yaml", tiny)
    found = answer(str(path), "--gpus", "8")["assumptions"]
    assert found["bytes_per_parameter"] == 12 and found["storage"]["background"] is True
    assert found["parameters"] < 1e6
    plain = answer(str(path), "optimizer.name=sgd", "checkpoint.background=false", "--gpus", "8")["assumptions"]
    assert plain["bytes_per_parameter"] == 4 and plain["storage"]["background"] is False
    assert answer(str(path), "--gpus", "8", "--blocking")["assumptions"]["storage"]["background"] is False
    with pytest.raises(LaunchError, match="give one"):
        plan(str(path), "--parameters", "1B")


def test_communication_is_predicted_for_a_config(tiny: dict[str, Any], tmp_path: Path) -> None:
    """More replicas wait longer; each keeps its batch. A part of a step renamed is a KeyError here."""
    cut = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 2}
    path = write_config(tmp_path / "c.yaml", tiny | {"parallel": cut, "precision": {"dtype": "bf16"}})
    config = load_run_config(path)

    def share(gpus: int) -> float:
        return communication_share(step_on(config, "H100", gpus, 8)[1])

    assert 0 < share(8) < share(512) < 1 and len(COMMUNICATION) == 5
    found = answer(str(path), "--accelerator", "H100", "--gpus", "8,512", "--days", "30")
    for scale in found["scales"]:
        assert scale["communication_hours"] == pytest.approx(720 * scale["goodput"] * share(scale["gpus"]))
    assert found["communication_from"] == "predicted for H100"
    with pytest.raises(LaunchError, match="use 4 or 8"):
        step_on(config, "H100", 6, 2)
    with pytest.raises(ConfigError, match="H100"):
        plan(str(path), "--accelerator", "H1000")
    assert find_accelerator("H100")


def test_a_layout_that_is_auto_is_chosen_as_plan_does(tiny: dict[str, Any], tmp_path: Path) -> None:
    """For each number of GPUs; numbers on which nothing works are left out and named."""
    tiny["training"] |= {"global_batch_size": 16, "steps": 1000}
    del tiny["training"]["micro_batch_size"]
    path = write_config(tmp_path / "c.yaml", tiny | {"parallel": "auto"})
    found = answer(str(path), "--accelerator", "H100", "--gpus", "8,16,4096", "--price-per-accelerator-hour", "2")
    assert [scale["gpus"] for scale in found["scales"]] == [8, 16]
    for scale in found["scales"]:
        cluster = cluster_of_nodes("H100", scale["gpus"] // 8, 8, "x")
        config = load_run_config(path)
        best = search(config, cluster, free=config.unresolved_options).best
        assert best is not None and scale["layout"] == str(best.layout)
        assert scale["step_s"] == best.time.seconds and scale["steps"] == 1000
        assert scale["days"] * 86_400 == pytest.approx(1000 * scale["step_s"] / scale["goodput"])
        assert scale["price"] == pytest.approx(2 * 24 * scale["days"] * scale["gpus"])
    assert found["notices"][0].startswith("left out: 4,096 GPUs: no layout works on 4096 x H100")
    told = plan(str(path), "--accelerator", "H100", "--gpus", "8,16")
    assert "length, saves and failures included" in told and "accelerator-hours" in told
    with pytest.raises(LaunchError, match="no layout works on 4096 x H100"):
        plan(str(path), "--accelerator", "H100", "--gpus", "4096")


def test_what_is_not_counted_is_told(tiny: dict[str, Any], tmp_path: Path) -> None:
    """An interval in steps without their time, and a mean time between failures for several sizes of job."""
    checkpoint = {"interval": 50, "mean_hours_between_failures": 1500.0}
    path = write_config(tmp_path / "c.yaml", tiny | {"checkpoint": checkpoint})
    steps, hours = answer(str(path), "--gpus", "8,16")["notices"][:2]
    assert steps.startswith("checkpoint.interval 50 is not counted") and "1,500 is not counted" in hours
    one = answer(str(path), "--gpus", "8")
    assert one["scales"][0]["mtbf_hours"] == pytest.approx(1500) and "is not counted here" not in str(one["notices"])
    assert "checkpoint.mean_hours_between_failures=1500" in plan(str(path), "--gpus", "8"), "a plain number"


def test_the_tutorial_is_printed_with_what_contradicts_it() -> None:
    told = plan("--preset", "tutorial")
    for words in ("4285.7", "988.4 GB", "141.2 s", "3.92%", "38.1", "16.74 h", "43.0", "50.95 h", "779 GPUs", "72.37%"):
        assert words in told
    assert "Where the text contradicts its own numbers" in told and "97 min, not 63" in told
    found = answer("--preset", "tutorial")
    assert found["scales"][-1]["mtbf_hours"] == pytest.approx(33.48, abs=0.005)
    assert len(found["contradictions"]) >= 8 and len(found["losses"]) == 4
    rows = list(csv.DictReader(io.StringIO(plan("--preset", "tutorial", "--csv"))))
    assert [int(row["gpus"]) for row in rows] == TUTORIAL_GPUS


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--gpus", "100"], "100 GPUs are no whole number of nodes with 8 GPUs each: take 96 or 104"),
        (["--gpus", "8,100,4"], "take 96 or 104"),
        (["--gpus", "4"], "take 8, or give --gpus-per-node"),
        (["--gpus", "8,many"], "'many' is no number of GPUs"),
        (["--gpus", "...,8"], "'...' is no number of GPUs"),
        (["--gpus", "0"], "'0' is no number of GPUs"),
        (["--rate-per-1000-node-days", "0"], "--rate-per-1000-node-days 0: must be a finite number above 0"),
        (["--rate-per-1000-node-days", "4", "--redundant-psu"], "--redundant-psu makes one of their parts: give one"),
        (["--rate-per-1000-node-days", "4", "--preset", "llama3"], "--preset llama3"),
        (["--gpu-mttf-hours", "0"], "--gpu-mttf-hours 0: must be more than 0 hours"),
        (["--gpu-mttf-hours", "nan"], "--gpu-mttf-hours nan: must be more than 0 hours"),
        ([f"--{part}-mttf-hours=inf" for part in ("gpu", "nic", "psu")], "nothing fails with these components"),
        (["--days", "-1"], "--days -1: must be a finite number above 0"),
        (["--parameters", "many"], "--parameters many is no number: write it as 70.6e9 or 70.6B"),
        (["--writers", "0"], "--writers 0: must be nodes, gpus, or a number from 1 up"),
        (["--communication-share", "15"], "for 15% give 0.15"),
        (["--accelerator", "H100"], "of a CONFIG.yaml: give one"),
        (["--preset", "tutorial", "--days", "3"], "leave out --days, or the preset"),
        (["--preset", "tutorial", "--blocking"], "leave out --blocking, or the preset"),
        (["--preset", "tutorial", "--background"], "leave out --background, or the preset"),
        (["--redundant-psu"], "--redundant-psu is a detail of rates that are made of components: add"),
        (["--psus-per-node", "4"], "--psus-per-node is a detail"),
        (["--nics-per-node", "4"], "--nics-per-node is a detail"),
        (["--gpus", "20000000"], "no number of GPUs from 1 to 10,000,000"),
    ],
)
def test_a_mistake_gets_one_sentence(words: list[str], sentence: str) -> None:
    with pytest.raises((LaunchError, ConfigError)) as caught:
        plan(*words)
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_on_the_command_line_a_mistake_is_exit_code_2() -> None:
    done = megalite("plan", "reliability", "--gpus", "100")
    assert (
        done.returncode == 2 and done.stderr.startswith("megalite: error: --gpus 100") and done.stderr.count("\n") == 1
    )


def test_the_batch_grows_with_the_replicas(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Each keeps the samples that the config gives it."""
    tiny["training"] |= {"global_batch_size": 4, "micro_batch_size": 1}
    tiny["parallel"] = {"data_parallel_size": 2}
    config = load_run_config(write_config(tmp_path / "c.yaml", tiny))
    for gpus in (2, 8, 64):
        job = job_on(config, gpus)
        assert (job.layout.data_parallel_size, job.global_batch_size, job.micro_batches) == (gpus, 2 * gpus, 2)
