"""Hides secrets in texts that are kept where others read them."""

from __future__ import annotations

import re
from typing import Any

from megalite.config.loading.secrets import KINDS

# the rest of a secret behind what it is known by; of a private key all lines
REST = r"(?:(?<=-----)[\s\S]*?(?:-----END[^-]*-----|\Z)|[^\s&;,<>]*)"
PATTERNS = [re.compile(f"(?:{pattern}){REST}") for pattern in KINDS.values()]


def without_secrets(value: Any) -> Any:
    """Returns a text with `***` in place of all that seems to be a secret; in nested values, all their texts.

    For what is made of command lines and of other programs' errors, and kept where others read it.
    """
    if isinstance(value, dict):
        return {name: without_secrets(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [without_secrets(one) for one in value]
    if not isinstance(value, str):
        return value
    return "".join(map(_text_without_secrets, re.split("([\"'])", value)))  # quotes end a secret


def _text_without_secrets(text: str) -> str:
    for pattern in PATTERNS:
        text = pattern.sub("***", text)
    return text
