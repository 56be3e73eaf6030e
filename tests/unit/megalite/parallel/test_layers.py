from __future__ import annotations

import numpy as np
import pytest
import torch

from megalite.parallel.layers import BLOCK_ROWS, initialize_
from megalite.parallel.shard import Shard

# rows that cross the drawing blocks in the middle of a rank's share, and divide by no tp here
SECTIONS = (("q_proj", 2 * BLOCK_ROWS + 90), ("k_proj", 7), ("v_proj", BLOCK_ROWS))


def drawn(tp: int, dim: int, seed: int = 3, name: str = "layer.fused.weight") -> dict[str, np.ndarray]:
    """The global tensors as all ranks together hold them; asserts that padding is zero."""
    total, whole = sum(size for _, size in SECTIONS), {}
    for rank in range(tp):
        shape = (total, 5) if dim == 0 else (BLOCK_ROWS + 3, total)
        shard = Shard(shape, dim, SECTIONS, tp, rank, name=name)
        parameter = torch.full(shard.local_shape, float("nan"))
        initialize_(parameter, shard, seed, std=0.02)
        for piece in shard.pieces():
            target = whole.setdefault(piece.name, np.full(piece.shape, np.nan, dtype=np.float32))
            target[piece.source] = parameter[piece.target].numpy()
            parameter[piece.target] = 0.0
        assert (parameter == 0.0).all(), f"rank {rank} of {tp}: padding is not zero"
    return whole


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("tp", [2, 3, 4])
def test_every_layout_starts_from_the_same_weights_to_the_bit(tp: int, dim: int) -> None:
    serial, cut = drawn(1, dim), drawn(tp, dim)
    assert serial.keys() == cut.keys() == {"layer.q_proj.weight", "layer.k_proj.weight", "layer.v_proj.weight"}
    for name, expected in serial.items():
        np.testing.assert_array_equal(cut[name], expected, err_msg=name)


def test_weights_are_normal_and_depend_on_seed_name_and_place() -> None:
    weights = drawn(1, 0)
    q = weights["layer.q_proj.weight"]
    # 3000 draws: the mean is within 5 standard errors, the deviation within 10 %
    assert abs(q.mean()) < 5 * 0.02 / np.sqrt(q.size)
    assert abs(q.std() / 0.02 - 1) < 0.1
    first_block, second_block = q[:BLOCK_ROWS], q[BLOCK_ROWS : 2 * BLOCK_ROWS]
    others = [
        second_block,
        weights["layer.v_proj.weight"],
        drawn(1, 0, seed=4)["layer.q_proj.weight"][:BLOCK_ROWS],
        drawn(1, 0, name="other.fused.weight")["other.q_proj.weight"][:BLOCK_ROWS],
    ]
    for other in others:
        assert abs(np.corrcoef(first_block.ravel(), other.ravel())[0, 1]) < 0.15


@pytest.mark.parametrize(("initializer", "value"), [("ones", 1.0), ("zeros", 0.0)])
def test_norms_start_at_one_and_biases_at_zero(initializer: str, value: float) -> None:
    parameter = torch.full((9,), float("nan"))
    initialize_(parameter, Shard((9,), None, (("", 9),), 2, 1, initializer), seed=0, std=0.02)  # type: ignore[arg-type]
    assert (parameter == value).all()
