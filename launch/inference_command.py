"""`megalite generate|evaluate`: the words of the command line. No torch here."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from launch.arguments import AsJson
from launch.errors import INTERRUPTED_CODE

if TYPE_CHECKING:
    from launch.inference import Place


class DeviceName(enum.StrEnum):
    """What a model runs on."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class DtypeName(enum.StrEnum):
    """What it computes in."""

    AUTO = "auto"
    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


class SplitName(enum.StrEnum):
    """Documents of prepared data."""

    HELD_OUT = "held_out"
    TRAIN = "train"


ModelPath = Annotated[
    str, typer.Argument(help="Hugging Face folder or hub id, checkpoint, or run folder.", metavar="MODEL")
]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="Processes on this machine that share the model.")]
DeviceOption = Annotated[DeviceName, typer.Option(help="auto: GPUs, if there are any.")]
DtypeOption = Annotated[DtypeName, typer.Option(help="auto: as stored on GPUs, fp32 on a CPU.")]


def generate(
    model: ModelPath,
    prompt: Annotated[list[str], typer.Option("--prompt", "-p", help="Text to go on from; may be given again.")],
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to generate at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: always the likeliest token.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(min=1, help="Sample among this many likeliest; default: all.")] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample among the fewest likeliest that have this probability together.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling; of each further prompt one more.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="A prompt is a user's message: use the chat template.")] = False,
    tensor_parallel_size: TensorParallelSize = 1,
    device: DeviceOption = DeviceName.AUTO,
    dtype: DtypeOption = DtypeName.AUTO,
    as_json: AsJson = False,
) -> None:
    """Continue prompts, one after another; text appears as it is made, how fast on stderr.

    Ends at the model's end token. Greedy text is that of transformers' `generate`.

    Example: `megalite generate runs/quickstart/hf --prompt "def main(" --temperature 0.8 --top-p 0.95`
    """
    from launch.generate import GenerateRequest, run

    place = _place(model, tensor_parallel_size, device, dtype)
    request = GenerateRequest(place, prompt, max_new_tokens, temperature, top_k, top_p, seed, chat, as_json)
    _end(lambda: run(request))


def evaluate(
    model: ModelPath,
    text: Annotated[
        list[str] | None,
        typer.Option(help="Text to score: file, folder, glob, .jsonl(.gz) or dataset:NAME; may be given again."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Prefix of prepared data to score; default: the run's own. May be given again."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text in .jsonl and datasets.")] = "text",
    split: Annotated[SplitName | None, typer.Option(help="Of prepared data; default: held_out.")] = None,
    held_out_fraction: Annotated[
        float | None, typer.Option(help="Of prepared data; default: the run's, else 0.01.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Of prepared data; default: as many as the run evaluates on, else all.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens read at once; default: the run's, else up to 2048.")
    ] = None,
    stride: Annotated[
        int | None, typer.Option(min=1, help="Tokens between windows over text; default: sequence length, no overlap.")
    ] = None,
    tensor_parallel_size: TensorParallelSize = 1,
    device: DeviceOption = DeviceName.AUTO,
    dtype: DtypeOption = DtypeName.AUTO,
    as_json: AsJson = False,
) -> None:
    """Loss, perplexity and, for text, bits per byte of a model.

    Text: each document by itself, each token predicted once, with at least SEQUENCE_LENGTH - STRIDE tokens of context
    from the second window on. Prepared data: packed samples; of a run its own held-out ones, in its own order.

    Example: `megalite evaluate runs/quickstart/hf --text README.md --sequence-length 256 --stride 128`
    """
    from launch.evaluate import run
    from launch.evaluation_data import EvaluateRequest

    place = _place(model, tensor_parallel_size, device, dtype)
    request = EvaluateRequest(
        place,
        text or [],
        data or [],
        text_field,
        split.value if split else None,
        held_out_fraction,
        samples,
        sequence_length,
        stride,
        as_json,
    )
    _end(lambda: run(request))


def _place(path: str, tensor_parallel_size: int, device: DeviceName, dtype: DtypeName) -> Place:
    from launch.inference import Place

    return Place(path, tensor_parallel_size, device.value, dtype.value)


def _end(run: Callable[[], int]) -> None:
    """Ctrl-C ends a long answer without a traceback."""
    try:
        code = run()
    except KeyboardInterrupt:
        print(file=sys.stderr)
        code = INTERRUPTED_CODE
    if code:
        raise typer.Exit(code)
