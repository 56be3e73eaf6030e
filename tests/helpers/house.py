"""Measures the tree: lines of its rooms, long files and functions, and the signs of rooms.

python -m tests.helpers.house            # today's figures beside the limits of docs/limits.md
python -m tests.helpers.house --lower    # lowers each limit that today's figure is below; none rises
python -m tests.helpers.house --signs    # writes the rooms' table of docs/design.md
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.commands import ROOT

LIMITS, DESIGN = ROOT / "docs" / "limits.md", ROOT / "docs" / "design.md"
SOURCES = ("megalite", "models", "data_pipeline", "launch")
STUDY = (
    *("megalite/planner/reliability", "megalite/planner/placement", "launch/planning", "launch/inspection"),
    *("launch/experiments", "launch/parity", "launch/pages"),
)
"""Rooms of the second product; what else lies in the sources is the first. pyproject.toml has the contract."""
LONG_FILE, LONG_FUNCTION, SHORT_FUNCTION = 400, 60, 5  # lines
STEPS = (50, 10, 1)  # a limit is the figure rounded up to a multiple of the first that is below a tenth of it
IMPORTED = "import sys, launch.cli.app; print(len([name for name in sys.modules]))"


def figures() -> dict[str, int]:
    """Returns today's figures by the names that docs/limits.md gives them."""
    paths = sorted(path for folder in SOURCES for path in (ROOT / folder).rglob("*.py"))
    files = {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in paths}
    lines = {path: text.count("\n") for path, text in files.items()}
    nodes = (node for text in files.values() for node in ast.walk(ast.parse(text)))
    of_functions = (node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    functions = [(node.end_lineno or node.lineno) - node.lineno + 1 for node in of_functions]
    short = sum(length <= SHORT_FUNCTION for length in functions)
    study = sum(count for path, count in lines.items() if path.startswith(STUDY))
    imported = subprocess.run([sys.executable, "-c", IMPORTED], cwd=ROOT, capture_output=True, text=True, check=True)
    measured = {
        "all sources": sum(lines.values()),
        "train": sum(lines.values()) - study,
        "study": study,
        "files over 400 lines": sum(count > LONG_FILE for count in lines.values()),
        "functions over 60 lines": sum(length > LONG_FUNCTION for length in functions),
        "functions up to 5 lines, per cent": -(-100 * short // len(functions)),
        "modules that the command line imports": int(imported.stdout),
        "tests": sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "tests").rglob("*.py")),
        "benchmarks": sum(path.read_text(encoding="utf-8").count("\n") for path in (ROOT / "benchmarks").rglob("*.py")),
    }
    for path, count in lines.items():
        name = f"`{'/'.join(Path(path).parts[:-1][:2])}`"  # two folders deep, or one where files lie there
        measured[name] = measured.get(name, 0) + count
    return measured


def limits() -> dict[str, int]:
    """Returns the limits of docs/limits.md."""
    rows = re.findall(r"^\| (.+?) \| ([\d,]+) \|", LIMITS.read_text(encoding="utf-8"), re.MULTILINE)
    return {name: int(limit.replace(",", "")) for name, limit in rows}


def signs() -> list[str]:
    """Returns the rows of the rooms' table in docs/design.md: each package and the first line of its docstring."""
    rows = []
    for name in SOURCES:
        for init in sorted((ROOT / name).rglob("__init__.py")):
            sign = (ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or "").partition("\n")[0]
            rows.append(f"| `{init.parent.relative_to(ROOT)}` | {sign} |")
    return rows


def _lower() -> None:
    now, text = figures(), LIMITS.read_text(encoding="utf-8")
    for name, limit in limits().items():
        figure = now.get(name, limit)
        step = next((step for step in STEPS if step * 10 <= figure), 1)
        lower = -(-figure // step) * step
        if lower < limit:
            text = text.replace(f"| {name} | {limit:,} |", f"| {name} | {lower:,} |")
    LIMITS.write_text(text, encoding="utf-8")


def _write_signs() -> None:
    head = "| room | sign |\n|---|---|\n"
    rows = "".join(f"{row}\n" for row in signs())
    text = DESIGN.read_text(encoding="utf-8")
    DESIGN.write_text(re.sub(re.escape(head) + r"(\|.*\n)*", lambda _: head + rows, text), encoding="utf-8")


if __name__ == "__main__":
    if "--lower" in sys.argv:
        _lower()
    if "--signs" in sys.argv:
        _write_signs()
    known = limits()
    for name, figure in figures().items():
        print(f"{name:40} {figure:7,} of {known.get(name, 0):7,}")
    print("a batch's way: pytest -s tests/e2e/test_way_of_a_batch.py")
