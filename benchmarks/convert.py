"""`megalite import` and `megalite export` of a model of a billion parameters against a plain copy of the same bytes.

    python -m benchmarks.convert                             # writes benchmarks/results/convert.md
    python -m benchmarks.convert --layers 2 --repetitions 1  # a look at a small one, printed only

Shape: Llama, hidden 2048, 22 layers, 32 heads, 4 kv heads, ffn 5632, vocab 32000, untied, random numbers in bf16, made
tensor by tensor. An import reads 2 bytes a number and writes 4, because a checkpoint holds fp32; an export reads 4 and
writes 2. Each is a process of its own, `--no-validate`, and takes turns with its copy:

- copy: 8 MiB at a time, read() and write() of as many bytes as the conversion reads and writes, fsync at the end;
- direct copy: the same with O_DIRECT writes, past the page cache, which is how megalite writes weights.

What is read is dropped from the page cache before each turn (POSIX_FADV_DONTNEED), and the disk synced. Seconds are of
the work, without the start of an interpreter; a ratio is of turns that follow one another; cells are medians (smallest
to largest). Memory is the largest anonymous resident memory (RssAnon) of the process, sampled from outside every 5 ms,
beyond what it held once torch and megalite were imported. Then one import runs with its validation.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import spread

RESULTS = harness.RESULTS / "convert.md"
MODEL = {
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}
PIECE = 8 << 20
SAMPLE_S = 0.005


# --- the process that converts: `python -m benchmarks.convert --child import FROM TO VALIDATE`


def child(way: str, source: str, target: str, validate: str) -> None:
    """Says what memory it holds before, converts, and prints the summary."""
    from dataclasses import asdict

    from launch.conversion.huggingface.exporting import export_hugging_face
    from launch.conversion.huggingface.importing import import_hugging_face
    from launch.conversion.huggingface.progress import own_memory

    print(own_memory(), flush=True)
    convert: Callable[..., Any] = import_hugging_face if way == "import" else export_hugging_face
    print(json.dumps(asdict(convert(Path(source), Path(target), overwrite=True, validate=validate == "True"))))


@dataclass(frozen=True)
class Conversion:
    """Measurement of one conversion."""

    summary: dict[str, Any]
    wall_s: float  # with the start of the interpreter
    memory: int  # bytes beyond what it held before


def conversion(way: str, source: Path, target: Path, validate: bool = False) -> Conversion:
    words = [sys.executable, "-m", "benchmarks.convert", "--child", way, str(source), str(target), str(validate)]
    started, largest = time.monotonic(), 0
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        before = int(process.stdout.readline())
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            fields = status.read_text().partition("RssAnon:")[2].split()
            largest = max(largest, 1024 * int(fields[0]) if fields else 0)
            time.sleep(SAMPLE_S)
        summary = json.loads(process.stdout.read().splitlines()[-1])
    assert process.returncode == 0
    return Conversion(summary, time.monotonic() - started, largest - before)


# --- what it is compared with


def copy(sources: list[Path], target: Path, to_write: int, direct: bool) -> float:
    """Seconds of reading all of `sources` and writing `to_write` bytes of it, on disk at the end."""
    settle(sources)
    piece = memoryview(mmap.mmap(-1, PIECE))  # aligned
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (os.O_DIRECT if direct else 0)
    started, written, read = time.monotonic(), 0, 0
    total = sum(path.stat().st_size for path in sources)
    descriptor = os.open(target, flags, 0o666)
    for path in sources:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                read += count
                while written < to_write * read / total - PIECE:
                    written += os.write(descriptor, piece)
    while written < to_write:
        written += os.write(descriptor, piece)
    os.fsync(descriptor)
    os.close(descriptor)
    seconds = time.monotonic() - started
    target.unlink()
    return seconds


def settle(sources: list[Path]) -> None:
    """Nothing is waiting for the disk, and the sources are not in the page cache."""
    os.sync()
    harness.drop_from_cache(*sources)


def make_model(folder: Path, layers: int) -> int:
    """A Hugging Face folder, tensor by tensor; returns its parameters."""
    import torch

    from launch.conversion.huggingface.serial_model import global_shapes
    from megalite.checkpoint.huggingface.folder import row_blocks, write_configs, write_weights
    from megalite.checkpoint.huggingface.safetensors_writer import Entry
    from megalite.config import ModelConfig
    from models.families import family, hf_config

    model = ModelConfig.model_validate(MODEL | {"num_hidden_layers": layers})
    layout = family("llama").layout(model, global_shapes(model))
    generator = torch.Generator().manual_seed(0)
    entries = [Entry(tensor.name, tensor.shape, torch.bfloat16) for tensor in layout.tensors.values()]

    def blocks(entry: Entry) -> Iterator[torch.Tensor]:
        for rows in row_blocks(entry.shape, 4):
            shape = [s.stop - s.start for s in rows]
            numbers = torch.randn(shape, generator=generator)
            yield (1 + 0.1 * numbers if len(shape) == 1 else 0.02 * numbers).bfloat16()

    folder.mkdir()
    write_configs(folder, hf_config(model, "bf16"), {})
    return write_weights(folder, entries, blocks) // 2


# --- the report


def measure(root: Path, layers: int, repetitions: int) -> list[str]:
    hub, checkpoint, out = root / "hub", root / "checkpoint", root / "out"
    parameters = make_model(hub, layers)
    largest = 4 * MODEL["vocab_size"] * MODEL["hidden_size"]
    ratios = ("copy / conversion", "direct copy / conversion")
    rows = harness.header("", "GB read + written", "seconds", "GB/s", "copy s", "direct copy s", *ratios, "memory MB")
    for way, source, target in (("import", hub, checkpoint), ("export", checkpoint, out)):
        found: dict[str, list[float]] = {name: [] for name in ("s", "copy", "direct", "memory", "rate")}
        for _ in range(repetitions):
            files = sorted(source.glob("*.safetensors"))
            to_write = parameters * (4 if way == "import" else 2)
            found["copy"].append(copy(files, root / "copy", to_write, direct=False))
            found["direct"].append(copy(files, root / "copy", to_write, direct=True))
            settle(files)
            done = conversion(way, source, target)
            found["s"].append(done.summary["seconds"])
            found["memory"].append(done.memory / 1e6)
            found["rate"].append(6 * parameters / done.summary["seconds"] / 1e9)
        faster = [[a / b for a, b in zip(found[name], found["s"], strict=True)] for name in ("copy", "direct")]
        cells = [
            f"{(2 if way == 'import' else 4) * parameters / 1e9:.2f} + {to_write / 1e9:.2f}",
            spread(found["s"]),
            spread(found["rate"]),
            spread(found["copy"]),
            spread(found["direct"]),
            *map(spread, faster),
            spread(found["memory"], ".0f"),
        ]
        rows.append(harness.row([way, *cells]))
    same = subprocess.run(
        f"cat {hub}/*.safetensors | sha256sum; cat {out}/*.safetensors | sha256sum", shell=True, capture_output=True
    ).stdout.split()
    validated = conversion("import", hub, checkpoint, validate=True)
    compared = "; ".join([*validated.summary["compared"], *validated.summary["notices"]])
    return [
        f"{parameters:,} parameters; the largest tensor is {largest / 1e6:.0f} MB in fp32, so at most "
        f"{2 * largest / 1e6 + 300:.0f} MB are promised, and a ratio of at least 0.6.",
        "",
        *rows,
        "",
        f"The exported files have {'the' if same[0] == same[2] else 'NOT the'} bytes of the imported ones (SHA-256).",
        "",
        f"With validation an import takes {validated.summary['seconds']:.1f} s and {validated.memory / 1e6:,.0f} MB, "
        f"and {validated.summary['validation_seconds']:.0f} s for loading both models and comparing: logits are within "
        f"{validated.summary['logit_difference']:.1e} of their spread of transformers'. Compared: {compared}.",
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=MODEL["num_hidden_layers"], help="fewer: the results file stays")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    load, started = harness.Load(), time.monotonic()
    with tempfile.TemporaryDirectory(dir=RESULTS.parent, prefix=".convert_") as folder:
        rows = measure(Path(folder), options.layers, options.repetitions)
    facts = f"{harness.machine('torch', 'transformers', 'safetensors')}, {harness.mount_of(RESULTS.parent)}. {load}"
    text = harness.page(
        "Conversion of a model of a billion parameters",
        f"benchmarks.convert --repetitions {options.repetitions}",
        f"{facts} {time.monotonic() - started:.0f} s in all.",
        *rows,
    )
    print(text)
    if options.layers == MODEL["num_hidden_layers"]:
        RESULTS.write_text(text)


if __name__ == "__main__":
    main()
