"""A rank that compiles nothing trains without torch's compiler, which would be a second of its start and 60 MB."""

from __future__ import annotations

import os
import subprocess
import sys

from launch.runtime.rank_environment import VARIABLES

TWO_STEPS = """
import sys
from megalite.engine.deepspeed.process_groups import start_distributed
start_distributed(0)
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
case = Case(steps=2, dtype="bf16", accumulation=2)
engine = engine_of(case)
for batch in global_batches(case):
    engine.train_step(micro_batches_of(engine, case, batch), 1e-3)
slow = {"torch._dynamo", "torch._inductor", "sympy", "triton", "transformers", "pandas", "matplotlib", "setuptools"}
slow = sorted(slow & sys.modules.keys())
print("imported:", slow, flush=True)
import os
os._exit(0)
"""


def test_two_steps_import_no_compiler() -> None:
    """In a process of its own: the ranks of other tests are forked from one that has imported the compiler."""
    rank = dict(zip(VARIABLES, ("0", "0", "1"), strict=True))
    done = subprocess.run(
        [sys.executable, "-c", TWO_STEPS],
        env=os.environ | rank | {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["imported: []"], done.stdout + done.stderr
