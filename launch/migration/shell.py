"""The flags of a shell script, without running it: variables, their defaults, arrays and arithmetic are followed.

In: the text of a script, or of a log that lists arguments. Out: (flag, value) in order; a value that only a run of the
script would tell keeps its `$NAME`.
"""

from __future__ import annotations

import ast
import json
import operator
import re
import shlex
from collections.abc import Callable, Mapping
from typing import Any

from launch.errors import LaunchError
from megalite.config import ConfigError
from megalite.config.yaml_text import parse_yaml

LISTED = re.compile(r"^[^\n.]*?\b(\w+) \.{3,} ?(.*)$", re.MULTILINE)
HEREDOC = re.compile(r"<<-?\s*['\"]?(\w+)")
COMMENT = re.compile(r"(?m)(?:^|(?<=\s))#[^\n]*$")
ASSIGNMENT = re.compile(
    r"(?:^|(?<=[\s;]))([A-Za-z_]\w*)(\+?)=(\((?:[^()]|\([^()]*\))*\)|\"(?:[^\"\\]|\\.)*\"|'[^']*'|"
    r"(?:\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^)]{0,1000}\)|`[^`]*`|\$\{[^}]{0,1000}\}|[^\s;])*)",
    re.DOTALL,
)
VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\])?(?::?-([^}]{0,1000}))?\}|([A-Za-z_]\w*))")
ARITHMETIC = re.compile(r"\$\(\(((?:[^()]|\([^()]*\))*)\)\)")
FLAG = re.compile(r"--([A-Za-z][\w-]*)(?:=(.*))?", re.DOTALL)
POSITIONAL = re.compile(r"\$\d|\$\{\d\}")
UNKNOWN_IN_JSON = re.compile(r"(:\s*)(\$[\w{}:-]+)")
END = re.compile(r"-[A-Za-z].*|\||\|\||&|&&|;|>|>>|2>&1|\|&|.*\.(?:py|sh)")
MOST_ROUNDS = 20  # of variables in variables
MOST_FOLLOWED = 2_000_000  # characters of values that stand for variables: ten lines could otherwise become terabytes

OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


class _Variables(dict[str, str]):
    """The values of a script's variables, and how many characters of them may still be put in."""

    room = MOST_FOLLOWED


def listed_arguments(text: str) -> list[tuple[str, Any]]:
    """Returns the arguments that Megatron-LM writes to its log, as `  num_layers ..... 24`; empty if there are none."""
    found = [(name, _value(value.strip())) for name, value in LISTED.findall(text)]
    return found if len(found) > 4 else []


def flags_of(text: str, notes: list[str]) -> tuple[list[tuple[str, Any]], list[dict[str, Any]]]:
    """Returns the flags of the command that a script runs, and the JSON that it writes on the way."""
    text, bodies = _without_heredocs(re.sub(r"\\\r?\n", " ", text))
    text = COMMENT.sub("", text)
    known = _Variables()
    assigned: dict[str, set[str]] = {}
    rest, at = [], 0
    for found in ASSIGNMENT.finditer(text):
        name, adds, raw = found.groups()
        rest.append(text[at : found.start()])
        at = found.end()
        value = _expanded(_unquoted(raw), known)
        if POSITIONAL.fullmatch(value) and name in known:  # an option of the script itself, which has a default
            continue
        known[name] = f"{known.get(name, '')} {value}" if adds else value
        assigned.setdefault(name, set()).add(raw)
    rest.append(text[at:])
    commands = [_expanded(line, known) for line in "".join(rest).splitlines() if "--" in _expanded(line, known)]
    programs = [line for line in commands if ".py" in line and "preprocess_data" not in line]
    lines = programs or commands or list(known.values())
    used = set(re.findall(r"\w+", text))
    notes.extend(
        f"{name} is set {len(values)} times in the script: its last value was taken, {known[name]}"
        for name, values in assigned.items()
        if len(values) > 1 and name in used and "--" not in known[name] and f"${name}" in text.replace("{", "")
    )
    every = (one for line in lines for one in _flags(line))
    flags = list(dict.fromkeys((flag, tuple(value) if isinstance(value, list) else value) for flag, value in every))
    return [(flag, list(value) if isinstance(value, tuple) else value) for flag, value in flags], [
        config for body in bodies if (config := _json(_expanded(body, known))) is not None
    ]


def _without_heredocs(text: str) -> tuple[str, list[str]]:
    """Returns a script without the files that it writes from `<<NAME` on, and those files."""
    lines, kept, bodies, at = text.split("\n"), list[str](), list[str](), 0
    last = {line.strip(): place for place, line in enumerate(lines)}
    while at < len(lines):
        found, line = HEREDOC.search(lines[at]), lines[at]
        if found and last.get(found[1], 0) > at:
            begin = at + 1
            at = next(place for place in range(begin, len(lines)) if lines[place].strip() == found[1])
            bodies.append("\n".join(lines[begin:at]))
            line = line[: found.start()]
        kept.append(line)
        at += 1
    return "\n".join(kept), bodies


def _unquoted(raw: str) -> str:
    if raw[:1] == "(":
        return " ".join(raw[1:-1].split())
    return raw[1:-1] if raw[:1] in ("'", '"') and raw[-1:] == raw[:1] else raw


def _expanded(text: str, known: _Variables) -> str:
    """Returns the text with the variables that are known, the defaults of those that are not, and sums worked out.

    Raises LaunchError for variables that grow out of all proportion.
    """

    def variable(found: re.Match[str]) -> str:
        name = found[1] or found[3]
        value = known.get(name, found[0] if found[2] is None else found[2])
        known.room -= len(value)
        if known.room < 0:
            raise LaunchError(
                f"the variables of the script become more than {MOST_FOLLOWED:,} characters: give the part with the "
                "arguments"
            )
        return value

    for _ in range(MOST_ROUNDS):
        before, text = text, VARIABLE.sub(variable, text)
        text = ARITHMETIC.sub(lambda found: _sum(found[1], known) or found[0], text)
        if text == before:
            break
    return text


def _sum(expression: str, known: Mapping[str, str]) -> str | None:
    """Returns the value of an expression with integers; None if it has anything else in it."""

    def of(node: ast.expr) -> int:
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](of(node.left), of(node.right))
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return int(known[node.id])
        raise ValueError

    try:
        return str(of(ast.parse(expression.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError):
        return None


def _flags(line: str) -> list[tuple[str, Any]]:
    try:
        words = shlex.split(line)
    except ValueError:  # a quote without its other half
        words = line.replace('"', " ").replace("'", " ").split()
    words = [part for word in words for part in (word.split() if " --" in f" {word}" else [word])]
    found: list[tuple[str, list[str]]] = []
    is_open = False
    for word in words:
        if flag := FLAG.fullmatch(word):
            found.append((flag[1], [] if flag[2] is None else [flag[2]]))
            is_open = flag[2] is None
        elif (
            END.fullmatch(word) or re.match(r"-[A-Za-z]", word) or (VARIABLE.fullmatch(word) and found and found[-1][1])
        ):
            is_open = False
        elif is_open and found:
            found[-1][1].extend(word.split())
    return [(f"--{flag}", _values(values)) for flag, values in found]


def _values(values: list[str]) -> Any:
    if not values:
        return True
    return _value(values[0]) if len(values) == 1 else [_value(value) for value in values]


def _value(text: str) -> Any:
    if text in ("None", ""):
        return None
    try:
        return parse_yaml(text)[0]
    except ConfigError:
        return text


def _json(text: str) -> dict[str, Any] | None:
    try:
        values = json.loads(UNKNOWN_IN_JSON.sub(r'\1"\2"', text))
    except json.JSONDecodeError:
        return None
    return values if isinstance(values, dict) else None
