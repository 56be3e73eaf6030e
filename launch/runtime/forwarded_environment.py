"""Environment variables that the launcher forwards to ranks on other hosts, and which of them all users may see there.

A command line can be read by every user of a host. So it has only settings of libraries that are known by name; all
other variables reach ranks in a file that nobody else can read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from launch.errors import LaunchError
from launch.runtime.import_path import PYTHON_PATH, SAFE_PATH, import_variables
from launch.runtime.processes import TREES
from launch.runtime.rank_environment import LOCAL_SIZES, VARIABLES
from launch.runtime.shown_variables import AT_START, SHOWN
from megalite.config.loading.secrets_in_text import names_secret, secret_in
from megalite.distributed.rank_admission import ATTEMPT

USER_IN_ADDRESS = re.compile(r"://[^/]*@")  # of some services a user's name is a token


def is_secret(name: str, value: str) -> bool:
    """Returns whether a variable looks like a secret. Errs on the side of treating it as one.

    The name of a known setting, such as NCCL_IB_PKEY, is none.
    """
    is_named = names_secret(name) and name not in SHOWN
    return is_named or secret_in(value) is not None or bool(USER_IN_ADDRESS.search(value))


# variables of this shell that ranks on other hosts need too
FORWARDED = re.compile(
    r"(NCCL|GLOO|TORCH|UCX|OMP|MKL|KMP|HF|HUGGINGFACE|MLFLOW|TRANSFORMERS|TOKENIZERS|WANDB|AWS|S3|GOOGLE|GCS|AZURE|FSSPEC|DS|DEEPSPEED"
    r"|CUDA|PYTORCH|MEGALITE|GLIBC)_.*|(HTTPS?|NO|ALL)_PROXY|https?_proxy|no_proxy|SSL_CERT_(FILE|DIR)|REQUESTS_CA_BUNDLE"
)
# specific to this host or this process
NOT_FORWARDED = {"CUDA_VISIBLE_DEVICES", TREES, ATTEMPT, "DS_ENV_FILE", PYTHON_PATH, SAFE_PATH}
# set by the launcher; private variables come after it and would override them
OF_THE_LAUNCHER = {*VARIABLES, *LOCAL_SIZES, "CROSS_RANK", "CROSS_SIZE", "MASTER_ADDR", "MASTER_PORT"}
NOT_FROM_FILES = OF_THE_LAUNCHER | NOT_FORWARDED - {PYTHON_PATH}
PLAIN = re.compile(r"[\w@%+=:./-]+")  # neither a shell nor srun changes these
ENVIRONMENT_FILE = ".deepspeed_env"
EXPORT = re.compile(r"^export\s+")  # as in a file for a shell
# what a shell would replace: a variable, which is meant where there is one of this name, and what is in brackets
REFERENCE = re.compile(r"(?<!\\)\$(?:([A-Za-z_]\w*)|[{(])")


def forwarded_environment(
    variables: Mapping[str, str], environment_files: Sequence[Path], also: tuple[str, ...] = ()
) -> tuple[dict[str, str], dict[str, str]]:
    """Selects the variables that ranks need from this process's `variables` and from `.deepspeed_env` files.

    `also` are beginnings of further names that are selected.
    Returns those for command lines, which every user of a host can read, and private ones: all but the known settings
    of libraries (`SHOWN`), and those with a value that looks like a secret or that a shell would change.
    Files may have comments and empty lines, on which DeepSpeed itself fails. Raises LaunchError for any other line that
    is not NAME=VALUE.
    """
    wanted = {
        name: value
        for name, value in variables.items()
        if (FORWARDED.fullmatch(name) or name.startswith(also)) and name not in NOT_FORWARDED
    }
    for path in environment_files:
        found = _read_environment_file(path)
        wanted |= {name: value for name, value in found.items() if name not in NOT_FROM_FILES}
    if PYTHON_PATH in wanted:
        wanted |= {PYTHON_PATH: import_variables(wanted)[PYTHON_PATH]}

    def may_be_shown(name: str, value: str) -> bool:
        return name in SHOWN and bool(PLAIN.fullmatch(value)) and secret_in(value) is None

    shown = {name: value for name, value in wanted.items() if may_be_shown(name, value)}
    return shown, {name: value for name, value in wanted.items() if name not in shown}


def user_environment_files(variables: Mapping[str, str]) -> list[Path]:
    """Returns the paths of the user's environment files: the one at home, or those that DS_ENV_FILE names.

    As for DeepSpeed, a relative DS_ENV_FILE is looked for at home and in the current folder. Other files of the current
    folder are not read, since they may be somebody else's.
    """
    name = variables.get("DS_ENV_FILE")
    if name is None:
        return [Path.home() / ENVIRONMENT_FILE]
    return list(dict.fromkeys(folder / name for folder in (Path.home(), Path.cwd())))


def unread_environment_file(environment_files: Sequence[Path]) -> tuple[str, str] | None:
    """Returns a sentence about a file of the current folder that DeepSpeed would read, and what to do; else None."""
    here = Path.cwd() / ENVIRONMENT_FILE
    if not here.is_file() or here in environment_files:
        return None
    return (
        f"./{ENVIRONMENT_FILE} is not read, since a file of the current folder may be somebody else's",
        f"move it to ~/{ENVIRONMENT_FILE}, or name it (export DS_ENV_FILE={here})",
    )


def environment_notices(environment_files: Sequence[Path], private: Mapping[str, str]) -> list[str]:
    """Returns sentences about what does not work as a user of DeepSpeed may expect."""
    unread = unread_environment_file(environment_files)
    notices = [] if unread is None else [": ".join(unread)]
    for path in environment_files:
        found = _read_environment_file(path)
        if unused := sorted(found.keys() & NOT_FROM_FILES):
            notices.append(f"{path}: the launcher itself sets {', '.join(unused)}, so the file's values are left out")
        if not all(Path(entry).is_absolute() for entry in found.get(PYTHON_PATH, "/").split(os.pathsep)):
            notices.append(f"{path}: of {PYTHON_PATH} only full paths are taken: write full ones, or take the rest out")
    if late := sorted(private.keys() & AT_START):
        notices.append(
            f"ranks have {', '.join(late)} only after they have started, because the value does not fit on a command "
            "line: write it with letters, digits and _ @ % + = : . / - alone"
        )
    return notices


def _read_environment_file(path: Path) -> dict[str, str]:
    found: dict[str, str] = {}
    for number, line in enumerate(path.read_text().splitlines() if path.is_file() else (), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        name, equals, value = EXPORT.sub("", text).partition("=")
        if not equals or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise LaunchError(f"{path}:{number}: {text!r} is not NAME=VALUE: correct it")
        quote = value[0] if len(value) > 1 and value[0] == value[-1] and value[0] in "'\"" else ""
        value = value[1:-1] if quote else value
        if quote != "'":
            for reference in REFERENCE.finditer(value):
                if not reference[1] or reference[1] in os.environ:
                    raise LaunchError(
                        f"{path}:{number}: {name} has {reference[0]}, which is not replaced here: write its value out, "
                        f"or {name}='...' in single quotes if that is the value"
                    )
            value = value.replace("\\$", "$")
        found[name] = value
    return found
