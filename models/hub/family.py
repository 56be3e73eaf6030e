"""Model families: data that maps our options and names of weights to those of Hugging Face.

In: a `config.json` as a dict, or a `ModelConfig`. Out: the other one, and the layout of weights on disk. A key that
nothing reads is an error, and so is a value that we would have to approximate: a model is converted exactly or refused
with a `FamilyError`. Our own names of options and weights are Llama's, so most families rename little. An option that a
family does not mention has its default: a key of the same name, a constant of `PLAIN`, or a part of `PLAIN_PARTS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megalite.config import ModelConfig
from megalite.config.rules.model import problem_with_model
from models.hub.config_parts import (
    NO_EXPERTS,
    NO_LATENTS,
    NO_WINDOW,
    ConfigPart,
    FamilyError,
    Keys,
    refuse_unless,
    shown,
)
from models.hub.rope_config import rope
from models.hub.tensor_layout import HubLayout, Shape, hub_layout

SAME_KEYS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings"),
    *("tie_word_embeddings", "initializer_range"),
)
"""Options with a key of the same name in most families."""

PLAIN = {
    "normalization": "rmsnorm",
    "norm_placement": "pre",
    "use_parallel_residual": False,
    "query_key_norm": "none",
    "gated_mlp": True,
    "attention_bias": False,
    "attention_output_bias": False,
    "mlp_bias": False,
    "query_pre_attn_scalar": None,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "scale_embeddings": False,
    "position_embedding": "rope",
    "layers_without_rope": (),
    "scoring_func": "softmax",
    "fp32_router": False,
    "n_group": 1,
    "topk_group": 1,
    "group_score": "max",
    "routed_scaling_factor": 1.0,
    "e_score_correction_bias": False,
    "n_shared_experts": 0,
}
"""Options with a constant value in most families."""

PLAIN_PARTS = (rope(), NO_WINDOW, NO_EXPERTS, NO_LATENTS)
PLAIN_DEFAULTS = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "attention_bias": False,
    "mlp_bias": False,
}
"""transformers' defaults of keys that config.json lacks, in most families that have the key."""

DERIVED = ("num_key_value_heads", "head_dim")  # follow from other sizes without a value in config.json or a default

GENERATION = (
    *("max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
    *("temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty"),
    *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
    *("begin_suppress_tokens", "forced_bos_token_id", "forced_eos_token_id", "num_return_sequences"),
    *("output_scores", "return_dict_in_generate", "remove_invalid_values", "exponential_decay_length_penalty"),
    *("cache_implementation", "task_specific_params", "use_cache"),
)
KEPT = (
    *GENERATION,
    *("attention_dropout", "bos_token_id", "eos_token_id", "pad_token_id", "id2label", "label2id", "pretraining_tp"),
    *("problem_type", "transformers_version", "tokenizer_class", "max_sequence_length", "num_labels", "output_past"),
)
"""Keys of config.json that do not affect logits; a checkpoint keeps them, and an export writes them back."""

DROPPED = (
    *("_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "attn_implementation", "auto_map"),
    *("_flash_attn_2_enabled", "_num_labels", "chunk_size_feed_forward", "dtype", "gradient_checkpointing"),
    *("output_attentions", "output_hidden_states", "return_dict", "torch_dtype", "torchscript"),
    *("transformers.js_config", "unsloth_fixed", "unsloth_version", "use_bfloat16"),
)
"""Keys that do not affect the function of a model, and are written anew or not at all."""

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TRANSFORMERS_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


@dataclass(frozen=True)
class Family:
    """One `model_type` of transformers, as far as our decoder supports it."""

    model_type: str
    architecture: str  # transformers' class with the output head
    other_architectures: tuple[str, ...] = ()  # other classes whose folders this family reads
    # option of `ModelConfig` -> key of config.json, in addition to `SAME_KEYS`; several options may share a key
    keys: Mapping[str, str] = field(default_factory=dict)
    # key -> transformers' default, in addition to `PLAIN_DEFAULTS`; sizes have no default
    defaults: Mapping[str, Any] = field(default_factory=dict)
    # option -> its constant value in this family, in addition to `PLAIN`
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derived: tuple[str, ...] = ()  # options in `DERIVED` that have no key in this family
    parts: tuple[ConfigPart, ...] = ()  # options that are more than a key, in addition to `PLAIN_PARTS`
    must_be: Mapping[str, Any] = field(default_factory=dict)  # key -> the only value that we support
    # keys, in addition to `KEPT`, that do not affect logits, or that a part reads and would write differently
    kept: tuple[str, ...] = ()
    # key -> its name in other versions of transformers; both are read and written
    aliases: Mapping[str, str] = field(default_factory=dict)
    # part of a weight's canonical name -> the hub's name, e.g. `mlp.up_proj` -> `mlp.c_fc`
    renamed: Mapping[str, str] = field(default_factory=dict)
    # part of the hub's name -> ours, whose rows that tensor holds, e.g. `self_attn.qkv_proj` -> q, k, v
    fused: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    # true if fused tensors interleave the heads of their parts (GPT-NeoX) instead of concatenating the parts
    fused_by_head: bool = False
    transposed: tuple[str, ...] = ()  # parts of the hub's names whose matrices are [in, out] (GPT-2's Conv1D)
    # the hub's name of the output head; old folders hold a copy of a tied embedding under it
    head: str = "lm_head.weight"
    # prefix of the hub's names that is missing in a folder saved from transformers' class without the head
    base_prefix: str = "model."
    # suffixes of names of tensors in old checkpoints that can be computed from config.json
    ignored: tuple[str, ...] = (".rotary_emb.inv_freq",)
    # folders may hold layers behind the last one, for multi-token prediction, which are not read
    layers_left_out: bool = False

    @cached_property
    def _mentioned(self) -> set[str]:
        return {*self.keys, *self.fixed, *self.derived, *(option for part in self.parts for option in part.options)}

    @cached_property
    def all_keys(self) -> Mapping[str, str]:
        """Option -> key, for every option that is a key."""
        return {**{option: option for option in SAME_KEYS if option not in self._mentioned}, **self.keys}

    @cached_property
    def all_fixed(self) -> Mapping[str, Any]:
        """Option -> its constant value."""
        return {**{option: value for option, value in PLAIN.items() if option not in self._mentioned}, **self.fixed}

    @cached_property
    def all_parts(self) -> tuple[ConfigPart, ...]:
        """Every part, including the default ones."""
        return (*self.parts, *(part for part in PLAIN_PARTS if self._mentioned.isdisjoint(part.options)))

    @cached_property
    def all_defaults(self) -> Mapping[str, Any]:
        """Key -> transformers' default."""
        read = {*self.all_keys.values(), *(key for part in self.all_parts for key in part.keys)}
        return {**{key: value for key, value in PLAIN_DEFAULTS.items() if key in read}, **self.defaults}

    def options(self, hf_config: Keys) -> dict[str, Any]:
        """Returns the fields of `ModelConfig` for a config.json. Raises FamilyError naming unsupported keys."""
        self._refuse_unknown_keys(hf_config)
        keys = {**self.all_defaults, **hf_config, **self._values_of_aliases(hf_config)}
        options = {"model_type": self.model_type, **self.all_fixed}
        for option, key in self.all_keys.items():
            if key in keys:
                options[option] = keys[key]
            elif option not in DERIVED:
                raise FamilyError(f"config.json of a {self.model_type} model has no {key}")
        for part in self.all_parts:
            try:
                options |= part.read(keys)
            except (TypeError, AttributeError, ZeroDivisionError):  # a value of the wrong type
                values = ", ".join(f"{key} {keys[key]!r}" for key in part.keys if key in keys)
                raise FamilyError(f"config.json has {values[:200]}, which transformers would not write") from None
        return options

    def _values_of_aliases(self, hf_config: Keys) -> dict[str, Any]:
        for key, other in self.aliases.items():
            if hf_config.get(key, hf_config.get(other)) != hf_config.get(other, hf_config.get(key)):
                raise FamilyError(f"config.json has {key} {hf_config[key]} and {other} {hf_config[other]}: keep one")
        return {key: hf_config[other] for key, other in self.aliases.items() if other in hf_config}

    def _refuse_unknown_keys(self, hf_config: Keys) -> None:
        base = self.architecture.replace("ForCausalLM", "Model").replace("LMHeadModel", "Model")
        known = (self.architecture, base, *self.other_architectures)
        architectures = hf_config.get("architectures") or []
        if not isinstance(architectures, list) or any(name not in known for name in architectures):
            raise FamilyError(
                f"config.json has architectures {architectures}: "
                f"of {self.model_type} models only {self.architecture} is converted"
            )
        must_be = {"is_encoder_decoder": False, **self.must_be}
        for key, wanted in must_be.items():
            if hf_config.get(key) not in (None, wanted):
                raise FamilyError(
                    f"config.json has {key} {hf_config[key]!r}: our {self.model_type} decoder computes only {wanted!r}"
                )
        read = {"model_type", "architectures", *self.all_keys.values(), *must_be, *KEPT, *self.kept, *DROPPED}
        read |= {*self.aliases.values(), *(key for part in self.all_parts for key in part.keys)}
        if unread := sorted(set(hf_config) - read):
            raise FamilyError(
                f"config.json has {', '.join(unread)}, which the {self.model_type} family does not read: the model "
                "may compute something else than our decoder, so it is not converted"
            )

    def carried(self, hf_config: Keys) -> dict[str, Any]:
        """Returns the keys that have no place in `ModelConfig`, which an export passes to `hf_config`."""
        return {key: hf_config[key] for key in (*KEPT, *self.kept, *self.must_be) if key in hf_config}

    def check(self, model: ModelConfig) -> None:
        """Raises FamilyError if transformers' class cannot express `model`."""
        if problem := problem_with_model(model):
            raise FamilyError(problem)
        for option, wanted in self.all_fixed.items():
            refuse_unless(model, option, wanted)
        options: dict[str, str] = {}  # key -> the first option that it expresses
        for option, key in self.all_keys.items():
            other = options.setdefault(key, option)
            if getattr(model, option) != getattr(model, other):
                raise FamilyError(
                    f"model.{other} {shown(getattr(model, other))} and model.{option} "
                    f"{shown(getattr(model, option))} are one switch of a {self.model_type} model, {key}: "
                    "set both alike"
                )
        for part in self.all_parts:
            part.write(model, {})
        if "num_key_value_heads" in self.derived:
            refuse_unless(model, "num_key_value_heads", model.num_attention_heads)
        if "head_dim" in self.derived:
            refuse_unless(model, "head_dim", model.hidden_size // model.num_attention_heads)
        if "num_experts" in self.all_keys and model.num_experts is None:
            raise FamilyError(f"model.num_experts null is no {self.model_type} model: set it, or model.model_type")

    def hf_config(self, model: ModelConfig, dtype: str, carried: Keys) -> dict[str, Any]:
        """Returns the config.json of `model` for weights in `dtype` (fp32, bf16, fp16), for transformers 4 and 5.

        carried: the result of `Family.carried` for the config.json from which the model was imported.
        """
        self.check(model)
        values = {key: getattr(model, option) for option, key in self.all_keys.items()}
        if "head_dim" not in self.defaults and model.head_dim == model.hidden_size // model.num_attention_heads:
            values.pop("head_dim", None)
        for part in self.all_parts:
            values |= part.write(model, carried)
        name = TRANSFORMERS_DTYPES[dtype]
        return {
            **dict.fromkeys(TOKEN_IDS),  # null: without them transformers would use ids of its own vocabulary
            **carried,
            "architectures": [self.architecture],
            "model_type": self.model_type,
            **values,
            **{other: values[key] for key, other in self.aliases.items()},
            "torch_dtype": name,
            "dtype": name,
        }

    def layout(self, model: ModelConfig, shapes: Mapping[str, Shape]) -> HubLayout:
        """Returns the tensors on disk of `model`, whose weights have `shapes` by canonical name."""
        heads = model.num_attention_heads if self.fused_by_head else None
        return hub_layout(shapes, self.renamed, self.fused, self.transposed, heads)

    def is_left_out(self, tensor: str, model: ModelConfig) -> bool:
        """Returns whether a tensor on disk is of a layer for multi-token prediction behind the last one of `model`."""
        number = tensor.removeprefix(f"{self.base_prefix}layers.").partition(".")[0]
        return self.layers_left_out and number.isdecimal() and int(number) >= model.num_hidden_layers

    def has_own_tensor(self, projection: str) -> bool:
        """Returns whether the matrix of a projection, such as `q_proj`, is a tensor on disk as it is."""
        fused = [part for parts in self.fused.values() for part in parts]
        transposed = [ours for ours, theirs in self.renamed.items() if theirs in self.transposed]
        return not any(part.endswith(f".{projection}") for part in (*fused, *transposed))
