"""torch's optimizers compute the same without the compiler, and do not import it."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

STEPS = """
import json, sys, torch
{before}
found = []
for kind, options in ((torch.optim.AdamW, {{"fused": True}}), (torch.optim.SGD, {{}})):
    weight = torch.nn.Parameter(torch.linspace(-1, 2, 15).reshape(3, 5))
    optimizer = kind([weight], lr=0.1, **options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))  # wraps `step` once more
    for step in range(3):
        weight.pow(3).sum().backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.add_param_group({{"params": torch.nn.Parameter(torch.zeros(1))}})
    assert optimizer.step(torch.is_grad_enabled) is True  # a closure computes gradients
    found.append([weight.detach().tolist(), type(optimizer).__name__, kind.step.__name__])
print(json.dumps([found, "torch._dynamo" in sys.modules]))
"""
KEEP = "from megalite.engine.deepspeed import uncompiled_optimizers as kept; kept.keep_optimizers_uncompiled()"


def _after_steps(before: str) -> list[Any]:
    """Runs a process of its own, since an imported module stays."""
    done = subprocess.run([sys.executable, "-c", STEPS.format(before=before)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def test_optimizers_compute_the_same_without_the_compiler() -> None:
    found, has_compiler = _after_steps(KEEP)
    usual, usually_has_compiler = _after_steps("")
    assert found == usual, "to the bit"
    assert not has_compiler, "torch imports it elsewhere now: see torch/_compile.py and torch/optim/optimizer.py"
    assert usually_has_compiler, "fixed in torch: keep_optimizers_uncompiled has nothing to do"


def test_nothing_is_changed_where_the_compiler_is_there_already() -> None:
    """As where blocks are compiled. (A process forked for ranks has imported it too.)"""
    script = f"import torch, torch._dynamo; step = torch.optim.Adam.step; {KEEP}; print(torch.optim.Adam.step is step)"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "True\n"
