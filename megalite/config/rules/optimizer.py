"""Rules about the optimizer: where Muon can run, and when moments may be bf16."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config

ZERO_STAGE = ("parallel", "zero_stage")
SMALLEST_BF16_RATE = 2.0**-8  # a sum in bf16 takes no addend of less than half a unit in its last place: 2^-9 of it


def problems_with_optimizer(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule about the section `optimizer`."""
    if config.optimizer.name == "muon":
        yield from _problems_with_muon(config)
    if config.optimizer.moments_dtype == "bf16":
        yield from _problems_with_bf16_moments(config)


def _problems_with_muon(config: Config) -> Iterator[str]:
    unresolved, parallel = config.unresolved_options, config.parallel
    if config.is_optimizer_offloaded:
        yield (
            "optimizer.name muon makes matrices orthogonal where the weights are, and the optimizer is offloaded: "
            "set offload.optimizer none and remove deepspeed.zero_optimization.offload_optimizer, or use adamw"
        )
    if ZERO_STAGE in unresolved:
        return
    if parallel.zero_stage == 3:
        yield (
            "optimizer.name muon needs whole matrices, and parallel.zero_stage 3 keeps parts of them: use zero_stage 1 "
            "or 2, or optimizer.name adamw"
        )


def _problems_with_bf16_moments(config: Config) -> Iterator[str]:
    options = config.optimizer
    if options.name == "sgd":
        yield (
            "optimizer.moments_dtype bf16 has no effect with optimizer.name sgd, which keeps no moments: remove it, or "
            "use adamw"
        )
        return
    if config.is_optimizer_offloaded:
        yield (
            "optimizer.moments_dtype bf16 is for moments on the device that computes, and the optimizer is offloaded: "
            "use moments_dtype fp32, or offload.optimizer none"
        )
    rates = {"optimizer.betas": max(options.betas)}
    if options.name == "muon":
        rates["optimizer.momentum"] = options.momentum
    for option, rate in rates.items():
        if 1.0 - rate < SMALLEST_BF16_RATE:
            yield (
                f"{option} {rate:g} with optimizer.moments_dtype bf16 adds less than 2^-8 of a new value to a moment "
                "in a step, which rounding to bf16 loses: use 0.996 or less, or moments_dtype fp32"
            )
