"""Rules about compiled blocks: which runs cannot have them, and why."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.auto import SCHEDULE
from megalite.config.base import Device
from megalite.config.config import Config
from megalite.config.rules.pipeline import SPLITS_BACKWARD

CUTS_SEQUENCE = {("parallel", "tensor_parallel_size"), ("parallel", "sequence_parallel")}


def why_not_compiled(config: Config) -> str | None:
    """Returns why the blocks of a run cannot be compiled, with the option that stands against it; None if they can."""
    model, parallel = config.model, config.parallel
    if parallel.zero_stage == 3:
        return "parallel.zero_stage 3 gathers weights by hooks inside of blocks, which a compiler does not take"
    if parallel.pipeline_schedule in SPLITS_BACKWARD:
        return (
            f"parallel.pipeline_schedule {parallel.pipeline_schedule} puts gradients of weights off, which are part of "
            "a compiled block's gradient"
        )
    if config.offload.activations != "none":
        return "offload.activations cpu moves what a block keeps tensor by tensor, which a compiler chooses otherwise"
    if model.has_dropout:
        return (
            "dropout in the model has a seed of its own in each layer, so that no two blocks would share compiled code"
        )
    modes = config.recompute.by_stage(parallel.pipeline_parallel_size)
    if "selective" in modes and "none" in modes:
        return "recompute.mode none and selective in one run are one memory budget for a compiler"
    if any(model.has_experts(layer) for layer in range(model.num_hidden_layers)):
        return "blocks with experts (model.num_experts) are not written for a compiler"
    return None


def loses_compiled_blocks(config: Config, device: Device) -> bool:
    """Returns whether the blocks of a run would be compiled on `device` if its schedule did not split backward."""
    is_split = config.parallel.pipeline_schedule in SPLITS_BACKWARD
    is_wanted = is_split and config.performance.compile != "none" and device == "cuda"
    return is_wanted and why_not_compiled(config.with_resolved({SCHEDULE: "1f1b"})) is None


def problems_with_performance(config: Config, device: Device | None) -> Iterator[str]:
    """Yields a sentence if the config demands compiled blocks, or what is made of them, where there cannot be any."""
    if config.performance.compile != "blocks" and not config.performance.symmetric_memory:
        return
    reason = why_not_compiled(config)
    if config.performance.compile == "blocks" and reason:
        yield f"performance.compile blocks cannot be done, because {reason}: use performance.compile auto or none"
    if config.performance.symmetric_memory:
        yield from _symmetric_memory(config, device, None if config.performance.compile == "blocks" else reason)


def _symmetric_memory(config: Config, device: Device | None, why_not_compiled: str | None) -> Iterator[str]:
    option, parallel = "performance.symmetric_memory", config.parallel
    if device == "cpu":
        yield f"{option} needs GPUs that reach each other's memory, and this is a run on CPUs: use false"
    if config.performance.compile == "none":
        yield f"{option} is for compiled blocks, and performance.compile is none: use compile auto, or false"
    elif why_not_compiled:
        yield f"{option} is for compiled blocks, which cannot be done, because {why_not_compiled}: use false"
    cuts = parallel.sequence_parallel and parallel.tensor_parallel_size > 1
    if not cuts and not CUTS_SEQUENCE & config.unresolved_options:
        yield (
            f"{option} splits products along with the collectives of a cut sequence, and there are none: use "
            "parallel.sequence_parallel with a tensor_parallel_size of 2 or more, or false"
        )
    if config.precision.float8 != "none":
        yield (
            f"{option} splits products in 16 or 32 bits, and precision.float8 is {config.precision.float8}: use float8 "
            "none, or false"
        )
