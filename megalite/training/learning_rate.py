"""The learning rate of a run beyond one schedule by steps: by tokens, and scaled with the batch of each step.

A pure function of the config and the number of steps that are done, so that neither a resume nor a layout changes it. A
run with neither has `learning_rate_factor` of state.py alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from megalite.config import Config
from megalite.training.state import learning_rate_factor

EXPONENTS = {"none": 0.0, "linear": 1.0, "sqrt": 0.5}
"""Powers of the batch over the reference batch: linear for SGD (Goyal 2017, arXiv:1706.02677), the root for Adam
(Malladi 2022, arXiv:2205.10287). Adam's rule for k times the batch also makes betas `1 - k (1 - beta)` and eps `eps /
sqrt(k)`: these stay as the config states them, since the moments would mean something else from step to step."""


def rate_factors(config: Config, total_steps: int) -> Callable[[int], float]:
    """Returns the factor on `optimizer.learning_rate` as a function of the steps that are done.

    `config` counts its length from the run's position (`Config.counted_from`); steps before it are not asked for.
    """
    phases, shapes = config.phases, config.batches
    assert phases is not None, "the data is open"
    in_unit: Callable[[int], float] = partial(learning_rate_factor, config.schedule, total_steps=total_steps)
    if phases.by_tokens:
        lengths = {"warmup_steps": phases.warmup, "decay_steps": phases.decay}
        by_place = partial(
            learning_rate_factor, config.schedule.model_copy(update=lengths), total_steps=phases.last + 1
        )

        def in_tokens(step: int) -> float:
            if (place := shapes.tokens_after(step)) < phases.warmup:
                return min(1.0, shapes.tokens_after(step + 1) / phases.warmup)
            return by_place(place)

        in_unit = in_tokens
    if config.optimizer.scale_with_batch == "none":
        return in_unit
    return lambda step: in_unit(step) * batch_factor(config, shapes.shape_after(step).tokens)


def batch_factor(config: Config, tokens: int) -> float:
    """Returns what a batch of so many tokens makes of the rate.

    Tokens, because the loss is their mean: its noise falls with them, however many sequences they stand in.
    """
    options = config.optimizer
    if options.reference_batch_size is None:
        return 1.0
    share = tokens / (options.reference_batch_size * config.training.sequence_length)
    return float(share ** EXPONENTS[options.scale_with_batch])


def rate_lines(config: Config) -> list[str]:
    """Returns the rate at the steps where it turns, one line each: `step 100: 3.000e-04, the warm-up is over`."""
    phases, shapes, steps = config.phases, config.batches, config.total_steps
    if phases is None:
        return ["schedule.warmup_epochs is told in steps once the data is open: `megalite train CONFIG --dry-run`"]
    at = shapes.steps_at if phases.by_tokens else int
    until = shapes.steps_until if phases.by_tokens else int
    turns = {0: "the first"}
    if phases.warmup:
        turns[until(phases.warmup) - 1] = "the warm-up is over"
    for stretch in shapes.stretches[1:]:
        turns[stretch.step] = f"the stage {stretch.place} begins, of {stretch.shape.tokens:,} tokens a step"
    if config.schedule.name == "wsd":
        turns[at(max(0, phases.last - phases.decay))] = "the decay begins behind it"
    turns[steps - 1] = "the last"
    factor = rate_factors(config, steps)
    return [
        f"step {step + 1:,}: {config.optimizer.learning_rate * factor(step):.3e}, {turn}"
        for step, turn in sorted(turns.items())
        if shapes.step <= step < steps
    ]
