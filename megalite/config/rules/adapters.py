"""Rules about `adapter`: what it needs, and what does not go with weights that stay as they are."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.config.model import ModelConfig
from megalite.config.sections import AdapterConfig

OF_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")


def problems_with_adapter(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule. Options that are `auto` have their simplest values here; their rules are
    asked again for every layout that may be chosen."""
    adapter = config.adapter
    if adapter.name == "none":
        for option, default in AdapterConfig():
            if getattr(adapter, option) != default:
                yield (
                    f"adapter.{option} {getattr(adapter, option)} has no effect with adapter.name none, which trains "
                    "the model itself: set adapter.name lora, or remove it"
                )
        return
    if config.training.initialize_from is None:
        yield (
            "adapter.name lora keeps the model's weights as they are, and without training.initialize_from they are "
            "random: set it to a Hugging Face folder or hub id, or to a checkpoint"
        )
    yield from _targets(config)
    yield from _other_options(config)


def projections_of_attention(model: ModelConfig) -> tuple[str, ...]:
    """Returns the names of a block's projections in attention."""
    if model.kv_lora_rank is None:
        return ("q_proj", "k_proj", "v_proj", "o_proj")
    queries = ("q_proj",) if model.q_lora_rank is None else ("q_a_proj", "q_b_proj")
    return (*queries, "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")


def _targets(config: Config) -> Iterator[str]:
    adapter, model = config.adapter, config.model
    shown = adapter.targets if isinstance(adapter.targets, str) else ", ".join(adapter.targets)
    of_attention = projections_of_attention(model)
    unknown = [name for name in adapter.targets if name not in (*of_attention, *OF_FEED_FORWARD)]
    if adapter.targets != "all-linear" and unknown:
        kind = "no latent" if model.kv_lora_rank is None else "latent"
        yield (
            f"adapter.targets {shown} names {', '.join(unknown)}, which this model with {kind} attention has not: use "
            f"{', '.join(of_attention)}"
        )
    if model.num_experts is not None and any(map(adapter.adapts, OF_FEED_FORWARD)):
        yield (
            f"adapter.targets {shown} reaches into blocks with experts (model.num_experts {model.num_experts}), which "
            f"have no adapters: use [{', '.join(of_attention)}] or some of them"
        )
    elif not model.gated_mlp and adapter.targets != "all-linear" and "gate_proj" in adapter.targets:
        yield (
            f"adapter.targets {shown} has a gate_proj, and the MLP of this model has none (model.gated_mlp false): "
            "remove it"
        )


def _other_options(config: Config) -> Iterator[str]:
    option, float8 = "adapter.name lora", config.precision.float8
    if config.parallel.zero_stage == 3:
        yield (
            f"{option} does not go with parallel.zero_stage 3, as neither gradients nor optimizer state of the model "
            "are there to be sharded: use zero_stage 1 or 2, and tensor or pipeline parallelism for large weights"
        )
    if config.optimizer.name == "muon":
        yield f"{option} does not go with optimizer.name muon, which is for whole weights: use adamw"
    if float8 != "none":
        yield (
            f"{option} does not go with precision.float8 {float8}, whose products compute gradients of weights that "
            "stay as they are: use float8 none"
        )
    for name, coefficient in config.training.router:
        if coefficient:
            yield (
                f"training.router.{name} {coefficient} trains routers, which {option} keeps as they are: remove it, or "
                "use adapter.name none"
            )
