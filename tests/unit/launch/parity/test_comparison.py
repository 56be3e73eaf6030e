"""Errors, bounds and factors of made-up observations, and copies that differ between ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from launch.parity.comparison import (
    ADAMW_WEIGHT,
    FLOAT8_BOUNDS,
    OF_TRANSFORMERS,
    TOLERANCES,
    ReferenceAnswer,
    compare,
    compare_float8,
    reduction_bound,
    reduction_deviations,
    worst,
)
from launch.parity.observations import REDUCTION, ArrayBlock, Observations, Quantity, assemble, by_step
from megalite.config.sections import PrecisionConfig

GRADIENT, LOSS, NORM, TOKENS, WEIGHT, MOMENT = (
    Quantity("adamw", kind) for kind in ("gradient", "loss", "gradient norm", "token loss", "weight", "exp_avg")
)
NAMES = ("model.layers.0.mlp.weight", "model.norm.weight")


def observations(seed: int = 0, noise: float = 0.0) -> Observations:
    draw = np.random.default_rng(seed)
    arrays = {name: draw.standard_normal((5, 7)) for name in NAMES}
    other = np.random.default_rng(seed + 1)
    noisy = {name: value + noise * other.standard_normal(value.shape) for name, value in arrays.items()}
    tokens = {"step 1": np.full(20, 4.0) + noise, "step 2": np.full(20, 3.0)}
    norms, losses = by_step([5.0]), by_step([4.0 + noise, 3.0])
    return {TOKENS: tokens, LOSS: losses, NORM: norms, GRADIENT: noisy, WEIGHT: dict(noisy)}


def answer(theirs_noise: float = 0.0, dtype: str = "fp32") -> ReferenceAnswer:
    start = {name: np.zeros((5, 7)) for name in NAMES}
    return ReferenceAnswer(dtype, observations(), observations(noise=theirs_noise), start)


def test_the_truth_passes_with_no_error() -> None:
    assert all(found.error == 0 and found.passed for found in compare(observations(), answer()))


@pytest.mark.parametrize(("kind", "tolerance"), [("loss", 2e-5), ("gradient", 1e-5)])
def test_a_bound_holds_from_both_sides(kind: str, tolerance: float) -> None:
    assert TOLERANCES[kind] == tolerance
    quantity = Quantity("adamw", kind)
    for factor in (0.9, 1.1):
        seen = observations()
        name = next(iter(seen[quantity]))
        value = seen[quantity][name].copy()
        largest = np.unravel_index(np.abs(value).argmax(), value.shape)
        value[largest] *= 1 + factor * tolerance
        seen[quantity][name] = value
        assert worst(compare(seen, answer()), kind).passed == (factor < 1)


def test_a_model_that_is_hard_for_transformers_is_hard_for_us() -> None:
    seen = observations(noise=1e-4)
    assert not worst(compare(seen, answer()), "gradient").passed
    assert worst(compare(seen, answer(theirs_noise=1e-4)), "gradient").passed
    three_times = observations(noise=1e-4 * OF_TRANSFORMERS * 1.1)
    assert not worst(compare(three_times, answer(theirs_noise=1e-4)), "gradient").passed


def test_half_precision_is_held_to_transformers_error_in_that_precision() -> None:
    assert all(found.passed for found in compare(observations(noise=1.9e-2), answer(1e-2, "bf16")))
    assert not worst(compare(observations(noise=2.1e-2), answer(1e-2, "bf16")), "gradient").passed


def test_no_bound_is_so_wide_that_weights_may_stay_where_they_were() -> None:
    start = {name: np.zeros((5, 7)) for name in NAMES}
    hopeless = ReferenceAnswer("fp32", observations(), observations(noise=2.0), start)
    seen = observations()
    seen[WEIGHT] = start
    assert not worst(compare(seen, hopeless), "weight").passed


def test_a_stranger_among_the_parameters_fails() -> None:
    seen = observations()
    seen[GRADIENT]["model.layers.9.mlp.weight"] = np.zeros(3)
    assert not worst(compare(seen, answer()), "gradient").passed


def test_half_precision_asks_nothing_of_a_gradient_that_is_noise() -> None:
    """Its AdamW weight moves by the sign of rounding; its gradient is held to what transformers is off elsewhere."""
    truth, theirs, seen = observations(), observations(noise=1e-2), observations(noise=1e-2)
    for observed, value in ((truth, 1e-6), (theirs, 2e-6), (seen, 9e-6)):
        observed[GRADIENT]["k_proj.bias"] = observed[WEIGHT]["k_proj.bias"] = np.full(7, value)
    seen[WEIGHT]["k_proj.bias"] = np.full(7, 50.0)
    asked = ReferenceAnswer("bf16", truth, theirs, answer().start | {"k_proj.bias": np.zeros(7)})
    assert all(found.passed for found in compare(seen, asked))


def test_weights_are_measured_by_how_far_they_moved() -> None:
    start = {name: value + 1e-3 for name, value in observations()[WEIGHT].items()}
    asked = ReferenceAnswer("fp32", observations(), observations(), start)
    seen = observations()
    seen[WEIGHT] = {name: value + 2e-3 * ADAMW_WEIGHT for name, value in seen[WEIGHT].items()}
    assert not worst(compare(seen, asked), "weight").passed


def test_what_is_missing_or_no_number_fails() -> None:
    seen = observations()
    del seen[GRADIENT][NAMES[0]]
    seen[WEIGHT] = {name: np.where(value > 2, np.nan, value) for name, value in seen[WEIGHT].items()}
    seen[WEIGHT][NAMES[0]][0, 0] = np.nan
    findings = compare(seen, answer())
    assert not worst(findings, "gradient").passed and not worst(findings, "weight").passed
    seen[LOSS] = by_step([float("inf"), 3.0])
    assert worst(compare(seen, answer()), "loss").excess == np.inf


@pytest.mark.parametrize("factor", [2.0, 3.0, 0.5, 1 / 6])
def test_clean_factors_are_recognised(factor: float) -> None:
    seen = observations()
    seen[GRADIENT] = {name: value * factor for name, value in seen[GRADIENT].items()}
    assert worst(compare(seen, answer()), "gradient").ratio == pytest.approx(factor)


@pytest.mark.parametrize("factor", [1.3, 0.7, -1.0])
def test_other_factors_are_not(factor: float) -> None:
    seen = observations()
    seen[GRADIENT] = {name: value * factor for name, value in seen[GRADIENT].items()}
    assert worst(compare(seen, answer()), "gradient").ratio is None


def test_a_gradient_that_is_zero_but_for_rounding_is_measured_by_the_others() -> None:
    """A key's bias moves all scores of a query alike, and softmax does not see it."""
    truth, theirs = observations(), observations()
    truth[GRADIENT]["k_proj.bias"] = np.zeros(7)
    theirs[GRADIENT]["k_proj.bias"] = np.full(7, 1e-9)
    seen = observations()
    seen[GRADIENT]["k_proj.bias"] = np.full(7, 5e-9)
    for observed in (truth, theirs, seen):
        del observed[WEIGHT]
    asked = ReferenceAnswer("fp32", truth, theirs, {})
    assert all(found.passed for found in compare(seen, asked))
    seen[GRADIENT]["k_proj.bias"] = np.full(7, 1e-5)
    assert not worst(compare(seen, asked), "gradient").passed


@pytest.mark.parametrize(("moment", "passes"), [(0.0, True), (1e-5, False)])
def test_a_weight_without_a_gradient_that_adamw_moves_by_rounding_fails_nobody(moment: float, passes: bool) -> None:
    """Queries and keys of a window of one: AdamW divides rounding by itself. Of a weight that learns it is an error."""
    truth, seen = observations(), observations()
    for observed, moved in ((truth, 1e-4), (seen, 3e-3)):
        observed[WEIGHT]["q_proj.weight"] = np.full(7, moved)
        observed[MOMENT] = {NAMES[0]: np.full(7, 1.0), "q_proj.weight": np.full(7, moment)}
    asked = ReferenceAnswer("fp32", truth, truth, answer().start | {"q_proj.weight": np.zeros(7)})
    assert worst(compare(seen, asked), "weight").passed == passes
    seen[WEIGHT]["q_proj.weight"] = np.full(7, 0.1)  # a decay that should not be
    assert not worst(compare(seen, asked), "weight").passed


def block(value: float, where: slice) -> ArrayBlock:
    return ArrayBlock(GRADIENT, "w", (4,), (where,), np.full(where.stop - where.start, value, np.float32))


def test_blocks_make_a_whole_and_copies_must_agree() -> None:
    seen, disagreements = assemble([[block(1, slice(0, 2))], [block(2, slice(2, 4))], [block(2, slice(2, 4))]])
    assert seen[GRADIENT]["w"].tolist() == [1, 1, 2, 2] and not disagreements
    seen, disagreements = assemble([[block(1, slice(0, 2))], [block(1 + 2**-20, slice(1, 3))]])
    assert disagreements == ["adamw gradient of w differs between ranks 0 and 1 by 9.5e-07"], "not one bit"
    assert np.isnan(seen[GRADIENT]["w"][3]), "what no rank holds is no number"


@pytest.mark.parametrize("micro_batches", [1, 6, 48])
def test_rounding_of_a_sum_stays_below_its_bound_in_any_order(micro_batches: int) -> None:
    """Measured on sums of numbers that cancel, pairwise and one by one; a sum in bf16 is above that of fp32."""
    draw = np.random.default_rng(micro_batches)
    terms = draw.standard_normal((2 * micro_batches, 20_000)).astype(np.float32)
    terms[1::2] *= -0.99
    exact, size = terms.sum(axis=0, dtype=np.float64), np.abs(terms).sum(axis=0, dtype=np.float64)
    bound = reduction_bound(PrecisionConfig(), micro_batches)
    one_by_one = np.zeros(terms.shape[1], dtype=np.float32)
    for term in draw.permutation(terms):
        one_by_one += term / np.float32(3)
    others = terms / np.float32(3)
    while len(others) > 1:
        others = np.concatenate((others[:-1:2] + others[1::2], others[len(others) // 2 * 2 :]))
    for found in (one_by_one, others[0]):
        error = (np.abs(found - exact / 3) / (size / 3)).max()
        assert 0 < error < bound, f"{error:.1e} of {bound:.1e}"
    in_bf16 = (np.abs(torch.from_numpy(one_by_one).bfloat16().double().numpy() - exact / 3) / (size / 3)).max()
    coarse = reduction_bound(PrecisionConfig(gradient_reduction_dtype="bf16"), micro_batches)
    assert bound < in_bf16 < coarse


def test_a_rank_without_the_parameter_says_nothing_and_one_with_nan_fails() -> None:
    quantity = Quantity("adamw", REDUCTION)
    seen = {quantity: {"a": np.array([np.nan, 1e-8]), "b": np.array([np.inf, 0.0])}}
    a, b = reduction_deviations(seen, 1e-6)
    assert a.passed and a.error == 1e-8 and not b.passed


def test_float8_is_held_by_cosine_and_norm() -> None:
    """A gradient that is twice as large has the same direction, so its norm shows it; one that is reordered has not."""
    exact = answer(dtype="float8")
    assert all(found.passed for found in compare_float8(observations(noise=0.03), exact))
    for kind, wrong in (("gradient", lambda value: value[::-1]), ("gradient norm", lambda value: 2 * value)):
        seen, quantity = observations(), Quantity("adamw", kind)
        seen[quantity] = {name: wrong(value) for name, value in seen[quantity].items()}
        found = worst(compare_float8(seen, exact))
        assert found.quantity == quantity and not found.passed and found.bound == FLOAT8_BOUNDS[kind]
    seen = observations()
    del seen[GRADIENT][NAMES[0]]
    assert not worst(compare_float8(seen, exact)).passed


def test_float8_may_be_twice_as_far_as_transformers_in_float8() -> None:
    """Twice the rounding is four times 1 - cosine."""
    theirs = answer(0.2, dtype="float8")
    bounds = {found.name: found.bound for found in compare_float8(observations(), theirs) if found.quantity == GRADIENT}
    close = compare_float8(observations(noise=0.2), answer(dtype="float8"))
    errors = {found.name: found.error for found in close if found.quantity == GRADIENT}
    assert bounds == pytest.approx({name: 4 * error for name, error in errors.items()})
