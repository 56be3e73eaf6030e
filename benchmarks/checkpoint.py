"""What checkpoints cost: training blocked by a save, the disk's own speed, host memory, and the agreement of a step.

    python benchmarks/checkpoint.py                               # writes benchmarks/results/checkpoint.md
    python benchmarks/checkpoint.py --part disk --repetitions 3   # a look at one part, printed only

Shape: Llama, hidden 768, 9 layers, 12 heads, ffn 2048, vocab 16384 (88.9 million parameters): 1.07 GB of fp32 weights
and moments, on one rank and on two data-parallel ranks with ZeRO-1, in the environment that `megalite train` gives its
ranks. What is compared takes turns within each repetition; ratios are of one repetition's turns, and cells are
medians (smallest to largest). A time ends when the last rank is done; all wait for an idle disk before they begin.

- background: steps of one sequence of 64 tokens a rank. A repetition is a run of its own: a save in the background that
  finds nothing mapped, then pairs: a save while training waits, a save in the background while it goes on. `lost` is
  what training lost altogether: the wait, and by how much the steps until the commit were longer than quiet ones.
- disk: `dd conv=fsync` copies as many random bytes from the page cache to the same disk. Reads are from the disk
  (POSIX_FADV_DONTNEED), also those of `dd`. A resume compares all digests before it loads.
- memory: the peak of anonymous memory (RssAnon) above what the rank held before; for a load, above what it holds after
  it. Two models with almost equal state, whose largest parameters differ eightfold; ZeRO-1 and ZeRO-3 on two ranks.
- agreement: `Requests.agree`, 200 calls in a row, beside steps of a model with 9 thousand parameters.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import platform
import shutil
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from launch.local import rank_environment
from launch.warm_ranks import run_ranks, warm_up
from megalite.config import Config, LaunchConfig

if TYPE_CHECKING:
    from megalite.checkpoint.manifest import Manifest
    from megalite.checkpoint.saver import Saved, Saver

RESULTS = Path(__file__).parent / "results" / "checkpoint.md"
MODEL = {
    "vocab_size": 16384,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
}
NARROW = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
LARGEST = {  # vocabulary -> layers
    4096: 12,
    32768: 3,
}
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
SEQUENCE = 64
TIME_LIMIT_S = 1800
MIB = 1 << 20
Turn = dict[str, float]  # what was measured -> seconds or MiB


class Trainer:
    """An engine on this rank, fed random tokens."""

    def __init__(self, model: dict[str, int], ranks: int, zero_stage: int = 1, warm_up_steps: int = 2) -> None:
        import numpy as np
        import torch

        from megalite.engine.engine import build_engine
        from models.decoder import decoder_layers

        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
        config = Config.model_validate(
            {
                "run_dir": tempfile.gettempdir(),
                "model": model | {"max_position_embeddings": SEQUENCE},
                "data": {"path": "unused"},
                "parallel": {"data_parallel_size": ranks, "zero_stage": zero_stage},
                "training": {
                    "global_batch_size": ranks,
                    "micro_batch_size": 1,
                    "sequence_length": SEQUENCE,
                    "steps": 1,
                },
            }
        )
        self.engine = build_engine(decoder_layers(config.model), config, config.check_world(ranks, "cpu"))
        self._draw, self._vocabulary = np.random.default_rng(self.engine.coordinate.data_rank), model["vocab_size"]
        for _ in range(warm_up_steps):
            self.step()

    def step(self) -> float:
        """Trains one step; returns its seconds."""
        tokens = self._draw.integers(0, self._vocabulary, (1, SEQUENCE + 1))
        batch = SimpleNamespace(tokens=tokens[:, :-1].copy(), targets=tokens[:, 1:].copy(), positions=None)
        return timed(lambda: float(self.engine.train_step([batch], 1e-4).loss))

    def saver(self, root: Path, *, background: bool) -> Saver:
        from megalite.checkpoint.saver import Saver

        return Saver(self.engine, root, background=background)

    def load(self, folder: Path) -> None:
        from megalite.checkpoint.engine import load_engine
        from megalite.checkpoint.reader import CheckpointReader

        load_engine(self.engine, CheckpointReader(folder), weights_only=False)


def timed(action: Callable[[], Any]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def together(action: Callable[[], Any]) -> float:
    """Seconds until all ranks have done it."""
    import torch.distributed as dist

    def wait() -> None:
        action()
        dist.barrier()

    dist.barrier()
    return timed(wait)


def manifest(step: int) -> Manifest:
    from megalite.checkpoint.manifest import Manifest

    return Manifest(step=step, config={}, tokenizer=None, state={}, tensors={}, files={})


def succeeded(saver: Saver) -> Saved:
    """How the save went that has just ended."""
    saver.wait()
    (saved,) = saver.finished()
    assert saved.failure is None, saved.failure
    return saved


def clear(root: Path) -> None:
    """Collective. Removes what earlier turns wrote and waits until the disk is idle."""
    import torch.distributed as dist

    if dist.get_rank() == 0:
        for path in (*root.glob("step_*"), root / "copy"):
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        os.sync()
    dist.barrier()


# --- background


def background_rank(rank: int, root: Path, ranks: int, pairs: int) -> list[Turn]:
    """The first turn is the run's first save in the background; the others compare."""
    trainer = Trainer(MODEL, ranks)
    waiting, background = trainer.saver(root, background=False), trainer.saver(root, background=True)
    turns = []
    for number in range(1 + pairs):
        turn = Turn()
        if number:
            clear(root)
            waiting.save(manifest(2 * number))
            turn["waiting_s"] = succeeded(waiting).blocked_s
        clear(root)
        turn["quiet_s"] = statistics.median(trainer.step() for _ in range(3))
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
    rows = [
        "| ranks | save | blocked s | blocked / waiting save | waiting save s | total s | step meanwhile / quiet step | "
        "lost s | lost / waiting save |",
        "|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for ranks in (1, 2):
        first, later = [], []
        for _ in range(repetitions):
            runs = run_ranks(background_rank, ranks, root, ranks, 3, timeout_s=TIME_LIMIT_S)
            turns = [slowest(turn) for turn in zip(*runs, strict=True)]
            # the save that waits is as long the first time: it maps nothing
            first.append(turns[0] | {"waiting_s": statistics.median(turn["waiting_s"] for turn in turns[1:])})
            later += turns[1:]
        for name, turns in (("first", first), ("later", later)):
            cells = [
                str(ranks),
                name,
                spread([turn["blocked_s"] for turn in turns]),
                spread([100 * turn["blocked_s"] / turn["waiting_s"] for turn in turns], ".0f", " %"),
                spread([turn["waiting_s"] for turn in turns]),
                spread([turn["total_s"] for turn in turns]),
                spread([turn["during_s"] / turn["quiet_s"] for turn in turns]),
                spread([turn["lost_s"] for turn in turns]),
                spread([turn["lost_s"] / turn["waiting_s"] for turn in turns]),
            ]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def slowest(turns: Sequence[Turn]) -> Turn:
    """Of the ranks' turns."""
    return {name: max(turn[name] for turn in turns) for name in turns[0]}


# --- disk


def disk_rank(rank: int, root: Path, ranks: int, repetitions: int) -> list[Turn]:
    """Each turn writes with dd, saves, reads with dd, loads and resumes."""
    from megalite.checkpoint.digests import check_digests_together
    from megalite.checkpoint.manifest import read_manifest

    trainer = Trainer(MODEL, ranks)
    saver = trainer.saver(root, background=False)
    original, copy, folder = root / "original", root / "copy", root / "step_00000001"

    def save() -> None:
        saver.save(manifest(1))
        size = succeeded(saver).bytes
        if rank == 0 and not original.exists():
            write_random(original, size)

    def resume() -> None:
        check_digests_together(folder, read_manifest(folder))
        trainer.load(folder)

    def dd(*arguments: str) -> None:
        if rank == 0:
            subprocess.run(["dd", "bs=32M", "status=none", *arguments], check=True)

    save()
    turns = []
    for _ in range(repetitions):
        clear(root)
        turn = Turn(dd_write_s=together(lambda: dd(f"if={original}", f"of={copy}", "conv=fsync")))
        turn["save_s"] = together(save)
        os.sync()
        forget(copy)
        turn["dd_read_s"] = together(lambda: dd(f"if={copy}", "of=/dev/null"))
        forget(*folder.iterdir())
        turn["load_s"] = together(lambda: trainer.load(folder))
        turn["cached_load_s"] = together(lambda: trainer.load(folder))
        forget(*folder.iterdir())
        turn["resume_s"] = together(resume)
        turns.append(turn)
    return turns


def write_random(path: Path, size: int) -> None:
    block = os.urandom(MIB)
    with path.open("wb") as file:
        for number in range(size // MIB):
            file.write(number.to_bytes(8, "little") + block[8:])
        file.write(block[: size % MIB])


def forget(*paths: Path) -> None:
    """Drops synced files from the page cache."""
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


DISK_COLUMNS = {  # column -> what is divided by what
    "save / dd write": ("save_s", "dd_write_s"),
    "load / dd write": ("load_s", "dd_write_s"),
    "resume / dd write": ("resume_s", "dd_write_s"),
    "load / dd read": ("load_s", "dd_read_s"),
    "resume / dd read": ("resume_s", "dd_read_s"),
}
DISK_SECONDS = ("dd_write_s", "save_s", "dd_read_s", "load_s", "cached_load_s", "resume_s")


def disk_table(root: Path, repetitions: int) -> list[str]:
    ratios = [f"| ranks | {' | '.join(DISK_COLUMNS)} |", f"|---:{'|---:' * len(DISK_COLUMNS)}|"]
    seconds = ["", f"| ranks | {' | '.join(DISK_SECONDS)} |".replace("_s ", " s ").replace("_", " ")]
    seconds.append(f"|---:{'|---:' * len(DISK_SECONDS)}|")
    for ranks in (1, 2):
        runs = run_ranks(disk_rank, ranks, root, ranks, repetitions, timeout_s=TIME_LIMIT_S)
        turns = [slowest(turn) for turn in zip(*runs, strict=True)]
        cells = [spread([turn[upper] / turn[lower] for turn in turns]) for upper, lower in DISK_COLUMNS.values()]
        ratios.append(f"| {ranks} | {' | '.join(cells)} |")
        cells = [spread([turn[name] for turn in turns]) for name in DISK_SECONDS]
        seconds.append(f"| {ranks} | {' | '.join(cells)} |")
    return ratios + seconds


# --- memory


@contextmanager
def peak(into: Turn, name: str) -> Iterator[None]:
    """By how many MiB RssAnon rises at most while this is open: `into[name]`; and by the end: `into[name kept]`."""
    ctypes.CDLL(None).malloc_trim(0)  # what malloc keeps for later would hide what is taken now
    ended, seen = threading.Event(), [anonymous_mib()]

    def watch() -> None:
        while not ended.wait(0.001):
            seen.append(anonymous_mib())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        ctypes.CDLL(None).malloc_trim(0)
        into |= {name: max(seen) - seen[0], f"{name} kept": anonymous_mib() - seen[0]}


def anonymous_mib() -> float:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) / 1024


def save_memory_rank(rank: int, root: Path, model: dict[str, int], zero_stage: int) -> Turn:
    """This rank's state, and what saving it and gathering whole parameters take beside it, MiB."""
    from megalite.checkpoint.engine import own_blocks
    from megalite.engine.state import moment_names, read_parameter

    trainer = Trainer(model, 2, zero_stage)
    engine = trainer.engine
    shards = [parameter.shard for _, parameter in engine.parameters()]
    turn = Turn(
        state=sum(block.numbers.nbytes for block in own_blocks(engine)[0]) / MIB,
        largest=4 * max(shard.local_shape.numel() for shard in shards) / MIB,
    )
    for name, background in (("waiting", False), ("background", True)):
        saver = trainer.saver(root, background=background)
        for again in ("", " again"):
            with peak(turn, name + again):
                saver.save(manifest(1))
                succeeded(saver)
    with peak(turn, "gathered"):
        for _, parameter in engine.parameters():
            read_parameter(parameter, moment_names(engine))
    return turn


def load_memory_rank(rank: int, root: Path, model: dict[str, int], zero_stage: int) -> Turn:
    """The same of a load into an engine that has not trained: moments are made by it, and kept."""
    trainer = Trainer(model, 2, zero_stage, warm_up_steps=0)
    turn = Turn()
    with peak(turn, "load"):
        trainer.load(root / "step_00000001")
    return turn


def memory_table(root: Path, repetitions: int) -> list[str]:
    del repetitions  # the same each time
    rows = [
        "| largest parameter | ZeRO | own state | background save | of it kept | later ones | waiting save | later ones "
        "| load, beyond what stays | parameters gathered one at a time |",
        f"|---:{'|---:' * 9}|",
    ]
    for vocabulary, layers in LARGEST.items():
        model = NARROW | {"vocab_size": vocabulary, "num_hidden_layers": layers}
        for zero_stage in (1, 3):
            of_save = slowest(run_ranks(save_memory_rank, 2, root, model, zero_stage, timeout_s=TIME_LIMIT_S))
            of_load = slowest(run_ranks(load_memory_rank, 2, root, model, zero_stage, timeout_s=TIME_LIMIT_S))
            of_load["beyond"] = of_load["load"] - of_load["load kept"]
            names = ["state", "background", "background kept", "background again", "waiting", "waiting again"]
            cells = [f"{of_save[name]:.0f}" for name in names]
            cells = [f"{of_save['largest']:.0f}", str(zero_stage), *cells]
            cells += [f"{of_load['beyond']:.0f}", f"{of_save['gathered']:.0f}"]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- agreement


def agreement_rank(rank: int, root: Path, ranks: int, repetitions: int) -> list[Turn]:
    """Each turn agrees 200 times in a row and trains 5 steps."""
    from megalite.resilience.requests import Requests

    trainer, calls, steps = Trainer(TINY, ranks), 200, 5
    with Requests(max_minutes=60, started=time.monotonic()) as requests:
        return [
            Turn(
                agree_s=together(lambda: [requests.agree(False) for _ in range(calls)]) / calls,
                step_s=together(lambda: [trainer.step() for _ in range(steps)]) / steps,
            )
            for _ in range(repetitions)
        ]


def agreement_table(root: Path, repetitions: int) -> list[str]:
    rows = [
        "| ranks | agreement µs | smallest step ms | share of it | of a step of 1 s |",
        "|---:|---:|---:|---:|---:|",
    ]
    for ranks in (2, 8):
        runs = run_ranks(agreement_rank, ranks, root, ranks, 3 * repetitions, timeout_s=TIME_LIMIT_S)
        turns = [slowest(turn) for turn in zip(*runs, strict=True)]
        cells = [
            str(ranks),
            spread([1e6 * turn["agree_s"] for turn in turns], ".0f"),
            spread([1e3 * turn["step_s"] for turn in turns], ".0f"),
            spread([100 * turn["agree_s"] / turn["step_s"] for turn in turns], ".1f", " %"),
            f"{100 * statistics.median(turn['agree_s'] for turn in turns):.3f} %",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


# --- the report


def spread(values: Sequence[float], form: str = ".2f", unit: str = "") -> str:
    """The median, and the smallest and largest value."""
    return f"{statistics.median(values):{form}}{unit} ({min(values):{form}} to {max(values):{form}})"


PARTS: dict[str, tuple[str, Callable[[Path, int], list[str]]]] = {
    "background": ("Saves in the background", background_table),
    "disk": ("A checkpoint of 1.07 GB against the disk", disk_table),
    "memory": ("Host memory per rank, MiB, two ranks", memory_table),
    "agreement": ("Agreement of a step", agreement_table),
}


def measure(part: str, repetitions: int) -> list[str]:
    """A part's section of the results."""
    title, table = PARTS[part]
    before, started = os.getloadavg()[0], time.monotonic()
    with tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix=".checkpoint_") as folder:
        rows = table(Path(folder), repetitions)
    load = f"Load before and after: {before:.1f} and {os.getloadavg()[0]:.1f}; {time.monotonic() - started:.0f} s."
    return [f"## {title}", "", *rows, "", load, ""]


def head(repetitions: int) -> list[str]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "deepspeed"))
    mount = subprocess.run(
        ["df", "--output=source,fstype", RESULTS.parent], capture_output=True, text=True, check=True
    ).stdout.split()[-2:]
    return [
        "# What checkpoints cost",
        "",
        f"`python benchmarks/checkpoint.py --repetitions {repetitions}`, {date.today()}: {model.partition(': ')[2]}, "
        f"{os.cpu_count()} cores, {' '.join(mount)}, {packages}, Python {platform.python_version()}, Linux "
        f"{platform.release()}. What is measured and how: the script's docstring.",
        "",
    ]


BY_HAND = "\n<!-- below: written by hand, kept when the tables are renewed -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=PARTS, help="this part only; the results file stays")
    parser.add_argument("--repetitions", type=int, default=9)
    options = parser.parse_args()
    warm_up({"DS_ACCELERATOR": "cpu"} | rank_environment(LaunchConfig(), ranks=1, on_gpu=False)[0])
    text = "\n".join(head(options.repetitions))
    for part in [options.part] if options.part else PARTS:
        text += "\n" + "\n".join(measure(part, options.repetitions))
    print(text)
    if not options.part:
        notes = RESULTS.read_text().partition(BY_HAND)[2] if RESULTS.exists() else ""
        RESULTS.write_text(text + BY_HAND + notes)


if __name__ == "__main__":
    main()
