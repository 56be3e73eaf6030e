"""The command `megalite plan reliability`: failures, checkpoint interval and goodput of jobs of given sizes. No torch
here."""

from __future__ import annotations

import math
import time
from dataclasses import fields, replace
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Annotated, Literal

import typer

from launch.cli.options import (
    MOST_ACCELERATORS,
    AsJson,
    Overrides,
    PricePerAcceleratorHour,
    check_one_format,
    checked_price,
    finite_number,
)
from launch.errors import LaunchError
from launch.output import print_csv, print_json
from launch.planning.prediction_by_size import SizedRun, counts_by, predicted_runs, steps_not_counted
from launch.planning.tables.reliability import ReliabilityAnswer
from launch.trainer.run_config import load_run_config
from megalite.config import Config, ConfigError
from megalite.planner.cost.shapes import parameters as parameters_of
from megalite.planner.outlook import reliability_of
from megalite.planner.reliability.checkpoints import (
    BYTES_PER_PARAMETER,
    PER_GPU,
    PER_NODE,
    Contents,
    Storage,
    megalite_bytes_per_parameter,
)
from megalite.planner.reliability.failure_rates import DEFAULT_RATE, LLAMA_3, Components, nodes_of
from megalite.planner.reliability.goodput_model import Reliability, at_scale
from megalite.planner.units import plain

OBSERVED = "--rate-per-1000-node-days"
DEFAULT_DAYS = 30.0
FROM_HOURS = "of checkpoint.mean_hours_between_failures"


Hours = Annotated[float | None, typer.Option(help="Mean time to failure of one, in hours; inf: never.")]


def reliability(
    context: typer.Context,
    config_path: Annotated[
        Path | None,
        typer.Argument(
            help="Config from which to take the model, the checkpoints and the length of the run.",
            metavar="[CONFIG.yaml]",
        ),
    ] = None,
    overrides: Overrides = None,
    gpus: Annotated[
        str, typer.Option(help="Numbers of GPUs; `...` doubles up to the next number.", metavar="N,N,...,N")
    ] = "8,32,...,1024",
    gpus_per_node: Annotated[int, typer.Option(min=1, help="GPUs per node; a failure of any stops the job.")] = 8,
    rate: Annotated[
        float | None,
        typer.Option(OBSERVED, help=f"Observed failure rate; default {DEFAULT_RATE:.0f}, published 2 to 14."),
    ] = None,
    gpu_mttf_hours: Hours = None,
    nic_mttf_hours: Hours = None,
    psu_mttf_hours: Hours = None,
    node_mttf_hours: Hours = None,
    nics_per_node: Annotated[
        int | None, typer.Option(min=0, help="Network adapters per node; default: one per GPU.")
    ] = None,
    psus_per_node: Annotated[int | None, typer.Option(min=0, help="Power supplies per node; default 2.")] = None,
    redundant_psu: Annotated[
        bool, typer.Option("--redundant-psu", help="A node survives the failure of one power supply.")
    ] = False,
    days: Annotated[
        float | None,
        typer.Option(help="Length of the run in days; default: that of CONFIG on --accelerator, or 30."),
    ] = None,
    parameters: Annotated[
        str | None, typer.Option(help="Parameters of the model, such as 70.6e9 or 70.6B, the default.")
    ] = None,
    contents: Annotated[
        Contents,
        typer.Option(
            help="Contents of a checkpoint: fp32 weights and moments (12 bytes per parameter), mixed (14), or with "
            "fp32 gradients (16)."
        ),
    ] = Contents.MASTERS,
    writers: Annotated[str, typer.Option(help="Writers of a checkpoint: nodes, gpus, or a number.")] = PER_NODE,
    writer_gb_per_s: Annotated[float, typer.Option(help="Write speed of each writer.")] = 7.0,
    storage_gb_per_s: Annotated[
        float, typer.Option(help="Highest write speed of all writers together; inf: no limit.")
    ] = 100.0,
    background: Annotated[
        bool | None,
        typer.Option(
            "--background/--blocking",
            help="Whether training continues during a save; default: blocking, or as in CONFIG.",
        ),
    ] = None,
    copy_gb_per_s: Annotated[
        float, typer.Option(help="Copy speed from each GPU to its host, during which a background save blocks.")
    ] = 10.0,
    interval_minutes: Annotated[
        float | None, typer.Option(help="Minutes between saves; default: as in CONFIG, or `checkpoint.interval: auto`.")
    ] = None,
    detection_minutes: Annotated[float, typer.Option(help="Minutes until a failure is detected.")] = 5.0,
    restart_minutes: Annotated[float, typer.Option(help="Minutes from then until training continues.")] = 5.0,
    communication_share: Annotated[
        float | None, typer.Option(help="Share of a step, 0 to 1, in which GPUs wait for communication.")
    ] = None,
    accelerator: Annotated[
        str | None, typer.Option(help="GPU on which to predict steps of CONFIG and that share, such as H100.")
    ] = None,
    price: PricePerAcceleratorHour = None,
    by: Annotated[
        str | None,
        typer.Option(
            metavar="YYYY-MM-DD",
            help="Name the cheapest number of GPUs whose run, begun today, ends by this date; without --gpus, of those "
            "that come near it.",
        ),
    ] = None,
    preset: Annotated[
        Literal["tutorial", "llama3"] | None,
        typer.Option(help="A worked example with all its figures, or the component failures of Llama 3."),
    ] = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print the row of each number of GPUs as CSV.")] = False,
) -> None:
    """Predict failures, the best checkpoint interval and the goodput of a run on several numbers of GPUs.

    Shows beside each figure its range over the published failure rates, 2 to 14 per 1,000 node-days. With CONFIG and
    --accelerator it also predicts how long the run takes on each number.

    Example: `megalite plan reliability --gpus 8,32,...,1024 --days 30`
    """
    from launch.planning.tables import reliability as tables

    check_one_format(as_json=as_json, as_csv=as_csv)
    given = _given_options(context)
    if preset == "tutorial":
        if others := sorted(given - {"--preset", "--json", "--csv"}):
            raise LaunchError(f"--preset tutorial has all its figures: leave out {', '.join(others)}, or the preset")
        tables.show_tutorial(as_json=as_json, as_csv=as_csv)
        return
    components = _components(
        given,
        LLAMA_3 if preset == "llama3" else Components(),
        {field.name: context.params[field.name] for field in fields(Components)},
    )
    config = None if config_path is None else load_run_config(config_path, overrides or [])
    deadline = None if by is None else _deadline(by, config, accelerator, days)
    if deadline is not None and "--gpus" not in given and config is not None and accelerator is not None:
        counts = counts_by(config, accelerator, gpus_per_node, deadline - time.time())
    else:
        counts = parse_gpus(gpus, gpus_per_node)
    rate_per_1000_node_days, rate_source = _rate(rate, components, config, counts, gpus_per_node)
    given_contents = contents if "--contents" in given else None
    size, bytes_per_parameter, size_source = _size(config_path, config, parameters, given_contents)
    if writers not in (PER_NODE, PER_GPU) and not (writers.isdecimal() and int(writers) > 0):
        raise LaunchError(f"--writers {writers}: must be {PER_NODE}, {PER_GPU}, or a number from 1 up")
    limit = None if storage_gb_per_s == math.inf else finite_number("--storage-gb-per-s", storage_gb_per_s) * 1e9
    job = Reliability(
        rate_per_1000_node_days=rate_per_1000_node_days,
        parameters=size,
        bytes_per_parameter=bytes_per_parameter,
        gpus_per_node=gpus_per_node,
        days=DEFAULT_DAYS if days is None else finite_number("--days", days),
        storage=Storage(
            writers=writers if writers in (PER_NODE, PER_GPU) else int(writers),
            writer_bytes_per_s=finite_number("--writer-gb-per-s", writer_gb_per_s) * 1e9,
            storage_bytes_per_s=limit,
            background=(config is not None and config.checkpoint.background) if background is None else background,
            copy_bytes_per_s=finite_number("--copy-gb-per-s", copy_gb_per_s) * 1e9,
        ),
        detection_s=60 * finite_number("--detection-minutes", detection_minutes, zero=True),
        restart_s=60 * finite_number("--restart-minutes", restart_minutes, zero=True),
        interval_s=None if interval_minutes is None else 60 * finite_number("--interval-minutes", interval_minutes),
    )
    share_source = _communication_source(communication_share, accelerator, config)
    if config is None or accelerator is None:
        job = replace(job, communication_share=communication_share or 0.0)
        runs = [SizedRun(at_scale(job, count), job.days) for count in counts]
        remarks = [] if config is None or job.interval_s is not None else steps_not_counted(config)
    else:
        runs, remarks = predicted_runs(config, accelerator, counts, job, is_length_wanted=days is None)
    answer = ReliabilityAnswer(
        job,
        rate_source,
        components,
        size_source,
        share_source,
        _interval_source(interval_minutes, config, accelerator),
        checked_price(price),
        (*remarks, *_unused_hours(config, rate_source)),
        by,
    )
    if as_json:
        print_json(tables.as_values(answer, runs))
    elif as_csv:
        print_csv([tables.flat(run, answer.price) for run in runs])
    else:
        tables.show(answer, runs)


def _deadline(by: str, config: Config | None, accelerator: str | None, days: float | None) -> float:
    """The end of a day, in seconds of `time.time`. Raises LaunchError."""
    if config is None or accelerator is None or days is not None:
        raise LaunchError(f"--by {by} needs the length of a run: give a CONFIG and --accelerator, and no --days")
    try:
        day = date.fromisoformat(by)
    except ValueError:
        raise LaunchError(f"--by {by} is no date: write it as {date.today().isoformat()}") from None
    if day <= date.today():
        raise LaunchError(f"--by {by}: a run that begins today, {date.today()}, cannot end by then")
    try:
        return datetime.combine(day + timedelta(days=1), datetime.min.time()).timestamp()
    except (OverflowError, OSError, ValueError):  # the last day of all, or one that the machine's clock does not know
        raise LaunchError(f"--by {by} is too late to be counted: name a day of this century") from None


def parse_gpus(text: str, gpus_per_node: int) -> list[int]:
    """Parses `8,32,...,1024`, where `...` doubles the number before it up to the one after it. Raises LaunchError."""

    def number(part: str) -> int:
        if not part.isdecimal() or not 0 < int(part) <= MOST_ACCELERATORS:
            raise LaunchError(
                f"--gpus {text}: {part!r} is no number of GPUs from 1 to {MOST_ACCELERATORS:,}: write them as 8,64,256 "
                "or 8,...,1024"
            )
        return int(part)

    found: list[int] = []
    parts = [part.strip() for part in text.split(",")]
    for place, part in enumerate(parts):
        if part in ("...", "\N{HORIZONTAL ELLIPSIS}") and 0 < place < len(parts) - 1 and found:
            end = number(parts[place + 1])
            while found[-1] * 2 < end:
                found.append(found[-1] * 2)
            continue
        found.append(number(part))
    for count in found:
        try:
            nodes_of(count, gpus_per_node)
        except ConfigError as error:
            raise LaunchError(f"--gpus {text}: {error}") from None
    return sorted(set(found))


def _given_options(context: typer.Context) -> set[str]:
    """The options on the command line, in their long form, such as `--blocking` for a flag that was negated."""
    given = set()
    for option in context.command.params:
        name = option.name or ""
        if getattr(context.get_parameter_source(name), "name", "") != "COMMANDLINE":
            continue
        if option.param_type_name != "option":
            given.add(name)
        else:
            is_negated = context.params.get(name) is False and option.secondary_opts
            given.add(max(option.secondary_opts if is_negated else option.opts, key=len))
    return given


def _components(given: set[str], base: Components, values: dict[str, float | int | None]) -> Components | None:
    """The failure rates of components; None where no option names one, so that a rate of nodes is meant."""
    component_options = {f"--{name.replace('_', '-')}" for name in values if name != "gpus_per_node"}
    named = sorted(given & component_options)
    if not named and base is not LLAMA_3:
        return None
    if OBSERVED in given:
        other = named[0] if named else "--preset llama3"
        raise LaunchError(
            f"{OBSERVED} is the rate of whole nodes and {other} makes one of their parts: give one of them"
        )
    if base is not LLAMA_3 and not any(name.endswith("-hours") for name in named):
        raise LaunchError(
            f"{named[0]} is a detail of rates that are made of components: add how often they fail, such as "
            "--gpu-mttf-hours 50000, or --preset llama3"
        )
    for name, value in values.items():
        if name.endswith("_hours") and value is not None and not value > 0:
            raise LaunchError(f"--{name.replace('_', '-')} {value:g}: must be more than 0 hours, or inf for never")
    changes = {name: value for name, value in values.items() if value is not None}
    return replace(base, **changes)  # type: ignore[arg-type]


def _rate(
    observed: float | None, components: Components | None, config: Config | None, counts: list[int], per_node: int
) -> tuple[float, str]:
    """Failures per 1,000 node-days, and the source of that rate."""
    if components is not None:
        if not components.rate_per_1000_node_days:
            raise LaunchError("nothing fails with these components: give one of them a finite mean time to failure")
        parts = [f"{name} {per_hour:.2g}/h" for name, per_hour in components.failures_per_hour().items() if per_hour]
        source = f"of components, per node: {', '.join(parts)}; node MTTF {components.mttf_hours:,.1f} h"
        return components.rate_per_1000_node_days, source
    if observed is not None:
        return finite_number(OBSERVED, observed), "as given"
    if config is not None and config.checkpoint.mean_hours_between_failures is not None and len(counts) == 1:
        return reliability_of(config, per_node, counts[0]).rate_per_1000_node_days, FROM_HOURS
    return DEFAULT_RATE, "assumed: Llama 3 saw 3.8"


def _unused_hours(config: Config | None, rate_source: str) -> list[str]:
    hours = None if config is None else config.checkpoint.mean_hours_between_failures
    if hours is None or rate_source == FROM_HOURS:
        return []
    return [
        f"checkpoint.mean_hours_between_failures {plain(hours)} is not counted here: it is of a job of one size, so it "
        "counts with one number in --gpus and no failure rate"
    ]


def _interval_source(minutes: float | None, config: Config | None, accelerator: str | None) -> str:
    if minutes is not None:
        return "as given"
    is_counted = config is not None and accelerator is not None
    return f"checkpoint.interval {config.checkpoint.interval if config is not None and is_counted else 'auto'}"


def _size(
    config_path: Path | None, config: Config | None, parameters: str | None, contents: Contents | None
) -> tuple[float, float, str]:
    """The model's parameters, the bytes of each in a checkpoint, and the source of the number of parameters."""
    if config is None:
        number = 70.6e9 if parameters is None else _number("--parameters", parameters)
        source = "Llama 3 70B, as no model is given" if parameters is None else "as given"
        return number, BYTES_PER_PARAMETER[contents or Contents.MASTERS], source
    if parameters is not None:
        raise LaunchError(f"--parameters {parameters} and {config_path} both say how large the model is: give one")
    own = megalite_bytes_per_parameter(config.optimizer.name, config.model)
    size = own if contents is None else BYTES_PER_PARAMETER[contents]
    return parameters_of(config.model), size, str(config_path)


def _number(option: str, text: str) -> float:
    scales = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
    scale = scales.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise LaunchError(f"{option} {text} is no number: write it as 70.6e9 or 70.6B") from None
    return finite_number(option, number)


def _communication_source(share: float | None, accelerator: str | None, config: Config | None) -> str | None:
    """The source of the share of a step in which GPUs communicate; None where it is not counted."""
    if accelerator is None:
        value = share or 0.0
        if not 0 <= value < 1:
            hint = f": for {value:g}% give {value / 100:g}" if 1 <= value < 100 else ""
            raise LaunchError(f"--communication-share {value:g} is no share from 0 up to below 1{hint}")
        return None if share is None else f"{share:.1%} of a step, as given"
    if share is not None:
        raise LaunchError("--accelerator predicts what --communication-share gives: give one of them")
    if config is None:
        raise LaunchError(f"--accelerator {accelerator} predicts the communication of a CONFIG.yaml: give one")
    return f"predicted for {accelerator}"
