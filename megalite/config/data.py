"""Section `data`: which prepared token shards a run reads."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from megalite.config.base import NotBool, Section


def _one_path_is_a_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


PathPrefix = Annotated[str, Field(min_length=1)]


class DataConfig(Section):
    """Training text, already tokenised by `megalite prepare`."""

    path: Annotated[
        list[PathPrefix],
        BeforeValidator(_one_path_is_a_list, json_schema_input_type=PathPrefix | list[PathPrefix]),
        Field(min_length=1),
    ]
    """Prefixes of prepared token shards (the path without `.bin`/`.idx`); one, or a list of them."""

    held_out_fraction: Annotated[float, NotBool, Field(ge=0, le=0.5)] = 0.01
    """Fraction of the documents, 0 to 0.5, kept out of training for evaluation."""

    document_mask: bool = False
    """Attention stops at document boundaries inside a packed sequence, and positions restart there."""
