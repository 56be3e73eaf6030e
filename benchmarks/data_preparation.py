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

from benchmarks.data_costs import DataCost, DataGoal, number, of_proc_self, own_process, paired, ratio
from data_pipeline.prepare.encoding import EncoderName
from data_pipeline.prepare.plan import PrepareOptions, plan_job
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.tokenizer import python_stdlib_sources, train_tokenizer

ROOT = Path(__file__).resolve().parents[1]
_ENCODED_AT_ONCE = 64  # texts


def preparation_costs(folder: Path, distinct_text: int, *, is_quick: bool) -> Iterator[DataCost]:
    """Yields the rows about `prepare`; `distinct_text` is how many bytes both encoders encode."""
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    tokenizer = train_tokenizer(texts[:100], folder / "tokenizer", 8192)
    some = write_texts(folder / "some.jsonl", texts[::4] if is_quick else texts[::2])
    yield encoder_cost(some, tokenizer, folder, 1 if is_quick else 5)
    twice = write_texts(folder / "twice.jsonl", texts if is_quick else texts * 2)
    yield workers_cost(twice, tokenizer, folder, 1 if is_quick else 2)
    yield restart_cost(some, tokenizer, folder)
    yield from fast_encoder_costs(tokenizer, folder, distinct_text)


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
    first = known = len([*Path(f"{output}.parts").glob("part-*.npz")])

    def note(progress: PrepareProgress) -> None:
        nonlocal known
        if progress.doing == "encoding" and progress.parts_done > known:
            known = progress.parts_done
            print(of_proc_self("io", "rchar"), flush=True)
            if known == first + count:
                os._exit(0)

    prepare([source], Path(output), Path(tokenizer), workers=1, progress=note)


def fast_encoder_costs(tokenizer: Path, folder: Path, size: int) -> Iterator[DataCost]:
    """Compares both encoders on `size` bytes of text, once and each in a process of its own."""
    of_text = f"on {size >> 20} MiB of distinct text"
    what = f"processor time of `prepare --encoder exact`, of the fast one, {of_text}"
    goal, room = DataGoal(15, is_least=True, where=" on 512 MiB"), DataGoal(2)
    if find_spec("gigatoken") is None:
        yield DataCost(what, None, "gigatoken is not installed: pip install 'megalite[fast]'", goal)
        return
    source = write_distinct_text(folder / "distinct.jsonl", size)
    exact, fast = (
        json.loads(own_process("benchmarks.data_preparation", "prepare_with", str(source), str(tokenizer), encoder))
        for encoder in ("exact", "fast")
    )
    assert exact["sha256"] == fast["sha256"]
    yield number(what, exact["seconds"] / fast["seconds"], 1, goal)
    yield number(f"peak memory of the fast one, {of_text} (GB)", fast["peak_bytes"] / 1e9, 2, room)


def prepare_with(source: str, tokenizer: str, encoder: EncoderName) -> None:
    """Prints what `prepare` took with an encoder; the time of the fast one holds the comparison of both."""
    began = time.process_time()
    made = prepare([source], Path(f"{source}_{encoder}"), Path(tokenizer), PrepareOptions(encoder=encoder), workers=1)
    seconds, peak = time.process_time() - began, 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak_bytes": peak, "sha256": made.sha256}))


def write_distinct_text(path: Path, size: int) -> Path:
    """Writes `size` bytes of rows: Python's standard library, then its words in random order, some made new."""
    texts = [path.read_text(encoding="utf-8") for path in python_stdlib_sources()]
    draw, written = random.Random(0), 0
    with path.open("w", encoding="utf-8") as file:
        for place, text in enumerate(itertools.cycle(texts)):
            if written >= size:
                break
            if place >= len(texts):
                words = text.split(" ")
                draw.shuffle(words)
                words[::9] = [f"{word}{draw.randrange(100_000)}" for word in words[::9]]
                text = " ".join(words)
            file.write(json.dumps({"text": text}) + "\n")
            written += len(text.encode())
    return path


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
