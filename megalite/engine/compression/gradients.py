"""Gradients of replicas in codes (ZeRO-1), with error feedback (Seide 2014; Karimireddy 2019).

Each replica tells the owner of a part of a bucket its own sum there, encoded, straight and beside backward; the owner
decodes, adds up and divides in fp32. So nobody else decodes it, and replicas cannot drift apart. What a message leaves
out is added to the next step's sum. A step that is not taken leaves that as it was, because its message has been for
nothing: until the step is decided the new remainder lies where the sum was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megalite.config.compression import BITS, CompressionConfig
from megalite.engine.compression.blocks import BlockCodec
from megalite.engine.compression.codec import Codec, pieces_of
from megalite.engine.compression.top_k import TopKCodec
from megalite.engine.reduction.gradient_reduction import Bucket, GradientReducer
from megalite.engine.reduction.partitioned_step import PartitionedStep
from megalite.parallel.collectives import REDUCE_SCATTER
from megalite.tracing.activity import Activity


@dataclass
class _CodedBucket:
    """The coded reduction of one bucket."""

    codec: Codec
    untold: Tensor  # what messages of steps that were taken left out, fp32, of the bucket's size
    remainder: Tensor | None = None  # the same with this step's message
    message: Tensor | None = None  # on its way


class CompressedReducer(GradientReducer):
    """Reduces in codes; memory: 4 bytes for each of this rank's gradients, and this rank's part of the mean in fp32."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        parameters: Iterable[nn.Parameter],
        replicas: int,
        compression: CompressionConfig,
        activity: Activity,
        tensor_group: dist.ProcessGroup | None,
    ) -> None:
        super().__init__(buckets, parameters, replicas, torch.float32, activity, tensor_group)
        self.exchanges = {
            id(bucket): _CodedBucket(
                _codec_of(bucket, compression, self.device), torch.zeros(bucket.size, device=self.device)
            )
            for bucket in buckets
            if bucket.replicas.size > 1  # not of experts that nobody else holds
        }

    def begin(self, micro_batches: int) -> None:
        for one in self.exchanges.values():
            one.remainder = None  # of a step that was never decided, such as one that is run for a report
        super().begin(micro_batches)

    def _send(self, bucket: Bucket, sums: Tensor) -> None:
        if (one := self.exchanges.get(id(bucket))) is None:
            return super()._send(bucket, sums)
        replicas = bucket.replicas
        one.remainder = sums.float().add_(one.untold)
        one.message = one.codec.encode(one.remainder)
        received = [one.codec.sizes[replicas.rank]] * replicas.size
        bucket.on_wire = one.message.new_empty(sum(received))
        bucket.work = dist.all_to_all_single(
            bucket.on_wire, one.message, received, one.codec.sizes, group=replicas.group, async_op=True
        )

    def _settle_pending(self) -> None:
        for bucket in self._pending:
            if (one := self.exchanges.get(id(bucket))) is None:
                continue
            assert bucket.work is not None and bucket.on_wire is not None
            bucket.work.wait()
            replicas = bucket.replicas
            bucket.partition = torch.zeros(bucket.size // replicas.size, device=self.device)
            for message in bucket.on_wire.view(replicas.size, -1):
                one.codec.add_decoded(message, replicas.rank, bucket.partition)
            bucket.work = bucket.on_wire = one.message = None
        self._pending = [bucket for bucket in self._pending if bucket.work is not None]
        super()._settle_pending()

    def settle_remainders(self, is_left_out: Tensor | bool) -> None:
        """Keeps what this step's messages left out, unless the step is not taken: True, or 1 on the device."""
        if isinstance(is_left_out, bool):
            is_left_out = torch.full((), is_left_out, device=self.device)
        for one in self.exchanges.values():
            assert one.remainder is not None
            torch.where(is_left_out.bool(), one.untold, one.remainder, out=one.untold)
            one.remainder = None

    def mean_untold(self) -> dict[nn.Parameter, Tensor]:
        """Returns what all replicas together still owe the mean of each parameter that this rank owns a part of, of
        that part, flat; collective."""
        found: dict[nn.Parameter, Tensor] = {}
        for bucket in self.buckets:
            if (one := self.exchanges.get(id(bucket))) is None:
                owed = torch.zeros(bucket.size, device=self.device)
            else:
                whole = one.untold.clone()
                getattr(dist, REDUCE_SCATTER)(owed := bucket.own(whole), whole, group=bucket.replicas.group)
            owed /= self._size
            found |= {each.parameter: owed[at : at + stop - start] for each, start, stop, at in bucket.own_parts()}
        for parameter, part in found.items():
            if getattr(parameter, "is_summed_at_step", False):
                dist.all_reduce(part, group=self._tensor_group)
        return found

    def take_untold(self, fill: Callable[[nn.Parameter, Tensor], object], *, is_first: bool) -> None:
        """Replaces what is still to be told by what `fill` writes into this rank's parts, as `mean_untold` returned
        them, maybe on another layout. The owner of a part owes all of it; of parameters that tensor-parallel ranks
        sum, the first of these does, which `is_first` says."""
        for bucket in self.buckets:
            if (one := self.exchanges.get(id(bucket))) is None:
                continue
            one.untold.zero_()
            owed = bucket.own(one.untold)
            for each, start, stop, at in bucket.own_parts():
                if is_first or not getattr(each.parameter, "is_summed_at_step", False):
                    fill(each.parameter, owed[at : at + stop - start])
            owed *= self._size


class CompressedStep(PartitionedStep):
    """A step whose messages count only if it is taken."""

    @torch.no_grad()
    def __call__(self) -> None:
        super().__call__()
        on_device = self._decision.skipped_on_device
        assert isinstance(self.reducer, CompressedReducer)
        self.reducer.settle_remainders(bool(self._optimizer.overflow) if on_device is None else on_device)


def _codec_of(bucket: Bucket, compression: CompressionConfig, device: torch.device) -> Codec:
    pieces = pieces_of([(one.start, one.stop) for one in bucket.slices], bucket.size, bucket.replicas.size)
    if compression.gradients == "top_k":
        return TopKCodec(pieces, compression.density, device)
    return BlockCodec(pieces, BITS[compression.gradients], device)
