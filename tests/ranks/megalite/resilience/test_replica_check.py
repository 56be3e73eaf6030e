"""One flipped bit in one copy of one weight is found, named, and never saved; healthy runs are left alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalite.checkpoint.manifest import Manifest
from megalite.checkpoint.saver import Saved
from megalite.config import Config, resolve_layout
from megalite.engine.build import build_engine
from megalite.engine.deepspeed.internals import fp32_fragment, resident_weights
from megalite.engine.engine import Engine
from megalite.monitor.observer import Observer
from megalite.resilience import replica_check as replicas
from megalite.resilience.guards import Guard
from megalite.resilience.replica_check import INTEGERS, Disagreement, Holder, bit_hash, explain, find_disagreements
from megalite.resilience.stop_requests import StopRequests
from megalite.training.checkpoints import Checkpoints
from megalite.training.loop import TrainerContext, train
from megalite.training.state import TrainingStopped, TrainState
from models.decoder import decoder_layers
from tests.helpers.engine_cases import Batch, Case, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import SilentLog

TIED = {"tie_word_embeddings": True}
MATRIX = "model.layers.2.mlp.down_proj.weight"
NORM = "model.layers.0.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 29}
STACK = "model.layers.2.mlp.experts.down_proj.weight"


def flip(numbers: Tensor, index: int = 3, bit: int = 0) -> None:
    """Flips one bit, by default the last of the mantissa, where no loss would show it."""
    words = numbers.detach().view(INTEGERS[numbers.element_size()]).flatten()
    words[index] ^= torch.ones((), dtype=torch.int64).bitwise_left_shift(bit).to(words.dtype)


def exact_hash(numbers: Tensor) -> int:
    words = numbers.view(INTEGERS[numbers.element_size()]).flatten().tolist()
    total = sum((2 * index + 1) * word for index, word in enumerate(words)) % (1 << 64)
    return total - (1 << 64) if total >= 1 << 63 else total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_hash_sees_every_bit_every_pair_and_every_exchange(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Zeros of both signs and NaN payloads too; chunks of 4 words, so that pairs lie in one and in two of them."""
    monkeypatch.setattr(replicas, "CHUNK", 4)
    numbers = torch.tensor([0.0, 1.5, float("nan"), float("inf"), 0.0, -1.5, 1.5, float("nan"), 3e-5]).to(dtype)
    whole = int(bit_hash(numbers))
    assert whole == exact_hash(numbers)
    spots = [(index, bit) for index in range(len(numbers)) for bit in range(8 * numbers.element_size())]
    for first, one in enumerate(spots):
        damaged = numbers.clone()
        flip(damaged, *one)
        assert int(bit_hash(damaged)) != whole, one
        index, bit = one
        for other in ((index + 1) % len(numbers), (index + 4) % len(numbers)):  # the same bit elsewhere: XOR is blind
            twice = damaged.clone()
            flip(twice, other, bit)
            assert int(bit_hash(twice)) != whole, (one, other)
        twice = damaged.clone()
        flip(twice, *spots[first - 7])
        assert int(bit_hash(twice)) != whole, (one, spots[first - 7])
    exchanged = numbers[[0, 1, 2, 3, 4, 8, 6, 7, 5]]
    assert int(bit_hash(exchanged)) != whole


def test_a_hash_of_many_words_is_exact() -> None:
    numbers = torch.randn(3000, 701)  # more than one real chunk
    assert int(bit_hash(numbers)) == exact_hash(numbers)
    assert int(bit_hash(numbers[:0])) == 0
    assert int(bit_hash(numbers.t())) == exact_hash(numbers.t().contiguous())


@dataclass(frozen=True)
class Damage:
    """One bit in one copy, and what must be said about it."""

    rank: int
    parameter: str
    named: tuple[int, ...]  # ranks; several without a majority, none: cannot be seen
    is_fp32: bool = False


@dataclass(frozen=True)
class Layout:
    case: Case
    damages: tuple[Damage, ...]
    keeps_small_whole: bool = False  # ZeRO-3 as it comes; the parity tests tell it to cut everything

    def config(self) -> Config:
        config = self.case.config()
        return config.model_copy(update={"deepspeed": {}}) if self.keeps_small_whole else config

    def __str__(self) -> str:
        return f"{self.case}{' small ones whole' if self.keeps_small_whole else ''}"


def engine_of(case: Case, config: Config) -> Engine:
    layers = decoder_layers(config.model, config.recompute.mode)
    return build_engine(layers, config, resolve_layout(config, case.world_size, "cpu"))


def numbers_of(engine: Engine, name: str, is_fp32: bool) -> Tensor:
    if (tied := engine.tied_weight) is not None and tied.name == name:
        return tied.weight.detach()
    parameter = dict(engine.parameters())[name]
    numbers = fp32_fragment(parameter) if is_fp32 else resident_weights(parameter)
    assert numbers is not None
    return numbers


def _damage(rank: int, layout: Layout) -> list[list[Disagreement]]:
    """Verdicts: at the start, after training, and after each damage; every damage is mended again."""
    case = layout.case
    engine = engine_of(case, layout.config())
    verdicts = [find_disagreements(engine)]
    for batch in global_batches(case):
        engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
    verdicts.append(find_disagreements(engine))
    for damage in layout.damages:
        if rank == damage.rank:
            flip(numbers_of(engine, damage.parameter, damage.is_fp32))
        verdicts.append(find_disagreements(engine))
        if rank == damage.rank:
            flip(numbers_of(engine, damage.parameter, damage.is_fp32))
    verdicts.append(find_disagreements(engine))
    return verdicts


# ranks count tensor-parallel neighbours first, then replicas, then stages
LAYOUTS = [
    # the norm has four copies: the vote goes over tensor-parallel ranks and replicas together
    Layout(Case(tp=2, dp=2, zero=1), (Damage(3, MATRIX, (1, 3)), Damage(2, NORM, (2,)))),
    Layout(
        Case(tp=2, dp=2, zero=1, dtype="bf16"),
        (Damage(3, MATRIX, (1, 3)), Damage(2, NORM, (2,)), Damage(1, NORM, (0, 1), True)),
    ),
    Layout(Case(dp=3, zero=2), (Damage(1, MATRIX, (1,)), Damage(2, NORM, (2,)))),
    Layout(Case(dp=3, zero=2, dtype="bf16"), (Damage(0, MATRIX, (0,)),)),
    # replicas 1 and 3 hold the same experts, 0 and 2 others
    Layout(Case(dp=4, ep=2, micro_batch=1, model=EXPERTS), (Damage(3, STACK, (1, 3)), Damage(2, NORM, (2,)))),
    Layout(Case(tp=2, pp=2, accumulation=2, model=TIED), (Damage(3, EMBEDDING, (1, 3)), Damage(0, NORM, (0, 1)))),
    Layout(
        Case(tp=2, pp=2, accumulation=2, model=TIED, dtype="bf16"),
        (Damage(3, EMBEDDING, (1, 3)), Damage(0, NORM, (0, 1)), Damage(1, NORM, (0, 1), True)),
    ),
    Layout(
        Case(pp=2, dp=2, accumulation=2, zero=2, model=TIED, schedule="zero-bubble"),
        (Damage(3, EMBEDDING, (3,)), Damage(1, MATRIX, (0, 1))),
    ),
    # stages that the model passes twice hold the first and the last layer on one rank, and so the weight once
    Layout(Case(pp=2, accumulation=2, model=TIED, schedule="zb-v"), (Damage(0, EMBEDDING, ()),)),
    # ZeRO-3 holds a matrix once: no copy, no comparison
    Layout(Case(tp=2, dp=2, zero=3), (Damage(3, MATRIX, ()), Damage(2, NORM, (2, 3)), Damage(1, NORM, (0, 1), True))),
    Layout(
        Case(tp=2, dp=2, zero=3, dtype="bf16"),
        (Damage(3, MATRIX, ()), Damage(2, NORM, (2, 3)), Damage(1, NORM, (0, 1), True)),
    ),
    Layout(Case(tp=2, dp=2, zero=3, dtype="bf16"), (Damage(2, NORM, (2,)),), keeps_small_whole=True),
    Layout(Case(tp=4, sequence_parallel=True, sequence=36, model={"num_key_value_heads": 4}), (Damage(2, NORM, (2,)),)),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_flipped_bit_is_found_and_named(layout: Layout) -> None:
    answers = run_ranks(_damage, layout.case.world_size, layout)
    for rank, answer in enumerate(answers):
        assert answer == answers[0], f"{layout}: rank {rank} and rank 0 come to different verdicts"
    at_start, healthy, *damaged, mended = answers[0]
    assert at_start == healthy == mended == [], f"{layout}: a false alarm"
    for damage, found in zip(layout.damages, damaged, strict=True):
        where = f"{layout} {damage}"
        if not damage.named:
            assert found == [], where
            continue
        (one,) = found
        assert (one.parameter, one.has_majority) == (damage.parameter, len(damage.named) == 1), where
        assert tuple(holder.rank for holder in one.candidates) == damage.named, where
        assert one.is_fp32 == damage.is_fp32, where


def _damaged_padding(rank: int, case: Case) -> list[Disagreement]:
    engine = engine_of(case, case.config())
    parameter: Any = dict(engine.parameters())[NORM]
    if rank == case.world_size - 1:
        assert case.dp * parameter.partition_numel() == parameter.ds_numel + 1
        flip(parameter.ds_tensor, index=-1)
    return find_disagreements(engine)


def test_what_lies_behind_a_partition_is_not_compared() -> None:
    """ZeRO-3 pads a parameter's last partition with memory as it comes: comparing it would be a false alarm."""
    case = Case(tp=2, dp=2, zero=3, model={"hidden_size": 51, "head_dim": 12})
    assert run_ranks(_damaged_padding, case.world_size, case) == [[]] * case.world_size


class _Heard(SilentLog):
    """What the run says, to look at afterwards."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []

    def event(self, name: str, **facts: Any) -> None:
        self.events.append((name, facts["step"]))

    def on_checkpoint(self, saved: Saved, if_failed: str) -> None:
        self.event("save_failed" if saved.failure else "saved", step=saved.step)


class _Recorder(Observer):
    def __init__(self, records: list[dict[str, Any]]) -> None:
        self.records = records

    def on_step(self, record: dict[str, Any]) -> None:
        self.records.append(record)


def _manifest(state: TrainState) -> Manifest:
    return Manifest(step=state.step, config={}, tokenizer=None, state=state.model_dump(), tensors={}, files={})


def _train_with_damage(rank: int, case: Case, parameter: str, damaged_step: int, root: Path) -> dict[str, Any]:
    """The real loop; while the last rank waits for the batch of one step, a bit of its weights flips."""
    config = case.config()
    training = config.training.model_copy(update={"self_check_every": 2})
    checkpoint = config.checkpoint.model_copy(update={"interval": 3})
    config = config.model_copy(update={"training": training, "checkpoint": checkpoint})
    engine = engine_of(case, config)

    def batches() -> Iterator[list[Batch]]:
        for step, batch in enumerate(global_batches(case), start=1):
            if step == damaged_step and rank == case.world_size - 1:
                flip(numbers_of(engine, parameter, is_fp32=False))
            yield micro_batches_of(engine, case, batch)

    records: list[dict[str, Any]] = []
    heard = _Heard()
    job = TrainerContext(
        batches=lambda state: batches(),
        evaluation=[],
        lacks_evaluation=False,
        guard=Guard(engine, config.guards),
        checkpoints=Checkpoints(engine, config.checkpoint, root, heard, _manifest),
        requests=StopRequests(None, 0.0),
        observer=_Recorder(records),
    )
    stopped = ""
    try:
        train(engine, config, TrainState(), job)
    except TrainingStopped as error:
        stopped = str(error)
    job.checkpoints.wait()
    return {"stopped": stopped, "records": records, "saved": heard.events, "left": find_disagreements(engine)}


@pytest.mark.parametrize(
    ("case", "parameter"),
    [
        (Case(dp=2, zero=1, dtype="bf16"), MATRIX),
        (Case(dp=2, zero=2), MATRIX),
        (Case(tp=2), NORM),
        (Case(tp=2, dtype="bf16"), NORM),
        (Case(tp=2, zero=3, dtype="bf16"), NORM),
        (Case(pp=2, accumulation=2, model=TIED, dtype="bf16"), EMBEDDING),
    ],
    ids=str,
)
def test_the_loop_stops_before_it_saves_what_differs(case: Case, parameter: str, tmp_path: Path) -> None:
    """Step 6 is due for a check and for a save. Step 3 was checked because it was saved, step 5 was not."""
    answers = run_ranks(_train_with_damage, 2, replace(case, steps=8), parameter, 6, tmp_path)
    for rank, seen in enumerate(answers):
        where = f"{case} rank {rank}: {seen['stopped']}"
        assert f"at step 6: the weight {parameter} is wrong on rank 0" in seen["stopped"], where
        assert " or rank 1 (" in seen["stopped"] and "was not saved" in seen["stopped"], where
        assert seen["saved"] == [("saved", 3)], where
        assert [record["step"] for record in seen["records"]] == [1, 2, 3, 4, 5, 6], where
        checked = [record["step"] for record in seen["records"] if record.get("self_check_s", 0) > 0]
        assert checked == [2, 3, 4, 6], where
        if case.dp == 2:
            assert seen["left"] == [], "the step did not overwrite the replicas: one comparison would be enough"


def test_a_sentence_stays_short_when_many_ranks_differ() -> None:
    holders = tuple(Holder(rank, f"node-{rank // 8}") for rank in range(64))
    found = [Disagreement(NORM, False, holders, False), Disagreement(MATRIX, False, holders[:1], True)]
    sentence = explain(12, found)
    assert "at step 12" in sentence and NORM in sentence and "(1 more parameters differ)" in sentence
    assert "rank 7 (node-0) or 56 more ranks" in sentence and len(sentence) < 600
