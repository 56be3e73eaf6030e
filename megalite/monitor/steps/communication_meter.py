"""Counts and times what this rank hands to torch.distributed.

megalite and DeepSpeed both call the functions of torch.distributed, some by names that torch has renamed and that call
the new ones. So these are replaced in the module that defines them and in the one that exports them, while a meter is
open, and so is the `wait` of what they begin asynchronously. DeepSpeed's own `comms_logger` waits for the device after
each of its calls, which undoes all overlap.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from megalite.engine.engine import Engine
from megalite.tracing.activity import Activity

OPERATIONS = {
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "_all_gather_base": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "all_to_all": "all_to_all",
    "all_to_all_single": "all_to_all",
    "barrier": "barrier",
    "send": "send",
    "isend": "send",
    "recv": "receive",
    "irecv": "receive",
}
"""torch's functions, and what they are called here."""


class CommunicationMeter:
    """Writes each collective and message of the step onto this rank's tape while it is open.

    Threads beside the step, such as the one that finishes a save, hold nothing up and are left out.

    `with CommunicationMeter(engine): ...`
    """

    def __init__(self, engine: Engine) -> None:
        self._activity: Activity = engine.activity
        self._axes = _axes_of(engine)
        self._thread = threading.local()  # `is_ignored`: of a thread that is not the step's, and inside of a call
        self._replaced: list[tuple[Any, str, Any]] = []
        self._begun: WeakKeyDictionary[dist.Work, tuple[str, str]] = WeakKeyDictionary()  # axis, operation

    def __enter__(self) -> Self:
        self._thread.is_ignored = False
        for name, operation in OPERATIONS.items():
            if (function := getattr(c10d, name, None)) is not None:
                metered = self._metered(function, operation)
                for module in (c10d, dist):
                    if getattr(module, name, None) is function:
                        self._replaced.append((module, name, function))
                        setattr(module, name, metered)
        self._replaced.append((dist.Work, "wait", dist.Work.wait))
        dist.Work.wait = self._metered_wait(dist.Work.wait)  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, function in reversed(self._replaced):
            setattr(module, name, function)
        self._replaced.clear()

    def _metered(self, function: Callable[..., Any], operation: str) -> Callable[..., Any]:
        @wraps(function)
        def metered(*args: Any, **kwargs: Any) -> Any:
            tape, thread = self._activity.tape, self._thread
            if not hasattr(thread, "is_ignored"):  # autograd's threads, which python has not made, run the backward
                thread.is_ignored = not isinstance(threading.current_thread(), threading._DummyThread)
            if tape is None or thread.is_ignored:
                return function(*args, **kwargs)
            thread.is_ignored, began = True, tape.mark()  # torch's functions call each other
            try:
                work = function(*args, **kwargs)
            finally:
                thread.is_ignored = False
            values = (*args, *kwargs.values())
            if (axis := self._axis_of(values)) is not None:
                # the whole, not a rank's part: what an all-gather returns, what a reduce-scatter takes; and what an
                # all-to-all sends, which may be less than what comes
                sent = values[1:2] if operation == "all_to_all" else values
                tape.add_collective(began, axis, operation, max(map(_size, sent), default=0))
                if isinstance(work, dist.Work):
                    self._begun[work] = axis, operation
            return work

        return metered

    def _metered_wait(self, wait: Callable[..., bool]) -> Callable[..., bool]:
        @wraps(wait)
        def metered(work: dist.Work, *args: Any, **kwargs: Any) -> bool:
            tape, kind = self._activity.tape, self._begun.pop(work, None)
            if tape is None or kind is None:
                return wait(work, *args, **kwargs)
            began = tape.mark()
            result = wait(work, *args, **kwargs)
            tape.add_collective(began, *kind, 0, is_wait=True)
            return result

        return metered

    def _axis_of(self, values: tuple[Any, ...]) -> str | None:
        """Returns the axis of a call by its group; None for a rank alone."""
        group = next((value for value in values if isinstance(value, dist.ProcessGroup)), dist.group.WORLD)
        if group not in self._axes:
            self._axes[group] = "all" if dist.get_world_size(group) > 1 else None
        return self._axes[group]


def _axes_of(engine: Engine) -> dict[Any, str | None]:
    """Returns the axis of each group of the engine; None for a group of one rank. Others are of all ranks."""
    axes = {engine.data_parallel_group(): "data"}
    if (tensor := engine.tensor_parallel_group()) is not None:
        axes[tensor] = "tensor"
    if (context := engine.tensor_parallel.context.group) is not None:
        axes[context] = "context"
    if (experts := engine.tensor_parallel.experts.group) is not None:
        axes |= {experts: "expert", engine.data_parallel_group(of_experts=True): "expert_data"}
    axes |= dict.fromkeys(engine.pipeline_groups(), "pipeline")
    if engine.tied_weight is not None:
        axes[engine.tied_weight.group] = "tied"
    return {group: axis if dist.get_world_size(group) > 1 else None for group, axis in axes.items()}


def _size(value: Any) -> int:
    """Returns the bytes of a tensor or of tensors."""
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_size, value)) if isinstance(value, (list, tuple)) else 0
