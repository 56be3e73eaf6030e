"""Environment variables that the launcher forwards to ranks on other hosts, and which of them are secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.errors import LaunchError
from launch.runtime.processes import TREES
from launch.runtime.rank_environment import ATTEMPT
from megalite.config.secrets import names_secret, secret_in

USER_IN_ADDRESS = re.compile(r"://[^/]*@")  # of some services a user's name is a token


def is_secret(name: str, value: str) -> bool:
    """Returns whether a variable looks like a secret. Errs on the side of treating it as one."""
    return names_secret(name) or secret_in(value) is not None or bool(USER_IN_ADDRESS.search(value))


FORWARDED = re.compile(  # variables of this shell that ranks on other hosts need too; DeepSpeed forwards few of them
    r"(NCCL|GLOO|TORCH|UCX|OMP|MKL|KMP|HF|HUGGINGFACE|MLFLOW|TRANSFORMERS|TOKENIZERS|WANDB|AWS|S3|GOOGLE|GCS|AZURE|FSSPEC|DS|DEEPSPEED"
    r"|CUDA|PYTORCH|MEGALITE|GLIBC)_.*|(HTTPS?|NO|ALL)_PROXY|https?_proxy|no_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
NOT_FORWARDED = {"CUDA_VISIBLE_DEVICES", TREES, ATTEMPT, "DS_ENV_FILE"}  # specific to this host or this process
PLAIN = re.compile(r"[\w@%+=:./-]+")  # neither a shell nor srun changes these


def forwarded_environment(
    variables: Mapping[str, str], environment_files: Sequence[Path]
) -> tuple[dict[str, str], dict[str, str]]:
    """Selects the variables that ranks need from this process's `variables` and from `.deepspeed_env` files.

    Returns those for command lines, which every user of a host can read, and private ones: secrets, and values that a
    shell would change.
    Files may have comments and empty lines, on which DeepSpeed itself fails. Raises LaunchError for any other line that
    is not NAME=VALUE.
    """
    wanted = {
        name: value for name, value in variables.items() if FORWARDED.fullmatch(name) and name not in NOT_FORWARDED
    }
    for path in environment_files:
        if path.is_file():
            wanted |= _read_environment_file(path)
    shown = {name: value for name, value in wanted.items() if PLAIN.fullmatch(value) and not is_secret(name, value)}
    return shown, {name: value for name, value in wanted.items() if name not in shown}


def user_environment_files(variables: Mapping[str, str]) -> list[Path]:
    """Returns the paths at which DeepSpeed looks for environment files."""
    name = variables.get("DS_ENV_FILE", ".deepspeed_env")
    return list(dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd())))


def _read_environment_file(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = text.partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"{path}:{number}: {text!r} is not NAME=VALUE: correct it")
        if "$" in value:
            raise LaunchError(f"{path}:{number}: {name} has a $, which ranks take as it is: write its value out")
        found[name] = value[1:-1] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else value
    return found
