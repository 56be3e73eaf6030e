"""Recognises checkpoints of other training stacks by the names of their files, and says how to take their weights."""

from __future__ import annotations

from pathlib import Path

_MARKS: dict[str, tuple[tuple[str, ...], str]] = {
    "DeepSpeed": (
        ("global_step*", "*mp_rank_*_states.pt"),
        "with `python zero_to_fp32.py FOLDER OUT --safe_serialization`, and the model's config.json beside the result",
    ),
    "Megatron-LM": (
        ("latest_checkpointed_iteration.txt", "iter_[0-9]*", "mp_rank_*/*optim*.pt"),
        "with the converter of Megatron-LM or Megatron Bridge",
    ),
    "transformers' Trainer": (
        ("checkpoint-*/trainer_state.json", "trainer_state.json"),
        "which a checkpoint-N with a config.json and .safetensors already is",
    ),
    "torch.distributed": (
        ("*.distcp", "step-*/*.distcp", "checkpoint/step-*/*.distcp", "checkpoints/step-*/*.distcp"),
        "with the converter of the stack that wrote it",
    ),
}
"""Files by which each stack's folder of a run or checkpoint is known, and the way from it to a Hugging Face folder."""


def foreign_checkpoint(folder: Path) -> tuple[str, str] | None:
    """Returns words for a checkpoint of another stack that a folder holds, and what to do; None if there is none."""
    for stack, (patterns, how) in _MARKS.items():
        for pattern in patterns:
            if found := next(folder.glob(pattern), None):
                remedy = f"make a Hugging Face folder of it ({how}) and name that in training.initialize_from"
                return f"a checkpoint of {stack} ({found.relative_to(folder)})", remedy
    return None
