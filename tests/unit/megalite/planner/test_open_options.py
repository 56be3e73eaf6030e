"""The options that a run chooses for its layout: schedules against closed forms, the format of gradients, and what is
kept."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megalite.config import Config
from megalite.config.auto import SCHEDULE, WIRE
from megalite.config.rules.pipeline import FEWEST_CHUNKS
from megalite.planner.hardware import Cluster, ClusterFile, Link, cluster_of
from megalite.planner.open_options import choose_open, summed_in_bf16
from megalite.schedules.simulation import bubble_closed_form
from megalite.schedules.tables import Schedule

MODEL = {  # nothing but its blocks takes time, and no stage more than another
    **{"vocab_size": 8, "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 2048},
}


def config_of(p: int, m: int, dp: int = 1, **sections: dict[str, Any]) -> Config:
    values: dict[str, Any] = {
        "run_dir": "run",
        "model": MODEL,
        "data": {"path": "x"},
        "parallel": {"pipeline_parallel_size": p, "data_parallel_size": dp, **sections.pop("parallel", {})},
        "training": {"global_batch_size": m * dp, "micro_batch_size": 1, "sequence_length": 2048, "steps": 2},
    }
    return Config.model_validate(values | sections)


def cluster_for(p: int, dp: int = 1, gb_per_s: float = 1e6) -> Cluster:
    """Links that take no time, if nothing else is said, and memory for all."""
    described = ClusterFile(accelerator="H100", nodes=1, accelerators_per_node=p * dp)
    link = Link(gb_per_s=gb_per_s, latency_us=0)
    cluster = cluster_of(described, "test").with_figures(memory_gib=1000)
    return cluster.model_copy(update={"intra_node": link, "inter_node": link})


@pytest.mark.parametrize("factor", [1, 2, 4])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_the_fastest_schedule_is_taken_and_the_idle_share_of_each_told(p: int, factor: int) -> None:
    """1F1B and interleaved as Narayanan 2021 counts, to the digit that is told. The others' closed forms are of passes
    that take equally long, which attention and the head keep them from by a tenth."""
    config = config_of(p, m := p * factor, performance={"compile": "none"})
    options, (said,) = choose_open(config, cluster_for(p))
    told = {name: float(share) / 100 for name, share in re.findall(r"([a-z0-9-]+) ([\d.]+)%", said.partition(";")[0])}
    for schedule in Schedule:
        if schedule == "dualpipev" and factor == 1:
            assert schedule not in told, "it needs two micro-batches for each stage"
            continue
        form = bubble_closed_form(schedule, p, m, FEWEST_CHUNKS[schedule])
        is_exact = schedule in ("1f1b", "interleaved")
        is_close = told[schedule] == pytest.approx(form / (1 + form), abs=6e-4 if is_exact else 0.045)
        assert is_close or (schedule == "zb-v" and factor == 1), (schedule, told, form / (1 + form))
    taken = options[SCHEDULE]
    assert said.startswith(f"schedule: {taken} ") and told[taken] <= min(told.values()) + 0.01
    is_gain = 1 - min(told.values()) > (1 - told["1f1b"]) * 1.037
    assert (taken != "1f1b") == is_gain


def test_compiled_blocks_are_not_given_up() -> None:
    options, (said,) = choose_open(config_of(4, 8), cluster_for(4))
    assert options == {SCHEDULE: "interleaved"} and "no compiled blocks" in said and "zb-v" not in said
    cpu = cluster_for(4).model_copy(
        update={"accelerator": cluster_for(4).accelerator.model_copy(update={"device": "cpu"})}
    )
    assert "zb-v" in choose_open(config_of(4, 8), cpu)[1][0], "there nothing is compiled"


def test_what_is_named_or_was_trained_with_is_kept() -> None:
    for config in (config_of(1, 8), config_of(4, 8, parallel={"pipeline_schedule": "1f1b"})):
        assert not config.open_options and config.parallel.pipeline_schedule == "1f1b"
    options, (said,) = choose_open(config_of(4, 8), cluster_for(4), former="1f1b")
    assert options == {SCHEDULE: "1f1b"} and "as in the newest checkpoint" in said
    odd = choose_open(config_of(4, 6), cluster_for(4), former="interleaved")[0]
    assert odd == {SCHEDULE: "1f1b"}, "interleaved is not legal with six micro-batches, and nothing else compiled"
    assert config_of(4, 8).to_yaml() == config_of(4, 8, parallel={"pipeline_schedule": "auto"}).to_yaml()


@pytest.mark.parametrize(("gb_per_s", "dtype"), [(1e6, "fp32"), (10, "bf16")])
def test_the_wire_takes_bf16_where_fp32_keeps_a_step_waiting(gb_per_s: float, dtype: str) -> None:
    config = config_of(1, 8, 4, precision={"gradient_reduction_dtype": "auto"})
    options, (said,) = choose_open(config, cluster_for(1, 4, gb_per_s))
    assert options == {WIRE: dtype} and f"{summed_in_bf16(4):.2%} (rms)" in said
    exact = config_of(1, 8, 4, precision={"gradient_reduction_dtype": "auto", "dtype": "fp32"})
    assert choose_open(exact, cluster_for(1, 4, gb_per_s))[0] == {WIRE: "fp32"}, "whose rule refuses another"


@pytest.mark.parametrize("replicas", [2, 4, 8, 32])
def test_the_error_of_a_sum_in_bf16_is_as_told(replicas: int) -> None:
    """A ring's sums of independent gradients, against float64. A sum of two numbers of the same unit in the last place
    errs by half of its own or by nothing, which is more than the even spread that is taken: 6 %."""
    numbers = torch.randn(replicas, 200_000, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    summed = numbers[0].bfloat16()
    for one in numbers[1:]:
        summed = (summed.float() + one.bfloat16().float()).bfloat16()
    exact = numbers.sum(0)
    error = (summed.double() - exact).square().mean().sqrt() / exact.square().mean().sqrt()
    assert float(error) == pytest.approx(summed_in_bf16(replicas), rel=0.06)
