"""docs/models.md, written from the registry of families and the list of models under test.

python -m tests.helpers.models_page
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megalite.config import ModelConfig
from models.families import FAMILIES, model_config
from models.hub.config_parts import shown
from models.hub.family import PLAIN, Family
from models.hub.rope_config import SCALINGS
from tests.helpers.hub_models import HUB_MODELS, SWITCHES, HubModel

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

INTRODUCTION = """\
# Models

<!-- written by `python -m tests.helpers.models_page`, and compared by a test: change the families, not this page -->

Model families that are read from Hugging Face, trained on any layout, and written back. A family is data in one file of
`models/families/`; [adding_a_model.md](adding_a_model.md) shows how one is added. A `config.json` with a key that its
family does not read, or with a value that the decoder does not compute exactly, is refused by name and never
approximated. The keys of transformers 4 and of 5 are read, must not contradict each other, and are both written.

## Families and switches

Options are those of the section `model` of a run's config. A mark (x) is a switch that is tested on and off, or with
several values; a word is what the family always has; nothing is Llama's plain decoder (pre-norm RMSNorm, gated
feed-forward layer, whole heads rotated, no biases). Sizes, activation and epsilon vary in all families.

"""

ON_DISK = """
## On disk

Weights are read from and written to the tensors of transformers' `save_pretrained`, whose names are our own except for:

| family | tensors |
|---|---|
"""

CHECKS = """
## What is tested

Each row of the table below is a small random model made by transformers, with odd sizes and no weight left at its
default. For every one of them:

- Logits and every gradient of the serial decoder are transformers', within 1e-5 of the logits' deviation and of each
  gradient's norm, on sequences longer than the window and the length from which on rotary embedding is scaled. A
  mistake in a switch is at least 50 times that (`tests/unit/models/families/test_families.py`).
- Logits, loss and gradients of a training step on real ranks are transformers', within the bounds of
  [parity.md](parity.md): tp=2, pp=2, both, and with sequence parallelism (`tests/ranks/models/test_family_layouts.py`).
  Planted defects are caught (`tests/ranks/launch/parity/test_family_mutations.py`).
- Names and shapes on disk are what transformers' `save_pretrained` writes (`tests/unit/models/families/`), and import
  and export give the same tensors, bit for bit (`tests/ranks/launch/conversion/huggingface/test_convert.py`).
- config.json to our options and back is the same config to transformers, and each of its two spellings alone says
  everything (`tests/unit/models/hub/test_family_configs.py`).

Beside them hypothesis combines the switches of each family, a few draws by default and many with `-m exhaustive`, and
config.json files as they lie on the hub are read.

| model | family | keys of its config.json beside sizes |
|---|---|---|
"""

SWITCH_OPTIONS = (
    *("tie_word_embeddings", "num_key_value_heads", "head_dim", "normalization", "norm_placement"),
    *("use_parallel_residual", "query_key_norm", "gated_mlp", "attention_bias", "attention_output_bias", "mlp_bias"),
    *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping", "scale_embeddings"),
    *("position_embedding", "rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq"),
    *("layers_without_rope", "sliding_window", "layer_types", "num_experts", "num_experts_per_tok"),
    *("moe_intermediate_size", "norm_topk_prob", "mlp_only_layers"),
)
DERIVED_OPTIONS = {"num_key_value_heads", "head_dim", "layer_types", "moe_intermediate_size"}


def models_page() -> str:
    """The whole page."""
    disk = [f"| `{known.model_type}` | {said} |" for known in FAMILIES.values() if (said := _on_disk(known))]
    tested = [f"| {model} | `{model.model_type}` | {_switches(model.switches)} |" for model in HUB_MODELS]
    parts = (INTRODUCTION, _matrix(), ON_DISK, _lines(disk), CHECKS, _lines(tested))
    return "".join(parts)


def _matrix() -> str:
    """Options x families: what the models under test have."""
    values = {model_type: _tested_values(model_type) for model_type in FAMILIES}
    rows = [
        f"| option | {' | '.join(f'`{model_type}`' for model_type in FAMILIES)} |",
        "|---" * (len(FAMILIES) + 1) + "|",
    ]
    for option in SWITCH_OPTIONS:
        if option == "rope_scaling":
            for kind in SCALINGS:
                has = [kind in found[option] for found in values.values()]
                if kind != "default":
                    rows.append(f"| `rope_scaling` {kind} | {' | '.join('x' if it else '' for it in has)} |")
        else:
            rows.append(f"| `{option}` | {' | '.join(_cell(option, found[option]) for found in values.values())} |")
    return _lines(rows)


def _tested_values(model_type: str) -> dict[str, set[Any]]:
    """Option -> its values in the models under test and in those that hypothesis draws, one switch at a time."""
    models = [model for model in HUB_MODELS if model.model_type == model_type]
    models += [
        HubModel("", model_type, {key: value}) for key, values in SWITCHES[model_type].items() for value in values
    ]
    found: dict[str, set[Any]] = {option: set() for option in SWITCH_OPTIONS}
    for hub_model in models:
        model = ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))
        for option in SWITCH_OPTIONS:
            value = getattr(model, option)
            if option == "rope_scaling":
                value = value and value.rope_type
            elif option in DERIVED_OPTIONS and value == _derived(model, option):
                value = None
            found[option].add(value)
    return found


def _derived(model: ModelConfig, option: str) -> Any:
    values = {key: value for key, value in model.model_dump().items() if key not in DERIVED_OPTIONS}
    return getattr(ModelConfig.model_validate(values), option)


def _cell(option: str, found: set[Any]) -> str:
    if len(found) > 1:
        return "x"
    (value,) = found
    plain = {**PLAIN, **dict.fromkeys(DERIVED_OPTIONS)}
    default = plain[option] if option in plain else ModelConfig.model_fields[option].default
    return "" if value == default else shown(value)


def _on_disk(known: Family) -> str:
    how = " head by head" if known.fused_by_head else ""
    said = [f"`{whole}` holds {_listed(parts)}{how}" for whole, parts in known.fused.items()]
    if known.transposed:
        said.append(f"transposed: {_listed(known.transposed)}")
    if known.renamed:
        said.append(", ".join(f"`{ours}` is `{theirs}`" for ours, theirs in known.renamed.items()))
    return "; ".join(said)


def _switches(switches: dict[str, Any]) -> str:
    return ", ".join(f"{key} {_short(value)}" for key, value in switches.items())


def _short(value: Any) -> str:
    """A dict of rotary embedding by its type."""
    if isinstance(value, dict):
        return str(value["rope_type"])
    return shown(tuple(value) if isinstance(value, list) else value)


def _listed(names: Any) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _lines(rows: list[str]) -> str:
    return "".join(f"{row}\n" for row in rows)


if __name__ == "__main__":
    PAGE.write_text(models_page(), encoding="utf-8")
