"""The best published speed of an accelerator beside ours: plain arithmetic on the catalogue, no torch."""

from __future__ import annotations

from megalite.planner.hardware import Accelerator, PublishedSpeed


def best_published(kind: Accelerator, precision: str) -> PublishedSpeed | None:
    """Returns the fastest training published in `precision`, else the fastest of all; None where none is published."""
    alike = [one for one in kind.published if one.precision == precision]
    return max(alike or kind.published, key=lambda one: one.model_tflops, default=None)


def beside_published(name: str, kind: Accelerator, precision: str, model_tflops: float, what: str) -> str | None:
    """Returns a sentence with our model TFLOP/s of one accelerator and the best published; None where there is none.

    `what` says which of ours, such as `predicted`.
    """
    best = best_published(kind, precision)
    if best is None:
        return None
    where = f"{best.system}, {best.model}, sequences of {best.sequence_length:,}, {best.accelerators:,} of them"
    return (
        f"{what} {model_tflops:.4g} model TFLOP/s of each {name} in {precision}; published best: "
        f"{best.model_tflops:.4g} in {best.precision} ({where})"
    )
