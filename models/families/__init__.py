"""The supported model families of Hugging Face, by transformers' `model_type`.

A file here declares, as data, what the keys of a family's config.json mean and what its tensors are called on disk. To
add one, write a file with a `Family` in this folder and add it to `FAMILIES`.
"""

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from models.families.deepseek_v2 import DEEPSEEK_V2
from models.families.deepseek_v3 import DEEPSEEK_V3
from models.families.gemma2 import GEMMA2
from models.families.gemma3 import GEMMA3
from models.families.glm4_moe import GLM4_MOE
from models.families.gpt2 import GPT2
from models.families.gpt_neox import GPT_NEOX
from models.families.llama import LLAMA
from models.families.mistral import MINISTRAL, MISTRAL
from models.families.mixtral import MIXTRAL
from models.families.nearest_family import advice_for
from models.families.olmo2 import OLMO2
from models.families.olmo3 import OLMO3
from models.families.olmoe import OLMOE
from models.families.phi3 import PHI3
from models.families.qwen2 import QWEN2
from models.families.qwen3 import QWEN3
from models.families.qwen3_moe import QWEN3_MOE
from models.families.smollm3 import SMOLLM3
from models.families.starcoder2 import STARCODER2
from models.hub.config_parts import FamilyError
from models.hub.family import Family

_KNOWN = (
    *(LLAMA, MISTRAL, MINISTRAL, QWEN2, QWEN3, GEMMA2, GEMMA3, PHI3, OLMO2, OLMO3, GPT_NEOX, GPT2, SMOLLM3),
    *(MIXTRAL, QWEN3_MOE, OLMOE, STARCODER2, DEEPSEEK_V2, DEEPSEEK_V3, GLM4_MOE),
)
FAMILIES = {known.model_type: known for known in _KNOWN}


def family(model_type: object) -> Family:
    """Returns the family of a `model_type`. Raises FamilyError if it is unknown."""
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise FamilyError(
            f"model_type {model_type!r} is not a family known here, which are {', '.join(FAMILIES)}: "
            f"{advice_for(model_type, FAMILIES)}"
        )
    return FAMILIES[model_type]


def model_config(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `ModelConfig` for a config.json. Raises FamilyError."""
    model_type = hf_config.get("model_type")
    if model_type == "mistral" and "layer_types" in hf_config:
        model_type = "ministral"  # as in transformers' AutoConfig
    return family(model_type).options({**hf_config, "model_type": model_type})


def hf_config(model: ModelConfig, dtype: str, carried: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Returns config.json for `model` with weights in `dtype`; `carried`: the keys that an import kept."""
    return family(model.model_type).hf_config(model, dtype, carried or {})
