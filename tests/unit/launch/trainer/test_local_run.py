"""The end of `megalite train` on this machine, whatever its ranks have ended with."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launch.errors import LaunchError
from launch.trainer import local_run
from megalite.config import Config
from megalite.distributed.rank_admission import ATTEMPT
from tests.helpers.attempts import save


@pytest.mark.parametrize(
    ("code", "saved", "said"),
    [
        (137, 10, "the same command goes on from step 10"),
        (86, None, "the same command begins again with step 1"),
        (2, 10, ""),
        (75, 10, ""),
    ],
)
@pytest.mark.parametrize("is_supervised", [False, True])
def test_a_run_that_breaks_says_how_it_goes_on(
    code: int,
    saved: int | None,
    said: str,
    is_supervised: bool,
    tiny: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a kill the last word was the watchdog's, and nothing told that the same command would do."""
    config = Config.model_validate(tiny)
    if saved is not None:
        save(Path(config.run_dir), saved)
    start = SimpleNamespace(
        layout=SimpleNamespace(world_size=1),
        environment={},
        environment_in_words="",
        device="cpu",
        notices=(),
        overrides=(),
        position=None,
    )
    monkeypatch.setattr(local_run, "check_start", lambda *_: start)
    monkeypatch.setattr(local_run, "finish_if_complete", lambda _: False)
    monkeypatch.setattr(local_run, "Mesh", SimpleNamespace(of=lambda layout: layout))
    monkeypatch.setattr(local_run, "start_local_ranks", lambda *_: code)
    monkeypatch.delenv(ATTEMPT, raising=False)
    if is_supervised:
        monkeypatch.setenv(ATTEMPT, "an attempt")  # which is started again
    assert local_run.start_local_run(cast(Config, config), []) == code
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([said] if said and not is_supervised else [])


def test_slow_checks_before_a_run_are_not_silent(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine nothing was said for a minute and a half, until the ranks began."""
    monkeypatch.setattr("launch.trainer.local_run.TRAIN_WORD_S", 0.01)

    def slow(*_: object, **__: object) -> None:
        time.sleep(0.2)
        raise LaunchError("it is refused")

    monkeypatch.setattr("launch.trainer.local_run.check_start", slow)
    for begin in (local_run.print_dry_run, lambda config: local_run.start_local_run(config, [])):
        with pytest.raises(LaunchError, match="it is refused"):
            begin(Config.model_validate(tiny))
        assert "megalite: checking data, checkpoint and memory (0 s)" in capsys.readouterr().err
