"""What plan commands take at most."""

from __future__ import annotations

LARGEST = 10_000_000  # accelerators: more is a typing error
