"""Messages between stages that live at once on real ranks, against those that the planner counts as memory."""

from __future__ import annotations

from typing import Any

import pytest

from megalite.config import resolve_layout
from megalite.planner.cost.memory import CPU, kept_messages
from megalite.planner.workload import TrainingWorkload
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks

EIGHT_BLOCKS = {"num_hidden_layers": 8}
CASES = [
    Case(pp=4, accumulation=12, steps=1, model=EIGHT_BLOCKS),
    Case(pp=2, schedule="zb-v", accumulation=8, steps=1, model=EIGHT_BLOCKS),
    Case(pp=2, schedule="zero-bubble", accumulation=8, steps=1, model=EIGHT_BLOCKS),
]


def count(rank: int, case: Case) -> int:
    """Returns the most messages beside inputs and outputs of chunks while most micro-batches are alive."""
    from megalite.engine.pipeline.pipeline_runtime import ProgramRun

    found: dict[int, int] = {}
    record = ProgramRun._record_pass

    def counted(run: ProgramRun, *args: Any) -> None:
        record(run, *args)
        transfers = [*run._arriving.values(), *run._sending]
        messages = {transfer.tensor.data_ptr() for transfer in transfers}
        messages |= {tensor.data_ptr() for tensor in run._results.values()}
        kept = {tensor.data_ptr() for inputs, output in run._alive.values() for tensor in (inputs.hidden, output)}
        found[len(run._alive)] = max(found.get(len(run._alive), 0), len(messages - kept))

    ProgramRun._record_pass = counted  # type: ignore[method-assign]
    engine = engine_of(case)
    for batch in global_batches(case):
        engine.train_step(micro_batches_of(engine, case, batch), 1e-3)
    return found[max(found)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.exhaustive) for case in CASES[1:])])
def test_messages_that_live_at_once(case: Case) -> None:
    """Within one, for what is counted on average. With the constants of DeepSpeed's pipeline stage 0 would have 2 and
    all others 5, of any number of stages."""
    config = case.config()
    job = TrainingWorkload.of(config, resolve_layout(config, case.world_size, "cpu"))
    measured = run_fresh_ranks(count, case.world_size, case)
    predicted = [kept_messages(job, stage, CPU) for stage in range(case.pp)]
    assert predicted == pytest.approx(measured, abs=1), f"{case}: predicted {predicted}, measured {measured}"
