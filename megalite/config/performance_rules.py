"""Rules about compiled blocks: which runs cannot have them, and why."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.pipeline_rules import SPLITS_BACKWARD


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


def problems_with_performance(config: Config) -> Iterator[str]:
    """Yields a sentence if the config demands compiled blocks where there cannot be any."""
    if config.performance.compile == "blocks" and (reason := why_not_compiled(config)):
        yield f"performance.compile blocks cannot be done, because {reason}: use performance.compile auto or none"
