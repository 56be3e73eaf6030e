"""What a conversion would do, and what it has done."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ConversionPlan:
    """What a conversion would do."""

    source: str
    target: str
    model_type: str
    tensors: int | None  # on the Hugging Face side; None where they are not here yet
    parameters: int
    dtype: str  # of the Hugging Face side
    files: tuple[str, ...]  # with weights, on the Hugging Face side
    bytes_read: int
    bytes_written: int
    bytes_free: int  # where the target is going to be
    notices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ConvertSummary:
    """What was converted, what it took, and how far our logits and transformers' are apart."""

    source: str
    target: str
    model_type: str
    tensors: int  # on the Hugging Face side
    parameters: int
    dtype: str  # of the Hugging Face side
    logit_difference: float | None  # largest, over the logits' standard deviation; None where nothing was validated
    compared: tuple[str, ...]  # sentences: what was compared
    bytes_read: int  # of weights
    bytes_written: int
    seconds: float  # of reading and writing; validation has its own
    validation_seconds: float
    peak_memory_bytes: int | None  # of reading and writing, beyond what the process held before; None: unknown here
    notices: tuple[str, ...] = ()
