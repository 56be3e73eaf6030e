"""What a run believes about its machine."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.runtime import devices, gpu_probe
from launch.runtime.devices import gpu_count, gpu_memory_bytes, gpu_names, why_no_gpu
from launch.runtime.gpu_probe import gpu_facts, sizes_of_gpus, start_sizing_gpus
from launch.runtime.host_probe import cgroup_limits, host_memory_bytes
from launch.runtime.logs import configure_logging

LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-1a2b)\nGPU 1: NVIDIA H200 (UUID: GPU-3c4d)\n"
MISMATCH = "echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18"
DRIVER = """
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int count(void) {  /* the first ones alone are visible */
    const char *visible = getenv("CUDA_VISIBLE_DEVICES"), *there = getenv("FAKE_GPUS");
    int shown = 1, gpus = there ? atoi(there) : 0;
    if (!visible) return gpus;
    for (const char *at = visible; *at; at++) shown += *at == ',';
    return shown < gpus ? shown : gpus;
}
int cuInit(unsigned flags) {
    const char *code = getenv("FAKE_CODE");
    if (getenv("FAKE_HANG")) sleep(60);
    if (getenv("FAKE_CRASH")) abort();
    return code ? atoi(code) : count() ? 0 : 100;
}
int cuDeviceGetCount(int *found) { *found = count(); return 0; }
int cuDeviceGet(int *device, int number) { *device = number; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "NVIDIA H200", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 141UL << 30; return 0; }
int cuGetErrorString(int code, const char **text) {
    *text = code == 803 ? "system has unsupported display driver / cuda driver combination" : "no device";
    return 0;
}
"""


class Machine:
    """A machine of which a test says whether it has nvidia-smi, the driver's library and devices of GPUs."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, monkeypatch
        for name in (*devices.ASKED, "DS_ACCELERATOR"):
            monkeypatch.delenv(name, raising=False)
        (folder / "bin").mkdir()
        monkeypatch.setenv("PATH", str(folder / "bin"))
        self.is_like(build="CUDA 13.0", devices=False)

    def is_like(self, *, build: str = "CUDA 13.0", devices: bool = True) -> None:
        self.patch.setattr("launch.runtime.devices.torch_build", lambda: build)
        for module in ("devices", "gpu_probe"):
            self.patch.setattr(f"launch.runtime.{module}.has_device_files", lambda: devices)

    def has_smi(self, script: str) -> None:
        program = self.folder / "bin" / "nvidia-smi"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        devices._gpus_seen_with.cache_clear()

    def has_driver(self, library: Path, **settings: str) -> None:
        self.patch.setenv("LD_LIBRARY_PATH", str(library))
        for name, value in settings.items():
            self.patch.setenv(f"FAKE_{name}", value)
        devices._gpus_seen_with.cache_clear()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    devices._gpus_seen_with.cache_clear()
    return Machine(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a library that answers as CUDA's driver does."""
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(DRIVER)
    command = ["cc", "-shared", "-fPIC", "-o", str(folder / "libcuda.so.1"), str(folder / "driver.c")]
    subprocess.run(command, check=True)
    return folder


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 2),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("1, 0", 2),
        ("0,1,2,3", 2),  # a setting that came along from a larger machine
        ("7,0", 0),  # CUDA ignores all from the first that does not exist
        ("GPU-3c4d,GPU-ffff", 1),
    ],
)
def test_gpus_are_those_that_are_both_there_and_visible(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert gpu_count() == 0, "no nvidia-smi and no driver, no GPU"
    machine.has_smi(f"printf '{LISTING}'")
    assert gpu_count() == count
    assert bool(why_no_gpu()) == (visible == "7,0"), "whoever hides all GPUs knows why there are none"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert gpu_count() == 0
    monkeypatch.setenv("DS_ACCELERATOR", "gpu")
    with pytest.raises(LaunchError, match="set it to cpu or cuda, or unset it"):
        gpu_count()


def test_a_file_that_cannot_be_run_is_no_driver(machine: Machine) -> None:
    """As one in a folder of PATH that only root may read: a PermissionError, not a FileNotFoundError."""
    (machine.folder / "bin" / "nvidia-smi").touch()
    assert gpu_count() == 0


@pytest.mark.parametrize("script", [None, "exec /bin/sleep 60", MISMATCH, "echo No devices were found; exit 6", "true"])
def test_where_nvidia_smi_is_of_no_use_the_driver_is_asked(
    script: str | None, machine: Machine, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container may have the driver and no nvidia-smi: its run has trained on the CPU, silently."""
    # the driver is asked by a new Python, which a busy machine may need a second for
    monkeypatch.setattr(gpu_probe, "GPUS_S", 2.0 if script == "exec /bin/sleep 60" else 20.0)
    monkeypatch.setattr(devices, "SILENCE_S", 0.1)
    if script is not None:
        machine.has_smi(script)
    machine.has_driver(driver, GPUS="2")
    assert (gpu_count(), gpu_names(), gpu_memory_bytes(), why_no_gpu()) == (2, ("NVIDIA H200",) * 2, 141 << 30, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert gpu_count() == 1, "which is visible the driver decides"
    found = {"gpus": ["NVIDIA H200"] * 2, "gpu_problem": None, "gpu_memory_bytes": [141 << 30] * 2}
    assert gpu_facts() == found, "the doctor sees all of a host"


@pytest.mark.parametrize(
    ("script", "settings", "reasons"),
    [
        (None, None, ["there is no nvidia-smi", "neither libcuda.so.1 nor libamdhip64.so"]),
        (None, {}, ["there is no nvidia-smi", "libcuda.so.1: no device (error 100)"]),
        (MISMATCH, {"CODE": "803"}, ["NVML: Driver/library version mismatch", "unsupported display driver"]),
        (MISMATCH, {"CRASH": "1"}, ["mismatch", "ends with -6"]),
        (
            "exec /bin/sleep 60",
            {"HANG": "1"},
            ["nvidia-smi does not answer within 0.5 s", "does not answer within 0.5 s"],
        ),
    ],
)
def test_where_no_gpu_is_found_the_first_line_says_why(
    script: str | None,
    settings: dict[str, str] | None,
    reasons: list[str],
    machine: Machine,
    driver: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if script == "exec /bin/sleep 60":
        monkeypatch.setattr(gpu_probe, "GPUS_S", 0.5)
        monkeypatch.setattr(devices, "SILENCE_S", 0.1)
    if script is not None:
        machine.has_smi(script)
    if settings is not None:
        machine.has_driver(driver, **settings)
    machine.is_like(build="CUDA 13.0", devices=True)
    configure_logging()
    assert gpu_count() == 0 and gpu_count() == 0
    *waiting, line = capsys.readouterr().err.splitlines()
    assert waiting == ["megalite: warning: looking for GPUs: nvidia-smi has not answered for 0.1 s"] * (
        "HANG" in (settings or {})
    )
    assert line.startswith("megalite: warning: no GPU found, because ") and all(reason in line for reason in reasons)
    assert all(reason in gpu_facts()["gpu_problem"] for reason in reasons)


@pytest.mark.parametrize(
    ("build", "has_devices", "says"), [("CPUs", False, False), ("CPUs", True, True), ("ROCm 7.0", False, True)]
)
def test_a_machine_without_any_sign_of_gpus_needs_no_warning(
    build: str, has_devices: bool, says: bool, machine: Machine
) -> None:
    machine.is_like(build=build, devices=has_devices)
    assert gpu_count() == 0 and bool(why_no_gpu()) == says
    assert bool(gpu_facts()["gpu_problem"]) == has_devices, "a laptop may have a build for CUDA: no host to leave out"


def test_a_torch_for_cpus_uses_no_gpu_and_says_so(machine: Machine) -> None:
    machine.is_like(build="CPUs")
    machine.has_smi(f"printf '{LISTING}'")
    assert gpu_count() == 0 and "torch is built for CPUs alone" in (why_no_gpu() or "")


@pytest.mark.parametrize(
    ("memberships", "files", "limits"),
    [
        ("0::/jobs/one\n", {"jobs/one/memory.max": "max", "jobs/memory.max": "4096"}, [4096]),
        ("0::/jobs/one\n", {"memory.max": "8192"}, [8192]),  # in a container, which sees itself at the top
        ("4:memory:/job\n3:cpu:/job\n0::/\n", {"memory/job/memory.limit_in_bytes": "512"}, [512]),
        ("4:memory:/out/side\n0::/\n", {"memory/memory.limit_in_bytes": "1024"}, [1024]),
        ("", {}, []),
    ],
)
def test_limits_of_cgroups_are_found_in_both_versions(
    memberships: str, files: dict[str, str], limits: list[int], tmp_path: Path
) -> None:
    (tmp_path / "cgroup").write_text(memberships)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(f"{text}\n")
    assert list(cgroup_limits(tmp_path / "cgroup", tmp_path / "fs")) == limits
    assert list(cgroup_limits(tmp_path / "nowhere", tmp_path / "fs")) == []
    assert 2**28 < host_memory_bytes() < 2**50, "of this machine, whatever its cgroups"


def test_the_memory_of_gpus_is_that_of_the_largest(machine: Machine) -> None:
    """A small one may not be among those that ranks use; each rank compares with its own."""
    assert gpu_memory_bytes() is None
    machine.has_smi("printf '4096\\n81559\\n[N/A]\\n'")
    assert gpu_memory_bytes() == 81559 << 20
    assert sizes_of_gpus(start_sizing_gpus()) == [4096 << 20, 81559 << 20, None]


def test_what_torch_is_built_for_is_read_beside_it() -> None:
    import torch

    build = devices.torch_build()
    assert build == (f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPUs"), (
        "or ROCm, where this runs on AMD's"
    )
