"""Numbers of adapters (megalite/parallel/adapters.py), which alone have gradients and optimizer state. No torch."""

from __future__ import annotations

from megalite.config import ModelConfig
from megalite.config.sections import AdapterConfig
from megalite.planner.cost.stage_parameters import StageShape, cut
from megalite.planner.workload import TrainingWorkload


def trained_numbers(job: TrainingWorkload, stage: StageShape) -> int:
    """Returns the numbers on one rank of a stage that are trained, before ZeRO cuts them, padding included."""
    if not job.trains_adapters:
        return stage.parameters
    return adapter_numbers(job.model, job.adapter, stage, job.layout.tensor_parallel_size)


def adapter_numbers(model: ModelConfig, adapter: AdapterConfig, stage: StageShape, tensor_parallel_size: int) -> int:
    """Returns the numbers of adapters on one rank of a stage; 0 without any."""
    tp, hidden, features = tensor_parallel_size, model.hidden_size, model.intermediate_size
    query, key_value = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    by_column = {"q_proj": query, "k_proj": key_value, "v_proj": key_value}
    by_row = {"o_proj": query}
    if model.num_experts is None:
        by_column |= {"gate_proj": features, "up_proj": features} if model.gated_mlp else {"up_proj": features}
        by_row["down_proj"] = features
    # of each projection one factor is cut as the weight is, the other has a side of `hidden` and is whole
    cut_sides = sum(cut(size, tp) for name, size in (by_column | by_row).items() if adapter.adapts(name))
    whole_sides = sum(hidden for name in by_column | by_row if adapter.adapts(name))
    return stage.blocks * adapter.rank * (cut_sides + whole_sides)
