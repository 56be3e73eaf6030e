"""Options of the job that `megalite plan reliability` and `megalite plan simulate` share. No torch here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from launch.cli.options import (
    AsJson,
    CommandOptions,
    Overrides,
    PricePerAcceleratorHour,
    check_one_format,
    checked_price,
)
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config
from megalite.planner.failure_rates import DEFAULT_RATE

DEFAULT_DAYS = 30.0


class JobOptions(CommandOptions):
    """The job, its failures, and the form of the answer."""

    config_path: Annotated[
        Path | None,
        Argument(
            help="Config from which to take the model, the checkpoints and the length of the run.",
            metavar="[CONFIG.yaml]",
        ),
    ] = None
    overrides: Overrides = None
    accelerator: str | None = Option(None, help="GPU on which to predict the steps of CONFIG, such as H100.")
    gpus_per_node: int = Option(8, min=1, help="GPUs per node; a failure of any stops the node and the job.")
    days: float | None = Option(
        None, help="Length of the run in days of wall time; default: that of CONFIG on --accelerator, or 30."
    )
    rate_per_1000_node_days: float | None = Option(
        None, help=f"Failure rate; default {DEFAULT_RATE:.0f}, beside 2 and 14, the extremes of published rates."
    )
    detection_minutes: float = Option(5.0, help="Minutes until a failure is detected.")
    restart_minutes: float = Option(5.0, help="Minutes from then, and available nodes, until training continues.")
    price_per_accelerator_hour: PricePerAcceleratorHour = None
    as_json: AsJson = False
    as_csv: bool = Option(False, "--csv", help="Print a row per number of GPUs, or per run, as CSV.")

    def checked_config(self) -> Config | None:
        """Checks what both commands check, and loads CONFIG. Raises LaunchError or ConfigError."""
        check_one_format(as_json=self.as_json, as_csv=self.as_csv)
        checked_price(self.price_per_accelerator_hour)
        self.check_numbers(above_0="days", from_0="detection_minutes restart_minutes")
        return None if self.config_path is None else load_run_config(self.config_path, self.overrides or [])
