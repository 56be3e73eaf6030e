"""Cost of `training.initialize_from: HF_DIR`: ranks reading their slices against a plain read of the same bytes.

    python -m benchmarks.initialize                                # writes benchmarks/results/initialize.md
    python -m benchmarks.initialize --repetitions 1 --layers 2     # a quick look, printed only

A random Llama (hidden 2048, ffn 5632, vocab 32000, 32 heads, 8 key/value heads), in files of 500 MB, on local
CPU ranks in the environment that `megalite train` gives its ranks. The optimizer's weights are fp32: numbers of a bf16
folder are also converted, and written as twice the bytes.

- plain: the ranks, at the same time, `preadv` the ranges of the files in which their slices lie into memory of that
  size, which is mapped already. Where tensor parallelism cuts columns these are whole rows: a disk gives no half ones.
- slices: the same ranks open the folder (headers, shapes, every tensor accounted for) and fill their weights:
  `load_engine` without its last step, which carries fp32 weights to other ranks' compute copies and reads no file.
- cold: nothing of the files is in the page cache (fsync, POSIX_FADV_DONTNEED, while no process maps them).
- Seconds are those of the slowest rank. Plain and slices take turns, after one of each that does not count; a ratio is
  of turns that follow one another. Cells are medians (smallest to largest).
- MiB beyond the shard: the peak of anonymous memory (RssAnon) above what the rank held before, when the engine and its
  weights were there already: of reading slices; and of all of `load_engine`, whose last step is the exchange that ends
  each training step too: gloo, which stands in for NCCL here, needs room for all weights in bf16.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks import harness
from benchmarks.checkpoint.memory import peak
from benchmarks.checkpoint.ranks import Turn, ranks_turns, together
from benchmarks.harness import header, spread
from launch.parity.forked_ranks import warm_up
from launch.runtime.local_ranks import rank_settings
from megalite.config import LaunchConfig, resolve_layout

if TYPE_CHECKING:
    from launch.conversion.huggingface.model_folder import ModelFolder
    from megalite.engine.engine import Engine

RESULTS = harness.RESULTS / "initialize.md"
MODEL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}
LAYOUTS: dict[str, dict[str, int]] = {
    "one rank": {},
    "tp 2": {"tensor_parallel_size": 2},
    "pp 2": {"pipeline_parallel_size": 2},
    "dp 2, ZeRO-1": {"data_parallel_size": 2},
    "dp 2, ZeRO-3": {"data_parallel_size": 2, "zero_stage": 3},
}
PIECE_BYTES = 8 << 20
GOAL_RATIO, GOAL_MIB = 0.8, 256
Range = tuple[str, int, int]  # file, first byte, bytes


def make_folder(folder: Path, layers: int, dtype: str) -> None:
    """A Hugging Face folder with random weights in `dtype`, fp32 or bf16."""
    import torch

    from launch.conversion.huggingface.model_folder import DTYPES
    from launch.conversion.huggingface.serial_model import global_shapes
    from megalite.checkpoint.huggingface.folder import row_blocks, write_configs, write_weights
    from megalite.checkpoint.huggingface.safetensors_writer import Entry
    from megalite.config import ModelConfig
    from models.families import family, hf_config

    model = ModelConfig.model_validate(MODEL | {"num_hidden_layers": layers})
    tensors = family("llama").layout(model, global_shapes(model)).tensors.values()
    folder.mkdir()
    write_configs(folder, hf_config(model, dtype), {})
    write_weights(
        folder,
        [Entry(tensor.name, tensor.shape, DTYPES[dtype]) for tensor in tensors],
        lambda e: (
            torch.randn([s.stop - s.start for s in block]).to(DTYPES[dtype]) for block in row_blocks(e.shape, 4)
        ),
        shard_bytes=5 * 10**8,
    )


def load_rank(rank: int, folder: Path, parallel: dict[str, int], ranks: int, repetitions: int) -> list[Turn]:
    """Turns of plain reads and of reading slices, and the memory of a load."""
    import torch

    from launch.conversion.huggingface.model_folder import open_model_folder
    from megalite.checkpoint.engine_state import load_engine
    from megalite.engine.parameter_state import refresh

    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    engine = _engine(open_model_folder(folder), parallel, ranks)
    ranges, needed = _ranges(engine, open_model_folder(folder), folder)
    memory = mmap.mmap(-1, sum(size for *_, size in ranges), mmap.MAP_PRIVATE | mmap.MAP_POPULATE)
    facts = {"needed": needed / 1e6, "ranges": len(memory) / 1e6}
    turns = []
    for is_cold in (False, True):
        pairs = [_pair(rank, engine, folder, ranges, memory, is_cold) for _ in range(1 + repetitions)]
        turns += [facts | pair | {"cold": float(is_cold)} for pair in pairs[1:]]
    memory.close()
    held = Turn()
    with peak(held, "reading"):
        _slices(engine, folder)
    with peak(held, "loading"):
        load_engine(engine, open_model_folder(folder).reader, weights_only=True)
    with peak(held, "exchange"):
        refresh(engine)
    return [turn | held for turn in turns]


def _pair(rank: int, engine: Engine, folder: Path, ranges: list[Range], memory: mmap.mmap, is_cold: bool) -> Turn:
    """Seconds of a plain read and of reading slices, in turn."""
    import torch.distributed as dist

    seconds = Turn()
    for name, action in (
        ("plain", lambda: _plain(folder, ranges, memory)),
        ("slices", lambda: _slices(engine, folder)),
    ):
        gc.collect()  # what maps the files keeps them in the page cache
        dist.barrier()
        if rank == 0 and is_cold:
            harness.drop_from_cache(*folder.glob("*.safetensors"))
        seconds[name] = together(action)
    return seconds


def _engine(hub: ModelFolder, parallel: dict[str, int], ranks: int) -> Engine:
    from megalite.engine.build import build_engine
    from models.decoder import decoder_layers

    model = hub.model.model_dump()
    config = harness.config_of(model, ranks, 64, parallel=parallel, precision={"dtype": "bf16"})
    return build_engine(decoder_layers(config.model), config, resolve_layout(config, ranks, "cpu"))


def _slices(engine: Engine, folder: Path) -> None:
    """`load_engine`, as a run calls it, up to the point where no file is read any more."""
    from launch.conversion.huggingface.model_folder import open_model_folder
    from megalite.checkpoint import engine_state as loading

    with patch.object(loading, "refresh", lambda engine: None):
        loading.load_engine(engine, open_model_folder(folder).reader, weights_only=True)


def _ranges(engine: Engine, hub: ModelFolder, folder: Path) -> tuple[list[Range], int]:
    """Returns the ranges of the files that hold this rank's slices, and how many of their bytes are its own."""
    from megalite.checkpoint.huggingface.hub_reader import HubReader
    from megalite.checkpoint.manifest import Slices

    places: dict[str, tuple[str, int, list[int]]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for name, entry in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    places[name] = (path.name, 8 + length + entry["data_offsets"][0], entry["shape"])
    ranges: list[Range] = []
    needed = 0

    class Watching(HubReader):
        """Notes what is read of the files."""

        def __init__(self, reader: HubReader) -> None:
            read = reader._read_hub

            def noted(name: str, source: Slices) -> Any:
                nonlocal needed
                file, start, shape = places[name]
                block = read(name, source)
                row = block.itemsize * prod(shape[1:])
                ranges.append((file, start + row * source[0].start, row * (source[0].stop - source[0].start)))
                needed += block.nbytes
                return block

            super().__init__(folder, noted, reader._layout, reader.shapes)

    from megalite.checkpoint.engine_state import load_engine

    load_engine(engine, Watching(hub.reader), weights_only=True)
    return list(_joined(ranges)), needed


def _joined(ranges: list[Range]) -> Iterator[Range]:
    """Ranges that follow one another as one, and parts of one row once."""
    file, start, stop = "", 0, 0
    for name, first, size in sorted(ranges):
        if name == file and first <= stop:
            stop = max(stop, first + size)
            continue
        if stop > start:
            yield file, start, stop - start
        file, start, stop = name, first, first + size
    yield file, start, stop - start


def _plain(folder: Path, ranges: list[Range], memory: mmap.mmap) -> None:
    view, filled = memoryview(memory), 0
    files = {name: os.open(folder / name, os.O_RDONLY) for name in {name for name, *_ in ranges}}
    for name, start, size in ranges:
        done = 0
        while done < size:
            piece = view[filled + done : filled + min(size, done + PIECE_BYTES)]
            done += os.preadv(files[name], [piece], start + done)
        filled += size
    for descriptor in files.values():
        os.close(descriptor)


def table(root: Path, layers: int, repetitions: int) -> list[str]:
    columns = ("a rank's slices MB", "plain s", "plain GB/s", "slices s", "plain / slices", "MiB beyond the shard")
    lines = header("folder", "layout", "", *columns, "and the exchange", words=3)
    for dtype, name in (*(("bf16", name) for name in LAYOUTS), ("fp32", "one rank"), ("fp32", "tp 2")):
        folder, parallel = root / dtype, LAYOUTS[name]
        if not folder.exists():
            make_folder(folder, layers, dtype)
        ranks = prod(size for option, size in parallel.items() if option != "zero_stage")
        turns = ranks_turns(load_rank, ranks, folder, parallel, ranks, repetitions)
        for is_cold in (False, True):
            some = [turn for turn in turns if turn["cold"] == is_cold]
            plain, slices = ([turn[key] for turn in some] for key in ("plain", "slices"))
            cells = [
                dtype,
                name,
                "cold" if is_cold else "warm",
                f"{some[0]['needed']:.0f} in {some[0]['ranges']:.0f}",
                spread(plain),
                spread([turn["ranges"] / 1e3 / turn["plain"] for turn in some], ".1f"),
                spread(slices),
                spread([turn["plain"] / turn["slices"] for turn in some]),
                f"{some[0]['reading']:.0f}",
                f"{some[0]['loading']:.0f} ({some[0]['exchange']:.0f} alone)",
            ]
            lines.append(harness.row(cells))
            print(lines[-1], flush=True)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--layers", type=int, default=8)
    options = parser.parse_args()
    warm_up(rank_settings(LaunchConfig(), 2, on_gpu=False)[0])
    load, began = harness.Load(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix=".initialize_") as temporary:
        root = Path(temporary)
        lines = table(root, options.layers, options.repetitions)
        size = sum(path.stat().st_size for path in (root / "bf16").glob("*.safetensors"))
    text = harness.page(
        "Starting from a Hugging Face folder",
        f"benchmarks.initialize --repetitions {options.repetitions} --layers {options.layers}",
        f"{harness.machine('torch')}. {size / 1e9:.2f} GB of weights in bf16.",
        *lines,
        "",
        f"The goals: plain / slices at least {GOAL_RATIO}, memory beyond the shard at most {GOAL_MIB} MiB. {load} "
        f"{time.monotonic() - began:.0f} s.",
    )
    if (options.repetitions, options.layers) == (5, 8):
        RESULTS.write_text(text)
    else:
        print(text)


if __name__ == "__main__":
    main()
