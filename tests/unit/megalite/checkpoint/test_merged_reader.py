"""A checkpoint with adapters is read as a model without any, or refused with a sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.merged_reader import MergedReader
from tests.helpers.single_rank import write_single

LORA = {"name": "lora", "rank": 2, "alpha": 3.0, "targets": ["q_proj"]}


SHAPES = {
    "a.q_proj.weight": (7, 5),
    "a.q_proj.lora_A": (2, 5),
    "a.q_proj.lora_B": (7, 2),
    "a.q_proj.bias": (7,),
    "a.norm.weight": (5,),
}


def written(
    folder: Path, adapter: dict[str, Any] | None, shapes: dict[str, tuple[int, ...]] = SHAPES
) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    config = {} if adapter is None else {"adapter": adapter}
    write_single(folder, tensors.items(), step=1, config=config, tokenizer=None, state={})
    return tensors


def test_any_block_is_that_of_the_merged_weight(tmp_path: Path) -> None:
    """A rank reads its rows, or columns, of a weight; the block's own rows of B and columns of A belong to it."""
    tensors = written(tmp_path / "step_00000001", LORA)
    reader = MergedReader(tmp_path / "step_00000001")
    merged = tensors["a.q_proj.weight"] + 1.5 * tensors["a.q_proj.lora_B"] @ tensors["a.q_proj.lora_A"]
    assert dict(reader.shapes) == {"a.q_proj.weight": (7, 5), "a.q_proj.bias": (7,), "a.norm.weight": (5,)}
    for block in ((slice(0, 7), slice(0, 5)), (slice(3, 6), slice(0, 5)), (slice(1, 2), slice(2, 5))):
        assert torch.allclose(reader.read("a.q_proj.weight", block), merged[block], atol=1e-6)
        assert reader.view("a.q_proj.weight", block) is None
    for name in ("a.q_proj.bias", "a.norm.weight"):
        assert torch.equal(reader.read(name), tensors[name])


@pytest.mark.parametrize(
    ("adapter", "sentence"),
    [
        (None, "neither rank nor alpha"),
        (LORA | {"rank": "many"}, "adapter.rank"),
        (LORA | {"more": 1}, "adapter.more"),
        ("lora", "describes no adapters"),
    ],
)
def test_a_manifest_that_describes_no_adapters_is_refused(tmp_path: Path, adapter: Any, sentence: str) -> None:
    """Whoever made it up: the adapters must not be left out without a word."""
    written(tmp_path / "step_00000001", adapter)
    with pytest.raises(CheckpointError, match=sentence):
        MergedReader(tmp_path / "step_00000001")


@pytest.mark.parametrize(
    ("adapter", "left_out", "sentence"),
    [
        (LORA, ["a.q_proj.lora_B"], "lacks a.q_proj.lora_B"),
        (LORA, ["a.q_proj.lora_A", "a.q_proj.lora_B"], "lacks a.q_proj.lora_A"),
        (LORA | {"targets": ["v_proj"]}, [], "holds, beside .* a.q_proj.lora_A"),
    ],
)
def test_adapters_other_than_those_of_the_manifest_are_refused(
    tmp_path: Path, adapter: dict[str, Any], left_out: list[str], sentence: str
) -> None:
    """A weight without one of its factors would be read as it was before training."""
    shapes = {name: shape for name, shape in SHAPES.items() if name not in left_out}
    written(tmp_path / "step_00000001", adapter, shapes)
    with pytest.raises(CheckpointError, match=sentence):
        MergedReader(tmp_path / "step_00000001")
