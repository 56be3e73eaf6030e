"""Checks of a Chrome trace, by the rules of its format, which know nothing of how it was made."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

NS = 1e-3  # microseconds


def read_trace(path: Path) -> list[dict[str, Any]]:
    """The events of a compressed trace; NaN and infinity, which are no JSON, are refused."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    events = json.loads(gzip.decompress(path.read_bytes()), parse_constant=refuse)["traceEvents"]
    assert isinstance(events, list)
    return events


def check_sound(events: list[dict[str, Any]]) -> int:
    """Fails where times are no numbers, spans of a track overlap, a track has no name, or an arrow lacks an end, leads
    backwards or begins or ends outside of a span. Returns the number of arrows."""
    tracks, named = defaultdict(list), set()
    arrows: dict[Any, dict[str, Any]] = defaultdict(dict)
    for event in events:
        if event["ph"] == "M":
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert isinstance(event["ts"], int | float) and math.isfinite(event["ts"]) and event["ts"] >= 0, event
        if event["ph"] == "X":
            assert event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"], event["name"]))
        elif event["ph"] in ("s", "f"):
            assert event["ph"] not in arrows[event["id"]], f"a second end: {event}"
            arrows[event["id"]][event["ph"]] = event
        else:
            assert event["ph"] == "i", event
    processes = {process for what, process, _ in named if what == "process_name"}
    for (process, track), spans in tracks.items():
        assert process in processes and ("thread_name", process, track) in named
        spans.sort()
        for one, after in pairwise(spans):
            assert after[0] > one[1] - NS, f"process {process}, track {track}: {one} and {after} overlap"
    for number, ends in arrows.items():
        assert ends.keys() == {"s", "f"}, f"arrow {number} has one end"
        assert ends["f"]["ts"] >= ends["s"]["ts"] - NS, f"arrow {number} leads backwards: {ends}"
        for end in ends.values():
            spans = tracks[end["pid"], end["tid"]]
            assert any(begin - NS <= end["ts"] <= stop + NS for begin, stop, _ in spans), f"arrow {number} hangs"
    return len(arrows)
