"""Predicted times against closed forms, limits and one published measurement of a single layer; the tables are in
benchmarks/planner/validation.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.published import (
    MEGATRON_2021,
    MEGATRON_2022,
    gpt,
    korthikanti_table_5,
    llama,
    mosaicml,
    nodes_of,
    read,
)
from megalite.config import ModelConfig
from megalite.config.sections import Dtype
from megalite.planner.cost.communication_time import boundary_s, data_ring, expert_ring, tensor_ring
from megalite.planner.cost.communication_volumes import Moved, data_moved, hidden_state_bytes
from megalite.planner.cost.layer_time import Speed, block_work, dense_flops, head_flops, score_flops
from megalite.planner.cost.stage_parameters import parameters, stage_shapes
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import Cluster, catalogue
from megalite.planner.workload import MEGALITE, ParallelLayout, TrainingWorkload
from megalite.schedules.simulation import PipelineTimes, simulate_schedule
from tests.helpers.machines import cpus

SMALL = llama(1024, 6, 2816, 16, 4, 32003, 2048)


def jobs() -> st.SearchStrategy[tuple[TrainingWorkload, Cluster]]:
    """Any layout of a small model, on nodes of any kind."""

    @st.composite
    def draw(draw: st.DrawFn) -> tuple[TrainingWorkload, Cluster]:
        tp, dp = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([1, 2, 4]))
        pp = draw(st.sampled_from([1, 2, 3, 6]))
        zero = 1 if pp > 1 else draw(st.sampled_from([1, 2, 3]))
        layout = ParallelLayout(
            tp,
            pp,
            dp,
            1,
            zero,
            tp > 1 and draw(st.booleans()),
            draw(st.sampled_from(["none", "selective", "full"])),
            draw(st.sampled_from([1, 2])),
        )
        batch = layout.micro_batch_size * dp * draw(st.integers(1, 16))
        stack = MEGALITE if zero > 1 else draw(st.sampled_from([MEGALITE, MEGATRON_2021, MEGATRON_2022]))
        job = TrainingWorkload(SMALL, layout, draw(st.sampled_from([128, 2048])), batch, stack=stack)
        name = draw(st.sampled_from([key for key in catalogue().accelerators if key != "V100-32GB"]))
        gpus = -(-layout.world_size // 8) * 8
        return job, nodes_of(gpus, name)

    return draw()


def roofline_s(job: TrainingWorkload, cluster: Cluster) -> float:
    """Every accelerator at its peak, on the mathematics alone, scores above the diagonal left out."""
    layers = range(job.model.num_hidden_layers)
    flops = sum(dense_flops(job, layer) + score_flops(job, layer) / 2 for layer in layers) + head_flops(job)
    needed = 3.0 * flops * job.micro_batches * job.layout.data_parallel_size
    return needed / (cluster.peak_flops(job.dtype) * job.layout.world_size)


@settings(max_examples=150, deadline=None)
@given(jobs())
def test_no_step_is_faster_than_the_hardware(case: tuple[TrainingWorkload, Cluster]) -> None:
    """Above the roofline of bare operations, each part at least nothing, and utilization below one."""
    job, cluster = case
    time = step_time(job, cluster)
    assert all(seconds >= 0 for seconds in time.parts.values()), f"{job.layout}: {dict(time.parts)}"
    assert time.seconds >= roofline_s(job, cluster), f"{job.layout} on {cluster.name}"
    longest = max(stage.forward_s + stage.backward_s for stage in time.stages)
    assert time.seconds >= job.micro_batches * longest * (1 - 1e-9), f"{job.layout}: a stage alone takes longer"


@settings(max_examples=60, deadline=None)
@given(jobs(), st.sampled_from(["efficiency", "memory_gb_per_s", "intra_node", "inter_node"]))
def test_better_hardware_is_never_slower(case: tuple[TrainingWorkload, Cluster], what: str) -> None:
    job, cluster = case
    if what in ("intra_node", "inter_node"):
        link = getattr(cluster, what)
        better = cluster.model_copy(update={what: link.model_copy(update={"gb_per_s": 2 * link.gb_per_s})})
    else:
        kind = cluster.accelerator
        kind = kind.model_copy(update={what: 1.5 * getattr(kind, what)})
        better = cluster.model_copy(update={"accelerator": kind})
    assert step_time(job, better).seconds <= step_time(job, cluster).seconds * (1 + 1e-12), f"{job.layout}"


@pytest.mark.parametrize("pp", [2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 64, 4096])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_the_bubble_is_the_published_one(pp: int, micro_batches: int, chunks: int) -> None:
    """Narayanan 2021, section 2.2: (p - 1) / (v m) of the time without it, for equal stages; none is left in the
    limit of many micro-batches."""
    model = gpt(2048, 32, 16, 64)  # a head that weighs nothing beside its blocks
    job = TrainingWorkload(
        model, ParallelLayout(1, pp, 1, chunks, micro_batch_size=1), 512, micro_batches, stack=MEGATRON_2021
    )
    time = step_time(job, nodes_of(8, "A100-80GB"))
    busy = sum(time.parts[part] for part in ("matrix products", "attention", "memory-bound", "launches"))
    bubble = time.parts["pipeline bubble"] - (pp - 1) * 2 * time.between_stages_s
    assert bubble / busy == pytest.approx((pp - 1) / (chunks * micro_batches), rel=1e-9)


@pytest.mark.parametrize("micro_batches", [16, 64])
@pytest.mark.parametrize("schedule", ["zero-bubble", "zb-v", "dualpipev"])
def test_the_bubble_of_split_backward_is_simulated(schedule: Any, micro_batches: int) -> None:
    """With the predicted times of equal stages. ZB-H1's is (p - 1)(T_F + T_B - T_W) (Qi 2023); all are below 1F1B's."""
    chunks = 1 if schedule == "zero-bubble" else 2
    model = gpt(2048, 32, 16, 64)  # a head that weighs nothing beside its blocks
    plain = TrainingWorkload(model, ParallelLayout(1, 8, 1), 512, micro_batches)
    layout = replace(plain.layout, pipeline_schedule=schedule, pipeline_chunks=chunks)
    cluster = nodes_of(8, "A100-80GB")
    time, usual = step_time(replace(plain, layout=layout), cluster), step_time(plain, cluster)
    stage = time.stages[3]
    times = PipelineTimes(
        (stage.forward_s,) * 8, (stage.backward_s,) * 8, time.between_stages_s, (stage.weight_gradient_s,) * 8
    )
    timeline = simulate_schedule(layout.schedule, times, micro_batches, chunks)
    waits_s = time.parts["pipeline bubble"] + time.parts["between stages"]
    idle_s = timeline.makespan_s - micro_batches * stage.seconds
    # times are rounded to a thousandth; ZB-V's end is on the stage that has the head
    assert waits_s == pytest.approx(idle_s, abs=0.001 * micro_batches * stage.seconds)
    if schedule == "zero-bubble":
        expected = 7 * (stage.forward_s + stage.backward_s - 2 * stage.weight_gradient_s)
        assert time.parts["pipeline bubble"] == pytest.approx(expected, rel=0.02)
    assert time.parts["pipeline bubble"] < usual.parts["pipeline bubble"] / 1.5


def test_interleaved_stages_send_more_often() -> None:
    """Narayanan 2021, section 2.2.2: v times as many messages for a v-th of the bubble."""
    stack = replace(MEGALITE, waits_for_messages=True)
    plain = TrainingWorkload(gpt(2048, 32, 16, 64), ParallelLayout(1, 8, 1), 512, 64, stack=stack)
    layout = replace(plain.layout, pipeline_schedule="interleaved", pipeline_chunks=2)
    cluster = nodes_of(8, "A100-80GB")
    usual, chunked = (step_time(job, cluster) for job in (plain, replace(plain, layout=layout)))
    messages_s = 64 * 2 * usual.between_stages_s
    assert chunked.parts["between stages"] - usual.parts["between stages"] == pytest.approx(messages_s)
    assert chunked.parts["pipeline bubble"] < 0.6 * usual.parts["pipeline bubble"]
    beside = step_time(replace(plain, layout=layout, stack=MEGALITE), cluster)
    assert 0 < beside.parts["between stages"] < chunked.parts["between stages"], "messages travel beside computation"


def test_a_layer_takes_what_was_measured() -> None:
    """Korthikanti 2022, table 4: a layer of the 22B model on 8 A100s takes 7.7 ms forward (7.2 with sequence
    parallelism), and its attention scores 1.3 ms to compute again. The noise of such tables is 3 to 6 %."""
    job = next(iter(korthikanti_table_5())).job
    cluster = nodes_of(8, "A100-80GB")
    speed = Speed.of(job, cluster)
    sums = tensor_ring(job.layout, cluster).seconds(Moved(all_reduce=2 * hidden_state_bytes(job)), 2)
    for sequence_parallel, measured in ((False, 7.7e-3), (True, 7.2e-3)):
        cut = replace(job, layout=replace(job.layout, sequence_parallel=sequence_parallel))
        assert block_work(cut, 0, speed).forward.seconds + sums == pytest.approx(measured, rel=0.06)
    selective = replace(job, layout=replace(job.layout, recompute="selective"))
    assert block_work(selective, 0, speed).again.seconds == pytest.approx(1.3e-3, rel=0.06)


def test_operations_are_those_of_the_paper() -> None:
    """Korthikanti 2022, appendix A: 72 B s l h^2 (1 + s/6h + V/12lh), without what is recomputed."""
    hidden, layers, s, vocab, batch = 4096, 36, 2048, 51200, 512
    job = TrainingWorkload(
        gpt(hidden, layers, 32, vocab), ParallelLayout(4, 1, 32, recompute="full", micro_batch_size=16), s, batch
    )
    published = 72 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * layers * hidden))
    assert step_time(job, nodes_of(128, "A100-80GB")).model_flops == pytest.approx(published, rel=1e-12)


def test_rings_leave_the_node_through_all_adapters_of_their_members() -> None:
    """Eight replicas of one rank each in a node share all its adapters; one replica of eight ranks per node has one
    adapter per ring."""
    cluster = nodes_of(64, "A100-80GB")  # 25 GB/s per adapter, 80 % of it; NVLink 300 GB/s, 75 % of it
    assert data_ring(ParallelLayout(1, 1, 64), cluster).bytes_per_s == pytest.approx(8 * 25e9 * 0.8)
    assert data_ring(ParallelLayout(8, 1, 8), cluster).bytes_per_s == pytest.approx(25e9 * 0.8)
    assert data_ring(ParallelLayout(1, 8, 8), cluster).bytes_per_s == pytest.approx(300e9 * 0.75)
    assert tensor_ring(ParallelLayout(8, 1, 8), cluster).bytes_per_s == pytest.approx(300e9 * 0.75)
    assert data_ring(ParallelLayout(4, 1, 16), nodes_of(64, "A100-80GB", adapters=4)).bytes_per_s == pytest.approx(
        2 * 25e9 * 0.8 / 2
    )


def test_an_all_to_all_leaves_the_node_through_one_adapter_a_rank() -> None:
    """What a rank sends to other nodes goes through its own adapter, where a ring has those of all its members."""
    cluster, moved = nodes_of(64, "A100-80GB"), Moved(all_to_all=10**9)
    inside, outside = 300e9 * 0.75, 25e9 * 0.8
    assert expert_ring(_dealt(8), cluster).seconds(moved) == pytest.approx(7 / 8 * 1e9 / inside + 7 * 5e-6)
    latency_s = 15 * cluster.inter_node.latency_us * 1e-6
    assert expert_ring(_dealt(16), cluster).seconds(moved) == pytest.approx(8 / 16 * 1e9 / outside + latency_s)
    # of two experts among those of two nodes, one of the other node is met by three tokens of four, not by all
    once = replace(_dealt(16), stack=replace(_dealt(16).stack, sends_once_per_node=True))
    assert expert_ring(once, cluster).seconds(moved) == pytest.approx(0.75 / 2 * 1e9 / outside + latency_s)


def _dealt(ep: int) -> TrainingWorkload:
    values = SMALL.model_dump(mode="json") | {"model_type": "mixtral", "num_experts": 64, "num_experts_per_tok": 2}
    layout = ParallelLayout(data_parallel_size=64, expert_parallel_size=ep)
    return TrainingWorkload(ModelConfig.model_validate(values), layout, 2048, 64)


def test_dealt_experts_are_reduced_less_and_exchanged_more() -> None:
    one, many = (step_time(_dealt(ep), nodes_of(64, "A100-80GB")) for ep in (1, 8))
    assert one.parts["expert collectives"] == 0.0 < many.parts["expert collectives"]
    assert many.parts["replicas"] < one.parts["replicas"]
    assert many.parts["optimizer"] == pytest.approx(one.parts["optimizer"])
    assert many.model_flops == one.model_flops


def test_experts_cost_what_their_tokens_go_through() -> None:
    """Twice the experts, as many picked: the same operations; the products are smaller and no faster."""

    def model(experts: int) -> ModelConfig:
        values = SMALL.model_dump(mode="json") | {"model_type": "mixtral", "num_experts": experts}
        return ModelConfig.model_validate(values)

    few, many = (TrainingWorkload(model(count), ParallelLayout(), 2048, 8) for count in (8, 16))
    cluster = nodes_of(8, "H100")
    router = 3 * 2 * 8 * 1024 * 6 * few.tokens_per_step
    assert step_time(many, cluster).model_flops - step_time(few, cluster).model_flops == pytest.approx(router)
    assert step_time(many, cluster).seconds > step_time(few, cluster).seconds


FREE = 1e30  # bytes per second: nothing takes time but products


def speed(**given: float) -> Speed:
    values = {"flops": FREE, "attention_flops": FREE, "memory_bytes": FREE, "launch_s": 0.0} | given
    return Speed(**values, number_bytes=2)


def swiglu(**options: Any) -> ModelConfig:
    return ModelConfig.model_validate(SMALL.model_dump(mode="json") | options)


@pytest.mark.parametrize("gated", [False, True])
def test_a_block_multiplies_with_all_its_weights(gated: bool) -> None:
    """Two operations per weight of q, k, v, output, (gate,) up, down and token; grouped heads as they are."""
    model = swiglu(gated_mlp=gated)
    job = TrainingWorkload(model, ParallelLayout(micro_batch_size=2), 128, 2)
    h, kv, f = 1024, 4 * 64, 2816
    weights = h * (h + 2 * kv) + h * h + (3 if gated else 2) * h * f
    assert block_work(job, 0, speed(flops=1.0)).forward.matrix_s == pytest.approx(2 * 256 * weights)
    assert block_work(job, 0, speed(flops=1.0)).backward.matrix_s == pytest.approx(4 * 256 * weights)
    assert dense_flops(job, 0) == pytest.approx(2 * 256 * weights)


def test_experts_multiply_for_the_tokens_that_chose_them() -> None:
    model = swiglu(model_type="mixtral", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=96)
    job = TrainingWorkload(model, ParallelLayout(recompute="full"), 128, 1)
    h, kv = 1024, 4 * 64
    numbers = h * (2 * h + 2 * kv) + 8 * h + 2 * 3 * h * 96
    passes = block_work(job, 0, speed(flops=1.0))
    assert passes.forward.matrix_s == pytest.approx(2 * 128 * numbers) == pytest.approx(dense_flops(job, 0))
    assert passes.again.matrix_s == pytest.approx(passes.forward.matrix_s)  # every product, the last one too


def test_recomputation_stops_before_the_last_product_where_nothing_needs_it() -> None:
    """megalite/parallel/layers.py's checkpoints are torch's non-reentrant ones; a mask of dropout behind the product
    makes it needed."""
    for dropout, skipped in ((0.0, 2 * 128 * 1024 * 2816), (0.1, 0)):
        job = TrainingWorkload(swiglu(residual_dropout=dropout), ParallelLayout(recompute="full"), 128, 1)
        passes = block_work(job, 0, speed(flops=1.0))
        assert passes.forward.matrix_s - passes.again.matrix_s == pytest.approx(skipped)


@pytest.mark.parametrize("bf16_peak", [0.1, 0.01])
def test_a_cpu_gains_from_16_bits_in_matrix_products_alone(bf16_peak: float) -> None:
    """Measured on an AMD EPYC with AVX-512 BF16: products 2.1 times as fast, attention 0.9, norms and activations 0.5
    to 0.8 times. Without such units products are slower, and the others as fast as before."""
    peaks = {"fp32": 0.05, "bf16": bf16_peak}
    cluster = cpus(1).model_copy(update={"accelerator": cpus(1).accelerator.model_copy(update={"peak_tflops": peaks})})
    wide, narrow = (TrainingWorkload(SMALL, ParallelLayout(), 128, 8, dtype) for dtype in ("fp32", "bf16"))
    in_fp32, in_bf16 = (block_work(job, 0, Speed.of(job, cluster)).forward for job in (wide, narrow))
    assert (in_bf16.attention_s, in_bf16.memory_s) == pytest.approx((in_fp32.attention_s, in_fp32.memory_s))
    assert in_fp32 == block_work(wide, 0, Speed.of(wide, cpus(1))).forward
    assert (in_bf16.matrix_s < in_fp32.matrix_s) == (bf16_peak > 0.05)


def test_ranks_on_a_cpu_hide_nothing() -> None:
    """Each layer's weights are gathered and its gradients scattered in each of two micro-batches, one after another."""
    job = TrainingWorkload(SMALL, ParallelLayout(1, 1, 4, zero_stage=3, micro_batch_size=1), 128, 8)
    time, ring = step_time(job, cpus(4)), data_ring(job.layout, cpus(4))
    (shape,) = stage_shapes(job.model, 1, 1)
    messages = 2 * 2 * shape.blocks * (4 - 1)
    moved_s = data_moved(job, shape).per_link(4) / ring.bytes_per_s
    assert ring.latency_s > 0 and time.hidden_s == 0
    assert time.parts["replicas"] == pytest.approx(moved_s + messages * ring.latency_s, rel=1e-6)
    assert step_time(job, nodes_of(8, "H100")).hidden_s > 0


def test_masks_double_fused_attention_and_windows_bound_what_counts() -> None:
    plain, masked = (TrainingWorkload(SMALL, ParallelLayout(), 2048, 1, document_mask=mask) for mask in (False, True))
    times = [block_work(job, 0, speed(attention_flops=1.0)).forward.attention_s for job in (plain, masked)]
    assert times == pytest.approx([2 * 2048**2 * 1024, 4 * 2048**2 * 1024])
    window = TrainingWorkload(swiglu(sliding_window=512, layer_types=None), ParallelLayout(), 2048, 1)
    assert score_flops(window, 0) == score_flops(plain, 0) / 4


def test_a_boundary_is_shared_by_the_ranks_that_send() -> None:
    """One adapter a node of eight: two ranks of a stage share it, whatever the other six do. 0.8 of 25 GB/s, 5 us."""
    cluster = nodes_of(16, "A100-80GB", adapters=1)
    alone, two = (boundary_s(1e9, 0, ParallelLayout(1, 16 // dp, dp), cluster) for dp in (1, 2))
    assert alone == pytest.approx(1 / (25 * 0.8) + 5e-6) and two == pytest.approx(2 / (25 * 0.8) + 5e-6)
    inside = boundary_s(1e9, 0, ParallelLayout(1, 8, 1), nodes_of(8, "A100-80GB"))
    assert inside == pytest.approx(1 / (300 * 0.75) + 5e-6)


def test_groups_that_do_not_fit_nodes_cross_them() -> None:
    """tp 2, dp 3 on nodes of eight: ranks 6, 8 and 10 are a group, with one member in the first node."""
    cluster = nodes_of(24, "A100-80GB")
    assert data_ring(ParallelLayout(2, 4, 3), cluster).bytes_per_s == pytest.approx(25e9 * 0.8)
    assert data_ring(ParallelLayout(2, 4, 4), cluster).bytes_per_s == pytest.approx(300e9 * 0.75)


def test_fast_adapters_are_no_faster_than_the_links_to_them() -> None:
    cluster = nodes_of(16, "A100-80GB")
    fast = cluster.model_copy(update={"inter_node": cluster.inter_node.model_copy(update={"gb_per_s": 1000})})
    assert data_ring(ParallelLayout(1, 1, 16), fast).bytes_per_s == pytest.approx(300e9 * 0.75)


def test_sequence_parallel_stages_send_their_part() -> None:
    cluster = nodes_of(16, "A100-80GB")
    whole, cut = (
        step_time(
            TrainingWorkload(SMALL, ParallelLayout(8, 2, 1, sequence_parallel=sp), 2048, 4), cluster
        ).between_stages_s
        for sp in (False, True)
    )
    assert (whole - 5e-6) == pytest.approx(8 * (cut - 5e-6))


@pytest.mark.parametrize(("optimizer", "size"), [("adamw", 28), ("sgd", 12)])
def test_the_optimizer_moves_what_it_updates(optimizer: Any, size: int) -> None:
    cluster = nodes_of(8, "A100-80GB")
    for replicas in (1, 4):
        job = TrainingWorkload(SMALL, ParallelLayout(1, 1, replicas), 128, 4, optimizer=optimizer)
        expected = size * parameters(SMALL) / replicas / (2039e9 * 0.8)
        assert step_time(job, cluster).parts["optimizer"] == pytest.approx(expected)


def test_hosts_of_small_models_set_the_pace() -> None:
    """One token: a block's three passes of 300 us, more hooks where DeepSpeed reduces, more launches with experts, and
    with each of them where they are no single kernel."""
    cluster = nodes_of(8, "H100")

    def seconds(model: ModelConfig, zero: int, dtype: Dtype = "bf16") -> float:
        time = step_time(TrainingWorkload(model, ParallelLayout(zero_stage=zero), 1, 1, dtype=dtype), cluster)
        return sum(stage.forward_s + stage.backward_s for stage in time.stages)

    base = 6 * 3 * 300e-6
    assert [seconds(SMALL, zero) / base for zero in (1, 2, 3)] == pytest.approx([1.0, 1.0, 4.4], rel=0.02)
    experts = swiglu(model_type="mixtral", num_experts=8, moe_intermediate_size=96)
    assert seconds(experts, 1) / base == pytest.approx(2.0, rel=0.02)
    assert seconds(experts, 1, "fp16") / base == pytest.approx(2.8, rel=0.02)


def test_tied_embeddings_are_summed_over_the_ends() -> None:
    """An fp32 gradient one way, then the weight the other: 4 + 2 bytes of each number, at an adapter's 20 GB/s."""
    cluster = nodes_of(16, "A100-80GB")
    tied, untied = (
        TrainingWorkload(swiglu(tie_word_embeddings=tie), ParallelLayout(8, 2, 1), 128, 4) for tie in (True, False)
    )
    more = step_time(tied, cluster).parts["between stages"] - step_time(untied, cluster).parts["between stages"]
    assert more == pytest.approx(6 * 4001 * 1024 / (25e9 * 0.8), rel=0.2)  # and the messages' latency


def test_published_models_have_their_published_sizes() -> None:
    rows = read("mosaicml_fsdp_a100_80gb_seq2048")
    jobs = [one.job for one in mosaicml("mosaicml_fsdp_a100_80gb_seq2048", lambda row: "")]
    for row, job in zip(rows, jobs, strict=True):
        assert parameters(job.model) == int(row["params"]), row["model"]


def test_copies_of_activations_cost_what_computing_does_not_hide() -> None:
    """Full recomputation moves a block's input, which any GPU hides; over a link of a twentieth copies set the pace."""
    job = TrainingWorkload(llama(4096, 8, 11008, 32, 32, 32000, 4096), ParallelLayout(recompute="full"), 4096, 8)
    cluster = nodes_of(8, "H100")
    moved = step_time(replace(job, offloads_activations=True), cluster)
    assert moved.parts["offloading"] == 0 and moved.seconds == step_time(job, cluster).seconds
    slow = cluster.model_copy(
        update={"accelerator": cluster.accelerator.model_copy(update={"host_link": "Ethernet 25"})}
    )
    kept = 8 * 4096 * 4096 * 2  # bytes of 8 blocks' inputs in bf16
    (stage,) = moved.stages
    copies = 8 * (2 * kept / (0.8 * 3.125e9) - stage.forward_s - stage.backward_s)
    assert step_time(replace(job, offloads_activations=True), slow).parts["offloading"] == pytest.approx(
        max(copies, 8 * (kept / (0.8 * 3.125e9) - stage.forward_s)), rel=1e-9
    )


def test_on_a_cpu_copies_hide_behind_nothing() -> None:
    """Each is read and written, there and back; the update is where it was."""
    job = TrainingWorkload(llama(512, 8, 1408, 8, 8, 8192, 512), ParallelLayout(recompute="full"), 512, 4, dtype="fp32")
    plain, activations, optimizer = (
        step_time(one, cpus(1)).parts
        for one in (job, replace(job, offloads_activations=True), replace(job, offloads_optimizer=True))
    )
    inputs = 8 * 512 * 512 * 4  # bytes of 8 blocks' inputs in fp32
    expected = job.micro_batches * 4 * inputs / Speed.of(job, cpus(1)).memory_bytes
    assert activations["offloading"] == pytest.approx(expected, rel=1e-9)
    assert plain["offloading"] == optimizer["offloading"] == 0 and optimizer["optimizer"] == plain["optimizer"]


def test_the_slowest_stage_of_a_pipeline_waits_for_its_copies() -> None:
    """Three blocks of 8 on the first two stages, one on the last; every micro-batch waits for the most."""
    model = llama(4096, 8, 11008, 32, 32, 32000, 4096)
    layout = ParallelLayout(recompute="full", pipeline_parallel_size=4)
    job, cluster = TrainingWorkload(model, layout, 4096, 8, offloads_activations=True), nodes_of(8, "H100")
    slow = cluster.model_copy(
        update={"accelerator": cluster.accelerator.model_copy(update={"host_link": "Ethernet 25"})}
    )
    time = step_time(job, slow)
    waits = [
        sum(max(0.0, shape.blocks * 4096 * 4096 * 2 / (0.8 * 3.125e9) - s) for s in (stage.forward_s, stage.backward_s))
        for shape, stage in zip(stage_shapes(model, 1, 4), time.stages, strict=True)
    ]
    assert len(set(waits)) > 1 and time.parts["offloading"] == pytest.approx(8 * max(waits), rel=1e-9)
    mixed = replace(job, layout=replace(layout, recompute=("full", "full", "full", "none")))
    assert step_time(mixed, slow).parts["offloading"] > time.parts["offloading"], "the last stage keeps all"


def test_an_update_on_the_host_is_slower_by_its_link_and_its_memory() -> None:
    job, cluster = TrainingWorkload(SMALL, ParallelLayout(data_parallel_size=2), 2048, 16), nodes_of(8, "H100")
    beside, after = (step_time(replace(job, offloads_optimizer=on), cluster) for on in (False, True))
    plain, moved = beside.parts, after.parts
    (shape,) = stage_shapes(SMALL, 1, 1)
    owned = shape.parameters / 2
    assert moved["optimizer"] == pytest.approx(owned * ((4 + 2) / (0.8 * 64e9) + 28 / 51.2e9))
    assert plain["optimizer"] < moved["optimizer"] / 10
    assert beside.hidden_s == after.hidden_s > 0, "replicas exchange the same"
    same = plain.keys() - {"optimizer"}
    assert {name: plain[name] for name in same} == {name: moved[name] for name in same}
