"""`megalite plan reliability`: how often a job of a given size breaks, how often to save, and where its hours go. No
torch here."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from launch.arguments import AsJson, Overrides
from launch.errors import LaunchError
from launch.plan.limits import LARGEST
from launch.plan.output import print_csv, print_json
from launch.run_config import load_run_config
from megalite.config import Config, ConfigError
from megalite.planner.reliability import Reliability, at_scale
from megalite.planner.reliability_checkpoint import (
    BYTES_PER_PARAMETER,
    PER_GPU,
    PER_NODE,
    Contents,
    Storage,
    megalite_bytes_per_parameter,
)
from megalite.planner.reliability_rates import DEFAULT_RATE, LLAMA_3, Components, nodes_of
from megalite.planner.shapes import parameters as parameters_of

OBSERVED = "--rate-per-1000-node-days"
COMPONENT_OPTIONS = (
    *(f"{part}_mttf_hours" for part in ("gpu", "nic", "psu", "node")),
    *(f"{part}_per_node" for part in ("gpus", "nics", "psus")),
)


class Preset(StrEnum):
    """Figures of others."""

    TUTORIAL = "tutorial"
    LLAMA3 = "llama3"


@dataclass(frozen=True)
class Answer:
    """What is asked, and in what words the failure rate comes."""

    job: Reliability
    rate_words: str
    components: Components | None  # None: an observed rate
    size_words: str
    communication_words: str | None  # None: it is not counted


Hours = Annotated[float | None, typer.Option(help="Mean time to failure of one, in hours; inf: never.")]


def reliability(
    context: typer.Context,
    config_path: Annotated[
        Path | None, typer.Argument(help="Takes parameters, optimizer and background from it.", metavar="[CONFIG.yaml]")
    ] = None,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs; `...` doubles up to the next number.", metavar="N,N,...,N")
    ] = "8,32,...,1024",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="A failure of one stops the job.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(OBSERVED, help=f"Observed failures; default {DEFAULT_RATE:.0f}, published 2 to 14."),
    ] = None,
    gpu_mttf_hours: Hours = None,
    nic_mttf_hours: Hours = None,
    psu_mttf_hours: Hours = None,
    node_mttf_hours: Hours = None,
    nics_per_node: Annotated[int | None, typer.Option(min=0, help="Default: one per GPU.")] = None,
    psus_per_node: Annotated[int | None, typer.Option(min=0, help="Power supplies; default 2.")] = None,
    redundant_psu: Annotated[
        bool, typer.Option("--redundant-psu", help="A node outlives the failure of a power supply.")
    ] = False,
    days: Annotated[float, typer.Option(help="Length of the run.")] = 30.0,
    parameters: Annotated[str | None, typer.Option(help="Of the model, as 70.6e9 or 70.6B; default that.")] = None,
    contents: Annotated[
        Contents,
        typer.Option(help="Of a checkpoint: fp32 weights and moments, 12 bytes; 14 mixed; 16 with fp32 gradients."),
    ] = Contents.MASTERS,
    writers: Annotated[str, typer.Option(help="Of a checkpoint: nodes, gpus, or how many.")] = PER_NODE,
    writer_gb_per_s: Annotated[float, typer.Option(help="Of each writer.")] = 7.0,
    storage_gb_per_s: Annotated[float, typer.Option(help="Of all writers together at most; inf: no limit.")] = 100.0,
    background: Annotated[
        bool | None,
        typer.Option(
            "--background/--blocking", help="Whether training goes on meanwhile; default blocking, or CONFIG."
        ),
    ] = None,
    copy_gb_per_s: Annotated[float, typer.Option(help="Per GPU to its host: blocks a background save.")] = 10.0,
    interval_minutes: Annotated[float | None, typer.Option(help="Between saves; default the best (Daly 2006).")] = None,
    detection_minutes: Annotated[float, typer.Option(help="From a failure until it is noticed.")] = 5.0,
    restart_minutes: Annotated[float, typer.Option(help="From then until training goes on.")] = 5.0,
    communication_share: Annotated[
        float | None, typer.Option(help="Of a step, from 0 to 1: GPUs wait for communication.")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="Predicts that share for CONFIG on this GPU, such as H100.")
    ] = None,
    preset: Annotated[
        Preset | None, typer.Option(help="A worked example with all its figures, or Llama 3's component failures.")
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the scale sweep as CSV.")] = False,
) -> None:
    """How often something breaks, how often to save, and where the hours go, for several numbers of GPUs.

    Beside each point stands what the published failure rates, 2 to 14 per 1,000 node-days, would make of it.

    Example: `megalite plan reliability --gpus 8,32,...,1024 --days 30`
    """
    from launch.plan import reliability_tables as tables

    if as_json and as_csv:
        raise LaunchError("--json and --csv are two ways to print the result: give one of them")
    given = _given(context)
    if preset is Preset.TUTORIAL:
        if others := sorted(given - {"--preset", "--json", "--csv"}):
            raise LaunchError(f"--preset tutorial has all its figures: leave out {', '.join(others)}, or the preset")
        tables.show_tutorial(as_json=as_json, as_csv=as_csv)
        return
    components = _components(
        given,
        LLAMA_3 if preset is Preset.LLAMA3 else Components(),
        {name: context.params[name] for name in COMPONENT_OPTIONS},
        redundant_psu,
    )
    rate_here, rate_words = _rate(rate, components)
    size = _size(config_path, overrides or [], parameters, contents, given)
    job = Reliability(
        rate_per_1000_node_days=rate_here,
        parameters=size.parameters,
        bytes_per_parameter=size.bytes_per_parameter,
        gpus_per_node=gpus_per_node,
        days=_positive("--days", days),
        storage=_storage(
            writers,
            writer_gb_per_s,
            storage_gb_per_s,
            copy_gb_per_s,
            size.background if background is None else background,
        ),
        detection_s=60 * _positive("--detection-minutes", detection_minutes, zero=True),
        restart_s=60 * _positive("--restart-minutes", restart_minutes, zero=True),
        interval_s=None if interval_minutes is None else 60 * _positive("--interval-minutes", interval_minutes),
    )
    share_at, share_words = _communication(communication_share, accelerator, size.config, gpus_per_node)
    answer = Answer(job, rate_words, components, size.words, share_words)
    counts = parse_gpus(gpus, gpus_per_node)
    scales = [at_scale(replace(job, communication_share=share_at(count)), count) for count in counts]
    if as_json:
        print_json(tables.as_values(answer, scales))
    elif as_csv:
        print_csv([tables.flat(scale) for scale in scales])
    else:
        tables.show(answer, scales)


def _storage(
    writers: str, writer_gb_per_s: float, storage_gb_per_s: float, copy_gb_per_s: float, background: bool
) -> Storage:
    limit = None if storage_gb_per_s == math.inf else _positive("--storage-gb-per-s", storage_gb_per_s) * 1e9
    return Storage(
        writers=_writers(writers),
        writer_bytes_per_s=_positive("--writer-gb-per-s", writer_gb_per_s) * 1e9,
        storage_bytes_per_s=limit,
        background=background,
        copy_bytes_per_s=_positive("--copy-gb-per-s", copy_gb_per_s) * 1e9,
    )


def parse_gpus(words: str, gpus_per_node: int) -> list[int]:
    """`8,32,...,1024`: `...` is the number before it doubled, and doubled again, up to the one after it."""
    found: list[int] = []
    parts = [part.strip() for part in words.split(",")]
    for place, part in enumerate(parts):
        if part in ("...", "\N{HORIZONTAL ELLIPSIS}") and 0 < place < len(parts) - 1 and found:
            end = _count(parts[place + 1], words)
            while found[-1] * 2 < end:
                found.append(found[-1] * 2)
            continue
        found.append(_count(part, words))
    for count in found:
        try:
            nodes_of(count, gpus_per_node)
        except ConfigError as error:
            raise LaunchError(f"--gpus {words}: {error}") from None
    return sorted(set(found))


def _count(part: str, words: str) -> int:
    if not part.isdecimal() or not 0 < int(part) <= LARGEST:
        raise LaunchError(
            f"--gpus {words}: {part!r} is no number of GPUs from 1 to {LARGEST:,}: write them as 8,64,256 or 8,...,1024"
        )
    return int(part)


def _given(context: typer.Context) -> set[str]:
    """The options on the command line, as typed at the longest."""
    return {
        _as_typed(option, context.params.get(option.name or ""))
        for option in context.command.params
        if getattr(context.get_parameter_source(option.name or ""), "name", "") == "COMMANDLINE"
    }


def _as_typed(option: Any, value: Any) -> str:
    if option.param_type_name != "option":
        return option.name or ""
    return max(option.secondary_opts if value is False and option.secondary_opts else option.opts, key=len)


def _components(
    given: set[str], base: Components, values: dict[str, float | int | None], redundant_psu: bool
) -> Components | None:
    """None where nothing is said of components: then a rate is meant."""
    asked = {f"--{name.replace('_', '-')}" for name in values if name != "gpus_per_node"} | {"--redundant-psu"}
    said = sorted(given & asked)
    if not said and base is not LLAMA_3:
        return None
    if OBSERVED in given:
        other = said[0] if said else f"--preset {Preset.LLAMA3}"
        raise LaunchError(
            f"{OBSERVED} is the rate of whole nodes and {other} makes one of their parts: give one of them"
        )
    if base is not LLAMA_3 and not any(name.endswith("-hours") for name in said):
        raise LaunchError(
            f"{said[0]} is a detail of rates that are made of components: add how often they fail, such as "
            "--gpu-mttf-hours 50000, or --preset llama3"
        )
    for name, value in values.items():
        if name.endswith("_hours") and value is not None and not value > 0:
            raise LaunchError(f"--{name.replace('_', '-')} {value:g}: must be more than 0 hours, or inf for never")
    changes = {name: value for name, value in values.items() if value is not None}
    return replace(base, redundant_psu=redundant_psu, **changes)  # type: ignore[arg-type]


def _rate(observed: float | None, components: Components | None) -> tuple[float, str]:
    """Per 1,000 node-days, and in words where it is from."""
    if components is not None:
        if not components.rate_per_1000_node_days:
            raise LaunchError("nothing fails with these components: give one of them a finite mean time to failure")
        return components.rate_per_1000_node_days, _component_words(components)
    if observed is None:
        return DEFAULT_RATE, "assumed: Llama 3 saw 3.8"
    return _positive(OBSERVED, observed), "as given"


def _component_words(components: Components) -> str:
    parts = [f"{name} {rate:.2g}/h" for name, rate in components.failures_per_hour().items() if rate]
    return f"of components, per node: {', '.join(parts)}; node MTTF {components.mttf_hours:,.1f} h"


@dataclass(frozen=True)
class _Size:
    parameters: float
    bytes_per_parameter: float
    background: bool
    words: str
    config: Config | None = None


def _size(
    config_path: Path | None, overrides: list[str], parameters: str | None, contents: Contents, given: set[str]
) -> _Size:
    if config_path is None:
        number = 70.6e9 if parameters is None else _number("--parameters", parameters)
        words = "Llama 3 70B, as no model is given" if parameters is None else "as given"
        return _Size(number, BYTES_PER_PARAMETER[contents], False, words)
    if parameters is not None:
        raise LaunchError(f"--parameters {parameters} and {config_path} both say how large the model is: give one")
    config = load_run_config(config_path, overrides)
    own = "--contents" not in given
    size = megalite_bytes_per_parameter(config.optimizer.name) if own else BYTES_PER_PARAMETER[contents]
    return _Size(parameters_of(config.model), size, config.checkpoint.background, str(config_path), config)


def _number(option: str, text: str) -> float:
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    scale = scales.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise LaunchError(f"{option} {text} is no number: write it as 70.6e9 or 70.6B") from None
    return _positive(option, number)


def _positive(option: str, value: float, zero: bool = False) -> float:
    if not (value > 0 or (zero and value == 0)) or not math.isfinite(value):
        raise LaunchError(f"{option} {value:g}: must be a finite number {'from 0 up' if zero else 'above 0'}")
    return value


def _communication(
    share: float | None, accelerator: str | None, config: Config | None, gpus_per_node: int
) -> tuple[Callable[[int], float], str | None]:
    """The share of a step on so many GPUs, and in words where it is from."""
    if accelerator is None:
        return lambda _: _share(share or 0.0), None if share is None else f"{share:.1%} of a step, as given"
    if share is not None:
        raise LaunchError("--accelerator predicts what --communication-share gives: give one of them")
    if config is None:
        raise LaunchError(f"--accelerator {accelerator} predicts the communication of a CONFIG.yaml: give one")
    from launch.plan.reliability_communication import predicted_share

    return predicted_share(config, accelerator, gpus_per_node), f"predicted for {accelerator}"


def _share(value: float) -> float:
    if not 0 <= value < 1:
        hint = f": for {value:g}% give {value / 100:g}" if 1 <= value < 100 else ""
        raise LaunchError(f"--communication-share {value:g} is no share from 0 up to below 1{hint}")
    return value


def _writers(text: str) -> int | str:
    if text in (PER_NODE, PER_GPU):
        return text
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise LaunchError(f"--writers {text}: must be {PER_NODE}, {PER_GPU}, or a number from 1 up")
