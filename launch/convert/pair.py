"""Our decoder and transformers' with the same weights, side by side: how far apart they are, and from which layer on.

Letters of shapes: B rows, S tokens of a row, K of them that are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from launch.convert.probes import Probe, scaling_threshold
from launch.convert.serial import Read, serial_model
from launch.transformers_model import load_transformers_model
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.loss import head_logits

MOST_COMPARED = 256  # tokens of a row, evenly spaced: logits of all of a long one would fill the memory
TIMED_TOKENS = 32  # of two rows


class Pair:
    """Both models in fp32."""

    def __init__(self, model: ModelConfig, read: Read, hf_dir: Path) -> None:
        """Raises LaunchError where transformers does not load the folder."""
        self.model = model
        self._ours = serial_model(model, TensorParallel(), read)
        self._theirs = load_transformers_model(hf_dir, torch.float32)

    @torch.no_grad()
    def seconds_per_token(self) -> float:
        """Of both models together, on rows of few tokens."""
        tokens = torch.zeros(2, min(TIMED_TOKENS, scaling_threshold(self.model) or TIMED_TOKENS), dtype=torch.long)
        for _ in range(2):  # the first time much is set up
            started = time.perf_counter()
            self._ours(tokens)
            self._theirs(tokens, use_cache=False, logits_to_keep=1)
        return (time.perf_counter() - started) / tokens.numel()

    @torch.no_grad()
    def difference(self, probe: Probe) -> float:
        """The largest of compared tokens' logits, over their standard deviation; NaN where one is NaN."""
        return _spread_apart(self._our_logits(probe), self._their_logits(probe))

    @torch.no_grad()
    def rounding(self, probe: Probe) -> float:
        """The same between transformers and itself: its two ways to attend, or, where it has one, fp32 and fp64. It is
        what the order of sums alone does to this model."""
        implementation = self._theirs.config._attn_implementation
        if implementation == "eager":
            # its masks are not made for fp64: of padding it would compute NaN
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
        return _spread_apart(other, usual)

    @torch.no_grad()
    def first_different_layer(self, probe: Probe, allowed: float) -> str:
        """The first layer whose output is further apart than `allowed`, over its standard deviation."""
        ours, theirs = self._our_states(probe), self._their_states(probe)
        for name, states in ours.items():
            if not _spread_apart(states[probe.compared[:, _columns(probe)]], theirs[name]) <= allowed:
                return name
        return "lm_head"

    def _our_logits(self, probe: Probe) -> Tensor:
        """`[compared tokens, vocab]`."""
        hidden, weight = self._ours(_payload(probe))
        columns, cap = _columns(probe), self.model.final_logit_softcapping
        logits = head_logits(hidden[:, columns], weight, self.model.vocab_size, TensorParallel(), cap)
        return logits[probe.compared[:, columns]]

    def _their_logits(self, probe: Probe) -> Tensor:
        """`[compared tokens, vocab]`."""
        logits = [self._run_theirs(part).logits for part in _alone(probe)]
        return torch.cat(logits, dim=1)[probe.compared[:, _columns(probe)]]

    def _run_theirs(self, part: _Part) -> Any:
        return self._theirs(
            part.tokens,
            attention_mask=part.attention_mask,
            position_ids=part.position_ids,
            use_cache=False,
            logits_to_keep=part.columns,
        )

    def _our_states(self, probe: Probe) -> dict[str, Tensor]:
        """Name of a layer -> its output `[B, K, hidden]`, up to the last norm."""
        states: dict[str, Tensor] = {}
        payload: Any = _payload(probe)
        blocks = [spec.name for spec in self._ours.specs if spec.is_block]
        for spec in self._ours.specs[:-1]:
            module = self._ours.layers[spec.module_key]
            payload = module(payload) if spec.forward is None else spec.forward(module, payload)
            hidden = payload if isinstance(payload, Tensor) else payload[0]
            if not states or spec.is_block or blocks[-1] in states:
                states[spec.name] = hidden[:, _columns(probe)]
            else:  # learned positions: transformers has added them before its first block
                states = {next(iter(states)): hidden[:, _columns(probe)]}
        return states

    def _their_states(self, probe: Probe) -> dict[str, Tensor]:
        """The same of transformers' model: `[compared tokens, hidden]`."""
        names = [spec.name for spec in self._ours.specs]
        seen: dict[str, list[Tensor]] = {}
        with self._watched(names, lambda name, hidden: seen.setdefault(name, []).append(hidden)):
            for part in _alone(probe):
                before = {name: len(states) for name, states in seen.items()}
                self._run_theirs(part)
                for name, states in seen.items():
                    assert len(states) == before.get(name, 0) + 1
                    if states[-1].shape[1] != len(part.columns):  # of the head's input the others are cut off already
                        states[-1] = states[-1][:, part.columns]
        compared = probe.compared[:, _columns(probe)]
        return {name: torch.cat(states, dim=1)[compared] for name, states in seen.items()}

    @contextmanager
    def _watched(self, names: list[str], see: Callable[[str, Tensor], object]) -> Iterator[None]:
        """`see` gets what goes into transformers' first block, comes out of each, and goes into its head."""
        count = self.model.num_hidden_layers
        blocks = next(part for part in self._theirs.modules() if isinstance(part, nn.ModuleList) and len(part) == count)
        own = [spec.name for spec in self._ours.specs if spec.is_block]

        def input_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
                see(name, args[0] if args else kwargs["hidden_states"])

            return hook

        def output_of(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, args: Any, output: Any) -> None:
                see(name, output if isinstance(output, Tensor) else output[0])

            return hook

        head = self._theirs.get_output_embeddings()
        handles = [
            blocks[0].register_forward_pre_hook(input_of(names[0]), with_kwargs=True),
            *(block.register_forward_hook(output_of(name)) for name, block in zip(own, blocks, strict=True)),
            head.register_forward_pre_hook(input_of("model.norm"), with_kwargs=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class _Part:
    """What transformers runs at once: all rows of a probe, or one document of it."""

    def __init__(
        self, tokens: Tensor, columns: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None
    ) -> None:
        self.tokens, self.columns = tokens, columns
        self.attention_mask, self.position_ids = attention_mask, position_ids


def _alone(probe: Probe) -> Iterator[_Part]:
    columns = _columns(probe)
    if not probe.documents:
        yield _Part(probe.tokens, columns, probe.attention_mask, probe.position_ids)
        return
    first = 0
    for count in probe.documents:
        inside = columns[(columns >= first) & (columns < first + count)] - first
        if len(inside):
            yield _Part(probe.tokens[:, first : first + count], inside)
        first += count


def _payload(probe: Probe) -> Any:
    return probe.tokens if probe.positions is None else (probe.tokens, probe.positions)


def _columns(probe: Probe) -> Tensor:
    """The tokens of a row that are looked at `[K]`, its last among them."""
    return torch.linspace(0, probe.length - 1, min(probe.length, MOST_COMPARED)).round().long().unique()


def _spread_apart(values: Tensor, others: Tensor) -> float:
    largest = float((values - others).abs().max())
    return largest if largest == 0 else largest / float(others.std())
