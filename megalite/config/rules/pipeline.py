"""Rules about pipeline schedules: what each demands of stages, chunks, micro-batches and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.auto import PIPELINE
from megalite.config.config import Config
from megalite.config.sections import PipelineSchedule

FEWEST_CHUNKS: dict[str, int] = {
    "1f1b": 1,
    "interleaved": 2,
    "zero-bubble": 1,
    "zb-v": 2,
    "dualpipev": 2,
}  # per stage; only interleaved may have more
SPLITS_BACKWARD = ("zero-bubble", "zb-v", "dualpipev")  # gradients of weights are computed apart, and later
FOLDED = ("zb-v", "dualpipev")  # the model turns at its middle and comes back through the stages


def problems_with_schedule(
    schedule: PipelineSchedule, stages: int, chunks: int, micro_batches: int | None
) -> Iterator[str]:
    """Yields a sentence for each demand of a schedule that is not met; micro_batches: None while not known."""
    fewest = FEWEST_CHUNKS[schedule]
    if schedule in FOLDED and chunks != 2:
        yield f"{schedule} has exactly 2 chunks per stage, not {chunks}: give it 2"
    elif fewest == 1 and chunks > 1:
        yield f"{schedule} has one chunk per stage, not {chunks}: use interleaved for more"
    elif chunks < fewest:
        yield f"{schedule} needs at least {fewest} chunks per stage: with one, use 1f1b"
    if micro_batches is None:
        return
    if schedule == "interleaved" and micro_batches % stages:
        near = max(1, round(micro_batches / stages)) * stages
        yield (
            f"interleaved takes micro-batches in groups of {stages}, the number of stages, and {micro_batches} is no "
            f"multiple of it: use {near}"
        )
    if schedule == "dualpipev" and micro_batches < 2 * stages:
        yield (
            f"dualpipev needs at least two micro-batches per stage, {2 * stages} for {stages} stages, and there are "
            f"{micro_batches}: use more, or zb-v, which takes any number"
        )


def problems_with_pipeline(config: Config, replicas: int | None) -> Iterator[str]:
    """Yields a sentence for each broken rule about pipelines; replicas: None while not known."""
    parallel, training, modes = config.parallel, config.training, config.recompute.mode
    stages, zero, schedule = parallel.pipeline_parallel_size, parallel.zero_stage, parallel.pipeline_schedule
    chunks = parallel.pipeline_chunks or FEWEST_CHUNKS[schedule]
    about_chunks = list(problems_with_schedule(schedule, stages, chunks, None))
    if PIPELINE in config.unresolved_options:  # rules about its size wait until it is chosen
        yield from (f"parallel.pipeline_schedule {problem} (set parallel.pipeline_chunks)" for problem in about_chunks)
        return
    if not isinstance(modes, str) and len(modes) != stages:
        yield (
            f"recompute.mode is a list of length {len(modes)}, but parallel.pipeline_parallel_size is {stages}: list a "
            "mode for each stage, or give one for all of them, or auto"
        )
    if stages == 1:
        if schedule != "1f1b" or chunks > 1:
            name = f"pipeline_schedule {schedule}" if schedule != "1f1b" else f"pipeline_chunks {chunks}"
            yield (
                f"parallel.{name} has no effect with parallel.pipeline_parallel_size 1: remove it, or use more stages"
            )
        return
    count = None if replicas is None else training.global_batch_size // (training.micro_batch_size * replicas)
    for problem in problems_with_schedule(schedule, stages, chunks, count):
        option = "set parallel.pipeline_chunks" if problem in about_chunks else "change training.global_batch_size"
        yield f"parallel.pipeline_schedule {problem} ({option})"
    legal_chunks = FEWEST_CHUNKS[schedule] if about_chunks else chunks  # those that the sentence before asks for
    if stages * legal_chunks > config.model.num_hidden_layers:
        yield _too_few_layers(stages, legal_chunks, config.model.num_hidden_layers)
    if zero == 3 and schedule in SPLITS_BACKWARD:
        yield (
            f"parallel.zero_stage 3 does not go with pipeline_schedule {schedule}, which computes gradients of weights "
            "when ZeRO-3 does not hold them: use zero_stage 1 or 2, or pipeline_schedule 1f1b or interleaved"
        )
    if zero == 3 and config.model.tie_word_embeddings:
        yield (
            f"parallel.zero_stage 3 with parallel.pipeline_parallel_size {stages} cannot tie the head on the last "
            "stage to the embedding on the first (model.tie_word_embeddings true): use zero_stage 1 or 2, or "
            "pipeline_parallel_size 1"
        )


def _too_few_layers(stages: int, chunks: int, layers: int) -> str:
    pieces = f" x parallel.pipeline_chunks {chunks}" if chunks > 1 else ""
    most = f"a pipeline_parallel_size of at most {max(1, layers // chunks)}"
    if chunks > 1 and layers < 2 * chunks:  # one stage is no pipeline
        fewer = f" and a pipeline_parallel_size of at most {layers}" if stages > layers else ""
        most = f"pipeline_schedule 1f1b with one chunk per stage{fewer}"
    return (
        f"parallel.pipeline_parallel_size {stages}{pieces} is larger than model.num_hidden_layers {layers}, but "
        f"every {'chunk' if chunks > 1 else 'stage'} needs at least one layer: use {most}, or at least "
        f"{stages * chunks} layers"
    )
