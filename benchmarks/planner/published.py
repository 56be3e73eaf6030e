"""Published training runs as the planner's jobs: what each table in benchmarks/published measured, with what software.

Each row of a CSV says where its numbers are from. What a table does not print and is taken here: interleaving of SC21
Table 2 (one layer per chunk), interleaving (the same) and micro-batch of Megatron-Core's table, feed-forward sizes of
GPT models (4 hidden).
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megalite.config import ModelConfig
from megalite.config.known_models import known_models
from megalite.config.sections import Dtype, PipelineSchedule
from megalite.planner.cost.layer_time import dense_flops, head_flops
from megalite.planner.cost.stage_parameters import parameters
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of
from megalite.planner.workload import ParallelLayout, Recompute, Stack, TrainingWorkload

FOLDER = Path(__file__).parents[1] / "published"
Row = Mapping[str, str]

MEGATRON_2021 = Stack(
    "Megatron-LM of SC21",
    attention="materialized",
    cuts_boundary_tensors=True,
    waits_for_messages=True,
    balances_stages=False,
    stops_recompute_early=False,
    replicas="all_reduce",
)
# the sums over tensor-parallel ranks run beside the gradients of weights
MEGATRON_2022 = replace(MEGATRON_2021, name="Megatron-LM of 2022", overlaps_tensor_gradients=True)
TORCH_DDP = replace(MEGATRON_2021, name="Megatron-LM of SC21 with torch's DDP", overlaps_replicas=True)
MEGATRON_CORE = Stack(
    "Megatron-Core 0.8",
    overlaps_tensor_gradients=True,
    waits_for_messages=True,
    balances_stages=False,
    stops_recompute_early=False,
    replicas="sharded_optimizer",
    overlaps_replicas=True,
)
# Composer's FSDPConfig: backward_prefetch="BACKWARD_POST"
FSDP_2023 = Stack(
    "FSDP through Composer",
    attention="flash_1",
    stops_recompute_early=False,
    replicas="fully_sharded",
    prefetches_backward=False,
)
MEGATRON_MOE = replace(
    MEGATRON_CORE,
    name="Megatron-Core 0.14 with experts",
    attention="cudnn",
    folds_experts=True,
    sends_once_per_node=True,
)
FSDP_2024 = Stack("torchtitan", replicas="fully_sharded")


@dataclass(frozen=True)
class Published:
    """One measured run."""

    table: str
    name: str
    job: TrainingWorkload
    cluster: Cluster
    seconds: float  # of one optimizer step


def read(name: str) -> list[dict[str, str]]:
    """The rows of a CSV in benchmarks/published."""
    with (FOLDER / f"{name}.csv").open(newline="") as stream:
        return list(csv.DictReader(stream))


def gpt(hidden: int, layers: int, heads: int, vocab: int, dropout: float = 0.1) -> ModelConfig:
    """A GPT-3-like model: LayerNorm, biases, learned positions, tied embeddings, GELU, four times wider inside."""
    return ModelConfig(
        model_type="gpt2",
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        normalization="layernorm",
        position_embedding="learned",
        tie_word_embeddings=True,
        gated_mlp=False,
        hidden_act="gelu",
        attention_bias=True,
        mlp_bias=True,
        attention_dropout=dropout,
        residual_dropout=dropout,
    )


def nodes_of(gpus: int, accelerator: str, inter_node: str | None = None, adapters: int | None = None) -> Cluster:
    """Nodes of eight, or less than one."""
    per_node = min(8, gpus)
    described = ClusterFile(
        accelerator=accelerator,
        nodes=gpus // per_node,
        accelerators_per_node=per_node,
        adapters_per_node=adapters,
        inter_node=inter_node,
    )
    return cluster_of(described, f"{gpus} x {accelerator}")


def sc21_seconds(row: Row, hidden: int, layers: int, gpus: int) -> float:
    """Narayanan 2021, equation 3: the floating-point operations of a step with full recomputation."""
    batch, s, vocab = int(row["global_batch"]), 2048, 51200
    flops = 96 * batch * s * layers * hidden**2 * (1 + s / (6 * hidden) + vocab / (16 * layers * hidden))
    return flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)


def sc21_table_1() -> Iterator[Published]:
    for row in read("sc21_table1_a100"):
        hidden, layers, heads, tp, pp, gpus, micro_batch = _ints(
            row, "hidden", "layers", "heads", "TP", "PP", "gpus", "micro_batch"
        )
        per_chunk = int(row["layers_per_virtual_stage"] or layers // pp)
        layout = _layout(gpus, tp, pp, micro_batch, layers // pp // per_chunk, recompute="full")
        stack = MEGATRON_2021 if row["ddp_impl"] == "local" else TORCH_DDP
        job = TrainingWorkload(
            gpt(hidden, layers, heads, 51200), layout, 2048, int(row["global_batch"]), "fp16", "fp16", stack=stack
        )
        yield Published(
            "SC21 Table 1", row["model"], job, nodes_of(gpus, "A100-80GB"), sc21_seconds(row, hidden, layers, gpus)
        )


def sc21_table_2() -> Iterator[Published]:
    shapes = {"174.6": (12288, 96, 96, 12), "529.6": (20480, 105, 128, 35)}
    for row in read("sc21_table2_ptd_vs_zero3"):
        hidden, layers, heads, pp = shapes[row["params_B"]]
        gpus, micro_batch = _ints(row, "gpus", "micro_batch")
        if row["scheme"] == "PTD":
            layout, stack = _layout(gpus, 8, pp, micro_batch, layers // pp, recompute="full"), MEGATRON_2021
        else:
            layout = ParallelLayout(
                data_parallel_size=gpus, zero_stage=3, recompute="full", micro_batch_size=micro_batch
            )
            stack = Stack("ZeRO-3 of 2021", attention="materialized", stops_recompute_early=False)
        model = gpt(hidden, layers, heads, 51200)
        job = TrainingWorkload(model, layout, 2048, int(row["global_batch"]), "fp16", "fp16", stack=stack)
        table = "SC21 Table 2" if row["scheme"] == "PTD" else "SC21 Table 2, ZeRO-3 of 2021"
        seconds = sc21_seconds(row, hidden, layers, gpus)
        yield Published(table, f"{row['params_B']}B on {gpus}", job, nodes_of(gpus, "A100-80GB"), seconds)


def korthikanti_table_5() -> Iterator[Published]:
    modes: list[tuple[Recompute, bool, str]] = [
        ("full", False, "iter_s_full_recompute"),
        ("selective", True, "iter_s_seqpar_selective"),
    ]
    for row in read("korthikanti_table5"):
        hidden, layers, heads, tp, pp, gpus, micro_batch, chunks = _ints(
            row, "hidden", "layers", "heads", "TP", "PP", "gpus", "micro_batch", "virtual_stages"
        )
        for recompute, sequence_parallel, column in modes:
            layout = _layout(gpus, tp, pp, micro_batch, chunks, recompute, sequence_parallel)
            model, batch = gpt(hidden, layers, heads, 51200), int(row["global_batch"])
            job = TrainingWorkload(model, layout, 2048, batch, "fp16", "fp16", stack=MEGATRON_2022)
            name = f"{row['model']}, {recompute} recompute"
            yield Published("Korthikanti Table 5", name, job, nodes_of(gpus, "A100-80GB"), float(row[column]))


def megascale_table_2() -> Iterator[Published]:
    for row in read("megascale_table2_megatron_rows"):
        hidden, layers, heads, tp, pp, gpus = _ints(row, "hidden", "layers", "heads", "TP", "PP", "gpus")
        layout = _layout(gpus, tp, pp, 1, 6, "selective", sequence_parallel=True)
        model, batch = gpt(hidden, layers, heads, 64000), int(row["global_batch"])
        # in bf16 Megatron-LM sums and reduces gradients in fp32 (megatron/arguments.py)
        job = TrainingWorkload(model, layout, 2048, batch, "bf16", "fp32", stack=MEGATRON_2022)
        name = f"{gpus} GPUs, batch {batch}"
        yield Published("MegaScale Table 2", name, job, nodes_of(gpus, "A100-80GB"), float(row["iter_s"]))


MPT = {
    "125m": (768, 12, 12),
    "350m": (1024, 24, 16),
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 48, 56),
    "70b": (8192, 80, 64),
}
MOSAIC_HARDWARE = {
    "a100_80gb": ("A100-80GB", "RoCE 200"),
    "a100_40gb": ("A100-40GB", "RoCE 200"),
    "h100_80gb": ("H100", None),
}


def mosaicml(name: str, table: Callable[[Row], str]) -> Iterator[Published]:
    """MPT models without dropout, FSDP over all GPUs."""
    for row in read(name):
        if "fp8" in row["precision"] or row["act_offload"] == "True":
            continue
        accelerator, link = MOSAIC_HARDWARE[row["gpu"]]
        hidden, layers, heads = MPT[row["model"]]
        gpus, micro_batch, batch, s = _ints(row, "gpus", "micro_batch", "global_batch", "seq")
        model = gpt(hidden, layers, heads, 50368, dropout=0.0).model_copy(update={"max_position_embeddings": s})
        layout = ParallelLayout(
            data_parallel_size=gpus,
            zero_stage=3 if row["sharding"] == "FULL_SHARD" else 2,
            recompute="full" if row["act_ckpt"] == "True" else "none",
            micro_batch_size=micro_batch,
        )
        # measured later, with a torch whose recomputation stops early
        stack = replace(FSDP_2023, stops_recompute_early=True) if accelerator == "H100" else FSDP_2023
        reduced: Dtype = "bf16" if row["mp_mode"] == "PURE" else "fp32"
        job = TrainingWorkload(model, layout, s, batch, "bf16", gradient_reduction_dtype=reduced, stack=stack)
        recompute = " recomputed" if layout.recompute == "full" else ""
        yield Published(
            table(row),
            f"{row['model']}, {s} tokens x {micro_batch}, {gpus} GPUs{recompute}",
            job,
            nodes_of(gpus, accelerator, link),
            float(row["global_batch_tokens"]) / float(row["tokens_s"]),
        )


def megatron_core_h100(micro_batch: int) -> Iterator[Published]:
    """Sequence parallel, scores recomputed inside fused attention only; model operations as Korthikanti 2022, appendix
    A, counts them."""
    for row in read("megatron_core_h100_weak_scaling"):
        hidden, layers, heads, tp, pp, gpus, s, vocab = _ints(
            row, "hidden", "layers", "heads", "TP", "PP", "gpus", "seq", "vocab"
        )
        model, batch = gpt(hidden, layers, heads, vocab, dropout=0.0), int(row["global_batch"])
        layout = _layout(gpus, tp, pp, micro_batch, layers // pp, "none", tp > 1)
        job = TrainingWorkload(model, layout, s, batch, "bf16", stack=MEGATRON_CORE)
        flops = 72 * batch * layers * s * hidden**2 * (1 + s / (6 * hidden) + vocab / (12 * hidden * layers))
        seconds = flops / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        yield Published(f"Megatron-Core, micro-batch {micro_batch}", row["model"], job, nodes_of(gpus, "H100"), seconds)


def llama_3_405b() -> Iterator[Published]:
    """Operations: 6 per parameter and token, and scores below the diagonal. Ranks that share sequences gather keys and
    values (section 3.3.2)."""
    for row in read("llama3_table4_h100"):
        gpus, tp, context, pp, dp, s, batch = _ints(row, "gpus", "TP", "CP", "PP", "DP", "seq", "batch_per_DP")
        hidden, layers, ffn, heads, kv_heads, vocab = _ints(
            row, "hidden", "layers", "ffn", "heads", "kv_heads", "vocab"
        )
        model = llama(hidden, layers, ffn, heads, kv_heads, vocab, s)
        layout = replace(_layout(tp * pp * dp, tp, pp, 1, layers // pp, "none", True), context_parallel_size=context)
        job = TrainingWorkload(model, layout, s, batch * dp, "bf16", stack=MEGATRON_CORE)
        per_token = 6 * parameters(model) + 6 * layers * hidden * s
        seconds = per_token * job.tokens_per_step / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        yield Published(
            "Llama 3 405B",
            f"{gpus} GPUs{f', cp {context}' if context > 1 else ''}",
            job,
            nodes_of(gpus, "H100"),
            seconds,
        )


def experts_h100() -> Iterator[Published]:
    """Mixtures of experts, tokens forced to be balanced. Operations: 6 per parameter that a token meets, and scores
    below the diagonal. What is exchanged beside another micro-batch's computing is left out: no part of the planner
    knows it."""
    for row in read("moe_h100"):
        if "1F1B" in row["note"]:
            continue
        gpus, s, tp, cp, ep, pp, chunks, dp, micro_batch, batch = _ints(
            row, "gpus", "seq", "TP", "CP", "EP", "PP", "VPP", "DP", "micro_batch", "global_batch"
        )
        model = ModelConfig(**known_models()[row["model"]]["model"]).model_copy(update={"max_position_embeddings": s})
        stack, is_sharded = MEGATRON_MOE, row["sharding"] == "FSDP"
        if is_sharded:
            stack = replace(FSDP_2024, attention="cudnn", folds_experts=True, sends_once_per_node=True)
        if row["dispatcher"] == "A2A":
            stack = replace(stack, sends_once_per_node=False)
        recompute: Recompute = "full" if row["recompute"] == "full" else "none"
        layout = replace(
            _layout(tp * pp * dp, tp, pp, micro_batch, chunks, recompute, tp > 1),
            context_parallel_size=cp,
            expert_parallel_size=ep // tp,
            zero_stage=3 if is_sharded else 1,
        )
        job = TrainingWorkload(model, layout, s, batch, "bf16", stack=stack)
        seconds = float(row["step_s"] or 0) or _expert_flops(job) / (float(row["tflops_per_gpu"]) * 1e12 * gpus)
        sizes = [f"tp {tp}", f"cp {cp}", f"ep {ep}", f"pp {pp}"]
        used = ", ".join(size for size in sizes if not size.endswith(" 1"))
        name = f"{row['model']}, {gpus} GPUs, {s} tokens, {used}{', FSDP' * is_sharded}"
        yield Published("Experts", name, job, nodes_of(gpus, "H100"), seconds)


def _expert_flops(job: TrainingWorkload) -> float:
    """Returns the operations of a step, as Megatron-LM counts them."""
    layers, length = job.model.num_hidden_layers, job.sequence_length
    one = replace(job, layout=ParallelLayout(), sequence_length=1)
    weights = sum(dense_flops(one, layer) for layer in range(layers)) + head_flops(one)
    scores = 2.0 * length * job.model.num_attention_heads * job.model.head_dim * layers
    return 3 * (weights + scores) * job.tokens_per_step


def torchtitan() -> Iterator[Published]:
    """Llama 3.1 8B in bf16 without compilation or asynchronous tensor parallelism."""
    for row in read("torchtitan_llama_8b_h100"):
        if row["techniques"] not in ("FSDP", "bf16 vanilla TP"):
            continue
        gpus, fsdp, tp, s, local, batch = _ints(row, "gpus", "FSDP", "TP", "seq", "local_batch", "global_batch")
        layout = ParallelLayout(tp, 1, fsdp, 1, 3, tp > 1, "selective", local)
        job = TrainingWorkload(llama(4096, 32, 14336, 32, 8, 128256, s), layout, s, batch, "bf16", stack=FSDP_2024)
        seconds = job.tokens_per_step / (float(row["tokens_per_s_per_gpu"]) * gpus)
        name = f"{gpus} GPUs, {row['techniques']}"
        yield Published("torchtitan Llama 3.1 8B", name, job, nodes_of(gpus, "H100"), seconds)


def mt_nlg() -> Iterator[Published]:
    """Smith 2022 (MT-NLG), section 2.4: 530B in fp16, TP 8, PP 35, batch 1920, DeepSpeed's pipeline."""
    (printed,) = (row["value"] for row in read("palm_opt_bloom_mtnlg") if row["item"].startswith("iter s @2240"))
    for gpus, seconds in zip((2240, 2800, 3360), map(float, printed.split("/")), strict=True):
        model, layout = gpt(20480, 105, 128, 51200), _layout(gpus, 8, 35, 1, 1, "full")
        job = TrainingWorkload(model, layout, 2048, 1920, "fp16", "fp16", stack=MEGATRON_2021)
        yield Published("MT-NLG 530B", f"{gpus} GPUs", job, nodes_of(gpus, "A100-80GB"), seconds)


def bloom_176b() -> Iterator[Published]:
    """The run itself: TP 4, PP 12, DP 8, micro-batch 2, batch 2048, 105 s a step; kernels were waited for."""
    items = {row["item"]: row["value"] for row in read("palm_opt_bloom_mtnlg") if row["system"] == "BLOOM 176B"}
    stack = replace(
        MEGATRON_2021, name="Megatron-DeepSpeed of 2022", replicas="deepspeed_2022", waits_for_launches=True
    )
    layout = _layout(384, 4, 12, 2, 1, "full")
    model = gpt(14336, 70, 112, 250880)
    job = TrainingWorkload(model, layout, 2048, 2048, "bf16", gradient_reduction_dtype="bf16", stack=stack)
    seconds = float(items["iter s / TFLOP/s/GPU"].split()[0])
    yield Published("BLOOM 176B", "384 GPUs", job, nodes_of(384, "A100-80GB", "Omni-Path 100", 4), seconds)


def llama(hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, vocab: int, longest: int) -> ModelConfig:
    """A Llama 3."""
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=longest,
    )


def held_out_a100() -> list[Published]:
    """The tables on which nothing is fitted."""
    rows = [*sc21_table_2(), *korthikanti_table_5(), *megascale_table_2()]
    rows += mosaicml("mosaicml_fsdp_a100_80gb_seq2048", lambda row: "MosaicML A100-80GB, 2048 tokens")
    return [row for row in rows if "ZeRO-3 of 2021" not in row.table]


def _ints(row: Row, *names: str) -> tuple[int, ...]:
    return tuple(int(row[name]) for name in names)


def _layout(
    gpus: int,
    tp: int,
    pp: int,
    micro_batch: int,
    chunks: int,
    recompute: Recompute = "none",
    sequence_parallel: bool = False,
) -> ParallelLayout:
    schedule: PipelineSchedule = "interleaved" if chunks > 1 else "1f1b"
    return ParallelLayout(tp, pp, gpus // (tp * pp), chunks, 1, sequence_parallel, recompute, micro_batch, schedule)
