"""Description of a cluster: accelerators, the links between them, and their number. Data from YAML; no torch.

`catalogue.yaml` beside this file holds what is known; a cluster file names entries of it or describes its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import Field, ValidationError, model_validator

from megalite.config.base import NonNegativeFloat, PositiveFloat, PositiveInt, Section
from megalite.config.errors import ConfigError, problems_of, shown
from megalite.config.sections import Dtype
from megalite.config.suggestions import nearest_name
from megalite.config.yaml_text import parse_yaml

CATALOGUE = Path(__file__).with_name("catalogue.yaml")


class Link(Section):
    """One kind of link between accelerators."""

    gb_per_s: PositiveFloat
    """Bandwidth in each direction: per accelerator inside a node, per adapter between nodes. 1 GB = 1e9 bytes."""

    latency_us: NonNegativeFloat = 5.0  # latency of one message
    source: str = ""  # source of the figures


class FlashAttention(Section):
    """Fraction of the peak that versions of FlashAttention reach. Dao 2023 (FlashAttention-2), abstract: 25-40 % and
    50-73 % on the A100; here the middle of each."""

    flash_1: PositiveFloat = 0.325
    flash_2: PositiveFloat = 0.615
    cudnn: PositiveFloat = 0.615  # cuDNN's kernel, which other stacks use


class PublishedSpeed(Section):
    """A speed of training that somebody has published for one kind of accelerator."""

    system: str  # the software that trained, with its version where it was said
    model: str  # the model: its size, or its name
    precision: Literal["fp32", "bf16", "fp16", "fp8"]  # format of the matrix products
    model_tflops: PositiveFloat  # TFLOP/s of one accelerator: what the mathematics needs, without recomputation
    counted: str  # operations that were counted, in words
    # whether `model_tflops` is our own arithmetic, on published tokens per second, and not a published figure
    is_computed_here: bool = False
    tokens_per_s: PositiveFloat | None = None  # tokens per second of one accelerator
    sequence_length: PositiveInt  # tokens of a sequence
    accelerators: PositiveInt  # number of accelerators in all
    date: str = ""  # date of the figure, such as `2025-11`; empty where it was not said
    source: str  # source of the figure


class Accelerator(Section):
    """One kind of GPU, or another device of a rank."""

    memory_gib: PositiveFloat
    """Most that a process can allocate, in GiB."""

    peak_tflops: dict[Dtype | Literal["fp8"], PositiveFloat]
    """Peak of dense matrix products, per number format."""

    memory_gb_per_s: PositiveFloat
    """Bandwidth of the memory."""

    efficiency: PositiveFloat = 0.6  # the one calibrated constant: part of the peak that large matrix products reach
    # measurement that the constant was fitted on
    calibrated_on: str = "a guess, from other accelerators: no published table to fit it on"
    device: Literal["cuda", "cpu"] = "cuda"  # type of the device in torch
    # part of the peak that fused attention reaches
    flash_attention: FlashAttention = Field(default_factory=FlashAttention)
    # host time to launch one transformer block's forward pass; a block is never faster
    launch_us: NonNegativeFloat = 300.0
    intra_node: str
    """Name of the link between accelerators of a node."""

    inter_node: str
    """Name of the link that an adapter of a node usually has."""

    # name of the link to the host's memory, over which offloaded state and activations move; a CPU has none
    host_link: str = "PCIe 4"
    source: str = ""  # source of the figures
    published: list[PublishedSpeed] = Field(default_factory=list)  # speeds of training that others have published

    @property
    def fastest_tflops(self) -> float:
        """The peak of its fastest number format of 16 or 32 bits."""
        return max(peak for name, peak in self.peak_tflops.items() if name != "fp8")

    @property
    def is_fitted(self) -> bool:
        """True if the constant was fitted on a measurement."""
        return not self.calibrated_on.startswith("a guess")

    @model_validator(mode="after")
    def _is_a_part_of_the_peak(self) -> Self:
        if self.device == "cuda" and self.efficiency > 1:  # a CPU's peak is measured, and may be surpassed
            raise ValueError(f"efficiency {self.efficiency:g} is more than all of the peak: use a part, such as 0.6")
        return self


def is_guess(accelerator: Accelerator) -> bool:
    """True for a CPU whose efficiency no run was fitted to: step times on it are rough."""
    return accelerator.device == "cpu" and not accelerator.is_fitted


class Catalogue(Section):
    """All hardware known by name."""

    accelerators: dict[str, Accelerator] = Field(default_factory=dict)
    links: dict[str, Link] = Field(default_factory=dict)


class ClusterFile(Section):
    """Contents of a cluster file."""

    accelerator: str | Accelerator
    """A name in the catalogue, or its figures."""

    nodes: PositiveInt
    accelerators_per_node: PositiveInt = 8
    adapters_per_node: PositiveInt | None = None  # network adapters of a node; left out: one for each accelerator
    intra_node: str | Link | None = None  # left out: what the accelerator usually has
    inter_node: str | Link | None = None  # left out: what the accelerator usually has


class Cluster(Section):
    """The cluster of a run, with all links resolved."""

    name: str
    accelerator_name: str
    accelerator: Accelerator
    nodes: PositiveInt
    accelerators_per_node: PositiveInt
    adapters_per_node: PositiveInt
    intra_node: Link
    inter_node: Link
    ranks_per_core: NonNegativeFloat = 0.0  # ranks per core of a CPU that ranks share; 0 for an accelerator of its own

    @property
    def accelerators(self) -> int:
        """Number of accelerators in all."""
        return self.nodes * self.accelerators_per_node

    @property
    def memory_bytes(self) -> int:
        """Memory of one accelerator, in bytes."""
        return int(self.accelerator.memory_gib * 2**30)

    def with_figures(self, **figures: float) -> Self:
        """Returns the same cluster with other figures of its accelerator, such as `efficiency`."""
        return self.model_copy(update={"accelerator": self.accelerator.model_copy(update=figures)})

    def peak_flops(self, dtype: Dtype) -> float:
        """Returns the dense floating-point operations per second of one accelerator."""
        peaks = self.accelerator.peak_tflops
        if dtype == "fp16" and self.accelerator.device == "cpu":
            dtype = "fp32"  # in which a CPU computes the products of fp16
        if dtype not in peaks:
            others = " or ".join(name for name in peaks if name != "fp8")
            others = f"use {others}, or " if others else ""
            raise ConfigError(
                f"{self.accelerator_name} has no peak_tflops for precision.dtype {dtype}: {others}add it to the "
                "cluster file"
            )
        return peaks[dtype] * 1e12


@cache
def catalogue() -> Catalogue:
    """Returns the catalogue of this package."""
    values, _ = parse_yaml(CATALOGUE.read_text())
    return Catalogue.model_validate(values)


def extended(known: Catalogue, values: Any) -> Catalogue:
    """Returns `known` extended by a user's catalogue file: entries of one's own, and for known names the fields that
    differ, such as `efficiency` alone. Raises ValidationError."""
    merged = known.model_dump(mode="json", exclude_unset=True)
    for section, entries in (values or {}).items() if isinstance(values, dict) else ():
        old = merged.setdefault(section, {})
        if not isinstance(entries, dict):
            merged[section] = entries
            continue
        names = {key.lower(): key for key in old}
        for name, entry in entries.items():
            name = names.get(str(name).lower(), name)
            old[name] = _merged(old.get(name), entry)
    return Catalogue.model_validate(merged if isinstance(values, dict | None) else values)


def _merged(old: Any, new: Any) -> Any:
    """Merges fields recursively; new values replace old ones."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return old | {key: _merged(old.get(key), value) for key, value in new.items()}


def find_accelerator(name: str, known: Catalogue | None = None) -> Accelerator:
    """Finds an accelerator by name, ignoring case. Raises ConfigError with the nearest name."""
    return _find("accelerator", name, (known or catalogue()).accelerators)


def cluster_of(described: ClusterFile, name: str, known: Catalogue | None = None) -> Cluster:
    """Resolves all names. Raises ConfigError for unknown ones."""
    known = known or catalogue()
    kind = described.accelerator
    accelerator = find_accelerator(kind, known) if isinstance(kind, str) else kind
    names = (key for key in known.accelerators if isinstance(kind, str) and key.lower() == kind.lower())
    return Cluster(
        name=name,
        accelerator_name=next(names, "accelerator"),
        accelerator=accelerator,
        nodes=described.nodes,
        accelerators_per_node=described.accelerators_per_node,
        adapters_per_node=described.adapters_per_node or described.accelerators_per_node,
        intra_node=find_link(described.intra_node or accelerator.intra_node, known),
        inter_node=find_link(described.inter_node or accelerator.inter_node, known),
    )


def read_yaml(path: Path) -> tuple[Any, dict[tuple[str | int, ...], int]]:
    """Returns the values of a file, and their lines. Raises OSError, or ConfigError with the file's name."""
    try:
        return parse_yaml(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path} cannot be read: it is not text") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def read_cluster(path: Path, known: Catalogue | None = None) -> Cluster:
    """Reads a cluster from a YAML file. Raises ConfigError, one sentence with file and line."""
    try:
        values, lines = read_yaml(path)
    except OSError as error:
        raise ConfigError(f"cluster {path} cannot be read: {error.strerror}") from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: a cluster file has {', '.join(ClusterFile.model_fields)}, got {shown(values)}")
    try:
        return cluster_of(ClusterFile.model_validate(values), path.stem, known)
    except ValidationError as error:
        problem = problems_of(error, ClusterFile)[0]
        line = lines.get(tuple(problem.path))
        raise ConfigError(f"{path}{f', line {line}' if line else ''}: {problem.sentence}") from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


Entry = TypeVar("Entry", Accelerator, Link)


def _find(kind: str, name: str, known: dict[str, Entry]) -> Entry:
    by_lower = {key.lower(): entry for key, entry in known.items()}
    if name.lower() in by_lower:
        return by_lower[name.lower()]
    near = _names_near(name, known) if name else []
    meant = f"did you mean {' or '.join(near)}? The" if near else "the"
    raise ConfigError(
        f'unknown {kind} "{name}": {meant} catalogue has {", ".join(known)}; or describe your own in '
        "~/.config/megalite/hardware.yaml or a --cluster file, as docs/planner.md shows"
    )


def _names_near(name: str, known: Iterable[str]) -> list[str]:
    """Returns the names that were perhaps meant: "A100" is the beginning of two."""
    written = {key.lower().replace("-", "_"): key for key in known}
    typed = name.lower().replace("-", "_")
    if same := [key for word, key in written.items() if word.startswith(typed) or typed.startswith(word)]:
        return same
    near = nearest_name(typed, written)
    return [written[near]] if near else []


def find_link(value: str | Link, known: Catalogue | None = None) -> Link:
    """Finds a link by name, or returns the one described. Raises ConfigError with the nearest name."""
    return _find("link", value, (known or catalogue()).links) if isinstance(value, str) else value
