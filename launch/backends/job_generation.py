"""Shared by commands that generate a scheduler's job: checks the run, fits its layout to nodes, delivers the text."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import LaunchError
from launch.output import check_writable, write_file
from launch.runtime.devices import Device
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config, ResolvedLayout, wanted_world_size
from megalite.config.suggestions import neighbours
from megalite.units import plural

log = get_logger(__name__)


@dataclass(frozen=True)
class Delivery:
    """Destination of generated text: a file, a scheduler, or, without either, standard output."""

    file: Path | None
    overwrite: bool
    submit: bool
    dry_run: bool
    as_json: bool

    def check(self) -> None:
        """Raises LaunchError if the file cannot be written, or exists and must not be replaced."""
        if self.file is None:
            return
        check_writable(self.file)
        if self.file.exists() and not self.overwrite:
            raise LaunchError(f"{self.file} is there already: give --overwrite, or write another file")

    def write(self, text: str, next_step: str) -> list[str]:
        """Writes the file, except in a dry run; returns a sentence that says so, with the user's `next_step`."""
        if self.file is None or self.dry_run:
            return []
        write_file(self.file, text)
        return [f"wrote {self.file}{next_step}"]

    def report(
        self, text: str, facts: Mapping[str, Any], notices: Sequence[str], done: Sequence[str], summary: str = ""
    ) -> None:
        """Prints the result: as JSON with all `facts`, or the text if it goes nowhere else, or what was done.

        A dry run prints the `summary`, if there is one, instead of the text.
        """
        if self.as_json:
            print_result(json.dumps({**facts, "notices": list(notices), "done": list(done)}, indent=2))
            return
        for notice in notices:
            log.warning(notice)
        prints_text = self.file is None and not self.submit and not (summary and self.dry_run)
        if prints_text:
            print_result(text, end="")
        elif summary:
            say(summary)
        for sentence in done:
            say(sentence, file=sys.stderr if prints_text else sys.stdout)


def load_checked_config(config_path: Path, overrides: Sequence[str] | None) -> Config:
    """Loads a config for a supervised run. Raises ConfigError or LaunchError for what its ranks would reject."""
    from launch.supervision.supervisor import check_resumes
    from launch.trainer.start.checks import check_run

    config = load_run_config(config_path, overrides or [])
    check_resumes(config)
    check_run(config)
    return config


def fit_layout(
    config: Config,
    nodes: int,
    gpus_per_node: int,
    *,
    cpu_ranks_per_node: int | None = None,
    ranks_option: str | None = None,
    check_versions: bool = False,
) -> tuple[ResolvedLayout, int, list[str]]:
    """Returns the layout on `nodes` nodes, the ranks per node, and notices.

    `ranks_option` names the command's option for `cpu_ranks_per_node`, if it has one. `check_versions` also checks the
    installed packages, which are those of the ranks if nodes share this environment. Raises ConfigError or LaunchError
    if the layout does not fit.
    """
    from launch.prediction.auto_layout import layout_or_likely
    from megalite.config.auto import PIPELINE
    from megalite.config.rules.known_bad import check_known_bad, installed_versions
    from megalite.planner.search import TENSOR, Ranks

    give_option = "" if ranks_option is None else f"give {ranks_option}, or "
    per_node = gpus_per_node or cpu_ranks_per_node
    if per_node is None and {TENSOR, PIPELINE} & config.unresolved_options:
        raise LaunchError(
            f"parallel is auto, so nothing says how many ranks a node has on the CPU: {give_option}state "
            "parallel.tensor_parallel_size, pipeline_parallel_size and data_parallel_size"
        )
    world_size = nodes * per_node if per_node else wanted_world_size(config, None)
    ranks, left_over = divmod(world_size, nodes)
    if left_over or not ranks:
        is_open = ranks_option is not None and config.parallel.data_parallel_size == "auto"
        another = f"or {ranks_option}" if is_open else "or another parallel.data_parallel_size"
        near = neighbours(nodes, (count for count in range(1, world_size + 1) if not world_size % count))
        raise LaunchError(
            f"the layout has {plural(world_size, 'rank')} on the CPU, which {nodes} nodes cannot share "
            f"equally: give --nodes {near}, {another}"
        )
    device: Device = "cuda" if gpus_per_node else "cpu"
    likely, layout, later = layout_or_likely(config, Ranks(world_size, ranks, device))
    if check_versions:
        check_known_bad(likely, layout, installed_versions(), device)
    notices = [*layout.notices, *later]
    if ranks % layout.tensor_parallel_size:
        notices.append(
            f"tensor parallelism over {layout.tensor_parallel_size} ranks crosses nodes of {ranks}: every layer will "
            f"wait for the network; use a parallel.tensor_parallel_size that divides the ranks of a node"
        )
    return layout, ranks, notices
