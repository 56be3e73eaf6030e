"""The command-line options of `megalite generate` and `megalite evaluate`, checked before PyTorch is loaded."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.samples.token_stream import Split
from data_pipeline.sources import open_sources
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.paths import is_url
from launch.conversion.huggingface.folder_lookup import is_hub_id
from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.huggingface.json_files import CONFIG, refuse_adapter
from megalite.checkpoint.manifest import find_latest, no_checkpoint

MOST_NEW_TOKENS = 1_000_000  # the cache has room for all of them from the beginning on
LEAST_TEMPERATURE = 1e-6  # logits divided by a smaller one may be infinite


@dataclass(frozen=True)
class ModelPlacement:
    """A model and the devices to run it on."""

    path: str  # Hugging Face folder, hub id, checkpoint or run folder
    tensor_parallel_size: int = 1
    device: str = "auto"  # cpu or cuda; auto: GPUs if there are any
    dtype: str = "auto"  # fp32, bf16 or fp16; auto: as stored on GPUs, fp32 on a CPU
    tokenizer: str | None = None  # its folder; None: the one that the model knows

    def check(self) -> None:
        """Raises LaunchError or CheckpointError if there is no model at the path; asks no hub."""
        folder = Path(self.path)
        if not is_hub_id(folder) and not (folder / CONFIG).is_file():
            refuse_adapter(folder)
            newest, reasons = find_latest(folder)
            if newest is None:
                raise CheckpointError(reasons[0] if reasons else no_checkpoint(folder))


@dataclass(frozen=True)
class GenerateOptions:
    """The options that a user has given `megalite generate`."""

    place: ModelPlacement
    prompts: list[str]  # none in chat: what is typed
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the most likely token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0  # for the first prompt; each further one adds one
    chat: bool = False  # prompts are a user's messages in one conversation, rendered by the tokenizer's chat template
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or (self.top_k is not None and self.top_k < 1):
            raise LaunchError("max_new_tokens and top_k are at least 1")
        if self.max_new_tokens > MOST_NEW_TOKENS:
            raise LaunchError(f"max_new_tokens {self.max_new_tokens:,} is more than {MOST_NEW_TOKENS:,}: ask for fewer")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise LaunchError(
                f"temperature {self.temperature} is neither 0 nor a finite number from {LEAST_TEMPERATURE} on"
            )
        if not self.prompts and not self.chat:
            raise LaunchError("give --prompt TEXT; with --chat alone a conversation is read from standard input")
        if not self.prompts and self.place.tensor_parallel_size > 1:
            raise LaunchError(
                "a conversation is read from standard input by one process: give its messages by --prompt, or leave "
                "out --tensor-parallel-size"
            )
        if any("\ud800" <= character <= "\udfff" for prompt in self.prompts for character in prompt):
            raise LaunchError("a prompt is not UTF-8 text: no tokenizer reads it")
        if not 0 < self.top_p <= 1:
            raise LaunchError(f"top_p {self.top_p} is not above 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise LaunchError("top_k and top_p choose among tokens to draw: set temperature above 0, such as 1.0")


@dataclass(frozen=True)
class EvaluateOptions:
    """The options that a user has given `megalite evaluate`; None and empty: those of the run, or everything."""

    place: ModelPlacement
    text: list[str]  # sources, as `megalite prepare` takes them
    data: list[str]  # prefixes of prepared data
    text_field: str = "text"
    split: Split | None = None
    held_out_fraction: float | None = None
    samples: int | None = None
    sequence_length: int | None = None
    stride: int | None = None
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.text and self.data:
            raise LaunchError("--text and --data are two things to score: give one of them")
        of_data = {"--split": self.split, "--held-out-fraction": self.held_out_fraction, "--samples": self.samples}
        for option, value in of_data.items() if self.text else [("--stride", self.stride)]:
            if value is not None:
                raise LaunchError(f"{option} belongs to {'--data' if self.text else '--text'}: leave it out")

    def check(self) -> None:
        """Raises LaunchError, CheckpointError or DataError if a file of this machine is missing."""
        self.place.check()
        if here := [text for text in self.text if not is_url(text)]:
            open_sources(here, self.text_field)
        for prefix in itertools.filterfalse(is_url, self.data):
            IndexedTokens(Path(prefix))
