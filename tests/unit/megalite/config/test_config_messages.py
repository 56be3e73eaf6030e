"""Every way a config can be wrong is answered with one line: option, reason, and what works."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config import ConfigError, load_config, resolve_layout

# overrides on the minimal config -> fragments of the message, in this order
BAD_OVERRIDES = [
    # names
    ("training.learning_rate=1e-3", ['"training.learning_rate": did you mean "optimizer.learning_rate"?']),
    ("learning_rate=1e-3", ['"learning_rate": did you mean "optimizer.learning_rate"?']),
    ("optimiser.learning_rate=1e-3", ['"optimiser": did you mean "optimizer"?']),
    ("train.learning_rate=1e-3", ['"train.learning_rate": did you mean "optimizer.learning_rate"?']),
    ("optimizer.lr=1e-3", ['"optimizer.lr": did you mean "optimizer.learning_rate"?']),
    ("parallel.tp=2", ['"parallel.tp": did you mean "parallel.tensor_parallel_size"?']),
    ("training.batch_size=2", ['"training.batch_size": did you mean "training.global_batch_size"?']),
    ("wandb.enabled=true", ['"wandb": did you mean "monitor.wandb"?']),
    ("recompute.zebra=1", ['"recompute.zebra": section recompute has mode']),
    ("zebra=1", ['unknown option "zebra": the config has run_dir, model, data']),
    # values
    ("precision.dtype=bf61", ["precision.dtype must be fp32, bf16 or fp16, got 'bf61'"]),
    ("recompute.mode=some", ["recompute.mode must be none, selective, full, a list or auto, got 'some'"]),
    ("recompute.mode=[full, some]", ["recompute.mode must be none, selective, full or auto, got 'some'"]),
    ("recompute.mode=[full, auto]", ["must be none, selective, full in a list or auto alone, got 'auto'"]),
    (
        "recompute.mode=[full, none]",
        ["recompute.mode is a list of length 2, but parallel.pipeline_parallel_size is 1: list a mode for each stage"],
    ),
    ("parallel.zero_stage=4", ["parallel.zero_stage must be 0, 1, 2, 3 or auto, got 4"]),
    ("parallel.data_parallel_size=x", ["parallel.data_parallel_size must be a valid integer or auto, got 'x'"]),
    ("model.hidden_size=-1", ["model.hidden_size must be greater than 0, got -1"]),
    ("model.hidden_size=3", ["model.hidden_size 3 is not a multiple of model.num_attention_heads 4"]),
    ("model.hidden_size=64.5", ["model.hidden_size must be a valid integer, got 64.5"]),
    ("model.hidden_size=true", ["model.hidden_size must be a valid integer, got 'true'"]),
    ("model.hidden_size=null", ["model.hidden_size must be a valid integer, got null"]),
    ("optimizer.learning_rate=.nan", ["optimizer.learning_rate must be a finite number"]),
    ("optimizer.betas=[0.9]", ["optimizer.betas must be a longer list, got [0.9]"]),
    ("optimizer.betas=[0.9, 1.5]", ["optimizer.betas must be less than 1, got 1.5"]),
    (
        "optimizer.name=muon parallel.zero_stage=3",
        ["optimizer.name muon needs whole matrices", "parallel.zero_stage 3", "use zero_stage 1 or 2"],
    ),
    ("optimizer.name=muon offload.optimizer=cpu", ["optimizer.name muon", "set offload.optimizer none"]),
    (
        "optimizer.moments_dtype=bf16 optimizer.betas=[0.9,0.999]",
        ["optimizer.betas 0.999 with optimizer.moments_dtype bf16", "use 0.996 or less, or moments_dtype fp32"],
    ),
    (
        "optimizer.moments_dtype=bf16 optimizer.name=muon optimizer.momentum=0.999",
        ["optimizer.momentum 0.999 with optimizer.moments_dtype bf16"],
    ),
    ("optimizer.moments_dtype=bf16 optimizer.name=sgd", ["has no effect with optimizer.name sgd", "remove it"]),
    (
        "optimizer.moments_dtype=bf16 offload.optimizer=cpu",
        ["optimizer.moments_dtype bf16", "use moments_dtype fp32, or offload.optimizer none"],
    ),
    ("data.path=[]", ["data.path must be a list of at least 1, got []"]),
    ("data.held_out_fraction=0.6", ["data.held_out_fraction must be at most 0.5, got 0.6"]),
    ("model.rope_scaling.factor=2", ["model.rope_scaling.rope_type is required"]),
    (
        "model.rope_scaling.rope_typ=linear",
        ['"model.rope_scaling.rope_typ": did you mean "model.rope_scaling.rope_type"?'],
    ),
    ("model.num_hidden_layers=1e12", ["model.num_hidden_layers must be at most 100000"]),
    # whose micro-batches had filled 20 GB before the first step
    ("training.global_batch_size=1e12", ["training.global_batch_size must be at most 1000000"]),
    ("launch.spin_threads=3", ["launch.spin_threads must be auto or true or false, got 3"]),
    ("training=3", ["training must be a section with options of its own, got 3: it has global_batch_size, "]),
    ("recompute=full", ["got 'full': did you mean recompute.mode=full?"]),
    ("monitor.wandb=true", ["got true: did you mean monitor.wandb.enabled=true?"]),
    ("model=llama3-8b", ["`megalite config init --from llama3-8b` writes a config"]),
    ("optimizer.betas=0.9,0.95", ["got '0.9,0.95': write [0.9,0.95]"]),
    ("training.steps=10,000", ["got '10,000': write 10000"]),
    ("data.held_out_fraction=5%", ["got '5%': write 0.05"]),
    ("data.path={x}", ["a path is text, or a list of texts, got {'x': None}"]),
    ("model=null", ["model.vocab_size is required (number of token ids) (and 4 more)"]),
    (
        "watchdog.startup_minutes=45",
        ["watchdog.startup_minutes 45", "watchdog.timeout_minutes 30", "set watchdog.timeout_minutes to 45 or more"],
    ),
    # the form of an override
    ("training.steps", ['"training.steps" is not of the form section.option=value']),
    (".steps=3", ['".steps=3" is not of the form section.option=value']),
    ("training.steps = 3", ['overrides "training.steps", "=", "3" are not of the form', "value, in one word"]),
    ("run_dir=", ["run_dir must be a path, got null"]),
    ("model.vocab_size=1e30", ["model.vocab_size must be an integer of fewer digits, got 1e+30"]),
    ("model.model_type=3", ["model.model_type must be text, got 3"]),
    # what it lacks was said of `training.stages.0`, or a namesake elsewhere was thought to be meant
    ("training.stages=[{at: 1}]", ['"training.stages.0.at": section training.stages.0 has from_tokens, from_steps']),
    ("training.stages=[{step: 1}]", ['"training.stages.0.step": section training.stages.0 has from_tokens']),
    ("data.stages=[{weight: {a: 1}}]", ['"data.stages.0.weight": did you mean "data.stages.0.weights"?']),
    ("data.validation={x: {packing: concat}}", ['"data.validation.x.packing": did you mean "data.packing"?']),
    ("model.rope_scaling.type=linear", ['"model.rope_scaling.type": did you mean "model.rope_scaling.rope_type"?']),
    ("training.steps.x=3", ["training.steps is a value, not a section; write training.steps=..."]),
    ("data.path=[a", ['override "data.path=[a": not valid YAML: expected']),
    ("deepspeed={a: 1, a: 2}", ["a stands twice"]),
    (
        "deepspeed={zero_optimization: {reduce_bucket: 3}}",
        ['no option "reduce_bucket" in its section zero_optimization: did you mean "reduce_bucket_size"?'],
    ),
    (
        "deepspeed.managed_gradient_accumulation=true",
        ["gradients are accumulated until", "remove deepspeed.managed_gradient_accumulation"],
    ),
    ("deepspeed.zero_optimization.reduce_bucket_size=7", ["set parallel.gradient_bucket_size"]),
    ("deepspeed={zero_optimization:{stage:3}}", ['"stage:3" in its section zero_optimization: remove']),
    # the model and the layout
    ("model.hidden_size=66", ["model.hidden_size 66", "num_attention_heads 4: use a hidden_size of 64 or 72"]),
    ("model.head_dim=15", ["model.head_dim 15 is odd", "RoPE", "14 or 16"]),
    ("model.num_key_value_heads=3", ["model.num_attention_heads 4", "num_key_value_heads 3", "use 2 or 4 kv"]),
    ("parallel.tensor_parallel_size=3", ["model.num_attention_heads 4", "tensor_parallel_size 3", "of 2 or 4"]),
    ("parallel.pipeline_parallel_size=6", ["pipeline_parallel_size 6", "num_hidden_layers 5", "at most 5"]),
    (
        "parallel.pipeline_parallel_size=2 parallel.zero_stage=3 parallel.pipeline_schedule=zb-v",
        ["parallel.zero_stage 3", "pipeline_schedule zb-v", "use zero_stage 1 or 2, or pipeline_schedule 1f1b"],
    ),
    (
        "parallel.pipeline_parallel_size=2 parallel.zero_stage=3 model.tie_word_embeddings=true",
        ["parallel.zero_stage 3", "cannot tie the head", "use zero_stage 1 or 2, or pipeline_parallel_size 1"],
    ),
    ("parallel.pipeline_schedule=zb-v", ["has no effect with parallel.pipeline_parallel_size 1", "remove it"]),
    ("parallel.pipeline_chunks=2", ["pipeline_chunks 2 has no effect", "remove it, or use more stages"]),
    (
        "parallel.pipeline_parallel_size=2 parallel.pipeline_schedule=zb-v parallel.pipeline_chunks=1",
        ["zb-v has exactly 2 chunks per stage, not 1", "set parallel.pipeline_chunks"],
    ),
    (
        "parallel.pipeline_parallel_size=2 parallel.pipeline_chunks=2",
        ["1f1b has one chunk per stage, not 2", "use interleaved", "set parallel.pipeline_chunks"],
    ),
    (
        "parallel.pipeline_parallel_size=2 parallel.pipeline_schedule=interleaved parallel.pipeline_chunks=3",
        [
            "2 x parallel.pipeline_chunks 3",
            "num_hidden_layers 5",
            "every chunk",
            "1f1b with one chunk",
            "at least 6 layers",
        ],
    ),
    (
        "model.num_attention_heads=12 model.num_key_value_heads=6 model.head_dim=4 parallel.tensor_parallel_size=4",
        ["model.num_key_value_heads 6", "tensor_parallel_size 4", "tensor_parallel_size of 3 or 6"],
    ),
    (
        "model.num_attention_heads=32 model.num_key_value_heads=2 model.head_dim=2 parallel.tensor_parallel_size=8",
        ["model.num_key_value_heads 2", "replicated kv heads x head_dim = 4 must be a multiple", "of 4"],
    ),
    (
        "model.vocab_size=3 parallel.tensor_parallel_size=4",
        ["model.vocab_size 3", "tensor_parallel_size 4", "use a tensor_parallel_size of at most 3"],
    ),
    (
        "parallel.sequence_parallel=true parallel.tensor_parallel_size=2 training.sequence_length=31",
        ["training.sequence_length 31", "tensor_parallel_size 2", "use a sequence_length of 30 or 32"],
    ),
    # offloading
    (
        "deepspeed.zero_optimization.offload_optimizer.device=cpu",
        ["zero_optimization.offload_optimizer is not set there", "set offload.optimizer cpu"],
    ),
    ("deepspeed.zero_optimization.cpu_offload=true", ["cpu_offload is not set there", "set offload.optimizer cpu"]),
    (
        "offload.optimizer=cpu deepspeed.zero_optimization.offload_optimizer.device=nvme",
        ["offload.optimizer cpu and deepspeed.zero_optimization.offload_optimizer", "remove one of them"],
    ),
    (
        "offload.optimizer=cpu deepspeed.zero_optimization.offload_optimizer.device=none",
        ["offload.optimizer cpu and deepspeed.zero_optimization.offload_optimizer", "remove one of them"],
    ),
    (
        "offload.optimizer=cpu deepspeed.zero_optimization.offload_optimizer=null",
        ["offload.optimizer cpu and deepspeed.zero_optimization.offload_optimizer", "remove one of them"],
    ),
    (
        "offload.optimizer=cpu deepspeed.zero_force_ds_cpu_optimizer=true",
        ["zero_force_ds_cpu_optimizer true would end a run", "remove it"],
    ),
    (
        "offload.optimizer=cpu deepspeed.zero_optimization.overlap_comm=true",
        ["overlap_comm has no effect", "summed by megalite while backward runs", "remove it"],
    ),
    (
        "deepspeed.zero_optimization.offload_optimizer.device=nvme",
        ["offload_optimizer.device nvme keeps", "parallel.zero_stage 1", "set offload.optimizer cpu", "zero_stage 3"],
    ),
    (
        "deepspeed.zero_optimization.offload_optimizer.device=nvme parallel.zero_stage=2",
        ["offload_optimizer.device nvme keeps", "parallel.zero_stage 2", "set offload.optimizer cpu", "zero_stage 3"],
    ),
    (
        "deepspeed.zero_optimization.offload_optimizer.device=nvme parallel.zero_stage=3 "
        "parallel.gradient_bucket_size=262143",
        ["offload_optimizer.device nvme keeps", "less than 1 MiB", "with 1 replica", "at least 262144"],
    ),
    ("offload.optimizer=nvme", ["offload.optimizer", "none", "cpu"]),
    ("offload.activations=true", ["offload.activations", "none", "cpu"]),
    (
        "offload.activations=cpu parallel.pipeline_parallel_size=2 parallel.zero_stage=3 "
        "parallel.pipeline_schedule=zero-bubble",
        ["parallel.zero_stage 3 does not go with pipeline_schedule zero-bubble"],
    ),
    # the run
    ("training.tokens=1e6", ["training.steps 10 and training.tokens 1000000", "keep one"]),
    ("training.steps=", ['override "training.steps=": a run needs a length: set training.steps']),
    ("training.steps=null", ["a run needs a length: set training.steps or training.tokens"]),
    ("training.global_batch_size=9", ["training.global_batch_size 9", "micro_batch_size 2", "of 8 or 10"]),
    (
        "parallel.data_parallel_size=3",
        ["training.global_batch_size 8", "micro_batch_size 2 x data-parallel size 3 = 6", "of 6 or 12"],
    ),
    ("training.sequence_length=4096", ["4096 is longer than model.max_position_embeddings 2048", "at most 2048"]),
    ("schedule.decay_steps=2", ["schedule.decay_steps 2", "schedule.name cosine", "use schedule.name wsd"]),
    (
        "schedule.name=wsd schedule.warmup_steps=5 schedule.decay_steps=6",
        ["schedule.warmup_steps 5 + schedule.decay_steps 6", "at most 10"],
    ),
    ("schedule.name=wsd schedule.warmup_steps=10", ["schedule.decay_steps 1", "at most 10"]),
    (
        "schedule.name=wsd schedule.warmup_samples=72 schedule.decay_tokens=4096 training.sequence_length=64",
        ["schedule.warmup_samples 72 = 4608 tokens + schedule.decay_tokens 4096", "add up to at most 5120"],
    ),
    ("schedule.decay_tokens=2", ["schedule.decay_tokens 2", "schedule.name cosine", "use schedule.name wsd"]),
    (
        "schedule.warmup_steps=5 schedule.warmup_tokens=10",
        ["schedule.warmup_steps 5 and schedule.warmup_tokens 10 are 2 lengths of one warm-up: keep one"],
    ),
    (
        "schedule.name=wsd schedule.warmup_tokens=0 schedule.decay_steps=3 training.sequence_length=64",
        [
            "schedule.decay_steps 3 is in steps",
            "warmup_tokens makes the whole schedule go by tokens",
            "decay_tokens 1536",
        ],
    ),
    (
        "schedule.name=wsd schedule.warmup_steps=2 schedule.decay_tokens=512 training.sequence_length=64",
        ["schedule.warmup_steps 2 is in steps, and schedule.decay_tokens", "use warmup_tokens 1024 in its place"],
    ),
    (
        "data.path=null data.sources.a.path=x data.sources.a.weight=1 schedule.warmup_epochs=1",
        ["of one text", "use warmup_samples or warmup_tok"],
    ),
    ("schedule.name=wsd schedule.decay_steps=1 schedule.decay_tokens=1", ["two lengths of one decay"]),
    ("optimizer.scale_with_batch=sqrt", ["set optimizer.reference_batch_size, in sequences; 8, the global_batch_size"]),
    ("optimizer.reference_batch_size=8", ["no effect with optimizer.scale_with_batch none: use sqrt"]),
    (
        "training.evaluation.interval=5 data.held_out_fraction=0",
        ["training.evaluation.interval 5", "data.held_out_fraction is 0", "use a held_out_fraction of 0.01"],
    ),
    (
        "training.evaluation.interval=5 training.evaluation.samples=7",
        ["training.evaluation.samples 7", "micro_batch_size 2", "use 6 or 8 samples"],
    ),
    ("training.initialize_from=runs/tiny/checkpoints/step_00000010", ["run's own run_dir", "another run_dir"]),
    (
        "precision.gradient_accumulation_dtype=fp16",
        ["precision.gradient_accumulation_dtype fp16", "precision.dtype bf16", "use fp32 or bf16"],
    ),
    ("precision.dtype=fp32 precision.gradient_accumulation_dtype=bf16", ["precision.dtype fp32: use fp32"]),
    (
        "precision.gradient_reduction_dtype=fp16",
        ["precision.gradient_reduction_dtype fp16", "precision.dtype bf16", "use fp32 or bf16"],
    ),
    (
        "compression.gradients=int8 parallel.zero_stage=2",
        ["compression.gradients int8", "parallel.zero_stage 2", "use zero_stage 1", "gradient_reduction_dtype bf16"],
    ),
    ("compression.weights=int8 precision.dtype=fp16", ["compression.weights int8", "dtype fp16", "use bf16"]),
    ("compression.weights=int8 offload.optimizer=cpu", ["compression.weights int8", "use offload.optimizer none"]),
    (
        "compression.gradients=top_k precision.gradient_reduction_dtype=bf16",
        ["compression.gradients top_k replaces precision.gradient_reduction_dtype bf16", "set that to fp32"],
    ),
    ("deepspeed.communication_data_type=fp32", ["set precision.gradient_reduction_dtype"]),
    (
        "parallel.zero_stage=2 deepspeed.zero_optimization.reduce_scatter=true",
        ["reduce_scatter has no effect with parallel.zero_stage 2", "summed by megalite", "remove it"],
    ),
    # DeepSpeed's own options
    ("deepspeed.train_batch_size=8", ["deepspeed.train_batch_size", "set training.global_batch_size"]),
    ("deepspeed.bf16.enabled=true", ["deepspeed.bf16", "set precision.dtype"]),
    ("deepspeed.fp16.enabled=true", ["deepspeed.fp16.enabled", "set precision.dtype"]),
    ("deepspeed.fp16.loss_scale_window=5", ["deepspeed.fp16 has no effect", "precision.dtype bf16"]),
    ("deepspeed.zero_optimization.stage=2", ["deepspeed.zero_optimization.stage", "set parallel.zero_stage"]),
    ("deepspeed.zero_optimization=2", ["deepspeed.zero_optimization must be a section", "got 2"]),
    ("deepspeed.data_types.grad_accum_dtype=bf16", ["set precision.gradient_accumulation_dtype"]),
    ("deepspeed.pipeline.stages=2", ["deepspeed.pipeline", "parallel.pipeline_parallel_size"]),
    ("deepspeed.activation_checkpointing={}", ["deepspeed.activation_checkpointing", "set recompute.mode"]),
    ("deepspeed.optimizer.type=Adam", ["deepspeed.optimizer", "set optimizer.name"]),
    ("deepspeed.scheduler.type=WarmupLR", ["deepspeed.scheduler", "set schedule.name"]),
    ("deepspeed.elasticity.enabled=true", ["DeepSpeed 0.19 removed elasticity: remove deepspeed.elasticity"]),
    ("deepspeed.amp={}", ["DeepSpeed 0.19 removed amp"]),
    (
        "deepspeed.gradient_allreduce_op=sum",
        ["deepspeed.gradient_allreduce_op", "mean over the global batch", "remove"],
    ),
    ("deepspeed.prescale_gradients=true", ["deepspeed.prescale_gradients cannot be set"]),
    ("deepspeed.gradient_predivide_factor=2", ["deepspeed.gradient_predivide_factor cannot be set"]),
    ("deepspeed.zero_allow_untested_optimizer=false", ["deepspeed.zero_allow_untested_optimizer cannot be set"]),
    (
        "deepspeed.sequence_parallel_size=2",
        ["is not set there but through parallel.context_parallel_size"],
    ),
    ("deepspeed.zero_optimisation.x=1", ['"deepspeed.zero_optimisation"', '"deepspeed.zero_optimization"?']),
    ("deepspeed.gradient_cliping=1", ['"deepspeed.gradient_cliping"', 'did you mean "training.gradient_clipping"?']),
    ("deepspeed.xyz=1", ['DeepSpeed 0.19 has no option "xyz": remove deepspeed.xyz']),
    ("guards.max_interventions=0", ["guards.max_interventions", "0"]),
    ("deepspeed.zero_optimization.mics_shard_size=2", ["DeepSpeed 0.19 removed zero_optimization.mics_shard"]),
    (
        "deepspeed.comms_logger.enabled=true",
        ["deepspeed.comms_logger cannot be set: it waits for the device", "beside computation", "monitor.profile"],
    ),
    (
        "deepspeed.wall_clock_breakdown=true",
        ["deepspeed.wall_clock_breakdown cannot be set", "steps.jsonl", "remove deepspeed.wall_clock_breakdown"],
    ),
    ("deepspeed.flops_profiler.enabled=true", ["deepspeed.flops_profiler cannot be set", "monitor.timeline"]),
]

# text of a file -> fragments of the message
BAD_FILES = [
    ("", ["is empty: it needs at least run_dir and the sections model, data and training"]),
    ("- a\n- b\n", ["must hold sections like `model:`, but holds list data"]),
    ("model:\n  vocab_size: 8\n vocab_size: 9\n", ["line 3: not valid YAML"]),
    ("model:\n\tvocab_size: 8\n", ["line 2: not valid YAML: found character"]),
    ("model: *nowhere\n", ["line 1: not valid YAML: found undefined alias"]),
    ("run_dir: x\nmodel: &a [*a]\n", ["line 2: an alias contains itself: write out what it stands for"]),
    ("model: &a {b: {c: *a}}\n", ["line 1: an alias contains itself"]),
    ("[" * 2000 + "]" * 2000, ["nested too deeply"]),
    ("model: !!python/object:os.system {}\n", ["line 1: not valid YAML: could not determine a constructor"]),
    ("seed: 1\nmodel:\n  a: 1\n  b: 2\n  a: 3\n", ["line 5: model.a stands twice, first on line 3: remove one"]),
    ("1: 2\n", ["line 1: option names are words, got '1'"]),
    ("run_dir: x\nmodel:\n  vocab_size: 8\n  hiden_size: 8\n", ["line 4: unknown", '"model.hidden_size"?', "more)"]),
    ("run_dir: x\nmodell: {}\n", ["line 2: unknown option", 'did you mean "model"? (and 2 more)']),
    ("run_dir: x\n", ["section model is required, with vocab_size, hidden_size"]),
    ("run_dir: x\n---\nrun_dir: y\n", ["line 2: not valid YAML: expected a single document"]),
    ("\x00", ["not valid YAML"]),
]

# (overrides, world size, device) -> fragments of the message
BAD_WORLDS = [
    (
        "parallel.tensor_parallel_size=2 parallel.pipeline_parallel_size=2",
        6,
        "cpu",
        ["tensor_parallel_size 2 x parallel.pipeline_parallel_size 2 = 4", "6 processes", "start 4 or 8"],
    ),
    ("parallel.tensor_parallel_size=4", 2, "cpu", ["4 does not divide the 2 processes", "start 4"]),
    (
        "parallel.tensor_parallel_size=2 parallel.data_parallel_size=2",
        8,
        "cuda",
        ["makes 4 processes, but this run has 8: start 4, or set parallel.data_parallel_size to 4 or auto"],
    ),
    ("parallel.data_parallel_size=2 parallel.pipeline_parallel_size=2", 3, "cpu", ["but this run has 3: start 4"]),
    ("", 3, "cpu", ["training.global_batch_size 8", "data-parallel size 3 = 6", "of 6 or 12"]),
    (
        "training.evaluation.interval=1 training.evaluation.samples=2",
        4,
        "cpu",
        ["training.evaluation.samples 2", "data-parallel size 4 = 8", "use 8 samples"],
    ),
]


def assert_one_line(message: str, fragments: list[str]) -> None:
    assert "\n" not in message and "Traceback" not in message and "pydantic" not in message
    position = 0
    for fragment in fragments:
        assert fragment in message[position:], f"{fragment!r} is not in (the rest of) {message!r}"
        position = message.index(fragment, position)


def split(overrides: str) -> list[str]:
    """Overrides apart at spaces, except inside brackets."""
    parts: list[str] = []
    for part in overrides.split():
        if parts and (parts[-1].count("[") + parts[-1].count("{")) > (parts[-1].count("]") + parts[-1].count("}")):
            parts[-1] += " " + part
        else:
            parts.append(part)
    return parts


def test_advice_about_layers_is_for_the_chunks_that_are_advised(minimal: Path) -> None:
    """It was for the refused ones: 6 layers were told to become 9, though 2 chunks on 3 stages need 6."""
    stated = split("parallel.pipeline_parallel_size=3 parallel.pipeline_schedule=zb-v parallel.pipeline_chunks=3")
    for layers, fragments in ((6, []), (5, ["use a pipeline_parallel_size of at most 2, or at least 6 layers"])):
        with pytest.raises(ConfigError) as raised:
            load_config(minimal, [*stated, f"model.num_hidden_layers={layers}"])
        first, *others = raised.value.sentences
        assert "exactly 2 chunks per stage, not 3: give it 2 (set parallel.pipeline_chunks)" in first
        assert len(others) == len(fragments)
        assert all(fragment in other for fragment, other in zip(fragments, others, strict=True))


@pytest.mark.parametrize(("overrides", "fragments"), BAD_OVERRIDES, ids=[row[0] for row in BAD_OVERRIDES])
def test_bad_override_is_one_sentence(minimal: Path, overrides: str, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as raised:
        load_config(minimal, split(overrides))
    assert_one_line(str(raised.value), fragments)


@pytest.mark.parametrize(("text", "fragments"), BAD_FILES)
def test_bad_file_is_one_sentence_with_the_line(tmp_path: Path, text: str, fragments: list[str]) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load_config(path)
    assert_one_line(str(raised.value), [str(path), *fragments])


@pytest.mark.parametrize(("overrides", "world_size", "device", "fragments"), BAD_WORLDS)
def test_bad_world_is_one_sentence(
    minimal: Path, overrides: str, world_size: int, device: str, fragments: list[str]
) -> None:
    config = load_config(minimal, split(overrides))
    with pytest.raises(ConfigError) as raised:
        resolve_layout(config, world_size, device)  # type: ignore[arg-type]
    assert_one_line(str(raised.value), fragments)


def test_unreadable_files_are_one_sentence(tmp_path: Path) -> None:
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\xff")
    (tmp_path / "config.json").write_text('{"model_type": "llama", "vocab_size": 8}')
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    for path, reason in [
        (tmp_path / "absent.yaml", "does not exist"),
        (tmp_path, "is a folder: write a config for the model with `megalite config init --from"),
        (tmp_path / "config.json", "is a Hugging Face config: write a config for the model with `megalite config init"),
        (run, f"is a folder: give {run / 'config.yaml'}"),
        (binary, "is not UTF-8 text"),
    ]:
        with pytest.raises(ConfigError) as raised:
            load_config(path)
        assert_one_line(str(raised.value), [str(path), reason])


@pytest.mark.parametrize(
    "override", ["training.steps=3", "run_dir=s3://K:hunter2@b/x", "data.path=https://u:hunter2@h/" + "x" * 300]
)
def test_an_override_in_the_place_of_the_config_is_not_repeated(override: str) -> None:
    """Its value, which may be a URL with a password, looks like a folder."""
    with pytest.raises(ConfigError) as raised:
        load_config(Path(override))
    name = override.partition("=")[0]
    expected = f'"{name}=..." stands where a config is needed: the config comes first, then overrides'
    assert list(raised.value.sentences) == [expected]


def test_message_says_where_the_value_came_from(minimal: Path) -> None:
    """An option of the file is blamed on its line, one of the command line on the override."""
    text = minimal.read_text().replace("steps: 10", "steps: ten")
    path = minimal.with_name("where.yaml")
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"where\.yaml, line 14: training\.steps must be a valid integer"):
        load_config(path)
    with pytest.raises(ConfigError, match=r'^override "training\.steps=eleven": training\.steps must be'):
        load_config(path, ["training.steps=eleven"])


def sentences(path: Path, *overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        load_config(path, overrides)
    assert all("\n" not in sentence for sentence in raised.value.sentences)
    return list(raised.value.sentences)


def test_all_problems_are_found_at_once_each_with_its_line(minimal: Path) -> None:
    """Misspelt options, wrong values and missing ones of file and overrides, and rules about the others."""
    path = minimal.with_name("many.yaml")
    text = minimal.read_text().replace("steps: 10", "steps: ten").replace("hidden_size: 64", "hiden_size: 64", 1)
    path.write_text(text.replace("  global_batch_size: 8\n", ""))
    found = sentences(path, "parallel.tp=2", "optimizer.eps=0", "nonsense")
    assert [sentence.partition(": ")[0] for sentence in found] == [
        'override "nonsense" is not of the form section.option=value, in one word',
        f"{path}, line 4",
        'override "parallel.tp=2"',
        'override "optimizer.eps=0"',
        f"{path}, line 13",
        f"{path}, line 10",
    ]
    for sentence, fragment in zip(
        found[1:],
        ["model.hidden_size", "parallel.tensor_parallel_size", "optimizer.eps", "training.steps", "global_batch_size"],
        strict=True,
    ):
        assert fragment in sentence, sentence


def test_rules_are_checked_beside_wrong_values(minimal: Path) -> None:
    """A second round for a rule about options that are right would be a second mistake to find."""
    found = sentences(minimal, "optimizer.eps=0", "training.global_batch_size=9", "parallel.tensor_parallel_size=3")
    assert len(found) == 3, found
    assert found[1].startswith('override "parallel.tensor_parallel_size=3": model.num_attention_heads 4 cannot')
    assert found[2].startswith('override "training.global_batch_size=9": training.global_batch_size 9 is not')


@pytest.mark.parametrize("stage", ["3", "auto"])
def test_nvme_goes_with_stage_3_and_with_one_that_is_yet_to_be_chosen(minimal: Path, stage: str) -> None:
    nvme = "deepspeed.zero_optimization.offload_optimizer.device=nvme"
    load_config(minimal, [nvme, f"parallel.zero_stage={stage}"])


def test_a_rule_is_not_blamed_on_an_option_that_is_wrong_by_itself(minimal: Path) -> None:
    """Without the misspelt or wrong value the default would break the rule."""
    text = minimal.read_text()
    path = minimal.with_name("misspelt.yaml")
    path.write_text(text.replace("  steps: 10", "  stepz: 10"))
    assert len(sentences(path)) == 1 and "training.steps" in sentences(path)[0]
    assert len(sentences(minimal, "training.steps=ten")) == 1


def test_a_rule_names_the_line_of_the_file(minimal: Path) -> None:
    path = minimal.with_name("rule.yaml")
    path.write_text(minimal.read_text().replace("global_batch_size: 8", "global_batch_size: 9"))
    assert sentences(path)[0].startswith(f"{path}, line 11: training.global_batch_size 9 is not")


def test_all_duplicates_are_found_at_once(minimal: Path) -> None:
    path = minimal.with_name("twice.yaml")
    path.write_text(minimal.read_text() + "  steps: 3\nmodel: {}\n")
    found = sentences(path)
    assert [fragment in found[n] for n, fragment in enumerate(["training.steps stands twice", "model stands twice"])]


def test_what_completes_a_config_fails_beside_other_problems(minimal: Path) -> None:
    """A Hugging Face folder that is not there must not hide a misspelt option."""

    def fail(values: dict[str, object]) -> dict[str, object]:
        raise ValueError("there is no such folder")

    with pytest.raises(ConfigError) as raised:
        load_config(minimal, ["training.stepz=3"], complete=fail)
    assert raised.value.sentences[0] == "there is no such folder" and "stepz" in raised.value.sentences[1]
    with pytest.raises(ValueError, match="there is no such folder"):
        load_config(minimal, complete=fail)
