"""No secret in a config: each option refuses one in a sentence that does not repeat it; ordinary values are none."""

from __future__ import annotations

import base64
import re
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from megalite.checkpoint.remote.errors import scrubbed
from megalite.config import Config, ConfigError, load_config
from megalite.config.loading.load import stated_values
from megalite.config.loading.secrets_in_config import secret_in_option, secret_in_override, secrets_among
from megalite.config.loading.secrets_in_text import names_secret, without_secrets
from megalite.config.suggestions import OptionPath, dotted, option_paths
from tests.unit.megalite.config.loading.test_secrets_in_text import ORDINARY, SECRETS

CANARY = "c4naryC4naryC4naryC4nary"
TEXTS = {  # each holds the canary, or words of it where the form has no room for it
    "token": f"hf_{CANARY}",
    "password": f"https://user:{CANARY}@host/x",
    "user": f"sftp://{CANARY}@host/x",
    "bucket": f"s3://{CANARY}@bucket/x",
    "path of a bucket": f"s3:/{CANARY}:x@bucket/x",
    "chained": f"simplecache::https://{CANARY}@host/x",
    "query": f"https://host/x?access_token={CANARY}",
    "signed": f"s3://bucket/x?X-Amz-Signature={CANARY}",
    "header": f"Bearer {CANARY}",
    "connection string": f"AccountName=a;AccountKey={CANARY}==",
}
SOMEWHERE: list[OptionPath] = [
    *option_paths(Config),
    ("deepspeed", "comet", "workspace"),
    ("deepspeed", "tensorboard", "output_path"),
    ("deepspeed", "no_such"),
    ("no_such", "option"),
    ("model", "no_such"),
]
NAMED = [
    "deepspeed.comet.api_key",
    "deepspeed.mlflow.password",
    "monitor.wandb.api_key",
    "monitor.wandb_token",
    "token",
]


def told(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load_config(path, overrides)
    with pytest.raises(ConfigError) as again:
        stated_values(path, overrides)
    said = "\n".join(refused.value.sentences)
    assert said == "\n".join(again.value.sentences) and CANARY not in said and "environment instead (" in said
    return said


@given(st.sampled_from(SOMEWHERE), st.sampled_from(list(TEXTS)), st.booleans())
def test_every_option_refuses_a_secret(minimal: Path, option: OptionPath, kind: str, in_list: bool) -> None:
    """In the file and on the command line, whatever the option would make of the text."""
    text = TEXTS[kind]
    written = f'["a", "{text}"]' if in_list else f'"{text}"'
    said = told(minimal, f"{dotted(option)}={written}")
    assert said.startswith(f'override "{dotted(option)}=..."') and said.count("\n") == 0
    values = yaml.safe_load(minimal.read_text())
    here: Any = values
    for name in option[:-1]:
        here = here.setdefault(name, {})
    here[option[-1]] = ["a", text] if in_list else text
    path = minimal.with_name("secret.yaml")
    path.write_text(yaml.safe_dump(values))
    said = told(path)
    assert re.match(rf"{re.escape(str(path))}, line \d+: {re.escape(dotted(option))} holds ", said)


@pytest.mark.parametrize("name", NAMED)
def test_options_are_refused_by_their_names(name: str, minimal: Path) -> None:
    """Keys of tracking services look like nothing: `deepspeed` passes comet's on, others are unknown options."""
    assert f"{name} holds a secret, by its name" in told(minimal, f"{name}={CANARY}")
    assert "holds a secret, by a name in it" in told(minimal, f'{name}="{CANARY}')  # the quote is not closed
    section, _, option = name.rpartition(".")
    if section:
        assert f"{name} holds a secret" in told(minimal, f"{section}={{enabled: true, {option}: {CANARY}}}")
        assert "holds a secret" in told(minimal, f"{section}={{enabled: true, {option}: {CANARY}")


@pytest.mark.parametrize("value", ["12345678901234567890", "1234567.5", "!!binary c2VjcmV0", "2026-01-01", "[5000000]"])
def test_a_secret_that_is_no_text_is_refused_by_its_name(value: str, minimal: Path) -> None:
    for override in (f"deepspeed.comet={{enabled: true, api_key: {value}}}", f"deepspeed.comet.api_key={value}"):
        assert "deepspeed.comet.api_key holds a secret, by its name" in told(minimal, override)


def test_ids_of_tokens_and_counts_are_no_secrets() -> None:
    assert not list(secrets_among({"a": {"pad_token": 0, "bytes_per_token": 4.2, "token": True, "key": None}}))


@pytest.mark.parametrize("name", ["eos_token", "pad_token", "boi_token", "special_tokens.mask_token", "sep_token"])
def test_tokens_of_a_vocabulary_are_no_secrets(name: str, minimal: Path) -> None:
    """Whoever brought `eos_token` from another stack was told to put it into the environment."""
    assert secret_in_override(f"data.{name}=</s>") is None
    assert "a Hugging Face token" in told(minimal, f"data.{name}={TEXTS['token']}")


def test_bytes_and_sets_are_searched(minimal: Path) -> None:
    coded = base64.b64encode(TEXTS["token"].encode()).decode()
    assert "a Hugging Face token" in told(minimal, f"deepspeed.comet.workspace=!!binary {coded}")
    assert "a Hugging Face token" in told(minimal, f"deepspeed.comet.workspace=!!set {{{TEXTS['token']}}}")


def test_only_a_value_is_a_secret_and_counts_of_tokens_are_none(minimal: Path) -> None:
    for value in ("null", "false", "''", "{}"):
        assert secret_in_override(f"deepspeed.comet.api_key={value}") is None
    for name in ("max_tokens", "max_new_tokens", "token_type_ids", "num_key_value_heads", "eos_token_id"):
        assert secret_in_override(f"deepspeed.{name}=4096") is None


def test_the_variable_is_named(minimal: Path) -> None:
    assert "(COMET_API_KEY)" in told(minimal, f"deepspeed.comet.api_key={CANARY}")
    assert "(HF_TOKEN)" in told(minimal, f"training.initialize_from=https://{CANARY}@hub/x")
    assert "(AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY)" in told(minimal, f"run_dir=s3://K:{CANARY}@bucket/x")


@pytest.mark.parametrize(
    "override",
    [f"hf_{CANARY}", f"hf_{CANARY}.x=1", f"training.hf_{CANARY}=1", f"https://u:{CANARY}@host", f"=hf_{CANARY}"],
)
def test_what_is_no_override_is_not_repeated_either(override: str, minimal: Path) -> None:
    told(minimal, override)


def test_a_secret_as_a_name_or_in_yaml_that_cannot_be_read_is_not_repeated(minimal: Path) -> None:
    path = minimal.with_name("names.yaml")
    for text in (f"monitor: {{hf_{CANARY}: 1}}", f"run_dir: *hf_{CANARY}", f"hf_{CANARY}: 1\nhf_{CANARY}: 2"):
        path.write_text(f"{minimal.read_text()}\n{text}\n")
        with pytest.raises(ConfigError) as refused:
            load_config(path)
        assert CANARY not in "".join(refused.value.sentences)


@pytest.mark.parametrize("value", SECRETS)
def test_what_is_made_of_a_secret_is_hidden(value: str) -> None:
    """Nothing of it is left to use: what stays are names of hosts, users and parameters."""
    words = "SECRET|p%40ss|pa/ss|word|hunter2|plainword|dXNl|1234567|abcdef|e30.abc|k==|XXXX|IOSFODNN7|b3"
    hidden = without_secrets({"error": [f"cannot open '{value}' at all"]})["error"][0]
    assert hidden.startswith("cannot open '") and "***" in hidden
    assert not re.search(words, hidden.replace("Password", "")), hidden


@pytest.mark.parametrize("value", ORDINARY)
def test_an_ordinary_value_is_left_alone(value: str) -> None:
    assert secret_in_option(value) is None and without_secrets(value) == value
    assert secret_in_override(f"checkpoint.mirror={value}") is None


def test_no_config_of_ours_and_no_documented_word_is_taken_for_a_secret() -> None:
    texts = [path.read_text() for path in (*Path("configs").rglob("*.yaml"), *Path("docs").glob("*.md"))]
    words = {word.strip("`'\"()[],.") for text in texts for word in text.split()}
    assert len(words) > 4000
    assert {word: kind for word in words if (kind := secret_in_option(word))} == {}
    overrides = {word for word in words if re.match(r"[a-z_]+\.[a-z_.]+=", word)}
    assert len(overrides) > 10
    assert {override: said for override in overrides if (said := secret_in_override(override))} == {}


PIECES = [
    *("a", "0", "_", ".", ":", "@", " ", "://a", "://:x", ":/a", "a:", "a.", "a-", "a_", "s3:/", "https://a", "a:b@c."),
    *("=a:a", "1@", "0,", "?a=", "key", "key ", "a_token", "KEY_", "hf_a", "sk-a-", "eyJ", "-----BEGIN ", "-----END"),
    *("-----BEGIN PRIVATE KEY-----", "basic ", "basic a0", "authorization: "),
]


def test_no_text_makes_a_search_hang() -> None:
    """Configs and errors of storage servers are texts of strangers; a quadratic pattern takes 4 to 20 s."""
    for piece in PIECES:
        text = f"x={piece * (40_000 // len(piece))}!"
        for search in (names_secret, secret_in_option, scrubbed):
            start = time.process_time()
            search(text)
            assert time.process_time() - start < 1, (search, piece)


def test_a_config_with_a_long_text_is_loaded_at_once(minimal: Path) -> None:
    start = time.process_time()
    assert len(str(load_config(minimal, [f"run_dir={'a' * 100_000}"]).run_dir)) == 100_000
    assert time.process_time() - start < 5
