"""The command `megalite plan reliability`: failures, checkpoint interval and goodput of a run by its GPUs. No torch."""

from __future__ import annotations

import math
import time
from dataclasses import fields, replace
from datetime import date, datetime, timedelta
from typing import Literal

from typer import Option

from launch.cli.options import MOST_ACCELERATORS, check_one_format, finite_number, taking
from launch.cli.plan_job_options import DEFAULT_DAYS, JobOptions
from launch.errors import LaunchError
from launch.output import print_csv, print_json
from launch.planning.prediction_by_size import SizedRun, counts_by, predicted_runs, steps_not_counted
from launch.planning.tables.reliability import ReliabilityAnswer
from megalite.config import Config, ConfigError
from megalite.planner.cost.checkpoints import (
    BYTES_PER_PARAMETER,
    PER_GPU,
    PER_NODE,
    Contents,
    Storage,
    megalite_bytes_per_parameter,
)
from megalite.planner.cost.stage_parameters import parameters as parameters_of
from megalite.planner.failure_rates import DEFAULT_RATE, LLAMA_3, Components, whole_nodes
from megalite.planner.forecast import reliability_of
from megalite.planner.reliability.goodput_model import Reliability, at_scale
from megalite.units import short

OBSERVED = "--rate-per-1000-node-days"
FROM_HOURS = "of checkpoint.mean_hours_between_failures"
MTTF = "Mean time to failure of one, in hours; inf: never."


class ReliabilityOptions(JobOptions):
    """The numbers of GPUs, the failures of components, and checkpoints."""

    gpus: str = Option("8,32,...,1024", help="Numbers of GPUs; `...` doubles up to the next one.", metavar="N,N,...,N")
    gpu_mttf_hours: float | None = Option(None, help=MTTF)
    nic_mttf_hours: float | None = Option(None, help=MTTF)
    psu_mttf_hours: float | None = Option(None, help=MTTF)
    node_mttf_hours: float | None = Option(None, help=MTTF)
    nics_per_node: int | None = Option(None, min=0, help="Network adapters per node; default: one per GPU.")
    psus_per_node: int | None = Option(None, min=0, help="Power supplies per node; default 2.")
    redundant_psu: bool = Option(False, "--redundant-psu", help="A node survives the failure of one power supply.")
    parameters: str | None = Option(None, help="Parameters of the model, such as 70.6e9 or 70.6B, the default.")
    contents: Contents = Option(
        Contents.MASTERS,
        help="Contents of a checkpoint: fp32 weights and moments (12 bytes per parameter), mixed (14), or with fp32 "
        "gradients (16).",
    )
    writers: str = Option(PER_NODE, help="Writers of a checkpoint: nodes, gpus, or a number.")
    writer_gb_per_s: float = Option(7.0, help="Write speed of each writer.")
    storage_gb_per_s: float = Option(100.0, help="Highest write speed of all writers together; inf: no limit.")
    background: bool | None = Option(
        None,
        "--background/--blocking",
        help="Whether training continues during a save; default: blocking, or as in CONFIG.",
    )
    copy_gb_per_s: float = Option(10.0, help="Copy speed from each GPU to its host, while a background save blocks.")
    interval_minutes: float | None = Option(
        None, help="Minutes between saves; default: as in CONFIG, or `checkpoint.interval: auto`."
    )
    communication_share: float | None = Option(None, help="Share of a step, 0 to 1, that GPUs wait for communication.")
    by: str | None = Option(
        None,
        metavar="YYYY-MM-DD",
        help="Name the cheapest number of GPUs whose run, begun today, ends by this date; without --gpus, of those "
        "that come near it.",
    )
    preset: Literal["tutorial", "llama3"] | None = Option(
        None, help="A worked example with all its figures, or the component failures of Llama 3."
    )


@taking(ReliabilityOptions)
def reliability(options: ReliabilityOptions) -> None:
    """Predict failures, the best checkpoint interval and the goodput of a run on several numbers of GPUs.

    Shows beside each figure its range over the published failure rates, 2 to 14 per 1,000 node-days. With CONFIG and
    --accelerator it also predicts how long the run takes on each number.

    Example: `megalite plan reliability --gpus 8,32,...,1024 --days 30`
    """
    from launch.planning.tables import reliability as tables

    if options.preset == "tutorial":
        if others := sorted(options.given - {"--preset", "--json", "--csv"}):
            raise LaunchError(f"--preset tutorial has all its figures: leave out {', '.join(others)}, or the preset")
        check_one_format(as_json=options.as_json, as_csv=options.as_csv)
        tables.show_tutorial(as_json=options.as_json, as_csv=options.as_csv)
        return
    config, accelerator = options.checked_config(), options.accelerator
    answer, counts = _asked(options, config)
    if config is None or accelerator is None:
        runs = [SizedRun(at_scale(answer.job, count), answer.job.days) for count in counts]
        remarks = [] if config is None or answer.job.interval_s is not None else steps_not_counted(config)
    else:
        runs, remarks = predicted_runs(config, accelerator, counts, answer.job, is_length_wanted=options.days is None)
    answer = replace(answer, remarks=(*remarks, *answer.remarks))
    if options.as_json:
        print_json(tables.as_values(answer, runs))
    elif options.as_csv:
        print_csv([tables.flat(run, answer.price) for run in runs])
    else:
        tables.show(answer, runs)


def _asked(options: ReliabilityOptions, config: Config | None) -> tuple[ReliabilityAnswer, list[int]]:
    """The job with the sources of its figures, and the numbers of GPUs. Raises LaunchError or ConfigError."""
    options.check_numbers(
        above_0="rate_per_1000_node_days writer_gb_per_s copy_gb_per_s interval_minutes"
        + " storage_gb_per_s" * (options.storage_gb_per_s != math.inf)
    )
    components = _components(options)
    counts = _counts(options, config)
    rate, rate_source = _rate(options, components, config, counts)
    size, bytes_per_parameter, size_source = _size(options, config)
    minutes, writers = options.interval_minutes, options.writers
    if writers not in (PER_NODE, PER_GPU) and not (writers.isdecimal() and int(writers) > 0):
        raise LaunchError(f"--writers {writers}: must be {PER_NODE}, {PER_GPU}, or a number from 1 up")
    is_in_background = options.background
    if is_in_background is None:
        is_in_background = config is not None and config.checkpoint.background
    job = Reliability(
        rate_per_1000_node_days=rate,
        parameters=size,
        bytes_per_parameter=bytes_per_parameter,
        gpus_per_node=options.gpus_per_node,
        days=options.days or DEFAULT_DAYS,
        storage=Storage(
            writers=int(writers) if writers.isdecimal() else writers,
            writer_bytes_per_s=options.writer_gb_per_s * 1e9,
            storage_bytes_per_s=None if options.storage_gb_per_s == math.inf else options.storage_gb_per_s * 1e9,
            background=is_in_background,
            copy_bytes_per_s=options.copy_gb_per_s * 1e9,
        ),
        detection_s=60 * options.detection_minutes,
        restart_s=60 * options.restart_minutes,
        communication_share=options.communication_share or 0.0,
        interval_s=None if minutes is None else 60 * minutes,
    )
    is_counted = config is not None and options.accelerator is not None
    interval = f"checkpoint.interval {config.checkpoint.interval if config is not None and is_counted else 'auto'}"
    sources = rate_source, components, size_source, _communication_source(options, config)
    remarks = tuple(_unused_hours(config, rate_source))
    price = options.price_per_accelerator_hour
    return ReliabilityAnswer(
        job, *sources, interval if minutes is None else "as given", price, remarks, options.by
    ), counts


def _counts(options: ReliabilityOptions, config: Config | None) -> list[int]:
    """The numbers of GPUs, as given, or those that may end by a date."""
    if options.by is None:
        return parse_gpus(options.gpus, options.gpus_per_node)
    if config is None or options.accelerator is None or options.days is not None:
        raise LaunchError(
            f"--by {options.by} needs the length of a run: give a CONFIG and --accelerator, and no --days"
        )
    deadline = _deadline(options.by)
    if "--gpus" in options.given:
        return parse_gpus(options.gpus, options.gpus_per_node)
    return counts_by(config, options.accelerator, options.gpus_per_node, deadline - time.time())


def _deadline(by: str) -> float:
    """The end of a day, in seconds of `time.time`. Raises LaunchError."""
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
            whole_nodes(count, gpus_per_node)
        except ConfigError as error:
            raise LaunchError(f"--gpus {text}: {error}") from None
    return sorted(set(found))


def _components(options: ReliabilityOptions) -> Components | None:
    """The failure rates of components; None where no option names one, so that a rate of nodes is meant."""
    names = [field.name for field in fields(Components)]
    values = {name: value for name in names if (value := getattr(options, name)) is not None}
    flags = {f"--{name.replace('_', '-')}" for name in names if name != "gpus_per_node"}
    base, named = LLAMA_3 if options.preset == "llama3" else Components(), sorted(options.given & flags)
    if not named and base is not LLAMA_3:
        return None
    if OBSERVED in options.given:
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
        if name.endswith("_hours") and not value > 0:
            raise LaunchError(f"--{name.replace('_', '-')} {value:g}: must be more than 0 hours, or inf for never")
    return replace(base, **values)


def _rate(
    options: ReliabilityOptions, components: Components | None, config: Config | None, counts: list[int]
) -> tuple[float, str]:
    """Failures per 1,000 node-days, and the source of that rate."""
    if components is not None:
        if not components.rate_per_1000_node_days:
            raise LaunchError("nothing fails with these components: give one of them a finite mean time to failure")
        parts = [f"{name} {per_hour:.2g}/h" for name, per_hour in components.failures_per_hour().items() if per_hour]
        source = f"of components, per node: {', '.join(parts)}; node MTTF {components.mttf_hours:,.1f} h"
        return components.rate_per_1000_node_days, source
    if options.rate_per_1000_node_days is not None:
        return options.rate_per_1000_node_days, "as given"
    if config is not None and config.checkpoint.mean_hours_between_failures is not None and len(counts) == 1:
        return reliability_of(config, options.gpus_per_node, counts[0]).rate_per_1000_node_days, FROM_HOURS
    return DEFAULT_RATE, "assumed: Llama 3 saw 3.8"


def _unused_hours(config: Config | None, rate_source: str) -> list[str]:
    hours = None if config is None else config.checkpoint.mean_hours_between_failures
    if hours is None or rate_source == FROM_HOURS:
        return []
    return [
        f"checkpoint.mean_hours_between_failures {short(hours)} is not counted here: it is of a job of one size, so it "
        "counts with one number in --gpus and no failure rate"
    ]


def _size(options: ReliabilityOptions, config: Config | None) -> tuple[float, float, str]:
    """The model's parameters, the bytes of each in a checkpoint, and the source of the number of parameters."""
    text = options.parameters
    if config is None:
        number, source = (70.6e9, "Llama 3 70B, as no model is given") if text is None else (_number(text), "as given")
        return number, BYTES_PER_PARAMETER[options.contents], source
    if text is not None:
        raise LaunchError(f"--parameters {text} and {options.config_path} both say how large the model is: give one")
    own = megalite_bytes_per_parameter(config.optimizer.name, config.model)
    size = BYTES_PER_PARAMETER[options.contents] if "--contents" in options.given else own
    return parameters_of(config.model), size, str(options.config_path)


def _number(text: str) -> float:
    scale = {"k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}.get(text[-1:].lower(), 1.0)
    try:
        number = float(text[:-1] if scale != 1.0 else text) * scale
    except ValueError:
        raise LaunchError(f"--parameters {text} is no number: write it as 70.6e9 or 70.6B") from None
    return finite_number("--parameters", number)


def _communication_source(options: ReliabilityOptions, config: Config | None) -> str | None:
    """The source of the share of a step in which GPUs communicate; None where it is not counted."""
    share, accelerator = options.communication_share, options.accelerator
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
