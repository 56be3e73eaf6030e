"""The sides of `benchmarks.peers` without a stack of their own: one rank of each trains the same Llama when told to.

Every side has the same initial weights (megalite's), tokens, AdamW (learning rate 1e-3, no decay) and clipping at 1.0,
in fp32. `plain` is what most people write: transformers' LlamaForCausalLM, and DistributedDataParallel, FSDP2,
DTensor's tensor parallelism, or torch.distributed.pipelining. What peers add themselves is theirs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

MODEL = {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
SEQUENCE = 256
LEARNING_RATE = 1e-3
Step = Callable[[], float]


@dataclass(frozen=True)
class PeerLayout:
    """A division of a step's sequences and of the model among ranks."""

    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    zero: int = 1  # stage of ZeRO where a side has a choice
    batch: int = 4  # sequences of a step
    micro_batches: int = 1  # of a replica
    sequence: int = SEQUENCE

    @property
    def ranks(self) -> int:
        return self.data * self.tensor * self.pipeline

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch."""
        return self.batch // self.data // self.micro_batches

    def replica(self, rank: int) -> int:
        """Returns which replica a rank belongs to; replicas are the middle axis of all sides, as of megalite."""
        return rank // self.tensor % self.data

    def micro_batches_of(self, tokens: Any, rank: int) -> list[tuple[Any, Any]]:
        """Returns the tokens and next tokens of the rank's micro-batches, of a step's `[batch, seq + 1]`."""
        first = self.replica(rank) * self.batch // self.data
        starts = range(first, first + self.batch // self.data, self.rows)
        pieces = [tokens[start : start + self.rows] for start in starts]
        return [(piece[:, :-1].copy(), piece[:, 1:].copy()) for piece in pieces]


LAYOUTS = {
    "one": PeerLayout(),
    "one64": PeerLayout(batch=64, micro_batches=64, sequence=32),
    "dp2": PeerLayout(data=2),
    "dp2z2": PeerLayout(data=2, zero=2),
    "tp2": PeerLayout(tensor=2),
    "pp2": PeerLayout(pipeline=2, micro_batches=4),
    "dp4z2": PeerLayout(data=4, zero=2),
    "dp2tp2": PeerLayout(data=2, tensor=2, zero=2),
    "tp2pp2": PeerLayout(tensor=2, pipeline=2, micro_batches=4),
}


def tokens_of_steps(layout: PeerLayout) -> Iterator[Any]:
    """Yields random tokens `[batch, seq + 1]`, step by step, the same in every process."""
    import numpy as np

    draw = np.random.default_rng(0)
    while True:
        yield draw.integers(0, MODEL["vocab_size"], (layout.batch, layout.sequence + 1))


def initial_weights() -> dict[str, Any]:
    """Returns megalite's initial weights by the names of a Hugging Face Llama."""
    from megalite.config import ModelConfig
    from megalite.parallel.collectives import TensorParallel
    from megalite.parallel.layers import SerialModel, make_layer, named_shards
    from models.decoder import decoder_layers

    model = ModelConfig.model_validate(MODEL)
    layers = SerialModel(
        decoder_layers(model),
        TensorParallel(),
        lambda spec, tp: make_layer(spec, tp, seed=0, initializer_range=model.initializer_range),
    )
    return {
        piece.name: parameter.detach()[piece.target].clone()
        for _, parameter in named_shards(layers)
        for piece in parameter.shard.pieces()  # type: ignore[attr-defined]
    }


def _config(layout: PeerLayout, dtype: str) -> Any:
    from benchmarks.harness import config_of

    sizes = {"data": layout.data, "tensor": layout.tensor, "pipeline": layout.pipeline}
    return config_of(
        MODEL,
        layout.batch,
        layout.sequence,
        micro_batch=layout.rows,
        precision={"dtype": dtype},
        parallel={f"{axis}_parallel_size": size for axis, size in sizes.items()} | {"zero_stage": layout.zero},
        optimizer={"learning_rate": LEARNING_RATE, "betas": (0.9, 0.999), "weight_decay": 0.0},
        training={"seed": 0, "gradient_clipping": 1.0},
    )


def megalite(name: str, dtype: str = "fp32") -> Step:
    """A rank of a run, as launch/train.py builds it."""
    import numpy as np

    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from models.decoder import decoder_layers

    layout, rank = LAYOUTS[name], int(os.environ["RANK"])
    config = _config(layout, dtype)
    start_distributed(local_rank=rank)
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, layout.ranks, "cpu"))
    steps = tokens_of_steps(layout)
    absent = dict.fromkeys(("positions", "sources", "global_valid_targets"))

    def step() -> float:
        batches = [
            SimpleNamespace(tokens=tokens, targets=targets, samples=np.zeros(layout.rows, dtype=np.int64), **absent)
            for tokens, targets in layout.micro_batches_of(next(steps), rank)
        ]
        return float(engine.train_step(batches if engine.needs_data else [], LEARNING_RATE).loss)

    return step


def megalite_train(name: str) -> Callable[[Any], None]:
    """A rank of `megalite train` at its defaults: the whole loop, with data from files, records and watchdog.

    The loop asks for no turns, so its engine's `train_step` answers them, with the tokens that the other sides have.
    """
    import numpy as np
    import yaml

    from benchmarks.turns import WARM_UP_STEPS
    from data_pipeline.storage.indexed_writer import IndexedWriter
    from launch import train
    from megalite.engine.engine import Engine

    layout, rank, folder = LAYOUTS[name], int(os.environ["RANK"]), Path(os.environ["BENCHMARK_FOLDER"])
    if rank == 0:
        with IndexedWriter(folder / "tokens", np.uint16) as writer:
            tokens = np.concatenate([one.flatten() for one in islice(tokens_of_steps(layout), 64)])
            writer.append(tokens.astype(np.uint16), np.array([len(tokens)]))
    options = _config(layout, "fp32").model_dump(mode="json", exclude_unset=True)
    options |= {
        "run_dir": str(folder / "run"),
        "data": {"path": str(folder / "tokens")},
        "schedule": {"name": "constant"},
    }
    options["training"]["steps"] = 100_000
    path = folder / f"config_{rank}.yaml"
    path.write_text(yaml.safe_dump(options))
    steps, taken, left = tokens_of_steps(layout), 0, WARM_UP_STEPS
    plain_step: Any = Engine.train_step
    result: Any = SimpleNamespace(loss=0.0)

    def loop(answers: Any) -> None:
        def train_step(engine: Any, micro_batches: Any, *arguments: Any) -> Any:
            nonlocal taken, left, result
            if taken == left:
                taken, left = 0, answers.next_turn(taken, float(result.loss))
            for batch, (tokens, targets) in zip(micro_batches, layout.micro_batches_of(next(steps), rank), strict=True):
                batch.tokens[:], batch.targets[:] = tokens, targets
            taken, result = taken + 1, plain_step(engine, micro_batches, *arguments)
            return result

        Engine.train_step = train_step  # type: ignore[assignment, method-assign]
        raise SystemExit(train.main([str(path)]))

    return loop


def transformers_llama(dtype: str = "fp32") -> Any:
    """Builds transformers' model with the initial weights."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODEL, attn_implementation="sdpa", tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config)
    model.load_state_dict(initial_weights())
    return model.to(torch.bfloat16) if dtype == "bf16" else model


def adamw(parameters: Iterable[Any]) -> Any:
    """Builds the optimizer as torch comes."""
    import torch

    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def start(name: str) -> tuple[PeerLayout, int]:
    """Begins gloo, of one rank too: some stacks ask for their groups. Returns the layout and this rank."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return LAYOUTS[name], int(os.environ["RANK"])


def loop_of(
    layout: PeerLayout,
    rank: int,
    loss_of: Callable[[Any, Any], Any],
    optimizer: Any,
    clip: Callable[[], Any],
    backward: Callable[[Any], Any] | None = None,
) -> Step:
    """Returns the step of a side that has no loop of its own: micro-batches, clip, optimizer, the loss's mean."""
    import torch

    steps = tokens_of_steps(layout)

    def step() -> float:
        losses = []
        for pair in layout.micro_batches_of(next(steps), rank):
            loss = loss_of(*map(torch.from_numpy, pair)) / layout.micro_batches
            (backward or type(loss).backward)(loss)
            losses.append(loss.detach())
        clip()
        optimizer.step()
        optimizer.zero_grad()
        return mean_of_replicas(sum(losses), layout)

    return step


def mean_of_replicas(loss: Any, layout: PeerLayout) -> float:
    import torch.distributed as dist

    if layout.data == 1:
        return float(loss)
    loss = whole(loss)
    dist.all_reduce(loss)
    return float(loss) / dist.get_world_size()


def whole(loss: Any) -> Any:
    """Returns a loss that ranks share, if it is of those of DTensor, as each has it."""
    return loss.full_tensor() if hasattr(loss, "full_tensor") else loss


def loss_of_transformers(model: Any) -> Callable[[Any, Any], Any]:
    return lambda inputs, targets: model(input_ids=inputs, labels=inputs, shift_labels=targets).loss


def plain(name: str, dtype: str = "fp32") -> Step:
    """transformers with torch's own parallelism."""
    from torch.nn.parallel import DistributedDataParallel

    layout, rank = start(name)
    if layout.pipeline > 1:
        return _pipelined(layout, rank)
    model = transformers_llama(dtype)
    if layout.tensor > 1:
        _cut_by_dtensor(model)
    trained = DistributedDataParallel(model) if layout.data > 1 else model
    parameters = list(model.parameters())
    return loop_of(layout, rank, loss_of_transformers(trained), adamw(parameters), partial(clip, parameters))


def clip(parameters: Sequence[Any], group: Any = None, is_cut: Callable[[Any], bool] | None = None) -> None:
    """Clips at norm 1.0, over cut and whole parameters alike; `group`: over the ranks that hold other parameters.

    `is_cut`: which parameters that are no DTensors have other parts on the ranks of the group; all, if left out.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    squares, counts_once = torch.zeros(()), group is None or dist.get_rank(group) == 0
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for one in parameters:
        kinds[isinstance(one.grad, DTensor)].append(one)
    for alike in kinds.values():
        grads = [one.grad for one in alike if counts_once or is_cut is None or is_cut(one)]
        if grads:
            norm = torch.nn.utils.get_total_norm(grads)
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    for alike in kinds.values():
        if alike:
            torch.nn.utils.clip_grads_with_norm_(alike, 1.0, squares.sqrt())


def _cut_by_dtensor(model: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ColwiseParallel, RowwiseParallel
    plan: dict[str, Any] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    for layer in range(MODEL["num_hidden_layers"]):
        for name, kind in {"q_proj": column, "k_proj": column, "v_proj": column, "o_proj": row}.items():
            plan[f"model.layers.{layer}.self_attn.{name}"] = kind()
        for name, kind in {"gate_proj": column, "up_proj": column, "down_proj": row}.items():
            plan[f"model.layers.{layer}.mlp.{name}"] = kind()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


def _pipelined(layout: PeerLayout, rank: int) -> Step:
    """A stage of torch.distributed.pipelining: 1F1B over micro-batches of one sequence."""
    import torch
    import torch.distributed as dist
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, half = transformers_llama(), MODEL["num_hidden_layers"] // 2

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = whole.model.embed_tokens if rank == 0 else None
            self.layers = whole.model.layers[:half] if rank == 0 else whole.model.layers[half:]
            self.rotary = whole.model.rotary_emb
            self.norm: Any = None if rank == 0 else whole.model.norm
            self.head: Any = None if rank == 0 else whole.lm_head

        def forward(self, x: Any) -> Any:
            hidden = x if self.embed is None else self.embed(x)
            places = torch.arange(SEQUENCE).unsqueeze(0)
            turned = self.rotary(hidden, position_ids=places)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=turned, position_ids=places)
            return hidden if self.norm is None else self.head(self.norm(hidden))

    stage_model = Half()
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(stage, layout.micro_batches, loss_fn=mean_loss)
    parameters = list(stage_model.parameters())
    clipped = partial(clip, parameters, dist.group.WORLD)
    return pipeline_loop(layout, schedule, rank == 0, adamw(parameters), clipped, 1 / layout.micro_batches)


def mean_loss(logits: Any, targets: Any) -> Any:
    from torch.nn import functional

    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def pipeline_loop(
    layout: PeerLayout, schedule: Any, is_first: bool, optimizer: Any, clip: Callable[[], Any], scale: float
) -> Step:
    """Returns the step of a stage under a schedule of torch; the loss is `scale` times the sum of its losses."""
    import torch
    import torch.distributed as dist

    steps = tokens_of_steps(layout)

    def step() -> float:
        tokens, losses = torch.from_numpy(next(steps)), list[torch.Tensor]()
        if is_first:
            schedule.step(tokens[:, :-1].contiguous())
        else:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        clip()
        optimizer.step()
        optimizer.zero_grad()
        loss = scale * torch.stack([whole(one.detach()) for one in losses]).sum() if losses else torch.zeros(())
        dist.broadcast(loss, src=dist.get_world_size() - 1)
        return loss.item()

    return step
