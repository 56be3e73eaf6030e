"""Finds secrets among the values of a config and its overrides, before anything repeats them.

A config is copied into config.yaml, deepspeed.json, every checkpoint's manifest and the tracking service, and the
overrides stand on command lines: a secret in one of them is everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from megalite.config.errors import ConfigError
from megalite.config.loading.secrets_in_text import secret_in
from megalite.config.suggestions import OptionPath, dotted
from megalite.config.yaml_text import parse_yaml

NAMES = re.compile(
    r"(?:^|_)(?:(?:api|access|secret|private|account|auth)_?key|(?:api|access|auth|hf|hub|wandb)_?token|token|secret"
    r"|passwd|password|passphrase|credentials?|authorization)$",
    re.IGNORECASE,
)
"""Names of options, all of other programs, whose value is a secret, such as `deepspeed.comet.api_key`."""

VOCABULARY = re.compile(
    r"(?:^|_)(?:[be]os|eo[tmd]|pad(?:ding)?|unk(?:nown)?|mask|sep(?:arator)?|cls|stop|start|end|special|image|video|audio"
    r"|boi|eoi|think|extra|added|response|instruction|decoder_start|prefix|suffix|middle)_token$",
    re.IGNORECASE,
)
"""Names of tokens of a vocabulary, which are no secrets."""

NAMED = re.compile(r"(?:key|token|secret|passw(?:or)?d)[\"']?\s*:", re.IGNORECASE)  # in YAML that cannot be read
USER = re.compile(r"([A-Za-z][\w+.-]{0,30}):/{1,2}([^/?#\s@]*)@")
BUCKET = re.compile(r"(?:s3a?|gcs?):/{1,2}(?!arn:)[^/\s]*[:@]")  # whose name has no user and no port
CONTAINERS = ("abfs", "abfss", "az", "wasb", "wasbs")  # protocols in whose URLs a container stands before the @
TOKEN = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w~%+-]{20,}")  # in the place of a user's name; those of Azure have dots

SMALL = 1_000_000  # number below which a value is the id of a token or a count; bools are numbers, too

VARIABLES = {
    "comet": "COMET_API_KEY",
    "wandb": "WANDB_API_KEY",
    "s3:": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "s3a:": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "AWS": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs:": "GOOGLE_APPLICATION_CREDENTIALS",
    "gcs:": "GOOGLE_APPLICATION_CREDENTIALS",
    "Google": "GOOGLE_APPLICATION_CREDENTIALS",
    "storage account": "AZURE_STORAGE_CONNECTION_STRING",
    "Hugging Face": "HF_TOKEN",
    "initialize_from": "HF_TOKEN",
    "GitHub": "GITHUB_TOKEN",
}
"""What a name, the kind of a secret or a protocol contains, and the environment variables where it belongs."""
ANY_VARIABLE = "the variables that its provider reads"


def secret_in_option(value: str) -> str | None:
    """Returns what kind of secret the text of an option seems to contain; None if it has none.

    Names of users and containers that URLs need, as in `sftp://user@host`, are none.
    """
    if kind := secret_in(value):
        return kind
    if BUCKET.match(value):
        return "an address with a key"
    for protocol, user in USER.findall(value):
        if protocol.lower() not in CONTAINERS and TOKEN.fullmatch(user):
            return "an address with a token"
    return None


def secrets_among(values: Any, path: OptionPath = ()) -> Iterator[tuple[OptionPath, str]]:
    """Yields each option of nested values that holds a secret, as far as its name is none, and a sentence about it."""
    if isinstance(values, dict):
        for name, value in values.items():
            if kind := secret_in_option(str(name)):
                yield path, _sentence(path, f"{kind} as the name of an option", "")
            else:
                yield from secrets_among(value, (*path, str(name)))
    elif isinstance(values, list | tuple | set):
        for value in values:
            yield from secrets_among(value, path)
    elif values not in (None, "") and not (isinstance(values, int | float) and abs(values) < SMALL):
        text = values.decode("latin-1") if isinstance(values, bytes) else values if isinstance(values, str) else ""
        if path and NAMES.search(path[-1]) and not VOCABULARY.search(path[-1]):
            yield path, _sentence(path, "a secret, by its name", "")
        elif kind := secret_in_option(text):
            yield path, _sentence(path, kind, text)


def secret_in_override(override: str) -> str | None:
    """Returns a sentence about an override that holds a secret, in its value or anywhere else; None if it has none."""
    name, equals, text = override.partition("=")
    if not equals or secret_in_option(name):
        kind = secret_in_option(override)
        return None if kind is None else f"an override: {_sentence((), kind, '')}"
    option = tuple(name.strip().split("."))
    where = f'override "{dotted(option)}=..."'
    kind = secret_in_option(text)
    try:
        if found := next(secrets_among(parse_yaml(text)[0], option), None):
            return f"{where}: {found[1]}"
    except ConfigError:  # its own sentence would repeat the text
        kind = "a secret, by a name in it" if NAMED.search(f"{name}:{text}") else kind
    return None if kind is None else f"{where}: {_sentence(option, kind, text)}"


def _sentence(option: OptionPath, kind: str, value: str) -> str:
    about = f"{dotted(option)} {kind} {value}"
    variable = next((variable for mark, variable in VARIABLES.items() if mark in about), ANY_VARIABLE)
    return (
        f"{dotted(option) or 'the config'} holds {kind}, and a config is copied into the run folder, checkpoints and "
        f"reports: remove it, and put it into the environment instead ({variable}); "
        "if it is none, write it differently"
    )
