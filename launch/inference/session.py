"""Runs a stored model on this machine, whole or cut over local tensor-parallel ranks, for generation and evaluation.

A command calls `run_here_or_on_ranks`: on one process the work is done in place; otherwise ranks are started, which get
the options as a JSON file. Each rank reads its own slices of the weights and does the same work; rank 0 prints.
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

from launch.conversion.huggingface.model_folder import DTYPES
from launch.conversion.huggingface.serial_model import filled_model
from launch.errors import FAILED_CODE, USER_ERROR_CODE, USER_ERRORS, LaunchError
from launch.inference.command_options import ModelPlacement
from launch.inference.stored_model import StoredModel, open_stored
from launch.output import FIRST_WORD_S, spinner
from launch.runtime.devices import gpu_count
from launch.runtime.local_ranks import rank_settings, start_local_ranks
from launch.runtime.printing import say
from launch.runtime.processes import end_with_parent
from launch.runtime.rank_environment import set_rank_variables
from launch.runtime.rank_process import log_once
from megalite.checkpoint.reader import CheckpointReader
from megalite.config import LaunchConfig
from megalite.config.suggestions import tensor_parallel_fits, tensor_parallel_near
from megalite.distributed.errors import RendezvousFailed
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import expert_balances
from megalite.parallel.layers import SerialModel
from megalite.parallel.mesh import Mesh
from megalite.resilience.signals import take_signals


@dataclass(frozen=True)
class Loaded:
    """One rank's part of a model with its weights."""

    stored: StoredModel
    module: SerialModel  # without gradients, in evaluation mode
    tp: TensorParallel
    device: torch.device

    @property
    def is_rank_zero(self) -> bool:
        """True on the rank that prints; all ranks have the same results."""
        return self.tp.rank == 0


def resolve(place: ModelPlacement, stored: StoredModel) -> ModelPlacement:
    """Replaces `auto` and hub ids by their values. Raises LaunchError if the model cannot run there."""
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


def load(place: ModelPlacement, rank: int = 0, stored: StoredModel | None = None) -> Loaded:
    """Reads the weights of one of the model's `tensor_parallel_size` ranks; opens the model unless it is `stored`.

    The first one reads all files of a checkpoint: raises CheckpointError if one has another digest than was recorded.
    """
    stored = stored or open_stored(place.path, place.tokenizer)
    place = resolve(place, stored)
    if rank == 0 and isinstance(stored.weights, CheckpointReader):  # wrong numbers make text, too
        stored.weights.verify_weights(lambda *_: None)
    device = torch.device("cpu" if place.device == "cpu" else f"cuda:{rank}")
    tp = TensorParallel(place.tensor_parallel_size, rank)
    module = filled_model(stored.model, tp, stored.weights.fill, device, DTYPES[place.dtype])
    for _, name, balance in expert_balances(module):
        if name in stored.weights.shapes:
            balance.bias = torch.zeros(balance.experts, device=device)
            stored.weights.fill(balance.bias, name, (slice(0, balance.experts),))
    return Loaded(stored, module.requires_grad_(False), tp, device)


def run_here_or_on_ranks(
    module: str, options: Any, check: Callable[[Any, StoredModel], object], work: Callable[[Any, Loaded], None]
) -> int:
    """Runs `work(options, loaded)` here, or on ranks that run `python -m MODULE`. Returns the exit code.

    options: a dataclass that can be converted to JSON, with a `place`. `check(options, stored)` raises errors of the
    user before weights are read and ranks are started.
    """
    with spinner(f"opening {options.place.path}", first_s=FIRST_WORD_S):
        stored = open_stored(options.place.path, options.place.tokenizer)
        place = resolve(options.place, stored)
        check(options, stored)
        size = place.tensor_parallel_size
        loaded = load(place, 0, stored) if size == 1 else None
    if loaded is not None:
        work(options, loaded)
        return 0
    environment, description = rank_settings(LaunchConfig(), size, place.device == "cuda")
    say(f"megalite: starting {size} ranks on {place.device} ({description})", file=sys.stderr, flush=True)
    with NamedTemporaryFile("w", suffix=".json") as file:  # command-line arguments are limited to 128 KB
        json.dump(asdict(replace(options, place=place)), file)
        file.flush()
        return start_local_ranks(Mesh(tensor_parallel_size=size), environment, [file.name], module)


def rank_main(arguments: Sequence[str], kind: Callable[..., Any], work: Callable[[Any, Loaded], None]) -> int:
    """Runs one of the ranks that `run_here_or_on_ranks` starts, with options of one kind. Returns the exit code."""
    from megalite.engine.deepspeed.process_groups import start_distributed, stop_distributed  # only ranks need it

    take_signals().when = ""
    end_with_parent()
    values = json.loads(Path(arguments[0]).read_text())
    options = kind(**values | {"place": ModelPlacement(**values["place"])})
    rank = set_rank_variables()
    assert rank is not None, "started by run_here_or_on_ranks"
    try:
        with spinner("starting ranks and reading the model", is_shown=rank.rank == 0, first_s=FIRST_WORD_S):
            start_distributed(rank.local_rank)
            loaded = load(options.place, rank.rank)
        work(options, loaded)
    except USER_ERRORS as error:
        log_once(str(error), rank)
        return USER_ERROR_CODE
    except RendezvousFailed as error:
        log_once(str(error), rank)
        return FAILED_CODE
    stop_distributed()
    return 0
