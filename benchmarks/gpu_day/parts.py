"""The parts of the GPU day: a table, and the process in which one of them runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

MOST_S = 480.0  # no part may take longer


@dataclass(frozen=True)
class Part:
    """Something to measure in one go."""

    name: str
    about: str
    function: str  # module:name in this package; imported by the part's own process alone
    limit_s: float = MOST_S
    needs_packages: bool = True  # beside torch
    always: bool = False  # runs again though it ended well: it takes seconds, and depends on other parts

    def load(self) -> Callable[[Any], None]:
        module, _, name = self.function.partition(":")
        found: Callable[[Any], None] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return found


PARTS: tuple[Part, ...] = (
    Part("checklist-kernels", "kernels and host syncs of a step, verify on two lengths", "checklist:kernels"),
    Part("checklist-trainings", "compiled as eager, the same twice, killed and resumed, text", "checklist:trainings"),
    Part("checklist-options", "documents, fp16, float8, Muon and offload beside eager bf16", "checklist:options"),
    Part("environment", "what the machine is; products and copies at best", "machine:run", 120, needs_packages=False),
    Part("parity", "megalite verify on one rank: fp32, bf16, fp16, recomputation", "parity:formats"),
    Part("train-1b", "30 steps of a Llama 1B: tokens/s, MFU, memory, kernels, waits", "training:run"),
    Part("train-3b", "the same of a Llama 3B", "training:run"),
    Part("train-8b-8-layers", "the same of eight layers of an 8B", "training:run"),
    Part("levers-1b", "a Llama 1B's step with each option that is to make it faster", "levers:run"),
    Part("levers-1b-documents", "the same on packed documents of about 1k tokens in sequences of 8k", "levers:run"),
    Part("levers-3b", "the same of a Llama 3B, sequences of 8k", "levers:run"),
    Part("levers-8b-8-layers", "the same of eight layers of an 8B, sequences of 8k", "levers:run"),
    Part("levers-gemma-2-2b", "the same of Gemma 2 2B, sequences of 8k", "levers:run"),
    Part("levers-qwen3-moe-4-layers", "the same of four layers of Qwen3-30B-A3B, 128 experts each", "levers:run"),
    Part("checkpoint", "save, resume, save in the background, read through", "stored:checkpoints"),
    Part("generate", "text from the checkpoint: tokens/s", "stored:generation"),
    Part("families", "megalite verify of every family's model, made small", "parity:families"),
    Part("calibration", "the planner's constant from the trainings", "calibration:run", 120, always=True),
)


def find(names: list[str]) -> list[Part]:
    """The parts of these names, in the table's order; all where none is named. Raises KeyError for an unknown one."""
    known = {part.name: part for part in PARTS}
    for name in names:
        if name not in known:
            raise KeyError(name)
    return [part for part in PARTS if not names or part.name in names]
