"""The text of a config from another stack's files, and the table of what became of each word."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launch.migration.translation import OUTCOMES, MigratedConfig
from launch.output import Table
from megalite.config.foreign_words import Kind, stack
from megalite.config.yaml_text import to_yaml


def config_text(kind: Kind, paths: Sequence[Path], migrated: MigratedConfig) -> str:
    """Returns the YAML, in which a comment marks options that the files do not tell."""
    names = ", ".join(path.name.replace("\n", " ") for path in paths)
    lines = to_yaml(migrated.values()).splitlines()
    section = ""
    for place, line in enumerate(lines):
        name = line.strip().partition(":")[0]
        section = name if not line.startswith(" ") else section
        if line.startswith(("  ", name)) and ({name, f"{section}.{name}"} & set(migrated.filled)):
            lines[place] = f"{line}  # not in the files: yours to set"
    return "\n".join([f"# Written by `megalite config from`, from files of {stack(kind).name}: {names}", *lines, ""])


def table_of(migrated: MigratedConfig) -> Table:
    """Returns the table, in the order of `OUTCOMES`; words that say the same are one row."""
    ordered = sorted(migrated.lines, key=lambda line: OUTCOMES.index(line.outcome))
    columns = ("there", "value", "became", "here")
    rows = [(line.word, line.value, line.outcome, line.here) for line in ordered]
    return Table(columns, rows, text_columns=range(len(columns)))
