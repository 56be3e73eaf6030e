"""The server that ranks of tests are forked from: it has imported what they need, so that none of them does it again.

Whatever starts ranks imports this module: the first call of `warm_up` decides what the server knows.
"""

import os

from launch.parity.forked_ranks import warm_up

PYTEST = ["pytest", "hypothesis", "psutil", "yaml", "safetensors.torch"]  # what modules of tests import
COMMANDS = ["launch.cli.app", "launch.cli.mistakes", "launch.cli.train", "launch.conversion.huggingface"]
TRAINING = [  # what a run imports on its way
    *("launch.train", "deepspeed.module_inject.auto_ep_layer", "megalite.checkpoint.engine_state"),
    *("megalite.checkpoint.remote.mirror", "megalite.checkpoint.saver", "megalite.monitor.expert_usage"),
    *("megalite.monitor.goodput", "megalite.monitor.prometheus.endpoint", "megalite.monitor.sinks.jsonl"),
    *("megalite.monitor.steps.profiler", "megalite.monitor.steps.recorder"),
    *("megalite.resilience.checkpoint_interval", "megalite.resilience.guards"),
    *("megalite.resilience.nonfinite_tracing", "megalite.resilience.stop_requests", "megalite.resilience.watchdog"),
    *("megalite.training.checkpoints", "megalite.training.loop"),
]

ACCELERATOR = os.environ.get("DS_ACCELERATOR", "cpu")  # of tests/device it is another
warm_up(
    {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": ACCELERATOR}, [*PYTEST, *COMMANDS, *TRAINING, "tests.helpers.numa_once"]
)
