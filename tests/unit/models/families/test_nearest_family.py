"""A model type that is not supported is answered with where to begin."""

from __future__ import annotations

from itertools import chain

import pytest

from models.families import FAMILIES, family
from models.families.nearest_family import OTHER_KINDS, RELATIVES
from models.hub.config_parts import FamilyError


@pytest.mark.parametrize(
    ("model_type", "advice"),
    [
        ("falcon", "its nearest relative is gpt_neox, and docs/adding_a_model.md shows"),
        ("gemma", "its nearest relative is gemma2"),
        ("dots1", "its nearest relative is glm4_moe"),
        ("bert", "it is an encoder, and only decoders"),
        ("t5", "it is an encoder with a decoder, and only"),
        ("mamba", "it is a recurrent model, and only"),
        ("lama", "did you mean llama?"),
        ("qwen-3", "did you mean qwen3?"),
        ("never_heard_of", "most families begin as a copy of llama, and docs/adding_a_model.md"),
        (None, "most families begin as a copy of llama"),
    ],
)
def test_an_unsupported_family_names_where_to_begin(model_type: object, advice: str) -> None:
    with pytest.raises(FamilyError) as raised:
        family(model_type)
    assert f"{model_type!r} is not a family known here" in str(raised.value) and advice in str(raised.value)


def test_relatives_are_families_and_each_model_type_has_one_answer() -> None:
    assert set(RELATIVES) <= set(FAMILIES)
    answered = [*chain(*RELATIVES.values()), *chain(*OTHER_KINDS.values())]
    assert len(answered) == len(set(answered)) and not set(answered) & set(FAMILIES)
