"""A rank has a witness where nobody else ends the ranks of other hosts; it tells what it can by itself."""

from __future__ import annotations

import pytest

from launch.runtime import slurm_rendezvous, start_witness
from launch.runtime.rank_environment import Rank, read_rank
from launch.runtime.start_witness import StartWitness
from launch.trainer.start import joining
from megalite.distributed.start_failures import StartFailure
from tests.unit.launch.runtime.test_rank_environment import INTERACTIVE, STEP

TWO = {"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "node1"}
MPICH = {"PMI_RANK": "0", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "1", "MPI_LOCALRANKID": "0", "WORLD_SIZE": "2"}
RESTARTS = {"TORCHELASTIC_MAX_RESTARTS": "2"}
BEGINS = {  # environment -> whether a witness is started
    "by hand": (TWO, True),
    "on one host": (TWO | {"LOCAL_WORLD_SIZE": "2"}, False),
    "on loopback": (TWO | {"MASTER_ADDR": "127.0.0.1"}, False),
    "srun": (STEP, True),
    "the shell of an interactive step": (INTERACTIVE, False),
    "srun that ends all": (STEP | {"SLURM_KILL_BAD_EXIT": "1"}, False),
    "Open MPI": ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "WORLD_SIZE": "2"}, False),
    "hydra": (MPICH, False),
    "DeepSpeed's helper under hydra": (MPICH | TWO | {"LOCAL_SIZE": "1"}, True),
    "torchrun that starts it again": (TWO | RESTARTS | {"TORCHELASTIC_RESTART_COUNT": "1"}, False),
    "torchrun's last start": (TWO | RESTARTS | {"TORCHELASTIC_RESTART_COUNT": "2"}, True),
}


@pytest.mark.parametrize("name", BEGINS)
def test_a_witness_begins_where_nobody_else_would_tell(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, is_wanted = BEGINS[name]
    begun = list[dict[str, object]]()
    monkeypatch.setattr(start_witness.subprocess, "Popen", lambda command, **options: begun.append(options))
    monkeypatch.setattr(start_witness.sys, "excepthook", start_witness.sys.excepthook)
    StartWitness().begin(environment)
    assert len(begun) == is_wanted
    assert all(one["stdout"] == start_witness.subprocess.DEVNULL for one in begun), "else `| tee` waits for it"


def test_a_failure_is_told_once_and_by_the_rank_itself_where_it_can() -> None:
    one, told = StartWitness(), list[tuple[int, str]]()

    def note(code: int, text: str) -> bool:
        told.append((code, text))
        return True

    one.note = note
    one.fail(2, "no data")
    one.fail(1, "what follows from it")
    assert told == [(2, "no data")]


def test_a_rank_that_has_failed_itself_is_not_ended_by_another_s_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks meet the same mistake. Ended by its watch in the moment before it says why, rank 0 said nothing."""
    monkeypatch.setattr(joining, "witness", one := StartWitness())
    monkeypatch.setattr(joining.os, "_exit", lambda code: pytest.fail("ended without a word"))
    one.note = lambda code, text: (
        joining._end_with(StartFailure(1, "node1", 2, text), lambda: True, Rank(0, 0, 2)) is None
    )
    one.fail(2, "no data")
    assert one.has_told


def test_a_rank_that_lacks_a_package_finds_the_others_as_they_find_each_other() -> None:
    found, rank = dict(STEP), read_rank(STEP)
    slurm_rendezvous.set_variables(found)
    assert rank is not None
    wanted = {"RANK": rank.rank, "WORLD_SIZE": rank.world_size, "MASTER_ADDR": rank.master[0]}
    assert {name: found[name] for name in wanted} == {name: str(value) for name, value in wanted.items()}
    assert found["MASTER_PORT"] == str(rank.master[1])
