"""Options that follow from several words of another stack: batches, schedules, splits and sizes, in the units of here.

In: quantities by the names that the tables in megalite/config/stacks give them. Out: options, contradictions, and what
has another unit here.
"""

from __future__ import annotations

import re
from math import ceil
from pathlib import PurePosixPath
from typing import Any

from launch.migration.derivation import Derivation, Options, Quantities
from launch.migration.flavors import FLAVORS
from megalite.config.errors import shown
from megalite.config.sections import WatchdogConfig

STARTUP_MINUTES = WatchdogConfig.model_fields["startup_minutes"].default
ONE_REPLICA = "is for one replica: multiply it by their number, or add parallel.data_parallel_size=N"


def derive(given: Quantities, known: Options) -> tuple[Options, list[str], list[tuple[str, str, str]]]:
    """Returns options, sentences about contradictions, and explanations of what has another meaning here."""
    work = Derivation(given, dict(known))
    for subject in (_flavor, _model, _layout, _batch, _length, _rate, _warmup, _data, _evaluation, _limits, _rest):
        subject(work)
    return work.derived, work.problems, work.notes


def _flavor(work: Derivation) -> None:
    """Sets the sizes of a model that torchtitan knows by name and flavor."""
    given, options = work.given, work.options
    if (flavor := given.get("flavor")) is None:
        return
    name = given.get("family")
    sizes = FLAVORS.get((str(name), str(flavor)))
    if sizes is None and "model.hidden_size" not in options and "training.initialize_from" not in options:
        known = ", ".join(f"{of} {size}" for of, size in FLAVORS)
        work.problems.append(
            f"model.flavor {shown(flavor)} of {shown(name)} has no known sizes (known are {known}): add "
            "training.initialize_from=HF_MODEL, or model.hidden_size=... and the other sizes"
        )
    for option, value in (sizes or {}).items():
        work.set(f"model.{option}", value)
    if sizes and name == "llama3":
        work.note("flavor", "the sizes of the section model; for Llama 3.1 and later add model.rope_scaling")


def _model(work: Derivation) -> None:
    given, options = work.given, work.options
    hidden = options.get("model.hidden_size")
    if given.kind in ("megatron_lm", "gpt_neox") and isinstance(hidden, int):
        _feed_forward(work, hidden)
    if (groups := work.number("query_groups")) is not None:
        if given.get("gqa"):
            work.set("model.num_key_value_heads", groups)
        else:
            work.note("query_groups", "nothing: without --group-query-attention Megatron-LM ignores it")
    if (dropout := given.get("dropout")) is not None:
        work.set("model.residual_dropout", dropout)
        work.set("model.embedding_dropout", dropout)
    experts = given.get("experts")
    if experts is not None and (isinstance(experts, list) or (work.number("experts") or 0) > 1):
        work.set("model.num_experts", experts)
        if (each := work.number("experts_per_token")) is not None:
            work.set("model.num_experts_per_tok", each)
    for option in ("model.rope_theta", "model.partial_rotary_factor"):
        if options.get("model.position_embedding") == "learned" and option in options:
            work.derived[option] = 1.0 if option.endswith("factor") else options[option]


def _feed_forward(work: Derivation, hidden: int) -> None:
    """Sets the width of the feed-forward layer, which Megatron-LM and GPT-NeoX derive where it is left out."""
    gated = work.options.get("model.gated_mlp")
    if work.given.kind == "megatron_lm":
        width = work.number("ffn") or (int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden)
        work.set("model.intermediate_size", width)
        return
    multiple = work.number("multiple_of") or 1
    width = work.number("neox_ffn") or (8 if gated else 4) * hidden
    if gated:  # what GPT-NeoX calls intermediate_size is that of both projections, before it takes two thirds
        width = ceil(int(width * 2 / 3) // 2 / multiple) * multiple
        work.note("neox_ffn", f"model.intermediate_size {width}: a third, rounded up to mlp_multiple_of {multiple}")
    work.set("model.intermediate_size", width)


def _layout(work: Derivation) -> None:
    given, options = work.given, work.options
    if (tp := work.number("titan_tp")) is not None:
        work.set("parallel.tensor_parallel_size", tp)
        work.set("parallel.sequence_parallel", tp > 1)
    if given.get("stages") is not None:
        work.set("parallel.pipeline_parallel_size", max(1, work.number("stages") or 1))
    pp, layers = work.size("parallel.pipeline_parallel_size"), options.get("model.num_hidden_layers")
    chunks = work.number("chunks")
    if (each := work.number("layers_per_chunk")) and isinstance(layers, int):
        chunks, rest = divmod(layers, pp * each)
        if rest:
            work.problems.append(
                f"{given.word('layers_per_chunk')} {each} x {pp} stages does not divide {layers} layers: correct one"
            )
            chunks = None
    if chunks and chunks > 1:
        work.set("parallel.pipeline_schedule", "interleaved")
        work.set("parallel.pipeline_chunks", chunks)
    if options.get("parallel.pipeline_schedule") and pp == 1:
        work.derived["parallel.pipeline_schedule"] = "1f1b"
    if isinstance(stage := given.get("zero_stage"), str) and stage.isdigit():
        work.problems.append(f'{given.word("zero_stage")} "{stage}" is text: write {stage}, without quotes')
    elif stage is not None:
        work.set("parallel.zero_stage", max(1, stage) if isinstance(stage, int) else stage)
        if stage == 0:
            work.note("zero_stage", "parallel.zero_stage 1: there is no stage below it, and it computes the same")
    _shards(work, pp)
    _replicas(work)


def _shards(work: Derivation, pp: int) -> None:
    """Sets the stage and the replicas of torchtitan's two degrees of data parallelism."""
    given = work.given
    shards, copies = given.get("shard_degree"), work.number("replicate_degree") or 1
    if not isinstance(shards, int):
        shards = work.number("shard_degree")
    if shards is not None and shards != 1:
        work.set("parallel.zero_stage", 3 if pp == 1 else 2)
        if copies > 1:
            work.note("replicate_degree", "not here: shards within replicas; all of them shard")
    if shards is not None and shards > 0:
        work.set("parallel.data_parallel_size", shards * copies)


def _replicas(work: Derivation) -> None:
    """Notes the number of replicas where the files tell how many devices there are."""
    per_node, nodes = work.number("gpus_per_node"), work.number("nodes") or 1
    if per_node is None or "parallel.data_parallel_size" in work.options:
        return
    tp = work.size("parallel.tensor_parallel_size")
    pp = work.size("parallel.pipeline_parallel_size")
    cp = work.size("parallel.context_parallel_size")
    shared = f" x context parallel {cp}" if cp > 1 else ""
    replicas, rest = divmod(per_node * nodes, tp * pp * cp)
    if rest:
        work.note(
            "gpus_per_node",
            f"{per_node * nodes} devices ({per_node} x {nodes} hosts) are no multiple of tensor parallel {tp} x "
            f"pipeline parallel {pp}{shared}: take more devices, or smaller sizes",
        )
        return
    work.replicas = replicas


def _batch(work: Derivation) -> None:
    """Sets both batch sizes. The global one is that of all replicas, which DeepSpeed calls train_batch_size."""
    given, options = work.given, work.options
    dp = options.get("parallel.data_parallel_size", work.replicas)
    dp = dp if isinstance(dp, int) else None
    whole, micro, times = (work.number(name) for name in ("global_batch", "micro_batch", "accumulation"))
    local = work.number("local_batch")
    if local is not None:
        pp = work.size("parallel.pipeline_parallel_size")
        micro = (work.number("pipeline_micro_batch") or 1) if pp > 1 else local
        if whole is None:
            whole = local * (dp or 1)
            replicas = f"= {local} x {dp} replicas" if dp else ONE_REPLICA
            work.note("local_batch", f"training.global_batch_size {whole} {replicas}")
        times = None
    if whole is None and micro is not None:
        whole = micro * (times or 1) * (dp or 1)
        if dp is None:
            work.note("micro_batch", f"training.global_batch_size {whole} {ONE_REPLICA}")
    if whole is not None and micro is None:
        micro = max(1, whole // ((times or 1) * dp)) if dp else None
    if whole is not None and micro is not None:
        product = micro * (times or 1) * (dp or 1)
        is_whole = whole == product if times and dp else whole % product == 0
        if not is_whole:
            parts = [
                f"{given.word('micro_batch') if local is None else given.word('local_batch')} {micro}",
                *([f"{given.word('accumulation')} {times}"] if times else []),
                *([f"{dp} replicas"] if dp else []),
            ]
            relation = "is not" if times and dp else "is no multiple of"
            work.problems.append(
                f"{given.word('global_batch')} {whole} {relation} {' x '.join(parts)} = {product}: correct one of them"
            )
    for option, size in (("global", whole), ("micro", micro)):
        if size is not None:
            work.set(f"training.{option}_batch_size", size)
    _ramp(work, whole)


def _ramp(work: Derivation, whole: int | None) -> None:
    """Turns Megatron-LM's rampup-batch-size (first batch, increment, samples) into stages."""
    ramp, length = work.given.get("rampup"), work.options.get("training.sequence_length")
    if ramp is None or whole is None or not isinstance(length, int):
        return
    if not (isinstance(ramp, list) and len(ramp) == 3 and all(isinstance(part, int) and part > 0 for part in ramp)):
        work.problems.append(f"{work.given.word('rampup')} {shown(ramp)}: must be first batch, increment, samples")
        return
    first, step, samples = ramp
    increments, rest = divmod(whole - first, step)
    if rest or increments < 1:
        work.problems.append(
            f"{work.given.word('rampup')} {shown(ramp)} does not reach the global batch {whole} in whole increments"
        )
        return
    work.set("training.global_batch_size", first)
    work.derived["training.global_batch_size"] = first
    work.set(
        "training.stages",
        [
            {"from_tokens": samples * nth // increments * length, "global_batch_size": first + nth * step}
            for nth in range(1, increments + 1)
        ],
    )


def _length(work: Derivation) -> None:
    steps, samples = work.number("train_steps"), work.number("train_samples")
    length = work.options.get("training.sequence_length")
    if steps and samples and work.given.word("train_steps") in ("--train-iters", "train_iters"):
        work.problems.append("train-iters and train-samples are both given: give one of them")
    if tokens := work.number("train_tokens"):
        work.set("training.tokens", int(tokens))
        if steps:
            work.note("train_steps", f"training.tokens {int(tokens)}; there a run ends with whichever is reached first")
    elif steps:
        work.set("training.steps", steps)
    elif samples and isinstance(length, int):
        work.set("training.tokens", samples * length)
        work.note("train_samples", f"training.tokens {samples * length}: samples x sequence length")


def _steps_of_run(work: Derivation) -> int | None:
    """Returns the length of the run in steps, by the largest batch; None if it is not known."""
    steps, tokens = work.options.get("training.steps"), work.options.get("training.tokens")
    batch, length = _largest_batch(work), work.options.get("training.sequence_length")
    if isinstance(steps, int):
        return steps
    if not isinstance(tokens, int) or batch is None or not isinstance(length, int):
        return None
    return ceil(tokens / (batch * length))


def _largest_batch(work: Derivation) -> int | None:
    stages = work.options.get("training.stages")
    found = stages[-1]["global_batch_size"] if stages else work.options.get("training.global_batch_size")
    return found if isinstance(found, int) else None


def _rate(work: Derivation) -> None:
    given, peak = work.given, work.options.get("optimizer.learning_rate")
    least = given.get("min_lr")
    if least is not None and isinstance(peak, int | float) and isinstance(least, int | float) and peak > 0:
        if least > peak:
            work.problems.append(
                f"{given.word('min_lr')} {least} is above the learning rate {peak}: correct one of them"
            )
        else:
            work.set("schedule.min_learning_rate_ratio", float(f"{least / peak:.6g}"))
    first, second = given.get("beta1"), given.get("beta2")
    if first is not None and second is not None:
        work.set("optimizer.betas", [first, second])
    run, ends = _steps_of_run(work), work.number("decay_steps")
    batch = _largest_batch(work)
    if ends is None and (samples := work.number("decay_samples")) and batch:
        ends = ceil(samples / batch)
    if ends and run and ends != run:
        name = "decay_steps" if given.get("decay_steps") is not None else "decay_samples"
        work.note(name, f"there the rate is lowest from step {ends:,} on, here at the end of the run, step {run:,}")
    samples, length = work.number("wsd_samples"), work.options.get("training.sequence_length")
    if wsd := work.number("wsd_steps"):
        work.set("schedule.decay_steps", int(wsd))
    elif samples and isinstance(length, int) and not (work.number("warmup_steps") or work.number("warmup_fraction")):
        work.set("schedule.decay_tokens", samples * length)
    elif wsd := _in_steps(work, "wsd_samples"):
        work.set("schedule.decay_steps", wsd)
    if (ratio := work.number("decay_ratio")) and run:
        work.set("schedule.name", "wsd")
        work.derived["schedule.name"] = "wsd"
        work.set("schedule.decay_steps", max(1, round(ratio * run)))


def _in_steps(work: Derivation, name: str) -> int | None:
    samples, batch = work.number(name), _largest_batch(work)
    return ceil(samples / batch) if samples and batch else None


def _warmup(work: Derivation) -> None:
    given, run = work.given, _steps_of_run(work)
    stated = [
        name for name in ("warmup_steps", "warmup_samples", "warmup_tokens", "warmup_fraction") if work.number(name)
    ]
    if len(stated) > 1:
        named = " and ".join(given.word(name) for name in stated)
        work.problems.append(f"{named} are two lengths of one warm-up: give one of them")
        return
    if not stated:
        return
    name, value = stated[0], work.number(stated[0])
    if name in ("warmup_samples", "warmup_tokens"):
        work.set(f"schedule.{name}", int(value))
        return
    steps: int | None = int(value)
    if name == "warmup_fraction":
        ends = work.number("decay_steps") or _in_steps(work, "decay_samples") or run
        steps = round(value * ends) if ends else None
    if steps is None:
        work.note(name, "schedule.warmup_steps: the length of the run is not in the files")
        return
    work.set("schedule.warmup_steps", steps)
    if name != "warmup_steps":
        work.note(name, f"schedule.warmup_steps {steps}, in steps")


def _data(work: Derivation) -> None:
    given, paths = work.given, work.given.get("data")
    parts = paths.split() if isinstance(paths, str) else paths if isinstance(paths, list) else []
    weights: list[Any] = []
    if given.get("train_data") is not None:
        parts = given.get("train_data")
        parts = parts if isinstance(parts, list) else [parts]
        weights = given.get("data_weights") or [1.0] * len(parts)
        if not isinstance(weights, list) or len(weights) != len(parts):
            work.problems.append(f"{given.word('data_weights')} must be as many as {given.word('train_data')}")
            return
    elif len(parts) > 1 and len(parts) % 2 == 0 and all(_is_number(part) for part in parts[::2]):
        weights, parts = [float(part) for part in parts[::2]], parts[1::2]
    if not weights and any(_is_number(part) and not isinstance(part, str) for part in parts):
        work.problems.append(
            f"{given.word('data')} {shown(paths)}: weights and paths must alternate, beginning with a weight"
        )
    elif not weights:
        if parts:
            work.set("data.path", parts[0] if len(parts) == 1 else parts)
    elif len(parts) == 1:
        work.set("data.path", parts[0])
    else:
        names: list[str] = []
        for path in map(str, parts):
            name = re.sub(r"[^A-Za-z0-9_-]+", "_", PurePosixPath(path).name)[:60] or "text"
            names.append(name if name not in names else f"{name}_{len(names)}")
        sources = zip(names, parts, weights, strict=True)
        work.set("data.sources", {name: {"path": str(path), "weight": weight} for name, path, weight in sources})
    _split(work)


def _is_number(value: Any) -> bool:
    return bool(re.fullmatch(r"\d*\.?\d+(?:[eE]-?\d+)?", str(value)))


def _split(work: Derivation) -> None:
    split = work.given.get("split")
    parts = re.split(r"[,\s/]+", str(split).strip("[]")) if split is not None else []
    if not parts:
        return
    if not all(map(_is_number, parts)) or not (total := sum(map(float, parts))):
        work.problems.append(f"{work.given.word('split')} {shown(split)}: must be parts such as 949,50,1")
        return
    held_out = float(f"{1 - float(parts[0]) / total:.6g}")
    if held_out <= 0.5:
        work.set("data.held_out_fraction", held_out)
        if held_out == 0:
            work.derived["training.evaluation.interval"] = 0
            work.note("split", "nothing is held out, so there is no evaluation: training.evaluation.interval 0")
    else:
        work.problems.append(
            f"{work.given.word('split')} {shown(split)} leaves {held_out:.0%} out of training, but "
            "data.held_out_fraction is at most 0.5"
        )


def _evaluation(work: Derivation) -> None:
    rounds, batch = work.given.get("eval_steps"), _largest_batch(work)
    if rounds == 0:
        work.derived["training.evaluation.interval"] = 0
    elif (rounds := work.number("eval_steps")) and batch:
        work.set("training.evaluation.samples", rounds * batch)
        work.note("eval_steps", f"training.evaluation.samples {rounds * batch}: iterations x global batch")


def _limits(work: Derivation) -> None:
    """Sets the limit of the start to that of a collective, which must not come first."""
    minutes = work.options.get("watchdog.timeout_minutes")
    if isinstance(minutes, int | float) and 0 < minutes < STARTUP_MINUTES:
        work.set("watchdog.startup_minutes", minutes)


def _rest(work: Derivation) -> None:
    if (folder := work.given.get("run_dir")) is not None:
        work.set("run_dir", str(folder))
    if work.given.get("load") not in (None, folder):
        here = "a run goes on from its run_dir; for weights from elsewhere, training.initialize_from"
        work.note("load", here)
    if (project := work.given.get("wandb_project")) is not None:
        work.set("monitor.wandb.project", project)
        work.set("monitor.wandb.enabled", True)
    if work.given.get("checkpoints_are_on") is False:
        work.derived |= {"checkpoint.interval": 0, "checkpoint.save_last": False}
    left = work.given.kind == "torchtitan" or work.given.get("dtype_is_left")
    if not left and "precision.dtype" not in work.options:
        work.set("precision.dtype", "fp32")
        work.notes.append(("", "", "precision.dtype fp32: no word of the files asks for bf16 or fp16"))
