"""The stand-in itself: messages carry numbers, streams wait for what they should, and wrong orders are told.

Without these, green runs of the other files could mean that nothing is moved and nobody ever waits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.device.counts import change_setting, counts_now
from tests.helpers.rank_pool import RankFailure, run_fresh_ranks

RANKS = 3


def _here(numbers: Tensor) -> Tensor:
    return numbers.to("cuda")


def _collectives(rank: int, dtype: torch.dtype) -> None:
    mine = [torch.arange(6).mul(each + 1).to(dtype) for each in range(RANKS)]  # of each rank; small, so exact
    whole = torch.stack(mine)
    x = _here(mine[rank])
    dist.all_reduce(x)
    assert torch.equal(x.cpu(), whole.sum(0).to(dtype))
    x = _here(mine[rank])
    dist.all_reduce(x, dist.ReduceOp.MAX)
    assert torch.equal(x.cpu(), whole.amax(0))
    part, x = _here(torch.zeros(2, dtype=dtype)), _here(mine[rank])
    dist.reduce_scatter_tensor(part, x)
    assert torch.equal(part.cpu(), whole.sum(0).to(dtype)[2 * rank : 2 * rank + 2])
    gathered = _here(torch.zeros(RANKS, 6, dtype=dtype))
    dist.all_gather_into_tensor(gathered, x)
    assert torch.equal(gathered.cpu(), whole)
    dist.broadcast(x, src=1)
    assert torch.equal(x.cpu(), mine[1])
    exchanged = _here(torch.zeros(6, dtype=dtype))
    dist.all_to_all_single(exchanged, _here(mine[rank]))
    assert torch.equal(exchanged.cpu(), torch.cat([each[2 * rank : 2 * rank + 2] for each in mine]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_collectives_move_numbers(dtype: torch.dtype) -> None:
    run_fresh_ranks(_collectives, RANKS, dtype)


def _messages(rank: int) -> None:
    pairs = [dist.new_group([0, 1]), dist.new_group([1, 2])]
    x = _here(torch.full((5,), float(rank)))
    if rank == 0:
        dist.send(x, dst=1, group=pairs[0])
    elif rank == 1:
        got = torch.empty_like(x)
        dist.recv(got, src=0, group=pairs[0])
        assert got.cpu().eq(0).all()
        dist.send(got, dst=2, group=pairs[1])
    else:
        dist.recv(x, src=1, group=pairs[1])
        assert x.cpu().eq(0).all()
    ahead, behind, got = (rank + 1) % RANKS, (rank - 1) % RANKS, torch.empty_like(x)
    ring = [dist.P2POp(dist.isend, _here(torch.full((5,), 7.0 + rank)), ahead), dist.P2POp(dist.irecv, got, behind)]
    for work in dist.batch_isend_irecv(ring):  # one bundle, so that a ring is no deadlock
        work.wait()
    assert got.cpu().eq(7.0 + behind).all()


def test_messages_move_numbers() -> None:
    run_fresh_ranks(_messages, RANKS)


def _waiting(rank: int) -> None:
    store = dist.distributed_c10d._get_default_store()
    x = torch.zeros(4, device="cuda")
    if rank == 1:
        side, event = torch.cuda.Stream(), torch.cuda.Event()
        work = dist.irecv(x, src=0)
        assert work is not None
        work.wait()  # of the current stream
        event.record()
        side.wait_event(event)
        behind = torch.cuda.Event()
        behind.record(side)
        assert not event.query() and not behind.query(), "nothing has been sent"
        store.set("asked", "")
        behind.synchronize()
        assert event.query() and x.cpu().eq(3).all()
    else:
        store.wait(["asked"])
        dist.send(_here(torch.full((4,), 3.0)), dst=1)


def test_what_waits_for_a_message_runs_behind_it() -> None:
    run_fresh_ranks(_waiting, 2)


def say_into(folder: Path, rank: int) -> None:
    change_setting("STAND_IN_PATIENCE_S", 3)
    os.dup2(os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT), 2)


def said_by_failing(folder: Path, function: Callable[..., Any], world_size: int, *arguments: Any) -> str:
    """What ranks say on stderr while a function fails, as it must."""
    with pytest.raises(RankFailure):
        run_fresh_ranks(function, world_size, folder, *arguments)
    return "".join(file.read_text() for file in sorted(folder.iterdir()))


def _both_send_first(rank: int, folder: Path) -> None:
    say_into(folder, rank)
    x, got = torch.zeros(1 << 20, device="cuda"), torch.zeros(1 << 20, device="cuda")
    dist.send(x, dst=1 - rank)
    dist.recv(got, src=1 - rank)
    torch.cuda.synchronize()


def test_a_send_that_nobody_receives_hangs_and_each_rank_says_so(tmp_path: Path) -> None:
    """NCCL buffers small messages, so that this order hangs with large ones alone."""
    said = said_by_failing(tmp_path, _both_send_first, 2)
    assert re.search(r"waits in send of 1048576 float32, number 0, for rank [01]", said), said


def _one_calls_another_collective(rank: int, folder: Path) -> None:
    say_into(folder, rank)
    x = torch.zeros(8, device="cuda")
    if rank == 0:
        dist.all_reduce(x)
    else:
        dist.broadcast(x, src=1)
    torch.cuda.synchronize()


def test_collectives_that_do_not_match_are_told(tmp_path: Path) -> None:
    said = said_by_failing(tmp_path, _one_calls_another_collective, 2)
    assert "all-reduce of 8 float32" in said and "broadcast of 8 float32" in said, said


def _crossing_groups(rank: int, folder: Path, connections: int) -> None:
    """Two groups, whose collectives the ranks enqueue in different orders; a stream of its own waits for each."""
    say_into(folder, rank)
    groups = [dist.new_group([0, 1]), dist.new_group([0, 1])]
    change_setting("CUDA_DEVICE_MAX_CONNECTIONS", connections)
    x = [torch.zeros(8, device="cuda") for _ in groups]
    for each in [0, 1] if rank == 0 else [1, 0]:
        work = dist.all_reduce(x[each], group=groups[each], async_op=True)
        assert work is not None
        with torch.cuda.stream(torch.cuda.Stream()):
            work.wait()
    torch.cuda.synchronize()


def test_what_waits_in_a_connection_holds_back_the_streams_that_share_it(tmp_path: Path) -> None:
    """Kernels of two groups run side by side; with one connection the first wait stands before the second kernel."""
    run_fresh_ranks(_crossing_groups, 2, tmp_path, 0)
    said = said_by_failing(tmp_path, _crossing_groups, 2, 1)
    assert "waits for its turn in connection 0" in said and "waits in all-reduce of 8 float32" in said, said


def test_memory_ends() -> None:
    run_fresh_ranks(_memory, 1)


def _memory(rank: int) -> None:
    before = counts_now()
    kept = torch.empty(70 << 30, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(20 << 30, dtype=torch.uint8, device="cuda")
    assert torch.cuda.mem_get_info()[1] == 80 << 30 and kept.numel() == 70 << 30
    taken = torch.ones(5).cuda()
    del taken
    assert torch.empty(5, device="cuda").cpu().eq(0).all(), "what is taken again is zeroed"
    assert (counts_now() - before).allocations >= 2


def _taken_again(rank: int, folder: Path, waits: bool) -> None:
    """A copy on a stream of its own, of a tensor that is given back and whose memory is taken again at once."""
    say_into(folder, rank)
    x, y, side = torch.empty(1000, device="cuda"), torch.empty(1000, device="cuda"), torch.cuda.Stream()
    with torch.cuda.stream(side):
        y.copy_(x)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    place = x.data_ptr()
    del x
    assert torch.empty(1000, device="cuda").data_ptr() == place


def _spoilt(rank: int, folder: Path, reads: bool) -> None:
    """As when the last block's activations leave although backward has them: what comes back is not theirs."""
    say_into(folder, rank)
    change_setting("STAND_IN_HAZARDS", 2)
    x, host = torch.empty(1000, device="cuda"), torch.empty(1000, pin_memory=True)
    with torch.cuda.stream(torch.cuda.Stream()):
        host.copy_(x, non_blocking=True)
    del x
    y = torch.empty(1000, device="cuda")
    if reads:
        y.copy_(host, non_blocking=True)


def test_what_was_taken_before_it_had_left_is_not_copied_back(tmp_path: Path) -> None:
    run_fresh_ranks(_spoilt, 1, tmp_path, False)
    assert "source may have been used again" in said_by_failing(tmp_path, _spoilt, 1, True)


def test_memory_that_a_stream_may_still_read_is_not_taken_again(tmp_path: Path) -> None:
    """However soon the copy has ended this time."""
    run_fresh_ranks(_taken_again, 1, tmp_path, True)
    said = said_by_failing(tmp_path, _taken_again, 1, False)
    assert re.search(r"the allocator's use by stream \d+ may come while stream \d+ still is at a copy of them", said), (
        said
    )
