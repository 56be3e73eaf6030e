"""Compares two checkpoints by canonical name, independently of their layouts.

Tensors are read in blocks of rows, so memory is bounded by two blocks, not by the largest tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import isnan, prod
from typing import Any

import torch

from megalite.checkpoint.huggingface.folder import row_blocks
from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.reader import CheckpointReader

Shape = tuple[int, ...]
ROUNDED = ("guard", "source_losses")  # entries of the state with past losses and norms, which layouts round differently
MISSING = "(none)"  # value of a side that lacks the entry


@dataclass(frozen=True)
class TensorDifference:
    """The comparison of one tensor that is in both checkpoints."""

    kind: str  # weight, or the name of a moment
    name: str
    numbers: int
    different: int  # numbers whose bits differ
    max_abs: float  # NaN where only one side is NaN
    max_rel: float  # max_abs relative to the largest finite magnitude of the tensor in either

    def within(self, tolerance: float) -> bool:
        """Returns whether no number differs by more than `tolerance` x the largest magnitude, and none is NaN."""
        return self.max_rel <= tolerance


@dataclass(frozen=True)
class ValueDifference:
    """One value of the manifests that differs."""

    name: str  # dotted path
    first: Any
    second: Any


@dataclass(frozen=True)
class Difference:
    """The comparison of two checkpoints; tensors are sorted worst first."""

    first: str
    second: str
    tensors: tuple[TensorDifference, ...]
    only_in_first: tuple[str, ...]  # `kind name`
    only_in_second: tuple[str, ...]
    shapes: tuple[ValueDifference, ...]  # of tensors in both checkpoints whose shapes differ
    progress: tuple[ValueDifference, ...]  # step, position in the data, optimizer steps
    settings: tuple[ValueDifference, ...]  # config, layout, past losses: may differ between equal states

    @property
    def different(self) -> list[TensorDifference]:
        """The tensors that do not have the same bits."""
        return [tensor for tensor in self.tensors if tensor.different]

    def is_equal(self, tolerance: float) -> bool:
        """Returns whether a run would continue in the same way from either checkpoint."""
        other = (self.only_in_first, self.only_in_second, self.shapes, self.progress)
        return not any(other) and all(tensor.within(tolerance) for tensor in self.tensors)


def difference(
    first: CheckpointReader, second: CheckpointReader, advance: Callable[[int], None] = lambda numbers: None
) -> Difference:
    """Compares everything; calls `advance` with the number of values that have just been compared."""
    left, right = _shapes(first.manifest), _shapes(second.manifest)
    both = [key for key in left if key in right]
    tensors = [_compare(first, second, *key, advance) for key in both if left[key] == right[key]]
    other_shapes = [key for key in both if left[key] != right[key]]
    return Difference(
        first=str(first.folder),
        second=str(second.folder),
        tensors=tuple(sorted(tensors, key=_sort_key, reverse=True)),
        only_in_first=tuple(" ".join(key) for key in left if key not in right),
        only_in_second=tuple(" ".join(key) for key in right if key not in left),
        shapes=tuple(ValueDifference(" ".join(key), list(left[key]), list(right[key])) for key in other_shapes),
        progress=_differences(_progress(first.manifest), _progress(second.manifest)),
        settings=_differences(_settings(first.manifest), _settings(second.manifest)),
    )


def numbers_in_common(first: Manifest, second: Manifest) -> int:
    """Returns the number of values that `difference` compares."""
    right = _shapes(second)
    return sum(prod(shape) for key, shape in _shapes(first).items() if right.get(key) == shape)


def _shapes(manifest: Manifest) -> dict[tuple[str, str], Shape]:
    """Returns the shapes of all tensors by kind and name."""
    return {(kind, name): shape for name, shape in manifest.tensors.items() for kind in manifest.kinds_of(name)}


def _compare(
    first: CheckpointReader, second: CheckpointReader, kind: str, name: str, advance: Callable[[int], None]
) -> TensorDifference:
    shape = first.shapes[name]
    different, scale, largest = 0, 0.0, torch.zeros(())
    for block in row_blocks(shape, 4):
        a, b = (reader.read(name, block, kind) for reader in (first, second))
        differs = a.view(torch.int32) != b.view(torch.int32)
        different += int(differs.sum())
        # equal bits are no difference, as inf - inf would be; NaN stays the largest
        largest = torch.maximum(largest, torch.where(differs, a - b, 0.0).abs().max())
        scale = max(scale, *(float(side.nan_to_num(0.0, 0.0, 0.0).abs().max()) for side in (a, b)))
        advance(a.numel())
    max_abs = float(largest)
    return TensorDifference(kind, name, prod(shape), different, max_abs, max_abs / scale if scale else max_abs)


def _sort_key(tensor: TensorDifference) -> tuple[bool, float, float, int]:
    """Orders by size of the difference, NaN last."""
    is_nan = isnan(tensor.max_rel)
    return (is_nan, 0.0 if is_nan else tensor.max_rel, 0.0 if is_nan else tensor.max_abs, tensor.different)


def _progress(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "optimizer_steps": manifest.optimizer_steps,
        **_flat("loss_scaler", manifest.loss_scaler),
        **_flat("state", {name: value for name, value in manifest.state.items() if name not in ROUNDED}),
    }


def _settings(manifest: Manifest) -> dict[str, Any]:
    return {
        **_flat("", manifest.config),
        **_flat("layout", manifest.layout),
        "tokenizer_sha256": manifest.tokenizer_sha256,
        "evaluation_loss": manifest.evaluation_loss,
        **_flat("state", {name: value for name, value in manifest.state.items() if name in ROUNDED}),
    }


def _flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Flattens nested dicts to dotted names."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        flat |= _flat(name, value) if isinstance(value, dict) else {name: value}
    return flat


def _differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> tuple[ValueDifference, ...]:
    names = dict.fromkeys((*first, *second))
    pairs = ((name, first.get(name, MISSING), second.get(name, MISSING)) for name in names)
    return tuple(ValueDifference(*pair) for pair in pairs if pair[1] != pair[2])
