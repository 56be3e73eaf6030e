"""Checks URLs of object stores in a config, which hold no secrets: a config is printed and kept with checkpoints."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

BUCKETS = ("s3", "s3a", "gs", "gcs")  # protocols whose URLs name a bucket, which has no user and no port


def problem_with_url(url: str) -> str | None:
    """Returns why `url` names no folder on a store, without repeating a credential in it; None if it does."""
    never = "credentials come only from the usual providers (environment variables, profiles, the machine's role)"
    protocol, is_url, rest = url.partition("://")
    try:
        urlsplit(url)
    except ValueError:  # brackets that do not enclose an IPv6 address
        return "is not a URL that can be read: write file:///folder, s3://bucket/folder or gs://bucket/folder"
    if re.search(r"::[\w+.-]+://", url):
        return "chains protocols: use one, as in s3://bucket/folder"
    if not is_url:
        return "is not a URL: write file:///folder, s3://bucket/folder or gs://bucket/folder"
    if not rest:
        return "names no place: write file:///folder, s3://bucket/folder or gs://bucket/folder"
    if _has_credentials(url, protocol, rest):
        return f"has credentials in it: remove them, {never}"
    if "?" in rest or "#" in rest:
        return f"has a query, where tokens stand: remove it, {never}"
    return None


def _has_credentials(url: str, protocol: str, rest: str) -> bool:
    if protocol in BUCKETS:
        is_alias = rest.startswith("arn:")  # of an access point
        return not is_alias and ("@" in rest or ":" in rest.partition("/")[0])
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError:  # a port that is no number is the beginning of a password with a slash in it
        return True
    return parts.password is not None
