"""The pages name only options and commands that exist, and the page of options is the one that the code writes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from megalite.config import Config
from megalite.config.deepspeed import PASSED_ON
from megalite.config.documentation.option_docs import WRITTEN_BY, options_page
from megalite.config.suggestions import option_paths
from tests.helpers.commands import whole_command

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOREIGN_WORDS = ROOT / "docs" / "coming_from.md"  # the first column of its tables holds names of other stacks

SECTIONS = sorted({path[0] for path in option_paths(Config) if len(path) > 1} | {"deepspeed"})
OPTION = re.compile(rf"(?<![\w./*-])(?:{'|'.join(SECTIONS)})(?:\.[a-z_][a-z_0-9]*)+(?![\w/*]|\.\w)")
FILES = (".bin", ".html", ".idx", ".json", ".jsonl", ".md", ".png", ".py", ".safetensors", ".txt", ".yaml")
WEIGHTS = ("model.embed_positions", "model.embed_tokens", "model.layers", "model.norm")  # canonical names
FENCED = re.compile(r"```\w*\n(.*?)```", re.DOTALL)
MEGALITE = whole_command()


def ours(page: Path) -> str:
    text = page.read_text(encoding="utf-8")
    if page == FOREIGN_WORDS:
        text = re.sub(r"^\| .*? \| (?=.* \|$)", "", text, flags=re.MULTILINE)
    return text


def test_the_page_of_options_is_that_of_the_code() -> None:
    written = (ROOT / "docs" / "options.md").read_text(encoding="utf-8")
    assert written == options_page(), f"run `{WRITTEN_BY} > docs/options.md`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_option_that_a_page_names_exists(page: Path) -> None:
    known = {".".join(path) for path in option_paths(Config)}
    wrong = []
    for name in OPTION.findall(ours(page)):
        is_key = name.startswith("deepspeed.") and name.split(".")[1] in PASSED_ON
        is_other = name.endswith(FILES) or name.startswith(WEIGHTS) or (name.startswith("launch.") and is_module(name))
        if name not in known and not is_key and not is_other:
            wrong.append(name)
    assert not wrong, f"{page.name} names options that do not exist: {sorted(set(wrong))}"


def is_module(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    blocks = [line for block in FENCED.findall(text) for line in block.splitlines()]
    spans = re.findall(r"`([^`]+)`", FENCED.sub("", text))
    lines = [" ".join(line.split()) for line in (*blocks, *spans)]
    commands = [line for line in lines if re.match(r"(# +|[A-Z_]+=\S+ )*megalite ", line)]
    wrong = [problem for line in commands for problem in problems_of(line)]
    assert not wrong, f"{page.name}: {wrong}"


def problems_of(line: str) -> Iterator[str]:
    """Yields what is wrong with a command: a subcommand or an option that it does not have."""
    words = line.partition("megalite ")[2].split()
    at = MEGALITE
    options = {word for option in at.params for word in (*option.opts, *option.secondary_opts)}
    while words and hasattr(at, "commands"):
        word = words.pop(0).strip(".,;:)")
        if word.startswith("-"):
            if word not in options:
                yield f"{line}: megalite has no {word}"
            continue
        names = word.split("|")
        if not all(name in at.commands for name in names):
            if re.fullmatch(r"[a-z][a-z0-9]*", word):
                yield f"{line}: there is no command {word}"
            elif "layouts" not in at.commands or not word.endswith(".yaml"):
                return  # a placeholder, such as COMMAND
            else:
                at = at.commands["layouts"]  # what `plan` is without a subcommand
                break
            return
        at = at.commands[names[0]]
    options = {word for option in at.params for word in (*option.opts, *option.secondary_opts)} | {"--help"}
    for word in words:
        if word == "--" or word in ("&&", "|", ">", ";"):
            return
        option = word.strip("[]().,;:").partition("=")[0]
        if re.fullmatch(r"--?[a-z][a-z-]*", option) and option not in options:
            yield f"{line}: {at.name} has no {option}"
