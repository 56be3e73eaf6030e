"""Names of the modules that are started as processes, their command lines, and paths of this installation.

No import checks a module name inside a command line, so each name is written only here, and a test imports them all.
"""

from __future__ import annotations

import sys
from pathlib import Path

import launch

RANK = "launch.train"
COMMAND_LINE = "launch"
REAPER = "launch.supervision.reaper"
START_WITNESS = "launch.runtime.start_witness"
LAST_PICTURES = "launch.inspection.page.last_pictures"
EXPORT_PROCESS = "launch.trainer.export_process"
BANDWIDTH_RANK = "launch.cluster.doctor.bandwidth_rank"
RAY_DRIVER = "launch.backends.ray"
RAY_CLUSTER = "launch.backends.ray_cluster"
FORK_SERVER_PRELOAD = "launch.parity.preload"
TORCHRUN = "torch.distributed.run"
DEEPSPEED_RUNNER = "deepspeed.launcher.runner"

PACKAGE = Path(launch.__file__).resolve().parent
INSTALLATION = PACKAGE.parent
"""The folder that contains `launch`, `megalite`, `models` and `data_pipeline`."""
RANK_SCRIPT = PACKAGE / "train.py"
HOST_PROBE = PACKAGE / "runtime" / "host_probe.py"
GPU_PROBE = PACKAGE / "runtime" / "gpu_probe.py"
AGENT = PACKAGE / "cluster" / "ssh" / "agent.py"


def python_command(module: str, *arguments: str) -> list[str]:
    """Returns the command line that runs a module with this Python, which loads no code from the current folder (-P).

    Python's own children need PYTHONSAFEPATH as well (launch/runtime/import_path.py).
    """
    return [sys.executable, "-P", "-u", "-m", module, *arguments]
