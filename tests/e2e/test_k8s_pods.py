"""What the pods of `megalite k8s` run, run: each pod a process tree of this machine, with the variables that Kubeflow's
torch plugin gives it, and a SIGTERM as kubelet sends it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from launch.errors import PREEMPTED_CODE, USER_ERROR_CODE
from launch.runtime.local_ranks import free_port
from megalite.monitor.events import EVENTS, read_events
from megalite.monitor.sinks.jsonl import stream_records
from tests.conftest import write_config
from tests.helpers.k8s_command_line import command, from_yaml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 150
PATIENCE_S = 200


@pytest.fixture
def manifest(tiny: dict[str, Any], corpus: Path, tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Two nodes of one CPU rank; pods see the claims where they are on this machine."""
    more = ["run_dir=runs/pods", f"training.steps={STEPS}", "monitor.log_interval=1", f"data.path={corpus}"]
    more += ["parallel.tensor_parallel_size=1", "--data-claim", f"corpora:{corpus.parent}"]
    layout = ("--nodes", "2", "--gpus-per-node", "0", "--output-claim", f"runs:{tmp_path}/output")
    written = command(write_config(tmp_path / "config.yaml", tiny))(*more, "--grace", "100", layout=layout)
    return {each["kind"]: each for each in from_yaml(written)}


@contextmanager
def pod(manifest: dict[str, dict[str, Any]], folder: Path, index: int, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """The process that Kubernetes starts as the first one of pod `index`."""
    trainer = manifest["TrainJob"]["spec"]["trainer"]
    mounted = folder / "mounted.yaml"
    mounted.write_text(manifest["ConfigMap"]["data"]["config.yaml"])
    inherited = {name: os.environ[name] for name in ("LANG",) if name in os.environ}
    plugin = {"NNODES": trainer["numNodes"], "NPROC_PER_NODE": trainer["numProcPerNode"], "NODE_RANK": index}
    plugin |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    settings = {each["name"]: each["value"] for each in trainer["env"]}
    home = folder / f"home{index}"  # an empty folder of the pod
    home.mkdir(exist_ok=True)
    assert settings["HOME"] == "/var/lib/megalite"
    environment = {
        **inherited,
        **{"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
        **settings,
        "HOME": str(home),
        **{f"PET_{name}": str(value) for name, value in plugin.items()},
    }
    line = [str(mounted) if word == "/etc/megalite/config.yaml" else word for word in trainer["command"]]
    with (folder / f"pod{index}.log").open("ab") as log:
        process = subprocess.Popen(line, env=environment, cwd=folder, stdout=log, stderr=log, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()
                time.sleep(3)  # a second SIGTERM ends all at once
                process.terminate()
                process.wait(60)


def logs(folder: Path) -> str:
    return "\n".join(f"{path.name}: {path.read_text()[-3000:]}" for path in sorted(folder.glob("pod*.log")))


def test_a_pod_that_is_asked_to_end_takes_the_run_along_and_it_goes_on(
    manifest: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Kubernetes evicts one pod: the run saves, and both pods end with 75, by which the JobSet starts it again; then it
    ends, and all pods with 0. torchrun alone would kill the ranks after 30 s and end with 1."""
    run_dir = tmp_path / "output/runs/pods"
    codes = []
    for attempt in range(2):
        port = free_port()
        with ExitStack() as stack:
            pods = [stack.enter_context(pod(manifest, tmp_path, index, port)) for index in range(2)]
            deadline = time.monotonic() + PATIENCE_S
            while attempt == 0 and len(list(stream_records(run_dir / "metrics.jsonl"))) < 3:
                assert time.monotonic() < deadline and all(each.poll() is None for each in pods), logs(tmp_path)
                time.sleep(0.1)
            if attempt == 0:
                pods[1].send_signal(signal.SIGTERM)
            codes.append([each.wait(PATIENCE_S) for each in pods])
    assert codes == [[PREEMPTED_CODE] * 2, [0] * 2], logs(tmp_path)
    events = [event["event"] for event in read_events(run_dir / EVENTS)]
    assert [name for name in events if name in ("started", "preempted", "ended")] == [
        *("started", "preempted", "started", "ended")
    ]
    assert [record["step"] for record in list(stream_records(run_dir / "metrics.jsonl"))] == list(range(1, STEPS + 1))


def test_a_mistake_ends_a_pod_with_the_code_that_ends_the_run(
    manifest: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Of which torchrun would make 1, and the JobSet a restart."""
    text = manifest["ConfigMap"]["data"]["config.yaml"]
    manifest["ConfigMap"]["data"]["config.yaml"] = text.replace("hidden_size:", "hiden_size:", 1)
    with pod(manifest, tmp_path, 0, free_port()) as process:
        assert process.wait(PATIENCE_S) == USER_ERROR_CODE, logs(tmp_path)
    assert "megalite: error:" in (tmp_path / "pod0.log").read_text()
