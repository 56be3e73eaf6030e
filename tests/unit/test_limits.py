"""The limits of docs/limits.md: no figure is above its limit, and a limit follows a figure that has fallen."""

from __future__ import annotations

from tests.helpers.house import DESIGN, figures, limits, signs

ELSEWHERE = ("a batch's way", "worker-seconds")  # tests/e2e/test_way_of_a_batch.py and tests/conftest.py hold them

SPARE = 1.03  # how far a limit may stand above its figure, or by 60, before it must be lowered


def test_figures_are_within_their_limits() -> None:
    """A change that breaks one makes room first. A limit that nothing measures, or a room without one, fails too."""
    now = figures()
    known = {name: limit for name, limit in limits().items() if not name.startswith(ELSEWHERE)}
    assert set(now) == set(known)
    above = {name: (figure, known[name]) for name, figure in now.items() if figure > known[name]}
    loose = {name: known[name] for name, figure in now.items() if known[name] > max(SPARE * figure, figure + 60)}
    assert not above and not loose, (
        f"above their limits (docs/limits.md): {above}; to be lowered by python -m tests.helpers.house --lower: {loose}"
    )


def test_every_room_has_a_sign_in_the_design() -> None:
    rows = signs()
    assert not [row for row in rows if row.endswith("|  |")], "a package without a docstring"
    table = "| room | sign |\n|---|---|\n" + "\n".join(rows) + "\n\n"
    assert table in DESIGN.read_text(encoding="utf-8"), "python -m tests.helpers.house --signs"
