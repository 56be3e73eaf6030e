"""Memory by the formulas: against the papers' own figures, and promises that hold whatever the job."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.memory_published import Figure, figure_1, figure_7, published_memory_of, published_states, total
from benchmarks.planner.published import read
from megalite.config import ModelConfig
from megalite.planner.cost.memory import COPY, CPU, CUDA, TENSORS, Device, StageMemory, memory_of, with_process
from megalite.planner.cost.model_states import BUCKET, deepspeed_states
from megalite.planner.cost.stage_parameters import parameters, stage_shapes
from megalite.planner.workload import MEGALITE, ParallelLayout, TrainingWorkload


@pytest.mark.parametrize("figure", figure_1(), ids=lambda figure: figure.name)
def test_figure_1_of_korthikanti(figure: Figure) -> None:
    """Weights, gradients and optimizer (18 bytes a parameter of 12 L h^2), and the first stage's activations."""
    assert figure.ours == pytest.approx(figure.published, abs=1e-3)


@pytest.mark.parametrize("figure", figure_7(), ids=lambda figure: figure.name)
def test_figure_7_of_korthikanti(figure: Figure) -> None:
    """Percent of what tensor parallelism alone keeps; the figure was read off."""
    assert figure.ours == pytest.approx(figure.published, abs=0.2)


@pytest.mark.parametrize("row", read("zero_table1_gb"), ids=lambda row: f"{row['model']} {row['DP']}")
def test_table_1_of_zero(row: dict[str, str]) -> None:
    """fp16 weights and gradients; formulas to their digits, printed figures as they are rounded, or cut off."""
    numbers = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}[row["model"]]
    for zero, column in ((1, "Pos"), (2, "Pos+g"), (3, "Pos+g+p")):
        layout = replace(GPT.layout, zero_stage=zero, data_parallel_size=int(row["DP"]))
        gigabytes = total(published_states(replace(GPT, layout=layout), numbers)) / 1e9
        assert gigabytes == pytest.approx(float(row[f"{column}_formula"]), abs=6e-4), column
        printed = row[f"{column}_printed"]
        last_digit = 10.0 ** -len(printed.partition(".")[2])
        assert abs(gigabytes - float(printed)) < last_digit, column


def _model(**options: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
    }
    return ModelConfig.model_validate(values | options)


GPT = TrainingWorkload(
    _model(gated_mlp=False, hidden_act="gelu", normalization="layernorm"),
    ParallelLayout(),
    sequence_length=2048,
    global_batch_size=64,
    gradient_accumulation_dtype="bf16",
    stack=replace(MEGALITE, name="Megatron-LM", attention="materialized"),
)

models = st.builds(
    _model,
    num_hidden_layers=st.sampled_from([4, 8, 12]),
    num_key_value_heads=st.sampled_from([1, 4, 16]),
    gated_mlp=st.booleans(),
    hidden_act=st.sampled_from(["silu", "gelu", "relu"]),
    normalization=st.sampled_from(["rmsnorm", "layernorm"]),
    norm_placement=st.sampled_from(["pre", "post", "pre_and_post"]),
    use_parallel_residual=st.booleans(),
    query_key_norm=st.sampled_from(["none", "per_head", "full_width"]),
    num_experts=st.sampled_from([None, 4]),
    attention_dropout=st.sampled_from([0.0, 0.1]),
    residual_dropout=st.sampled_from([0.0, 0.1]),
    attn_logit_softcapping=st.sampled_from([None, 30.0]),
    position_embedding=st.sampled_from(["rope", "learned"]),
    tie_word_embeddings=st.booleans(),
).filter(lambda model: not (model.use_parallel_residual and model.norm_placement == "post"))
layouts = st.builds(
    ParallelLayout,
    tensor_parallel_size=st.sampled_from([1, 2, 8]),
    pipeline_parallel_size=st.sampled_from([1, 2, 4]),
    data_parallel_size=st.sampled_from([1, 2, 16]),
    zero_stage=st.sampled_from([1, 2, 3]),
    sequence_parallel=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    micro_batch_size=st.sampled_from([1, 4]),
)
jobs = st.builds(
    TrainingWorkload,
    models,
    layouts,
    sequence_length=st.sampled_from([512, 4096]),
    global_batch_size=st.sampled_from([64, 1024]),
    dtype=st.sampled_from(["fp32", "bf16"]),
    gradient_accumulation_dtype=st.just("fp32"),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    document_mask=st.booleans(),
    stack=st.sampled_from([MEGALITE, GPT.stack]),
)
devices = st.sampled_from([CUDA, TENSORS, CPU, Device("cpu"), replace(CPU, widens_bf16=True)])


def _most(job: TrainingWorkload, device: Device) -> float:
    return max(stage.total for stage in _memory(job, device))


def _memory(job: TrainingWorkload, device: Device) -> tuple[StageMemory, ...]:
    """As our decoder needs it, or by the papers' formulas."""
    return (memory_of if job.stack == MEGALITE else published_memory_of)(job, device)


def _with(job: TrainingWorkload, **layout: Any) -> TrainingWorkload:
    return replace(job, layout=replace(job.layout, **layout))


@settings(deadline=None)
@given(jobs, devices)
def test_parts_add_up_and_none_is_negative(job: TrainingWorkload, device: Device) -> None:
    stages = _memory(job, device)
    assert [stage.stage for stage in stages] == list(range(job.layout.pipeline_parallel_size))
    for stage in stages:
        assert all(size >= 0 for size in stage.parts.values()), stage.parts
        assert stage.total == pytest.approx(sum(stage.parts.values()))


@settings(deadline=None)
@given(jobs, st.integers(1, 2))
def test_papers_need_no_more_with_more_zero(job: TrainingWorkload, zero: int) -> None:
    papers = replace(job, stack=GPT.stack)
    assert _most(_with(papers, zero_stage=zero + 1), TENSORS) <= _most(_with(papers, zero_stage=zero), TENSORS)


@settings(deadline=None)
@given(jobs)
def test_ours_cuts_states_with_more_zero(job: TrainingWorkload) -> None:
    """Weights, gradients and optimizer; ZeRO-3 has an fp32 copy of fp32 weights too."""
    shapes = stage_shapes(job.model, job.layout.tensor_parallel_size, job.layout.pipeline_parallel_size)
    for shape in shapes:
        numbers = shape.parameters, shape.parameters / job.layout.replicas, shape.parameters / 4
        one, two, three = (deepspeed_states(_with(job, zero_stage=zero), *numbers) for zero in (1, 2, 3))
        copy = three.weights if job.dtype == "fp32" else 0.0
        assert total(two) <= total(one)
        assert total(three) <= total(two) + copy


@settings(deadline=None)
@given(jobs)
def test_more_zero_adds_buffers_at_most(job: TrainingWorkload) -> None:
    """DeepSpeed's stages 2 and 3 reduce through a bucket of 50 million numbers and copies of it, stage 2 copies its own
    gradients for the update, and stage 3 gathers weights and keeps gradients while it copies them: in a small model
    that is more than they save."""
    stages = [memory_of(_with(job, zero_stage=zero, recompute="none"), TENSORS) for zero in (1, 2, 3)]
    shapes = stage_shapes(job.model, job.layout.tensor_parallel_size, job.layout.pipeline_parallel_size)
    size = 4 if job.dtype == "fp32" else 2
    for one, two, three, shape in zip(*stages, shapes, strict=True):
        numbers = shape.parameters, shape.parameters / job.layout.replicas, shape.parameters
        of_two, of_three = (deepspeed_states(_with(job, zero_stage=zero), *numbers) for zero in (2, 3))
        copy = of_three.weights if job.dtype == "fp32" else 0.0
        assert two.total <= one.total + of_two.own_gradients + 2 * size * BUCKET + 1
        assert three.total <= two.total + of_three.gathered + of_three.gradients + copy + 2 * size * BUCKET + 1


@settings(deadline=None)
@given(jobs, devices, st.sampled_from([2, 4]))
def test_more_replicas_of_a_micro_batch_need_no_more(job: TrainingWorkload, device: Device, factor: int) -> None:
    """The global batch grows along, so that each does as many micro-batches."""
    more = _with(job, data_parallel_size=job.layout.data_parallel_size * factor)
    more = replace(more, global_batch_size=job.global_batch_size * factor)
    # gloo makes a copy for its messages, and ZeRO-2 and 3 have a bucket on its way beside the partitions
    alone_needs_less = job.layout.data_parallel_size == 1 and (device.kind == "cpu" or job.layout.zero_stage >= 2)
    if not alone_needs_less:
        assert _most(more, device) <= _most(job, device) * (1 + 1e-12)


@settings(deadline=None)
@given(jobs, devices)
def test_recomputing_more_never_needs_more(job: TrainingWorkload, device: Device) -> None:
    """But for one block's attention, which is there again while it is computed again: where scores are never in memory
    selective recomputation has next to nothing else to save, and full recomputation nothing of a single block. And but
    for the holes that gathering a cut sequence leaves where malloc keeps what is freed: full recomputation gathers
    twice more in each block, and each leaves up to 1.8 hidden states. Full recomputation has a block's scores, if they
    are ever in memory, while gradients of its experts are computed; selective has them after."""
    full, selective, none = (_most(_with(job, recompute=mode), device) for mode in ("full", "selective", "none"))
    hidden = 4 * job.layout.micro_batch_size * job.sequence_length * job.model.hidden_size
    holes = 2 * job.model.num_hidden_layers * 1.8 * hidden * (device.keeps_freed and job.layout.sequence_parallel)
    attention = 4 * hidden
    of_scores = job.layout.micro_batch_size * job.model.num_attention_heads * job.sequence_length**2
    scores = 12 * of_scores * (job.model.num_experts is not None)  # at most thrice in fp32: cap, softmax, dropout
    assert full <= selective + (attention + scores) * (1 + device.fragments) + holes
    assert selective <= none + attention * (1 + device.fragments)


def test_selective_recomputation_drops_scores() -> None:
    """With attention dropout all scores exist, in bf16 as fp32, as bf16 and as a mask: 7 bytes each; of 7 blocks of 8
    they go, and of the last they are there while it is computed again."""
    job = TrainingWorkload(_model(attention_dropout=0.1), ParallelLayout(), sequence_length=4096, global_batch_size=1)
    none, selective = (_most(_with(job, recompute=mode), TENSORS) for mode in ("none", "selective"))
    scores = 7 * job.model.num_attention_heads * job.sequence_length**2
    assert 6.9 * scores < none - selective < 8 * scores


@pytest.mark.parametrize("length", [2048, 20_000])
@pytest.mark.parametrize(("dtype", "size", "own_sum"), [("fp16", 4, 4), ("bf16", 2, 0)])
def test_gradients_of_an_fp16_head_are_fp32(dtype: Any, size: int, own_sum: int, length: int) -> None:
    """Those of hidden states, and the sum of the head's, which is the reducer's but in fp16: logits of 16,768 tokens
    are a chunk of 1 GiB, and their gradient takes their place (megalite/parallel/loss.py)."""
    model = _model(num_hidden_layers=1, tie_word_embeddings=True)  # so that no moment needs more than the loss
    job = TrainingWorkload(model, ParallelLayout(), sequence_length=length, global_batch_size=1, dtype=dtype)
    (stage,) = memory_of(job, TENSORS)
    weight = model.vocab_size * model.hidden_size
    assert stage.moment == "loss"
    assert stage.parts["working"] == own_sum * weight + size * length * model.hidden_size
    assert stage.parts["logits"] == 2 * min(length, 16_768) * model.vocab_size


def test_pipelines_have_more_communicators() -> None:
    """Three are in the context; engine/deepspeed/test_process_groups.py counts 9, and one is of all ranks."""
    job = TrainingWorkload(_model(tie_word_embeddings=True), ParallelLayout(8, 4, 2), 512, 64)
    assert memory_of(job)[0].parts["context"] == 1.5 * 2**30 + 7 * 150 * 2**20


@pytest.mark.parametrize(("optimizer", "numbers"), [("adamw", 3), ("sgd", 1)])
def test_the_copy_of_a_save_in_the_background_is_a_rank_s_share(optimizer: Any, numbers: int) -> None:
    """fp32 weights, and of AdamW two moments; SGD without momentum has none. The process counts beside it."""
    layout = ParallelLayout(data_parallel_size=2)
    job = TrainingWorkload(_model(), layout, 512, 64, optimizer=optimizer, background_saves=True)
    (stage,) = memory_of(job, CPU)
    saved = with_process(stage, job, 7.0)
    assert saved.parts[COPY] == 4 * numbers * parameters(job.model) / 2
    assert saved.total == pytest.approx(stage.total + saved.parts[COPY] + 7)
    waits = with_process(stage, replace(job, background_saves=False), 7.0)
    assert waits.total == pytest.approx(stage.total + 7)


@settings(deadline=None)
@given(jobs, devices.filter(lambda device: not device.keeps_freed))
def test_cutting_the_sequence_never_needs_more(job: TrainingWorkload, device: Device) -> None:
    """Where malloc keeps what is freed, gathering leaves holes."""
    cut, whole = (_most(_with(job, sequence_parallel=is_cut), device) for is_cut in (True, False))
    assert cut <= whole * (1 + 1e-12)


def test_folded_stages_hold_as_much_as_the_first_stage_of_1f1b() -> None:
    """ZB-V: 2 p chunks of half a stage on every stage (Qi 2023, section 6); later stages of 1F1B hold less."""
    job = TrainingWorkload(_model(vocab_size=64), ParallelLayout(pipeline_parallel_size=4), 2048, 64)
    plain = [stage.parts["activations"] for stage in memory_of(job, TENSORS)]
    folded = [
        stage.parts["activations"]
        for stage in memory_of(_with(job, pipeline_schedule="zb-v", pipeline_chunks=2), TENSORS)
    ]
    # a chunk's output is held too, and there are twice as many chunks
    assert folded == pytest.approx([plain[0]] * 4, rel=0.06)
    assert plain == sorted(plain, reverse=True) and plain[-1] < plain[0] / 3


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_postponed_products_keep_their_operands(recompute: Any) -> None:
    """The last stage of ZB-H1 with 4 stages holds one micro-batch whole, where 1F1B holds one, and 3 whose weight
    gradients are due: inputs of 4 products, h, h, f and h numbers a token, and gradients of their outputs, 3 h, h, 2 f
    and h. The last stage's moment with most is the one in which a fourth is due and the first is not computed yet."""
    model = _model(num_key_value_heads=16)
    job = TrainingWorkload(model, ParallelLayout(pipeline_parallel_size=4, recompute=recompute), 2048, 64)
    _, _, _, plain = memory_of(job, TENSORS)
    _, _, _, split = memory_of(_with(job, pipeline_schedule="zero-bubble"), TENSORS)
    h, f = model.hidden_size, model.intermediate_size
    (blocks,) = [shape.blocks for shape in stage_shapes(model, 1, 4)[3:]]
    one = 2 * 2048 * blocks * (3 * h + f + 3 * h + h + 2 * f + h)
    kept = [stage.parts["activations"] for stage in (plain, split)]
    whole = 2 * 2048 * h * blocks  # of full recomputation: what blocks get
    expected = 4 * one - whole if recompute == "full" else 3 * one
    assert kept[1] - kept[0] == pytest.approx(expected, rel=0.05)


def test_a_tied_head_has_no_optimizer_state() -> None:
    """On another stage than its embedding it is a copy in 16 bits and a sum of gradients in fp32."""
    layout = ParallelLayout(pipeline_parallel_size=2)
    tied, untied = (
        memory_of(TrainingWorkload(_model(tie_word_embeddings=tie), layout, 512, 64), TENSORS)[1]
        for tie in (True, False)
    )
    rows = 32000 * 1024
    assert tied.parts["weights"] == untied.parts["weights"]
    assert untied.parts["optimizer"] - tied.parts["optimizer"] == 12 * rows
    assert tied.parts["gradients"] == untied.parts["gradients"]


def test_a_bucket_of_gradients_is_there_whole_from_the_loss_on() -> None:
    """Which adds to it. One of all parameters beside the activations of all blocks; smaller ones come as those go. On a
    CPU it takes memory as gradients are written to it, but room of its own."""
    job = replace(GPT, dtype="fp32", gradient_accumulation_dtype="fp32", global_batch_size=1, stack=MEGALITE)
    numbers = stage_shapes(job.model, 1, 1)[0].parameters
    whole = replace(job, gradient_bucket_size=numbers)
    small = replace(job, gradient_bucket_size=1)  # each parameter has one
    (one,), (other,) = memory_of(whole, TENSORS), memory_of(small, TENSORS)
    assert (one.moment, one.parts["gradients"]) == ("loss", 4 * numbers)
    assert other.total < one.total
    (touched,), (kept,) = memory_of(whole, Device("cpu", maps_lazily=True)), memory_of(whole, CPU)
    assert touched.parts["gradients"] < one.parts["gradients"] == kept.parts["gradients"] == 4 * numbers


@settings(deadline=None)
@given(jobs.filter(lambda job: job.stack == MEGALITE))
def test_what_is_offloaded_is_on_the_host_and_not_on_the_gpu(job: TrainingWorkload) -> None:
    for stage, plain in enumerate(memory_of(job, TENSORS)):
        numbers = stage_shapes(job.model, job.layout.tensor_parallel_size, job.layout.pipeline_parallel_size)[stage]
        moved = memory_of(replace(job, offloads_optimizer=True), TENSORS)[stage]
        state = {"adamw": 16, "sgd": 8}[job.optimizer] * numbers.parameters / job.layout.data_parallel_size
        assert moved.on_host == max(plain.on_host, state) and moved.parts.get("optimizer", 0.0) == 0
        assert 0 < plain.on_host <= 4 * numbers.parameters, "of a parameter, as it is drawn"
        offloaded = memory_of(replace(job, offloads_activations=True), TENSORS)[stage]
        assert offloaded.total <= plain.total
        assert offloaded.on_host > 0


@pytest.mark.parametrize(
    ("stages", "stage", "blocks", "left", "received"),
    [(1, 0, 8, 2, 0), (4, 0, 3 * 4, 4, 0), (4, 1, 3 * 3, 4, 3), (4, 3, 1, 1, 0)],
)
def test_two_blocks_of_activations_stay_on_the_gpu(
    stages: int, stage: int, blocks: int, left: int, received: int
) -> None:
    """Of 8; of a stage's blocks in all its micro-batches two for each of the passes that alternate, and the hidden
    states that it has received of each micro-batch. Where there is one block in all, that one."""
    layout = ParallelLayout(pipeline_parallel_size=stages)
    job = TrainingWorkload(_model(), layout, sequence_length=4096, global_batch_size=64)
    plain, moved = (memory_of(replace(job, offloads_activations=on), TENSORS)[stage] for on in (False, True))
    of_a_block, hidden = moved.on_host / blocks, 2 * 4096 * 1024
    saved = plain.parts["activations"] - moved.parts["activations"]
    assert saved == pytest.approx((blocks - left) * of_a_block - received * hidden, rel=1e-9)


def test_on_a_cpu_offloading_adds_its_copies() -> None:
    """There is one memory: it holds the activations and the copies of two blocks, and all of the optimizer."""
    job = TrainingWorkload(_model(), ParallelLayout(), sequence_length=4096, global_batch_size=64, dtype="fp32")
    (plain,), (moved,) = (memory_of(replace(job, offloads_activations=on), CPU) for on in (False, True))
    (on_gpu,) = memory_of(replace(job, offloads_activations=True), TENSORS)
    assert moved.parts["activations"] - plain.parts["activations"] == pytest.approx(on_gpu.on_host / 8 * 2, rel=1e-9)
    (offloaded,) = memory_of(replace(job, offloads_optimizer=True), CPU)
    assert offloaded.parts["optimizer"] == 16 * parameters(job.model)
    assert moved.on_host == offloaded.on_host == 0
