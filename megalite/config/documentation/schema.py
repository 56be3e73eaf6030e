"""Writes JSON Schema 2020-12 of all configs, for editors and other programs.

Pydantic writes it from the types and docstrings of the sections. Added here is what types do not say: `auto`, empty
sections, options that may be left out because of others, and the keys of the section `deepspeed`.
"""

from __future__ import annotations

from typing import Any

from megalite.config.auto import ALONG, AUTO, OPEN, PLACEHOLDERS, SCHEDULE, SECTIONS
from megalite.config.base import Section, items_of, section_of
from megalite.config.config import Config
from megalite.config.deepspeed import NESTED, PASSED_ON, REORDERING, refused_keys
from megalite.config.deepspeed import SECTIONS as DEEPSPEED_SECTIONS
from megalite.config.suggestions import NAME, NUMBER, OptionPath, dotted
from megalite.config.versions import own_version

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
DESCRIPTION = (
    "All options of a megalite run. Overrides on the command line and rules about several options (sizes that must "
    "divide each other, training.steps or training.tokens) are not part of it: `megalite config show CONFIG.yaml "
    "[OVERRIDES]` checks them. megalite also takes a number or a truth value written as text, such as '1e-3' or no."
)
ABOUT = ("title", "description", "default", "examples")
FALSY: list[Any] = [False, None, 0, "", [], {}]


def json_schema() -> Schema:
    """Returns the schema of a config file."""
    schema = Config.model_json_schema()
    options, definitions = schema["properties"], schema["$defs"]
    sizes = _definition(options["model"], definitions).pop("required")
    schema["required"].remove("model")
    chosen_along = [option for section, option in ALONG if section == "training"]
    training = _definition(options["training"], definitions)
    training["required"] = [name for name in training["required"] if name not in chosen_along]
    for section, option in PLACEHOLDERS | OPEN:
        _add_alternative(_definition(options[section], definitions)["properties"][option], {"const": AUTO})
    _definition(options[SCHEDULE[0]], definitions)["properties"][SCHEDULE[1]]["default"] = AUTO
    _complete_sections(Config, schema, definitions, ())
    for section in SECTIONS:
        _add_alternative(options[section], {"const": AUTO})
    options["deepspeed"] = {name: options["deepspeed"][name] for name in ABOUT if name in options["deepspeed"]} | {
        "anyOf": [_deepspeed_schema(), {"type": "null"}]
    }
    without_model = {"required": ["model"], "properties": {"model": {"type": "object", "required": sizes}}}
    without_choice = {"properties": {"training": {"required": chosen_along}}}
    source = {"required": ["initialize_from"], "properties": {"initialize_from": {"type": "string"}}}
    has_source = {"required": ["training"], "properties": {"training": {"type": "object", **source}}}
    rules = [{"if": has_source, "else": without_model}, {"if": _leaves_layout_to_the_planner(), "else": without_choice}]
    head = {
        "$schema": DIALECT,
        "$id": f"urn:megalite:config:{own_version()}",
        "title": "megalite config",
        "description": DESCRIPTION,
    }
    return {**head, **{key: value for key, value in schema.items() if key not in ABOUT}, "allOf": rules}


def _definition(option: Schema, definitions: Schema) -> Schema:
    """Returns the definition that an option refers to, also if it may be null; empty if it refers to none."""
    for kind in (option, *option.get("anyOf", ())):
        if "$ref" in kind:
            found: Schema = definitions[kind["$ref"].rpartition("/")[2]]
            return found
    return {}


def _complete_sections(section: type[Section], schema: Schema, definitions: Schema, path: OptionPath) -> None:
    """Titles sections and options by their dotted names, and allows sections to be empty (null) where pydantic does."""
    for name, field in section.model_fields.items():
        option = schema["properties"][name]
        option |= {"title": dotted((*path, name)), "description": field.description}
        if "patternProperties" in option:  # pydantic refuses other names, and does not write it
            option["additionalProperties"] = False
            option["propertyNames"] = {"not": {"pattern": "\\n"}}  # before which `$` matches in validators in Python
        if inner := section_of(field.annotation):
            definition = _definition(option, definitions)
            definition["title"] = option["title"]
            _complete_sections(inner, definition, definitions, (*path, name))
            if "$ref" in option and not definition.get("required"):
                _add_alternative(option, {"type": "null"})
        elif inner := items_of(field.annotation):
            is_list = "items" in option
            named = option.get("patternProperties", {})
            items, name_of_items = (option["items"], NUMBER) if is_list else (*named.values(), NAME)
            definition = _definition(items, definitions)
            definition["title"] = dotted((*path, name, name_of_items))
            _complete_sections(inner, definition, definitions, (*path, name, name_of_items))
            if not definition.get("required"):
                _add_alternative(items, {"type": "null"})


def _add_alternative(option: Schema, alternative: Schema) -> None:
    """Lets an option have a value that `alternative` describes too."""
    about = {key: option.pop(key) for key in ABOUT if key in option}
    kinds = option["anyOf"] if set(option) == {"anyOf"} else [dict(option)]
    option.clear()
    option.update(anyOf=[*kinds, alternative], **about)


def _leaves_layout_to_the_planner() -> Schema:
    """Returns the condition under which options are chosen along with the layout."""
    names = [option for section, option in PLACEHOLDERS if section == "parallel" and (section, option) != SCHEDULE]
    left = [{"type": "object", "required": [name], "properties": {name: {"const": AUTO}}} for name in names]
    return {"required": ["parallel"], "properties": {"parallel": {"anyOf": [{"const": AUTO}, *left]}}}


def _deepspeed_schema() -> Schema:
    """Returns the schema of DeepSpeed's keys that may be set; deepspeed.py checks the same on loading."""
    keys: dict[str, Any] = {name: {} for name in sorted(PASSED_ON)}
    for section in DEEPSPEED_SECTIONS:
        keys[section] = {"type": "object", "properties": {}}
    for section, names in NESTED.items():
        keys[section] |= {"properties": {name: {} for name in sorted(names)}, "additionalProperties": False}
    for section, name in (path for path in refused_keys() if len(path) == 2 and path[0] in DEEPSPEED_SECTIONS):
        keys[section]["properties"][name] = False
    section, name = REORDERING
    keys[section]["properties"][name] = {"enum": FALSY}
    return {"type": "object", "properties": keys, "additionalProperties": False}
