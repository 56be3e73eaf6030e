"""Describes options in words, from their types and docstrings: for `megalite config explain` and docs/options.md.

In: the sections. Out: an `OptionFacts` per option, and the page with all of them.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from megalite.config.auto import AUTO, SCHEDULE
from megalite.config.base import section_of
from megalite.config.config import Config
from megalite.config.documentation.schema import Schema, json_schema
from megalite.config.errors import section_at
from megalite.config.suggestions import NAME, NUMBER, OptionPath, dotted, option_paths
from megalite.config.yaml_text import to_yaml

WRITTEN_BY = "megalite config schema --markdown"
INTRODUCTION = f"""\
# Options

<!-- written by `{WRITTEN_BY}`, and compared by a test: change the docstrings in megalite/config, not this page -->

Every option of a config. A config is a YAML file; an option can also be given on the command line as
`section.option=value`, its value written as in YAML, and counts more there. Relative paths start from the working
directory of the command.

```text
megalite config init -o config.yaml
megalite config explain optimizer.learning_rate
megalite config schema > megalite.schema.json
```

`megalite config init` writes a config to start from, `megalite config explain` tells one option or section, and
`megalite config show` prints a config with all its defaults. Editors with a YAML language server complete and check
options when the first line of a config is `# yaml-language-server: $schema=megalite.schema.json`.

Where a default is *derived*, the description says from what. Options whose values include `auto` can be left to the
planner ([planner.md](planner.md)): `parallel: auto` leaves all of a layout to it.
"""


@dataclass(frozen=True)
class OptionFacts:
    """An option or a section in words."""

    path: OptionPath
    values: str  # that it takes
    default: str  # as in YAML, or `required`, or `derived`; empty for a section that may be left out
    description: str  # its docstring
    details: str  # the docstring of a section's class, which says more; empty for an option
    example: Any  # a value; None for most sections
    is_section: bool

    @property
    def override(self) -> str:
        """The example as on the command line."""
        return f"{dotted(self.path)}={_inline(self.example)}"

    @property
    def in_file(self) -> str:
        """The example as in a config."""
        nested = self.example
        for name in reversed(self.path):
            nested = [nested] if name == NUMBER else {name: nested}
        return to_yaml(nested)


def facts_of(path: OptionPath) -> OptionFacts:
    """Returns the facts of an option or section of the config; `path` must exist."""
    section, schema = section_at(path[:-1], Config), _schemas()[path]
    field = section.model_fields[path[-1]]
    inner = section_of(field.annotation)
    examples = field.examples or [_example(schema)]
    default = _default(section, path[-1])
    kinds = schema.get("anyOf", [schema])
    if default in ("", "{}") or (inner is not None and field.is_required()):  # null is no more than an empty section
        kinds = [kind for kind in kinds if kind != {"type": "null"}]
    details = inspect.cleandoc(inner.__doc__ or "") if inner is not None else ""
    return OptionFacts(
        path, _in_words({"anyOf": kinds}), default, field.description or "", details, examples[0], inner is not None
    )


def options_in(section: OptionPath) -> list[OptionFacts]:
    """Returns the facts of the options and sections directly in a section, in the order of definition."""
    return [facts_of(path) for path in option_paths(Config) if path[:-1] == section]


def options_page() -> str:
    """Returns docs/options.md."""
    top = options_in(())
    contents = [f"- [`{dotted(one.path)}`](#{_anchor(one.path)}): {_cell(one.description)}" for one in top]
    return "\n".join([INTRODUCTION, *contents, *(line for one in top for line in _chapter(one))]) + "\n"


def _chapter(about: OptionFacts) -> Iterator[str]:
    """Yields the lines about one section, and those about the sections in it."""
    yield f"\n{'#' * (len(about.path) + 1)} `{dotted(about.path)}`\n"
    yield about.details or about.description
    if not about.is_section:
        yield f"\n{about.values}; {_in_cell(about.default)}; example: `{about.override}`"
        return
    yield from _table(about.path)


def _table(section: OptionPath) -> Iterator[str]:
    """Yields the lines about the options of a section, and those about the sections in it and the items of options."""
    yield from ("", "| option | values | default | meaning |", "|---|---|---|---|")
    inner = options_in(section)
    for one in inner:
        values = _cell(one.values)
        if one.is_section:
            values = values.replace("section", f"[section](#{_anchor(one.path)})")
        yield f"| `{one.path[-1]}` | {values} | {_in_cell(one.default)} | {_cell(one.description)} |"
    for one in inner:
        if one.is_section:
            yield from _chapter(one)
            continue
        for item in ((*one.path, NAME), (*one.path, NUMBER)):
            if options_in(item):
                yield f"\n{'#' * (len(item) + 1)} `{dotted(item)}`\n"
                yield inspect.cleandoc(section_at(item, Config).__doc__ or "")
                yield from _table(item)


def _anchor(path: OptionPath) -> str:
    return "".join(path)  # as GitHub makes it of a heading: lower case, dots removed


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _in_cell(default: str) -> str:
    return default if default in ("", "required", "derived") else f"`{default}`"


@cache
def _schemas() -> dict[OptionPath, Schema]:
    """Returns the JSON schema of every option and section by its path, which is its title."""
    schema = json_schema()
    nodes = [schema, *schema["$defs"].values()]
    options = (option for node in nodes for option in node.get("properties", {}).values())
    return {tuple(option["title"].split(".")): option for option in options}


def _default(section: type[BaseModel], name: str) -> str:
    field = section.model_fields[name]
    if field.is_required():
        return "required"
    if section_of(field.annotation) is not None and field.default is not None:
        return ""
    if field.default_factory is not None:
        return "derived" if field.default_factory_takes_validated_data else "{}"
    return AUTO if name == SCHEDULE[1] else _inline(field.default)


def _example(schema: Schema) -> Any:
    """Returns a value of an option without examples: another one than its default where there are few, else that."""
    default = schema.get("default")
    kinds = schema.get("anyOf", [schema])
    choices = [choice for kind in kinds for choice in kind.get("enum", [kind["const"]] if "const" in kind else [])]
    if any(kind.get("type") == "boolean" for kind in kinds):
        choices += [True, False]
    return next((choice for choice in choices if choice != default), default)


def _in_words(schema: Schema) -> str:
    """Returns the values that a schema allows, such as `integer above 0, or auto`."""
    if "anyOf" in schema:
        words = list(dict.fromkeys(_in_words(kind) for kind in schema["anyOf"]))
        return f"{', '.join(words[:-1])} or {words[-1]}" if len(words) > 1 else words[0]
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{_inline(value)}`" for value in schema.get("enum", [schema.get("const")]))
    if "$ref" in schema or schema.get("type") == "object":
        return "section"
    match schema["type"]:
        case "integer" | "number" as kind:
            return f"{kind}{_bounds(schema)}"
        case "string":
            return "path" if schema.get("format") == "path" else "text"
        case "boolean":
            return "`true`, `false`"
        case "null":
            return "`null`"
        case _:
            items = [_in_words(item) for item in schema.get("prefixItems", ())] or [_in_words(schema["items"])]
            number = f"of {len(items)}" if "prefixItems" in schema else "of any length"
            return f"list {number}, each {items[0]}"


def _bounds(schema: Schema) -> str:
    """Returns the bounds of a number, such as ` from 0 to below 1`."""
    below = f" to below {schema['exclusiveMaximum']:g}" if "exclusiveMaximum" in schema else ""
    upper = f" to {schema['maximum']:g}" if "maximum" in schema else below
    if "exclusiveMinimum" in schema:
        return f" above {schema['exclusiveMinimum']:g}{upper.replace(' to ', ', at most ')}"
    return f" from {schema['minimum']:g}{upper or ' up'}" if "minimum" in schema else ""


def _inline(value: Any) -> str:
    """Formats a value as YAML on one line."""
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_inline(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_inline, value))}]"
    return to_yaml({"a": value}).removeprefix("a: ").strip()
