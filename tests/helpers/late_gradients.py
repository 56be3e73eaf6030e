"""A small model whose layers put weight gradients off, and those gradients as one dictionary."""

from __future__ import annotations

from torch import Tensor, nn

from megalite.parallel.deferred_weight_gradients import PutOffProduct, compute_put_off
from tests.helpers.sizes import ODD_SIZES

SIZES = ODD_SIZES | {"num_hidden_layers": 2, "initializer_range": 0.2}


class Sums:
    """Takes gradients as a reducer does on a CPU, but sums those of a weight in its own format, as autograd does."""

    takes_products, is_fp32 = False, False

    def __init__(self) -> None:
        self.found: dict[nn.Parameter, Tensor] = {}

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        self.found[parameter] = self.found[parameter] + gradient if parameter in self.found else gradient

    def add_product(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        raise AssertionError("products are for a GPU")

    def sum_of(self, parameter: Tensor) -> Tensor:
        raise AssertionError("embedding and head are computed at once")


def late_gradients(products: list[PutOffProduct]) -> dict[nn.Parameter, Tensor]:
    sums = Sums()
    compute_put_off(products, sums)
    return sums.found
