"""One training on one device and on two, held against each other as `megalite compare` does."""

from __future__ import annotations

import json
import sys
from typing import Any

import pytest

from launch.cli.app import main
from tests.e2e.conftest import References
from tests.helpers.commands import metrics

pytestmark = pytest.mark.slow


def test_one_device_and_two_agree(
    tiny: dict[str, Any], references: References, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With real receipts and records: would catch a fact that a run does not write as the comparison reads it."""
    tiny["training"] |= {"steps": 8, "evaluation": {"interval": 4, "samples": 4}}
    tiny["monitor"] = {"plot": False, "report": False}
    one = references.of(tiny, world_size=1).run_dir
    two = references.of(tiny | {"parallel": {"tensor_parallel_size": 2}}).run_dir
    monkeypatch.setattr(sys, "argv", ["megalite", "compare", str(one), str(two), "--json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    found = json.loads(capsys.readouterr().out)
    pair = found["against_first"][0]
    assert pair["verdict"] == "agrees" and pair["steps"] == 8 and pair["need_not_agree"] == []
    assert pair["tolerance"] == 2e-3
    losses = [[record["loss"] for record in metrics(run)] for run in (one, two)]
    largest = max(abs(a - b) / max(a, b) for a, b in zip(*losses, strict=True))
    assert pair["largest_loss"]["relative"] == pytest.approx(largest) and largest < 1e-5
    assert pair["largest_evaluation_loss"]["step"] in (4, 8)
    assert [option["name"] for option in found["options"]] == ["parallel.tensor_parallel_size"]
    parts = [run["parts_s"] for run in found["runs"]]
    assert parts[1]["tensor_collectives"] > 0 and "tensor_collectives" not in parts[0]
