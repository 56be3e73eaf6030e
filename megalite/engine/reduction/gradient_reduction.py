"""Sum of gradients over replicas, bucket by bucket while backward goes on.

In: parameters in buckets, and how many gradients each gets in a step. Out: the mean over the replicas of this rank's
partition of every bucket, fp32. A hook on each parameter adds its gradient to the bucket's flat sum and frees it; a
bucket whose parameters have all had theirs is reduced: for ZeRO-1 once in a step, for ZeRO-2 and ZeRO-3 in one round
for each micro-batch, so that a flat sum lives from one round to the next alone and partitions take up what comes out.
Who calls backward, and in what order, is not known here: gradients that come ahead of their round travel with an
earlier one. No DeepSpeed. On a GPU linear layers have their GEMM add to the flat sum instead (`add_product`).

Each bucket is reduce-scattered in place: rank r keeps elements [r * P, (r + 1) * P) of its R * P ones; why is told in
docs/design.md, Gradients of replicas. One of dealt experts is summed over the replicas that hold these, and divided by
the number of all. gloo has no reduce-scatter, and torch runs an all-reduce of a copy there.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.parallel.collectives import REDUCE_SCATTER, RankGroup
from megalite.parallel.gradient_accumulation_fusion import add_product
from megalite.tracing.activity import Activity, Operation


@dataclass
class BucketSlice:
    """One parameter's place in its bucket, and the gradients that it has had in this step."""

    parameter: nn.Parameter
    start: int  # in the bucket
    shape: torch.Size  # whole, also where ZeRO-3 holds nothing of it between passes
    from_elsewhere: int = 0  # gradients per step beside one per micro-batch
    expected: int = 0
    received: int = 0
    wanted: int = 0  # of `expected`, before the next round can begin
    is_held: bool = False  # whether the flat sum holds gradients of it
    is_open: bool = False  # whether layers add to the flat sum, so that a hook without a gradient counts one

    def __str__(self) -> str:
        shard = getattr(self.parameter, "shard", None)  # none outside of a model of ours
        return f"{'a parameter' if shard is None else shard.name} of shape {tuple(self.shape)}"

    @property
    def stop(self) -> int:
        return self.start + self.shape.numel()

    def view_of(self, sums: Tensor) -> Tensor:
        """Returns the parameter's part of its bucket's sum as a view in the parameter's shape."""
        return sums[self.start : self.stop].view(self.shape)


@dataclass
class Bucket:
    """Parameters whose gradients are summed in one flat tensor and reduced by one collective.

    What lies between and behind the slices is padding and stays zero. Replicas own equal parts, in the order of ranks.
    """

    slices: list[BucketSlice]
    size: int  # elements of the flat tensor, padding included; a multiple of the number of replicas
    dtype: torch.dtype  # of the sum over micro-batches
    replicas: RankGroup  # that hold its parameters
    kept: Tensor | None = None  # a flat tensor that outlives the step; else there is one during a step
    sums: Tensor | None = None
    missing: int = 0  # gradients that are still to come before it is reduced
    on_wire: Tensor | None = None  # the collective's tensor, while it runs
    work: dist.Work | None = None
    partition: Tensor | None = field(default=None, repr=False)  # fp32 mean over the replicas; before `finish` the sum

    def open(self, device: torch.device) -> Tensor:
        """Returns the flat sum, which exists from a step's first gradient on; slices without one hold anything.

        Only padding is set to zero: pages of a slice's memory on a CPU count once its gradient is written there.
        """
        if self.sums is None and self.kept is not None:
            self.sums = self.kept
        elif self.sums is None:
            self.sums = torch.empty(self.size, dtype=self.dtype, device=device)
            ends = [0, *(one.stop for one in self.slices)]
            starts = [*(one.start for one in self.slices), self.size]
            for end, start in zip(ends, starts, strict=True):
                self.sums[end:start].zero_()
        return self.sums

    def by_rank(self, sums: Tensor) -> Tensor:
        """Returns the flat sum with each replica's part in one piece."""
        return sums

    def own(self, flat: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that is in the order of `by_rank`."""
        return flat.chunk(self.replicas.size)[self.replicas.rank]

    def own_parts(self) -> Iterator[tuple[BucketSlice, int, int, int]]:
        """Yields slices of which this rank owns a part, its range in the slice, and its start in all that is owned."""
        rank, length = self.replicas.rank, self.size // self.replicas.size
        for one in self.slices:
            start, stop = max(one.start, rank * length), min(one.stop, (rank + 1) * length)
            if start < stop:
                yield one, start - one.start, stop - one.start, start - rank * length


class GradientReducer:
    """Reduces the gradients of one rank's parameters over its replicas.

    A step is `begin`, any number of backward passes, `finish`, the use of `partitions`, `release`. Buckets start in one
    fixed order, the same on all replicas: by their first parameters, from the last to the first, as backward reaches
    them. One that lacks a gradient holds up those behind it; `finish` refuses a step in which one never came. Between
    `begin` and `finish` nothing else may use the group: a replica that waits for a gradient starts later.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Iterable[nn.Parameter],
        replicas: int,
        wire_dtype: torch.dtype,
        activity: Activity,
        tensor_group: dist.ProcessGroup | None = None,
        *,
        in_rounds: bool = False,
    ) -> None:
        """`parameters` are those of all buckets in the order in which forward uses them. The mean is taken over
        `replicas`, which sum in `wire_dtype`. In `tensor_group` those are summed that say `is_summed_at_step`.
        `in_rounds`: as ZeRO-2."""
        self.buckets, self._size, self._wire_dtype, self._activity = buckets, replicas, wire_dtype, activity
        self._tensor_group = tensor_group
        positions = {parameter: position for position, parameter in enumerate(parameters)}
        self._place = {one.parameter: (bucket, one) for bucket in buckets for one in bucket.slices}
        assert self._place.keys() == positions.keys(), "buckets and parameters are not the same"
        self._order = sorted(buckets, key=lambda bucket: -min(positions[one.parameter] for one in bucket.slices))
        self.device = next(iter(positions)).device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        # on a CPU a GEMM that adds takes longer than the passes it saves
        self.takes_products = self._stream is not None
        self.is_fp32 = all(bucket.dtype == torch.float32 for bucket in buckets)
        self._in_rounds = in_rounds and self._size > 1
        self._rounds = 0  # reductions of each bucket in this step; no step has begun
        self._started = 0  # reductions in this step
        self._pending: list[Bucket] = []  # reductions that have started and not been waited for, on a CPU
        take = partial(GradientReducer._take, weakref.proxy(self))  # torch's hooks would keep this object for ever
        for parameter in positions:
            parameter.register_post_accumulate_grad_hook(take)
            parameter.gradient_sums = self  # type: ignore[attr-defined]

    def expect_more(self, parameter: nn.Parameter, count: int) -> None:
        """Says that from now on a weight gets `count` gradients more in a step than there are micro-batches, as a tied
        one."""
        self._place[parameter][1].from_elsewhere = count

    def begin(self, micro_batches: int) -> None:
        """Begins a step in which each parameter gets a gradient from each of `micro_batches` backward passes."""
        self.release()
        self._started, self._rounds = 0, micro_batches if self._in_rounds else 1
        for bucket in self.buckets:
            for one in bucket.slices:
                one.expected, one.received = micro_batches + one.from_elsewhere, 0
            self._begin_round(bucket, 1)

    def _begin_round(self, bucket: Bucket, number: int) -> None:
        for one in bucket.slices:
            one.wanted, one.is_held = one.expected if number == self._rounds else number, False
        bucket.missing = sum(max(0, one.wanted - one.received) for one in bucket.slices)

    def add_product(self, parameter: nn.Parameter, grad: Tensor, x: Tensor) -> None:
        """Adds `grad^T x`, a new gradient of a weight, to its bucket; layers call it in backward."""
        bucket, one = self._expected(parameter)
        add_product(one.view_of(bucket.open(grad.device)), grad, x, is_first=not one.is_held)
        one.is_held = True
        self._count(bucket, one)

    def sum_of(self, parameter: Tensor) -> Tensor:
        """Returns a parameter's part of the flat sum for a layer to add a gradient to, before backward or in it; the
        hook counts it, which has nothing to take then."""
        bucket, one = self._expected(parameter)
        own = one.view_of(bucket.open(parameter.device))
        is_first, one.is_held, one.is_open = not one.is_held, True, True
        return own.zero_() if is_first else own

    def _take(self, parameter: nn.Parameter) -> None:
        """Adds a parameter's new gradient to its bucket; runs behind each accumulation into `grad`."""
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:  # else a layer has put it off, and hands it over later, or has added it
            self.add(parameter, gradient)
        elif self._place[parameter][1].is_open:
            self._count(*self._expected(parameter))

    def add(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Adds a new gradient of a parameter, in any format, to its bucket."""
        bucket, one = self._expected(parameter)
        own = one.view_of(bucket.open(gradient.device))
        (own.add_ if one.is_held else own.copy_)(gradient)  # copied over the last step's
        one.is_held = True
        self._count(bucket, one)

    def _expected(self, parameter: Tensor) -> tuple[Bucket, BucketSlice]:
        """Returns the place of a gradient that has come. Raises RuntimeError if none is expected."""
        bucket, one = self._place[parameter]  # type: ignore[index]
        # one too many may come while its bucket waits, and would stand for one of another parameter that never comes
        if one.received == one.expected or self._started == self._rounds * len(self.buckets):
            raise RuntimeError(
                f"a gradient of {one} came after its bucket was reduced, or is one too many: it is the parameter's "
                f"number {one.received + 1} of this step, for which `begin` and `expect_more` have announced "
                f"{one.expected}; a layer that is applied several times in a forward pass needs `expect_more`"
            )
        return bucket, one

    def _count(self, bucket: Bucket, one: BucketSlice) -> None:
        bucket.missing -= one.received < one.wanted
        one.received += 1
        self._start_complete()

    def _start_complete(self) -> None:
        count = len(self._order)
        while self._started < self._rounds * count and not (turn := self._order[self._started % count]).missing:
            self._start(turn)
            if (done := -(-self._started // count)) < self._rounds:
                self._begin_round(turn, done + 1)

    def _start(self, bucket: Bucket) -> None:
        """Starts the collective of the next bucket, and does not wait for it."""
        self._started += 1
        sums = bucket.open(self.device)
        for one in bucket.slices:
            if not one.is_held:  # its gradient has travelled with an earlier round
                one.view_of(sums).zero_()
        if self._size == 1:
            bucket.partition = sums.float()
            return
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self.device))
        reducing = self._activity.interruption(Operation.REDUCE_GRADIENTS, self._started, self._activity.peers.data)
        with reducing, nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._in_rounds:  # one flat sum at a time is on the wire, beside that which backward fills
                self._settle_pending()
            self._send(bucket, sums)
            self._pending.append(bucket)
            if self._stream is not None:
                self._settle_pending()
        if self._in_rounds:
            if self._stream is not None:
                sums.record_stream(self._stream)  # before its memory is used again
            bucket.sums = None

    def _send(self, bucket: Bucket, sums: Tensor) -> None:
        bucket.on_wire = bucket.by_rank(sums).to(self._wire_dtype)
        own, group = bucket.own(bucket.on_wire), bucket.replicas.group
        bucket.work = getattr(dist, REDUCE_SCATTER)(own, bucket.on_wire, group=group, async_op=True)

    def _settle_pending(self) -> None:
        """Waits for the collectives that have started, on CUDA without the host, and takes their sums."""
        for bucket in self._pending:
            assert bucket.work is not None and bucket.on_wire is not None
            bucket.work.wait()
            own = bucket.own(bucket.on_wire)
            if bucket.partition is not None:
                bucket.partition.add_(own)
            elif self._in_rounds or bucket.dtype != torch.float32:
                bucket.partition = own.to(torch.float32, copy=True)
            else:  # the flat sum is there until the next step, so that no more memory is needed
                bucket.partition = bucket.own(bucket.open(self.device))
                if bucket.on_wire is not bucket.sums:
                    bucket.partition.copy_(own)
            bucket.work = bucket.on_wire = None
        self._pending.clear()

    def finish(self) -> None:
        """Waits for all reductions: on CUDA the current stream does, not the host. Raises RuntimeError if a gradient of
        this step never came, which their sum would pass over in silence."""
        if self._started < self._rounds * len(self._order):
            few = [one for bucket in self.buckets for one in bucket.slices if one.received < one.expected]
            raise RuntimeError(
                f"gradients of {len(few)} parameters never came in this step, first that of {few[0]}: backward brought "
                f"{few[0].received} of the {few[0].expected} that `begin` and `expect_more` have announced; the step "
                "ends here, before it changes a weight: a pass of the schedule, or a layer in one, was left out"
            )
        if self._size > 1:
            self._activity.record_op(Operation.REDUCE_GRADIENTS, self._started, self._activity.peers.data)
            self._settle_pending()
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            # last and in fp32: a quotient of each addend would round once per replica
            torch._foreach_div_(self.partitions, self._size)
        self._sum_in_tensor_group()

    def _sum_in_tensor_group(self) -> None:
        """Sums the gradients of replicated parameters of which each tensor-parallel rank has computed a part.

        Sums over micro-batches, replicas and these ranks commute, so there is one collective in a step, of what this
        rank owns, in fp32. Ranks of a group own the same places.
        """
        parts = [part for each, _, part in self.own_parts() if getattr(each, "is_summed_at_step", False)]
        if parts:
            self._activity.record_op(Operation.REDUCE_GRADIENTS, peers=self._activity.peers.tensor)
            whole = torch.cat(parts)
            dist.all_reduce(whole, group=self._tensor_group)
            torch._foreach_copy_(parts, whole.split([len(part) for part in parts]))

    @property
    def partitions(self) -> list[Tensor]:
        """This rank's part of the mean of each bucket, flat and fp32, in the order of the buckets; after `finish`."""
        found = [bucket.partition for bucket in self.buckets if bucket.partition is not None]
        assert len(found) == len(self.buckets), "gradients are read before `finish`"
        return found

    def own_parts(self) -> Iterator[tuple[nn.Parameter, int, Tensor]]:
        """Yields the parameters of which this rank holds reduced gradients, the first element that it holds of each,
        and its part of the mean, flat: a view of `partitions`."""
        for bucket, partition in zip(self.buckets, self.partitions, strict=True):
            for one, start, stop, place in bucket.own_parts():
                yield one.parameter, start, partition[place : place + stop - start]

    def release(self) -> None:
        """Frees what a step leaves: its sums, unless their memory is kept, and the partitions."""
        self._pending.clear()
        for bucket in self.buckets:
            bucket.sums = bucket.partition = None
