"""Offloading of activations: what a decoder block keeps for backward waits in host memory.

In: the forward pass of a block. Out: the same result, and a graph whose saved tensors are on the host. torch's own
`torch.autograd.graph.save_on_cpu` copies on the stream that computes and fetches each tensor when backward asks for it,
so that computation waits for every byte. Here copies have streams of their own: a block's tensors leave while the next
block computes, and come back while backward is in the block behind it. The tensors of two blocks are on the device at
once, whatever the number of blocks; pipelines, whose passes alternate, hold those of two in each direction.

Whole storages move, each once, so that views keep their strides and results are equal to the bit. Views of parameters
do not move, and neither does what is smaller than a page.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, UntypedStorage, nn
from torch.multiprocessing.reductions import StorageWeakRef

SMALLEST_BYTES = 4096  # of a storage that is worth a copy of its own
BLOCKS_ON_DEVICE = 2  # in forward: the one that computes, and the one before it, whose tensors are leaving


class Copies:
    """Copies of storages between a device and its host, each of which is waited for before its result is used.

    Those of a CPU end before they return: nothing is gained, but the same code runs.
    """

    def to_host(self, storage: UntypedStorage) -> tuple[UntypedStorage, Any]:
        """Begins a copy to the host; `storage` must live until `wait` has returned."""
        return storage.clone(), None

    def to_device(self, host: UntypedStorage, device: torch.device) -> tuple[UntypedStorage, Any]:
        """Begins the copy back of what `to_host` returned, whose copy the stream that computes has waited for."""
        return host.clone(), None

    def wait(self, done: Any) -> None:
        """Makes the stream that computes wait for a copy."""


class CudaCopies(Copies):
    """Copies between a GPU and pinned memory, on a stream for each direction."""

    def __init__(self) -> None:
        self._out, self._back = torch.cuda.Stream(), torch.cuda.Stream()

    def to_host(self, storage: UntypedStorage) -> tuple[UntypedStorage, torch.cuda.Event]:
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
        source = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return host.untyped_storage(), self._copy(host, source, self._out)

    def to_device(self, host: UntypedStorage, device: torch.device) -> tuple[UntypedStorage, torch.cuda.Event]:
        # memory of the stream that computes, which is the one that frees it again
        target = torch.empty(host.nbytes(), dtype=torch.uint8, device=device)
        target.record_stream(self._back)
        done = self._copy(target, torch.empty(0, dtype=torch.uint8).set_(host), self._back)
        return target.untyped_storage(), done

    def _copy(self, target: Tensor, source: Tensor, stream: torch.cuda.Stream) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream())  # what has computed the source, or used the target's memory
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return stream.record_event()

    def wait(self, done: torch.cuda.Event) -> None:
        torch.cuda.current_stream().wait_event(done)


class OffloadedStorage:
    """A storage that autograd has saved: on the host, and on the device until it has left and from its return on."""

    def __init__(self, storage: UntypedStorage, copies: Copies) -> None:
        self._copies, self._device = copies, storage.device
        self.on_host, self._arrival = copies.to_host(storage)
        self.on_device: UntypedStorage | None = storage
        self._has_left = False

    def leave(self) -> None:
        """Frees the device's copy; the stream that computes waits until it has been read."""
        if not self._has_left:
            self._copies.wait(self._arrival)
            self._has_left, self.on_device = True, None

    def fetch(self) -> None:
        """Begins the copy back, unless the storage is on the device."""
        if self.on_device is None:
            self.on_device, self._arrival = self._copies.to_device(self.on_host, self._device)

    def storage(self) -> UntypedStorage:
        """Returns the storage on the device, for use by the stream that computes."""
        self.fetch()
        if self._has_left:
            self._copies.wait(self._arrival)
        assert self.on_device is not None
        return self.on_device


class SavedView(NamedTuple):
    """A saved tensor as a view of an offloaded storage."""

    moved: OffloadedStorage
    block: BlockTensors
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def tensor(self) -> Tensor:
        self.block.fetch()
        storage = self.moved.storage()
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(
            storage, self.offset, self.size, self.stride
        )


class SavedWeight(NamedTuple):
    """A saved tensor as a view of a parameter. ZeRO-3 gives the parameter other memory before backward."""

    parameter: nn.Parameter
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # from the parameter's beginning

    def tensor(self) -> Tensor:
        weight = self.parameter.detach()
        return weight.as_strided(self.size, self.stride, weight.storage_offset() + self.offset)


Version = tuple[StorageWeakRef, int]  # a storage, and how often it has been written to


class BlockTensors:
    """The storages that one block has saved in one pass. Autograd owns them, and frees each after its last use."""

    def __init__(self, previous: BlockTensors | None) -> None:
        self.previous = previous  # of the same pass
        self.moved: WeakValueDictionary[Version, OffloadedStorage] = WeakValueDictionary()
        self.output: StorageWeakRef | None = None  # hidden states that the block returned
        self._is_back = False

    def known(self, version: Version) -> OffloadedStorage | None:
        """Returns what has been made of a storage by this block, or the one before it, which may share constants."""
        found = self.moved.get(version)
        if found is None and self.previous is not None and (found := self.previous.moved.get(version)) is not None:
            self.moved[version] = found
        return found

    def leave(self) -> None:
        """Frees what is on the device."""
        for moved in list(self.moved.values()):
            moved.leave()

    def fetch(self) -> None:
        """Brings all storages back, last saved first, and those of the block that backward enters next."""
        if self._is_back:
            return
        self._is_back = True
        for block in (self, self.previous):
            for moved in reversed(list(block.moved.values())) if block is not None else ():
                moved.fetch()


class ActivationOffload:
    """Offloads what the blocks of one rank keep for backward; all of them share one."""

    def __init__(self, copies: Copies | None = None) -> None:
        self._copies = copies
        self._leaving: deque[BlockTensors] = deque()

    def __call__(self, block: nn.Module, function: Callable[..., Tensor], hidden: Tensor, *others: Any) -> Tensor:
        """Returns `function(hidden, *others)`, the forward pass of `block`, hidden states `[batch, seq(/tp), hidden]`.

        Blocks belong to one pass if one's output is the next one's `hidden`.
        """
        if self._copies is None:
            self._copies = CudaCopies() if hidden.device.type == "cuda" else Copies()
        while len(self._leaving) >= BLOCKS_ON_DEVICE:
            self._leaving.popleft().leave()
        before = self._leaving[-1] if self._leaving else None
        is_next = before is not None and before.output == StorageWeakRef(hidden.untyped_storage())
        tensors = BlockTensors(before if is_next else None)
        self._leaving.append(tensors)
        with self._moving(tensors, list(block.parameters()), hidden.device):
            output = function(hidden, *others)
        tensors.output = StorageWeakRef(output.untyped_storage())
        return output

    @contextmanager
    def _moving(
        self, tensors: BlockTensors, parameters: Sequence[nn.Parameter], device: torch.device
    ) -> Iterator[None]:
        copies = self._copies
        assert copies is not None

        def pack(tensor: Tensor) -> Tensor | SavedView | SavedWeight:
            if tensor.layout != torch.strided or tensor.device != device:
                return tensor
            if (weight := _as_weight(tensor, parameters)) is not None:
                return weight
            storage = tensor.untyped_storage()
            if storage.nbytes() < SMALLEST_BYTES:
                return tensor
            version = (StorageWeakRef(storage), tensor._version)
            moved = tensors.known(version)
            if moved is None:
                moved = tensors.moved[version] = OffloadedStorage(storage, copies)
            place = tensor.size(), tensor.stride(), int(tensor.storage_offset())
            return SavedView(moved, tensors, tensor.dtype, *place)

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda it: it if isinstance(it, Tensor) else it.tensor()):
            yield


def _as_weight(tensor: Tensor, parameters: Sequence[nn.Parameter]) -> SavedWeight | None:
    """Describes a view of one of the parameters; None for other tensors.

    A hook gets another tensor than the one that was saved, so that the memory tells what it is. ZeRO-1 and ZeRO-2 have
    all parameters in one storage, and ZeRO-3 those that it has gathered together.
    """
    storage, offset = tensor.untyped_storage().data_ptr(), int(tensor.storage_offset())
    for parameter in parameters:
        first = offset - int(parameter.storage_offset())
        if (
            parameter.dtype == tensor.dtype
            and 0 <= first < parameter.numel()
            and parameter.untyped_storage().data_ptr() == storage
        ):
            return SavedWeight(parameter, tensor.size(), tensor.stride(), first)
    return None
