"""A combination that is known to go wrong is refused with one sentence, and nothing else is.

Rows are checked against invented versions: what they would catch is a range that is off by one release, a setting
read from the wrong place, and a sentence that leaves out who says so or what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config, ConfigError, load_config, resolve_layout
from megalite.config.rules.known_bad import KNOWN_BAD, Device, KnownBad, check_known_bad, installed_versions, matching
from megalite.config.rules.rules import OF_DEEPSPEEDS_REDUCTION
from tests.helpers.sizes import TINY_SIZES

QUICKSTART = Path(__file__).parents[5] / "configs" / "quickstart.yaml"
MODEL = TINY_SIZES | {"hidden_size": 64, "num_hidden_layers": 5}


@dataclass(frozen=True)
class Case:
    """A row's settings, the versions at both ends of its range, and what must be in its sentence."""

    settings: dict[str, Any]
    bad: list[dict[str, str]]
    good: list[dict[str, str]]
    harmless: list[dict[str, Any]]  # the same settings but for one
    fragments: list[str]
    world_size: int = 2
    device: Device = "cuda"

    def config(self, settings: dict[str, Any] | None = None) -> Config:
        settings = self.settings if settings is None else settings
        training = {"global_batch_size": 24, "micro_batch_size": 1, "sequence_length": 32, "steps": 10}
        return Config.model_validate(
            {
                "run_dir": "unused",
                "model": MODEL | settings.get("model", {}),
                "data": {"path": "unused"} | settings.get("data", {}),
                "training": training | settings.get("training", {}),
                **{name: value for name, value in settings.items() if name not in ("model", "data", "training")},
            }
        )


def deepspeed(*versions: str) -> list[dict[str, str]]:
    return [{"deepspeed": version, "torch": "2.9.1", "transformers": "5.0.0"} for version in versions]


def zero(stage: int, **settings: Any) -> dict[str, Any]:
    return {"parallel": {"zero_stage": stage}, "deepspeed": {"zero_optimization": settings}}


ONE_MICRO_BATCH = {"training": {"global_batch_size": 2}}
PIPELINE = {"parallel": {"pipeline_parallel_size": 2}}
OFFLOADED = {"offload": {"optimizer": "cpu"}}

CASES = {
    "DeepSpeed#8203": Case(
        PIPELINE | ONE_MICRO_BATCH,
        deepspeed("0.16.0", "0.18.2", "0.19.3+local"),
        deepspeed("0.19.4", "0.19.8"),
        [ONE_MICRO_BATCH],
        ["pipeline_parallel_size 2", "2 micro-batches", "deepspeed 0.16.0", "install deepspeed"],
    ),
    "DeepSpeed#8225": Case(
        zero(2) | OFFLOADED,
        deepspeed("0.19.4"),
        deepspeed("0.19.5"),
        [zero(2), zero(2, offload_optimizer=None), zero(2, offload_optimizer={"device": "none"})],
        ["offload.optimizer cpu", "managed_gradient_accumulation", "the start fails"],
    ),
    "DeepSpeed#7898": Case(
        zero(3),
        [{"deepspeed": "0.18.7", "torch": "2.10.0"}, {"deepspeed": "0.18.7", "torch": "2.13.0+cu130"}],
        [
            {"deepspeed": "0.18.7", "torch": "2.9.1+cu128"},
            {"deepspeed": "0.18.8", "torch": "2.10.0"},
            {"deepspeed": "0.18.7"},
        ],
        [zero(1)],
        ["deepspeed 0.18.7 and torch 2.10.0", "zero_stage 3", "zero_stage 1 or 2"],
    ),
    "DeepSpeed#7606": Case(
        zero(3, zero_hpz_partition_size=2),
        deepspeed("0.18.2"),
        deepspeed("0.18.3"),
        [zero(3), zero(3, zero_hpz_partition_size=1), zero(2, zero_hpz_partition_size=2)],
        ["zero_hpz_partition_size 2", "remove zero_hpz_partition_size"],
        world_size=8,
    ),
    # 50 numbers are padded to 72 and cut in 8: the last part begins at 63; of 64 numbers it begins inside
    "DeepSpeed#6659": Case(
        zero(3, zero_hpz_partition_size=8) | {"model": {"hidden_size": 50, "head_dim": 8}},
        deepspeed("0.18.3", "0.19.4"),
        deepspeed("0.19.5"),
        [zero(3, zero_hpz_partition_size=8), zero(3, zero_hpz_partition_size=1)],
        ["hidden_size 50", "24 replicas", "remove zero_hpz_partition_size"],
        world_size=24,
    ),
    "DeepSpeed#7775": Case(
        zero(3, zero_quantized_weights=True),
        deepspeed("0.19.4", "0.19.5"),
        deepspeed("0.19.6"),
        [
            zero(3),
            zero(2, zero_quantized_weights=True),
            zero(3, zero_quantized_weights=True) | {"precision": {"dtype": "fp16"}},
        ],
        ["zero_quantized_weights", "dtype bf16", "remove zero_quantized_weights"],
    ),
    "DeepSpeed#8158": Case(
        zero(3, stage3_use_all_reduce_for_fetch_params=True),
        deepspeed("0.19.3"),
        deepspeed("0.19.4"),
        [zero(3), zero(2, stage3_use_all_reduce_for_fetch_params=True)],
        ["stage3_use_all_reduce_for_fetch_params", "remove it"],
    ),
}


def test_every_row_has_a_case() -> None:
    assert [row.thread for row in KNOWN_BAD] == list(CASES)


@pytest.mark.parametrize("row", KNOWN_BAD, ids=lambda row: row.thread)
def test_a_known_bad_combination_is_refused_in_one_sentence(row: KnownBad) -> None:
    case = CASES[row.thread]
    config = case.config()
    layout = resolve_layout(config, case.world_size, case.device)
    for versions in case.bad:
        assert row in matching(config, layout, versions, case.device), versions
        assert row in matching(config, layout, versions), "an unknown device may be this one"
    sentence = row.sentence(config, layout, case.bad[0])
    assert all(fragment in sentence for fragment in [row.thread, row.remedy, *case.fragments]), sentence
    assert "\n" not in sentence and not sentence.endswith(".")
    with pytest.raises(ConfigError) as refused:
        check_known_bad(config, layout, case.bad[0], case.device)
    assert str(refused.value).startswith(f"{next(iter(row.versions))} ")


@pytest.mark.parametrize("row", KNOWN_BAD, ids=lambda row: row.thread)
def test_the_neighbouring_versions_are_not_refused(row: KnownBad) -> None:
    case = CASES[row.thread]
    config = case.config()
    layout = resolve_layout(config, case.world_size, case.device)
    for versions in case.good:
        assert row not in matching(config, layout, versions, case.device), versions
    assert row not in matching(config, layout, {}, case.device), "a package that is not installed"


@pytest.mark.parametrize("row", KNOWN_BAD, ids=lambda row: row.thread)
def test_other_settings_are_not_refused(row: KnownBad) -> None:
    case = CASES[row.thread]
    for settings in case.harmless:
        config = case.config(settings)
        layout = resolve_layout(config, case.world_size, case.device)
        assert row not in matching(config, layout, case.bad[0], case.device), settings
    if row.device is not None:
        config = case.config()
        other: Device = "cpu" if row.device == "cuda" else "cuda"
        layout = resolve_layout(config, case.world_size, other)
        assert row not in matching(config, layout, case.bad[0], other)


def test_several_rows_are_one_line_with_their_number() -> None:
    config = CASES["DeepSpeed#8225"].config()
    with pytest.raises(ConfigError, match=r"DeepSpeed#8203.*\(and 1 more\)$"):
        check_known_bad(config, resolve_layout(config, 2, "cuda"), {"deepspeed": "0.18.0"}, "cuda")


def test_accumulation_alone_takes_several_backward_passes() -> None:
    config = CASES["DeepSpeed#8203"].config({})
    rows = matching(config, resolve_layout(config, 2, "cuda"), {"deepspeed": "0.19.3"}, "cuda")
    assert [row.thread for row in rows] == ["DeepSpeed#8203"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_installed_here_runs_the_quickstart(device: Device) -> None:
    versions = installed_versions()
    assert versions.keys() == {"torch", "deepspeed", "transformers"}
    config = load_config(QUICKSTART)
    check_known_bad(config, resolve_layout(config, 8, device), versions, device)


def test_a_thread_has_an_address() -> None:
    assert KNOWN_BAD[0].url == "https://github.com/deepspeedai/DeepSpeed/issues/8203"
    assert all(row.url for row in KNOWN_BAD)


RULES = {
    **{
        f"{key} has no effect": ({"zero_optimization": {key: True}}, {"zero_optimization": {key: False}})
        for key in OF_DEEPSPEEDS_REDUCTION
    },
    "zenflow": ({"zero_optimization": {"zenflow": {"topk_ratio": 0.1}}}, {"zero_optimization": {"zenflow": None}}),
    "offload_optimizer.ratio": (
        {"zero_optimization": {"offload_optimizer": {"ratio": 0.5}}},
        {"zero_optimization": {"offload_optimizer": {"ratio": 1.0}}},
    ),
    "compute_grad_norm": (
        {"zero_optimization": {"compute_grad_norm": False}},
        {"zero_optimization": {"compute_grad_norm": True}},
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_what_no_version_can_do_is_refused(name: str) -> None:
    bad, good = RULES[name]
    case = CASES["DeepSpeed#7898"]
    with pytest.raises(ValueError, match=name):
        resolve_layout(case.config({"deepspeed": bad}), 2, "cpu")
    resolve_layout(case.config({"deepspeed": good}), 2, "cpu")


def test_the_documentation_shows_the_table() -> None:
    """docs/parity.md is written from the rows; on a failure, what is expected here goes there."""
    rows = ["| versions | with | what goes wrong | remedy |", "|---|---|---|---|"]
    for row in KNOWN_BAD:
        versions = " and ".join(f"{package} {bad}" for package, bad in row.versions.items())
        settings = row.settings + (f" ({row.device})" if row.device else "")
        rows.append(f"| {versions} | {settings} | {row.wrong} ([{row.thread}]({row.url})) | {row.remedy} |")
    table = "\n".join(rows)
    text = (Path(__file__).parents[5] / "docs" / "parity.md").read_text()
    assert table in text, f"\n{table}"
