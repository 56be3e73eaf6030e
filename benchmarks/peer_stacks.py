"""The sides of `benchmarks.peers` that are stacks of their own: their models, parallelism and losses, as they come.

Each begins with the weights of all sides, brought to its own names and order, and has torch's AdamW. Where a stack
takes a GPU for granted, one place is told otherwise, which is said there.
"""

from __future__ import annotations

import os
from contextlib import nullcontext
from functools import partial, reduce
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional

from benchmarks.peer_sides import (
    LAYOUTS,
    LEARNING_RATE,
    MODEL,
    SEQUENCE,
    PeerLayout,
    Step,
    adamw,
    clip,
    initial_weights,
    loop_of,
    loss_of_transformers,
    mean_loss,
    pipeline_loop,
    start,
    transformers_llama,
)


def fsdp2(name: str) -> Step:
    """transformers under FSDP2 that gathers weights once per step and keeps them for backward, its SHARD_GRAD_OP."""
    from torch.distributed.fsdp import fully_shard

    layout, rank = start(name)
    model = transformers_llama()
    for layer in model.model.layers:
        fully_shard(layer, reshard_after_forward=False)
    fully_shard(model, reshard_after_forward=False)
    parameters = list(model.parameters())
    return loop_of(layout, rank, loss_of_transformers(model), adamw(parameters), partial(clip, parameters))


def accelerate(name: str) -> Step:
    """transformers under Hugging Face Accelerate, which has data parallelism on a CPU."""
    from accelerate import Accelerator

    layout, accelerator, model = LAYOUTS[name], Accelerator(cpu=True), transformers_llama()
    trained, optimizer = accelerator.prepare(model, adamw(model.parameters()))
    return loop_of(
        layout,
        int(os.environ["RANK"]),
        loss_of_transformers(trained),
        optimizer,
        lambda: accelerator.clip_grad_norm_(trained.parameters(), 1.0),
        accelerator.backward,
    )


def deepspeed(name: str) -> Step:
    """transformers on DeepSpeed's own engine with its own ZeRO, begun without its shared-memory operator for inference,
    which it would compile first."""
    import deepspeed as stack

    from megalite.engine.deepspeed.process_groups import start_distributed

    layout, rank, model = LAYOUTS[name], int(os.environ["RANK"]), transformers_llama()
    start_distributed(local_rank=rank)
    config = {
        "train_micro_batch_size_per_gpu": layout.rows,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": layout.zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    engine, *_ = stack.initialize(model=model, optimizer=adamw(model.parameters()), config=config)
    as_optimizer = SimpleNamespace(step=engine.step, zero_grad=lambda: None)  # its step clips, and clears gradients
    return loop_of(layout, rank, loss_of_transformers(engine), as_optimizer, lambda: None, engine.backward)


def torchtitan(name: str) -> Step:
    """Its Llama 3 with FSDP2, tensor parallelism with sequence parallelism and parallel loss, and its pipelining."""
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims, parallel_dims, utils
    from torchtitan.distributed.pipeline_parallel import pipeline_llm
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama
    from torchtitan.models.llama3.model.args import RoPEScalingArgs
    from torchtitan.models.llama3.model.state_dict_adapter import Llama3StateDictAdapter

    layout, rank = start(name)
    parallel_dims.device_type = "cpu"  # it takes a machine without an accelerator for one with CUDA
    arguments = TransformerModelArgs(
        dim=MODEL["hidden_size"],
        n_layers=MODEL["num_hidden_layers"],
        n_heads=MODEL["num_attention_heads"],
        n_kv_heads=MODEL["num_key_value_heads"],
        vocab_size=MODEL["vocab_size"],
        norm_eps=1e-6,
        rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0),
        max_seq_len=SEQUENCE,
    )
    config = JobConfig()
    config.training.seq_len, config.training.mixed_precision_param = SEQUENCE, "float32"
    config.training.local_batch_size = layout.batch // layout.data
    config.parallelism.pipeline_parallel_schedule = "1F1B"
    config.parallelism.pipeline_parallel_microbatch_size = layout.rows
    config.parallelism.pipeline_parallel_degree = layout.pipeline
    config.parallelism.fsdp_reshard_after_forward = "never" if layout.zero == 2 else "default"
    config.activation_checkpoint.mode = "none"
    sizes = {"dp_shard": layout.data, "tp": layout.tensor, "pp": layout.pipeline}
    dims = ParallelDims(dp_replicate=1, cp=1, ep=1, etp=1, world_size=layout.ranks, **sizes)
    dims.build_mesh()
    model = Transformer(arguments)
    model.load_state_dict(Llama3StateDictAdapter(arguments, None).from_hf(initial_weights()))
    loss_of_sum = lambda logits, targets: cross_entropy_loss(logits, targets) / (layout.batch * SEQUENCE)  # noqa: E731
    if layout.pipeline > 1:
        schedule, parts, is_first, _ = pipeline_llm(
            model, dims, config, torch.device("cpu"), arguments, parallelize_llama, loss_of_sum
        )
    else:
        parts = [parallelize_llama(model, dims, config)]
    for module in parts[0].modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo has no sum of products, which it asks for
    parameters = [one for part in parts for one in part.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)  # as it chooses itself
    stages = dims.get_mesh("pp") if layout.pipeline > 1 else None
    clipped = partial(utils.clip_grad_norm_, parameters, 1.0, foreach=True, pp_mesh=stages)
    step = loop_of(layout, rank, lambda inputs, targets: loss_of_sum(parts[0](inputs), targets), optimizer, clipped)
    if layout.pipeline > 1:
        step = pipeline_loop(layout, schedule, is_first, optimizer, clipped, 1.0)
    context = utils.get_train_context(enable_loss_parallel=layout.tensor > 1)

    def in_context() -> float:
        with context():
            return step() * layout.data  # its loss is that of the rank's part of the batch

    return in_context


def olmo(name: str) -> Step:
    """OLMo-core's Llama-like transformer with its FSDP or DDP and tensor parallelism."""
    from olmo_core.nn.feed_forward import FeedForwardConfig
    from olmo_core.nn.transformer import TransformerConfig
    from olmo_core.train.train_module.transformer.config import PipelineScheduleType, TransformerPipelineParallelConfig
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.pipelining import Schedule1F1B

    layout, rank = start(name)
    model = TransformerConfig.llama_like(
        d_model=MODEL["hidden_size"],
        vocab_size=MODEL["vocab_size"],
        n_layers=MODEL["num_hidden_layers"],
        n_heads=MODEL["num_attention_heads"],
        n_kv_heads=MODEL["num_key_value_heads"],
        feed_forward=FeedForwardConfig(hidden_size=MODEL["intermediate_size"], bias=False),
        layer_norm_eps=1e-6,
        rope_theta=10_000,
    ).build(init_device="cpu")
    places = {
        "lm_head": "lm_head.w_out",
        "model.norm": "lm_head.norm",
        "model.embed_tokens": "embeddings",
        "model.layers": "blocks",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "feed_forward_norm",
        "self_attn.o_proj": "attention.w_out",
        "self_attn.": "attention.w_",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
        "_proj": "",
    }
    weights = {reduce(lambda old, pair: old.replace(*pair), places.items(), n): w for n, w in initial_weights().items()}
    model.load_state_dict(weights)
    names = ("pp", "dp", "tp")
    mesh = init_device_mesh("cpu", (layout.pipeline, layout.data, layout.tensor), mesh_dim_names=names)
    if layout.pipeline > 1:
        split = TransformerPipelineParallelConfig(layout.pipeline, PipelineScheduleType.single_1F1B)
        (stage,), (model,) = split.split_model(model, pp_mesh=mesh["pp"], device=torch.device("cpu"))
    if layout.tensor > 1:
        model.apply_tp(mesh["tp"])
    if layout.data > 1 and layout.zero == 2:
        model.apply_fsdp(dp_mesh=mesh["dp"], pp_enabled=True)  # keeps gathered weights for backward
    elif layout.data > 1:
        model.apply_ddp(dp_mesh=mesh["dp"])
    parameters = list(model.parameters())
    if layout.pipeline > 1:
        schedule = Schedule1F1B(stage, layout.micro_batches, loss_fn=mean_loss)
        clipped = partial(clip, parameters, mesh["pp"].get_group())
        is_first = mesh["pp"].get_local_rank() == 0
        return pipeline_loop(layout, schedule, is_first, adamw(parameters), clipped, 1 / layout.micro_batches)
    loss_of = lambda inputs, targets: model(inputs, labels=targets).loss  # noqa: E731
    return loop_of(layout, rank, loss_of, adamw(parameters), partial(clip, parameters))


def megatron(name: str) -> Step:
    """Megatron-core's GPTModel of its local layers (no Transformer Engine, no Apex), with its tensor parallelism and
    DistributedDataParallel. Its optimizer and its pipeline's schedule want CUDA, so torch's AdamW is here too."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
    from megatron.core.transformer import TransformerConfig

    layout, rank = start(name)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]  # for angles and gradients
    get_cuda_rng_tracker().fork = lambda *_, **__: nullcontext()  # dropout's, whose rate is 0 here
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)
    config = TransformerConfig(
        num_layers=MODEL["num_hidden_layers"],
        hidden_size=MODEL["hidden_size"],
        ffn_hidden_size=MODEL["intermediate_size"],
        num_attention_heads=MODEL["num_attention_heads"],
        num_query_groups=MODEL["num_key_value_heads"],
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_dtype=torch.float32,
        normalization="RMSNorm",
        layernorm_epsilon=1e-6,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=MODEL["vocab_size"],
        max_sequence_length=SEQUENCE,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        rotary_base=10_000,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
    )
    offset = parallel_state.get_pipeline_model_parallel_rank() * len(model.decoder.layers)
    weights = _megatron_weights(layout, parallel_state.get_tensor_model_parallel_rank(), offset)
    model.load_state_dict({name: weights[name] for name, _ in model.named_parameters()}, strict=False)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)  # True: hidden
    positions = torch.arange(SEQUENCE).unsqueeze(0)
    if layout.data > 1:
        model = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), model)
    parameters = list(model.parameters())

    def finish() -> None:
        if layout.data > 1:
            model.finish_grad_sync()
            for one in parameters:
                one.grad = one.main_grad
        group = parallel_state.get_tensor_model_parallel_group()
        clip(parameters, group, lambda one: getattr(one, "tensor_model_parallel", False))

    def loss_of(inputs: Any, targets: Any) -> Any:
        if layout.data > 1:
            model.zero_grad_buffer()  # of the step before: a step is one micro-batch here
        return model(inputs, positions, mask, labels=targets).mean()

    if layout.pipeline == 1:
        return loop_of(layout, rank, loss_of, adamw(parameters), finish)
    sizes = {"num_microbatches": layout.micro_batches, "seq_length": SEQUENCE, "micro_batch_size": layout.rows}
    run = partial(get_forward_backward_func(), model=model, forward_only=False, **sizes)
    return lambda: run(forward_step_func=loss_of, data_iterator=None)  # wants CUDA before it calls anything


def _megatron_weights(layout: PeerLayout, part: int, offset: int) -> dict[str, Any]:
    """Returns a tensor-parallel rank's weights by Megatron's names; layers count from the stage's first."""
    given, heads = initial_weights(), MODEL["num_attention_heads"] // MODEL["num_key_value_heads"]
    columns = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
    weights = {f"{own}.weight": _part(given[f"{theirs}.weight"], 0, layout, part) for own, theirs in columns.items()}
    weights["decoder.final_layernorm.weight"] = given["model.norm.weight"]
    for layer in range(MODEL["num_hidden_layers"]):
        of = {name.partition(f".{layer}.")[2]: one for name, one in given.items() if f"layers.{layer}." in name}
        size = MODEL["hidden_size"] // MODEL["num_attention_heads"]
        groups = [of[f"self_attn.{one}_proj.weight"].unflatten(0, (-1, size)) for one in "qkv"]
        queries = groups[0].unflatten(0, (-1, heads))
        together = torch.cat([queries, groups[1].unsqueeze(1), groups[2].unsqueeze(1)], dim=1)  # group by group
        gates = torch.stack([of["mlp.gate_proj.weight"], of["mlp.up_proj.weight"]])
        weights |= {
            f"decoder.layers.{layer - offset}.{name}.weight": weight
            for name, weight in {
                "input_layernorm": of["input_layernorm.weight"],
                "pre_mlp_layernorm": of["post_attention_layernorm.weight"],
                "self_attention.linear_qkv": _part(together, 0, layout, part).flatten(0, 2),
                "self_attention.linear_proj": _part(of["self_attn.o_proj.weight"], 1, layout, part),
                "mlp.linear_fc1": _part(gates, 1, layout, part).flatten(0, 1),
                "mlp.linear_fc2": _part(of["mlp.down_proj.weight"], 1, layout, part),
            }.items()
        }
    return weights


def _part(weight: Any, axis: int, layout: PeerLayout, part: int) -> Any:
    return weight.chunk(layout.tensor, axis)[part]
