"""Writes a first config: the options that most runs set, each under its docstring as a comment.

In: where the weights come from, if not from a seed. Out: YAML that loads at once, with the examples of the sections.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from textwrap import indent, wrap
from typing import Any

from megalite.config.config import Config
from megalite.config.documentation.option_docs import facts_of
from megalite.config.errors import section_at
from megalite.config.suggestions import OptionPath, dotted
from megalite.config.yaml_text import to_yaml

WIDTH = 110  # columns of a comment
LONGEST = 2048  # tokens per sequence to begin with, where the model is meant for more
ADVICE = (
    "Options that are left out have defaults: `megalite config show THIS_FILE` prints them, and `megalite config "
    "explain SECTION.OPTION` tells about one. Relative paths start from the directory in which megalite is run."
)

SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "tie_word_embeddings"),
)
CHOICES: dict[str, tuple[str, ...]] = {
    "run_dir": (),
    "model": SIZES,
    "data": ("path", "held_out_fraction"),
    "parallel": ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "zero_stage"),
    "precision": ("dtype",),
    "optimizer": ("learning_rate", "weight_decay"),
    "schedule": ("name", "warmup_steps"),
    "training": (
        *("initialize_from", "global_batch_size", "micro_batch_size", "sequence_length", "steps", "seed"),
        "evaluation",
    ),
    "recompute": ("mode",),
    "checkpoint": ("interval", "keep_last", "export_hf"),
    "monitor": ("log_interval", "wandb"),
}
"""The sections of a first config, and their options."""

VALUES: dict[str, Any] = {
    "model.tie_word_embeddings": True,  # half of a small model's weights would be its output head
    "optimizer.learning_rate": 1e-3,
    "training.evaluation": {"interval": 100, "samples": 64},
    "checkpoint.interval": "auto",
    "monitor.log_interval": 10,
    "monitor.wandb": {"enabled": False},
}
"""Values that are neither an option's default nor its example."""

TUNING: dict[str, Any] = {"run_dir": "runs/tuned", "optimizer.learning_rate": 2e-5, "checkpoint.export_hf": "last"}
"""Values for a run that starts from trained weights."""


@dataclass(frozen=True)
class SourceOfWeights:
    """The Hugging Face model that a run starts from."""

    place: str  # folder or hub id, as the user named it
    folder: Path  # the folder, or the download of a hub id; its tokenizer prepares the text
    longest: int  # sequence that the model is meant for, in tokens


def starter_config(source: SourceOfWeights | None = None) -> str:
    """Returns the text of a first config; with a source of weights, `model` is left out, for they have all sizes."""
    values = VALUES
    if source is not None:
        length = min(source.longest, LONGEST)
        values = values | {**TUNING, "training.initialize_from": source.place, "training.sequence_length": length}
    parts = [_heading(source)]
    for section, names in CHOICES.items():
        if source is not None and section == "model":
            continue
        parts.append("\n" + _comment(facts_of((section,)).description))
        parts.append(f"{section}:\n" if names else _setting((section,), values))
        for name in names:
            if name != "initialize_from" or source is not None:
                path = (section, name)
                parts.append(indent(_comment(facts_of(path).description) + _setting(path, values), "  "))
    return "".join(parts)


def _heading(source: SourceOfWeights | None) -> str:
    if source is None:
        first = "A small model to begin with. Prepare text, then train:"
        tokenizer = f"--train-vocab-size {starting_value(('model', 'vocab_size'))} -t data/tokenizer"
    else:
        first = f"Further training of {source.place}, whose config.json has all sizes. Prepare text, then train:"
        tokenizer = f"-t {shlex.quote(str(source.folder))}"
    commands = f"#   megalite prepare YOUR_TEXT {tokenizer} -o data/mine\n#   megalite train THIS_FILE\n"
    return _comment(first) + commands + _comment(ADVICE)


def _setting(path: OptionPath, values: dict[str, Any]) -> str:
    return to_yaml({path[-1]: values.get(dotted(path), starting_value(path))})


def starting_value(path: OptionPath) -> Any:
    """Returns the first example of an option, else its default."""
    field = section_at(path[:-1], Config).model_fields[path[-1]]
    return field.examples[0] if field.examples else field.default


def _comment(text: str) -> str:
    return "".join(f"# {line}\n" for line in wrap(text, WIDTH, break_on_hyphens=False, break_long_words=False))
