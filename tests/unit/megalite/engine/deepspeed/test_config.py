from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from megalite.config import Config, resolve_layout
from megalite.engine.deepspeed.config import deepspeed_config
from tests.helpers.sizes import TINY_SIZES

BASE = {
    "run_dir": "unused",
    "model": TINY_SIZES,
    "data": {"path": "unused"},
    "training": {"global_batch_size": 24, "micro_batch_size": 2, "sequence_length": 16, "steps": 5},
}


# Everything that is written out whatever the user says, so that a default that moves in DeepSpeed moves nothing here.
EXPLICIT = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("managed_gradient_accumulation", "steps_per_print", "wall_clock_breakdown"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("zero_optimization.stage", "zero_optimization.contiguous_gradients", "zero_optimization.allgather_bucket_size"),
    "zero_optimization.overlap_comm",
    *("timers.throughput.enabled", "bf16.enabled", "bf16.immediate_grad_update", "bf16.check_grad_overflow"),
    *("fp16.enabled", "data_types.grad_accum_dtype"),
}
OFFLOADING = {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "nvme"}}}


def made(world_size: int, **sections: dict[str, Any]) -> dict[str, Any]:
    config = Config.model_validate({**BASE, **sections})
    return deepspeed_config(config, resolve_layout(config, world_size, "cuda"))


def test_batch_sizes_multiply_out() -> None:
    # DeepSpeed refuses a config where they do not
    result = made(12, parallel={"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "data_parallel_size": 3})
    assert result["train_batch_size"] == 24
    assert result["train_micro_batch_size_per_gpu"] == 2
    assert result["gradient_accumulation_steps"] == 4


@pytest.mark.parametrize(("wanted", "given"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_zero_stage_0_becomes_1(wanted: int, given: int) -> None:
    assert made(1, parallel={"zero_stage": wanted})["zero_optimization"]["stage"] == given


@pytest.mark.parametrize(
    ("precision", "bf16", "fp16", "data_types"),
    [
        ({"dtype": "fp32"}, False, False, None),
        ({}, True, False, {"grad_accum_dtype": "fp32"}),
        ({"dtype": "bf16", "gradient_accumulation_dtype": "bf16"}, True, False, {"grad_accum_dtype": "bf16"}),
        ({"dtype": "fp16"}, False, True, {"grad_accum_dtype": "fp32"}),
    ],
    ids=str,
)
def test_precision(precision: dict[str, str], bf16: bool, fp16: bool, data_types: dict[str, str] | None) -> None:
    result = made(1, precision=precision)
    assert (result["bf16"]["enabled"], result["fp16"]["enabled"]) == (bf16, fp16)
    assert result.get("data_types") == data_types


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_buckets_have_the_stated_size_and_stage_3_alone_overlaps(stage: int) -> None:
    """DeepSpeed's own defaults are ten times as large; and it takes `overlap_comm` under stage 1 for a mistake."""
    for size in (999, 50_000_000):
        zero = made(2, parallel={"zero_stage": stage, "gradient_bucket_size": size})["zero_optimization"]
        assert zero["allgather_bucket_size"] == size + size % 2
        assert zero["overlap_comm"] == (stage == 3)


@pytest.mark.parametrize("clip", [0.0, 0.5, 1.0])
def test_clipping_is_always_said(clip: float) -> None:
    # DeepSpeed's own default became 1.0 in 0.19.3
    assert made(1, training=BASE["training"] | {"gradient_clipping": clip})["gradient_clipping"] == clip


def test_the_users_section_is_merged_deep() -> None:
    theirs = {
        "zero_optimization": {"allgather_bucket_size": 7, "offload_optimizer": {"device": "nvme"}},
        "aio": {"block_size": 7},
        "data_types": {},
    }
    kept = copy.deepcopy(theirs)
    stage_3 = {"zero_stage": 3}  # under others nothing goes to NVMe
    plain, result = made(1, parallel=stage_3), made(1, parallel=stage_3, deepspeed=theirs)
    assert result["zero_optimization"] == plain["zero_optimization"] | {
        "allgather_bucket_size": 7,
        "offload_optimizer": {"device": "nvme", "pin_memory": True},
    }
    assert result["aio"] == {"block_size": 7}
    changed = {"zero_optimization", "aio"}
    assert {k: v for k, v in result.items() if k not in changed} == {k: v for k, v in plain.items() if k not in changed}
    assert theirs == kept, "the user's section was written to"


def test_the_same_config_gives_the_same_result_and_nothing_is_shared() -> None:
    config = Config.model_validate(BASE | {"deepspeed": {"aio": {"block_size": 7}}})
    layout = resolve_layout(config, 1, "cuda")
    first = deepspeed_config(config, layout)
    expected = copy.deepcopy(first)
    first["zero_optimization"]["stage"] = 99
    first["aio"]["block_size"] = 8
    assert deepspeed_config(config, layout) == expected


@pytest.mark.parametrize("pin", [None, False])
def test_pinned_memory_is_said_where_something_is_offloaded(pin: bool | None) -> None:
    # DeepSpeed's own default became True in 0.19.5
    section = {"device": "cpu"} if pin is None else {"device": "cpu", "pin_memory": pin}
    zero = made(1, deepspeed={"zero_optimization": {"offload_param": section}})["zero_optimization"]
    assert zero["offload_param"]["pin_memory"] is (pin is None)
    assert "offload_optimizer" not in zero


def test_the_optimizer_is_kept_on_the_host_where_asked() -> None:
    plain, result = made(1), made(1, offload={"optimizer": "cpu"})
    assert result.pop("zero_optimization") == plain.pop("zero_optimization") | {
        "offload_optimizer": {"device": "cpu", "pin_memory": True}
    }
    assert result == plain


def test_every_setting_that_has_moved_is_written_out() -> None:
    assert set(paths(made(1))) == EXPLICIT
    offload = {"offload_param", "offload_optimizer"}
    said = {f"zero_optimization.{section}.{key}" for section in offload for key in ("device", "pin_memory")}
    assert set(paths(made(1, parallel={"zero_stage": 3}, deepspeed=OFFLOADING))) == EXPLICIT | said


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_deepspeed_reads_every_key_that_is_written(dtype: str) -> None:
    """It ignores top-level keys and keys of `data_types` that it does not know; others it refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    result = made(1, precision={"dtype": dtype}, parallel={"zero_stage": 3}, deepspeed=OFFLOADING)
    data_types = Asked(result.get("data_types", {}))
    asked = Asked(result | {"data_types": data_types})
    DeepSpeedConfig(asked)
    assert asked.keys() <= asked.asked, "DeepSpeed does not know a key at the top"
    assert data_types.keys() <= data_types.asked, "DeepSpeed does not know a key of data_types"


class Asked(dict[str, Any]):
    """A dictionary that remembers which of its keys were read; copies of it remember in the same place."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def paths(section: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """The settings of nested sections, as `section.setting`."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{key}.")
        else:
            yield prefix + key
