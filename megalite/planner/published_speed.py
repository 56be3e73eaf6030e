"""The best published speed of an accelerator beside ours: plain arithmetic on the catalogue, no torch."""

from __future__ import annotations

from megalite.config.sections import PrecisionConfig
from megalite.planner.hardware import Accelerator


def beside_published(
    name: str, kind: Accelerator, precision: PrecisionConfig, model_tflops: float, *, is_measured: bool
) -> str | None:
    """Returns a sentence with our model TFLOP/s of one accelerator and the best published; None where there is none."""
    ours = "fp8" if precision.float8 != "none" else precision.dtype
    formats = ("bf16", "fp16") if ours in ("bf16", "fp16") else (ours,)
    alike = [one for one in kind.published if one.precision in formats]
    if (best := max(alike, key=lambda one: one.model_tflops, default=None)) is None:
        return None
    what = "measured" if is_measured else "predicted"
    where = f"{best.system}, {best.model}, sequences of {best.sequence_length:,}, {best.accelerators:,} of them"
    counted = "; TFLOP/s computed here from published tokens/s" * best.is_computed_here
    beyond = "; take a prediction that nobody has reached as a limit"
    is_beyond = not is_measured and model_tflops > best.model_tflops
    return (
        f"{what} {model_tflops:.4g} model TFLOP/s of each {name} in {ours}; published best: "
        f"{best.model_tflops:.4g} in {best.precision} ({where}{counted})"
        f"{beyond * is_beyond}"
    )
