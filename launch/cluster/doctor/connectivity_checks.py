"""Checks between hosts: reachability, layout, network connections, shared files, clocks.

Pure functions from answers to findings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import median

from launch.cluster.doctor.findings import FAIL, HERE, OK, WARN, Answers, Facts, Finding, Problems, fold, usual
from launch.cluster.doctor.host_checks import on_gpus
from launch.prediction.auto_layout import format_sizes, layout_or_likely
from launch.runtime.devices import Device
from megalite.config import ConfigError
from megalite.planner.search import Ranks

SKEW_S = 2.0


def shared_findings(answers: Answers) -> list[Finding]:
    """Runs all checks of this module."""
    reachable = Problems("reachable")
    for name, sentence in answers.errors.items():
        reachable.add(name, FAIL, sentence)
    findings = reachable.findings([host.name for host in answers.hosts], "answers")
    if answers.there:
        findings += check_layout(answers) + check_machines(answers) + check_network(answers)
        findings += check_run_dir(answers) + check_data(answers) + check_clock(answers)
    return findings


def check_layout(answers: Answers) -> list[Finding]:
    """Checks that the layout of the config fits the slots of all hosts."""
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
    found = f"{later[0]};" if later else f"{format_sizes(config, layout)} on"
    return [Finding("layout", OK, (), f"{found} {ranks} slots")]


def check_machines(answers: Answers) -> list[Finding]:
    """Checks that no machine has two names, which would put two ranks on each of its GPUs."""
    problems = Problems("machines")
    first: dict[tuple[str, tuple[str, ...]], str] = {}
    for name, facts in answers.there.items():
        other = first.setdefault((facts["hostname"], tuple(sorted(facts["interfaces"].values()))), name)
        if other != name:
            problems.add(name, FAIL, f"is the same machine as {other}", "name each machine once in the hostfile")
    return problems.findings([], "")


def check_network(answers: Answers) -> list[Finding]:
    """Checks TCP between all pairs of hosts on ephemeral ports: ranks connect to all others, not only to the master."""
    problems = Problems("network")
    names = [name for name in answers.there if name in answers.links]
    if len(names) < 2:
        return []
    broken = {
        (name, other): link["problem"]
        for name in names
        for other, link in answers.links[name].items()
        if other in names and "problem" in link
    }
    for name in faulty_hosts(names, broken):
        to = [other for one, other in broken if one == name]
        back = [one for one, other in broken if other == name]
        where, pair = (f"to {fold(to)}", (name, to[0])) if to else (f"from {fold(back)}", (back[0], name))
        both = " and back" if to and set(to) == set(back) else ""
        remedy = "open all ports between the hosts of a run (firewall, security group), or correct the route"
        problems.add(name, FAIL, f"no TCP connection {where}{both} ({broken[pair]})", remedy)
    slowest_ms = max(link.get("seconds", 0.0) for one in answers.links.values() for link in one.values()) * 1e3
    return problems.findings(names, f"TCP to and from all others, connected within {slowest_ms:.1f} ms")


def faulty_hosts(order: Sequence[str], broken: Iterable[tuple[str, str]]) -> list[str]:
    """Returns hosts without which all connections work.

    Repeatedly takes the host with most broken connections, and in a tie the later one in the hostfile.
    """
    left, faulty = set(broken), []
    while left:
        counts = {name: sum(name in pair for pair in left) for name in order}
        worst = max(order, key=lambda name: (counts[name], order.index(name)))
        faulty.append(worst)
        left = {pair for pair in left if worst not in pair}
    return sorted(faulty, key=order.index)


def addresses(answers: Answers) -> dict[str, str]:
    """Returns the address at which most hosts reach each host (the ssh address for a single host)."""
    found = {}
    for name, facts in answers.there.items():
        used = {one: links[name]["address"] for one, links in answers.links.items() if "address" in links.get(name, {})}
        found[name] = usual(used) or own_addresses(facts)[0]
    return found


def own_addresses(facts: Facts) -> list[str]:
    """Returns the addresses at which a host may be reached, the one of ssh first."""
    others = [address for address in facts["interfaces"].values() if not address.startswith("127.")]
    return list(dict.fromkeys([facts["ssh_address"] or facts["hostname"], *others]))


def check_run_dir(answers: Answers) -> list[Finding]:
    """Checks that the run folder is shared: each host and this machine wrote a token there and looked for all others'.

    Checkpoints have parts of all ranks, and `megalite launch` reads the progress of the run there.
    """
    run_dir = answers.settings.run_dir
    if run_dir is None:
        sentence = "not checked whether the run folder is shared"
        return [Finding("run folder", WARN, (), sentence, "name it: CONFIG.yaml or --run-dir")]
    problems, here = Problems("run folder"), list[Finding]()
    unwritten = answers.token_problems
    readers = [name for name in (*answers.there, HERE) if name in answers.tokens_seen and not unwritten.get(name)]
    views = {name: frozenset(answers.tokens_seen[name] & set(readers)) for name in readers}
    shared = usual(views, views.get(HERE))
    for name in (*answers.there, HERE):
        if unwritten.get(name):
            sentence = f"cannot write to {run_dir}: {unwritten[name]}"
        elif name in views and views[name] != shared:
            missing = sorted(set(shared) - {name} - views[name]) or [name]
            unseen = fold(missing) if missing != [name] else "others"
            sentence = f"does not see in {run_dir} what {unseen} wrote there"
        else:
            continue
        if name == HERE:
            remedy = "start the run where its folder is mounted"
            here = [Finding("run folder", FAIL, (), f"{HERE} {sentence}", remedy)]
        else:
            remedy = f"mount the same storage at {run_dir} on all hosts, or choose another run_dir"
            problems.add(name, FAIL, sentence, remedy)
    fine = f"{run_dir} {'is shared' if len(answers.hosts) > 1 else 'can be written'}"
    return problems.findings(answers.there, fine) + here


def check_data(answers: Answers) -> list[Finding]:
    """Checks that the files of prepared data exist and have the same size on all hosts."""
    problems = Problems("data")
    remedy = "write it with `megalite prepare`" if len(answers.hosts) == 1 else "put the data on shared storage"
    for path in map(str, answers.settings.data_files):
        sizes = {name: facts["files"][path] for name, facts in answers.there.items()}
        right = usual(sizes, answers.here["files"][path])
        for name, size in sizes.items():
            if size is None:
                problems.add(name, FAIL, f"{path} is not there", f"{remedy}, or copy it")
            elif size != right:
                sentence = f"{path} has {size:,} bytes, and {right:,} on the others"
                problems.add(name, FAIL, sentence, "copy it again, or put it on shared storage")
    return problems.findings(answers.there if answers.settings.data_files else (), "files are there, equally long")


def check_clock(answers: Answers) -> list[Finding]:
    """Compares each clock with the median of all hosts and this machine."""
    problems = Problems("clock")
    reference = median([0.0, *(ahead for ahead, _ in answers.clocks.values())])
    for name, (ahead, uncertainty) in answers.clocks.items():
        skew = ahead - reference
        if abs(skew) > SKEW_S + uncertainty:
            sentence = f"its clock is {abs(skew):.1f} s {'ahead' if skew > 0 else 'behind'}"
            problems.add(name, WARN, sentence, "start chrony or ntpd there: times in logs will mislead")
    names = [name for name in answers.there if name in answers.clocks]
    return problems.findings(names, f"within {SKEW_S:.0f} s of each other")
