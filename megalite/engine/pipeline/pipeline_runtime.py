"""Runs one stage's program of the planner: passes through its chunks, and the messages between them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.pipeline.stage_messages import MessageLayout, PipelineGroups
from megalite.engine.stages import Chunk, Labels
from megalite.parallel.deferred_weight_gradients import PutOffProduct, WeightGradientQueue, compute_put_off
from megalite.parallel.gradient_accumulation_fusion import SumsGradients
from megalite.parallel.layers import BlockInput
from megalite.schedules.passes import PassKind
from megalite.schedules.program import Compute, Message, MessageKind, Program, Receive, Send
from megalite.tracing.activity import NOBODY, Activity, Operation

SEND = {MessageKind.ACTIVATION: Operation.SEND_ACTIVATION, MessageKind.GRADIENT: Operation.SEND_GRADIENT}
WAIT = {MessageKind.ACTIVATION: Operation.AWAIT_ACTIVATION, MessageKind.GRADIENT: Operation.AWAIT_GRADIENT}
RECEIVE = {MessageKind.ACTIVATION: Operation.RECEIVE_ACTIVATION, MessageKind.GRADIENT: Operation.RECEIVE_GRADIENT}


@dataclass(frozen=True)
class StageContext:
    """Everything on one rank that stays the same from one run of a program to the next."""

    chunks: Mapping[int, Chunk]  # of this rank, by position in the model
    last_position: int  # of the model
    transport: PipelineGroups
    backward: Callable[[Tensor, Tensor | None], None]  # from an output with its gradient, or from a loss
    activity: Activity
    ranks: Sequence[int]  # the global rank of each stage of this pipeline
    compute_peers: tuple[int, ...]
    put_off: WeightGradientQueue | None  # of a schedule that splits backward
    sums: SumsGradients  # of weight gradients that are put off


class _Transfer(NamedTuple):
    """A message on its way."""

    message: Message
    tensor: Tensor
    work: dist.Work


class ProgramRun:
    """One run of a program, with gradients unless torch's are disabled."""

    def __init__(
        self,
        context: StageContext,
        layout: MessageLayout,
        first_input: Callable[[int], BlockInput],
        labels: Callable[[int], Labels | None],
    ) -> None:
        self._context, self._layout = context, layout
        self._first_input, self._labels = first_input, labels  # by micro-batch, from 0
        self._arriving: dict[Message, _Transfer] = {}
        self._sending: deque[_Transfer] = deque()  # oldest first
        self._results: dict[tuple[MessageKind, int, int], Tensor] = {}  # by kind, position that uses it, micro-batch
        self._here: dict[tuple[int, int], BlockInput] = {}  # from a chunk to the next one on this rank
        self._alive: dict[tuple[int, int], tuple[BlockInput, Tensor]] = {}  # input and output between the two passes
        self._put_off: dict[tuple[int, int], list[PutOffProduct]] = {}  # between the two parts of a backward
        self._outputs: dict[int, Tensor] = {}  # the last chunk's, by micro-batch
        self.peak_alive = 0  # micro-batches of a chunk

    def run(self, program: Program) -> list[Tensor]:
        """Returns the last chunk's output of each micro-batch; empty on ranks that do not hold it."""
        for action in program:
            match action:
                case Receive(message):
                    tensor = self._layout.new_buffer(message.kind)
                    work = self._context.transport.receive(message, tensor)
                    self._arriving[message] = _Transfer(message, tensor, work)
                case Send(message):
                    self._send(message)
                case Compute(PassKind.FORWARD):
                    self._forward(action)
                case Compute(PassKind.WEIGHT_GRADIENT):
                    self._weight_gradients(action)
                case Compute():
                    self._backward(action)
        self._await_sends(0)
        left_over = (self._arriving, self._results, self._here, self._alive, self._put_off)
        assert not any(left_over), "a program ended before all its work was done"
        return [self._outputs[number] for number in sorted(self._outputs)]

    def _send(self, message: Message) -> None:
        # as many as chunks of the model: a stage that waits here is far ahead of the one that receives
        self._await_sends(self._context.last_position + 1)
        tensor = self._results.pop((message.kind, message.position, message.micro_batch))
        self._record_message(SEND, message)
        self._sending.append(_Transfer(message, tensor, self._context.transport.send(message, tensor)))

    def _await_sends(self, most: int) -> None:
        """Waits for the oldest sends until at most so many are left, whose tensors live.

        It ends: the programs begin messages in one common order, so what is waited for comes before what follows. NCCL
        tells when a send has ended, gloo does only to who waits for it.
        """
        while self._sending and self._sending[0].work.is_completed():
            self._sending.popleft()
        while len(self._sending) > most:
            transfer = self._sending.popleft()
            self._record_message(WAIT, transfer.message, self._peers(transfer.message.target))
            transfer.work.wait()

    def _taken(self, message: Message | None) -> Tensor:
        """Waits for a message that has been begun to be received."""
        assert message is not None, "a pass needs what nobody sends"
        transfer = self._arriving.pop(message)
        self._record_message(RECEIVE, message, self._peers(message.source))
        transfer.work.wait()
        return transfer.tensor

    def _forward(self, action: Compute) -> None:
        position, number = action.position, action.micro_batch
        if position == 0:
            self._context.activity.record_op(Operation.LOAD, number + 1)
            inputs = self._first_input(number)
        else:
            is_here = position - 1 in self._context.chunks
            inputs = self._here.pop((position, number)) if is_here else self._layout.unpack(self._taken(action.needs))
            inputs.hidden.requires_grad_(torch.is_grad_enabled())
        is_last = position == self._context.last_position
        self._record_pass(Operation.FORWARD, action, self._context.compute_peers)
        outputs = self._context.chunks[position](inputs, self._labels(number) if is_last else None)
        if is_last:
            self._outputs[number] = outputs.detach()
        elif position + 1 in self._context.chunks:
            self._here[position + 1, number] = outputs._replace(hidden=outputs.hidden.detach())
        else:
            self._results[MessageKind.ACTIVATION, position + 1, number] = self._layout.pack(outputs)
        if torch.is_grad_enabled():
            self._alive[position, number] = inputs, outputs if is_last else outputs.hidden
            self.peak_alive = max(self.peak_alive, len(self._alive))

    def _backward(self, action: Compute) -> None:
        position, number = action.position, action.micro_batch
        is_last = position == self._context.last_position
        gradient = None
        if position + 1 in self._context.chunks:
            gradient = self._results.pop((MessageKind.GRADIENT, position, number))
        elif not is_last:
            gradient = self._taken(action.needs)
        self._record_pass(Operation.BACKWARD, action, self._context.compute_peers)
        inputs, output = self._alive.pop((position, number))
        self._context.backward(output, gradient)
        if position > 0:
            assert inputs.hidden.grad is not None
            self._results[MessageKind.GRADIENT, position - 1, number] = inputs.hidden.grad
        if self._context.put_off is not None:
            self._put_off[position, number] = self._context.put_off.take()

    def _weight_gradients(self, action: Compute) -> None:
        self._record_pass(Operation.WEIGHT_GRADIENT, action, self._context.compute_peers)
        compute_put_off(self._put_off.pop((action.position, action.micro_batch)), self._context.sums)

    def _record_pass(self, operation: Operation, action: Compute, peers: tuple[int, ...]) -> None:
        self._context.activity.record_op(operation, action.micro_batch + 1, peers, self._chunk(action.position))

    def _record_message(
        self, operations: Mapping[MessageKind, Operation], message: Message, peers: tuple[int, ...] = NOBODY
    ) -> None:
        chunk = self._chunk(message.position)
        self._context.activity.record_op(operations[message.kind], message.micro_batch + 1, peers, chunk)

    def _peers(self, stage: int) -> tuple[int, ...]:
        return (self._context.ranks[stage],)

    def _chunk(self, position: int) -> int | None:
        """Returns what a record says about a chunk: nothing where each stage has only one."""
        return position if len(self._context.chunks) > 1 else None
