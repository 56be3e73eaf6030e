"""What a user can get wrong: each is one sentence on stderr and a non-zero exit, before a rank starts."""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.cli.app import main
from tests.conftest import write_config
from tests.helpers.single_rank import write_single

Change = Callable[[dict[str, Any], Path], list[str]]  # edits the config; returns further arguments


def override(*words: str) -> Change:
    return lambda config, folder: list(words)


def section(name: str, **values: Any) -> Change:
    def change(config: dict[str, Any], folder: Path) -> list[str]:
        config.setdefault(name, {}).update(values)
        return []

    return change


def broken_data(suffix: str, content: bytes) -> Change:
    """The corpus copied, one of its files replaced."""

    def change(config: dict[str, Any], folder: Path) -> list[str]:
        source = Path(config["data"]["path"])
        for file in source.parent.glob(f"{source.name}.*"):
            (folder / file.name).write_bytes(file.read_bytes())
        (folder / f"{source.name}{suffix}").write_bytes(content)
        config["data"]["path"] = str(folder / source.name)
        return []

    return change


def half_checkpoint(config: dict[str, Any], folder: Path) -> list[str]:
    (folder / "half").mkdir()
    return [f"training.initialize_from={folder / 'half'}"]


def foreign_checkpoint(config: dict[str, Any], folder: Path) -> list[str]:
    (folder / "foreign").mkdir()
    (folder / "foreign" / "manifest.json").write_text(json.dumps({"format": "another"}))
    return [f"training.initialize_from={folder / 'foreign'}"]


def own_checkpoint(**saved: Any) -> Change:
    """The run's own checkpoint, made by a run that differed in one thing."""

    def change(config: dict[str, Any], folder: Path) -> list[str]:
        from data_pipeline.samples.dataset import PackedSamples

        length, prefix = config["training"]["sequence_length"], Path(config["data"]["path"])
        fingerprint = PackedSamples([prefix], length, 0, "train", config["data"]["held_out_fraction"]).fingerprint
        made = {"model": config["model"], "optimizer": {"name": "adamw"}, "training": config["training"]}
        state = {"data_fingerprint": fingerprint, "seed": 0, "step": 2, "consumed_samples": 8, "tokens_seen": 0}
        for name, value in saved.items():
            (state if name in state else made)[name] = value
        step = Path(config["run_dir"]) / "checkpoints" / "step_00000002"
        write_single(step, [], step=2, config=made, tokenizer=None, state=state)
        return []

    return change


def resumed_with(*words: str) -> Change:
    """The run's own checkpoint, and overrides that differ from it."""
    return lambda config, folder: own_checkpoint()(config, folder) or list(words)


def mixed_with(**options: Any) -> Change:
    """The corpus as the only source of a mix, with options of it."""

    def change(config: dict[str, Any], folder: Path) -> list[str]:
        config["data"]["sources"] = {"alone": {"path": config["data"].pop("path"), "weight": 1, **options}}
        return []

    return change


def file_as_run_dir(config: dict[str, Any], folder: Path) -> list[str]:
    (folder / "taken").write_text("")
    config["run_dir"] = str(folder / "taken")
    return []


def damaged_run_dir(name: str, *, is_folder: bool) -> Change:
    """A run folder in which `name` is a folder, or a file."""

    def change(config: dict[str, Any], folder: Path) -> list[str]:
        path = Path(config["run_dir"]) / name
        path.parent.mkdir(parents=True)
        path.mkdir() if is_folder else path.write_text("")
        return []

    return change


MISTAKES: dict[str, tuple[Change, list[str]]] = {
    "unknown option": (override("training.stepz=3"), ["training.stepz", "training.steps"]),
    "option of another section": (override("training.learning_rate=1"), ["optimizer.learning_rate"]),
    "unknown section": (section("modle", vocab_size=3), ["modle", "model"]),
    "not a number": (override("training.steps=many"), ["training.steps"]),
    "not an override": (override("steps"), ["steps", "section.option=value"]),
    "negative size": (override("model.hidden_size=-1"), ["model.hidden_size"]),
    "missing required option": (lambda c, f: c["model"].pop("vocab_size") and [], ["model.vocab_size"]),
    "heads not divisible": (override("parallel.tensor_parallel_size=3"), ["num_attention_heads", "3"]),
    "stages without layers": (override("parallel.pipeline_parallel_size=8"), ["pipeline_parallel_size", "3"]),
    "batch not divisible": (override("training.global_batch_size=5"), ["global_batch_size", "4", "6"]),
    "split backward with ZeRO-3": (
        override(
            "parallel.pipeline_parallel_size=2", "parallel.zero_stage=3", "parallel.pipeline_schedule=zero-bubble"
        ),
        ["zero_stage 3", "pipeline_schedule zero-bubble", "use zero_stage 1 or 2"],
    ),
    "sequence parallel with an odd length": (
        override("parallel.sequence_parallel=true", "parallel.tensor_parallel_size=2", "training.sequence_length=33"),
        ["sequence_length", "33"],
    ),
    "sequence longer than the model": (override("training.sequence_length=4096"), ["max_position_embeddings"]),
    "steps and tokens": (override("training.tokens=100"), ["steps", "tokens"]),
    "DeepSpeed section contradicts": (section("deepspeed", train_batch_size=3), ["train_batch_size"]),
    "DeepSpeed key that is gone": (section("deepspeed", elasticity={"enabled": True}), ["elasticity"]),
    "unknown family": (override("model.model_type=mamba"), ["mamba", "llama"]),
    "family that cannot express it": (override("model.gated_mlp=false"), ["gated_mlp", "llama"]),
    "no such data": (override("data.path=nowhere"), ["nowhere"]),
    "text as data": (lambda c, f: [f"data.path={__file__}"], [f"`megalite prepare {__file__} -t TOKENIZER -o PREFIX`"]),
    "folder of data": (lambda c, f: [f"data.path={Path(c['data']['path']).parent}"], ["give a prefix, such as /"]),
    "two configs": (override("other.yaml"), ["a command takes one config"]),
    "data of a larger vocabulary": (override("model.vocab_size=100"), ["vocab_size", "100", "320"]),
    "data of a larger vocabulary than the checkpoints": (
        lambda c, f: own_checkpoint()(c, f) or ["model.vocab_size=100"],
        ["vocabulary of 320", "choose another run_dir"],
    ),
    "whole documents without masks": (override("data.packing=best_fit"), ["packing best_fit", "document_mask true"]),
    "data named by its file": (lambda c, f: [f"data.path={c['data']['path']}.bin"], ["without an ending", "text, not"]),
    "truncated tokens": (broken_data(".bin", b"ab"), [".bin"]),
    "not an index": (broken_data(".idx", b"not an index at all, but long enough to be one"), [".idx"]),
    "half a checkpoint": (half_checkpoint, ["half", "manifest.json"]),
    "foreign checkpoint": (foreign_checkpoint, ["foreign"]),
    "no such checkpoint": (override("training.initialize_from=nowhere"), ["nowhere"]),
    "resume of another model": (own_checkpoint(model={"hidden_size": 64}), ["hidden_size", "64", "32"]),
    "resume on other data": (own_checkpoint(data_fingerprint="other"), ["other data", "initialize_from"]),
    "a source that is read too often": (mixed_with(max_epochs=0.001), ["read", "max_epochs is 0.001"]),
    "resume of another mix": (
        lambda c, f: own_checkpoint()(c, f) or [*mixed_with()(c, f), "data.held_out_fraction=0.2"],
        ["sample 0 (token 0) came from data.path, and this config reads alone", "data.stages"],
    ),
    "unknown option of a source": (mixed_with(wieght=1), ['did you mean "data.sources.alone.weight"']),
    "resume with another seed": (own_checkpoint(seed=5), ["training.seed 5"]),
    "resume with another optimizer": (own_checkpoint(optimizer={"name": "sgd"}), ["sgd", "adamw"]),
    "resume with documents masked": (resumed_with("data.document_mask=true"), ["document_mask", "--allow-change"]),
    "resume with another length": (
        resumed_with("training.sequence_length=8"),
        ["training.sequence_length 32 -> 8"],
    ),
    "resume with other betas": (resumed_with("optimizer.betas=[0.9, 0.99]"), ["0.95", "0.99", "--allow-change"]),
    "memory of a thousand machines": (
        override("model.hidden_size=32768", "model.intermediate_size=131072", "model.num_hidden_layers=100"),
        ["lacks", "--force"],
    ),
    "run_dir in a folder of the kernel": (override("run_dir=/proc/runs"), ["run_dir /proc/runs cannot be written"]),
    "data with its ending": (lambda c, f: [f"data.path={c['data']['path']}.bin"], [".bin"]),
    "run_dir with checkpoints, not to be resumed": (
        lambda c, f: own_checkpoint()(c, f) or ["checkpoint.resume=false"],
        ["checkpoint.resume is false"],
    ),
    "run_dir is a URL": (
        override("run_dir=s3://bucket/run"),
        ["run_dir s3://bucket/run is a URL: give a local folder, and checkpoint.mirror=s3://bucket/run"],
    ),
    "run_dir is a file": (file_as_run_dir, ["taken"]),
    "checkpoints is a file": (
        damaged_run_dir("checkpoints", is_folder=False),
        ["/checkpoints is a file: move it away or choose another run_dir"],
    ),
    "config.yaml is a folder": (
        damaged_run_dir("config.yaml", is_folder=True),
        ["/config.yaml is a folder, where a run has a file of its own: move it away, or choose another run_dir"],
    ),
    "events.jsonl is a folder": (damaged_run_dir("events.jsonl", is_folder=True), ["/events.jsonl is a folder"]),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_any_rank_starts(
    mistake: str,
    tiny: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Ranks would print through this process's descriptors, and take seconds: there must be none.

    A dry run refuses the same, and leaves no trace.
    """
    change, fragments = MISTAKES[mistake]
    config = copy.deepcopy(tiny)
    arguments = change(config, tmp_path)
    path = write_config(tmp_path / "config.yaml", config)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    before = sorted(tmp_path.rglob("*"))
    for words in (["train", "--dry-run"], ["train"]):
        code, out, err = command([*words, str(path), *arguments], monkeypatch, capfd)
        assert code == 2
        assert err.startswith("megalite: error: ") and err.count("\n") == 1, err
        assert all(fragment in err for fragment in fragments), err
        assert "starting" not in out
        assert sorted(tmp_path.rglob("*")) == before, "nothing may be left behind"


def test_all_mistakes_of_a_config_are_told_each_on_a_line(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "config.yaml", tiny)
    mistakes = ["training.stepz=3", "precision.dtype=bf61", "parallel.pipeline_parallel_size=8"]
    code, out, err = command(["train", str(path), *mistakes], monkeypatch, capfd)
    lines = err.splitlines()
    assert code == 2 and not out and len(lines) == 3, err
    for line, mistake in zip(lines, mistakes, strict=True):
        assert line.startswith(f'megalite: error: override "{mistake.partition("=")[0]}='), line


SECRET = "hf_" + "c4naryC4nary" * 3
READ_A_CONFIG = [
    *("train", "train --dry-run", "supervise", "verify", "place", "doctor", "config show"),
    *("plan", "plan reliability", "plan simulate"),
    *("launch --dry-run", "slurm --dry-run", "k8s --dry-run", "ray --dry-run"),
]


@pytest.mark.parametrize("words", READ_A_CONFIG)
def test_no_command_repeats_a_secret_that_was_typed(
    words: str, tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "config.yaml", tiny)
    before = sorted(tmp_path.rglob("*"))
    for typed in (f"data.path={SECRET}", f"data.no_such={SECRET}", f"--data.path={SECRET}", f"--{SECRET}", SECRET):
        code, out, err = command([*words.split(), str(path), typed], monkeypatch, capfd)
        assert code == 2 and SECRET[3:] not in out + err, out + err
        assert "Traceback" not in err and sorted(tmp_path.rglob("*")) == before


def test_a_path_that_does_not_exist_is_named_in_full(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Paths of a config start from the working directory, which a user may take for the config's folder."""
    path = write_config(tmp_path / "config.yaml", tiny)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    (elsewhere / "taken").write_text("")
    for words, named in (
        ("data.path=corpus/mine", "corpus/mine.bin"),
        ("training.initialize_from=some_run", "some_run"),
        ("run_dir=taken", "taken"),
    ):
        code, _, err = command(["train", str(path), words], monkeypatch, capfd)
        assert code == 2 and err.count("\n") == 1 and f"{elsewhere}/{named}" in err, err


def test_the_environment_may_ask_for_a_gpu_that_is_not_there(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path / "config.yaml", tiny)
    monkeypatch.setattr("launch.trainer.start.checks.gpu_count", lambda: 0)
    monkeypatch.setenv("DS_ACCELERATOR", "cuda")
    for arguments in (["train"], ["train", "--dry-run"]):
        code, _, err = command([*arguments, str(path)], monkeypatch, capfd)
        assert code == 2 and "megalite: error: DS_ACCELERATOR is cuda, and there is no GPU here" in err, err


def test_a_known_bad_combination_is_one_sentence_too(
    tiny: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The rows themselves: tests/unit/megalite/config/rules/test_known_bad.py."""
    path = write_config(tmp_path / "config.yaml", tiny)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("launch.trainer.start.checks.installed_versions", lambda: {"deepspeed": "0.19.2"})
    for arguments in (["train"], ["train", "--dry-run"]):
        code, out, err = command([*arguments, str(path), "parallel.pipeline_parallel_size=2"], monkeypatch, capfd)
        assert code == 2 and not out
        assert err.startswith("megalite: error: deepspeed 0.19.2 with parallel.pipeline_parallel_size 2"), err
        assert err.count("\n") == 1 and "DeepSpeed#8203" in err and "install deepspeed" in err


OTHER_COMMANDS: dict[str, tuple[list[str], str]] = {
    "no such config": (["train", "nowhere.yaml"], "nowhere.yaml"),
    "no such source": (["prepare", "nowhere.txt", "-o", "out", "-t", "tok"], "nowhere.txt"),
    "prefix without a name": (["prepare", __file__, "-o", "", "-t", "tok"], "-o '' names no file: give a prefix"),
    "prefix that is a folder": (["prepare", __file__, "-o", "data/", "-t", "tok"], "such as data/text"),
    "prefix with an ending": (["prepare", __file__, "-o", "data/n.bin", "-t", "tok"], "no ending: give data/n"),
    "prefix that is a URL": (["prepare", __file__, "-o", "s3://bucket/x", "-t", "tok"], "give a local prefix"),
    "prefix below a file": (["prepare", __file__, "-o", f"{__file__}/x", "-t", "tok"], "is a file, not a folder"),
    "fast encoder of conversations": (
        ["prepare", __file__, "-o", "out", "-t", "tok", "--chat", "--encoder", "fast"],
        "--encoder fast is for text",
    ),
    "no such tokenizer": (["prepare", __file__, "-o", "out", "-t", "nowhere"], "nowhere"),
    "export of nothing": (["export", "nowhere", "out"], "nowhere"),
    "import of nothing": (["import", "./nowhere", "out"], "nowhere"),
    "generate with no tokenizer": (["generate", "nowhere", "--prompt", "x", "--tokenizer", "tok"], "nowhere"),
    "export of a file": (["export", __file__, "out"], "is a file, no checkpoint folder"),
    "import to a URL": (["import", "./nowhere", "s3://b/x"], "s3://b/x is a URL: give a local folder, and copy it"),
    "export to a URL": (["export", "nowhere", "s3://b/x"], "s3://b/x is a URL: give a local folder, and copy it"),
    "import below a file": (["import", "./nowhere", f"{__file__}/x"], f"{__file__}: is a file, where a folder"),
    "export below a file": (["export", "nowhere", f"{__file__}/x"], f"{__file__}: is a file, where a folder"),
    "state of a URL": (["status", "s3://b/x"], "`megalite checkpoint ls s3://b/x` lists the checkpoints there"),
    "runs of a URL": (["ls", "s3://b"], "s3://b is a URL: give a local folder"),
    "supervision of a config": (["supervise", "--", "./c.yaml"], "megalite supervise -- megalite train ./c.yaml"),
    "supervision of a text": (["supervise", "--", __file__], "is not executable: chmod +x it"),
    "supervision in a file": (["supervise", "--run-dir", __file__, "--", "true"], "is a file: give the folder"),
    "folder as the config": (["train", "/"], "/ is a folder: give a config in YAML"),
    "generate from nothing": (["generate", "nowhere", "--prompt", "x"], "nowhere"),
    "show of nothing": (["config", "show", "nowhere.yaml"], "nowhere.yaml"),
    "override with dashes": (["train", "c.yaml", "--training.steps=3"], "no dashes here: training.steps=3"),
    "missing argument": (["train"], "missing argument 'CONFIG.yaml'; see `megalite train --help`"),
    "unknown command": (["trian"], "no such command 'trian'. Did you mean 'train'"),
    "unknown option": (["checkpoint", "ls", "--al", "x"], "no such option: --al (Possible options: --help)"),
    "value out of range": (["verify", "c.yaml", "--steps", "0"], "--steps must be greater than or equal to 1, got '0'"),
    "value with a unit": (["prepare", "a", "--train-vocab-size", "1k"], "valid integer, got '1k': write 1_000"),
    "option that is missing": (
        ["prepare", "a", "-o", "p"],
        "--tokenizer / -t: folder with a tokenizer.json; --train-vocab",
    ),
    "flag of Megatron's": (["prepare", "--input", "a"], "here megalite prepare SOURCES -t TOKENIZER -o P"),
    "value of no list": (["verify", "c.yaml", "--reference", "x"], "'x' is not one of 'transformers', 'self'"),
    "option without its value": (["ls", "--depth"], "option '--depth' requires an argument"),
    "explanation of nothing": (["config", "explain", "training.stepz"], 'did you mean "training.steps"'),
}


@pytest.mark.parametrize("mistake", OTHER_COMMANDS)
def test_other_commands_too(
    mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments, fragment = OTHER_COMMANDS[mistake]
    monkeypatch.chdir(tmp_path)
    code, _, err = command(arguments, monkeypatch, capfd)
    assert code == 2
    assert err.startswith("megalite: error: ") and err.count("\n") == 1 and fragment in err, err
    assert not list(tmp_path.iterdir()), "nothing may be left behind"


def command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    """Exit code, stdout and stderr of `megalite ARGUMENTS` in this process."""
    monkeypatch.setattr(sys, "argv", ["megalite", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    return stopped.value.code, out, err
