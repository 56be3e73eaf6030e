"""`megalite plan CONFIG.yaml`: what it prints, what it writes, and what it says to a mistake."""

from __future__ import annotations

import copy
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import output
from launch.cli import plan_layouts as layouts_command
from launch.errors import LaunchError
from launch.parity.verify import make_plan
from launch.planning.tables.layouts import row_of
from launch.prediction import cluster as places
from launch.trainer.start.checks import choose_layout
from launch.trainer.start.run_config import load_run_config
from megalite.config import resolve_layout
from megalite.planner.hardware import read_cluster
from megalite.planner.search import divisors, search
from tests.conftest import write_config
from tests.helpers.commands import ROOT
from tests.helpers.machines import cpus
from tests.unit.launch.cli.test_mistakes import command

CLUSTER = """\
accelerator:
  memory_gib: 4
  peak_tflops: {fp32: 0.05, bf16: 0.05}
  memory_gb_per_s: 10
  device: cpu
  intra_node: Ethernet 100
  inter_node: Ethernet 25
nodes: 1
accelerators_per_node: 4
"""


@pytest.fixture
def files(tiny: dict[str, Any], tmp_path: Path) -> tuple[str, str]:
    """A config of three layers and two key/value heads, and a cluster of four ranks."""
    (tmp_path / "four.yaml").write_text(CLUSTER)
    return str(write_config(tmp_path / "tiny.yaml", tiny)), str(tmp_path / "four.yaml")


class Plan:
    """`megalite plan` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self._patches = monkeypatch, capfd

    def __call__(self, *words: str, code: int = 0) -> tuple[str, str]:
        got, out, err = command(["plan", *words], *self._patches)
        assert got == code, err
        return out, err


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Plan:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    return Plan(monkeypatch, capfd)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "clusters").glob("*.yaml")), ids=lambda path: path.name)
def test_every_cluster_in_the_repository_loads(path: Path) -> None:
    nodes, per_node = path.stem.split("_")[0], read_cluster(path).accelerators_per_node
    assert read_cluster(path).accelerators == int(nodes) and per_node == 8


def test_people_see_the_cluster_the_layouts_and_why(plan: Plan, files: tuple[str, str]) -> None:
    config, cluster = files
    out, _ = plan(config, "--cluster", cluster, "--top", "2", "training.global_batch_size=8")
    assert "cluster: four, 1 node x 4 accelerator" in out
    rows = [line for line in out.splitlines() if "micro-batch" in line and line.startswith("│")]
    assert len(rows) == 3 and "as written" in rows[0] and "tp 1 pp 1 dp 4 micro-batch 2" in rows[0]
    assert all(unit in out for unit in ("GiB", "s/step", "tokens/s", "bubble")) and "MFU" not in out
    assert "MFU" in plan(config, "--gpus", "4", "--accelerator", "H100")[0], "a CPU has no specified peak"
    assert "bound by" in out and "next best" in out and "dropped" in out


def test_a_model_of_hugging_face_is_planned_without_torch(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Its config.json is all that is read; importing torch takes longer than a plan."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **tiny.pop("model")}))
    tiny["training"]["initialize_from"] = str(folder)
    (tmp_path / "four.yaml").write_text(CLUSTER)
    words = ["megalite", "plan", str(write_config(tmp_path / "c.yaml", tiny)), "--cluster", str(tmp_path / "four.yaml")]
    code = f"import sys, atexit; sys.argv = {words}; from launch.cli.app import main\n"
    code += "atexit.register(lambda: print('torch' in sys.modules)); main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "layouts that fit" in done.stdout and done.stdout.splitlines()[-1] == "False"


def test_json_and_csv_say_the_same(plan: Plan, files: tuple[str, str]) -> None:
    config, cluster = files
    words = (config, "--cluster", cluster, "--top", "5", "parallel.data_parallel_size=2", "training.micro_batch_size=1")
    facts = json.loads(plan(*words, "--json")[0])
    rows = list(csv.DictReader(io.StringIO(plan(*words, "--csv")[0])))
    assert facts["cluster"]["accelerators_per_node"] == 4 and len(facts["explanation"]) == 3
    assert facts["layouts_found"] >= len(facts["layouts"]) == 5
    own, *ranked = rows
    assert own["rank"] == "" and own["layout"] == facts["as_written"]["layout"]
    for place, (row, fact) in enumerate(zip(ranked, facts["layouts"], strict=True), 1):
        assert int(row["rank"]) == fact["rank"] == place
        assert float(row["step_s"]) == fact["step_s"] == pytest.approx(sum(fact["step_parts_s"].values()))
        assert fact["memory_gib"] * 2**30 == pytest.approx(
            max(sum(parts.values()) for parts in fact["memory_parts_bytes"])
        )
        assert (fact["data_parallel_size"], fact["micro_batch_size"]) == (2, 1), "an override is kept"
        assert fact["accelerators"] == 4
    assert [fact["step_s"] for fact in facts["layouts"]] == sorted(fact["step_s"] for fact in facts["layouts"])


H100S = ("--gpus", "8", "--accelerator", "H100")


def test_people_are_told_how_long_and_how_much(plan: Plan, files: tuple[str, str]) -> None:
    """The steps of the tokens, and the price of the accelerators' hours; a guess on a CPU has one digit."""
    words = (files[0], *H100S, "training.steps=null", "training.tokens=1000000000")
    out, _ = plan(*words, "--price-per-accelerator-hour", "3")
    config = load_run_config(Path(files[0]), ["training.steps=null", "training.tokens=1000000000"])
    assert f"length: {config.total_steps:,} steps, 1 billion tokens: " in out
    assert "expected wall time: " in out and "price: " in out and "checkpoints: every " in out
    run = json.loads(plan(*words, "--json", "--price-per-accelerator-hour", "3")[0])["run"]
    assert run["steps"] == config.total_steps and run["checkpoint_interval"] == "auto"
    assert run["training_days"] * 86_400 == pytest.approx(run["steps"] * run["step_s"])
    assert run["expected_days"] == pytest.approx(run["training_days"] / run["goodput"])
    assert run["accelerator_hours"] == pytest.approx(24 * 8 * run["expected_days"])
    assert run["price"] == pytest.approx(3 * run["accelerator_hours"])
    out, _ = plan(files[0], "--cluster", files[1])
    assert re.search(r"^length: .* tokens: roughly \d+ \w+$", out, re.MULTILINE) and "price" not in out


def test_the_plan_is_that_of_the_longest_sequences(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    """A layout that only the first stage fits would fail days later; the length counts the tokens of each stage."""
    config, cluster = yaml.safe_load(Path(files[0]).read_text()), files[1]
    alone, staged = copy.deepcopy(config), copy.deepcopy(config)
    alone["training"] |= {"global_batch_size": 8, "sequence_length": 128}
    staged["training"] |= {"global_batch_size": 8, "stages": [{"from_steps": 2, "sequence_length": 128}]}
    found = []
    for name, one in (("alone", alone), ("staged", staged)):
        path = write_config(tmp_path / f"{name}.yaml", one)
        found.append(json.loads(plan(str(path), "--cluster", cluster, "--json")[0]))
    assert found[0]["layouts"] == found[1]["layouts"]
    assert found[1]["run"]["tokens"] == 2 * 8 * 32 + 2 * 8 * 128 < found[0]["run"]["tokens"]
    said = plan(str(tmp_path / "staged.yaml"), "--cluster", cluster)[0]
    assert "batch: from the stage from_steps 2, after step 2 (token 512), on: 8 sequences x 128 tokens = 1,024" in said
    assert "note: memory and step times are those of 8 sequences of 128 tokens in micro-batches of " in said


def test_what_a_plan_writes_has_the_micro_batches_of_each_stage(
    plan: Plan, files: tuple[str, str], tmp_path: Path
) -> None:
    """The plan is that of the last stage, whose micro-batch must not become that of the first."""
    config = yaml.safe_load(Path(files[0]).read_text())
    stage = {"from_steps": 2, "sequence_length": 128, "micro_batch_size": 1}
    config["training"] |= {"global_batch_size": 16, "micro_batch_size": 2, "stages": [stage]}
    path = write_config(tmp_path / "staged.yaml", config)
    found = json.loads(plan(str(path), "--cluster", files[1], "--write", str(tmp_path / "best.yaml"), "--json")[0])
    assert {row["micro_batch_size"] for row in found["layouts"]} == {1}
    written = load_run_config(tmp_path / "best.yaml", []).training
    assert written.micro_batch_size == 2 and written.stages[0].micro_batch_size == 1


def test_a_run_that_is_never_done_is_told(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    """It saves only at its end, weeks away, and fails every hour: the expected time has two hundred digits."""
    never = ["training.steps=1000000000", "checkpoint.interval=0", "checkpoint.mean_hours_between_failures=1"]
    page = tmp_path / "page.html"
    out, _ = plan(files[0], *never, *H100S, "--price-per-accelerator-hour", "2", "--html", str(page))
    assert "expected wall time: the run is never done: failures come every 1 h" in out and "price" not in out
    assert "<b>forever</b>" in page.read_text()
    assert json.loads(plan(files[0], *never, *H100S, "--json")[0])["run"]["expected_days"] is None
    values = yaml.safe_load(Path(files[0]).read_text())
    Path(files[0]).write_text(yaml.safe_dump(values | {"parallel": "auto"}))
    for subcommand in ("reliability", "simulate"):
        _, err = plan(subcommand, files[0], *never, *H100S, code=2)
        assert "on 8 GPUs the run is never done: they fail every 1 h" in err and err.count("\n") == 1


@pytest.mark.parametrize("checkpoint", [[], ["checkpoint.background=false"], ["checkpoint.interval=7"]])
@pytest.mark.parametrize("hours", [[], ["checkpoint.mean_hours_between_failures=5"]])
def test_all_plans_agree_on_one_interval(
    plan: Plan, files: tuple[str, str], checkpoint: list[str], hours: list[str], tmp_path: Path
) -> None:
    """`plan`, `plan reliability` and `plan simulate`, for one config on one cluster, and the length that follows."""
    best = str(tmp_path / "best.yaml")
    stated = ["training.global_batch_size=8", "training.steps=100000", *checkpoint, *hours]
    run = json.loads(plan(files[0], *stated, *H100S, "--write", best, "--json")[0])["run"]
    (scale,) = json.loads(plan("reliability", best, *H100S, "--json")[0])["scales"]
    simulated = json.loads(plan("simulate", best, *H100S, "--seeds", "1", "--json")[0])["assumptions"]
    assert scale["interval_s"] == pytest.approx(run["checkpoint_interval_s"])
    assert simulated["interval_s"] == pytest.approx(run["checkpoint_interval_s"])
    assert (simulated["save"]["blocked_s"], simulated["save"]["duration_s"]) == pytest.approx(
        (run["save_blocked_s"], run["save_duration_s"])
    )
    assert simulated["duration_s"] == pytest.approx(86_400 * run["expected_days"])
    assert (scale["days"], scale["steps"]) == (pytest.approx(run["expected_days"]), 100_000)
    if "checkpoint.interval=7" in checkpoint:
        assert run["checkpoint_interval_s"] == pytest.approx(max(7 * run["step_s"], run["save_duration_s"]))


def test_the_layout_as_written_is_told_where_it_cannot_be(plan: Plan, files: tuple[str, str]) -> None:
    config, cluster = files
    values = yaml.safe_load(Path(config).read_text())
    Path(config).write_text(yaml.safe_dump(values | {"parallel": {"data_parallel_size": 8}}))
    out, _ = plan(config, "--cluster", cluster)
    assert "as written it does not work: " in out and "x data-parallel size 8 = 16" in out
    out, _ = plan(config, "--cluster", cluster, "training.global_batch_size=16")
    assert "as written it does not work: it needs 8 processes, and there are 4 accelerators" in out
    assert json.loads(plan(config, "--cluster", cluster, "--json")[0])["as_written"] is None


def test_the_written_config_is_the_given_one_with_the_best_layout(
    plan: Plan, files: tuple[str, str], tmp_path: Path
) -> None:
    config, cluster = files
    best = tmp_path / "best.yaml"
    facts, err = plan(config, "training.steps=3", "--cluster", cluster, "--write", str(best), "--json")
    assert f"megalite train {best}" in err, "programs read stdout"
    first = json.loads(facts)["layouts"][0]
    text = best.read_text()
    assert text.startswith(f"# {config} with the layout that `megalite plan` has chosen for four")
    assert f"# {json.loads(facts)['explanation'][0]}" in text
    written, given = load_run_config(best), load_run_config(Path(config), ["training.steps=3"])
    changed = {"parallel", "recompute", "training"}
    assert written.model_dump(exclude=changed) == given.model_dump(exclude=changed)
    assert written.training.model_copy(update={"micro_batch_size": 2}) == given.training
    layout = resolve_layout(written, 4, "cpu")
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size) == (
        first["tensor_parallel_size"],
        first["pipeline_parallel_size"],
        first["data_parallel_size"],
    )
    assert written.training.micro_batch_size == first["micro_batch_size"]
    _, err = plan(config, "--cluster", cluster, "--write", str(best), code=2)
    assert "best.yaml is there already: give --overwrite" in err and best.read_text() == text
    plan(config, "training.steps=4", "--cluster", cluster, "--write", str(best), "--overwrite")
    assert load_run_config(best).training.steps == 4


SCHEDULES: list[dict[str, Any]] = [
    {"pipeline_schedule": "1f1b"},
    {"pipeline_schedule": "interleaved", "pipeline_chunks": 3},
    {"pipeline_schedule": "zero-bubble"},
    {"pipeline_schedule": "zb-v"},
    {"pipeline_schedule": "dualpipev"},
]


@pytest.mark.parametrize("stated", SCHEDULES, ids=lambda stated: stated["pipeline_schedule"])
@pytest.mark.parametrize("others", [{}, {"pipeline_parallel_size": "auto"}], ids=["as written", "auto"])
def test_a_stated_schedule_is_kept_and_what_is_written_can_run(
    stated: dict[str, Any], others: dict[str, Any], plan: Plan, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """It was left out of the search and then written beside a size for which it is not legal."""
    tiny["model"]["num_hidden_layers"], tiny["training"]["global_batch_size"] = 6, 16
    config = write_config(tmp_path / "c.yaml", tiny | {"parallel": stated | others | {"gradient_bucket_size": 12345}})
    (tmp_path / "two.yaml").write_text(CLUSTER.replace("per_node: 4", "per_node: 2"))
    best, cluster = tmp_path / "best.yaml", str(tmp_path / "two.yaml")
    facts = json.loads(plan(str(config), "--cluster", cluster, "--write", str(best), "--top", "99", "--json")[0])
    written = load_run_config(best)
    layout = resolve_layout(written, 2, "cpu")
    assert written.parallel.model_dump().items() >= stated.items() and written.parallel.gradient_bucket_size == 12345
    is_default = stated == SCHEDULES[0]
    assert is_default or layout.pipeline_parallel_size == 2
    assert {one["pipeline_parallel_size"] for one in facts["layouts"]} == ({1, 2} if is_default else {2})
    assert {one["pipeline_schedule"] for one in facts["layouts"]} == {layout.pipeline_schedule}
    refused = [one["reason"] for one in facts["dropped"]]
    assert is_default or any("has no effect with parallel.pipeline_parallel_size 1" in reason for reason in refused)


def test_a_stated_list_of_modes_is_kept(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    best, modes = tmp_path / "best.yaml", "recompute.mode=[full, none]"
    plan(files[0], modes, "--cluster", files[1], "--write", str(best))
    written = load_run_config(best)
    assert written.recompute.mode == ("full", "none") and resolve_layout(written, 4, "cpu").pipeline_parallel_size == 2
    _, err = plan(files[0], "recompute.mode=[full, none, full, none, none]", "--cluster", files[1], code=2)
    assert "no layout works on 4 x" in err and "is a list of length 5" in err and "give one for all of them" in err


def test_where_no_layout_can_have_the_stated_schedule_the_reason_is_one(plan: Plan, files: tuple[str, str]) -> None:
    """Of layouts without a pipeline nobody hears more than that they are none."""
    stated = ["parallel.pipeline_schedule=zb-v", "parallel.pipeline_parallel_size=auto"]
    _, err = plan(files[0], *stated, "--cluster", files[1], code=2)
    assert err.count("\n") == 1 and "no layout works on 4 x" in err, err
    assert "num_hidden_layers 3" in err and "use pipeline_schedule 1f1b with one chunk per stage, or at least 4" in err


def test_ranks_are_given_what_was_chosen_beside_what_is_stated(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their words replaced the whole section, and with it the schedule."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(places, "here", cpus)
    monkeypatch.setattr(places, "cpu_count", lambda: 2)
    tiny["model"]["num_hidden_layers"] = 4
    stated = {"pipeline_parallel_size": "auto", "pipeline_schedule": "zb-v", "gradient_bucket_size": 12345}
    path = write_config(tmp_path / "c.yaml", tiny | {"parallel": stated})
    settled, words, _ = choose_layout(load_run_config(path))
    assert load_run_config(path, words) == settled and settled.parallel.pipeline_schedule == "zb-v"
    assert resolve_layout(settled, 2, "cpu").pipeline_parallel_size == 2
    assert make_plan(load_run_config(path)).layouts[0].pp == 2, "verify takes the config too"


@pytest.mark.slow
def test_the_written_config_trains(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    """Two steps on two ranks, with a pipeline: the parts of a layout that a rank could refuse."""
    from tests.helpers.warm_runs import train  # which starts a server of ranks

    config, _ = files
    two, best = tmp_path / "two.yaml", tmp_path / "best.yaml"
    two.write_text(CLUSTER.replace("per_node: 4", "per_node: 2"))
    stated = ["training.steps=2", "parallel.pipeline_parallel_size=2", "recompute.mode=selective"]
    plan(config, *stated, "--cluster", str(two), "--write", str(best))
    config = yaml.safe_load(best.read_text())
    train(tmp_path / "session", config)
    run = Path(config["run_dir"])
    assert json.loads((run / "receipt.json").read_text())["layout"]["pipeline_parallel_size"] == 2
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps if "loss" in step] == [1, 2]


def test_a_page_is_written_beside(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    config, cluster = files
    page = tmp_path / "report.html"
    plan(config, "--cluster", cluster, "--html", str(page))
    assert "<svg" in page.read_text()
    _, err = plan(config, "--cluster", cluster, "--html", str(page), code=2)
    assert "report.html is there already" in err


def test_without_a_cluster_it_is_this_machine(
    plan: Plan, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the number of ranks that is fastest; cores that are not used count for nothing."""
    config, _ = files
    monkeypatch.setattr(places, "here", cpus)
    monkeypatch.setattr(places, "cpu_count", lambda: 4)
    facts = json.loads(plan(config, "--json")[0])
    assert facts["cluster"]["accelerator_name"] == "core"
    best = facts["layouts"][0]["step_s"]
    values = load_run_config(Path(config))
    assert best == min(search(values, cpus(count)).candidates[0].time.seconds for count in (1, 2, 3, 4))


def test_hosts_are_a_cluster(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    config, _ = files
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=2\nnode2 slots=2\n")
    facts = json.loads(plan(config, "--hostfile", str(hosts), "--accelerator", "h100", "--json")[0])
    assert (facts["cluster"]["nodes"], facts["cluster"]["accelerators_per_node"]) == (2, 2)
    assert facts["cluster"]["accelerator_name"] == "H100"
    counted = json.loads(plan(config, "--gpus", "4", "--gpus-per-node", "2", "--accelerator", "H100", "--json")[0])
    assert counted["layouts"] == facts["layouts"]
    hosts.write_text("node1 slots=2\nnode2 slots=4\n")
    _, err = plan(config, "--hostfile", str(hosts), "--accelerator", "h100", code=2)
    assert "node2 has 4 slots and node1 2" in err and "use 2 slots of each" in err
    hosts.write_text("node1 slots=2\n")
    _, err = plan(config, "--hostfile", str(hosts), code=2)
    assert "add --accelerator, such as H100" in err


MISTAKES: dict[str, tuple[list[str], list[str]]] = {
    "GPUs that fill no node": (["--gpus", "12", "--accelerator", "H100"], ["--gpus 12", "8 or 16"]),
    "unknown accelerator": (["--gpus", "8", "--accelerator", "A100"], ["A100-40GB or A100-80GB"]),
    "two clusters": (["--gpus", "8", "--hostfile", "hosts"], ["--hostfile and --gpus", "give one"]),
    "an accelerator for this machine": (["--accelerator", "H100"], ["--accelerator belongs to --hostfile or --gpus"]),
    "no such cluster": (["--cluster", "nowhere.yaml"], ["nowhere.yaml", "No such file"]),
    "no such hostfile": (["--hostfile", "nowhere", "--accelerator", "H100"], ["nowhere does not exist"]),
    "more GPUs than sequences": (
        ["--gpus", "64", "--accelerator", "H100", "training.global_batch_size=2", "training.sequence_length=127"],
        ["no layout works on 64 x H100", "training.global_batch_size 2 is not a multiple", "use"],
    ),
    "a model that fits nowhere": (
        ["--gpus", "1", "--accelerator", "H100", "model.intermediate_size=20000000000", "precision.dtype=bf16"],
        ["fits in no layout on 1 x H100", "lacks", "GiB", "no number of them up to", "needs", "a smaller model"],
    ),
    "a model that needs more GPUs": (
        ["--gpus", "1", "--accelerator", "H100", "model.intermediate_size=20000000", "precision.dtype=bf16"],
        ["fits in no layout on 1 x H100", "lacks", "GiB", "it fits on 2 of them"],
    ),
    "a number format without a peak": (
        ["--gpus", "2", "--accelerator", "V100-32GB", "precision.dtype=bf16"],
        ["V100-32GB has no peak_tflops for precision.dtype bf16", "use fp16 or fp32"],
    ),
    "an option that no layout has": (
        ["--gpus", "8", "--accelerator", "H100", "parallel.zero_stage=9"],
        ['override "parallel.zero_stage=9": parallel.zero_stage must be'],
    ),
    "more accelerators than anybody has": (
        ["--gpus", "1000000000", "--accelerator", "H100"],
        ["a cluster of 1,000,000,000 accelerators: a plan is for 10,000,000 at most"],
    ),
    "no accelerator's name": (["--gpus", "8", "--accelerator", ""], ['unknown accelerator "": the catalogue has']),
    "two results in one file": (["--write", "x", "--html", "./x"], ["--write and --html both name x"]),
    "a result in a folder that is not there": (["--write", "no/x"], ["no/x cannot be written: there is no folder"]),
    "a result that is a folder": (["--html", "/", "--overwrite"], ["/ is a folder: name a file"]),
    "a name that is not text": (["--write", "a\udcff.yaml"], ["'a\\udcff.yaml' is not UTF-8: rename it"]),
    "a price below nothing": (["--price-per-accelerator-hour", "-1"], ["--price-per-accelerator-hour -1: must be"]),
    "CSV and JSON": (["--csv", "--json"], ["--json and --csv", "give one"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake: str, plan: Plan, files: tuple[str, str]) -> None:
    words, fragments = MISTAKES[mistake]
    out, err = plan(files[0], *words, code=2)
    assert not out and err.startswith("megalite: error: ") and err.count("\n") == 1, err
    assert all(fragment in err for fragment in fragments), err


def test_what_the_plan_is_made_from_is_not_replaced(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    config, cluster = files
    before = [Path(path).read_text() for path in files]
    for option, path in (("--html", config), ("--html", cluster), ("--write", cluster)):
        _, err = plan(config, "--cluster", cluster, option, path, "--overwrite", code=2)
        assert "would replace what the plan is made from" in err
    assert [Path(path).read_text() for path in files] == before
    plan(config, "--cluster", cluster, "--write", config, "--overwrite")
    assert "chosen for" in Path(config).read_text()


def test_destinations_are_checked_before_the_search(
    plan: Plan, files: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts_command, "search", lambda *_, **__: pytest.fail("searched first"))
    plan(files[0], "--cluster", files[1], "--html", "nowhere/x.html", code=2)


def test_a_line_break_in_a_name_stays_in_the_comment(plan: Plan, files: tuple[str, str], tmp_path: Path) -> None:
    strange = tmp_path / "a\nrun_dir: elsewhere\n.yaml"
    strange.write_text(Path(files[0]).read_text())
    best = tmp_path / "best.yaml"
    plan(str(strange), "--cluster", files[1], "--write", str(best))
    text = best.read_text()
    assert not any(line.startswith("run_dir: elsewhere") for line in text.splitlines())
    assert yaml.safe_load(text)["run_dir"] == yaml.safe_load(strange.read_text())["run_dir"]


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, link = tmp_path / "x.yaml", tmp_path / "link.yaml"
    target.write_text("old")
    link.symlink_to(target)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patches:
        patches.setattr(output, "write_durably", full)
        with pytest.raises(LaunchError, match=r"link.yaml cannot be written: the disk is full"):
            output.write_file(link, "new")
    assert target.read_text() == "old"
    output.write_file(link, "new")
    assert target.read_text() == "new" and link.is_symlink()
    output.write_file(Path("/dev/null"), "new")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("number", [1, 2, 12, 49, 97, 360])
def test_divisors_ascend(number: int) -> None:
    assert divisors(number) == tuple(n for n in range(1, number + 1) if number % n == 0)


def test_divisors_of_large_numbers_take_no_time() -> None:
    assert len(divisors(2**40)) == 41


def test_figures_of_a_row_are_those_of_the_candidate(files: tuple[str, str]) -> None:
    """GiB over GiB, and tokens of one accelerator."""
    cluster = read_cluster(Path(files[1]))
    config = load_run_config(Path(files[0]), layouts_command.ALL_AUTO)
    best = search(config, cluster).best
    assert best is not None
    row = row_of(best, cluster, 1)
    assert row["memory_gib"] == pytest.approx(best.fullest.total / 2**30)
    assert row["memory_used"] == pytest.approx(row["memory_gib"] / cluster.accelerator.memory_gib)
    assert row["accelerators"] == 4
    assert row["tokens_per_s"] == pytest.approx(best.job.tokens_per_step / row["step_s"])
    assert row["tokens_per_s_per_accelerator"] == pytest.approx(row["tokens_per_s"] / 4)
