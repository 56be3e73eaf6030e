"""Rules about `precision.float8`: sizes of products, number format, and what has no products in float8."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from megalite.config.config import Config
from megalite.config.errors import ConfigError
from megalite.config.rules.pipeline import SPLITS_BACKWARD
from megalite.config.suggestions import multiples_near

TILE = 16  # rows and columns of a float8 product must be multiples of it


def check_float8_package(config: Config) -> None:
    """Raises ConfigError, one sentence, where float8 is asked for and torchao is missing here."""
    recipe = config.precision.float8
    if recipe != "none" and find_spec("torchao") is None:
        raise ConfigError(
            f"precision.float8 {recipe} needs torchao, which this Python lacks: pip install 'megalite[float8]', or use "
            "none"
        )


def problems_with_float8(config: Config) -> Iterator[str]:
    """Yields a sentence for each broken rule. Options that are `auto` have their simplest values here; their rules are
    asked again for every layout that may be chosen."""
    recipe = config.precision.float8
    if recipe == "none":
        return
    option, parallel = f"precision.float8 {recipe}", config.parallel
    if config.precision.dtype == "fp16":
        yield f"{option} does not go with precision.dtype fp16: use bf16 or fp32"
    if parallel.zero_stage == 3:
        yield (
            f"{option} does not go with parallel.zero_stage 3, because its products would keep weights that ZeRO-3 "
            "frees: use zero_stage 1 or 2, or float8 none"
        )
    if parallel.pipeline_schedule in SPLITS_BACKWARD:
        yield (
            f"{option} does not go with parallel.pipeline_schedule {parallel.pipeline_schedule}, which computes "
            "gradients of weights apart: use 1f1b or interleaved, or float8 none"
        )
    if config.model.kv_lora_rank is not None:
        yield f"{option} does not go with latent attention (model.kv_lora_rank), of narrow products: use float8 none"
    yield from _sizes(config, option)


def _sizes(config: Config, option: str) -> Iterator[str]:
    model, training, tp = config.model, config.training, config.parallel.tensor_parallel_size
    query, key_value = (heads * model.head_dim for heads in (model.num_attention_heads, model.num_key_value_heads))
    if model.hidden_size % TILE:
        yield (
            f"model.hidden_size {model.hidden_size} is no multiple of {TILE}, which {option} needs: use "
            f"{multiples_near(model.hidden_size, TILE)}, or float8 none"
        )
    part = _part(query, tp)
    if part % TILE or (part + 2 * _part(key_value, tp)) % TILE:
        yield (
            f"model.num_attention_heads {model.num_attention_heads} and num_key_value_heads "
            f"{model.num_key_value_heads} with head_dim {model.head_dim} make {part} + 2 x {_part(key_value, tp)} "
            f"features per tensor-parallel rank, and {option} needs multiples of {TILE}: use a head_dim of "
            f"{multiples_near(model.head_dim, TILE)}, a smaller parallel.tensor_parallel_size, or float8 none"
        )
    size, shared = model.intermediate_size, model.shared_size
    has_dense_layers = any(not model.has_experts(layer) for layer in range(model.num_hidden_layers))
    if _part(shared, tp) % TILE:
        yield (
            f"model.n_shared_experts {model.n_shared_experts} x model.moe_intermediate_size make {_part(shared, tp)} "
            f"features per tensor-parallel rank, and {option} needs a multiple of {TILE}: use float8 none"
        )
    if has_dense_layers and _part(size, tp) % TILE:
        yield (
            f"model.intermediate_size {size} makes {_part(size, tp)} features per tensor-parallel rank, and {option} "
            f"needs a multiple of {TILE}: use {multiples_near(size, TILE * tp)}, or float8 none"
        )
    tokens = training.micro_batch_size * training.sequence_length
    if tokens % TILE and ("training", "micro_batch_size") not in config.unresolved_options:
        yield (
            f"training.micro_batch_size {training.micro_batch_size} x training.sequence_length "
            f"{training.sequence_length} = {tokens} tokens are no multiple of {TILE}, which {option} needs: use a "
            f"sequence_length of {multiples_near(training.sequence_length, TILE)}, or float8 none"
        )


def _part(size: int, ranks: int) -> int:
    """Returns a rank's part of `size`, padding included."""
    return -(-size // ranks)
