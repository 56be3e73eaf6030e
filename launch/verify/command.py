"""`megalite verify` from a config to a verdict: what is run, in which order, and what is said.

In: a config and the command's options. Out: a `Report`, printed as a table or JSON. Torch is imported only once
something is to be computed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from launch.devices import Device, gpu_count
from launch.errors import LaunchError
from launch.local import rank_environment
from launch.verify.diagnosis import Diagnosis, Verdict, diagnose
from launch.verify.judge import Answer, judge
from launch.verify.layout import Layout, auto_layouts, layout_of, parse_layouts
from launch.verify.observations import COPIES, FIRST_STEP, NEAR_CHOICES, Block, Observations, assemble
from launch.verify.problem import FP16_SCALE_POWER, Dtype, Problem, Training, make_problem
from launch.warm_ranks import RankFailure, run_ranks, warm_up
from megalite.config import Config, ConfigError
from megalite.config.auto import PLACEHOLDERS
from megalite.config.known_bad import installed_versions, matching
from models.families import family

MOST_CPU_RANKS = 8
MOST_DRAWS, MOST_NEAR_CHOICES = 20, 10  # where more choices of experts are near, all draws have some


@dataclass(frozen=True)
class Plan:
    """What will be run."""

    problem: Problem
    layouts: tuple[Layout, ...]
    left_out: tuple[str, ...]  # layouts that cannot be run, and why
    dtypes: tuple[Dtype, ...]
    reference: str
    device: Device
    timeout_s: float


@dataclass(frozen=True)
class Report:
    """What came of it."""

    plan: Plan
    verdicts: tuple[Verdict, ...]
    diagnoses: tuple[Diagnosis, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)


def make_plan(
    config: Config,
    *,
    layouts: str = "auto",
    reference: str = "transformers",
    steps: int = 3,
    full: bool = False,
    seed: int | None = None,
    timeout_s: float = 120.0,
) -> Plan:
    """Checks everything that can be checked before a process is started. Raises ConfigError or LaunchError."""
    if reference == "transformers":
        family(config.model.model_type).check(config.model)
    config = config.settled({path: PLACEHOLDERS[path] for path in config.open})  # any layout of it must be right
    gpus = gpu_count()
    device: Device = "cuda" if gpus else "cpu"
    most = gpus or MOST_CPU_RANKS
    too_large: list[str] = []
    is_auto = layouts.strip().lower() == "auto"
    if is_auto:
        wanted, too_large = auto_layouts(_own_layout(config, gpus), most)
    else:
        wanted = parse_layouts(layouts)
        for layout in wanted:
            if layout.world_size > most:
                raise LaunchError(
                    f"--layouts: {layout} needs {layout.world_size} ranks, and {most} fit on this machine's {device}"
                )
    problem = make_problem(
        config,
        wanted,
        seed=int(np.random.SeedSequence().entropy % 2**31) if seed is None else seed,  # type: ignore[operator]
        steps=steps,
        full=full,
        keep_dropout=reference == "self",
    )
    runnable, left_out = _legal(problem, wanted, strict=not is_auto)
    if not runnable:
        raise LaunchError(f"none of the layouts can be run, for example {left_out[0]}")
    dtype = config.precision.dtype
    if dtype == "fp16" and device == "cpu":
        raise ConfigError("precision.dtype fp16 needs a GPU, but this machine has none: use bf16 or fp32")
    dtypes = tuple(dict.fromkeys(("fp32", dtype)))
    return Plan(problem, runnable, (*too_large, *left_out), dtypes, reference, device, timeout_s)


def _own_layout(config: Config, gpus: int) -> Layout:
    return layout_of(config, config.world_size_wanted(gpus or None))


def _legal(problem: Problem, wanted: Sequence[Layout], *, strict: bool) -> tuple[tuple[Layout, ...], tuple[str, ...]]:
    """The layouts that this model can have; where the user asked for them, one that it cannot is a mistake."""
    runnable, left_out = [], []
    for layout in wanted:
        try:
            layout.config(problem.config)
        except ConfigError as error:
            if strict:
                raise LaunchError(f"--layouts: {layout}: {error}") from None
            left_out.append(f"{layout}: {error}")
        else:
            runnable.append(layout)
    return tuple(runnable), tuple(left_out)


def verify(plan: Plan, say: Callable[[str], None]) -> Report:
    """Runs the plan; `say` hears of progress."""
    started = time.monotonic()
    environment, _ = rank_environment(
        plan.problem.config.launch, max(layout.world_size for layout in plan.layouts), plan.device == "cuda"
    )
    # so that looking for GPUs starts no CUDA in the server, which could not be forked then
    warm_up(environment | {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"})
    verdicts, diagnoses = [], []
    asked = plan.problem.config.model.num_experts_per_tok
    for dtype in plan.dtypes:
        say(f"reference: {plan.reference} in float64 and {dtype} on one process")
        session = Session(References(plan, dtype), plan.timeout_s)
        if (chosen := session.references.problem.config.model.num_experts_per_tok) != asked:
            say(f"{dtype}: each token goes to all {chosen} experts, because rounding would decide to which {asked}")
        if near := session.references.near_choices:
            say(f"{near} choices of experts are so near that rounding may decide: one that differs shows as an error")
        for index, layout in enumerate(plan.layouts, start=1):
            verdict = session.run(layout)
            verdicts.append(verdict)
            outcome = "pass" if verdict.passed else "FAIL"
            say(f"[{index}/{len(plan.layouts)}] {dtype} {layout}: {outcome} ({verdict.seconds:.1f} s)")
        diagnoses += session.explain([v for v in verdicts if v.dtype == dtype and not v.passed], say)
    return Report(plan, tuple(verdicts), tuple(diagnoses), time.monotonic() - started)


def _solve(rank: int, problem: Problem, layout: Layout, trainings: Sequence[Training]) -> list[Block]:
    from launch.verify.rank import solve  # DeepSpeed: only ranks need it

    return solve(rank, problem, layout, trainings)


class References:
    """What is right, in one number format: computed on one process, each answer once."""

    def __init__(self, plan: Plan, dtype: Dtype) -> None:
        from launch.verify import reference, reference_models

        self._solve, self.device, self.dtype = reference.solve, plan.device, dtype
        is_ours = plan.reference == "self"
        self._kind = reference_models.SerialReference if is_ours else reference_models.TransformersModel
        self.problem = _in_dtype(plan.problem, dtype)
        self._start = reference_models.initial_weights(self.problem)
        self._answers: dict[int, Answer] = {}
        for draw in range(MOST_DRAWS):
            self.problem = replace(self.problem, draw=draw)
            settings = reference.sgd_settings(self._kind, self.problem, plan.device)
            self.trainings = (self.problem.training(), self.problem.sgd(*settings))
            self._truth = self._solutions("fp64", 1)
            if not self.near_choices or (draw == 0 and self.near_choices > MOST_NEAR_CHOICES):
                break

    @property
    def near_choices(self) -> int:
        """Choices of experts that may be others in float32 than in float64, of all forward passes.

        Batches are drawn anew until there are none. Of a large model there are always some.
        """
        counts = (arrays["all"].item() for quantity, arrays in self._truth.items() if quantity.kind == NEAR_CHOICES)
        return sum(counts)

    def answer(self, accumulation: int) -> Answer:
        """For a layout; in half precision the reference sums as many micro-batches as it does."""
        parts = 1 if self.dtype == "fp32" else accumulation
        if parts not in self._answers:
            self._answers[parts] = Answer(self.dtype, self._truth, self._solutions(self.dtype, parts), self._start)
        return self._answers[parts]

    def _solutions(self, dtype: Dtype, accumulation: int) -> Observations:
        solutions: Observations = {}
        for training in self.trainings:
            solutions |= self._solve(self._kind, self.problem, training, dtype, self.device, accumulation)
        return solutions


@dataclass
class Session:
    """Layouts against the references: each run once."""

    references: References
    timeout_s: float
    solve: Callable[..., list[Block]] = _solve  # what ranks run
    _verdicts: dict[Layout, Verdict] = field(default_factory=dict)

    def run(self, layout: Layout) -> Verdict:
        """The verdict on a layout."""
        if layout not in self._verdicts:
            self._verdicts[layout] = self._run(layout)
        return self._verdicts[layout]

    def _run(self, layout: Layout) -> Verdict:
        started = time.monotonic()
        dtype, problem, trainings = self.references.dtype, self.references.problem, self.references.trainings
        try:
            ranks = run_ranks(self.solve, layout.world_size, problem, layout, trainings, timeout_s=self.timeout_s)
        except RankFailure as failure:
            seconds = time.monotonic() - started
            return Verdict(layout, dtype, seconds, crash=str(failure), traceback=failure.rank_traceback)
        return self.judged(layout, ranks, time.monotonic() - started)

    def judged(self, layout: Layout, ranks: Sequence[Iterable[Block]], seconds: float) -> Verdict:
        """The verdict on what the ranks of a layout observed."""
        seen, disagreements = assemble(ranks)
        disagreements += [sentence for quantity in seen if quantity.kind == COPIES for sentence in seen[quantity]]
        findings = judge(seen, self.references.answer(layout.accumulation))
        norms = {q.training: float(v[FIRST_STEP][0]) for q, v in seen.items() if q.kind == "gradient norm"}
        return Verdict(layout, self.references.dtype, seconds, tuple(findings), tuple(disagreements), first_norms=norms)

    def explain(self, failed: Sequence[Verdict], say: Callable[[str], None]) -> list[Diagnosis]:
        """A diagnosis for every failure that an earlier one does not explain, smallest layouts first."""
        diagnoses: list[Diagnosis] = []
        for verdict in sorted(failed, key=lambda v: (len(v.layout.axes), v.layout.world_size)):
            if not any(diagnosis.explains(verdict.layout) for diagnosis in diagnoses):
                say(f"looking for the cause of {verdict.layout}")
                answer = self.references.answer(verdict.layout.accumulation)
                diagnoses.append(diagnose(verdict, self.run, answer, self._known_bad))
        return diagnoses

    def _known_bad(self, layout: Layout) -> list[str]:
        return known_bad(layout, self.references.problem.config, self.references.device)


def known_bad(layout: Layout, config: Config, device: Device) -> list[str]:
    """What is publicly known to go wrong with the installed versions and these settings."""
    config, versions = layout.config(config), installed_versions()
    resolved = config.check_world(layout.world_size, device)
    rows = matching(config, resolved, versions, device)
    return [f"{row.sentence(config, resolved, versions)}, {row.url}" for row in rows]


def _in_dtype(problem: Problem, dtype: str) -> Problem:
    values = problem.config.model_dump(mode="json")
    if dtype != values["precision"]["dtype"]:
        values["precision"] |= {"dtype": dtype, "gradient_accumulation_dtype": "fp32"}
    if dtype == "fp16":
        values["deepspeed"].setdefault("fp16", {})["initial_scale_power"] = FP16_SCALE_POWER
    else:
        values["deepspeed"].pop("fp16", None)
    if dtype != "fp32" and values["model"]["num_experts"]:  # some of a hundred tokens would go elsewhere in each layer
        values["model"]["num_experts_per_tok"] = values["model"]["num_experts"]
    return replace(problem, config=Config.model_validate(values))
