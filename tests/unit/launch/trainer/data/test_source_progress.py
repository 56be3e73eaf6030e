"""What the log of a run says of the sources of its mix."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from data_pipeline.samples.mix import Mix, MixStage
from launch.trainer.data.source_progress import SourceProgress


def progress_of(names: list[str]) -> SourceProgress:
    mix = Mix.by_weights(names, [MixStage(0, dict.fromkeys(names, 1))])
    sources = {name: SimpleNamespace(samples_per_epoch=4) for name in names}
    return SourceProgress(cast(Any, SimpleNamespace(mix=mix, sources=sources, sequence_length=8)), 200)


def test_the_end_tells_the_last_loss_of_each_source(caplog: pytest.LogCaptureFixture) -> None:
    """Also of one that the last step has no target of."""
    progress = progress_of(["web", "code"])
    for step, losses in enumerate(({"web": 3.0, "code": 4.0}, {"web": 2.5}, {}), start=1):
        progress.measure({"step": step, "samples": [0, 4 * step], **({"source_losses": losses} if losses else {})})
    with caplog.at_level(logging.INFO):
        progress.on_end("finished")
    assert caplog.messages == ["the last training loss of each source: code 4.0000, web 2.5000"]


@pytest.mark.parametrize(("sources", "told"), [(32, [99, 100, 101, 200]), (33, [100, 200])])
def test_many_sources_are_told_of_rarely(sources: int, told: list[int], caplog: pytest.LogCaptureFixture) -> None:
    names = [f"s{place:02}" for place in range(sources)]
    progress, found = progress_of(names), []
    for step in (99, 100, 101, 200):
        record: dict[str, Any] = {"step": step, "samples": [0, 64], "source_losses": dict.fromkeys(names, 1.0)}
        found += [step] if "source_epochs" in progress.measure(record) else []
    with caplog.at_level(logging.INFO):
        progress.on_end("finished")
    assert found == told and bool(caplog.messages) == (sources == 32)
