"""Where a run starts, in the cases that are no mistake (those are in test_mistakes.py)."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.checkpoints.listing import checkpoints_in
from launch.inspection.status import read_status
from launch.trainer.data.opening import open_data
from launch.trainer.run_summary import warn_of_passed_over
from launch.trainer.start.checks import find_position
from launch.trainer.start.flags import NO_FLAGS
from launch.trainer.start.resume import checkpoints_of, find_start
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import find_latest, read_manifest
from megalite.config import Config
from tests.unit.launch.cli.test_mistakes import own_checkpoint

DROPOUT = {"attention_dropout": 0.1, "residual_dropout": 0.2, "embedding_dropout": 0.3}


@pytest.mark.parametrize("saved", [{}, DROPOUT], ids=["turned on", "turned off"])
def test_a_run_goes_on_with_another_dropout(saved: dict[str, float], tiny: dict[str, Any], tmp_path: Path) -> None:
    """It changes nothing about what the checkpoint computes, so it must not count as another model."""
    before = copy.deepcopy(tiny)
    before["model"] |= saved
    own_checkpoint()(before, tmp_path)
    tiny["model"] |= DROPOUT if not saved else {}
    config = Config.model_validate(tiny)
    own, skipped = find_latest(checkpoints_of(config))
    start = find_start(config, open_data(config), own, skipped)
    assert start.is_resume and start.step == 2


@pytest.mark.parametrize("harm", ["damaged", "renamed"])
def test_a_newer_checkpoint_that_is_passed_over_is_a_warning(
    harm: str, tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its steps are lost: with --quiet nothing said so."""
    own_checkpoint()(copy.deepcopy(tiny), tmp_path)
    config = Config.model_validate(tiny)
    root = checkpoints_of(config)
    newer = shutil.copytree(root / "step_00000002", root / "step_00000004")
    if harm == "damaged":
        (newer / "manifest.json").write_text("{}")
    capfd.readouterr()
    start = find_position(config, NO_FLAGS).start
    warn_of_passed_over(start)
    (reason,) = start.passed_over
    assert start.step == 2 and reason.startswith(f"{newer}")
    said = capfd.readouterr()
    assert f"warning: passed over: {reason}; the run starts from {root / 'step_00000002'}" in said.err
    (problem,) = read_status(config.run_dir).problems[-1:]
    assert problem == reason
    fresh = copy.deepcopy(tiny) | {"run_dir": str(tmp_path / "fresh")}
    fresh["training"]["initialize_from"] = str(config.run_dir)
    assert find_position(Config.model_validate(fresh), NO_FLAGS).start.passed_over == (reason,)


@pytest.mark.parametrize(
    "option",
    [{"sliding_window": 3}, {"scale_embeddings": True}, {"rope_scaling": {"rope_type": "linear", "factor": 2}}],
)
def test_an_older_checkpoint_without_an_option_is_of_a_model_without_it(
    option: dict[str, Any], tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Shapes are equal, so nothing later would notice that the run goes on as another function."""
    own_checkpoint()(copy.deepcopy(tiny), tmp_path)
    tiny["model"] |= option
    config = Config.model_validate(tiny)
    own, skipped = find_latest(checkpoints_of(config))
    with pytest.raises(CheckpointError, match=f"of another model: its model.({next(iter(option))}|layer_types) is"):
        find_start(config, open_data(config), own, skipped)


@pytest.mark.parametrize(
    ("saved", "option"),
    [(None, "name"), ({"rank": 8}, "rank"), ({"alpha": 3}, "alpha"), ({"targets": ["q_proj"]}, "targets")],
)
def test_a_run_does_not_go_on_with_other_adapters(
    saved: dict[str, Any] | None, option: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Another alpha fits in shape, and would make another model of what is trained."""
    made = {} if saved is None else {"adapter": {"name": "lora"} | saved}
    own_checkpoint(**made)(copy.deepcopy(tiny), tmp_path)
    tiny["training"]["initialize_from"] = "unused"
    config = Config.model_validate(tiny | {"adapter": {"name": "lora"}})
    own, skipped = find_latest(checkpoints_of(config))
    with pytest.raises(CheckpointError, match=f"was trained with adapter.{option} "):
        find_start(config, open_data(config), own, skipped)
    if saved is not None:
        config = Config.model_validate(tiny | made)
        assert find_start(config, open_data(config), own, skipped).is_resume


def test_the_order_of_targets_is_no_change(tiny: dict[str, Any], tmp_path: Path) -> None:
    own_checkpoint(adapter={"name": "lora", "targets": ["v_proj", "q_proj"]})(copy.deepcopy(tiny), tmp_path)
    tiny["training"]["initialize_from"] = "unused"
    config = Config.model_validate(tiny | {"adapter": {"name": "lora", "targets": ["q_proj", "v_proj"]}})
    own, skipped = find_latest(checkpoints_of(config))
    assert find_start(config, open_data(config), own, skipped).is_resume


@pytest.mark.parametrize(
    ("name", "stack"),
    [
        ("global_step10/mp_rank_00_model_states.pt", "DeepSpeed"),
        ("zero_pp_rank_0_mp_rank_00_optim_states.pt", "DeepSpeed"),
        ("iter_0000010/mp_rank_00/model_optim_rng.pt", "Megatron-LM"),
        ("latest_checkpointed_iteration.txt", "Megatron-LM"),
        ("checkpoint-500/trainer_state.json", "transformers' Trainer"),
        ("checkpoint/step-10/__0_0.distcp", "torch.distributed"),
    ],
)
def test_a_checkpoint_of_another_stack_is_named_and_no_new_run_begins(
    name: str, stack: str, tiny: dict[str, Any], tmp_path: Path
) -> None:
    """Whoever names its folder as run_dir thinks that training goes on, and would find weights of a new model."""
    config = Config.model_validate(tiny | {"run_dir": str(tmp_path / "theirs")})
    (config.run_dir / name).parent.mkdir(parents=True)
    (config.run_dir / name).touch()
    said = rf"theirs:? holds a checkpoint of {stack} \({name.split('/')[0]}.*: make a Hugging Face folder of it"
    with pytest.raises(CheckpointError, match=f"{said}.*choose another run_dir"):
        find_start(config, open_data(config), None, ())
    for reader in (read_manifest, lambda folder: checkpoints_in(str(folder))):  # as generate and export read it
        with pytest.raises(CheckpointError, match=said):
            reader(config.run_dir)
    anew = Config.model_validate(config.model_dump() | {"checkpoint": {"resume": False}})
    assert find_start(anew, open_data(anew), None, ()).step == 0
