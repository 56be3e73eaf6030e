"""Runs `megalite verify`: plans the layouts, runs them and the references, compares and diagnoses.

In: a config and the command's options. Out: a `ParityReport`, printed as a table or JSON. Torch is imported only when
something is computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from launch.errors import LaunchError
from launch.output import console, spinner
from launch.parity.comparison import ReferenceAnswer, compare, compare_float8, reduction_bound, reduction_deviations
from launch.parity.diagnosis import Diagnosis, LayoutResult, diagnose
from launch.parity.forked_ranks import RankFailure, run_ranks, warm_up
from launch.parity.layout import ParityLayout, auto_layouts, layout_of, micro_batches, parse_layouts
from launch.parity.observations import COPIES, FIRST_STEP, NEAR_CHOICES, ArrayBlock, Observations, assemble
from launch.parity.problem import FP16_SCALE_POWER, Dtype, ParityProblem, Training, make_problem
from launch.runtime.devices import Device, gpu_count
from launch.runtime.local_ranks import rank_settings
from megalite.config import Config, ConfigError, resolve_layout, wanted_world_size
from megalite.config.auto import PIPELINE, PLACEHOLDERS
from megalite.config.batch_stages import shapes_of
from megalite.config.rules.float8 import check_float8_package
from megalite.config.rules.known_bad import installed_versions, matching
from megalite.config.suggestions import OptionPath
from megalite.units import plural
from models.families import family

MOST_CPU_RANKS = 8
COMPILATION_S = 300.0  # more time for a layout with compiled blocks: each rank calls a compiler some four times
MOST_DRAWS, MOST_NEAR_CHOICES = 20, 10  # with more near choices of experts, all draws have some


@dataclass(frozen=True)
class Plan:
    """The layouts to run, and the problem that they solve."""

    problem: ParityProblem
    layouts: tuple[ParityLayout, ...]
    left_out: tuple[str, ...]  # layouts that cannot be run, with reasons
    dtypes: tuple[Dtype, ...]
    reference: str
    device: Device
    timeout_s: float


@dataclass(frozen=True)
class ParityReport:
    """The results of all layouts, and the causes of failures."""

    plan: Plan
    results: tuple[LayoutResult, ...]
    diagnoses: tuple[Diagnosis, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(result.passed for result in self.results)


def make_plan(
    config: Config,
    *,
    layouts: str = "auto",
    reference: str = "transformers",
    steps: int = 3,
    full: bool = False,
    seed: int | None = None,
    timeout_s: float = 120.0,
    deep: bool = False,
) -> Plan:
    """Checks everything that does not need another process. Raises ConfigError or LaunchError."""
    if reference == "transformers":
        family(config.model.model_type).check(config.model)
    config = config.with_resolved(_fewest_ranks(config))
    gpus = gpu_count()
    device: Device = "cuda" if gpus else "cpu"
    most = gpus or MOST_CPU_RANKS
    too_large: list[str] = []
    is_auto = layouts.strip().lower() == "auto"
    own = layout_of(config, wanted_world_size(config, gpus or None))
    if is_auto and not deep:
        wanted, too_large = auto_layouts(own, most, config.model.num_experts is not None)
    else:
        wanted = [own] if is_auto else parse_layouts(layouts)
        if larger := [layout for layout in wanted if layout.world_size > most]:
            fit = f"ranks, and {most} fit on this machine's {device}"
            what = "--deep, whose layout is the config's own" if is_auto else "--layouts"
            advice = ": name a smaller one with --layouts, or run it where they fit" if is_auto else ""
            raise LaunchError(*(f"{what}: {layout} needs {layout.world_size} {fit}{advice}" for layout in larger))
    wanted = [replace(each, compile=config.performance.compile) if each.compile == "auto" else each for each in wanted]
    problem = make_problem(
        config,
        wanted,
        seed=int(np.random.SeedSequence().entropy % 2**31) if seed is None else seed,  # type: ignore[operator]
        steps=steps,
        full=full,
        keep_dropout=reference == "self",
        counts=[shape.micro_batches(own.dp) for shape in shapes_of(config.training)] if deep else (),
    )
    runnable, left_out = _legal(problem, wanted)
    if left_out and (deep or not is_auto):
        raise LaunchError(*(f"--layouts: {reason}" for reason in left_out))
    if not runnable:
        raise LaunchError(f"none of the layouts can be run, for example {left_out[0]}")
    dtype = config.precision.dtype
    dtypes: tuple[Dtype, ...] = tuple(dict.fromkeys(("fp32", dtype)))
    if config.precision.float8 != "none":
        check_float8_package(config)
        dtypes = (*dtypes, "float8")
    return Plan(problem, runnable, (*too_large, *left_out), dtypes, reference, device, timeout_s)


def _fewest_ranks(config: Config) -> dict[OptionPath, Any]:
    """Returns the simplest values of options that are `auto`, which may resolve to any: all of them must be right. A
    stated schedule has two stages, and a list of modes as many as it has entries."""
    values = {path: PLACEHOLDERS[path] for path in config.unresolved_options}
    if PIPELINE in values:
        modes, has_schedule = config.recompute.mode, config.parallel.pipeline_schedule != "1f1b"
        values[PIPELINE] = max(1 + has_schedule, 1 if isinstance(modes, str) else len(modes))
    return values


def _legal(problem: ParityProblem, wanted: Sequence[ParityLayout]) -> tuple[tuple[ParityLayout, ...], tuple[str, ...]]:
    """Returns the possible layouts, and a sentence for each of the others."""
    runnable, left_out = [], []
    for layout in wanted:
        try:
            layout.config(problem.config)
        except ConfigError as error:
            left_out.append(f"{layout}: {error}")
        else:
            runnable.append(layout)
    return tuple(runnable), tuple(left_out)


def verify(plan: Plan) -> ParityReport:
    """Runs the plan; prints progress to stderr, of what takes long every 10 s."""
    started = time.monotonic()
    environment, _ = rank_settings(
        plan.problem.config.launch, max(layout.world_size for layout in plan.layouts), plan.device == "cuda"
    )
    # looking for GPUs must not initialize CUDA in the fork server, which could not fork afterwards
    warm_up(environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    results, diagnoses, log = [], [], console(stderr=True).print
    wanted = plan.problem.config.model.num_experts_per_tok
    for dtype in plan.dtypes:
        log(f"reference: {plan.reference} in float64 and {dtype} on one process")
        with spinner(f"loading PyTorch and computing the reference in float64 and {dtype}"):
            session = Session(References(plan, dtype), plan.timeout_s)
            session.references.answer(plan.layouts[0].accumulation)  # here, or it would count as the layout's time
        if (experts := session.references.problem.config.model.num_experts_per_tok) != wanted:
            log(f"{dtype}: each token goes to all {experts} experts, because rounding would decide to which {wanted}")
        if dtype == "fp16" and plan.device == "cpu":
            from megalite.parallel.linear import why_fp16_is_slow  # with PyTorch, which the reference has loaded

            if notice := why_fp16_is_slow():
                log(notice)
        if near := session.references.near_choices:
            log(f"{near} choices of experts are so near that rounding may decide: one that differs shows as an error")
        for index, layout in enumerate(plan.layouts, start=1):
            name = f"[{index}/{len(plan.layouts)}] {dtype} {layout}"
            with spinner(f"{name}: starting {plural(layout.world_size, 'rank')}, training and comparing"):
                result = session.run(layout)
            results.append(result)
            log(f"{name}: {'pass' if result.passed else 'FAIL'} ({result.seconds:.1f} s)")
        diagnoses += session.explain([result for result in results if result.dtype == dtype and not result.passed])
    return ParityReport(plan, tuple(results), tuple(diagnoses), time.monotonic() - started)


def _solve(rank: int, problem: ParityProblem, layout: ParityLayout, trainings: Sequence[Training]) -> list[ArrayBlock]:
    from launch.parity.rank import solve  # DeepSpeed: only ranks need it

    return solve(rank, problem, layout, trainings)


class References:
    """Reference answers in one number format, computed on one process, each once."""

    def __init__(self, plan: Plan, dtype: Dtype) -> None:
        from launch.parity import reference
        from launch.reference import models as reference_models

        self._solve, self.device, self.dtype = reference.solve, plan.device, dtype
        is_ours = plan.reference == "self"
        self._kind = reference_models.SerialReference if is_ours else reference_models.TransformersModel
        self.problem = _in_dtype(plan.problem, dtype)
        self._start = reference_models.initial_weights(self.problem)
        self._answers: dict[int, ReferenceAnswer] = {}
        for draw in range(MOST_DRAWS):
            self.problem = replace(self.problem, draw=draw)
            settings = reference.sgd_settings(self._kind, self.problem, plan.device)
            self.trainings = (self.problem.training(), self.problem.sgd(*settings))
            self._truth = self._solutions("fp64", 1)
            if not self.near_choices or (draw == 0 and self.near_choices > MOST_NEAR_CHOICES):
                break

    @property
    def near_choices(self) -> int:
        """The number of choices of experts in all forward passes that may differ between float32 and float64.

        Batches are drawn again until there are none. A large model always has some.
        """
        counts = (arrays["all"].item() for quantity, arrays in self._truth.items() if quantity.kind == NEAR_CHOICES)
        return sum(counts)

    def answer(self, accumulation: int) -> ReferenceAnswer:
        """Returns the answer for a layout; in half precision the reference accumulates as many micro-batches."""
        parts = 1 if self.dtype == "fp32" else accumulation
        if parts not in self._answers:
            self._answers[parts] = ReferenceAnswer(
                self.dtype,
                self._truth,
                self._solutions(self.dtype, parts),
                self._start,
                self.problem.config.optimizer.moments_dtype,
            )
        return self._answers[parts]

    def _solutions(self, dtype: Dtype, accumulation: int) -> Observations:
        solutions: Observations = {}
        for training in self.trainings:
            solutions |= self._solve(self._kind, self.problem, training, dtype, self.device, accumulation)
        return solutions


@dataclass
class Session:
    """Compares layouts with the references, running each layout once."""

    references: References
    timeout_s: float
    solve: Callable[..., list[ArrayBlock]] = _solve  # what ranks run
    _results: dict[ParityLayout, LayoutResult] = field(default_factory=dict)

    def run(self, layout: ParityLayout) -> LayoutResult:
        """Returns the result of a layout."""
        if layout not in self._results:
            started, references = time.monotonic(), self.references
            work = (self.solve, layout.world_size, references.problem, layout, references.trainings)
            limit_s = self.timeout_s + (COMPILATION_S if layout.compile == "blocks" else 0.0)
            try:
                ranks = run_ranks(*work, timeout_s=limit_s)
                self._results[layout] = self.compared(layout, ranks, time.monotonic() - started)
            except RankFailure as failure:
                seconds, trace = time.monotonic() - started, failure.rank_traceback
                self._results[layout] = LayoutResult(
                    layout, references.dtype, seconds, crash=str(failure), traceback=trace
                )
        return self._results[layout]

    def compared(self, layout: ParityLayout, ranks: Sequence[Iterable[ArrayBlock]], seconds: float) -> LayoutResult:
        """Compares the observations of the ranks of a layout."""
        seen, disagreements = assemble(ranks)
        disagreements += [sentence for quantity in seen if quantity.kind == COPIES for sentence in seen[quantity]]
        compared = compare_float8 if self.references.dtype == "float8" else compare
        deviations = compared(seen, self.references.answer(layout.accumulation))
        config = self.references.problem.config
        most = layout.dp * max(micro_batches(config.training, layout.accumulation))
        deviations += reduction_deviations(seen, reduction_bound(config.precision, most))
        norms = {q.training: float(v[FIRST_STEP][0]) for q, v in seen.items() if q.kind == "gradient norm"}
        return LayoutResult(
            layout, self.references.dtype, seconds, tuple(deviations), tuple(disagreements), first_norms=norms
        )

    def explain(self, failed: Sequence[LayoutResult]) -> list[Diagnosis]:
        """Diagnoses every failure that an earlier diagnosis does not explain, smallest layouts first."""
        diagnoses: list[Diagnosis] = []
        for result in sorted(failed, key=lambda result: (len(result.layout.axes), result.layout.world_size)):
            layout = result.layout
            if not any(diagnosis.explains(layout) for diagnosis in diagnoses):
                console(stderr=True).print(f"looking for the cause of {layout}")
                known = known_bad(layout, self.references.problem.config, self.references.device)
                with spinner(f"running parts of {layout}"):
                    diagnoses.append(diagnose(result, self.run, self.references.answer(layout.accumulation), known))
        return diagnoses


def known_bad(layout: ParityLayout, config: Config, device: Device) -> list[str]:
    """Returns publicly known defects of the installed versions with these settings."""
    config, versions = layout.config(config), installed_versions()
    resolved = resolve_layout(config, layout.world_size, device)
    rows = matching(config, resolved, versions, device)
    return [f"{row.sentence(config, resolved, versions)}, {row.url}" for row in rows]


def _in_dtype(problem: ParityProblem, dtype: str) -> ParityProblem:
    """Returns the problem in one number format; in `float8` it stays as the config has it."""
    values = problem.config.model_dump(mode="json")
    if dtype == "float8":
        dtype = values["precision"]["dtype"]
    else:
        values["precision"]["float8"] = "none"
    if dtype != values["precision"]["dtype"]:
        values["precision"] |= {"dtype": dtype, "gradient_accumulation_dtype": "fp32", "gradient_reduction_dtype": None}
    if dtype == "fp16":
        values["deepspeed"].setdefault("fp16", {})["initial_scale_power"] = FP16_SCALE_POWER
    else:
        values["deepspeed"].pop("fp16", None)
    if dtype != "fp32" and values["model"]["num_experts"]:  # rounding would route some of a hundred tokens elsewhere
        values["model"] |= {"num_experts_per_tok": values["model"]["num_experts"], "n_group": 1, "topk_group": 1}
    return replace(problem, config=Config.model_validate(values))
