"""A save in the background writes from host memory that was made ready before: of the right size, and with the same
numbers as a save that training waits for."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.checkpoint.engine_state import own_blocks, own_size
from megalite.checkpoint.manifest import Manifest, read_manifest, step_folder
from megalite.checkpoint.saver import Saver
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_ranks

TIED = {"tie_word_embeddings": True}
CASES = [Case(), Case(tp=2, model=TIED), Case(pp=2, model=TIED), Case(dp=2, zero=1), Case(dp=2, zero=3)]


def save_both_ways(rank: int, root: Path, case: Case) -> tuple[int, int, list[bool]]:
    """Numbers that memory was made for; numbers saved; whether each save succeeded."""
    engine = engine_of(case)
    committing: list[int] = []  # manifests there are when the run's records are synced
    background, waiting = (
        Saver(
            engine, root, background=later, committing=lambda: committing.append(len([*root.glob("*/manifest.json")]))
        )
        for later in (True, False)
    )
    expected, _ = own_size(engine)
    background.prepare()
    engine.train_step(micro_batches_of(engine, case, global_batches(case)[0]), case.learning_rate)
    succeeded = []
    for step, saver in enumerate((background, waiting)):
        saver.save(Manifest(step=step, config={}, tokenizer=None, state={}, tensors={}, files={}))
        saver.wait()
        succeeded += [saved.failure is None for saved in saver.finished()]
    assert committing == ([0, 1] if rank == 0 else []), "no checkpoint may have steps without a record"
    return expected, sum(block.numbers.numel() for block in own_blocks(engine).blocks), succeeded


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_prepared_memory_holds_what_is_saved(tmp_path: Path, case: Case) -> None:
    """A size that misses replicated, tied or padded numbers would make the first save wait for memory after all."""
    for expected, saved, succeeded in run_ranks(save_both_ways, case.world_size, tmp_path, case):
        assert expected == saved
        assert succeeded == [True, True]
    background, waiting = (read_manifest(tmp_path / step_folder(step)) for step in range(2))
    assert background.files == waiting.files and background.files, "digests of what was written"
