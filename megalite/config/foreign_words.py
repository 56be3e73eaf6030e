"""Words of other training stacks, and what they are here: the tables in `stacks/`, one file for each stack.

They are docs/coming_from.md, answer unknown options and flags, say which keys the section `deepspeed` refuses and why,
and are the rules by which `megalite config from` reads other stacks' files. A row is `there: here` or
`there: {here: ..., take: ..., absent: ...}`:

- `there`: words in a list, or text with words in backticks;
- `here`: one option, or text that begins with `nothing`, `not here` or `removed` where there is none;
- `take`: where `megalite config from` puts the value: an option, one of the quantities of launch/migration, or for each
  value the options that it sets; if left out, the option that is all of `here`; `no`: nowhere;
- `absent`: pattern of names of options and commands that would make `not here` untrue.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

import yaml

KEYS = (
    *("ddp", "fsdp", "horovod", "deepspeed", "megatron_lm", "megatron_deepspeed", "gpt_neox"),
    *("torchtitan", "trainer", "axolotl", "llama_factory", "accelerate", "torchrun", "slow_links"),
)
USED_AS_VALUES = ("horovod", "slow_links")
OPTION = re.compile(r"run_dir|[a-z]+(?:\.[a-z_0-9]+)+")
WITHOUT = ("nothing", "not here", "removed")  # beginnings of `here` where no option takes a word's place
WRITTEN_BY = "python -c \"from megalite.config.foreign_words import page; print(page(), end='')\" > docs/coming_from.md"

Kind = Literal["deepspeed", "megatron_lm", "gpt_neox", "torchtitan", "accelerate"]
KINDS: tuple[Kind, ...] = ("deepspeed", "gpt_neox", "megatron_lm", "torchtitan", "accelerate")
"""Stacks that have files of their own; where words are equally many, the first one."""

_NOT_TRANSLATED = {
    "Axolotl": ({"base_model", "datasets"}, {"base_model", "micro_batch_size"}, {"base_model", "sequence_len"}),
    "LLaMA-Factory": ({"model_name_or_path", "finetuning_type"}, {"model_name_or_path", "stage"}),
    "Hugging Face's Trainer": (
        *({"output_dir", size} for size in ("per_device_train_batch_size", "num_train_epochs", "max_steps")),
        *({"model_name_or_path", name} for name in ("per_device_train_batch_size", "dataset_name")),  # TRL has the last
    ),
    "NeMo": ({"trainer", "exp_manager"}, {"trainer", "model", "name"}),
    "torchtune": ({"tokenizer", "checkpointer"},),
    "LitGPT": ({"train", "out_dir"},),
}
"""Names of sections and options that only the configs of a stack have together, first to last."""


@dataclass(frozen=True)
class WordRow:
    """One row of a table: words of a stack that are the same here."""

    there: str  # the words, in Markdown
    here: str  # the words of this project for them, in Markdown
    words: tuple[str, ...]  # the words as `normal_form` has them
    take: str | Mapping[str, Mapping[str, Any]] | None  # the option that takes the value; None: nowhere
    absent: str  # pattern of names that would make the row untrue; empty where it does not say `not here`

    @property
    def option(self) -> str | None:
        """The option that the words are, no more and no less; None if there is more to say."""
        bare = self.here.strip("`")
        return bare if OPTION.fullmatch(bare) else None

    @property
    def options(self) -> list[str]:
        """Options that the row names first to last."""
        return OPTION.findall(self.here)

    @property
    def in_words(self) -> str:
        """Their counterpart here, without Markdown."""
        return re.sub(r"\[(.*?)\]\(.*?\)", r"\1", self.here).replace("`", "")


@dataclass(frozen=True)
class OtherStack:
    """One stack: its words, and the values that words have there which are left out."""

    title: str
    name: str
    rows: tuple[WordRow, ...]
    defaults: Mapping[str, Any]
    above: str
    below: str


def normal_form(word: str) -> str:
    """Returns a word as all its spellings are compared: `--num-layers`, `num-layers` and `num_layers` are one."""
    return word.strip().lstrip("-").replace("-", "_").lower()


@cache
def stack(key: str) -> OtherStack:
    """Returns the table of one of `KEYS`."""
    values = yaml.load(_text(f"{key}.yaml"), getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    rows = tuple(_row(there, here) for there, here in values["rows"].items())
    defaults = {normal_form(word): value for word, value in values.get("defaults", {}).items()}
    return OtherStack(values["title"], values["name"], rows, defaults, values.get("above", ""), values.get("below", ""))


def _text(name: str) -> str:
    return files("megalite.config").joinpath("stacks", name).read_text(encoding="utf-8")


def _row(there: str, value: Any) -> WordRow:
    about = value if isinstance(value, dict) else {"here": value}
    listed = there.split(", ")
    if "`" not in there and not any(" " in word for word in listed):
        words, there = listed, ", ".join(f"`{word}`" for word in listed)
    else:
        words = [word for word in re.findall(r"`([^`]+)`", there) if re.fullmatch(r"[\w.-]+", word)]
    here = about["here"]
    is_option = bool(OPTION.fullmatch(here.strip("`")))
    take = about.get("take", here.strip("`") if is_option else None)
    shown = f"`{here}`" if is_option and "`" not in here else here
    names = tuple(dict.fromkeys(map(normal_form, words)))
    return WordRow(there, shown, names, None if take == "no" else take, about.get("absent", ""))


def page() -> str:
    """Returns docs/coming_from.md."""
    return "\n".join([_text("introduction.md"), *(_section(stack(key)) for key in KEYS)])


def _section(about: OtherStack) -> str:
    rows = (f"| {row.there} | {row.here} |\n" for row in about.rows)
    table = "".join(["| there | here |\n", "|---|---|\n", *rows])
    return "\n".join(part for part in (f"## {about.title}\n", about.above, table, about.below) if part)


@cache
def _rows_by_word() -> dict[str, list[tuple[str, WordRow]]]:
    """Returns the rows of each word, with the names of their stacks; the last part of a dotted word finds it too."""
    found: dict[str, list[tuple[str, WordRow]]] = {}
    parts: dict[str, list[tuple[str, WordRow]]] = {}
    for about in map(stack, KEYS):
        for row in about.rows:
            for word in row.words:
                found.setdefault(word, []).append((about.name, row))
                if "_" in (last := word.rpartition(".")[2]) and last != word:
                    parts.setdefault(last, []).append((about.name, row))
    return parts | found


def rows_of(typed: str, own_names: Iterable[str] = ()) -> list[tuple[str, WordRow]]:
    """Returns the rows about a word as somebody typed it, `--flag` or `section.option`, with their stacks' names.

    The last part of a dotted word is looked up too, unless it is one of `own_names`; and at last the patterns of what
    is not here, so that `cp_size` is answered although no stack has just that word.
    """
    known, word = _rows_by_word(), normal_form(typed)
    if word in known and (word not in own_names or "." in word):
        return known[word]
    section, _, last = word.rpartition(".")
    if section and last in known and last not in own_names:
        return known[last]
    whole = section
    while whole:  # a section of theirs, such as `zero_optimization`
        if whole in known and not any(whole == name.partition(".")[0] for name in own_names):
            return known[whole]
        whole = whole.rpartition(".")[0]
    if last in own_names:
        return []
    for about in map(stack, KEYS):
        for row in about.rows:
            if row.absent and re.search(row.absent, word):
                return [("", row)]
    return []


@cache
def _rows_by_value() -> dict[str, tuple[str, WordRow]]:
    """Returns the rows of names that are written as values too, by their letters and digits: `OneBitAdam`."""
    tables = map(stack, USED_AS_VALUES)
    return {_squeezed(word): (about.name, row) for about in tables for row in about.rows for word in row.words}


def _squeezed(word: str) -> str:
    return re.sub(r"[^a-z0-9]", "", word.lower())


def answer_to_value(value: Any) -> str | None:
    """Returns what serves instead of a name that somebody wrote as a value, `strategy: horovod`, as `answer` does."""
    found = _rows_by_value().get(_squeezed(value)) if isinstance(value, str) else None
    return answer([found]) if found else None


def answer(found: Iterable[tuple[str, WordRow]]) -> str:
    """Returns what words are here, in one sentence: `of Megatron-LM: here training.steps`."""
    names: dict[str, list[str]] = {}
    for name, row in found:
        known = names.setdefault(row.in_words, [])
        if name not in known:
            known.append(name)
    return "; ".join(_part(here, stacks) for here, stacks in names.items())


def _part(here: str, stacks: list[str]) -> str:
    begins = here if here.startswith(WITHOUT) else f"here {here}"
    if not any(stacks):
        return f"of other stacks: {begins}"
    listed = ", ".join(stacks[:-1]) + f" and {stacks[-1]}" if len(stacks) > 1 else stacks[0]
    return f"of {listed}: {begins}"


def kind_of(keys: Iterable[str]) -> Kind | None:
    """Returns the stack that knows most top-level keys of a file; None where none knows half of them, or ten."""
    names = {normal_form(key) for key in keys}
    known = {kind: len(names & _top_names(kind)) for kind in KINDS}
    best = max(KINDS, key=lambda kind: known[kind])
    return best if known[best] >= min(10, len(names) / 2) and known[best] else None


def not_translated(keys: Iterable[str]) -> str | None:
    """Returns a clause about a config with these top-level keys, if it is of a stack without rules; else None."""
    names = frozenset(keys)
    other = next((other for other, marks in _NOT_TRANSLATED.items() if any(mark <= names for mark in marks)), None)
    return other and (
        f"a config of {other}, which is not translated: `megalite config init --from MODEL` writes one for its model, "
        "and docs/coming_from.md has words that are called otherwise here"
    )


@cache
def _top_names(kind: Kind) -> frozenset[str]:
    """Returns the words of a stack up to their first dot."""
    return frozenset(word.partition(".")[0] for row in stack(kind).rows for word in row.words)


def leaves(values: Mapping[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yields the path and value of everything in nested sections; an empty section is a value."""
    for name, value in values.items():
        here = (*path, str(name))
        if isinstance(value, Mapping) and value:
            yield from leaves(value, here)
        else:
            yield here, value
