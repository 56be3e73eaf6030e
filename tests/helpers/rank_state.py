"""What a task may change in the process that runs it, and what a pool's rank puts back after it."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections import OrderedDict, defaultdict
from datetime import timedelta
from functools import _lru_cache_wrapper
from operator import is_
from pathlib import Path
from types import CellType, FunctionType, ModuleType
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import DeepSpeedOptimizer
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partition_parameters import Init
from torch.nn import Parameter

from megalite.engine.deepspeed.internals import process_groups, set_timeout

# what these define or import is put back by name; torch's own state is put back by its getters and setters
RESTORED = ("deepspeed", "megalite", "models", "launch", "data_pipeline", "tests")
HOOKS = "torch.nn.modules.module"  # its globals are the hooks of all modules
CONTAINERS = (dict, list, set, OrderedDict, defaultdict)
MOST_MB = 400  # that a rank may hold more than at its start
GOING_S = 1.0  # what a task's threads have to end by themselves
MEETING = timedelta(seconds=30)
LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class _Names:
    """What a module or a class binds to its names, and what is in the containers among it and among the defaults of
    its functions: `_register_deepspeed_module` (runtime/zero/parameter_offload.py) counts modules in one."""

    def __init__(self, owner: Any) -> None:
        self._owner, self._names = owner, vars(owner)
        self._values = self._names.copy()
        public = {name: value for name, value in self._values.items() if not name.startswith("__")}
        functions = [value for value in public.values() if isinstance(value, FunctionType)]
        defaults = [each for function in functions for each in function.__defaults__ or ()]
        containers = [each for each in (*public.values(), *defaults) if type(each) in CONTAINERS]
        self._contents = [(each, each.copy()) for each in containers]
        self._caches = [cache for value in public.values() for cache in _caches_of(value)]

    def put_back(self) -> None:
        # mostly nothing has changed, and there are 20 thousand names
        if len(self._names) != len(self._values) or not all(map(is_, self._names.values(), self._values.values())):
            self._put_names_back()
        for value, kept in self._contents:
            if not _is_same(value, kept):
                value.clear()
                value.extend(kept) if isinstance(value, list) else value.update(kept)
        for cache in self._caches:
            cache.cache_clear()

    def _put_names_back(self) -> None:
        found = self._names.copy()  # by itself: a collection that runs meanwhile may change what it looks at
        for name in found.keys() - self._values.keys():
            # a submodule is imported once, and __annotations__ and the like are made when first asked for
            if not isinstance(found[name], ModuleType) and not name.startswith("__"):
                delattr(self._owner, name)
        for name, value in self._values.items():
            if name not in found or found[name] is not value:
                setattr(self._owner, name, value)


def _caches_of(value: Any) -> list[_lru_cache_wrapper[Any]]:
    """A function's own, and one that it decorates: DeepSpeed's __params_to_release holds every engine of ZeRO-3 so
    (runtime/zero/partitioned_param_coordinator.py)."""
    cells = getattr(value, "__closure__", None) or ()
    inside = [cell.cell_contents for cell in cells if cell != CellType()] if isinstance(value, FunctionType) else []
    return [each for each in (value, *inside) if isinstance(each, _lru_cache_wrapper)]


def _is_same(value: Any, kept: Any) -> bool:
    """Whether two containers hold the very same objects; whether these are equal is not asked, they may be tensors."""
    if len(value) != len(kept):
        return False
    if isinstance(value, dict):
        return all(name in value and value[name] is other for name, other in kept.items())
    if isinstance(value, set):
        return bool(value == kept)
    return all(one is other for one, other in zip(value, kept, strict=True))


class _Modules:
    """The names of all modules that are imported, and of their classes."""

    def __init__(self) -> None:
        self._seen: dict[str, list[_Names]] = {}
        self.note_new()

    def note_new(self) -> None:
        for name, module in sys.modules.copy().items():
            is_ours = name.partition(".")[0] in RESTORED or name == HOOKS
            if is_ours and name not in self._seen and isinstance(module, ModuleType):
                classes = [
                    value for value in vars(module).values() if isinstance(value, type) and value.__module__ == name
                ]
                self._seen[name] = [_Names(module)] + ([] if name == HOOKS else [_Names(each) for each in classes])

    def put_back(self) -> None:
        for names in self._seen.values():
            for each in names:
                each.put_back()
        self.note_new()


class _Torch:
    """Settings of torch, and random numbers of everybody."""

    def __init__(self) -> None:
        self._states = (torch.get_rng_state(), np.random.get_state(), random.getstate())
        self._dtype, self._device = torch.get_default_dtype(), torch.get_default_device()
        self._threads = torch.get_num_threads()
        self._precision = torch.get_float32_matmul_precision()
        self._is_deterministic = torch.are_deterministic_algorithms_enabled()
        self._only_warns = torch.is_deterministic_algorithms_warn_only_enabled()

    def put_back(self) -> None:
        for set_state, state in zip(
            (torch.set_rng_state, np.random.set_state, random.setstate), self._states, strict=True
        ):
            set_state(state)
        torch.set_default_dtype(self._dtype)
        if torch.get_default_device() != self._device:
            torch.set_default_device(None)
        torch.set_num_threads(self._threads)
        torch.set_float32_matmul_precision(self._precision)
        torch.use_deterministic_algorithms(self._is_deterministic, warn_only=self._only_warns)
        torch.set_grad_enabled(True)
        torch.set_anomaly_enabled(False)
        torch.set_autocast_enabled("cpu", False)


class _Process:
    """What belongs to the process: environment, folder, signals, limits, streams, logging."""

    def __init__(self) -> None:
        self._environment, self._folder, self._path = dict(os.environ), Path.cwd(), list(sys.path)
        self._handlers = {number: signal.getsignal(number) for number in self._numbers()}
        self._limits = {number: resource.getrlimit(number) for number in LIMITS}
        self._umask = os.umask(0)
        os.umask(self._umask)
        self._streams = sys.stdin, sys.stdout, sys.stderr
        self._warnings = list(warnings.filters)
        self._root = self._logging_of(logging.root)
        self._loggers = {name: self._logging_of(logger) for name, logger in self._all_loggers().items()}

    def _numbers(self) -> set[signal.Signals]:
        return signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}  # type: ignore[return-value]

    def _all_loggers(self) -> dict[str, logging.Logger]:
        known = logging.root.manager.loggerDict
        return {name: logger for name, logger in known.items() if isinstance(logger, logging.Logger)}

    def _logging_of(self, logger: logging.Logger) -> tuple[int, bool, bool, list[Any], list[Any]]:
        return logger.level, logger.propagate, logger.disabled, list(logger.handlers), list(logger.filters)

    def put_back(self) -> None:
        os.environ.clear()
        os.environ.update(self._environment)
        os.chdir(self._folder)
        sys.path[:] = self._path
        for number, handler in self._handlers.items():
            if handler is not None and signal.getsignal(number) != handler:
                signal.signal(number, handler)
        for number, limits in self._limits.items():
            if resource.getrlimit(number) != limits:
                resource.setrlimit(number, limits)
        os.umask(self._umask)
        sys.stdin, sys.stdout, sys.stderr = self._streams
        warnings.filters[:] = self._warnings  # type: ignore[index]
        self._set_logging(logging.root, self._root)
        for name, logger in self._all_loggers().items():
            self._set_logging(logger, self._loggers.get(name, (logging.NOTSET, True, False, [], [])))

    def _set_logging(self, logger: logging.Logger, kept: tuple[int, bool, bool, list[Any], list[Any]]) -> None:
        if self._logging_of(logger) != kept:
            logger.setLevel(kept[0])
            logger.propagate, logger.disabled, logger.handlers[:], logger.filters[:] = kept[1:]


def _empty_engines() -> None:
    """Lets go of all that engines hold, groups among it. Hooks that are called from C++ hold the engines themselves
    and their parameters, where no collection sees the cycle."""
    kinds = (DeepSpeedEngine, DeepSpeedOptimizer, Init, Parameter)
    made = [each for each in gc.get_objects() if issubclass(type(each), kinds)]  # `isinstance` would ask lazy objects
    for each in made:
        if issubclass(type(each), Parameter):
            each._backward_hooks = None
            each._post_accumulate_grad_hooks = None
        vars(each).clear()


class RankState:
    """What is so now, in a rank that has joined the world and has not run a task yet."""

    def __init__(self) -> None:
        get_accelerator()
        self._process, self._torch, self._modules = _Process(), _Torch(), _Modules()
        self._threads = set(threading.enumerate())
        self._memory = psutil.Process().memory_info().rss
        self._tasks = 0
        gc.collect()
        gc.freeze()  # the next collections look at what tasks have made only

    def put_back(self) -> list[str]:
        """Puts back what it can; collective. What it cannot, in words."""
        self._tasks += 1
        set_timeout(dist.group.WORLD, MEETING)
        dist.barrier()  # nobody is in a group any more; and the world has come through the task
        self._process.put_back()
        _empty_engines()
        self._modules.put_back()
        gc.collect()
        self._end_groups()
        self._torch.put_back()
        ctypes.CDLL(None).malloc_trim(0)
        return self._left()

    def _end_groups(self) -> None:
        for group in process_groups():
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)
        # a name must not come again, for the store keeps addresses by it; and ranks must agree on the next
        dist.distributed_c10d._world.group_count = 10_000 * self._tasks

    def _left(self) -> list[str]:
        deadline = time.monotonic() + GOING_S
        threads = set(threading.enumerate()) - self._threads
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        left = [f"thread {thread.name}" for thread in threads if thread.is_alive()]
        left += [f"process {child.name()}" for child in psutil.Process().children()]
        grown = (psutil.Process().memory_info().rss - self._memory) >> 20
        return left + ([f"{grown} MB more memory"] if grown > MOST_MB else [])
