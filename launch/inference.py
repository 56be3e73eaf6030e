"""A stored model on this machine's processors, whole or cut over local tensor-parallel ranks, for generation and
evaluation.

A command calls `run`: on one process the work is done here; else the request goes as a JSON file to ranks that this
starts, each of which reads its own slices of the weights and does the same work, rank 0 the talking.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch
from torch import nn

from launch.convert import DTYPES, named_layer
from launch.devices import gpu_count
from launch.errors import INTERRUPTED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError
from launch.local import rank_environment, start_local_ranks
from launch.processes import end_with_parent
from launch.rank_environment import this_rank
from launch.ranks import tell_once
from launch.stored_model import StoredModel, open_stored
from megalite.config import LaunchConfig
from megalite.config.remedies import tensor_parallel_fits, tensor_parallel_near
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, SerialModel
from models.decoder import decoder_layers


@dataclass(frozen=True)
class Place:
    """Which model, and what it runs on."""

    path: str  # Hugging Face folder, hub id, checkpoint or run folder
    tensor_parallel_size: int = 1
    device: str = "auto"  # cpu or cuda; auto: GPUs if there are any
    dtype: str = "auto"  # fp32, bf16 or fp16; auto: as stored on GPUs, fp32 on a CPU


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, as one rank has it."""

    stored: StoredModel
    module: SerialModel  # without gradients, in evaluation mode
    tp: TensorParallel
    device: torch.device

    @property
    def is_speaker(self) -> bool:
        """Whether this rank tells the user; all have the same to tell."""
        return self.tp.rank == 0


def resolve(place: Place, stored: StoredModel) -> Place:
    """With `auto` decided and a local path. Raises LaunchError where it cannot be."""
    gpus, size, model = gpu_count(), place.tensor_parallel_size, stored.model
    device = place.device if place.device != "auto" else ("cuda" if gpus else "cpu")
    dtype = place.dtype if place.dtype != "auto" else (stored.dtype if device == "cuda" else "fp32")
    for option, value, values in (("device", device, ("cpu", "cuda")), ("dtype", dtype, tuple(DTYPES))):
        if value not in values:
            raise LaunchError(f"{option} {value!r} is none of auto, {', '.join(values)}")
    if dtype == "fp16" and device == "cpu":
        raise LaunchError("dtype fp16 needs a GPU: use fp32 or bf16")
    if device == "cuda" and gpus < size:
        raise LaunchError(f"{size} GPUs are needed and this machine has {gpus}: use fewer, or --device cpu")
    if size < 1 or size > model.vocab_size or not tensor_parallel_fits(model, size):
        raise LaunchError(
            f"--tensor-parallel-size {size} does not cut this model's {model.num_attention_heads} query and "
            f"{model.num_key_value_heads} key/value heads evenly: use {tensor_parallel_near(model, size)}"
        )
    return replace(place, path=str(stored.folder), device=device, dtype=dtype)


def load(place: Place, rank: int = 0) -> Loaded:
    """Opens the model and reads the weights of one rank, of `tensor_parallel_size` that make up the job."""
    stored = open_stored(place.path)
    return _load(resolve(place, stored), stored, rank)


def _load(place: Place, stored: StoredModel, rank: int) -> Loaded:
    device = torch.device("cpu" if place.device == "cpu" else f"cuda:{rank}")

    @torch.no_grad()
    def filled_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
        layer = named_layer(spec, tp).to(device=device, dtype=DTYPES[place.dtype])
        for parameter in layer.parameters():
            parameter.zero_()  # padding
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                stored.weights.fill(parameter[piece.target], piece.name, piece.source)
        return layer

    tp = TensorParallel(place.tensor_parallel_size, rank)
    module = SerialModel(decoder_layers(stored.model), tp, filled_layer).eval().requires_grad_(False)
    return Loaded(stored, module, tp, device)


def run(
    module: str, request: Any, check: Callable[[Any, StoredModel], object], work: Callable[[Any, Loaded], None]
) -> int:
    """Does `work(request, loaded)` here, or has it done by ranks that run `python -m MODULE`; the exit code.

    request: a dataclass that survives JSON, with a `place`. `check(request, stored)` raises what the user can mend,
    before weights are read and ranks are started.
    """
    stored = open_stored(request.place.path)
    place = resolve(request.place, stored)
    check(request, stored)
    size = place.tensor_parallel_size
    if size == 1:
        work(request, _load(place, stored, 0))
        return 0
    environment, said = rank_environment(LaunchConfig(), size, place.device == "cuda")
    print(f"megalite: starting {size} ranks on {place.device} ({said})", file=sys.stderr, flush=True)
    with NamedTemporaryFile("w", suffix=".json") as file:  # an argument takes 128 KB at most
        json.dump(asdict(replace(request, place=place)), file)
        file.flush()
        return start_local_ranks(size, environment, [file.name], module)


def rank_main(arguments: Sequence[str], kind: Callable[..., Any], work: Callable[[Any, Loaded], None]) -> int:
    """One rank of those that `run` starts, for requests of one kind; the exit code."""
    from megalite.engine.distributed import start_distributed, stop_distributed  # DeepSpeed: only ranks need it

    end_with_parent()
    values = json.loads(Path(arguments[0]).read_text())
    request = kind(**values | {"place": Place(**values["place"])})
    rank = this_rank()
    assert rank is not None, "started by run"
    try:
        start_distributed(rank.local_rank)
        work(request, load(request.place, rank.rank))
    except USER_ERRORS as error:
        tell_once(str(error), rank)
        return USER_ERROR_CODE
    except KeyboardInterrupt:
        return INTERRUPTED_CODE
    stop_distributed()
    return 0
