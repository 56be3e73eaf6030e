"""Variants of a config: every combination of the values that options are given with `--vary` or a preset.

In: `KEY=A,B,C` as typed. Out: points of a series, the first of which all others are compared with. No torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from launch.errors import LaunchError
from launch.experiments.series import LENGTH_OPTIONS, SeriesPoint
from megalite.config import Config, ResolvedLayout
from megalite.config.suggestions import NUMBER, option_paths

BUCKETS = (5_000_000, 15_000_000, 50_000_000, 150_000_000, 500_000_000)
RECOMPUTE = ("none", "selective", "full")
OPENING, CLOSING = "[{(", "]})"


@dataclass(frozen=True)
class VariedOption:
    """An option and its values, as an override writes them."""

    key: str
    values: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> VariedOption:
        """Reads `KEY=A,B,C`; commas inside brackets belong to a value. Raises LaunchError.

        Whether there is such an option, and whether it may have these values, is checked with the whole config.
        """
        key, equals, values = text.partition("=")
        key = key.strip()
        found = _split(values)
        if not equals or not key or not all(found):
            raise LaunchError(
                f"--vary {text}: write an option and its values, such as --vary parallel.zero_stage=1,2,3"
            )
        if key in LENGTH_OPTIONS:
            raise LaunchError(f"--vary {text}: {key} is not varied but set for every run: {LENGTH_OPTIONS[key]}")
        if twice := next((value for place, value in enumerate(found) if value in found[:place]), None):
            raise LaunchError(f"--vary {text}: {twice} is there twice")
        return cls(key, tuple(found))


def variants(varied: Sequence[VariedOption]) -> tuple[SeriesPoint, ...]:
    """Returns one point per combination of values, the last option changing fastest. Raises LaunchError."""
    keys = [option.key for option in varied]
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise LaunchError(f"{twice} is varied twice: give all its values once, as in --vary {twice}=A,B,C")
    if not varied:
        return (SeriesPoint("as configured"),)
    shown = [_shortest_name(key) for key in keys]
    return tuple(
        SeriesPoint(
            " ".join(f"{name}={value}" for name, value in zip(shown, values, strict=True)),
            tuple(f"{key}={value}" for key, value in zip(keys, values, strict=True)),
        )
        for values in product(*(option.values for option in varied))
    )


def bucket_sizes(config: Config) -> list[VariedOption]:
    """Returns sizes of gradient buckets around that of the config, which is the first.

    Under ZeRO-3 also whether collectives run beside computation; ZeRO-1 and ZeRO-2 always do that.
    """
    options = [_own_first("parallel.gradient_bucket_size", config.parallel.gradient_bucket_size, BUCKETS)]
    if config.parallel.zero_stage == 3:
        zero = config.deepspeed.get("zero_optimization")
        own = zero.get("overlap_comm", True) if isinstance(zero, dict) else True
        options.append(_own_first("deepspeed.zero_optimization.overlap_comm", own, (False, True)))
    return options


def micro_batch_sizes(config: Config, layout: ResolvedLayout) -> list[VariedOption]:
    """Returns the micro-batch sizes that are powers of two and divide a replica's batch, that of the config first."""
    per_replica = config.training.global_batch_size // layout.data_parallel_size
    sizes = [1 << power for power in range(per_replica.bit_length()) if per_replica % (1 << power) == 0]
    return [_own_first("training.micro_batch_size", config.training.micro_batch_size, sizes)]


def recompute_modes(config: Config) -> list[VariedOption]:
    """Returns the three modes of recomputation, that of the config first if all its stages have the same."""
    mode = config.recompute.mode
    return [_own_first("recompute.mode", mode if isinstance(mode, str) else RECOMPUTE[0], RECOMPUTE)]


def _shortest_name(key: str) -> str:
    """Returns the last part of an option's name if no other option ends with it, such as `zero_stage`.

    Options of a stage, which repeat those of the start, do not count.
    """
    last = key.rpartition(".")[2]
    return last if [path[-1] for path in option_paths(Config) if NUMBER not in path].count(last) == 1 else key


def _own_first(key: str, own: object, values: Sequence[object]) -> VariedOption:
    texts = [str(value).lower() for value in (own, *values)]
    return VariedOption(key, tuple(dict.fromkeys(texts)))


def _split(text: str) -> list[str]:
    """Splits at the commas that are in no bracket and no quotes."""
    depth, quote, parts = 0, "", [""]
    for letter in text:
        if letter == "," and depth == 0 and not quote:
            parts.append("")
            continue
        if letter in "\"'" and quote in ("", letter):
            quote = "" if quote else letter
        elif not quote:
            depth += (letter in OPENING) - (letter in CLOSING)
        parts[-1] += letter
    return [part.strip() for part in parts]
