"""What is wrong between hosts: who can be asked, who reaches whom, who sees the same files, whose clock is off.

Pure: answers in, findings out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from statistics import median

from launch.devices import Device
from launch.doctor.checks import on_gpus
from launch.doctor.findings import HERE, Answers, Facts, Finding, Judgement, Verdict, fold, gather, usual
from launch.plan.automatic import layout_or_likely
from megalite.config import ConfigError
from megalite.planner.search import Ranks

OK, WARN, FAIL = Verdict
SKEW_S = 2.0
Judged = Iterator[tuple[str, Judgement]]


def shared_findings(answers: Answers) -> list[Finding]:
    """Of all checks in this file."""
    findings = check_reachable(answers)
    if answers.there:
        findings += check_layout(answers) + check_machines(answers) + check_network(answers)
        findings += check_run_dir(answers) + check_data(answers) + check_clock(answers)
    return findings


def check_reachable(answers: Answers) -> list[Finding]:
    """All hosts, not only the first."""
    problems = [(name, Judgement(FAIL, sentence)) for name, sentence in answers.errors.items()]
    return gather("reachable", [host.name for host in answers.hosts], problems, "answers")


def check_layout(answers: Answers) -> list[Finding]:
    """Whether the config's layout fits the slots of all hosts together."""
    config = answers.settings.layout_of
    if config is None:
        return []
    ranks = sum(host.slots for host in answers.hosts)
    try:
        slots = math.gcd(*(host.slots for host in answers.hosts))
        device: Device = "cuda" if on_gpus(answers) else "cpu"
        _, layout, later = layout_or_likely(config, Ranks(ranks, slots, device))
    except ConfigError as error:
        return [Finding("layout", FAIL, (), str(error))]
    if later:
        return [Finding("layout", OK, (), f"{later[0]}; {ranks} slots")]
    sizes = f"tensor {layout.tensor_parallel_size} x pipeline {layout.pipeline_parallel_size}"
    return [Finding("layout", OK, (), f"{sizes} x data {layout.data_parallel_size} on {ranks} slots")]


def check_machines(answers: Answers) -> list[Finding]:
    """Two names of one machine would put two ranks on each of its GPUs."""
    first: dict[tuple[str, tuple[str, ...]], str] = {}

    def judge() -> Judged:
        for name in answers.there:
            facts = answers.facts[name]
            other = first.setdefault((facts["hostname"], tuple(sorted(facts["interfaces"].values()))), name)
            if other != name:
                yield name, Judgement(FAIL, f"is the same machine as {other}", "name each machine once in the hostfile")

    twice = list(judge())
    return gather("machines", [], twice, "")


def check_network(answers: Answers) -> list[Finding]:
    """TCP from each host to each other, on a port as the run takes one: ranks connect to all others, not only to the
    master."""
    names = [name for name in answers.there if name in answers.links]
    broken = {
        (name, other): link["problem"]
        for name in names
        for other, link in answers.links[name].items()
        if other in names and "problem" in link
    }
    remedy = "open all ports between the hosts of a run (firewall, security group), or correct the route"

    def judge() -> Judged:
        for name in at_fault(names, broken):
            to = [other for one, other in broken if one == name]
            back = [one for one, other in broken if other == name]
            way, pair = (f"to {fold(to)}", (name, to[0])) if to else (f"from {fold(back)}", (back[0], name))
            both = " and back" if to and set(to) == set(back) else ""
            yield name, Judgement(FAIL, f"no TCP connection {way}{both} ({broken[pair]})", remedy)

    if len(names) < 2:
        return []
    slowest_ms = max(link.get("seconds", 0.0) for one in answers.links.values() for link in one.values()) * 1e3
    return gather("network", names, judge(), f"TCP to and from all others, connected within {slowest_ms:.1f} ms")


def at_fault(order: Sequence[str], broken: Iterable[tuple[str, str]]) -> list[str]:
    """Hosts without which all connections work: the ones with most broken ones, the later in the hostfile of two."""
    left, blamed = set(broken), []
    while left:
        counts = {name: sum(name in pair for pair in left) for name in order}
        worst = max(order, key=lambda name: (counts[name], order.index(name)))
        blamed.append(worst)
        left = {pair for pair in left if worst not in pair}
    return sorted(blamed, key=order.index)


def addresses(answers: Answers) -> dict[str, str]:
    """Where most others reach each host; of a host alone, where ssh does."""
    found = {}
    for name in answers.there:
        used = {one: links[name]["address"] for one, links in answers.links.items() if "address" in links.get(name, {})}
        found[name] = usual(used) or own_addresses(answers.facts[name])[0]
    return found


def own_addresses(facts: Facts) -> list[str]:
    """Where a host may be reached: first as ssh does."""
    others = [address for address in facts["interfaces"].values() if not address.startswith("127.")]
    return list(dict.fromkeys([facts["ssh_address"] or facts["hostname"], *others]))


def check_run_dir(answers: Answers) -> list[Finding]:
    """Each host and this machine wrote a token there and looked for all others' tokens: checkpoints have parts of all
    ranks, and `megalite launch` reads there how the run goes."""
    run_dir = answers.settings.run_dir
    if run_dir is None:
        sentence = "not checked whether the run folder is shared"
        return [Finding("run folder", WARN, (), sentence, "name it: CONFIG.yaml or --run-dir")]
    problems = answers.token_problems
    readers = [name for name in (*answers.there, HERE) if name in answers.tokens_seen and not problems.get(name)]
    views = {name: frozenset(answers.tokens_seen[name] & set(readers)) for name in readers}
    shared = usual(views, views.get(HERE))
    remedy = f"mount the same storage at {run_dir} on all hosts, or choose another run_dir"

    def judge() -> Judged:
        for name in (*answers.there, HERE):
            if problems.get(name):
                yield name, Judgement(FAIL, f"cannot write to {run_dir}: {problems[name]}", remedy)
            elif name in views and views[name] != shared:
                missing = sorted(set(shared) - {name} - views[name]) or [name]
                unseen = fold(missing) if missing != [name] else "others"
                yield name, Judgement(FAIL, f"does not see in {run_dir} what {unseen} wrote there", remedy)

    judged = list(judge())
    findings = gather("run folder", answers.there, [one for one in judged if one[0] != HERE], f"{run_dir} is shared")
    findings += [
        Finding("run folder", FAIL, (), f"{HERE} {one.sentence}", "start the run where its folder is mounted")
        for name, one in judged
        if name == HERE
    ]
    return findings


def check_data(answers: Answers) -> list[Finding]:
    """Files of prepared data, equally long on all hosts."""
    findings = []
    for path in map(str, answers.settings.data_files):
        sizes = {name: answers.facts[name]["files"][path] for name in answers.there}
        right = usual(sizes, answers.here["files"][path])

        def judge(path: str = path, sizes: dict[str, int | None] = sizes, right: int | None = right) -> Judged:
            for name, size in sizes.items():
                if size is None:
                    yield name, Judgement(FAIL, f"{path} is not there", "put the data on shared storage, or copy it")
                elif size != right:
                    sentence = f"{path} has {size:,} bytes, and {right:,} on the others"
                    yield name, Judgement(FAIL, sentence, "copy it again, or put it on shared storage")

        findings += gather("data", [], judge(), "")
    fine = [name for name in answers.there if all(name not in finding.hosts for finding in findings)]
    if answers.settings.data_files and fine:
        findings.insert(0, Finding("data", OK, tuple(fine), "files are there, equally long"))
    return findings


def check_clock(answers: Answers) -> list[Finding]:
    """Against the middle one of all hosts and this machine."""
    middle = median([0.0, *(ahead for ahead, _ in answers.clocks.values())])

    def judge() -> Judged:
        for name, (ahead, give_or_take) in answers.clocks.items():
            skew = ahead - middle
            if abs(skew) > SKEW_S + give_or_take:
                sentence = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
                yield name, Judgement(WARN, sentence, "start chrony or ntpd there: times in logs will mislead")

    names = [name for name in answers.there if name in answers.clocks]
    return gather("clock", names, judge(), f"within {SKEW_S:.0f} s of each other")
