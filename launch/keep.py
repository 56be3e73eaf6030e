"""The process between a supervisor and one attempt of its command: `python -m launch.keep GRACE_S COMMAND...`.

It ends everything that the command has started when the command has ended, and also when the supervisor is gone, even
by SIGKILL. Its exit code is the command's; 128 + n for signal n.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from launch.processes import ProcessTree, StopSignals, wait_for


def keep(command: Sequence[str], grace_s: float) -> int:
    """Runs `command` to its end; the exit code."""
    with StopSignals() as signals, ProcessTree(command, os.environ, is_alone=True) as tree:
        code = wait_for(tree, signals, ranks=tree.ranks, otherwise=tree.signal_group, grace_s=grace_s)
        tree.end(grace_s)
    return code


if __name__ == "__main__":
    sys.exit(keep(sys.argv[2:], float(sys.argv[1])))
