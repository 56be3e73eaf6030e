"""Builds the layout of a whole model on disk from a family's names of weights.

Names of modules are dotted paths; a family's data refers to parts of them, e.g. `mlp.up_proj` or `model.layers`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from models.hub.tensor_layout import HubLayout, HubTensor, RowRun, Shape


def hub_layout(
    shapes: Mapping[str, Shape],
    renamed: Mapping[str, str],
    fused: Mapping[str, tuple[str, ...]],
    transposed: tuple[str, ...],
    heads: int | None,
) -> HubLayout:
    """Returns the tensors on disk of a model whose weights have `shapes` by canonical name.

    renamed: part of a path -> the hub's part. fused: the hub's part -> our parts whose rows it concatenates; with
    `heads` it interleaves that many heads of each. transposed: the hub's parts whose matrices are [in, out].
    """
    parts = {part: (whole, members) for whole, members in fused.items() for part in members}
    tensors: dict[str, HubTensor] = {}
    for name in shapes:
        whole, names = _fused_with(name, parts)
        hub_name = _replaced(whole, renamed)
        if names[0] != name:  # a later part of a fused tensor
            continue
        assert hub_name not in tensors, f"two weights are called {hub_name}"
        runs = tuple(_runs({part: shapes[part][0] for part in names}, heads if len(names) > 1 else None))
        shape = (sum(run.count for run in runs), *shapes[name][1:])
        is_transposed = len(shape) == 2 and _ends_with(hub_name, transposed)
        tensors[hub_name] = HubTensor(hub_name, shape[::-1] if is_transposed else shape, runs, is_transposed)
    return HubLayout(tensors.values(), shapes)


def _fused_with(name: str, parts: Mapping[str, tuple[str, tuple[str, ...]]]) -> tuple[str, list[str]]:
    """Returns the name of the tensor that holds `name`, and the canonical names of everything in it."""
    path, leaf = name.rsplit(".", 1)
    for part, (whole, members) in parts.items():
        if path.endswith(f".{part}"):
            block = path.removesuffix(part)
            return f"{block}{whole}.{leaf}", [f"{block}{member}.{leaf}" for member in members]
    return name, [name]


def _runs(rows: Mapping[str, int], heads: int | None) -> Iterator[RowRun]:
    """Yields the rows of a tensor that holds several of ours, whole or head by head."""
    hub, pieces = 0, heads or 1
    for piece in range(pieces):
        for name, count in rows.items():
            assert count % pieces == 0, f"{name}: {count} rows are not {pieces} heads"
            yield RowRun(name, piece * (count // pieces), hub, count // pieces)
            hub += count // pieces


def _replaced(name: str, renamed: Mapping[str, str]) -> str:
    if not renamed:
        return name
    longest_first = sorted(renamed, key=len, reverse=True)
    part = re.compile(rf"(?<![^.])({'|'.join(map(re.escape, longest_first))})(?![^.])")
    return part.sub(lambda found: renamed[found[0]], name)


def _ends_with(name: str, parts: tuple[str, ...]) -> bool:
    return name.rsplit(".", 1)[0].endswith(tuple(f".{part}" for part in parts))
