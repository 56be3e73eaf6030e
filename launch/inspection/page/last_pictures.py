"""Draws what a run shows at its end: `python -m launch.inspection.page.last_pictures RUN_DIR FILE...`."""

from __future__ import annotations

import sys
from pathlib import Path

from launch.inspection.page.run_page import write_run_page
from launch.runtime.logs import configure_logging, get_logger
from megalite.checkpoint.safe_files import check_file_is_safe
from megalite.monitor.loss_picture import FILE, draw_loss

if __name__ == "__main__":
    configure_logging(rank=0)
    log = get_logger("launch.inspection.page.last_pictures")
    for path in (Path(sys.argv[1], name) for name in sys.argv[2:]):
        try:
            check_file_is_safe(path)  # others may have put something else there
            (draw_loss if path.name == FILE else write_run_page)(path.parent, path)
            log.info(f"wrote {path}")
        except Exception as error:
            log.warning(f"{path.name} is not written, which changes nothing for the run: {error}")
