"""The guides about model families say what the code says."""

from __future__ import annotations

import inspect

from models.families import olmo2
from tests.helpers.models_page import PAGE, models_page

ADDING = PAGE.with_name("adding_a_model.md")


def test_the_page_of_models_is_that_of_the_registry() -> None:
    """On a failure: python -m tests.helpers.models_page."""
    assert PAGE.read_text(encoding="utf-8") == models_page()


def test_the_walk_through_shows_the_file_of_the_family() -> None:
    assert f"```python\n{inspect.getsource(olmo2)}```" in ADDING.read_text(encoding="utf-8")
