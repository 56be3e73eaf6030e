"""`megalite generate`: continues prompts with a stored model and streams the text.

In: prompts and sampling options. Out: a `Generation` for each prompt, one after another. Tokens come from
`models.generation`; greedy ones equal those of transformers' `generate`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import torch

from data_pipeline.storage.paths import decimal_size
from data_pipeline.tokenizers.reading import HubTokenizer
from launch.conversion.huggingface.model_folder import DTYPES
from launch.errors import LaunchError
from launch.inference.chat_template import Dialogue
from launch.inference.command_options import GenerateOptions, ModelPlacement
from launch.inference.session import Loaded, load, rank_main, resolve, run_here_or_on_ranks
from launch.inference.stored_model import StoredModel
from launch.runtime.devices import gpu_memory_bytes
from launch.runtime.host_probe import host_memory_bytes
from launch.runtime.logs import get_logger
from launch.runtime.printing import print_result, say
from launch.runtime.rank_process import run_to_the_end
from megalite.config import ModelConfig
from models.generation import Sampling
from models.generation import generate as generate_tokens

log = get_logger(__name__)

CUT_CHARACTER = "\ufffd"  # a tokenizer decodes an incomplete character to this


class TextStream:
    """Decodes new tokens after a prompt incrementally, without special tokens.

    A token is decoded together with the tokens before it, whose text is then removed: many tokenizers drop the leading
    space of a single token. The context is as short as the last piece of text that was returned.
    """

    def __init__(self, tokenizer: HubTokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer, self._tokens = tokenizer, list(prompt)
        self._first, self._done = 0, len(prompt)  # context starts at `_first`; text was returned up to `_done`

    def add(self, token: int) -> str:
        """Returns the text that `token` adds; empty while it ends in the middle of a character."""
        self._tokens.append(token)
        text = self._pending()
        if text.endswith(CUT_CHARACTER) or not text:
            return ""
        self._first, self._done = self._done, len(self._tokens)
        return text

    def rest(self) -> str:
        """Returns the pending text after the last token."""
        text = self._pending()
        self._first = self._done = len(self._tokens)
        return text

    def _pending(self) -> str:
        parts = self._tokens[self._first : self._done], self._tokens[self._first :]
        context, text = (self._tokenizer.decode(tokens) for tokens in parts)
        return text[len(context) :]


Write = Callable[[str], object]


@dataclass(frozen=True)
class Generation:
    """A prompt and its continuation by the model."""

    prompt: str
    completion: str
    prompt_tokens: int
    new_tokens: int  # including an end token
    stopped_by: Literal["end_token", "max_new_tokens"]
    prompt_s: float = field(compare=False)  # time to the first new token
    seconds: float = field(compare=False)  # total

    @property
    def text(self) -> str:
        """The prompt and its completion."""
        return self.prompt + self.completion

    @property
    def tokens_per_second(self) -> float:
        """The speed without the first new token, whose time includes the prompt."""
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
    tokenizer: str | Path | None = None,
) -> Generation:
    """Continues `prompt` with the model at `path`, on this process: a Hugging Face folder, hub id, checkpoint or run.

    Temperature 0 always takes the most likely token; otherwise tokens are sampled from the `top_k` most likely, and
    from the most likely with a total probability of `top_p`. tokenizer: its folder; by default the model's own.
    """
    place = ModelPlacement(str(path), tokenizer=None if tokenizer is None else str(tokenizer))
    options = GenerateOptions(place, [prompt], max_new_tokens, temperature, top_k, top_p, seed, chat)
    (generation,) = generations(options, load(place), lambda text: None)
    return generation


def generations(options: GenerateOptions, loaded: Loaded, write: Write) -> Iterator[Generation]:
    """Yields one generation per prompt; passes the text to `write` as it is generated, the prompt first unless in chat.

    In chat the prompts are the messages of one conversation, or what is typed where there is none. All ranks run this
    together. Raises LaunchError if there is no tokenizer, or it does not match the model.
    """
    stored, tokenizer = loaded.stored, loaded.stored.loaded_tokenizer
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    with _dialogue(options, stored, tokenizer) as dialogue:
        ends = stored.end_tokens(tokenizer) | (dialogue.end_of_turn if dialogue else frozenset())
        warned = len(options.prompts) == 1 or dialogue is None or not loaded.is_rank_zero  # all was said beforehand
        for number, prompt in enumerate(options.prompts or _typed_messages()):
            try:
                tokens = _prompt_tokens(options, stored, tokenizer, dialogue, number, prompt)
            except LaunchError as error:
                if options.prompts:
                    raise
                log.error("%s", error)  # the conversation goes on without this message
                continue
            warned = warned or _warn_of_length(stored.model, len(tokens), options.max_new_tokens)
            generator = torch.Generator().manual_seed(options.seed + number)
            choose = partial(sampling.choose, generator=generator)
            stream, pieces = TextStream(tokenizer, tokens), []
            write("" if dialogue else prompt)
            times, token = [time.perf_counter()], -1
            for token in generate_tokens(
                loaded.module, stored.model, loaded.tp, tokens, choose, options.max_new_tokens
            ):
                times.append(time.perf_counter())
                if token in ends:
                    break
                pieces.append(stream.add(token))
                write(pieces[-1])
            pieces.append(stream.rest())
            write(pieces[-1])
            if dialogue:
                dialogue.answered(prompt, "".join(pieces))
            yield Generation(
                prompt,
                completion="".join(pieces),
                prompt_tokens=len(tokens),
                new_tokens=len(times) - 1,
                stopped_by="end_token" if token in ends else "max_new_tokens",
                prompt_s=times[1] - times[0],
                seconds=times[-1] - times[0],
            )


def _dialogue(
    options: GenerateOptions, stored: StoredModel, tokenizer: HubTokenizer
) -> AbstractContextManager[Dialogue | None]:
    return Dialogue(tokenizer, stored.folder) if options.chat else nullcontext()


def _typed_messages() -> Iterator[str]:
    """Yields the lines of standard input that have text, until its end; asks for them on a terminal."""
    while True:
        if sys.stdin.isatty():
            say("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.buffer.readline().decode(errors="replace")
        if not line:
            return
        if message := line.strip():
            yield message


def _prompt_tokens(
    options: GenerateOptions,
    stored: StoredModel,
    tokenizer: HubTokenizer,
    dialogue: Dialogue | None,
    number: int,
    prompt: str,
) -> list[int]:
    """Returns the token ids of a prompt, for an empty one the token before a document; in chat of all that was said.

    Raises LaunchError.
    """
    if dialogue:
        name = f"prompt {number + 1}" if len(options.prompts) > 1 else "the prompt"
        tokens = dialogue.ask(prompt, name)
    else:
        start = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
        tokens = tokenizer.ids(prompt) or start
        if not tokens:
            raise LaunchError("the prompt is empty, and the tokenizer has no token that starts a text: give a prompt")
    stored.check_ids(tokens, "the prompt")
    check_cache(stored.model, resolve(options.place, stored), len(tokens) + options.max_new_tokens)
    model, new = stored.model, options.max_new_tokens
    room = model.max_position_embeddings + 1 - len(tokens)
    if model.position_embedding == "learned" and new > room:
        raise LaunchError(
            f"{len(tokens)} tokens of the prompt and {new} new ones are more than the {model.max_position_embeddings} "
            f"positions that this model has learned: {'shorten the prompt' if room < 1 else f'ask for {room} new ones'}"
        )
    return tokens


def check_cache(model: ModelConfig, place: ModelPlacement, tokens: int) -> None:
    """Raises LaunchError if the keys and values of so many tokens take more than all memory of their device.

    `place` has no `auto`: it is one that `resolve` has returned.
    """
    heads = max(1, model.num_key_value_heads // place.tensor_parallel_size)
    each = 2 * heads * model.head_dim * model.num_hidden_layers * DTYPES[place.dtype].itemsize
    memory = gpu_memory_bytes() if place.device == "cuda" else host_memory_bytes() // place.tensor_parallel_size
    if memory is not None and tokens * each > memory:
        raise LaunchError(
            f"the keys and values of {tokens:,} tokens take {decimal_size(tokens * each)} on each rank, which has "
            f"{decimal_size(memory)}: set --max-new-tokens so that prompt and answer have at most {memory // each:,}"
        )


def _warn_of_length(model: ModelConfig, prompt_tokens: int, new: int) -> bool:
    """Warns of more tokens than the model is meant for; returns whether it did."""
    room = model.max_position_embeddings + 1 - prompt_tokens  # the last one is never read
    if new > room:
        log.warning(
            f"{prompt_tokens} tokens of the prompt and up to {new} new ones are more than the "
            f"{model.max_position_embeddings} this model is meant for: "
            + (f"ask for {room} new ones" if room > 0 else "shorten the prompt")
        )
    return new > room


def run(options: GenerateOptions) -> int:
    """Runs `megalite generate`. Returns the exit code."""

    def check(options: GenerateOptions, stored: StoredModel) -> None:
        tokenizer = stored.loaded_tokenizer
        with _dialogue(options, stored, tokenizer) as dialogue:  # each message of a conversation alone
            if dialogue and dialogue.notice:
                log.warning("%s", dialogue.notice)
            lengths = [
                len(_prompt_tokens(options, stored, tokenizer, dialogue, number, prompt))
                for number, prompt in enumerate(options.prompts)
            ]
        if not options.chat or len(options.prompts) == 1:  # other conversations grow, and are asked at each turn
            _warn_of_length(stored.model, max(lengths, default=0), options.max_new_tokens)

    return run_here_or_on_ranks("launch.inference.generate", options, check, generate_and_print)


def generate_and_print(options: GenerateOptions, loaded: Loaded) -> None:
    """Prints text to stdout as it is generated, or JSON at the end, and the speed to stderr."""
    streams = loaded.is_rank_zero and not options.as_json

    def write(text: str) -> None:
        if streams and text:
            print_result(text, end="", flush=True)

    made = []
    for generation in generations(options, loaded, write):
        made.append(generation)
        write("\n")
        if streams:
            say(f"megalite: {_sentence(generation)}", file=sys.stderr, flush=True)
    if loaded.is_rank_zero and options.as_json:
        rows = [asdict(generation) | {"tokens_per_second": generation.tokens_per_second} for generation in made]
        print_result(json.dumps({"model": str(loaded.stored.folder), "generations": rows}, indent=2))


def _sentence(generation: Generation) -> str:
    end = ", up to an end token" if generation.stopped_by == "end_token" else ""
    return (
        f"{generation.prompt_tokens} tokens read in {generation.prompt_s:.2f} s, {generation.new_tokens} made{end}, "
        f"{generation.tokens_per_second:.1f} tokens/s"
    )


if __name__ == "__main__":
    run_to_the_end(lambda: rank_main(sys.argv[1:], GenerateOptions, generate_and_print))
