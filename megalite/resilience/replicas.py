"""Do all ranks that should hold the same numbers hold the same bits?

Three kinds of copies: a weight on every data-parallel replica, what tensor-parallel ranks hold alike (norms, and the
fp32 numbers behind them), and tied weights on several pipeline stages. Per copy one 64-bit hash, computed where the
numbers are; per kind one small reduction that tells whether all hashes are equal. Names and hosts travel only when
they are not.

What cannot be seen: numbers that exist once, which are tensor-parallel shards' fp32 weights, everything under ZeRO-3
that is not tensor-parallel replicated, and all moments; damage that reached all copies alike, such as a wrong
gradient, which is summed before anyone uses it. The fp32 weights behind tied copies are not compared either: the
stages cut them at different places; nor those that are on NVMe.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megalite.engine.engine import Engine
from megalite.engine.seams import fp32_fragment, is_whole_here, resident_weights, tied_weights

CHUNK = 1 << 20  # words hashed at once: 8 MiB of int64 beside the weights
WORDS = {2: torch.int16, 4: torch.int32}  # bytes of a number -> the integer that is its bits
NAMED = 8  # ranks in a sentence
ALL = -1  # in a `_Key`: the copies lie on all ranks of that axis


@dataclass(frozen=True, order=True)
class Holder:
    """A rank that holds a copy."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Disagreement:
    """Copies of one parameter that should be equal and are not."""

    parameter: str
    is_fp32: bool  # the number that the optimizer keeps, not the one that the model computes with
    suspects: tuple[Holder, ...]  # whose copies a majority contradicts; all holders where there is no majority
    has_majority: bool

    def __str__(self) -> str:
        named = [str(holder) for holder in self.suspects[:NAMED]]
        if len(self.suspects) > NAMED:
            named.append(f"{len(self.suspects) - NAMED} more ranks")
        kind = "fp32 weight" if self.is_fp32 else "weight"
        return f"the {kind} {self.parameter} is wrong on {(' and ' if self.has_majority else ' or ').join(named)}"


@dataclass(frozen=True, order=True)
class _Key:
    """What must be equal wherever it exists."""

    moment: int
    name: str
    is_fp32: bool
    tensor_rank: int
    data_rank: int


@dataclass(frozen=True)
class _Copy:
    key: _Key
    hash: Tensor  # [] int64
    groups: tuple[dist.ProcessGroup, ...]  # every rank of them holds a copy


def bit_hash(numbers: Tensor) -> Tensor:
    """Sum of word i times 2i+1, modulo 2^64, over the bits of a tensor of up to 2^31 numbers of 2 or 4 bytes.

    Differs after any one or two flipped bits and after any exchange of two numbers: the odd factors are all different
    and not so large that a difference of 64 bits could vanish. `torch.hash_tensor` is twice as fast, but an exclusive
    or: the same bit flipped in two numbers, or two numbers exchanged, leave it as it was; and as it widens floats
    first, it does not see all bits of a NaN.
    """
    words = numbers.detach().contiguous().view(WORDS[numbers.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        weights = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=words.device)
        total += weights.mul_(chunk).sum()
    return total


class SelfCheck:
    """Compares a step's copies twice: the weights it was computed with, and the weights it left.

    Once ZeRO has updated its partitions it overwrites all replicas' weights, and with them every trace of a bit that
    flipped in one of them during the step: the first comparison has to be made before that, in a hook of the optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_watching = False
        self._used: list[_Copy] = []  # stays empty where the step is skipped
        self._used_s = 0.0
        engine.torch_optimizer.register_step_pre_hook(self._before_update)

    def watch(self) -> None:
        """The coming step will be checked."""
        self._is_watching = True

    def run(self) -> tuple[list[Disagreement], float]:
        """What differs after a watched step, and the seconds both comparisons took; collective, equal on all ranks."""
        started = time.perf_counter() - self._used_s
        found = _compare(self._engine, [*self._used, *_copies(self._engine, moment=1)])
        self._is_watching, self._used, self._used_s = False, [], 0.0
        return found, time.perf_counter() - started

    def _before_update(self, *_: Any) -> None:
        """DeepSpeed steps the optimizer once per parameter group; before the first of them nothing has changed."""
        if self._is_watching:
            started = time.perf_counter()
            self._is_watching, self._used = False, _copies(self._engine, moment=0)
            self._used_s = time.perf_counter() - started


def find_disagreements(engine: Engine) -> list[Disagreement]:
    """What differs now; collective, equal on all ranks."""
    return _compare(engine, _copies(engine, moment=0))


def explain(step: int, found: list[Disagreement]) -> str:
    """One sentence for whoever runs the job."""
    more = f" ({len(found) - 1} more parameters differ)" if len(found) > 1 else ""
    hosts = " or ".join(sorted({holder.host for holder in found[0].suspects})[:NAMED])
    return (
        f"copies that must be equal to the bit are not at step {step}: {found[0]}{more}; the step was not saved: "
        f"take {hosts} out of the job or test its memory, and start the run again from its last checkpoint"
    )


def _copies(engine: Engine, moment: int) -> list[_Copy]:
    """This rank's copies of what other ranks hold too, in the same order on all of them."""
    return [
        _Copy(_Key(moment, *key), bit_hash(numbers).to(engine.deepspeed.device), groups)
        for key, numbers, groups in _shared(engine)
        if groups
    ]


def _shared(
    engine: Engine,
) -> Iterator[tuple[tuple[str, bool, int, int], Tensor, tuple[dist.ProcessGroup, ...]]]:
    """(name, is fp32, tensor rank, data rank), numbers and groups of every copy on this rank."""
    at, tensor_ranks = engine.coordinate, engine.deepspeed.module.tensor_parallel
    replicas = (engine.data_parallel_group(),) if engine.mesh.data_parallel_size > 1 else ()
    tied = tied_weights(engine.deepspeed.module)
    for name, parameter in engine.parameters():
        alike = (tensor_ranks.group,) if parameter.shard.is_replicated and tensor_ranks.size > 1 else ()  # type: ignore[attr-defined]
        tensor_rank = ALL if alike else at.tensor_rank
        is_whole = is_whole_here(parameter)
        groups = (*(replicas if is_whole else ()), *alike, *(group for weight, group in tied if weight is parameter))
        yield (name, False, tensor_rank, ALL if is_whole else at.data_rank), resident_weights(parameter), groups
        if alike and (fragment := fp32_fragment(parameter)) is not None:
            yield (name, True, tensor_rank, at.data_rank), fragment, alike


def _compare(engine: Engine, copies: list[_Copy]) -> list[Disagreement]:
    device = engine.deepspeed.device
    hashes = torch.stack([copy.hash for copy in copies]) if copies else torch.empty(0, dtype=torch.int64, device=device)
    differs = torch.zeros(len(copies), dtype=torch.bool, device=device)
    for group in _groups(engine):
        members = [index for index, copy in enumerate(copies) if group in copy.groups]
        if members:
            differs[members] |= _differs(hashes[members], group)
    anywhere = differs.any().to(torch.int32)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere.item():
        return []
    return _judge([copy.key for copy in copies], hashes.tolist(), differs.tolist())


def _groups(engine: Engine) -> list[dist.ProcessGroup]:
    """In an order in which no two ranks can wait for each other."""
    module = engine.deepspeed.module
    tied = dict.fromkeys(group for _, group in tied_weights(module))
    return [engine.data_parallel_group(), module.tensor_parallel.group, *tied]


def _differs(hashes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """`[n]` bool, equal on all ranks of the group: the smallest and the largest of n hashes each, in one reduction."""
    extremes = torch.stack([hashes, ~hashes])  # ~h falls as h grows, and unlike -h never overflows
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    return extremes[0] != ~extremes[1]


def _judge(keys: list[_Key], hashes: list[int], differs: list[bool]) -> list[Disagreement]:
    """Asks every rank for its copies of what differs anywhere, and lets them vote; each parameter once."""
    suspected: set[_Key] = set().union(*_gather({key for key, bad in zip(keys, differs, strict=True) if bad}))
    own = {key: value for key, value in zip(keys, hashes, strict=True) if key in suspected}
    answers: list[tuple[str, dict[_Key, int]]] = _gather((socket.gethostname(), own))
    verdicts = []
    for key in suspected:
        held = {Holder(rank, host): own[key] for rank, (host, own) in enumerate(answers) if key in own}
        verdicts.append((key, _vote(key, held)))
    # nearest to the cause first: before the update carried it on, and where the rank is certain
    verdicts.sort(key=lambda verdict: (verdict[0].moment, not verdict[1].has_majority, verdict[0]))
    by_parameter: dict[str, Disagreement] = {}
    for key, verdict in verdicts:
        by_parameter.setdefault(key.name, verdict)
    return list(by_parameter.values())


def _vote(key: _Key, held: dict[Holder, int]) -> Disagreement:
    (most, count), *_ = Counter(held.values()).most_common()
    has_majority = 2 * count > len(held)
    suspects = tuple(holder for holder, value in held.items() if not has_majority or value != most)
    return Disagreement(key.name, key.is_fp32, suspects, has_majority)


def _gather(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
