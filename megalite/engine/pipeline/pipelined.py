"""Trains a model that is cut into pipeline stages, in the order of the planner's tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from megalite.config import Config, ResolvedLayout
from megalite.config.batch_stages import BatchShape
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.engine.batch_transfer import DeviceBatch, MicroBatch, cut_sequences
from megalite.engine.deepspeed.process_groups import group_among
from megalite.engine.deepspeed.zero_3 import let_stages_differ
from megalite.engine.engine import Engine
from megalite.engine.pipeline.handover import hand_over
from megalite.engine.pipeline.pipeline_runtime import ProgramRun, StageContext
from megalite.engine.pipeline.stage_messages import MessageLayout, PipelineGroups
from megalite.engine.pipeline.tying import TiedHead, TiedWeight
from megalite.engine.stages import TORCH_DTYPES, Chunk, Labels, Stage
from megalite.parallel.deferred_weight_gradients import put_off_weight_gradients
from megalite.parallel.layers import LayerSpec
from megalite.parallel.mesh import Mesh, stage_boundaries
from megalite.schedules.deadlock_check import check_programs
from megalite.schedules.program import Program, forward_programs, training_programs
from megalite.schedules.tables import Schedule, placement
from megalite.tracing.activity import Activity, Operation


class PipelinedEngine(Engine):
    """Trains the chunks of one pipeline stage on DeepSpeed's plain engine, which sees nothing of the pipeline."""

    def __init__(
        self, specs: Sequence[LayerSpec], config: Config, layout: ResolvedLayout, mesh: Mesh, activity: Activity
    ) -> None:
        super().__init__(config, layout, mesh, activity)
        self._schedule, self._stages = Schedule(layout.pipeline_schedule), mesh.pipeline_parallel_size
        self._placement = placement(self._schedule, self._stages, layout.pipeline_chunks)
        neighbours = {pair for pair in pairwise(self._placement) if pair[0] != pair[1]}
        pairs = neighbours | {(after, before) for before, after in neighbours}
        # before the group of a tied weight, which only some ranks are in: torch names NCCL's groups by their number
        self._groups = PipelineGroups(self._grid.pipe_groups, pairs)
        self._ranks = self._groups.ranks
        self._device = torch.device(get_accelerator().current_device_name())
        chunks = self._build_chunks(specs)
        self._tied_head: TiedHead | None = None
        if specs[-1].tied_to is not None:
            self._tie(specs[-1].module_key, chunks)
        if layout.zero_stage == 3:
            let_stages_differ()
        self._initialize(Stage(chunks, self._tp))
        self._tied_embedding: nn.Parameter | None = None  # which gets the gradients of the head too
        if specs[-1].tied_to is not None and self.coordinate.pipeline_rank == self._placement[0]:
            weight = chunks[0].serial.layers[specs[-1].module_key].weight
            assert isinstance(weight, nn.Parameter)
            self._tied_embedding = weight if weight.requires_grad else None
        self._groups.open(self._device)
        put_off = put_off_weight_gradients(self.deepspeed.module) if self._schedule in SPLITS_BACKWARD else None
        self._context = StageContext(
            chunks,
            len(self._placement) - 1,
            self._groups,
            partial(hand_over, self.deepspeed),
            activity,
            self._ranks,
            self._compute_peers,
            put_off,
            self.reducer,
        )
        self._forward_programs: dict[int, Program] = {}  # by the number of micro-batches
        self._prepare_steps()

    def _build_chunks(self, specs: Sequence[LayerSpec]) -> dict[int, Chunk]:
        costs, is_block = [spec.cost for spec in specs], [spec.is_block for spec in specs]
        boundaries = stage_boundaries(costs, is_block, len(self._placement))
        last = len(self._placement) - 1
        return {
            position: Chunk(specs[begin:end], self.config, self._tp, self._make, is_last=position == last)
            for position, (stage, (begin, end)) in enumerate(zip(self._placement, pairwise(boundaries), strict=True))
            if stage == self.coordinate.pipeline_rank
        }

    def _tie(self, module_key: str, chunks: dict[int, Chunk]) -> None:
        """Makes the head compute with the embedding's weight: one module if one rank holds both, else with a copy."""
        first, last = self._placement[0], self._placement[-1]
        if first == last:
            if self.coordinate.pipeline_rank == first:
                layers = chunks[0].serial.layers
                chunks[len(self._placement) - 1].serial.layers[module_key] = layers[module_key]
            return
        ends = [[ranks[first], ranks[last]] for ranks in self._grid.pipe_groups]
        group = group_among(ends)  # None on the ranks between them
        if self.coordinate.pipeline_rank == first:
            weight = chunks[0].serial.layers[module_key].weight
            assert isinstance(weight, nn.Parameter)
            self.tied_weight = TiedWeight(weight.shard.name, weight, group, self.activity)  # type: ignore[attr-defined]
        elif self.coordinate.pipeline_rank == last:
            module = chunks[len(self._placement) - 1].serial.layers[module_key]
            self._tied_head = TiedHead(module, TORCH_DTYPES[self.config.precision.dtype], self._device)
            self.tied_weight = TiedWeight(self._tied_head.name, self._tied_head.weight, group, self.activity)

    def use_shape(self, shape: BatchShape) -> None:
        if shape != self.shape:
            super().use_shape(shape)
            self._prepare_steps()

    def _prepare_steps(self) -> None:
        """Prepares what depends on the number of micro-batches: the program, and the gradients of a tied embedding."""
        programs = training_programs(self._schedule, self._stages, self.micro_batches, self.layout.pipeline_chunks)
        check_programs(programs)
        self._training_program = programs[self.coordinate.pipeline_rank]
        if (weight := self._tied_embedding) is not None:
            is_same_rank = self._placement[0] == self._placement[-1]
            self.reducer.expect_more(weight, self.micro_batches if is_same_rank else 1)

    def _forward_program(self, count: int) -> Program:
        """Returns the program of an evaluation, whose number of micro-batches is the same every time."""
        if count not in self._forward_programs:
            programs = forward_programs(self._schedule, self._stages, count, self.layout.pipeline_chunks)
            check_programs(programs)
            self._forward_programs[count] = programs[self.coordinate.pipeline_rank]
        return self._forward_programs[count]

    @property
    def needs_data(self) -> bool:
        return self.coordinate.pipeline_rank in (self._placement[0], self._placement[-1])

    def pipeline_groups(self) -> list[dist.ProcessGroup]:
        return [self._grid.get_pipe_parallel_group(), *self._groups.all()]

    @property
    def _loss_peers(self) -> tuple[int, ...]:
        source = self._ranks[self._placement[-1]]
        if dist.get_rank() != source:
            return (source,)
        return tuple(sorted({*self.activity.peers.data, *self._ranks}))

    def _over_replicas(self, numbers: Tensor) -> Tensor:
        source = self._ranks[self._placement[-1]]
        if dist.get_rank() == source:
            numbers = super()._over_replicas(numbers)
        dist.broadcast(numbers, src=source, group=self._grid.get_pipe_parallel_group())
        return numbers

    def _accumulate_gradients(self, micro_batches: Sequence[DeviceBatch], weight: Tensor) -> list[Tensor]:
        shape = self.shape
        run = self._run(micro_batches, (shape.micro_batch_size, shape.sequence_length), weight)
        losses = run.run(self._training_program)
        self._hand_over_tied_gradient()
        return losses

    def _hand_over_tied_gradient(self) -> None:
        """Sends the gradient of the head's copy to the embedding and adds it there."""
        if self.tied_weight is None or not self.tied_weight.weight.requires_grad:
            return
        weight, group, ranks = self.tied_weight.weight, self.tied_weight.group, self.tied_weight.ranks
        self.activity.record_op(Operation.REDUCE_TIED_GRADIENTS, peers=ranks)
        if self._tied_head is not None:
            dist.send(self._tied_head.take_gradient(self.micro_batches), dst=ranks[0], group=group)
            return
        gradient = torch.empty(weight.shape, dtype=torch.float32, device=self._device)
        dist.recv(gradient, src=ranks[1], group=group)
        assert isinstance(weight, nn.Parameter)
        self.reducer.add(weight, gradient)

    def _evaluate(self, micro_batches: Sequence[DeviceBatch], count: int, weight: Tensor) -> list[Tensor]:
        training = self.config.training
        run = self._run(micro_batches, (training.micro_batch_size, training.sequence_length), weight)
        return run.run(self._forward_program(count))

    @torch.no_grad()
    def logits(self, micro_batch: MicroBatch) -> Tensor | None:
        self.deepspeed.eval()
        batch, sequence = micro_batch.tokens.shape
        on_device = self._transfer(cut_sequences([micro_batch], self._tp.context))
        outputs = self._run(on_device, (batch, sequence), None).run(self._forward_program(1))
        self.deepspeed.train()
        return outputs[0] if outputs else None

    def _run(self, micro_batches: Sequence[DeviceBatch], shape: tuple[int, int], weight: Tensor | None) -> ProgramRun:
        """Prepares a run over micro-batches of `shape` [batch, seq]; without a weight their logits are computed."""
        model, (batch, sequence) = self.config.model, shape
        has_positions = self.config.data.document_mask
        if any((each.inputs.positions is None) == has_positions for each in micro_batches):
            raise ValueError(f"micro-batches must{' not' * (not has_positions)} have positions: see data.document_mask")
        layout = MessageLayout(
            (batch, sequence // self._tp.sequence_parts, model.hidden_size),
            TORCH_DTYPES[self.config.precision.dtype],
            self._device,
            shape if has_positions else None,
            (batch,) if model.has_dropout else None,
        )

        def labels(number: int) -> Labels | None:
            return None if weight is None else self._labels(micro_batches[number], weight)

        return ProgramRun(self._context, layout, lambda number: micro_batches[number].inputs, labels)
