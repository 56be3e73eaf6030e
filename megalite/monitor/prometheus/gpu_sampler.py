"""Reads this host's GPUs by NVML every few seconds, in a thread of its own.

All GPUs that the driver shows are read, whoever computes on them. What cannot be read is left out: without a driver all
of it, of a GPU that has failed all its series, under MIG its utilisation. Each such reason is told once.
"""

from __future__ import annotations

import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from statistics import fmean
from types import ModuleType
from typing import Any

from megalite.monitor.prometheus.families import DIRECTIONS, OF_GPUS, Labels, Series, Values
from megalite.monitor.records.step import StepRecord

EVERY_S = 5.0
DCGM = "http://127.0.0.1:9400/metrics"
DCGM_S = 1.0  # for its answer
ALL_LINKS = 0xFFFFFFFF  # scope of a field that sums over NVLinks
REASONS = {  # names in NVML of the bits that lower a clock
    "power_cap": "SwPowerCap",
    "hardware_slowdown": "HwSlowdown",
    "sync_boost": "SyncBoost",
    "software_thermal": "SwThermalSlowdown",
    "hardware_thermal": "HwThermalSlowdown",
    "power_brake": "HwPowerBrakeSlowdown",
}


def dcgm_answers(url: str = DCGM) -> bool:
    """Returns whether a DCGM exporter of this host serves its GPUs already."""
    try:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(url, timeout=DCGM_S) as answer:
            return b"DCGM_FI_" in answer.read(1 << 20)
    except OSError:
        return False


class GpuSampler:
    """Reads all GPUs of this host every EVERY_S seconds while it is open."""

    def __init__(self, nvml: ModuleType, tell: Callable[[str], None]) -> None:
        """`nvml` is the module pynvml; `tell` takes a sentence."""
        self._nvml, self._tell, self._host = nvml, tell, socket.gethostname()
        self._told: set[str] = set()
        self.values: Values = {}  # the last readings
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpu sampler", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread, unless it hangs in the driver."""
        self._is_over.set()
        self._thread.join(EVERY_S)

    def record(self) -> StepRecord:
        """Returns what a step's record has of these GPUs: the mean of their utilisation, and of their power in W."""
        found: StepRecord = {}
        if used := self.values.get("megalite_gpu_utilization_ratio"):
            found["gpu_utilization"] = round(fmean(used.values()), 4)
        if power := self.values.get("megalite_gpu_power_watts"):
            found["gpu_power_w"] = round(fmean(power.values()), 4)
        return found

    def _run(self) -> None:
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError as error:
            self._say_once("all", f"no metrics of GPUs: NVML does not start here: {error}")
            return
        try:
            is_over = False
            while not is_over:
                self.values = self.read()
                is_over = self._is_over.wait(EVERY_S)
        except Exception as error:
            self.values = {}
            self._say_once("all", f"no more metrics of GPUs: {type(error).__name__}: {error}")

    def read(self) -> dict[str, Series]:
        """Returns a reading of all GPUs; NVML must have been started."""
        values: dict[str, dict[Labels, float]] = {}
        for index in range(self._nvml.nvmlDeviceGetCount()):
            try:
                handle = self._nvml.nvmlDeviceGetHandleByIndex(index)
                gpu = (self._host, str(index), _text(self._nvml.nvmlDeviceGetUUID(handle)))
                for name, labels, value in self._of_gpu(handle, index):
                    values.setdefault(name, {})[(*gpu, *labels)] = value
            except self._nvml.NVMLError as error:
                self._say_once(f"gpu {index}", f"GPU {index} of {self._host} cannot be read: {error}")
                for series in values.values():
                    for key in [key for key in series if key[1] == str(index)]:
                        del series[key]
        order = [family.name for family in OF_GPUS]
        return {name: values[name] for name in order if values.get(name)}

    def _of_gpu(self, handle: Any, index: int) -> Iterator[tuple[str, Labels, float]]:
        nvml = self._nvml
        readers: dict[str, Callable[[], Any]] = {
            "utilization_ratio": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu / 100,
            "memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).used,
            "memory_total_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(handle).total,
            "power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_hertz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM) * 1e6,
            "energy_joules_total": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "throttled_info": lambda: self._throttled(handle),
            "ecc_errors_total": lambda: self._ecc_errors(handle),
            "nvlink_bytes_total": lambda: self._nvlink_bytes(handle),
        }
        for name, read in readers.items():
            try:
                found = read()
            except nvml.NVMLError as error:
                if isinstance(error, nvml.NVMLError_GpuIsLost):
                    raise
                if not isinstance(error, nvml.NVMLError_NotSupported) or name == "utilization_ratio":
                    self._say_once(
                        name, f"no megalite_gpu_{name} of GPU {index} of {self._host}: {self._why(handle, error)}"
                    )
                continue
            series = found if isinstance(found, dict) else {(): found}
            for labels, value in series.items():
                yield f"megalite_gpu_{name}", labels, float(value)

    def _throttled(self, handle: Any) -> dict[Labels, float]:
        bits = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
        values = {name: getattr(self._nvml, f"nvmlClocksThrottleReason{nvml}") for name, nvml in REASONS.items()}
        return {(name,): float(bool(bits & value)) for name, value in values.items()}

    def _ecc_errors(self, handle: Any) -> dict[Labels, float]:
        nvml = self._nvml
        kinds = {
            "corrected": nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED,
            "uncorrected": nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED,
        }
        return {
            (name,): nvml.nvmlDeviceGetTotalEccErrors(handle, kind, nvml.NVML_AGGREGATE_ECC)
            for name, kind in kinds.items()
        }

    def _nvlink_bytes(self, handle: Any) -> dict[Labels, float]:
        nvml = self._nvml
        fields = (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX)
        found = nvml.nvmlDeviceGetFieldValues(handle, [(field, ALL_LINKS) for field in fields])
        known = zip(DIRECTIONS, found, strict=True)
        return {(name,): one.value.ullVal * 1024 for name, one in known if one.nvmlReturn == nvml.NVML_SUCCESS}

    def _why(self, handle: Any, error: Exception) -> str:
        """Returns the reason in words; MIG is one that NVML does not name."""
        try:
            is_divided = self._nvml.nvmlDeviceGetMigMode(handle)[0] == self._nvml.NVML_DEVICE_MIG_ENABLE
        except self._nvml.NVMLError:
            is_divided = False
        return "NVML measures none of a GPU that is divided by MIG" if is_divided else str(error)

    def _say_once(self, about: str, sentence: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._tell(sentence)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
