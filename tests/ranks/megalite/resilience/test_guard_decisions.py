"""What a guard decides: what is a spike, which policy follows, how often; and fp16's search for a scale is let be."""

from __future__ import annotations

import json
import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from megalite.config.sections import GuardsConfig
from megalite.engine.deepspeed.loss_scale import loss_scaler_state, set_loss_scaler_state
from megalite.engine.engine import Engine
from megalite.engine.step_result import Readback, StepResult
from megalite.resilience.guards import Action, Guard, Intervention
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.planting import Plant, guarded_step, higher_losses, planted
from tests.helpers.rank_pool import run_ranks

NORM = "model.layers.0.input_layernorm.weight"


def _actions(engine: Engine, case: Case, guard: Guard, plants: str, step: int = 1) -> list[Intervention | None]:
    """Steps without (.) and with (x) a gradient that is not finite, or with a weight that is not (w)."""
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    seen = []
    for number, letter in enumerate(plants, start=step):
        kind = {"x": "gradient", "w": "weight"}.get(letter)
        with planted(engine, case, 0, Plant(kind, NORM, 0, 1)) if kind else nullcontext():
            seen.append(guarded_step(engine, guard, batch, number))
    return seen


def _policies(rank: int) -> None:
    """All on one engine: what is checked is what the guard makes of its steps."""
    case = Case()
    engine = engine_of(case)
    skip, roll_back, stop = Action.SKIP, Action.ROLLBACK, Action.STOP

    def run(guard: Guard, plants: str, step: int = 1) -> list[Action | None]:
        seen = _actions(engine, case, guard, plants, step)
        sentences.append(seen[-1].sentence if seen[-1] else "")
        return [one and one.action for one in seen]

    sentences: list[str] = []
    guard = Guard(engine, GuardsConfig(not_finite="skip", max_interventions=3))
    assert run(guard, ".xx.xxx") == [None, skip, skip, None, skip, skip, stop]
    assert sentences[-1].startswith(
        "3 steps in a row were skipped; 5 steps skipped and 0 rollbacks in all, the last at 5 (gradients), "
        "6 (gradients), 7 (gradients): step 7: the loss is finite, gradients are not; not finite are the gradients of "
        f"1 of 33 parameters ({NORM})"
    )
    guard = Guard(engine, GuardsConfig(not_finite="stop"))
    assert run(guard, ".x") == [None, stop]
    assert sentences[-1].startswith("guards.not_finite is stop; ")
    two_rollbacks = GuardsConfig(not_finite="rollback", max_interventions=2)
    guard = Guard(engine, two_rollbacks)
    early = guard.state()
    assert run(guard, ".x.x") == [None, roll_back, None, roll_back]
    guard.rolled_back(early)
    saved = json.loads(json.dumps(guard.state()))  # what the checkpoint after a rollback holds
    assert saved == early | {"rollbacks": 2, "rolled_back_at": [2, 4], "history": [[2, "gradients"], [4, "gradients"]]}
    assert run(guard, "x") == [stop], "a rollback must not forget how many there were"
    assert sentences[-1].startswith(
        "2 rollbacks within 1000 steps did not help; 0 steps skipped and 2 rollbacks in all"
    )

    def after_two_rollbacks(config: GuardsConfig = two_rollbacks) -> Guard:
        guard = Guard(engine, config)
        guard.restore(saved)
        return guard

    assert run(after_two_rollbacks(), "x") == [stop], "nor must a crash"
    assert run(after_two_rollbacks(), "x", 1001) == [stop], "both are less than 1000 steps old"
    guard = after_two_rollbacks()
    assert run(guard, "x", 1002) == [roll_back], "the first is forgotten"
    guard.rolled_back(saved)
    assert run(guard, "x", 1000) == [stop], "a step further back is no progress"
    assert sentences[-1].startswith(
        "2 rollbacks within 1000 steps did not help; 0 steps skipped and 3 rollbacks in all"
    )
    long_window = two_rollbacks.model_copy(update={"spike_window": 200})
    assert run(after_two_rollbacks(long_window), "x", 2001) == [stop]
    assert run(after_two_rollbacks(long_window), "x", 2002) == [roll_back]


def test_policies_and_their_bounds() -> None:
    run_ranks(_policies, 1)


def _nowhere_to_return(rank: int) -> None:
    case = Case()
    engine = engine_of(case)
    config = GuardsConfig(not_finite="rollback", max_interventions=2)
    guard = Guard(engine, config)

    def bad_step(step: int) -> Intervention:
        (intervention,) = _actions(engine, case, guard, "x", step)
        assert intervention is not None
        return intervention

    for step in (1, 2):
        assert bad_step(step).action is Action.ROLLBACK
        guard.could_not_roll_back()
        counts = {"skips_in_row": step, "skips": step, "rollbacks": 0, "rolled_back_at": []}
        assert guard.state().items() >= counts.items()
    kept = guard.state()
    last = bad_step(3)
    assert last.action is Action.STOP
    words = "3 steps in a row were skipped; 3 steps skipped and 0 rollbacks in all, the last at 2 (gradients), 3"
    assert last.sentence.startswith(words)

    guard = Guard(engine, config)
    guard.restore(kept)
    assert _actions(engine, case, guard, ".", 3) == [None]
    assert bad_step(4).action is Action.ROLLBACK, "in a row they are no longer"
    assert guard.state()["rolled_back_at"] == [4]


def test_a_rollback_without_a_checkpoint_counts_as_a_skip() -> None:
    run_ranks(_nowhere_to_return, 1)


def _bad_weights(rank: int) -> None:
    case = Case()
    engine = engine_of(case)
    for policy, expected in (("skip", Action.STOP), ("rollback", Action.ROLLBACK), ("stop", Action.STOP)):
        guard = Guard(engine, GuardsConfig(not_finite=policy))
        _, bad = _actions(engine, case, guard, ".w")
        assert bad is not None and bad.action is expected, policy
        assert f"weights were not finite before it; {NORM} on rank 0" in bad.sentence, policy
        assert ("no step can mend weights" in bad.sentence) is (expected is Action.STOP), policy
    guard = Guard(engine, GuardsConfig(not_finite="rollback"))
    _actions(engine, case, guard, ".")
    guard.rolled_back(guard.state())
    (bad,) = _actions(engine, case, guard, "w")
    assert bad is not None and bad.action is Action.STOP, "the checkpoint itself is bad: going back to it is no help"
    assert "the weights that were loaded are not finite already" in bad.sentence


def test_weights_that_are_not_finite_end_the_run_and_are_named() -> None:
    run_ranks(_bad_weights, 1)


def _judgements(rank: int) -> None:
    def no_loss() -> float:
        raise AssertionError("nobody needs the loss")

    engine = engine_of(Case())
    assert Guard(engine, GuardsConfig()).takes(no_loss)
    guard = Guard(engine, GuardsConfig(loss_spike="skip", spike_window=3, spike_z_score=2.0))
    guard.restore({"losses": [4.0, 5.0, 6.0]})
    limit = 5.0 + 2.0 * float(np.std([4.0, 5.0, 6.0]))
    assert guard.takes(lambda: limit - 1e-9) and not guard.takes(lambda: limit + 1e-9)
    assert guard.takes(lambda: -100.0), "a loss far below is none"
    guard.restore({"losses": [5.0, 5.0, 5.0]})  # pushes the others out
    assert guard.takes(lambda: 5.000001), "rounding is no spike where losses are equal"
    assert not guard.takes(lambda: 5.1)
    guard = Guard(engine, GuardsConfig(loss_spike="skip", spike_window=3))
    for loss in (5.5, 0.0, 4.5):  # 0 is that of a batch without any target
        guard.takes(partial(float, loss))
        guard.after(1, StepResult(Readback(torch.tensor(loss), 0.0, False)), [])
    assert guard.state()["losses"] == [5.5, 4.5]


def test_what_is_a_spike() -> None:
    run_ranks(_judgements, 1)


def _fp16(rank: int, zero: int) -> None:
    case = Case(dp=2, zero=zero, dtype="fp16")
    engine = engine_of(case)
    optimizer = engine.deepspeed.optimizer
    guard = Guard(engine, GuardsConfig(not_finite="stop", loss_spike="skip", spike_window=1, max_interventions=4))
    assert _actions(engine, case, guard, ".") == [None]

    before = loss_scaler_state(optimizer)
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    with higher_losses(engine, 0, 1, 1):
        spike = guarded_step(engine, guard, batch)
    assert spike is not None and spike.report.cause == "spike"
    assert loss_scaler_state(optimizer) == before, "the loss scale is not to blame for a spike"

    for number in (1, 2):  # DeepSpeed lowers the scale at the second one
        (overflow,) = _actions(engine, case, guard, "x", number)
        assert overflow is not None and overflow.action is Action.SKIP, "how fp16 finds its scale is no reason to stop"
    assert "overflowed fp16, whose loss scale is 32768 now" in overflow.sentence
    for number in range(3, 18):  # 32768 is 2^15, and the smallest scale 1: more than `max_interventions` in a row
        (overflow,) = _actions(engine, case, guard, "x", number)
        assert overflow is not None and (overflow.action, overflow.report.cause) == (Action.SKIP, "loss scale"), number
    assert overflow.report.loss_scale == 1.0
    (smallest,) = _actions(engine, case, guard, "x", 18)
    assert smallest is not None and smallest.report.cause == "gradients", "the scale cannot fall any further"
    assert smallest.action is Action.STOP and smallest.report.suspects[0].where == NORM
    assert loss_scaler_state(optimizer)["cur_scale"] == 1.0
    assert guard.state()["skips"] == 1 + 17 and guard.state()["skips_in_row"] == 1, "the spike, and a search is no row"

    lowers_next = before | {"cur_hysteresis": 1}
    _blame_leaves_the_loss_scale(engine, case, rank, lowers_next)
    _second_run_has_the_same_loss_scale(engine, case, rank, lowers_next)


def _blame_leaves_the_loss_scale(engine: Engine, case: Case, rank: int, state: dict[str, float]) -> None:
    """One bad step with a guard, and one without: the scale moves alike."""
    optimizer, batch = engine.deepspeed.optimizer, micro_batches_of(engine, case, global_batches(case)[0])
    for comes_again in (True, False):
        after = []
        for guard in (None, Guard(engine, GuardsConfig())):
            set_loss_scaler_state(optimizer, state)
            with planted(engine, case, rank, Plant("loss", "the loss", 0, 1, comes_again)):
                result = engine.train_step(batch, 1e-3, guard)
                bad = guard and guard.after(7, result, batch)
            after.append(loss_scaler_state(optimizer))
        assert bad is not None and bad.report.came_again is comes_again
        assert after[1] == after[0] != state


def _second_run_has_the_same_loss_scale(engine: Engine, case: Case, rank: int, state: dict[str, float]) -> None:
    """What overflows with the first run's scale alone is not finite in the second run either."""
    optimizer, names = engine.deepspeed.optimizer, dict(engine.parameters())
    set_loss_scaler_state(optimizer, state)

    def overflow(gradient: Tensor) -> Tensor:
        return gradient + (math.inf if loss_scaler_state(optimizer)["cur_scale"] == state["cur_scale"] else 0.0)

    hook, guard = names[NORM].register_hook(overflow), Guard(engine, GuardsConfig())
    batch = micro_batches_of(engine, case, global_batches(case)[0])
    with planted(engine, case, rank, Plant("loss", "the loss", 0, 1, False)):  # the first run alone
        bad = guarded_step(engine, guard, batch)
    hook.remove()
    assert bad is not None and (bad.report.cause, bad.report.came_again) == ("loss", True)
    assert loss_scaler_state(optimizer)["cur_scale"] == state["cur_scale"] / 2


@pytest.mark.parametrize("zero", [1, 2])  # a scale on the device, and DeepSpeed's on the host
def test_fp16_finds_its_loss_scale_undisturbed(zero: int) -> None:
    run_ranks(_fp16, 2, zero)
