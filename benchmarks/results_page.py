"""The page of results that a benchmark writes: its table anew, and below it what was written by hand."""

from __future__ import annotations

from pathlib import Path

BY_HAND = "\n<!-- below: written by hand, kept when the table is renewed -->\n"


def renew_page(path: Path, text: str) -> None:
    """Writes `text` to the page, and keeps what it has below the mark."""
    notes = path.read_text().partition(BY_HAND)[2] if path.exists() else ""
    path.write_text(text + BY_HAND + notes)
