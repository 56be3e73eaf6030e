"""Compares our decoder with transformers' on the same weights: how far apart they are, and from which layer on."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from launch.reference.models import HEAD, Rows, SerialReference, TransformersModel
from launch.reference.probes import Probe, scaling_threshold

TIMED_TOKENS = 32  # in each of two rows


@dataclass(frozen=True)
class ModelPair:
    """Our decoder and transformers' model with the same weights, both in fp32."""

    ours: SerialReference
    theirs: TransformersModel

    @torch.no_grad()
    def seconds_per_token(self) -> float:
        """Measures both models together, on short rows."""
        length = min(TIMED_TOKENS, scaling_threshold(self.ours.model) or TIMED_TOKENS)
        rows, last = Rows(torch.zeros(2, length, dtype=torch.long)), torch.tensor([length - 1])
        for _ in range(2):  # the first pass includes one-time setup
            started = time.perf_counter()
            self.ours.outputs(rows, last)
            self.theirs.outputs(rows, last)
        return (time.perf_counter() - started) / rows.tokens.numel()

    @torch.no_grad()
    def difference(self, probe: Probe) -> float:
        """Returns the largest difference of logits over their standard deviation; NaN if a logit is NaN."""
        ours, theirs = (model.outputs(probe.rows, probe.columns)[HEAD] for model in (self.ours, self.theirs))
        return _relative_difference(probe, ours, theirs)

    @torch.no_grad()
    def rounding(self, probe: Probe) -> float:
        """Returns the difference between two ways in which transformers computes the same: its two implementations of
        attention, or fp32 and fp64 if it has only one. The order of sums alone has this effect on the model."""
        module = self.theirs.module
        attention = module.config._attn_implementation
        if attention == "eager":
            probe = Probe(probe.name, Rows(probe.rows.tokens))  # in fp64 its masks would make padding NaN
        usual = self.theirs.outputs(probe.rows, probe.columns)[HEAD]
        if attention == "eager":
            module.double()
            other = self.theirs.outputs(probe.rows, probe.columns)[HEAD]
            module.float()
        else:
            module.set_attn_implementation("eager")
            other = self.theirs.outputs(probe.rows, probe.columns)[HEAD]
            module.set_attn_implementation(attention)
        return _relative_difference(probe, other, usual)

    @torch.no_grad()
    def first_different_layer(self, probe: Probe, allowed: float) -> str:
        """Returns the first layer whose outputs differ by more than `allowed` times their standard deviation."""
        ours, theirs = (model.outputs(probe.rows, probe.columns, layers=True) for model in (self.ours, self.theirs))
        for index, (name, value) in enumerate(theirs.items()):
            if not _relative_difference(probe, ours[name], value) <= allowed:
                # transformers adds learned positions before its first block: only their sum can be compared
                return name if index else next(iter(ours))
        return HEAD


def _relative_difference(probe: Probe, values: Tensor, others: Tensor) -> float:
    if probe.rows.real is not None:
        real = probe.rows.real[:, probe.columns]
        values, others = values[real], others[real]
    largest = float((values - others).abs().max())
    return largest if largest == 0 else largest / float(others.std())
