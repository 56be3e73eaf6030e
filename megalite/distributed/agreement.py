"""Agreement between ranks: small values of a stated type travel as JSON in tensors, and nothing is unpickled.

torch's object collectives pickle, so whoever takes the place of a rank could run code on all others. Here the bytes of
a rank are parsed strictly as the type that the caller states: dataclasses, tuples, sets, paths, enums, NaN and integers
of any size come back as they were, and anything else is refused in a sentence that names the rank. Lengths are
exchanged first, so that a rank cannot make the others allocate more than `LIMIT_BYTES` per rank of the group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from pydantic import ConfigDict, TypeAdapter, ValidationError

from megalite.distributed.errors import MessageRefused

Value = TypeVar("Value")
LIMIT_BYTES = 64 << 20  # of one rank's message; the largest are the names and shapes of a model's parameters
UNSENDABLE = -1  # in place of the length
OTHERWISE = -1  # in place of a position in the table of errors
STRANGER = "is it a rank of this run, of the same version? A program that took its place is stopped by starting again"
JSON = ConfigDict(ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64", extra="forbid")


def from_all_ranks(value: Value, of: object, group: dist.ProcessGroup | None = None) -> list[Value]:
    """Returns the values of all ranks of a group, by default all ranks, in rank order; collective.

    `of` is the type of the values, such as `list[int]` or `str | None`. Raises MessageRefused on all ranks where a rank
    sends something else, and ValueError on a rank whose own value is not of the type.
    """
    adapter, own, failure = _adapter(of), b"", None
    try:
        own = _encoded(value, adapter)
    except ValueError as error:  # the other ranks must hear of it
        failure = error
    ranks, device = dist.get_process_group_ranks(group), _device_of(group)
    lengths = torch.empty(len(ranks), 1, dtype=torch.int64, device=device)
    length = UNSENDABLE if failure is not None else len(own)
    dist.all_gather(list(lengths), torch.tensor([length], device=device), group=group)
    if failure is not None:
        raise failure
    announced = dict(zip(ranks, lengths.flatten().tolist(), strict=True))
    _check_lengths(announced, of)
    padded = _as_tensor(own, max(announced.values()), device)
    received = torch.empty(len(ranks), len(padded), dtype=torch.uint8, device=device)
    dist.all_gather(list(received), padded, group=group)
    messages = zip(announced.items(), received.cpu(), strict=True)
    return [_decoded(row[:count].numpy().tobytes(), adapter, of, rank) for (rank, count), row in messages]


def is_same_on_all_ranks(value: str | None) -> bool:
    """Returns whether all ranks hold equal values; collective."""
    return all(other == value for other in from_all_ranks(value, str | None))


@dataclass(frozen=True)
class _Failure:
    kind: int  # position in the table of errors
    sentences: tuple[str, ...]


def from_rank_0(
    find: Callable[[], Value],
    of: object,
    errors: Sequence[type[Exception]] = (),
    otherwise: Callable[[str], Exception] = RuntimeError,
) -> Value:
    """Returns on every rank what `find`, which returns a value of type `of`, returns on rank 0; collective.

    If `find` raises one of `errors`, all ranks raise it with the same sentences. For any other exception all raise what
    `otherwise` makes of a sentence about it, so that no rank is left waiting. Raises MessageRefused where rank 0 sends
    something else.
    """
    adapter = _adapter(tuple[list[of], _Failure | None])  # type: ignore[valid-type]
    own = _answer_of_rank_0(find, adapter, errors) if dist.get_rank() == 0 else b""
    device = _device_of(None)
    length = torch.tensor([len(own)], device=device)
    dist.broadcast(length, src=0)
    count = int(length.item())
    _check_lengths({0: count}, of)
    message = _as_tensor(own, count, device)
    dist.broadcast(message, src=0)
    found, problem = _decoded(message.cpu().numpy().tobytes(), adapter, of, 0)
    if problem is not None:
        known = 0 <= problem.kind < len(errors)
        raise errors[problem.kind](*problem.sentences) if known else otherwise(" ".join(problem.sentences))
    if len(found) != 1:
        raise _refused(0, of, f"{len(found)} answers")
    return cast(Value, found[0])


def _answer_of_rank_0(find: Callable[[], Any], adapter: TypeAdapter[Any], errors: Sequence[type[Exception]]) -> bytes:
    try:
        return _encoded(([find()], None), adapter)
    except Exception as error:
        kind = next((index for index, one in enumerate(errors) if isinstance(error, one)), OTHERWISE)
        sentences = getattr(error, "sentences", (str(error),))  # of a config there may be several
        if kind == OTHERWISE:
            reason = " ".join(str(error).split())
            sentences = (f"rank 0 could not decide for all ranks ({type(error).__name__}: {reason})",)
        sendable = tuple(text.encode(errors="backslashreplace").decode() for text in sentences)  # any name of a file
        return _encoded(([], _Failure(kind, sendable)), adapter)


def _adapter(of: object) -> TypeAdapter[Any]:
    # pydantic takes no settings for a dataclass itself, and hands them down to one in a tuple
    return TypeAdapter(tuple[of], config=JSON)  # type: ignore[valid-type]


def _encoded(value: object, adapter: TypeAdapter[Any]) -> bytes:
    """Returns the message of a value. Raises ValueError if it is not of the adapter's type."""
    return adapter.dump_json((value,), warnings="error")


def _decoded(message: bytes, adapter: TypeAdapter[Any], of: object, rank: int) -> Any:
    """Returns the value in the message of a rank. Raises MessageRefused."""
    try:
        return adapter.validate_json(message, strict=True)[0]
    except ValidationError as error:
        # without the place, whose names may be the sender's
        problem = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise _refused(rank, of, f"{len(message):,} bytes of something else ({problem})") from None


def _check_lengths(announced: dict[int, int], of: object) -> None:
    """Checks the lengths of messages, in bytes, by rank, before memory is taken for them. Raises MessageRefused."""
    for rank, length in announced.items():
        if length == UNSENDABLE:
            raise MessageRefused(f"rank {rank} could not send its {_name(of)}: its own error says why")
        if not 0 < length <= LIMIT_BYTES:
            raise _refused(rank, of, f"a message of {length:,} bytes, of at most {LIMIT_BYTES:,}")


def _refused(rank: int, of: object, sent: str) -> MessageRefused:
    return MessageRefused(f"rank {rank} was to send {_name(of)} and announced or sent {sent}: {STRANGER}")


def _name(of: object) -> str:
    return of.__name__ if isinstance(of, type) and not hasattr(of, "__args__") else str(of).replace("typing.", "")


def _as_tensor(message: bytes, length: int, device: torch.device) -> torch.Tensor:
    """Returns a message as `[length]` uint8, with zeros behind its end."""
    tensor = torch.zeros(length, dtype=torch.uint8)
    if message:
        tensor[: len(message)] = torch.frombuffer(bytearray(message), dtype=torch.uint8)
    return tensor.to(device)


def _device_of(group: dist.ProcessGroup | None) -> torch.device:
    """Returns the device of the tensors that a group exchanges: gloo's are on the CPU, NCCL's on this rank's GPU."""
    if dist.get_backend(group) == "gloo" or (accelerator := torch.accelerator.current_accelerator()) is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
