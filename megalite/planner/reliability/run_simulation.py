"""Simulates long runs: failures, hangs, spare nodes, restarts, checkpoints and stragglers. Pure arithmetic, no torch.

In: a `Run`. Out: where its hours go. The simulation jumps from one failure to the next: all nodes together are one
Poisson process, and what happens between two failures (checkpoints, slow steps) is a closed expression. A simulation
takes as long as its failures are many, whatever the number of nodes and steps.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from random import Random
from statistics import fmean, stdev

from megalite.config import ConfigError
from megalite.planner.cost.checkpoints import Save
from megalite.planner.failure_rates import DEFAULT_RATE

DAY_S, HOUR_S = 86400.0, 3600.0
MOST_FAILURES = 1_000_000  # some seconds
MOST_SPARE_NODES = 100_000
HALF_WIDTH = 9.0  # standard deviations around a mean beyond which nothing is
INTERVALS = 600  # of Simpson's rule
PARTS = ("useful", "stragglers", "checkpoints", "rework", "detection", "waiting for nodes", "restart")


@dataclass(frozen=True)
class SimulatedJob:
    """A job that needs all its nodes to run, for a given wall-clock time."""

    nodes: int
    duration_s: float
    interval_s: float  # of training between two checkpoints
    save: Save
    rate_per_1000_node_days: float = DEFAULT_RATE  # failures of nodes under load; published: 2 to 14
    detection_s: float = 300.0  # from a crash until it is noticed
    hang_share: float = 0.0  # of the failures: nothing ends, only a timeout notices
    hang_timeout_s: float = 1800.0
    restart_s: float = 300.0  # from nodes that are there to the first new step
    lost_node_share: float = 1.0  # of the failures: the node is out for `repair_s`; the others restart where they are
    spare_nodes: int | None = None  # None: there is always one
    repair_s: float = DAY_S
    infant_mortality_shape: float = 1.0  # of a Weibull distribution; below 1, failures come early; 1: at any time alike
    slow_node_share: float = 0.0  # of all nodes
    slow_node_slowdown: float = 0.0  # by how much of a step these are slower, always
    step_jitter: float = 0.0  # standard deviation of a node's step time, as a part of it

    def __post_init__(self) -> None:
        values = {f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), int | float)}
        for name, value in values.items():
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} is {value}: give a number of at least 0")
        for name in ("nodes", "duration_s", "interval_s", "infant_mortality_shape"):
            if not values[name]:
                raise ConfigError(f"{name} is 0: give a number above 0")
        for name in ("hang_share", "lost_node_share", "slow_node_share"):
            if values[name] > 1:
                raise ConfigError(f"{name} is {values[name]:g}: a share is between 0 and 1")
        if self.expected_failures > MOST_FAILURES:
            raise ConfigError(
                f"{self.expected_failures:.3g} failures are expected, {MOST_FAILURES:,} simulated at most: take fewer "
                "nodes, fewer days or a lower rate"
            )

    @property
    def expected_failures(self) -> float:
        """Expected failures of a job that is always under load."""
        return self.nodes * self.rate_per_1000_node_days / 1000 * self.duration_s / DAY_S

    @property
    def mean_time_between_failures_s(self) -> float:
        """Mean time between failures of the whole job: 1 / (N r)."""
        return self.duration_s / self.expected_failures if self.expected_failures else math.inf

    @property
    def cycle_s(self) -> float:
        """Seconds from one checkpoint to the next: one at a time is written, so one in the background can delay the
        next."""
        return max(self.interval_s + self.save.blocked_s, self.save.duration_s)

    def trained_and_saved_s(self, elapsed_s: float) -> tuple[float, float]:
        """Returns the seconds of training done, and those in a usable checkpoint, after some time without a failure.

        A checkpoint that is being written when a failure comes is lost: the one before it counts.
        """
        train_s = self.cycle_s - self.save.blocked_s
        cycles, rest_s = divmod(elapsed_s, self.cycle_s)
        trained_s = min(elapsed_s, cycles * train_s + min(rest_s, train_s))  # rounding may make a sum of parts more
        usable = max(0, math.floor((elapsed_s - train_s - self.save.duration_s) / self.cycle_s) + 1)
        return trained_s, min(trained_s, usable * train_s)


@dataclass(frozen=True, slots=True)
class Interruption:
    """One failure and its cost, in seconds."""

    at_s: float  # on the wall clock
    is_hang: bool
    rework_s: float  # training that is done again
    detection_s: float
    waiting_s: float  # until there are nodes enough
    restart_s: float  # tried or done

    @property
    def cost_s(self) -> float:
        """Seconds of the run that it takes in all."""
        return self.rework_s + self.detection_s + self.waiting_s + self.restart_s


@dataclass(frozen=True)
class Outcome:
    """One simulated run."""

    seed: int
    hours: Mapping[str, float]  # by `PARTS`, adding up to the duration
    interruptions: tuple[Interruption, ...]
    checkpoints: int  # that became usable

    @property
    def total_hours(self) -> float:
        return sum(self.hours.values())

    @property
    def goodput(self) -> float:
        """Time that a run without failures, checkpoints and stragglers needs for the same work, over the time taken."""
        return self.hours["useful"] / self.total_hours

    @property
    def effective_training_time(self) -> float:
        """ETTR, effective training time ratio: time of steps that count, however slow, over all time."""
        return (self.hours["useful"] + self.hours["stragglers"]) / self.total_hours


@dataclass(frozen=True)
class Spread:
    """Spread of one figure over several seeds."""

    mean: float
    deviation: float  # standard deviation of one run; 0 for a single one
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(fmean(values), stdev(values) if len(values) > 1 else 0.0, min(values), max(values))


@dataclass(frozen=True)
class Summary:
    """Several simulated runs that differ by their seeds."""

    seeds: int
    goodput: Spread
    effective_training_time: Spread
    failures: Spread
    hangs: Spread
    hours: Mapping[str, Spread]  # by `PARTS`


def simulate(run: SimulatedJob, seed: int = 0) -> Outcome:
    """Simulates one run from its first step to the end of its wall-clock time; deterministic for a seed.

    Nodes fail while they train, save or restart, not while the job is down. A failure during a restart begins another
    outage.
    """
    return _Simulation(run, seed).outcome()


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Returns mean and spread over the seeds."""
    return Summary(
        seeds=len(outcomes),
        goodput=Spread.of([outcome.goodput for outcome in outcomes]),
        effective_training_time=Spread.of([outcome.effective_training_time for outcome in outcomes]),
        failures=Spread.of([float(len(outcome.interruptions)) for outcome in outcomes]),
        hangs=Spread.of([float(sum(each.is_hang for each in outcome.interruptions)) for outcome in outcomes]),
        hours={part: Spread.of([outcome.hours[part] for outcome in outcomes]) for part in PARTS},
    )


def spare_nodes_for(longest_share: float, under_repair: float) -> int:
    """Returns the fewest spare nodes with which a job waits for at most this share of its time (Erlang's loss
    formula)."""
    blocked = 1.0
    for places in range(1, MOST_SPARE_NODES):
        blocked = under_repair * blocked / (places + under_repair * blocked)
        if blocked <= longest_share:
            return places - 1
    return MOST_SPARE_NODES


@lru_cache(maxsize=4096)
def expected_slowdown(nodes: int, slow_nodes: int, slow_by: float, jitter: float) -> float:
    """Returns the mean duration of a step relative to one on identical nodes, at least 1.

    A synchronous step takes the longest of N node times, not their mean. `slow_nodes` of the nodes take `1 + slow_by`
    times as long in every step; besides, each node's time varies from step to step with a standard deviation of
    `jitter` (both are parts of a step), normally and independently. The mean of the largest of independent numbers:
    E[max] = integral of 1 - product of F_i (David & Nagaraja, Order Statistics).
    """
    usual = nodes - slow_nodes
    if jitter == 0:
        return 1.0 + slow_by * (slow_nodes > 0)
    top = slow_by if slow_nodes else 0.0
    low, high = -HALF_WIDTH * jitter, top + HALF_WIDTH * jitter

    def all_done(at: float) -> float:
        """Returns the probability that no node needs longer than 1 + `at`."""
        return _normal(at / jitter) ** usual * _normal((at - slow_by) / jitter) ** slow_nodes

    width = (high - low) / INTERVALS
    inner = sum((4 if i % 2 else 2) * (1.0 - all_done(low + i * width)) for i in range(1, INTERVALS))
    area = (2.0 - all_done(low) - all_done(high) + inner) * width / 3
    return 1.0 + max(top, low + area)


def expected_maximum(count: int) -> float:
    """Returns the mean of the largest of `count` standard normal numbers: 0.564 of 2, 2.51 of 100; near sqrt(2 ln N)
    for many."""
    return expected_slowdown(count, 0, 0.0, 1.0) - 1.0


class _Simulation:
    """The state of one run while it is simulated."""

    def __init__(self, run: SimulatedJob, seed: int) -> None:
        self._run, self._seed = run, seed
        # Failures come from a stream of their own: runs that differ in other respects meet the same ones.
        self._failures = _failure_times(run, Random(f"{seed} failures"))
        self._chance = Random(f"{seed} everything else")
        self._clock_s = self._load_s = 0.0  # on the wall, and under load, where nodes fail
        self._next_failure_s = next(self._failures)  # in time under load
        self._spent_s = dict.fromkeys(PARTS, 0.0)
        self._interruptions: list[Interruption] = []
        self._checkpoints = 0
        self._spare_nodes = run.spare_nodes or 0
        self._repaired_s: deque[float] = deque()  # when the nodes that are out come back
        self._slow_nodes = _successes(run.nodes, run.slow_node_share, self._chance)

    def outcome(self) -> Outcome:
        while self._left_s() > 0:
            rework_s = self._train()
            while self._left_s() > 0 and not self._recover(rework_s):
                rework_s = 0.0
        hours = {part: seconds / HOUR_S for part, seconds in self._spent_s.items()}
        return Outcome(self._seed, hours, tuple(self._interruptions), self._checkpoints)

    def _left_s(self) -> float:
        return self._run.duration_s - self._clock_s

    def _spend(self, part: str, seconds: float) -> float:
        """Advances time, at most to the end of the run; returns the seconds that passed."""
        seconds = min(seconds, self._left_s())
        self._spent_s[part] += seconds
        self._clock_s += seconds
        return seconds

    def _train(self) -> float:
        """Trains until the next failure or the end; returns the seconds of training that are lost."""
        run = self._run
        until_failure_s = self._next_failure_s - self._load_s
        fails = until_failure_s < self._left_s()
        elapsed_s = until_failure_s if fails else self._left_s()
        trained_s, saved_s = run.trained_and_saved_s(elapsed_s)
        self._checkpoints += round(saved_s / (run.cycle_s - run.save.blocked_s))
        counts_s = saved_s if fails else trained_s
        slowdown = expected_slowdown(run.nodes, self._slow_nodes, run.slow_node_slowdown, run.step_jitter)
        self._spent_s["useful"] += counts_s / slowdown
        self._spent_s["stragglers"] += counts_s - counts_s / slowdown
        self._spent_s["rework"] += trained_s - counts_s
        self._spent_s["checkpoints"] += elapsed_s - trained_s
        self._load_s += elapsed_s
        self._clock_s = self._clock_s + elapsed_s if fails else run.duration_s
        return trained_s - counts_s

    def _recover(self, rework_s: float) -> bool:
        """Recovers from a failure; returns False if another failure comes before the job runs again."""
        run, at_s = self._run, self._clock_s
        self._next_failure_s = next(self._failures)
        is_hang = self._chance.random() < run.hang_share
        loses_node = self._chance.random() < run.lost_node_share
        detection_s = self._spend("detection", run.hang_timeout_s if is_hang else run.detection_s)
        waiting_s = self._replace_node() if loses_node else 0.0
        until_failure_s = self._next_failure_s - self._load_s
        restart_s = self._spend("restart", min(run.restart_s, until_failure_s))
        self._load_s += restart_s
        cost_s = (rework_s, detection_s, waiting_s, restart_s)
        self._interruptions.append(Interruption(at_s, is_hang, *cost_s))
        return until_failure_s > run.restart_s

    def _replace_node(self) -> float:
        """Takes a spare node or waits for a repair; returns the seconds that took."""
        run = self._run
        self._slow_nodes -= self._chance.random() < self._slow_nodes / run.nodes
        self._slow_nodes += self._chance.random() < run.slow_node_share
        if run.spare_nodes is None:
            return 0.0
        self._repaired_s.append(self._clock_s + run.repair_s)
        while self._repaired_s and self._repaired_s[0] <= self._clock_s:
            self._repaired_s.popleft()
            self._spare_nodes += 1
        if self._spare_nodes:
            self._spare_nodes -= 1
            return 0.0
        return self._spend("waiting for nodes", self._repaired_s.popleft() - self._clock_s)


def _failure_times(run: SimulatedJob, chance: Random) -> Iterator[float]:
    """Yields the times of node failures, in seconds under load. The expected number over the duration is that of a
    constant rate.

    With a shape k other than 1, each node's hazard is a Weibull distribution's, and whatever replaces a node is as old
    as the node: the expected number of failures until t is F (t / T)^k, a power-law process (Crow 1974).
    """
    expected = 0.0
    while run.expected_failures:
        expected += chance.expovariate(1.0) / run.expected_failures
        try:
            yield run.duration_s * expected ** (1 / run.infant_mortality_shape)
        except OverflowError:
            yield math.inf
    while True:
        yield math.inf


def _successes(trials: int, share: float, chance: Random) -> int:
    """Draws a binomial number, by jumps from success to success."""
    if share in (0.0, 1.0):
        return int(trials * share)
    successes, at = 0, 0
    while (at := at + 1 + int(min(trials, math.log(1.0 - chance.random()) / math.log1p(-share)))) <= trials:
        successes += 1
    return successes


def _normal(at: float) -> float:
    """Returns the standard normal distribution function."""
    return 0.5 * math.erfc(-at / math.sqrt(2))
