"""What a start takes of a device and its host, what it says of attention, and that it says nothing to worry about.

Would catch: a whole model on a device or a host that trains a part of it, a banner that names another kernel than the
one that runs, warnings of libraries.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from torch.utils._python_dispatch import TorchDispatchMode

from tests.device.runs import train, with_sections, write_counts
from tests.helpers.engine_cases import Case, engine_of
from tests.helpers.rank_pool import run_fresh_ranks
from tests.helpers.warm_runs import session


class Reached(Exception):
    """Ends a run where it has come to what is looked at."""


def _kib(name: str) -> int:
    """A figure of this process in /proc."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def _peaks(rank: int, cases: list[Case]) -> list[tuple[int, int, int]]:
    """Of each start until DeepSpeed makes its optimizer: the numbers of this rank's layers, and the most bytes on its
    device and in its process, which has those of the device, too."""
    found = []

    def reached(self: DeepSpeedEngine, *_: Any) -> None:
        numbers = sum(getattr(each, "ds_numel", each.numel()) for each in self.module.parameters())
        found.append((numbers, torch.cuda.max_memory_allocated() - before, (_kib("VmHWM") - resident) << 10))
        raise Reached

    for case in cases:
        torch.cuda.reset_peak_memory_stats()
        Path("/proc/self/clear_refs").write_text("5")  # the process' peak
        before, resident = torch.cuda.memory_allocated(), _kib("VmRSS")
        with patch.object(DeepSpeedEngine, "_configure_optimizer", reached), pytest.raises(Reached):
            engine_of(case)
    return found


@pytest.mark.parametrize(("layout", "bytes_on_device"), [({"dp": 2, "zero": 3}, 2 / 2), ({"pp": 2}, 2)], ids=str)
def test_a_start_holds_what_it_trains_and_a_layer(layout: dict[str, Any], bytes_on_device: float) -> None:
    """Of a whole model in fp32 the process would have four bytes more for each number, of one in bf16 the device two.
    A smaller start before it has what the process takes for libraries."""
    sizes = {"hidden_size": 512, "intermediate_size": 1024}
    cases = [Case(**layout, dtype="bf16", model=sizes | {"num_hidden_layers": layers}) for layers in (2, 12)]
    for _, (numbers, on_device, in_process) in run_fresh_ranks(_peaks, 2, cases):
        assert on_device < (bytes_on_device + 0.5) * numbers and in_process < (bytes_on_device + 2) * numbers


class _UntilAttention(TorchDispatchMode):
    """Ends a step at attention's kernel, whose name it tells: cuDNN's is not stood in for."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if re.search("attention|attn", str(function)):
            raise Reached(str(function))
        return function(*args, **(kwargs or {}))


def _end_at_attention(folder: Path, rank: int, capability: int) -> None:
    os.environ["STAND_IN_CAPABILITY"] = str(capability)
    from megalite.engine.engine import Engine

    train_step = Engine.train_step

    def until_attention(*arguments: Any, **options: Any) -> Any:
        with _UntilAttention():
            return train_step(*arguments, **options)

    patch.object(Engine, "train_step", until_attention).start()


WITH_A_MASK = {"data": {"document_mask": True}, "performance": {"attention": "sdpa"}}


@pytest.mark.parametrize(
    ("capability", "sections", "kernel", "words"),
    [
        (80, {}, "_scaled_dot_product_flash_attention", "torch's flash attention"),
        (90, {}, "_scaled_dot_product_cudnn_attention", "torch's cuDNN attention"),
        (90, WITH_A_MASK, "_scaled_dot_product_efficient_attention", "torch's memory-efficient attention with a mask"),
        (90, {"data": {"document_mask": True}}, "_varlen_attn", "flash attention by boundaries of documents"),
    ],
    ids=str,
)
def test_the_banner_names_the_kernel_that_runs(
    capability: int, sections: dict[str, Any], kernel: str, words: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    config = with_sections(tiny, {"model": {"head_dim": 16}} | sections)
    with session(tmp_path, config, world_size=1, fault=(_end_at_attention, (capability,))) as running:
        running.wait()
        said = running.output()
    assert f"attention of 3 layers: {words}" in said and re.search(rf"Reached: \w+\.{kernel}\.", said), said


@pytest.mark.parametrize(("ranks", "parallel"), [(2, {"pipeline_parallel_size": 2}), (1, {"zero_stage": 3})], ids=str)
def test_libraries_do_not_warn(ranks: int, parallel: dict[str, Any], tiny: dict[str, Any], tmp_path: Path) -> None:
    config = with_sections(tiny, {"parallel": parallel})
    said = train(tmp_path / "session", config, world_size=ranks, fault=(write_counts, ({},)))
    ours = "step 1 has no loss"  # it is 0
    assert not [line for line in said.splitlines() if "warning" in line.lower() and ours not in line], said
