"""The workload that the planner predicts: a model, a batch, a layout and a software stack. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal, Self, TypeVar

from megalite.config import Config, ModelConfig, ResolvedLayout
from megalite.config.batch_stages import BatchShape, largest_shape
from megalite.config.compression import CompressionConfig
from megalite.config.sections import AdapterConfig, ContextParallelKind, Dtype, PipelineSchedule, RecomputeMode
from megalite.schedules.tables import Schedule
from megalite.units import of_stages

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Recompute = RecomputeMode
OfStage = TypeVar("OfStage")


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of model and batch, as the planner needs it; that of a run is `ResolvedLayout`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    pipeline_chunks: int = 1  # pieces of the model per stage (Narayanan 2021, section 2.2.2)
    zero_stage: int = 1
    sequence_parallel: bool = False
    recompute: Recompute | tuple[Recompute, ...] = "none"  # of all stages, or of each
    micro_batch_size: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    context_parallel_size: int = 1
    context_parallel_kind: ContextParallelKind = "all_gather"
    expert_parallel_size: int = 1  # replicas that the experts of a layer are dealt over

    @cached_property
    def schedule(self) -> Schedule:
        return Schedule(self.pipeline_schedule)

    @property
    def recompute_by_stage(self) -> tuple[Recompute, ...]:
        modes = self.recompute
        return (modes,) * self.pipeline_parallel_size if isinstance(modes, str) else modes

    @property
    def replicas(self) -> int:
        """Copies of the weights, over which gradients are summed and ZeRO cuts."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def expert_replicas(self) -> int:
        """Copies of an expert."""
        return self.replicas // self.expert_parallel_size

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.replicas

    def __str__(self) -> str:
        """`tp 8 pp 4 dp 2 zb-v ZeRO-2 sequence-parallel full recompute micro-batch 2`, defaults left out."""
        words = [f"tp {self.tensor_parallel_size} pp {self.pipeline_parallel_size} dp {self.data_parallel_size}"]
        words += [f"cp {self.context_parallel_size} {self.context_parallel_kind}"] * (self.context_parallel_size > 1)
        words += [f"ep {self.expert_parallel_size}"] * (self.expert_parallel_size > 1)
        if self.pipeline_schedule != "1f1b":
            is_choice = self.pipeline_schedule == "interleaved"
            words.append(self.pipeline_schedule + f" {self.pipeline_chunks}" * is_choice)
        words += [f"ZeRO-{self.zero_stage}"] * (self.zero_stage != 1)
        words += ["sequence-parallel"] * self.sequence_parallel
        if self.recompute != "none":
            is_one = isinstance(self.recompute, str)
            words.append(f"{self.recompute} recompute" if is_one else f"recompute ({of_stages(self.recompute)})")
        return " ".join([*words, f"micro-batch {self.micro_batch_size}"])


def recompute_in_short(recompute: Recompute | Sequence[Recompute]) -> str:
    """Returns the one mode, or that of each stage, as `full/full/none`."""
    return recompute if isinstance(recompute, str) else "/".join(recompute)


Attention = Literal["materialized", "flash_1", "flash_2", "cudnn"]
Replicas = Literal["deepspeed", "deepspeed_2022", "all_reduce", "sharded_optimizer", "fully_sharded"]


@dataclass(frozen=True)
class Stack:
    """Properties of a training stack that affect time and memory beside the layout. Published tables were made with
    other stacks (benchmarks/planner/published.py); each property is a fact of the software, none is fitted."""

    name: str
    attention: Attention = "flash_2"  # FlashAttention skips scores above the diagonal (Dao 2022; Dao 2023)
    overlaps_tensor_gradients: bool = False  # sums in backward run behind the products for gradients of weights
    cuts_boundary_tensors: bool = False  # tensors between stages are sent in parts and gathered (Narayanan 2021, 4.1)
    balances_stages: bool = True  # layers are cut where the slowest stage is fastest; else stages have as many blocks
    stops_recompute_early: bool = True  # at the last number that backward needs (torch's non-reentrant checkpoints)
    # as megalite on DeepSpeed 0.19; as DeepSpeed's ZeRO-1 of 2022, an all-reduce of gradients and a gather of weights;
    # an all-reduce alone; a reduce-scatter to the owners of optimizer shards and a gather of weights; or with weights
    # sharded too, as in PyTorch's FSDP
    replicas: Replicas = "deepspeed"
    waits_for_messages: bool = False  # between stages; else they travel while stages compute
    # gradients are reduced behind the last micro-batch's backward pass, weights gathered behind the first's forward
    overlaps_replicas: bool = False
    prefetches_backward: bool = True  # sharded weights of the next layer are gathered while backward computes this one
    waits_for_launches: bool = False  # each kernel is waited for before the next launch (CUDA_LAUNCH_BLOCKING=1)
    # experts are dealt over tensor-parallel ranks too, which send the tokens of their part of the sequence (Liu 2025)
    folds_experts: bool = False
    sends_once_per_node: bool = False  # a token that has several experts there (DeepEP)
    # as megalite/parallel/linear.py: a column-parallel layer sums its input's gradient over the ranks beside the
    # product for its weight's; of a cut sequence it keeps a slice and gathers the whole again beside the other product;
    # selective recomputation is of what norms and activations put out, and of scores where they exist
    has_own_linear_layers: bool = False


MEGALITE = Stack("megalite", has_own_linear_layers=True)


@dataclass(frozen=True)
class TrainingWorkload:
    """One way to train one model."""

    model: ModelConfig
    layout: ParallelLayout
    sequence_length: int
    global_batch_size: int  # sequences per optimizer step
    dtype: Dtype = "bf16"
    gradient_accumulation_dtype: Dtype = "fp32"
    gradient_reduction_dtype: Dtype | None = None  # between replicas; None: `gradient_accumulation_dtype`
    compression: CompressionConfig = field(default_factory=CompressionConfig)  # of what replicas send
    gradient_bucket_size: int = 50_000_000  # numbers that replicas reduce in one collective
    optimizer: Literal["adamw", "muon", "sgd"] = "adamw"
    moments_dtype: Dtype = "fp32"
    in_float8: bool = False  # products with the weights of blocks
    document_mask: bool = False
    offloads_optimizer: bool = False  # to the memory of the host
    offloads_activations: bool = False
    adapter: AdapterConfig = field(default_factory=AdapterConfig)
    background_saves: bool = False  # each rank keeps a copy of its weights and moments in the memory of the host
    stack: Stack = field(default=MEGALITE)
    first_micro_batch_size: int | None = None  # of the start of a run, of which a later stage is planned

    @property
    def reduction_dtype(self) -> Dtype:
        """Format in which gradients are summed over replicas."""
        return self.gradient_reduction_dtype or self.gradient_accumulation_dtype

    @property
    def bytes_per_gradient(self) -> float:
        """Bytes of one gradient between replicas."""
        return self.compression.bytes_per_gradient(BYTES[self.reduction_dtype])

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of one updated weight between replicas of ZeRO-1 and ZeRO-2."""
        return self.compression.bytes_per_weight(BYTES[self.dtype])

    @property
    def trains_adapters(self) -> bool:
        """True if the model's weights stay as they are, without gradients and optimizer state."""
        return self.adapter.name != "none"

    @property
    def reduces_beside_backward(self) -> bool:
        """True if gradients are reduced bucket by bucket while backward runs (engine/reduction)."""
        return self.stack.replicas == "deepspeed" and self.layout.zero_stage < 3

    @property
    def reductions(self) -> int:
        """Number of such reductions in a step: for ZeRO-2 one for each micro-batch."""
        return self.micro_batches if self.layout.zero_stage == 2 and self.reduces_beside_backward else 1

    @property
    def micro_batches(self) -> int:
        """Micro-batches per optimizer step on each replica."""
        return self.global_batch_size // (self.layout.micro_batch_size * self.layout.data_parallel_size)

    @property
    def recomputes_the_end(self) -> bool:
        """True if recomputing a block repeats its last product and sum: because a norm or dropout after them needs
        it, or because recomputation does not stop early."""
        model = self.model
        return not self.stack.stops_recompute_early or model.norm_placement != "pre" or model.residual_dropout > 0

    def with_recompute(self, recompute: Recompute | tuple[Recompute, ...]) -> Self:
        if recompute == self.layout.recompute:
            return self
        layout = replace(self.layout, recompute=recompute)
        return type(self)(**(vars(self) | {"layout": layout}))  # in two thirds of the time of `replace`

    def by_stage(self, figures: Callable[[Self, Sequence[int]], Sequence[OfStage]]) -> tuple[OfStage, ...]:
        """Returns `figures` of each stage of a job, which may recompute otherwise than the others; `figures` is asked
        about some stages of a job that all recompute the same."""
        modes = self.layout.recompute_by_stage
        found: dict[int, OfStage] = {}
        for mode in dict.fromkeys(modes):
            stages = [stage for stage, other in enumerate(modes) if other == mode]
            found |= zip(stages, figures(self.with_recompute(mode), stages), strict=True)
        return tuple(found[stage] for stage in range(len(modes)))

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch that a rank computes."""
        return self.layout.micro_batch_size * self.sequence_length // self.layout.context_parallel_size

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @classmethod
    def of(cls, config: Config, layout: ResolvedLayout, shape: BatchShape | None = None) -> Self:
        """Returns the workload of `megalite train`; by default that of the largest batch of the run."""
        shape = shape or largest_shape(config.training)
        return cls(
            model=config.model,
            layout=ParallelLayout(
                tensor_parallel_size=layout.tensor_parallel_size,
                pipeline_parallel_size=layout.pipeline_parallel_size,
                pipeline_schedule=layout.pipeline_schedule if layout.pipeline_parallel_size > 1 else "1f1b",
                pipeline_chunks=layout.pipeline_chunks if layout.pipeline_parallel_size > 1 else 1,
                data_parallel_size=layout.data_parallel_size,
                context_parallel_size=layout.context_parallel_size,
                context_parallel_kind=layout.context_parallel_kind,
                expert_parallel_size=layout.expert_parallel_size,
                zero_stage=layout.zero_stage,
                sequence_parallel=config.parallel.sequence_parallel,
                recompute=config.recompute.mode,
                micro_batch_size=shape.micro_batch_size,
            ),
            sequence_length=shape.sequence_length,
            global_batch_size=shape.global_batch_size,
            dtype=config.precision.dtype,
            gradient_accumulation_dtype=config.precision.gradient_accumulation_dtype,
            gradient_reduction_dtype=config.precision.gradient_reduction_dtype,
            compression=config.compression,
            gradient_bucket_size=config.parallel.gradient_bucket_size,
            optimizer=config.optimizer.name,
            moments_dtype=config.optimizer.moments_dtype,
            in_float8=config.precision.float8 != "none",
            document_mask=config.data.document_mask,
            offloads_optimizer=config.offload.optimizer == "cpu",
            offloads_activations=config.offload.activations == "cpu",
            adapter=config.adapter,
            background_saves=config.checkpoint.background,
            first_micro_batch_size=config.training.micro_batch_size if config.training.stages else None,
        )
