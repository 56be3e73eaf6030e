"""Time of one pass of one micro-batch through a block or the head on an accelerator. No torch.

Letters: s sequence, b micro-batch, h hidden, a heads, t tensor-parallel size, f features of the feed-forward layer.
Times are those of one tensor-parallel rank, without its collectives, in seconds.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.parallel.mesh import attention_matrices
from megalite.planner.cost.stage_parameters import cut, scores_exist
from megalite.planner.hardware import Cluster
from megalite.planner.workload import BYTES, TrainingWorkload
from megalite.units import Additive

MEMORY_EFFICIENCY = 0.8  # of the bandwidth on the data sheet, that kernels which only move numbers reach
FLASH_BACKWARD = 2.5  # times the work of the forward pass: it computes the scores again (Dao 2022, section 3.1)


@dataclass(frozen=True)
class LayerTime(Additive):
    """Seconds by the resource that bounds them."""

    matrix_s: float = 0.0
    attention_s: float = 0.0
    memory_s: float = 0.0

    @property
    def seconds(self) -> float:
        return self.matrix_s + self.attention_s + self.memory_s


@dataclass(frozen=True)
class Passes(Additive):
    """Work of one micro-batch: forward, backward and recomputation."""

    forward: LayerTime = LayerTime()
    backward: LayerTime = LayerTime()
    again: LayerTime = LayerTime()


@dataclass(frozen=True)
class Speed:
    """Throughput of an accelerator."""

    flops: float  # of large matrix products: peak times the calibrated efficiency
    attention_flops: float  # of fused attention
    memory_bytes: float
    launch_s: float  # of one block's forward pass by the host
    number_bytes: int  # as which a number counts outside matrix products
    float8_flops: float | None = None  # of products with a block's weights, where they are in float8

    @classmethod
    def of(cls, job: TrainingWorkload, cluster: Cluster) -> Speed:
        """Returns the throughput for a job. On a CPU only matrix products gain from 16 bits: fused attention and
        elementwise operations are widened to fp32, which takes as long as fp32 or longer."""
        accelerator, peak = cluster.accelerator, cluster.peak_flops(job.dtype)
        fused = {"materialized": 0.0, **dict(accelerator.flash_attention)}[job.stack.attention]
        widens, float8 = accelerator.device == "cpu", accelerator.peak_tflops.get("fp8")
        return cls(
            flops=peak * accelerator.efficiency,
            attention_flops=fused * (accelerator.peak_tflops.get("fp32", peak / 1e12) * 1e12 if widens else peak),
            memory_bytes=accelerator.memory_gb_per_s * 1e9 * MEMORY_EFFICIENCY,
            launch_s=accelerator.launch_us * 1e-6,
            number_bytes=BYTES["fp32" if widens else job.dtype],
            float8_flops=1e12 * float8 * accelerator.efficiency if float8 and job.in_float8 else None,
        )

    def product(self, rows: float, columns: int, inner: int, size: int, count: float = 1.0) -> LayerTime:
        """Returns the time of `count` products [rows, inner] x [inner, columns]. Their operands and result pass
        through memory once, which the computation hides only in part, most of all where a dimension is small: so
        both times are added, where a roofline (Williams 2009) takes the larger."""
        flops = 2.0 * rows * columns * inner * count
        moved = size * (rows * inner + inner * columns + rows * columns) * count
        return LayerTime(matrix_s=flops / self.flops + moved / self.memory_bytes)

    def weights(self, rows: float, columns: int, inner: int, size: int) -> LayerTime:
        """Returns the time of a product with a block's weights, which may be in float8: then its operands are read in
        16 bits, written in 8 and read again, and it is taken to reach the same part of its peak."""
        if self.float8_flops is None:
            return self.product(rows, columns, inner, size)
        moved = (size + 1 + 1) * inner * (rows + columns) + size * rows * columns
        return LayerTime(matrix_s=2.0 * rows * columns * inner / self.float8_flops + moved / self.memory_bytes)

    def moving(self, moved_bytes: float) -> LayerTime:
        return LayerTime(memory_s=moved_bytes / self.memory_bytes)


def block_work(job: TrainingWorkload, layer: int, speed: Speed) -> Passes:
    """Returns the work of one block. Backward has two products for each one of forward and twice the bytes, and
    one beside adapters, whose own products are not counted;
    `TrainingWorkload.layout.recompute` decides what is recomputed."""
    dense, core, moved = _products(job, layer, speed), _attention(job, layer, speed), _elementwise(job, layer, speed)
    is_fused = job.stack.attention != "materialized" and not scores_exist(job.model)
    core_backward = (FLASH_BACKWARD if is_fused else 2.0) * core
    forward = sum(dense, core + moved)
    backward = sum((products_of_backward(job) * product for product in dense), core_backward + 2.0 * moved)
    again = LayerTime()
    assert isinstance(job.layout.recompute, str), "figures of stages that recompute differently are asked for by_stage"
    if job.layout.recompute == "full":
        # experts' outputs are kept: their probabilities are multiplied with them
        needs_all = job.recomputes_the_end or job.model.has_experts(layer)
        again = forward if needs_all else forward + -1.0 * dense[-1]
    elif job.layout.recompute == "selective":
        has_own = job.stack.has_own_linear_layers
        again = (LayerTime() if is_fused and has_own else core) + has_own * _computed_again(job, layer, speed)
    return Passes(forward, backward, again)


def products_of_backward(job: TrainingWorkload) -> float:
    """Returns the products of backward for each one of forward: a weight that stays as it is needs no gradient."""
    return 1.0 if job.trains_adapters else 2.0


def _computed_again(job: TrainingWorkload, layer: int, speed: Speed) -> LayerTime:
    """Returns the work of norms and activation that products do not keep the results of (models/decoder.py)."""
    model, t, size = job.model, job.layout.tensor_parallel_size, speed.number_bytes
    is_dense = not model.has_experts(layer)
    norms = (2 if is_dense else 1) * (model.norm_placement != "post") * 2 * size * model.hidden_size
    is_kept = not is_dense or (not model.gated_mlp and model.hidden_act == "relu")
    activation = 0 if is_kept else (3 if model.gated_mlp else 2) * size * model.intermediate_size
    return speed.moving(job.micro_batch_tokens * (norms / (t if job.layout.sequence_parallel else 1) + activation / t))


def head_work(job: TrainingWorkload, speed: Speed) -> Passes:
    """Returns the work of logits and their softmax in fp32: 12 bytes each way per logit. Our loss computes both
    gradients in forward: the sum is the same."""
    model, size = job.model, BYTES[job.dtype]
    tokens, columns = job.micro_batch_tokens, cut(model.vocab_size, job.layout.tensor_parallel_size)
    product = speed.product(tokens, columns, model.hidden_size, size)
    softmax = speed.moving(12.0 * tokens * columns)
    return Passes(product + softmax, products_of_backward(job) * product + softmax, LayerTime())


def dense_flops(job: TrainingWorkload, layer: int) -> float:
    """Returns the FLOPs of products with weights in a block's forward pass of one micro-batch, over all tensor-parallel
    ranks: Narayanan 2021, appendix, with the sizes of any family."""
    model = job.model
    hidden, numbers = model.hidden_size, sum(each.inputs * each.outputs for each in attention_matrices(model))
    if model.has_experts(layer):
        assert model.num_experts is not None
        active = model.num_experts_per_tok * model.moe_intermediate_size + model.shared_size
        numbers += hidden * (model.num_experts + 3 * active)
    else:
        numbers += (3 if model.gated_mlp else 2) * hidden * model.intermediate_size
    return 2.0 * job.micro_batch_tokens * numbers


def score_flops(job: TrainingWorkload, layer: int) -> float:
    """Returns the FLOPs of attention scores and their products with values; scores above the diagonal count as
    published."""
    model, length = job.model, job.sequence_length
    window = model.sliding_window if model.has_window(layer) else None
    widths = model.num_attention_heads * (model.head_dim + (model.v_head_dim or model.head_dim))
    return 2.0 * job.micro_batch_tokens * min(length, window or length) * widths


def head_flops(job: TrainingWorkload) -> float:
    """Returns the FLOPs of the output head."""
    return 2.0 * job.micro_batch_tokens * job.model.hidden_size * job.model.vocab_size


def _products(job: TrainingWorkload, layer: int, speed: Speed) -> list[LayerTime]:
    """Returns the matrix products with weights, in order."""
    model, t, size, tokens = job.model, job.layout.tensor_parallel_size, BYTES[job.dtype], job.micro_batch_tokens
    hidden = model.hidden_size
    found = _attention_products(job, speed)
    if not model.has_experts(layer):
        features, gates = cut(model.intermediate_size, t), 2 if model.gated_mlp else 1
        found.append(speed.weights(tokens, gates * features, hidden, size))
        return [*found, speed.weights(tokens, hidden, features, size)]
    assert model.num_experts is not None
    found.append(speed.product(tokens, model.num_experts, hidden, size))
    # of as many fewer experts as many more tokens, where they are dealt over ranks
    whole, ep = t if job.stack.folds_experts else 1, job.layout.expert_parallel_size
    features, experts = cut(model.moe_intermediate_size, t // whole), model.num_experts // (ep * whole)
    rows = tokens * model.num_experts_per_tok * ep / model.num_experts
    if model.n_shared_experts:
        shared = cut(model.shared_size, t)
        found += [speed.weights(tokens, 2 * shared, hidden, size), speed.weights(tokens, hidden, shared, size)]
    found.append(speed.product(rows, 2 * features, hidden, size, experts))
    return [*found, speed.product(rows, hidden, features, size, experts)]


def _attention_products(job: TrainingWorkload, speed: Speed) -> list[LayerTime]:
    """Returns the products of attention with weights; queries, keys and values of hidden states share one."""
    model, t, size, tokens = job.model, job.layout.tensor_parallel_size, BYTES[job.dtype], job.micro_batch_tokens
    *made, output = attention_matrices(model)
    inputs, outputs = output.sides(t)
    last = speed.weights(tokens, outputs, inputs, size)
    if model.kv_lora_rank is None:
        return [speed.weights(tokens, sum(each.sides(t)[1] for each in made), model.hidden_size, size), last]
    parts = t if job.layout.sequence_parallel else 1  # of a cut sequence, latents are computed on a slice
    rows = [tokens // parts if each.cut == "none" else tokens for each in made]
    return [*(speed.weights(row, *each.sides(t)[::-1], size) for row, each in zip(rows, made, strict=True)), last]


def _attention(job: TrainingWorkload, layer: int, speed: Speed) -> LayerTime:
    """Returns the work of scores and their products with values. In memory: two batched products, softmax (a read
    and a write) and dropout (the same, and a mask of bytes). Fused: only scores below the diagonal."""
    model, size, t = job.model, BYTES[job.dtype], job.layout.tensor_parallel_size
    number = speed.number_bytes
    heads, s = model.num_attention_heads / t * job.layout.micro_batch_size, job.sequence_length
    rows = s / job.layout.context_parallel_size  # or all of as many fewer heads
    if job.stack.attention == "materialized" or scores_exist(model):
        products = speed.product(rows, s, model.head_dim, size, heads)
        products += speed.product(rows, model.head_dim, s, size, heads)
        passes = 2 * number + ((2 * number + 1) if model.attention_dropout > 0 else 0)
        moved = speed.moving(passes * rows * s * heads)
        return LayerTime(attention_s=products.seconds, memory_s=moved.memory_s)
    # torch has no kernel for a window or for documents: their masks are added, and all scores are computed
    is_masked = job.document_mask or model.has_window(layer)
    flops = 4.0 * rows * s * model.head_dim * heads * (1.0 if is_masked else 0.5)
    return LayerTime(attention_s=flops / speed.attention_flops)


def _elementwise(job: TrainingWorkload, layer: int, speed: Speed) -> LayerTime:
    """Returns the work of operations that only move numbers: norms (a read and a write), residual sums (two reads and a
    write, and a mask with dropout), activation, copies of queries, keys and values where they are rotated, and of
    attention's output where its heads are regrouped.

    Without fused kernels more would move; ours are fused or in place (models/attention.py).
    """
    model, t, size = job.model, job.layout.tensor_parallel_size, speed.number_bytes
    whole_t = t if job.layout.sequence_parallel else 1
    norms = {"pre": 2, "post": 2, "pre_and_post": 4}[model.norm_placement] * 2 * size * model.hidden_size
    sums = 2 * (3 * size + (1 if model.residual_dropout > 0 else 0)) * model.hidden_size
    features = model.intermediate_size
    if model.has_experts(layer):  # rows are copied to their experts and back
        features = model.moe_intermediate_size * model.num_experts_per_tok + model.shared_size
        sums += 3 * size * model.hidden_size * (model.n_shared_experts > 0)
        copies = 4 if job.layout.expert_parallel_size == 1 else 8  # once more where they arrive
        sums += copies * size * model.num_experts_per_tok * model.hidden_size
    activation = (3 if model.gated_mlp else 2) * size * features
    heads = model.num_attention_heads + (2 * model.num_key_value_heads if model.rotary_dim(layer) > 0 else 0)
    is_copied = job.stack.attention == "materialized" or model.rotary_dim(layer) > 0
    copies = 2 * size * heads * model.head_dim if is_copied else 0
    return speed.moving(job.micro_batch_tokens * ((norms + sums) / whole_t + (activation + copies) / t))
