"""Package versions that go wrong with certain settings: a table, known_bad.yaml, checked before a run starts.

Every row names the public thread that reports it; most were reproduced by running this project on the versions in
question. In: a config, its layout and the installed versions. Out: the rows that match, or one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from megalite.config.base import Device
from megalite.config.batch_stages import shapes_of
from megalite.config.config import Config
from megalite.config.errors import ConfigError
from megalite.config.layout import ResolvedLayout
from megalite.config.versions import installed_version
from megalite.config.yaml_text import parse_yaml

FILE = Path(__file__).parents[1] / "known_bad.yaml"


@dataclass(frozen=True)
class KnownBad:
    """Versions and settings that together compute something wrong, or cannot run."""

    versions: Mapping[str, str]  # package -> specifier of the versions it happens with; of several, all must match
    settings: str  # that trigger it: a key of `settings_of`
    wrong: str  # the effect, in one phrase
    thread: str  # that reports or fixes it: `DeepSpeed#8203`
    remedy: str  # to end the message with
    device: Device | None = None  # it happens on; None = both

    @property
    def url(self) -> str:
        """Address of the thread; GitHub redirects the number of a pull request."""
        return f"https://github.com/deepspeedai/{self.thread.replace('#', '/issues/')}"

    def is_installed(self, versions: Mapping[str, str]) -> bool:
        """Returns whether all its packages are installed in affected versions; `2.13.0+cpu` counts as 2.13.0."""
        return all(
            package in versions and SpecifierSet(bad).contains(Version(versions[package]).public, prereleases=True)
            for package, bad in self.versions.items()
        )

    def sentence(self, config: Config, layout: ResolvedLayout, versions: Mapping[str, str]) -> str:
        """Returns the message: versions, settings, effect, thread and remedy."""
        packages = " and ".join(f"{package} {versions[package]}" for package in self.versions)
        _, settings = settings_of(config, layout)[self.settings]
        return f"{packages} with {settings}: {self.wrong} ({self.thread}): {self.remedy}"


def installed_versions() -> dict[str, str]:
    """Returns the installed versions of the packages in the table; a missing package is left out."""
    versions = {package: installed_version(package) for package in ("torch", "deepspeed", "transformers")}
    return {package: version for package, version in versions.items() if version is not None}


def matching(
    config: Config, layout: ResolvedLayout, versions: Mapping[str, str], device: Device | None = None
) -> list[KnownBad]:
    """Returns the rows that match a run; while the device is unknown, those of both devices."""
    settings = settings_of(config, layout)
    return [
        row
        for row in KNOWN_BAD
        if row.is_installed(versions) and (device is None or row.device in (None, device)) and settings[row.settings][0]
    ]


def check_known_bad(
    config: Config, layout: ResolvedLayout, versions: Mapping[str, str], device: Device | None = None
) -> None:
    """Raises ConfigError with a sentence for each row that matches in any stage of the run."""
    sentences: dict[str, str] = {}  # by what is wrong
    for shape, one in zip(shapes_of(config.training), config.in_each_stage(), strict=True):
        there = replace(layout, gradient_accumulation_steps=shape.micro_batches(layout.data_parallel_size))
        for row in matching(one, there, versions, device):
            sentences.setdefault(row.wrong, row.sentence(one, there, versions))
    if sentences:
        raise ConfigError(*sentences.values())


def settings_of(config: Config, layout: ResolvedLayout) -> dict[str, tuple[bool, str]]:
    """Returns, for the settings that rows name, whether a run has them, and their description with the run's values."""
    model, dtype = config.model, config.precision.dtype
    stage, stages, replicas = layout.zero_stage, layout.pipeline_parallel_size, layout.replicas
    micro_batches = layout.gradient_accumulation_steps
    per_step = f"{micro_batches} micro-batches per step"
    zero, section = config.deepspeed.get("zero_optimization", {}), "deepspeed.zero_optimization"
    offloaded = "offload.optimizer cpu" if config.offload.optimizer == "cpu" else f"{section}.offload_optimizer"
    size = zero.get("zero_hpz_partition_size", 1)
    is_cut_twice = stage == 3 and isinstance(size, int) and size > 1
    cut_twice = f"{section}.zero_hpz_partition_size {size}"
    padded = -(-model.hidden_size // replicas) * replicas
    return {
        "several backward passes": (
            stages > 1 or micro_batches != 1,
            f"parallel.pipeline_parallel_size {stages} and {per_step}",
        ),
        "offloaded optimizer": (config.is_optimizer_offloaded, offloaded),
        "zero 3": (stage == 3, "parallel.zero_stage 3"),
        "secondary partitions": (is_cut_twice, cut_twice),
        # the last secondary partition of a norm's weight begins behind the weight's end
        "secondary partitions of small weights": (
            is_cut_twice and padded // size * (size - 1) > model.hidden_size,
            f"{cut_twice}, model.hidden_size {model.hidden_size} and {replicas} replicas",
        ),
        "quantized weights": (
            stage == 3 and bool(zero.get("zero_quantized_weights")) and dtype != "fp16",
            f"{section}.zero_quantized_weights and precision.dtype {dtype}",
        ),
        "fetching by all reduce": (
            stage == 3 and bool(zero.get("stage3_use_all_reduce_for_fetch_params")),
            f"{section}.stage3_use_all_reduce_for_fetch_params",
        ),
    }


KNOWN_BAD = tuple(KnownBad(**row) for row in parse_yaml(FILE.read_text(encoding="utf-8"))[0])
