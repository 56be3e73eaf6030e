"""`megalite evaluate`: how well a stored model predicts text or prepared samples: loss, perplexity, bits per byte.

In: documents of text, each scored by itself in windows, or samples of prepared data, the very ones that a run
evaluates on. Out: an `Evaluation`. All ranks compute the same sums; logits of more than a chunk of tokens never exist.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from data_pipeline.batches import IGNORED_TARGET, global_batch
from data_pipeline.sources import Source
from data_pipeline.windows import Window, document_windows, equally_long_batches
from launch.errors import LaunchError
from launch.evaluation_data import EvaluateRequest, Prepared, Texts, scored_data
from launch.inference import Loaded, rank_main
from launch.inference import run as run_anywhere
from launch.ranks import run_to_the_end
from megalite.parallel.loss import head_loss

BATCH_TOKENS = 8192  # read at once, unless one row is longer
Tokens = NDArray[np.int64]  # [batch, seq]
Batch = tuple[Tokens, Tokens, Tokens | None]  # tokens, targets, positions where documents share a row


@dataclass
class Score:
    """Sums so far."""

    loss: float = 0.0  # nats
    tokens: int = 0  # predicted, each once
    documents: int = 0  # of text
    bytes: int = 0  # of the text that was predicted, UTF-8

    @property
    def mean(self) -> float:
        return self.loss / max(1, self.tokens)


@dataclass(frozen=True)
class Evaluation:
    """What came of it."""

    model: str
    loss: float  # mean over the tokens, nats
    perplexity: float
    bits_per_byte: float | None  # None for prepared data, which knows no bytes
    tokens: int  # predicted
    sequence_length: int  # tokens read at once, at most
    seconds: float
    tokens_per_second: float
    documents: int | None = None  # of text
    stride: int | None = None  # of windows over text
    samples: int | None = None  # of prepared data
    samples_per_epoch: int | None = None  # that there are of its split


def evaluate(request: EvaluateRequest, loaded: Loaded, progress: Callable[[Score], None]) -> Evaluation:
    """All ranks run this together. Raises LaunchError or DataError where there is nothing to score."""
    data, score, started = scored_data(request, loaded.stored), Score(), time.perf_counter()
    batches = _text_batches(data, loaded, score) if isinstance(data, Texts) else _sample_batches(data)
    for tokens, targets, positions in batches:
        score.loss += _loss(loaded, tokens, targets, positions)
        score.tokens += int((targets != IGNORED_TARGET).sum())
        progress(score)
    if score.tokens == 0:
        raise LaunchError("nothing to score: no document has two tokens, and the first one has nothing to be told from")
    seconds = time.perf_counter() - started
    if isinstance(data, Texts):
        extent = {"documents": score.documents, "stride": data.stride}
    else:
        extent = {"samples": data.count, "samples_per_epoch": data.samples.samples_per_epoch}
    return Evaluation(
        model=str(loaded.stored.folder),
        loss=score.mean,
        perplexity=math.exp(score.mean) if score.mean < 700 else math.inf,
        bits_per_byte=score.loss / math.log(2) / score.bytes if score.bytes else None,
        tokens=score.tokens,
        sequence_length=data.sequence_length,
        seconds=seconds,
        tokens_per_second=score.tokens / seconds,
        **extent,
    )


@torch.no_grad()
def _loss(loaded: Loaded, tokens: Tokens, targets: Tokens, positions: Tokens | None) -> float:
    """Summed over the targets."""
    parts = [torch.from_numpy(part).to(loaded.device) for part in (tokens, positions) if part is not None]
    hidden, head = loaded.module(parts[0] if len(parts) == 1 else tuple(parts))
    model, expected = loaded.stored.model, torch.from_numpy(targets).to(loaded.device)
    return float(head_loss(hidden, head, expected, model.vocab_size, loaded.tp, model.final_logit_softcapping))


def _text_batches(texts: Texts, loaded: Loaded, score: Score) -> Iterator[Batch]:
    for batch in equally_long_batches(_windows(texts, loaded, score), BATCH_TOKENS):
        yield batch.tokens, batch.targets, None


def _windows(texts: Texts, loaded: Loaded, score: Score) -> Iterator[Window]:
    """Of all documents; counts them and their bytes."""
    stored = loaded.stored
    tokenizer = stored.load_tokenizer()
    for text in documents(texts.sources):
        ids = tokenizer(text, verbose=False)["input_ids"]
        if max(ids, default=0) >= stored.model.vocab_size:
            raise LaunchError(
                f"{stored.folder}: its tokenizer makes token {max(ids)} of the text, but its model knows only "
                f"{stored.model.vocab_size}: it is another model's tokenizer"
            )
        # the first token is not predicted, so its bytes do not count; a special one has none
        first = tokenizer.decode(ids[:1], skip_special_tokens=True, clean_up_tokenization_spaces=False)
        score.bytes += max(0, len(text.encode()) - len(first.encode()))
        score.documents += 1
        yield from document_windows(np.array(ids, dtype=np.int64), texts.sequence_length, texts.stride)


def documents(sources: list[Source]) -> Iterator[str]:
    """Whole texts: a piece of a document would begin without its context."""
    pieces: list[str] = []
    for source in sources:
        for piece in source.pieces():
            pieces.append(piece.text)
            if piece.ends_document:
                yield "".join(pieces)
                pieces.clear()


def _sample_batches(data: Prepared) -> Iterator[Batch]:
    size = max(1, BATCH_TOKENS // data.sequence_length)
    for first in range(0, data.count, size):
        count = min(size, data.count - first)
        (batch,) = global_batch(
            data.samples,
            consumed_samples=first,
            global_batch_size=count,
            micro_batch_size=count,
            data_parallel_rank=0,
            data_parallel_size=1,
            document_mask=data.document_mask,
        )
        yield batch.tokens, batch.targets, batch.positions


def run(request: EvaluateRequest) -> int:
    """`megalite evaluate`; the exit code."""
    return run_anywhere("launch.evaluate", request, scored_data, show)


def show(request: EvaluateRequest, loaded: Loaded) -> None:
    """The work of `megalite evaluate`: progress to a terminal, the result to stdout."""
    with _progress(loaded.is_speaker) as progress:
        evaluation = evaluate(request, loaded, progress)
    if loaded.is_speaker:
        print(json.dumps(asdict(evaluation), indent=2) if request.as_json else _sentence(evaluation))


@contextmanager
def _progress(is_shown: bool) -> Iterator[Callable[[Score], None]]:
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    is_shown = is_shown and console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as display:
        task = display.add_task("reading")
        yield lambda score: display.update(task, description=f"{score.tokens:,} tokens, loss {score.mean:.4f}")


def _sentence(evaluation: Evaluation) -> str:
    bits = "" if evaluation.bits_per_byte is None else f", {evaluation.bits_per_byte:.4f} bits per byte"
    if evaluation.documents is not None:
        of = (
            f"{evaluation.documents:,} documents in windows of {evaluation.sequence_length:,}, "
            f"{evaluation.stride:,} apart"
        )
    else:
        of = f"{evaluation.samples:,} of {evaluation.samples_per_epoch:,} samples of {evaluation.sequence_length:,}"
    return (
        f"loss {evaluation.loss:.4f}, perplexity {evaluation.perplexity:.3f}{bits}: {evaluation.tokens:,} tokens of "
        f"{of}, {evaluation.tokens_per_second:,.0f} tokens/s"
    )


if __name__ == "__main__":
    run_to_the_end(lambda: rank_main(sys.argv[1:], EvaluateRequest, show))
