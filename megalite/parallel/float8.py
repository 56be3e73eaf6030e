"""Products of a block's linear layers in float8, scaled by torchao's recipes.

In: the layers of a model, the name of a recipe. Out: the same layers, whose forward product and both products of
backward round their operands to float8; weights, their gradients and everything between the products stay as they are.
Each operand is scaled by the largest number in it at that moment: `tensorwise` in the whole local tensor, `rowwise` in
each row, so that one large number spoils one row. Not converted: the head, embeddings, routers and experts.

Under tensor parallelism a scale is that of the local part. It is never coarser than that of the whole, so layouts
differ by the rounding of float8, and no scale travels.
"""

from __future__ import annotations

import dataclasses
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megalite.config.errors import ConfigError
from megalite.parallel.collectives import TensorParallel, gathered_slices
from megalite.parallel.linear import ONE_RANK, ColumnParallelLinear, Recomputable, RowParallelLinear

if TYPE_CHECKING:
    from torchao.float8.config import Float8LinearConfig
    from torchao.float8.float8_training_tensor import LinearMMConfig

Recipe = Literal["rowwise", "tensorwise"]
LEAST_CAPABILITY: dict[str, tuple[int, int]] = {"tensorwise": (8, 9), "rowwise": (9, 0)}  # Ada, Hopper


def check_float8_device(recipe: Recipe, capability: tuple[int, int], device: str) -> None:
    """Raises ConfigError, one sentence, for a GPU that has no such products."""
    least = LEAST_CAPABILITY[recipe]
    if capability >= least:
        return
    other = " or tensorwise" if recipe == "rowwise" and capability >= LEAST_CAPABILITY["tensorwise"] else ""
    raise ConfigError(
        f"precision.float8 {recipe} needs a GPU of compute capability {least[0]}.{least[1]} or more, and {device} has "
        f"{capability[0]}.{capability[1]}: use none{other}"
    )


def use_float8(model: nn.Module, recipe: Recipe) -> None:
    """Makes the projections of attention and of feed-forward parts of `model` multiply in float8."""
    product = Float8Product(recipe)
    for module in model.modules():
        if isinstance(module, ColumnParallelLinear | RowParallelLinear):
            module.product = product


class Float8Product:
    """`F.linear` in float8; on a CPU by fp32 products of the rounded operands."""

    def __init__(self, recipe: Recipe) -> None:
        from torchao.float8.config import Float8LinearConfig

        config = Float8LinearConfig.from_recipe_name(recipe)
        self._on_gpu, self._on_cpu = _arguments(config), _arguments(dataclasses.replace(config, emulate=True))
        self._function = _function()

    def __call__(
        self, x: Tensor | Recomputable, weight: nn.Parameter, bias: Tensor | None, tp: TensorParallel = ONE_RANK
    ) -> Tensor:
        """Computes what `linear` does, in the same order. The input is kept, whole: torchao's backward neither computes
        it again nor leaves room for a collective between its products."""
        value = gathered_slices(x.value if isinstance(x, Recomputable) else x, tp)
        y = self._function.apply(value, weight.t(), *(self._on_gpu if value.is_cuda else self._on_cpu))
        return y if bias is None else y + bias


def _arguments(config: Float8LinearConfig) -> tuple[LinearMMConfig, Float8LinearConfig]:
    """Returns what torchao's product is given: how each of the three GEMMs runs, and how operands are scaled."""
    from torchao.float8.float8_training_tensor import LinearMMConfig, ScaledMMConfig

    gemms = config.gemm_config_output, config.gemm_config_grad_input, config.gemm_config_grad_weight
    return LinearMMConfig(*(ScaledMMConfig(config.emulate, gemm.use_fast_accum) for gemm in gemms)), config


@lru_cache(maxsize=1)
def _function() -> Any:
    """Returns torchao's product as a Function whose output may be changed in place, as residuals do: autograd forbids
    that for a view."""
    from torchao.float8.float8_linear import matmul_with_hp_or_float8_args

    class Product(matmul_with_hp_or_float8_args):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Tensor:
            return matmul_with_hp_or_float8_args.forward(ctx, *arguments).detach()

    return torch._dynamo.allow_in_graph(Product)  # torch.compile does not look into it, as into torchao's own
