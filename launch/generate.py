"""`megalite generate`: how a stored model goes on from prompts, as text that appears while it is made.

In: prompts and how tokens are chosen. Out: a `Generation` for each prompt, one after another. The tokens are
`models.generation`'s; greedy ones are those of transformers' `generate`.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from launch.errors import LaunchError
from launch.inference import Loaded, Place, load, rank_main
from launch.inference import run as run_anywhere
from launch.ranks import run_to_the_end
from launch.stored_model import StoredModel
from launch.text_stream import TextStream
from models.generation import generate as generate_tokens
from models.sampling import Sampling

Write = Callable[[str], object]
LEAST_TEMPERATURE = 1e-6  # logits over a smaller one may be infinite


@dataclass(frozen=True)
class GenerateRequest:
    """What `megalite generate` is asked for."""

    place: Place
    prompts: list[str]
    max_new_tokens: int = 128
    temperature: float = 0.0  # 0: always the likeliest token
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0  # of the first prompt, the next one's is one more
    chat: bool = False  # prompts are a user's messages, put into the tokenizer's chat template
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1 or (self.top_k is not None and self.top_k < 1):
            raise LaunchError("max_new_tokens and top_k are at least 1")
        if self.temperature != 0 and not LEAST_TEMPERATURE <= self.temperature < math.inf:
            raise LaunchError(
                f"temperature {self.temperature} is neither 0 nor a finite number from {LEAST_TEMPERATURE} on"
            )
        if any("\ud800" <= character <= "\udfff" for prompt in self.prompts for character in prompt):
            raise LaunchError("a prompt is not UTF-8 text: no tokenizer reads it")
        if not 0 < self.top_p <= 1:
            raise LaunchError(f"top_p {self.top_p} is not above 0 and at most 1")
        if self.temperature == 0 and (self.top_k is not None or self.top_p < 1):
            raise LaunchError("top_k and top_p choose among tokens to draw: set temperature above 0, such as 1.0")

    @property
    def sampling(self) -> Sampling:
        return Sampling(self.temperature, self.top_k, self.top_p)


@dataclass(frozen=True)
class Generation:
    """A prompt and how the model went on."""

    prompt: str
    completion: str
    prompt_tokens: int
    new_tokens: int  # an end token included
    stopped_by: Literal["end_token", "max_new_tokens"]
    prompt_s: float = field(compare=False)  # until the first new token
    seconds: float = field(compare=False)  # in all

    @property
    def text(self) -> str:
        """Both, as one reads it."""
        return self.prompt + self.completion

    @property
    def tokens_per_second(self) -> float:
        """Of the new tokens but the first, whose time is the prompt's."""
        return (self.new_tokens - 1) / (self.seconds - self.prompt_s) if self.new_tokens > 1 else 0.0


def generate(
    path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
    chat: bool = False,
) -> Generation:
    """Continues `prompt` with the model at `path`, on this process: a Hugging Face folder, hub id, checkpoint or run.

    Temperature 0 takes the likeliest token each time; otherwise tokens are drawn, from the `top_k` likeliest, and from
    the likeliest that have the probability `top_p` together.
    """
    place = Place(str(path))
    request = GenerateRequest(place, [prompt], max_new_tokens, temperature, top_k, top_p, seed, chat)
    (generation,) = generations(request, load(place), lambda text: None)
    return generation


def generations(request: GenerateRequest, loaded: Loaded, write: Write) -> Iterator[Generation]:
    """One for each prompt; `write` gets the text, the prompt's first unless it is a chat, as it comes.

    All ranks run this together. Raises LaunchError where there is no tokenizer, or it does not go with the model.
    """
    model, tokenizer = loaded.stored.model, loaded.stored.load_tokenizer()
    prompts, ends = _prompts(request, loaded.stored, tokenizer), loaded.stored.end_tokens(tokenizer)
    for number, (prompt, tokens) in enumerate(zip(request.prompts, prompts, strict=True)):
        generator = torch.Generator().manual_seed(request.seed + number)
        choose = partial(request.sampling.choose, generator=generator)
        stream, pieces = TextStream(tokenizer, tokens), []
        write("" if request.chat else prompt)
        times, token = [time.perf_counter()], -1
        for token in generate_tokens(loaded.module, model, loaded.tp, tokens, choose, request.max_new_tokens):
            times.append(time.perf_counter())
            pieces.append(stream.add(token))
            write(pieces[-1])
            if token in ends:
                break
        pieces.append(stream.rest())
        write(pieces[-1])
        yield Generation(
            prompt,
            completion="".join(pieces),
            prompt_tokens=len(tokens),
            new_tokens=len(times) - 1,
            stopped_by="end_token" if token in ends else "max_new_tokens",
            prompt_s=times[1] - times[0],
            seconds=times[-1] - times[0],
        )


def _prompts(request: GenerateRequest, stored: StoredModel, tokenizer: Any) -> list[list[int]]:
    """Token ids of each prompt; of an empty one the token that documents start after. Raises LaunchError."""
    prompts = [_tokens_of(prompt, request.chat, stored, tokenizer) for prompt in request.prompts]
    model, new = stored.model, request.max_new_tokens
    largest, longest = max(map(max, prompts)), max(map(len, prompts))
    if largest >= model.vocab_size:
        raise LaunchError(
            f"{stored.folder}: its tokenizer makes token {largest} of the prompt, but its model knows only "
            f"{model.vocab_size}: it is another model's tokenizer"
        )
    room = model.max_position_embeddings + 1 - longest  # the last new token is never read
    if model.position_embedding == "learned" and new > room:
        raise LaunchError(
            f"{longest} tokens of the prompt and {new} new ones are more than the {model.max_position_embeddings} "
            f"positions that this model has learned: {'shorten the prompt' if room < 1 else f'ask for {room} new ones'}"
        )
    return prompts


def _tokens_of(prompt: str, chat: bool, stored: StoredModel, tokenizer: Any) -> list[int]:
    if chat:
        if not tokenizer.chat_template:
            raise LaunchError(f"{stored.folder}: its tokenizer has no chat template: leave out --chat")
        message = {"role": "user", "content": prompt}
        try:
            rendered = tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True)
        except Exception as error:  # a template is a program, and may raise anything
            raise LaunchError(f"{stored.folder}: its chat template takes no message of a user alone: {error}") from None
        ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]  # the template has them
    else:
        ids = tokenizer(prompt)["input_ids"]
    start = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids and not start:
        raise LaunchError("the prompt is empty, and the tokenizer has no token that starts a text: give a prompt")
    return list(ids) or start


def run(request: GenerateRequest) -> int:
    """`megalite generate`; the exit code."""
    return run_anywhere("launch.generate", request, check, show)


def check(request: GenerateRequest, stored: StoredModel) -> None:
    """Raises LaunchError for what is wrong with the prompts."""
    _prompts(request, stored, stored.load_tokenizer())


def show(request: GenerateRequest, loaded: Loaded) -> None:
    """The work of `megalite generate`: text to stdout as it comes, or JSON at the end; how fast it went to stderr."""
    speaks = loaded.is_speaker and not request.as_json
    longest = loaded.stored.model.max_position_embeddings

    def write(text: str) -> None:
        if speaks and text:
            sys.stdout.write(text)
            sys.stdout.flush()

    made = []
    for generation in generations(request, loaded, write):
        made.append(generation)
        write("\n")
        if speaks:
            print(f"megalite: {_sentence(generation)}", file=sys.stderr, flush=True)
        length = generation.prompt_tokens + generation.new_tokens
        if loaded.is_speaker and length > longest:
            print(f"megalite: {length} tokens are more than the {longest} this model is meant for", file=sys.stderr)
    if loaded.is_speaker and request.as_json:
        rows = [asdict(generation) | {"tokens_per_second": generation.tokens_per_second} for generation in made]
        print(json.dumps({"model": str(loaded.stored.folder), "generations": rows}, indent=2))


def _sentence(generation: Generation) -> str:
    end = ", up to an end token" if generation.stopped_by == "end_token" else ""
    return (
        f"{generation.prompt_tokens} tokens read in {generation.prompt_s:.2f} s, {generation.new_tokens} made{end}, "
        f"{generation.tokens_per_second:.1f} tokens/s"
    )


if __name__ == "__main__":
    run_to_the_end(lambda: rank_main(sys.argv[1:], GenerateRequest, show))
