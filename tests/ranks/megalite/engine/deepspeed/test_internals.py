"""Fails when a place of DeepSpeed's insides that we lean on moves, or when a defect that we work round is gone.

The first kind says where to look after an upgrade; the second says what can be deleted.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import deepspeed.comm
import deepspeed.ops
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.zero import partitioned_param_coordinator as coordinator
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils import logger, safe_get_full_optimizer_state, safe_set_full_fp32_param
from torch import nn

from megalite.config import Config, resolve_layout
from megalite.config.deepspeed import NESTED, PASSED_ON, refused_keys
from megalite.engine.build import build_engine
from megalite.engine.deepspeed import internals as seams
from megalite.engine.deepspeed import loss_scale as scale_seams
from megalite.engine.deepspeed import step as step_seams
from megalite.engine.deepspeed.process_groups import Grid
from megalite.engine.parameter_state import read_parameter, write_weight
from megalite.parallel.mesh import Mesh
from models.decoder import decoder_layers
from tests.helpers.engine_cases import Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks


def _shared_memory_collective(rank: int) -> dict[str, Any]:
    torch_backend = sys.modules["deepspeed.comm.torch"]  # as an attribute of deepspeed.comm it is torch itself
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    compiled = []

    def compile_now(self: Any, *_: Any) -> Any:
        compiled.append(self.NAME)
        return SimpleNamespace()

    type(builder).load = compile_now
    del deepspeed.ops.__compatible_ops__  # ours, set when the group was joined
    known = "deepspeed_shm_comm" in deepspeed.ops.__compatible_ops__
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = True
    torch_backend.build_shm_op()
    by_deepspeed = list(compiled)
    seams.keep_collective_uncompiled()
    return {
        "at_start": "build_shm_op" in torch_backend.TorchBackend.__init__.__code__.co_names,
        "known": known,
        "by_deepspeed": by_deepspeed,
        "after_ours": torch_backend.build_shm_op(),
        "compiled": compiled,
    }


def test_deepspeed_would_compile_its_cpu_collective_at_start() -> None:
    (seen,) = run_fresh_ranks(_shared_memory_collective, 1)
    assert seen["at_start"], "fixed in DeepSpeed: init_distributed builds nothing"
    assert seen["known"], "deepspeed.ops.__compatible_ops__ does not list the operator any more"
    assert seen["by_deepspeed"] == ["deepspeed_shm_comm"]
    assert seen["after_ours"] is None
    assert seen["compiled"] == ["deepspeed_shm_comm"], "compiled although we switched it off"


def test_deepspeeds_logger_is_where_we_quieten_it() -> None:
    level = logger.level
    logger.setLevel(logging.INFO)  # the default of some versions in our range
    try:
        with warnings.catch_warnings():
            seams.quiet_logging()
        assert logger.getEffectiveLevel() == logging.WARNING
        assert logger.name == "DeepSpeed"
        skips = "OVERFLOW! Skipping step"
        assert skips in inspect.getsource(loss_scaler), "DeepSpeed says it in other words, or no more"
        assert not logger.filter(logger.makeRecord("", logging.WARNING, "", 0, f"[deepspeed] {skips}.", (), None))
    finally:
        logger.setLevel(level)


def _warnings_of_collectives(rank: int, *, quieted: bool) -> int:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if quieted:
            seams.quiet_logging()
        deepspeed.comm.all_gather_into_tensor(torch.zeros(1), torch.ones(1))
        deepspeed.comm.reduce_scatter_tensor(torch.zeros(1), torch.ones(1))
    return len(seen)


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13 does not deprecate the old names")
def test_deepspeed_calls_collectives_by_deprecated_names() -> None:
    assert run_fresh_ranks(partial(_warnings_of_collectives, quieted=False), 1) == [2]
    assert run_fresh_ranks(partial(_warnings_of_collectives, quieted=True), 1) == [0]


def _said_by_both_grids(rank: int, mesh: Mesh) -> list[list[Any]]:
    sizes = mesh.pipeline_parallel_size, mesh.tensor_parallel_size, mesh.data_parallel_size
    with contextlib.redirect_stdout(io.StringIO()):
        theirs, said = PipelineParallelGrid(PipeModelDataParallelTopology(*sizes)), []
    for grid in (theirs, Grid(mesh)):
        groups = [getattr(grid, f"get_{axis}_parallel_group")() for axis in ("data", "pipe", "slice", "model")]
        axes = ("data", "pipe", "slice", "tensor_model", "pipeline_model")
        numbers = [getattr(grid, f"get_{axis}_parallel_{what}")() for axis in axes for what in ("rank", "world_size")]
        ranks = [[rank] if group is None else dist.get_process_group_ranks(group) for group in groups]
        said.append([*ranks, *numbers, grid.get_model_parallel_world_size(), grid.get_model_parallel_rank()])
    return said


@pytest.mark.parametrize("mesh", [Mesh(2, 2, 2), Mesh(1, 2, 2), Mesh(2, 1, 1)], ids=str)
def test_our_grid_says_what_deepspeeds_says(mesh: Mesh) -> None:
    """But for one rank: what tensor-parallel ranks hold alike ZeRO-3's norm counts on rank 0, of all stages."""
    assert "mpu.get_model_parallel_rank()" in inspect.getsource(DeepSpeedZeroOptimizer_Stage3), "stage3.py moved"
    for rank, (theirs, ours) in enumerate(run_ranks(_said_by_both_grids, mesh.world_size, mesh)):
        at = mesh.coordinate(rank)
        assert ours == [*theirs[:-1], at.tensor_rank]
        assert ours[4:9:2] == [at.data_rank, at.pipeline_rank, at.tensor_rank], "the order of ranks is another"
        assert (theirs[-1] == at.tensor_rank) == (at.pipeline_rank == 0), "fixed in DeepSpeed: see `Grid`"


def _compared_over_the_world(rank: int) -> str:
    """Each rank is a stage of its own, whose modules are numbered from 0."""
    try:
        coordinator.assert_ints_same_as_other_ranks([rank] * 3)
    except RuntimeError as error:
        return str(error)
    return ""


def test_zero_3_compares_the_order_of_modules_over_the_world() -> None:
    """Stages differ, so `let_stages_differ` takes the comparison away."""
    source = inspect.getsource(coordinator.PartitionedParameterCoordinator.reset_step)
    assert "assert_ints_same_as_other_ranks([m.ds_id for m in self.__submodule_order])" in source, (
        "partitioned_param_coordinator.py compares no more, or is told a group: `let_stages_differ` may go"
    )
    first, second = run_fresh_ranks(_compared_over_the_world, 2)
    assert not first and "disagreement" in second


ENGINES = {
    "single_partition_of_fp32_groups": [Case(dp=2, zero=1), Case(dp=2, zero=2), Case(pp=2)],
    "fp32_groups_flat_partition": [Case(dp=2, zero=1, dtype="bf16"), Case(pp=2, dtype="bf16")],
    "fp32_partitioned_groups_flat": [Case(dp=2, zero=3), Case(dp=2, zero=3, dtype="bf16")],
}


def _trained_engines(rank: int, cases: list[Case]) -> list[dict[str, Any]]:
    seen = []
    for case in cases:
        engine = engine_of(case)
        optimizer = engine.deepspeed.optimizer
        asked = _Asked()
        result = engine.train_step(micro_batches_of(engine, case, global_batches(case)[0]), case.learning_rate, asked)
        flats = step_seams.flat_partitions(optimizer)
        # reading is a collective over the replicas, which fails on some of them only: asked where there is one
        alone = engine.mesh.data_parallel_size == 1
        unlinked = [_is_readable(parameter) for _, parameter in engine.parameters()] if alone else []
        seams.link_optimizer_state(optimizer)
        linked = [_is_readable(parameter) for _, parameter in engine.parameters()]
        seen.append(
            {
                "names": [name for name in step_seams.FLAT_PARTITIONS if hasattr(optimizer, name)],
                "stepped": {id(flat) for flat in flats} == {id(key) for key in engine.torch_optimizer.state},
                "dtypes": {flat.dtype for flat in flats},
                "partitioned": {seams.is_partitioned(parameter) for _, parameter in engine.parameters()},
                "can_refresh": hasattr(optimizer, "update_lp_params"),
                "can_link": hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"),
                "has_link_flag": hasattr(optimizer, "_hp_optimizer_states_linked"),
                "unlinked": unlinked,
                "linked": all(linked),
                "loss_scaler": scale_seams.loss_scaler_state(optimizer),
                "asked": asked.times,
                "micro_losses": len(result.micro_losses),
                "is_last_stage": engine.coordinate.pipeline_rank == case.pp - 1,
            }
        )
        engine.deepspeed.destroy()
    return seen


class _Asked:
    """A judge that takes every step and asks for its loss twice."""

    times = 0

    waits = True

    def takes(self, loss: Callable[[], float]) -> bool:
        self.times += 1
        return loss() == loss()

    def examine(self) -> None:
        raise AssertionError("the step was not taken")


def _is_readable(parameter: nn.Parameter) -> bool:
    try:
        return safe_get_full_optimizer_state(parameter, "exp_avg") is not None
    except (KeyError, ValueError, TypeError):
        return False


@pytest.fixture(scope="module")
def engines() -> dict[str, list[dict[str, Any]]]:
    """What each case's engine looks like after a step, by case and rank."""
    cases = [case for group in ENGINES.values() for case in group]
    by_rank = run_fresh_ranks(_trained_engines, 2, cases)
    return {str(case): [seen[index] for seen in by_rank] for index, case in enumerate(cases)}


ENGINE_CASES = [(name, case) for name, cases in ENGINES.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), ENGINE_CASES, ids=str)
def test_flat_partitions_are_what_the_torch_optimizer_steps(
    name: str, case: Case, engines: dict[str, list[dict[str, Any]]]
) -> None:
    for seen in engines[str(case)]:
        assert seen["names"] == [name], "a DeepSpeed optimizer renamed its flat fp32 partitions"
        assert seen["stepped"], f"{name} is not what torch's optimizer holds state for"
        assert seen["dtypes"] == {torch.float32}
        assert seen["partitioned"] == {case.zero == 3}
        assert seen["can_refresh"] == (case.zero != 3)
        assert seen["can_link"] == seen["has_link_flag"] == (case.zero != 3)
        assert seen["linked"], "moments are unreadable even after link_optimizer_state"
        assert seen["loss_scaler"] == {}


def _replicas_of_groups(rank: int, cases: list[Case]) -> list[tuple[set[Any], bool]]:
    """Of each case the ranks of each kind of group, and whether a rank's partition is its part of the group."""
    seen = []
    for case in cases:
        engine = engine_of(case)
        groups, partitions = (
            seams.flat_groups(engine.deepspeed.optimizer),
            step_seams.flat_partitions(engine.deepspeed.optimizer),
        )
        ranks = {
            (parameter.shard.is_dealt, tuple(dist.get_process_group_ranks(group.replicas)))  # type: ignore[attr-defined]
            for group in groups
            for parameter in group.parameters
        }
        pairs = zip(groups, partitions, strict=True)
        are_parts = all(len(own) * dist.get_world_size(group.replicas) == len(group.weights) for group, own in pairs)
        seen.append((ranks, are_parts))
    return seen


def test_groups_that_say_so_are_cut_over_the_ranks_with_the_same_experts() -> None:
    """The list of process groups is set before anything is cut, under a name that `dealt_groups_cut_over` knows."""
    case = Case(dp=4, ep=2, micro_batch=1, model={"num_experts": 4, "moe_intermediate_size": 29})
    cases = [case, replace(case, zero=2, dtype="bf16"), replace(case, dtype="bf16")]
    for rank, seen in enumerate(run_ranks(_replicas_of_groups, 4, cases)):
        assert seen == [({(False, (0, 1, 2, 3)), (True, (rank % 2, rank % 2 + 2))}, True)] * len(cases)


def test_zero_1_links_no_moments_itself(engines: dict[str, list[dict[str, Any]]]) -> None:
    """Its own `step` does, after the first group's; ours replaces it."""
    for case in (Case(pp=2), Case(pp=2, dtype="bf16")):
        for seen in engines[str(case)]:
            assert not any(seen["unlinked"]), "link_optimizer_state is not needed any more"


def _write_and_read_back(rank: int) -> dict[str, bool]:
    """131 x 48, 48 and other sizes, none of which five ranks divide."""
    engine = engine_of(Case(dp=5, zero=3, micro_batch=1))
    parameters = [parameter for _, parameter in engine.parameters()]
    torch.manual_seed(0)
    values = [torch.randn(parameter.shard.local_shape) for parameter in parameters]  # type: ignore[attr-defined]
    deepspeed_can = True
    try:
        for parameter, value in zip(parameters, values, strict=True):
            safe_set_full_fp32_param(parameter, value)
    except RuntimeError:
        deepspeed_can = False
    for parameter, value in zip(parameters, values, strict=True):
        write_weight(parameter, value)
    pairs = zip(parameters, values, strict=True)
    ours_can = all(torch.equal(read_parameter(parameter, ())["weight"], value) for parameter, value in pairs)
    return {"deepspeed": deepspeed_can, "ours": ours_can}


def test_zero_3_cannot_set_a_weight_that_its_ranks_do_not_divide() -> None:
    seen = run_ranks(_write_and_read_back, 5)
    assert all(rank["ours"] for rank in seen)
    assert not all(rank["deepspeed"] for rank in seen), "fixed in DeepSpeed: `write_weight` could use its setter"


def test_no_flat_partition_is_said_not_guessed() -> None:
    with pytest.raises(AssertionError, match="DeepSpeed has renamed it"):
        step_seams.flat_partitions(SimpleNamespace())


def _waits_for_the_device(rank: int, options: dict[str, Any]) -> list[int]:
    """How often the host waited for all work on the device, in each of four steps of three micro-batches."""
    waits: list[int] = []
    type(get_accelerator()).synchronize = lambda *_: waits.append(1)
    case = Case(accumulation=3, steps=4)
    config = case.config().model_copy(update={"deepspeed": options})  # unchecked: a config may not turn the timer on
    engine = build_engine(decoder_layers(config.model), config, resolve_layout(config, 1, "cpu"))
    seen = []
    for batch in global_batches(case):
        waits.clear()
        engine.train_step(micro_batches_of(engine, case, batch), case.learning_rate)
        seen.append(len(waits))
    return seen


def test_deepspeeds_throughput_timer_would_wait_for_the_device_at_every_forward() -> None:
    """utils/timer.py: and at the end of each step, from the third on. A hand-over of a pipeline is a forward too."""
    timed = {"timers": {"throughput": {"enabled": True}}}
    ((ours,), (theirs,)) = (run_fresh_ranks(_waits_for_the_device, 1, options) for options in ({}, timed))
    assert ours == [0, 0, 0, 0]
    assert theirs == [0, 0, 4, 4], "fixed in DeepSpeed: the timer may stay on"


def _fp16_engine(rank: int) -> dict[str, Any]:
    fp16 = Config.model_validate(Case(zero=3).config().model_dump() | {"precision": {"dtype": "fp16"}})
    optimizer = build_engine(decoder_layers(fp16.model), fp16, resolve_layout(fp16, 1, "cpu")).deepspeed.optimizer
    before = scale_seams.loss_scaler_state(optimizer)
    scale_seams.set_loss_scaler_state(optimizer, {name: value + 1 for name, value in before.items()})
    after = scale_seams.loss_scaler_state(optimizer)
    scaler = optimizer.loss_scaler = optimizer.loss_scaler._rules  # DeepSpeed's own
    fresh = dict(vars(scaler))
    for overflow in (False, True, False, True, True, False):
        scaler.update_scale(overflow)
    moved = {name for name, value in vars(scaler).items() if fresh[name] != value}
    return {"before": before, "after": after, "moved": moved}


def test_fp16s_loss_scale_is_read_and_put_back_and_nothing_is_forgotten() -> None:
    (seen,) = run_fresh_ranks(_fp16_engine, 1)
    assert tuple(seen["before"]) == scale_seams.FIELDS
    assert seen["before"]["cur_scale"] >= 2**10
    assert seen["after"] == {name: value + 1 for name, value in seen["before"].items()}
    assert seen["moved"] == set(scale_seams.FIELDS), "the loss scaler has state that a resume would lose"


MUON_READ = """
import sys
{before}
import deepspeed.runtime.zero.muon.muon_optimizer
sys.exit("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.slow
def test_reading_muon_no_longer_imports_the_compiler() -> None:
    """`keep_muon_uncompiled` saves that import; when the second process stops needing it, the defect is gone."""
    keep = "from megalite.engine.deepspeed.internals import keep_muon_uncompiled; keep_muon_uncompiled()"
    with_seam = subprocess.run([sys.executable, "-c", MUON_READ.format(before=keep)], check=False)
    without = subprocess.run([sys.executable, "-c", MUON_READ.format(before="")], check=False)
    assert with_seam.returncode == 0
    assert without.returncode == 1


@pytest.mark.parametrize(
    ("section", "model"), [("zero_optimization", DeepSpeedZeroConfig), ("fp16", DeepSpeedFP16Config)]
)
def test_the_keys_of_its_sections_are_those_that_the_config_knows(section: str, model: Any) -> None:
    """Of any other key it raises pydantic's error on the ranks."""
    assert model.model_config["extra"] == "forbid"
    removed = {path[1] for path in refused_keys() if path[0] == section and len(path) == 2} - NESTED[section]
    assert {field.alias or name for name, field in model.model_fields.items()} - removed == NESTED[section]


class _RecordingConfig(dict[str, Any]):
    """A config that remembers the keys that it is asked for."""

    keys_asked: ClassVar[set[str]] = set()

    def __contains__(self, key: object) -> bool:
        self.keys_asked.add(str(key))
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.keys_asked.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.keys_asked.add(key)
        return super().get(key, default)


def test_every_key_that_deepspeed_asks_for_is_passed_on_or_refused_with_a_reason() -> None:
    """One of a newer DeepSpeed would be called unknown, or do nothing in silence."""
    DeepSpeedConfig(_RecordingConfig(train_batch_size=1))
    known = PASSED_ON | {path[0] for path in refused_keys()}
    assert len(_RecordingConfig.keys_asked) > 40
    assert _RecordingConfig.keys_asked - known == set(), "add a row to megalite/config/stacks/deepspeed.yaml"
