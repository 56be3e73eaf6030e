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
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import deepspeed.comm
import deepspeed.ops
import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import LayerSpec as DeepSpeedLayerSpec
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.fp16 import loss_scaler
from deepspeed.runtime.pipe.topology import PipelineParallelGrid
from deepspeed.runtime.precision_config import DeepSpeedFP16Config
from deepspeed.runtime.utils import partition_balanced
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils import logger, safe_get_full_optimizer_state, safe_set_full_fp32_param
from torch import nn

from megalite.config import Config, resolve_layout
from megalite.config.deepspeed import NESTED, REMOVED
from megalite.engine import deepspeed_internals as seams
from megalite.engine.activity import Phase
from megalite.engine.build import build_engine
from megalite.engine.distributed import Grid
from megalite.engine.parameter_state import read_parameter, write_weight
from megalite.engine.pipeline import Pipeline
from megalite.parallel.mesh import Mesh
from models.decoder import decoder_layers
from tests.helpers.engine_cases import MODEL, Case, engine_of, global_batches, micro_batches_of
from tests.helpers.rank_pool import run_fresh_ranks, run_ranks


def _shared_memory_collective(rank: int) -> dict[str, Any]:
    torch_backend = sys.modules["deepspeed.comm.torch"]  # as an attribute of deepspeed.comm it is torch itself
    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    compiled = []

    def compile_now(self: Any, *_: Any) -> Any:
        compiled.append(self.NAME)
        return SimpleNamespace()

    type(builder).load = compile_now
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


def _warnings_of_collectives(rank: int) -> tuple[list[str], list[str]]:
    def call() -> list[str]:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if quieted:
                seams.quiet_logging()
            whole = torch.zeros(1)
            deepspeed.comm.all_gather_into_tensor(whole, torch.ones(1))
            deepspeed.comm.reduce_scatter_tensor(whole, torch.ones(1))
        return [str(w.message) for w in seen]

    quieted = False
    loud = call()
    quieted = True
    return loud, call()


@pytest.mark.skipif(not hasattr(dist, "all_gather_single"), reason="torch before 2.13 does not deprecate the old names")
def test_deepspeed_calls_collectives_by_deprecated_names() -> None:
    ((loud, quiet),) = run_ranks(_warnings_of_collectives, 1)
    assert len(loud) == 2
    assert quiet == []


def test_the_pipeline_grid_lacks_the_tensor_parallel_group() -> None:
    # deepspeed.checkpointing and others ask an mpu for it
    assert not hasattr(PipelineParallelGrid, "get_tensor_model_parallel_group")
    assert hasattr(PipelineParallelGrid, "get_tensor_model_parallel_rank")
    assert hasattr(Grid, "get_tensor_model_parallel_group")


def test_deepspeeds_own_cut_may_leave_a_stage_without_a_block() -> None:
    # embedding, 4 blocks, norm, head: a stage of the head alone hangs the gradient norm (DeepSpeed#1522)
    costs = [1000, 1, 1, 1, 1, 0, 1000]
    bounds = partition_balanced(costs, 3)
    blocks = set(range(1, 5))
    assert any(not blocks & set(range(a, b)) for a, b in pairwise(bounds)), bounds


def test_deepspeeds_layer_spec_takes_module_classes_only() -> None:
    with pytest.raises((RuntimeError, TypeError)):
        DeepSpeedLayerSpec(lambda: nn.Linear(1, 1))


class _Watched(Pipeline):
    """Notes what exists when DeepSpeed asks for the cut, and who sets the bounds."""

    def _partition_layers(self, method: str = "parameters") -> None:
        self.at_partition = {name: hasattr(self, name) for name in ("_grid", "stage_id", "forward_funcs", "parts")}
        super()._partition_layers(method)
        self.bounds = (self._local_start, self._local_stop)


def _pipeline(rank: int) -> dict[str, Any]:
    case = Case(tp=2, pp=2, model={"tie_word_embeddings": True})
    config = case.config()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        model = _Watched(decoder_layers(config.model), config, Mesh(2, 2, 1))
    after_ours = _warnings_of_backward(model)
    PipelineModule._synchronize_tied_weights(model)
    after_theirs = _warnings_of_backward(model)
    return {
        "printed": printed.getvalue(),
        "at_partition": model.at_partition,
        "bounds": model.bounds,
        "parts": model.parts,
        "stage": model.stage_id,
        "built": len(model.forward_funcs),
        "tensor_rank": model.tensor_parallel.rank,
        "tied_keys": list(model.tied_comms),
        "tied_attributes": [comm["weight_attr"] for comm in model.tied_comms.values()],
        "warnings": {"ours": after_ours, "theirs": after_theirs},
    }


def _warnings_of_backward(model: Pipeline) -> list[str]:
    """What torch says about the broadcast when the tied weight is first differentiated."""
    (tied,) = model.tied_comms.values()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        tied["module"].weight.sum().backward()
    return [str(warning.message) for warning in seen if "broadcast" in str(warning.message)]


@pytest.fixture(scope="module")
def pipelines() -> list[dict[str, Any]]:
    return run_ranks(_pipeline, 4)


def test_the_cut_happens_after_the_groups_and_before_the_layers(pipelines: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(pipelines):
        expected = {"_grid": True, "stage_id": True, "forward_funcs": False, "parts": False}
        assert seen["at_partition"] == expected, "runtime/pipe/module.py: PipelineModule.__init__ changed its order"
        assert (seen["stage"], seen["tensor_rank"]) == divmod(rank, 2)


def test_our_boundaries_are_the_ones_that_get_built(pipelines: list[dict[str, Any]]) -> None:
    for seen in pipelines:
        start, stop = seen["parts"][seen["stage"]], seen["parts"][seen["stage"] + 1]
        assert seen["bounds"] == (start, stop)
        assert seen["built"] == stop - start
        assert seen["parts"][0] == 0 and seen["parts"][-1] == MODEL["num_hidden_layers"] + 3  # type: ignore[operator]


def test_tied_layers_are_found_by_key_and_attribute(pipelines: list[dict[str, Any]]) -> None:
    for seen in pipelines:
        assert seen["tied_keys"] == ["model/embed_tokens"]
        assert seen["tied_attributes"] == [["weight"]]


def test_deepspeed_prints_its_geometry(pipelines: list[dict[str, Any]]) -> None:
    assert "SEED_LAYERS" in pipelines[0]["printed"]  # runtime/pipe/module.py
    assert "Using topology" in pipelines[0]["printed"]  # runtime/pipe/topology.py
    with contextlib.redirect_stdout(io.StringIO()) as outside, seams.quiet_stdout():
        print("partition")
    assert outside.getvalue() == ""


def test_deepspeed_broadcasts_tied_weights_under_autograd(pipelines: list[dict[str, Any]]) -> None:
    assert all(seen["warnings"]["theirs"] for seen in pipelines), "fixed in DeepSpeed: the override can go"
    assert not any(seen["warnings"]["ours"] for seen in pipelines)


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
        aggregated = _calls_of(type(engine.deepspeed), "_aggregate_total_loss") if case.pp > 1 else []
        result = engine.train_step(micro_batches_of(engine, case, global_batches(case)[0]), case.learning_rate, asked)
        flats = seams.flat_partitions(optimizer)
        # reading is a collective over the replicas, which fails on some of them only: asked where there is one
        alone = engine.mesh.data_parallel_size == 1
        unlinked = [_is_readable(parameter) for _, parameter in engine.parameters()] if alone else []
        seams.link_optimizer_state(optimizer)
        linked = [_is_readable(parameter) for _, parameter in engine.parameters()]
        seen.append(
            {
                "names": [name for name in seams.FLAT_PARTITIONS if hasattr(optimizer, name)],
                "stepped": {id(flat) for flat in flats} == {id(key) for key in engine.torch_optimizer.state},
                "dtypes": {flat.dtype for flat in flats},
                "partitioned": {seams.is_partitioned(parameter) for _, parameter in engine.parameters()},
                "can_refresh": hasattr(optimizer, "update_lp_params"),
                "can_link": hasattr(optimizer, "_lazy_init_hp_params_optimizer_state"),
                "has_link_flag": hasattr(optimizer, "_hp_optimizer_states_linked"),
                "unlinked": unlinked,
                "linked": all(linked),
                "loss_scaler": seams.loss_scaler_state(optimizer),
                "asked": asked.times,
                "aggregated": len(aggregated),
                "micro_losses": len(result.micro_losses),
                "is_last_stage": engine.coordinate.pipeline_rank == case.pp - 1,
            }
        )
        engine.deepspeed.destroy()
    return seen


class _Asked:
    """A judge that takes every step and asks for its loss twice."""

    times = 0

    def takes(self, loss: Callable[[], float]) -> bool:
        self.times += 1
        return loss() == loss()

    def examine(self) -> None:
        raise AssertionError("the step was not taken")


def _calls_of(owner: type, name: str) -> list[str]:
    """Gets an entry per call of a method."""
    calls, original = [], getattr(owner, name)

    def counted(self: Any, *arguments: Any) -> Any:
        calls.append(name)
        return original(self, *arguments)

    setattr(owner, name, counted)
    return calls


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


@pytest.mark.parametrize(("name", "case"), ENGINE_CASES, ids=str)
def test_an_optimizer_is_stopped_between_the_norm_and_the_update(
    name: str, case: Case, engines: dict[str, list[dict[str, Any]]]
) -> None:
    """tests/ranks/megalite/engine/test_step_gate.py shows that it does stop there, and leaves no trace."""
    for seen in engines[str(case)]:
        assert seen["asked"] == 1, "DeepSpeed no longer asks where `GatedStep` listens"
        assert seen["micro_losses"] == (case.accumulation if seen["is_last_stage"] else 0)
        assert seen["aggregated"] == (case.pp > 1), "`train_batch` computes the loss again that a judge has asked for"


def test_zero_1_links_the_moments_of_its_first_group_only(engines: dict[str, list[dict[str, Any]]]) -> None:
    for seen in engines[str(Case(pp=2))]:
        assert any(seen["unlinked"]), "the first group's moments are linked by DeepSpeed itself"
        assert not all(seen["unlinked"]), "fixed in DeepSpeed: link_optimizer_state need not unset the flag"
    for seen in engines[str(Case(pp=2, dtype="bf16"))]:
        assert all(seen["unlinked"])


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
        seams.flat_partitions(SimpleNamespace())


def _fp16_engine(rank: int) -> dict[str, Any]:
    type(get_accelerator()).is_fp16_supported = lambda self: True  # the CPU here may have no fp16 matrix product
    fp16 = Config.model_validate(Case().config().model_dump() | {"precision": {"dtype": "fp16"}})
    optimizer = build_engine(decoder_layers(fp16.model), fp16, resolve_layout(fp16, 1, "cuda")).deepspeed.optimizer
    before = seams.loss_scaler_state(optimizer)
    seams.set_loss_scaler_state(optimizer, {name: value + 1 for name, value in before.items()})
    after = seams.loss_scaler_state(optimizer)
    scaler = optimizer.loss_scaler
    fresh = dict(vars(scaler))
    for overflow in (False, True, False, True, True, False):
        scaler.update_scale(overflow)
    moved = {name for name, value in vars(scaler).items() if fresh[name] != value}
    return {"before": before, "after": after, "moved": moved, "at_smallest": _at_smallest_loss_scale(optimizer)}


def _at_smallest_loss_scale(optimizer: Any) -> list[str | float]:
    """What one more overflow does there: DeepSpeed's own way, and ours."""
    scaler, seen = optimizer.loss_scaler, []
    for prepare in (lambda _: setattr(scaler, "raise_error_at_min_scale", True), seams.stay_at_smallest_loss_scale):
        prepare(optimizer)
        seams.set_loss_scaler_state(optimizer, {"cur_scale": scaler.min_scale, "cur_hysteresis": 1})
        assert not seams.loss_scale_can_fall(optimizer)
        try:
            scaler.update_scale(True)
            seen.append(scaler.cur_scale / scaler.min_scale)
        except Exception as error:
            seen.append(str(error))
    seams.set_loss_scaler_state(optimizer, {"cur_scale": 2 * scaler.min_scale})
    assert seams.loss_scale_can_fall(optimizer)
    return seen


def test_fp16s_loss_scale_is_read_and_put_back_and_nothing_is_forgotten() -> None:
    (seen,) = run_fresh_ranks(_fp16_engine, 1)
    assert tuple(seen["before"]) == seams.LOSS_SCALER_FIELDS
    assert seen["before"]["cur_scale"] >= 2**10
    assert seen["after"] == {name: value + 1 for name, value in seen["before"].items()}
    assert seen["moved"] == set(seams.LOSS_SCALER_FIELDS), "the loss scaler has state that a resume would lose"
    theirs, ours = seen["at_smallest"]
    assert "cannot decrease scale anymore" in str(theirs), "fixed in DeepSpeed: nothing is raised at the smallest scale"
    assert ours == 1.0


MUON_READ = """
import sys
{before}
import deepspeed.runtime.zero.muon.muon_optimizer
sys.exit("torch._inductor.compile_fx" in sys.modules)
"""


@pytest.mark.slow
def test_reading_muon_no_longer_imports_the_compiler() -> None:
    """`keep_muon_uncompiled` saves that import; when the second process stops needing it, the defect is gone."""
    keep = "from megalite.engine.deepspeed_internals import keep_muon_uncompiled; keep_muon_uncompiled()"
    with_seam = subprocess.run([sys.executable, "-c", MUON_READ.format(before=keep)], check=False)
    without = subprocess.run([sys.executable, "-c", MUON_READ.format(before="")], check=False)
    assert with_seam.returncode == 0
    assert without.returncode == 1


def _noted_instructions(rank: int) -> dict[str, list[tuple[str, int | None]]]:
    case = Case(pp=2, accumulation=2, model={"tie_word_embeddings": True})
    engine, batches = engine_of(case), global_batches(case)
    batch = micro_batches_of(engine, case, batches[0])
    noted = {}
    for phase, execute in (
        (Phase.STEP, lambda: engine.train_step(batch, 1e-3)),
        (Phase.EVALUATION, lambda: engine.evaluate(batch, case.accumulation)),
    ):
        execute()
        notes = engine.activity.notes()
        noted[phase.value] = [
            (note.operation.value, note.micro_batch) for note in notes if note.phase_number == notes[-1].phase_number
        ]
    return noted


def test_every_pipeline_instruction_is_seen_before_it_runs() -> None:
    """The watchdog's knowledge; an instruction that a new DeepSpeed executes in another way would be missing."""
    first, last = run_ranks(_noted_instructions, 2)
    end = ["reduce_tied_gradients", "reduce_gradients", "optimizer", "loss", "unite_tied_weights", "finish"]
    assert first["step"] == [
        ("begin", None),
        ("load", 1),
        ("forward", 1),
        ("send_activation", 1),
        ("load", 2),
        ("forward", 2),
        ("receive_gradient", 1),
        ("send_activation", 2),
        ("backward", 1),
        ("receive_gradient", 2),
        ("backward", 2),
        *((name, None) for name in end),
    ]
    of_micro_batch = ["receive_activation", "load", "forward", "backward", "send_gradient"]
    assert last["step"] == [
        ("begin", None),
        *((name, number) for number in (1, 2) for name in of_micro_batch),
        *((name, None) for name in end),
    ]
    assert [name for name, number in first["evaluation"] if number is None] == ["begin", "meet", "loss", "finish"]
    for stage, exchange in ((first, "send_activation"), (last, "receive_activation")):
        for number in (1, 2):
            of_micro_batch = [name for name, each in stage["evaluation"] if each == number]
            assert sorted(of_micro_batch) == sorted(["load", "forward", exchange])


def _timeouts_without_ours(rank: int) -> set[float]:
    import megalite.engine.build as module

    module.share_timeout = lambda: None
    engine_of(Case(pp=2, dp=1))
    return {seams.timeout_of(group).total_seconds() for group in seams.process_groups()}


def test_deepspeed_s_groups_have_not_the_timeout_of_the_job() -> None:
    """tests/ranks/megalite/engine/test_timeouts.py holds that they have it after all."""
    for seen in run_fresh_ranks(_timeouts_without_ours, 2, timeout_s=90):
        assert seen == {90.0, 1800.0}, "fixed in DeepSpeed, or torch: share_timeout has nothing to do"


@pytest.mark.parametrize(
    ("section", "model"), [("zero_optimization", DeepSpeedZeroConfig), ("fp16", DeepSpeedFP16Config)]
)
def test_the_keys_of_its_sections_are_those_that_the_config_knows(section: str, model: Any) -> None:
    """Of any other key it raises pydantic's error on the ranks."""
    assert model.model_config["extra"] == "forbid"
    removed = {name.partition(".")[2] for name in REMOVED if name.startswith(f"{section}.")}
    assert {field.alias or name for name, field in model.model_fields.items()} - removed == NESTED[section]
