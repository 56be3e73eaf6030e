"""Cost of checkpoints: training blocked by a save, the disk's own speed, host memory, and the agreement of a step.

    python -m benchmarks.checkpoint.checkpoint                               # writes benchmarks/results/checkpoint.md
    python -m benchmarks.checkpoint.checkpoint --part disk --repetitions 3   # a look at one part, printed only

Shape: Llama, hidden 768, 9 layers, 12 heads, ffn 2048, vocab 16384 (88.9 million parameters): 1.07 GB of fp32 weights
and moments, on one rank and on two data-parallel ranks with ZeRO-1, in the environment that `megalite train` gives its
ranks. What is compared takes turns, and a ratio is of turns that follow one another. Cells are medians (smallest to
largest), seconds those of the last rank. Before a turn the disk is synced and the processors have been idle for half a
second, or have not in 20 seconds.

- background: a `waiting` save is one with `checkpoint.background: false`. Steps have one sequence of 64 tokens a rank.
  A repetition is two runs: one whose first save in the background finds nothing mapped, and one that has called
  `Saver.prepare` before and goes on with two pairs of a waiting save and a save in the background. `lost` is what
  training lost to a save in the background altogether: the wait, and by how much the steps until its commit took longer
  than quiet ones.
- disk: `dd bs=32M conv=fsync` copies as many random bytes from the page cache to the same disk, through the page cache
  and (`direct`) past it. All but the cached load read what is not in the page cache (POSIX_FADV_DONTNEED), `dd` too. A
  resume compares all digests and loads.
- memory: the peak of anonymous memory (RssAnon) above what the rank held before; for a load, above what it holds after
  it. Two models of the same size, whose largest parameters differ eightfold; ZeRO-1 and ZeRO-3 on two ranks.
- agreement: `Requests.agree`, 200 calls in a row, beside steps of a model with 9 thousand parameters.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import harness
from benchmarks.checkpoint.memory import memory_table
from benchmarks.checkpoint.ranks import Trainer, Turn, manifest, ranks_turns, settle, succeeded, together
from benchmarks.harness import header, spread
from launch.parity.forked_ranks import warm_up
from launch.runtime.local_ranks import rank_settings
from megalite.config import LaunchConfig

if TYPE_CHECKING:
    from megalite.checkpoint.saver import Saved

RESULTS = harness.RESULTS / "checkpoint.md"
MODEL = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
}
TINY = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
MIB = 1 << 20


# --- background


def background_rank(rank: int, root: Path, ranks: int, is_prepared: bool, pairs: int) -> list[Turn]:
    """The first turn is the run's first save in the background; the others compare."""
    trainer = Trainer(MODEL, ranks)
    waiting, background = trainer.saver(root, background=False), trainer.saver(root, background=True)
    if is_prepared:
        background.prepare()
    turns = []
    for number in range(1 + pairs):
        turn = Turn()
        if number:
            settle(root)
            waiting.save(manifest(2 * number))
            turn["waiting_s"] = succeeded(waiting).blocked_s
        settle(root)
        turn["quiet_s"] = statistics.median(trainer.step() for _ in range(5))
        background.save(manifest(2 * number + 1))
        ended: list[Saved] = []
        during: list[float] = []
        while not everywhere(ended):
            during.append(trainer.step())
            ended += background.finished()
        background.wait()
        (saved,) = ended
        assert saved.failure is None, saved.failure
        lost = saved.blocked_s + sum(during) - len(during) * turn["quiet_s"]
        turn |= {"blocked_s": saved.blocked_s, "total_s": saved.total_s, "lost_s": lost}
        turn["during_s"] = statistics.mean(during)
        turns.append(turn)
    return turns


def everywhere(ended: list[Saved]) -> bool:
    """Collective: whether no rank's list is empty."""
    import torch
    import torch.distributed as dist

    least = torch.tensor(len(ended))
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    return bool(least)


def background_table(root: Path, repetitions: int) -> list[str]:
    head = ["ranks", "save", "blocked s", "waiting save s", "blocked / waiting save", "total s"]
    head += ["step meanwhile / quiet step", "quiet step s", "lost s", "lost / waiting save"]
    rows = header(*head)
    for ranks in (1, 2):
        turns: dict[str, list[Turn]] = {"first, nothing mapped": [], "first, prepared": [], "later": []}
        for _ in range(repetitions):
            (bare,) = ranks_turns(background_rank, ranks, root, ranks, False, 0)
            prepared, *later = ranks_turns(background_rank, ranks, root, ranks, True, 2)
            usual = {"waiting_s": statistics.median(turn["waiting_s"] for turn in later)}  # maps nothing, first or not
            turns["first, nothing mapped"].append(bare | usual)
            turns["first, prepared"].append(prepared | usual)
            turns["later"] += later
        for name, own in turns.items():
            cells = [
                str(ranks),
                name,
                spread([turn["blocked_s"] for turn in own]),
                spread([turn["waiting_s"] for turn in own]),
                spread([100 * turn["blocked_s"] / turn["waiting_s"] for turn in own], ".0f", " %"),
                spread([turn["total_s"] for turn in own]),
                spread([turn["during_s"] / turn["quiet_s"] for turn in own]),
                spread([turn["quiet_s"] for turn in own]),
                spread([turn["lost_s"] for turn in own]),
                spread([turn["lost_s"] / turn["waiting_s"] for turn in own]),
            ]
            rows.append(harness.row(cells))
    return rows


# --- disk


def disk_rank(rank: int, root: Path, ranks: int, repetitions: int) -> list[Turn]:
    """Each turn writes with dd, saves, reads with dd, loads and resumes."""
    from megalite.checkpoint.intact_checkpoint import newest_intact

    trainer = Trainer(MODEL, ranks)
    saver = trainer.saver(root, background=False)
    original, copy, folder = root / "original", root / "copy", root / "step_00000001"

    def save() -> None:
        saver.save(manifest(1))
        size = succeeded(saver).bytes
        if rank == 0 and not original.exists():
            write_random(original, size)

    def resume() -> None:
        assert newest_intact(root) == (folder, [])
        trainer.load(folder)

    def dd(*arguments: str) -> None:
        if rank == 0:
            subprocess.run(["dd", "bs=32M", "status=none", *arguments], check=True)

    writes = {
        "dd_direct_write_s": lambda: dd(f"if={original}", f"of={copy}", "conv=fsync", "oflag=direct"),
        "dd_write_s": lambda: dd(f"if={original}", f"of={copy}", "conv=fsync"),
        "save_s": save,
    }
    reads = {
        "load_s": lambda: trainer.load(folder),
        "cached_load_s": lambda: trainer.load(folder),
        "dd_read_s": lambda: dd(f"if={original}", "of=/dev/null"),
        "resume_s": resume,
    }
    save()
    turns = []
    for _ in range(repetitions):
        turn = Turn()
        for name, action in writes.items():
            settle(root)
            dd(f"if={original}", "of=/dev/null")  # into the page cache
            turn[name] = together(action)
        for name, action in reads.items():
            settle(root, remove=False)
            if name != "cached_load_s":
                harness.drop_from_cache(original, *folder.iterdir())
            turn[name] = together(action)
        turns.append(turn)
    return turns


def write_random(path: Path, size: int) -> None:
    block = os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.write(block[: size % MIB])


def disk_table(root: Path, repetitions: int) -> list[str]:
    measured = ("dd_write_s", "dd_direct_write_s", "save_s", "dd_read_s", "load_s", "cached_load_s", "resume_s")
    ratios = {
        f"{upper} / dd {lower.replace('_', ' ')}": (f"{upper}_s", f"dd_{lower}_s")
        for upper, lower in (
            ("save", "write"),
            ("save", "direct_write"),
            ("load", "write"),
            ("resume", "write"),
            ("load", "read"),
            ("resume", "read"),
        )
    }
    of_ratios = header("ranks", *ratios)
    of_seconds = header("ranks", *(name.replace("_", " ") for name in measured))
    for ranks in (1, 2):
        turns = ranks_turns(disk_rank, ranks, root, ranks, repetitions)
        cells = [spread([turn[upper] / turn[lower] for turn in turns]) for upper, lower in ratios.values()]
        of_ratios.append(harness.row([ranks, *cells]))
        cells = [spread([turn[name] for turn in turns]) for name in measured]
        of_seconds.append(harness.row([ranks, *cells]))
    return [*of_ratios, "", *of_seconds]


# --- agreement


def agreement_rank(rank: int, root: Path, ranks: int, repetitions: int) -> list[Turn]:
    """Each turn agrees 200 times in a row and trains 5 steps."""
    from megalite.resilience.stop_requests import StopRequests

    trainer, calls, steps = Trainer(TINY, ranks), 200, 5
    with StopRequests(max_minutes=60, started=time.monotonic()) as requests:
        return [
            Turn(
                agree_s=together(lambda: [requests.agree(save_next=False) for _ in range(calls)]) / calls,
                step_s=together(lambda: [trainer.step() for _ in range(steps)]) / steps,
            )
            for _ in range(repetitions)
        ]


def agreement_table(root: Path, repetitions: int) -> list[str]:
    rows = header("ranks", "agreement µs", "smallest step ms", "share of it", "of a step of 1 s")
    for ranks in (2, 8):
        turns = ranks_turns(agreement_rank, ranks, root, ranks, 3 * repetitions)
        cells = [
            str(ranks),
            spread([1e6 * turn["agree_s"] for turn in turns], ".0f"),
            spread([1e3 * turn["step_s"] for turn in turns], ".0f"),
            spread([100 * turn["agree_s"] / turn["step_s"] for turn in turns], ".1f", " %"),
            f"{100 * statistics.median(turn['agree_s'] for turn in turns):.3f} %",
        ]
        rows.append(harness.row(cells))
    return rows


# --- the report


PARTS: dict[str, tuple[str, Callable[[Path, int], list[str]]]] = {
    "background": ("Saves in the background", background_table),
    "disk": ("A checkpoint of 1.07 GB against the disk", disk_table),
    "memory": ("Host memory per rank, MiB, two ranks", memory_table),
    "agreement": ("Agreement of a step", agreement_table),
}


def measure(part: str, repetitions: int) -> list[str]:
    """A part's section of the results."""
    title, table = PARTS[part]
    load, started = harness.Load(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix=".checkpoint_") as folder:
        rows = table(Path(folder), repetitions)
    return [f"## {title}", "", *rows, "", f"{load} {time.monotonic() - started:.0f} s.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="this part only; the results file stays")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    warm_up({"DS_ACCELERATOR": "cpu"} | rank_settings(LaunchConfig(), ranks=1, on_gpu=False)[0])
    text = harness.page(
        "What checkpoints cost",
        f"benchmarks.checkpoint.checkpoint --repetitions {options.repetitions}",
        f"{harness.machine('torch', 'deepspeed')}, {harness.mount_of(RESULTS.parent)}.",
        *(line for part in ([options.part] if options.part else PARTS) for line in measure(part, options.repetitions)),
    )
    harness.show(text, RESULTS, renews=not options.part)


if __name__ == "__main__":
    main()
