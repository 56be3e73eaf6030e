"""What a model family is: data that says how Hugging Face spells our options and our weights' names.

In: a `config.json` as a dict, or a `ModelConfig`. Out: the other one, and names of weights in both spellings. A key
that nothing reads is an error, and so is a number we would have to approximate: a model is converted exactly or
refused with a `FamilyError` of one sentence. Our own names of weights are Llama's, so most families rename nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.config import ModelConfig

ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
PLAIN_ROPE = {"rope_type": "default", "type": "default"}
DEFAULT_ROPE_THETA = 10000.0  # transformers' own, where config.json has none
TRANSFORMERS_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}

KEPT = (
    "attention_dropout",
    "bos_token_id",
    "eos_token_id",
    "id2label",
    "label2id",
    "pad_token_id",
    "pretraining_tp",
    "problem_type",
    "transformers_version",
    "use_cache",
)
"""Keys of config.json that change no logits; they travel through a checkpoint and come back on export."""

DROPPED = (
    "_name_or_path",
    "chunk_size_feed_forward",
    "dtype",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "torch_dtype",
    "transformers.js_config",
)
"""Keys that say nothing about the function a model computes, and are written anew or not at all."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
DERIVED_TENSORS = (".rotary_emb.inv_freq",)  # old checkpoints hold what is computed from rope_theta


class FamilyError(ValueError):
    """One sentence: which option or key of a model stands between us and Hugging Face, and what would work."""


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers, as far as the decoder computes it."""

    model_type: str
    architecture: str
    """transformers' class with the output head."""

    keys: Mapping[str, str]
    """Option of `ModelConfig` -> key of config.json; several options may be one key."""

    defaults: Mapping[str, Any]
    """Key -> transformers' value where config.json has none; sizes have no default."""

    fixed: Mapping[str, Any]
    """Options that this family does not let vary."""

    must_be: Mapping[str, Any] = field(default_factory=dict)
    """Key -> the only value we compute."""

    kept: tuple[str, ...] = ()
    """Keys beside `KEPT` that change no logits."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    """Part of a weight's canonical name -> the hub's, e.g. `mlp.up_proj` -> `mlp.c_fc`."""

    def options(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of `ModelConfig` for a config.json; FamilyError names what cannot be computed exactly."""
        self._refuse_what_nothing_reads(hf_config)
        options = {"model_type": self.model_type, **self.fixed, "rope_theta": _rope_theta(hf_config)}
        for option, key in self.keys.items():
            if key in hf_config:
                options[option] = hf_config[key]
            elif key in self.defaults:
                options[option] = self.defaults[key]
            elif option not in ("num_key_value_heads", "head_dim"):  # derived from the other sizes
                raise FamilyError(f"config.json of a {self.model_type} model has no {key}")
        return options

    def _refuse_what_nothing_reads(self, hf_config: Mapping[str, Any]) -> None:
        if hf_config.get("architectures") not in (None, [], [self.architecture]):
            raise FamilyError(
                f"config.json has architectures {hf_config['architectures']}: "
                f"of {self.model_type} models only {self.architecture} is converted"
            )
        must_be = {"is_encoder_decoder": False, **self.must_be}
        for key, wanted in must_be.items():
            if hf_config.get(key, wanted) != wanted:
                raise FamilyError(
                    f"config.json has {key} {hf_config[key]!r}: our {self.model_type} decoder computes only {wanted!r}"
                )
        read = {"model_type", "architectures", *ROPE_KEYS, *self.keys.values(), *must_be, *KEPT, *self.kept, *DROPPED}
        unread = sorted(set(hf_config) - read)
        if unread:
            raise FamilyError(
                f"config.json has {', '.join(unread)}, which the {self.model_type} family does not read: the model "
                "may compute something else than our decoder, so it is not converted"
            )

    def carried(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """What of a config.json has no place in `ModelConfig` and is given back to `hf_config` on export."""
        return {key: hf_config[key] for key in (*KEPT, *self.kept, *self.must_be) if key in hf_config}

    def check(self, model: ModelConfig) -> None:
        """FamilyError where transformers' class cannot be told to compute what `model` says."""
        for option, wanted in self.fixed.items():
            if getattr(model, option) != wanted:
                raise FamilyError(
                    f"model.{option} {_shown(getattr(model, option))} is no {self.model_type} model, "
                    f"whose {option} is {_shown(wanted)}: change it, or model.model_type"
                )
        told: dict[str, str] = {}
        for option, key in self.keys.items():
            other = told.setdefault(key, option)
            if getattr(model, option) != getattr(model, other):
                raise FamilyError(
                    f"model.{other} {_shown(getattr(model, other))} and model.{option} "
                    f"{_shown(getattr(model, option))} are one switch of a {self.model_type} model, {key}: "
                    "set both alike"
                )
        if model.num_attention_heads % model.num_key_value_heads:
            raise FamilyError(
                f"model.num_attention_heads {model.num_attention_heads} is not a multiple of "
                f"model.num_key_value_heads {model.num_key_value_heads}"
            )
        if model.head_dim % 2:
            raise FamilyError(f"model.head_dim {model.head_dim} is odd, but RoPE rotates pairs")

    def hf_config(self, model: ModelConfig, dtype: str, carried: Mapping[str, Any]) -> dict[str, Any]:
        """config.json of `model` for weights in `dtype` (fp32, bf16, fp16), in both the v4 and the v5 spelling.

        transformers 4 reads a v5-only config.json without an error as rope_theta 10000, hence both.
        """
        self.check(model)
        values = {key: getattr(model, option) for option, key in self.keys.items()}
        if model.head_dim == model.hidden_size // model.num_attention_heads:
            values.pop("head_dim", None)
        name = TRANSFORMERS_DTYPES[dtype]
        return {
            **dict.fromkeys(TOKEN_IDS),  # null: left out, transformers would fill in ids of its own vocabulary
            **carried,
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **values,
            "rope_theta": model.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
            "torch_dtype": name,
            "dtype": name,
        }

    def hub_names(self, canonical: Iterable[str]) -> dict[str, str]:
        """Canonical name -> the hub's, for every weight of a model."""
        names = {name: self._hub_name(name) for name in canonical}
        assert len(set(names.values())) == len(names), f"{self.model_type}: two weights have one hub name"
        return names

    def _hub_name(self, canonical: str) -> str:
        path, leaf = canonical.rsplit(".", 1)
        for ours, theirs in self.renamed.items():
            if path.endswith(f".{ours}"):
                return f"{path.removesuffix(ours)}{theirs}.{leaf}"
        return canonical


def _rope_theta(hf_config: Mapping[str, Any]) -> Any:
    """The base of plain rotary embedding, from wherever v4 or v5 wrote it; anything but plain is refused."""
    thetas = {"rope_theta": hf_config["rope_theta"]} if hf_config.get("rope_theta") is not None else {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = hf_config.get(key) or {}
        if not isinstance(rope, dict) or any(rope[name] != PLAIN_ROPE.get(name, rope[name]) for name in rope):
            raise FamilyError(f"config.json has {key} {rope}: only plain RoPE is computed")
        if unread := sorted(set(rope) - {*PLAIN_ROPE, "rope_theta"}):
            raise FamilyError(f"config.json has {', '.join(unread)} in {key}: only plain RoPE is computed")
        if "rope_theta" in rope:
            thetas[f"{key}.rope_theta"] = rope["rope_theta"]
    values = list(thetas.values()) or [DEFAULT_ROPE_THETA]
    if any(value != values[0] for value in values):
        told = " and ".join(f"{key} {value}" for key, value in thetas.items())
        raise FamilyError(f"config.json has {told}: keep the one that the weights were trained with")
    return values[0]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
