"""Codecs by their properties: nothing is lost, what is left is small, NaN stays, no piece sees another's numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.config.compression import BLOCK, CompressionConfig
from megalite.engine.compression.blocks import BlockCodec
from megalite.engine.compression.codec import Codec, Pieces, pieces_of
from megalite.engine.compression.top_k import TopKCodec

CPU = torch.device("cpu")
PIECES = [[1, 255, 300, 45], [601], [256, 345]]
CODECS: dict[str, Callable[[Pieces], Codec]] = {
    "int8": lambda pieces: BlockCodec(pieces, 8, CPU),
    "int4": lambda pieces: BlockCodec(pieces, 4, CPU),
    "top_k": lambda pieces: TopKCodec(pieces, 0.1, CPU),
}


def _decoded(codec: Codec, messages: Tensor, length: int) -> Tensor:
    """What each part's owner gets, behind each other."""
    parts = []
    for part, message in enumerate(messages.split(codec.sizes)):
        out = torch.zeros(length)
        codec.add_decoded(message, part, out)
        parts.append(out)
    return torch.cat(parts)


@pytest.fixture(params=CODECS)
def make(request: pytest.FixtureRequest) -> Callable[[Pieces], Codec]:
    return CODECS[request.param]


@pytest.mark.parametrize("pieces", [PIECES, [[7], [7]], [[1]], [[], []]], ids=str)
@pytest.mark.parametrize("factor", [1.0, 1e-30, 1e30, 1e-44])
def test_what_is_decoded_and_what_is_left_add_up(
    make: Callable[[Pieces], Codec], pieces: Pieces, factor: float
) -> None:
    length = sum(pieces[0])
    for _ in range(3):
        numbers = torch.randn(length * len(pieces)) * factor
        left = numbers.clone()
        codec = make(pieces)
        messages = codec.encode(left)
        assert len(messages) == sum(codec.sizes)
        # a product and a difference in fp32, each rounded once
        error = (_decoded(codec, messages, length).double() + left.double() - numbers.double()).abs()
        assert bool((error <= 2**-22 * numbers.abs().clamp(min=factor) + 2e-45).all()), float(error.max())
        assert not length or left.abs().max() <= numbers.abs().max()


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
def test_integers_that_fill_the_codes_are_exact(bits: int, largest: int) -> None:
    numbers = torch.randint(-largest, largest + 1, (3 * 601,)).float()
    for part in range(3):
        numbers[part * 601 :: BLOCK // 4] = largest  # in each block
    for start in (0, 1, 256, 556, 601, 1202, 1458):
        numbers[start] = -largest
    left = numbers.clone()
    codec = BlockCodec(PIECES, bits, CPU)
    assert torch.equal(_decoded(codec, codec.encode(left), 601), numbers) and not left.any()


@pytest.mark.parametrize(("bits", "largest"), [(8, 127), (4, 7)])
def test_a_number_is_told_to_half_a_scale(bits: int, largest: int) -> None:
    numbers = torch.randn(3 * 601)
    left = numbers.clone()
    BlockCodec(PIECES, bits, CPU).encode(left)
    start = 0
    for length in (each for part in PIECES for each in part):
        for block, rest in zip(
            numbers[start : start + length].split(BLOCK), left[start : start + length].split(BLOCK), strict=True
        ):
            assert rest.abs().max() <= block.abs().max() / largest * 0.5001
        start += length


def test_the_largest_of_each_piece_are_sent() -> None:
    numbers = torch.randn(3 * 601)
    left = numbers.clone()
    TopKCodec(PIECES, 0.1, CPU).encode(left)
    start = 0
    for length in (each for part in PIECES for each in part):
        was, rest = numbers[start : start + length].abs(), left[start : start + length].abs()
        sent = rest < was
        assert int(sent.sum()) == -(-length // 10)
        assert was[sent].min() >= was[~sent].max() if not sent.all() else True
        assert bool((rest[sent] <= was[sent] * 2**-8).all()), "bf16"
        start += length


@pytest.mark.parametrize("spoiled", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("place", [0, 1, 600, 601, 1802])
def test_what_is_not_finite_stays_so(make: Callable[[Pieces], Codec], spoiled: float, place: int) -> None:
    numbers = torch.randn(3 * 601)
    numbers[place] = spoiled
    codec = make(PIECES)
    assert not torch.isfinite(_decoded(codec, codec.encode(numbers.clone()), 601)[place])


def test_a_piece_is_decoded_alike_among_any_others(make: Callable[[Pieces], Codec]) -> None:
    """A norm's weights lie among other ranks' slices: their copies would drift apart."""
    first, second = torch.randn(3 * 601), torch.randn(3 * 601) * 100
    second[256:556] = first[256:556]
    codec = make(PIECES)
    one, other = (_decoded(codec, codec.encode(each), 601) for each in (first, second))
    assert torch.equal(one[256:556], other[256:556])


@pytest.mark.parametrize("kind", ["int8", "int4", "top_k"])
def test_messages_have_the_bytes_that_the_config_says(kind: str) -> None:
    """A scale of each block, and up to 7 bytes that align a message."""
    length = 100 * BLOCK
    compression = CompressionConfig(gradients=kind, density=0.1)  # type: ignore[arg-type]
    codec = CODECS[kind]([[length], [length]])
    assert sum(codec.sizes) == pytest.approx(2 * length * compression.bytes_per_gradient(4), abs=16)


def test_a_bucket_is_cut_at_its_parameters_and_owners() -> None:
    assert pieces_of([(0, 5), (5, 12), (12, 13)], 16, 2) == [[5, 3], [4, 1, 3]]
    assert pieces_of([(0, 4)], 4, 4) == [[1], [1], [1], [1]]
