"""Rotary embedding in config.json: in one place in our options, in up to four in transformers'.

transformers 4 writes `rope_theta` and `rope_scaling` (and a family's own names for the base and the rotated part), 5
writes `rope_parameters`, in Gemma 3 one for each kind of layer. All of them are read, must not contradict each other,
and are all written: transformers 4 silently reads a config.json of version 5 as plain RoPE of base 10000.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megalite.config import ModelConfig
from megalite.config.rules.model import ROPE_FIELDS
from models.hub.config_parts import FULL, SLIDING, ConfigPart, FamilyError, Keys, absent, refuse_unless, shown

DEFAULT_THETA = 10000.0  # transformers' default
OPTIONS = ("rope_theta", "rope_scaling", "partial_rotary_factor", "rope_local_base_freq")
THETA, FACTOR = "rope_theta", "partial_rotary_factor"
PARAMETERS, SCALING = "rope_parameters", "rope_scaling"
LENGTH = "original_max_position_embeddings"

SCALINGS = {"default": (), **{kind: (*needed, *allowed) for kind, (needed, allowed) in ROPE_FIELDS.items()}}
"""rope_type -> the keys that transformers reads with it."""


def rope(
    theta: float = DEFAULT_THETA, theta_key: str = THETA, rotated: float | None = None, rotated_key: str = FACTOR
) -> ConfigPart:
    """Returns a part with the same rotary embedding in every layer.

    theta, rotated: defaults of the base and of the rotated fraction of a head. rotated None: transformers' class
    rotates whole heads. theta_key, rotated_key: their names in transformers 4.
    """

    def read(keys: Keys) -> dict[str, Any]:
        found = {name: _rope_of(keys.get(name), name) for name in (PARAMETERS, SCALING)}
        found_theta = _agreed({theta_key: keys.get(theta_key), **_taken(found, THETA)}, theta)
        found_rotated = _agreed({rotated_key: keys.get(rotated_key), **_taken(found, FACTOR)}, rotated or 1.0)
        # some versions write these in addition to a family's own names, but do not read them
        _agreed({theta_key: found_theta, THETA: keys.get(THETA)}, None)
        _agreed({rotated_key: found_rotated, FACTOR: keys.get(FACTOR)}, None)
        if rotated is None and found_rotated != 1:
            raise FamilyError(
                f"config.json has {FACTOR} {found_rotated}, which transformers does not read in a "
                f"{keys.get('model_type')} model: it rotates whole heads"
            )
        scaling = _scaling(found, keys.get(LENGTH))
        return {"rope_theta": found_theta, "rope_scaling": scaling, "partial_rotary_factor": found_rotated}

    def write(model: ModelConfig, _: Keys) -> dict[str, Any]:
        refuse_unless(model, "rope_local_base_freq", None)
        scaling = _written_scaling(model)
        parameters = {"rope_type": "default", **(scaling or {}), THETA: model.rope_theta}
        written = {theta_key: model.rope_theta, SCALING: scaling, PARAMETERS: parameters}
        if rotated is None:
            refuse_unless(model, "partial_rotary_factor", 1.0)
            return written
        features = int(model.head_dim * model.partial_rotary_factor)
        if features % 2 and parameters["rope_type"] in ("yarn", "longrope"):
            raise FamilyError(
                f"model.partial_rotary_factor {model.partial_rotary_factor} of model.head_dim {model.head_dim} rotates "
                f"{features} features, an odd number that transformers' {parameters['rope_type']} RoPE does not take"
            )
        parameters[FACTOR] = model.partial_rotary_factor
        return {**written, rotated_key: model.partial_rotary_factor}

    keys = dict.fromkeys((THETA, theta_key, FACTOR, rotated_key, PARAMETERS, SCALING, LENGTH))
    return ConfigPart(OPTIONS, tuple(keys), read, write)


def two_ropes(theta: float, local_theta: float, local_key: str | None = None) -> ConfigPart:
    """Returns a part with plain rotary embedding of another base in sliding layers (Gemma 3, OLMo-3).

    local_key: the key of transformers 4 for that base; None: it has one base for all layers.
    """

    def read(keys: Keys) -> dict[str, Any]:
        nested = keys.get(PARAMETERS) or {}
        if unread := sorted(set(nested) - {FULL, SLIDING}):
            raise FamilyError(
                f"config.json has {', '.join(unread)} in {PARAMETERS}, which has {FULL} and {SLIDING} "
                f"in a {keys.get('model_type')} model"
            )
        found = {name: _rope_of(nested.get(name), f"{PARAMETERS}.{name}") for name in (FULL, SLIDING)}
        found[SCALING] = _rope_of(keys.get(SCALING), SCALING)
        local = found.pop(SLIDING)
        is_plain = local.get("rope_type", "default") == "default"
        if _agreed(_taken({SLIDING: local, **found}, FACTOR), 1.0) != 1 or not is_plain:
            raise FamilyError(f"config.json has {PARAMETERS} {nested}: sliding layers have plain RoPE, of whole heads")
        locals_ = {f"{PARAMETERS}.{SLIDING}": local.get(THETA)}
        if local_key:
            locals_[local_key] = keys.get(local_key)
        return {
            "rope_theta": _agreed({THETA: keys.get(THETA), **_taken(found, THETA)}, theta),
            "rope_local_base_freq": _agreed(locals_, local_theta),
            "rope_scaling": _scaling(found, None),
        }

    def write(model: ModelConfig, _: Keys) -> dict[str, Any]:
        refuse_unless(model, "partial_rotary_factor", 1.0)
        scaling, local = _written_scaling(model), model.rope_local_base_freq
        if local is None and scaling:
            raise FamilyError(
                f"model.rope_local_base_freq null scales sliding layers as all others, but they have plain RoPE in a "
                f"{model.model_type} model: set it to their base, such as {model.rope_theta}"
            )
        local = model.rope_theta if local is None else local
        if local_key is None and local != model.rope_theta:
            refuse_unless(model, "rope_local_base_freq", model.rope_theta)
        return {
            THETA: model.rope_theta,
            SCALING: scaling,
            PARAMETERS: {
                FULL: {"rope_type": "default", **(scaling or {}), THETA: model.rope_theta},
                SLIDING: {"rope_type": "default", THETA: local},
            },
            **({local_key: local} if local_key else {}),
        }

    return ConfigPart(OPTIONS, (THETA, PARAMETERS, SCALING, *([local_key] if local_key else [])), read, write)


NO_ROPE = absent((*OPTIONS, "layers_without_rope"), "position_embedding", "learned")
"""The part of a model with learned positions, in which the options of rotary embedding have no effect."""


def _rope_of(rope: Any, name: str) -> dict[str, Any]:
    """Returns one dict of rotary embedding without null values, its type under `rope_type`; empty if there is none."""
    if not rope:
        return {}
    if not isinstance(rope, dict):
        raise FamilyError(f"config.json has {name} {rope!r}, which is no mapping")
    found = {key: value for key, value in rope.items() if value is not None}
    kind = _agreed({f"{name}.{key}": found.pop(key, None) for key in ("rope_type", "type")}, "default")
    if not isinstance(kind, str) or kind not in SCALINGS:
        raise FamilyError(f"config.json has {name}.rope_type {kind!r}, which is none of {', '.join(SCALINGS)}")
    if unread := sorted(set(found) - {THETA, FACTOR, *SCALINGS[kind]}):
        raise FamilyError(f"config.json has {', '.join(unread)} in {name}, which {kind} RoPE does not read")
    return {"rope_type": kind, **found}


def _taken(ropes: Mapping[str, dict[str, Any]], key: str) -> dict[str, Any]:
    """Removes a key from all dicts and returns its values by place."""
    return {f"{name}.{key}": rope.pop(key, None) for name, rope in ropes.items()}


def _scaling(ropes: Mapping[str, dict[str, Any]], length: Any) -> dict[str, Any] | None:
    """Returns the scaling, which may be given twice; `length` is the original length if it is given separately."""
    for name, rope in ropes.items():
        if length is not None and LENGTH in SCALINGS[rope.get("rope_type", "default")]:
            rope[LENGTH] = _agreed({LENGTH: length, f"{name}.{LENGTH}": rope.get(LENGTH)}, None)
    found = _agreed({name: rope or None for name, rope in ropes.items()}, {"rope_type": "default"})
    return None if found["rope_type"] == "default" else found


def _agreed(given: Mapping[str, Any], default: Any) -> Any:
    """Returns the value on which all places agree, or `default`. Raises FamilyError if they differ."""
    values = {name: value for name, value in given.items() if value is not None}
    first = next(iter(values.values()), default)
    if any(value != first for value in values.values()):
        places = " and ".join(f"{name} {shown(value)}" for name, value in values.items())
        raise FamilyError(f"config.json has {places}: keep the one that the weights were trained with")
    return first


def _written_scaling(model: ModelConfig) -> dict[str, Any] | None:
    """Returns the scaling as JSON, without values that transformers derives."""
    return None if model.rope_scaling is None else model.rope_scaling.model_dump(mode="json", exclude_none=True)
