"""One layout trained by our engine, and the same steps by transformers' model on one process."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from megalite.config import Config
from megalite.engine.engine import Engine, build_engine
from megalite.engine.state import read_parameter
from megalite.parallel.layers import make_layer
from models.decoder import decoder_layers

MODEL = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 101,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
}


Block = tuple[str, tuple[int, ...], tuple[slice, ...], np.ndarray]  # name, global shape, where, numbers


@dataclass(frozen=True)
class Case:
    """One layout and everything that may change with it. Sizes are odd on purpose."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"
    accumulation: int = 1
    micro_batch: int = 3
    sequence: int = 33
    steps: int = 3
    optimizer: str = "adamw"
    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    # not 1e-8: a gradient that is nothing but rounding would move its weight by the learning rate in a random direction
    eps: float = 1e-6
    clip: float = 1.0
    document_mask: bool = False
    rows_without_loss: int = 0  # the first so many sequences of each global batch
    dtype: str = "fp32"
    global_batch: int | None = None
    model: dict[str, Any] = field(default_factory=dict)
    seed: int = 7

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp

    @property
    def batch(self) -> int:
        return self.global_batch or self.micro_batch * self.accumulation * self.dp

    def with_optimizer(self, name: str) -> Case:
        """The layout with AdamW, or with SGD (no decay, steps long enough to see, a clip that bites at every one)."""
        if name == "adamw":
            return self
        return dataclasses.replace(self, optimizer="sgd", learning_rate=0.5, weight_decay=0.0, clip=0.5)

    def config(self) -> Config:
        return Config.model_validate(
            {
                "run_dir": "unused",
                "model": MODEL | self.model,
                "data": {"path": "unused"},
                "parallel": {
                    "tensor_parallel_size": self.tp,
                    "pipeline_parallel_size": self.pp,
                    "data_parallel_size": self.dp,
                    "sequence_parallel": self.sequence_parallel,
                    "zero_stage": self.zero,
                },
                "precision": {"dtype": self.dtype},
                "optimizer": {
                    "name": self.optimizer,
                    "learning_rate": self.learning_rate,
                    "weight_decay": self.weight_decay,
                    "eps": self.eps,
                },
                "training": {
                    "global_batch_size": self.batch,
                    "micro_batch_size": self.micro_batch,
                    "sequence_length": self.sequence,
                    "steps": self.steps,
                    "seed": self.seed,
                    "gradient_clipping": self.clip,
                },
                "recompute": {"mode": self.recompute},
                # by default ZeRO-3 leaves parameters this small whole
                "deepspeed": {"zero_optimization": {"stage3_param_persistence_threshold": 0}} if self.zero == 3 else {},
            }
        )

    def __str__(self) -> str:
        changed = {
            name: value
            for name, value in vars(self).items()
            if value != getattr(Case, name, None) and value not in ({}, None)
        }
        return " ".join(f"{name}={value}" for name, value in changed.items()) or "serial"


@dataclass(frozen=True)
class Reference:
    """What transformers says: one loss and norm (before clipping) per step, global weights before and after."""

    losses: list[float]
    norms: list[float]
    initial: dict[str, np.ndarray]
    final: dict[str, np.ndarray]


@dataclass(frozen=True)
class Batch:
    tokens: np.ndarray
    targets: np.ndarray
    positions: np.ndarray | None
    samples: np.ndarray


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
        targets[: case.rows_without_loss] = -100
        positions = None
        if case.document_mask:
            starts = draw.random((case.batch, case.sequence)) < 0.15
            starts[:, 0] = True
            index = np.arange(case.sequence)
            positions = index - np.maximum.accumulate(np.where(starts, index, 0), axis=1)
        batches.append(Batch(tokens, targets, positions, step * case.batch + np.arange(case.batch)))
    return batches


def replica_slice(batch: Batch, case: Case, replica: int) -> list[Batch]:
    size = case.micro_batch
    count = case.batch // (size * case.dp)
    rows = [slice((replica * count + i) * size, (replica * count + i + 1) * size) for i in range(count)]
    positions = batch.positions
    return [
        Batch(batch.tokens[r], batch.targets[r], None if positions is None else positions[r], batch.samples[r])
        for r in rows
    ]


def engine_of(case: Case) -> Engine:
    """The case's engine on this rank."""
    config = case.config()
    layers = decoder_layers(config.model, config.recompute.mode)
    return build_engine(layers, config, config.check_world(case.world_size, "cpu"))


def micro_batches_of(engine: Engine, case: Case, batch: Batch) -> list[Batch]:
    """What this rank feeds its engine of a global batch."""
    return replica_slice(batch, case, engine.coordinate.data_rank) if engine.needs_data else []


def local_weights(engine: Engine) -> list[Block]:
    """This rank's blocks of the global fp32 weights."""
    weights = []
    for _, parameter in engine.parameters():
        value = read_parameter(parameter, ())["weight"]
        weights += [
            (piece.name, piece.shape, piece.source, value[piece.target].numpy().copy())
            for piece in parameter.shard.pieces()
        ]
    return weights


def train(rank: int, case: Case) -> dict[str, Any]:
    """What one rank sees: losses, norms, and its pieces of every weight afterwards."""
    engine = engine_of(case)
    losses, norms = [], []
    for batch in global_batches(case):
        result = engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
        assert not result.skipped
        losses.append(float(result.loss))
        norms.append(float(result.grad_norm))
    weights = local_weights(engine)
    engine.deepspeed.destroy()
    return {"losses": losses, "norms": norms, "weights": weights}


def train_all(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    """Several cases of one world size, one after another in the same ranks."""
    return [train(rank, case) for case in cases]


def assemble(results: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Global tensors from all ranks' pieces; every number must be covered, and copies must agree to the bit."""
    whole: dict[str, np.ndarray] = {}
    for result in results:
        for name, shape, source, value in result["weights"]:
            target = whole.setdefault(name, np.full(shape, np.nan, dtype=np.float32))[source]
            seen = ~np.isnan(target)
            assert np.array_equal(target[seen], value[seen]), f"copies of {name} differ between ranks"
            target[...] = value
    for name, value in whole.items():
        assert not np.isnan(value).any(), f"{name} is not covered by the ranks"
    return whole


def initial_weights(case: Case) -> dict[str, torch.Tensor]:
    """The global initial weights, from the serial layers."""
    from megalite.parallel.collectives import TensorParallel

    config, weights = case.config(), {}
    for spec in decoder_layers(config.model):
        module = make_layer(
            spec,
            TensorParallel(),
            seed=config.training.seed,
            initializer_range=config.model.initializer_range,
        )
        for _, parameter in module.named_parameters():
            for piece in parameter.shard.pieces():
                weights[piece.name] = parameter.detach()[piece.target].clone()
    return weights


LLAMA_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
    "rms_norm_eps",
    "rope_theta",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def reference(case: Case) -> Reference:
    """The same steps on one process; computed once for all layouts of one problem."""
    serial = dataclasses.replace(
        case,
        tp=1,
        pp=1,
        dp=1,
        zero=1,
        sequence_parallel=False,
        recompute="none",
        accumulation=1,
        micro_batch=case.batch,
    )
    key = repr(serial)
    if key not in _references:
        _references[key] = _reference(serial)
    return _references[key]


_references: dict[str, Reference] = {}


def _reference(case: Case) -> Reference:
    """transformers' LlamaForCausalLM, torch's AdamW or SGD, and torch's clipping.

    bf16: forward and backward by a bf16 copy of fp32 weights, which take the gradients in fp32. The fp32 weights begin
    where bf16 can begin, because DeepSpeed copies them from the bf16 ones.
    """
    master, compute = _llama(case), _llama(case)
    if case.dtype == "bf16":
        for parameter, copy in zip(master.parameters(), compute.parameters(), strict=True):
            copy.data = copy.data.bfloat16()  # not `.bfloat16()`: transformers keeps the rotary buffers in fp32
            parameter.data = copy.data.float()
    initial = {name: parameter.detach().numpy().copy() for name, parameter in master.named_parameters()}
    groups = [
        {"params": [p for p in master.parameters() if p.ndim > 1], "weight_decay": case.weight_decay},
        {"params": [p for p in master.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    if case.optimizer == "sgd":
        optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=case.learning_rate)
    else:
        optimizer = torch.optim.AdamW(groups, lr=case.learning_rate, betas=(0.9, 0.95), eps=case.eps)
    losses, norms = [], []
    for batch in global_batches(case):
        compute.zero_grad()
        logits = _reference_logits(compute, batch).float()
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(batch.targets).flatten())
        loss.backward()
        for parameter, copy in zip(master.parameters(), compute.parameters(), strict=True):
            parameter.grad = copy.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(master.parameters(), case.clip or float("inf"))))
        optimizer.step()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter, copy in zip(master.parameters(), compute.parameters(), strict=True):
                copy.copy_(parameter)
    final = {name: parameter.detach().numpy() for name, parameter in master.named_parameters()}
    return Reference(losses, norms, initial, final)


def _llama(case: Case) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    model = case.config().model
    shape = {name: getattr(model, name) for name in LLAMA_FIELDS}
    llama = LlamaForCausalLM(LlamaConfig(**shape, attn_implementation="sdpa")).float()
    llama.load_state_dict(initial_weights(case), strict=not model.tie_word_embeddings)
    return llama


def _reference_logits(model: Any, batch: Batch) -> torch.Tensor:
    tokens = torch.from_numpy(batch.tokens)
    if batch.positions is None:
        return model(tokens).logits
    positions = torch.from_numpy(batch.positions)
    document = (positions == 0).cumsum(1)
    allowed = (document.unsqueeze(2) == document.unsqueeze(1)).tril().unsqueeze(1)
    return model(tokens, attention_mask=allowed, position_ids=positions).logits
