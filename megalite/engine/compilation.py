"""Compilation of decoder blocks or passes by torch.compile: which runs have it, the cache between runs, its log lines.

Each block is compiled by itself, as a whole graph, and equal blocks share one (torch calls it regional compilation), so
that the start takes no longer with more layers. Forward without gradients is not compiled: evaluation and generation
have shapes of their own.
"""

from __future__ import annotations

import logging
import os
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megalite.config import Config, ConfigError
from megalite.config.rules.performance import why_not_compiled
from megalite.config.user_folders import cache_folder
from megalite.parallel import linear
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.fused_passes import HasPasses, fused
from megalite.parallel.layers import CompilableBlock

log = logging.getLogger(__name__)
MOST_GRAPHS = 64  # of one kind of model; torch refuses more than 8 unless told
# recompute.mode selective, of the bytes that torch's partitioner would keep: it gives up all that costs no product of
# matrices and no attention; at 0.65 it would give up those too (counted for a block of Llama's proportions)
SELECTIVE_BUDGET = 0.9
# torch joins the gather or the reduce-scatter of a cut sequence with the product beside it, and splits both
SPLIT_PRODUCTS: dict[str, str | int | bool | Callable[..., Any]] = {"_micro_pipeline_tp": True}
CACHES = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton"}


def compile_blocks(model: nn.Module, config: Config, device: torch.device, tp: TensorParallel) -> None:
    """Makes the blocks of `model`, or on GPUs their passes alone, compile themselves in their first training pass."""
    blocks = [module for module in model.modules() if isinstance(module, CompilableBlock)]
    if not blocks or not _is_wanted(config, device):
        if device.type == "cuda" and config.performance.compile != "none":
            fuse_passes(model)
        return
    import torch._functorch.config as functorch_config

    _set_up_compiler(tells=dist.get_rank() == 0)
    is_selective = any(block.recompute == "selective" for block in blocks)
    functorch_config.activation_memory_budget = SELECTIVE_BUDGET if is_selective else 1.0
    options = None
    if config.performance.symmetric_memory:
        share_memory(tp)
        options = SPLIT_PRODUCTS
    # one function for all blocks, which torch compiles once for each kind
    compiled = {
        kind: torch.compile(kind.compute, fullgraph=True, dynamic=False, options=options)
        for kind in {type(block) for block in blocks}
    }
    for block in blocks:
        block.compiled = compiled[type(block)]


def fuse_passes(model: nn.Module) -> None:
    _set_up_compiler(tells=dist.get_rank() == 0)
    for module in model.modules():
        if isinstance(module, HasPasses) and module.is_fusible:
            module.run = fused


def _is_wanted(config: Config, device: torch.device) -> bool:
    if config.performance.compile != "auto":
        return config.performance.compile == "blocks"
    if device.type != "cuda":  # where it gains nothing: see docs/design.md
        return False
    reason = why_not_compiled(config)
    if dist.get_rank() == 0:
        log.info(f"performance.compile auto: blocks are {'compiled' if reason is None else f'not compiled: {reason}'}")
    return reason is None


def share_memory(tp: TensorParallel) -> None:
    """Opens memory that tensor-parallel ranks read from each other, for `SPLIT_PRODUCTS`.

    Raises ConfigError, one sentence, where their GPUs cannot.
    """
    import torch.distributed._symmetric_memory as symmetric_memory

    assert tp.group is not None
    name = tp.group.group_name
    with warnings.catch_warnings():
        # deprecated as needless, but torch 2.13 splits products only of groups that were named by it
        warnings.simplefilter("ignore", FutureWarning)
        symmetric_memory.enable_symm_mem_for_group(name)
    try:
        symmetric_memory.get_symm_mem_workspace(name, min_size=1)  # all ranks of the group are here
    except RuntimeError as error:
        raise ConfigError(
            "performance.symmetric_memory needs GPUs that reach each other's memory, as over NVLink, and torch cannot "
            f"share it between tensor-parallel ranks here ({str(error).partition(chr(10))[0]}): use false"
        ) from error


@cache
def _set_up_compiler(*, tells: bool) -> None:
    """Prepares torch's compiler in this process, once."""
    import torch._dynamo  # imported here, because it takes a second that other runs save
    from torch._dynamo.callback import on_compile_end, on_compile_start

    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    for asks_the_machine in (linear._cpu_multiplies_bf16, linear._cpu_multiplies_fp16):  # which cannot be traced
        torch.compiler.assume_constant_result(asks_the_machine)
    folder = keep_compiled_code()
    if not tells:
        return
    begun: list[float] = []

    def begins(*_: object) -> None:
        begun.append(time.monotonic())

    def ends(*_: object) -> None:
        kept = "" if folder is None else f"; the next start finds it in {folder}"
        log.info(f"performance.compile: compiling took {time.monotonic() - begun.pop():.1f} s{kept}")

    on_compile_start(begins)
    on_compile_end(ends)


def keep_compiled_code() -> Path | None:
    """Lets the compilers keep what they make in the user's cache, unless the environment names another place.

    torch keys its files by code, versions and hardware, and renames them into place, so ranks and runs share them.
    Returns the folder; None if it cannot be made, and torch's own is in a temporary folder.
    """
    from torch._inductor.runtime.cache_dir_utils import default_cache_dir  # torch sets it when dynamo is imported

    folder = cache_folder() / "compiled"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        log.warning(f"performance.compile: compiled code is not kept for the next start: {error}")
        return None
    for variable, name in CACHES.items():
        if os.environ.get(variable) in (None, default_cache_dir()):
            os.environ[variable] = str(folder / name)
    return Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
