"""Compares our decoder with transformers' on the same weights: how far apart they are, and from which layer on.

Letters of shapes: B rows, S tokens of a row, K of them that are compared.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from launch.huggingface.layer_outputs import watch_layers
from launch.huggingface.probes import Probe, scaling_threshold
from launch.huggingface.serial_model import Read, serial_model
from launch.huggingface.transformers_model import load_transformers_model
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.loss import head_logits

MOST_COMPARED = 256  # tokens of a row, evenly spaced: logits of all tokens of a long row would fill the memory
TIMED_TOKENS = 32  # in each of two rows


class ModelPair:
    """Our decoder and transformers' model with the same weights, both in fp32."""

    def __init__(self, model: ModelConfig, read: Read, hf_dir: Path) -> None:
        """Raises LaunchError if transformers does not load the folder."""
        self.model = model
        self._ours = serial_model(model, TensorParallel(), read)
        self._theirs = load_transformers_model(hf_dir, torch.float32)

    @torch.no_grad()
    def seconds_per_token(self) -> float:
        """Measures both models together, on short rows."""
        tokens = torch.zeros(2, min(TIMED_TOKENS, scaling_threshold(self.model) or TIMED_TOKENS), dtype=torch.long)
        for _ in range(2):  # the first pass includes one-time setup
            started = time.perf_counter()
            self._ours(tokens)
            self._theirs(tokens, use_cache=False, logits_to_keep=1)
        return (time.perf_counter() - started) / tokens.numel()

    @torch.no_grad()
    def difference(self, probe: Probe) -> float:
        """Returns the largest difference of logits over their standard deviation; NaN if a logit is NaN."""
        hidden, weight = self._ours(probe.tokens, probe.positions)
        columns, cap = _columns(probe), self.model.final_logit_softcapping
        logits = head_logits(hidden[:, columns], weight, self.model.vocab_size, TensorParallel(), cap)
        return _relative_difference(logits[probe.compared[:, columns]], self._their_logits(probe))

    @torch.no_grad()
    def rounding(self, probe: Probe) -> float:
        """Returns the difference between two ways in which transformers computes the same: its two implementations of
        attention, or fp32 and fp64 if it has only one. The order of sums alone has this effect on the model."""
        implementation = self._theirs.config._attn_implementation
        if implementation == "eager":
            # its masks do not support fp64, in which padding would become NaN
            probe = Probe(probe.name, probe.tokens, torch.ones_like(probe.compared))
            usual = self._their_logits(probe)
            self._theirs.double()
            other = self._their_logits(probe)
            self._theirs.float()
        else:
            usual = self._their_logits(probe)
            self._theirs.set_attn_implementation("eager")
            other = self._their_logits(probe)
            self._theirs.set_attn_implementation(implementation)
        return _relative_difference(other, usual)

    @torch.no_grad()
    def first_different_layer(self, probe: Probe, allowed: float) -> str:
        """Returns the first layer whose outputs differ by more than `allowed` times their standard deviation."""
        columns = _columns(probe)
        compared = probe.compared[:, columns]
        ours: dict[str, Tensor] = {}  # layer -> [B, K, hidden]
        with watch_layers(self._ours, self.model, lambda name, hidden: ours.update({name: hidden[:, columns]})):
            self._ours(probe.tokens, probe.positions)
        theirs: dict[str, list[Tensor]] = {}
        for arguments in _their_arguments(probe):
            kept = arguments["logits_to_keep"]

            def keep(name: str, hidden: Tensor, kept: Tensor = kept) -> None:
                # the input of the head has been reduced to these columns already
                theirs.setdefault(name, []).append(hidden if hidden.shape[1] == len(kept) else hidden[:, kept])

            with watch_layers(self._theirs, self.model, keep):
                self._theirs(**arguments)
        for index, (name, states) in enumerate(theirs.items()):
            if not _relative_difference(ours[name][compared], torch.cat(states, dim=1)[compared]) <= allowed:
                # transformers adds learned positions before its first block: only their sum can be compared
                return name if index else next(iter(ours))
        return "lm_head"

    def _their_logits(self, probe: Probe) -> Tensor:
        """Returns `[compared tokens, vocab]`."""
        logits = [self._theirs(**arguments).logits for arguments in _their_arguments(probe)]
        return torch.cat(logits, dim=1)[probe.compared[:, _columns(probe)]]


def _their_arguments(probe: Probe) -> Iterator[dict[str, Any]]:
    """Yields the arguments of transformers' forward passes: all rows at once, or one packed document after another."""
    columns = _columns(probe)
    if not probe.documents:
        yield {
            "input_ids": probe.tokens,
            "attention_mask": probe.attention_mask,
            "position_ids": probe.position_ids,
            "logits_to_keep": columns,
            "use_cache": False,
        }
    start = 0
    for length in probe.documents:
        inside = columns[(columns >= start) & (columns < start + length)] - start
        if len(inside):
            tokens = probe.tokens[:, start : start + length]
            yield {"input_ids": tokens, "logits_to_keep": inside, "use_cache": False}
        start += length


def _columns(probe: Probe) -> Tensor:
    """Returns the compared tokens of a row `[K]`, the last one among them."""
    return torch.linspace(0, probe.length - 1, min(probe.length, MOST_COMPARED)).round().long().unique()


def _relative_difference(values: Tensor, others: Tensor) -> float:
    largest = float((values - others).abs().max())
    return largest if largest == 0 else largest / float(others.std())
