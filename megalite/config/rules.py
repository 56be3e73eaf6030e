"""Rules about several options: a rule returns None, or one sentence with the reason and a value that works.

`check_rules` runs all of them; rules about replicas or the device pass while those are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from megalite.config.config import Config
from megalite.config.deepspeed import is_on
from megalite.config.errors import ConfigError, one_line
from megalite.config.model_rules import problem_with_model
from megalite.config.suggestions import multiples_near, tensor_parallel_fits, tensor_parallel_near


@dataclass(frozen=True)
class Situation:
    """The facts about a run's processes that rules depend on; None = not known yet."""

    data_parallel_size: int | None
    device: Literal["cpu", "cuda"] | None


def check_rules(config: Config, situation: Situation) -> None:
    """Raises ConfigError with the first broken rule in full and the number of the others."""
    broken = [sentence for rule in RULES if (sentence := rule(config, situation)) is not None]
    if broken:
        raise ConfigError(one_line(broken))


def one_length(config: Config, _: Situation) -> str | None:
    training = config.training
    if training.steps is None and training.tokens is None:
        return "a run needs a length: set training.steps or training.tokens"
    if training.steps is not None and training.tokens is not None:
        return (
            f"training.steps {training.steps} and training.tokens {training.tokens} both set the length of "
            "the run: keep one and remove the other (or set it to null)"
        )
    return None


def model_goes_together(config: Config, _: Situation) -> str | None:
    return problem_with_model(config.model)


def heads_divide_over_tensor_parallel(config: Config, _: Situation) -> str | None:
    heads, tp = config.model.num_attention_heads, config.parallel.tensor_parallel_size
    if heads % tp == 0:
        return None
    return (
        f"model.num_attention_heads {heads} cannot be shared evenly by parallel.tensor_parallel_size {tp}: "
        f"use a tensor_parallel_size of {tensor_parallel_near(config.model, tp)}"
    )


def kv_heads_divide_over_tensor_parallel(config: Config, _: Situation) -> str | None:
    model, tp = config.model, config.parallel.tensor_parallel_size
    kv = model.num_key_value_heads
    if model.num_attention_heads % tp or tensor_parallel_fits(model, tp):
        return None
    reason = "one must be a multiple of the other"
    if tp % kv == 0:
        reason = f"replicated kv heads x head_dim = {kv * model.head_dim} must be a multiple of it"
    return (
        f"model.num_key_value_heads {kv} does not go with parallel.tensor_parallel_size {tp} ({reason}): use "
        f"a tensor_parallel_size of {tensor_parallel_near(model, tp)}"
    )


def vocabulary_divides_over_tensor_parallel(config: Config, _: Situation) -> str | None:
    vocab, tp = config.model.vocab_size, config.parallel.tensor_parallel_size
    if vocab >= tp:
        return None
    return (
        f"model.vocab_size {vocab} is smaller than parallel.tensor_parallel_size {tp}, so some ranks would "
        f"hold no token: use a tensor_parallel_size of at most {vocab}"
    )


def every_stage_has_a_block(config: Config, _: Situation) -> str | None:
    layers, pp = config.model.num_hidden_layers, config.parallel.pipeline_parallel_size
    if pp <= layers:
        return None
    return (
        f"parallel.pipeline_parallel_size {pp} is larger than model.num_hidden_layers {layers}, but every stage needs "
        f"at least one layer: use a pipeline_parallel_size of at most {layers}, or at least {pp} layers"
    )


def pipeline_with_zero_1(config: Config, _: Situation) -> str | None:
    pp, zero = config.parallel.pipeline_parallel_size, config.parallel.zero_stage
    if pp == 1 or zero < 2:
        return None
    return (
        f"parallel.zero_stage {zero} does not work with parallel.pipeline_parallel_size {pp}, whose stages sum the "
        "gradients of many micro-batches before reducing them: use zero_stage 1, or pipeline_parallel_size 1"
    )


def no_engine_timers_in_a_pipeline(config: Config, _: Situation) -> str | None:
    pp = config.parallel.pipeline_parallel_size
    for key in ("wall_clock_breakdown", "flops_profiler"):
        if pp > 1 and is_on(config.deepspeed.get(key)):
            return (
                f"deepspeed.{key} crashes DeepSpeed's pipeline engine (parallel.pipeline_parallel_size "
                f"{pp}): remove it, or use pipeline_parallel_size 1"
            )
    return None


def micro_batches_are_no_steps(config: Config, _: Situation) -> str | None:
    if config.deepspeed.get("managed_gradient_accumulation", True):
        return None
    return (
        "deepspeed.managed_gradient_accumulation false would make every micro-batch an optimizer step of its own: "
        "remove it"
    )


def offload_without_deepspeeds_optimizer(config: Config, _: Situation) -> str | None:
    zero = config.deepspeed.get("zero_optimization", {})
    offload = zero.get("offload_optimizer")
    is_partial = isinstance(offload, dict) and offload.get("ratio", 1) != 1
    for name, is_used in (("zenflow", zero.get("zenflow")), ("offload_optimizer.ratio", is_partial)):
        if is_used:
            return (
                f"deepspeed.zero_optimization.{name} needs an optimizer of DeepSpeed's own, but a run's are plain "
                "torch ones: remove it"
            )
    return None


def gradients_are_checked(config: Config, _: Situation) -> str | None:
    if config.deepspeed.get("zero_optimization", {}).get("compute_grad_norm", True) is not False:
        return None
    return (
        "deepspeed.zero_optimization.compute_grad_norm false would let gradients that are not finite into the weights: "
        "remove it"
    )


def quantized_communication_needs_a_gpu(config: Config, situation: Situation) -> str | None:
    zero = config.deepspeed.get("zero_optimization", {})
    for key in ("zero_quantized_weights", "zero_quantized_gradients"):
        if situation.device == "cpu" and zero.get(key):
            return f"deepspeed.zero_optimization.{key} needs a GPU, but this run is on a CPU: remove it"
    return None


def loss_scaling_needs_fp16(config: Config, _: Situation) -> str | None:
    dtype = config.precision.dtype
    if dtype == "fp16" or "fp16" not in config.deepspeed:
        return None
    return (
        f"deepspeed.fp16 has no effect with precision.dtype {dtype}: remove deepspeed.fp16, or set "
        "precision.dtype to fp16"
    )


def accumulation_dtype_fits(config: Config, _: Situation) -> str | None:
    dtype, accumulation = config.precision.dtype, config.precision.gradient_accumulation_dtype
    if accumulation in ("fp32", dtype):
        return None
    works = "fp32" if dtype == "fp32" else f"fp32 or {dtype}"
    return (
        f"precision.gradient_accumulation_dtype {accumulation} does not go with precision.dtype {dtype}: "
        f"accumulate in {works}"
    )


def fp16_needs_a_gpu(config: Config, situation: Situation) -> str | None:
    if config.precision.dtype != "fp16" or situation.device != "cpu":
        return None
    return "precision.dtype fp16 needs a GPU, but this run is on a CPU: use bf16 or fp32"


def global_batch_divides(config: Config, situation: Situation) -> str | None:
    training, dp = config.training, situation.data_parallel_size
    micro_batches = training.micro_batch_size * (dp or 1)
    if training.global_batch_size % micro_batches == 0:
        return None
    replicas = f" x data-parallel size {dp} = {micro_batches}" if dp else ""
    return (
        f"training.global_batch_size {training.global_batch_size} is not a multiple of "
        f"training.micro_batch_size {training.micro_batch_size}{replicas}: use a global_batch_size of "
        f"{multiples_near(training.global_batch_size, micro_batches)}"
    )


def evaluation_samples_divide(config: Config, situation: Situation) -> str | None:
    training, dp = config.training, situation.data_parallel_size
    samples, step = training.evaluation.samples, training.micro_batch_size * (dp or 1)
    if training.evaluation.interval == 0 or samples % step == 0:
        return None
    replicas = f" x data-parallel size {dp} = {step}" if dp else ""
    return (
        f"training.evaluation.samples {samples} is not a multiple of training.micro_batch_size "
        f"{training.micro_batch_size}{replicas}: use {multiples_near(samples, step)} samples"
    )


def evaluation_has_documents(config: Config, _: Situation) -> str | None:
    if config.training.evaluation.interval == 0 or config.data.held_out_fraction > 0:
        return None
    return (
        f"training.evaluation.interval {config.training.evaluation.interval} has nothing to evaluate on, "
        "because data.held_out_fraction is 0: use a held_out_fraction of 0.01, or interval 0"
    )


def sequence_divides_over_tensor_parallel(config: Config, _: Situation) -> str | None:
    length, tp = config.training.sequence_length, config.parallel.tensor_parallel_size
    if not config.parallel.sequence_parallel or length % tp == 0:
        return None
    return (
        f"training.sequence_length {length} cannot be cut by parallel.sequence_parallel over "
        f"parallel.tensor_parallel_size {tp}: use a sequence_length of {multiples_near(length, tp)}, or "
        "sequence_parallel false"
    )


def sequence_fits_the_model(config: Config, _: Situation) -> str | None:
    length, longest = config.training.sequence_length, config.model.max_position_embeddings
    if length <= longest:
        return None
    return (
        f"training.sequence_length {length} is longer than model.max_position_embeddings {longest}: use a "
        f"sequence_length of at most {longest}, or raise max_position_embeddings to {length}"
    )


def schedule_fits_the_run(config: Config, situation: Situation) -> str | None:
    if one_length(config, situation) is not None:
        return None
    schedule, steps = config.schedule, config.total_steps
    decay = schedule.wsd_decay_steps(steps)
    if schedule.name == "wsd" and schedule.warmup_steps + decay > steps:
        return (
            f"schedule.warmup_steps {schedule.warmup_steps} + schedule.decay_steps {decay} is longer than "
            f"the run of {steps} steps: they may add up to at most {steps}"
        )
    return None


def decay_steps_need_wsd(config: Config, _: Situation) -> str | None:
    schedule = config.schedule
    if schedule.decay_steps is None or schedule.name == "wsd":
        return None
    return (
        f"schedule.decay_steps {schedule.decay_steps} has no meaning with schedule.name {schedule.name}: "
        "remove it, or use schedule.name wsd"
    )


def initial_weights_are_not_our_own(config: Config, _: Situation) -> str | None:
    source = config.training.initialize_from
    if source is None:
        return None
    if not source.absolute().is_relative_to(config.run_dir.absolute()):
        return None
    return (
        f"training.initialize_from {source} lies in this run's own run_dir {config.run_dir}: leave it out to "
        "continue this run (checkpoint.resume does that), or use another run_dir to start a new one"
    )


def keep_best_has_losses(config: Config, _: Situation) -> str | None:
    best = config.checkpoint.keep_best
    if best == 0 or config.training.evaluation.interval > 0:
        return None
    return (
        f"checkpoint.keep_best {best} has no losses to compare, because training.evaluation.interval is 0: set an "
        "interval at which checkpoints are saved too, or keep_best 0"
    )


def the_last_step_is_exported(config: Config, _: Situation) -> str | None:
    checkpoint = config.checkpoint
    if checkpoint.export_hf != "last" or checkpoint.save_last:
        return None
    return (
        "checkpoint.export_hf last has nothing to export, because checkpoint.save_last is false: set save_last true, "
        "or export_hf every"
    )


BUCKETS = ("s3", "s3a", "gs", "gcs")  # protocols whose URLs name a bucket, which has no user and no port


def problem_with_url(url: str) -> str | None:
    """Returns why `url` cannot hold checkpoints, without repeating a credential in it; None if it can."""
    never = "credentials come only from the usual providers (environment variables, profiles, the machine's role)"
    protocol, is_url, rest = url.partition("://")
    if re.search(r"::[\w+.-]+://", url):
        return "chains protocols: use one, as in s3://bucket/folder"
    if not is_url:
        return "is not a URL: write file:///folder, s3://bucket/folder or gs://bucket/folder"
    if not rest:
        return "names no place: write file:///folder, s3://bucket/folder or gs://bucket/folder"
    if _has_credentials(url, protocol, rest):
        return f"has credentials in it: remove them, {never}"
    if "?" in rest or "#" in rest:
        return f"has a query, where tokens stand: remove it, {never}"
    return None


def _has_credentials(url: str, protocol: str, rest: str) -> bool:
    if protocol in BUCKETS:
        is_alias = rest.startswith("arn:")  # of an access point
        return not is_alias and ("@" in rest or ":" in rest.partition("/")[0])
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:  # a port that is no number is the beginning of a password with a slash in it
        return True
    return parts.password is not None


def mirror_is_a_place(config: Config, _: Situation) -> str | None:
    mirror = config.checkpoint.mirror
    problem = None if mirror is None else problem_with_url(mirror)
    return None if problem is None else f"checkpoint.mirror {problem}"


def mirror_outlives_the_run_folder(config: Config, _: Situation) -> str | None:
    protocol, _separator, folder = (config.checkpoint.mirror or "").partition("://")
    if protocol != "file" or not Path(folder).absolute().is_relative_to(config.run_dir.absolute()):
        return None
    return (
        f"checkpoint.mirror {config.checkpoint.mirror} lies in this run's own run_dir {config.run_dir}, which it is "
        "there to outlive: choose a folder elsewhere"
    )


def rollbacks_have_checkpoints(config: Config, _: Situation) -> str | None:
    guards = config.guards
    for name, policy in (("not_finite", guards.not_finite), ("loss_spike", guards.loss_spike)):
        if policy == "rollback" and config.checkpoint.interval == 0:
            return (
                f"guards.{name} rollback has no checkpoint to return to, because checkpoint.interval is 0: set "
                f"checkpoint.interval to a number of steps or auto, or guards.{name} to skip or stop"
            )
    return None


def the_watchdog_comes_first(config: Config, _: Situation) -> str | None:
    watchdog = config.watchdog
    if not watchdog.enabled or watchdog.startup_minutes <= watchdog.timeout_minutes:
        return None
    return (
        f"watchdog.startup_minutes {watchdog.startup_minutes:g} is longer than watchdog.timeout_minutes "
        f"{watchdog.timeout_minutes:g}, after which ranks that wait for each other fail: set watchdog.timeout_minutes "
        f"to {watchdog.startup_minutes:g} or more"
    )


RULES: tuple[Callable[[Config, Situation], str | None], ...] = (
    one_length,
    model_goes_together,
    heads_divide_over_tensor_parallel,
    kv_heads_divide_over_tensor_parallel,
    vocabulary_divides_over_tensor_parallel,
    every_stage_has_a_block,
    pipeline_with_zero_1,
    no_engine_timers_in_a_pipeline,
    micro_batches_are_no_steps,
    offload_without_deepspeeds_optimizer,
    gradients_are_checked,
    quantized_communication_needs_a_gpu,
    loss_scaling_needs_fp16,
    accumulation_dtype_fits,
    fp16_needs_a_gpu,
    global_batch_divides,
    evaluation_samples_divide,
    evaluation_has_documents,
    sequence_divides_over_tensor_parallel,
    sequence_fits_the_model,
    schedule_fits_the_run,
    decay_steps_need_wsd,
    initial_weights_are_not_our_own,
    keep_best_has_losses,
    the_last_step_is_exported,
    mirror_is_a_place,
    mirror_outlives_the_run_folder,
    rollbacks_have_checkpoints,
    the_watchdog_comes_first,
)
