"""What differs between two checkpoints, by canonical name and whatever their layouts.

Tensors are read in blocks of rows, so memory is bounded by two blocks and not by a tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import isnan, prod
from typing import Any

import torch

from megalite.checkpoint.hugging_face import row_blocks
from megalite.checkpoint.manifest import WEIGHT, Manifest, Slices
from megalite.checkpoint.reader import CheckpointReader

Shape = tuple[int, ...]
GUARD = "guard"  # of the state: past losses and norms, which layouts round differently
MISSING = "(none)"  # what a side shows where only the other one has a fact


@dataclass(frozen=True)
class TensorDifference:
    """One tensor that both have."""

    kind: str  # weight, or a moment
    name: str
    numbers: int
    different: int  # numbers that are not the same bits
    max_abs: float  # NaN where a NaN stands against something else
    max_rel: float  # max_abs relative to the largest finite magnitude of the tensor in either

    def within(self, tolerance: float) -> bool:
        """No number is further away than `tolerance` x the largest magnitude; NaN never is within."""
        return self.max_rel <= tolerance


@dataclass(frozen=True)
class FactDifference:
    """One value that is not the same."""

    name: str  # dotted
    first: Any
    second: Any


@dataclass(frozen=True)
class Difference:
    """Two checkpoints side by side; tensors worst first."""

    first: str
    second: str
    tensors: tuple[TensorDifference, ...]
    only_in_first: tuple[str, ...]  # `kind name`
    only_in_second: tuple[str, ...]
    shapes: tuple[FactDifference, ...]  # of tensors that both have, in other shapes
    progress: tuple[FactDifference, ...]  # step, position in the data, what the optimizer has done
    settings: tuple[FactDifference, ...]  # config, layout, past losses: may well differ between equal states

    def is_equal(self, tolerance: float) -> bool:
        """The same state: a run goes on from either as from the other."""
        other = (self.only_in_first, self.only_in_second, self.shapes, self.progress)
        return not any(other) and all(tensor.within(tolerance) for tensor in self.tensors)


def difference(
    first: CheckpointReader, second: CheckpointReader, advance: Callable[[int], None] = lambda numbers: None
) -> Difference:
    """Compares everything; `advance` is told how many numbers have just been compared."""
    ours, theirs = _tensors(first.manifest), _tensors(second.manifest)
    both = [key for key in ours if key in theirs]
    same_shape = [key for key in both if ours[key] == theirs[key]]
    tensors = [_compare(first, second, kind, name, ours[kind, name], advance) for kind, name in same_shape]
    return Difference(
        first=str(first.folder),
        second=str(second.folder),
        tensors=tuple(sorted(tensors, key=_badness, reverse=True)),
        only_in_first=tuple(" ".join(key) for key in ours if key not in theirs),
        only_in_second=tuple(" ".join(key) for key in theirs if key not in ours),
        shapes=tuple(
            FactDifference(" ".join(key), list(ours[key]), list(theirs[key]))
            for key in both
            if ours[key] != theirs[key]
        ),
        progress=_facts(_progress(first.manifest), _progress(second.manifest)),
        settings=_facts(_settings(first.manifest), _settings(second.manifest)),
    )


def numbers_in_common(first: Manifest, second: Manifest) -> int:
    """How many numbers `difference` compares."""
    theirs = _tensors(second)
    return sum(prod(shape) for key, shape in _tensors(first).items() if theirs.get(key) == shape)


def blocks_of(shape: Shape) -> Iterator[Slices]:
    """Slices that cover a tensor of fp32 numbers in blocks of rows."""
    yield from row_blocks(shape, 4) if shape else [()]


def _tensors(manifest: Manifest) -> dict[tuple[str, str], Shape]:
    kinds = (WEIGHT, *manifest.moments)
    return {(kind, name): shape for kind in kinds for name, shape in manifest.tensors.items()}


def _compare(
    first: CheckpointReader,
    second: CheckpointReader,
    kind: str,
    name: str,
    shape: Shape,
    advance: Callable[[int], None],
) -> TensorDifference:
    different, largest, scale = 0, 0.0, 0.0
    for block in blocks_of(shape):
        a, b = (reader.read(name, block, kind) for reader in (first, second))
        differs = a.view(torch.int32) != b.view(torch.int32)
        different += int(differs.sum())
        # the same bits are no difference: infinities and NaNs have none to themselves
        largest = _max(largest, float(torch.where(differs, a - b, 0.0).abs().max()))
        scale = max(scale, *(float(side.nan_to_num(0.0, 0.0, 0.0).abs().max()) for side in (a, b)))
        advance(a.numel())
    return TensorDifference(kind, name, prod(shape), different, largest, largest / scale if scale else largest)


def _max(a: float, b: float) -> float:
    """Of the two the larger one, or NaN if either is: `max` would forget it."""
    return a if isnan(a) else b if isnan(b) else max(a, b)


def _badness(tensor: TensorDifference) -> tuple[bool, float, float, int]:
    is_nan = isnan(tensor.max_rel)
    return (
        is_nan,
        0.0 if is_nan else tensor.max_rel,
        0.0 if isnan(tensor.max_abs) else tensor.max_abs,
        tensor.different,
    )


def _progress(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "optimizer_steps": manifest.optimizer_steps,
        **_flat("loss_scaler", manifest.loss_scaler),
        **_flat("state", {name: value for name, value in manifest.state.items() if name != GUARD}),
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    return {
        **_flat("", manifest.config),
        **_flat("layout", manifest.layout),
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "evaluation_loss": manifest.evaluation_loss,
        **_flat("state", {name: value for name, value in manifest.state.items() if name == GUARD}),
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts as dotted options."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        flat |= _flat(name, value) if isinstance(value, dict) else {name: value}
    return flat


def _facts(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[FactDifference, ...]:
    names = dict.fromkeys((*first, *second))
    pairs = ((name, first.get(name, MISSING), second.get(name, MISSING)) for name in names)
    return tuple(FactDifference(*pair) for pair in pairs if pair[1] != pair[2])
