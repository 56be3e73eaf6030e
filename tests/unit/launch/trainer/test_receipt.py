"""What a run keeps of the words it was started with, and of other programs' errors."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from launch.trainer.start.run_folder import write_receipt
from megalite.config import Config, resolve_layout
from megalite.monitor.events import EventLog


def test_commands_and_errors_are_kept_without_their_secrets(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other launchers have words of their own, and other programs' errors repeat what they were given."""
    config, secret = Config.model_validate(tiny | {"run_dir": str(tmp_path)}), "hunter2hunter2"
    monkeypatch.setattr(sys, "argv", ["train.py", "config.yaml", f"--proxy=http://me:{secret}@proxy:3128", "--force"])
    write_receipt(config, resolve_layout(config, 1, "cpu"), {})
    EventLog(tmp_path / "events.jsonl").write("save_failed", reason=f"GET 'https://{secret}@host/x': denied", step=3)
    receipt, events = (tmp_path / "receipt.json").read_text(), (tmp_path / "events.jsonl").read_text()
    assert secret not in receipt + events
    assert '"--force"' in receipt and "proxy" in receipt and '\': denied", "step": 3' in events
