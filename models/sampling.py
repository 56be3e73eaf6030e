"""From the logits of the next token to the token: the likeliest one, or one drawn.

In: logits `[vocab]`, equal on all tensor-parallel ranks. Out: a token id, equal on all of them, because the numbers
that are drawn with come from a seeded generator on the CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen; what transformers' options of these names mean, applied in its order."""

    temperature: float = 0.0  # 0: the likeliest token, and nothing is drawn
    top_k: int | None = None  # draw among this many likeliest tokens, and those as likely as the last of them
    top_p: float = 1.0  # draw among the fewest likeliest tokens that have this probability together

    def probabilities(self, logits: Tensor) -> Tensor:
        """`[..., vocab]` -> the same, fp32: of each token to be drawn; temperature must not be 0."""
        scores = logits.float() / self.temperature
        if self.top_k is not None and self.top_k < scores.shape[-1]:
            last = scores.topk(self.top_k).values[..., -1:]
            scores = scores.masked_fill(scores < last, float("-inf"))
        if self.top_p < 1.0:  # Holtzman 2019
            ascending, order = scores.sort(descending=False)
            unlikely = ascending.softmax(dim=-1).cumsum(dim=-1) <= 1 - self.top_p
            unlikely[..., -1:] = False  # the likeliest always stays
            scores = scores.masked_fill(unlikely.scatter(-1, order, unlikely), float("-inf"))
        return scores.softmax(dim=-1)

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """The next token for logits `[vocab]`; `generator` is on the CPU."""
        if self.temperature == 0:
            return int(logits.float().argmax())
        return int(torch.multinomial(self.probabilities(logits).cpu(), 1, generator=generator))
