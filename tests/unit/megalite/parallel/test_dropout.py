"""The hash behind dropout is as good as chance where a mask could show that it is not, and knows no layout."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

import megalite.parallel.dropout as dropout_module
from megalite.parallel.collectives import ContextParallel, TensorParallel
from megalite.parallel.dropout import Dropout

SERIAL = TensorParallel()
PATH = "model.layers.3.self_attn.dropout"
HEADS, SEQ, HIDDEN = 4, 128, 96


def dropout(rate: float, path: str = PATH, seed: int = 0, tp: TensorParallel = SERIAL) -> Dropout:
    module = Dropout(rate, tp)
    module.set_site(seed, path)
    return module


def mask(module: Dropout, samples: Tensor) -> Tensor:
    """1 where a number of `[samples, SEQ, HIDDEN]` was kept."""
    return (module(torch.ones(len(samples), SEQ, HIDDEN), samples) > 0).double()


def heads_mask(module: Dropout, samples: Tensor, heads: int = HEADS) -> Tensor:
    """1 where a probability of `[samples, heads, SEQ, SEQ]` was kept."""
    ones = torch.ones(len(samples), heads, SEQ, SEQ)
    return (module.probabilities(ones, samples, module.tp.rank * heads, 0) > 0).double()


def assert_like_chance(products: Tensor, variance: float, what: str) -> None:
    """Independent products have mean 0; five standard errors are exceeded once in two million draws."""
    z = float(products.sum() / (variance * products.numel()) ** 0.5)
    assert abs(z) < 5, f"{what}: {z:.1f} standard errors"


@pytest.mark.parametrize("rate", [1e-3, 0.1, 0.5, 0.97])
def test_the_kept_fraction_is_the_rate_and_the_kept_are_scaled_by_it(rate: float) -> None:
    x = torch.full((64, SEQ, HIDDEN), 3.0)
    y = dropout(rate)(x.clone(), torch.arange(64))
    kept = y != 0
    torch.testing.assert_close(y[kept], x[kept] / (1 - rate))
    assert_like_chance(kept.double() - (1 - rate), rate * (1 - rate), f"rate {rate}")


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_numbers_near_one_another_are_dropped_independently(rate: float) -> None:
    """A weak hash shows between neighbours, at powers of two, and in blocks of four."""
    z, variance = heads_mask(dropout(rate), torch.arange(16)) - (1 - rate), rate * (1 - rate)
    for lag in (1, 2, 3, 4, 8, 16, 31, 32, 64, 127):
        assert_like_chance(z[..., lag:] * z[..., :-lag], variance**2, f"columns {lag} apart")
        assert_like_chance(z[..., lag:, :] * z[..., :-lag, :], variance**2, f"rows {lag} apart")
    assert_like_chance(z[:, 1:] * z[:, :-1], variance**2, "neighbouring heads")
    assert_like_chance(z[1:] * z[:-1], variance**2, "neighbouring samples")
    blocks = z[..., 1:, 1:] * z[..., 1:, :-1] * z[..., :-1, 1:] * z[..., :-1, :-1]
    assert_like_chance(blocks, variance**4, "blocks of four")


def test_sites_seeds_and_samples_have_masks_of_their_own() -> None:
    """Samples beyond 32 bits too: a run may see more than 2^32."""
    near, far = torch.arange(8), torch.arange(8) + 2**32
    masks = {
        "a": mask(dropout(0.3), near),
        "another layer": mask(dropout(0.3, "model.layers.4.self_attn.dropout"), near),
        "another seed": mask(dropout(0.3, seed=1), near),
        "other samples": mask(dropout(0.3), near + 8),
        "far samples": mask(dropout(0.3), far),
        "one sample on": mask(dropout(0.3), near + 1),
    }
    for (one, x), (other, y) in itertools.combinations(masks.items(), 2):
        assert_like_chance((x - 0.7) * (y - 0.7), (0.3 * 0.7) ** 2, f"{one} and {other}")


def test_a_mask_depends_on_the_sample_and_not_on_its_place_in_the_batch() -> None:
    module, order = dropout(0.3), torch.tensor([5, 2, 7])
    whole = mask(module, torch.arange(8))
    assert torch.equal(mask(module, order), whole[order])
    whole = heads_mask(module, torch.arange(8))
    assert torch.equal(heads_mask(module, order), whole[order])


@pytest.mark.parametrize(("words", "passes"), [(1 << 25, 1), (HIDDEN * SEQ, 8), (5 * HIDDEN + 1, 205), (1, 8 * SEQ)])
def test_passes_are_few_and_do_not_show(words: int, passes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight samples at once where memory suffices: each sample for itself cost a GPU ten launches."""
    made, expected = [], mask(dropout(0.3), torch.arange(8))
    in_words = dropout_module._words
    monkeypatch.setitem(dropout_module.WORDS_AT_ONCE, "cpu", words)
    monkeypatch.setattr(dropout_module, "_words", lambda keys, count: made.append(keys) or in_words(keys, count))
    assert torch.equal(mask(dropout(0.3), torch.arange(8)), expected)
    assert len(made) == passes


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_slices_of_the_serial_mask(size: int) -> None:
    samples = torch.arange(3)
    whole, whole_heads = mask(dropout(0.3), samples), heads_mask(dropout(0.3), samples)
    for rank in range(size):
        cut = TensorParallel(size, rank, None, sequence_parallel=True)
        mine = dropout(0.3, tp=cut)(torch.ones(3, SEQ // size, HIDDEN), samples) > 0
        assert torch.equal(mine.double(), whole.chunk(size, dim=1)[rank])
        # whole sequences between the parallel parts: all ranks hold the same hidden states
        uncut = TensorParallel(size, rank, None, sequence_parallel=False)
        assert torch.equal(mask(dropout(0.3, tp=uncut), samples), whole)
        heads = heads_mask(dropout(0.3, tp=uncut), samples, HEADS // size)
        assert torch.equal(heads, whole_heads.chunk(size, dim=1)[rank])


@pytest.mark.parametrize("tp_size", [1, 2])
def test_ranks_that_share_sequences_hold_their_parts_of_the_serial_mask(tp_size: int) -> None:
    samples = torch.arange(3)
    whole = mask(dropout(0.3), samples)
    for rank, tensor_rank in itertools.product(range(4), range(tp_size)):
        tp = TensorParallel(tp_size, tensor_rank, None, tp_size > 1, ContextParallel(4, rank))
        mine = dropout(0.3, tp=tp)(torch.ones(3, SEQ // 4 // tp_size, HIDDEN), samples) > 0
        of_rank = torch.cat([whole.chunk(8, dim=1)[rank], whole.chunk(8, dim=1)[7 - rank]], dim=1)
        assert torch.equal(mine.double(), of_rank.chunk(tp_size, dim=1)[tensor_rank])
    of_queries = dropout(0.3).probabilities(torch.ones(3, 2, 5, 70), samples, 1, 65) > 0
    assert torch.equal(of_queries.double(), heads_mask(dropout(0.3), samples)[:, 1:3, 65:70, :70])


def test_outside_training_and_at_zero_nothing_is_computed() -> None:
    x = torch.ones(2, 3, 4)
    assert dropout(0.0)(x, None) is x
    assert dropout(0.5).eval()(x, None) is x
    with pytest.raises(AssertionError, match="sample ids"):
        dropout(0.5)(x, None)


def test_the_masks_of_a_seed_never_change() -> None:
    """A run that is resumed by another version of this code, or on a GPU, goes on with the same masks."""
    kept = mask(dropout(0.5), torch.tensor([123_456_789_012]))[0, 77, :32].int().tolist()
    assert "".join(map(str, kept)) == "11001101011011010011101111111101"
