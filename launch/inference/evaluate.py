"""`megalite evaluate`: scores text or prepared samples with a stored model: loss, perplexity, bits per byte.

In: documents of text, each scored separately in windows, or samples of prepared data, the same sets as in the
evaluation of a run. Out: an `Evaluation`. All ranks compute the same sums; logits exist only for one chunk of tokens
at a time.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from typing import Any

import torch

from data_pipeline.errors import first_names
from data_pipeline.loader import IGNORED_TARGET
from launch.errors import LaunchError
from launch.inference.command_options import EvaluateOptions
from launch.inference.scored_data import Prepared, Score, Texts, scored_data
from launch.inference.session import Loaded, rank_main, run_here_or_on_ranks
from launch.output import spinner
from launch.runtime.printing import print_result, say
from launch.runtime.rank_process import run_to_the_end
from megalite.parallel.loss import head_loss
from megalite.units import plural


@dataclass(frozen=True)
class SetLoss:
    """The result of one of several sets."""

    name: str
    loss: float  # mean over the tokens, nats
    perplexity: float
    tokens: int  # predicted
    samples: int
    samples_per_epoch: int  # available in the split


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    model: str
    loss: float  # mean over the tokens, nats
    perplexity: float
    bits_per_byte: float | None  # None for prepared data, whose text is unknown
    tokens: int  # predicted
    sequence_length: int  # maximum of tokens read at once
    seconds: float
    tokens_per_second: float
    documents: int | None = None  # of text
    stride: int | None = None  # of windows over text
    samples: int | None = None  # of prepared data
    samples_per_epoch: int | None = None  # available in the split
    notice: str | None = None  # about the samples
    sets: list[SetLoss] | None = None  # of prepared data in sets with names


@torch.no_grad()
def evaluate(options: EvaluateOptions, loaded: Loaded, progress: Callable[[Score], None]) -> Evaluation:
    """Scores the data; all ranks run this together. Raises LaunchError or DataError if there is nothing to score."""
    data, started = scored_data(options, loaded.stored), time.perf_counter()
    scores = [_scored(one, loaded, progress) for one in data]
    score = Score(*(sum(numbers) for numbers in zip(*map(astuple, scores), strict=True)))
    if score.tokens == 0:
        where = f" in {first_names(options.text)}" if options.text else ""
        raise LaunchError(f"nothing to score{where}: it is empty, or no document has the two tokens that a score takes")
    seconds = time.perf_counter() - started
    match data:
        case [Texts() as texts]:
            extent: dict[str, Any] = {"documents": score.documents, "stride": texts.stride}
        case _:
            extent = _extent([one for one in data if isinstance(one, Prepared)], scores)
    return Evaluation(
        model=str(loaded.stored.folder),
        loss=score.mean,
        perplexity=score.perplexity,
        bits_per_byte=score.loss / math.log(2) / score.bytes if score.bytes else None,
        tokens=score.tokens,
        sequence_length=data[0].sequence_length,
        seconds=seconds,
        tokens_per_second=score.tokens / seconds,
        **extent,
    )


def _scored(data: Texts | Prepared, loaded: Loaded, progress: Callable[[Score], None]) -> Score:
    """Scores one set of data."""
    score, model = Score(), loaded.stored.model
    for tokens, targets, positions in data.batches(loaded, score):
        inputs = (None if part is None else torch.from_numpy(part).to(loaded.device) for part in (tokens, positions))
        hidden, head = loaded.module(*inputs)
        expected = torch.from_numpy(targets).to(loaded.device)
        score.loss += float(
            head_loss(hidden, head, expected, model.vocab_size, loaded.tp, model.final_logit_softcapping)
        )
        score.tokens += int((targets != IGNORED_TARGET).sum())
        progress(score)
    return score


def _extent(sets: list[Prepared], scores: list[Score]) -> dict[str, Any]:
    """Returns the fields of an `Evaluation` that tell of prepared data."""
    notices = [f"{one.name}: {one.notice}" if one.name else one.notice for one in sets if one.notice]
    extent = {
        "samples": sum(one.count for one in sets),
        "samples_per_epoch": sum(one.samples.samples_per_epoch for one in sets),
        "notice": "; ".join(notices) or None,
    }
    if not sets[0].name:
        return extent
    losses = [
        SetLoss(one.name, score.mean, score.perplexity, score.tokens, one.count, one.samples.samples_per_epoch)
        for one, score in zip(sets, scores, strict=True)
    ]
    return extent | {"sets": losses}


def run(options: EvaluateOptions) -> int:
    """Runs `megalite evaluate`. Returns the exit code."""
    return run_here_or_on_ranks("launch.inference.evaluate", options, scored_data, evaluate_and_print)


def evaluate_and_print(options: EvaluateOptions, loaded: Loaded) -> None:
    """Shows progress on a terminal and prints the result to stdout."""
    with spinner("reading", is_shown=loaded.is_rank_zero) as describe:
        evaluation = evaluate(options, loaded, lambda so: describe(f"{so.tokens:,} tokens, loss {so.mean:.4f}"))
    if loaded.is_rank_zero:
        if evaluation.notice is not None:
            say(f"megalite: {evaluation.notice}", file=sys.stderr)
        if options.as_json:
            print_result(json.dumps(asdict(evaluation), indent=2))
            return
        for one in evaluation.sets or ():
            print_result(
                f"{one.name}: loss {one.loss:.4f}, perplexity {one.perplexity:.3f}: {plural(one.tokens, 'token')} of "
                f"{one.samples:,} of {plural(one.samples_per_epoch, 'sample')}"
            )
        print_result(_sentence(evaluation))


def _sentence(evaluation: Evaluation) -> str:
    bits = "" if evaluation.bits_per_byte is None else f", {evaluation.bits_per_byte:.4f} bits per byte"
    if evaluation.documents is not None:
        documents = plural(evaluation.documents, "document")
        of = f"{documents} in windows of {evaluation.sequence_length:,}, {evaluation.stride:,} apart"
    else:
        samples = plural(evaluation.samples_per_epoch or 0, "sample")
        of = f"{evaluation.samples:,} of {samples} of {evaluation.sequence_length:,}"
    return (
        f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.3f}{bits}: "
        f"{plural(evaluation.tokens, 'token')} of {of}, {evaluation.tokens_per_second:,.0f} tokens/s"
    )


if __name__ == "__main__":
    run_to_the_end(lambda: rank_main(sys.argv[1:], EvaluateOptions, evaluate_and_print))
