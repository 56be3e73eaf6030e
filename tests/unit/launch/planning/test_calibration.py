"""`megalite plan calibrate`: one constant, from receipts that may say anything, into a catalogue that people edit."""

from __future__ import annotations

import json
import math
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.errors import LaunchError
from launch.planning import calibration
from launch.planning.calibration import fit, minimize, read_run
from launch.prediction import hardware_catalogue as user_hardware
from launch.prediction.hardware_catalogue import add_to_user_file, known_hardware
from launch.prediction.prediction import Prediction, SessionMeasurement
from launch.prediction.this_machine import Machine
from megalite.checkpoint.durable_files import write_durably
from megalite.config import Config, ConfigError, resolve_layout
from megalite.planner.hardware import ClusterFile, catalogue, cluster_of, find_link, read_cluster
from tests.helpers.commands import command_line

MODEL = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
}


def machine(kind: str = "H100", ranks: int = 8) -> Machine:
    whole = catalogue().accelerators[kind]
    cluster = cluster_of(ClusterFile(accelerator=kind, nodes=1, accelerators_per_node=ranks), "here")
    return Machine(kind, whole, find_link(whole.intra_node), cluster, is_cpu=False)


def finished(
    folder: Path,
    measured_s: float | None,
    kind: str = "H100",
    steps: int = 20,
    model: dict[str, int] = MODEL,
    **parallel: Any,
) -> Path:
    """A run as training leaves it, whose steps took so long; None: as long as efficiency 0.5 says."""
    config = Config.model_validate(
        {
            "run_dir": str(folder),
            "model": model,
            "data": {"path": "unused"},
            "parallel": parallel,
            "training": {"global_batch_size": 32, "micro_batch_size": 2, "sequence_length": 2048, "steps": 50},
        }
    )
    world_size = math.prod(value for name, value in parallel.items() if name.endswith("_size"))
    layout = resolve_layout(config, world_size, "cuda")
    prediction = Prediction.of(config, layout, machine(kind), "", 0)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config.to_yaml())
    names = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
    receipt = {
        "layout": {name: getattr(layout, name) for name in names},
        "prediction": prediction.facts(),
        "measured": {"steps": steps, "step_time_s": 1.0, "data_wait_s": 0.0, "ranks": []},
        "resumed_from_step": 0,
    }
    write(folder, receipt)
    receipt["measured"]["step_time_s"] = measured_s or read_run(folder).predicted_s(0.5)
    write(folder, receipt)
    return folder


def write(folder: Path, receipt: Any) -> None:
    (folder / "receipt.json").write_text(json.dumps(receipt))


def receipt_of(folder: Path) -> Any:
    return json.loads((folder / "receipt.json").read_text())


LAYOUTS: list[dict[str, Any]] = [
    {"tensor_parallel_size": 1},
    {"tensor_parallel_size": 4, "data_parallel_size": 2},
    {"pipeline_parallel_size": 4, "data_parallel_size": 2, "zero_stage": 1},
]


def test_the_constant_that_made_the_times_is_found_again(tmp_path: Path) -> None:
    runs = [read_run(finished(tmp_path / str(n), None, **layout)) for n, layout in enumerate(LAYOUTS)]
    for chosen in (runs[:1], runs):
        (found,) = fit(chosen)
        assert found.efficiency == pytest.approx(0.5, rel=1e-3)
        assert found.accelerator == "H100" and all(run.whole.efficiency != found.efficiency for run in found.runs)


def test_it_is_the_least_squares_of_logarithms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all of a step is products, T = a / e, it is the geometric mean of a_i / t_i."""

    class Step:
        def __init__(self, seconds: float) -> None:
            self.seconds = seconds
            self.parts: dict[str, float] = {}

    monkeypatch.setattr(calibration, "step_time", lambda job, cluster: Step(0.7 / cluster.accelerator.efficiency))
    times = [1.0, 1.4, 3.5]
    runs = [read_run(finished(tmp_path / str(n), t, tensor_parallel_size=1)) for n, t in enumerate(times)]
    (found,) = fit(runs)
    assert found.efficiency == pytest.approx(math.prod(0.7 / t for t in times) ** (1 / 3), rel=1e-3)


@given(st.floats(-6, 2), st.floats(0.1, 10))
def test_a_minimum_is_found_wherever_it_is(place: float, steepness: float) -> None:
    assert minimize(lambda x: steepness * (x - place) ** 2, -7.0, 3.0) == pytest.approx(place, abs=1e-5)


def test_accelerators_are_fitted_apart(tmp_path: Path) -> None:
    paths = [finished(tmp_path / kind, None, kind=kind, tensor_parallel_size=2) for kind in ("H100", "A100-80GB")]
    receipt = receipt_of(paths[1])
    receipt["measured"]["step_time_s"] *= 1.5
    write(paths[1], receipt)
    h100, a100 = fit([read_run(path) for path in paths])
    assert (h100.accelerator, a100.accelerator) == ("H100", "A100-80GB")
    assert h100.efficiency == pytest.approx(0.5, rel=1e-3) and a100.efficiency < 0.4


def test_times_that_no_constant_explains_are_told(tmp_path: Path) -> None:
    for name, seconds, word in (("slow", 1e7, "longer"), ("fast", 1e-6, "shorter")):
        run = read_run(finished(tmp_path / name, seconds, tensor_parallel_size=2))
        with pytest.raises(LaunchError, match=f"no efficiency of H100 explains .*{word}"):
            fit([run])


def test_a_run_that_was_killed_is_read_from_its_metrics(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", None, tensor_parallel_size=2)
    receipt = receipt_of(folder)
    receipt |= {"measured": {"steps": 0, "step_time_s": None}, "resumed_from_step": 10}
    write(folder, receipt)
    seconds = {step: 9.0 if step <= 13 else 0.5 + step / 100 for step in range(1, 21)}  # until 10 of another session
    lines = [{"step": step, "step_time_s": s + 0.25, "data_wait_s": 0.25} for step, s in seconds.items()]
    text = "\n".join(map(json.dumps, lines)) + '\n{"step": 21, "step_ti'
    (folder / "metrics.jsonl").write_text(text)
    run = read_run(folder)
    assert (run.steps, run.measured_s) == (7, pytest.approx(0.67))
    (folder / "metrics.jsonl").write_text("\n".join(text.splitlines()[:15]))
    with pytest.raises(LaunchError, match="it has 2 steps after 3 of warm-up, and 5 are needed"):
        read_run(folder)


def test_what_is_no_receipt_of_ours_is_one_sentence(tmp_path: Path) -> None:
    good = finished(tmp_path / "good", None, tensor_parallel_size=2)
    text, values = (good / "receipt.json").read_text(), receipt_of(good)
    hostile: dict[str, str] = {
        "no receipt of a run": "[1, 2]",
        "is not JSON, or was cut off": text[: len(text) // 2],
        "is not JSON": "[" * 100_000,
        "has no prediction": json.dumps({key: values[key] for key in ("layout", "measured")}),
        "its receipt has no prediction": json.dumps(values | {"prediction": 3}),
        "no step time was predicted for it, because unknown GPU": json.dumps(
            values | {"prediction": {"problem": "unknown GPU", "memory": []}}
        ),
        "layout.tensor_parallel_size is not": json.dumps(
            values | {"layout": values["layout"] | {"tensor_parallel_size": -1}}
        ),
        "measured.step_time_s is not": json.dumps(values | {"measured": {"steps": 9, "step_time_s": float("nan")}}),
        "measured.steps is not": json.dumps(values | {"measured": {"steps": "many", "step_time_s": 1}}),
        "prediction.cluster": json.dumps(values | {"prediction": values["prediction"] | {"cluster": {"nodes": 0}}}),
        "5 are needed": json.dumps({key: value for key, value in values.items() if key != "measured"}),
    }
    for sentence, content in hostile.items():
        (good / "receipt.json").write_text(content)
        with pytest.raises(LaunchError, match=sentence) as caught:
            read_run(good)
        assert "\n" not in str(caught.value) and str(good) in str(caught.value)
    (good / "receipt.json").write_text(text)
    (good / "config.yaml").unlink()
    with pytest.raises(LaunchError, match=r"config\.yaml"):
        read_run(good)
    with pytest.raises(LaunchError, match=r"it has no receipt\.json: name the folder of a run"):
        read_run(tmp_path)


def test_the_command_writes_what_later_predictions_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    own = tmp_path / "config" / "megalite" / "hardware.yaml"
    own.parent.mkdir(parents=True)
    own.write_text("# ours\n# since 2024\nlinks:\n  our ring: {gb_per_s: 12}\n")
    run = finished(tmp_path / "run", None, tensor_parallel_size=2)
    dry = command_line("plan", "calibrate", str(run), "--dry-run")
    assert dry.returncode == 0 and "nothing was written" in dry.stdout and "H100: efficiency" in dry.stdout
    assert "H100" not in own.read_text()
    done = command_line("plan", "calibrate", str(run), str(tmp_path), "--json")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    (told,) = answer["fits"]
    assert told["efficiency"] == pytest.approx(0.5, rel=1e-3) and answer["written"] == str(own)
    (row,) = told["runs"]
    assert abs(row["error"]) < 1e-3 < abs(row["error_before"]) and row["steps"] == 20
    assert len(answer["left_out"]) == 1 and "no receipt.json" in done.stderr
    assert own.read_text().startswith("# ours\n# since 2024\n")
    known = known_hardware()
    assert known.accelerators["H100"].efficiency == told["efficiency"]
    assert known.accelerators["H100"].calibrated_on.startswith("run run, 20")
    assert known.accelerators["H100"].peak_tflops == catalogue().accelerators["H100"].peak_tflops
    assert known.accelerators["A100-80GB"] == catalogue().accelerators["A100-80GB"]
    assert known.links["our ring"].gb_per_s == 12


def test_steps_of_other_things_than_products_are_no_calibration(tmp_path: Path) -> None:
    tiny = MODEL | {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 200}
    own = tmp_path / "own.yaml"
    run = finished(tmp_path / "run", None, model=tiny, tensor_parallel_size=4)
    done = command_line("plan", "calibrate", str(run), "--output", str(own))
    assert done.returncode == 2 and "calibrate on a larger model" in done.stderr and not own.exists()


def test_mistakes_are_one_sentence(tmp_path: Path) -> None:
    for words, sentence in (
        ([str(tmp_path)], "no run to calibrate on"),
        ([str(tmp_path), str(tmp_path / "b")], r"(and 1 more)"),
        ([str(tmp_path), "--json", "--csv"], "two ways to print"),
    ):
        done = command_line("plan", "calibrate", *words)
        assert done.returncode == 2 and sentence in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_accelerator_that_nobody_knows_is_written_whole(tmp_path: Path) -> None:
    """As this machine's CPU: what was measured must be there when the cache is not."""
    run = finished(tmp_path / "run", None, tensor_parallel_size=2)
    receipt, name = receipt_of(run), "Some CPU, 4 cores"
    link = f"{name}, between ranks"
    receipt["prediction"] |= {"accelerator": name}
    receipt["prediction"]["whole_accelerator"]["intra_node"] = link
    write(run, receipt)
    own = tmp_path / "own.yaml"
    done = command_line("plan", "calibrate", str(run), "--output", str(own))
    assert done.returncode == 0, done.stderr
    known = known_hardware(own)
    assert known.accelerators[name].efficiency == pytest.approx(0.5, rel=1e-3)
    assert cluster_of(ClusterFile(accelerator=name, nodes=1), "x", known).intra_node.gb_per_s == 450


def test_links_of_ones_own_go_along_into_another_catalogue(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", None, tensor_parallel_size=2)
    receipt = receipt_of(run)
    receipt["prediction"] |= {"accelerator": "Ours"}
    receipt["prediction"]["link"] = {"gb_per_s": 12}
    receipt["prediction"]["cluster"]["inter_node"] = {"gb_per_s": 3}
    receipt["prediction"]["whole_accelerator"] |= {"intra_node": "our ring", "inter_node": "our net"}
    write(run, receipt)
    own = tmp_path / "own.yaml"
    own.write_text("links:\n  our ring: {gb_per_s: 11}\n")
    assert command_line("plan", "calibrate", str(run), "--output", str(own)).returncode == 0
    cluster = cluster_of(ClusterFile(accelerator="Ours", nodes=2), "x", known_hardware(own))
    assert (cluster.intra_node.gb_per_s, cluster.inter_node.gb_per_s) == (11, 3), "what is there stays"


def test_times_that_are_not_finite_are_no_constant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = read_run(finished(tmp_path / "run", None, tensor_parallel_size=2))
    for predicted in (math.nan, math.inf, 0.0):
        monkeypatch.setattr(calibration.MeasuredRun, "predicted_s", lambda *_, is_=predicted: is_)
        with pytest.raises(LaunchError, match="cannot be compared"):
            fit([run])


def test_numbers_that_no_machine_has_are_one_sentence(tmp_path: Path) -> None:
    folder = finished(tmp_path / "run", None, tensor_parallel_size=2)
    receipt = receipt_of(folder)
    strange = json.loads(json.dumps(receipt))
    strange["prediction"]["cluster"]["accelerator"]["memory_gb_per_s"] = 1e-320
    strange["prediction"]["whole_accelerator"]["memory_gb_per_s"] = 1e-320
    write(folder, strange)
    with pytest.raises(LaunchError):
        fit([read_run(folder)])
    write(folder, receipt | {"measured": {"steps": 0, "step_time_s": None}})
    lines = [f'{{"step": {step}, "step_time_s": {"9" * 400 if step == 9 else 1}}}' for step in range(1, 20)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    assert read_run(folder).steps == 15, "of 16 after warm-up"
    write(folder, receipt | {"prediction": {"problem": "two\nlines"}})
    with pytest.raises(LaunchError, match=r"because two lines$"):
        read_run(folder)


def test_the_table_is_shown_before_anything_is_written(tmp_path: Path) -> None:
    run = finished(tmp_path / "run", None, tensor_parallel_size=2)
    (tmp_path / "file").write_text("")
    done = command_line("plan", "calibrate", str(run), "--output", str(tmp_path / "file" / "own.yaml"))
    assert done.returncode == 2 and "H100: efficiency" in done.stdout and "wrote" not in done.stdout


def test_a_catalogue_of_ones_own_extends_and_corrects(tmp_path: Path) -> None:
    own = tmp_path / "hardware.yaml"
    own.write_text(
        "accelerators:\n  h100: {efficiency: 0.5}\n  L4:\n    memory_gib: 22\n    peak_tflops: {bf16: 121}\n"
        "    memory_gb_per_s: 300\n    intra_node: PCIe 4\n    inter_node: Ethernet 100\n"
    )
    known = known_hardware(own)
    assert known.accelerators["H100"].efficiency == 0.5 and "h100" not in known.accelerators
    assert cluster_of(ClusterFile(accelerator="l4", nodes=2), "x", known).intra_node.gb_per_s == 32
    assert known_hardware(tmp_path / "none.yaml") == catalogue()
    own.write_text("")
    assert known_hardware(own) == catalogue()


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "accelerators:\n  H100: {efficency: 0.5}\n",
            'line 2: accelerators.H100.efficency: unknown option "efficency": did you mean "efficiency"?',
        ),
        ("accelerators:\n  H100:\n    colour: red\n", "line 3: accelerators.H100.colour: unknown option"),
        ("accelerators:\n  L4: {memory_gib: 22}\n", "line 2: accelerators.L4.peak_tflops: peak_tflops is required"),
        (
            "accelerators:\n  h100:\n    efficiency: fast\n",
            "line 3: accelerators.h100.efficiency: efficiency must be a valid number, got 'fast'",
        ),
        ("accelerators:\n  H100: {peak_tflops: {bf17: 3}}\n", "accelerators.H100.peak_tflops: peak_tflops must be"),
        ("links:\n  NVLink 4: {gb_per_s: 0}\n", "line 2: links.NVLink 4.gb_per_s: gb_per_s must be"),
        ("links:\n  x:\n", "line 2: links.x must have fields such as gb_per_s: 50, got null"),
        ("accelerator:\n  H100: {}\n", 'line 1: unknown section "accelerator": did you mean "accelerators"?'),
        ("accelerators: 3\n", "line 1: accelerators must have entries with a name each, got 3"),
        ("- a\n", "hardware.yaml: the file must have accelerators and links, got ['a']"),
        ("accelerators: [\n", "hardware.yaml: "),
    ],
)
def test_a_mistake_in_ones_own_catalogue_names_its_entry_and_field(text: str, sentence: str, tmp_path: Path) -> None:
    own = tmp_path / "hardware.yaml"
    own.write_text(text)
    with pytest.raises(ConfigError) as caught:
        known_hardware(own)
    told = str(caught.value)
    assert sentence in told and told.startswith(str(own)) and "\n" not in told and "  " not in told
    assert "the config" not in told


def test_a_cluster_file_that_is_a_list_is_told_what_it_should_be(tmp_path: Path) -> None:
    (tmp_path / "cluster.yaml").write_text("- H100\n")
    with pytest.raises(ConfigError, match=r"cluster.yaml: a cluster file has accelerator, nodes, .*, got \['H100'\]"):
        read_cluster(tmp_path / "cluster.yaml")


def test_two_that_add_at_a_time_both_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits from before it reads until the first has written."""
    path = tmp_path / "hardware.yaml"
    second = threading.Thread(target=add_to_user_file, args=({"links": {"b": {"gb_per_s": 2}}}, path))

    def slowly(to: Path, data: bytes) -> None:
        monkeypatch.setattr(user_hardware, "write_durably", write_durably)
        second.start()
        second.join(0.2)
        write_durably(to, data)

    monkeypatch.setattr(user_hardware, "write_durably", slowly)
    add_to_user_file({"links": {"a": {"gb_per_s": 1}}}, path)
    second.join()
    assert {"a", "b"} <= known_hardware(path).links.keys()
    assert list(tmp_path.iterdir()) == [path]


def test_adding_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "hardware.yaml"
    add_to_user_file({"accelerators": {"H100": {"efficiency": 0.5}}}, path)
    add_to_user_file({"accelerators": {"H100": {"calibrated_on": "x"}, "H200": {"efficiency": 0.6}}}, path)
    known = known_hardware(path).accelerators
    assert (known["H100"].efficiency, known["H100"].calibrated_on, known["H200"].efficiency) == (0.5, "x", 0.6)
    (tmp_path / "file").write_text("")
    with pytest.raises(LaunchError, match="cannot be written"):
        add_to_user_file({}, tmp_path / "file" / "hardware.yaml")


def test_the_median_leaves_the_warm_up_and_waiting_out() -> None:
    measurement = SessionMeasurement()
    assert measurement.facts([])["step_time_s"] is None
    for seconds in (9.0, 9.0, 9.0, 1.0, 5.0, 2.0):
        measurement.add({"step_time_s": seconds + 0.5, "data_wait_s": 0.5})
    facts = measurement.facts([{"peak_mib": 3.0, "process_mib": 1.0}, None])
    assert (facts["steps"], facts["step_time_s"], facts["data_wait_s"]) == (3, 2.0, 0.5)
    assert facts["ranks"] == [{"peak_mib": 3.0, "process_mib": 1.0}, None]
