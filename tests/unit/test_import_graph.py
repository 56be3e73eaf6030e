"""No module imports itself through others, not even for its annotations (`if TYPE_CHECKING`)."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter

import grimp
import pytest


def test_no_import_circle() -> None:
    graph = grimp.build_graph("launch", "megalite", "models", "data_pipeline", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"import circle: {' -> '.join(error.args[1])}")
