"""CPU time of Prometheus's metrics: a scrape at 4, 64 and 1,024 ranks, and the training thread's share.

    python -m benchmarks.prometheus               # writes benchmarks/results/prometheus.md
    python -m benchmarks.prometheus --rounds 5    # a look, printed only

No ranks are started: an exporter is given records and breakdowns of runs with so many ranks, 8 pipeline stages and all
kinds of communication, which are more series than a run has. A scrape is what the server does for one request without
the socket: render the snapshot, and write down what is shown. A step is what observers do on the training thread, with
a breakdown in every step (`monitor.log_interval` 1); with scrapes at the same time it is the same thread's CPU time.
Medians of the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from benchmarks import harness

RESULTS = harness.RESULTS / "prometheus.md"
RANKS = (4, 64, 1024)
STAGES = 8
SCRAPES_PER_S = 50


class ScrapeCost(NamedTuple):
    """Milliseconds of CPU time, and kilobytes."""

    ranks: int
    scrape_ms: float
    kilobytes: float
    step_ms: float  # of the training thread
    step_beside_scrapes_ms: float


def exporter_of(run_dir: Path) -> tuple[Any, Any]:
    """Returns an exporter without a port, and its registry."""
    from types import SimpleNamespace

    from prometheus_client import CollectorRegistry

    from megalite.config import resolve_layout
    from megalite.monitor.goodput import Goodput
    from megalite.monitor.observer import Nonfatal
    from megalite.monitor.prometheus.exporter import PrometheusExporter

    model = {
        "vocab_size": 320,
        "hidden_size": 32,
        "intermediate_size": 50,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
    }
    config = harness.config_of(model, 4, 32, micro_batch=2, steps=1000, run_dir=str(run_dir))
    host: Any = SimpleNamespace(registry=CollectorRegistry(), gpus=None)
    goodput = Goodput(run_dir, 0, lambda *_, **__: None)
    exporter = PrometheusExporter(config, resolve_layout(config, 1, "cpu"), 0, host, goodput, Nonfatal(print))
    return exporter, host.registry


def breakdown_of(step: int, ranks: int) -> Any:
    """Returns what ranks would have told rank 0."""
    import numpy as np

    from megalite.monitor.steps.breakdown import HEAD, ROW, StepBreakdown

    rows = np.random.default_rng(step).random((ranks, len(ROW)))
    rows[:, 0] = 1
    rows[:, len(HEAD) :] *= 100
    stages = [rank * min(STAGES, ranks) // ranks for rank in range(ranks)]
    return StepBreakdown.of(step, rows, stages, [0.0] * ranks, [f"node{rank // 8:04d}" for rank in range(ranks)])


def measure(ranks: int, rounds: int) -> ScrapeCost:
    """Measures the cost at so many ranks."""
    from prometheus_client import generate_latest

    with tempfile.TemporaryDirectory() as folder:
        exporter, registry = exporter_of(Path(folder))
        breakdowns = [breakdown_of(step, ranks) for step in range(50)]
        step = 0

        def one_step() -> float:
            nonlocal step
            step += 1
            record = {
                "step": step,
                "time": time.time(),
                "loss": 3.0,
                "grad_norm": 1.0,
                "learning_rate": 1e-3,
                "samples": [step, step + 4],
                "tokens_per_second": 1e4,
                "step_time_s": 0.1,
                "skipped": False,
                "save_blocked_s": 0.0,
                "goodput": 0.9,
            }
            began = time.thread_time()
            exporter.on_breakdown(breakdowns[step % len(breakdowns)])
            exporter.on_step(record)
            return time.thread_time() - began

        def one_scrape() -> float:
            began = time.thread_time()
            generate_latest(registry)
            return time.thread_time() - began

        steps = [one_step() for _ in range(max(60, rounds))]
        scrapes = []
        for _ in range(rounds):
            one_step()
            scrapes.append(one_scrape())
        size = len(generate_latest(registry))
        is_over = threading.Event()

        def scrape_on() -> None:
            while not is_over.wait(1 / SCRAPES_PER_S):
                generate_latest(registry)

        thread = threading.Thread(target=scrape_on)
        thread.start()
        beside = []
        for _ in range(rounds):
            beside.append(one_step())
            time.sleep(0.01)
        is_over.set()
        thread.join()
    return ScrapeCost(ranks, 1e3 * median(scrapes), size / 1e3, 1e3 * median(steps[-rounds:]), 1e3 * median(beside))


def page(costs: list[ScrapeCost], rounds: int, load: harness.Load) -> str:
    """Returns the page of results."""
    beside = f"ms a step beside {SCRAPES_PER_S} scrapes/s"
    rows = [
        (f"{ranks:,}", f"{scrape_ms:.1f}", f"{kilobytes:.0f}", f"{step_ms:.2f}", f"{beside_ms:.2f}")
        for ranks, scrape_ms, kilobytes, step_ms, beside_ms in costs
    ]
    return harness.page(
        "What Prometheus's metrics cost",
        "benchmarks.prometheus",
        f"{harness.machine('prometheus-client')}. {load} Medians of {rounds} rounds, CPU time.",
        *harness.header("ranks", "ms a scrape", "kB a scrape", "ms a step", beside, words=0),
        *map(harness.row, rows),
    )


def main() -> None:
    """Measures, prints, and writes the page unless this is a look."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="fewer rounds; the page is printed only")
    rounds = parser.parse_args().rounds
    load = harness.Load()
    text = page([measure(ranks, rounds or 200) for ranks in RANKS], rounds or 200, load)
    harness.show(text, RESULTS, renews=rounds is None)


if __name__ == "__main__":
    main()
