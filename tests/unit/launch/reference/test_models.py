"""The references themselves: two independent models are one function, and what makes them comparable is right."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from launch.errors import LaunchError
from launch.parity import reference
from launch.parity.layout import ParityLayout
from launch.parity.observations import NEAR_CHOICES, Observations, Quantity
from launch.parity.problem import Batch, ParityProblem, Training
from launch.parity.reference import solve
from launch.parity.verify import MOST_NEAR_CHOICES
from launch.reference.models import HEAD, Model, Rows, SerialReference, TransformersModel, load_transformers
from megalite.config import ModelConfig
from models.families import model_config
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.helpers.odd_sizes import problem, references_of

BY_NAME = {model.name: model for model in HUB_MODELS}


def asked(name: str, **switches: Any) -> ParityProblem:
    hub_model = HubModel(name, BY_NAME[name].model_type, BY_NAME[name].switches | switches)
    model = ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))
    sequence = min(33, model.max_position_embeddings)
    return problem([ParityLayout()], model=model.model_dump(mode="json"), sequence=sequence, steps=1)


def hidden_states(model: Model, batch: Batch) -> dict[str, torch.Tensor]:
    """All that a model observes of a forward pass, and its logits."""
    assert batch.positions is not None
    with torch.no_grad():
        rows = Rows(torch.from_numpy(batch.tokens), torch.from_numpy(batch.positions))
        return model.outputs(rows, layers=True)


# a hidden size whose root is exact: transformers rounds Gemma's factor of embeddings to float32, also in float64
GEMMA = {"hidden_size": 64}
ONE_OF_EACH_KIND: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in ("llama-biases", "llama-3.1", "llama-deepseek-yarn", "mistral", "qwen2-window")),
    *((name, {}) for name in ("qwen3", "phi3", "phi3-longrope", "olmo2", "olmo3", "gpt_neox", "gpt2", "smollm3")),
    *((name, {}) for name in ("mixtral", "qwen3_moe", "qwen3_moe-some-dense", "olmoe", "glm4_moe", "starcoder2-tied")),
    *((name, GEMMA) for name in ("gemma2", "gemma3", "gemma3-capped")),
]


@pytest.mark.parametrize(("name", "switches"), ONE_OF_EACH_KIND, ids=[name for name, _ in ONE_OF_EACH_KIND])
def test_ours_and_transformers_are_one_function_in_float64(name: str, switches: dict[str, Any]) -> None:
    """What is left is float64's own rounding, so that an epsilon or a constant that is a little off cannot hide."""
    assert_one_function(asked(name, **switches))


def experts_of_olmoe(of: random.Random) -> dict[str, Any]:
    experts = of.randint(2, 9)
    return {"num_experts": experts, "num_experts_per_tok": of.randint(1, experts)}


def experts_of_glm(of: random.Random) -> dict[str, Any]:
    groups, size = of.randint(1, 3), of.randint(2, 4)
    chosen = of.randint(1, groups)
    return {
        **{"n_group": groups, "topk_group": chosen, "n_routed_experts": groups * size},
        **{"num_experts_per_tok": of.randint(1, chosen * size), "moe_intermediate_size": of.randint(8, 40)},
        **{"n_shared_experts": of.randint(1, 3), "first_k_dense_replace": of.randint(0, 2)},
        **{"use_qk_norm": of.random() < 0.5, "attention_bias": of.random() < 0.5, "norm_topk_prob": of.random() < 0.5},
    }


OF_ANY_SHAPE = {"olmoe": experts_of_olmoe, "glm4_moe": experts_of_glm}


@pytest.mark.slow
@pytest.mark.parametrize("draw", range(5))
@pytest.mark.parametrize("name", OF_ANY_SHAPE)
def test_experts_of_any_shape_are_transformers_function_in_float64(name: str, draw: int) -> None:
    seed = random.SystemRandom().getrandbits(32)
    print(f"seed {seed}")
    of = random.Random(seed)
    kv_heads, group, head_dim = of.randint(1, 4), of.randint(1, 3), 2 * of.randint(2, 9)
    shape = {
        **{"num_key_value_heads": kv_heads, "num_attention_heads": group * kv_heads},
        **{"hidden_size": group * kv_heads * head_dim, "vocab_size": of.randint(40, 200)},
        **{"intermediate_size": of.randint(8, 60), "num_hidden_layers": of.randint(2, 4)},
    }
    assert_one_function(asked(name, **shape, **OF_ANY_SHAPE[name](of)))


def assert_one_function(made: ParityProblem) -> None:
    for training in (made.training(), made.sgd(0.1, 1.0)):
        ours, theirs = (solve(kind, made, training, "fp64", "cpu") for kind in (SerialReference, TransformersModel))
        for quantity in theirs.keys() - {Quantity(training.name, NEAR_CHOICES)}:
            largest = max(np.abs(value).max() for value in theirs[quantity].values())
            for part, value in theirs[quantity].items():
                difference = np.abs(ours[quantity][part] - value).max()
                scale = max(
                    np.abs(value).max(), 1e-4 * largest
                )  # the gradient of a key's bias is zero but for rounding
                assert difference <= 1e-8 * scale, f"{quantity} of {part} off by {difference / scale:.1e}"


KERNELS: list[dict[str, Any]] = [
    {"attn_implementation": "some/kernel"},
    {"_attn_implementation": "some/kernel@main:f"},
    {"attn_implementation": {"": "some/kernel"}},
]


@pytest.mark.parametrize("change", KERNELS, ids=str)
def test_a_folder_does_not_choose_code_of_the_hub(change: dict[str, Any], tmp_path: Path) -> None:
    """transformers would fetch such a kernel and run it, whatever it is told of remote code."""
    folder = HUB_MODELS[0].save(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | change | {"auto_map": {"AutoConfig": "some/code--x.T"}}))
    module = load_transformers(transformers.AutoModelForCausalLM, folder)
    assert module.config._attn_implementation == module.model.config._attn_implementation == "sdpa"


def test_a_folder_with_an_adapter_beside_the_model_is_refused(tmp_path: Path) -> None:
    """With peft, transformers would import the module that the adapter names."""
    folder = HUB_MODELS[0].save(tmp_path)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(LaunchError, match=r"holds an adapter beside the model: move adapter_config\.json away"):
        load_transformers(transformers.AutoModelForCausalLM, folder)


@pytest.mark.parametrize("name", ["gemma2", "mistral", "phi3", "qwen3_moe", "olmoe", "gpt2", "smollm3-window", "olmo3"])
def test_transformers_computes_packed_documents_as_if_each_were_alone(name: str) -> None:
    """It derives documents and windows from positions; a version that no longer does would be a wrong reference."""
    made = asked(name)
    batch = made.training().batches[0]
    model = TransformersModel.of(made, torch.float64, "cpu")
    packed = hidden_states(model, batch)
    model.runs_documents_alone = True
    alone = hidden_states(model, batch)
    assert packed.keys() == alone.keys()
    for layer, hidden in packed.items():
        assert (hidden - alone[layer]).abs().max() <= 1e-12 * hidden.abs().max(), layer


def test_documents_whose_angles_depend_on_their_length_are_computed_alone() -> None:
    """Packed with a longer one transformers would rotate a short document by the long factors."""
    made = asked("phi3-longrope")
    batch = made.training().batches[0]
    model = TransformersModel.of(made, torch.float64, "cpu")
    right = hidden_states(model, batch)[HEAD]
    model.runs_documents_alone = False
    assert (hidden_states(model, batch)[HEAD] - right).abs().max() > 1e-3 * right.abs().max()


def test_weights_gradients_and_moments_come_back_under_our_names_as_they_went_in() -> None:
    for name in ("gpt2", "phi3", "gpt_neox", "mixtral", "qwen3_moe-some-dense"):
        made = asked(name)
        ours, theirs = (kind.of(made, torch.float32, "cpu") for kind in (SerialReference, TransformersModel))
        expected, found = (model.named(lambda parameter: parameter.detach()) for model in (ours, theirs))
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[name], found[name]) for name in expected)


def near_choices(made: ParityProblem) -> int:
    training = made.training()
    seen = solve(TransformersModel, made, training, "fp64", "cpu")
    return int(seen[Quantity(training.name, NEAR_CHOICES)]["all"].item())


def test_near_choices_are_those_of_every_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    made = asked("qwen3_moe-some-dense")  # experts in one block of four
    monkeypatch.setattr(reference, "NEAR", 1e9)
    passes = 4  # hidden states, an evaluation, a step, an evaluation
    assert near_choices(made) == passes * made.training().batches[0].tokens.size
    monkeypatch.setattr(reference, "NEAR", 0.0)
    assert near_choices(made) == 0


def test_batches_are_drawn_again_until_no_choice_of_experts_is_near(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that rounding sends to another expert is an error of a thousand times the bound, and nobody's mistake."""
    made, found = asked("mixtral"), iter([3, 3, 11, 0, 0, 0])  # in the two trainings of each draw

    def observed(kind: type[Model], made: ParityProblem, training: Training, *rest: Any) -> Observations:
        seen = solve(kind, made, training, *rest)
        return seen | {Quantity(training.name, NEAR_CHOICES): {"all": np.array([next(found)])}}

    monkeypatch.setattr(reference, "solve", observed)
    references = references_of(made)
    assert references.problem.draw == 2 and references.near_choices == 0
    first, drawn = (problem.training().batches[0].tokens for problem in (made, references.problem))
    assert not np.array_equal(first, drawn)
    assert np.array_equal(references.trainings[0].batches[0].tokens, drawn), "what the ranks are given"


def test_where_many_choices_are_near_another_draw_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "NEAR", 0.1)
    references = references_of(asked("mixtral"))
    assert references.problem.draw == 0 and references.near_choices > MOST_NEAR_CHOICES
