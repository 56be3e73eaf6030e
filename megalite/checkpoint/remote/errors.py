"""Turns errors of fsspec, s3fs, botocore and gcsfs into a StorageError: one sentence without credentials."""

from __future__ import annotations

import re
from typing import Any

from megalite.checkpoint.errors import StorageError
from megalite.checkpoint.manifest import printable
from megalite.config.loading.secrets_in_text import without_secrets

# in the names of classes: which of these packages are installed is not known here
NO_CREDENTIALS = re.compile("Credentials|CredentialRetrieval|ProfileNotFound|SSOToken|TokenRetrieval|RefreshError")
NO_ANSWER = re.compile("EndpointConnection|Connect(or|Timeout|ionClosed)|ReadTimeout|HTTPClient|ServerDisconnected")
# no second :// and a longest length keep the search linear in the length of a text
IN_URLS = (
    (re.compile(r"(://(?:(?!://)[^\s\"'?])+)\?[^\s\"']+"), r"\1"),  # a query, as of a signed URL
    (re.compile(r"(?<=://)[^\s\"']{1,500}@"), ""),  # user:password, as of a proxy, whose host stays readable
)
NAMED = re.compile(
    r"((?:key|signature|credential|token|secret|password|passwd|sig)[\w-]{0,30}[\"']?\s*[=:>]\s*[\"']?)[^\s&\"',;<>]+",
    re.IGNORECASE,
)


def scrubbed(text: str) -> str:
    """Returns `text` in one line, with anything that looks like a credential replaced."""
    for pattern, replacement in IN_URLS:
        text = pattern.sub(replacement, text)
    return printable(" ".join(NAMED.sub(r"\1***", without_secrets(text)).split()))


def error_code(error: BaseException) -> str | None:
    """Returns S3's name of an error, as "NoSuchBucket"; s3fs keeps it in the exception's cause."""
    for one in (error, error.__cause__):
        response: Any = getattr(one, "response", None)
        if isinstance(response, dict):
            return str(response.get("Error", {}).get("Code"))
    return None


def explained(url: str, error: BaseException) -> StorageError:
    """Explains `error` at `url` to the user."""
    names = " ".join(kind.__name__ for one in (error, error.__cause__) if one for kind in type(one).__mro__)
    text = scrubbed((isinstance(error, OSError) and error.strerror) or str(error))
    if NO_CREDENTIALS.search(names):
        return StorageError(
            f"{url}: no credentials for it were found ({text}): set them as its provider documents (environment "
            "variables, a profile, or the machine's role), never in the config",
            is_lasting=True,
        )
    if error_code(error) == "NoSuchBucket":
        return StorageError(f"{url}: there is no such bucket: create it, or correct the URL", is_lasting=True)
    if isinstance(error, PermissionError):
        return StorageError(
            f"{url}: access is denied ({text}): the credentials must allow to list and read there, and to write and "
            "delete for checkpoints",
            is_lasting=True,
        )
    if isinstance(error, FileNotFoundError):
        return StorageError(f"{url}: there is no such bucket or folder ({text})", is_lasting=True)
    if isinstance(error, TimeoutError) or NO_ANSWER.search(names):
        return StorageError(f"{url}: no answer in time ({text or type(error).__name__})")
    return StorageError(f"{url}: {text or type(error).__name__}")
