"""Reads small JSON files, which anybody may have written, as one stated type."""

from functools import lru_cache
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

T = TypeVar("T")
STRICT = ConfigDict(extra="forbid", strict=True)
"""A value of a dataclass's `__pydantic_config__`: no field is converted, none is unknown."""
Count = Annotated[int, Field(ge=0, lt=1 << 63)]


def _nameable(text: str) -> str:
    if "\0" in text or any(len(part.encode()) > 255 for part in text.split("/")) or len(text.encode()) >= 4096:
        raise ValueError("no file can have this name")
    return text


PathText = Annotated[str, AfterValidator(_nameable)]
"""A path that the system can be asked about."""


def of_json(kind: type[T], content: bytes) -> T:
    """Returns the value of type `kind` in a file's content. Raises ValueError, whose text names the wrong field."""
    try:
        hashable: Any = kind
        value: T = _adapter(hashable).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(map(str, first["loc"]))
        raise ValueError(f"{field}: {first['msg']}" if field else first["msg"]) from None
    return value


@lru_cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
