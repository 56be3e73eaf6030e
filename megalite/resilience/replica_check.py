"""Checks that all ranks that should hold the same values hold the same bits.

There are three kinds of copies: a weight on every data-parallel replica, values that tensor-parallel ranks replicate
(norms, and the fp32 weights behind them), and tied weights on several pipeline stages. Each copy gets a 64-bit hash,
computed on its device; one small reduction per kind finds whether all hashes are equal. Names and hosts are exchanged
only if they are not.

Not detected: damage to values that exist once, which are tensor-parallel shards' fp32 weights, everything under ZeRO-3
that is not tensor-parallel replicated, and all moments; damage that reached all copies alike, such as a wrong gradient,
which is summed before it is used. The fp32 weights that are on NVMe are not compared either.
"""

from __future__ import annotations

import socket
import time
from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.distributed.agreement import from_all_ranks
from megalite.engine.deepspeed.internals import fp32_fragment, is_whole_here, resident_weights
from megalite.engine.engine import Engine
from megalite.tracing.activity import Phase

CHUNK = 1 << 20  # values hashed at once: 8 MiB of int64 beside the weights
INTEGERS = {2: torch.int16, 4: torch.int32}  # bytes of a value -> integer type of the same size
NAMED = 8  # ranks in a sentence
ALL = -1  # in a `_Key`: the copies are on all ranks of that axis


@dataclass(frozen=True, order=True)
class Holder:
    """A rank that holds a copy."""

    rank: int
    host: str

    def __str__(self) -> str:
        return f"rank {self.rank} ({self.host})"


@dataclass(frozen=True)
class Disagreement:
    """Copies of one parameter that differ."""

    parameter: str
    is_fp32: bool  # the optimizer's weight, not the one that the model computes with
    candidates: tuple[Holder, ...]  # the minority; all holders if there is no majority
    has_majority: bool

    def __str__(self) -> str:
        named = [str(holder) for holder in self.candidates[:NAMED]]
        if len(self.candidates) > NAMED:
            named.append(f"{len(self.candidates) - NAMED} more ranks")
        kind = "fp32 weight" if self.is_fp32 else "weight"
        return f"the {kind} {self.parameter} is wrong on {(' and ' if self.has_majority else ' or ').join(named)}"


@dataclass(frozen=True, order=True)
class _Key:
    """Identifies a value that must be equal on all ranks that hold it."""

    moment: int
    name: str
    is_fp32: bool
    tensor_rank: int
    data_rank: int


@dataclass(frozen=True)
class _ReplicaCopy:
    key: _Key
    hash: Tensor  # [] int64
    groups: tuple[dist.ProcessGroup, ...]  # all of whose ranks hold a copy


def bit_hash(numbers: Tensor) -> Tensor:
    """Returns the sum of word i times 2i+1, modulo 2^64, over the bits of up to 2^31 values of 2 or 4 bytes.

    Differs after any one or two flipped bits and after any exchange of two numbers: the odd factors are all different
    and not so large that a difference of 64 bits could vanish. `torch.hash_tensor` is twice as fast, but an exclusive
    or: the same bit flipped in two numbers, or two numbers exchanged, leave it as it was; and as it widens floats
    first, it does not see all bits of a NaN.
    """
    words = numbers.detach().contiguous().view(INTEGERS[numbers.element_size()]).flatten()
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, len(words), CHUNK):
        chunk = words[start : start + CHUNK]
        weights = torch.arange(2 * start + 1, 2 * (start + len(chunk)), 2, device=words.device)
        total += weights.mul_(chunk).sum()
    return total


class SelfCheck:
    """Compares a step's copies twice: the weights it was computed with, and the updated ones.

    Once ZeRO has updated its partitions it overwrites all replicas' weights, and with them a bit that flipped in one of
    them during the step: so the first hashes are taken before that, in a hook of the optimizer.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._is_watching = False
        self._used: list[_ReplicaCopy] = []  # empty if the step is skipped
        self._used_s = 0.0
        engine.torch_optimizer.register_step_pre_hook(self._before_update)

    def watch(self) -> None:
        """Makes the next step take its first hashes."""
        self._is_watching = True

    def run(self) -> tuple[list[Disagreement], float]:
        """Returns what differs after a watched step, and the seconds that both comparisons took.

        Collective, equal on all ranks.
        """
        self._engine.activity.begin_phase(Phase.SELF_CHECK)
        started = time.perf_counter() - self._used_s
        found = _compare(self._engine, [*self._used, *_copies(self._engine, moment=1)])
        self._is_watching, self._used, self._used_s = False, [], 0.0
        return found, time.perf_counter() - started

    def _before_update(self, *_: Any) -> None:
        """Hashes before the first of DeepSpeed's optimizer steps, one per parameter group, when nothing has changed."""
        if self._is_watching:
            started = time.perf_counter()
            self._is_watching, self._used = False, _copies(self._engine, moment=0)
            self._used_s = time.perf_counter() - started


def find_disagreements(engine: Engine) -> list[Disagreement]:
    """Returns what differs now; collective, equal on all ranks."""
    return _compare(engine, _copies(engine, moment=0))


def explain(step: int, found: list[Disagreement]) -> str:
    """Explains a disagreement to the user in one sentence."""
    more = f" ({len(found) - 1} more parameters differ)" if len(found) > 1 else ""
    hosts = " or ".join(sorted({holder.host for holder in found[0].candidates})[:NAMED])
    return (
        f"copies that must be equal to the bit are not at step {step}: {found[0]}{more}; the step was not saved: "
        f"take {hosts} out of the job or test its memory, and start the run again from its last checkpoint"
    )


def _copies(engine: Engine, moment: int) -> list[_ReplicaCopy]:
    """Returns this rank's copies of values that other ranks hold too, in the same order on all of them."""
    copies: list[_ReplicaCopy] = []

    def add(key: _Key, numbers: Tensor, groups: tuple[dist.ProcessGroup, ...]) -> None:
        if groups:
            copies.append(_ReplicaCopy(key, bit_hash(numbers).to(engine.deepspeed.device), groups))

    at, tensor_ranks = engine.coordinate, engine.deepspeed.module.tensor_parallel
    mesh, replicas = engine.mesh, (engine.data_parallel_group(),) if engine.mesh.replicas > 1 else ()
    tied = engine.tied_weight
    for name, parameter in engine.parameters():
        alike = (tensor_ranks.group,) if parameter.shard.is_replicated and tensor_ranks.size > 1 else ()  # type: ignore[attr-defined]
        tensor_rank = ALL if alike else at.tensor_rank
        is_whole, whole_on, data_rank = is_whole_here(parameter), replicas, ALL
        if parameter.shard.is_dealt:  # type: ignore[attr-defined]
            whole_on = (engine.replicas_of(parameter),) if mesh.copies_of_experts > 1 else ()
            data_rank = at.replica % mesh.expert_parallel_size
        with_copy = (tied.group,) if tied is not None and tied.weight is parameter else ()
        groups = (*(whole_on if is_whole else ()), *alike, *with_copy)
        held_by = data_rank if is_whole else at.replica
        add(_Key(moment, name, False, tensor_rank, held_by), resident_weights(parameter), groups)
        if alike and (fragment := fp32_fragment(parameter)) is not None:
            add(_Key(moment, name, True, tensor_rank, at.replica), fragment, alike)
    if engine.expert_bias is not None:
        alike = (tensor_ranks.group,) if tensor_ranks.size > 1 else ()
        for name, bias in engine.expert_bias.named():
            add(_Key(moment, name, False, ALL, ALL), bias, (*replicas, *alike))
    if tied is not None and not isinstance(tied.weight, nn.Parameter):
        add(_Key(moment, tied.name, False, at.tensor_rank, ALL), tied.weight, (*replicas, tied.group))
    return copies


def _compare(engine: Engine, copies: list[_ReplicaCopy]) -> list[Disagreement]:
    device = engine.deepspeed.device
    hashes = torch.stack([copy.hash for copy in copies]) if copies else torch.empty(0, dtype=torch.int64, device=device)
    differs = torch.zeros(len(copies), dtype=torch.bool, device=device)
    module = engine.deepspeed.module
    tied = () if engine.tied_weight is None else (engine.tied_weight.group,)
    # the same order on all ranks, so that no two of them wait for each other
    same_experts = {engine.replicas_of(parameter) for _, parameter in engine.parameters()} - {
        engine.data_parallel_group()
    }
    for group in (engine.data_parallel_group(), *same_experts, module.tensor_parallel.group, *tied):
        members = [index for index, copy in enumerate(copies) if group in copy.groups]
        if members:
            differs[members] |= _differs(hashes[members], group)
    anywhere = differs.any().to(torch.int32)
    dist.all_reduce(anywhere, op=dist.ReduceOp.MAX)
    if not anywhere.item():
        return []
    return _find_minorities([copy.key for copy in copies], hashes.tolist(), differs.tolist())


def _differs(hashes: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Returns `[n]` bool, equal on all ranks of the group: minimum and maximum of each hash, in one reduction."""
    extremes = torch.stack([hashes, ~hashes])  # ~h falls as h grows, and unlike -h never overflows
    dist.all_reduce(extremes, op=dist.ReduceOp.MIN, group=group)
    return extremes[0] != ~extremes[1]


def _find_minorities(keys: list[_Key], hashes: list[int], differs: list[bool]) -> list[Disagreement]:
    """Gathers all ranks' hashes of what differs anywhere and finds the minority; one result per parameter."""
    bad_here = {key for key, bad in zip(keys, differs, strict=True) if bad}
    differing = set[_Key]().union(*from_all_ranks(bad_here, set[_Key]))
    own_hashes = [(key, value) for key, value in zip(keys, hashes, strict=True) if key in differing]
    gathered = from_all_ranks((socket.gethostname(), own_hashes), tuple[str, list[tuple[_Key, int]]])
    answers = [(host, dict(pairs)) for host, pairs in gathered]
    found = []
    for key in differing:
        held = {Holder(rank, host): own[key] for rank, (host, own) in enumerate(answers) if key in own}
        found.append((key, _vote(key, held)))
    # nearest to the cause first: before the update, and where a majority names the rank
    found.sort(key=lambda pair: (pair[0].moment, not pair[1].has_majority, pair[0]))
    by_parameter: dict[str, Disagreement] = {}
    for key, disagreement in found:
        by_parameter.setdefault(key.name, disagreement)
    return list(by_parameter.values())


def _vote(key: _Key, held: dict[Holder, int]) -> Disagreement:
    (most, count), *_ = Counter(held.values()).most_common()
    has_majority = 2 * count > len(held)
    candidates = tuple(holder for holder, value in held.items() if not has_majority or value != most)
    return Disagreement(key.name, key.is_fp32, candidates, has_majority)
