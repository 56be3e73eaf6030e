"""Section `checkpoint`: when the run's state is saved, what is kept, and whether an existing one is continued."""

from __future__ import annotations

import re
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import BeforeValidator

from megalite.config.base import NonNegativeFloat, NonNegativeInt, PositiveFloat, Section


def _false_means_off(value: object) -> object:
    """YAML 1.1, in which other programs may have written a config, has `off` for false."""
    return "off" if value is False else value


Exported = Literal["off", "last", "every"]
ExportHf = Annotated[Exported, BeforeValidator(_false_means_off, json_schema_input_type=Exported)]


class CheckpointConfig(Section):
    """Checkpoints in `run_dir/checkpoints`; any of them resumes on any layout."""

    interval: NonNegativeInt | Literal["auto"] = 0
    """Steps between checkpoints; 0 = only at the end; `auto` = what loses least time, by measured cost and failures."""

    mean_hours_between_failures: PositiveFloat | None = None
    """For `interval: auto`: how long the job runs until something breaks. Left out: observed in this run's folder."""

    save_last: bool = True
    """Save a checkpoint after the last step."""

    resume: bool = True
    """Continue from the newest complete checkpoint in `run_dir`, or in `mirror` where `run_dir` has none."""

    background: bool = True
    """Write files while training goes on: a step waits only until its state is copied to host memory."""

    keep_last: NonNegativeInt = 10
    """How many of the newest checkpoints stay; 0 = all."""

    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this stay for good; 0 = none."""

    keep_best: NonNegativeInt = 0
    """How many checkpoints of the lowest evaluation loss stay."""

    export_hf: ExportHf = "off"
    """Write `run_dir/hugging_face/step_...` of the last step, or of every checkpoint, with which it is deleted."""

    export_hf_dtype: Literal["fp32", "bf16", "fp16"] | None = None
    """Number format of `export_hf`. Left out: that of the Hugging Face model it began from, or `precision.dtype`."""

    mirror: str | None = None
    """Any fsspec URL (`s3://bucket/run`, `gs://...`, `file:///...`): finished checkpoints are copied there."""

    mirror_wait_minutes: NonNegativeFloat = 30
    """How long the end of a run waits for the mirror to have the last checkpoint."""


BUCKETS = ("s3", "s3a", "gs", "gcs")  # protocols whose URLs name a bucket, which has no user and no port


def problem_with_url(url: str) -> str | None:
    """What keeps `url` from being a place for checkpoints, to follow its name; a credential in it is not repeated."""
    never = "credentials come only from the usual providers (environment variables, profiles, the machine's role)"
    protocol, is_url, rest = url.partition("://")
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
