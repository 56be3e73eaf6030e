"""Names the supported family that is nearest to a model which is not supported, to begin with.

In: transformers' `model_type`. Out: the end of a sentence about it.
"""

from __future__ import annotations

from collections.abc import Iterable

from megalite.config.suggestions import nearest_name

GUIDE = "docs/adding_a_model.md shows how a family is added"

RELATIVES: dict[str, tuple[str, ...]] = {
    "gpt_neox": ("falcon", "gptj", "codegen", "phi", "persimmon", "gpt_neox_japanese", "cohere", "cohere2"),
    "gpt2": ("opt", "gpt_neo", "gpt_bigcode", "openai-gpt", "bloom", "mpt", "xglm", "biogpt"),
    "deepseek_v3": ("deepseek_v32", "kimi_k2", "glm4_moe_lite", "longcat_flash"),
    "glm4_moe": ("glm4v_moe_text", "dots1", "exaone_moe"),
    "llama": (
        *("granite", "glm", "glm4", "nemotron", "internlm2", "internlm3", "helium", "olmo", "stablelm", "arcee"),
        *("apertus", "seed_oss", "ernie4_5", "diffllama", "baichuan", "minicpm", "minicpm3"),
    ),
    "gemma2": ("gemma", "vaultgemma"),
    "gemma3_text": ("gemma3", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text"),
    "mistral": ("mistral3",),
    "ministral": ("ministral3",),
    "mixtral": ("dbrx", "phimoe", "granitemoe", "jetmoe", "minimax"),
    "olmo3": ("exaone4",),
    "olmoe": ("flex_olmo",),
    "qwen2": ("qwen2_vl", "qwen2_5_vl"),
    "qwen3": ("hunyuan_v1_dense", "qwen3_vl"),
    "qwen3_moe": (
        *("qwen2_moe", "gpt_oss", "ernie4_5_moe"),
        *("hunyuan_v1_moe", "llama4", "llama4_text"),
    ),
}
"""Family -> model types whose decoder differs from it in few places."""

OTHER_KINDS: dict[str, tuple[str, ...]] = {
    "an encoder": (
        *("bert", "roberta", "distilbert", "electra", "albert", "deberta", "deberta-v2", "xlm-roberta", "modernbert"),
        *("camembert", "mpnet", "longformer", "vit", "clip"),
    ),
    "an encoder with a decoder": ("t5", "mt5", "umt5", "bart", "mbart", "pegasus", "marian", "whisper", "t5gemma"),
    "a recurrent model": (
        *("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "recurrent_gemma", "jamba", "zamba", "zamba2"),
        *("nemotron_h", "falcon_h1", "qwen3_next", "lfm2", "bamba", "granitemoehybrid"),
    ),
}


def advice_for(model_type: object, known: Iterable[str]) -> str:
    """Returns what to do with a model type that is none of the `known` families."""
    for family, relatives in RELATIVES.items():
        if model_type in relatives:
            return f"its nearest relative is {family}, and {GUIDE}"
    for kind, names in OTHER_KINDS.items():
        if model_type in names:
            return f"it is {kind}, and only decoders with attention in every layer are trained here"
    meant = nearest_name(model_type, known) if isinstance(model_type, str) else None
    return f"did you mean {meant}?" if meant else f"most families begin as a copy of llama, and {GUIDE}"
