"""All options of a run but those of `model`, `data` and tracking services: a class per section, in `Config`'s order.

To add an option, add an annotated field with a docstring to its section: the JSON schema, the help and the
documentation derive from it. Rules about several options belong in rules.py.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from megalite.config.base import (
    BatchCount,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    NotBool,
    PositiveFloat,
    PositiveInt,
    Probability,
    RankCount,
    Section,
)
from megalite.config.tracking import TrackioConfig, WandbConfig
from megalite.config.training_stage import TrainingStage

PipelineSchedule = Literal["1f1b", "interleaved", "zero-bubble", "zb-v", "dualpipev"]


ContextParallelKind = Literal["all_gather", "ulysses"]


class ParallelConfig(Section):
    """Layout of the run. Every layout computes the same thing; layouts differ in memory and speed."""

    tensor_parallel_size: RankCount = 1
    """Number of ranks that share every layer."""

    pipeline_parallel_size: RankCount = 1
    """Number of stages that the layers are divided among; the division may be uneven."""

    pipeline_schedule: PipelineSchedule = Field(default="1f1b", examples=["1f1b"])
    """Order in which pipeline stages compute; `auto` is the fastest that fits, `megalite plan schedule` draws each."""

    pipeline_chunks: RankCount | None = Field(default=None, examples=[1])
    """Pieces of the model on each pipeline stage. Left out: as few as the schedule needs, 1 or 2."""

    data_parallel_size: RankCount | Literal["auto"] = "auto"
    """Number of replicas; `auto` uses all processes that tensor and pipeline parallelism leave."""

    context_parallel_size: RankCount = 1
    """Number of ranks that share every sequence, each with the same part of it in all layers."""

    context_parallel_kind: ContextParallelKind | Literal["auto"] = "auto"
    """How they attend to each other: gathered keys and values, or heads exchanged; `auto` moves fewer bytes."""

    expert_parallel_size: RankCount = 1
    """Number of neighbouring replicas over which each layer's experts are dealt; all else is whole on each of them."""

    sequence_parallel: bool = False
    """Cut activations between parallel layers along the sequence; no effect without tensor parallelism."""

    zero_stage: Literal[0, 1, 2, 3] = 1
    """State that data parallelism shards: 1 optimizer state, 2 also gradients, 3 also weights; 0 is run as 1."""

    gradient_bucket_size: PositiveInt = 50_000_000
    """Gradients, or new weights, in one collective of replicas (numbers, not bytes); a larger parameter goes alone."""

    @property
    def ranks_per_replica(self) -> int:
        """Number of ranks that train one share of the samples."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size


Dtype = Literal["fp32", "bf16", "fp16"]


class PrecisionConfig(Section):
    """Number formats. Master weights are always fp32; `optimizer.moments_dtype` is that of the optimizer's state."""

    dtype: Dtype = "bf16"
    """Format of weights and activations in forward and backward; fp16 has a loss scale."""

    gradient_accumulation_dtype: Dtype = "fp32"
    """Format in which micro-batches' gradients are summed: fp32, or the same as `dtype`."""

    gradient_reduction_dtype: Dtype | None = None
    """Format of gradients between replicas: fp32 or `dtype`. Left out: as accumulated; `auto`: bf16 if a step gains."""

    float8: Literal["none", "rowwise", "tensorwise"] = Field(default="none", examples=["rowwise"])
    """Float8 products in attention and MLP, scaled per row or tensor: Hopper or Ada GPUs; a CPU emulates it, slower."""

    float32_matmul_precision: Literal["highest", "high", "medium"] = "highest"
    """PyTorch's `set_float32_matmul_precision`: below `highest`, fp32 products are faster and less exact."""

    @property
    def reduction_dtype(self) -> Dtype:
        """Format in which gradients are summed over replicas."""
        return self.gradient_reduction_dtype or self.gradient_accumulation_dtype


class OptimizerConfig(Section):
    """Update rule; its learning rate is the peak that the schedule scales."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """Update rule: AdamW; Muon for the blocks' matrices and AdamW for the rest; or SGD without momentum (for tests)."""

    learning_rate: PositiveFloat = 3e-4
    """Peak learning rate, reached at the end of the warm-up; with muon of all weights, matrices as `adjust_lr` says."""

    betas: tuple[Probability, Probability] = (0.9, 0.95)
    """AdamW's decay rates of the first and second moment; ignored by sgd."""

    eps: PositiveFloat = 1e-8
    """AdamW's epsilon, added to the root of the second moment; ignored by sgd."""

    momentum: Probability = 0.95
    """Muon's decay rate of the momentum, which is Nesterov's; ignored by the others."""

    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Muon's factor on a matrix's rate: 0.2 sqrt(larger side), as AdamW's updates, or sqrt(max(1, rows / columns))."""

    moments_dtype: Literal["fp32", "bf16"] = "fp32"
    """Format of AdamW's moments and Muon's momentum; bf16 halves their memory, and is rounded to the nearest."""

    weight_decay: NonNegativeFloat = 0.1
    """Decay of the matrices per step, times the learning rate; norms and biases never decay."""

    scale_with_batch: Literal["none", "linear", "sqrt"] = Field(default="none", examples=["sqrt"])
    """Factor on the rate for the batch of each step, in tokens over those of the reference batch: it, or its root."""

    reference_batch_size: PositiveInt | None = Field(default=None, examples=[256])
    """Batch for which `learning_rate` is meant, in sequences of `training.sequence_length`, for `scale_with_batch`."""


class ScheduleConfig(Section):
    """Learning-rate schedule: a linear warm-up, then one of four shapes; all of it by steps, or all of it by tokens."""

    name: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Shape after the warm-up; wsd (warm-up, stable, decay) is constant until the last `decay_steps`."""

    warmup_steps: NonNegativeInt = Field(default=0, examples=[100])
    """Steps over which the learning rate rises linearly to its peak; a shorter run (a smoke test) ends on the way."""

    warmup_tokens: NonNegativeInt | None = Field(default=None, examples=[100_000_000])
    """The warm-up in tokens; like samples and epochs it makes the whole schedule go by tokens, 0 without a warm-up."""

    warmup_samples: NonNegativeInt | None = Field(default=None, examples=[50_000])
    """The warm-up in samples of the data, as long as the longest sequence of the run."""

    warmup_epochs: PositiveFloat | None = Field(default=None, examples=[0.5])
    """The warm-up in passes over the data, of one text."""

    min_learning_rate_ratio: Fraction = 0.1
    """Learning rate at the end of the run, as a fraction of the peak; ignored by constant."""

    decay_steps: PositiveInt | None = Field(default=None, examples=[200])
    """wsd only: length of the final decay in steps. Left out: a tenth of the run."""

    decay_tokens: PositiveInt | None = Field(default=None, examples=[1_000_000_000])
    """wsd only: length of the final decay in tokens, in place of `decay_steps`; the whole schedule goes by tokens."""

    def wsd_decay_steps(self, total_steps: int) -> int:
        """Length in steps of wsd's final decay in a run of `total_steps`."""
        return self.decay_steps if self.decay_steps is not None else max(1, total_steps // 10)


class EvaluationConfig(Section):
    """Loss on held-out documents while training."""

    interval: NonNegativeInt = Field(default=0, examples=[100])
    """Steps between evaluations; 0 = never."""

    samples: PositiveInt = 64
    """Held-out sequences per evaluation; a multiple of `micro_batch_size` x data-parallel size."""


class RouterConfig(Section):
    """Losses and a bias that make the routers of a model with experts use all of them; equal on every layout, 0 = off.

    Only the gradients of losses are added: the loss that is shown stays the model's own.
    """

    sequence_loss: NonNegativeFloat = Field(default=0.0, examples=[0.0001])
    """Coefficient of the sequence-wise balance loss (DeepSeek-V3), 1 for each sequence that uses experts equally."""

    z_loss: NonNegativeFloat = Field(default=0.0, examples=[0.001])
    """Coefficient of the mean squared logsumexp of a router's logits, which keeps them small (ST-MoE)."""

    bias_rate: NonNegativeFloat = Field(default=0.0, examples=[0.001])
    """Step of a bias on scores, for the choice of experts alone, that falls where more tokens than the mean went."""


class TrainingConfig(Section):
    """Batch, length, seed and stopping of the run."""

    global_batch_size: BatchCount = Field(examples=[16])
    """Sequences per optimizer step, over all replicas and micro-batches."""

    micro_batch_size: PositiveInt = Field(examples=[2])
    """Sequences per forward pass on one replica; affects memory, not results; `auto`: chosen with the layout."""

    sequence_length: PositiveInt = Field(examples=[256])
    """Tokens per sequence."""

    stages: tuple[TrainingStage, ...] = Field(
        default=(), examples=[[{"from_tokens": 10_000_000_000, "global_batch_size": 512}]]
    )
    """Changes of the batch in the course of the run, in the order in which they come."""

    steps: PositiveInt | None = Field(default=None, examples=[1000])
    """Length of the run in optimizer steps; give this or `tokens`."""

    tokens: PositiveInt | None = Field(default=None, examples=[1_000_000_000])
    """Length of the run in training tokens, rounded up to whole steps; give this or `steps`."""

    seed: Annotated[int, Field(ge=0, lt=2**63), NotBool] = 0
    """Seed of the initial weights, the order of the data and dropout."""

    gradient_clipping: NonNegativeFloat = 1.0
    """Largest global norm of the gradient; larger ones are scaled down to it. 0 = off."""

    router: RouterConfig = Field(default_factory=RouterConfig)
    """Balance of experts."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Loss on held-out documents while training."""

    max_minutes: PositiveFloat | None = Field(default=None, examples=[230])
    """Wall-clock limit: the run saves and ends with exit code 75 at the first step that ends after it."""

    self_check_every: NonNegativeInt = Field(default=0, examples=[100])
    """Steps between checks that all ranks' copies of a weight are equal to the bit; before every save too. 0 = off."""

    deterministic: bool = False
    """Two runs of one config on equal machines are equal to the bit; GPUs take slower kernels, a CPU none."""

    initialize_from: Path | None = Field(default=None, examples=["meta-llama/Llama-3.2-1B"])
    """Weights to start from: a Hugging Face folder or hub id (`model` may then be left out), or our own checkpoint."""


OfLlama = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
Projection = Literal[OfLlama, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"]


class AdapterConfig(Section):
    """Small trained matrices beside weights that stay as they are (LoRA, Hu 2021): fine-tuning with little memory."""

    name: Literal["none", "lora"] = Field(default="none", examples=["lora"])
    """`lora` keeps the model as it is and adds `alpha / rank * B A` to each target; `none` trains the model itself."""

    rank: PositiveInt = 16
    """Rows of each A and columns of each B."""

    alpha: PositiveFloat = 32.0
    """Factor on what the adapters add, over `rank`."""

    targets: Literal["all-linear"] | Annotated[tuple[Projection, ...], Field(min_length=1)] = "all-linear"
    """Projections with an adapter, by the names that Llama, or DeepSeek, has for them; `all-linear`: all of them."""

    def adapts(self, projection: str) -> bool:
        """Returns whether the projection of this name has an adapter."""
        return self.name == "lora" and (self.targets == "all-linear" or projection in self.targets)

    @property
    def projections(self) -> tuple[Projection, ...]:
        """The projections with an adapter, in the same order however `targets` names them."""
        names: tuple[Projection, ...] = get_args(Projection)
        return tuple(name for name in names if self.adapts(name))


RecomputeMode = Literal["none", "selective", "full"]


class RecomputeConfig(Section):
    """Activations that the backward pass recomputes instead of keeping them.

    `selective` recomputes what costs no product: norms, activations, and attention's scores where they are in memory;
    `full` whole blocks (a third more compute).
    """

    mode: RecomputeMode | tuple[RecomputeMode, ...] = "none"
    """Mode of all pipeline stages, or a list with that of each; `auto`: on each stage the fastest that fits."""

    def by_stage(self, stages: int) -> tuple[RecomputeMode, ...]:
        """Returns the mode of each of `stages` pipeline stages."""
        return (self.mode,) * stages if isinstance(self.mode, str) else self.mode


class OffloadConfig(Section):
    """State and activations that wait in the memory of the host instead of the GPU's; a CPU run gains nothing by it."""

    optimizer: Literal["none", "cpu"] = "none"
    """`cpu` keeps fp32 weights, moments and their update on the host (ZeRO-Offload): less memory, slower steps."""

    activations: Literal["none", "cpu"] = "none"
    """`cpu` moves what blocks keep for backward to the host and back while other blocks compute."""


class PerformanceConfig(Section):
    """Faster kernels for the same results, up to rounding."""

    compile: Literal["auto", "none", "blocks"] = "auto"
    """`blocks` compiles decoder blocks for training, `auto` on GPUs where it can; `none`: nor passes and loss there."""

    attention: Literal["auto", "sdpa"] = "auto"
    """`auto`: on GPUs kernels for packed documents, windows and capped scores; `sdpa`: masks, as on a CPU."""

    symmetric_memory: bool = False
    """Compiled blocks split products along with the collectives of a cut sequence; needs NVLink (async TP in torch)."""


Exported = Literal["off", "last", "every"]
ExportHf = Annotated[
    Exported,  # false is `off` in YAML 1.1, which other programs write
    BeforeValidator(lambda value: "off" if value is False else value, json_schema_input_type=Exported | Literal[False]),
]


class CheckpointConfig(Section):
    """Checkpoints in `run_dir/checkpoints`; any of them resumes on any layout."""

    interval: NonNegativeInt | Literal["auto"] = "auto"
    """Steps between checkpoints; 0 = only at the end; `auto` = what loses least time, at most an hour of training."""

    mean_hours_between_failures: PositiveFloat | None = Field(default=None, examples=[12])
    """Expected hours between failures, for `interval: auto`. Left out: observed in this run, or 6000 / nodes."""

    save_last: bool = True
    """Save a checkpoint after the last step."""

    resume: bool = True
    """Continue from the newest complete checkpoint in `run_dir`, or in `mirror` where `run_dir` has none."""

    background: bool = True
    """Write files while training goes on: a step waits only until its state is copied to host memory."""

    keep_last: NonNegativeInt = 10
    """Number of the newest checkpoints to keep; 0 = all."""

    keep_every: NonNegativeInt = Field(default=0, examples=[1000])
    """Keeps checkpoints of steps that are a multiple of this permanently; 0 = none."""

    keep_best: NonNegativeInt = Field(default=0, examples=[1])
    """Number of checkpoints with the lowest evaluation loss to keep."""

    export_hf: ExportHf = "off"
    """Write `run_dir/hugging_face/step_...` of the last step or of every checkpoint; deleted with the checkpoint."""

    export_hf_dtype: Dtype | None = Field(default=None, examples=["bf16"])
    """Number format of `export_hf`. Left out: that of the initial Hugging Face model, or `precision.dtype`."""

    mirror: str | None = Field(default=None, examples=["s3://bucket/my_run"])
    """Any fsspec URL (`s3://bucket/run`, `gs://...`, `file:///...`): finished checkpoints are copied there."""

    mirror_wait_minutes: NonNegativeFloat = 30
    """Longest wait at the end of a run until the mirror has the last checkpoint, in minutes."""


Policy = Literal["skip", "rollback", "stop"]


class GuardsConfig(Section):
    """Policies for bad steps, which are caught before they change a weight.

    `skip` leaves the weights as they are and goes on with the next batch; `rollback` returns to the last checkpoint
    and goes on behind the offending data, or skips where there is none yet; `stop` ends the run.
    """

    not_finite: Policy = "skip"
    """Policy for NaN or Inf in the loss or the gradients."""

    loss_spike: Literal["ignore"] | Policy = "ignore"
    """Policy for a loss far above those of the last steps; other than ignore, each step waits for its loss."""

    spike_z_score: PositiveFloat = 6.0
    """Standard deviations above the window's mean from which a loss is a spike."""

    spike_window: PositiveInt = 100
    """Steps whose losses a loss is compared with; no loss is a spike before there are that many."""

    max_interventions: PositiveInt = 10
    """Skips in a row, or rollbacks within 10 `spike_window`s (1000 steps at least), after which the run stops."""


class WatchdogConfig(Section):
    """Ends a run that hangs, with a report of which ranks wait for which, so that it can be restarted."""

    enabled: bool = True
    """End a run that makes no progress."""

    factor: PositiveFloat = 10.0
    """A step may take this many times the longest of the last 20; evaluations and saves likewise, by their own."""

    minimum_seconds: PositiveFloat = 300.0
    """Lower bound of that limit, in seconds."""

    startup_minutes: PositiveFloat = 30.0
    """Limit until the first step (evaluation, save) has ended, while its usual length is not known."""

    timeout_minutes: PositiveFloat = 30.0
    """A rank that waits so long for others in one collective, of any process group, fails; the watchdog comes first."""

    def limit_s(self, recent_s: Collection[float]) -> float:
        """Returns the limit in seconds of work whose last ones took `recent_s`: that of the start if none has ended."""
        return max(self.minimum_seconds, self.factor * max(recent_s)) if recent_s else 60.0 * self.startup_minutes


class TimelineConfig(Section):
    """Timelines of chosen steps on all ranks, for `megalite trace`; 10, 11, 100, 101, ... and the last are kept anyway.

    Each takes some kilobytes to some megabytes for a rank, in the run folder's `timeline`.
    """

    every: NonNegativeInt = 0
    """Keep every so many steps too; 0: none."""

    steps: tuple[PositiveInt, ...] = Field(default=(), examples=[(5, 500)])
    """Keep these steps too."""

    ranks: Literal["all"] | tuple[NonNegativeInt, ...] = Field(default="all", examples=[(0, 8)])
    """Ranks that keep theirs; an empty list: none, and no step is kept."""

    keep: PositiveInt = 20
    """Number of steps that are kept; the oldest ones make room."""


class ProfileConfig(Section):
    """Profiles of chosen steps by torch.profiler, which makes these steps slower."""

    steps: tuple[PositiveInt, ...] = Field(default=(), examples=[(20, 21)])
    """Steps to profile; a file `profile_next` in the run folder asks for the next step while the run goes on."""

    memory: bool = False
    """Write a snapshot of the accelerator's memory with each profile."""


class PrometheusConfig(Section):
    """Metrics for Prometheus, and of each host's GPUs. Needs `pip install megalite[prometheus]`."""

    enabled: bool = False
    """Serve the metrics of the run from rank 0's host, and those of its GPUs from each host."""

    port: Annotated[int, Field(ge=1, le=65526)] = 9466
    """Port on each host; where it is taken, the next free one of ten."""

    host: Annotated[str, Field(pattern=r"^[^\s/@]{1,253}$")] = "127.0.0.1"
    """Address to listen at; 0.0.0.0 admits every host that reaches this one: the endpoint has no authentication."""

    textfile: Path | None = Field(default=None, examples=["/var/lib/prometheus/node-exporter"])
    """Folder of node_exporter's textfile collector, for `megalite_RUN.prom`. Left out: no such file."""

    gpus: Literal["auto"] | bool = "auto"
    """Metrics of GPUs; `auto`: where there are any, and no DCGM exporter on port 9400 serves them already."""

    per_rank: bool = True
    """Peak memory and relative speed of every rank, two series each."""


class MonitorConfig(Section):
    """Console output, plots and tracking services."""

    log_interval: PositiveInt = 1
    """Steps between console lines, losses by source and parts of a step; docs/observing.md tells their pace."""

    timeline: TimelineConfig = Field(default_factory=TimelineConfig)
    """Timelines of chosen steps."""

    profile: ProfileConfig = Field(default_factory=ProfileConfig)
    """Profiles of chosen steps."""

    plot: bool = True
    """Write `loss.png` to the run folder at the end."""

    report: bool = True
    """Write `report.html` to the run folder at the end: one page with all figures, which needs no network."""

    wandb: WandbConfig = Field(default_factory=WandbConfig)
    """Weights & Biases."""

    tensorboard: bool = False
    """Write curves for TensorBoard to the run folder's `tensorboard`. Needs `pip install megalite[tensorboard]`."""

    trackio: TrackioConfig = Field(default_factory=TrackioConfig)
    """trackio."""

    prometheus: PrometheusConfig = Field(default_factory=PrometheusConfig)
    """Metrics for Prometheus."""


class LaunchConfig(Section):
    """Process settings of ranks; none of them changes a result."""

    threads_per_rank: PositiveInt | Literal["auto"] = "auto"
    """Compute threads of one rank; `auto` divides this machine's cores among its ranks."""

    malloc_tunables: bool = True
    """Let glibc's malloc keep freed memory instead of returning it: fewer page faults, faster steps."""

    spin_threads: Literal["auto"] | bool = "auto"
    """OpenMP threads spin between parallel regions; `auto`: only when ranks x threads fit the cores."""

    interface: Annotated[str, Field(pattern=r"^[^\s/:,=^]{1,15}$", examples=["eth0"])] = "auto"
    """Network interface of ranks on several hosts, by the same name on each; `auto`: the one on the way to rank 0."""
