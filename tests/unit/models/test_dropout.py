"""Dropout in the decoder: where transformers has it and as strong, the same under recomputation, nowhere else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from launch.conversion.huggingface.serial_model import global_shapes
from megalite.config import ModelConfig
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import BlockInput, SerialModel, make_layer, named_shards
from megalite.parallel.loss import head_logits, head_loss
from models.decoder import decoder_layers
from models.families import family, model_config
from tests.helpers.hub_models import HubModel
from tests.helpers.sizes import ODD_SIZES

SERIAL = TensorParallel()
ALL = {"attention_dropout": 0.2, "residual_dropout": 0.1, "embedding_dropout": 0.15}
MODEL = ModelConfig(**ODD_SIZES, num_key_value_heads=2, initializer_range=0.1, **ALL)
DRAWS = 1500  # losses of one sequence under as many masks
STANDARD_ERRORS = 4.0


def serial(model: ModelConfig, recompute: Any = "none", seed: int = 3) -> SerialModel:
    return SerialModel(
        decoder_layers(model, recompute),
        SERIAL,
        lambda spec, tp: make_layer(spec, tp, seed=seed, initializer_range=model.initializer_range),
    )


def from_transformers(theirs: Any, dropout: dict[str, float]) -> SerialModel:
    """Our decoder with the weights of `theirs`."""
    model = ModelConfig.model_validate(model_config(theirs.config.to_diff_dict()) | dropout)
    layout, weights = family(model.model_type).layout(model, global_shapes(model)), theirs.state_dict()
    ours = serial(model)
    with torch.no_grad():
        for _, parameter in named_shards(ours):
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                parameter[piece.target] = layout.read_own(lambda name, at: weights[name][at], piece.name, piece.source)
    return ours


@dataclass(frozen=True)
class Losses:
    """Of one sequence under many masks."""

    drawn: Tensor  # [DRAWS]

    @property
    def mean(self) -> float:
        return float(self.drawn.mean())

    @property
    def mean_error(self) -> float:
        return float(self.drawn.std()) / len(self.drawn) ** 0.5

    @property
    def deviation(self) -> float:
        return float(self.drawn.std())

    @property
    def deviation_error(self) -> float:
        """Standard error of the standard deviation, by the fourth moment: losses are not quite normal."""
        squares = (self.drawn - self.drawn.mean()).square()
        return float(squares.std()) / len(self.drawn) ** 0.5 / (2 * self.deviation)


def losses(logits: Tensor, targets: Tensor) -> Losses:
    """Mean over the tokens of each row."""
    return Losses(F.cross_entropy(logits.transpose(1, 2), targets, reduction="none").mean(1))


@torch.no_grad()
def drawn_by_ours(model: SerialModel, tokens: Tensor, targets: Tensor) -> Losses:
    hidden, head = model(tokens, sample_ids=torch.arange(len(tokens)))
    return losses(head_logits(hidden, head, 131, SERIAL), targets)


@pytest.mark.parametrize(
    ("model_type", "dropout"),
    [
        ("llama", {"attention_dropout": 0.3}),
        ("starcoder2", {"attention_dropout": 0.2}),
        ("starcoder2", {"residual_dropout": 0.2}),
        ("starcoder2", {"embedding_dropout": 0.2}),
        ("starcoder2", ALL),
    ],
    ids=str,
)
def test_losses_are_distributed_as_transformers(model_type: str, dropout: dict[str, float]) -> None:
    """One sequence 1500 times in a batch: losses under as many masks on each side have equal means and deviations.

    Catches dropout at another place, of another strength, without its scale or with one mask for all.
    """
    theirs = HubModel("under dropout", model_type, {**dropout, "attn_implementation": "eager"}).build()
    ours = from_transformers(theirs, dropout)
    tokens = torch.randint(131, (1, 12), generator=torch.Generator().manual_seed(5)).expand(DRAWS, 12)
    with torch.no_grad():
        # what the model believes undisturbed, so that all noise raises the loss: at random targets it hardly would
        targets = theirs.eval()(tokens[:1]).logits.argmax(dim=-1).expand(DRAWS, 12)
        expected = losses(theirs.train()(tokens).logits, targets)
    found = drawn_by_ours(ours, tokens, targets)

    error = (found.mean_error**2 + expected.mean_error**2) ** 0.5
    assert abs(found.mean - expected.mean) <= STANDARD_ERRORS * error, f"mean {found.mean}, theirs {expected.mean}"
    error = (found.deviation_error**2 + expected.deviation_error**2) ** 0.5
    apart = abs(found.deviation - expected.deviation)
    assert apart <= STANDARD_ERRORS * error, f"deviation {found.deviation}, theirs {expected.deviation}"
    assert STANDARD_ERRORS * error <= 0.15 * expected.deviation  # what the comparison can see at least


def loss_and_gradients(model: SerialModel, inputs: BlockInput) -> list[Tensor]:
    hidden, weight = model(*inputs[:3])
    loss = head_loss(hidden, weight, inputs.hidden, 131, SERIAL)
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    assert all(gradient is not None for gradient in gradients)
    return [loss.detach(), *gradients]  # type: ignore[list-item]


def all_equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


TOKENS = torch.randint(131, (2, 32), generator=torch.Generator().manual_seed(0))
PACKED = (torch.arange(32) % 11).expand(2, 32)
SAMPLES = torch.tensor([40, 7])


@pytest.mark.parametrize("positions", [None, PACKED], ids=["plain", "packed"])
def test_recomputation_finds_the_same_masks(positions: Tensor | None) -> None:
    """To the bit: a mask drawn anew would give a gradient of another function."""
    inputs = BlockInput(TOKENS, positions, SAMPLES)
    kept = loss_and_gradients(serial(MODEL), inputs)
    for recompute in ("selective", "full"):
        assert all_equal(loss_and_gradients(serial(MODEL, recompute), inputs), kept), recompute
    assert not all_equal(loss_and_gradients(serial(MODEL), inputs._replace(sample_ids=SAMPLES + 1)), kept)


@pytest.mark.parametrize("name", ALL)
def test_masks_know_samples_and_seed_not_rows(name: str) -> None:
    """Each site alone: rows in another order have their losses in another order; another seed, other masks."""
    model = MODEL.model_copy(update=dict.fromkeys(ALL, 0.0) | {name: 0.2})
    tokens = TOKENS[:1].expand(4, -1)  # one sequence, so that only its number tells a row from another
    module, samples = serial(model), torch.tensor([3, 1, 2**40, 3])
    with torch.no_grad():
        hidden, _ = module(tokens, None, samples)
        turned, _ = module(tokens, None, samples.flip(0))
        module_of_another_seed = serial(model, seed=4)
        module_of_another_seed.load_state_dict(module.state_dict())
        reseeded, _ = module_of_another_seed(tokens, None, samples)
    torch.testing.assert_close(turned.flip(0), hidden)
    torch.testing.assert_close(hidden[0], hidden[3])
    assert (hidden[0] - hidden[1]).abs().max() > 0.1 and (hidden[0] - hidden[2]).abs().max() > 0.1
    assert (hidden - reseeded).abs().amax((1, 2)).min() > 0.1


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
def test_evaluation_and_zero_are_the_model_without_dropout_to_the_bit(packed: bool) -> None:
    """Evaluation still gets the samples: a pipeline's payload has one shape."""
    without = MODEL.model_copy(update=dict.fromkeys(ALL, 0.0))
    inputs = BlockInput(TOKENS, PACKED if packed else None)
    expected = loss_and_gradients(serial(without), inputs)
    with_samples = inputs._replace(sample_ids=SAMPLES)
    assert all_equal(loss_and_gradients(serial(MODEL).eval(), with_samples), expected)
    assert all_equal(loss_and_gradients(serial(without), with_samples), expected)
    with pytest.raises(AssertionError, match="sample ids"):
        serial(MODEL)(*inputs[:3])


def test_probabilities_that_exist_weigh_as_torchs_attention_does() -> None:
    """A rate so small that nothing is dropped leaves the attention we wrote for dropout against torch's own."""
    almost = MODEL.model_copy(update=dict.fromkeys(ALL, 0.0) | {"attention_dropout": 1e-9})
    without = almost.model_copy(update={"attention_dropout": 0.0})
    for positions in (None, PACKED):
        inputs = BlockInput(TOKENS, positions, SAMPLES)
        found, expected = (loss_and_gradients(serial(model), inputs) for model in (almost, without))
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)  # fp32, summed in another order
