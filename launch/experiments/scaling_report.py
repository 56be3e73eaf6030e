"""The result of `megalite scaling` as sentences, a table, JSON and CSV; scaling_page.py draws it."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.experiments.efficiency import ScaledPoint, ScalingPoint, scaled
from launch.experiments.scaling_page import ScalingFigures, render_scaling
from launch.output import Table, write_file
from launch.pages.sections import number_table
from megalite.units import count, percent, plural, seconds

UNKNOWN = "-"
COLUMNS = ("point", "ranks", "global batch", "step time", "tokens/s", "ideal", "efficiency", "predicted", "note")
HELD = {
    "weak": "weak scaling: the batch of a replica is held",
    "strong": "strong scaling: the global batch is held",
    "mixed": "neither the global batch nor that of a replica is held: efficiency is by tokens all the same",
}
CSV_FIELDS = (
    *("name", "ranks", "global_batch_size", "step_s", "tokens_per_s"),
    *("ideal_tokens_per_s", "predicted_tokens_per_s", "efficiency", "predicted_efficiency", "failure"),
)


@dataclass(frozen=True)
class ScalingReport:
    """The points of one scaling experiment."""

    kind: str  # weak, strong or mixed
    points: Sequence[ScalingPoint]  # those that failed among them
    crowded: Sequence[int] = ()  # numbers of ranks that share cores with each other

    @property
    def compared(self) -> list[ScaledPoint]:
        """The points that have worked, the smallest first."""
        return scaled(self.points)

    def sentences(self) -> list[str]:
        """Returns what there is to say, the most important first."""
        compared = self.compared
        said = [HELD[self.kind]]
        said += [one.sentence() for one in compared[1:]]
        if len(compared) < 2:
            said.append("an efficiency needs two points that have worked")
        if self.crowded:
            ranks = ", ".join(map(str, self.crowded))
            said.append(
                f"OVERSUBSCRIBED: with {ranks} ranks there are more ranks than cores on this machine, so these points "
                "show how ranks share cores and not how the run scales"
            )
        return [*said, *(f"{point.name} failed: {point.failure}" for point in self.points if point.failure)]

    def table(self) -> Table:
        """Returns a row per point."""
        return Table(COLUMNS, self._rows(), HELD[self.kind], (0, 8))

    def _rows(self) -> list[list[str]]:
        by_point = {id(one.point): one for one in self.compared}
        return [self._row(point, by_point.get(id(point))) for point in self.points]

    def _row(self, point: ScalingPoint, one: ScaledPoint | None) -> list[str]:
        ranks = str(point.ranks) if point.ranks else UNKNOWN
        if one is None:
            return [point.name, ranks, *[UNKNOWN] * (len(COLUMNS) - 3), point.failure or "not run"]
        notes = [point.failure, "oversubscribed" if point.ranks in self.crowded else ""]
        return [
            point.name,
            ranks,
            str(point.runs[0].samples_per_step),
            seconds(point.step_s),
            count(point.tokens_per_s),
            count(one.ideal_tokens_per_s),
            percent(one.efficiency),
            UNKNOWN if one.predicted_efficiency is None else percent(one.predicted_efficiency),
            "; ".join(filter(None, notes)),
        ]

    def facts(self) -> dict[str, Any]:
        """Returns everything for JSON."""
        return {
            "kind": self.kind,
            "oversubscribed_ranks": list(self.crowded),
            "sentences": self.sentences(),
            "points": [one.facts() for one in self.compared],
            "failures": [{"name": point.name, "reason": point.failure} for point in self.points if point.failure],
        }

    def write(self, folder: Path, title: str) -> None:
        """Writes scaling.json, scaling.csv and scaling.html. Raises LaunchError where they cannot be written."""
        facts = self.facts()
        write_file(folder / "scaling.json", json.dumps(facts, indent=2, default=str) + "\n")
        text = io.StringIO()
        writer = csv.DictWriter(text, CSV_FIELDS, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(facts["points"])
        write_file(folder / "scaling.csv", text.getvalue())
        # the reason of a failure is among the sentences; in the table it would leave no room for numbers
        rows = [
            row if row[2] != UNKNOWN else [*row[:-1], "failed" if point.failure else "not run"]
            for point, row in zip(self.points, self._rows(), strict=True)
        ]
        page = render_scaling(
            title,
            self.subtitle(),
            self.sentences()[1:],
            ScalingFigures(self.compared, self.crowded),
            number_table(COLUMNS, rows, (0, 8)),
        )
        write_file(folder / "scaling.html", page)

    def subtitle(self) -> str:
        """Says what was held, and how much was run."""
        runs = sum(len(point.runs) for point in self.points)
        return f"{HELD[self.kind]}; {plural(len(self.points), 'point')}, {plural(runs, 'run')}."
