"""The page of `megalite plan --html` for a model of Llama 3 405B's shape on 512 H100, as a picture for the docs.

    python -m benchmarks.planner.plan_screenshot              # seconds; writes docs/images/plan_report.png

Needs chromium: `make test-packages` as root on Debian installs it.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

from PIL import Image

from launch.planning.report.page import write_report
from megalite.config import Config
from megalite.config.auto import CHOOSABLE
from megalite.planner.hardware import ClusterFile, cluster_of
from megalite.planner.search import ZERO, search
from tests.helpers.browser import look_at, photograph, why_no_browser

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "plan_report.png"
WIDTH = 1120
PRICE = 2.5  # of an accelerator-hour
CONFIG = {
    "run_dir": "runs/llama-3-405b",
    "model": {
        "vocab_size": 128_256,
        "hidden_size": 16_384,
        "intermediate_size": 53_248,
        "num_hidden_layers": 126,
        "num_attention_heads": 128,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "data": {"path": "data/text"},
    "precision": {"dtype": "bf16"},
    "training": {"global_batch_size": 256, "micro_batch_size": 1, "sequence_length": 8192, "tokens": 300_000_000_000},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, help="keep the page here as well")
    arguments = parser.parse_args()
    if reason := why_no_browser():
        sys.exit(reason)
    cluster = cluster_of(ClusterFile(accelerator="H100", nodes=64), "512 x H100")
    # ZeRO stays at stage 1, so that the best layout is one with a pipeline to look at
    config = Config.model_validate(CONFIG)
    result = search(config, cluster, free=CHOOSABLE - {ZERO})
    with tempfile.TemporaryDirectory() as folder:
        page = arguments.page or Path(folder) / "plan.html"
        write_report(page, result, cluster, "A 405B model of Llama 3's shape on 512 x H100", config, PRICE)
        height = math.ceil(look_at(page, (WIDTH, 3000)).height)
        said = photograph(page, PICTURE, (WIDTH, height))
    with Image.open(PICTURE) as picture:  # 256 colours are enough, and less than half of the size
        picture.convert("RGB").quantize(256, Image.Quantize.MAXCOVERAGE).save(PICTURE, optimize=True)
    print(f"{PICTURE}: {WIDTH} x {height}, {PICTURE.stat().st_size / 1000:.0f} kB", *said, sep="\n")


if __name__ == "__main__":
    main()
