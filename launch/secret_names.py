"""Which variables of the environment nobody else should see, by their names and by what they hold."""

from __future__ import annotations

import re

NAME = re.compile(r"(KEY|TOKEN|SECRET|PASS|PASSWD|PASSWORD|PWD|CREDENTIALS?|AUTH|SAS)S?(_|$)", re.IGNORECASE)
IN_ADDRESS = re.compile(r"://[^/]*@")  # https://user:password@host


def is_secret(name: str, value: str) -> bool:
    """Rather too often than not."""
    return bool(NAME.search(name) or IN_ADDRESS.search(value))
