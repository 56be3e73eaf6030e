"""Rules about several options, by subject: for each broken rule a sentence with the reason and a value that works.

`broken_rules` runs all of them; rules about replicas or the device pass while those are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from megalite.config.base import Device
from megalite.config.config import Config
from megalite.config.deepspeed import offloads_to_nvme
from megalite.config.errors import ConfigError
from megalite.config.rules.adapters import problems_with_adapter
from megalite.config.rules.compression import problems_with_compression
from megalite.config.rules.context import problems_with_context
from megalite.config.rules.data import problems_with_data
from megalite.config.rules.experts import problems_with_experts
from megalite.config.rules.float8 import problems_with_float8
from megalite.config.rules.learning_rate import problems_with_learning_rate, problems_with_phases
from megalite.config.rules.model import problems_with_model
from megalite.config.rules.optimizer import problems_with_optimizer
from megalite.config.rules.performance import problems_with_performance
from megalite.config.rules.pipeline import problems_with_pipeline
from megalite.config.rules.stages import problems_with_stages
from megalite.config.store_url import problem_with_url
from megalite.config.suggestions import multiples_near, tensor_parallel_fits, tensor_parallel_near
from megalite.units import plural

OF_DEEPSPEEDS_REDUCTION = (
    *("contiguous_gradients", "overlap_comm", "reduce_scatter", "use_multi_rank_bucket_allreduce"),
    "zero_quantized_gradients",
)
LEAST_ON_NVME = 1 << 20  # MIN_AIO_BYTES of DeepSpeed's runtime/swap_tensor/utils.py


def check_rules(config: Config, data_parallel_size: int | None, device: Device | None) -> None:
    """Raises ConfigError with a sentence for each broken rule.

    data_parallel_size, device: None while they are not known.
    """
    if broken := broken_rules(config, data_parallel_size, device):
        raise ConfigError(*broken)


def broken_rules(config: Config, data_parallel_size: int | None, device: Device | None) -> list[str]:
    """Returns a sentence for each broken rule; `check_rules` raises them."""
    return [
        *_length(config),
        *problems_with_model(config.model),
        *_router(config),
        *_layout(config),
        *problems_with_context(config),
        *problems_with_experts(config, data_parallel_size),
        *problems_with_pipeline(config, data_parallel_size),
        *problems_with_stages(config, lambda in_stage: _of_batch(in_stage, data_parallel_size)),
        *problems_with_performance(config, device),
        *_deepspeed(config, device),
        *_gradient_reduction(config),
        *problems_with_compression(config),
        *_offload(config),
        *_offload_to_nvme(config, data_parallel_size),
        *problems_with_optimizer(config),
        *_precision(config),
        *problems_with_float8(config),
        *problems_with_adapter(config),
        *_batch(config, data_parallel_size),
        *_evaluation(config, data_parallel_size),
        *problems_with_data(config, data_parallel_size),
        *problems_with_learning_rate(config),
        *_checkpoints(config),
        *_guards(config),
        *_monitor(config, device),
    ]


def check_counted_length(config: Config) -> None:
    """Raises ConfigError if the phases of the schedule do not fit into a run that counts its length from its start.

    Loading cannot check it with `training.tokens`: steps before a checkpoint may have had another batch size.
    """
    if broken := list(problems_with_phases(config)):
        raise ConfigError(*broken)


def _length(config: Config) -> Iterator[str]:
    training = config.training
    if training.steps is None and training.tokens is None:
        yield "a run needs a length: set training.steps or training.tokens"
    if training.steps is not None and training.tokens is not None:
        yield (
            f"training.steps {training.steps} and training.tokens {training.tokens} both set the length of "
            "the run: keep one and remove the other (or set it to null)"
        )


def _router(config: Config) -> Iterator[str]:
    for option, coefficient in config.training.router:
        if coefficient and config.model.num_experts is None:
            yield (
                f"training.router.{option} {coefficient} is about experts, but model.num_experts is null: remove it, "
                "or set num_experts"
            )
    has_place = config.model.e_score_correction_bias
    if config.training.router.bias_rate and config.checkpoint.export_hf != "off" and not has_place:
        yield (
            f"checkpoint.export_hf {config.checkpoint.export_hf} cannot write the bias of training.router.bias_rate "
            f"{config.training.router.bias_rate}, for which a Hugging Face {config.model.model_type} model has no "
            "place: set export_hf off, or bias_rate 0"
        )


def _layout(config: Config) -> Iterator[str]:
    model, tp = config.model, config.parallel.tensor_parallel_size
    heads, kv = model.num_attention_heads, model.num_key_value_heads
    if heads % tp:
        yield (
            f"model.num_attention_heads {heads} cannot be shared evenly by parallel.tensor_parallel_size {tp}: "
            f"use a tensor_parallel_size of {tensor_parallel_near(model, tp)}"
        )
    elif not tensor_parallel_fits(model, tp):
        reason = "one must be a multiple of the other"
        if tp % kv == 0:
            reason = f"replicated kv heads x head_dim = {kv * model.head_dim} must be a multiple of it"
        yield (
            f"model.num_key_value_heads {kv} does not go with parallel.tensor_parallel_size {tp} ({reason}): use "
            f"a tensor_parallel_size of {tensor_parallel_near(model, tp)}"
        )
    if model.vocab_size < tp:
        yield (
            f"model.vocab_size {model.vocab_size} is smaller than parallel.tensor_parallel_size {tp}, so some ranks "
            f"would hold no token: use a tensor_parallel_size of at most {model.vocab_size}"
        )


def _deepspeed(config: Config, device: Device | None) -> Iterator[str]:
    options, dtype = config.deepspeed, config.precision.dtype
    zero = options.get("zero_optimization", {})
    offload = zero.get("offload_optimizer")
    is_partial = isinstance(offload, dict) and offload.get("ratio", 1) != 1
    for name, is_used in (("zenflow", zero.get("zenflow")), ("offload_optimizer.ratio", is_partial)):
        if is_used:
            yield (
                f"deepspeed.zero_optimization.{name} makes DeepSpeed update part of the weights with an optimizer "
                "that it adds, whose state no checkpoint would hold: remove it"
            )
    if zero.get("compute_grad_norm", True) is False:
        yield (
            "deepspeed.zero_optimization.compute_grad_norm false would let gradients that are not finite into the "
            "weights: remove it"
        )
    if device == "cpu" and zero.get("zero_quantized_weights"):
        yield "deepspeed.zero_optimization.zero_quantized_weights needs a GPU, but this run is on a CPU: remove it"
    if dtype != "fp16" and "fp16" in options:
        yield (
            f"deepspeed.fp16 has no effect with precision.dtype {dtype}: remove deepspeed.fp16, or set "
            "precision.dtype to fp16"
        )


def _monitor(config: Config, device: Device | None) -> Iterator[str]:
    if config.monitor.profile.memory and device == "cpu":
        yield (
            "monitor.profile.memory needs a GPU, but this run is on a CPU, whose memory torch keeps no record of: "
            "remove it"
        )


def _gradient_reduction(config: Config) -> Iterator[str]:
    zero_stage = config.parallel.zero_stage
    for key in filter(config.deepspeed.get("zero_optimization", {}).get, OF_DEEPSPEEDS_REDUCTION):
        if key != "overlap_comm" or zero_stage < 3:  # ZeRO-3 gathers weights with it
            yield (
                f"deepspeed.zero_optimization.{key} has no effect with parallel.zero_stage "
                f"{zero_stage}, whose gradients are summed by megalite while backward runs: remove it"
            )


def _offload(config: Config) -> Iterator[str]:
    if config.offload.optimizer == "none":
        return
    section = config.deepspeed.get("zero_optimization", {}).get("offload_optimizer", {})
    if not isinstance(section, dict) or "device" in section:
        yield (
            "offload.optimizer cpu and deepspeed.zero_optimization.offload_optimizer both say where the optimizer's "
            "state is kept: remove one of them"
        )
    if config.deepspeed.get("zero_force_ds_cpu_optimizer"):
        yield (
            "deepspeed.zero_force_ds_cpu_optimizer true would end a run with offload.optimizer cpu where DeepSpeed's "
            "Adam does not compile: remove it, as that Adam is used wherever it does"
        )


def _offload_to_nvme(config: Config, data_parallel_size: int | None) -> Iterator[str]:
    if not offloads_to_nvme(config.deepspeed):
        return
    zero_stage, size = config.parallel.zero_stage, config.parallel.gradient_bucket_size
    replicas = (data_parallel_size or 1) * config.parallel.context_parallel_size
    least = replicas * LEAST_ON_NVME // 4  # fp32 numbers
    where = "deepspeed.zero_optimization.offload_optimizer.device nvme keeps the optimizer's state in host memory "
    if zero_stage < 3 and ("parallel", "zero_stage") not in config.unresolved_options:
        yield (
            f"{where}with parallel.zero_stage {zero_stage}, as DeepSpeed moves it to NVMe under stage 3 alone: remove "
            "offload_optimizer and set offload.optimizer cpu, or use zero_stage 3"
        )
    elif size < least:
        yield (
            f"{where}where a replica's part of it has less than 1 MiB: with {plural(replicas, 'replica')} each "
            f"part of parallel.gradient_bucket_size {size} has; use at least {least}, or offload.optimizer cpu"
        )


def _precision(config: Config) -> Iterator[str]:
    dtype, precision = config.precision.dtype, config.precision
    works = "fp32" if dtype == "fp32" else f"fp32 or {dtype}"
    for what in ("accumulation", "reduction"):
        chosen = getattr(precision, f"gradient_{what}_dtype")
        if chosen not in (None, "fp32", dtype):
            yield f"precision.gradient_{what}_dtype {chosen} does not go with precision.dtype {dtype}: use {works}"


def _batch(config: Config, replicas: int | None) -> Iterator[str]:
    training, tp = config.training, config.parallel.tensor_parallel_size
    length, longest = training.sequence_length, config.model.max_position_embeddings
    divisor, micro_batch = _divisor(config, replicas)
    if training.global_batch_size % divisor:
        yield (
            f"training.global_batch_size {training.global_batch_size} is not a multiple of {micro_batch}: use a "
            f"global_batch_size of {multiples_near(training.global_batch_size, divisor)}"
        )
    if config.parallel.sequence_parallel and length % tp:
        yield (
            f"training.sequence_length {length} cannot be cut by parallel.sequence_parallel over "
            f"parallel.tensor_parallel_size {tp}: use a sequence_length of {multiples_near(length, tp)}, or "
            "sequence_parallel false"
        )
    if length > longest:
        yield (
            f"training.sequence_length {length} is longer than model.max_position_embeddings {longest}: use a "
            f"sequence_length of at most {longest}, or raise max_position_embeddings to {length}"
        )


def _divisor(config: Config, replicas: int | None) -> tuple[int, str]:
    """Returns the sequences of one micro-batch on all replicas, and how they come about."""
    size = config.training.micro_batch_size
    divisor = size * (replicas or 1)
    return divisor, f"training.micro_batch_size {size}" + (
        f" x data-parallel size {replicas} = {divisor}" if replicas else ""
    )


def _evaluation(config: Config, replicas: int | None) -> Iterator[str]:
    evaluation, (divisor, micro_batch) = config.training.evaluation, _divisor(config, replicas)
    if evaluation.interval and evaluation.samples % divisor:
        yield (
            f"training.evaluation.samples {evaluation.samples} is not a multiple of {micro_batch}: use "
            f"{multiples_near(evaluation.samples, divisor)} samples"
        )


def _of_batch(config: Config, replicas: int | None) -> Iterator[str]:
    """Yields what is broken by the batch of a config, which in stages is another one."""
    yield from _batch(config, replicas)
    yield from problems_with_pipeline(config, replicas)
    yield from problems_with_float8(config)


def _checkpoints(config: Config) -> Iterator[str]:
    checkpoint, source, run_dir = config.checkpoint, config.training.initialize_from, config.run_dir
    if source is not None and source.absolute().is_relative_to(run_dir.absolute()):
        yield (
            f"training.initialize_from {source} lies in this run's own run_dir {config.run_dir}: leave it out to "
            "continue this run (checkpoint.resume does that), or use another run_dir to start a new one"
        )
    if checkpoint.keep_best and not config.training.evaluation.interval:
        yield (
            f"checkpoint.keep_best {checkpoint.keep_best} has no losses to compare, because "
            "training.evaluation.interval is 0: set an interval at which checkpoints are saved too, or keep_best 0"
        )
    if checkpoint.export_hf == "last" and not checkpoint.save_last:
        yield (
            "checkpoint.export_hf last has nothing to export, because checkpoint.save_last is false: set save_last "
            "true, or export_hf every"
        )
    if checkpoint.mirror is None:
        return
    if problem := problem_with_url(checkpoint.mirror):
        yield f"checkpoint.mirror {problem}"
    protocol, _separator, folder = checkpoint.mirror.partition("://")
    if protocol == "file" and Path(folder).absolute().is_relative_to(run_dir.absolute()):
        yield (
            f"checkpoint.mirror {checkpoint.mirror} lies in this run's own run_dir {config.run_dir}, which it is "
            "there to outlive: choose a folder elsewhere"
        )


def _guards(config: Config) -> Iterator[str]:
    guards, watchdog = config.guards, config.watchdog
    for name, policy in (("not_finite", guards.not_finite), ("loss_spike", guards.loss_spike)):
        if policy == "rollback" and config.checkpoint.interval == 0:
            yield (
                f"guards.{name} rollback has no checkpoint to return to, because checkpoint.interval is 0: set "
                f"checkpoint.interval to a number of steps or auto, or guards.{name} to skip or stop"
            )
    if watchdog.enabled and watchdog.startup_minutes > watchdog.timeout_minutes:
        yield (
            f"watchdog.startup_minutes {watchdog.startup_minutes:g} is longer than watchdog.timeout_minutes "
            f"{watchdog.timeout_minutes:g}, after which ranks that wait for each other fail: set "
            f"watchdog.timeout_minutes to {watchdog.startup_minutes:g} or more"
        )
