"""Tables of a page about a run: communication, events, the settings that differ from defaults, and versions."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from data_pipeline.storage.paths import decimal_size
from launch.inspection.comparison import default_of
from launch.inspection.page.page_data import PageData
from launch.inspection.run_files import Facts, listed, number, time_of
from launch.inspection.status_output import ACCOUNT
from launch.pages.sections import PageSection, number_table
from launch.pages.svg import element
from megalite.checkpoint.manifest import printable
from megalite.config.loading.secrets_in_text import names_secret, without_secrets
from megalite.units import percent, seconds, short

MOST_EVENTS = 50
MOST_SETTINGS = 100
MOST_COMMUNICATION = 64
LONGEST_CELL = 120
HIDDEN = "***"


def communication_section(found: PageData) -> PageSection:
    """Tabulates the communication of a step by stage, axis and operation, in the last line of steps.jsonl."""
    rows, wall_s = [], number(found.history.breakdowns[-1].get("wall_s")) if found.history.breakdowns else None
    for stage in found.last_breakdown:
        lines = stage.get("communication")
        for line in (one for one in listed(lines) if isinstance(one, Mapping)):
            calls, size, took_s = (number(line.get(name)) for name in ("calls", "bytes", "seconds"))
            if calls is None or size is None or took_s is None or min(calls, size, took_s) < 0:
                continue
            rows.append(
                [
                    str(stage.get("stage")),
                    str(line.get("axis")),
                    str(line.get("operation")).replace("_", " "),
                    short(calls),
                    decimal_size(int(size)),
                    seconds(took_s),
                    percent(took_s / wall_s) if wall_s else "",
                    f"{decimal_size(int(size / took_s))}/s" if took_s > 0 else "",
                ]
            )
    if not rows:
        return PageSection("communication", "Communication", "No line of steps.jsonl says what ranks exchanged.")
    header = ["stage", "axis", "operation", "calls", "bytes", "time", "share of the step", "bytes/s"]
    caption = (
        f"One step of the first rank of each stage, as of step {found.history.breakdowns[-1].get('step')}. Time is how "
        "long the rank was held up, with the wait for others, so bytes/s is no speed of a link."
    )
    table = number_table(header, rows[:MOST_COMMUNICATION], words=[1, 2])
    return PageSection("communication", "Communication", caption, [element("div", table, class_="wide")])


def events_section(found: PageData) -> PageSection:
    """Tabulates the last events."""
    events = found.events[-MOST_EVENTS:]
    if not events:
        return PageSection("events", "Events", "events.jsonl has no event.")
    rows = [[_moment(time_of(event)), str(event["event"]).replace("_", " "), _facts(event)] for event in events]
    caption = f"The last {len(events)} of {len(found.events):,} events." if len(events) < len(found.events) else ""
    table = number_table(["time (UTC)", "event", "facts"], rows, words=[0, 1, 2])
    return PageSection("events", "Events", caption, [element("div", table, class_="wide")])


def _moment(at: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(at)) if at > 0 else ""
    except (OverflowError, ValueError, OSError):
        return ""


def _facts(event: Facts) -> str:
    known = {name: value for name, value in event.items() if name not in ACCOUNT and value is not None}
    return _cell(", ".join(f"{name} {_value(name, value)}" for name, value in known.items()))


def _cell(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}..."


def settings_section(found: PageData) -> PageSection:
    """Tabulates the settings that differ from their defaults; a secret is `***`."""
    config = found.history.files.config
    if config is None:
        return PageSection("settings", "Settings", "config.yaml is missing or cannot be read.")
    rows = [
        [name, _value(name, value), _value(name, default)]
        for name, value, default in _changed(config.model_dump(mode="json"))
    ]
    caption = f"What the run's config.yaml sets to another value than the default: {len(rows)} settings."
    table = number_table(["setting", "value", "default"], rows[:MOST_SETTINGS], words=[0, 1, 2])
    return PageSection("settings", "Settings", caption, [element("div", table, class_="wide")])


def _changed(values: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yields name, value and default of each setting that is not what it is without being set; None: no default."""
    for place in _places(values):
        own, default = reduce(getitem, place, values), default_of(values, place)
        if own != default:
            yield ".".join(place), own, default


def _places(values: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yields the names of each setting, that of its section first."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _places(value, (*above, name))
        else:
            yield *above, name


def _value(name: str, value: Any) -> str:
    """Returns a value as it is shown; a text whose option is named as secrets are is hidden."""
    if value is None:
        return ""
    if isinstance(value, str) and names_secret(name.rpartition(".")[2]):
        return HIDDEN
    shown = without_secrets(value)
    return _cell(shown if isinstance(shown, str) else json.dumps(shown, default=str))


def versions_section(found: PageData) -> PageSection:
    """Tabulates the versions that ran, the machine of rank 0 and the command."""
    receipt = found.receipt
    rows = []
    for name in ("versions", "machine", "git"):
        for key, value in getattr(receipt, name).items():
            rows.append([printable(str(key)), _cell(str(without_secrets(value)))])
    if receipt.command:
        rows.append(["command", _cell(" ".join(hide_arguments([str(one) for one in receipt.command])))])
    for name in ("seed", "data_fingerprint", "written"):
        if (value := getattr(receipt, name)) is not None:
            rows.append([name.replace("_", " "), _cell(str(value))])
    if not rows:
        return PageSection("versions", "Versions", "receipt.json is missing or cannot be read.")
    return PageSection("versions", "Versions", "", [number_table(["what", "value"], rows, words=[0, 1])])


def hide_arguments(command: list[str]) -> list[str]:
    """Returns a command line without secrets: neither texts that look like one, nor values of names that hold one."""
    shown, hides_next = [], False
    for argument in without_secrets(command):
        name, equals, _ = argument.lstrip("-").partition("=")
        is_secret = names_secret(name.rpartition(".")[2].replace("-", "_"))
        if hides_next and not argument.startswith("-"):
            shown.append(HIDDEN)
        else:
            shown.append(argument[: argument.index("=") + 1] + HIDDEN if is_secret and equals else argument)
        hides_next = is_secret and not equals and argument.startswith("-")
    return shown
