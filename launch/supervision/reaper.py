"""Process between a supervisor and one attempt of its command: `python -m launch.supervision.reaper GRACE_S COMMAND...`

It ends everything that the command has started once the command has ended, or once the supervisor is gone, even by
SIGKILL. Its exit code is the command's; 128 + n for signal n.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launch.runtime.processes import ProcessTree, StopRequest, StopSignals, wait_for


def run_and_reap(command: Sequence[str], grace_s: float) -> int:
    """Runs `command` to its end and cleans up after it; returns the exit code."""
    with StopSignals() as signals, ProcessTree(command, os.environ, is_alone=True) as tree:
        code = wait_for(tree, signals, StopRequest(grace_s), ranks=tree.ranks, otherwise=tree.signal_group)
        tree.end(grace_s)
    return code


if __name__ == "__main__":
    sys.exit(run_and_reap(sys.argv[2:], float(sys.argv[1])))
