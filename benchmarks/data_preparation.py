"""Rows about `megalite prepare`, and about a run that reads what it has prepared; benchmarks/data.py prints them."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from benchmarks.data_costs import DataCost, DataGoal, number, of_proc_self, own_process, paired, ratio
from data_pipeline.prepare.plan import PrepareOptions, plan_job
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.sources.python_stdlib import python_stdlib_sources
from data_pipeline.tokenizers.training import train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
_ENCODED_AT_ONCE = 64  # texts
_DISTINCT_TEXT = 512 << 20  # bytes for the fast encoder; the exact one has an eighth of it, a minute


def preparation_costs(folder: Path, *, is_quick: bool) -> Iterator[DataCost]:
    """Yields the rows about `prepare`."""
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    tokenizer = train_tokenizer(texts[:100], folder / "tokenizer", 8192)
    some = write_texts(folder / "some.jsonl", texts[::4] if is_quick else texts[::2])
    twice = write_texts(folder / "twice.jsonl", texts if is_quick else texts * 2)
    yield encoder_cost(twice, tokenizer, folder, 1 if is_quick else 3)
    yield workers_cost(twice, tokenizer, folder, 1 if is_quick else 2)
    yield restart_cost(some, tokenizer, folder)
    yield from fast_encoder_costs(tokenizer, folder, _DISTINCT_TEXT >> 4 if is_quick else _DISTINCT_TEXT)


def encoder_cost(source: Path, tokenizer: Path, folder: Path, turns: int) -> DataCost:
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    texts = [json.loads(line)["text"] for line in source.open()]

    def encode() -> None:
        for first in range(0, len(texts), _ENCODED_AT_ONCE):
            encoder.encode_batch_fast(texts[first : first + _ENCODED_AT_ONCE], add_special_tokens=False)

    one_worker = preparing(source, tokenizer, folder / "one", 1)
    what = "encoder's processor time, of that of `prepare` with one worker"
    return ratio(what, paired(encode, one_worker, turns), 2, DataGoal(0.95, is_least=True))


def workers_cost(source: Path, tokenizer: Path, folder: Path, turns: int) -> DataCost:
    what = "wall time of `prepare` with one worker, of that with two"
    goal = DataGoal(1.9, is_least=True)
    if len(os.sched_getaffinity(0)) < 2:
        return DataCost(what, None, "this machine has one processor", goal)
    one, two = (preparing(source, tokenizer, folder / f"workers{count}", count) for count in (1, 2))
    return ratio(what, paired(one, two, turns, clock=time.monotonic, warms_up=False), 2, goal)


def restart_cost(source: Path, tokenizer: Path, folder: Path) -> DataCost:
    """Counts the bytes that are read up to the first new part, when 90 % are there, beyond those of a job's begin."""
    new, reread = folder / "restarted", folder / "begun"
    job = str(source), str(tokenizer)
    module = "benchmarks.data_preparation"
    parts = len(own_process(module, "prepare_parts", *job, str(folder / "whole"), 10**9).splitlines())
    begun = own_process(module, "prepare_parts", *job, str(reread), 1)
    own_process(module, "prepare_parts", *job, str(new), int(0.9 * parts))
    restarted = own_process(module, "prepare_parts", *job, str(new), 1)
    unit = plan_job([str(source)], tokenizer, PrepareOptions()).unit_bytes
    units = (int(restarted.split()[0]) - int(begun.split()[0])) / unit
    return number("units of text read again when a job that is 90 % done begins again", max(units, 0.0), 1, DataGoal(2))


def prepare_parts(source: str, tokenizer: str, output: str, count: int) -> None:
    """Prepares until `count` new parts are there, and prints the bytes read up to each of them."""
    known = list[int]()

    def note(progress: PrepareProgress) -> None:
        if progress.doing != "encoding" or progress.parts_done in known:
            return
        known.append(progress.parts_done)  # the first is the number of parts that were there
        if len(known) > 1:
            print(of_proc_self("io", "rchar"), flush=True)
        if len(known) > count:
            os._exit(0)

    prepare([source], Path(output), Path(tokenizer), workers=1, progress=note)


def fast_encoder_costs(tokenizer: Path, folder: Path, size: int) -> Iterator[DataCost]:
    """Compares both encoders, each in a process of its own, by byte: the exact one takes a second per megabyte."""
    what = f"processor time of `prepare --encoder fast` per byte of {size >> 20} MiB of distinct text, of the exact one"
    goal = DataGoal(1 / 15, where=f" for {_DISTINCT_TEXT >> 20} MiB")
    if find_spec("gigatoken") is None:
        yield DataCost(what, None, "gigatoken is not installed: pip install 'megalite[fast]'", goal)
        return
    sizes, per_byte, peak = {"exact": size >> 3, "fast": size}, dict[str, float](), 0.0
    for encoder, written in sizes.items():
        source = write_distinct_text(folder / f"distinct_{encoder}.jsonl", written)
        words = str(source), str(tokenizer), str(folder / encoder), encoder
        seconds, peak = json.loads(own_process("benchmarks.data_preparation", "prepare_with", *words))
        per_byte[encoder] = seconds / source.stat().st_size
    yield number(what, per_byte["fast"] / per_byte["exact"], 3, goal)
    yield number("peak memory of the process of the fast encoder (GB)", peak, 2, DataGoal(2))


def prepare_with(source: str, tokenizer: str, output: str, encoder: Literal["exact", "fast"]) -> None:
    """Prints the processor seconds of `prepare` and of the processes that it starts, and this one's memory in GB."""
    before = processor_seconds()
    prepare([source], Path(output), Path(tokenizer), PrepareOptions(encoder=encoder), workers=1)
    peak = 1024 * of_proc_self("status", "VmHWM") / 1e9  # ru_maxrss would be that of the process that started this one
    print(json.dumps([processor_seconds() - before, peak]))


def write_distinct_text(path: Path, size: int) -> Path:
    """Writes the texts of Python's standard library, then its words in random order, some made new, up to `size`."""
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    draw = random.Random(0)
    with path.open("w", encoding="utf-8") as file:
        for number_of_text, text in enumerate(itertools.cycle(texts)):
            if file.tell() >= size:
                return path
            if number_of_text >= len(texts):
                words = text.split(" ")
                draw.shuffle(words)
                words[::9] = [f"{word}{draw.randrange(100_000)}" for word in words[::9]]
                text = " ".join(words)
            file.write(json.dumps({"text": text}) + "\n")
    return path


def processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def waiting_costs(folder: Path, *, is_quick: bool) -> Iterator[DataCost]:
    """Yields the share of a step that waits for data: configs/quickstart.yaml on one rank, where steps are shortest."""
    data, command = folder / "quickstart", str(Path(sys.executable).parent / "megalite")
    environment = os.environ | {"DS_ACCELERATOR": "cpu"}
    tokenizer = train_tokenizer([path.read_text() for path in python_stdlib_sources()[:60]], folder / "small", 2048)
    prepare([str(path) for path in python_stdlib_sources()[:200]], data, tokenizer, workers=1)
    for packing in ("concat", "best_fit"):
        run_dir, steps = folder / f"run_{packing}", 8 if is_quick else 40
        options = {
            "run_dir": run_dir,
            "data.path": data,
            "data.packing": packing,
            "data.document_mask": str(packing == "best_fit").lower(),
            "training.steps": steps,
            "training.evaluation.interval": 0,
            "checkpoint.interval": steps,
            **{f"parallel.{axis}_parallel_size": 1 for axis in ("tensor", "pipeline", "data")},
        }
        words = [f"{name}={value}" for name, value in options.items()]
        for verb in (["data", "pack"], ["train"]) if packing == "best_fit" else (["train"],):
            run = [command, *verb, str(ROOT / "configs/quickstart.yaml"), *words]
            subprocess.run(run, check=True, stdout=subprocess.PIPE, env=environment, cwd=ROOT)
        records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
        steps_done = [record for record in records if "data_wait_s" in record][3:]  # the first ones warm up
        waited, whole = (sum(record[name] for record in steps_done) for name in ("data_wait_s", "step_time_s"))
        what = f"share of a quickstart step that waits for data, packing {packing} (%)"
        yield number(what, 100 * waited / whole, 3, DataGoal(0.5))


def write_texts(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def preparing(source: Path, tokenizer: Path, output: Path, workers: int) -> Callable[[], object]:
    """Returns a call that prepares `source`, each time under a new name."""
    times = itertools.count()
    return lambda: prepare([str(source)], Path(f"{output}{next(times)}"), tokenizer, workers=workers)
