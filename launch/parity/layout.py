"""Layouts of `megalite verify`: parsing, validation, and the default selection.

In: a config, text such as `tp=2,pp=2,zero=1`. Out: `ParityLayout`s, and configs that request them. Does not import
torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from typing import Any, get_args

from launch.errors import LaunchError
from megalite.config import Config, ConfigError, resolve_layout
from megalite.config.batch_stages import shapes_of
from megalite.config.rules.pipeline import FEWEST_CHUNKS, problems_with_schedule
from megalite.config.sections import ContextParallelKind, PipelineSchedule, RecomputeMode, TrainingConfig
from megalite.config.suggestions import nearest_name
from megalite.planner.workload import recompute_in_short


@dataclass(frozen=True, order=True)
class ParityLayout:
    """Parallel layout on the axes that must not change a result; the defaults are one process."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    zero: int = 1
    sequence_parallel: bool = False
    recompute: str = "none"  # or a mode for each pipeline stage: full/none
    accumulation: int = 1  # micro-batches per step on one replica
    schedule: PipelineSchedule = "1f1b"
    chunks: int = 0  # pieces of the model on each pipeline stage; 0: as few as the schedule has
    compile: str = "auto"  # or blocks, or none
    cp: int = 1
    cp_kind: str = "auto"  # or all_gather, or ulysses
    ep: int = 1

    @property
    def pieces(self) -> int:
        """The number of pieces that the model is cut into."""
        return self.pp * (self.chunks or FEWEST_CHUNKS[self.schedule])

    @property
    def world_size(self) -> int:
        return self.tp * self.pp * self.dp * self.cp

    @property
    def axes(self) -> dict[str, Any]:
        """The axes that differ from their defaults, with their values."""
        return {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}

    @property
    def axes_on(self) -> dict[str, Any]:
        """The axes that `without` would change, except those at their defaults."""
        return {axis: value for axis, value in self.axes.items() if value != _OFF[axis]}

    def without(self, *axes: str) -> ParityLayout:
        """Returns the layout with these axes off, and with them what needs them: without tensor parallelism there is no
        sequence parallelism, without replicas no expert parallelism, and a schedule needs stages and enough
        micro-batches."""
        off = replace(self, **{axis: _OFF[axis] for axis in axes})
        if off.dp * off.cp % off.ep:
            off = replace(off, ep=1)
        if off.pp == 1 or "schedule" in axes or not off.allows(off.accumulation):
            off = replace(off, schedule=_DEFAULTS["schedule"], chunks=_DEFAULTS["chunks"])
        if off.pp != self.pp and "/" in off.recompute:
            off = replace(off, recompute=_DEFAULTS["recompute"])
        return replace(off, sequence_parallel=False) if off.tp == 1 else off

    def allows(self, micro_batches: int) -> bool:
        """True if the pipeline's schedule takes that many micro-batches."""
        return not any(problems_with_schedule(self.schedule, self.pp, self.pieces // self.pp, micro_batches))

    def __str__(self) -> str:
        return ",".join(name if value is True else f"{name}={value}" for name, value in self.axes.items()) or "tp=1"

    def config(self, base: Config) -> Config:
        """Returns `base` with this layout and the same global batch. Raises ConfigError if that is impossible."""
        values = base.model_dump(mode="json", exclude_unset=True)
        values["parallel"] = {
            "tensor_parallel_size": self.tp,
            "pipeline_parallel_size": self.pp,
            "data_parallel_size": self.dp,
            "context_parallel_size": self.cp,
            "context_parallel_kind": self.cp_kind,
            "expert_parallel_size": self.ep,
            "sequence_parallel": self.sequence_parallel,
            "zero_stage": self.zero,
            "pipeline_schedule": self.schedule,
            "pipeline_chunks": self.chunks or None,
            "gradient_bucket_size": base.parallel.gradient_bucket_size,
        }
        values["recompute"] = {"mode": self.recompute.split("/") if "/" in self.recompute else self.recompute}
        is_split = base.performance.symmetric_memory and self.sequence_parallel and self.compile != "none"
        performance = {"compile": self.compile, "symmetric_memory": is_split}
        values["performance"] = values.get("performance", {}) | performance
        sizes = []
        for shape, count in zip(shapes_of(base.training), micro_batches(base.training, self.accumulation), strict=True):
            batch, parts = shape.global_batch_size, self.dp * count
            if batch % parts:
                raise ConfigError(f"a global batch of {batch} cannot be cut into {parts} micro-batches")
            sizes.append({"micro_batch_size": batch // parts})
        first, *others = sizes
        stages = [stage | size for stage, size in zip(values["training"].get("stages", []), others, strict=True)]
        values["training"] = values["training"] | first | {"stages": stages}
        config = Config.model_validate(values)
        resolve_layout(config, self.world_size, "cuda")  # the command checks the device, once
        return config


def micro_batches(training: TrainingConfig, accumulation: int) -> list[int]:
    """Returns the micro-batches of a step on one replica in each batch shape of a problem, in a layout that has
    `accumulation` of them in the first: those of the config's own layout, which the problem states, or all alike."""
    own = [shape.micro_batches(1) for shape in shapes_of(training)]
    return [count if accumulation == own[0] else accumulation for count in own]


_DEFAULTS: dict[str, Any] = {f.name: f.default for f in fields(ParityLayout)}
_OFF = _DEFAULTS | {"compile": "none"}  # auto compiles on GPUs


def layout_of(config: Config, world_size: int) -> ParityLayout:
    """Returns the layout that a config requests on `world_size` processes."""
    resolved = resolve_layout(config, world_size, "cuda")
    chunks = resolved.pipeline_chunks
    return ParityLayout(
        tp=resolved.tensor_parallel_size,
        pp=resolved.pipeline_parallel_size,
        dp=resolved.data_parallel_size,
        cp=resolved.context_parallel_size,
        ep=resolved.expert_parallel_size,
        zero=resolved.zero_stage,
        sequence_parallel=config.parallel.sequence_parallel,
        recompute=recompute_in_short(config.recompute.mode),
        accumulation=resolved.gradient_accumulation_steps,
        schedule=resolved.pipeline_schedule,
        chunks=0 if chunks == FEWEST_CHUNKS[resolved.pipeline_schedule] else chunks,
        cp_kind=config.parallel.context_parallel_kind,
        compile=config.performance.compile,
    )


def parse_layouts(text: str) -> list[ParityLayout]:
    """Parses `"tp=2,zero=1;pp=2,sequence_parallel"`. Raises LaunchError with a sentence for each mistake."""
    parsed = [_parse(entry) for entry in text.split(";") if entry.strip(" ,")]
    if not parsed:
        raise LaunchError('--layouts is empty: give "auto", or layouts such as "tp=2,pp=2;dp=2,zero=3"')
    if problems := [problem for _, problems in parsed for problem in problems]:
        raise LaunchError(*dict.fromkeys(problems))
    return list(dict.fromkeys(ParityLayout(**values) for values, _ in parsed))


def _parse(entry: str) -> tuple[dict[str, Any], list[str]]:
    """Returns the values of one layout, and what is wrong with it."""
    values: dict[str, Any] = {}
    problems: list[str] = []
    for word in entry.replace(",", " ").split():
        name, _, value = word.partition("=")
        if name not in _DEFAULTS:
            problems.append(_unknown(name, word))
        elif name in values:
            problems.append(f'--layouts: "{entry.strip()}" gives {name} twice')
        else:
            try:
                values[name] = _value(name, value, word)
            except LaunchError as error:
                problems.append(str(error))
    if values.get("sequence_parallel") and values.get("tp", 1) == 1 and not problems:
        problems.append(f'--layouts: "{entry.strip()}": sequence_parallel cuts nothing without a tp of 2 or more')
    return values, problems


def _unknown(name: str, word: str) -> str:
    meant = nearest_name(name, _DEFAULTS)
    if (found := re.fullmatch(r"([a-z_]+)(\d+)", word)) and found[1] in _DEFAULTS:
        meant = f"{found[1]}={found[2]}"
    remedy = f'did you mean "{meant}"?' if meant else f"the words are {', '.join(_DEFAULTS)}"
    return f'--layouts: "{word}" is not understood: {remedy}'


CHOICES: dict[str, tuple[dict[str, Any], str]] = {
    "sequence_parallel": ({"": True, "true": True, "false": False}, "true or false"),
    "schedule": (
        {name: name for name in get_args(PipelineSchedule)},
        f"one of {', '.join(get_args(PipelineSchedule))}",
    ),
    "cp_kind": ({name: name for name in ("auto", *get_args(ContextParallelKind))}, "auto, all_gather or ulysses"),
    "compile": ({name: name for name in ("auto", "none", "blocks")}, "auto, none or blocks"),
    "zero": ({"1": 1, "2": 2, "3": 3}, "1, 2 or 3 (stage 0 is served by 1)"),
}


def _value(name: str, value: str, word: str) -> Any:
    if name == "recompute":
        if not set(value.split("/")) <= set(get_args(RecomputeMode)):
            raise LaunchError(
                f'--layouts: "{word}": recompute is none, selective or full, or one of them for each stage, as in '
                "recompute=full/none"
            )
        return value
    choices, expected = CHOICES.get(name, ({}, f"a whole number from 1, as in {name}=2"))
    if value in choices:
        return choices[value]
    if choices or not value.isdecimal() or int(value) < 1:
        raise LaunchError(f'--layouts: "{word}": {name} is {expected}')
    return int(value)


AUTO = (
    ParityLayout(),
    ParityLayout(tp=2),
    ParityLayout(pp=2, accumulation=4),
    ParityLayout(dp=2, accumulation=4),
    ParityLayout(dp=2, zero=2),
    ParityLayout(dp=2, zero=3, recompute="selective"),
    ParityLayout(tp=2, sequence_parallel=True, recompute="full"),
    ParityLayout(tp=2, pp=2, accumulation=2, recompute="full/selective", schedule="zero-bubble"),
    ParityLayout(pp=2, dp=2, zero=2, accumulation=4, schedule="zb-v"),
    ParityLayout(tp=2, dp=2, zero=3),
    ParityLayout(tp=2, pp=2, dp=2, accumulation=4),
    ParityLayout(tp=4, sequence_parallel=True),
    ParityLayout(cp=2),
    ParityLayout(tp=2, dp=2, cp=2, sequence_parallel=True),
)
"""Axes one at a time or nearly so, then together; the config's own layout is run in addition."""

AUTO_OF_EXPERTS = (ParityLayout(dp=2, ep=2, accumulation=2), ParityLayout(tp=2, dp=2, zero=2, ep=2))

MOST_ACCUMULATION = 4  # in the config's own layout, or as few more as its schedule takes: others repeat these


def auto_layouts(own: ParityLayout, most: int, has_experts: bool = False) -> tuple[list[ParityLayout], list[str]]:
    """Returns the config's own layout and those of `AUTO` that fit on `most` ranks, and the reasons for omissions."""
    fewer = range(min(own.accumulation, MOST_ACCUMULATION), own.accumulation)
    own = replace(own, accumulation=next(filter(own.allows, fewer), own.accumulation))
    layouts = list(dict.fromkeys((own, *AUTO, *(AUTO_OF_EXPERTS if has_experts else ()))))
    too_large = [
        f"{layout}: needs {layout.world_size} ranks, {most} fit here" for layout in layouts if layout.world_size > most
    ]
    return [layout for layout in layouts if layout.world_size <= most], too_large
