"""The runtime adds messages to what the chunks compute, and nothing else: no copy of hidden states, no other operation.

A step's operations are counted one by one, where a clock cannot be trusted.
"""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config import Config
from megalite.engine.pipeline.handover import hand_over
from megalite.engine.pipeline.pipeline_runtime import ProgramRun, StageContext
from megalite.engine.pipeline.stage_messages import MessageLayout
from megalite.engine.stages import Chunk, Labels
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, make_layer
from megalite.parallel.mesh import Mesh
from megalite.schedules.program import Message, MessageKind, training_programs
from megalite.schedules.tables import Schedule
from megalite.tracing.activity import Activity
from models.decoder import decoder_layers
from tests.helpers.late_gradients import Sums

BATCH, SEQUENCE, HIDDEN, MICRO_BATCHES = 2, 5, 12, 5


class _Counted(TorchDispatchMode):
    """Counts operations by name and the shape of their first tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[tuple[str, tuple[int, ...]]] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        shape = next((tuple(each.shape) for each in (result, *args) if isinstance(each, Tensor)), ())
        self.seen[function.overloadpacket.__name__, shape] += 1
        return result


class _InOneProcess:
    """Carries messages between threads, by handing the sender's tensor to the receiver's buffer."""

    def __init__(self, queues: dict[tuple[int, int, MessageKind], SimpleQueue[Tensor]]) -> None:
        self._queues = queues
        self.sent: list[tuple[MessageKind, int]] = []  # with bytes

    def send(self, message: Message, tensor: Tensor) -> Any:
        self.sent.append((message.kind, tensor.numel() * tensor.element_size()))
        self._queues[message.source, message.target, message.kind].put(tensor)
        return _Work()

    def receive(self, message: Message, tensor: Tensor) -> Any:
        return _Work(self._queues[message.source, message.target, message.kind], tensor)


class _Work(dist.Work):
    def __init__(self, queue: SimpleQueue[Tensor] | None = None, into: Tensor | None = None) -> None:
        super().__init__()
        self._queue, self._into = queue, into

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        if self._queue is not None and self._into is not None:
            # numpy: torch counts nothing
            np.copyto(self._into.detach().numpy(), self._queue.get(timeout=20).detach().numpy())
        return True


class _PlainBackward:
    """The two calls of DeepSpeed's engine that a hand-over makes, without its hooks."""

    def __call__(self, run: Any) -> Tensor:
        return run()

    def backward(self, loss: Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()


def _chunks() -> list[Chunk]:
    model = {"vocab_size": 31, "hidden_size": HIDDEN, "intermediate_size": 20, "num_hidden_layers": 2}
    model |= {"num_attention_heads": 3, "max_position_embeddings": SEQUENCE}
    config = Config.model_validate(
        {
            "run_dir": "unused",
            "model": model,
            "data": {"path": "unused"},
            "training": {"global_batch_size": 2, "micro_batch_size": 2, "sequence_length": SEQUENCE, "steps": 1},
        }
    )
    specs = decoder_layers(config.model)
    make, tp = partial(make_layer, seed=config.training.seed, initializer_range=0.02), TensorParallel()
    return [Chunk(part, config, tp, make, is_last=at == 1) for at, part in enumerate((specs[:2], specs[2:]))]


def _numbers(number: int) -> tuple[Tensor, Tensor]:
    draw = np.random.default_rng(number)
    tokens, targets = (torch.from_numpy(draw.integers(0, 31, (BATCH, SEQUENCE))) for _ in range(2))
    return tokens, targets


def _labels(number: int) -> Labels:
    return Labels(_numbers(number)[1], torch.ones(()))


def _run_stage(stage: int, chunk: Chunk, transport: _InOneProcess) -> tuple[Counter, int]:
    layout = MessageLayout((BATCH, SEQUENCE, HIDDEN), torch.float32, torch.device("cpu"))
    context = StageContext(
        {stage: chunk},
        1,
        transport,
        partial(hand_over, _PlainBackward()),
        Activity(Mesh(), 0),
        [0, 1],
        (),
        None,
        Sums(),
    )
    tokens, labels = ([each(number) for number in range(MICRO_BATCHES)] for each in (_numbers, _labels))
    _pass(stage, chunk, torch.zeros(BATCH, SEQUENCE, HIDDEN) if stage else tokens[0][0], labels[0])  # keeps rotations
    run = ProgramRun(context, layout, lambda number: BlockInput(tokens[number][0]), labels.__getitem__)
    program = training_programs(Schedule.ONE_F_ONE_B, 2, MICRO_BATCHES)[stage]
    with _Counted() as counted:
        run.run(program)
    return counted.seen, run.peak_alive


def _pass(stage: int, chunk: Chunk, inputs: Tensor, labels: Labels) -> Tensor:
    """Runs a chunk forward alone."""
    output = chunk(BlockInput(inputs), labels if stage else None)
    return output if stage else output.hidden


def _serially(stage: int, chunk: Chunk, inputs: Tensor, gradient: Tensor) -> Counter:
    """Counts the operations of the chunk's own passes, called directly."""
    own = [inputs.clone().requires_grad_(inputs.is_floating_point()) for _ in range(MICRO_BATCHES)]
    labels = _labels(0)
    with _Counted() as counted:
        for each in own:
            _pass(stage, chunk, each, labels).backward(None if stage else gradient)
    return counted.seen


@pytest.fixture(scope="module")
def stages() -> list[tuple[Counter, Counter, int, list[tuple[MessageKind, int]]]]:
    """Of each stage: the operations of a run, those of its chunk alone, the peak, and its messages."""
    torch.manual_seed(0)
    chunks = _chunks()
    queues = {(a, 1 - a, kind): SimpleQueue() for a in (0, 1) for kind in MessageKind}
    transports = [_InOneProcess(queues) for _ in range(2)]
    found: dict[int, tuple[Counter, int]] = {}

    def run(stage: int) -> None:
        found[stage] = _run_stage(stage, chunks[stage], transports[stage])

    threads = [threading.Thread(target=run, args=(stage,), daemon=True) for stage in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    hidden = torch.randn(BATCH, SEQUENCE, HIDDEN)
    own = []
    for stage, inputs in enumerate((_numbers(0)[0], hidden)):
        chunks[stage].zero_grad()
        own.append(_serially(stage, chunks[stage], inputs, torch.randn_like(hidden)))
    return [(found[at][0], own[at], found[at][1], transports[at].sent) for at in (0, 1)]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_copies_no_hidden_states_and_computes_nothing_beside_its_passes(stages: list, stage: int) -> None:
    """Catches a message that is copied where no positions travel, a cloned input, a gradient that is scaled again."""
    run, own, *_ = stages[stage]
    without_work = {"detach", "empty", "view"}
    more = {key: count for key, count in (run - own).items() if key[0] not in without_work and np.prod(key[1]) > 1}
    assert not more, more
    assert not own - run, f"a pass of the chunk was left out: {own - run}"


def test_one_message_per_micro_batch_and_direction(stages: list) -> None:
    size = 4 * BATCH * SEQUENCE * HIDDEN
    sent = [messages for *_, messages in stages]
    assert sent[0] == [(MessageKind.ACTIVATION, size)] * MICRO_BATCHES
    assert sent[1] == [(MessageKind.GRADIENT, size)] * MICRO_BATCHES
    assert [peak for _, _, peak, _ in stages] == [2, 1]
