"""Peak memory of each rank of a layout, part by part. Pure arithmetic, no torch.

The peak is the maximum over the moments at which a step may need most: while the loss is computed, when backward
begins, when it ends, when replicas sum gradients, and in the optimizer's step. A moment maps each purpose to bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from megalite.planner.cost.activations import embedding_bytes, micro_batches_in_flight, stage_blocks, with_same_blocks
from megalite.planner.cost.model_states import BUCKET, MOMENTS, deepspeed_states
from megalite.planner.cost.shapes import StageShape, cut, embedding_parameters, stage_shapes
from megalite.planner.workload import BYTES, TrainingWorkload

MIB = 2**20
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}  # fp32 logits at once, megalite/parallel/loss.py
CHUNK_TOKENS = 128  # at least
PROCESS_BYTES = 300 * MIB  # of a rank before its model is built: benchmarks/results/planner_memory.md
PROCESS, COPY = "process", "checkpoint copy"


@dataclass(frozen=True)
class Device:
    """The device of the memory and the overhead of its allocator."""

    kind: Literal["cpu", "cuda"]
    # glibc's malloc as `megalite train` sets it up keeps what is freed, in pieces that rarely suit a large buffer:
    # each kind of buffer ends up with room of its own, and what counts is the sum of their peaks
    keeps_freed: bool = False
    maps_lazily: bool = False  # pages of a buffer count once they are written to
    fragments: float = 0.0  # fraction of the tensors' bytes that the allocator reserves and does not use
    context_bytes: float = 0.0  # beside tensors
    widens_bf16: bool = False  # bf16 products are computed in fp32, as on a CPU without bf16 units


CUDA = Device("cuda", fragments=0.07, context_bytes=1.5 * 2**30)
"""Memory that has to fit: tensors, 7 % that the caching allocator reserves for tensors of other sizes, and 1.5 GiB
of CUDA's context and NCCL's buffers. Both are usual values and not fitted: no published table splits them off."""

TENSORS = Device("cuda")
"""Memory that `torch.cuda.max_memory_allocated` counts."""

CPU = Device("cpu", keeps_freed=True, maps_lazily=True, context_bytes=40 * MIB)
"""A rank of `megalite train`, without the memory that its process has before the model is built. 40 MiB: libraries'
pages and buffers that the first steps touch, measured with a tiny model."""


@dataclass(frozen=True)
class StageMemory:
    """Memory of each rank of one pipeline stage, in bytes."""

    stage: int
    parts: Mapping[str, float]  # what it is for -> bytes, adding up to the total
    moment: str = ""  # when most is needed

    @property
    def total(self) -> float:
        """The predicted peak."""
        return sum(self.parts.values())


def memory_of(job: TrainingWorkload, device: Device = CUDA) -> tuple[StageMemory, ...]:
    """Returns the peak memory of each pipeline stage, in order."""
    shapes = stage_shapes(job.model, job.layout.tensor_parallel_size, job.layout.pipeline_parallel_size)
    blocks = with_same_blocks(job)
    return tuple(_Stage(job, blocks, stage, shape, device).memory() for stage, shape in enumerate(shapes))


def with_process(one: StageMemory, job: TrainingWorkload, process_bytes: float) -> StageMemory:
    """Adds the memory of the process, which counts on a CPU, and the buffer that megalite/checkpoint/saver.py keeps for
    background saves: this rank's share of fp32 weights and moments."""
    layout = job.layout
    shape = stage_shapes(job.model, layout.tensor_parallel_size, layout.pipeline_parallel_size)[one.stage]
    numbers = (1 + MOMENTS[job.optimizer]) * shape.parameters / layout.data_parallel_size
    copy = {COPY: 4.0 * numbers} if job.background_saves else {}
    return StageMemory(one.stage, {PROCESS: float(process_bytes), **one.parts, **copy}, one.moment)


Moment = dict[str, float]


class _Stage:
    """One pipeline stage of megalite."""

    def __init__(
        self, job: TrainingWorkload, blocks: TrainingWorkload, stage: int, shape: StageShape, device: Device
    ) -> None:
        self.job, self.stage, self.shape, self.device = job, stage, shape, device
        layout, model, tp = job.layout, job.model, job.layout.tensor_parallel_size
        self.size = BYTES[job.dtype]
        self.embedding = embedding_parameters(model, tp) if shape.has_embedding or shape.has_head else 0
        in_blocks = cut(model.intermediate_size, tp) * model.hidden_size * (1 + model.gated_mlp)
        largest = max(self.embedding, in_blocks)  # parameter
        self.largest_of_blocks = in_blocks / largest
        self.states = deepspeed_states(job, shape.parameters, largest)
        self.blocks = stage_blocks(blocks, shape.first_block, shape.blocks, device.widens_bf16)
        self.in_flight = micro_batches_in_flight(layout.pipeline_parallel_size, stage, job.micro_batches)
        self.passing = self.blocks.first.passing
        self.whole = layout.micro_batch_size * job.sequence_length * model.hidden_size * self.size  # hidden states

    def memory(self) -> StageMemory:
        states, always = self.states, self._always()
        moments = {
            "loss": self._loss() if self.shape.has_head else {},
            "start of backward": self._backward_starts(),
            "end of backward": self._backward_ends(),
            "reduction of gradients": always
            | {"gradients": states.gradients, "communication buffers": self._bucket() + states.reducing},
            "optimizer step": always | {"gradients": states.own_gradients, "step copies": states.stepping},
            # gradients without a permanent buffer have been copied and freed
            "update": always | {"step copies": states.updating},
            "gathering of weights": self._gathers(),
        }
        if self.device.keeps_freed:
            name, parts = self._own_room(moments)
        else:
            name = max(moments, key=lambda name: sum(moments[name].values()))
            parts = moments[name]
        return StageMemory(self.stage, with_device(parts, self.device), name)

    def _always(self) -> Moment:
        states = self.states
        is_kept = states.gathered > 0  # ZeRO-3's bucket is always there
        return {
            "weights": states.weights,
            "optimizer": states.optimizer,
            "gradients": states.gradients if states.stay else 0.0,
            "communication buffers": self._bucket() if is_kept else 0.0,
        }

    def _bucket(self, numbers: float | None = None) -> float:
        """Returns the bucket's bytes after so many gradients (None: all). If malloc keeps what is freed, its pages
        have been written to before."""
        states, device = self.states, self.device
        if device.maps_lazily and not device.keeps_freed:
            return min(states.bucket, self.size * (self.shape.parameters if numbers is None else numbers))
        return states.bucket

    def _during(self, activations: float, **more: float) -> Moment:
        """Returns the bytes during forward or backward of a micro-batch."""
        moment = self._always() | {"gathered weights": self.states.gathered, "activations": activations}
        has_earlier = not self.states.stay and self.job.micro_batches > 1  # micro-batches, whose gradients are kept
        moment["gradients"] += self.states.gradients if has_earlier else 0.0
        for name, size in more.items():
            moment[name] = moment.get(name, 0.0) + size
        return moment

    def _most_activations(self) -> float:
        kept = self.in_flight * self.blocks.kept
        if self.shape.has_embedding:
            kept += self.in_flight * embedding_bytes(self.job)
        if self.job.layout.pipeline_parallel_size > 1:  # what comes and what goes, and what has come and gone before
            kept += (2 if self.stage == 0 else 5) * self.passing
        return kept

    def _loss(self) -> Moment:
        job, model = self.job, self.job.model
        tokens = job.micro_batch_tokens
        rows = cut(model.vocab_size, job.layout.tensor_parallel_size)
        chunk = max(CHUNK_TOKENS, CHUNK_BYTES[self.device.kind] // (4 * rows))
        is_wide = self.size == 4 or (self.device.widens_bf16 and job.dtype == "bf16")
        numbers = min(chunk, tokens) * rows
        if is_wide:
            logits = 4.0 * numbers * (2 if tokens > chunk else 1)
        else:
            logits = numbers * (12.0 if tokens > chunk else 8.0)
        if model.final_logit_softcapping is not None:
            logits += 4.0 * numbers
        weight = rows * model.hidden_size
        of_products = 4 if is_wide or job.dtype == "fp16" else self.size
        gradients = 4.0 * weight + (0 if is_wide else of_products * weight * (tokens > chunk))
        gradients += 4.0 * weight if is_wide and self.size < 4 else 0.0  # the head, widened
        gradients += of_products * tokens * model.hidden_size
        # the last block's output and its norm's, which products read whole
        head = self.passing + self.whole + (self.passing if self.passing < self.whole else 0.0)
        return self._during(self._most_activations() + head, logits=logits, working=gradients)

    def _backward_starts(self) -> Moment:
        working = self.blocks.last.backward + self.states.one_gradient * self.largest_of_blocks
        head = 0.0
        if self.shape.has_head and self.states.are_scattered:
            head = BYTES[self.job.gradient_accumulation_dtype] * self.embedding
        buckets = {} if self.states.gathered else {"communication buffers": self._bucket(self.embedding)}
        return self._during(self._most_activations() + self.passing, working=working, gradients=head, **buckets)

    def _backward_ends(self) -> Moment:
        """Returns the larger of two moments: all gradients exist and only the first block's activations of the last
        micro-batch remain; then those are freed too, and the embedding has its gradient."""
        states, first = self.states, self.blocks.first
        in_block = first.kept + first.backward + states.one_gradient * self.largest_of_blocks
        of_embedding = self.size * self.embedding + states.one_gradient if self.shape.has_embedding else 0.0
        working = max(in_block, of_embedding) - first.kept
        moment = self._during(first.kept + self.passing, working=working)
        if states.are_scattered:
            moment["gradients"] = states.gradients
        if not states.gathered:
            moment["communication buffers"] = self._bucket()
        return moment

    def _gathers(self) -> Moment:
        """Returns gloo's copies: it gathers into a tensor of its own. Its threads have heaps of at most 64 MiB for that
        (glibc's HEAP_MAX_SIZE), and tensors that fit are kept: measured, about three of them."""
        layout, moment = self.job.layout, self._always()
        if self.device.kind == "cpu" and layout.data_parallel_size > 1:
            most = BUCKET if layout.zero_stage == 3 else self.shape.parameters  # at once
            copy = self.size * min(self.shape.parameters, most)
            is_kept = self.device.keeps_freed and copy < 64 * MIB and layout.zero_stage < 3
            moment["gloo"] = 3 * copy if is_kept else copy
        return moment

    def _own_room(self, moments: Mapping[str, Moment]) -> tuple[str, Moment]:
        """Returns the sum of each flat buffer's own peak and the common peak of small tensors, which reuse each other's
        space. Measured: half of the space of the first weights, and of a bucket that is remade, is reused."""
        small = {"activations", "logits", "working"} | ({"gradients"} if self.states.are_scattered else set())
        most = max(moments, key=lambda name: sum(size for part, size in moments[name].items() if part in small))
        parts: Moment = {}
        for moment in moments.values():
            for part, size in moment.items():
                parts[part] = max(parts.get(part, 0.0), size)
        parts |= {part: moments[most].get(part, 0.0) for part in small}
        if not self.states.gathered and self.job.micro_batches > 1:
            parts["communication buffers"] += self.states.bucket / 2
        parts["gloo"] = parts.get("gloo", 0.0) + self._pieces()
        # what an update copies has room where gradients were reduced
        parts["step copies"] = moments["optimizer step"].get("step copies", 0.0)
        return most, parts | {"first weights": self.states.building / 2}

    def _pieces(self) -> float:
        """Returns the fragments of gathering a cut sequence, each a little too small for the next: gloo's copy and
        ours lie beside other tensors. Measured: 1.8 of each hidden state that is gathered, and no more than 65 of
        them."""
        job = self.job
        if self.blocks.first.passing == self.whole:
            return 0.0
        gathered = self.shape.blocks * (6 if job.layout.recompute == "full" else 4)
        return self.whole * min(1.8 * (gathered + self.shape.has_embedding + self.shape.has_head), 65)


def with_device(parts: Moment, device: Device) -> Moment:
    """Adds the allocator's fragments and the device's context."""
    fragments = device.fragments * sum(parts.values())
    return parts | {"allocator": fragments, "context": device.context_bytes}
