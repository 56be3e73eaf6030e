"""Output of all commands: tables, JSON, CSV, files and progress bars.

A module that reports something builds a `Table`, and the command prints it: apart from the command line, only this
module knows rich, which it imports when something is printed.
"""

from __future__ import annotations

import csv
import io
import json
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say, visible
from megalite.checkpoint.durable_files import NO_ROOM, write_durably
from megalite.config.path_or_url import url_of
from megalite.config.user_folders import may_be_written

if TYPE_CHECKING:
    from rich.console import Console

log = get_logger(__name__)
SILENCE_S = 10.0  # longest time without a word on what a command does
TRAIN_WORD_S = 5.0  # in a step of the start of training
FIRST_WORD_S = 3.0  # after its start, which itself takes a second or two
WIDTH = 160  # columns, where standard output is a file or a pipe
TEXT_WIDTH = 12  # columns that are left to a column of text before its words are broken


class StyledCell(NamedTuple):
    """A cell in a rich style such as "bold red"."""

    text: str
    style: str


Cell = str | StyledCell


def styled(cells: Iterable[str], style: str | None) -> list[Cell]:
    """The cells of a row in one style; unchanged without a style."""
    return [StyledCell(cell, style) if style else cell for cell in cells]


@dataclass(frozen=True)
class Table:
    """A table in which every cell is shown whole, however narrow the terminal.

    Columns of text (`text_columns`, by index) are aligned left and folded where there is no room; all others hold
    numbers, are aligned right and broken only at spaces. A row that is None is drawn as a line. Cells are never markup.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell] | None]
    title: str = ""
    text_columns: Sequence[int] = (0,)

    @classmethod
    def of(
        cls,
        records: Iterable[Mapping[str, Any]],
        columns: Mapping[str, str],
        title: str = "",
        text_columns: Sequence[int] = (0,),
    ) -> Table:
        """A table with one row per record; `columns` maps each header to its format, such as `{step_s:.3g}`."""
        rows = [[template.format_map(record) for template in columns.values()] for record in records]
        return cls(list(columns), rows, title, text_columns)

    def print(self, to: Console | None = None) -> None:
        """Prints on standard output, or on another console."""
        from rich.table import Table as RichTable
        from rich.text import Text

        to = to or console()

        def texts(row: Sequence[Cell]) -> list[Text]:
            return [
                Text(visible(cell)) if isinstance(cell, str) else Text(visible(cell.text), cell.style) for cell in row
            ]

        rows = [None if row is None else texts(row) for row in self.rows]
        columns = [visible(name) for name in self.columns]
        cells = [[name, *(row[place].plain for row in rows if row)] for place, name in enumerate(columns)]
        borders = len(cells) + 1
        padding = 1 if sum(self._least_widths(cells)) + borders + 2 * len(cells) <= to.width else 0
        widths = self._widths(cells, to.width - borders - 2 * padding * len(cells))
        title = Text(visible(self.title), style="table.title") if self.title else None
        table = RichTable(title=title, title_justify="left", padding=(0, padding))
        for place, (name, width) in enumerate(zip(columns, widths, strict=True)):
            justify = "left" if place in self.text_columns else "right"
            table.add_column(Text(name), width=width, justify=justify, overflow="fold", no_wrap=False)  # type: ignore[arg-type]
        for row in rows:
            if row is None:
                table.add_section()
            else:
                table.add_row(*row)
        to.print(table)

    def _least_widths(self, cells: Sequence[Sequence[str]]) -> list[int]:
        """The widths below which numbers would be broken, and text be hard to read."""
        longest = [max((len(word) for cell in column[1:] for word in cell.split()), default=1) for column in cells]
        return [min(n, TEXT_WIDTH) if place in self.text_columns else n for place, n in enumerate(longest)]

    def _widths(self, cells: Sequence[Sequence[str]], room: int) -> list[int]:
        """Each column as wide as its longest line; where there is no room, the widest gives way, and headers last."""
        from rich.cells import cell_len

        widths = [max(max(map(cell_len, cell.split("\n"))) for cell in column) for column in cells]
        least = self._least_widths(cells)
        headers = [max((len(word) for word in column[0].split()), default=1) for column in cells]
        for lowest in ([max(pair) for pair in zip(least, headers, strict=True)], least):
            while sum(widths) > room and (wide := [n for n, width in enumerate(widths) if width > lowest[n]]):
                widths[max(wide, key=widths.__getitem__)] -= 1
        return widths


def terminal_width() -> int | None:
    """Width for a console; None makes it as wide as the terminal."""
    return None if sys.stdout.isatty() else WIDTH


def console(*, stderr: bool = False) -> Console:
    """A console that takes names and paths as text, never as markup or as control of the terminal."""
    from rich.console import Console
    from rich.text import Text

    class PlainConsole(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(visible(text), **options)

    return PlainConsole(
        width=None if stderr else terminal_width(), highlight=False, markup=False, soft_wrap=True, stderr=stderr
    )


def print_json(values: Any) -> None:
    """Prints indented JSON; numbers that are not finite, which JSON cannot hold, become null."""
    print_result(json.dumps(_finite(values), indent=2, allow_nan=False, default=str))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints at least one row, with a header."""
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    print_result(text.getvalue(), end="")


@contextmanager
def spinner(
    description: str, *, is_shown: bool = True, first_s: float | None = None
) -> Iterator[Callable[[str], None]]:
    """A spinner with the elapsed time on stderr while the block runs; elsewhere than on a terminal, a line every 10 s.

    The first of these lines may come earlier, after `first_s`. Yields a function that replaces the description.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    to = console(stderr=True)
    if is_shown and not to.is_terminal:
        with progress_lines(description, first_s=first_s) as describe:
            yield describe
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=to, transient=True, disable=not is_shown) as progress:
        task = progress.add_task(visible(description))
        yield lambda text: progress.update(task, description=visible(text))


def loading(what: str) -> AbstractContextManager[object]:
    """Says what is being imported, within the 5 s in which a command should give its first sign of life."""
    return spinner(f"loading {what}", first_s=FIRST_WORD_S)


@contextmanager
def progress_lines(
    description: str, every_s: float | None = None, first_s: float | None = None
) -> Iterator[Callable[[str], None]]:
    """Writes the newest description and the elapsed time to stderr every so many seconds, by default 10, unless
    `--quiet`.

    The first line may come earlier, after `first_s`.
    """
    newest, ended, started = [description], threading.Event(), time.monotonic()

    def write() -> None:
        pause_s = first_s or every_s or SILENCE_S
        while not ended.wait(pause_s) and log.isEnabledFor(logging.INFO):
            say(f"megalite: {newest[0]} ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)
            pause_s = every_s or SILENCE_S

    def describe(text: str) -> None:
        newest[0] = text

    thread = threading.Thread(target=write, name="progress", daemon=True)
    thread.start()
    try:
        yield describe
    finally:
        ended.set()
        thread.join()


@contextmanager
def progress_bar(*, is_shown: bool = True, is_bytes: bool = False) -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr while the block runs; elsewhere than on a terminal, a line every 10 s.

    Yields a function of a description, the work done and the total; a new description replaces the bar.
    """
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        ProgressColumn,
        TaskID,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amount: list[ProgressColumn] = [DownloadColumn(), TransferSpeedColumn()] if is_bytes else [TaskProgressColumn()]
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), *amount, TimeRemainingColumn())
    to = console(stderr=True)
    if is_shown and not to.is_terminal:
        with progress_lines("starting") as describe:
            yield lambda description, done, total: describe(f"{description}: {done / max(1, total):.0%}")
        return
    with Progress(*columns, console=to, transient=True, disable=not is_shown) as bar:
        tasks: dict[str, TaskID] = {}

        def report(description: str, done: int, total: int) -> None:
            description = visible(description)
            if description not in tasks:
                for task in tasks.values():
                    bar.update(task, visible=False)
                tasks[description] = bar.add_task(description, total=total)
            bar.update(tasks[description], completed=done)

        yield report


@contextmanager
def changing_lines() -> Iterator[Callable[[Sequence[Sequence[Cell]]], None]]:
    """Yields a function that shows lines of cells in the place of those before; the last ones stay. For a terminal."""
    from rich.live import Live
    from rich.text import Text

    to = console()

    def text_of(line: Sequence[Cell]) -> Text:
        cells = [(visible(cell), "") if isinstance(cell, str) else (visible(cell.text), cell.style) for cell in line]
        return Text.assemble(*cells, no_wrap=True, overflow="ellipsis")

    with Live(console=to, auto_refresh=False) as live:
        yield lambda lines: live.update(Text("\n").join(map(text_of, lines)), refresh=True)


def write_file(path: Path, content: str | bytes) -> None:
    """Writes the whole file or nothing. Raises LaunchError where `path` cannot be written."""
    data = content.encode() if isinstance(content, str) else content
    target = path.resolve()  # the target of a link is replaced, not the link
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout, which must stay what it is
            target.write_bytes(data)
        else:
            write_durably(target, data)
    except OSError as error:
        why = NO_ROOM.get(error.errno or 0)
        told = f"{why}; free some space" if why else f"{error.strerror or error}; give a file in a folder that exists"
        raise LaunchError(f"{path} cannot be written: {told}") from None


def check_local(path: Path, remedy: str) -> None:
    """Raises LaunchError with the `remedy` if `path` is a URL: it would be a folder here, named as the protocol."""
    if url := url_of(path):
        raise LaunchError(f"{url} is a URL: {remedy}")


def check_writable(path: Path) -> None:
    """Checks, before the work whose result goes there, that `path` can be written. Raises LaunchError."""
    check_local(path, "give a local file, and copy it afterwards")
    if path.is_dir():
        raise LaunchError(f"{path} is a folder: name a file")
    folder = path.resolve().parent
    problem = None
    if not folder.is_dir():
        problem = f"{folder} is a file" if folder.exists() else f"there is no folder {folder}"
    elif not may_be_written(folder):
        problem = f"nothing may be written in {folder}"
    if problem:
        raise LaunchError(f"{path} cannot be written: {problem}; give a file in a folder that exists")
