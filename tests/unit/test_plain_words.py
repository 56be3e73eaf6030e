"""Rules of the prose that a program can check: how docstrings begin, and that a class name means one thing."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("launch", "megalite", "models", "data_pipeline", "benchmarks")
# openings of fragments whose subject the reader has to guess
VAGUE = {"Of", "And", "What", "Where", "With", "For", "None", "To", "It", "How", "Which", "Whether", "Who", "That"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), ast.parse(path.read_text())


def test_no_docstring_begins_without_its_subject_or_a_verb() -> None:
    vague = []
    for path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                first = (ast.get_docstring(node) or "").split(maxsplit=1)[:1]
                if first and first[0].strip(",.:;") in VAGUE:
                    vague.append(f"{path}:{getattr(node, 'lineno', 1)}: {first[0]} ...")
    assert not vague, f"{len(vague)} docstrings begin without a subject or a verb:\n" + "\n".join(vague)


def test_a_class_name_means_one_thing() -> None:
    places = defaultdict(list)
    for path, tree in sources():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path))
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert not twice, f"rename one of each: {twice}"
