"""The cases of the benchmark: layouts on two hosts, one replica of every pipeline stage on each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from benchmarks.harness import config_of
from megalite.config import Config

REPLICAS, SEQUENCE = 2, 128


@dataclass(frozen=True)
class LinkCase:
    """A layout whose steps are timed in two ways: its sides.

    Those of ZeRO-1 and 2 are one engine, whose reducer is kept back until backward has ended, or not. Those of ZeRO-3
    are two engines, with two settings of DeepSpeed's section `zero_optimization`.
    """

    name: str
    stages: int = 1
    zero: int = 1
    micro_batches: int = 1
    rows: int = 8  # of a micro-batch
    sleep_s: float = 0.0  # of each backward pass of a rank, whose model is then of no size; 0: it computes
    settings: tuple[dict[str, Any], ...] = ({},)

    @property
    def ranks(self) -> int:
        return REPLICAS * self.stages

    def config(self, zero_optimization: dict[str, Any]) -> Config:
        """Returns the config of a side."""
        hidden = 128 if self.sleep_s else 512
        model = {
            "vocab_size": 1024,
            "hidden_size": hidden,
            "intermediate_size": 11 * hidden // 4,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "max_position_embeddings": SEQUENCE,
        }
        parallel = {
            "pipeline_parallel_size": self.stages,
            "zero_stage": self.zero,
            "gradient_bucket_size": 7 * hidden**2,  # about half a block
        }
        options: dict[str, Any] = {"deepspeed": {"zero_optimization": zero_optimization}, "parallel": parallel}
        rows = self.micro_batches * self.rows * REPLICAS
        return config_of(model, rows, SEQUENCE, micro_batch=self.rows, precision={"dtype": "fp32"}, **options)


SLEEPS: dict[str, Any] = {"sleep_s": 1.0, "rows": 1}
OVERLAP = ({"overlap_comm": False}, {"overlap_comm": True})
CASES = [
    LinkCase("ZeRO-1, sleeps", **SLEEPS),
    LinkCase("ZeRO-1"),
    LinkCase("ZeRO-1, 4 micro-batches", micro_batches=4, rows=2),
    LinkCase("ZeRO-1, pp 2, 4 micro-batches, sleeps", stages=2, micro_batches=4, **SLEEPS),
    LinkCase("ZeRO-1, pp 2, 4 micro-batches", stages=2, micro_batches=4, rows=4),
    LinkCase("ZeRO-2, 4 micro-batches, sleeps", zero=2, micro_batches=4, **SLEEPS),
    LinkCase("ZeRO-3, one setting twice, sleeps", zero=3, settings=({}, {}), **SLEEPS),
    LinkCase("ZeRO-3, overlap_comm, sleeps", zero=3, settings=OVERLAP, **SLEEPS),
]


@dataclass(frozen=True)
class LinkStep:
    """One step as rank 0 saw it. What is about its reducer is there under ZeRO-1 and 2 only."""

    step_s: float
    backward_s: float  # of the last backward pass
    sent_bytes: int  # by the host
    sent: float = 0.0  # share of them that had left the host when that pass ended
    exposed_s: float = 0.0  # from then on until all gradients were reduced
    complete_s: tuple[float, ...] = ()  # when each bucket had its last gradient, from the end of backward on
    sizes: tuple[int, ...] = ()  # of these buckets

    @property
    def hideable_s(self) -> float:
        """The part of the reduction that could run beside backward, of a step that reduced everything after it."""
        end = -float("inf")
        for complete, size in zip(self.complete_s, self.sizes, strict=True):
            end = max(end, complete) + self.exposed_s * size / sum(self.sizes)
        return self.exposed_s - max(0.0, end)
