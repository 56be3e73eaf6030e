"""Checks before ranks start: those of a dry run are those of a start, and leave no trace."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.runtime.local_ranks import COMPILE_WORKERS
from launch.trainer.local_run import finish_if_complete, print_dry_run
from launch.trainer.start.checks import check_run, check_start, find_position
from launch.trainer.start.flags import NO_FLAGS, StartFlags, split_flags
from launch.trainer.start.run_config import load_run_config
from launch.trainer.start.run_folder import check_run_folder, lock_run_folder
from megalite.config import Config, ConfigError
from megalite.monitor.events import EVENTS, read_events
from models.families import model_config
from tests.conftest import write_config
from tests.helpers.hub_models import HubModel
from tests.helpers.mirrors import complete
from tests.unit.launch.cli.test_mistakes import own_checkpoint

HUGE = {"hidden_size": 32768, "intermediate_size": 131072, "num_hidden_layers": 100}


def test_a_dry_run_of_a_folder_in_use_is_refused_and_frees_it(tiny: dict[str, Any]) -> None:
    config = Config.model_validate(tiny)
    check_run_folder(config)
    assert not config.run_dir.exists()
    with lock_run_folder(config):
        before = sorted(config.run_dir.iterdir())
        with pytest.raises(LaunchError, match="another run is using run_dir"):
            check_run_folder(config)
    check_run_folder(config)
    lock_run_folder(config).close()  # which a look at it does not keep
    assert sorted(config.run_dir.iterdir()) == before


@pytest.mark.parametrize("threads", ["x", "0", "-1", "1.5", ""])
def test_threads_that_are_no_number_are_refused(
    threads: str, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """libgomp ignores them and gives every rank all cores, while the summary says what the user has set."""
    config = Config.model_validate(tiny)
    for name in ("DS_ACCELERATOR", "GLIBC_TUNABLES", COMPILE_WORKERS):  # a fork server here may have set them
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", threads)
    with pytest.raises(LaunchError, match=f"^OMP_NUM_THREADS={threads} is no number of threads: set it to at least 1"):
        check_start(config, NO_FLAGS, is_dry=True)
    monkeypatch.setenv("OMP_NUM_THREADS", "77,1")  # of nested parallel regions
    said = check_start(config, NO_FLAGS, is_dry=True).environment_in_words
    assert "77 threads each" in said and "OMP_NUM_THREADS as you set it" in said and "threads spin" not in said


@pytest.mark.parametrize("below", ["", "further/down"])
def test_a_file_in_the_way_is_named_by_both(below: str, tiny: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    config = Config.model_validate(tiny | {"run_dir": str(tmp_path / "taken" / below)})
    for look in (check_run_folder, lock_run_folder):
        with pytest.raises(LaunchError, match=r"run_dir .*/taken.* cannot be written: .*: choose another run_dir"):
            look(config)


def test_a_folder_without_the_right_to_write_is_refused(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, who has every right."""
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(LaunchError, match="cannot be written: Permission denied"):
        check_run_folder(Config.model_validate(tiny))


def test_checkpoints_without_the_right_to_write_are_refused(
    tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would train all its steps before it finds out."""
    config = Config.model_validate(tiny)
    (config.run_dir / "checkpoints").mkdir(parents=True)
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "checkpoints")
    with pytest.raises(LaunchError, match="/checkpoints cannot be written: change its rights"):
        check_run_folder(config)


def test_force_starts_what_cannot_fit(tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    tiny["model"] |= HUGE
    config = Config.model_validate(tiny)
    with pytest.raises(LaunchError, match=r"needs 4.*GiB|needs 5.*GiB"):
        check_start(config, NO_FLAGS, is_dry=True)
    checked = check_start(config, StartFlags(force=True), is_dry=True)
    assert checked.memory is not None and checked.memory.cannot_fit and checked.memory.warning
    assert not config.run_dir.exists()


def finish(tiny: dict[str, Any], tmp_path: Path, mirror: str) -> Config:
    """A run that ended before its mirror had the last checkpoint, and is started again."""
    tiny["training"]["steps"] = 2
    tiny["checkpoint"] = {"mirror": mirror}
    own_checkpoint()(tiny, tmp_path)
    config = Config.model_validate(tiny)
    assert finish_if_complete(find_position(config, NO_FLAGS))
    return config


def test_the_mirror_of_a_complete_run_gets_what_it_lacks(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """As the end of that run has promised; no training and no other command would send it."""
    mirror = (tmp_path / "mirror").as_uri()
    config = finish(tiny, tmp_path, mirror)
    assert complete(mirror) == ["step_00000002"] and f"step_00000002 is on {mirror}" in capfd.readouterr().out
    assert [event["event"] for event in read_events(config.run_dir / EVENTS)] == ["mirrored"]
    lock_run_folder(config).close()  # which the upload does not keep


def test_a_mirror_that_cannot_be_reached_is_no_failure_of_a_complete_run(
    tiny: dict[str, Any], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = finish(tiny, tmp_path, "file:///proc/no/such/folder")
    said = capfd.readouterr()
    assert "mirroring step_00000002 failed" in said.err and "the run ends without this copy" in said.err
    assert "error: file:///proc/no/such/folder has not got the last checkpoint after 0." in said.err
    assert str(config.run_dir / "checkpoints") in said.err and "mirror_wait_minutes" in said.err


def test_a_run_that_is_complete_needs_no_memory(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started again, as a supervisor may on a smaller host, it says so and ends: it builds no engine."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    tiny["model"] |= HUGE
    own_checkpoint()(tiny, tmp_path)
    tiny["training"]["steps"] = 2
    checked = check_start(Config.model_validate(tiny), NO_FLAGS, is_dry=True)
    assert checked.position.is_complete and checked.memory is not None and checked.memory.cannot_fit
    tiny["training"]["steps"] = 3
    with pytest.raises(LaunchError, match="--force starts it all the same"):
        check_start(Config.model_validate(tiny), NO_FLAGS, is_dry=True)


def test_tokens_are_counted_from_those_a_checkpoint_has_seen(tiny: dict[str, Any], tmp_path: Path) -> None:
    """Two steps of whatever batch size; the config's own takes 4 x 32 tokens a step."""
    own_checkpoint()(tiny, tmp_path)
    del tiny["training"]["steps"]
    config = Config.model_validate(tiny | {"training": tiny["training"] | {"tokens": 1000}})
    assert config.total_steps == 8
    assert find_position(config, NO_FLAGS, is_dry=True).config.total_steps == 2 + 8, "it has seen none"
    assert [config.counted_from(2, seen).total_steps for seen in (256, 488, 489, 999, 1000, 2000)] == [8, 6, 6, 3, 2, 2]
    assert config.counted_from(2, 256).with_resolved({("recompute", "mode"): "full"}).total_steps == 8
    steps = Config.model_validate(tiny | {"training": tiny["training"] | {"steps": 9}})
    assert steps.counted_from(2, 256).total_steps == 9


def test_a_schedule_of_tokens_must_fit_into_the_length_that_the_start_counts(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    """8 steps at the config's batch size, of which a run without a checkpoint has none behind it."""
    del tiny["training"]["steps"]
    tiny["training"]["tokens"] = 1000
    tiny["schedule"] = {"name": "wsd", "warmup_steps": 5, "decay_steps": 4}
    config = load_run_config(write_config(tmp_path / "c.yaml", tiny))
    with pytest.raises(ConfigError, match=r"5 \+ schedule.decay_steps 4 is longer than the run of 8 steps"):
        find_position(config, NO_FLAGS, is_dry=True)
    mirrored = config.model_copy(update={"checkpoint": config.checkpoint.model_copy(update={"mirror": "file:///m"})})
    find_position(mirrored, NO_FLAGS, is_dry=True)  # whose ranks may find a checkpoint there
    own_checkpoint()(tiny, tmp_path)
    assert find_position(config, NO_FLAGS, is_dry=True).config.total_steps == 10, "2 steps have seen no token"
    own_checkpoint(tokens_seen=360)(tiny, tmp_path / "grown")
    with pytest.raises(ConfigError, match="the run of 7 steps: they may add up to at most 7"):
        find_position(config, NO_FLAGS, is_dry=True)


@pytest.mark.parametrize(
    ("model_type", "lacking", "left"),
    [
        ("gpt2", "q_proj, k_proj, v_proj, o_proj, up_proj, down_proj", None),
        ("gpt_neox", "q_proj, k_proj, v_proj", "o_proj, up_proj, down_proj"),
        ("phi3", "q_proj, k_proj, v_proj, gate_proj, up_proj", "o_proj, down_proj"),
        ("llama", None, None),
    ],
)
def test_adapters_that_no_export_can_hold_are_refused_before_training(
    model_type: str, lacking: str | None, left: str | None, tiny: dict[str, Any]
) -> None:
    """Else days of training end with the only notice of it."""
    model = HubModel("", model_type).config().to_diff_dict()
    tiny |= {"model": model_config(model), "adapter": {"name": "lora"}, "checkpoint": {"export_hf": "last"}}
    tiny["training"]["initialize_from"] = "some/model"
    if lacking is None:
        check_run(Config.model_validate(tiny))
        return
    with pytest.raises(ConfigError, match=f"a {model_type} model holds {lacking} fused") as refused:
        check_run(Config.model_validate(tiny))
    assert ("or set adapter.targets" in str(refused.value)) == (left is not None)
    if left is not None:
        assert f"[{left}]" in str(refused.value)
        check_run(Config.model_validate(tiny | {"adapter": {"name": "lora", "targets": left.split(", ")}}))
    check_run(Config.model_validate(tiny | {"checkpoint": {"export_hf": "off"}}))


@pytest.mark.parametrize("is_resume", [True, False])
def test_where_a_run_starts_is_said_once(
    is_resume: bool, tiny: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    own_checkpoint()(tiny, Path(tiny["run_dir"]))
    step, says = Path(tiny["run_dir"]) / "checkpoints" / "step_00000002", "resumes from step 2 of 4 ({})"
    if not is_resume:
        tiny["training"]["initialize_from"], says = str(step), "new, with the weights of {}"
        tiny["run_dir"] += "_new"
    print_dry_run(Config.model_validate(tiny))
    said = "".join(capfd.readouterr())
    assert said.count(str(step)) == 1 and f"{tiny['run_dir']}, {says.format(step)}\n" in said


def test_flags_are_found_among_the_arguments_of_a_rank() -> None:
    flags, words = split_flags(["c.yaml", "--allow-change", "a.b=1", "--force"])
    assert flags == StartFlags(force=True, allow_change=True) and words == ["c.yaml", "a.b=1"]
    assert split_flags(["c.yaml"]) == (NO_FLAGS, ["c.yaml"]) and split_flags(flags.words)[0] == flags
