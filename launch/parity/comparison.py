"""Compares the observations of a layout with the reference: the error of every array, and its bound.

In: observations. Out: a `Deviation` per array. Errors are measured against float64; a bound is never tighter than twice
the error of transformers itself in the same format, so that an ill-conditioned model does not fail.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from launch.parity.observations import OF_REFERENCES, REDUCTION, SOURCE_LOSS, TOKEN_LOSS, Observations, Quantity
from launch.reference import LOGITS_TOLERANCE
from megalite.config.sections import Dtype, PrecisionConfig

LATER_GRADIENT = "later gradient"  # of the second step or a later one
TOLERANCES = {
    "loss": 2e-5,
    "evaluation loss": 2e-5,
    "gradient norm": 2e-5,
    "activation": 1e-5,
    "logits": LOGITS_TOLERANCE,
    "gradient": 1e-5,
    SOURCE_LOSS: 2e-5,
    # these accumulate the differences of several steps, and AdamW divides small gradients by themselves
    LATER_GRADIENT: 5e-5,
    "exp_avg": 1e-4,
    "exp_avg_sq": 2e-4,
    "momentum_buffer": 1e-4,
    "weight": 1e-4,
}
"""In float32. Scalars: relative. Arrays: relative to their largest entry; weights: to their largest change."""
MUON_TOLERANCES = {
    "loss": 1e-4,
    "evaluation loss": 1e-4,
    "gradient norm": 5e-4,
    SOURCE_LOSS: 1e-4,
    LATER_GRADIENT: 2e-3,
    "exp_avg": 2e-3,
    "exp_avg_sq": 4e-3,
    "momentum_buffer": 2e-3,
    "weight": 5e-2,
}
"""Those of a training with Muon, in every format: it rounds its update to bf16, 2^-8 of an entry where an error of
float32 decides the last bit, and in ten products that multiply small singular values by up to 500. float32 on one
process is up to 1.6e-2 from float64; a matrix that is cut or joined with another one is wrong by 0.3 and more."""
BF16_MOMENTS = 2.0**-6  # two units in the last place: an error of float32 may decide a rounding in each step
FLOAT8_BOUNDS = {"loss": 1e-2, "evaluation loss": 1e-2, "gradient": 1e-2, "gradient norm": 5e-2}
"""Bounds of a training with products in float8, whose operands are rounded by up to 6 %; a gradient's error is 1 - its
cosine."""
ADAMW_WEIGHT = 1e-2  # an entry whose gradient is only rounding moves by a large part of the learning rate
OF_TRANSFORMERS = 2.0
MOSTLY_ROUNDING = 0.1  # a half-precision gradient with this error in transformers is only compared in float32
WIDEST_BOUND = 0.9  # the widest bound: a weight that never moved has an error of 1
FLOOR = 1e-2  # smallest scale of an array, relative to the largest of its kind: a key's bias has gradient zero
SCALARS = ("loss", "evaluation loss", "gradient norm", SOURCE_LOSS)
SQUARED = ("exp_avg_sq",)
MOMENT_KINDS = ("exp_avg", "exp_avg_sq", "momentum_buffer")
OF_PARAMETERS = ("gradient", "weight", *MOMENT_KINDS)
ADAMW, MUON = Quantity("adamw", "weight"), "muon"  # a quantity, a training
NO_GRADIENT = 1e-9  # relative to the largest first moment: less is float64 rounding of a zero gradient


UNIT_ROUNDOFF: dict[Dtype, float] = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
OTHER_ROUNDINGS = 3  # DeepSpeed divides by the replicas before a sum or after it; the loss scale is divided out


@dataclass(frozen=True)
class Deviation:
    """The error of one array, and its bound."""

    quantity: Quantity
    name: str
    error: float
    bound: float
    ratio: float | None = None  # the array is this multiple of the truth, if that is a whole number or its inverse

    @property
    def passed(self) -> bool:
        return self.error <= self.bound  # NaN is not

    @property
    def excess(self) -> float:
        """The error in units of the bound."""
        return self.error / self.bound if np.isfinite(self.error) else np.inf


@dataclass(frozen=True)
class ReferenceAnswer:
    """The reference's observations in one format and in float64 (`truth`), and the weights before training."""

    dtype: str
    truth: Observations
    theirs: Observations
    start: Mapping[str, np.ndarray]
    moments_dtype: str = "fp32"


def compare(seen: Observations, answer: ReferenceAnswer) -> list[Deviation]:
    """Returns the deviation of every array of the truth, in the order of computation."""
    pooled, noise, still = _pooled_errors(answer), _noise(answer), _without_gradient(answer)
    deviations = []
    for quantity, arrays in answer.truth.items():
        # in 16 bits the error of a mean over few tokens is random, and sources are no matter of the format
        if quantity.kind in OF_REFERENCES or (quantity.kind == SOURCE_LOSS and answer.dtype != "fp32"):
            continue
        largest = max(_size(_measured(quantity, name, value, answer), answer) for name, value in arrays.items())
        floor = largest * (FLOOR**2 if quantity.kind in SQUARED else FLOOR)
        unknown = set(seen.get(quantity, {})) - set(arrays) if quantity.kind in OF_PARAMETERS else set()
        deviations += [Deviation(quantity, name, float("nan"), 0.0) for name in sorted(unknown)]
        for name, value in arrays.items():
            if (quantity.training, name) in noise:
                continue
            truth = _measured(quantity, name, value, answer)
            mine = seen.get(quantity, {}).get(name)
            if mine is None or mine.shape != value.shape:
                deviations.append(Deviation(quantity, name, float("nan"), 0.0))
                continue
            mine = _measured(quantity, name, mine, answer)
            theirs = _measured(quantity, name, answer.theirs[quantity][name], answer)
            scale = max(_size(truth, answer), largest if quantity == ADAMW and name in still else floor) or 1.0
            if quantity.kind in SCALARS:
                error, their_error = _relative(mine, truth), pooled[quantity]
            else:
                error = _size(mine - truth, answer) / scale
                their_error = max(_size(theirs - truth, answer) / scale, pooled.get(quantity, 0.0))
            tolerance = _tolerance(quantity, value, scale, answer)
            bound = min(WIDEST_BOUND, max(tolerance, OF_TRANSFORMERS * their_error))
            ratio = None if error <= bound else _clean_ratio(mine, truth)
            deviations.append(Deviation(quantity, name, error, bound, ratio))
    return deviations


def compare_float8(seen: Observations, answer: ReferenceAnswer) -> list[Deviation]:
    """Returns the deviations of losses and gradients with products in float8.

    The error of a gradient is 1 - its cosine with the truth, which grows with the square of rounding; its size shows in
    the norm. A random small model amplifies rounding, so that a bound is at least twice the error of transformers with
    the same products, twice in rounding for a cosine.
    """
    pooled, noise = _pooled_errors(answer), _noise(answer)
    deviations: list[Deviation] = []
    for quantity, arrays in answer.truth.items():
        for name, value in arrays.items() if quantity.kind in FLOAT8_BOUNDS else ():
            if (quantity.training, name) in noise:
                continue
            mine, is_gradient = seen.get(quantity, {}).get(name), quantity.kind == "gradient"
            measure = _angle if is_gradient else _relative
            their_error = measure(answer.theirs[quantity][name], value) if is_gradient else pooled[quantity]
            error = measure(mine, value) if mine is not None and mine.shape == value.shape else float("nan")
            widest = OF_TRANSFORMERS**2 * their_error if is_gradient else OF_TRANSFORMERS * their_error
            bound = min(WIDEST_BOUND, max(FLOAT8_BOUNDS[quantity.kind], widest))
            deviations.append(Deviation(quantity, name, error, bound))
    return deviations


def reduction_bound(precision: PrecisionConfig, micro_batches: int) -> float:
    """Returns the largest error of a mean over so many micro-batches, in the formats in which the config sums.

    In whatever order n terms are added, the error is at most `(n-1)u / (1 - (n-1)u)` of the sum of their absolute
    values, where u is the unit roundoff (Higham 2002, Accuracy and Stability of Numerical Algorithms, section 4.2).
    """
    unit = max(UNIT_ROUNDOFF[precision.gradient_accumulation_dtype], UNIT_ROUNDOFF[precision.reduction_dtype])
    terms = 2 * micro_batches  # a tied weight has two gradients in each
    rounded = (terms - 1 + OTHER_ROUNDINGS) * unit
    return rounded / (1 - rounded)


def reduction_deviations(seen: Observations, bound: float) -> list[Deviation]:
    """Returns the deviation of each parameter's mean gradient from its micro-batches' gradients on the same ranks."""
    return [
        Deviation(quantity, name, float(np.nanmax(error_by_rank)), bound)  # NaN: a rank without this parameter
        for quantity, parameters in seen.items()
        if quantity.kind == REDUCTION
        for name, error_by_rank in parameters.items()
    ]


def _measured(quantity: Quantity, name: str, value: np.ndarray, answer: ReferenceAnswer) -> np.ndarray:
    """Returns the array in float64; of weights their change."""
    value = value.astype(np.float64)
    return value - answer.start[name] if quantity.kind == "weight" else value


def _size(value: np.ndarray, answer: ReferenceAnswer) -> float:
    """Returns the largest entry in float32, and the 2-norm in half precision, whose single entries are noise."""
    if answer.dtype == "fp32":
        return float(np.abs(value).max(initial=0.0))
    return float(np.linalg.norm(value))


def _relative(mine: np.ndarray, truth: np.ndarray) -> float:
    return float((np.abs(mine - truth) / np.abs(truth)).max())


def _angle(mine: np.ndarray, truth: np.ndarray) -> float:
    """Returns 1 - the cosine between two arrays."""
    mine, truth = mine.astype(np.float64), truth.astype(np.float64)
    size = np.sqrt(_square(mine) * _square(truth))
    return 1.0 - (float((mine * truth).sum() / size) if size else 0.0)


def _tolerance(quantity: Quantity, value: np.ndarray, scale: float, answer: ReferenceAnswer) -> float:
    if quantity.kind in MOMENT_KINDS and answer.moments_dtype == "bf16":
        return BF16_MOMENTS
    kind = LATER_GRADIENT if quantity.kind == "gradient" and quantity.step > 1 else quantity.kind
    if quantity.training == MUON and kind in MUON_TOLERANCES:
        return MUON_TOLERANCES[kind]
    if kind != "weight":
        return TOLERANCES[kind]
    if quantity == ADAMW:
        return ADAMW_WEIGHT
    # each side rounds `weight - lr * gradient` at every step
    steps = len(answer.truth[Quantity(quantity.training, "loss")])
    return TOLERANCES["weight"] + steps * float(np.finfo(np.float32).eps) * float(np.abs(value).max()) / scale


def _pooled_errors(answer: ReferenceAnswer) -> dict[Quantity, float]:
    """Returns transformers' error for quantities of which a single error is random, pooled over many.

    Scalars in float32 are pooled by kind. In half precision a loss may be off by its tokens' mean absolute error, a
    norm by the error of its gradients (|mean e| <= mean |e|, | |a| - |b| | <= |a - b|), and arrays of one kind by the
    largest error among them: in an array of few entries the error of a single run is random.
    """
    if answer.dtype == "fp32":
        errors = dict.fromkeys(SCALARS, 0.0)
        of_scalars = {quantity: arrays for quantity, arrays in answer.truth.items() if quantity.kind in SCALARS}
        for quantity, arrays in of_scalars.items():
            found = (_relative(answer.theirs[quantity][name], value) for name, value in arrays.items())
            errors[quantity.kind] = max(errors[quantity.kind], *found)
        return {quantity: errors[quantity.kind] for quantity in of_scalars}
    pooled: dict[Quantity, float] = {}
    noise = _noise(answer)
    for quantity in answer.truth:
        training, kind, step = quantity
        truth, theirs = answer.truth[quantity], answer.theirs[quantity]
        if kind == TOKEN_LOSS:
            error = max(float(np.abs(theirs[n] - v).mean() / np.abs(v.mean())) for n, v in truth.items())
            pooled |= {Quantity(training, "loss"): error, Quantity(training, "evaluation loss"): error}
        elif kind == "gradient" and step == 1:
            squares = [(_square(theirs[name] - value), _square(value)) for name, value in truth.items()]
            difference, size = np.sqrt(np.sum(squares, axis=0))
            norm = Quantity(training, "gradient norm")
            scalars = [_relative(answer.theirs[norm][step], value) for step, value in answer.truth[norm].items()]
            pooled[norm] = max(float(difference / size), *scalars)
        if kind in OF_PARAMETERS:
            start = answer.start if kind == "weight" else dict.fromkeys(truth, 0.0)
            known = {name: value for name, value in truth.items() if (training, name) not in noise}
            errors_of = (_relative_size(theirs[name] - value, value - start[name]) for name, value in known.items())
            pooled[quantity] = max(errors_of, default=0.0)
    return pooled


def _noise(answer: ReferenceAnswer) -> set[tuple[str, str]]:
    """Returns (training, parameter) whose half-precision gradient is mostly rounding, such as that of a key's bias. In
    float8, where a tenth is no exception, that is only what is tiny."""
    if answer.dtype == "fp32":
        return set()
    most = np.inf if answer.dtype == "float8" else MOSTLY_ROUNDING
    noise = set()
    for quantity, gradients in answer.truth.items():
        if quantity.kind == "gradient":
            largest = max(float(np.linalg.norm(gradient)) for gradient in gradients.values())
            for name, gradient in gradients.items():
                is_small = np.linalg.norm(gradient) < FLOOR * largest
                if is_small or _relative_size(answer.theirs[quantity][name] - gradient, gradient) > most:
                    noise.add((quantity.training, name))
    return noise


def _without_gradient(answer: ReferenceAnswer) -> set[str]:
    """Returns parameters that AdamW moves only by decay and rounding: a key's bias, q and k of a window of one."""
    moments = answer.truth.get(Quantity(ADAMW.training, "exp_avg"), {})
    largest = max((float(np.abs(moment).max(initial=0.0)) for moment in moments.values()), default=0.0)
    return {name for name, moment in moments.items() if np.abs(moment).max(initial=0.0) < NO_GRADIENT * largest}


def _relative_size(difference: np.ndarray, value: np.ndarray) -> float:
    return float(np.linalg.norm(difference) / (np.linalg.norm(value) or 1.0))


def _square(value: np.ndarray) -> float:
    return float(np.square(value, dtype=np.float64).sum())


def _clean_ratio(mine: np.ndarray, truth: np.ndarray) -> float | None:
    """Returns k or 1/k if `mine` is that multiple of the truth for a whole number k >= 2."""
    if not np.isfinite(mine).all() or not _square(truth):
        return None
    ratio = float((mine * truth).sum() / _square(truth))
    rest = np.sqrt(_square(mine - ratio * truth) / max(_square(mine), np.finfo(float).tiny))
    if ratio <= 0 or rest > 1e-3:
        return None
    whole = round(max(ratio, 1 / ratio))
    exact = float(whole) if ratio > 1 else 1 / whole
    return exact if whole > 1 and abs(ratio / exact - 1) < 1e-3 else None


def worst(deviations: Iterable[Deviation], kind: str | None = None) -> Deviation:
    """Returns the deviation with the largest error in units of its bound, of one kind of quantity or of all."""
    return max((d for d in deviations if kind is None or d.quantity.kind == kind), key=lambda d: d.excess)
