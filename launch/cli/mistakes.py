"""Tells of mistakes and failures of a command; imported where there is one to tell."""

from __future__ import annotations

import errno
import os
import sys

from pydantic import ValidationError
from typer.exceptions import TyperException

from launch.errors import USER_ERROR_CODE, USER_ERRORS, LaunchError, sentences_of
from launch.runtime.logs import get_logger
from megalite.checkpoint.durable_files import NO_ROOM
from megalite.config import Config
from megalite.config.errors import expectation, must_be
from megalite.config.foreign_words import answer, rows_of
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.config.suggestions import dotted, option_paths

log = get_logger(__name__)


def usage_mistake(error: TyperException) -> str:
    """Returns the sentence for wrong usage; an empty one where a command without arguments has shown its help."""
    if not (message := error.format_message().removesuffix(".").replace("Value error, ", "")):
        return ""
    command = getattr(error, "ctx", None)
    message = _in_our_words(error) or message
    where = "" if command is None or message.endswith("?") else f"; see `{command.command_path} --help`"
    return without_secrets(f"{message[0].lower()}{message[1:]}{where}")  # words as they were typed


def _in_our_words(error: TyperException) -> str | None:
    """Returns what a value of a flag must be; what a flag is that no command has: an option, another stack's word."""
    flag = getattr(error, "param", None)
    if isinstance(error.__cause__, ValidationError) and flag and (detail := error.__cause__.errors()[0]):
        if detail["type"] == "value_error":
            return None
        return f"{flag.opts[0]} {must_be(flag.name, [expectation(detail)], detail['input'])}"
    if flag and flag.param_type_name == "option" and not error.message:  # it is missing
        return f"missing option {' / '.join(flag.opts)}: {flag.help[0].lower()}{flag.help[1:].removesuffix('.')}"
    if (typed := getattr(error, "option_name", None)) is None:
        return None
    name, command = typed.lstrip("-"), getattr(getattr(error, "ctx", None), "command", None)
    takes = any(parameter.name == "overrides" for parameter in getattr(command, "params", ()))
    if tuple(name.split(".")) in option_paths(Config):
        return f"{typed}: an option of the config has no dashes here: {name}=..."
    if found := rows_of(typed):
        options = "; options of the config are set as section.option=value" * takes
        return f"there is no flag {typed}, a word {answer(found)}{options}"
    named = [f"{dotted(path)}=..." for path in option_paths(Config) if takes and path[-1] == name.replace("-", "_")]
    return f"there is no flag {typed}: options of the config are set as {' or '.join(named[:3])}" if named else None


def refuse_dashed_override(word: str) -> None:
    """Raises LaunchError for an override with dashes in front, as other stacks write options of a config."""
    name = word.lstrip("-").partition("=")[0]
    if name == "run_dir" or name.partition(".")[0] in Config.model_fields:
        shown = without_secrets(word)
        raise LaunchError(f"{shown}: an option of the config has no dashes here: {shown.lstrip('-')}")


def code_of(error: Exception) -> int | None:
    """Tells what has ended a command, and returns its exit code; None for what no user can mend."""
    if isinstance(error, USER_ERRORS):
        for sentence in sentences_of(error):
            log.error(sentence)
    elif not isinstance(error, OSError):
        return None
    elif error.filename is not None:
        why = NO_ROOM.get(error.errno or 0)
        told = f"{why}: free some space" if why else f"{error.strerror}: check the path and your rights to it"
        log.error(f"{error.filename}: {told}")
    elif error.errno in (*NO_ROOM, errno.EPIPE):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more
        if error.errno != errno.EPIPE:  # whoever read it has seen enough
            log.error(f"standard output cannot be written: {error.strerror}: send it elsewhere")
    else:
        return None
    return USER_ERROR_CODE
