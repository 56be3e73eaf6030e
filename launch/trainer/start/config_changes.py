"""Compares the config of a resumed run with that of its checkpoint.

Every difference that concerns the training is listed. Those that would make the run compute something else with what
the checkpoint holds are refused unless the user allows them. No torch.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_origin

from pydantic import BaseModel, ValidationError

from launch.errors import LaunchError
from megalite.checkpoint.manifest import Manifest
from megalite.config import Config, ModelConfig
from megalite.config.base import section_of
from megalite.config.errors import shown
from megalite.config.suggestions import dotted
from megalite.training.learning_rate import rate_factors

OptionName = str  # dotted, such as `optimizer.betas`

NEEDS_PERMISSION: Mapping[OptionName, str] = {
    "data.document_mask": "it changes what attention sees, and the positions, in every sample of several documents",
    "optimizer.betas": "the moments in the checkpoint are averages with the former rates",
    "optimizer.momentum": "the momentum in the checkpoint is an average with the former rate",
    "optimizer.eps": "it rescales the updates that the moments in the checkpoint lead to",
}
"""Options whose change makes the data or the saved moments mean something else, and the reason. Other data, another
seed, model or optimizer never go with a checkpoint and are refused by launch/trainer/start/resume.py; learning rate,
weight decay, clipping, batch size, number formats and dropout are changed on purpose in the course of a run."""

REDUCTION = "precision.gradient_reduction_dtype"  # None: as gradients are accumulated
IGNORED_BY: Mapping[str, tuple[OptionName, ...]] = {  # optimizer.name -> options
    "adamw": ("optimizer.momentum", "optimizer.adjust_lr"),
    "muon": (),
    "sgd": tuple(f"optimizer.{name}" for name in ("betas", "eps", "momentum", "adjust_lr", "moments_dtype")),
}
NAMED_BY_USERS = ("deepspeed.", "data.sources.", "data.validation.")
"""Beginnings of options that a checkpoint lacks where the run did not have them."""

JUMP = 0.25  # share of the larger learning rate

WITHOUT_EFFECT = (
    "run_dir",
    "launch",
    "monitor",
    "data.cache",
    "training.initialize_from",
    "training.max_minutes",
    "model.initializer_range",
)
"""Options and sections that change nothing of a run that is resumed."""


@dataclass(frozen=True)
class OptionChange:
    """One option of which a checkpoint and the config that resumes it have different values."""

    option: OptionName
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.option} {shown(self.before)} -> {shown(self.after)}"


def changes_since(manifest: Manifest, config: Config) -> tuple[OptionChange, ...]:
    """Returns the options that differ from the checkpoint's config, in the order of the sections.

    An option that the checkpoint does not name has the default that was in force. Options that are still `auto` are
    left out.
    """
    named = {name: manifest.config.get(name) for name in Config.model_fields} | {"model": saved_model(manifest)}
    saved = dict(_defaults(Config)) | _former_defaults(manifest) | dict(_flat("", named))
    if not manifest.config.get("data"):
        del saved["data.path"]  # its default is that of a mix, and nothing is known of this text
    ours = dict(_flat("", config.model_dump(mode="json")))
    for values in (saved, ours):
        values[REDUCTION] = values.get(REDUCTION) or values.get("precision.gradient_accumulation_dtype")
    open_options = {dotted(path) for path in config.unresolved_options | config.open_options}
    changes = []
    for option in dict.fromkeys((*ours, *saved)):
        # of a checkpoint without a whole config
        is_unknown = option not in saved and not option.startswith(NAMED_BY_USERS)
        is_without_effect = option in IGNORED_BY[config.optimizer.name] or f"{option}.".startswith(
            tuple(f"{name}." for name in WITHOUT_EFFECT)
        )
        before, after = saved.get(option), ours.get(option)
        if before != after and not (is_unknown or option in open_options or is_without_effect):
            changes.append(OptionChange(option, before, after))
    return tuple(changes)


def learning_rate_jump(manifest: Manifest, config: Config) -> tuple[float, float] | None:
    """Returns the learning rates of the last step before a checkpoint and the first behind it, if another length,
    schedule or peak than the checkpoint's sets them more than `JUMP` apart; None if not, or if they are not known.
    """
    named = {name: manifest.config[name] for name in Config.model_fields if name in manifest.config}
    try:
        saved = Config.model_validate(named).counted_from(0, 0, config.samples_per_epoch)
    except ValidationError:
        return None
    steps, peak = saved.training.steps, saved.optimizer.learning_rate
    if not steps or not 0 < manifest.step < config.total_steps:
        return None
    factor = rate_factors(saved, steps)
    before, planned = (peak * factor(min(step, steps - 1)) for step in (manifest.step - 1, manifest.step))
    after = config.optimizer.learning_rate * rate_factors(config, config.total_steps)(manifest.step)
    return (before, after) if abs(after - planned) > JUMP * max(after, planned) else None


def saved_model(manifest: Manifest) -> dict[str, Any]:
    """Returns the section `model` of a checkpoint; options that an older version did not have take their defaults."""
    saved: dict[str, Any] = manifest.config.get("model", {})
    try:
        return ModelConfig.model_validate(saved).model_dump(mode="json")
    except ValidationError:
        return saved


def check_changes(changes: tuple[OptionChange, ...], checkpoint: Path, *, allow_change: bool) -> None:
    """Raises LaunchError for the first change that needs permission, unless it is given."""
    for change in changes if not allow_change else ():
        if change.option in NEEDS_PERMISSION:
            raise LaunchError(
                f"{checkpoint} was trained with {change.option} {shown(change.before)}, this config has "
                f"{shown(change.after)}: {NEEDS_PERMISSION[change.option]}; set it back, or give --allow-change to go "
                "on with it all the same"
            )


def _former_defaults(manifest: Manifest) -> dict[OptionName, Any]:
    """Returns defaults that have changed since, for a checkpoint that does not name the option."""
    dtype = (manifest.config.get("precision") or {}).get("dtype", "fp32")
    # DeepSpeed sums the replicas' gradients in the format of the model, unless it is told another
    reduction = {} if dtype == "fp32" else {REDUCTION: dtype}
    return {"checkpoint.interval": 0, "parallel.pipeline_schedule": "1f1b", **reduction}


def _flat(prefix: OptionName, values: Mapping[str, Any]) -> Iterator[tuple[OptionName, Any]]:
    """Yields each option with its value; None, which stands for a section that is not there, has no options."""
    for key, value in values.items():
        name = f"{prefix}.{key}" if prefix else key
        if isinstance(value, dict):
            yield from _flat(name, value)
        elif prefix or value is not None:
            yield name, value


def _defaults(section: type[BaseModel], prefix: OptionName = "") -> Iterator[tuple[OptionName, Any]]:
    """Yields the default of each option that has one, as JSON holds it."""
    for key, field in section.model_fields.items():
        name = f"{prefix}.{key}" if prefix else key
        if name == "model":  # its defaults depend on other options of it: `saved_model` has them
            continue
        if (inner := section_of(field.annotation)) is not None:
            yield from _defaults(inner, name)
        elif not field.is_required() and get_origin(field.annotation) is not dict:  # which has no options of its own
            yield name, json.loads(json.dumps(field.get_default(call_default_factory=True), default=str))
