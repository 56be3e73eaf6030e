"""Describes this machine for the planner: its GPUs by their names in the catalogue, or its CPU, measured once.

The measurement is cached in `$XDG_CACHE_HOME/megalite/this_cpu.json` by CPU, cores and version of torch, with its date
and the load, which counts as above the number of cores while ranks start beside it. One made under such a load is
repeated once the load is lower, and one that a run has contradicted by a factor of 4 is repeated once. Delete the file
to measure again. No torch here.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeGuard

import psutil

from launch.errors import LaunchError
from launch.prediction.hardware_catalogue import known_hardware, user_file
from launch.runtime.devices import cpu_count, gpu_count, gpu_names
from launch.runtime.host_probe import cpu_info, has_bf16_units, host_memory_bytes
from megalite.checkpoint.durable_files import write_durably
from megalite.config import Config
from megalite.config.user_folders import cache_folder
from megalite.config.versions import installed_version
from megalite.planner.cost.communication_time import INTRA_NODE_EFFICIENCY
from megalite.planner.cost.layer_time import MEMORY_EFFICIENCY
from megalite.planner.cost.memory import CPU, Device
from megalite.planner.hardware import Accelerator, Catalogue, Cluster, FlashAttention, Link, find_link, is_guess
from megalite.units import plural

MEASURING = Path(__file__).with_name("measure_cpu.py")
MEASURING_S = 60.0  # timeout; takes three seconds on an idle machine
START_PART = 0.25  # share of the timeout with which ranks wait for one another
FORMS = frozenset({"pcie", "nvl", "mig", "max", "q"})  # words that distinguish GPUs of the same name
NETWORK = "Ethernet 25"  # assumed between CPU hosts
CPU_EFFICIENCY = 0.8
GUESSED = "a guess: `megalite plan calibrate RUN` fits it to this machine"
MEASUREMENT = 2  # number of the way in which `MEASURING` measures; entries of another are measured again
CONTRADICTED = 4.0  # times as fast or as slow as predicted: more than the planner's own errors
CONFIRMED = 2.0  # times the figure before, within which a repeated measurement confirms it
OTHERS_COMPUTE = 0.5  # load above the number of cores, from which a prediction is rough
Measured = dict[str, Any]
ROUGH: Measured = {  # typical of a server CPU
    "core_flops": {"fp32": 5e10, "bf16": 5e10},
    "attention_flops": 2e10,
    "memory_bytes_per_s": 2e10,
    "layer_s": 3e-4,
    "link_bytes_per_s": 1e9,
    "message_s": 5e-5,
}


@dataclass(frozen=True)
class MeasurementLimits:
    """Limits on the measurement of a CPU that is not known yet."""

    timeout_s: float = MEASURING_S
    busy_ranks: int = 0  # ranks that compute at the same time
    allow_typical: bool = False  # take typical figures if the CPU cannot be measured in that time
    only_typical: bool = False  # do not even look for others, where every start must find the same


UNMEASURED = MeasurementLimits(timeout_s=0.0, allow_typical=True)  # where memory alone counts


@dataclass(frozen=True)
class Machine:
    """The accelerators of one host."""

    name: str  # name of `whole` in the catalogue
    whole: Accelerator  # one GPU, or all cores together
    link: Link  # between ranks of this host, at most one per core
    cluster: Cluster  # an accelerator for each rank
    is_cpu: bool
    rough: str = ""  # why its figures are typical ones; empty where they are its own
    busy: str = ""  # who else computes on its cores

    @property
    def why_rough(self) -> str:
        """Why step times on it are rough; empty where its constant was fitted to runs and nobody else computes."""
        guess = ""
        if is_guess(self.whole):
            guess = "the efficiency of this machine is a guess, which `megalite plan calibrate RUN` fits"
        return "; ".join(reason for reason in (self.rough, self.busy, guess) if reason)


def describe_machine(
    ranks: int | None = None, *, on_cpu: bool = False, nodes: int = 1, limits: MeasurementLimits | None = None
) -> Machine:
    """Describes the GPUs of this machine, or `ranks` ranks that share its CPU (default: one per core).

    It is one of `nodes` equal hosts. Raises LaunchError or ConfigError.
    """
    known = known_hardware()
    count = 0 if on_cpu else gpu_count()
    if count:
        return _with_gpus(ranks or count, nodes, known)
    return _with_cpu(ranks or cpu_count(), nodes, known, limits or MeasurementLimits())


def start_patience_s(config: Config) -> float:
    """Seconds that rank 0 may measure its machine while the other ranks wait."""
    return min(MEASURING_S, START_PART * 60 * min(config.watchdog.timeout_minutes, config.watchdog.startup_minutes))


def gpu_in_catalogue(gpu: str, known: Catalogue) -> str | None:
    """The catalogue entry of a GPU by its driver's name, e.g. "NVIDIA A100-SXM4-80GB"; None where there is none.

    The name must contain all words of the entry, and have the same words that distinguish forms of a GPU.
    """
    words = _words(gpu)
    matching = [name for name in known.accelerators if _words(name) <= words]
    matching = [name for name in matching if _words(name) & FORMS == words & FORMS]
    return max(matching, key=lambda name: len(_words(name)), default=None)


def _words(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[^a-z0-9]+", re.sub(r"(\d) (?=gb)", r"\1", name.lower()))) - {""}


def _with_gpus(ranks: int, nodes: int, known: Catalogue) -> Machine:
    if len(kinds := list(dict.fromkeys(gpu_names()))) > 1:
        raise LaunchError(
            f"this machine has GPUs of several kinds, {' and '.join(kinds)}: a step takes as long as theirs"
        )
    name = gpu_in_catalogue(kinds[0], known)
    if name is None:
        raise LaunchError(
            f"the catalogue has no GPU {kinds[0]!r}: describe it in {user_file()} under accelerators, by a name of its "
            "words, with memory_gib, peak_tflops, memory_gb_per_s, intra_node and inter_node"
        )
    whole = known.accelerators[name]
    link = find_link(whole.intra_node, known)
    return Machine(name, whole, link, _cluster(name, whole, link, ranks, nodes, known), False)


def _with_cpu(ranks: int, nodes: int, known: Catalogue, limits: MeasurementLimits) -> Machine:
    cores, rough = _computing_cores(), ""
    name = f"{cpu_name()}, {plural(cores, 'core')}"
    if limits.only_typical:
        whole, link = _as_accelerator(ROUGH, name, cores)
    elif name in known.accelerators:  # calibrated, or described by hand
        whole = known.accelerators[name]
        link = find_link(whole.intra_node, known)
    else:
        measured, rough = measured_cpu(name, limits)
        whole, link = _as_accelerator(measured, name, cores)
    # threads of a rank as launch/runtime/local_ranks.py sets them, unless the user does
    stated = os.environ.get("OMP_NUM_THREADS", "")
    threads = int(stated) if stated.isdecimal() and int(stated) else max(1, cpu_count() // ranks)
    share = min(threads, cores / ranks) / cores
    part = whole.model_copy(
        update={
            "memory_gib": whole.memory_gib / ranks,
            "peak_tflops": {dtype: share * peak for dtype, peak in whole.peak_tflops.items()},
            "memory_gb_per_s": share * whole.memory_gb_per_s,
        }
    )
    # measured with two ranks on a core each; more ranks share a core in turns
    shared = link.model_copy(update={"gb_per_s": link.gb_per_s * min(1.0, cores / ranks)})
    cluster = _cluster(name, part, shared, ranks, nodes, known).model_copy(update={"ranks_per_core": ranks / cores})
    return Machine(name, whole, link, cluster, True, rough, who_else_computes())


def _cluster(name: str, accelerator: Accelerator, link: Link, ranks: int, nodes: int, known: Catalogue) -> Cluster:
    return Cluster(
        name="this machine",
        accelerator_name=name,
        accelerator=accelerator,
        nodes=nodes,
        accelerators_per_node=ranks,
        adapters_per_node=ranks,
        intra_node=link,
        inter_node=find_link(accelerator.inter_node, known),
    )


def _as_accelerator(measured: Measured, name: str, cores: int) -> tuple[Accelerator, Link]:
    # the planner scales catalogue entries, which are from data sheets, to what is reached; here that was measured
    attention = measured["attention_flops"] / measured["core_flops"]["fp32"]
    accelerator = Accelerator(
        memory_gib=host_memory_bytes() / 2**30,
        peak_tflops={dtype: cores * flops / 1e12 for dtype, flops in measured["core_flops"].items()},
        memory_gb_per_s=measured["memory_bytes_per_s"] / 1e9 / MEMORY_EFFICIENCY,
        efficiency=CPU_EFFICIENCY,
        calibrated_on=GUESSED,
        device="cpu",
        flash_attention=FlashAttention(flash_1=attention, flash_2=attention, cudnn=attention),
        launch_us=measured["layer_s"] * 1e6,
        intra_node=f"{name}, between ranks",
        inter_node=NETWORK,
        source="measured here",
    )
    link = Link(
        gb_per_s=measured["link_bytes_per_s"] / 1e9 / INTRA_NODE_EFFICIENCY,
        latency_us=measured["message_s"] * 1e6,
        source="measured here",
    )
    return accelerator, link


def measured_cpu(name: str, limits: MeasurementLimits) -> tuple[Measured, str]:
    """The figures of `measure_cpu.py`, measured now or cached, and the reason if they are typical ones instead.

    Raises LaunchError where the measurement fails and typical figures are not allowed.
    """
    path = cache_folder() / "this_cpu.json"
    key = _key(name)
    cached = _read_cache(path)
    found = cached.get(key)
    found = found if _is_measured(found) and found.get("measurement") == MEASUREMENT else None
    load, cores = os.getloadavg()[0], _computing_cores()
    if limits.busy_ranks:  # the average does not know them yet
        load = max(load, cores + limits.busy_ranks)
    is_contradicted = found is not None and found.get("contradicted") is True
    if found is not None and not is_contradicted and not load <= cores < found.get("load", 0):
        return found, ""
    try:
        measured = _measure(limits.timeout_s)
    except LaunchError as error:
        if found is None and not limits.allow_typical:
            raise
        return (found, "") if found is not None else (ROUGH, f"by rough figures of a CPU: {error}")
    measured |= {"load": load, "date": datetime.now(UTC).isoformat(timespec="seconds"), "measurement": MEASUREMENT}
    if found is not None and is_contradicted:
        pairs = [(measured["core_flops"][dtype], found["core_flops"][dtype]) for dtype in ("fp32", "bf16")]
        measured["confirmed"] = all(1 / CONFIRMED < new / old < CONFIRMED for new, old in pairs)
    _write_cache(path, cached | {key: measured})
    return measured, ""


def who_else_computes() -> str:
    """Says at which load others compute on the cores of this process; empty where they do not."""
    load, cores = os.getloadavg()[0], _computing_cores()
    if load <= cores + OTHERS_COMPUTE:
        return ""
    return f"somebody else computes here too, at a load of {load:.0f} on {plural(cores, 'core')}"


def mark_contradicted(name: str, predicted_s: float, measured_s: float) -> bool:
    """Marks the measurement of the CPU if a run's steps contradict it; returns whether it will be made again.

    Steps that are far slower prove nothing where somebody else computes. A measurement that was repeated with the same
    result is not repeated again: then the model does not fit the run.
    """
    is_faster, is_slower = predicted_s > CONTRADICTED * measured_s, measured_s > CONTRADICTED * predicted_s
    path, key = cache_folder() / "this_cpu.json", _key(name)
    cached = _read_cache(path)
    entry = cached.get(key)
    if not _is_measured(entry) or entry.get("confirmed"):
        return False
    if not is_faster and (not is_slower or who_else_computes()):
        return False
    return _write_cache(path, cached | {key: entry | {"contradicted": True}})


def _key(name: str) -> str:
    return f"{name}, torch {installed_version('torch')}"


def _write_cache(path: Path, values: dict[str, Any]) -> bool:
    """Returns False where the folder is not writable: the next run measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, (json.dumps(values, indent=2) + "\n").encode())
    except OSError:
        return False
    return True


def _read_cache(path: Path) -> dict[str, Any]:
    try:
        cached = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return cached if isinstance(cached, dict) else {}


def _is_measured(value: Any) -> TypeGuard[Measured]:
    if not isinstance(value, dict) or not isinstance(flops := value.get("core_flops"), dict):
        return False
    figures = [flops.get("fp32"), flops.get("bf16"), *(value.get(name) for name in ROUGH if name != "core_flops")]
    is_loaded = isinstance(value.get("load", 0), float | int)
    return is_loaded and all(isinstance(figure, float | int) and 0 < figure < 1e18 for figure in figures)


def _measure(timeout_s: float) -> Measured:
    if timeout_s <= 0:
        raise LaunchError("this machine's CPU has not been measured yet, which a run does at its start")
    command = [sys.executable, "-P", str(MEASURING), str(_computing_cores())]
    try:
        # without the thread settings of a rank's environment
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "MKL_"))}
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=True, env=environment)
        measured = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        raise LaunchError(f"this machine's CPU could not be measured in {timeout_s:g} s") from None
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        raise LaunchError(f"this machine's CPU could not be measured ({type(error).__name__})") from None
    if not _is_measured(measured):
        raise LaunchError("this machine's CPU could not be measured (impossible figures)")
    return dict(measured)


def _computing_cores() -> int:
    """Physical cores that this process may use; hardware threads share a core's arithmetic units."""
    return max(1, min(cpu_count(), psutil.cpu_count(logical=False) or cpu_count()))


def cpu_name() -> str:
    """The name of this machine's CPU, such as `AMD EPYC 7763 64-Core Processor`."""
    return cpu_info("model name") or platform.processor() or platform.machine()


def cpu_memory(environment: Mapping[str, str], has_units: bool | None = None) -> Device:
    """Returns the allocator of a CPU rank: glibc as launch/runtime/local_ranks.py tunes it, or untuned.

    `has_units` tells whether its CPU has bf16 units; None asks this machine.
    """
    is_ours = "mmap_threshold" in environment.get("GLIBC_TUNABLES", "")
    return replace(CPU, keeps_freed=is_ours, widens_bf16=not (has_bf16_units() if has_units is None else has_units))
