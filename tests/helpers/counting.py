"""Counts of what a decoder block or an engine step does, without a GPU: kernels, bytes kept for backward, tensors of
sequence x sequence elements, collectives in their order, waits for the device, graph breaks.

A block runs on the meta device, where only shapes exist, at the sizes of a real model; cuda_kernels.py stands in for
what CUDA runs as one kernel. Collectives go to torch's fake process group, which moves nothing. An engine
steps on the CPU.
"""

from __future__ import annotations

import gc
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # the meta kernels of collectives
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megalite.config import ModelConfig
from megalite.engine.statistics.expert_bias import ExpertCounts
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.expert_balance import ExpertBalance, PlacedBalance
from megalite.parallel.fused_passes import HasPasses
from megalite.parallel.layers import BlockInput, Recompute
from models.decoder import DecoderBlock
from tests.helpers.cuda_kernels import cuda_kernels, one_kernel

ALLOCATIONS = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}
NO_KERNELS = ALLOCATIONS | {"_unsafe_view", "_reshape_alias", "is_same_size", "_fused_sdp_choice", "lift_fresh"}
GEMMS = {"mm", "addmm", "addmm_", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "_scaled_grouped_mm"}
# The host reads values or a size from the device, which on a GPU waits for all work before it. Some of them are methods
# that a CPU answers without any operation.
SYNCS = {"_local_scalar_dense", "is_nonzero", "equal", "nonzero", "masked_select", "tolist", "numpy"}
READS = {torch.Tensor.tolist: "tolist", torch.Tensor.numpy: "numpy"}
COLLECTIVES = {
    "allreduce_": "all_reduce",
    "_reduce_scatter_base_": "reduce_scatter",
    "_allgather_base_": "all_gather",
    "broadcast_": "broadcast",
    "reduce_": "reduce",
    "send": "send",
    "recv_": "recv",
    "alltoall_base_": "all_to_all",
    "all_reduce": "all_reduce",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_gather_into_tensor": "all_gather",
    "all_to_all_single": "all_to_all",
}


@dataclass(frozen=True)
class Call:
    """One operation that torch was asked for."""

    name: str  # of a collective, as in `COLLECTIVES`; else torch's
    shapes: tuple[torch.Size, ...]  # of what it reads and makes
    size: int = 0  # bytes of a collective's largest tensor: the whole, not a rank's part
    where: str = ""  # the innermost lines of Python outside of torch, of a wait alone

    @property
    def is_collective(self) -> bool:
        return self.size > 0

    @property
    def is_gemm(self) -> bool:
        return self.name in GEMMS


class CallLog(TorchDispatchMode):
    """Writes down the calls that run kernels, collectives, or wait; remembers the storages they have made."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = function.__name__.partition(".")[0]
        read, made = _tensors((args, kwargs)), _tensors(result)
        given = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in read}
        for storage in (tensor.untyped_storage() for tensor in made):
            reference = StorageWeakRef(storage)
            if reference.cdata not in given:  # no view of a parameter or of a cache
                self._made[reference.cdata] = reference, storage.nbytes()
        if function.namespace in ("c10d", "_c10d_functional"):
            if name in COLLECTIVES:
                size = max(each.numel() * each.element_size() for each in read + made)
                self.calls.append(Call(COLLECTIVES[name], (), size))
        elif name not in NO_KERNELS and not function.is_view:
            where = _where() if name in SYNCS else ""
            self.calls.append(Call(name, tuple(each.shape for each in read + made), where=where))
        return result

    def __enter__(self) -> CallLog:
        self._reads = _Reads(self)
        self._reads.__enter__()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._reads.__exit__(*error)

    def kept_bytes(self, *, but: Tensor) -> int:
        """Returns the bytes of the storages made here that still exist, without that of `but`."""
        gc.collect()
        left_out = StorageWeakRef(but.untyped_storage()).cdata
        return sum(size for key, (reference, size) in self._made.items() if key != left_out and not reference.expired())


class _Reads(TorchFunctionMode):
    """Adds the methods of `READS` to a log."""

    def __init__(self, log: CallLog) -> None:
        super().__init__()
        self._log = log

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READS:
            self._log.calls.append(Call(READS[function], (), where=_where()))
        return function(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


def _where() -> str:
    frames = [one for one in traceback.extract_stack() if "/torch/" not in one.filename and one.filename != __file__]
    return " < ".join(f"{one.filename.rpartition('/')[2]}:{one.lineno} {one.name}" for one in frames[:-4:-1])


@contextmanager
def fake_group(size: int) -> Iterator[dist.ProcessGroup | None]:
    """A process group in which this process is the first of `size` ranks and the others do not exist."""
    if size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


LLAMA_8B = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
}


@dataclass(frozen=True)
class BlockCase:
    """One decoder block in bf16, and a micro-batch of one sequence."""

    model: dict[str, Any] = field(default_factory=dict)  # what differs from `LLAMA_8B`
    seq: int = 8192  # unlike the model's sizes, so that what is square in it is recognised
    tp: int = 1
    sequence_parallel: bool = False
    recompute: Recompute = "none"
    documents: bool = False
    fuses: bool = True  # as on a GPU, unless performance.compile is none
    device: str = "meta"  # cpu where values decide what runs, as those of a router do

    @property
    def config(self) -> ModelConfig:
        return ModelConfig.model_validate(LLAMA_8B | self.model)


@dataclass(frozen=True)
class BlockCounts:
    """Results of one forward and backward of a block, after a first one has filled the caches."""

    forward: list[Call]
    backward: list[Call]
    kept: float  # bytes for backward per token, in units of hidden_size; the input counts, the output does not
    squares: int  # kernels that read or write what is square in the sequence, such as a mask or scores

    @property
    def forward_kernels(self) -> int:
        return len(kernels_of(self.forward))

    @property
    def backward_kernels(self) -> int:
        return len(kernels_of(self.backward))

    @property
    def syncs(self) -> list[Call]:
        return syncs_of(self.forward + self.backward)

    @property
    def names(self) -> Counter[str]:
        """Kernels and collectives by name, for messages."""
        return Counter(call.name for call in self.forward + self.backward)


def kernels_of(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if not call.is_collective and call.name not in READS.values()]


def collectives_of(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.is_collective]


def syncs_of(calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.name in SYNCS]


@contextmanager
def block_of(case: BlockCase) -> Iterator[tuple[DecoderBlock, BlockInput]]:
    """Builds the case's block and its input; both live as long as their process group."""
    model, dtype = case.config, torch.get_default_dtype()
    with fake_group(case.tp) as group:
        tp = TensorParallel(case.tp, 0, group, case.sequence_parallel)
        torch.set_default_dtype(torch.bfloat16)
        try:
            with torch.device(case.device):
                block = DecoderBlock(model, case.recompute, 0, tp)
                rows = case.seq // (case.tp if case.sequence_parallel else 1)
                hidden = torch.zeros(1, rows, model.hidden_size, requires_grad=True)
                positions = torch.arange(case.seq).unsqueeze(0) % 1000 if case.documents else None
            for part in block.modules():
                if isinstance(part, HasPasses) and part.is_fusible and case.fuses and case.device == "meta":
                    part.run = one_kernel
            for balance in (part for part in block.modules() if isinstance(part, ExpertBalance)):
                ExpertCounts([PlacedBalance(0, "", balance)], hidden.device)
            # shared with the blocks before it, as in a model; the host knows the number of documents
            yield block, BlockInput(hidden, positions, documents=-(-case.seq // 1000), shared={})
        finally:
            torch.set_default_dtype(dtype)


def count_block(case: BlockCase) -> BlockCounts:
    """Counts one forward and backward of the case's block."""
    with block_of(case) as (block, inputs), cuda_kernels() if case.device == "meta" else nullcontext():
        block(inputs)
        with CallLog() as forward:
            hidden = _hidden(block(inputs))
        kept = forward.kept_bytes(but=hidden) + inputs.hidden.untyped_storage().nbytes()
        with CallLog() as backward:
            hidden.backward(torch.empty_like(hidden))
    squares = sum(any(shape.count(case.seq) > 1 for shape in call.shapes) for call in forward.calls + backward.calls)
    return BlockCounts(forward.calls, backward.calls, kept / case.seq / case.config.hidden_size, squares)


def _hidden(output: BlockInput | Tensor) -> Tensor:
    return output if isinstance(output, Tensor) else output.hidden


def why_not_one_graph(case: BlockCase) -> str | None:
    """Returns why torch.compile does not get the block into one graph, forward and backward; None: it does."""
    torch._dynamo.reset()
    with block_of(replace(case, fuses=False)) as (block, inputs), cuda_kernels():
        try:
            block.compiled = torch.compile(type(block).compute, backend="aot_eager", fullgraph=True, dynamic=False)
            hidden = _hidden(block(inputs))
            hidden.backward(torch.empty_like(hidden))
        except Exception as error:  # dynamo, fake tensors and autograd each have their own
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        finally:
            torch._dynamo.reset()
    return None


def calls_of(step: Callable[[], Any]) -> list[Call]:
    """Returns the calls of one engine step on this rank, for which the engine has been through another before."""
    with CallLog() as log:
        step()
    return log.calls
