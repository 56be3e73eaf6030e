"""The parts that verify: number formats and recomputation of one model, then every family, on one rank.

`megalite verify` makes each model small, draws packed documents for one of its two trainings, and compares all it
computes with transformers in float64.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.gpu_day.context import Context

Facts = dict[str, Any]
DIFFERS = 1  # exit code of `megalite verify`
SEED = 7
LAYOUTS = "tp=1;recompute=selective;recompute=full;accumulation=3"
CORES_OF_ONE, MOST_AT_ONCE = 4, 4
OF_TINY = ("llama",)
# over what transformers' own configs of a family say, which verify then makes small
SWITCHES: dict[str, dict[str, Any]] = {
    "llama": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 16384,
        "rope_parameters": {
            **{"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0},
            **{"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 2048},
        },
    },
    "qwen2": {"num_key_value_heads": 8, "use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 2},
    "qwen3": {"num_key_value_heads": 8},
    "phi3": {"num_key_value_heads": 8, "sliding_window": 2047},
    "olmo2": {"num_key_value_heads": 8},
    "olmo3": {"num_key_value_heads": 8},
}


def formats(context: Context) -> None:
    """The part `parity`: fp32, bf16 and fp16, without and with recomputation, and with several micro-batches."""
    chosen = ("bf16",) if context.tiny else ("bf16", "fp16") if context.device == "cuda" else ("bf16",)
    layouts = "tp=1;recompute=full" if context.tiny else LAYOUTS
    _side_by_side(
        context, {f"llama in fp32 and {dtype}": verification(context, "llama", dtype, layouts) for dtype in chosen}
    )


def families(context: Context) -> None:
    """The part `families`: each in fp32 and bf16."""
    from models.families import FAMILIES

    chosen = OF_TINY if context.tiny else tuple(sorted(FAMILIES))
    _side_by_side(context, {name: verification(context, name, "bf16", "tp=1;recompute=full") for name in chosen})


def _side_by_side(context: Context, items: dict[str, Callable[[], Facts]]) -> None:
    """As many at once as there are cores for: the references are computed on the host too."""
    at_once = max(1, min(MOST_AT_ONCE, len(os.sched_getaffinity(0)) // CORES_OF_ONE))
    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(lambda named: context.item(*named), items.items()))


def verification(context: Context, family: str, dtype: str, layouts: str, sequence: int = 64) -> Callable[[], Facts]:
    """Returns what verifies a family on sequences of that length, which verify cuts to 96."""

    def verify() -> Facts:
        folder = context.work / f"verify_{family}_{dtype}"
        _write_hub_config(family, folder)
        config = context.write_config(
            f"verify_{family}_{dtype}_config",
            {
                "run_dir": str(folder / "run"),
                "data": {"path": "unused"},
                "precision": {"dtype": dtype},
                "training": {
                    **{"initialize_from": str(folder), "global_batch_size": 12, "micro_batch_size": 12},
                    **{"sequence_length": sequence, "steps": 3},
                },
            },
        )
        words = ["verify", str(config), "--layouts", layouts, "--seed", str(SEED), "--json"]
        words += ["--steps", "1"] if context.tiny else []
        return verdict(context.json_of("-m", "launch", *words, allowed=(0, DIFFERS)))

    return verify


def verdict(told: Facts) -> Facts:
    """Summarises the output of `megalite verify --json`."""
    rows = [
        {name: row[name] for name in ("layout", "dtype", "passed", "seconds", "worst")}
        | {"problem": row["crash"] or "; ".join([*row["disagreements"][:3], *map(_failure, row["failures"][:3])])}
        for row in told["layouts"]
    ]
    return {"rows": rows} | {name: told[name] for name in ("passed", "device", "changes", "diagnoses")}


def _failure(finding: Facts) -> str:
    return f"{finding['quantity']} of {finding['name']}: error {finding['error']} over its bound {finding['bound']}"


def _write_hub_config(family: str, folder: Any) -> None:
    """The config.json of a Hugging Face folder: verify needs no weights, it draws its own."""
    from transformers import AutoConfig

    folder.mkdir(parents=True, exist_ok=True)
    AutoConfig.for_model(family, **SWITCHES.get(family, {})).save_pretrained(folder)
