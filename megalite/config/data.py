"""Section `data`: the prepared text of a run, from one source or as a mix of several, and what it is evaluated on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from megalite.config.base import NonNegativeFloat, NotBool, PositiveFloat, PositiveInt, Section
from megalite.config.training_stage import StageStart

BLEND = re.compile(r"\d*\.?\d+(?:[eE]-?\d+)?")  # of Megatron: a weight before each path


def _one_path_is_a_list(value: Any) -> Any:
    parts = value.split() if isinstance(value, str) else value if isinstance(value, list) else []
    are_weights = [BLEND.fullmatch(str(part)) is not None for part in parts]
    # a text of two words may be one path with a space, such as "2024 texts"
    if len(parts) > 2 - isinstance(value, list) and all(are_weights[::2]) and not any(are_weights[1::2]):
        source = f"{{path: {parts[1]}, weight: {parts[0]}}}"
        raise ValueError(
            "paths with weights before them are a blend of Megatron-LM: name each text in data.sources, as in "
            f"data.sources.a={source}"
        )
    if not isinstance(value, str | list | tuple | None):
        raise ValueError(f"a path is text, or a list of texts, got {value!r}")
    return [value] if isinstance(value, str) else value


PathPrefix = Annotated[str, Field(min_length=1)]
PathPrefixes = Annotated[list[PathPrefix], Field(min_length=1)]
OnePathOrMore = Annotated[
    PathPrefixes, BeforeValidator(_one_path_is_a_list, json_schema_input_type=PathPrefix | PathPrefixes)
]
SourceName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]  # no dot: it stands in names of options


class DataSource(Section):
    """One source of a mix: prepared text with an order and epochs of its own."""

    path: OnePathOrMore = Field(examples=["data/web"])
    """Prefixes of prepared token shards; one, a pattern such as `data/web/*`, or a list of them, read as one text."""

    weight: NonNegativeFloat | None = Field(default=None, examples=[0.7])
    """Share of the samples, in proportion to the weights of all sources; 0: only stages give it one."""

    epochs: PositiveFloat | None = Field(default=None, examples=[2.0])
    """Times that the run reads the source, in place of a weight: all sources of a mix say the same of the two."""

    max_epochs: PositiveFloat | None = Field(default=None, examples=[4.0])
    """Times that the source may be read at most; a run that would read it more often is refused before it starts."""


class DataStage(StageStart):
    """Weights of the sources from a place of the run on, at the first step that begins there or later."""

    weights: dict[SourceName, NonNegativeFloat] = Field(default_factory=dict, examples=[{"web": 0.4, "maths": 0.6}])
    """Weights of sources by name; a source that is not named has its own `weight`."""


class ValidationSet(Section):
    """Text that gives an evaluation loss of its own."""

    source: SourceName | None = Field(default=None, examples=["web"])
    """Source whose held-out documents are evaluated on; give this or `path`."""

    path: OnePathOrMore | None = Field(default=None, examples=["data/wiki_validation"])
    """Prefixes of prepared text, or patterns of them, all of whose documents are evaluated on."""

    samples: PositiveInt | None = Field(default=None, examples=[128])
    """Sequences per evaluation. Left out: `training.evaluation.samples`."""


class DataConfig(Section):
    """Training text, tokenised by `megalite prepare`: one text (`path`), or a mix of sources (`sources`)."""

    path: OnePathOrMore | None = Field(default=None, examples=["data/mine"])
    """Prefixes of prepared token shards (path or URL without `.bin`); one, a pattern (`data/web/*`), or a list."""

    sources: dict[SourceName, DataSource] = Field(
        default_factory=dict, examples=[{"web": {"path": "data/web", "weight": 0.9}}]
    )
    """Sources of a mix by name, in place of `path`."""

    stages: tuple[DataStage, ...] = Field(
        default=(), examples=[[{"from_tokens": 800_000_000_000, "weights": {"web": 0.4}}]]
    )
    """Changes of the weights in the course of the run, in the order in which they come; before them, the sources'."""

    validation: dict[SourceName, ValidationSet] = Field(default_factory=dict, examples=[{"web": {"source": "web"}}])
    """Sets to evaluate on, by name. Left out: the held-out documents of `path`, or those of each source."""

    held_out_fraction: Annotated[float, Field(ge=0, le=0.5), NotBool] = 0.01
    """Fraction of the documents, 0 to 0.5, kept out of training for evaluation."""

    document_mask: bool = False
    """Attention stops at document boundaries inside a packed sequence, and positions restart there."""

    packing: Literal["concat", "best_fit"] = "concat"
    """Documents in a row, cut where a sample is full, or whole by `megalite data pack`, which needs `document_mask`."""

    too_long: Literal["refuse", "skip", "cut"] = "refuse"
    """Conversations longer than a sample: an error, left out, or cut, as packing `concat` needs; other text is cut."""

    cache: Path | None = Field(default=None, examples=["/scratch/megalite"])
    """Folder of each host for copies of data at URLs (left out: in `$XDG_CACHE_HOME`) and, if set, plans of packing."""

    @property
    def prefixes(self) -> list[str]:
        """Prefixes of all training text, source by source."""
        return [*(self.path or []), *(prefix for source in self.sources.values() for prefix in source.path)]

    @property
    def all_prefixes(self) -> list[str]:
        """Prefixes of all text that the run reads, that of validation sets included."""
        of_validation = (prefix for one in self.validation.values() for prefix in one.path or [])
        return list(dict.fromkeys([*self.prefixes, *of_validation]))

    @property
    def urls(self) -> list[str]:
        """Those of all prefixes that are URLs, of which each host keeps a copy."""
        return [prefix for prefix in self.all_prefixes if "://" in prefix]

    @property
    def is_by_epochs(self) -> bool:
        """True if the sources say how often they are read, instead of weights."""
        return any(source.epochs is not None for source in self.sources.values())

    def weights_of(self, stage: DataStage) -> Mapping[str, float]:
        """Returns the weight of every source in a stage."""
        own = {name: source.weight or 0.0 for name, source in self.sources.items()}
        return own | stage.weights
