"""Cost of a long life: what a resume, a rollback and those who look at a run read of its records.

    python -m benchmarks.records              # writes benchmarks/results/records.md
    python -m benchmarks.records --most 10000 # a look, printed only

Run folders of a thousand, a hundred thousand and a million steps, a save every thousand steps, and lines of 529 bytes
(a short record) and 940 bytes (with the parts of each step, as `monitor.log_interval: 1` writes them). Each number is
that of a process of its own, which has imported what it needs before the clock starts: seconds of processor time, and
how much the peak of its resident memory grows. The resume goes on from the last save, 40 steps before the last record;
the rollback goes back another 1,000 steps. A file that was just written is in the page cache.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import harness
from megalite.monitor.prometheus.totals import COUNTED_UP_TO, SHOWN, keep_shown

RESULTS = harness.RESULTS / "records.md"
SIZES, LINES = (1_000, 100_000, 1_000_000), (529, 940)
SAVED_EVERY, AFTER_THE_SAVE = 1_000, 40
BEGAN = 1.7e9
ACTIONS = {  # those that change the folder come last
    "a supervisor's look": """
before = time_now()
assert RunProgress.read(run_dir).step
""",
    "`megalite status`": """
before = time_now()
assert read_status(run_dir).step
""",
    "`loss.png`": """
plot_loss([{"step": 1, "loss": 1.0}], run_dir / "loss.png", "fonts and all")
before = time_now()
draw_loss(run_dir, run_dir / "loss.png")
""",
    "all numbers, for `report.html`": """
before = time_now()
read_columns(run_dir / METRICS, [])
""",
    "resume: the account of goodput": """
before = time_now()
Goodput(run_dir, resumed, lambda *_, **__: None)
""",
    "resume: counters of Prometheus": """
before = time_now()
RunTotals.of_run(run_dir, resumed, 1, 1)
""",
    "resume: `metrics.jsonl` is cut": """
before = time_now()
JsonLinesSink(run_dir / METRICS, resumed)
""",
    "rollback by 1,000 steps": """
goodput, sink = Goodput(run_dir, resumed, lambda *_, **__: None), JsonLinesSink(run_dir / METRICS, resumed)
record = {"step": max(1, resumed - 1000), "time": 1.8e9, "step_time_s": 1.0}
before = time_now()
sink.on_step(record | goodput.measure(record))
""",
}
PROCESS = """
import resource, sys, time
from pathlib import Path
from launch.inspection.history import read_columns
from launch.inspection.status import read_status
from launch.supervision.run_progress import RunProgress
from megalite.monitor.goodput import Goodput
from megalite.monitor.prometheus.totals import RunTotals
from megalite.monitor.sinks.jsonl import METRICS, JsonLinesSink
from megalite.monitor.loss_picture import draw_loss, plot_loss
def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
def time_now():
    global memory
    memory = peak()
    return time.process_time()
run_dir, resumed = Path(sys.argv[1]), int(sys.argv[2])
%s
print(time.process_time() - before, (peak() - memory) / 1024)
"""


def make_run(run_dir: Path, steps: int, size: int) -> None:
    """Writes the records and events of a run, and the counters as its last save has kept them."""
    record = {"step": 0, "time": BEGAN, "loss": 2.5, "grad_norm": 0.5, "session_s": 0.0, "step_time_s": 1.0, "rest": ""}
    record["rest"] = "x" * (size - len(json.dumps(record)) - 20)
    tail = json.dumps(record).partition('"loss"')[2]
    with (run_dir / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + AFTER_THE_SAVE + 1):
            start = f'{{"step": {step}, "time": {BEGAN + step}, "loss"'
            file.write(start + tail.replace('"session_s": 0.0', f'"session_s": {step + 9.0}', 1) + "\n")
    with (run_dir / "events.jsonl").open("w") as file:
        file.write(json.dumps({"time": BEGAN, "event": "started", "step": 0, "before_s": 9.0}) + "\n")
        for step in range(SAVED_EVERY, steps + 1, SAVED_EVERY):
            account = {"productive": float(step), "startup": 9.0}
            saved = {"time": BEGAN + step, "event": "saved", "step": step, "bytes": 1_000_000, "account": account}
            file.write(json.dumps(saved) + "\n")
    counted: dict[tuple[str, ...], float] = {("step",): float(steps), ("time",): BEGAN + steps}
    keep_shown(run_dir / SHOWN, {"megalite_steps_total": {("taken",): float(steps)}, COUNTED_UP_TO: counted})


def measure(action: str, run_dir: Path, resumed: int) -> tuple[float, float]:
    """Returns the seconds of processor time and the megabytes of an action, in a process of its own."""
    command = [sys.executable, "-c", PROCESS % ACTIONS[action], str(run_dir), str(resumed)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    seconds, mebibytes = done.stdout.split()[-2:]
    return float(seconds), float(mebibytes)


def rows(most: int) -> list[str]:
    """Returns the rows of the table."""
    sizes = [steps for steps in SIZES if steps <= most]
    cells: dict[str, list[str]] = {action: [] for action in ACTIONS}
    with tempfile.TemporaryDirectory() as folder:
        for size in LINES:
            for steps in sizes:
                make_run(Path(folder), steps, size)
                for action, known in cells.items():
                    seconds, mebibytes = measure(action, Path(folder), steps)
                    known.append(f"{seconds:.2f} s, {mebibytes:.0f} MiB")
    head = [f"{steps:,} steps of {size} bytes" for size in LINES for steps in sizes]
    return [*harness.header("", *head), *(harness.row([action, *known]) for action, known in cells.items())]


def main() -> None:
    """Measures, and prints the results; those of all sizes are written too."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=SIZES[-1], help="steps of the longest run")
    options = parser.parse_args()
    load, began = harness.Load(), time.monotonic()
    table = rows(options.most)
    text = harness.page(
        "What a long life costs",
        "benchmarks.records",
        f"{harness.machine()}. {load} {time.monotonic() - began:.0f} s in all. Processor time and growth of the peak "
        "of resident memory.",
        *table,
    )
    harness.show(text, RESULTS, renews=options.most >= SIZES[-1])


if __name__ == "__main__":
    main()
