"""Results that are read a step late: each step's record, the guard's decisions and the weights are those of a run that
reads each result at once, to the bit. A device that works behind the host is played by the flag alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from megalite.checkpoint.engine_state import own_blocks
from megalite.config import Config
from megalite.engine.engine import Engine
from megalite.engine.parameter_state import optimizer_step_count
from megalite.engine.step_result import Readback
from megalite.resilience.stop_requests import StopRequests
from megalite.training.state import TrainingPreempted, TrainingStopped
from tests.helpers import recorded_run
from tests.helpers.engine_cases import Case
from tests.helpers.planting import Plant, planted
from tests.helpers.rank_pool import run_ranks
from tests.helpers.recorded_run import KeptLog, train_case

STEPS, SAVED_EVERY, BAD = 9, 4, 6  # the sixth step is bad, and the seventh is on its way when that is known
SPOILED = Plant("gradient", "model.layers.4.self_attn.qkv_proj.weight", 1, 1, lasts=False)
NUMBERS = ("step", "loss", "grad_norm", "learning_rate", "samples", "tokens_seen", "skipped", "skipped_steps")
MOE = {"num_experts": 7, "num_experts_per_tok": 2, "moe_intermediate_size": 29}


class _Log(KeptLog):
    def __init__(self) -> None:
        super().__init__()
        self.sentences: list[str] = []
        self.drawn: list[int] = []  # how many batches had been taken at each record

    def on_intervention(self, facts: dict[str, Any], sentence: str) -> None:
        self.sentences.append(sentence)


def _config(case: Case, run_dir: Path, policy: str) -> Config:
    values = case.config().model_dump(mode="json") | {"run_dir": str(run_dir), "guards": {"not_finite": policy}}
    values["checkpoint"]["interval"], values["monitor"]["log_interval"] = SAVED_EVERY, 1
    return Config.model_validate(values)


def _train(
    rank: int, case: Case, run_dir: Path, policy: str, *, is_late: bool, has_bad_step: bool = True, asks: bool = False
) -> Any:
    log, drawn, engines = _Log(), [0], []

    def batches_of(engine: Engine, batches: list[Any]) -> Iterator[Any]:
        engine.runs_ahead = is_late
        engines.append(engine)
        return draws(engine, batches)

    def draws(engine: Engine, batches: list[Any]) -> Iterator[Any]:
        for batch in batches:
            drawn[0] += 1
            if asks and drawn[0] == 3 and rank == 0:
                (run_dir / "profile_next").touch()
            is_bad = has_bad_step and drawn[0] == BAD
            with planted(engine, case, rank, SPOILED) if is_bad else nullcontext():
                yield batch

    on_step = log.on_step
    log.on_step = lambda record: (on_step(record), log.drawn.append(drawn[0]))  # type: ignore[method-assign,assignment]
    run_dir.mkdir(exist_ok=True)
    began, ending = perf_counter(), ""
    try:
        train_case(case, _config(case, run_dir, policy), log, batches_of)
    except (TrainingStopped, TrainingPreempted) as error:
        ending = str(error)
    assert sum(record["step_time_s"] for record in log.records) <= perf_counter() - began, "no second counts twice"
    state = _state_of(engines[-1])
    engines[-1].deepspeed.destroy()
    told = [{name: record[name] for name in NUMBERS} | {"experts": record.get("experts")} for record in log.records]
    return {"told": told, "sentences": log.sentences, "state": state, "ending": ending}, log.drawn


def _state_of(engine: Engine) -> dict[str, bytes]:
    """The bits of weights, moments and biases of experts."""
    blocks = own_blocks(engine).blocks
    bits = {block.key: block.numbers.detach().contiguous().view(torch.uint8).numpy().tobytes() for block in blocks}
    return bits | {"steps": str(optimizer_step_count(engine)).encode()}


def _both(rank: int, cases: list[Case], run_dir: Path, policies: list[str]) -> list[Any]:
    found = []
    for number, (case, policy) in enumerate(zip(cases, policies, strict=True)):
        folders = [run_dir / f"{number} {name}" for name in ("now", "late")]
        found.append(
            [_train(rank, case, folder, policy, is_late=folder is folders[1]) for folder in folders]  # the same batches
        )
    return found


CASES = [
    Case(dp=2, accumulation=2, steps=STEPS, optimizer="muon"),
    Case(tp=2, dtype="bf16", steps=STEPS, optimizer="sgd"),
    Case(pp=2, accumulation=2, dtype="bf16", steps=STEPS, document_mask=True),
    Case(dp=2, dtype="bf16", steps=STEPS, model=MOE, router={"bias_rate": 0.02}),
]


def test_a_late_result_is_that_of_its_own_step(tmp_path: Path) -> None:
    """Whatever the guard makes of a bad step: skip it, go back to step 4, or stop."""
    found = run_ranks(_both, 2, CASES, tmp_path, ["skip", "rollback", "stop", "rollback"])
    for ranks in found:
        for case, ((now, drawn_now), (late, drawn_late)) in zip(CASES, ranks, strict=True):
            assert late.keys() == now.keys()
            for name, value in now.items():
                assert late[name] == value, f"{case}: late results are others in {name}"
            assert len(now["sentences"]) == 1 and "qkv_proj" in now["sentences"][0], case
            assert drawn_now[:6] == [1, 2, 3, 4, 5, 6], case
            assert drawn_late[:6] == [2, 3, 3, 4, 6, 7], f"{case}: read at once is only what is saved, here step 4"
        (of_experts, _), _ = ranks[-1]
        if ranks is found[0]:  # who gathers
            skipped = [record["skipped"] for record in of_experts["told"]]
            assert [record["experts"] is None for record in of_experts["told"]] == skipped and any(skipped)


def _newest_is_read(rank: int, run_dir: Path) -> list[list[float]]:
    """The losses as they are, and as they would be told by numbers that the next step has written over."""
    made: list[Readback] = []
    original, numbers = Readback.__init__, Readback.numbers.func

    def keep(self: Readback, *arguments: Any) -> None:
        original(self, *arguments)
        made.append(self)

    losses = []
    for number, newest in enumerate((False, True)):
        change = patch.object(Readback, "numbers", property(lambda self: numbers(made[-1] if newest else self)))  # noqa: B023
        with patch.object(Readback, "__init__", keep), change:
            case = Case(steps=3)
            told, _ = _train(rank, case, run_dir / str(number), "skip", is_late=True, has_bad_step=False)
        losses.append([record["loss"] for record in told["told"]])
    return losses


def test_a_loss_told_of_another_step_would_be_seen(tmp_path: Path) -> None:
    ((losses, shifted),) = run_ranks(_newest_is_read, 1, tmp_path)
    assert shifted != losses and shifted[0] == losses[1]


def _preempted(rank: int, run_dir: Path) -> Any:
    with patch.object(recorded_run, "StopRequests", lambda *_: StopRequests(1e-9, 0.0)):
        return _train(rank, Case(dp=2, steps=STEPS), run_dir, "skip", is_late=True, has_bad_step=False)[0]


def test_a_run_that_is_asked_to_end_reads_its_last_step_first(tmp_path: Path) -> None:
    for found in run_ranks(_preempted, 2, tmp_path):
        assert [record["step"] for record in found["told"]] == [1]
        assert "the state of step 1 is saved" in found["ending"]


def _profiled(rank: int, run_dir: Path) -> list[str]:
    _train(rank, Case(steps=STEPS), run_dir, "skip", is_late=True, has_bad_step=False, asks=True)
    return sorted(path.name for path in (run_dir / "profile").iterdir())


def test_a_profile_asked_for_is_that_of_the_next_step_that_begins(tmp_path: Path) -> None:
    """Ranks meet once more before that step, because the one on its way is read first."""
    (folders,) = run_ranks(_profiled, 1, tmp_path)
    assert len(folders) == 1, folders
