"""The tables of other stacks' words: true of the options and commands that exist, and the answers to wrong options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from megalite.config import Config, ConfigError, load_config
from megalite.config.deepspeed import NESTED, PASSED_ON, refused_keys
from megalite.config.foreign_words import KEYS, WITHOUT, WRITTEN_BY, WordRow, answer, normal_form, page, rows_of, stack
from megalite.config.suggestions import option_paths
from tests.helpers.commands import command_line, whole_command

ROOT = Path(__file__).parents[4]
ROWS = [(key, row) for key in KEYS for row in stack(key).rows]
OPTIONS = {".".join(path) for path in option_paths(Config)}


def names_of_commands() -> set[str]:
    """Names of all commands and of their flags."""

    def walk(command: Any) -> set[str]:
        flags = {normal_form(flag) for option in command.params for flag in (*option.opts, *option.secondary_opts)}
        inner = getattr(command, "commands", {})
        return flags | set(inner) | {name for one in inner.values() for name in walk(one)}

    return walk(whole_command())


def test_the_page_is_that_of_the_tables() -> None:
    """tests/unit/test_docs.py holds the options and commands that it names against those that exist."""
    assert (ROOT / "docs" / "coming_from.md").read_text(encoding="utf-8") == page(), f"run `.venv/bin/{WRITTEN_BY}`"


def targets(row: WordRow) -> set[str]:
    if isinstance(row.take, str):
        return {row.take}
    return {option for settings in (row.take or {}).values() for option in settings}


@pytest.mark.parametrize("key", KEYS)
def test_what_a_row_sets_exists(key: str) -> None:
    """A renamed option would make `megalite config from` write a config that does not load."""
    missing = [(row.there, name) for row in stack(key).rows for name in targets(row) if "." in name]
    missing = [(there, name) for there, name in missing if name not in OPTIONS and not name.startswith("deepspeed.")]
    assert not missing
    known = {word for row in stack(key).rows for word in row.words}
    assert stack(key).defaults.keys() <= known, "a value that a stack has by default is of a word without a row"
    twice = [word for word in known if sum(word in row.words for row in stack(key).rows) > 1]
    assert not twice, "a word has two rows"


def test_what_is_not_here_is_not_here() -> None:
    """A feature that arrives makes the rows untrue that deny it: mend them in megalite/config/stacks."""
    denied = [row for _, row in ROWS if row.in_words.startswith("not here") or "not here" in row.in_words]
    assert len(denied) > 20
    existing = OPTIONS | names_of_commands()
    for row in denied:
        if not row.in_words.startswith("not here") and not row.absent:
            continue  # a part of the words, beside others that are here
        assert row.absent, f"{row.there}: which names would make `{row.here}` untrue?"
        found = sorted(name for name in existing if re.search(row.absent, name))
        assert not found, f"{row.there} is said to be not here, but there is {found}"
    patterns = [row.absent for row in denied if row.absent and row.words]
    words = [word for row in denied for word in row.words]
    assert [one for one in patterns if not any(re.search(one, word) for word in words)] == []


@pytest.mark.parametrize(
    ("overrides", "answers"),
    [
        ("training.train_iters=5", ["a word of Megatron-LM and GPT-NeoX: here training.steps, or training.tokens"]),
        ("model.num_layers=4", ['did you mean "model.num_hidden_layers"?']),
        ("data.split=[1, 2]", ["here data.held_out_fraction"]),
        ("expert_parallel_size=2", ['did you mean "parallel.expert_parallel_size"?']),
        ("train_batch_size=16", ['did you mean "training.global_batch_size"?']),
        ("gradient_accumulation_steps=16", ["training.global_batch_size"]),
        ("zero_optimization.stage=2", ['did you mean "parallel.zero_stage"?']),
        ("bf16.enabled=true", ["here precision.dtype: bf16"]),
        ("fp16.enabled=true", ["here precision.dtype: fp16"]),
        ("training.stages=[{train_batch_size: 8}]", ['did you mean "training.stages.0.global_batch_size"?']),
        ("data.sources={own:{path:x}}", ['"data.sources.own.path:x": YAML wants a space after a colon, path: x']),
        ("comms_logger.enabled=true", ["of DeepSpeed: nothing: it waits for the device"]),
        ("optimizer.type=Adam", ['did you mean "optimizer.name"?']),
        ("optimizer={type: Adam, params: {lr: 1}}", ['"optimizer.name"', '"optimizer.learning_rate"']),
        ("parallelism.data_parallel_shard_degree=8", ["of torchtitan: here parallel.data_parallel_size with"]),
        ("fsdp_config.version=2", ["of Hugging Face Trainer: here the section parallel"]),
        ("training.per_device_train_batch_size=2", ['did you mean "training.micro_batch_size"?']),
        ("axolotl={lora_r: 8, epochs: 2}", ['"adapter.rank"', "data.sources={NAME: {path: PREFIX, epochs: ...}}"]),
        ("fsdp_sharding_strategy=FULL_SHARD", ["of Accelerate: here parallel.zero_stage"]),
        ("data.path=[0.5, a, 0.5, b]", ["blend of Megatron-LM", "data.sources.a={path: a, weight: 0.5}"]),
        ("data.path=30 a 70 b", ["data.sources"]),
        ("strategy=horovod", ["'horovod' is a word of Horovod: nothing: megalite train and megalite launch start"]),
        ("parallel=horovod", ["got 'horovod': a word of Horovod"]),
        ("trainer={strategy: horovod, devices: 3}", ["'horovod' is a word of Horovod", '"trainer.devices"']),
        ("horovod.enabled=true", ["a word of Horovod", "parallel.data_parallel_size"]),
        ("optimizer.name=one_bit_adam", ["must be adamw, muon or sgd", "DeepSpeed 0.19 removed it", "name: adamw"]),
        ("optimizer.name=onebitlamb", ["no optimizer here compresses gradients"]),
        (
            "deepspeed={optimizer: {type: ZeroOneAdam}}",
            ["DeepSpeed 0.19 removed it", "remove deepspeed.optimizer.type"],
        ),
        ("deepspeed.horovod=true", ["deepspeed.horovod is a word of Horovod", "remove deepspeed.horovod"]),
        ("deepspeed.zero_optimization.zeropp_loco_param={}", ["removed", "gradient_reduction_dtype: bf16 halves"]),
        ("parallel.loco=true", ["compression.gradients: int8"]),
        ("local_sgd.every=3", ["not here: all replicas take every step together"]),
        ("diloco={outer_lr: 0.7}", ["larger training.global_batch_size"]),
        ("hivemind=true", ["megalite launch --spares K"]),
        ("parallel.backend=Hivemind", ["'Hivemind' is a word", "megalite launch --spares K"]),
    ],
)
def test_words_of_other_stacks_are_answered(minimal: Path, overrides: str, answers: list[str]) -> None:
    """The most similar name misled: train_batch_size was sent to micro_batch_size, context to tensor parallelism."""
    with pytest.raises(ConfigError) as raised:
        load_config(minimal, [overrides])
    said = "\n".join(raised.value.sentences)
    assert all(part in said for part in answers), said


def test_a_path_with_digits_is_no_blend(minimal: Path) -> None:
    assert load_config(minimal, ["data.path=['2023', '2024']"]).data.path == ["2023", "2024"]
    assert load_config(minimal, ["data.path=2024 texts"]).data.path == ["2024 texts"]


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--tensor-model-parallel-size=2", "of Megatron-LM: here parallel.tensor_parallel_size"),
        ("--context-parallel-size", "here parallel.context_parallel_size"),
        ("--training.steps", "an option of the config has no dashes here: training.steps="),
        ("--dryrun", "no such option: --dryrun"),
        ("--resume", "the same command goes on"),
        ("--config", "the config has no flag before it"),
        ("--num_gpus", "starts the product of parallel.tensor_parallel_size"),
        ("--steps", "there is no flag --steps: options of the config are set as training.steps=... or "),
    ],
)
def test_flags_of_other_stacks_are_answered(flag: str, said: str) -> None:
    done = command_line("train", "config.yaml", flag, "2")
    assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("ds.json", '{\n\t"train_batch_size": 8, "optimizer": {"type": "Adam"}}', "is a config of DeepSpeed"),
        ("ds.yaml", "zero_optimization: {stage: 1}\n", "is a config of DeepSpeed"),
        ("a.yml", '"pipe-parallel-size": 1\n"num-layers": 2\n', "is a config of GPT-NeoX"),
        ("t.toml", "[job]\ndump_folder = 'x'\n[parallelism]\n", "is a config of torchtitan"),
        ("t.toml", "zebra = 1\n", "is no config in YAML"),
        ("run.sh", "python pretrain_gpt.py --num-layers 2 --hidden-size 4\n", "is a config of Megatron-LM"),
        ("accelerate.yaml", "distributed_type: FSDP\n", "is a config of Accelerate"),
    ],
)
def test_a_config_of_another_stack_is_recognised(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"{name} {said}: `megalite config from .*{name} -o config.yaml`") as raised:
        load_config(path)
    assert len(raised.value.sentences) == 1


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("base_model: x\ndatasets: [{path: a}]\nlearning_rate: 1\nmicro_batch_size: 2\nsequence_len: 9\n", "Axolotl"),
        ("model_name_or_path: q\nstage: sft\nfinetuning_type: lora\ntemplate: qwen\nbf16: true\n", "LLaMA-Factory"),
        ("output_dir: x\nmax_steps: 3\nlearning_rate: 1e-4\nseed: 1\n", "Hugging Face's Trainer"),
        ("model_name_or_path: q\nper_device_train_batch_size: 1\n", "Hugging Face's Trainer"),
        ("model_name_or_path: q\ndataset_name: trl-lib/Capybara\nlearning_rate: 1\n", "Hugging Face's Trainer"),
        ("name: a\ntrainer: {devices: 1}\nexp_manager: {}\nmodel: {micro_batch_size: 1}\n", "NeMo"),
        ("model: {_component_: a}\ntokenizer: {path: x}\ncheckpointer: {}\noptimizer: {lr: 1}\n", "torchtune"),
        ("model_name: a\nout_dir: x\ntrain: {save_interval: 1}\ndata: null\noptimizer: AdamW\n", "LitGPT"),
    ],
)
def test_a_config_that_is_not_translated_is_one_message(tmp_path: Path, text: str, name: str) -> None:
    """Each of its keys was a line of its own before."""
    path = tmp_path / "a.yml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"a.yml is a config of {name}, which is not translated: ") as raised:
        load_config(path)
    assert len(raised.value.sentences) == 1


def test_every_mistake_in_the_section_deepspeed_is_told_at_its_line(tmp_path: Path, minimal: Path) -> None:
    section = """\
deepspeed:
  train_batch_size: 8
  sequence_parallel_size: 2
  zero_optimization:
    stage: 2
    offload_optimiser: {device: cpu}
  optimizer:
    params: {lr: 1}
  autotuning: {enabled: true, fast: false}
"""
    path = tmp_path / "config.yaml"
    path.write_text(section + minimal.read_text())
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    said = [(line.split(": ")[0][-1], line.partition(": ")[2]) for line in raised.value.sentences]
    expected = {
        "2": "set training.global_batch_size",
        "3": "parallel.context_parallel_size",
        "5": "set parallel.zero_stage",
        "6": 'did you mean "offload_optimizer"?',
        "8": "set optimizer.learning_rate",
        "9": "megalite plan CONFIG.yaml",
    }
    assert [line for line, _ in said] == list(expected)
    assert all(expected[line] in sentence for line, sentence in said), said


@pytest.mark.parametrize(
    "key",
    [
        *("autotuning", "tensorboard", "wandb", "csv_monitor", "comet", "expert_parallel", "compile", "pipeline"),
        *("sequence_parallel_size", "tensor_parallel", "elasticity", "curriculum_learning", "data_efficiency"),
        *("compression_training", "sparse_attention", "activation_checkpointing", "flops_profiler", "comms_logger"),
        *("nebula", "checkpoint", "hybrid_engine", "timers", "datastates_ckpt", "weight_quantization"),
    ],
)
@pytest.mark.parametrize("value", ["{}", "{enabled: true}", "false"])
def test_sections_of_deepspeed_that_do_nothing_are_refused(minimal: Path, key: str, value: str) -> None:
    """DeepSpeed takes them, and trains as if they were not there."""
    with pytest.raises(ConfigError, match=rf"remove deepspeed\.{key}"):
        load_config(minimal, [f"deepspeed.{key}={value}"])


def test_rows_and_keys_that_are_passed_on_do_not_contradict_each_other() -> None:
    refused = {path[0] for path in refused_keys() if len(path) == 1}
    assert not refused & PASSED_ON
    assert {path[1] for path in refused_keys() if path[0] == "zero_optimization" and len(path) == 2} - {
        "mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"
    } <= NESTED["zero_optimization"]  # fmt: skip


def test_answers_are_one_line() -> None:
    for key, row in ROWS:
        said = answer([(stack(key).name, row)])
        assert "\n" not in said and "`" not in said and len(said) < 400, said
        assert row.here.startswith(WITHOUT) or row.here, key
    assert answer(rows_of("zebra")) == ""
