"""The commands `megalite generate` and `megalite evaluate`; launch/inference implements them. No torch here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Annotated, Literal

import typer

from launch.cli.options import AsJson, ModelTokenizer
from launch.output import loading
from launch.runtime.printing import say

ModelPath = Annotated[
    str, typer.Argument(help="Hugging Face folder, hub id, checkpoint, or run folder.", metavar="MODEL")
]
TensorParallelSize = Annotated[int, typer.Option(min=1, help="Number of local processes that share the model.")]
Device = Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Device; auto: GPUs, if there are any.")]
Dtype = Annotated[
    Literal["auto", "fp32", "bf16", "fp16"],
    typer.Option(help="Dtype of the computation; auto: as stored on GPUs, fp32 on a CPU."),
]


def generate(
    model: ModelPath,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="Text to continue; may be repeated.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens to generate.")] = 100,
    temperature: Annotated[
        float, typer.Option(min=0.0, help="Sampling temperature; 0: always the most likely token.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(min=1, help="Sample from this many most likely tokens; default: all.")
    ] = None,
    top_p: Annotated[
        float, typer.Option(help="Sample from the fewest tokens whose probabilities reach this sum.")
    ] = 1.0,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the sampling; increases by one with each prompt.")] = 0,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Treat prompts as messages of one conversation; without any, read them line by line."
        ),
    ] = False,
    tokenizer: ModelTokenizer = None,
    tensor_parallel_size: TensorParallelSize = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Continue prompts, one after another; streams the text to stdout and reports the speed on stderr.

    Stops at the model's end token; with --chat, also at the one by which the template ends an answer. Then each prompt
    follows the answer to the one before, and without --prompt messages are typed, or read from a pipe, one a line.
    Greedy decoding gives the same text as `generate` of transformers.

    Example: `megalite generate runs/quickstart/hf --prompt "def main(" --temperature 0.8 --top-p 0.95`
    """
    from launch.inference.command_options import GenerateOptions, ModelPlacement

    place = ModelPlacement(model, tensor_parallel_size, device, dtype, tokenizer)
    options = GenerateOptions(place, prompt or [], max_new_tokens, temperature, top_k, top_p, seed, chat, as_json)
    place.check()
    with loading("PyTorch and transformers"):
        from launch.inference.generate import run
    _exit_with(lambda: run(options))


def evaluate(
    model: ModelPath,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Text to score: file, folder, glob, URL, .jsonl(.gz), .parquet or dataset:NAME; may be repeated."
        ),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Prefix of prepared data to score, or its URL; default: that of the run. May be repeated."),
    ] = None,
    text_field: Annotated[str, typer.Option(help="Field that holds the text in .jsonl, .parquet, datasets.")] = "text",
    split: Annotated[
        Literal["held_out", "train"] | None, typer.Option(help="Split of prepared data; default: held_out.")
    ] = None,
    held_out_fraction: Annotated[
        float | None, typer.Option(help="Held-out fraction of prepared data; default: that of the run, else 0.01.")
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Number of samples of prepared data; default: as in the run, else all.")
    ] = None,
    sequence_length: Annotated[
        int | None, typer.Option(min=1, help="Tokens read at once; default: as in the run, else up to 2048.")
    ] = None,
    stride: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens between windows over text; default: the sequence length (no overlap)."),
    ] = None,
    tokenizer: ModelTokenizer = None,
    tensor_parallel_size: TensorParallelSize = 1,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: AsJson = False,
) -> None:
    """Compute the loss, the perplexity and, for text, the bits per byte of a model.

    Text: every document is scored separately and every token predicted once, with at least SEQUENCE_LENGTH - STRIDE
    tokens of context from the second window on. Prepared data: packed samples; by default the held-out samples of the
    run, in its order.

    Example: `megalite evaluate runs/quickstart/hf --text README.md --sequence-length 256 --stride 128`
    """
    from launch.inference.command_options import EvaluateOptions, ModelPlacement

    place = ModelPlacement(model, tensor_parallel_size, device, dtype, tokenizer)
    options = EvaluateOptions(
        place, text or [], data or [], text_field, split, held_out_fraction, samples, sequence_length, stride, as_json
    )
    options.check()
    with loading("PyTorch and transformers"):
        from launch.inference.evaluate import run
    _exit_with(lambda: run(options))


def _exit_with(run: Callable[[], int]) -> None:
    """Exits with the code of `run`; Ctrl-C ends a long answer with a line of its own."""
    try:
        code = run()
    except KeyboardInterrupt:
        say(file=sys.stderr)
        raise
    if code:
        raise typer.Exit(code)
