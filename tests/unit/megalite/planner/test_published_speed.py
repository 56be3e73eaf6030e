"""Published speeds: what the catalogue says is plausible and in the committed tables, and the best of them is found."""

from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner.published import nodes_of
from megalite.config import ModelConfig
from megalite.config.sections import PrecisionConfig
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import Accelerator, PublishedSpeed, catalogue, find_link
from megalite.planner.published_speed import beside_published
from megalite.planner.workload import ParallelLayout, TrainingWorkload

TABLES = Path(__file__).parents[4] / "benchmarks" / "published"
ENTRIES = [(name, one) for name, kind in catalogue().accelerators.items() for one in kind.published]


def _kind(**tflops: float) -> Accelerator:
    published = [
        PublishedSpeed(
            system=f"system {place}",
            model="8B",
            precision=name.partition("_")[0],  # type: ignore[arg-type]
            model_tflops=value,
            counted="all",
            sequence_length=4096,
            accelerators=8,
            source="here",
        )
        for place, (name, value) in enumerate(tflops.items())
    ]
    return catalogue().accelerators["H100"].model_copy(update={"published": published})


@pytest.mark.parametrize(("name", "entry"), ENTRIES, ids=lambda one: one if isinstance(one, str) else one.system)
def test_a_published_speed_is_below_the_peak(name: str, entry: PublishedSpeed) -> None:
    peak = catalogue().accelerators[name].peak_tflops["bf16"] * (2 if entry.precision == "fp8" else 1)
    assert 0.25 * peak < entry.model_tflops < 0.7 * peak


def test_speeds_in_16_bits_are_those_of_the_committed_tables() -> None:
    with (TABLES / "mosaicml_fsdp_all.csv").open() as file:
        rows = [(float(row["model_tflop"]), row["model"].upper(), row["gpu"]) for row in csv.DictReader(file)]
    with (TABLES / "megatron_core_h100_weak_scaling.csv").open() as file:
        rows += [(float(row["tflops_per_gpu"]), row["model"], "h100_80gb") for row in csv.DictReader(file)]
    with (TABLES / "llama3_table4_h100.csv").open() as file:
        rows += [(float(row["tflops_per_gpu"]), "405B", "h100_80gb") for row in csv.DictReader(file)]
    names = {"A100-40GB": "a100_40gb", "A100-80GB": "a100_80gb", "H100": "h100_80gb"}
    for name, one in ENTRIES:
        assert one.precision == "fp8" or (one.model_tflops, one.model, names[name]) in rows, one


def test_the_best_is_of_the_same_precision() -> None:
    kind = _kind(bf16_1=400.0, bf16_2=500.0, fp8=700.0)
    for dtype, best in {"bf16": "published best: 500 in", "fp16": "published best: 500 in", "fp32": None}.items():
        said = beside_published("H100", kind, PrecisionConfig.model_validate({"dtype": dtype}), 1.0, is_measured=True)
        assert (said is None) == (best is None) and (best or "") in (said or ""), "fp32 beside fp8 says nothing"


def test_a_sentence_says_both_and_nothing_is_said_without_a_published_speed() -> None:
    said = beside_published("H100", _kind(bf16=500.0), PrecisionConfig(), 432.1, is_measured=True)
    assert said == (
        "measured 432.1 model TFLOP/s of each H100 in bf16; published best: 500 in bf16 "
        "(system 0, 8B, sequences of 4,096, 8 of them)"
    )
    beyond = beside_published("H100", _kind(bf16=500.0), PrecisionConfig(), 502.0, is_measured=False)
    assert beyond is not None and beyond.endswith("; take a prediction that nobody has reached as a limit")
    assert beside_published("cpu", _kind(), PrecisionConfig(), 1.0, is_measured=True) is None


def test_a_run_in_float8_stands_beside_others_in_float8() -> None:
    kind, precision = _kind(bf16=500.0, fp8=700.0), PrecisionConfig(float8="rowwise")
    measured, predicted = (beside_published("H100", kind, precision, 600.0, is_measured=one) for one in (True, False))
    assert measured is not None and predicted is not None
    assert measured.startswith("measured 600 model TFLOP/s of each H100 in fp8; published best: 700 in fp8 (")
    assert predicted.startswith("predicted 600 model TFLOP/s of each H100 in fp8; published best: 700 in")


def test_what_is_computed_here_is_not_said_to_be_published() -> None:
    kind = catalogue().accelerators["H200"]
    said = beside_published("H200", kind, PrecisionConfig(float8="rowwise"), 600.0, is_measured=True)
    assert said is not None and said.endswith("; TFLOP/s computed here from published tokens/s)")
    (one,) = kind.published
    assert one.tokens_per_s is not None and one.model_tflops == pytest.approx(one.tokens_per_s * 51.5e9 / 1e12, abs=0.5)


@pytest.mark.parametrize(("name", "kind"), catalogue().accelerators.items())
def test_an_accelerator_names_known_links_and_its_source(name: str, kind: Accelerator) -> None:
    assert kind.source and all(find_link(link).source for link in (kind.intra_node, kind.inter_node, kind.host_link))
    assert kind.is_fitted or kind.efficiency == Accelerator.model_fields["efficiency"].default, "a guess is the default"
    assert kind.peak_tflops.get("fp8", 2 * kind.fastest_tflops) == pytest.approx(2 * kind.fastest_tflops, rel=0.03)


def test_float8_makes_products_with_weights_faster_where_it_is_known() -> None:
    """And nothing else: not attention, not the head."""
    sizes = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    layout = ParallelLayout(tensor_parallel_size=2, data_parallel_size=4)
    job = TrainingWorkload(ModelConfig(num_attention_heads=32, num_key_value_heads=8, **sizes), layout, 8192, 128)
    for name, is_faster in (("H100", True), ("A100-80GB", False)):
        cluster = nodes_of(8, name)
        plain, fast = step_time(job, cluster), step_time(replace(job, in_float8=True), cluster)
        assert (fast.parts["matrix products"] < 0.75 * plain.parts["matrix products"]) == is_faster
        assert {name for name, size in fast.parts.items() if size != plain.parts[name]} <= {"matrix products"} | (
            {"replicas", "tensor collectives"} if is_faster else set()
        ), "less computing hides less"
