"""Products of compiled blocks that torch joins with the collectives of a cut sequence (`performance.symmetric_memory`).

The joined operations need GPUs. Here torch's own passes transform the graphs, forward and backward, and torch's own
formulas, a collective and a product one after the other, run in the place of its kernels.
"""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from functorch.compile import make_boxed_func
from torch import nn
from torch._inductor import config as inductor_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.fx_passes.post_grad import post_grad_passes, view_to_reshape
from torch._inductor.virtualized import V

from megalite.config import ConfigError, load_config
from megalite.engine import compilation
from megalite.parallel.collectives import TensorParallel
from models.decoder import DecoderBlock
from tests.helpers.commands import ROOT
from tests.helpers.counting import fake_group
from tests.unit.models.test_attention_inputs import apart
from tests.unit.models.test_compiled_blocks import KINDS, blocks_of, results

JOINED_GATHER, JOINED_SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
ALONE = ("all_gather_into_tensor", "reduce_scatter_tensor")


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    library = torch.library.Library("symm_mem", "IMPL", "CPU")  # type: ignore[no-untyped-call]
    for name, formula in (
        (JOINED_GATHER, symmetric_memory._fused_all_gather_matmul_fallback),
        (JOINED_SCATTER, symmetric_memory._fused_matmul_reduce_scatter_fallback),
    ):
        library.impl(name, formula)
    torch._dynamo.reset()
    with symmetric_memory._test_mode():
        yield
    torch._dynamo.reset()
    library._destroy()  # type: ignore[no-untyped-call]


def by_torchs_passes(graphs: list[Counter[str]]) -> Callable[..., Any]:
    """Returns a backend with inductor's graphs after all of its passes, uncompiled; it counts their operations."""

    def transformed(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
        graph = copy.deepcopy(graph)
        view_to_reshape(graph)
        with V.set_fake_mode(inputs[0].fake_mode), inductor_config.patch(compilation.SPLIT_PRODUCTS):
            post_grad_passes(graph, is_inference=False)
        graph.recompile()
        names = [str(node.target).split(".") for node in graph.graph.nodes if node.op == "call_function"]
        graphs.append(Counter(name[1] for name in names if len(name) > 1))
        return make_boxed_func(graph.forward)

    return functools.partial(compile_fx, inner_compile=transformed)


@pytest.mark.parametrize("kind", ["llama", pytest.param("gemma2", marks=pytest.mark.exhaustive)])
def test_each_product_beside_a_collective_is_joined_with_it(kind: str, on_cpu: None) -> None:
    graphs: list[Counter[str]] = []
    with fake_group(2) as group:
        blocks = blocks_of(TensorParallel(2, 0, group, True), **KINDS[kind])
        expected = results(blocks, 1)
        backend = by_torchs_passes(graphs)
        function = torch.compile(DecoderBlock.compute, backend=backend, fullgraph=True, dynamic=False)
        for block in blocks:
            block.compiled = function
        assert apart(results(blocks, 1), expected) <= 2e-5  # fp32, sums in another order
    forward, backward = graphs
    for graph in (forward, backward):  # attention and MLP are entered and left, and so are their gradients
        assert (graph[JOINED_GATHER], graph[JOINED_SCATTER]) == (2, 2)
        assert not any(graph[name] for name in ALONE)


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[dist.ProcessGroup]:
    """A group that no test has named to torch before, which takes a name only once."""
    monkeypatch.setattr(symmetric_memory, "_group_name_to_store", {})
    monkeypatch.setattr(symmetric_memory._SymmetricMemory, "set_group_info", lambda *arguments: None)
    monkeypatch.setattr(compilation, "_set_up_compiler", lambda **options: None)
    with fake_group(2) as group:
        assert group is not None
        yield group


@pytest.mark.parametrize("is_wanted", [False, True])
def test_blocks_are_split_if_the_run_wants_it(
    is_wanted: bool, group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's pass is off by default, and asks for groups that were named to it."""
    opened: list[str] = []
    monkeypatch.setattr(symmetric_memory, "get_symm_mem_workspace", lambda name, min_size: opened.append(name))
    tp = TensorParallel(2, 0, group, True)
    words = ["parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true", "performance.compile=blocks"]
    words += [f"performance.symmetric_memory={is_wanted}"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", words)
    compiler = Mock(wraps=torch.compile)  # which refuses options that it does not know
    monkeypatch.setattr(torch, "compile", compiler)
    compilation.compile_blocks(nn.ModuleList(blocks_of(tp)), config, torch.device("cpu"), tp)
    assert compiler.call_args.kwargs["options"] == (compilation.SPLIT_PRODUCTS if is_wanted else None)
    assert symmetric_memory.is_symm_mem_enabled_for_group(group.group_name) == is_wanted == bool(opened)


def test_gpus_that_cannot_share_memory_are_one_sentence(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str, min_size: int) -> None:
        raise RuntimeError("no peer access\nException raised from ...")

    monkeypatch.setattr(symmetric_memory, "get_symm_mem_workspace", refuse)
    with pytest.raises(ConfigError, match=r"performance.symmetric_memory .* \(no peer access\): use false$"):
        compilation.share_memory(TensorParallel(2, 0, group, True))
