"""How all plan commands print: tables that no width makes unreadable, and JSON and CSV for programs. No torch here."""

from __future__ import annotations

import csv
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch.errors import LaunchError
from megalite.checkpoint.files import write_durably

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 120  # off a terminal
NAME_WIDTH = 12  # of a column of names, which is folded further only where it is shorter


def terminal_width() -> int | None:
    """None: as wide as the terminal is."""
    return None if sys.stdout.isatty() else WIDTH


def console() -> Console:
    """What names and paths hold is text, never markup."""
    from rich.console import Console

    return Console(width=terminal_width(), highlight=False, markup=False, soft_wrap=True)


def show_table(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str] | None],
    *,
    names: Sequence[int] = (0,),
    to: Console | None = None,
) -> None:
    """On standard output; `names` are the columns of words, which give way first, and None is a line across.

    Every cell is shown whole: words are folded where there is no room, numbers only at spaces.
    """
    from rich.table import Table
    from rich.text import Text

    to = to or console()
    cells = [[column, *(row[place] for row in rows if row is not None)] for place, column in enumerate(columns)]
    padding = 1 if _needed(cells, names, padding=1) <= to.width else 0
    room = to.width - _borders(len(columns), padding)
    table = Table(title=Text(title, style="table.title"), title_justify="left", padding=(0, padding))
    for place, (column, width) in enumerate(zip(columns, _widths(cells, names, room), strict=True)):
        table.add_column(
            Text(column), width=width, justify="left" if place in names else "right", overflow="fold", no_wrap=False
        )
    for row in rows:
        if row is None:
            table.add_section()
        else:
            table.add_row(*map(Text, row))
    to.print(table)


def _needed(cells: Sequence[Sequence[str]], names: Sequence[int], *, padding: int) -> int:
    return sum(_least(cells, names)) + _borders(len(cells), padding)


def _borders(columns: int, padding: int) -> int:
    return columns * (1 + 2 * padding) + 1


def _least(cells: Sequence[Sequence[str]], names: Sequence[int]) -> list[int]:
    """The widths below which numbers would be cut, and names be hard to read; headers may be folded."""
    longest = [max((len(word) for cell in column[1:] for word in cell.split()), default=1) for column in cells]
    return [min(width, NAME_WIDTH) if place in names else width for place, width in enumerate(longest)]


def _widths(cells: Sequence[Sequence[str]], names: Sequence[int], room: int) -> list[int]:
    """As wide as their longest line; where there is no room for that, the widest gives way, headers last."""
    from rich.cells import cell_len

    widths = [max(max(map(cell_len, cell.split("\n"))) for cell in column) for column in cells]
    least = _least(cells, names)
    headers = [max((len(word) for word in column[0].split()), default=1) for column in cells]
    for lowest in ([max(pair) for pair in zip(least, headers, strict=True)], least):
        while sum(widths) > room and (wide := [n for n, width in enumerate(widths) if width > lowest[n]]):
            widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def write_file(path: Path, text: str) -> None:
    """Whole or not at all. Raises LaunchError where `path` cannot be written."""
    target = path.resolve()  # what a link leads to is replaced, not the link
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout, which must stay what it is
            target.write_text(text, encoding="utf-8")
        else:
            write_durably(target, text.encode())
    except OSError as error:
        reason = error.strerror or str(error)
        raise LaunchError(f"{path} cannot be written: {reason}; give a file in a folder that exists") from None


def check_writable(path: Path) -> None:
    """Before the work whose result is to be written. Raises LaunchError."""
    folder = path.resolve().parent
    problem = None
    if path.is_dir():
        problem = "it is a folder"
    elif not folder.is_dir():
        problem = f"there is no folder {folder}"
    elif not os.access(folder, os.W_OK | os.X_OK):
        problem = f"nothing may be written in {folder}"
    if problem:
        raise LaunchError(f"{path} cannot be written: {problem}; give a file in a folder that exists")


def print_json(values: Any) -> None:
    """With null for what is not finite, which JSON has no word for."""
    print(json.dumps(_finite(values), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """One row at least, with a header."""
    writer = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
