"""Package versions that go wrong with certain settings: a table, checked before a run starts.

Every row names the public thread that reports it; most were reproduced by running this project on the versions in
question. In: a config, its layout and the installed versions. Out: the rows that match, or one sentence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Literal

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megalite.config.config import Config
from megalite.config.errors import ConfigError, one_line
from megalite.config.layout import ResolvedLayout

Device = Literal["cpu", "cuda"]
Settings = Callable[[Config, ResolvedLayout], str | None]

REPOSITORIES = {"DeepSpeed": "deepspeedai/DeepSpeed", "pytorch": "pytorch/pytorch"}


@dataclass(frozen=True)
class KnownBad:
    """Versions and settings that together compute something wrong, or cannot run."""

    versions: Mapping[str, str]
    """Package -> the versions it happens with, as a version specifier; with several packages, all must match."""
    settings: Settings
    """Describes the settings that trigger it, with their values; None if a run does not have them."""
    wrong: str
    """The effect, in one phrase."""
    thread: str
    """The thread that reports or fixes it: `DeepSpeed#8152`."""
    remedy: str
    """The remedy, to end the message with."""
    device: Device | None = None
    """The device it happens on; None = both."""

    @property
    def url(self) -> str:
        """Address of the thread; GitHub redirects the number of a pull request."""
        repository, number = self.thread.split("#")
        return f"https://github.com/{REPOSITORIES[repository]}/issues/{number}"

    def is_installed(self, versions: Mapping[str, str]) -> bool:
        """Returns whether all its packages are installed in affected versions; `2.13.0+cpu` counts as 2.13.0."""
        return all(
            package in versions and SpecifierSet(bad).contains(Version(versions[package]).public, prereleases=True)
            for package, bad in self.versions.items()
        )

    def sentence(self, config: Config, layout: ResolvedLayout, versions: Mapping[str, str]) -> str:
        """Returns the message: versions, settings, effect, thread and remedy."""
        packages = " and ".join(f"{package} {versions[package]}" for package in self.versions)
        return f"{packages} with {self.settings(config, layout)}: {self.wrong} ({self.thread}): {self.remedy}"


def installed_versions() -> dict[str, str]:
    """Returns the installed versions of the packages in the table; a missing package is left out."""
    versions = {}
    for package in ("torch", "deepspeed", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def matching(
    config: Config, layout: ResolvedLayout, versions: Mapping[str, str], device: Device | None = None
) -> list[KnownBad]:
    """Returns the rows that match a run; while the device is unknown, those of both devices."""
    return [
        row
        for row in KNOWN_BAD
        if row.is_installed(versions)
        and (device is None or row.device in (None, device))
        and row.settings(config, layout) is not None
    ]


def check_known_bad(
    config: Config, layout: ResolvedLayout, versions: Mapping[str, str], device: Device | None = None
) -> None:
    """Raises ConfigError with the first matching row in full and the number of the others."""
    rows = matching(config, layout, versions, device)
    if rows:
        raise ConfigError(one_line(row.sentence(config, layout, versions) for row in rows))


def _zero(config: Config, key: str, default: Any = None) -> Any:
    """Returns a setting of DeepSpeed's `zero_optimization` section."""
    return config.deepspeed.get("zero_optimization", {}).get(key, default)


def _reduces_in_buckets(config: Config, layout: ResolvedLayout) -> bool:
    """Returns whether DeepSpeedZeroOptimizer reduces the gradients (ZeRO-1 or 2, but not BF16_Optimizer)."""
    has_own_way = layout.zero_stage == 1 and config.precision.dtype == "bf16"
    has_own_way &= config.precision.gradient_accumulation_dtype == "fp32"
    return layout.zero_stage < 3 and layout.data_parallel_size > 1 and not has_own_way


def pipeline_with_accumulation(_: Config, layout: ResolvedLayout) -> str | None:
    stages, micro_batches = layout.pipeline_parallel_size, layout.gradient_accumulation_steps
    if stages == 1 or micro_batches == 1:
        return None
    return f"parallel.pipeline_parallel_size {stages} and {micro_batches} micro-batches per step"


def zero_2_with_accumulation(_: Config, layout: ResolvedLayout) -> str | None:
    micro_batches = layout.gradient_accumulation_steps
    if layout.zero_stage != 2 or micro_batches == 1:
        return None
    return f"parallel.zero_stage 2 and {micro_batches} micro-batches per step"


def zero_2_offloaded_with_accumulation(config: Config, layout: ResolvedLayout) -> str | None:
    micro_batches, offload = layout.gradient_accumulation_steps, _zero(config, "offload_optimizer")
    is_offloaded = isinstance(offload, dict) and offload.get("device", "none") != "none"
    if layout.zero_stage != 2 or micro_batches <= 2 or not is_offloaded:
        return None
    return f"parallel.zero_stage 2, an offload_optimizer and {micro_batches} micro-batches per step"


def gradients_not_contiguous(config: Config, layout: ResolvedLayout) -> str | None:
    # the default is set in megalite/engine/deepspeed_config.py
    if not _reduces_in_buckets(config, layout) or _zero(config, "contiguous_gradients", layout.zero_stage > 1):
        return None
    return (
        f"parallel.zero_stage {layout.zero_stage}, {layout.data_parallel_size} replicas and "
        "zero_optimization.contiguous_gradients false"
    )


def communication_overlapped(config: Config, layout: ResolvedLayout) -> str | None:
    if not _reduces_in_buckets(config, layout) or not _zero(config, "overlap_comm"):
        return None
    return f"parallel.zero_stage {layout.zero_stage} and deepspeed.zero_optimization.overlap_comm"


def zero_3(_: Config, layout: ResolvedLayout) -> str | None:
    return "parallel.zero_stage 3" if layout.zero_stage == 3 else None


def secondary_partitions(config: Config, layout: ResolvedLayout) -> str | None:
    size = _zero(config, "zero_hpz_partition_size", 1)
    if layout.zero_stage != 3 or not isinstance(size, int) or size <= 1:
        return None
    return f"deepspeed.zero_optimization.zero_hpz_partition_size {size}"


def secondary_partitions_of_small_weights(config: Config, layout: ResolvedLayout) -> str | None:
    """Matches if the last secondary partition of a norm's weight begins behind the weight's end."""
    named, replicas, width = secondary_partitions(config, layout), layout.data_parallel_size, config.model.hidden_size
    if named is None:
        return None
    size = _zero(config, "zero_hpz_partition_size")
    padded = -(-width // replicas) * replicas
    if padded // size * (size - 1) <= width:
        return None
    return f"{named}, model.hidden_size {width} and {replicas} replicas"


def quantized_weights(config: Config, layout: ResolvedLayout) -> str | None:
    dtype = config.precision.dtype
    if layout.zero_stage != 3 or not _zero(config, "zero_quantized_weights") or dtype == "fp16":
        return None
    return f"deepspeed.zero_optimization.zero_quantized_weights and precision.dtype {dtype}"


def fetching_by_all_reduce(config: Config, layout: ResolvedLayout) -> str | None:
    key = "stage3_use_all_reduce_for_fetch_params"
    if layout.zero_stage != 3 or not _zero(config, key):
        return None
    return f"deepspeed.zero_optimization.{key}"


def mask_over_half_a_tile(config: Config, _: ResolvedLayout) -> str | None:
    length, window = config.training.sequence_length, config.model.sliding_window
    if config.precision.dtype == "fp32" or length % 128 != 64:
        return None
    if config.data.document_mask:
        mask = "data.document_mask"
    elif window is not None and window < length and "sliding_attention" in config.model.layer_types:
        mask = f"model.sliding_window {window}"
    else:
        return None
    return f"{mask}, precision.dtype {config.precision.dtype} and training.sequence_length {length}"


UPGRADE = "install deepspeed 0.19.8 or newer"  # no row is about them, and the tests run on them

KNOWN_BAD: tuple[KnownBad, ...] = (
    KnownBad(
        {"deepspeed": ">=0.16.0,<0.18.3"},
        pipeline_with_accumulation,
        "gradients are the sum over the micro-batches instead of their mean",
        "DeepSpeed#7773",
        UPGRADE,
    ),
    KnownBad(
        {"deepspeed": ">=0.18.3,<0.19.3"},
        pipeline_with_accumulation,
        "every stage but the last divides its gradients once more by the number of micro-batches",
        "DeepSpeed#8152",
        UPGRADE,
    ),
    KnownBad(
        {"deepspeed": ">=0.17.6,<0.18.3"},
        zero_2_with_accumulation,
        "the gradients of some micro-batches are lost",
        "DeepSpeed#7718",
        UPGRADE + ", or use zero_stage 1 or 3",
    ),
    KnownBad(
        {"deepspeed": ">=0.15.2,<0.19.0"},
        zero_2_offloaded_with_accumulation,
        "the gradients of all micro-batches but the first and the last are lost",
        "DeepSpeed#7967",
        UPGRADE + ", or use zero_stage 1 or 3",
    ),
    KnownBad(
        {"deepspeed": "<0.19.8"},
        gradients_not_contiguous,
        "gradients are not reduced over the replicas, each of which trains on its own",
        "DeepSpeed#8382",
        UPGRADE + ", or set deepspeed.zero_optimization.contiguous_gradients to true",
        device="cpu",
    ),
    KnownBad(
        {"deepspeed": "<0.19.0"},
        communication_overlapped,
        "gradients are overwritten while they are still being reduced, and the loss becomes NaN",
        "DeepSpeed#7965",
        UPGRADE + ", or remove overlap_comm",
        device="cuda",
    ),
    KnownBad(
        {"deepspeed": "<0.18.8", "torch": ">=2.10"},
        zero_3,
        "gradients are reduced before they are computed, and weights become NaN",
        "DeepSpeed#7898",
        UPGRADE + ", or use zero_stage 1 or 2",
        device="cuda",
    ),
    KnownBad(
        {"deepspeed": "<0.18.3"},
        secondary_partitions,
        "the first step after weights were loaded computes with the ones before",
        "DeepSpeed#7606",
        UPGRADE + ", or remove zero_hpz_partition_size",
    ),
    KnownBad(
        {"deepspeed": "<0.19.5"},
        secondary_partitions_of_small_weights,
        "the weights of norms are too small to be cut twice, and the start fails",
        "DeepSpeed#6659",
        UPGRADE + ", or remove zero_hpz_partition_size",
    ),
    KnownBad(
        {"deepspeed": "<0.19.6"},
        quantized_weights,
        "the quantizer reads the bits of weights as fp16",
        "DeepSpeed#7775",
        UPGRADE + ", or remove zero_quantized_weights",
    ),
    KnownBad(
        {"deepspeed": "<0.19.4"},
        fetching_by_all_reduce,
        "padding that nobody wrote is added to the first numbers of weights",
        "DeepSpeed#8158",
        UPGRADE + ", or remove it",
    ),
    KnownBad(
        {"torch": ">=2.11,<2.14"},
        mask_over_half_a_tile,
        "cuDNN's attention can turn gradients into NaN on H100 and H200",
        "pytorch#196678",
        "use a sequence_length that is a multiple of 128",
        device="cuda",
    ),
)
