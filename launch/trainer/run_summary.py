"""Summary of a run before its first step: the facts that its dry run, their JSON and the start banner share.

In: config, layout, data and start of the run. Out: facts as JSON holds them and, from these alone, lines of a label and
a text. No torch.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from data_pipeline.samples.mix import MixedSamples
from launch.prediction.memory_check import MemoryForecast
from launch.prediction.prediction import Prediction
from launch.runtime.logs import get_logger
from launch.runtime.printing import say
from launch.trainer.data.opening import RunData
from launch.trainer.start.config_changes import OptionChange, learning_rate_jump
from launch.trainer.start.resume import RunSetup, Start
from launch.trainer.start.run_folder import layout_facts
from megalite.checkpoint.durable_files import room_at
from megalite.config import Config, ResolvedLayout
from megalite.config.batch_stage_text import format_stage, stage_facts
from megalite.config.schedule_phases import stated_by_tokens
from megalite.planner.cost.checkpoints import megalite_bytes_per_parameter
from megalite.planner.cost.model_states import adapter_numbers
from megalite.planner.cost.stage_parameters import StageShape, parameters, stage_shapes, stages_of
from megalite.training.learning_rate import rate_lines
from megalite.units import about, count, duration, epochs, gib, of_stages, plural, seconds

log = get_logger(__name__)
Facts = dict[str, Any]
Lines = list[tuple[str, str]]
LONG_STEP_S = 3600.0  # a step from here on is worth a warning
MOST_STAGES = 4  # that are told one by one
MOST_SOURCES = 12


def run_facts(config: Config, layout: ResolvedLayout, data: RunData, start: Start, devices: str) -> Facts:
    """Returns the facts of a run; `config` counts its length from `start`, `devices` are in words."""
    samples, left, batches = data.training, max(0, config.total_steps - start.step), config.batches
    shape, end = batches.shape_after(start.step), start.followed.samples_at_end(config)
    tokens_left = batches.tokens_after(start.step + left) - batches.tokens_after(start.step)
    modes = config.recompute.by_stage(layout.pipeline_parallel_size)
    turns = bool(config.optimizer.reference_batch_size or stated_by_tokens(config.schedule))  # where batches tell
    return {
        "run_dir": str(config.run_dir),
        "start": {
            "resumes": start.is_resume,
            "step": start.step,
            "weights": str(start.checkpoint or (start.hub.folder if start.hub is not None else "")) or None,
        },
        "changes": [asdict(change) for change in start.changes],
        "learning_rates": learning_rate_jump(start.manifest, config) if start.changes and start.manifest else None,
        "model": {"family": config.model.model_type, "parameters": parameters(config.model)},
        "adapter_parameters": _in_adapters(config),
        "layout": layout_facts(layout)
        | {
            "context_parallel_kind": layout.context_parallel_kind,
            "pipeline_schedule": layout.pipeline_schedule,
            "pipeline_chunks": layout.pipeline_chunks,
            "sequence_parallel": config.parallel.sequence_parallel,
            "ranks": layout.world_size,
        },
        "stages": [
            {"stage": number, "holds": _held(shape), "parameters_per_rank": shape.parameters, "recompute": mode}
            for number, (shape, mode) in enumerate(zip(stages_of(config, layout), modes, strict=True))
        ],
        "devices": devices,
        "offload": config.offload.model_dump(),
        "batch": {
            "samples": shape.global_batch_size,
            "sequence_length": shape.sequence_length,
            "tokens": shape.tokens,
            "micro_batch_size": shape.micro_batch_size,
            "micro_batches": shape.micro_batches(layout.data_parallel_size),
            "stages": stage_facts(config),
        },
        "learning_rate": rate_lines(config) if turns else [],
        "data": {
            "paths": config.data.prefixes,
            "samples": samples.samples_per_epoch,
            "tokens": samples.token_count,
            "epochs": end / samples.samples_per_epoch,
            "sources": _source_facts(samples, end) if isinstance(samples, MixedSamples) else [],
        },
        "length": {"steps": config.total_steps, "steps_left": left, "tokens_left": tokens_left},
        "evaluation": {
            "samples": sum(one.count for one in data.validation),
            "every": config.training.evaluation.interval,
        },
    }


def _format_rates(facts: Facts) -> list[str]:
    if facts["learning_rates"] is None:
        return []
    step, (before, after) = facts["start"]["step"], facts["learning_rates"]
    return [
        f"the learning rate goes from {before:.2e} in step {step} to {after:.2e} in step {step + 1}, because it "
        "follows this config from there on (schedule, training.steps, optimizer.learning_rate, scale_with_batch)"
    ]


def log_start(setup: RunSetup, devices: str, memory_warning: str | None) -> None:
    """Logs the summary of a run that starts; call it on rank 0."""
    facts = run_facts(setup.config, setup.layout, setup.data, setup.start, devices)
    warn_of_passed_over(setup.start)
    for label, text in summary_lines(facts):
        log.info(f"{label}: {text}")
    for warning in filter(None, (memory_warning, warning_of_room(setup.config), warning_of_warmup(setup.config))):
        log.warning(warning)


def warn_of_passed_over(start: Start) -> None:
    """Warns of each newer checkpoint that cannot be used: its steps are lost."""
    for reason in start.passed_over:
        log.warning(f"passed over: {reason}; the run starts from {start.checkpoint}")


def prediction_facts(facts: Facts, prediction: Prediction, memory: MemoryForecast | None) -> Facts:
    """Returns what is predicted for the run of `facts`: memory, step time, and the time of the steps that are left."""
    step_s = prediction.step.seconds if prediction.step is not None else None
    steps = facts["length"]["tokens_left"] / facts["batch"]["tokens"]  # steps of another batch count by their tokens
    return {
        "memory_per_rank_bytes": [round(stage.total) for stage in prediction.memory],
        "memory": memory.facts() if memory is not None else None,
        "step_s": step_s,
        "seconds_left": step_s * steps if step_s is not None else None,
        "rough": prediction.why_rough,
        "problem": prediction.problem or None,
    }


def summary_lines(facts: Facts) -> Lines:
    """Returns the summary of a run."""
    model, layout, batch, data, length = (facts[name] for name in ("model", "layout", "batch", "data", "length"))
    schedule, zero = "", f"ZeRO-{layout['zero_stage']}"
    if layout["pipeline_parallel_size"] > 1:
        zero += " (experimental in a pipeline)" * (layout["zero_stage"] == 3)
        if layout["pipeline_schedule"] != "1f1b":
            schedule = f" ({layout['pipeline_schedule']}, {plural(layout['pipeline_chunks'], 'chunk')} a stage)"
    cp = layout.get("context_parallel_size", 1)
    shared = f" x context {cp} ({layout['context_parallel_kind']})" if cp > 1 else ""
    ep = layout.get("expert_parallel_size", 1)
    dealt = [f"experts dealt to {ep} replicas"] if ep > 1 else []
    parallel = ", ".join([zero, *["sequence parallel"] * layout["sequence_parallel"], *dealt])
    number, size = batch["micro_batches"], batch["micro_batch_size"]
    done = f", {length['steps_left']:,} of them left" if facts["start"]["step"] else ""
    held_out, every = facts["evaluation"]["samples"], facts["evaluation"]["every"]
    evaluated = f"; evaluated on {plural(held_out, 'sample')} every {plural(every, 'step')}" if every else ""
    in_adapters = facts["adapter_parameters"]
    on_host = [what for what, where in facts["offload"].items() if where == "cpu"]
    return [
        ("run", f"{facts['run_dir']}, {_format_start(facts['start'], length)}"),
        *(("changed", str(OptionChange(**change))) for change in facts["changes"]),
        *(("changed", text) for text in _format_rates(facts)),
        ("model", f"{model['family']}, {count(model['parameters'])} parameters"),
        *[("adapters", f"LoRA, {count(in_adapters)} parameters, which alone are trained")] * bool(in_adapters),
        (
            "layout",
            f"tensor {layout['tensor_parallel_size']} x pipeline {layout['pipeline_parallel_size']}{schedule} x "
            f"data {layout['data_parallel_size']}{shared}, {parallel}: {facts['devices']}",
        ),
        ("per rank", _format_stages(facts["stages"])),
        ("recompute", of_stages([stage["recompute"] for stage in facts["stages"]])),
        *[("offload", f"{' and '.join(on_host)} in the memory of the host")] * bool(on_host),
        (
            "batch",
            f"{batch['samples']:,} samples x {batch['sequence_length']:,} tokens = {batch['tokens']:,} tokens a step; "
            f"on each replica {number:,} micro-batch{'es' * (number > 1)} of {size:,}",
        ),
        *(("batch", format_stage(stage)) for stage in batch["stages"]),
        *(("learning rate", line) for line in facts["learning_rate"]),
        *_data_lines(data),
        ("length", f"{plural(length['steps'], 'step')}{done}, {count(length['tokens_left'])} tokens{evaluated}"),
    ]


def _source_facts(samples: MixedSamples, end: int) -> list[Facts]:
    """Returns the facts of each source of a mix, at the end of the run."""
    taken = dict(zip(samples.mix.names, samples.mix.counts(end), strict=True))
    return [
        {
            "name": name,
            "samples": source.samples_per_epoch,
            "tokens": source.token_count,
            "epochs": taken[name] / source.samples_per_epoch,
        }
        for name, source in samples.sources.items()
    ]


def _data_lines(data: Facts) -> Lines:
    whole = f"{data['samples']:,} samples, {count(data['tokens'])} tokens"
    if not data["sources"]:
        again = ", each time in another order" if data["epochs"] > 1 else ""
        return [("data", f"{', '.join(data['paths'])}: {whole}; the run takes {epochs(data['epochs'])} epochs{again}")]
    taken = [source["epochs"] for source in data["sources"]]
    if len(taken) > MOST_SOURCES:
        of_all = f"{epochs(min(taken))} to {epochs(max(taken))} epochs each"
        return [("data", f"{len(taken)} sources: {whole}; the run takes {of_all}")]
    sizes = [f"{one['samples']:,} samples, {count(one['tokens'])} tokens" for one in data["sources"]]
    return [
        ("data", f"{one['name']}: {size}; the run takes {epochs(one['epochs'])} epochs")
        for one, size in zip(data["sources"], sizes, strict=True)
    ]


def print_lines(lines: Lines) -> None:
    """Prints lines with their labels in a column."""
    for label, text in lines:
        say(f"{label:<9} {text}")


def prediction_lines(predicted: Facts) -> Lines:
    """Returns what is predicted for a run."""
    sizes = [gib(size) for size in predicted["memory_per_rank_bytes"]]
    memory, fullest = predicted["memory"], max(predicted["memory_per_rank_bytes"])
    text = f"{sizes[0]} on each rank" if len(set(sizes)) == 1 else f"up to {gib(fullest)} on a rank"
    if memory is not None:
        needed, available = memory["needed_bytes"], memory["available_bytes"]
        text += f"; {gib(needed)} of the {gib(available)} of {memory['of']} ({needed / available:.0%})"
    if predicted["step_s"] is None:
        return [("memory", text), ("time", f"not known, because {predicted['problem']}")]
    step_s, rough = predicted["step_s"], predicted["rough"]
    step = seconds(step_s) if rough is None else f"roughly {about(step_s)}"
    because = "" if rough is None else f" ({rough})"
    return [
        ("memory", text),
        ("time", f"{step} a step; in all {format_total(predicted['seconds_left'], rough)}{because}"),
    ]


def format_total(whole_s: float, rough: str | None) -> str:
    """Returns the predicted time of all steps that are left: with one digit where it is `rough`."""
    whole = duration(whole_s) if rough is None else f"roughly {about(whole_s)}"
    return f"{whole}, without evaluations and saves"


def warning_of_long_step(step_s: float, global_batch_size: int) -> str | None:
    """Returns a warning where a step takes very long, since nothing is logged and nothing can be saved meanwhile."""
    if step_s < LONG_STEP_S:
        return None
    return (
        f"one step is predicted to take about {about(step_s)}, in which nothing is logged and a request to stop "
        f"has to wait: training.global_batch_size is {global_batch_size:,}"
    )


def warning_of_warmup(config: Config) -> str | None:
    """Returns a warning where a run ends before its warmup does."""
    phases = config.phases
    if phases is None or phases.warmup <= phases.end:
        return None
    warmup = "the warm-up of" if phases.by_tokens else "schedule.warmup_steps"
    unit = "tokens" if phases.by_tokens else "steps"
    return (
        f"{warmup} {phases.warmup:,} {unit * phases.by_tokens}".rstrip()
        + f" is longer than the run of {phases.end:,} {unit}, which ends before it reaches optimizer.learning_rate"
    )


def warning_of_room(config: Config) -> str | None:
    """Returns a warning where the disk of `run_dir` has no room for the next checkpoint."""
    in_adapters, whole = _in_adapters(config), parameters(config.model)
    size = (in_adapters or whole) * megalite_bytes_per_parameter(config.optimizer.name, config.model)
    size += 4 * whole if in_adapters else 0  # bytes of weights that stay as they are
    free = room_at(config.run_dir.absolute())
    if free >= size:
        return None
    return (
        f"a checkpoint takes {gib(size)} and the disk of {config.run_dir} has {gib(free)} free: "
        "free some space, or choose another run_dir"
    )


def _in_adapters(config: Config) -> int:
    """Returns the numbers of all adapters; 0 without any."""
    return adapter_numbers(config.model, config.adapter, stage_shapes(config.model, 1, 1)[0], 1)


def _format_start(start: Facts, length: Facts) -> str:
    if start["resumes"] and not length["steps_left"]:
        return f"at step {start['step']:,} of {length['steps']:,}: nothing left to train"
    if start["resumes"]:
        return f"resumes from step {start['step']:,} of {length['steps']:,} ({start['weights']})"
    return "new" if start["weights"] is None else f"new, with the weights of {start['weights']}"


def _held(shape: StageShape) -> str:
    """Returns the layers of a stage, such as `embedding, layers 0-3`."""
    blocks = [
        f"layer {chunk.first}" if chunk.count == 1 else f"layers {chunk.first}-{chunk.first + chunk.count - 1}"
        for chunk in shape.chunks
    ]
    return ", ".join([*["embedding"] * shape.has_embedding, *blocks, *["head"] * shape.has_head])


def _format_stages(stages: list[Facts]) -> str:
    if len(stages) == 1:
        return f"{count(stages[0]['parameters_per_rank'])} parameters, before ZeRO cuts them"
    if len(stages) > MOST_STAGES:
        sizes = [stage["parameters_per_rank"] for stage in stages]
        return f"{count(min(sizes))} to {count(max(sizes))} parameters in {len(stages)} stages"
    return "; ".join(
        f"stage {stage['stage']} ({stage['holds']}) {count(stage['parameters_per_rank'])} parameters"
        for stage in stages
    )
