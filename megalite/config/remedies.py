"""The nearest numbers that work, to end error messages with. In: one that does not. Out: "8 or 16"."""

from __future__ import annotations

from collections.abc import Iterable

from megalite.config.model import ModelConfig


def either(values: Iterable[int]) -> str:
    """[2, 4] -> "2 or 4"; zero is never an answer."""
    return " or ".join(str(value) for value in values if value > 0)


def multiples_near(value: int, of: int) -> str:
    """The multiples of `of` below and above `value`."""
    return either([value // of * of, (value // of + 1) * of])


def neighbours(value: int, allowed: Iterable[int]) -> str:
    """The nearest allowed numbers below and above `value`, from an ascending list."""
    numbers = list(allowed)
    below = [number for number in numbers if number < value]
    above = [number for number in numbers if number > value]
    return either(below[-1:] + above[:1])


def tensor_parallel_fits(model: ModelConfig, size: int) -> bool:
    """Whether the heads can be shared by `size` ranks; kv heads fewer than ranks are replicated."""
    kv = model.num_key_value_heads
    if model.num_attention_heads % size or (kv % size and size % kv):
        return False
    return size <= kv or kv * model.head_dim % size == 0


def tensor_parallel_near(model: ModelConfig, size: int) -> str:
    """The nearest tensor_parallel_sizes that this model's heads allow."""
    largest = min(model.num_attention_heads, model.vocab_size)
    return neighbours(size, (n for n in range(1, largest + 1) if tensor_parallel_fits(model, n)))
