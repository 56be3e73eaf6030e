"""Small engines for tests of one room: a case is a layout and what may change with it.

That all layouts compute the same thing is tested by tests/verify; here cases are means to look at something else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from launch.parity import observations
from launch.parity.observations import ArrayBlock, Quantity
from launch.parity.problem import Batch
from megalite.config import Config, resolve_layout
from megalite.engine.build import build_engine
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import read_parameter
from megalite.planner.cost.stage_parameters import recompute_of_blocks
from models.decoder import layers_of
from tests.helpers import odd_sizes as odd

MODEL = odd.MODEL | {"initializer_range": 0.1}


@dataclass(frozen=True)
class Case:
    """One layout and everything that may change with it. Sizes are odd on purpose."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    sequence_parallel: bool = False
    recompute: str | tuple[str, ...] = "none"
    accumulation: int = 1
    micro_batch: int = 3
    sequence: int = 33
    steps: int = 3
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    optimizer_options: dict[str, Any] = field(default_factory=dict)  # more of the section
    document_mask: bool = False
    sources: int = 0  # of a mix; 0: one text
    dtype: str = "fp32"
    reduction: str | None = None  # format in which replicas sum gradients; None: fp32
    global_batch: int | None = None
    model: dict[str, Any] = field(default_factory=dict)
    seed: int = 7
    offload: dict[str, str] = field(default_factory=dict)  # the section
    cache: str = os.devnull  # where DeepSpeed's Adam for the CPU is looked for and compiled; here there is no room
    schedule: str = "1f1b"
    compile: str = "auto"
    bucket: int | None = None  # gradients per reduction; None: more than these models have
    clipping: float = 1.0
    compression: dict[str, Any] = field(default_factory=dict)  # the section
    router: dict[str, float] = field(default_factory=dict)  # the section training.router
    adapter: dict[str, Any] = field(default_factory=dict)  # the section
    fp16: dict[str, float] = field(default_factory=dict)  # the section deepspeed.fp16
    zero_options: dict[str, Any] | None = None  # of deepspeed.zero_optimization; None: as below
    cp: int = 1
    cp_kind: str = "auto"
    ep: int = 1

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def batch(self) -> int:
        return self.global_batch or self.micro_batch * self.accumulation * self.dp

    def _zero_options(self) -> dict[str, Any]:
        if self.zero_options is not None:
            return self.zero_options
        return {"stage3_param_persistence_threshold": 0} if self.zero == 3 else {}

    def _data(self) -> dict[str, Any]:
        if not self.sources:
            return {"path": "unused"}
        return {"sources": {f"source_{place:02}": {"path": "unused", "weight": 1} for place in range(self.sources)}}

    def config(self) -> Config:
        return Config.model_validate(
            {
                "run_dir": "unused",
                "model": MODEL | self.model,
                "data": self._data() | {"document_mask": self.document_mask},
                "parallel": {
                    "tensor_parallel_size": self.tp,
                    "pipeline_parallel_size": self.pp,
                    "data_parallel_size": self.dp,
                    "context_parallel_size": self.cp,
                    "context_parallel_kind": self.cp_kind,
                    "expert_parallel_size": self.ep,
                    "sequence_parallel": self.sequence_parallel,
                    "zero_stage": self.zero,
                    "pipeline_schedule": self.schedule,
                    **({"gradient_bucket_size": self.bucket} if self.bucket else {}),
                },
                "precision": {"dtype": self.dtype, "gradient_reduction_dtype": self.reduction},
                "compression": self.compression,
                "optimizer": {"name": self.optimizer, "learning_rate": self.learning_rate, **self.optimizer_options},
                "training": {
                    "global_batch_size": self.batch,
                    "micro_batch_size": self.micro_batch,
                    "sequence_length": self.sequence,
                    "steps": self.steps,
                    "seed": self.seed,
                    "gradient_clipping": self.clipping,
                    "router": self.router,
                    "initialize_from": "some/model" if self.adapter else None,
                },
                "adapter": self.adapter,
                "recompute": {"mode": self.recompute},
                "offload": self.offload,
                "performance": {"compile": self.compile},
                # by default ZeRO-3 leaves parameters this small whole
                "deepspeed": {"zero_optimization": self._zero_options(), **({"fp16": self.fp16} if self.fp16 else {})},
            }
        )

    def __str__(self) -> str:
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != getattr(Case, name, None) and value not in ({}, None)
        }
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "serial"


def global_batches(case: Case) -> list[Batch]:
    """Random batches with unequal numbers of valid tokens, so that a mean of means is wrong."""
    draw = np.random.default_rng(case.seed)
    vocab = case.config().model.vocab_size
    batches = []
    for step in range(case.steps):
        tokens = draw.integers(0, vocab, (case.batch, case.sequence))
        targets = draw.integers(0, vocab, (case.batch, case.sequence))
        for row, hidden in enumerate(draw.integers(0, case.sequence, case.batch)):
            targets[row, :hidden] = -100
        positions = None
        if case.document_mask:
            starts = draw.random((case.batch, case.sequence)) < 0.15
            starts[:, 0] = True
            index = np.arange(case.sequence)
            positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        batches.append(Batch(tokens, targets, positions, step * case.batch + np.arange(case.batch)))
    return batches


def engine_of(case: Case) -> Engine:
    """The case's engine on this rank."""
    config = case.config()
    layout = resolve_layout(config, case.world_size, "cpu")
    with patch.dict(os.environ, {"XDG_CACHE_HOME": case.cache}):
        return build_engine(layers_of(config, recompute_of_blocks(config, layout)), config, layout)


def micro_batches_of(engine: Engine, case: Case, batch: Batch) -> list[Batch]:
    """What this rank feeds its engine of a global batch."""
    count = case.batch // (case.micro_batch * case.dp)
    first = engine.coordinate.data_rank * count
    rows = [slice(i * case.micro_batch, (i + 1) * case.micro_batch) for i in range(first, first + count)]
    return [batch.rows(which) for which in rows] if engine.needs_data else []


WEIGHT = Quantity("", "weight")


def local_weights(engine: Engine) -> list[ArrayBlock]:
    """This rank's blocks of the global fp32 weights."""
    blocks = []
    for _, parameter in engine.parameters():
        value = read_parameter(parameter, ())["weight"]
        blocks += [
            ArrayBlock(WEIGHT, piece.name, piece.shape, piece.source, value[piece.target].numpy().copy())
            for piece in parameter.shard.pieces()
        ]
    return blocks


def assemble(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Global weights from all ranks' blocks; every number must be covered, and copies must agree to the bit."""
    seen, disagreements = observations.assemble([result["weights"] for result in results])
    assert not disagreements, disagreements
    missing = [name for name, value in seen[WEIGHT].items() if np.isnan(value).any()]
    assert not missing, f"not covered by the ranks: {missing}"
    return seen[WEIGHT]


def trained_steps(engine: Engine, case: Case, first: int, last: int) -> list[tuple[float, float]]:
    """The loss and the gradient norm of each of these steps."""
    numbers = []
    for batch in global_batches(case)[first:last]:
        result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
        numbers.append((float(result.loss), float(result.grad_norm)))
    return numbers


def plain_optimizer(engine: Engine, weights: Mapping[nn.Parameter, Tensor]) -> torch.optim.Optimizer:
    """torch's own optimizer of an engine's config over copies of its parameters; vectors do not decay."""
    options = engine.config.optimizer
    groups = [
        {"params": [w for p, w in weights.items() if (p.ndim > 1) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, options.weight_decay), (False, 0.0))
    ]
    if options.name == "sgd":
        return torch.optim.SGD(groups, lr=options.learning_rate)
    return torch.optim.AdamW(groups, lr=options.learning_rate, betas=options.betas, eps=options.eps)
