"""`megalite generate`: text from a Hugging Face folder or from a checkpoint, by transformers' own `generate`.

A checkpoint goes through an export to a temporary folder, so what is sampled is what an export would give.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from launch.convert import export_hugging_face
from launch.errors import LaunchError
from launch.transformers_model import load_tokenizer, load_transformers_model, local_folder


@dataclass(frozen=True)
class Generation:
    """A prompt and how the model went on."""

    prompt: str
    completion: str
    new_tokens: int

    @property
    def text(self) -> str:
        """Both, as one reads it."""
        return self.prompt + self.completion


def generate(
    path: str | Path,
    prompt: str,
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_k: int | None = None,
    seed: int = 0,
) -> Generation:
    """Continues `prompt` with the model at `path`: a Hugging Face folder, hub id, checkpoint or run folder.

    Temperature 0 takes the likeliest token each time; otherwise tokens are drawn, from the `top_k` likeliest if given.
    """
    if max_new_tokens < 1 or temperature < 0 or (top_k is not None and top_k < 1):
        raise LaunchError("max_new_tokens and top_k are at least 1, and temperature at least 0")
    folder = local_folder(path)
    if (folder / "config.json").is_file():
        return _generate(folder, prompt, max_new_tokens, temperature, top_k, seed)
    with tempfile.TemporaryDirectory(prefix="megalite_") as temporary:
        exported = Path(temporary) / "model"
        summary = export_hugging_face(folder, exported, validate=False)
        if summary.notices:  # all of them are about the tokenizer
            raise LaunchError(f"{path}: cannot generate text: {summary.notices[0]}")
        return _generate(exported, prompt, max_new_tokens, temperature, top_k, seed)


def _generate(
    folder: Path, prompt: str, max_new_tokens: int, temperature: float, top_k: int | None, seed: int
) -> Generation:
    tokenizer = load_tokenizer(folder)
    on_gpu = torch.cuda.is_available()
    model = load_transformers_model(folder, "auto" if on_gpu else torch.float32).to("cuda" if on_gpu else "cpu")
    tokens = _prompt_tokens(tokenizer, prompt).to(model.device)
    drawn = {"do_sample": True, "temperature": temperature, "top_k": top_k or 0, "top_p": 1.0}
    # a folder's generation_config may ask for sampling: greedy is said in full
    greedy = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    torch.manual_seed(seed)
    output = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id,
        **(drawn if temperature else greedy),
    )
    new = output[0, tokens.shape[1] :]
    return Generation(prompt, tokenizer.decode(new, skip_special_tokens=True), len(new))


def _prompt_tokens(tokenizer: Any, prompt: str) -> torch.Tensor:
    """Token ids `[1, seq]`; an empty prompt is the token that documents start after."""
    ids = tokenizer(prompt)["input_ids"]
    if not ids:
        ids = [token for token in (tokenizer.bos_token_id, tokenizer.eos_token_id) if token is not None][:1]
    if not ids:
        raise LaunchError("the prompt is empty, and the tokenizer has no token that starts a text: give a prompt")
    return torch.tensor([ids], dtype=torch.int64)
