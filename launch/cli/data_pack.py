"""The command `megalite data pack`: a table around `launch.trainer.data.packing`."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.output import Table, print_json, spinner
from launch.runtime.logs import get_logger
from launch.trainer.start.run_config import load_run_config

if TYPE_CHECKING:
    from launch.trainer.data.packing import PackedSplit

log = get_logger(__name__)


def pack(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Compute which documents share a sample, for a run with `data.packing: best_fit`.

    The plan of each split is written beside the token files, or into data.cache where these may not be written, and
    computed again only where they, the sequence length or the held-out fraction have changed. Ranks read of it what
    their samples need. Samples without any token that carries loss are counted, and refused if there are no others.

    Example: `megalite data pack configs/quickstart.yaml data.packing=best_fit data.document_mask=true`
    """
    from launch.trainer.data.opening import open_texts
    from launch.trainer.data.packing import pack_data
    from launch.trainer.data.remote_data import copies_here, with_copies
    from launch.trainer.loss_targets import notices_of_targets

    config = load_run_config(config_path, overrides or [], needs_length=False)
    with spinner("packing", is_shown=not as_json) as describe:
        places = copies_here(config.data, config.training.sequence_length, may_fetch=True, tell=describe)
        here = config.model_copy(update={"data": with_copies(config.data, places)})
        packed = pack_data(here, describe)
    if as_json:
        print_json([asdict(each) for each in packed])
    else:
        _print_table(packed)
    for notice in notices_of_targets(open_texts(here, config.training.sequence_length), config.data.too_long):
        log.warning(notice)


def _print_table(packed: list[PackedSplit]) -> None:
    rows = [
        (
            str(each.prefix),
            each.split,
            f"{each.tokens:,}",
            f"{each.pieces:,}",
            f"{each.samples:,}",
            "-" if each.filled is None else f"{each.filled:.3%}",
            "already packed" if each.is_reused else "packed",
        )
        for each in packed
    ]
    columns = ("data", "split", "tokens", "pieces", "samples", "filled", "plan")
    Table(columns, rows, text_columns=(0, 1, 6)).print()
