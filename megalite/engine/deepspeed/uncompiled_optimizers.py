"""Keeps torch.optim from importing torch's compiler, which a run that compiles nothing never calls.

Two decorators import `torch._dynamo`, and with it sympy and most of torch.distributed: `_disable_dynamo` of
torch/_compile.py, around methods of every optimizer, when such a method is first called, and
`_use_grad_for_differentiable` of torch/optim/optimizer.py, around `step`. Both are for optimizers inside a compiled
function; here the engine calls them from plain Python.
"""

from __future__ import annotations

import sys
from typing import Any

import torch


def keep_optimizers_uncompiled() -> None:
    """Makes torch's optimizers work without the compiler: about a second of a start and 60 MB of each rank.

    Does nothing where the compiler has been imported. A compiled block is no optimizer, so it is not affected either.
    """
    if "torch._dynamo" in sys.modules:
        return
    for method in vars(torch.optim.Optimizer).values():
        if _is_made_by(method, "_disable_dynamo"):
            method.__wrapped__.__dynamo_disable = method.__wrapped__  # what it would call once dynamo is imported
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        if step is not None and _is_made_by(step, "_use_grad_for_differentiable"):
            kind.step = torch.no_grad()(step.__wrapped__)  # as it runs where `differentiable` is not asked for


def _is_made_by(function: Any, decorator: str) -> bool:
    """Returns whether `function` is what this decorator has made of another."""
    code = getattr(function, "__code__", None)  # the wrapper's own, whatever name it has taken over
    return code is not None and code.co_qualname.startswith(f"{decorator}.<locals>.")
