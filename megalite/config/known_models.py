"""Published models by name, which stand where a config or a folder of weights could. Data: known_models.yaml."""

from __future__ import annotations

from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from megalite.config.yaml_text import parse_yaml, to_yaml

FILE = Path(__file__).with_name("known_models.yaml")
TOKENS_PER_PARAMETER = 20  # Hoffmann 2022 (arXiv:2203.15556), where no number of tokens was published
LARGE, BATCH_TOKENS = 10_000_000_000, (1_048_576, 4_194_304)  # parameters; tokens of a step below and above them
LONGEST = 8192  # tokens of a sequence, where the model is meant for more


@cache
def known_models() -> dict[str, Any]:
    """Returns `parameters`, `source`, `model` and perhaps `tokens` of each model."""
    values, _ = parse_yaml(FILE.read_text(encoding="utf-8"))
    assert isinstance(values, dict)
    return values


def run_of(name: str) -> dict[str, Any] | None:
    """Returns the values of a config that trains a model from random weights with a layout that is chosen; None for a
    name that is not known."""
    if (known := known_models().get(name.lower())) is None:
        return None
    length = min(known["model"]["max_position_embeddings"], LONGEST)
    tokens = known.get("tokens") or TOKENS_PER_PARAMETER * known["parameters"]
    batch = BATCH_TOKENS[known["parameters"] >= LARGE] // length
    training = {"global_batch_size": batch, "sequence_length": length, "tokens": tokens}
    return {
        "run_dir": f"runs/{name.lower()}",
        "model": dict(known["model"]),
        "data": {"path": f"data/{name.lower()}"},
        "parallel": "auto",
        "training": training,
    }


def run_text(name: str) -> str | None:
    """Returns the same as the text of a file, which says where its figures come from."""
    values = run_of(name)
    return None if values is None else f"# {origin(name)}\n{to_yaml(values)}"


def origin(name: str) -> str:
    """Returns one sentence with the source of a known model's sizes, and with what is assumed."""
    known = known_models()[name.lower()]
    tokens = "as published" if "tokens" in known else f"{TOKENS_PER_PARAMETER} per parameter"
    return (
        f"{name.lower()}: {known['parameters']:,} parameters ({known['source']}); training.tokens {tokens}; "
        "training.global_batch_size and sequence_length are assumed"
    )


def names_near(name: str) -> list[str]:
    """Returns the known names that were perhaps meant."""
    return get_close_matches(name.lower(), known_models(), n=3, cutoff=0.6)
