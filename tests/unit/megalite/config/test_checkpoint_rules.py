"""What options must be to those of `checkpoint`; a credential in a URL is refused and never repeated."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalite.config import ConfigError, load_config


def told_of(minimal: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as told:
        load_config(minimal, overrides)
    assert "\n" not in str(told.value)
    return str(told.value)


def test_the_best_need_losses(minimal: Path) -> None:
    sentence = told_of(minimal, "checkpoint.keep_best=3")
    assert "checkpoint.keep_best 3" in sentence and "training.evaluation.interval is 0" in sentence
    evaluated = ["training.evaluation.interval=5", "data.held_out_fraction=0.1"]
    assert load_config(minimal, ["checkpoint.keep_best=3", *evaluated]).checkpoint.keep_best == 3


@pytest.mark.parametrize(
    "url",
    [
        "s3://a-key:hunter2@bucket/run",
        "s3://a-key:hun/ter2@bucket/run",  # the password ends after the first slash
        *("s3://hunter2@bucket/run", "gs://bucket:hunter2/run", "sftp://user:hunter2@host/run"),
        *("sftp://user:hun/ter2@host/run", "s3://bucket/run?token=hunter2", "gs://bucket/run#hunter2"),
    ],
)
def test_a_url_with_a_credential_is_refused_and_not_repeated(url: str, minimal: Path) -> None:
    sentence = told_of(minimal, f"checkpoint.mirror='{url}'")
    assert "checkpoint.mirror has" in sentence or "checkpoint.mirror holds" in sentence
    assert "usual providers" in sentence or "environment instead" in sentence
    assert "hun" not in sentence and "ter2" not in sentence


@pytest.mark.parametrize(
    "url", ["/mnt/copies", "bucket/run", "s3://", "simplecache::s3://bucket/run", "s3:a:b@bucket", "file://[::1/x"]
)
def test_what_is_no_url_is_told_what_one_looks_like(url: str, minimal: Path) -> None:
    sentence = told_of(minimal, f"checkpoint.mirror='{url}'")
    assert "s3://bucket/folder" in sentence and "a:b@" not in sentence


@pytest.mark.parametrize(
    "url",
    [
        "s3://bucket/run 1/12:30",
        "s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/run",
        "gs://bucket",
        "file:///mnt/copies/me@home",
        "sftp://user@host:22/run",
        "abfs://container@account.dfs.core.windows.net/run",
    ],
)
def test_urls_without_a_secret_are_taken(url: str, minimal: Path) -> None:
    assert load_config(minimal, [f"checkpoint.mirror='{url}'"]).checkpoint.mirror == url


def test_a_mirror_inside_the_run_folder_is_none(minimal: Path, tmp_path: Path) -> None:
    sentence = told_of(minimal, f"run_dir={tmp_path}", f"checkpoint.mirror=file://{tmp_path}/checkpoints")
    assert "run's own run_dir" in sentence


@pytest.mark.parametrize("name", ["not_finite", "loss_spike"])
def test_rollbacks_need_checkpoints(name: str, minimal: Path) -> None:
    sentence = told_of(minimal, f"guards.{name}=rollback", "checkpoint.interval=0")
    assert f"guards.{name} rollback" in sentence and "checkpoint.interval is 0" in sentence
    for interval in ("5", "auto"):
        config = load_config(minimal, [f"guards.{name}=rollback", f"checkpoint.interval={interval}"])
        assert getattr(config.guards, name) == "rollback"


def test_the_last_step_is_exported_only_if_it_is_saved(minimal: Path) -> None:
    sentence = told_of(minimal, "checkpoint.export_hf=last", "checkpoint.save_last=false")
    assert "checkpoint.save_last is false" in sentence and "export_hf every" in sentence
    for off in ("off", "false"):  # which are one in YAML 1.1
        assert load_config(minimal, [f"checkpoint.export_hf={off}"]).checkpoint.export_hf == "off"
