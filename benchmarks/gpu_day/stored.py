"""The parts `checkpoint` and `generate`: the 1B shape saved, resumed, read through, and asked to go on from text."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_day import shapes

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

Facts = dict[str, Any]
RUN = "run_saved"
STEPS, MORE_STEPS = 3, 5
PROMPT = "def main(arguments):\n    "
LONG = 64  # times the prompt
NEW_TOKENS = {True: 8, False: 256}


def checkpoints(context: Context) -> None:
    """The part `checkpoint`."""
    context.item("save", lambda: _trained(context, STEPS, fresh=True))
    context.item("resume, save in the background", lambda: _resumed(context))
    if not _has_checkpoint(context.work / RUN):  # saved by an earlier call, on a machine that is gone
        _trained(context, STEPS, fresh=True)
    context.item("read through", lambda: _read_through(context))


def _trained(context: Context, steps: int, *overrides: str, fresh: bool = False) -> Facts:
    """Trains to a step and saves there; what the run tells of its save, and of where it began."""
    folder = context.fresh_folder(RUN) if fresh else context.work / RUN
    shape = shapes.tiny(shapes.LLAMA_1B) if context.tiny else shapes.LLAMA_1B
    values = replace(shape, steps=steps).config(folder, context.data())
    values["checkpoint"] = {"interval": 0, "save_last": True, "background": False}
    config = context.write_config(f"{RUN}_{steps}", values)
    context.megalite("train", config, *context.overrides, f"training.steps={steps}", *overrides)
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    started = [event for event in events if event["event"] == "started"][-1]
    saved = [event for event in events if event["event"] == "saved"][-1]
    return {
        "passed": started["step"] == (0 if fresh else STEPS) and saved["step"] == steps,
        "parameters": shape.parameters,
        "started_at_step": started["step"],
        "startup_s": started["before_s"],
        "saved_bytes": saved["bytes"],
        "training_waited_s": saved["blocked_s"],
        "save_s": saved["total_s"],
        "save_gb_per_s": saved["bytes"] / saved["total_s"] / 1e9 if saved["total_s"] else None,
    }


def _resumed(context: Context) -> Facts:
    if _saved_steps(context.work / RUN) != [STEPS]:  # an earlier call was stopped here, or on another machine
        _trained(context, STEPS, fresh=True)
    return _trained(context, MORE_STEPS, "checkpoint.background=true")


def _saved_steps(folder: Path) -> list[int]:
    return sorted(int(path.name.rpartition("_")[2]) for path in (folder / "checkpoints").glob("step_*"))


def _read_through(context: Context) -> Facts:
    """Every byte against its digest."""
    folder = context.work / RUN
    size = sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
    started = time.monotonic()
    told = context.json_of("-m", "launch", "checkpoint", "verify", folder, "--deep", "--json", allowed=(0, 1))
    took = time.monotonic() - started
    problems = [problem for one in told["checkpoints"] for problem in one.get("problems", [])]
    # with the command's own start, which is much of it for a small model
    return {"passed": told["passed"], "bytes": size, "command_s": took, "problems": problems}


def generation(context: Context) -> None:
    """The part `generate`."""
    if not _has_checkpoint(context.work / RUN):
        _trained(context, STEPS, fresh=True)
    context.item("short prompt", lambda: generated(context, context.work / RUN, PROMPT))
    if not context.tiny:
        context.item("long prompt", lambda: generated(context, context.work / RUN, PROMPT * LONG))
    shutil.rmtree(context.work / RUN, ignore_errors=True)  # some 15 GB for each checkpoint of the 1B


def _has_checkpoint(folder: Path) -> bool:
    return bool(_saved_steps(folder))


def generated(context: Context, run: Path, prompt: str) -> Facts:
    """Tokens/s of a run of the 1B shape."""
    new = NEW_TOKENS[context.tiny]
    words = ["generate", str(run), "-p", prompt, "--max-new-tokens", str(new)]
    device = ["--device", context.device, "--dtype", "bf16", "--json"]
    told = context.json_of("-m", "launch", *words, *device)["generations"][0]
    names = ("prompt_tokens", "new_tokens", "stopped_by", "prompt_s", "seconds", "tokens_per_second")
    facts = {name: told[name] for name in names}
    # each token reads all weights once: 2 bytes each in bf16
    shape = shapes.tiny(shapes.LLAMA_1B) if context.tiny else shapes.LLAMA_1B
    read = 2 * shape.multiplied_parameters * told["tokens_per_second"] / 1e9
    return {"passed": told["new_tokens"] > 0, **facts, "weights_read_gb_per_s": read}
