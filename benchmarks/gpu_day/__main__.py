"""`python -m benchmarks.gpu_day`: the parts of a GPU day, one after another, each once. docs/gpu_day.md tells more.

Exit codes: 0, all that was asked for ended well, now or earlier; 1, a part did not; 2, something is lacking here.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.gpu_day import process, wheels
from benchmarks.gpu_day.parts import PARTS, Part, find
from benchmarks.gpu_day.process import print_line
from benchmarks.gpu_day.store import (
    FAILED,
    OVER_LIMIT,
    PASSED,
    ROOT,
    RUNNING,
    WORK,
    ResultStore,
    code_digest,
    folder_name,
)
from benchmarks.gpu_day.summary import write_summary

RESULTS = ROOT / "benchmarks" / "results" / "gpu"
TINY_RESULTS = ROOT / "benchmarks" / "results" / ".gpu"  # git ignores it
WORTHWHILE_S = 30.0  # less time than this is left to a part: it is not begun
LOOKING_S = 120.0


class Lacking(Exception):
    """Why nothing can be measured here, in one sentence."""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("--part", action="append", default=[], metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--all", action="store_true", help="every part, which is what happens without --part too")
    parser.add_argument("--list", action="store_true", help="say which parts there are, and which have ended well")
    parser.add_argument("--dry-run", action="store_true", help="say what would be run; run nothing")
    parser.add_argument("--again", action="store_true", help="parts too that have ended well")
    parser.add_argument("--minutes", type=float, metavar="N", help="stop after about so long; the next call goes on")
    parser.add_argument("--results", type=Path, metavar="DIR", help="default: benchmarks/results/gpu")
    parser.add_argument(
        "--work", type=Path, default=WORK, metavar="DIR", help="for data and runs, up to 40 GB; default: runs/gpu_day"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try the programs out")
    parser.add_argument("--tiny", action="store_true", help="all models so small that a CPU will do")
    parser.add_argument(
        "--override", action="append", default=[], metavar="OPTION=VALUE", help="of the trainings' configs"
    )
    parser.add_argument(
        "--install-wheels",
        nargs="?",
        type=Path,
        const=wheels.SITE,
        metavar="DIR",
        help="install what lacks from .wheels/ there",
    )
    options = parser.parse_args(words)
    try:
        options.parts = find([] if options.all else options.part)
    except KeyError as error:
        parser.error(f"there is no part {error.args[0]!r}: choose from {', '.join(names)}")
    if options.minutes is not None and not options.minutes > 0:
        parser.error("--minutes is a positive number")
    return options


def prepare_packages(options: argparse.Namespace) -> None:
    """Puts installed wheels on the path of all that follows, and raises Lacking for what is not there."""
    site = options.install_wheels or wheels.SITE
    _use(site)
    needs_packages = any(part.needs_packages for part in options.parts) and not (options.list or options.dry_run)
    lack = wheels.lacking()
    if options.install_wheels is not None and lack.wheels:
        print_line(f"installing {len(lack.wheels)} wheels into {site}")
        done = subprocess.run([*wheels.install_command(lack, site), "--quiet"], check=False)
        if done.returncode:
            raise Lacking("pip could not install the wheels; what it says is above")
        _use(site)
        lack = wheels.lacking()
    if wheels.TORCH in lack.missing:
        raise Lacking(
            f"{lack.missing[wheels.TORCH]} is not installed in this Python ({sys.executable}): install it first; the "
            "wheels of the other packages leave it out"
        )
    if lack.missing and needs_packages:
        raise Lacking(_sentence(lack, site))


def _use(site: Path) -> None:
    if site.is_dir() and str(site) not in sys.path:
        sys.path.insert(0, str(site))
        paths = [str(site.resolve()), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def _sentence(lack: wheels.Lack, site: Path) -> str:
    names = ", ".join(lack.missing)
    if lack.without_wheel:
        without = ", ".join(map(str, lack.without_wheel)) if lack.wheels else "all of them"
        return (
            f"this Python lacks {names}; .wheels/ has no wheel of {without}: run "
            f"`make gpu-wheels PYTHON_VERSION={wheels.HERE}` on a machine with internet and copy the folder .wheels/ "
            "into this repository"
        )
    command = " ".join(wheels.install_command(lack, site))
    return f"this Python lacks {names}; .wheels/ has them: add --install-wheels, or run `{command}`"


def look_at_machine(device: str) -> dict[str, Any]:
    """Facts of the accelerator, from a process of its own. Raises Lacking."""
    command = [sys.executable, "-m", "benchmarks.gpu_day.machine", device]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LOOKING_S, check=False)
    except subprocess.TimeoutExpired:
        raise Lacking(f"torch has not told in {LOOKING_S:.0f} s which GPU this machine has") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["torch cannot be imported"])[-1]
        raise Lacking(f"no GPU to measure: {reason}; `--device cpu --tiny` tries the programs out on the CPU")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def choose_one_gpu(device: str) -> None:
    """All parts use one GPU: the first that may be used."""
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]


def open_store(options: argparse.Namespace, machine: dict[str, Any]) -> ResultStore:
    """The folder of this machine's results."""
    root = options.results or (TINY_RESULTS if options.tiny else RESULTS)
    names = ("device", "accelerator", "accelerator_memory_gib", "torch", "cuda", "python")
    key = {name: machine.get(name) for name in names}
    key |= {"code": code_digest(), "tiny": options.tiny, "overrides": sorted(options.override)}
    return ResultStore(root / folder_name(machine, options.tiny), key)


def part_command(part: Part, options: argparse.Namespace, store: ResultStore, work: Path) -> list[str]:
    """Returns the command that runs one part in a process of its own."""
    task = {
        "part": part.name,
        "device": options.device,
        "tiny": options.tiny,
        "overrides": options.override,
        "work": str(work),
        "folder": str(store.folder),
        "key": store.key,
        "again": options.again or part.always,
    }
    return [sys.executable, "-m", "benchmarks.gpu_day.run_part", json.dumps(task)]


def run_part(part: Part, command: list[str], store: ResultStore, limit_s: float) -> str:
    """Runs a part, keeps how it ended, and returns that."""
    print_line(f"== {part.name}: {part.about} (at most {limit_s:.0f} s)")
    ended = process.run(command, limit_s, print_line, part.name, folder=ROOT)
    if ended.code is None:
        told = store.end(part.name, OVER_LIMIT, ended.seconds, f"ended at its limit of {limit_s:.0f} s")
    elif ended.code:
        problem = (ended.output.strip().splitlines() or ["it said nothing"])[-1]
        told = store.end(part.name, FAILED, ended.seconds, f"exit code {ended.code}: {problem}")
    else:
        items = (store.current(part.name) or {}).get("items", {})
        wrong = [name for name, item in items.items() if not item.get("passed")]
        status = PASSED if items and not wrong else FAILED
        told = store.end(part.name, status, ended.seconds, f"not well: {', '.join(wrong)}" if wrong else "")
    reason = f": {told['problem']}" if told["problem"] else ""
    print_line(f"== {part.name}: {told['status']} ({ended.seconds:.0f} s){reason}")
    return str(told["status"])


def state_of(part: Part, store: ResultStore) -> str:
    """In a word or two, for a list."""
    found = store.read(part.name)
    if found is None:
        return "not run"
    status = "stopped" if found["status"] == RUNNING else found["status"]
    return f"{status} {found.get('ended', '')}" if store.current(part.name) else "measured with other code or options"


def run_all(options: argparse.Namespace, store: ResultStore, work: Path) -> int:
    """The parts that are to be run, and the exit code."""
    started, wrong = time.monotonic(), []
    for part in options.parts:
        if store.has_passed(part.name) and not (options.again or part.always):
            print_line(f"== {part.name}: ended well before, see {store.path(part.name)}")
            continue
        limit_s = part.limit_s
        if options.minutes is not None:
            limit_s = min(limit_s, 60 * options.minutes - (time.monotonic() - started))
        if limit_s < min(WORTHWHILE_S, part.limit_s):
            print_line(f"== {part.name}: left for the next call")
            wrong.append(part.name)
            continue
        if run_part(part, part_command(part, options, store, work), store, limit_s) != PASSED:
            wrong.append(part.name)
        write_summary(store, PARTS)
    print_line(f"results: {write_summary(store, PARTS)}")
    if wrong:
        print_line(f"not ended well: {', '.join(wrong)}; the same command goes on with them")
    return 1 if wrong else 0


def main() -> int:
    """The command."""
    options = parse_arguments()
    for number in (signal.SIGTERM, signal.SIGHUP):  # as Ctrl-C: what runs is ended with this process
        signal.signal(number, signal.default_int_handler)
    try:
        prepare_packages(options)
        choose_one_gpu(options.device)
        if options.list or options.dry_run:
            return _list(options)
        store = open_store(options, look_at_machine(options.device))
        options.work.mkdir(parents=True, exist_ok=True)
        return run_all(options, store, options.work.resolve())
    except (Lacking, OSError) as error:
        print(f"gpu day: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu day: interrupted; the same command goes on", file=sys.stderr)
        return 130


def _list(options: argparse.Namespace) -> int:
    try:
        store = open_store(options, look_at_machine(options.device))
    except Lacking as error:
        print(f"gpu day: {error}", file=sys.stderr)
        store = None  # the parts are the same everywhere
    for part in options.parts if options.dry_run else PARTS:
        is_skipped = store is not None and store.has_passed(part.name) and not (options.again or part.always)
        would = "" if options.list else "skip: " if is_skipped else "run:  "
        state = "" if store is None else f"{state_of(part, store):12} "
        print_line(f"{would}{part.name:25} {state}{part.about}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
