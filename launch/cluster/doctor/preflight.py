"""Checks in parallel whether hosts can train together.

Input: open connections, the errors of hosts without one, the hosts and the settings of the run. Output: a
`PreflightReport`. The connections stay open. Hosts write tokens into the run folder and remove them again.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from launch.cluster.doctor.connectivity_checks import addresses, own_addresses, shared_findings
from launch.cluster.doctor.findings import FAIL, HERE, OK, STYLES, WARN, Answers, Finding, Settings, fold, usual
from launch.cluster.doctor.host_checks import ROOM, on_gpus, own_findings
from launch.cluster.doctor.security import security_findings
from launch.cluster.ssh.connection import HostConnection, HostError, in_parallel
from launch.output import Cell, StyledCell, Table
from launch.runtime import host_probe as local
from launch.runtime.devices import Device
from launch.runtime.gpu_probe import GPUS_S, gpu_facts
from launch.runtime.hostfile import Host
from launch.runtime.started_modules import INSTALLATION
from launch.trainer.start.run_folder import PACKAGES
from megalite.units import plural

ANSWER_S = 30.0  # for all facts of a host; each that may hang has its own limit
CONNECT_S = 2.0
SEEN_S = 1.0  # until a token must be visible on the other hosts


@dataclass(frozen=True)
class PreflightReport:
    """Findings of a preflight, and the facts that a launch needs."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    addresses: Mapping[str, str]  # at which the other hosts reach each one; that of the first is `--master_addr`
    facts: Mapping[str, Mapping[str, Any]]
    device: Device  # of the ranks
    seconds: float

    @property
    def failures(self) -> list[Finding]:
        """The findings that prevent a run from starting."""
        return [finding for finding in self.findings if finding.verdict == FAIL]

    @property
    def passed(self) -> bool:
        """True if no finding is a failure."""
        return not self.failures

    @property
    def failed_hosts(self) -> list[str]:
        """Hosts to leave out of a run. A failure without hosts is only in `failures`."""
        return [name for name in self.hosts if any(name in failure.hosts for failure in self.failures)]

    def as_json(self) -> dict[str, Any]:
        """Returns the report as values that JSON can hold."""
        shown = {"passed": self.passed, "failed_hosts": self.failed_hosts, **asdict(self)}
        return shown | {"seconds": round(self.seconds, 3)}

    def table(self) -> Table:
        """Builds a table of findings and remedies, in the order in which checks depend on each other."""
        rows: list[list[Cell]] = []
        previous = None
        for finding in self.findings:
            style = STYLES[finding.verdict]
            is_of_all = len(finding.hosts) == len(self.hosts) > 1
            rows.append(
                [
                    "" if finding.check == previous else finding.check,
                    StyledCell(finding.verdict, style),
                    f"all {len(self.hosts)}" if is_of_all else fold(finding.hosts) or "-",
                    StyledCell(finding.sentence, "" if finding.verdict == OK else style),
                    finding.remedy,
                ]
            )
            previous = finding.check
        return Table(("check", "", "hosts", "found", "what to do"), rows, "findings", range(5))

    def conclusion(self) -> str:
        """Summarises the report in one line."""
        count, failed = len(self.hosts), self.failed_hosts
        hosts, warnings = plural(count, "host"), sum(one.verdict == WARN for one in self.findings)
        suffix = f", {plural(warnings, 'warning')}" if warnings else ""
        if self.passed:
            return f"{hosts} can train{' together' * (count > 1)}{suffix} ({self.seconds:.1f} s)"
        if not failed:
            return f"{hosts} can NOT train{' together' * (count > 1)} as it is{suffix} ({self.seconds:.1f} s)"
        rest = [name for name in self.hosts if name not in failed]
        without = f"; without {'it' if len(failed) == 1 else 'them'}, {fold(rest)} could" if rest else ""
        what = f"{len(failed)} of {hosts} can NOT train: {fold(failed)}"
        return f"{what}{without}{suffix} ({self.seconds:.1f} s)"


def preflight(
    connections: Mapping[str, HostConnection],
    errors: Mapping[str, HostError],
    hosts: Sequence[Host],
    settings: Settings,
) -> PreflightReport:
    """Runs the checks. A problem of a host becomes a finding, never an exception."""
    began = time.monotonic()
    run_dir = str(settings.run_dir) if settings.run_dir else None
    question: dict[str, Any] = {
        "root": str(INSTALLATION),
        "packages": list(PACKAGES),
        "python_path": [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path],
        "folders": [*ROOM, *([run_dir] if run_dir else [])],
        "files": [str(path) for path in settings.data_files],
        "extensions": list(settings.extensions),
        "caches": [path for path in [os.environ.get("TORCH_EXTENSIONS_DIR")] if path],
    }
    answers = Answers(tuple(hosts), settings, str(INSTALLATION), local.facts(**question) | gpu_facts())
    answers.errors.update({name: str(error) for name, error in errors.items()})
    names = tuple(host.name for host in hosts)
    questions = _Questions({name: connections[name] for name in names if name in connections}, answers, run_dir)
    try:
        questions.collect_facts(question)
        questions.probe_connections()
        questions.compare_code()
    finally:
        questions.clean_up()
    findings = (*shared_findings(answers), *own_findings(answers), *security_findings(answers, os.environ))
    device: Device = "cuda" if on_gpus(answers) else "cpu"
    return PreflightReport(names, findings, addresses(answers), answers.facts, device, time.monotonic() - began)


class _Questions:
    """Rounds of requests to all hosts; the second round needs the answers of the first."""

    def __init__(self, connections: Mapping[str, HostConnection], answers: Answers, run_dir: str | None) -> None:
        self._connections, self._answers, self._run_dir = connections, answers, run_dir
        self._mark = f".doctor_{uuid.uuid4().hex[:12]}_"  # prefix of token files and of greetings
        self._made: dict[str, list[str]] = {}  # host or HERE -> folders that it created
        self._ports: dict[str, int] = {}

    def collect_facts(self, question: Mapping[str, Any]) -> None:
        """Round 1: collects facts and clock offsets; each host writes a token file and opens a listening socket."""

        def ask(name: str) -> None:
            connection = self._connections[name]
            self._answers.clocks[name] = clock_of(connection)
            self._ports[name] = connection.ask("listen", greeting=self._mark + name)["port"]
            if self._run_dir is not None:
                self._note_token(name, connection.ask("write_token", **self._token(name)))
            facts = connection.ask("facts", timeout_s=ANSWER_S, **question)
            self._answers.facts[name] = facts | connection.ask("gpu_facts", timeout_s=ANSWER_S + 2 * GPUS_S)

        if self._run_dir is not None:
            self._note_token(HERE, local.write_token(**self._token(HERE)))
        self._on_all(ask)

    def probe_connections(self) -> None:
        """Round 2: each host reads the tokens of all hosts and connects to all others."""
        answers = self._answers
        tokens = {name: self._token(name) for name, problem in answers.token_problems.items() if problem is None}
        texts = {token["name"]: token["text"] for token in tokens.values()}
        targets = {
            name: {"addresses": own_addresses(facts), "port": self._ports[name], "greeting": self._mark + name}
            for name, facts in answers.there.items()
        }

        def ask(name: str) -> None:
            connection = self._connections[name]
            if self._run_dir is not None:
                found = connection.ask("read_tokens", folder=self._run_dir, texts=texts, wait_s=SEEN_S)["found"]
                answers.tokens_seen[name] = {texts[token] for token in found}
            others = {other: target for other, target in targets.items() if other != name}
            answers.links[name] = connection.ask("connect", timeout_s=ANSWER_S, targets=others, patience_s=CONNECT_S)

        if self._run_dir is not None:
            found = local.read_tokens(self._run_dir, texts, SEEN_S)["found"]
            answers.tokens_seen[HERE] = {texts[token] for token in found}
        self._on_all(ask)

    def compare_code(self) -> None:
        """Finds the source files in which hosts differ from the majority."""
        answers = self._answers
        codes = {name: facts["code"] for name, facts in answers.there.items()}
        right = usual(codes, answers.here["code"])
        other = [name for name in answers.there if codes[name] and codes[name] != right]
        if not other:
            return
        model = next(name for name in answers.there if codes[name] == right)
        digests: dict[str, dict[str, str]] = {}

        def ask(name: str) -> None:
            digests[name] = self._connections[name].ask("file_digests", root=str(INSTALLATION))

        self._on_all(ask, [*other, model])
        for name in other:
            if name in digests and model in digests:
                pairs = digests[name].items() ^ digests[model].items()
                answers.changed_files[name] = sorted({file for file, _ in pairs})

    def clean_up(self) -> None:
        """Removes files and closes ports on all hosts that still answer."""

        def ask(name: str) -> None:
            connection = self._connections[name]
            connection.ask("stop_listening")
            if self._run_dir is not None:
                connection.ask("remove_token", **self._token(name, made=self._made.get(name, [])))

        self._on_all(ask)
        for name in sorted(self._made, key=HERE.__eq__):  # tokens of lost hosts are visible here; HERE comes last
            local.remove_token(**self._token(name, made=self._made[name] if name == HERE else []))

    def _on_all(self, ask: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Runs `ask` for hosts that have answered so far; one that fails is not asked again."""
        answering = [name for name in self._connections if name not in self._answers.errors]
        _, failed = in_parallel(answering if names is None else names, ask)
        self._answers.errors.update({name: str(error) for name, error in failed.items()})

    def _token(self, name: str, **more: Any) -> dict[str, Any]:
        token = {"folder": self._run_dir, "name": self._mark + name.replace(" ", "_")}
        return {**token, **more} if more else {**token, "text": name}

    def _note_token(self, name: str, answer: Mapping[str, Any]) -> None:
        self._made[name] = answer["made"]
        self._answers.token_problems[name] = answer["problem"]


def clock_of(connection: HostConnection) -> tuple[float, float]:
    """Returns by how many seconds the clock of a host is ahead, and the uncertainty: the better of two tries."""
    tries = []
    for _ in range(2):
        before = time.time()
        theirs = connection.ask("clock")["time"]
        after = time.time()
        tries.append((theirs - (before + after) / 2, (after - before) / 2))
    return min(tries, key=lambda one: one[1])
