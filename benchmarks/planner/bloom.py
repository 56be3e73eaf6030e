"""BLOOM's published topology sweep: would the planner have chosen the layouts that were found to be fast?

In: benchmarks/published/bloom_topology_sweep_first_days.csv (its rows name their source). Out: a row per group of runs
of one model on as many nodes. `WAITED_LAUNCHES` of cost/step_time.py was chosen on the first day's groups
(02-20); those of the second day are held against it. Where a group has fewer than `LEAST_RANKED` runs its rank
correlation is shown and not held: two of three such runs differ by less than 1 %.

What the CSV does not hold, from the same page (chronicles-prequel.md): 96 heads at a hidden size of 14400, 64 at the
others; CUDA_LAUNCH_BLOCKING=1, without which runs on 320 GPUs hung. From the code of those days: Megatron-DeepSpeed's
stages of equally many blocks, boundary tensors that are sent in parts, bf16 with fp32 sums of gradients and ZeRO-1.
Layers that are not printed follow from the TFLOPs, which were 8 x size x tokens / time.

`python -m benchmarks.planner.bloom` prints the groups.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.planner.published import MEGATRON_2021, Row, gpt, read
from megalite.planner.cost.step_time import step_time
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of
from megalite.planner.workload import ParallelLayout, Stack, TrainingWorkload

TABLE = "bloom_topology_sweep_first_days"
DEFECTIVE = {
    "648": "its sizes do not multiply to its GPUs",
    "669": "seconds and TFLOPs are swapped",
    "775": "an outlier",
}
LEAST_RANKED = 4
ALONE = {"658", "659", "660"}  # one layout on one node: nothing to choose from
MEGATRON_DEEPSPEED = Stack(
    "Megatron-DeepSpeed of 2022",
    attention=MEGATRON_2021.attention,
    cuts_boundary_tensors=True,
    waits_for_messages=True,
    balances_stages=False,
    stops_recompute_early=False,
    replicas="deepspeed_2022",
    waits_for_launches=True,
)
HEADS = {14400: 96, 13824: 64, 14336: 64}
SEQUENCE_LENGTH, VOCABULARY = 2048, 250880


@dataclass(frozen=True)
class Run:
    """One published run."""

    line: str
    job: TrainingWorkload
    cluster: Cluster
    seconds: float  # of a step, measured
    block_flops: float  # of a step and accelerator

    @property
    def measured(self) -> float:
        """Operations of the blocks per accelerator and second."""
        return self.block_flops / self.seconds

    @property
    def predicted(self) -> float:
        return self.block_flops / step_time(self.job, self.cluster).seconds


@dataclass(frozen=True)
class Group:
    """Quality of the planner's ranking of runs that somebody had to choose among."""

    name: str
    day: str
    runs: int
    chosen: str  # the planner's choice
    fastest: str  # what was found to be
    regret: float  # part of the fastest run's speed that the planner's choice lacks
    spearman: float  # rank correlation of predicted and measured speeds
    time_error: float  # mean, absolute, of the steps


def groups() -> list[Group]:
    """In the order of the table."""
    by_name: dict[tuple[str, str], dict[TrainingWorkload, Run]] = {}
    for row in read(TABLE):
        if row["md_line"] not in DEFECTIVE.keys() | ALONE:
            one = run_of(row)
            name = f"{row['size']}, hidden {row['hidden']}, {row['nodes']} nodes"
            by_name.setdefault((name, row["date"]), {}).setdefault(one.job, one)  # the source repeats some
    return [judge(*key, list(runs.values())) for key, runs in by_name.items() if len(runs) > 1]


def judge(name: str, day: str, runs: Sequence[Run]) -> Group:
    """`runs` are of one group."""
    predicted, measured = [run.predicted for run in runs], [run.measured for run in runs]
    chosen = runs[max(range(len(runs)), key=predicted.__getitem__)]
    fastest = max(runs, key=lambda run: run.measured)
    errors = [abs(run.measured / speed - 1) for run, speed in zip(runs, predicted, strict=True)]
    return Group(
        name=name,
        day=day,
        runs=len(runs),
        chosen=str(chosen.job.layout),
        fastest=str(fastest.job.layout),
        regret=1 - chosen.measured / fastest.measured,
        spearman=spearman(predicted, measured),
        time_error=statistics.mean(errors),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """The correlation of the ranks; equal numbers share the mean of theirs."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(numbers: Sequence[float]) -> list[float]:
    ordered = sorted(numbers)
    return [ordered.index(number) + (ordered.count(number) + 1) / 2 for number in numbers]


def run_of(row: Row) -> Run:
    """A row as a job."""
    hidden, nodes, batch = int(row["hidden"]), int(row["nodes"]), int(row["GBS"])
    accelerators, seconds = 8 * nodes, float(row["sec_per_it"])
    tokens = batch * SEQUENCE_LENGTH
    per_layer = 12 * hidden**2
    implied = float(row["tflops_per_gpu"]) * 1e12 * seconds * accelerators / (8 * tokens * per_layer)
    layers = int(row["layers"] or round(implied))
    tensor, pipeline = int(row["TP"]), int(row["PP"])
    layout = ParallelLayout(
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        data_parallel_size=accelerators // (tensor * pipeline),
        zero_stage=int(row["zero"]),
        recompute="full",
        micro_batch_size=int(row["MBS"]),
    )
    model = gpt(hidden, layers, int(row["heads"] or HEADS[hidden]), VOCABULARY)
    job = TrainingWorkload(model, layout, SEQUENCE_LENGTH, batch, "bf16", "fp32", "bf16", stack=MEGATRON_DEEPSPEED)
    return Run(row["md_line"], job, jean_zay(nodes), seconds, 8 * per_layer * layers * tokens / accelerators)


def jean_zay(nodes: int) -> Cluster:
    """Nodes of eight A100 and four adapters of Omni-Path."""
    described = ClusterFile(
        accelerator="A100-80GB", nodes=nodes, accelerators_per_node=8, adapters_per_node=4, inter_node="Omni-Path 100"
    )
    return cluster_of(described, "Jean Zay")


def main() -> None:
    """The groups as a table."""
    for group in groups():
        print(
            f"{group.name}: {group.runs} runs, regret {group.regret:.1%}, Spearman {group.spearman:.2f}, "
            f"mean error {group.time_error:.1%}; chosen {group.chosen}; fastest {group.fastest}"
        )


if __name__ == "__main__":
    main()
