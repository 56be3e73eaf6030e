"""Folders of runs that recorded all that a page shows, made without training."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from megalite.config import Config
from megalite.monitor.goodput import CATEGORIES
from megalite.monitor.steps.parts import PARTS
from megalite.monitor.steps.timeline import RankTimeline, write_timeline
from megalite.schedules.simulation import PipelineTimes, simulate_schedule
from megalite.schedules.tables import Schedule
from megalite.tracing.tape import Collective
from tests.helpers.simulated_ranks import ranks_of

STARTED = 1.7e9
KEPT_STEP = 10


def config_of(run_dir: Path, **sections: Any) -> Config:
    """The config of a small model; `sections` replace its own."""
    model = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 4}
    values = {
        "run_dir": str(run_dir),
        "model": {**model, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
        "data": {"path": "unused"},
        "precision": {"dtype": "fp32"},
        "training": {"global_batch_size": 32, "micro_batch_size": 1, "sequence_length": 32, "steps": 10_000},
    }
    return Config.model_validate(values | sections)


def write_run(
    run_dir: Path, steps: int = 40, stages: int = 2, replicas: int = 2, tensors: int = 1, text: str = "node"
) -> None:
    """Writes a run that has ended; `text` stands wherever a stranger could put one."""
    run_dir.mkdir(parents=True)
    world, chance = stages * replicas * tensors, random.Random(0)
    (run_dir / "config.yaml").write_text(config_of(run_dir).to_yaml())
    records = [_record(step, chance) for step in range(1, steps + 1)]
    _write_lines(run_dir / "metrics.jsonl", records)
    lines = [_breakdown(step, stages, replicas * tensors, text) for step in range(1, steps + 1)][-50:]
    _write_lines(run_dir / "steps.jsonl", lines)
    _write_lines(run_dir / "events.jsonl", _events(records, text))
    (run_dir / "receipt.json").write_text(json.dumps(_receipt(stages, replicas, tensors, world, text)))
    write_timelines(run_dir, stages, replicas, tensors, text)


def write_timelines(run_dir: Path, stages: int, replicas: int, tensors: int, text: str) -> None:
    """Writes what all ranks did in step KEPT_STEP under 1F1B of four micro-batches."""
    times = PipelineTimes([0.010] * stages, [0.020] * stages, 0.001)
    simulated = ranks_of(simulate_schedule(Schedule.ONE_F_ONE_B, times, 4), KEPT_STEP)
    for stage, timeline in simulated.items():
        for peer in range(replicas * tensors):
            data, tensor = divmod(peer, tensors)
            rank = stage * replicas * tensors + peer
            sizes = {"tensor_parallel_size": tensors, "data_parallel_size": replicas}
            place = {"rank": rank, "data": data, "tensor": tensor, "host": f"{text} {rank // 8}"}
            owner = timeline.owner.model_copy(update=sizes | place)
            write_timeline(run_dir, _with_collective(replace(timeline, owner=owner)))


def _with_collective(timeline: RankTimeline) -> RankTimeline:
    """Adds a collective that takes the second half of the first forward pass."""
    first = next(span for span in timeline.spans() if str(span.note.operation) == "forward")
    began = (first.start + first.end) / 2
    return replace(timeline, collectives=[Collective(began, first.end - began, "tensor", "all_reduce", 4096)])


def _record(step: int, chance: random.Random) -> dict[str, Any]:
    parts = {name: round(chance.random() / 50, 9) for name in PARTS}
    record = {
        "step": step,
        "time": STARTED + 0.3 * step,
        "loss": 6 / step**0.1 + chance.random(),
        "grad_norm": chance.lognormvariate(0, 1),
        "learning_rate": chance.random() / 1000,
        "tokens_seen": 1024 * step,
        "tokens_per_second": 9000 + 1000 * chance.random(),
        "samples_per_second": 100 + chance.random(),
        "model_flops_utilization": 0.4123,
        "step_time_s": 0.25 + chance.random() / 10,
        "memory_peak_mib": 400.0 + step / 1e4,
        "skipped": step == 7,
        "goodput": 0.9 - chance.random() / 10,
        "wall_s": sum(parts.values()),
        "parts_s": parts,
    }
    return record | ({"evaluation_loss": 5.5 - step / 1e5} if step % 10 == 0 else {})


def _breakdown(step: int, stages: int, ranks: int, text: str) -> dict[str, Any]:
    mean_s = {"forward": 0.05, "backward": 0.1, "pipeline_wait": 0.03, "optimizer": 0.004}
    if stages > 8:
        mean_s = {name: 0.0123 for name in PARTS}
    of_stages = [
        {
            "stage": stage,
            "mean_s": mean_s | {"backward": 0.1 + stage / 100},
            "max_s": {},
            "idle_ratio": 0.2,
            "slowest_rank": stage * ranks,
            "communication": [
                {"axis": text, "operation": "all_reduce", "calls": 52.0, "bytes": 3_407_872.0, "seconds": 0.0187}
            ],
        }
        for stage in range(stages)
    ]
    return {"step": step, "steps": 1, "wall_s": 0.187, "stages": of_stages}


def _events(records: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    last = len(records)
    slow = {"rank": 1, "stage": 0, "host": text, "part": "forward", "sentence": f"rank 1 on {text} is slow"}
    return [
        {"time": STARTED, "event": "started", "step": 0, "total_steps": last, "host": text, "process": 2**22 + 1},
        {"time": STARTED + 1, "event": "saved", "step": 5, "bytes": 1000, "note": text},
        {"time": STARTED + 1, "event": "started", "step": 5, "total_steps": last, "host": text, "process": 2**22 + 1},
        {"time": STARTED + 2, "event": "slow_rank", "step": 8, **slow},
        {"time": STARTED + 0.3 * last, "event": "ended", "session_s": 12.0},
    ]


def _receipt(stages: int, replicas: int, tensors: int, world: int, text: str) -> dict[str, Any]:
    predicted = {"matrix products": 0.09, "pipeline bubble": 0.02, "between stages": 0.002, "optimizer": 0.003}
    return {
        "versions": {"megalite": "0.1.0", "torch": text},
        "machine": {"host": text, "platform": "Linux"},
        "command": ["launch/train.py", f"run.yaml {text}", "--hub-token", "hidden-value"],
        "layout": {
            "tensor_parallel_size": tensors,
            "pipeline_parallel_size": stages,
            "data_parallel_size": replicas,
            "zero_stage": 1,
        },
        "goodput": {
            "goodput": 0.8125,
            "sessions": 2,
            "lost_steps": 3,
            "seconds": {name: 0.0 for name in CATEGORIES} | {"productive": 65.0, "startup": 10.0, "lost": 5.0},
        },
        "prediction": {
            "step_time_s": 0.115,
            "parts_s": predicted,
            "rough": None,
            "memory": [{"stage": stage, "peak_mib": 420.0 + stage} for stage in range(stages)],
        },
        "measured": {"step_time_s": 0.3, "ranks": [{"peak_mib": 400.0 + rank / 10} for rank in range(world)]},
    }


def _write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
