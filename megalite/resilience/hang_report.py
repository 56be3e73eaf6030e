"""Explains in one paragraph which rank waits for which in a run that hangs.

In: the last records of every rank that answered, and what is known about those that did not. Out: the ranks that block
the others, and the paragraph. Pure functions.

A rank waits for those peers of its last record that have not begun what the record needs. Following the waits ends at
ranks that wait for nobody: these are the roots.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from megalite.parallel.mesh import Mesh
from megalite.resilience.rank_state import Ranks, RankState
from megalite.tracing.activity import Note, Operation, Phase
from megalite.units import rounded

NAMED = 8  # ranges of ranks in a list
CLAUSES = 8  # groups of waiting ranks that are listed one by one

PARTNERS = {  # the operation that the other side must have begun
    Operation.RECEIVE_ACTIVATION: Operation.SEND_ACTIVATION,
    Operation.AWAIT_ACTIVATION: Operation.RECEIVE_ACTIVATION,
    Operation.RECEIVE_GRADIENT: Operation.SEND_GRADIENT,
    Operation.AWAIT_GRADIENT: Operation.RECEIVE_GRADIENT,
}
OWN_WORK = {
    Operation.BEGIN,
    Operation.LOAD,
    Operation.FORWARD,
    Operation.BACKWARD,
    Operation.WEIGHT_GRADIENT,
    Operation.SEND_ACTIVATION,
    Operation.SEND_GRADIENT,
}  # the rank's own work, even if it needs peers

# "rank 5 waits ...", "rank 1 has been ..."; {m}: micro-batch, {r}: ranks
OPERATION_PHRASES = {
    Operation.COUNT_TOKENS: ("to count the batch's tokens with {r}", "counting the batch's tokens"),
    Operation.MEET: ("for {r} at a meeting of all ranks", "at a meeting of all ranks"),
    Operation.LOAD: ("to load micro-batch {m} with {r}", "loading micro-batch {m}"),
    Operation.FORWARD: ("in the forward of micro-batch {m} for {r}", "in the forward of micro-batch {m}"),
    Operation.BACKWARD: ("in the backward of micro-batch {m} for {r}", "in the backward of micro-batch {m}"),
    Operation.WEIGHT_GRADIENT: (
        "in the weight gradients of micro-batch {m} for {r}",
        "in the weight gradients of micro-batch {m}",
    ),
    Operation.SEND_ACTIVATION: (
        "to send the activation of micro-batch {m} to {r}",
        "sending the activation of micro-batch {m}",
    ),
    Operation.AWAIT_ACTIVATION: (
        "for {r} to take the activation of micro-batch {m}",
        "sending the activation of micro-batch {m}",
    ),
    Operation.RECEIVE_ACTIVATION: (
        "for the activation of micro-batch {m} from {r}",
        "receiving the activation of micro-batch {m}",
    ),
    Operation.SEND_GRADIENT: (
        "to send the gradient of micro-batch {m} to {r}",
        "sending the gradient of micro-batch {m}",
    ),
    Operation.AWAIT_GRADIENT: (
        "for {r} to take the gradient of micro-batch {m}",
        "sending the gradient of micro-batch {m}",
    ),
    Operation.RECEIVE_GRADIENT: (
        "for the gradient of micro-batch {m} from {r}",
        "receiving the gradient of micro-batch {m}",
    ),
    Operation.REDUCE_TIED_GRADIENTS: (
        "to sum the gradients of tied weights with {r}",
        "summing the gradients of tied weights",
    ),
    Operation.REDUCE_GRADIENTS: ("to sum gradients with {r}", "summing gradients"),
    Operation.OPTIMIZER: ("in the optimizer step for {r}", "in the optimizer step"),
    Operation.LOSS: ("to average the loss with {r}", "averaging the loss"),
    Operation.BALANCE_EXPERTS: ("to count the choices of experts with {r}", "moving the bias of the experts' choice"),
    Operation.GATHER_WEIGHTS: ("to gather weights with {r}", "gathering weights"),
    Operation.UNITE_TIED_WEIGHTS: ("to share tied weights with {r}", "sharing tied weights"),
    Operation.FINISH: ("at the end of the step for {r}", "waiting for its device at the end of the step"),
}
PHASE_PHRASES = {  # if the phase has only begun
    Phase.STARTING: ("at the start for {r}", "starting"),
    Phase.LOADING: ("to load a checkpoint with {r}", "loading a checkpoint"),
    Phase.DATA: ("for data with {r}", "in the data loader"),
    Phase.STEP: ("at the beginning of the step for {r}", "at the beginning of the step"),
    Phase.EVALUATION: ("to evaluate with {r}", "evaluating"),
    Phase.SELF_CHECK: ("to compare weights with {r}", "comparing weights"),
    Phase.LOGGING: ("to log with {r}", "logging"),
    Phase.WRITING: ("for the files of a checkpoint of {r}", "writing a checkpoint"),
    Phase.CHECKPOINT: ("to save a checkpoint with {r}", "saving a checkpoint"),
}


@dataclass(frozen=True)
class NoResponse:
    """Facts about a rank that did not answer."""

    host: str = ""
    condition: str = ""  # "its process is gone"
    is_dead: bool = False  # for certain


@dataclass(frozen=True)
class Explanation:
    """The ranks that block a run, and why."""

    roots: tuple[int, ...]
    headline: str  # "hung", or who died, and where
    paragraph: str


def explain(
    states: Mapping[int, RankState], unresponsive: Mapping[int, NoResponse], mesh: Mesh, *, is_lost: bool = False
) -> Explanation:
    """Explains a hang from the `states` of ranks that answered, at least one, and `unresponsive`, all other ranks.

    `is_lost`: a rank has lost a connection, so that ranks that do not answer are no longer there.
    """
    waits = _waits(states)
    # who lost a connection has left its work, and is waited for in vain because of those that do not answer
    roots = sorted(unresponsive) if is_lost and unresponsive else _roots(waits, states, unresponsive)
    reasons = [state.reason for _, state in sorted(states.items()) if state.reason]
    sentences = [
        *reasons[:1],
        _describe_roots(roots, waits, states, unresponsive, mesh),
        _describe_waits(roots, waits, states),
        _describe_others(roots, waits, states),
    ]
    return Explanation(tuple(roots), _headline(unresponsive, is_lost=is_lost), " ".join(filter(None, sentences)))


def _headline(unresponsive: Mapping[int, NoResponse], *, is_lost: bool) -> str:
    dead = {rank: one for rank, one in unresponsive.items() if one.is_dead}
    gone = dead or {rank: one for rank, one in unresponsive.items() if is_lost and not one.condition}
    if not gone:
        return "hung"
    hosts = sorted({one.host for one in gone.values() if one.host})
    where = f" on {', '.join(hosts[:NAMED])}" if hosts else ""
    return f"{_names(gone)}{where} {'died' if dead else 'died, or cannot be reached any more'}"


def _waits(states: Mapping[int, RankState]) -> dict[int, Ranks]:
    """Returns for every rank that answered the ranks, also unresponsive ones, that have not begun what it waits for."""
    progress = {rank: _Progress(state) for rank, state in states.items()}
    late: dict[_Need, Ranks] = {}  # by need, which the ranks of a group share
    waits = {}
    for rank, state in states.items():
        need = progress[rank].needs()
        if need not in late:
            peers = sorted(set(state.now.peers))
            late[need] = tuple(peer for peer in peers if peer not in progress or not progress[peer].reaches(need))
        ranks = late[need]
        place = bisect_left(ranks, rank)
        if rank in ranks[place : place + 1]:  # else the ranks of a group share one object
            ranks = ranks[:place] + ranks[place + 1 :]
        waits[rank] = ranks
    return waits


class _Need(NamedTuple):
    """Progress that a rank's last record needs from each of its peers."""

    peers: Ranks
    phase_number: int
    operation: Operation
    chunk: int | None
    micro_batch: int | None
    times: int  # how often the operation must have begun, if it has no micro-batch


class _Progress:
    """Progress of a rank in its phase."""

    def __init__(self, state: RankState) -> None:
        self.now = state.now
        self._count: dict[Operation, int] = defaultdict(int)
        # the last of each operation and chunk: they begin in order
        self._micro_batch: dict[tuple[Operation, int | None], int] = {}
        for note in state.notes:
            if note.phase_number == self.now.phase_number:
                self._count[note.operation] += 1
                key = note.operation, note.chunk
                self._micro_batch[key] = max(note.micro_batch or 0, self._micro_batch.get(key, 0))

    def needs(self) -> _Need:
        """Returns what this rank's last record needs from its peers."""
        note = self.now
        wanted = PARTNERS.get(note.operation, note.operation)
        times = self._count[note.operation]
        return _Need(note.peers, note.phase_number, wanted, note.chunk, note.micro_batch, times)

    def reaches(self, need: _Need) -> bool:
        """Returns whether this rank has begun what another one needs from it."""
        if self.now.phase_number != need.phase_number:
            return self.now.phase_number > need.phase_number
        if need.micro_batch is not None:
            return self._micro_batch.get((need.operation, need.chunk), 0) >= need.micro_batch
        return self._count[need.operation] >= need.times


def _roots(
    waits: Mapping[int, Ranks], states: Mapping[int, RankState], unresponsive: Mapping[int, NoResponse]
) -> list[int]:
    """Returns the ranks that do not answer, and those that are waited for but wait for nobody; sorted.

    If there are none: ranks that do work of their own; else those that wait for nobody; else all, because they wait in
    a circle.
    """
    free = [rank for rank, targets in waits.items() if not targets]
    awaited = {target for targets in _distinct(waits) for target in targets}
    found = [*unresponsive, *(rank for rank in free if rank in awaited)]
    return sorted(found or [rank for rank in free if _is_at_own_work(states[rank])] or free or waits)


def _is_at_own_work(state: RankState) -> bool:
    return state.now.operation in OWN_WORK or not state.now.peers


def _describe_roots(
    roots: list[int],
    waits: Mapping[int, Ranks],
    states: Mapping[int, RankState],
    unresponsive: Mapping[int, NoResponse],
    mesh: Mesh,
) -> str:
    if all(waits.get(rank) for rank in roots):
        return "Nobody is free to go on, the ranks wait for each other in a circle."
    groups: dict[tuple[str, str], list[int]] = defaultdict(list)
    for rank in roots:
        what = unresponsive[rank].condition if rank in unresponsive else _doing(states[rank])
        groups[unresponsive[rank].host if rank in unresponsive else states[rank].host, what].append(rank)
    clauses = []
    for (host, what), ranks in groups.items():
        who = f"{_names(ranks)}{_place(ranks, host, mesh)}, which"
        if ranks[0] in unresponsive:
            what = what or "stopped, dead, or cut off"
            clauses.append(f"{who} {_verb(ranks, 'does', 'do')} not answer: {what}")
        else:
            seconds = max(states[rank].now.time for rank in ranks)
            clauses.append(f"{who} {_verb(ranks, 'has', 'have')} been {what} for {rounded(seconds)}")
    sentence = f"The run waits for {', and for '.join(clauses)}."
    if any(rank in unresponsive or _is_at_own_work(states[rank]) for rank in roots):
        return sentence
    return f"{sentence} Nobody is missing there: look at the network and at the devices."


def _describe_waits(roots: Sequence[int], waits: Mapping[int, Ranks], states: Mapping[int, RankState]) -> str:
    """Describes the waits of the other ranks, those for the roots first."""
    among = set(roots)
    named = {id(targets): tuple(each for each in targets if each in among) or targets for targets in _distinct(waits)}
    groups: dict[str, list[int]] = defaultdict(list)
    for rank in _by_distance(roots, waits):
        groups[_waiting(states[rank], named[id(waits[rank])])].append(rank)
    clauses = [
        f"{_names(ranks)} {_verb(ranks, 'waits', 'wait')} {what}" for what, ranks in list(groups.items())[:CLAUSES]
    ]
    rest = sum(len(ranks) for ranks in list(groups.values())[CLAUSES:])
    if rest:
        clauses.append(f"{rest} more {'rank waits' if rest == 1 else 'ranks wait'} behind these")
    return _sentence(clauses)


def _describe_others(roots: Sequence[int], waits: Mapping[int, Ranks], states: Mapping[int, RankState]) -> str:
    """Describes ranks that neither wait nor are waited for."""
    groups: dict[str, list[int]] = defaultdict(list)
    among = set(roots)
    for rank in sorted(states):
        if not waits[rank] and rank not in among:
            groups[_doing(states[rank])].append(rank)
    return _sentence([f"{_names(ranks)} {_verb(ranks, 'is', 'are')} {what}" for what, ranks in groups.items()])


def _distinct(waits: Mapping[int, Ranks]) -> list[Ranks]:
    """Returns the values of `waits`, each object once."""
    return list({id(targets): targets for targets in waits.values()}.values())


def _by_distance(roots: Sequence[int], waits: Mapping[int, Ranks]) -> list[int]:
    """Returns the ranks that wait, those next to a root first, those in a circle last."""
    remaining = sorted(rank for rank, targets in waits.items() if targets)
    waiting_for: dict[int, list[int]] = defaultdict(list)  # by target the ids of the values of `waits` that hold it
    waiting: dict[int, list[int]] = defaultdict(list)  # by such an id the ranks
    for targets in _distinct(waits):
        for target in targets:
            waiting_for[target].append(id(targets))
    for rank in remaining:
        waiting[id(waits[rank])].append(rank)
    ordered: dict[int, None] = {}
    nearest = [rank for rank in roots if not waits.get(rank)]
    passed = set(nearest)
    while nearest:
        shared = {each for target in nearest for each in waiting_for.pop(target, [])}
        nearest = sorted({rank for each in shared for rank in waiting.pop(each, []) if rank not in passed})
        passed.update(nearest)
        ordered |= dict.fromkeys(nearest)
    return [*ordered, *(rank for rank in remaining if rank not in ordered)]


def _waiting(state: RankState, targets: Ranks) -> str:
    return _phrases(state.now)[0].format(m=_micro_batch(state.now), r=_names_of(targets))


def _doing(state: RankState) -> str:
    what = _phrases(state.now)[1].format(m=_micro_batch(state.now))
    return what if _is_at_own_work(state) else f"{what} with all peers"


def _micro_batch(note: Note) -> str:
    return f"{note.micro_batch}" if note.chunk is None else f"{note.micro_batch} of chunk {note.chunk}"


def _phrases(note: Note) -> tuple[str, str]:
    return PHASE_PHRASES[note.phase] if note.operation is Operation.BEGIN else OPERATION_PHRASES[note.operation]


def _place(ranks: Sequence[int], host: str, mesh: Mesh) -> str:
    """Returns the host of a group of ranks in parentheses, with the coordinates of a single rank."""
    place = mesh.place(ranks[0]) if len(ranks) == 1 else ""
    parts = [part for part in (place, f"on {host}" if host else "") if part]
    return f" ({', '.join(parts)})" if parts else ""


def _names(ranks: Iterable[int]) -> str:
    """Formats ranks, as in "rank 3", "ranks 3 and 5", "ranks 0-7 and 16-23"."""
    ordered = sorted(ranks)
    if len(ordered) == 1:
        return f"rank {ordered[0]}"
    starts = [ordered[0], *(b for a, b in pairwise(ordered) if b > a + 1)]
    ends = [*(a for a, b in pairwise(ordered) if b > a + 1), ordered[-1]]
    runs = [str(start) if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)]
    if len(runs) > NAMED:
        runs = [*runs[:NAMED], "others"]
    return f"ranks {' and '.join(part for part in (', '.join(runs[:-1]), runs[-1]) if part)}"


_names_of = lru_cache(maxsize=1024)(_names)


def _verb(ranks: Sequence[int], one: str, several: str) -> str:
    return one if len(ranks) == 1 else several


def _sentence(clauses: Sequence[str]) -> str:
    text = "; ".join(clauses)
    return f"{text[0].upper()}{text[1:]}." if text else ""
