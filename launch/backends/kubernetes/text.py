"""Objects as YAML that every reader takes alike."""

from __future__ import annotations

import re
from collections.abc import Sequence

import yaml

from launch.backends.kubernetes.job import Manifest

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # which some readers make something else of


class _Dumper(yaml.SafeDumper):
    """Quotes all text that could be a number or a bool: PyYAML and kubectl differ in which words are, as in 1e3."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = PLAIN.fullmatch(value) and value.lower() not in WORDS
    style = "|" if "\n" in value else "" if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
_Dumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def to_yaml(objects: Sequence[Manifest], heading: str) -> str:
    """One document each, in their order, behind a comment."""
    lines = "".join(f"# {line}\n" for line in heading.splitlines())
    return lines + yaml.dump_all(
        objects, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=4096, explicit_start=True
    )


def from_yaml(text: str) -> list[Manifest]:
    """What a reader makes of it."""
    return list(yaml.safe_load_all(text))
