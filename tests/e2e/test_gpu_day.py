"""The GPU day where there is no GPU: its programs for real on tiny models, its bookkeeping, and a device that is not
there."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
import venv
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from benchmarks.gpu_day import __main__ as command
from benchmarks.gpu_day import levers, machine, parity, process, shapes, training, wheels
from benchmarks.gpu_day.context import CommandFailed, Context, last_json
from benchmarks.gpu_day.parts import MOST_S, PARTS, Part, find
from benchmarks.gpu_day.profile_step import STEP, busy_us, counts
from benchmarks.gpu_day.store import FAILED, OVER_LIMIT, PASSED, ROOT, ResultStore, code_digest, folder_name
from benchmarks.gpu_day.summary import summary, write_summary

KEY = {"accelerator": "NVIDIA Test", "torch": "2.11.0", "cuda": "13.0", "python": "3.12.3", "code": "c0de"}
WHOLE = SimpleNamespace(total_memory=80 * 2**30, multi_processor_count=132)


def gpu_day(
    *words: str | Path, python: str | Path = sys.executable, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    line = [str(python), "-m", "benchmarks.gpu_day", *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}  # a second thread would only spin
    return subprocess.run(line, cwd=cwd, capture_output=True, text=True, check=False, env=environment)


@pytest.fixture
def store(tmp_path: Path) -> ResultStore:
    return ResultStore(tmp_path / "results", KEY)


def context_of(store: ResultStore, tmp_path: Path, **changed: Any) -> Context:
    values = {"part": "one", "device": "cpu", "tiny": True, "work": tmp_path, "overrides": []} | changed
    said: list[str] = []
    return Context(**values, store=store, record=store.begin(values["part"], again=False), say=said.append)


SOME_PARTS = ("environment", "train-1b", "levers-1b-documents")
LEVERS = ("levers-gemma-2-2b", "levers-qwen3-moe-4-layers")
MORE_PARTS = pytest.param((*SOME_PARTS, *LEVERS, "checkpoint", "generate"), marks=pytest.mark.exhaustive)


@pytest.fixture
def bare_checkout(tmp_path: Path) -> tuple[Path, Path]:
    """A copy of the sources that nobody has installed, and a Python with all packages that does not know megalite."""
    folder, environment = tmp_path / "checkout", tmp_path / "python"
    for room in ("megalite", "models", "data_pipeline", "launch", "benchmarks"):
        shutil.copytree(ROOT / room, folder / room)  # with the bytecode that is there
    shutil.copy2(ROOT / "pyproject.toml", folder)
    venv.create(environment, symlinks=True)
    places = {kind: Path(sysconfig.get_path(kind, vars={"base": str(environment)})) for kind in ("purelib", "platlib")}
    for kind, place in places.items():
        for package in Path(sysconfig.get_path(kind)).iterdir():
            if "megalite" not in package.name and package.suffix != ".pth" and not (place / package.name).exists():
                (place / package.name).symlink_to(package)
    python = environment / "bin" / "python"
    unknown = subprocess.run([python, "-c", "import megalite"], cwd=tmp_path, capture_output=True, check=False)
    assert unknown.returncode == 1 and b"No module named 'megalite'" in unknown.stderr
    return folder, python


@pytest.mark.slow
@pytest.mark.timeout(900)  # several whole commands
@pytest.mark.parametrize("parts", [SOME_PARTS, MORE_PARTS], ids=["some", "more"])
def test_tiny_models_go_through_the_parts(
    parts: tuple[str, ...], bare_checkout: tuple[Path, Path], tmp_path: Path
) -> None:
    """As `--tiny` does on a CPU, in the processes that a GPU day has; a second call finds nothing to do.

    It runs as on a machine to which a checkout was carried: without metadata of megalite every training has ended in
    a PackageNotFoundError there.
    """
    checkout, python = bare_checkout
    words = [word for part in parts for word in ("--part", part)]
    words += ["--tiny", "--device", "cpu", "--results", str(tmp_path / "results"), "--work", str(tmp_path / "work")]
    done = gpu_day(*words, python=python, cwd=checkout)
    assert done.returncode == 0, done.stdout + done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    found = {part: json.loads((folder / f"{part}.json").read_text()) for part in parts}
    assert all(record["status"] == PASSED for record in found.values())
    _check_training(found["train-1b"]["items"])
    for part in set(parts) & {*LEVERS, "levers-1b-documents"}:
        assert list(found[part]["items"]) == list(levers.OF_TINY)
        for item in found[part]["items"].values():
            assert item["tokens_per_second"] == pytest.approx(8 * 64 / item["step_s"]) and item["model_tflops"] > 0
    if "checkpoint" in parts:
        saved = found["checkpoint"]["items"]
        assert saved["resume, save in the background"]["started_at_step"] == 3 and saved["save"]["saved_bytes"] > 1e6
        assert found["generate"]["items"]["short prompt"]["tokens_per_second"] > 0
    page = (folder / "summary.md").read_text()
    assert "none of these numbers is a measurement" in page and "| train-1b | passed |" in page
    again = gpu_day(*words, python=python, cwd=checkout)
    assert again.returncode == 0 and again.stdout.count("ended well before") == len(parts)


def _check_training(items: dict[str, Any]) -> None:
    run, shape = items["training"], shapes.tiny(shapes.LLAMA_1B)
    assert run["parameters"] == shape.parameters and run["micro_batch_size"] == shape.micro_batch
    assert run["tokens_per_second"] == pytest.approx(shape.tokens_per_step / run["step_time_s"]["median"])
    peak = float(run["mfu_peak"].split()[0]) * 1e12  # may be measured too low: other tests compute beside this one
    assert run["mfu"] == pytest.approx(shapes.mfu(run["tokens_per_second"], shape.flops_per_token, peak), rel=1e-3)
    assert abs(run["memory_error"]) < 0.5


@pytest.mark.parametrize(
    ("shape", "parameters"),
    [
        (shapes.LLAMA_1B, 1_235_814_400),  # as the hub counts Llama-3.2-1B and 3B
        (shapes.LLAMA_3B, 3_212_749_824),
    ],
)
def test_parameters_are_those_of_the_published_models(shape: shapes.Shape, parameters: int) -> None:
    assert shape.parameters == parameters == shape.multiplied_parameters


def test_eight_layers_and_the_other_24_are_an_8b() -> None:
    shape = shapes.LLAMA_8B_8_LAYERS
    assert shape.parameters + 24 * shape.block_parameters == 8_030_261_248
    assert shape.parameters - shape.multiplied_parameters == 128256 * 4096


def test_flops_and_mfu_against_a_closed_form() -> None:
    """Three products of 2 flops for each weight and token, and for scores and values each, in all heads."""
    shape = shapes.tiny(shapes.LLAMA_8B_8_LAYERS)
    scores = 3 * 2 * 2 * shape.sequence * shape.heads * shape.head_dim * shape.layers
    assert shape.flops_per_token == 3 * 2 * shape.multiplied_parameters + scores
    assert shapes.mfu(1000.0, 6e9, 60e12) == pytest.approx(0.1)


def test_a_measurement_leaves_warm_up_out_and_says_why_there_is_no_mfu() -> None:
    shape = shapes.tiny(shapes.LLAMA_1B)
    config = shape.config(Path("run"), Path("data")) | {"recompute": {"mode": "none"}}
    times = [9.0, 9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    records = [{"step_time_s": s, "loss": 1.0, "memory_peak_mib": 100.0} for s in times]
    receipt = {"goodput": {"seconds": {"startup": 5.0}}, "prediction": {"problem": "the catalogue has no GPU 'X'"}}
    found = training.measurement(shape, config, records, receipt)
    assert found["step_time_s"] == {"median": 3.0, "least": 1.0, "most": 5.0}
    assert found["tokens_per_second"] == shape.tokens_per_step / 3.0
    assert (found["mfu"], found["memory_error"]) == (None, None)
    assert found["mfu_peak"] == "the catalogue has no GPU 'X'"
    whole = {"accelerator": "H200", "whole_accelerator": {"peak_tflops": {"bf16": 989.0}}}
    receipt["prediction"] = whole | {"memory": [{"peak_mib": 90.0}]}
    found = training.measurement(shape, config, records, receipt)
    rate = found["tokens_per_second"] * shape.flops_per_token
    assert found["mfu"] == pytest.approx(rate / 989e12) and found["memory_error"] == pytest.approx(-0.1)
    with pytest.raises(ValueError, match="3 steps are no more than"):
        training.measurement(shape, config, records[:3], receipt)


def event(name: str, category: str, begin: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": category, "ts": begin, "dur": duration}


def test_kernels_waits_and_idle_time_are_those_inside_the_step() -> None:
    found = counts(
        [
            {"ph": "M", "name": "process_name"},
            event(STEP, "user_annotation", 100, 100),
            event("cudaLaunchKernel", "cuda_runtime", 90, 2),  # before it
            event("cudaLaunchKernel", "cuda_runtime", 101, 2),
            event("cuLaunchKernelEx", "cuda_driver", 104, 2),
            event("cudaStreamSynchronize", "cuda_runtime", 150, 10),
            event("aten::mm", "cpu_op", 101, 4),
            event("aten::_local_scalar_dense", "cpu_op", 149, 12),
            event("gemm", "kernel", 110, 30),
            event("add", "kernel", 130, 20),  # on another stream, half beside the first
            event("Memcpy DtoH (Device -> Pageable)", "gpu_memcpy", 160, 10),
            event("gemm", "kernel", 200, 30),  # after it
        ]
    )
    assert (found["kernels"], found["launches"]) == (2, 2)
    assert found["host_syncs"] == {"cudaStreamSynchronize": 1}
    assert found["copies"] == {"Memcpy DtoH (Device -> Pageable)": 1}
    assert found["busy_ms"] == pytest.approx(0.05) and found["idle"] == pytest.approx(0.5)
    assert found["longest_kernels"][0] == {"kernel": "gemm", "calls": 1, "ms": 0.03, "part": 0.3}
    assert found["waiting_operators"] == {"aten::_local_scalar_dense": 1}
    assert busy_us([]) == 0


def fake_gpu(monkeypatch: pytest.MonkeyPatch, name: str = "NVIDIA H100 80GB HBM3") -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: name)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: WHOLE)


def test_the_facts_of_a_gpu_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch, store: ResultStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_gpu(monkeypatch)
    found = machine.facts("cuda")
    assert (found["accelerator_memory_gib"], found["capability"], found["count"]) == (80.0, "9.0", 2)
    assert folder_name(found, tiny=False) == "nvidia-h100-80gb-hbm3"
    monkeypatch.setattr(machine, "ceilings", lambda device: {"product_size": 8, "product_tflops": {"bf16": 700.0}})
    context = context_of(store, tmp_path, part="environment", device="cuda")
    machine.run(context)
    assert store.end("environment", PASSED, 1.0)["items"]["machine"]["packages"]["torch"]
    page = summary(store, PARTS)
    assert "NVIDIA H100 80GB HBM3, 80 GiB" in page and "| bf16 product of 8, TFLOP/s | 700 |" in page


def test_without_a_gpu_one_sentence_says_so(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = gpu_day("--part", "environment", "--results", tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1 and "sees no GPU; `--device cpu --tiny` tries" in done.stderr


def test_a_python_without_torch_starts_and_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "empty", with_pip=False, symlinks=True)
    done = gpu_day(python=str(tmp_path / "empty" / "bin" / "python"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu day: torch") and done.stderr.count("\n") == 1, done.stderr


def test_lacking_packages_are_named_and_found_among_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with torch, numpy, and transformers that are too old."""
    monkeypatch.setattr(wheels, "declared", lambda: ["torch>=2", "numpy>=2", "transformers>=5", "deepspeed", "wandb"])
    there = {"torch": ("2.11.0", ["sympy"]), "numpy": ("2.1", []), "transformers": ("4.9", ["tqdm"])}
    lack = wheels.lacking(tmp_path, there.get)
    assert list(lack.missing) == ["transformers", "deepspeed"] and len(lack.without_wheel) == 2
    sentence = command._sentence(lack, tmp_path / "site")
    assert f"make gpu-wheels PYTHON_VERSION={wheels.HERE}" in sentence and "all of them" in sentence
    for name, version, needs in (("deepspeed", "0.19.8", "hjson"), ("hjson", "3.1", ""), ("transformers", "5.1", "")):
        write_wheel(tmp_path, name, version, needs)
    lack = wheels.lacking(tmp_path, there.get)
    assert sorted(lack.wheels) == ["deepspeed", "hjson", "transformers"] and not lack.without_wheel
    assert str(lack.missing["transformers"]) == "transformers>=5"
    sentence = command._sentence(lack, tmp_path / "site")
    assert "--install-wheels" in sentence and "--no-index" in sentence and "numpy" not in sentence
    write_wheel(tmp_path, "torchao", "0.18.0", "")
    lack = wheels.lacking(tmp_path, there.get)
    assert "torchao" in lack.wheels and "torchao" not in lack.missing, "for float8 alone: no part needs it"
    assert "torchao" not in wheels.lacking(tmp_path, (there | {"torchao": ("0.18.0", [])}).get).wheels


def write_wheel(folder: Path, name: str, version: str, needs: str) -> None:
    import zipfile

    with zipfile.ZipFile(folder / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        told = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        archive.writestr(f"{name}-{version}.dist-info/METADATA", told + f"Requires-Dist: {needs}\n" * bool(needs))


def test_what_is_carried_leaves_out_torch_and_what_only_torch_needs() -> None:
    names = set(wheels.wanted("3.12"))
    assert {"deepspeed", "transformers", "pydantic-core", "numpy"} <= names
    assert not names & {"torch", "sympy", "triton", "pyarrow", "wandb", "datasets", "matplotlib", "megalite"}
    assert not [name for name in names if name.startswith("nvidia")]


def test_requirements_of_other_systems_are_left_out() -> None:
    assert wheels.parse("colorama; platform_system == 'Windows'") is None
    assert wheels.parse("pytest; extra == 'dev'") is None
    assert wheels.parse("tomli; python_version < '3.11'", environment={"python_version": "3.10"}) is not None
    assert str(wheels.parse("Ruamel.Yaml>=1,<2")) in ("ruamel-yaml<2,>=1", "ruamel-yaml>=1,<2")


def test_nothing_but_the_standard_library_at_the_start() -> None:
    """In the entry's own process, whatever is installed."""
    code = (
        "import sys; import benchmarks.gpu_day.__main__, benchmarks.gpu_day.run_part; "
        "own = {name.partition('.')[0] for name in sys.modules}; "
        "print(sorted(own & {'torch', 'numpy', 'yaml', 'pydantic', 'typer', 'rich', 'megalite', 'launch', 'models'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


PART = Part("one", "something", "nowhere:nothing", limit_s=30)


def writing(store: ResultStore, items: dict[str, Any]) -> list[str]:
    """A command that leaves these items, as a part's process does."""
    record = {"part": PART.name, "status": "running", "key": store.key, "items": items}
    code = f"import pathlib; pathlib.Path({str(store.path('one'))!r}).write_text({json.dumps(record)!r})"
    return [sys.executable, "-c", code]


def test_a_part_ends_well_only_if_all_its_items_do(store: ResultStore, capsys: pytest.CaptureFixture[str]) -> None:
    store.begin("one", again=False)
    assert command.run_part(PART, writing(store, {"a": {"passed": True}}), store, 30) == PASSED
    assert store.has_passed("one")
    wrong = {"a": {"passed": True}, "b": {"passed": False, "problem": "other numbers"}}
    assert command.run_part(PART, writing(store, wrong), store, 30) == FAILED
    assert not store.has_passed("one") and store.current("one")["problem"] == "not well: b"  # type: ignore[index]
    assert command.run_part(PART, [sys.executable, "-c", "print('no memory'); exit(5)"], store, 30) == FAILED
    assert "exit code 5: no memory" in capsys.readouterr().out


def test_a_part_over_its_limit_is_ended_with_all_it_started(store: ResultStore, tmp_path: Path) -> None:
    """Its grandchild has a session of its own, as ranks have, and a child that is nobody's."""
    pids = tmp_path / "pids"
    inner = f"import os, time; open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); os.fork() or time.sleep(0); "
    inner += f"open({str(pids)!r}, 'a').write(f'{{os.getpid()}} '); time.sleep(60)"
    code = (
        f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {inner!r}], start_new_session=True); "
        "time.sleep(60)"
    )
    store.begin("one", again=False)
    store.write("one", {**(store.current("one") or {}), "items": {"a": {"passed": True}}})
    started = time.monotonic()
    assert command.run_part(PART, [sys.executable, "-c", code], store, 2.0) == OVER_LIMIT
    assert time.monotonic() - started < 15
    found = store.current("one")
    assert found is not None and found["items"]["a"] and found["problem"] == "ended at its limit of 2 s"
    ended = {psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD}
    left = {each.pid for each in psutil.process_iter(["status"]) if each.info["status"] not in ended}
    assert not left & set(map(int, pids.read_text().split())), "the part's processes outlive it"
    assert list(store.begin("one", again=False)["items"]) == ["a"], "the next call goes on with the other items"
    assert store.begin("one", again=True)["items"] == {}


def test_who_is_silent_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SILENT_S", 0.3)
    said: list[str] = []
    ended = process.run([sys.executable, "-c", "import time; time.sleep(1.5); print('done')"], 20, said.append, "one")
    assert ended.code == 0 and "done" in said and said[0].startswith("one: ") and "of at most 20" in said[0]


def test_items_are_made_once_and_failures_again(store: ResultStore, tmp_path: Path) -> None:
    made: list[str] = []

    def make(name: str) -> dict[str, Any]:
        made.append(name)
        if len(made) == 2:
            raise CommandFailed("train", 1, "much\nout of memory\n")
        return {"value": len(made)}

    for _ in range(2):
        context = context_of(store, tmp_path)
        for name in ("a", "b"):
            context.item(name, lambda name=name: make(name))  # type: ignore[misc]
    assert made == ["a", "b", "b"]
    kept = store.current("one")
    assert kept is not None and kept["items"]["a"]["value"] == 1 and kept["items"]["b"]["value"] == 3


def test_results_of_other_code_or_another_machine_are_not_taken(store: ResultStore, tmp_path: Path) -> None:
    store.write("one", {"part": "one", "status": PASSED, "key": KEY, "items": {"a": {"passed": True}}})
    assert store.has_passed("one")
    other = ResultStore(store.folder, KEY | {"code": "other"})
    assert not other.has_passed("one") and other.begin("one", again=False)["items"] == {}
    store.path("one").write_text("{")
    assert store.read("one") is None
    (tmp_path / "megalite").mkdir()
    before = code_digest(tmp_path)
    (tmp_path / "megalite" / "new.py").write_text("x = 1\n")
    assert code_digest(tmp_path) != before


def test_a_call_stops_when_its_minutes_are_over(
    store: ResultStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = argparse.Namespace(parts=[PART, PART], again=False, minutes=0.01)
    monkeypatch.setattr(command, "part_command", lambda *arguments: pytest.fail("begun without time for it"))
    assert command.run_all(options, store, tmp_path) == 1
    assert capsys.readouterr().out.count("left for the next call") == 2


def test_the_page_of_trainings_and_verdicts(store: ResultStore) -> None:
    finding = {"quantity": "gradient", "name": "a|b", "error": 0.5, "bound": 0.1}
    told = {
        **{"passed": False, "device": "cuda", "changes": [], "diagnoses": []},
        "layouts": [
            {
                **{"layout": "tp=1", "dtype": "fp16", "passed": False, "seconds": 2.0, "crash": ""},
                **{"disagreements": [], "failures": [finding], "worst": finding},
            }
        ],
    }
    verdict = parity.verdict(told)
    assert verdict["rows"][0]["problem"] == "gradient of a|b: error 0.5 over its bound 0.1"
    store.write("parity", {"status": FAILED, "problem": "not well: llama", "key": KEY, "items": {"llama": verdict}})
    page = write_summary(store, PARTS).read_text()
    assert "| llama | tp=1 | fp16 | gradient, a\\|b | 0.5 | 0.1 | FAIL |" in page
    assert "| parity | failed: not well: llama |" in page and "| train-3b | not run |" in page


def test_the_last_json_of_an_output() -> None:
    assert last_json('said\n{"a": 1}\n{\n  "b": {\n "c": 2}\n}\n') == {"b": {"c": 2}}
    with pytest.raises(ValueError, match="no JSON"):
        last_json("nothing")


def test_parts_and_their_functions() -> None:
    assert all(part.limit_s <= MOST_S and callable(part.load()) for part in PARTS)
    assert [part.name for part in PARTS if part.name.startswith("checklist-")] == [part.name for part in PARTS[:3]]
    assert [part.name for part in find(["train-3b", "environment"])] == ["environment", "train-3b"]
    done = gpu_day("--part", "train-2b")
    assert done.returncode == 2 and "there is no part 'train-2b': choose from checklist-kernels" in done.stderr


def test_a_gpu_day_that_is_asked_to_end_leaves_nothing(tmp_path: Path) -> None:
    words = ["--part", "environment", "--tiny", "--device", "cpu", "--results", str(tmp_path), "--work", str(tmp_path)]
    line = [sys.executable, "-m", "benchmarks.gpu_day", *words]
    with subprocess.Popen(line, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as day:
        assert day.stdout is not None and day.stderr is not None
        assert next(line for line in day.stdout if line.startswith("environment: machine"))
        day.terminate()
        assert day.wait(20) == 130 and "the same command goes on" in day.stderr.read()
    lines = [" ".join(each.info["cmdline"] or ()) for each in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]


def test_one_gpu_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    command.choose_one_gpu("cuda")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2"
