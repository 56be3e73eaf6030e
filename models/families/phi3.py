"""The family Phi-3, with Phi-3.5 and Phi-4: fused projections on disk, LongRoPE, partial rotation in Phi-4-mini."""

from typing import Any

from megalite.config import ModelConfig
from models.hub.config_parts import ConfigPart, FamilyError, Keys, one_window
from models.hub.family import Family
from models.hub.rope_config import LENGTH, PARAMETERS, SCALING, rope

_ROPE = rope(rotated=1.0)
_OLD_NAMES = {"su": "longrope", "yarn": "longrope"}  # transformers treats them as longrope in this family


def _read(keys: Keys) -> dict[str, Any]:
    ropes = {
        name: {
            key: _OLD_NAMES.get(str(value), value) if key in ("type", "rope_type") else value
            for key, value in scaling.items()
        }
        for name in (PARAMETERS, SCALING)
        if isinstance(scaling := keys.get(name), dict)
    }
    return _ROPE.read({**keys, **ropes})


def _write(model: ModelConfig, kept: Keys) -> dict[str, Any]:
    written = _ROPE.write(model, kept)
    if written[SCALING] is None:
        return written
    if written[SCALING]["rope_type"] != "longrope":
        raise FamilyError(
            f"model.rope_scaling {written[SCALING]['rope_type']} is no phi3 model, which has longrope only"
        )
    length = written[SCALING].pop(LENGTH, model.max_position_embeddings)
    # transformers 4 expects `type` and the two factors in this dict, and the length outside
    written[SCALING] = {"type": written[SCALING].pop("rope_type"), **written[SCALING]}
    return {**written, LENGTH: length}


PHI3 = Family(
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    defaults={"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, LENGTH: 4096},
    parts=(ConfigPart(_ROPE.options, _ROPE.keys, _read, _write), one_window()),
    must_be={"attention_bias": False, "mlp_bias": False, "lm_head_bias": False},
    kept=(LENGTH, "resid_pdrop", "embd_pdrop", "full_attn_mod", "interpolate_factor"),
    fused={
        "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    },
)
