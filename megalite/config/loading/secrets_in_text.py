"""Recognises secrets in texts that others will read, by their forms or by the names of variables, and hides them.

A doubt counts as a secret, except where ordinary paths, addresses of hosts or names of models would be taken for one.
Texts of strangers are searched too: each pattern takes time linear in the length of a text, so that what could begin at
every character and run to the end has a longest length.
"""

from __future__ import annotations

import re
from typing import Any

NAME = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASS|PASSWD|PASSWORD|PASSPHRASE|PWD|CREDENTIAL|AUTH|AUTHORIZATION|BEARER|COOKIE|SESSION|WEBHOOK"
    r"|JWT|SAS|CONN|CONNECTION_?STRING|(?:^|_)PAT)S?_?\d*(?:_|$)|API_?KEY",
    re.IGNORECASE,
)
KINDS = {  # what a text seems to contain -> how that is recognised
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?: BLOCK)?-----",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{20,}\b",
    "a GitHub token": r"\b(?:gh[opsur]|github_pat)_\w{6,}",
    "a GitLab token": r"\bglpat-[\w-]{6,}",
    "an AWS access key": r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}\b",
    "a Google API key": r"\bAIza[\w-]{30,}",
    "a Slack token": r"\bxox[a-z]-[\w-]{4,}|\bxapp-\d-[\w-]{4,}",
    "the address of a webhook": r"hooks\.slack\.com/\w+/\w|discord(?:app)?\.com/api/webhooks/\w",
    "an API key": r"\b(?:sk|nvapi)-(?:[a-z]+\d*-){0,2}\w{20,}|\bwandb_v1_\w{10,}",
    "a signed token (JWT)": r"\beyJ[\w-]{10,}",
    # "basic" is a word of names as well: behind it base64, in which there are digits and letters of both cases
    "an authorization header": r"(?i:\bauthorization[\"']?\s*[:=]\s*[\"']?(?:basic|bearer|digest|token)\s+[^\s,;]"
    r"|\bbearer\s+[\w.~+/-]{8,})"
    r"|\b(?i:basic)\s+(?=[A-Za-z]*\d)(?=[a-z\d]*[A-Z])(?=[A-Z\d]*[a-z])[A-Za-z\d]{16,}(?![\w.+/-])",
    "the key of a storage account": r"(?i:\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)\s*=\s*[^\s;])",
    "a signed address": r"(?i:[?&](?:sig|X-(?:Amz|Goog)-(?:Signature|Credential|Security-Token))=[^&\s])",
    "an address with a password": r"://[^\s/:@]*:(?!\d*(?:[/?#]|$))[^\s@]{1,1000}@",
    "an address with a token": r"(?i:\b(?:https?|ftps?|socks[45]h?)://[^\s/?#@:]+@)",
    # digits and commas are the devices of a host: node1:0,1@node2:0,1; what is before a host without a dot and a port
    # may be the name of a run, as in lr:3e-4@cosine, unless it has the letters and digits of a password
    "a user's name and password": r"(?:^|[\s=,;])[\w.+%-]+:(?:"
    r"(?![\d,]+@)[^\s/@:]+@(?:[\w-]+\.[\w.-]+(?::\d+)?|[\w-]+:\d+)|(?=[A-Za-z]+\d)\w{7,}@[\w-]+)(?:[/\s,;]|$)",
    # a number is how many tokens
    "a password": r"(?i:(?:^|[\s?&;,])(?:passw(?:or)?d|pwd|(?:\w+_)?(?:token(?!=\d{1,15}(?![^\W_]))|secret)"
    r"|(?:access|api)_?key)=[^\s&;,]{4,})",
}
PATTERNS = {kind: re.compile(pattern) for kind, pattern in KINDS.items()}
# the rest of a secret behind what it is known by; of a private key all lines
REST = r"(?:(?<=-----)[\s\S]*?(?:-----END[^-]*-----|\Z)|[^\s&;,<>]*)"
WHOLE_SECRETS = [re.compile(f"(?:{pattern}){REST}") for pattern in KINDS.values()]


def secret_in(value: str) -> str | None:
    """Returns what kind of secret a text seems to contain, such as "a Hugging Face token"; None if it has none."""
    return next((kind for kind, pattern in PATTERNS.items() if pattern.search(value)), None)


def names_secret(name: str) -> bool:
    """Returns whether an environment variable of this name holds a secret, such as HF_TOKEN2 or GITHUB_PAT."""
    return bool(NAME.search(name))


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
    for pattern in WHOLE_SECRETS:
        text = pattern.sub("***", text)
    return text
