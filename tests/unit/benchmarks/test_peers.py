"""Turns of sides and the words of `benchmarks.peers`, and that all its sides begin with the same weights and data."""

from __future__ import annotations

import argparse
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from benchmarks import harness, peers, turns
from benchmarks.peer_sides import LAYOUTS, PeerLayout, initial_weights, tokens_of_steps, transformers_llama
from benchmarks.peer_stacks import _megatron_weights
from benchmarks.turns import CannotRun, RanksOfSide, SideTurn, reason_in


def test_a_ratio_is_the_median_over_rounds_and_another_loss_is_told() -> None:
    first = [SideTurn(wall, 3.0, 800.0, 9.5) for wall in (3.0, 2.0, 8.0)]
    second = [SideTurn(wall, 2.0, 700.0, 9.0) for wall in (1.0, 2.0, 4.0)]
    one, other = peers.rows("dp2", {"plain": first, "megalite": second})
    assert one == "| dp2 | plain | 3000 | 1 | 3000 | 1 | 800 | 9.5000 |"
    ratios = "2000 | 2.00 (1.50 to 2.50) | 2000 | 1.50 (1.50 to 1.50)"
    assert other == f"| dp2 | megalite | {ratios} | 700 | 9.0000 (differs by 5.0e-01) |"


def test_ranks_of_a_side_are_united() -> None:
    ranks = [{"wall_s": wall, "cpu_s": 1.0, "memory_mib": 500.0, "loss": 9.0} for wall in (2.0, 3.0)]
    assert SideTurn.of(ranks) == SideTurn(3.0, 2.0, 1000.0, 9.0)


def test_ranks_train_when_told_to(tmp_path: Path) -> None:
    side = tmp_path / "side.py"
    side.write_text("import os, megalite\ndef side(word):\n    return lambda: len(word) + float(os.environ['RANK'])\n")
    ranks = RanksOfSide((str(side), "side", "four"), 2)
    try:
        for steps in (2, 1):
            turn = ranks.turn(steps)
            assert turn.loss == 4.0 and 0 < turn.wall_s < 1 and turn.memory_mib > 10
    finally:
        ranks.close()


def test_the_reason_is_the_last_error_of_a_process() -> None:
    text = (
        "Traceback (most recent call last):\n  File x\n[rank1]: ModuleNotFoundError: No module named 'triton'\n"
        "[rank0]: RuntimeError: pair.cc: Connection closed by peer\n[rank] closing\n"
    )
    assert reason_in(text) == "ModuleNotFoundError: No module named 'triton'"
    assert reason_in("") == "it died without a word"
    with pytest.raises(CannotRun, match="has no attribute 'nobody'"):
        RanksOfSide(("benchmarks/peer_sides.py", "nobody", "one"), 1)


def test_a_side_that_dies_in_its_turn_is_dropped_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []

    class Stand:
        def __init__(self, words: tuple[str, str, str], ranks: int, **_: object) -> None:
            assert ranks == 2
            self.function, self.turns = words[1], 0

        def turn(self, steps: int) -> SideTurn:
            self.turns += 1
            if (self.function, self.turns) == ("plain", 2):
                raise CannotRun("rank 1 died: MemoryError")
            return SideTurn(1.0, 1.0, 1.0, 9.0)

        def close(self) -> None:
            closed.append(self.function)

    monkeypatch.setattr(peers, "RanksOfSide", Stand)
    taken, missing = peers.compare("dp2", ["plain", "megalite"], 3, 2)
    assert {side: len(turns) for side, turns in taken.items()} == {"megalite": 3}
    assert missing == ["plain, dp2: rank 1 died: MemoryError"] and closed == ["plain", "megalite"]


def test_a_rank_that_dies_is_named_while_another_waits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\nif [ "$RANK" = 0 ]; then exec sleep 60; fi\necho "ValueError: gone" >&2; exit 1\n')
    python.chmod(0o700)
    monkeypatch.setattr(turns, "POLL_S", 0.02)
    with pytest.raises(CannotRun, match=r"^rank 1 died: ValueError: gone$"):
        RanksOfSide(("benchmarks/peer_sides.py", "plain", "dp2"), 2, python=str(python))


def test_the_page_names_what_was_not_measured() -> None:
    options = argparse.Namespace(rounds=9, steps=2)
    text = peers.report(["| row |"], ["accelerate, one: ModuleNotFoundError: x"], options, harness.Load())
    assert "| row |\n\nDid not run:\n\n- accelerate, one: ModuleNotFoundError: x\n" in text
    assert ". 9 rounds of 2 steps" in text and "megatron-core 0.16.1" in text


def test_replicas_train_on_all_sequences_of_a_step_once() -> None:
    for layout in LAYOUTS.values():
        tokens = np.arange(layout.batch)[:, None] + np.zeros((1, 3), dtype=int)
        seen = {
            layout.replica(rank): [one for inputs, _ in layout.micro_batches_of(tokens, rank) for one in inputs[:, 0]]
            for rank in range(layout.ranks)
        }
        assert [row for _, rows in sorted(seen.items()) for row in rows] == list(range(layout.batch))
        assert len(layout.micro_batches_of(tokens, 0)) == layout.micro_batches
    first, second = (list(islice(tokens_of_steps(LAYOUTS["one"]), 2)) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, second, strict=True)) and not np.array_equal(*first)


def test_parts_of_megatron_hold_all_weights_once() -> None:
    layout = PeerLayout(tensor=2)
    parts = [_megatron_weights(layout, part, 0) for part in range(2)]
    numbers = sum(
        float((one.double() ** 2).sum()) for part in parts for name, one in part.items() if "norm" not in name
    )
    whole = initial_weights()
    assert numbers == pytest.approx(sum(float((w.double() ** 2).sum()) for n, w in whole.items() if "norm" not in n))
    qkv, size = parts[1]["decoder.layers.7.self_attention.linear_qkv.weight"], 64
    keys = whole["model.layers.7.self_attn.k_proj.weight"]
    assert qkv[3 * size : 4 * size].equal(keys[size:])  # behind the three heads of queries of its group


def test_transformers_begins_with_the_weights_of_megalite() -> None:
    weights, model = initial_weights(), transformers_llama()
    assert {name: tuple(one.shape) for name, one in weights.items()} == {
        name: tuple(one.shape) for name, one in model.named_parameters()
    }
    assert all(one.equal(weights[name]) for name, one in model.named_parameters())
    assert 0.019 < float(weights["model.layers.3.mlp.down_proj.weight"].std()) < 0.021
