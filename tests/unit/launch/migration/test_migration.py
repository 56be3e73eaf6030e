"""`megalite config from`: files of each stack give the config that computes the same, and no word is lost in silence.

The files are written as those stacks' own examples are: variables, arrays, heredocs, dashes and underscores, `auto`.
"""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.migration.derivation import Quantities
from launch.migration.reading import TABLES, ForeignSetting, read_files
from launch.migration.translation import MigratedConfig, _apply, migrate
from megalite.config import Config, ConfigError, load_config
from megalite.config.foreign_words import Kind, stack
from tests.helpers.commands import command_line

MEGATRON = """\
#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=${SLURM_NNODES:-2}
MB=${MB:-4}
GB=$((MB * 16))
DATA="0.7 data/web_text_document 0.3 data/code_text_document"
GPT_ARGS=(
    --num-layers 24   # blocks
    --hidden-size 2048
    --num-attention-heads 16
    --group-query-attention --num-query-groups 4
    --seq-length 2048 --max-position-embeddings 2048
    --swiglu --normalization RMSNorm --disable-bias-linear
    --position-embedding-type rope --rotary-base 500000
    --untie-embeddings-and-output-weights
    --attention-dropout 0 --hidden-dropout 0.0
)
OTHER="
  --micro-batch-size $MB
  --global-batch-size $GB
  --train-samples 1000000
  --lr-warmup-fraction .01
  --lr 3.0e-4
  --min-lr 3.0e-5
  --lr-decay-style cosine
  --bf16
  --weird-flag 3
"
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py ${GPT_ARGS[@]} $OTHER \\
   --tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --sequence-parallel \\
   --num-layers-per-virtual-pipeline-stage 3 --use-distributed-optimizer --context-parallel-size 1 \\
   --data-path $DATA --split 949,50,1 --tokenizer-type GPT2BPETokenizer --vocab-file v.json \\
   --save $1 --load $1 --save-interval 500 --eval-iters 10 2>&1 | tee log.txt
"""

MEGATRON_DEEPSPEED = """\
ZERO_STAGE=${ZERO_STAGE:-1}
DTYPE="bf16"
TP=${TP:-2}
PP=${PP:-2}
WORLD_SIZE=$((TP*PP*2))
GLOBAL=$((4*WORLD_SIZE))
while [[ $# -gt 0 ]]
do
case $1 in
    -z|--zero-stage)
    ZERO_STAGE=$2;
    shift
    ;;
esac
done
options=" \\
	--tensor-model-parallel-size $TP --pipeline-model-parallel-size $PP --ds-sequence-parallel-size 1 \\
        --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 \\
        --max-position-embeddings 1024 --micro-batch-size 4 --global-batch-size $GLOBAL --train-iters 1000 \\
        --lr 6.0e-3 --min-lr 6.0e-4 --lr-decay-style cosine --lr-warmup-iters 30 \\
	--data-path data/gpt2_text_document --tokenizer-type GPT2BPETokenizer --save-interval 100 --split 98,2,0 \\
	--${DTYPE} --checkpoint-activations --save exp/z${ZERO_STAGE} --load exp/z${ZERO_STAGE} \\
        "
options="${options} --deepspeed --deepspeed_config=ds.json --zero-stage=${ZERO_STAGE}"
cat <<EOT > ds.json
{
  "train_batch_size" : $GLOBAL,
  "train_micro_batch_size_per_gpu": 4,
  "steps_per_print": 1,
  "data_types": { "grad_accum_dtype": "fp32" },
  "wall_clock_breakdown" : false
}
EOT
run_cmd="deepspeed --num_nodes 1 --num_gpus $WORLD_SIZE pretrain_gpt.py $@ ${options}"
eval ${run_cmd}
"""

NEOX = """\
{
   "pipe_parallel_size": 2, "model-parallel-size": 2,  # dashes or underscores
   "num_layers": 12, "hidden_size": 768, "num_attention_heads": 12, "seq_length": 2048,
   "max_position_embeddings": 2048, "norm": "layernorm", "pos_emb": "rotary", "rotary_pct": 0.25,
   "no_weight_tying": true, "gpt_j_residual": true, "output_layer_parallelism": "column",
   "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95], "eps": 1.0e-8}},
   "min_lr": 0.00006,
   "zero_optimization": {"stage": 1, "allgather_bucket_size": 500000000, "overlap_comm": True, "cpu_offload": False},
   "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 8,
   "checkpoint_activations": true, "weight_decay": 0.1, "hidden_dropout": 0, "attention_dropout": 0,
   "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 12},
   "train_iters": 320000, "lr_decay_iters": 320000, "lr_decay_style": "cosine", "warmup": 0.01,
   "checkpoint_factor": 10000, "keep_last_n_checkpoints": 4, "wall_clock_breakdown": true,
}
"""
NEOX_LOCAL = """\
{
  "train-data-paths": ["data/pile", "data/code"], "train-data-weights": [3.0, 1.0],
  "vocab-file": "v.json", "tokenizer_type": "GPT2BPETokenizer", "save": "checkpoints", "load": "checkpoints",
}
"""

TITAN = """\
[job]
dump_folder = "./outputs"
[model]
name = "llama3"
flavor = "8B"
[optimizer]
name = "AdamW"
lr = 3e-4
[lr_scheduler]
warmup_steps = 200
decay_ratio = 0.1
[training]
local_batch_size = 2
seq_len = 8192
steps = 1000
dataset = "c4"
[parallelism]
data_parallel_shard_degree = 8
tensor_parallel_degree = 2
context_parallel_degree = 2
context_parallel_rotate_method = "allgather"
[checkpoint]
enable = false
interval = 500
[activation_checkpoint]
mode = "full"
[compile]
enable = false
"""

MICRO_BATCHES = {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 4}

TRAINER = {
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}},
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu"},
        "overlap_comm": True,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "wall_clock_breakdown": False,
}


def migrated(tmp_path: Path, *overrides: str, **files: str) -> MigratedConfig:
    """The config from files by name, `a_sh` for `a.sh`."""
    paths = []
    for name, text in files.items():
        path = tmp_path / name.replace("_", ".")
        path.write_text(text)
        paths.append(path)
    kind, settings, _ = read_files(paths, None)
    return migrate(kind, settings, overrides)


def loaded(result: MigratedConfig) -> Config:
    return Config.model_validate(result.values())


def outcome(result: MigratedConfig, word: str) -> tuple[str, str]:
    (line,) = [line for line in result.lines if line.word == word]
    return line.outcome, line.here


def test_a_script_of_megatron_lm(tmp_path: Path) -> None:
    result = migrated(tmp_path, run_sh=MEGATRON)
    config = loaded(result)
    model, training = config.model, config.training
    assert (model.num_hidden_layers, model.hidden_size, model.num_key_value_heads) == (24, 2048, 4)
    assert model.intermediate_size == int(4 * 2048 * 2 / 3) // 64 * 64, "Megatron-LM's width of a gated layer"
    assert model.gated_mlp and model.hidden_act == "silu" and model.normalization == "rmsnorm"
    assert not (model.attention_bias or model.mlp_bias or model.tie_word_embeddings or model.has_dropout)
    assert model.rms_norm_eps == 1e-5 and model.rope_theta == 500_000 and model.vocab_size == 50257
    assert (training.micro_batch_size, training.global_batch_size) == (4, 64)
    assert training.tokens == 1_000_000 * 2048 and training.seed == 1234
    assert config.schedule.warmup_steps == round(0.01 * 15625), "a fraction of the run, in steps"
    assert config.schedule.min_learning_rate_ratio == pytest.approx(0.1)
    assert config.optimizer.betas == (0.9, 0.999) and config.optimizer.weight_decay == 0.01, "what it leaves out"
    assert config.parallel.tensor_parallel_size == 2 and config.parallel.pipeline_parallel_size == 4
    assert (config.parallel.pipeline_schedule, config.parallel.pipeline_chunks) == ("interleaved", 2)
    assert config.parallel.data_parallel_size == "auto", "the layout is not bound to the devices of the script"
    assert {name: (one.path, one.weight) for name, one in config.data.sources.items()} == {
        "web_text_document": (["data/web_text_document"], 0.7),
        "code_text_document": (["data/code_text_document"], 0.3),
    }
    assert config.data.held_out_fraction == pytest.approx(0.051)
    assert training.evaluation.samples == 640 and config.precision.dtype == "bf16"
    assert result.options["model.model_type"] == "llama" and result.filled == ["run_dir"]
    assert outcome(result, "--weird-flag")[0] == "unknown"
    assert outcome(result, "--context-parallel-size") == ("taken", "parallel.context_parallel_size")
    assert "only when it runs" in outcome(result, "--save")[1]


def test_what_megatron_lm_means_by_leaving_out_is_written_out(tmp_path: Path) -> None:
    """Its defaults are GPT-2's, with dropout of 0.1 and tied embeddings; those of a config here are Llama's."""
    flags = (
        "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
        "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 10 --vocab-size 1000 --data-path x"
    )
    model = loaded(migrated(tmp_path, args_txt=flags)).model
    assert (model.normalization, model.position_embedding, model.hidden_act) == (
        "layernorm",
        "learned",
        "gelu_pytorch_tanh",
    )
    assert model.attention_bias and model.mlp_bias and model.tie_word_embeddings and not model.gated_mlp
    assert model.intermediate_size == 256 and model.residual_dropout == model.attention_dropout == 0.1
    assert model.model_type == "gpt2", "the family that is checked before ranks start"


def test_a_script_of_megatron_deepspeed_with_the_json_that_it_writes(tmp_path: Path) -> None:
    result = migrated(tmp_path, run_sh=MEGATRON_DEEPSPEED)
    config = loaded(result)
    assert config.training.global_batch_size == 32 and config.parallel.zero_stage == 1
    assert config.recompute.mode == "full" and config.deepspeed == {"steps_per_print": 1}
    assert config.run_dir == Path("exp/z1"), "the default of the script's own option, not what a loop would read"
    assert config.schedule.warmup_steps == 30 and config.precision.dtype == "bf16"
    assert outcome(result, "wall_clock_breakdown")[0] == "nothing to set"


def test_a_script_and_a_json_beside_it(tmp_path: Path) -> None:
    script = MEGATRON_DEEPSPEED[: MEGATRON_DEEPSPEED.index("cat <<EOT")] + "deepspeed pretrain_gpt.py $options\n"
    config = loaded(
        migrated(
            tmp_path, run_sh=script, ds_json=json.dumps({"fp16": {"enabled": False}, "zero_optimization": {"stage": 2}})
        )
    )
    assert config.parallel.zero_stage == 2


def test_arguments_of_a_log_and_of_json(tmp_path: Path) -> None:
    """All arguments with their defaults stand there, so nothing is added, and what is off is not listed."""
    arguments: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
        "micro_batch_size": 2, "global_batch_size": 8, "lr": 1e-3, "min_lr": 0.0, "train_iters": 10, "vocab_size": 999,
        "data_path": ["x"], "swiglu": True, "normalization": "RMSNorm", "add_bias_linear": False, "bf16": True,
        "fp16": False, "position_embedding_type": "rope", "untie_embeddings_and_output_weights": True,
        "group_query_attention": False, "num_query_groups": 1, "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "adam_beta1": 0.9, "adam_beta2": 0.95, "ffn_hidden_size": 172, "lr_warmup_fraction": None, "odd_one": 7,
        "context_parallel_size": 1, "tensor_model_parallel_size": 1,
    }  # fmt: skip
    log = "".join(f"  {name} {'.' * 20} {value}\n" for name, value in arguments.items())
    of_log = migrated(tmp_path, train_log=f"------ arguments ------\n{log}---- end of arguments ----\n")
    many = arguments | {f"argument_{n}": None for n in range(100)}
    of_json = migrated(tmp_path, args_json=json.dumps(many))
    assert of_log.options == of_json.options
    model = loaded(of_log).model
    assert model.num_key_value_heads == 4, "groups count with group-query-attention alone"
    assert model.intermediate_size == 172 and not model.mlp_bias and model.gated_mlp
    assert outcome(of_json, "odd_one")[0] == "unknown"


def test_files_of_gpt_neox_are_merged(tmp_path: Path) -> None:
    result = migrated(tmp_path, a_yml=NEOX, local_yml=NEOX_LOCAL)
    config = loaded(result)
    assert config.model.model_type == "gpt_neox" and config.model.use_parallel_residual
    assert config.model.partial_rotary_factor == 0.25 and config.model.rms_norm_eps == 1e-5
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (4, 32)
    assert config.schedule.warmup_steps == 3200 and config.recompute.mode == "full"
    assert config.precision.dtype == "fp16" and config.deepspeed["fp16"] == {"loss_scale": 0, "initial_scale_power": 12}
    assert {name: one.weight for name, one in config.data.sources.items()} == {"pile": 3.0, "code": 1.0}
    assert config.run_dir == Path("checkpoints") and config.checkpoint.keep_last == 4
    assert "for one replica" in outcome(result, "train_micro_batch_size_per_gpu")[1]
    assert outcome(result, "zero_optimization.overlap_comm")[0] == "nothing to set"
    with_replicas = loaded(migrated(tmp_path, "parallel.data_parallel_size=4", a_yml=NEOX, local_yml=NEOX_LOCAL))
    assert with_replicas.training.global_batch_size == 4 * 8 * 4


def test_a_gated_layer_of_gpt_neox_has_a_third_of_its_intermediate_size(tmp_path: Path) -> None:
    """Its Llama-2-7B says 32768, which is 11008 for everybody else."""
    text = NEOX.replace(
        '"norm": "layernorm"',
        '"norm": "rmsnorm", "activation": "swiglu", "intermediate_size": 32768, "mlp_multiple_of": 256',
    )
    result = migrated(tmp_path, a_yml=text, local_yml=NEOX_LOCAL)
    assert loaded(result).model.intermediate_size == 11008


def test_a_file_of_torchtitan(tmp_path: Path) -> None:
    result = migrated(tmp_path, "data.path=data/c4", train_toml=TITAN)
    config = loaded(result)
    assert (config.model.hidden_size, config.model.intermediate_size, config.model.num_key_value_heads) == (
        4096,
        14336,
        8,
    )
    assert (config.training.micro_batch_size, config.training.global_batch_size) == (2, 16), "local batch x replicas"
    assert config.parallel.zero_stage == 3 and config.parallel.data_parallel_size == 8
    assert config.parallel.sequence_parallel and config.schedule.name == "wsd" and config.schedule.decay_steps == 100
    assert config.checkpoint.interval == 0 and not config.checkpoint.save_last
    assert config.performance.compile == "none" and config.recompute.mode == "full"
    assert config.optimizer.betas == (0.9, 0.95) and not result.filled
    assert (config.parallel.context_parallel_size, config.parallel.context_parallel_kind) == (2, "all_gather")


def test_a_flavor_without_known_sizes_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.flavor '9B' of 'llama3' has no known sizes .*initialize_from"):
        migrated(tmp_path, train_toml=TITAN.replace("8B", "9B"))
    result = migrated(tmp_path, "training.initialize_from=org/name", train_toml=TITAN.replace("8B", "9B"))
    assert "model" not in result.values(), "it comes with the weights"


def test_auto_of_the_trainer_is_left_to_the_user(tmp_path: Path) -> None:
    result = migrated(tmp_path, ds_json=json.dumps(TRAINER))
    config = loaded(result)
    assert config.parallel.zero_stage == 3 and config.offload.optimizer == "cpu" and config.precision.dtype == "bf16"
    assert config.deepspeed == {"zero_optimization": {"offload_param": {"device": "cpu"}}}
    assert config.schedule.name == "constant"
    assert outcome(result, "optimizer.params.lr")[0] == "yours to set"
    words = {"gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}}
    result = migrated(tmp_path, ds_json=json.dumps(words))
    assert loaded(result).training.gradient_clipping != 0, "no default of DeepSpeed stands in for auto"
    for word in ("gradient_clipping", "zero_optimization.stage"):
        (line,) = [line for line in result.lines if line.word == word]
        assert (line.value, line.outcome) == ("auto", "yours to set")
    assert {"training.global_batch_size", "model.hidden_size"} <= set(result.filled)


def test_a_stage_in_quotes_and_a_file_that_is_no_json_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'zero_optimization.stage "3" is text: write 3, without quotes'):
        migrated(tmp_path, ds_json='{"zero_optimization": {"stage": "3"}}')
    with pytest.raises(LaunchError, match=r"ds.json is no JSON: 'not json'"):
        migrated(tmp_path, ds_json="not json")


@pytest.mark.parametrize("kind", TABLES)
def test_every_word_has_a_line(kind: Kind) -> None:
    """No word of a stack's table, with some value, is dropped in silence."""
    for word in (word for row in stack(kind).rows for word in row.words):
        result = MigratedConfig()
        _apply(ForeignSetting(word, 3, "file", kind), result, Quantities({}, kind))
        assert [line.word for line in result.lines] == [word]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            MICRO_BATCHES | {"gradient_accumulation_steps": 3},
            "train_batch_size 64 is no multiple of train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 3",
        ),
        (
            MICRO_BATCHES | {"gradient_accumulation_steps": 2, "data_parallel_size": 4},
            "train_micro_batch_size_per_gpu 4 x gradient_accumulation_steps 2 x 4 replicas = 32: correct one of them",
        ),
    ],
)  # fmt: skip
def test_batches_of_deepspeed_that_contradict_each_other(tmp_path: Path, values: dict[str, int], said: str) -> None:
    with pytest.raises(ConfigError) as raised:
        migrated(tmp_path, ds_json=json.dumps(values))
    assert any(said in sentence for sentence in raised.value.sentences), raised.value.sentences


def test_train_batch_size_is_that_of_all_replicas(tmp_path: Path) -> None:
    """train_batch_size is global in DeepSpeed too, and the micro-batch follows from it."""
    values = {"train_batch_size": 64, "gradient_accumulation_steps": 2, "data_parallel_size": 4}
    training = loaded(migrated(tmp_path, ds_json=json.dumps(values))).training
    assert (training.global_batch_size, training.micro_batch_size) == (64, 8)


def test_all_contradictions_are_told_at_once(tmp_path: Path) -> None:
    text = MEGATRON.replace("--min-lr 3.0e-5", "--min-lr 1").replace(
        "virtual-pipeline-stage 3", "virtual-pipeline-stage 5"
    )
    text = text.replace("949,50,1", "1,9")
    with pytest.raises(ConfigError) as raised:
        migrated(
            tmp_path, run_sh=text.replace("--lr-warmup-fraction .01", "--lr-warmup-fraction .01 --lr-warmup-iters 3")
        )
    said = "\n".join(raised.value.sentences)
    for part in (
        "--min-lr 1 is above the learning rate 0.0003",
        "5 x 4 stages does not divide 24 layers",
        "--split '1,9' leaves 90% out of training",
        "--lr-warmup-iters and --lr-warmup-fraction are two lengths of one warm-up",
    ):
        assert part in said, said


def test_a_rule_of_the_config_is_a_contradiction_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_attention_heads 15"):
        migrated(tmp_path, run_sh=MEGATRON.replace("--num-attention-heads 16", "--num-attention-heads 15"))


def test_what_real_scripts_have_is_read(tmp_path: Path) -> None:
    """Met in the examples of those stacks: tools that also take flags, unknown variables, steps beside tokens."""
    text = MEGATRON.replace("pretrain_gpt.py ", "-m pretrain.py ").replace("--bf16", "--bf16 ${MORE_ARGS}")
    text = text.replace("GPUS_PER_NODE=8", "GPUS_PER_NODE=9").replace("949,50,1", "100,0,0")
    text = text.replace("--weird-flag 3", "--num-experts 1 --topk 2 --distributed-timeout-minutes 10")
    result = migrated(tmp_path, run_sh="python tools/preprocess_data.py --input x --workers 4\n" + text)
    config = loaded(result)
    assert "18 devices (9 x 2 hosts) are no multiple of tensor parallel 2" in outcome(result, "--nproc_per_node")[1]
    assert config.model.num_experts is None and config.watchdog.startup_minutes == 10
    assert config.data.held_out_fraction == 0 and config.training.evaluation.interval == 0
    assert not any(line.word == "--workers" for line in result.lines)
    tokens = MEGATRON_DEEPSPEED.replace("--train-iters 1000", "--train-iters 1000 --train-tokens 5000000")
    training = loaded(migrated(tmp_path, run_sh=tokens)).training
    assert training.tokens == 5_000_000 and training.steps is None


def test_a_script_is_read_in_bounded_time_and_memory(tmp_path: Path) -> None:
    """Variables in variables became terabytes, and each `<<A` without its end was looked for through all the rest."""
    grows = "A=xxxxxxxxxx\n" + "A=$A$A$A$A$A$A$A$A$A$A\n" * 20
    with pytest.raises(LaunchError, match="variables of the script become more than 2,000,000 characters"):
        migrated(tmp_path, grows_sh=grows + MEGATRON)
    began = time.process_time()
    result = migrated(tmp_path, open_sh="cat <<A\n" * 10_000 + MEGATRON)
    assert time.process_time() - began < 2 and result.options["model.num_hidden_layers"] == 24
    for unit in ("${a:-", "A=${ ", "A=$( "):  # each was looked through to the end of the script
        began = time.process_time()
        result = migrated(tmp_path, open_sh=MEGATRON + unit * (60_000 // len(unit)))
        assert time.process_time() - began < 4 and result.options["model.num_hidden_layers"] == 24, unit


def test_a_secret_is_neither_shown_nor_written(tmp_path: Path) -> None:
    words = "pretrain_gpt.py --wandb-api-key 0123456789abcdef0123456789abcdef01234567"
    result = migrated(tmp_path, run_sh=MEGATRON.replace("pretrain_gpt.py", words))
    assert [line.value for line in result.lines if line.word == "--wandb-api-key"] == ["***"]
    with pytest.raises(ConfigError, match=r"data\.path holds an address with a password") as raised:
        text = MEGATRON.replace("--data-path $DATA", "--data-path s3://user:pass1word@host/data")
        migrated(tmp_path, run_sh=text)
    assert "pass1word" not in str(raised.value)


def test_json_as_deepspeed_reads_it(tmp_path: Path) -> None:
    text = '{\n\t// of ours\n\t"train_batch_size": 8, # eight\n\t"zero_optimization": {"stage": 1,},\n}\n'
    assert loaded(migrated(tmp_path, ds_json=text)).training.global_batch_size == 8


@pytest.mark.parametrize("value", ["x", [], -1, 10**30, float("inf"), ["0.5", "a"]], ids=str)
@pytest.mark.parametrize("kind", TABLES)
def test_no_value_of_a_word_ends_in_a_traceback(kind: Kind, value: Any) -> None:
    known = [("hidden_size", 64), ("num_layers", 4), ("seq_length", 32), ("train_batch_size", 8)]
    settings = [ForeignSetting(word, number, "file", kind) for word, number in known]
    for row in stack(kind).rows:
        if row.words and isinstance(row.take, str) and "." not in row.take:  # a quantity, with which is calculated
            with suppress(ConfigError):
                migrate(kind, [*settings, ForeignSetting(row.words[0], value, "file", kind)], [])


def test_a_ramp_of_the_batch_is_stages(tmp_path: Path) -> None:
    text = MEGATRON.replace("--bf16", "--bf16 --rampup-batch-size 32 16 30000")
    training = loaded(migrated(tmp_path, run_sh=text)).training
    assert training.global_batch_size == 32
    assert [(one.from_tokens, one.global_batch_size) for one in training.stages] == [
        (15000 * 2048, 48),
        (30000 * 2048, 64),
    ]
    in_samples = "--lr-warmup-samples 20000 --lr-wsd-decay-samples 100000"
    text = text.replace("--lr-warmup-fraction .01", in_samples).replace("style cosine", "style wsd")
    schedule = loaded(migrated(tmp_path, run_sh=text)).schedule
    assert (schedule.warmup_samples, schedule.decay_tokens, schedule.decay_steps) == (20000, 100000 * 2048, None)
    assert schedule.warmup_steps == 0, "over a ramp of the batch a number of steps would be another warm-up"


def test_the_command_writes_a_config_that_loads_and_overwrites_nothing(tmp_path: Path) -> None:
    script, target = tmp_path / "run.sh", tmp_path / "config.yaml"
    script.write_text(MEGATRON)
    words = ("config", "from", str(script), "run_dir=runs/gpt", "training.steps=7", "data.path=mine", "-o", str(target))
    done = command_line(*words)
    assert done.returncode == 0, done.stderr
    assert "--weird-flag" in done.stdout and "unknown" in done.stdout and f"wrote {target}" in done.stdout
    config = load_config(target)
    assert config.run_dir == Path("runs/gpt") and config.model.num_hidden_layers == 24
    assert config.data.path == ["mine"] and config.training.tokens is None, "an override takes the place of both"
    before = target.read_text()
    again = command_line(*words)
    assert again.returncode == 2 and "is there already: give --overwrite" in again.stderr
    assert target.read_text() == before
    printed = command_line(*words[:-2])
    assert printed.stdout == before, "the table is on standard error, so that the output is a config"
    as_json = json.loads(command_line("config", "from", str(script), "--json").stdout)
    assert as_json["config"]["model"]["hidden_size"] == 2048 and as_json["words"]


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("a.json", '{"a": 1}', "is recognised as none of DeepSpeed, Megatron-LM"),
        ("a.json", '{"a": ', "cannot be read as JSON"),
        ("a.json", "[1]", "must hold names and values, but holds list data"),
        ("a.yaml", "distributed_type: FSDP\n", "is a config of Accelerate, which says nothing about model and data"),
        (
            "a.yml",
            "base_model: x\nadapter: qlora\ndatasets: []\nmicro_batch_size: 2\n",
            "is a config of Axolotl, which",
        ),
        ("a.yaml", "model_name_or_path: q\nstage: sft\nfinetuning_type: lora\n", "is a config of LLaMA-Factory, which"),
        (
            "a.json",
            '{"output_dir": "x", "num_train_epochs": 3.0}',
            "is a config of Hugging Face's Trainer, which is not",
        ),
        ("a.yaml", "run_dir: x\nmodel: {}\ntraining: {}\n", "is a config of megalite already"),
        ("a.sh", "echo nothing\n", "has no words of another stack"),
        ("a.toml", "[job\n", "cannot be read as TOML"),
    ],
)
def test_files_that_are_none_of_a_stack(tmp_path: Path, name: str, text: str, said: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    done = command_line("config", "from", str(path))
    assert done.returncode == 2 and said in done.stderr and not done.stdout, done.stderr


def test_files_of_two_stacks_and_files_that_do_not_exist(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_text(NEOX)
    (tmp_path / "b.toml").write_text(TITAN)
    done = command_line("config", "from", str(tmp_path / "a.yml"), str(tmp_path / "b.toml"))
    assert done.returncode == 2 and "files of several stacks" in done.stderr
    assert "does not exist" in command_line("config", "from", str(tmp_path / "no.sh")).stderr
    assert (
        "--kind zebra: give one of" in command_line("config", "from", str(tmp_path / "a.yml"), "--kind", "zebra").stderr
    )
