"""The arithmetic and the words of `benchmarks.peers`, and that all its sides begin with the same weights and data."""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness, peers
from benchmarks.peer_sides import BATCH, LAYOUTS, initial_weights, rows_of, tokens_of_steps, transformers_llama
from benchmarks.peers import CannotRun, PeerRanks, PeerTurn, reason_in


def test_a_ratio_is_the_median_over_rounds_and_another_loss_is_told() -> None:
    ours = [PeerTurn(wall, 2.0, 700.0, 9.0) for wall in (1.0, 2.0, 4.0)]
    theirs = [PeerTurn(wall, 3.0, 800.0, 9.5) for wall in (3.0, 2.0, 8.0)]
    one, other = peers.rows("dp2", {"megalite": ours, "plain": theirs})
    assert one == "| dp2 | megalite | 2000 | 1.00x | 2000 | 1.00x | 700 | 9.0000 |"
    assert other == "| dp2 | plain | 3000 | 2.00x | 3000 | 1.50x | 800 | 9.5000 (differs by 5.0e-01) |"


def test_ranks_of_a_side_are_united() -> None:
    ranks = [{"wall_s": wall, "cpu_s": 1.0, "memory_mib": 500.0, "loss": 9.0} for wall in (2.0, 3.0)]
    assert PeerTurn.of(ranks) == PeerTurn(3.0, 2.0, 1000.0, 9.0)


def test_the_reason_is_the_last_error_of_a_process() -> None:
    text = (
        "Traceback (most recent call last):\n  File x\nModuleNotFoundError: No module named 'triton'\n[rank] closing\n"
    )
    assert reason_in(text) == "ModuleNotFoundError: No module named 'triton'"
    assert reason_in("") == "it died without a word"
    with pytest.raises(CannotRun, match="KeyError: 'nobody'"):
        PeerRanks("nobody", "one", sys.executable)


def test_a_side_that_dies_in_its_turn_is_dropped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Stand:
        def __init__(self, side: str, layout: str, python: str) -> None:
            self.side, self.turns = side, 0

        def turn(self, steps: int) -> PeerTurn:
            self.turns += 1
            if (self.side, self.turns) == ("plain", 2):
                raise CannotRun("rank 1 died: MemoryError")
            return PeerTurn(1.0, 1.0, 1.0, 9.0)

        def close(self) -> None:
            closed.append(self.side)

    monkeypatch.setattr(peers, "PeerRanks", Stand)
    taken, missing = peers.compare("dp2", ["plain", "megalite"], 3, 2)
    assert {side: len(turns) for side, turns in taken.items()} == {"megalite": 3}
    assert missing == ["plain, dp2, in round 2: rank 1 died: MemoryError"] and closed == ["plain", "megalite"]


def test_a_rank_that_dies_is_named_while_another_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nif [ "$RANK" = 0 ]; then exec sleep 60; fi\necho "ValueError: gone" >&2; exit 1\n')
    python.chmod(0o700)
    monkeypatch.setattr(peers, "POLL_S", 0.02)
    with pytest.raises(CannotRun, match=r"^rank 1 died: ValueError: gone$"):
        PeerRanks("plain", "dp2", str(python))


def test_the_page_names_what_was_not_measured() -> None:
    options = argparse.Namespace(sides=["megalite", "plain"], rounds=9, steps=2)
    text = peers.report(["| row |"], ["accelerate, one: ModuleNotFoundError: x"], options, harness.Load())
    assert "| row |\n\n- not measured: accelerate, one: ModuleNotFoundError: x\n" in text
    assert ". Median of 9 rounds of 2 steps" in text


def test_ranks_train_on_all_sequences_of_a_step_once() -> None:
    for layout in LAYOUTS:
        ranks = range(2) if layout == "dp2" else range(1)
        assert [row for rank in ranks for row in range(BATCH)[rows_of(layout, rank)]] == list(range(BATCH))
    first, second = (list(islice(tokens_of_steps(), 2)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)) and not np.array_equal(*first)


def test_transformers_begins_with_the_weights_of_megalite() -> None:
    weights, model = initial_weights(), transformers_llama()
    assert {name: tuple(one.shape) for name, one in weights.items()} == {
        name: tuple(one.shape) for name, one in model.named_parameters()
    }
    assert all(one.equal(weights[name]) for name, one in model.named_parameters())
    assert 0.019 < float(weights["model.layers.3.mlp.down_proj.weight"].std()) < 0.021
