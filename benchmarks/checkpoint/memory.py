"""Part `memory` of benchmarks/checkpoint/checkpoint.py: what a save and a load take beside the state itself."""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.checkpoint.ranks import Trainer, Turn, manifest, ranks_turns, succeeded
from benchmarks.harness import header, row

NARROW = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8}
LAYERS = {4096: 12, 32768: 3}  # by vocabulary: the same number of parameters
MIB = 1 << 20


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


def save_memory_rank(rank: int, root: Path, model: dict[str, int], zero_stage: int) -> list[Turn]:
    """This rank's state, and what saving it and gathering whole parameters take beside it, MiB."""
    from megalite.checkpoint.engine_state import own_blocks
    from megalite.engine.parameter_state import moment_names, read_parameter

    trainer = Trainer(model, 2, zero_stage)
    engine = trainer.engine
    shards = [parameter.shard for _, parameter in engine.parameters()]  # type: ignore[attr-defined]
    turn = Turn(
        state=sum(block.numbers.nbytes for block in own_blocks(engine).blocks) / MIB,
        largest=4 * max(math.prod(shard.local_shape) for shard in shards) / MIB,
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
    return [turn]


def load_memory_rank(rank: int, root: Path, model: dict[str, int], zero_stage: int) -> list[Turn]:
    """The same of a load into an engine that has not trained: moments are made by it, and kept."""
    trainer = Trainer(model, 2, zero_stage, warm_up_steps=0)
    turn = Turn()
    with peak(turn, "load"):
        trainer.load(root / "step_00000001")
    return [turn]


def memory_table(root: Path, repetitions: int) -> list[str]:
    del repetitions  # the same each time
    columns = ["largest parameter", "ZeRO", "own state", "background save", "of it kept", "later ones", "waiting save"]
    rows = header(*columns, "later ones", "load, beyond what stays", "parameters gathered one at a time")
    for vocabulary, layers in LAYERS.items():
        model = NARROW | {"vocab_size": vocabulary, "num_hidden_layers": layers}
        for zero_stage in (1, 3):
            (of_save,) = ranks_turns(save_memory_rank, 2, root, model, zero_stage)
            (of_load,) = ranks_turns(load_memory_rank, 2, root, model, zero_stage)
            names = ["state", "background", "background kept", "background again", "waiting", "waiting again"]
            cells = [f"{of_save['largest']:.0f}", str(zero_stage), *(f"{of_save[name]:.0f}" for name in names)]
            cells += [f"{of_load['load'] - of_load['load kept']:.0f}", f"{of_save['gathered']:.0f}"]
            rows.append(row(cells))
    return rows
