"""Peak memory of each rank of a layout, part by part. Pure arithmetic, no torch.

The peak is the maximum over the moments at which a step may need most: while the loss is computed, when backward
begins, when it ends, when replicas sum gradients, and in the optimizer's step. A moment maps each purpose to bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from operator import mul
from typing import Literal

from megalite.config.sections import Dtype
from megalite.planner.cost.activations import BlockWorkload, chunk_bytes, embedding_bytes
from megalite.planner.cost.model_states import (
    BUCKET,
    MOMENTS,
    deepspeed_states,
    owned_numbers,
    trained_numbers,
    with_frozen_weights,
)
from megalite.planner.cost.muon import orthogonalized_numbers
from megalite.planner.cost.offloading import activations_on_device, optimizer_on_host
from megalite.planner.cost.stage_parameters import (
    StageShape,
    cut,
    embedding_parameters,
    stages_of_job,
    widest_parameter,
)
from megalite.planner.workload import BYTES, TrainingWorkload
from megalite.schedules.in_flight import InFlight, most_in_flight
from megalite.schedules.tables import Schedule, placement

MIB = 2**20
CHUNK_BYTES = {"cpu": 16 << 20, "cuda": 1 << 30}  # of logits at once, megalite/parallel/loss.py
CHUNK_TOKENS = 128  # at least; on a GPU a multiple of it
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
    communicator_bytes: float = 0.0  # of each process group beyond three
    widens_bf16: bool = False  # bf16 products are computed in fp32, as on a CPU without bf16 units

    def widens(self, dtype: Dtype) -> bool:
        """Returns whether products in `dtype` are computed in fp32; hardly a CPU has units for fp16."""
        return self.kind == "cpu" and (dtype == "fp16" or (dtype == "bf16" and self.widens_bf16))


CUDA = Device("cuda", fragments=0.07, context_bytes=1.5 * 2**30, communicator_bytes=150 * MIB)
"""Memory that has to fit: tensors, 7 % that the caching allocator reserves for tensors of other sizes, 1.5 GiB of
CUDA's context and NCCL's buffers for three process groups, and 150 MiB for each other. These are usual values and not
fitted: no published table splits them off. Groups of A100s that reduce were seen with 688 MiB (NVIDIA/nccl#964)."""

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
    on_host: float = 0.0  # bytes beside them of a GPU's rank: offloaded, or at its start if that is more
    total: float = field(init=False)  # the predicted peak

    def __post_init__(self) -> None:
        object.__setattr__(self, "total", sum(self.parts.values()))


def memory_of(job: TrainingWorkload, device: Device = CUDA) -> tuple[StageMemory, ...]:
    """Returns the peak memory of each pipeline stage, in order."""
    return job.by_stage(lambda alike, stages: memory_of_stages(alike, stages, device))


def memory_of_stages(job: TrainingWorkload, stages: Sequence[int], device: Device = CUDA) -> list[StageMemory]:
    """Returns the peak memory of some pipeline stages of a job whose stages all recompute the same."""
    shapes, blocks = stages_of_job(job), BlockWorkload.of(job)
    kinds = {shapes[stage].like: shapes[stage] for stage in stages}
    found = {like: _StageKind(job, blocks, shape, device) for like, shape in kinds.items()}
    return [found[shapes[stage].like].memory(stage) for stage in stages]


def with_process(one: StageMemory, job: TrainingWorkload, process_bytes: float) -> StageMemory:
    """Adds the memory of the process, which counts on a CPU, and the buffer that megalite/checkpoint/saver.py keeps for
    background saves: this rank's share of fp32 weights and moments."""
    shape = stages_of_job(job)[one.stage]
    numbers = (1 + MOMENTS[job.optimizer]) * owned_numbers(job, shape)
    if job.trains_adapters:
        numbers += shape.parameters / job.layout.replicas
    if job.optimizer == "muon":
        orthogonalized = orthogonalized_numbers(job.model, shape, job.layout.tensor_parallel_size)
        numbers -= orthogonalized / job.layout.replicas
    copy = {COPY: 4.0 * numbers} if job.background_saves else {}
    return replace(one, parts={PROCESS: float(process_bytes), **one.parts, **copy})


def kept_messages(job: TrainingWorkload, stage: int, device: Device) -> int:
    """Returns the number of messages beside inputs and outputs of chunks (pipeline_runtime.py): what arrives for
    the next pass, with several chunks for another too, and what has been sent. NCCL tells when a message is gone; of
    gloo's as many are kept as the model has chunks, and one more."""
    layout, count = job.layout, job.micro_batches
    p, v = layout.pipeline_parallel_size, layout.pipeline_chunks
    if p == 1:
        return 0
    activations, gradients = _sent(layout.schedule, p, v)[stage]
    arriving = min(2, v)
    if device.kind == "cuda":
        return arriving + (gradients > 0)
    sent = min(p * v + 1, (activations + gradients) * count)
    if job.document_mask or job.model.has_dropout:  # sent in a copy, with positions or sample numbers
        return arriving + sent
    # outputs that are sent are there anyway
    alive = max(sum(moment.whole) for moment in most_in_flight(layout.schedule, p, stage, count, v)) * activations // v
    return arriving + sent - min(alive, sent * activations // (activations + gradients))


@lru_cache(maxsize=1024)
def _sent(schedule: Schedule, stages: int, chunks: int) -> tuple[tuple[int, int], ...]:
    """Returns the numbers of activations and of gradients that each stage sends for a micro-batch."""
    boundaries = [pair for pair in pairwise(placement(schedule, stages, chunks)) if pair[0] != pair[1]]
    activations, gradients = Counter(before for before, _ in boundaries), Counter(after for _, after in boundaries)
    return tuple((activations[stage], gradients[stage]) for stage in range(stages))


Moment = dict[str, float]


class _StageKind:
    """Pipeline stages of megalite that hold the same, of which each may have another number of micro-batches in
    flight."""

    def __init__(self, job: TrainingWorkload, blocks: BlockWorkload, shape: StageShape, device: Device) -> None:
        self.job, self.shape, self.device = job, shape, device
        model, tp, ep = job.model, job.layout.tensor_parallel_size, job.layout.expert_parallel_size
        self.size = BYTES[job.dtype]
        has_rows = shape.has_embedding or (shape.has_head and not shape.tied_copy)
        self.trained, self.owned = trained_numbers(job, shape), owned_numbers(job, shape)
        # trained rows of embedding and head, which adapters leave as they are
        self.embedding = embedding_parameters(model, tp) if has_rows and not job.trains_adapters else 0
        in_blocks = min(self.trained, max(widest_parameter(model, layer, tp, ep) for layer in shape.kinds))
        self.largest = largest = max(self.embedding, in_blocks)  # trained parameter
        self.largest_of_blocks = in_blocks / largest
        orthogonalized = orthogonalized_numbers(model, shape, tp) if job.optimizer == "muon" else 0
        self.states = deepspeed_states(job, self.trained, self.owned, largest, orthogonalized)
        if job.trains_adapters:
            self.states = with_frozen_weights(self.states, self.size, shape.parameters)
        if job.offloads_optimizer:
            on_host = optimizer_on_host(job, self.owned) if device.kind == "cpu" else 0.0
            self.states = replace(self.states, optimizer=on_host)
        self.chunks = [chunk_bytes(blocks, each.first, each.count, device.widens(job.dtype)) for each in shape.chunks]
        self.kept_by_chunk = [chunk.kept for chunk in self.chunks]
        self.postponed_by_chunk = [chunk.postponed for chunk in self.chunks]
        self.first, self.last = self.chunks[0].first, self.chunks[-1].last
        self.passing = self.first.passing
        self.whole = job.micro_batch_tokens * model.hidden_size * self.size  # hidden states
        self.always, self.found = self._always(), dict[tuple[object, int], tuple[Moment, str, float]]()
        always = self.always
        self.waiting = {"loss": self._loss()} if shape.has_head else {}  # moments that activations of others wait in
        self.waiting["start of backward"] = self._backward_starts()
        self.others = {
            "end of backward": self._backward_ends(),
            "gradient of the head": self._tied_gradient(),
            "reduction of gradients": always
            | {"gradients": self.states.gradients, "communication buffers": self._bucket() + self.states.reducing},
            "optimizer step": always | {"gradients": self.states.own_gradients, "step copies": self.states.stepping},
            # gradients without a permanent buffer have been copied and freed
            "update": always | {"step copies": self.states.updating},
            "gathering of weights": self._gathers(),
        }
        if not device.keeps_freed:  # one of them counts, and it is the same one on every stage
            name = max(self.others, key=lambda name: sum(self.others[name].values()))
            self.others = {name: self.others[name]}

    def memory(self, stage: int) -> StageMemory:
        layout = self.job.layout
        p, v = layout.pipeline_parallel_size, layout.pipeline_chunks
        in_flight = most_in_flight(layout.schedule, p, stage, self.job.micro_batches, v)
        messages = kept_messages(self.job, stage, self.device)
        if (in_flight, messages) not in self.found:
            self.found[in_flight, messages] = self._figures(in_flight, messages)
        return StageMemory(stage, *self.found[in_flight, messages])

    def _figures(self, in_flight: Sequence[InFlight], messages: int) -> tuple[Moment, str, float]:
        """Returns the parts, the moment and the bytes on the host of stages that hold as much."""
        most = max(map(self._held, in_flight)) + messages * self.passing
        moments = {name: one | {"activations": most + one["activations"]} for name, one in self.waiting.items()}
        moments |= self.others
        if self.device.keeps_freed:
            name, parts = self._own_room(moments)
        else:
            name, parts = max(moments.items(), key=lambda moment: sum(moment[1].values()))
        parts = with_device(parts, self.device)
        parts["context"] += self.device.communicator_bytes * max(0, communicators(self.job) - 3)
        return parts, name, self._on_host(in_flight)

    def _on_host(self, in_flight: Sequence[InFlight]) -> float:
        if self.device.kind == "cpu":
            return 0.0
        optimizer = optimizer_on_host(self.job, self.owned) if self.job.offloads_optimizer else 0.0
        offloaded = optimizer + (max(map(self._kept, in_flight)) if self.job.offloads_activations else 0.0)
        # parameters are drawn in fp32 one by one; `defragment` of runtime/zero/utils.py moves ZeRO-3's partitions there
        return max(offloaded, 4.0 * self.largest, self.states.building * (self.job.layout.zero_stage == 3))

    def _always(self) -> Moment:
        states = self.states
        tied_sum = 0.0 if self.job.trains_adapters else 4.0 * self.shape.tied_copy  # in fp32, of a head's gradients
        return {
            "weights": states.weights + self.size * self.shape.tied_copy,
            "optimizer": states.optimizer,
            "gradients": (states.gradients if states.stay else 0.0) + tied_sum,
            "communication buffers": 0.0,
        }

    def _bucket(self, numbers: float | None = None) -> float:
        """Returns the bucket's bytes after so many gradients (None: all). It is allocated whole, but a CPU's pages
        count once they are written to: by gradients or, where malloc keeps what is freed, before by the first weights,
        half of whose space is reused."""
        if not self.device.maps_lazily:
            return self.states.bucket
        written = self.size * (self.trained if numbers is None else numbers)
        if self.device.keeps_freed:
            written = self.size * self.trained + self.states.building / 2
        return min(self.states.bucket, written)

    def _during(self, activations: float, **more: float) -> Moment:
        """Returns the bytes during forward or backward of a micro-batch."""
        moment = self.always | {"gathered weights": self.states.gathered, "activations": activations}
        has_earlier = not self.states.stay and self.job.micro_batches > 1  # micro-batches, whose gradients are kept
        moment["gradients"] += self.states.gradients if has_earlier else 0.0
        for name, size in more.items():
            moment[name] = moment.get(name, 0.0) + size
        return moment

    def _held(self, moment: InFlight) -> float:
        """Returns the activations of all micro-batches at one moment. A chunk's output stays until its gradient has
        come; the model's last chunk puts out a loss."""
        kept = self._kept(moment)
        if self.job.offloads_activations:
            on_device = self._kept_on_device(moment)
            kept = on_device if self.device.kind == "cuda" else kept + on_device
        kept += sum(map(mul, moment.postponed, self.postponed_by_chunk))
        kept += self.passing * sum(moment.whole[:-1] if self.shape.has_head else moment.whole)
        return kept + (moment.whole[0] * embedding_bytes(self.job) if self.shape.has_embedding else 0.0)

    def _kept(self, moment: InFlight) -> float:
        """Returns the bytes that blocks keep for backward, wherever they are."""
        return sum(map(mul, moment.whole, self.kept_by_chunk))

    def _kept_on_device(self, moment: InFlight) -> float:
        """Returns those that offloading leaves on the device; there is what a pipeline has received, too, until it has
        its gradient."""
        received = self.passing * sum(moment.whole[1:] if self.shape.has_embedding else moment.whole)
        largest = max(block.kept for chunk in self.chunks for block in (chunk.first, chunk.last))
        return activations_on_device(self.job, self._kept(moment), largest, received)

    def _loss(self) -> Moment:
        job, model = self.job, self.job.model
        tokens = job.micro_batch_tokens
        rows = cut(model.vocab_size, job.layout.tensor_parallel_size)
        is_compiled = self.device.kind == "cuda"  # the gradient takes the place of the logits
        chunk = CHUNK_BYTES[self.device.kind] // ((self.size if is_compiled else 4) * rows)
        chunk = max(CHUNK_TOKENS, chunk - chunk % CHUNK_TOKENS if is_compiled else chunk)
        is_wide = self.size == 4 or self.device.widens(job.dtype)
        numbers = min(chunk, tokens) * rows
        logits = float(self.size * numbers) if is_compiled else numbers * (4.0 if is_wide else 8.0)
        if model.final_logit_softcapping is not None and not is_compiled:
            logits += 4.0 * numbers
        weight = rows * model.hidden_size
        of_products = 4 if is_wide or job.dtype == "fp16" else self.size
        is_added = is_wide or is_compiled  # in the GEMM; else its product is a matrix of its own
        # the sum is the reducer's, or one of the loss alone until backward
        is_summed = job.dtype != "fp16" and job.gradient_accumulation_dtype == "fp32" and not job.trains_adapters
        gradients = 0.0
        if not job.trains_adapters:
            has_products = not is_added and (is_summed or tokens > chunk)
            gradients = 4.0 * weight * (not is_summed) + of_products * weight * has_products
        gradients += 4.0 * weight if is_wide and self.size < 4 else 0.0  # the head, widened
        gradients += of_products * tokens * model.hidden_size
        # the last block's output and its norm's, which products read whole
        head = self.passing + self.whole + (self.passing if self.passing < self.whole else 0.0)
        return self._during(head, logits=logits, working=gradients, **(self._first_gradient() if is_summed else {}))

    def _backward_starts(self) -> Moment:
        working = self.last.backward + self.states.one_gradient * self.largest_of_blocks
        return self._during(self.passing, working=working, **self._first_gradient())

    def _first_gradient(self) -> Moment:
        """Returns the bytes of flat sums and bucket once they hold the first gradient of a step, the head's."""
        first = 0.0
        if self.shape.has_head and self.states.opened:
            first = BYTES[self.job.gradient_accumulation_dtype] * self.embedding
        if self.states.opened and not self.device.maps_lazily:
            first = self.states.opened
        if self.states.opened and self.job.micro_batches > 1:  # it has been opened before
            first = 0.0
        return {"gradients": first, "communication buffers": self._bucket(self.embedding)}

    def _backward_ends(self) -> Moment:
        """Returns the larger of two moments: all gradients exist and only the first block's activations of the last
        micro-batch remain; then those are freed too, and the embedding has its gradient."""
        states, first = self.states, self.first
        in_block = first.kept + first.backward + states.one_gradient * self.largest_of_blocks
        of_embedding = self.size * self.embedding + states.one_gradient if self.shape.has_embedding else 0.0
        working = max(in_block, of_embedding) - first.kept
        moment = self._during(first.kept + self.passing, working=working)
        if states.opened:
            moment["gradients"] = states.gradients
        moment["communication buffers"] = self._bucket()
        return moment

    def _tied_gradient(self) -> Moment:
        """Returns the moment at which the embedding's stage adds what the last stage has summed in fp32."""
        model, tied = self.job.model, self.shape.has_embedding and not self.shape.has_head
        if not (tied and model.tie_word_embeddings) or self.job.trains_adapters:
            return {}
        return self._during(0.0, working=4 * self.embedding)

    def _gathers(self) -> Moment:
        """Returns gloo's copies: it gathers into a tensor of its own. Its threads have heaps of at most 64 MiB for that
        (glibc's HEAP_MAX_SIZE), and tensors that fit are kept: measured, about three of them."""
        layout, moment = self.job.layout, dict(self.always)
        if self.device.kind == "cpu" and layout.replicas > 1:
            most = BUCKET if layout.zero_stage == 3 else self.trained  # at once
            copy = self.size * min(self.trained, most)
            is_kept = self.device.keeps_freed and copy < 64 * MIB and layout.zero_stage < 3
            moment["gloo"] = 3 * copy if is_kept else copy
        return moment

    def _own_room(self, moments: Mapping[str, Moment]) -> tuple[str, Moment]:
        """Returns the sum of each flat buffer's own peak and the common peak of small tensors, which reuse each other's
        space. Measured: half of the space of the first weights, and of a bucket that is remade, is reused."""
        small = {"activations", "logits", "working"}
        most = max(moments, key=lambda name: sum(size for part, size in moments[name].items() if part in small))
        parts: Moment = {}
        for moment in moments.values():
            for part, size in moment.items():
                parts[part] = max(parts.get(part, 0.0), size)
        parts |= {part: moments[most].get(part, 0.0) for part in small}
        if self.job.micro_batches > 1:
            parts["communication buffers"] += self._bucket() / 2
        parts["gloo"] = parts.get("gloo", 0.0) + self._pieces()
        # what an update copies has room where gradients were reduced
        parts["step copies"] = self.states.stepping
        if self.states.opened:
            copied = self.states.updating - self.states.own_gradients
            parts["step copies"] = max(0.0, copied - self.states.reducing)
        return most, parts | {"first weights": self.states.building / 2}

    def _pieces(self) -> float:
        """Returns the fragments of gathering a cut sequence, each a little too small for the next: gloo's copy and
        ours lie beside other tensors. Measured: 1.8 of each hidden state that is gathered, and no more than 65 of
        them."""
        job = self.job
        if self.passing == self.whole:
            return 0.0
        gathered = self.shape.blocks * (6 if job.layout.recompute == "full" else 4)
        return self.whole * min(1.8 * (gathered + self.shape.has_embedding + self.shape.has_head), 65)


def with_device(parts: Moment, device: Device) -> Moment:
    """Adds the allocator's fragments and the device's context."""
    fragments = device.fragments * sum(parts.values())
    return parts | {"allocator": fragments, "context": device.context_bytes}


def communicators(job: TrainingWorkload) -> int:
    """Returns the process groups of more than one rank that a rank is in at most (Grid, PipelineGroups, TiedWeight)."""
    layout = job.layout
    stages, is_cut, ep = layout.pipeline_parallel_size, layout.tensor_parallel_size > 1, layout.expert_parallel_size
    shares = (layout.context_parallel_size > 1) + (ep > 1) + (1 < ep < layout.replicas)
    is_odd_ring = layout.pipeline_schedule == "interleaved" and stages % 2
    of_pipelines = 1 + is_cut + min(4, 2 * stages - 2) + 2 * is_odd_ring + job.model.tie_word_embeddings
    return 1 + is_cut + shares + (layout.replicas > 1) + (of_pipelines if stages > 1 else 0)
