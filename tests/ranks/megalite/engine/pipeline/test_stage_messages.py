"""Pipelines exchange the same messages, and end, over a transport that buffers nothing.

NCCL cannot run here, so a transport over gloo obeys its rules, and stricter ones: each rank has one operation at a time
under way, in the order in which they were begun, whoever the other end is, and a send ends only with its reception.
What ends under these rules ends with any number of communicators.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.pipeline.pipelined import PipelinedEngine
from megalite.engine.pipeline.stage_messages import PipelineGroups
from megalite.schedules.program import Message, MessageKind
from megalite.schedules.tables import Schedule
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

STAGES = 4
KINDS = list(MessageKind)


@dataclass
class _Work:
    """A send or a reception on its way."""

    message: Message
    tensor: Tensor
    is_sent: bool
    error: Exception | None = None
    is_done: threading.Event = field(default_factory=threading.Event)

    def is_completed(self) -> bool:
        return self.is_done.is_set()

    def wait(self) -> None:
        self.is_done.wait()
        if self.error is not None:
            raise self.error


class StrictTransport:
    """One thread that runs a rank's sends and receptions one by one, on a process group that nothing else uses."""

    def __init__(self, ranks: Sequence[int], group: dist.ProcessGroup) -> None:
        self._ranks, self._group = ranks, group
        self._begun: queue.Queue[_Work] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def send(self, message: Message, tensor: Tensor) -> Any:
        return self._begin(_Work(message, tensor, True))

    def receive(self, message: Message, tensor: Tensor) -> Any:
        return self._begin(_Work(message, tensor, False))

    def _begin(self, work: _Work) -> _Work:
        self._begun.put(work)
        return work

    def _run(self) -> None:
        while True:
            work = self._begun.get()
            try:
                (self._send if work.is_sent else self._receive)(work)
            except Exception as error:
                work.error = error
            work.is_done.set()

    def _send(self, work: _Work) -> None:
        """Sends when the other end has come, and waits until it has everything."""
        other, signal = self._ranks[work.message.target], torch.zeros(1)
        dist.recv(signal, src=other, group=self._group)
        for tensor in (_name_of(work.message), work.tensor):
            dist.send(tensor, dst=other, group=self._group)
        dist.recv(signal, src=other, group=self._group)

    def _receive(self, work: _Work) -> None:
        other, signal, name = self._ranks[work.message.source], torch.zeros(1), _name_of(work.message)
        dist.send(signal, dst=other, group=self._group)
        dist.recv(sent := torch.empty_like(name), src=other, group=self._group)
        if not torch.equal(sent, name):
            raise AssertionError(f"expected {work.message}, and was sent {sent.tolist()}")
        dist.recv(work.tensor, src=other, group=self._group)
        dist.send(signal, dst=other, group=self._group)


def _name_of(message: Message) -> Tensor:
    return torch.tensor([KINDS.index(message.kind), message.position, message.micro_batch])


class _Watched(PipelineGroups):
    """The engine's own transport, which notes what it was asked for."""

    def open(self, device: torch.device) -> None:
        self.pairs, self.early = set(self._kind_of), list[Message]()
        super().open(device)
        self.is_open = True

    def send(self, message: Message, tensor: Tensor) -> dist.Work:
        self._note(message)
        return super().send(message, tensor)

    def receive(self, message: Message, tensor: Tensor) -> dist.Work:
        self._note(message)
        return super().receive(message, tensor)

    def _note(self, message: Message) -> None:
        if not getattr(self, "is_open", False) or (message.source, message.target) not in self.pairs:
            self.early.append(message)


def _run(engine: PipelinedEngine, case: Case) -> list[float]:
    """Two steps, an evaluation of a number of micro-batches that fits no group of stages, and one micro-batch alone."""
    batches = [micro_batches_of(engine, case, batch) for batch in global_batches(case)]
    steps = [engine.train_step(batch, case.learning_rate) for batch in batches]
    numbers = [float(number) for step in steps for number in (step.loss, step.grad_norm)]
    numbers.append(float(engine.evaluate(batches[0][:5], 5)))
    logits = engine.logits(global_batches(case)[0].rows(slice(0, 1)))
    return [*numbers, 0.0 if logits is None else float(logits.double().square().sum())]


def _both_transports(rank: int, schedules: list[str]) -> list[dict[str, Any]]:
    import megalite.engine.pipeline.pipelined as pipelined

    pipelined.PipelineGroups = _Watched  # type: ignore[misc]
    strict, seen = dist.new_group(range(STAGES)), []
    for schedule in schedules:
        model = {"num_hidden_layers": 2 * STAGES, "tie_word_embeddings": True}
        case = Case(
            pp=STAGES,
            accumulation=8,
            micro_batch=1,
            sequence=9,
            schedule=schedule,
            steps=2,
            document_mask=True,
            model=model,
        )
        found = []
        for is_strict in (False, True):
            engine = engine_of(case)
            assert isinstance(engine, PipelinedEngine)
            if is_strict:
                transport = StrictTransport(engine._ranks, strict)
                engine._context = replace(engine._context, transport=transport)
            found.append(_run(engine, case))
            engine.deepspeed.destroy()
            if not is_strict:
                watched: Any = engine._context.transport
                early, count = watched.early, len(watched.pairs)
        seen.append({"numbers": found, "early": early, "pairs": count})
    return seen


@pytest.fixture(scope="module")
def runs() -> dict[str, list[dict[str, Any]]]:
    """What each rank saw, by schedule."""
    schedules = [schedule.value for schedule in Schedule]
    by_rank = run_fresh_ranks(_both_transports, STAGES, schedules)
    return {schedule: [seen[index] for seen in by_rank] for index, schedule in enumerate(schedules)}


@pytest.mark.parametrize("schedule", Schedule)
def test_a_pipeline_ends_and_computes_the_same_without_any_buffer(
    schedule: Schedule, runs: dict[str, list[dict[str, Any]]]
) -> None:
    """To the bit: who waits for whom changes no sum. A message in another order than expected raises."""
    for seen in runs[schedule.value]:
        over_groups, strict = seen["numbers"]
        assert over_groups == strict and all(number == number for number in strict)


@pytest.mark.parametrize("schedule", Schedule)
def test_pairs_of_stages_are_opened_before_the_first_message(
    schedule: Schedule, runs: dict[str, list[dict[str, Any]]]
) -> None:
    """A pair of NCCL opens with its first message and waits for both ranks, which begin with different ones."""
    for seen in runs[schedule.value]:
        assert seen["early"] == []
        wraps = schedule is Schedule.INTERLEAVED  # from the last stage to the first one's second chunk
        assert seen["pairs"] == 2 * (STAGES - 1) + 2 * wraps
