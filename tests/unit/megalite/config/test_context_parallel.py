"""Rules of context parallelism: which kind `auto` is, and what cannot be cut."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import Config, ConfigError, resolve_layout, wanted_world_size
from megalite.config.rules.context import context_parallel_kind
from tests.helpers.odd_sizes import config_of


def config(sequence: int = 64, heads: tuple[int, int] = (8, 2), batch: int = 1, **parallel: Any) -> Config:
    model = {"num_attention_heads": heads[0], "num_key_value_heads": heads[1], "head_dim": 8}
    sizes = {"global_batch_size": batch, "micro_batch_size": 1, "sequence_length": sequence}
    return config_of(sequence, model=model, parallel=parallel, training=sizes)


@pytest.mark.parametrize(
    ("heads", "cp", "kind"),
    [
        ((8, 2), 2, "all_gather"),  # 4 heads of keys and values come in, or 10 go and come
        ((8, 8), 2, "all_gather"),  # 16 against 16: the one that needs no exchange
        ((8, 8), 4, "ulysses"),
        ((8, 2), 8, "all_gather"),  # keys and values would be repeated for eight ranks
        ((32, 8), 4, "all_gather"),
        ((32, 8), 8, "ulysses"),
        ((6, 6), 4, "all_gather"),  # heads cannot be dealt
    ],
)
def test_auto_moves_fewer_bytes(heads: tuple[int, int], cp: int, kind: str) -> None:
    assert context_parallel_kind(config(heads=heads, context_parallel_size=cp)) == kind


def test_auto_takes_what_can_cut_the_sequence() -> None:
    whole = config(36, context_parallel_size=4)
    assert resolve_layout(whole, 4, "cpu").context_parallel_kind == "ulysses"
    with pytest.raises(
        ConfigError, match=r"cannot be cut by parallel.context_parallel_size 4 \(all_gather\).* 32 or 40"
    ):
        resolve_layout(config(36, context_parallel_size=4, context_parallel_kind="all_gather"), 4, "cpu")


@pytest.mark.parametrize(
    ("parallel", "sequence", "said"),
    [
        (
            {"context_parallel_size": 3, "context_parallel_kind": "ulysses"},
            66,
            "cannot deal 8 heads and 2 key/value heads",
        ),
        ({"context_parallel_size": 3}, 64, "use a sequence_length of 60 or 66"),
        (
            {"context_parallel_size": 2, "tensor_parallel_size": 4, "sequence_parallel": True},
            68,
            "by parallel.context_parallel_size 2, parallel.tensor_parallel_size 4 and parallel.sequence_parallel",
        ),
    ],
)
def test_what_cannot_be_cut_is_one_sentence(parallel: dict[str, Any], sequence: int, said: str) -> None:
    tried = config(sequence, **parallel)
    with pytest.raises(ConfigError) as raised:
        resolve_layout(tried, wanted_world_size(tried, None), "cpu")
    assert len(raised.value.sentences) == 1 and said in raised.value.sentences[0], raised.value.sentences


def test_ranks_that_share_sequences_make_one_replica() -> None:
    shared = config(batch=6, context_parallel_size=2, tensor_parallel_size=2, data_parallel_size="auto")
    assert wanted_world_size(shared, 13) == 12
    layout = resolve_layout(shared, 12, "cpu")
    assert (layout.data_parallel_size, layout.replicas, layout.gradient_accumulation_steps) == (3, 6, 2)
    with pytest.raises(ConfigError, match="context_parallel_size 2 = 4 does not divide the 10 processes"):
        resolve_layout(shared, 10, "cpu")
