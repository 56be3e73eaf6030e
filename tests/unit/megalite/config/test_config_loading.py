"""What a good config becomes: defaults, derived sizes, the layout and YAML."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from data_pipeline import path_suggestions
from megalite.config import Config, ConfigError, load_config, resolve_layout, wanted_world_size
from megalite.config.suggestions import nearest_path


def sections(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield model
    for field in model.model_fields.values():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from sections(field.annotation)


@pytest.mark.parametrize("nearest", [nearest_path, path_suggestions.did_you_mean])
def test_a_misspelt_path_is_compared_with_so_many_names(
    nearest: Callable[[Path], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder of ten million files took minutes before the message that one is not there."""
    (tmp_path / "config.yaml").touch()
    assert nearest(tmp_path / "confg.yaml") == f" (did you mean {tmp_path / 'config.yaml'}?)"
    listed = itertools.count()
    monkeypatch.setattr(Path, "iterdir", lambda self: (self / str(n) for n in iter(listed.__next__, 20_000)))
    assert nearest(tmp_path / "confg.yaml") == ""
    assert next(listed) < 20_000


def test_required_options_are_enough_and_sizes_are_derived(minimal: Path) -> None:
    config = load_config(minimal)
    assert (config.model.num_key_value_heads, config.model.head_dim) == (4, 16)
    assert config.data.path == ["shards/stdlib"]
    assert config.run_dir == Path("runs/tiny"), "relative paths stay as given"
    assert config.parallel.data_parallel_size == "auto"
    assert config.optimizer.betas == (0.9, 0.95)
    assert config.deepspeed == {}
    assert config.total_steps == 10


def test_null_means_derived_as_in_hugging_face_files(minimal: Path) -> None:
    assert load_config(minimal, ["model.head_dim=null", "model.num_key_value_heads=null"]) == load_config(minimal)
    assert load_config(minimal, ["model.hidden_size=66", "model.head_dim=16"]).model.head_dim == 16


@pytest.mark.parametrize("number", ["1e-3", "1E-3", "1.e-3", "1.0e-3", ".001", "0.001", "'1e-3'"])
def test_numbers_as_people_write_them(minimal: Path, number: str) -> None:
    assert load_config(minimal, [f"optimizer.learning_rate={number}"]).optimizer.learning_rate == 1e-3
    path = minimal.with_name("number.yaml")
    path.write_text(minimal.read_text() + f"optimizer:\n  learning_rate: {number}\n")
    assert load_config(path).optimizer.learning_rate == 1e-3


def test_whole_numbers_may_be_written_with_exponents_and_underscores(minimal: Path) -> None:
    assert load_config(minimal, ["training.steps=null", "training.tokens=1e9"]).training.tokens == 10**9
    assert load_config(minimal, ["training.steps=1_000"]).training.steps == 1000


def test_yaml_1_1_surprises_stay_text(minimal: Path) -> None:
    """PyYAML alone reads these as False, 90 and a date."""
    for text in ("no", "1:30", "2024-01-01"):
        assert load_config(minimal, [f"monitor.wandb.project={text}"]).monitor.wandb.project == text
    assert load_config(minimal, ["monitor.plot=no"]).monitor.plot is False


def test_a_comment_in_an_override_is_no_silent_loss(minimal: Path) -> None:
    """Of two runs, `run_dir=exp #1` and `run_dir=exp #2`, the second would go on where the first ended."""
    for lost in ("run_dir=exp #1", "run_dir=#1", "data.path=[a, b] # 2"):
        with pytest.raises(ConfigError, match='" #" begins a comment in YAML'):
            load_config(minimal, [lost])
    for whole, name in (("run_dir='exp #1'", "exp #1"), ('run_dir="a # b"', "a # b"), ("run_dir=exp#1", "exp#1")):
        assert load_config(minimal, [whole]).run_dir == Path(name)


def test_overrides_nest_merge_and_the_last_one_wins(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "deepspeed.zero_optimization.ignore_unused_parameters=true",
            "deepspeed.zero_optimization.allgather_bucket_size=5e8",
            "training.seed=1",
            "training.seed=2",
            "data.path=[a, b]",
            "monitor=",
        ],
    )
    assert config.deepspeed == {"zero_optimization": {"ignore_unused_parameters": True, "allgather_bucket_size": 5e8}}
    assert config.training.seed == 2
    assert config.data.path == ["a", "b"]
    assert config.monitor == load_config(minimal).monitor, "an empty section means its defaults"


def test_round_trip_through_yaml(minimal: Path) -> None:
    config = load_config(
        minimal,
        [
            "monitor.wandb.name='1e3'",
            "training.initialize_from=a/b",
            "optimizer.eps=1e-12",
            "deepspeed.aio.x=[1, null]",
        ],
    )
    path = minimal.with_name("again.yaml")
    path.write_text(config.to_yaml())
    assert load_config(path) == config


def test_config_never_changes_after_loading(minimal: Path) -> None:
    config = load_config(minimal)
    with pytest.raises(ValidationError):
        config.training.seed = 3


def test_tokens_round_up_to_whole_steps(minimal: Path) -> None:
    per_step = 8 * 32
    for tokens, steps in [(1, 1), (per_step, 1), (per_step + 1, 2), (10 * per_step, 10)]:
        assert load_config(minimal, ["training.steps=null", f"training.tokens={tokens}"]).total_steps == steps


def test_default_decay_is_a_tenth_of_the_run(minimal: Path) -> None:
    schedule = load_config(minimal, ["schedule.name=wsd"]).schedule
    assert [schedule.wsd_decay_steps(steps) for steps in (1, 9, 100)] == [1, 1, 10]
    given = load_config(minimal, ["schedule.name=wsd", "schedule.decay_steps=3"]).schedule
    assert given.wsd_decay_steps(100) == 3


@pytest.mark.parametrize("pipeline", [1, 2, 3, 4, 5])
def test_layers_need_not_divide_over_stages(minimal: Path, pipeline: int) -> None:
    resolve_layout(load_config(minimal, [f"parallel.pipeline_parallel_size={pipeline}"]), pipeline, "cpu")


def test_layout_on_a_world(minimal: Path) -> None:
    layout = resolve_layout(load_config(minimal, ["parallel.tensor_parallel_size=2"]), 8, "cpu")
    assert (layout.tensor_parallel_size, layout.pipeline_parallel_size, layout.data_parallel_size) == (2, 1, 4)
    assert (layout.world_size, layout.gradient_accumulation_steps, layout.zero_stage) == (8, 1, 1)
    assert layout.notices == ()


def test_zero_stage_0_is_served_by_1_and_said(minimal: Path) -> None:
    layout = resolve_layout(load_config(minimal, ["parallel.zero_stage=0"]), 2, "cpu")
    assert layout.zero_stage == 1
    assert len(layout.notices) == 1 and layout.notices[0].startswith("zero_stage 0 is served by stage 1:")
    assert resolve_layout(load_config(minimal, ["parallel.zero_stage=3"]), 2, "cpu").zero_stage == 3


def test_sequence_parallel_without_tensor_parallel_is_the_identity(minimal: Path) -> None:
    overrides = ["parallel.sequence_parallel=true", "training.sequence_length=31"]
    assert resolve_layout(load_config(minimal, overrides), 1, "cpu").notices == ()


def test_wanted_world_size(minimal: Path) -> None:
    four = ["parallel.tensor_parallel_size=2", "parallel.pipeline_parallel_size=2"]
    auto = load_config(minimal, four)
    assert [wanted_world_size(auto, count) for count in (None, 4, 7, 8)] == [4, 4, 4, 8]
    assert wanted_world_size(load_config(minimal, [*four, "parallel.data_parallel_size=2"]), None) == 8
    with pytest.raises(ConfigError, match="needs 4 GPUs, but this machine has 2: use sizes whose product is at"):
        wanted_world_size(auto, 2)


def test_fp16_and_its_loss_scaling_are_for_gpus(minimal: Path) -> None:
    overrides = ["precision.dtype=fp16", "deepspeed.fp16.initial_scale_power=8"]
    resolve_layout(load_config(minimal, overrides), 1, "cuda")


def test_every_option_is_explained() -> None:
    for section in sections(Config):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name} has no docstring"
            assert "\n" not in field.description, f"{section.__name__}.{name}: one line, for --help and tables"


def test_config_is_light_to_import() -> None:
    """`--help`, config errors and planning must not wait for torch."""
    code = "import sys, megalite.config; print([m for m in ('torch', 'numpy', 'deepspeed') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("run_dir=~/runs/x", "run_dir ~/runs/x: ~ is not expanded here: write /home/me/runs/x"),
        ("run_dir=$HOME/runs", "run_dir $HOME/runs: variables are not expanded here: write the whole path"),
        ("run_dir=${DATA}/x", "run_dir ${DATA}/x: variables are not expanded here"),
        ("data.path=[a, ~/b]", "data.path ~/b: ~ is not expanded here: write /home/me/b"),
        ("data.cache=$SCRATCH", "data.cache $SCRATCH: variables are not expanded here"),
        ("training.initialize_from=~/model", "training.initialize_from ~/model: ~ is not expanded here"),
        (
            "checkpoint.mirror=file:///~/m",
            "checkpoint.mirror file:///~/m: ~ is not expanded here: write file:///home/me/m",
        ),
    ],
)
def test_a_path_that_a_shell_would_have_changed_is_refused(
    option: str, said: str, minimal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run would make a folder named `~`, or `$HOME`, in the working directory."""
    monkeypatch.setenv("HOME", "/home/me")
    with pytest.raises(ConfigError) as caught:
        load_config(minimal, [option])
    assert any(said in sentence for sentence in caught.value.sentences), caught.value.sentences


def test_paths_that_only_look_like_those_of_a_shell_are_kept(minimal: Path) -> None:
    assert str(load_config(minimal, ["run_dir=runs/a~b$"]).run_dir) == "runs/a~b$"
    assert str(load_config(minimal, ["data.cache=~/megalite"]).data.cache) == "~/megalite"


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_a_config_in_utf16_is_named(encoding: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes("run_dir: x\n".encode(encoding))
    with pytest.raises(ConfigError, match="it looks like UTF-16: save it as UTF-8"):
        load_config(tmp_path / "config.yaml")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("training.tokens=10B", "got '10B': write 10_000_000_000"),
        ("training.tokens=1.5M", "got '1.5M': write 1_500_000"),
        ("training.tokens=10 MiB", "got '10 MiB': write 10_000_000"),
        ("training.max_minutes=1.5h", "got '1.5h': write 90, without a unit"),
        ("watchdog.minimum_seconds=2m", "got '2m': write 120, without a unit"),
        ("training.steps=1h", "training.steps must be a valid integer, got '1h'$"),
        ("training.stages.0.from_steps=2", "training.stages must be a list, .*: give the whole list in one value"),
        ("training.seed=99999999999999999999999", "training.seed must be"),
    ],
)
def test_numbers_and_lists_as_people_write_them(override: str, said: str, minimal: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(minimal, [override])
