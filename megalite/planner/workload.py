"""The workload that the planner predicts: a model, a batch, a layout and a software stack. No torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

from megalite.config import Config, ModelConfig, ResolvedLayout
from megalite.config.sections import Dtype

BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2, "fp16": 2}

Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class ParallelLayout:
    """Layout of model and batch, as the planner needs it; that of a run is `ResolvedLayout`."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    interleave: int = 1  # model chunks per stage (Narayanan 2021, section 2.2.2); megalite trains with 1
    zero_stage: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    micro_batch_size: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size

    def __str__(self) -> str:
        """`tp 8 pp 4 dp 2 zero 1 sp full mbs 2`, defaults left out."""
        words = [f"tp {self.tensor_parallel_size} pp {self.pipeline_parallel_size} dp {self.data_parallel_size}"]
        words += [f"interleave {self.interleave}"] * (self.interleave > 1)
        words += [f"ZeRO-{self.zero_stage}"] * (self.zero_stage != 1)
        words += ["sequence-parallel"] * self.sequence_parallel
        words += [f"{self.recompute} recompute"] * (self.recompute != "none")
        return " ".join([*words, f"micro-batch {self.micro_batch_size}"])


Attention = Literal["materialized", "flash_1", "flash_2"]
Replicas = Literal["deepspeed", "all_reduce", "sharded_optimizer", "fully_sharded"]


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
    # as DeepSpeed's ZeRO does; an all-reduce of gradients; a reduce-scatter to the owners of optimizer shards and a
    # gather of weights; or with weights sharded too, as in PyTorch's FSDP
    replicas: Replicas = "deepspeed"
    # gradients are reduced behind the last micro-batch's backward pass, weights gathered behind the first's forward
    overlaps_replicas: bool = False
    prefetches_backward: bool = True  # sharded weights of the next layer are gathered while backward computes this one
    waits_for_launches: bool = False  # each kernel is waited for before the next launch (CUDA_LAUNCH_BLOCKING=1)


MEGALITE = Stack("megalite")


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
    optimizer: Literal["adamw", "sgd"] = "adamw"
    document_mask: bool = False
    background_saves: bool = False  # each rank keeps a copy of its weights and moments in the memory of the host
    stack: Stack = field(default=MEGALITE)

    @property
    def reduction_dtype(self) -> Dtype:
        """Format in which gradients are summed over replicas."""
        return self.gradient_reduction_dtype or self.gradient_accumulation_dtype

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

    @property
    def micro_batch_tokens(self) -> int:
        return self.layout.micro_batch_size * self.sequence_length

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch_size * self.sequence_length

    @classmethod
    def of(cls, config: Config, layout: ResolvedLayout) -> Self:
        """Returns the workload of `megalite train`."""
        return cls(
            model=config.model,
            layout=ParallelLayout(
                tensor_parallel_size=layout.tensor_parallel_size,
                pipeline_parallel_size=layout.pipeline_parallel_size,
                data_parallel_size=layout.data_parallel_size,
                zero_stage=layout.zero_stage,
                sequence_parallel=config.parallel.sequence_parallel,
                recompute=config.recompute.mode,
                micro_batch_size=config.training.micro_batch_size,
            ),
            sequence_length=config.training.sequence_length,
            global_batch_size=config.training.global_batch_size,
            dtype=config.precision.dtype,
            gradient_accumulation_dtype=config.precision.gradient_accumulation_dtype,
            gradient_reduction_dtype=config.precision.gradient_reduction_dtype,
            optimizer=config.optimizer.name,
            document_mask=config.data.document_mask,
            background_saves=config.checkpoint.background,
        )
