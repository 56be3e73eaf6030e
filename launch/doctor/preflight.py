"""Asks all hosts at once what could keep them from training together, and judges what they say.

In: open connections, the errors of hosts that have none, the hosts and what of the run is known. Out: a `Report`. The
connections stay open. Hosts write into the run folder meanwhile; nothing of it is left.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import launch
from launch.devices import Device
from launch.doctor import facts as local
from launch.doctor.between import addresses, own_addresses, shared_findings
from launch.doctor.checks import ROOM, on_gpus, own_findings
from launch.doctor.findings import HERE, Answers, Finding, Settings, Verdict, usual
from launch.hostfile import Host
from launch.hosts.connection import HostConnection, HostError, in_parallel
from launch.run_folder import PACKAGES

ROOT = Path(launch.__file__).resolve().parent.parent
ANSWER_S = 30.0  # for all facts of a host; it limits what may hang by itself
CONNECT_S = 2.0
SEEN_S = 1.0  # until what one host wrote must be visible on the others


@dataclass(frozen=True)
class Report:
    """What was found, and what a launch can use of it."""

    hosts: tuple[str, ...]
    findings: tuple[Finding, ...]
    addresses: Mapping[str, str]
    """Where the other hosts reach each one: the master's is what `--master_addr` takes."""
    facts: Mapping[str, Mapping[str, Any]]
    device: Device
    """What ranks will compute on."""
    seconds: float

    @property
    def failures(self) -> list[Finding]:
        """Those that keep a run from starting as it is."""
        return [finding for finding in self.findings if finding.verdict == Verdict.FAIL]

    @property
    def passed(self) -> bool:
        """Nothing fails."""
        return not self.failures

    @property
    def failed_hosts(self) -> dict[str, list[Finding]]:
        """Hosts that a run is better without, and why. A failure that is no host's is only in `failures`."""
        return {
            name: reasons for name in self.hosts if (reasons := [one for one in self.failures if name in one.hosts])
        }

    def as_json(self) -> dict[str, Any]:
        """Everything a program may want to know."""
        return {
            "passed": self.passed,
            "seconds": round(self.seconds, 3),
            "hosts": list(self.hosts),
            "failed_hosts": list(self.failed_hosts),
            "findings": [asdict(finding) for finding in self.findings],
            "device": self.device,
            "addresses": dict(self.addresses),
            "facts": {name: dict(facts) for name, facts in self.facts.items()},
        }


def preflight(
    connections: Mapping[str, HostConnection],
    errors: Mapping[str, HostError],
    hosts: Sequence[Host],
    settings: Settings,
) -> Report:
    """Never raises for what is wrong with a host: that is a finding."""
    began = time.monotonic()
    asked = _Asked(connections, errors, hosts, settings)
    with asked.clean():
        asked.first()
        asked.second()
        asked.compare_code()
    answers = asked.answers
    findings = (*shared_findings(answers), *own_findings(answers))
    names = tuple(host.name for host in hosts)
    device: Device = "cuda" if on_gpus(answers) else "cpu"
    return Report(names, findings, addresses(answers), answers.facts, device, time.monotonic() - began)


class _Asked:
    """The questions, in an order in which the answers to the first allow the second."""

    def __init__(
        self,
        connections: Mapping[str, HostConnection],
        errors: Mapping[str, HostError],
        hosts: Sequence[Host],
        settings: Settings,
    ) -> None:
        self._connections = {host.name: connections[host.name] for host in hosts if host.name in connections}
        self._mark = f".doctor_{uuid.uuid4().hex[:12]}_"  # of files that are written, and of greetings
        self._made: dict[str, list[str]] = {}  # host or HERE -> folders that it had to make
        self._ports: dict[str, int] = {}
        self._run_dir = str(settings.run_dir) if settings.run_dir else None
        self._question: dict[str, Any] = {
            "root": str(ROOT),
            "packages": list(PACKAGES),
            "python_path": [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path],
            "folders": [*ROOM, *([self._run_dir] if self._run_dir else [])],
            "files": [str(path) for path in settings.data_files],
            "caches": [path for path in [os.environ.get("TORCH_EXTENSIONS_DIR")] if path],
        }
        self.answers = Answers(tuple(hosts), settings, str(ROOT), local.facts(**self._question))
        self.answers.errors.update({name: str(error) for name, error in errors.items()})

    def first(self) -> None:
        """Facts, clocks; a token from each; each listens."""

        def ask(name: str) -> None:
            connection = self._connections[name]
            self.answers.clocks[name] = clock_of(connection)
            self._ports[name] = connection.ask("listen", greeting=self._mark + name)["port"]
            if self._run_dir is not None:
                self._wrote(name, connection.ask("write_token", **self._token(name)))
            self.answers.facts[name] = connection.ask("facts", timeout_s=ANSWER_S, **self._question)

        if self._run_dir is not None:
            self._wrote(HERE, local.write_token(**self._token(HERE)))
        self._on_all(ask)

    def second(self) -> None:
        """Each reads the tokens of all and connects to all others."""
        answers = self.answers
        tokens = {name: self._token(name) for name, problem in answers.token_problems.items() if problem is None}
        texts = {token["name"]: token["text"] for token in tokens.values()}
        targets = {
            name: {
                "addresses": own_addresses(answers.facts[name]),
                "port": self._ports[name],
                "greeting": self._mark + name,
            }
            for name in answers.there
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
        """Names the files in which hosts differ from what most have."""
        answers = self.answers
        codes = {name: answers.facts[name]["code"] for name in answers.there}
        right = usual(codes, answers.here["code"])
        other = [name for name in answers.there if codes[name] and codes[name] != right]
        if not other:
            return
        model = next(name for name in answers.there if codes[name] == right)
        digests: dict[str, dict[str, str]] = {}

        def ask(name: str) -> None:
            digests[name] = self._connections[name].ask("file_digests", root=str(ROOT))

        self._on_all(ask, [*other, model])
        for name in other:
            if name in digests and model in digests:
                pairs = digests[name].items() ^ digests[model].items()
                answers.changed_files[name] = sorted({file for file, _ in pairs})

    @contextmanager
    def clean(self) -> Iterator[None]:
        """At its end, files are removed and ports closed, however it ends."""
        try:
            yield
        finally:

            def ask(name: str) -> None:
                connection = self._connections[name]
                connection.ask("stop_listening")
                if self._run_dir is not None:
                    connection.ask("remove_token", **self._token(name, made=self._made.get(name, [])))

            self._on_all(ask)
            for name in sorted(self._made, key=HERE.__eq__):  # what lost hosts wrote is seen here; HERE comes last
                local.remove_token(**self._token(name, made=self._made[name] if name == HERE else []))

    def _on_all(self, ask: Callable[[str], None], names: Sequence[str] | None = None) -> None:
        """Of hosts that have answered so far; who does not is not asked again."""
        there = [name for name in self._connections if name not in self.answers.errors]
        _, failed = in_parallel(there if names is None else names, ask)
        self.answers.errors.update({name: str(error) for name, error in failed.items()})

    def _token(self, name: str, **more: Any) -> dict[str, Any]:
        token = {"folder": self._run_dir, "name": self._mark + name.replace(" ", "_")}
        return {**token, **more} if more else {**token, "text": name}

    def _wrote(self, name: str, answer: Mapping[str, Any]) -> None:
        self._made[name] = answer["made"]
        self.answers.token_problems[name] = answer["problem"]


def clock_of(connection: HostConnection) -> tuple[float, float]:
    """Seconds that its clock is ahead of this machine's, and how wrong that can be: the better of two tries."""
    tries = []
    for _ in range(2):
        before = time.time()
        theirs = connection.ask("clock")["time"]
        after = time.time()
        tries.append((theirs - (before + after) / 2, (after - before) / 2))
    return min(tries, key=lambda one: one[1])
