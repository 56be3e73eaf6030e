"""What a run believes about its machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.errors import LaunchError
from launch.runtime.devices import gpu_count, gpu_memory_bytes
from launch.runtime.host_probe import cgroup_limits, host_memory_bytes, sizes_of_gpus, start_sizing_gpus

LISTING = "GPU 0: NVIDIA H200 (UUID: GPU-1a2b)\nGPU 1: NVIDIA H200 (UUID: GPU-3c4d)\n"


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, count: int
) -> None:
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_count() == 0, "no nvidia-smi, no GPU"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nprintf '{LISTING}'\n")
    program.chmod(0o755)
    assert gpu_count() == count
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert gpu_count() == 0
    monkeypatch.setenv("DS_ACCELERATOR", "gpu")
    with pytest.raises(LaunchError, match="set it to cpu or cuda, or unset it"):
        gpu_count()


def test_a_file_that_cannot_be_run_is_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a folder of PATH that only root may read: a PermissionError, not a FileNotFoundError."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "nvidia-smi").touch()
    assert gpu_count() == 0


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


def test_the_memory_of_gpus_is_that_of_the_largest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small one may not be among those that ranks use; each rank compares with its own."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_memory_bytes() is None
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '4096\\n81559\\n[N/A]\\n'\n")
    program.chmod(0o755)
    assert gpu_memory_bytes() == 81559 << 20
    assert sizes_of_gpus(start_sizing_gpus()) == [4096 << 20, 81559 << 20, None]
