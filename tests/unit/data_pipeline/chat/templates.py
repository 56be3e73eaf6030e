"""Chat templates in the forms of eight families, short, and a tokenizer that knows all their tokens."""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers

from data_pipeline.tokenizers.reading import load_tokenizer

_CHATML_TURN = "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
_CHATML_PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
_TOOLS = "{% if tools %}{{ '<|im_start|>system\n' + tools | tojson + '<|im_end|>\n' }}{% endif %}"

TEMPLATES = {
    "llama-3": """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}
        {%- if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content | trim }}{% endif %}
        {{- '<|eot_id|>' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}""",
    "qwen-3": _TOOLS
    + """{% set ns = namespace(last=0) %}
        {%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
        {%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
        {%- if m.role == 'assistant' and loop.index0 < ns.last %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
        {%- elif m.tool_calls %}{{ '<tool_call>\n' + m.tool_calls[0].function | tojson + '\n</tool_call>' }}
        {%- else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"""
    + _CHATML_PROMPT,
    "mistral": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + '[/INST]' }}
        {%- elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}
        {%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}""",
    "gemma": """{{ bos_token }}{% for m in messages %}
        {%- set role = 'model' if m.role == 'assistant' else m.role %}
        {{- '<start_of_turn>' + role + '\n' + m.content | trim + '<end_of_turn>\n' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "chatml": _TOOLS + "{% for m in messages %}" + _CHATML_TURN + "{% endfor %}" + _CHATML_PROMPT,
    "phi": """{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}
        {%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}""",
    "deepseek": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}
        {%- elif m.role == 'assistant' %}{{ '<｜Assistant｜>' + m.content + '<｜end▁of▁sentence｜>' }}
        {%- else %}{{ m.content }}{% endif %}{% endfor %}
        {%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}{% generation %}"
    "{{ m.content + '<|im_end|>' }}{% endgeneration %}{{ '\n' }}{% else %}"
    + _CHATML_TURN
    + "{% endif %}{% endfor %}"
    + _CHATML_PROMPT,
}
WITHOUT_PROMPT = [TEMPLATES[family].replace(_CHATML_PROMPT, "") for family in ("chatml", "generation")]
"""Templates that ignore add_generation_prompt, although they open an answer."""
ENDS = {
    "llama-3": "<|eot_id|>", "mistral": "</s>", "gemma": "<end_of_turn>", "phi": "<|end|>",
    "deepseek": "<｜end▁of▁sentence｜>",
}  # fmt: skip
"""The token that ends an assistant's turn; `<|im_end|>` with the others."""

SPECIAL = (
    "<s>", "</s>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|im_start|>",
    "<|im_end|>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|end|>", "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>",
)  # fmt: skip
_LLAMA_3 = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
NOT_SPECIAL = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<｜User｜>", "<｜Assistant｜>")


def write_tokenizer(
    trained: Path,
    folder: Path,
    template: str,
    *,
    splits_lines: bool = True,
    normalizer: normalizers.Normalizer | None = None,
    special: Sequence[str] = SPECIAL,
) -> Path:
    """Writes a tokenizer folder as transformers does: the trained one with all tokens above, and a chat template.

    It splits text as Llama 3 does, with several line breaks as one word, or as GPT-2 does.
    """
    tokenizer = load_tokenizer(trained / "tokenizer.json")
    if splits_lines:
        words = pre_tokenizers.Split(Regex(_LLAMA_3), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(False, use_regex=False)])
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([AddedToken(token, normalized=normalizer is not None) for token in special])
    tokenizer.add_tokens(list(NOT_SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"clean_up_tokenization_spaces": False}))
    (folder / "chat_template.jinja").write_text(template)
    return folder
