"""One rank of a case: trains the steps that it is told to, and tells about each.

In: the case's name as argument, and lines on stdin, each the number of a side, and whether its reducer is kept back.
Out: a line of JSON for each; before the first, how many numbers the rank's gradients are.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist

from benchmarks.harness import random_batches
from benchmarks.throttled_link.cases import CASES, SEQUENCE, LinkCase, LinkStep
from megalite.config import resolve_layout
from megalite.engine.build import build_engine
from megalite.engine.deepspeed.process_groups import start_distributed
from megalite.engine.engine import Engine
from megalite.engine.reduction import take_over
from megalite.engine.reduction.gradient_reduction import GradientReducer
from megalite.tracing.activity import Operation
from models.decoder import decoder_layers

WARM_UP_STEPS = 3
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


class WatchedReducer(GradientReducer):
    """Notes when buckets are complete and when backward has ended; can be kept from starting any before that."""

    is_kept_back = False

    def begin(self, micro_batches: int) -> None:
        """See `GradientReducer`."""
        super().begin(micro_batches)
        self.complete_at: dict[int, float] = {}  # by place in the order of reductions

    def _start_complete(self) -> None:
        for place, bucket in enumerate(self._order):
            if bucket.missing == 0:
                self.complete_at.setdefault(place, time.monotonic())
        if not self.is_kept_back:
            super()._start_complete()

    def finish(self) -> None:
        """See `GradientReducer`."""
        self.ended_at, self.sent = time.monotonic(), int(SENT.read_text())
        super()._start_complete()  # what was kept back
        super().finish()
        self.finished_at = time.monotonic()


@contextmanager
def same_connections(groups: list[dist.ProcessGroup]) -> Iterator[None]:
    """Makes `new_group` return `groups`, made here before by the same calls; and fills them if there are none.

    A group has TCP connections of its own, which remember what they went through: some are a fifth faster than others.
    """
    original, known = dist.new_group, iter(list(groups))

    def new_group(*arguments: Any, **options: Any) -> dist.ProcessGroup:
        if (group := next(known, None)) is None:
            groups.append(group := original(*arguments, **options))
        return group

    dist.new_group = new_group
    yield
    dist.new_group = original


def build(case: LinkCase, zero_optimization: dict[str, Any], groups: list[dist.ProcessGroup]) -> Engine:
    """Builds the engine of a side."""
    config = case.config(zero_optimization)
    with same_connections(groups):
        engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, case.ranks, "cpu"))
    matrices = [parameter for _, parameter in engine.parameters() if len(parameter.shard.shape) > 1]  # type: ignore[attr-defined]
    for parameter in matrices if case.sleep_s else []:
        parameter.register_hook(lambda _: time.sleep(case.sleep_s / len(matrices)))
    return engine


def train(engine: Engine, case: LinkCase, draw: np.random.Generator) -> LinkStep:
    """Trains one step on random tokens."""
    shape = case.micro_batches, case.rows, SEQUENCE
    batches = random_batches(draw, engine.config.model.vocab_size, shape)
    dist.barrier()
    sent, began = int(SENT.read_text()), time.monotonic()
    float(engine.train_step(batches if engine.needs_data else [], 1e-3).loss)
    step_s, sent_in_all = time.monotonic() - began, int(SENT.read_text()) - sent
    notes = [note for note in engine.activity.notes() if note.time >= began]
    backwards = [note for note in notes if note.operation is Operation.BACKWARD]
    # noted again behind each reduction that has interrupted it
    last_backward = next(note.time for note in backwards if note.micro_batch == backwards[-1].micro_batch)
    reducer = engine.reducer
    assert isinstance(reducer, WatchedReducer)
    places = sorted(reducer.complete_at)
    return LinkStep(
        step_s,
        reducer.ended_at - last_backward,
        sent_in_all,
        (reducer.sent - sent) / sent_in_all,
        reducer.finished_at - reducer.ended_at,
        tuple(reducer.complete_at[place] - reducer.ended_at for place in places),
        tuple(reducer._order[place].size for place in places),
    )


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    case = next(case for case in CASES if case.name == sys.argv[1])
    start_distributed(int(os.environ["LOCAL_RANK"]))
    assert take_over.GradientReducer is GradientReducer  # type: ignore[attr-defined]
    take_over.GradientReducer = WatchedReducer  # type: ignore[attr-defined]  # this process runs nothing else
    groups: list[dist.ProcessGroup] = []
    sides = [build(case, settings, groups) for settings in case.settings]
    draw = np.random.default_rng(dist.get_rank())
    for engine in sides * WARM_UP_STEPS:
        train(engine, case, draw)
    numbers = sum(math.prod(parameter.shard.local_shape) for _, parameter in sides[0].parameters())  # type: ignore[attr-defined, misc]
    print(json.dumps(numbers), file=answers, flush=True)
    for line in sys.stdin:
        side, WatchedReducer.is_kept_back = json.loads(line)
        print(json.dumps(asdict(train(sides[side], case, draw))), file=answers, flush=True)


if __name__ == "__main__":
    main()
