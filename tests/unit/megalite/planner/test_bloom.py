"""BLOOM's published topology sweep: the planner would have chosen as well as those who tried."""

from __future__ import annotations

import pytest

from benchmarks.planner.bloom import ALONE, DEFECTIVE, LEAST_RANKED, TABLE, groups, run_of, spearman
from benchmarks.planner.published import read


def test_layers_that_are_not_printed_make_the_printed_sizes() -> None:
    """12 h^2 per layer; the source's sizes are with or without the embedding, 3.6 billion."""
    for row in read(TABLE):
        if row["md_line"] in DEFECTIVE or row["md_line"] in ALONE:
            continue
        model = run_of(row).job.model
        blocks = 12 * model.hidden_size**2 * model.num_hidden_layers / 1e9
        embedding = model.vocab_size * model.hidden_size / 1e9
        printed = float(row["size"].removesuffix("B"))
        assert min(abs(blocks - printed), abs(blocks + embedding - printed)) < 1.0, row["md_line"]


def test_every_run_uses_all_accelerators_of_its_nodes() -> None:
    for row in read(TABLE):
        if row["md_line"] not in DEFECTIVE and row["md_line"] not in ALONE:
            one = run_of(row)
            assert one.job.layout.world_size == one.cluster.accelerators
            assert one.job.layout.data_parallel_size == int(row["DP"]), row["md_line"]


def test_rank_correlation() -> None:
    assert spearman([1, 2, 3, 4], [10, 20, 30, 25]) == pytest.approx(0.8)
    assert spearman([1, 1, 2], [3, 3, 5]) == pytest.approx(1.0)
    assert spearman([3, 2, 1], [1, 2, 3]) == pytest.approx(-1.0)


def test_the_chosen_layout_is_within_three_percent_of_the_fastest() -> None:
    found = groups()
    assert sum(group.runs for group in found) >= 30
    for group in found:
        assert group.regret <= 0.03, group
        assert group.spearman >= 0.6 or group.runs < LEAST_RANKED, group
