"""Readings of GPUs through a fake NVML: units, what is left out where something cannot be read, and what is said."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from megalite.monitor.observer import Nonfatal
from megalite.monitor.prometheus import gpu_sampler
from megalite.monitor.prometheus.endpoint import Rendering
from megalite.monitor.prometheus.families import OF_GPUS, rendered
from megalite.monitor.prometheus.gpu_sampler import GpuSampler, dcgm_answers

HOST = socket.gethostname()


def fake_nvml(count: int = 2, **broken: int) -> Any:
    """Two GPUs; a function's name -> the code of the error that it raises, of GPU 1 alone."""
    fake = ModuleType("pynvml")
    fake.__dict__.update({name: value for name, value in vars(pynvml).items() if not name.startswith("nvml")})
    fake.__dict__.update({name: value for name, value in vars(pynvml).items() if name.startswith("nvmlClocks")})
    answers: dict[str, Any] = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": count,
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=75),
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=30 << 30, total=80 << 30),
        "nvmlDeviceGetPowerUsage": 650_500,  # mW
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetClockInfo": 1980,  # MHz
        "nvmlDeviceGetTotalEnergyConsumption": 7_000,  # mJ
        "nvmlDeviceGetCurrentClocksThrottleReasons": pynvml.nvmlClocksThrottleReasonHwThermalSlowdown,
        "nvmlDeviceGetTotalEccErrors": 3,
        "nvmlDeviceGetMigMode": (0, 0),
        "nvmlDeviceGetFieldValues": [
            SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(ullVal=kibibytes)) for kibibytes in (5, 6)
        ],
    }

    def of(name: str, answer: Any) -> Any:
        def call(*arguments: Any) -> Any:
            if name in broken and arguments[:1] in ((), (1,)):
                raise pynvml.NVMLError(broken[name])
            return answer

        return call

    for name, answer in answers.items():
        setattr(fake, name, of(name, answer))
    fake.nvmlDeviceGetHandleByIndex = lambda index: index  # type: ignore[attr-defined]
    fake.nvmlDeviceGetUUID = lambda index: f"GPU-{index}"  # type: ignore[attr-defined]
    return fake


def reading(nvml: Any) -> tuple[dict[str, Any], list[str]]:
    """Two readings, so that what would be said twice shows."""
    said: list[str] = []
    sampler = GpuSampler(nvml, said.append)
    sampler.read()
    return sampler.read(), said


def test_a_reading_is_in_base_units() -> None:
    """NVML has percent, milliwatt, megahertz, millijoule and kibibytes."""
    values, said = reading(fake_nvml(1))
    assert said == [] and [*values] == [family.name for family in OF_GPUS]
    one = (HOST, "0", "GPU-0")
    assert {name.removeprefix("megalite_gpu_"): series[one] for name, series in values.items() if one in series} == {
        "utilization_ratio": 0.75,
        "memory_used_bytes": 30 << 30,
        "memory_total_bytes": 80 << 30,
        "power_watts": 650.5,
        "temperature_celsius": 61,
        "sm_clock_hertz": 1.98e9,
        "energy_joules_total": 7.0,
    }
    assert values["megalite_gpu_nvlink_bytes_total"] == {(*one, "transmit"): 5120, (*one, "receive"): 6144}
    assert {key[3] for key, on in values["megalite_gpu_throttled_info"].items() if on} == {"hardware_thermal"}
    assert values["megalite_gpu_ecc_errors_total"] == {(*one, "corrected"): 3, (*one, "uncorrected"): 3}


@pytest.mark.parametrize(
    ("broken", "gone", "told"),
    [
        ({"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_GPU_IS_LOST}, None, "GPU 1 of .* cannot be read: .*lost"),
        (
            {"nvmlDeviceGetPowerUsage": pynvml.NVML_ERROR_NO_PERMISSION},
            "power_watts",
            "power_watts of GPU 1.*Permission",
        ),
        ({"nvmlDeviceGetTotalEccErrors": pynvml.NVML_ERROR_NOT_SUPPORTED}, "ecc_errors_total", ""),
    ],
    ids=["dead", "no permission", "a GPU without ECC"],
)
def test_the_other_gpu_and_the_other_numbers_stay(broken: dict[str, int], gone: str | None, told: str) -> None:
    values, said = reading(fake_nvml(**broken))
    for name, series in values.items():
        seen = {key[1] for key in series}
        is_gone = gone is None or name == f"megalite_gpu_{gone}"
        assert seen == ({"0"} if is_gone else {"0", "1"}), name
    assert len(said) == bool(told)
    if told:
        with pytest.raises(ValueError, match=told):
            raise ValueError(said[0])


def test_a_divided_gpu_has_no_utilisation_and_the_reason_is_told_once() -> None:
    nvml = fake_nvml(nvmlDeviceGetUtilizationRates=pynvml.NVML_ERROR_NOT_SUPPORTED)
    nvml.nvmlDeviceGetMigMode = lambda handle: (pynvml.NVML_DEVICE_MIG_ENABLE, pynvml.NVML_DEVICE_MIG_ENABLE)
    values, said = reading(nvml)
    assert [key[1] for key in values["megalite_gpu_utilization_ratio"]] == ["0"]
    assert [key[1] for key in values["megalite_gpu_memory_used_bytes"]] == ["0", "1"]
    assert len(said) == 1 and "MIG" in said[0]


@pytest.mark.parametrize(
    "code", [pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED, pynvml.NVML_ERROR_NO_PERMISSION]
)
def test_without_a_driver_one_sentence_is_all(code: int) -> None:
    said: list[str] = []
    sampler = GpuSampler(fake_nvml(nvmlInit=code), said.append)
    sampler.start()
    sampler.close()
    assert sampler.values == {} and sampler.record() == {}
    assert len(said) == 1 and said[0].startswith("no metrics of GPUs: NVML does not start here: ")


def test_the_thread_reads_and_a_record_has_the_mean() -> None:
    sampler = GpuSampler(fake_nvml(), pytest.fail)
    seen = threading.Event()
    sampler._is_over.wait = lambda timeout: seen.set() or True  # type: ignore[method-assign, assignment, func-returns-value]
    sampler.start()
    assert seen.wait(10)
    sampler.close()
    assert sampler.record() == {"gpu_utilization": 0.75, "gpu_power_w": 650.5}
    registry = CollectorRegistry()
    registry.register(Rendering(lambda: rendered(OF_GPUS, sampler.values), Nonfatal(pytest.fail)))
    assert f'megalite_gpu_power_watts{{gpu="1",host="{HOST}",uuid="GPU-1"}} 650.5' in generate_latest(registry).decode()


@pytest.fixture
def answering() -> Iterator[HTTPServer]:
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.server.text)  # type: ignore[attr-defined]

        def log_message(self, *arguments: Any) -> None:
            """Nobody reads it."""

    server = HTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_dcgm_exporter_is_told_from_other_servers(answering: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has port 9400 must not make the metrics of GPUs vanish; and a proxy of the shell is not asked."""
    url = f"http://127.0.0.1:{answering.server_port}/metrics"
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for text, is_dcgm in ((b'DCGM_FI_DEV_GPU_UTIL{gpu="0"} 3\n', True), (b"a page\n", False)):
        answering.text = text  # type: ignore[attr-defined]
        assert dcgm_answers(url) is is_dcgm
    assert not dcgm_answers("http://127.0.0.1:9/metrics") and gpu_sampler.DCGM.endswith(":9400/metrics")
