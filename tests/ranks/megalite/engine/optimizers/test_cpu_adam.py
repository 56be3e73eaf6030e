"""DeepSpeed's Adam for the CPU: compiled beside every lock, loaded without one, and the same update as torch's."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import pytest
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.ops.op_builder import CPUAdamBuilder

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from megalite.engine.optimizers.cpu_adam import BUILD_LIMIT, cached_library, compile_into, why_no_cpu_adam
from megalite.engine.parameter_state import optimizer_step_count
from tests.helpers.engine_cases import Case, engine_of, trained_steps
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks
from tests.helpers.saving import save
from tests.ranks.megalite.checkpoint.test_layout_matrix import Numbers

STEPS, SAVED_AT = 5, 2
ADAM = Case(dp=2, accumulation=2, steps=STEPS, offload={"optimizer": "cpu"})


def test_a_build_that_is_killed_leaves_nothing_that_another_waits_for(tmp_path: Path) -> None:
    """torch's own loader would leave a lock in its folder, and wait for it for ever."""
    library = tmp_path / "cache" / "cpu_adam.so"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"did not compile in 0\.1 s"):
            compile_into(library, timedelta(seconds=0.1))
        assert list(library.parent.iterdir()) == []


def runs(process_id: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(process_id).status() != psutil.STATUS_ZOMBIE
    return False


def ends(process_ids: Sequence[int]) -> bool:
    """Whether none of them runs within 5 s, as signals arrive later than they are sent."""
    deadline = time.monotonic() + 5
    while any(map(runs, process_ids)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def test_a_build_without_time_takes_its_compilers_with_it(tmp_path: Path) -> None:
    """ninja starts each in a process group of its own; these are in sessions of their own, and never at rest."""
    note = tmp_path / "compilers"
    loop = f"while :; do setsid sleep 30 & echo $! >> {note}; sleep 0.01; done"
    build = f"import subprocess; subprocess.run(['setsid', '-w', 'bash', '-c', {loop!r}])"
    library = tmp_path / "cache" / "cpu_adam.so"
    with (
        patch("megalite.engine.optimizers.cpu_adam.BUILD", build),
        pytest.raises(RuntimeError, match=r"did not compile in 1 s"),
    ):
        compile_into(library, timedelta(seconds=1))
    compilers = [int(line) for line in note.read_text().split()]
    assert len(compilers) > 3 and ends(compilers)
    assert len(note.read_text().split()) == len(compilers), "whatever starts them is gone too"


@pytest.mark.exhaustive  # it starts the compiler
def test_a_slow_compiler_is_stopped(tmp_path: Path) -> None:
    compiler, note = tmp_path / "compiler", tmp_path / "compilers"
    compiler.write_text(f'#!/bin/bash\n[[ "$*" == *" -c "* ]] && {{ echo $$ >> {note}; sleep 300; }}\nexec g++ "$@"\n')
    compiler.chmod(0o700)
    with patch.dict(os.environ, {"CXX": str(compiler)}), pytest.raises(RuntimeError, match="did not compile in 30 s"):
        compile_into(tmp_path / "cache" / "cpu_adam.so", timedelta(seconds=30))
    compilers = [int(line) for line in note.read_text().split()]
    assert compilers and ends(compilers)


@pytest.mark.parametrize(
    ("build", "reason"),
    [
        ("print('nothing to do')", "its compilation ended without an error and without a library"),
        ("raise SystemExit('fatal error: no such file')", "it does not compile: fatal error: no such file"),
        ("import os; os.kill(os.getpid(), 9)", "it does not compile: no reason given"),
    ],
)
def test_a_build_that_makes_nothing_is_a_reason(build: str, reason: str, tmp_path: Path) -> None:
    assert run_ranks(_reason_with, 1, build, str(tmp_path)) == [reason]


def _reason_with(rank: int, build: str, cache: str) -> str | None:
    with patch("megalite.engine.optimizers.cpu_adam.BUILD", build):
        return _reason(rank, cache, "g++")


def _reason(rank: int, cache: str, compiler: str) -> str | None:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": cache, "CXX": compiler}):
        return why_no_cpu_adam()


def test_all_ranks_know_why_there_is_none() -> None:
    reasons = run_ranks(_reason, 2, os.devnull, "g++")
    assert reasons[0] is not None and "Not a directory" in reasons[0] and reasons == reasons[:1] * 2


@pytest.mark.exhaustive  # it starts the compiler
def test_without_a_compiler_all_ranks_know_why(tmp_path: Path) -> None:
    reasons = run_ranks(_reason, 2, str(tmp_path), "/bin/false")
    assert reasons[0] is not None and "it does not compile: " in reasons[0] and reasons == reasons[:1] * 2


def _fails_on_rank_1(rank: int, home: str, name: str, failure: Exception) -> str | None:
    with (
        patch.dict(os.environ, {"HOME": home}),
        patch.object(Path, name, side_effect=failure) if rank else nullcontext(),
    ):
        os.environ.pop("XDG_CACHE_HOME", None)
        with (
            patch("megalite.engine.optimizers.cpu_adam.BUILD", ""),
            patch("megalite.engine.optimizers.cpu_adam.log.info") as said,
        ):
            reason = why_no_cpu_adam()
    assert not said.called, "nothing is compiled"
    return reason


@pytest.mark.parametrize(
    ("name", "failure", "reason"),
    [
        ("stat", PermissionError(13, "Permission denied", "/closed/x"), "[Errno 13] Permission denied: '/closed/x'"),
        ("mkdir", OSError("no room in /\udcff"), r"no room in /\udcff"),
    ],
)
def test_a_cache_that_one_rank_cannot_look_into_is_a_reason_on_all(
    name: str, failure: Exception, reason: str, tmp_path: Path
) -> None:
    """It was looked into between two collectives: that rank ended, and the others waited for it."""
    assert run_ranks(_fails_on_rank_1, 2, str(tmp_path), name, failure) == [reason] * 2


LINKED = "import os; os.open(os.environ['TORCH_EXTENSIONS_DIR'] + '/a.so', os.O_CREAT, 0o777)"  # as a linker makes it


def _reason_in_group(rank: int, cache: str, user: int) -> str | None:
    kept = os.umask(0o002)
    try:
        with patch("os.getuid", lambda: user):
            return _reason_with(rank, LINKED, cache)
    finally:
        os.umask(kept)


@pytest.mark.parametrize("is_there", [False, True])
def test_a_library_is_its_users_alone_under_any_umask(is_there: bool, tmp_path: Path) -> None:
    """One that others may write to is compiled anew: it was refused, again and again."""
    library = _library_in(tmp_path)
    if is_there:
        library.parent.mkdir(parents=True)
        library.write_text("old")
        library.chmod(0o775)
    (reason,) = run_ranks(_reason_in_group, 1, str(tmp_path), os.getuid())
    assert library.stat().st_size == 0 and library.stat().st_mode & 0o777 == 0o700
    assert reason is not None and "file too short" in reason, "it is not even loaded"


def test_a_library_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    library = _library_in(tmp_path)
    library.parent.mkdir(parents=True)
    library.touch(mode=0o700)
    reason = f"{library} may be written to by other users"
    assert run_ranks(_reason_in_group, 1, str(tmp_path), os.getuid() + 1) == [reason]


def _library_in(cache: Path) -> Path:
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
        return cached_library()


def _trained(rank: int, case: Case, root: Path, resumes: bool) -> tuple[Numbers, Any]:
    engine = engine_of(case)
    if resumes:
        load_engine(engine, CheckpointReader(root / f"step_{SAVED_AT:08d}"), weights_only=False)
        assert optimizer_step_count(engine) == SAVED_AT
    else:
        trained_steps(engine, case, 0, SAVED_AT)
        assert save(engine, root, SAVED_AT, background=True).failure is None
    return trained_steps(engine, case, SAVED_AT, STEPS), isinstance(engine.torch_optimizer, DeepSpeedCPUAdam)


@pytest.mark.exhaustive  # it compiles for 90 s
def test_it_updates_as_torch_does_and_checkpoints_go_from_one_to_the_other(tmp_path: Path) -> None:
    """Each resumes from the other's checkpoint. 1e-5 of a loss: the two round differently, by 3e-6 of a weight after
    8 steps."""
    adam, folders = replace(ADAM, cache=str(tmp_path)), {True: tmp_path / "deepspeed", False: tmp_path / "torch"}
    with patch.dict(os.environ, {"XDG_CACHE_HOME": adam.cache}):
        compile_into(cached_library(), BUILD_LIMIT)  # ranks of tests wait for each other for less
    found = {}
    for is_adam, case in ((False, ADAM), (True, adam)):
        for rank in run_fresh_ranks(_trained, 2, case, folders[is_adam], False):
            found[is_adam] = rank[0]
            assert rank[1] == is_adam
    np.testing.assert_allclose(np.array(found[True]), np.array(found[False]), rtol=1e-5)
    for is_adam, case in ((False, ADAM), (True, adam)):
        (numbers, was_adam), *_ = run_fresh_ranks(_trained, 2, case, folders[not is_adam], True)
        assert was_adam == is_adam
        np.testing.assert_allclose(np.array(numbers), np.array(found[False]), rtol=1e-5)


def test_deepspeed_asks_for_its_library_where_it_is_put() -> None:
    """Would fail where `OpBuilder.load` looks elsewhere, and compile in every rank."""
    library = object()
    with patch.dict(CPUAdamBuilder._loaded_ops, {CPUAdamBuilder.NAME: library}):
        assert CPUAdamBuilder().load() is library
