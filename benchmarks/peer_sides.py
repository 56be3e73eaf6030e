"""The sides of `benchmarks.peers`: one rank of each trains the same Llama with the same data, when told to.

Every side has the same initial weights (megalite's), tokens, AdamW (learning rate 1e-3, no decay) and clipping at 1.0,
in fp32. `plain` is what most people write: transformers' LlamaForCausalLM, and DistributedDataParallel, DTensor's
tensor parallelism, or torch.distributed.pipelining. What peers add themselves is theirs.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.harness import config_of
from benchmarks.train_step import MODEL, SEQUENCE, peak_kib

BATCH = 4  # sequences of a step
LEARNING_RATE = 1e-3
WARM_UP_STEPS = 3
LAYOUTS = ("one", "dp2", "tp2", "pp2")
Step = Callable[[], float]


def ranks_of(layout: str) -> int:
    """Returns the number of ranks."""
    return 1 if layout == "one" else 2


def rows_of(layout: str, rank: int) -> slice:
    """Returns the sequences of a step that a rank trains on: its share under data parallelism, else all."""
    return slice(rank * BATCH // 2, (rank + 1) * BATCH // 2) if layout == "dp2" else slice(BATCH)


def tokens_of_steps() -> Iterable[Any]:
    """Yields random tokens `[batch, seq + 1]`, step by step, the same in every process."""
    import numpy as np

    draw = np.random.default_rng(0)
    while True:
        yield draw.integers(0, MODEL["vocab_size"], (BATCH, SEQUENCE + 1))


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


def megalite(layout: str, rank: int) -> Step:
    """A rank of a run, as launch/train.py builds it."""
    import numpy as np

    from megalite.config import resolve_layout
    from megalite.engine.build import build_engine
    from megalite.engine.deepspeed.process_groups import start_distributed
    from models.decoder import decoder_layers

    rows = {"one": BATCH, "dp2": BATCH // 2, "tp2": BATCH, "pp2": 1}[layout]
    axis = {"dp2": "data", "tp2": "tensor", "pp2": "pipeline"}.get(layout)
    config = config_of(
        MODEL,
        BATCH,
        SEQUENCE,
        micro_batch=rows,
        precision={"dtype": "fp32"},
        parallel={f"{axis}_parallel_size": 2} if axis else {},
        optimizer={"learning_rate": LEARNING_RATE, "betas": (0.9, 0.999), "weight_decay": 0.0},
        training={"seed": 0, "gradient_clipping": 1.0},
    )
    start_distributed(local_rank=rank)
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, ranks_of(layout), "cpu"))
    steps, mine = iter(tokens_of_steps()), rows_of(layout, rank)

    def step() -> float:
        tokens = next(steps)[mine]
        batches = [
            SimpleNamespace(
                tokens=tokens[first : first + rows, :-1].copy(),
                targets=tokens[first : first + rows, 1:].copy(),
                positions=None,
                samples=np.zeros(rows, dtype=np.int64),
            )
            for first in range(0, len(tokens), rows)
        ]
        return float(engine.train_step(batches if engine.needs_data else [], LEARNING_RATE).loss)

    return step


def transformers_llama() -> Any:
    """Builds transformers' model with the initial weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**MODEL, attn_implementation="sdpa", tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(config)
    model.load_state_dict(initial_weights())
    return model


def adamw(parameters: Iterable[Any]) -> Any:
    """Builds the optimizer as torch comes."""
    import torch

    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0)


def plain(layout: str, rank: int) -> Step:
    """transformers with torch's own parallelism."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    if layout != "one":
        dist.init_process_group("gloo")
    if layout == "pp2":
        return _pipelined(rank)
    model = transformers_llama()
    if layout == "tp2":
        _cut_by_dtensor(model)
    trained = DistributedDataParallel(model) if layout == "dp2" else model
    optimizer, steps, mine = adamw(model.parameters()), iter(tokens_of_steps()), rows_of(layout, rank)

    def step() -> float:
        tokens = torch.from_numpy(next(steps)[mine])
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = trained(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        loss.backward()
        _clip(model.parameters())
        optimizer.step()
        optimizer.zero_grad()
        return _mean(loss.detach()) if layout == "dp2" else loss.item()

    return step


def _clip(parameters: Iterable[Any], group: Any = None) -> None:
    """Clips at norm 1.0, over cut and whole parameters alike; `group`: over the stages of a pipeline."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor

    parameters = list(parameters)
    squares = torch.zeros(())
    cut = [isinstance(one.grad, DTensor) for one in parameters]
    for kind in (True, False):
        grads = [one.grad for one, is_cut in zip(parameters, cut, strict=True) if is_cut is kind]
        if grads:
            norm = torch.nn.utils.get_total_norm(grads)
            squares += (norm.full_tensor() if isinstance(norm, DTensor) else norm) ** 2
    if group is not None:
        dist.all_reduce(squares, group=group)
    for kind in (True, False):
        alike = [one for one, is_cut in zip(parameters, cut, strict=True) if is_cut is kind]
        if alike:
            torch.nn.utils.clip_grads_with_norm_(alike, 1.0, squares.sqrt())


def _mean(loss: Any) -> float:
    import torch.distributed as dist

    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


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


def _pipelined(rank: int) -> Step:
    """A stage of torch.distributed.pipelining: 1F1B over micro-batches of one sequence."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    whole, half = transformers_llama(), MODEL["num_hidden_layers"] // 2

    class Half(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = whole.model.embed_tokens if rank == 0 else None
            self.layers = whole.model.layers[:half] if rank == 0 else whole.model.layers[half:]
            self.rotary = whole.model.rotary_emb
            self.norm: Any = None if rank == 0 else whole.model.norm
            self.head: Any = whole.lm_head

        def forward(self, x: Any) -> Any:
            hidden = x if self.embed is None else self.embed(x)
            places = torch.arange(SEQUENCE).unsqueeze(0)
            turned = self.rotary(hidden, position_ids=places)
            for layer in self.layers:
                hidden = layer(hidden, position_embeddings=turned, position_ids=places)
            return hidden if self.norm is None else self.head(self.norm(hidden))

    stage_model = Half()
    stage = PipelineStage(stage_model, rank, 2, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, BATCH, loss_fn=lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    )
    optimizer, steps = adamw(stage_model.parameters()), iter(tokens_of_steps())

    def step() -> float:
        tokens, losses = torch.from_numpy(next(steps)), list[torch.Tensor]()
        if rank == 0:
            schedule.step(tokens[:, :-1].contiguous())
        else:
            schedule.step(target=tokens[:, 1:].contiguous(), losses=losses)
        _clip(stage_model.parameters(), dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack([one.detach() for one in losses]).mean() if losses else torch.zeros(())
        dist.broadcast(loss, src=1)
        return loss.item()

    return step


def accelerate(layout: str, rank: int) -> Step:
    """transformers under Hugging Face Accelerate, which has data parallelism on a CPU."""
    import torch
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), transformers_llama()
    trained, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    steps, mine = iter(tokens_of_steps()), rows_of(layout, rank)

    def step() -> float:
        tokens = torch.from_numpy(next(steps)[mine])
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        loss = trained(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(accelerator.reduce(loss.detach(), "mean"))

    return step


SIDES: dict[str, Callable[[str, int], Step]] = {"plain": plain, "megalite": megalite, "accelerate": accelerate}


def serve(side: str, layout: str) -> None:
    """Answers, in a rank's process, each number of steps on stdin with one line of JSON."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not be taken for an answer
    step = SIDES[side](layout, int(os.environ["RANK"]))
    for _ in range(WARM_UP_STEPS):
        loss = step()
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        steps, wall, cpu = int(line), time.perf_counter(), time.process_time()
        for _ in range(steps):
            loss = step()
        turn = {
            "wall_s": (time.perf_counter() - wall) / steps,
            "cpu_s": (time.process_time() - cpu) / steps,
            "memory_mib": peak_kib() / 1024,
            "loss": loss,
        }
        print(json.dumps(turn), file=answers, flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    serve(*sys.argv[1:])
