"""The parts that train: 30 steps of a shape as a user would."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu_day import shapes

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context
    from benchmarks.gpu_day.shapes import Shape

Facts = dict[str, Any]
SHAPES = {  # by the name of their part
    "train-1b": shapes.LLAMA_1B,
    "train-3b": shapes.LLAMA_3B,
    "train-8b-8-layers": shapes.LLAMA_8B_8_LAYERS,
}


def run(context: Context) -> None:
    """Trains the shape that the part is named after."""
    shape = shapes.tiny(SHAPES[context.part]) if context.tiny else SHAPES[context.part]
    context.item("training", lambda: timed_run(context, shape))


def timed_run(context: Context, shape: Shape) -> Facts:
    """`megalite train` from an empty folder, and what its records say."""
    folder = context.fresh_folder(f"run_{shape.name}")
    config = context.write_config(f"{folder.name}_config", shape.config(folder, context.data()))
    context.megalite("train", config, *context.overrides)
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    receipt = json.loads((folder / "receipt.json").read_text())
    import yaml

    settled = (folder / "config.yaml").read_text()
    measured = measurement(shape, yaml.safe_load(settled), records, receipt)
    return measured | {"receipt": receipt, "config": settled}  # what `megalite plan calibrate` reads of a run's folder


def measurement(shape: Shape, config: Mapping[str, Any], records: Sequence[Facts], receipt: Facts) -> Facts:
    """Speed, MFU and memory of a finished run, each beside what was predicted.

    The rate is of the median step; MFU holds it against the peak in the planner's catalogue.
    """
    training, dtype = config["training"], config["precision"]["dtype"]
    shape = shape.with_options(config)
    kept = [record["step_time_s"] for record in records[shape.warm_up_steps :]]
    if not kept:
        raise ValueError(f"{len(records)} steps are no more than the {shape.warm_up_steps} that warm up")
    step_s = statistics.median(kept)
    rate = shape.tokens_per_step / step_s
    prediction = receipt.get("prediction") or {}
    peaks = (prediction.get("whole_accelerator") or {}).get("peak_tflops") or {}
    found: Facts = {
        "shape": shape.name,
        "parameters": shape.parameters,
        "dtype": dtype,
        "sequence_length": shape.sequence,
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.global_batch,
        "recompute": config["recompute"]["mode"],
        "steps": training["steps"],
        "warm_up_steps_left_out": shape.warm_up_steps,
        "step_time_s": {"median": step_s, "least": min(kept), "most": max(kept)},
        "predicted_step_time_s": prediction.get("step_time_s"),
        "tokens_per_second": rate,
        "flops_per_token": shape.flops_per_token,
        "model_tflops": rate * shape.flops_per_token / 1e12,
        "first_loss": records[0]["loss"],
        "last_loss": records[-1]["loss"],
        "startup_s": receipt["goodput"]["seconds"]["startup"],
    }
    if dtype in peaks:
        found["mfu"] = shapes.mfu(rate, shape.flops_per_token, peaks[dtype] * 1e12)
        found["mfu_peak"] = f"{peaks[dtype]:g} TFLOP/s of {prediction['accelerator']} in {dtype}"
    else:
        found["mfu"], found["mfu_peak"] = None, prediction.get("problem") or f"no known peak in {dtype}"
    measured = max(record["memory_peak_mib"] for record in records)
    predicted = max((stage["peak_mib"] for stage in prediction.get("memory") or []), default=None)
    error = predicted / measured - 1 if predicted else None
    return found | {"memory_peak_mib": measured, "predicted_memory_peak_mib": predicted, "memory_error": error}
