"""The parts `checklist-...`: what to ask a GPU first. Each item is a figure, or `not_measured`: why there is none.

Trainings are of the 1B shape, 12 steps of bf16 with eager kernels unless they say otherwise.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.gpu_day import levers, parity, shapes, stored
from benchmarks.gpu_day.context import CommandFailed

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

Facts = dict[str, Any]
STEPS, SAVED, KILLED = 12, 6, 9
NEAR = 0.02  # relative, of losses and the first gradient norm: five roundings of bf16
EAGER = ("performance.compile=none",)
DETERMINISTIC = ("training.deterministic=true",)
DOCUMENTS = (*EAGER, "data.document_mask=true")
OPTIONS: dict[str, tuple[str, ...]] = {
    "documents": DOCUMENTS,
    "documents with a mask": (*DOCUMENTS, "performance.attention=sdpa"),
    "fp16 from a scale of 2^26": (*EAGER, "precision.dtype=fp16", "deepspeed={fp16: {initial_scale_power: 26}}"),
    "float8": ("precision.float8=rowwise",),
    "Muon": (*EAGER, "optimizer.name=muon"),
    "optimizer on the host": (*EAGER, "offload.optimizer=cpu"),
}


class Killed(Exception):
    """Leaves a run, with all its processes, by SIGKILL: `process.run` ends what it has started so."""


def kernels(context: Context) -> None:
    """The part `checklist-kernels`: what a step launches and waits for, and whether verify agrees."""
    for lever in ("eager", "compiled blocks"):
        context.item(f"a step, {lever}", lambda lever=lever: _step(context, lever))  # type: ignore[misc]
    for dtype, sequence in (("bf16", 64), ("bf16", 96), ("fp16", 96)):
        verify = parity.verification(context, "llama", dtype, "tp=1;recompute=full", sequence)
        context.item(f"verify in fp32 and {dtype}, sequences of {sequence}", verify)
    context.item("two GPUs", lambda: {"not_measured": "a GPU day takes one: docs/gpu_day.md has the commands"})


def trainings(context: Context) -> None:
    """The part `checklist-trainings`: compiled as eager, the same twice and over a kill, and text of it."""
    eager = context.item("eager", lambda: _trained(context, "eager", *EAGER))
    compiled = context.item("compiled", lambda: _trained(context, "compiled", "performance.compile=blocks"))
    context.item("compiled beside eager", lambda: _difference(eager, compiled, NEAR))
    first = context.item("deterministic", lambda: _trained(context, "deterministic", *DETERMINISTIC))
    again = context.item("deterministic again", lambda: _trained(context, "deterministic", *DETERMINISTIC))
    context.item("deterministic twice", lambda: _difference(first, again, 0.0))
    resumed = context.item("killed and resumed", lambda: _killed_and_resumed(context))
    context.item("killed and resumed beside deterministic", lambda: _difference(first, resumed, 0.0))
    run = context.work / "checklist_killed"
    if not run.exists():  # of an earlier call, on a machine that is gone
        _killed_and_resumed(context)
    for name, value in (("cuDNN as torch has it", "0"), ("cuDNN last", "1")):
        with patch.dict(os.environ, TORCH_CUDNN_SDPA_DEPRIORITIZED=value):
            context.item(f"generate, {name}", lambda: stored.generated(context, run, stored.PROMPT))
    shutil.rmtree(run, ignore_errors=True)  # some 15 GB for each checkpoint of the 1B


def options(context: Context) -> None:
    """The part `checklist-options`: what has kernels or a path of its own on GPUs, beside eager bf16."""
    eager = context.item("eager", lambda: _trained(context, "eager", *EAGER))
    found = {
        name: context.item(name, lambda name=name, words=words: _tried(context, name, *words))  # type: ignore[misc]
        for name, words in OPTIONS.items()
    }
    with_mask, without = found["documents with a mask"], found["documents"]
    context.item("documents beside a mask", lambda: _difference(with_mask, without, NEAR))
    for name in ("fp16 from a scale of 2^26", "float8", "optimizer on the host"):
        if "not_measured" not in found[name]:
            context.item(f"{name} beside eager", lambda name=name: _first_loss(eager, found[name]))  # type: ignore[misc]


def _trained(context: Context, name: str, *options: str, fresh: bool = True, until: int | None = None) -> Facts:
    """Trains, with a look at the GPU's memory on the way. Raises Killed once step `until` is told. A folder that is not
    `fresh` is gone on with."""
    folder = context.fresh_folder(f"checklist_{name}") if fresh else context.work / f"checklist_{name}"
    shape = replace(shapes.tiny(shapes.LLAMA_1B) if context.tiny else shapes.LLAMA_1B, steps=STEPS)
    config = context.write_config(f"{folder.name}_config", shape.config(folder, context.data()))
    found: Facts = {"attention": None, "memory_used_mib": None}

    def watch(line: str) -> None:
        context.say(line)
        if "attention of" in line:
            found["attention"] = line.partition(": attention of ")[2]
        if f"step {STEPS - 2}/" in line:
            found["memory_used_mib"] = _used_mib()
        if until is not None and f"step {until}/" in line:
            raise Killed

    replace(context, say=watch).megalite("train", config, *context.overrides, *options)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = {record["step"]: record for record in records}.values()  # those before a kill may be there twice
    prediction = json.loads((folder / "receipt.json").read_text()).get("prediction") or {}
    found |= {name: [step.get(name) for step in steps] for name in ("loss", "grad_norm", "step_time_s")}
    found["skipped_steps"] = sum(step["skipped"] for step in steps)
    found["memory_peak_mib"] = max(step["memory_peak_mib"] for step in steps)
    found["predicted_peak_mib"] = max((stage["peak_mib"] for stage in prediction.get("memory") or []), default=None)
    why = context.json_of("-m", "launch", "trace", folder, "--why", "--json")
    return found | {"parts_s": {part: seconds for part, seconds in why["parts_s"].items() if seconds}}


def _used_mib() -> int | str:
    """All that the GPU holds: the context and other libraries' memory is what it has over torch's peak."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command += ["-i", os.environ.get("CUDA_VISIBLE_DEVICES", "0")]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        return f"not measured: {error}"


def _tried(context: Context, name: str, *options: str) -> Facts:
    """As `_trained`; what this GPU or these packages refuse is not measured, with their sentence."""
    try:
        return _trained(context, name.partition(" ")[0], *options)
    except CommandFailed as error:
        if error.code != 2:
            raise
        return {"not_measured": str(error)}


def _killed_and_resumed(context: Context) -> Facts:
    words = (*DETERMINISTIC, f"checkpoint.interval={SAVED}", "checkpoint.save_last=true")
    with suppress(Killed):
        _trained(context, "killed", *words, until=KILLED)
    return _trained(context, "killed", *words, fresh=False)


def _step(context: Context, lever: str) -> Facts:
    row = levers.ROWS["levers-1b"]
    found = levers.measured(context, row.tiny() if context.tiny else row, lever)
    if "host_syncs" not in found:
        return {"not_measured": "the profiler saw no kernel: it may lack the right to", **found}
    return {**found, "passed": not sum(found["host_syncs"].values())}


def _difference(one: Facts, other: Facts, bound: float) -> Facts:
    """The largest relative difference of two trainings' losses and first gradient norms; with 0, of all norms."""
    pairs = _pairs(one, other, "loss") + _pairs(one, other, "grad_norm")[: None if bound == 0 else 1]
    worst = max(abs(a - b) / max(abs(a), 1e-12) for a, b in pairs)
    return {"passed": worst <= bound, "largest_difference": worst, "bound": bound}


def _first_loss(one: Facts, other: Facts) -> Facts:
    """The relative difference of the first losses, of equal weights and samples."""
    ((a, b), *_) = _pairs(one, other, "loss")
    worst = abs(a - b) / max(abs(a), 1e-12)
    return {"passed": worst <= NEAR, "difference": worst, "bound": NEAR, "skipped_steps": other["skipped_steps"]}


def _pairs(one: Facts, other: Facts, name: str) -> list[tuple[float, float]]:
    if not (name in one and name in other):
        raise LookupError("one of the two trainings has not ended well")
    return [(a, b) for a, b in zip(one[name], other[name], strict=True) if a is not None and b is not None]
