"""Rules about the learning rate: what a batch makes of it, and the units and lengths of its schedule."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.schedule_phases import WARMUPS_BY_TOKENS, stated_by_tokens


def problems_with_learning_rate(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule about the learning rate and its schedule."""
    yield from _scale(config)
    schedule, training = config.schedule, config.training
    for name in ("decay_steps", "decay_tokens"):
        if schedule.name != "wsd" and (length := getattr(schedule, name)) is not None:
            yield (
                f"schedule.{name} {length} has no meaning with schedule.name {schedule.name}: remove it, or use "
                "schedule.name wsd"
            )
    units = list(_units(config))
    yield from units
    if training.steps is not None and training.tokens is None and not units:  # `check_counted_length` sees to tokens
        yield from problems_with_phases(config)


def problems_with_phases(config: Config) -> Iterator[str]:
    """Yields what is broken where the phases of wsd do not fit into the run, as far as it is counted."""
    schedule, phases = config.schedule, config.phases
    if schedule.name != "wsd" or phases is None or phases.warmup + phases.decay <= phases.end:
        return
    unit = "tokens" if phases.by_tokens else "steps"
    warmup = next((name for name in WARMUPS_BY_TOKENS if getattr(schedule, name) is not None), f"warmup_{unit}")
    length = getattr(schedule, warmup) or 0
    counted = f" = {phases.warmup} tokens" if warmup in ("warmup_samples", "warmup_epochs") else ""
    yield (
        f"schedule.{warmup} {length}{counted} + schedule.decay_{unit} {phases.decay} is longer than the run of "
        f"{phases.end} {unit}: they may add up to at most {phases.end}"
    )


def _scale(config: Config) -> Iterator[str]:
    options, batch = config.optimizer, config.training.global_batch_size
    rule, reference = options.scale_with_batch, options.reference_batch_size
    if rule != "none" and reference is None:
        yield (
            f"optimizer.scale_with_batch {rule} needs the batch for which optimizer.learning_rate is meant: set "
            f"optimizer.reference_batch_size, in sequences; {batch}, the global_batch_size, leaves the rate as it is"
        )
    if rule == "none" and reference is not None:
        yield (
            f"optimizer.reference_batch_size {reference} has no effect with optimizer.scale_with_batch none: use sqrt "
            "(AdamW and Muon) or linear (sgd), or remove it"
        )


def _units(config: Config) -> Iterator[str]:
    """Yields what is broken where a schedule is stated in two units."""
    schedule, training = config.schedule, config.training
    by_tokens = stated_by_tokens(schedule)
    warmups = [name for name in ("warmup_steps", *WARMUPS_BY_TOKENS) if getattr(schedule, name)]
    if len(warmups) > 1:
        stated = " and ".join(f"schedule.{name} {getattr(schedule, name)}" for name in warmups)
        yield f"{stated} are {len(warmups)} lengths of one warm-up: keep one, and set others to null (steps: 0)"
        return
    if schedule.warmup_epochs is not None and config.data.sources:
        yield (
            f"schedule.warmup_epochs {schedule.warmup_epochs:g} is of one text, and each of data.sources has epochs of "
            "its own: use warmup_samples or warmup_tokens"
        )
    decay = (schedule.decay_steps is not None) + (schedule.decay_tokens is not None)
    if decay > 1:
        yield (
            f"schedule.decay_steps {schedule.decay_steps} and schedule.decay_tokens {schedule.decay_tokens} are two "
            "lengths of one decay: remove one of them"
        )
        return
    if (training.steps is None) == (training.tokens is None) or not by_tokens:
        return
    batches, steps = config.batches, config.total_steps
    begin = max(0, steps - 1 - (schedule.decay_steps or 0))
    tokens = {
        "warmup": batches.tokens_after(schedule.warmup_steps),
        "decay": batches.tokens_after(steps - 1) - batches.tokens_after(begin),
    }
    for phase, length in (("warmup", schedule.warmup_steps), ("decay", schedule.decay_steps)):
        if length:
            yield (
                f"schedule.{phase}_steps {length} is in steps, and schedule.{by_tokens[0]} makes the whole schedule go "
                f"by tokens: use {phase}_tokens {tokens[phase]} in its place"
            )
