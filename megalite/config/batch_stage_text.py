"""The stages of training of a run, as facts and in words: where each begins, and the batch from there on."""

from __future__ import annotations

from typing import Any

from megalite.config import Config

Facts = dict[str, Any]


def stage_facts(config: Config) -> list[Facts]:
    """Returns the changes of the batch that are to come from where `config` counts its length, as JSON holds them."""
    steps = config.total_steps
    return [
        {
            "place": stretch.place,
            "after_step": stretch.step,
            "from_token": stretch.tokens,
            "global_batch_size": stretch.shape.global_batch_size,
            "sequence_length": stretch.shape.sequence_length,
            "micro_batch_size": stretch.shape.micro_batch_size,
            "is_reached": stretch.step < steps,
        }
        for stretch in config.batches.stretches[1:]
    ]


def format_stage(stage: Facts) -> str:
    """Returns a line about a stage."""
    tokens = stage["global_batch_size"] * stage["sequence_length"]
    batch = f"{stage['global_batch_size']:,} sequences x {stage['sequence_length']:,} tokens = {tokens:,} tokens a step"
    begin = f"the stage {stage['place']}, after step {stage['after_step']:,} (token {stage['from_token']:,})"
    if not stage["is_reached"]:
        return f"{begin}, {batch}, is not reached: the run ends before"
    return f"from {begin}, on: {batch}, in micro-batches of {stage['micro_batch_size']:,}"
