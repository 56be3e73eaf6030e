"""Ranks that are started on this machine: their environment, signals and deaths.

They get their time to save, and nothing outlives the command.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.errors import LaunchError
from launch.runtime.local_ranks import ALLOCATOR_OPTIONS, COMPILE_WORKERS, rank_settings
from launch.trainer.start.rank_devices import devices_of_ranks
from megalite.config import ConfigError, LaunchConfig
from megalite.distributed.rank_admission import FOLDER, is_private
from megalite.resilience.signals import INTERRUPT_REPEAT_S, REPEAT_S
from tests.e2e.test_supervise import MARK, marked, wait_until
from tests.helpers.commands import ROOT

pytestmark = pytest.mark.slow

NCCL_WARNING = "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING"
GPUS = "2,3"  # as a user chooses them
PROGRAM = """
import sys
from launch.runtime.local_ranks import start_local_ranks
from megalite.parallel.mesh import Mesh
ranks = Mesh(pipeline_parallel_size=2)
sys.exit(start_local_ranks(ranks, {"DS_ACCELERATOR": "cpu"}, sys.argv[1:], module="tests.helpers.fake_rank"))
"""


class Command:
    """What `megalite train` does with two ranks."""

    def __init__(self, folder: Path, behaviour: str) -> None:
        self.folder, self.mark = folder, folder.name + behaviour
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(folder), behaviour],
            env=os.environ | {MARK: self.mark, "CUDA_VISIBLE_DEVICES": GPUS, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def wait_for_ranks(self) -> list[int]:
        """Until both ranks take signals; their process ids."""
        files = [self.folder / f"pid_{rank}" for rank in range(2)]
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
        return [int(file.read_text()) for file in files]

    def got(self, rank: int) -> list[str]:
        """The signals that came to a rank."""
        return (self.folder / f"got_{rank}").read_text().split()

    def end(self, timeout_s: float) -> int:
        """The exit code; fails if a process is left."""
        _, self.said = self.process.communicate(timeout=timeout_s)
        assert marked(self.mark) == []
        return self.process.returncode


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Command]]:
    started: list[Command] = []

    def begin(behaviour: str) -> Command:
        started.append(Command(tmp_path, behaviour))
        return started[-1]

    yield begin
    for one in started:
        for process in marked(one.mark):
            process.kill()


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_ranks_get_the_signal_once_save_and_their_code_is_the_command_s(
    start: Callable[[str], Command], name: str, code: int
) -> None:
    """Ctrl-C in a terminal is for all processes of the group: the ranks have sessions of their own."""
    command = start("save")
    command.wait_for_ranks()
    os.killpg(command.process.pid, getattr(signal, name))
    assert command.end(timeout_s=10) == code, command.said
    assert command.said == "" and [command.got(rank) for rank in range(2)] == [[name], [name]]


def test_ranks_get_what_torch_and_deepspeed_read(start: Callable[[str], Command]) -> None:
    """deepspeed/launcher/launch.py sets the same; but it would number the GPUs anew where the user has chosen some."""
    command = start("save")
    command.wait_for_ranks()
    read = [json.loads((command.folder / f"environment_{rank}").read_text()) for rank in range(2)]
    assert is_private(Path(read[0][FOLDER])), "where they meet nobody else gets in"
    command.process.terminate()
    command.end(timeout_s=10)
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "2", "CROSS_RANK": "0", "CROSS_SIZE": "1"}
    for rank, environment in enumerate(read):
        expected = world | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1"}
        assert {name: environment.get(name) for name in expected} == expected
        assert environment.get("CUDA_VISIBLE_DEVICES") == GPUS and environment["DS_ACCELERATOR"] == "cpu"
    assert read[0][FOLDER] == read[1][FOLDER] and not Path(read[0][FOLDER]).exists(), "it is gone with the ranks"


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_a_signal_before_ranks_take_any_ends_the_start(start: Callable[[str], Command], name: str, code: int) -> None:
    command = start("import")
    command.wait_for_ranks()
    command.process.send_signal(getattr(signal, name))
    assert command.end(timeout_s=10) == code
    assert command.said.count("\n") == 1 and "before the ranks had started" in command.said, command.said


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 143), ("SIGINT", 130)])
def test_a_second_signal_ends_ranks_that_do_not_react(start: Callable[[str], Command], name: str, code: int) -> None:
    command = start("hang")
    command.wait_for_ranks()
    command.process.send_signal(getattr(signal, name))
    wait_until(lambda: all((command.folder / f"got_{rank}").exists() for rank in range(2)))
    time.sleep(REPEAT_S + 0.1 if name == "SIGTERM" else INTERRUPT_REPEAT_S + 0.1)
    assert command.process.poll() is None
    command.process.send_signal(getattr(signal, name))
    assert command.end(timeout_s=5) == code
    assert command.said == "megalite: warning: all ranks were ended at once: what was not saved is lost\n"


KILLED = (
    "megalite: error: rank 1 (stage 1) was ended by SIGKILL, which the kernel sends when memory runs out: `dmesg` says "
    "whether it did; what it said is above, in lines with `rank 1`\n"
)


@pytest.mark.parametrize(
    ("behaviour", "code", "said"), [("crash", 128 + signal.SIGKILL, KILLED), ("fail", 3, "")], ids=["crash", "fail"]
)
def test_the_first_rank_that_fails_gives_the_code_and_the_other_is_ended(
    start: Callable[[str], Command], behaviour: str, code: int, said: str
) -> None:
    """A rank that a signal ends cannot say so itself; the signal that ends the other one is nobody's concern."""
    command = start(behaviour)
    assert command.end(timeout_s=20) == code
    assert command.said == said
    assert command.got(0) == ["SIGTERM"]
    assert not Path(json.loads((command.folder / "environment_0").read_text())[FOLDER]).exists()


def test_a_picture_outlives_its_rank_and_is_whole_when_the_command_returns(start: Callable[[str], Command]) -> None:
    """The command adopts its process; what else a rank leaves behind is asked to end after a second."""
    command = start("draw")
    assert command.end(60) == 0
    assert int((command.folder / "loss.png").read_text()) == command.process.pid


def test_ranks_do_not_outlive_a_command_that_is_killed(start: Callable[[str], Command]) -> None:
    command = start("save")
    command.wait_for_ranks()
    command.process.kill()
    assert command.process.wait(timeout=20) == -signal.SIGKILL
    wait_until(lambda: not marked(command.mark), timeout_s=10)
    assert [command.got(rank)[0] for rank in range(2)] == ["SIGTERM"] * 2, "they could save"


def test_gpus_allocate_in_segments_that_grow_unless_the_user_has_a_say(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ALLOCATOR_OPTIONS:
        monkeypatch.delenv(name, raising=False)
    given, told = rank_settings(LaunchConfig(), 2, on_gpu=True)
    assert given["PYTORCH_ALLOC_CONF"] == "expandable_segments:True" and "segments that grow" in told
    monkeypatch.setenv("MASTER_PORT", "29501")
    given, told = rank_settings(LaunchConfig(), 2, on_gpu=False)
    assert "PYTORCH_ALLOC_CONF" not in given and "segments" not in told
    assert "MASTER_PORT as you set it changes nothing" in told, "it was replaced without a word"
    for name in ALLOCATOR_OPTIONS:
        with monkeypatch.context() as own:
            own.setenv(name, "max_split_size_mb:64")
            given, told = rank_settings(LaunchConfig(), 2, on_gpu=True)
        assert not given.keys() & set(ALLOCATOR_OPTIONS), "torch would take one of two"
        assert f"{name} as you set it" in told and "segments" not in told


@pytest.mark.parametrize(("ranks", "cores", "workers"), [(8, 192, "24"), (1, 192, "32"), (8, 4, "1")])
def test_compile_workers_share_cores(ranks: int, cores: int, workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks had 256 of them."""
    monkeypatch.delenv(COMPILE_WORKERS, raising=False)
    assert rank_settings(LaunchConfig(), ranks, on_gpu=True, cores=cores)[0][COMPILE_WORKERS] == workers
    monkeypatch.setenv(COMPILE_WORKERS, "7")
    given, told = rank_settings(LaunchConfig(), ranks, on_gpu=True, cores=cores)
    assert COMPILE_WORKERS not in given and COMPILE_WORKERS in told


def test_nccl_warns_of_nothing_in_an_ordinary_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """It did of the barrier of one rank, and of messages that wait for one another, as they are meant to."""
    from megalite.engine.deepspeed import process_groups

    called: list[str] = []
    monkeypatch.setenv(NCCL_WARNING, "0")  # to be restored
    monkeypatch.delenv(NCCL_WARNING)
    dist = process_groups.dist
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: called.append(os.environ[NCCL_WARNING]))
    monkeypatch.setattr(dist, "barrier", lambda: called.append("barrier"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: called.append("left"))
    monkeypatch.setattr("deepspeed.init_distributed", lambda **_: None)
    process_groups.start_distributed(0, rendezvous=SimpleNamespace(store=None, rank=0, world_size=1))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    for size in (1, 2):
        monkeypatch.setattr(dist, "get_world_size", lambda size=size: size)
        process_groups.stop_distributed()
    assert called == ["0", "left", "barrier", "left"]


@pytest.mark.parametrize("name", ["xpu", "npu", "hpu", "mps"])
def test_a_rank_on_another_accelerator_is_refused_in_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under torchrun, where DeepSpeed chooses what it finds, and such a rank was taken for one on a CPU."""
    from launch.trainer.start.joining import join_ranks
    from megalite.engine.deepspeed import process_groups

    monkeypatch.setattr(process_groups, "get_accelerator", lambda: SimpleNamespace(device_name=lambda: name))
    with pytest.raises(ConfigError, match=f"has chosen {name}, which is not supported: set DS_ACCELERATOR"):
        process_groups.start_distributed(0)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    with pytest.raises(LaunchError, match=f"DS_ACCELERATOR is '{name}' in the environment: set it to cpu or cuda"):
        join_ranks(None, None, None)  # DeepSpeed would be missing packages as soon as it is imported


def test_a_rank_that_was_started_for_a_gpu_does_not_compute_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed takes a CPU where torch finds no GPU, so a driver that is too old has made a CPU run, silently."""
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    from megalite.engine.deepspeed.process_groups import start_distributed

    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for on_gpu, accelerator in ((True, "cuda"), (False, "cpu")):
        assert rank_settings(LaunchConfig(), 2, on_gpu=on_gpu)[0]["DS_ACCELERATOR"] == accelerator
    monkeypatch.setattr("megalite.engine.deepspeed.process_groups.get_accelerator", CUDA_Accelerator)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"DS_ACCELERATOR is cuda, and torch .* can use no GPU here: compare"):
        start_distributed(0)


@pytest.mark.parametrize(("chosen", "gpus", "warned"), [(None, 2, True), (None, 0, False), ("cpu", 2, False)])
def test_a_rank_that_torch_puts_on_the_cpu_beside_gpus_says_so(
    chosen: str | None, gpus: int, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As under torchrun, which sets no DS_ACCELERATOR."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    if chosen is not None:
        monkeypatch.setenv("DS_ACCELERATOR", chosen)
    monkeypatch.setattr("launch.trainer.start.rank_devices.gpu_count", lambda: gpus)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("megalite.distributed.agreement.from_all_ranks", lambda own, kind: [own])
    assert [one.allocator.kind for one in devices_of_ranks("cpu")] == ["cpu"]
    assert ("torch cannot use the 2 GPUs that the driver names" in caplog.text) == warned
