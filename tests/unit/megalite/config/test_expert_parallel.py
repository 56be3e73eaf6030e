"""Rules of expert parallelism."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import ConfigError, resolve_layout
from tests.helpers.odd_sizes import config_of

EXPERTS = {"model_type": "mixtral", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7}


@pytest.mark.parametrize(
    ("ep", "changes", "said"),
    [
        (2, {"model": {"model_type": "llama"}}, "use 1, or set num_experts"),
        (2, {"model": EXPERTS | {"model_type": "qwen3_moe", "mlp_only_layers": [0, 1, 2, 3, 4]}}, "names every layer"),
        (3, {}, "must divide model.num_experts 8 and the 4 replicas (data-parallel x context-parallel size): use an "),
        (3, {}, "expert_parallel_size of 2 or 4"),
        (8, {}, "expert_parallel_size of 4"),
        (2, {"parallel": {"zero_stage": 3}}, "use zero_stage 1 or 2"),
        (2, {"optimizer": {"name": "muon"}}, "use adamw or sgd"),
        (4, {}, None),
    ],
)
def test_what_cannot_be_dealt_is_one_sentence(ep: int, changes: dict[str, Any], said: str | None) -> None:
    parallel = {"expert_parallel_size": ep, "context_parallel_size": 2} | changes.pop("parallel", {})
    sizes = {"global_batch_size": 2, "micro_batch_size": 1, "sequence_length": 32}
    model = changes.pop("model", EXPERTS)
    if said is None:
        layout = resolve_layout(config_of(32, model=model, parallel=parallel, training=sizes, **changes), 4, "cpu")
        assert layout.expert_parallel_size == ep
        return
    with pytest.raises(ConfigError) as raised:
        resolve_layout(config_of(32, model=model, parallel=parallel, training=sizes, **changes), 4, "cpu")
    assert len(raised.value.sentences) == 1 and said in raised.value.sentences[0], raised.value.sentences
