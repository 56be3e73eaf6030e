"""Checks of each host, alone or compared with the others: software, devices, free space, limits.

Pure functions from answers to findings. Hosts with the same result share a finding, so 64 equal hosts are one line.
"""

from __future__ import annotations

from typing import Any

from launch.cluster.doctor.findings import FAIL, WARN, Answers, Finding, Problems, usual
from megalite.units import GIB, MIB, duration, gib, plural

SHM = "/dev/shm"
ROOM = {SHM: 128 * MIB, "/tmp": GIB}  # a warning below this; containers have 64 MiB of /dev/shm by default
RUN_ROOM = 10 * GIB
SHOWN_FILES = 3
FILES = 256  # open files of a rank, besides its sockets to the others
SOCKETS_PER_RANK = 16


def own_findings(answers: Answers) -> list[Finding]:
    """Runs all checks of this module."""
    checks = (
        *(check_python, check_packages, check_code, check_devices),
        *(check_own_name, check_room, check_locks, check_limits),
    )
    return [finding for check in checks for finding in check(answers)] if answers.there else []


def on_gpus(answers: Answers) -> bool:
    """Returns whether ranks will compute on GPUs, judging by the facts of the hosts."""
    facts = answers.there.values()
    is_cpu_only = answers.settings.on_cpu or all("+cpu" in (one["versions"]["torch"] or "") for one in facts)
    return not is_cpu_only and any(one["gpus"] or one["gpu_problem"] for one in facts)


def check_python(answers: Answers) -> list[Finding]:
    """Compares Python versions. Patch-level differences are compatible."""
    problems = Problems("python")
    versions = {name: facts["python"] for name, facts in answers.there.items()}
    right = usual(versions, answers.here["python"])
    for name, version in versions.items():
        if version != right:
            is_far = version.split(".")[:2] != right.split(".")[:2]
            sentence = f"Python {version}, and {right} on the others"
            problems.add(name, FAIL if is_far else WARN, sentence, "make the virtual environments alike")
    return problems.findings(answers.there, f"{right}, {answers.here['executable']}")


def check_packages(answers: Answers) -> list[Finding]:
    """Compares the versions of packages between hosts; those of this machine only break ties."""
    problems = Problems("packages")
    here = answers.here["versions"]
    versions = {name: facts["versions"] for name, facts in answers.there.items()}
    right = {package: usual({name: versions[name][package] for name in versions}, here[package]) for package in here}
    for name, own in versions.items():
        wrong = [package for package in own if own[package] != right[package]]
        missing = [package for package in own if own[package] is None and right[package] is None]
        wrongs = [f"{package} {own[package] or 'is not installed'}, not {right[package]}" for package in wrong]
        wrongs += [f"{package} is not installed" for package in missing]
        if wrongs:
            wanted = " ".join(f"{package}=={right[package] or here[package]}" for package in [*wrong, *missing])
            remedy = f"there: {answers.here['executable']} -m pip install {wanted}"
            problems.add(name, FAIL, "; ".join(wrongs), remedy)
    findings = problems.findings(answers.there, _listed(right))
    other = {package: version for package, version in here.items() if version != right[package]}
    if other:
        sentence = f"this machine has {_listed(other)}, the hosts have {_listed({name: right[name] for name in other})}"
        findings.append(Finding("packages", WARN, (), sentence, "start the run from an environment like theirs"))
    return findings


def check_code(answers: Answers) -> list[Finding]:
    """Compares the code: ranks with different code compute different results, or wait for each other for ever."""
    problems = Problems("code")
    digests = {name: facts["code"] for name, facts in answers.there.items()}
    right = usual(digests, answers.here["code"])
    remedy = f"put the same commit at {answers.root} everywhere, or use shared storage"
    for name, digest in digests.items():
        if digest is None:
            problems.add(name, FAIL, f"the code at {answers.root} cannot be read", remedy)
        elif not digest:
            problems.add(name, FAIL, f"megalite is not at {answers.root}", remedy)
        elif digest != right:
            changed = answers.changed_files.get(name, [])
            more = f" and {len(changed) - SHOWN_FILES} more files" if len(changed) > SHOWN_FILES else ""
            problems.add(name, FAIL, f"other code than elsewhere: {', '.join(changed[:SHOWN_FILES])}{more}", remedy)
    findings = problems.findings(answers.there, f"{right or 'none'}, {answers.root}")
    if right != answers.here["code"]:
        findings.append(Finding("code", WARN, (), "this machine has other code than the hosts", remedy))
    return findings


def check_devices(answers: Answers) -> list[Finding]:
    """Checks that there are as many GPUs as slots in use, or on CPUs, enough cores for all slots."""
    problems = Problems("devices")
    uses_gpus = on_gpus(answers)
    hosts = {host.name: host for host in answers.hosts}
    names = {name: ", ".join(dict.fromkeys(facts["gpus"])) for name, facts in answers.there.items()}
    right = usual(names)
    for name, facts in answers.there.items():
        count, wanted = len(facts["gpus"]), max(hosts[name].devices) + 1
        if not uses_gpus:
            if hosts[name].slots > facts["cores"]:
                sentence = f"{hosts[name].slots} ranks share {facts['cores']} cores"
                problems.add(name, WARN, sentence, "slots beyond the cores make a run slower")
        elif facts["gpu_problem"]:
            remedy = "look at nvidia-smi there, or set DS_ACCELERATOR=cpu here"
            problems.add(name, FAIL, facts["gpu_problem"], remedy)
        elif count < wanted:
            sentence = f"{plural(count, 'GPU')}, and the hostfile's slots need {wanted}"
            problems.add(name, FAIL, sentence, "correct its slots, or look at nvidia-smi there")
        elif names[name] != right:
            sentence = f"{names[name]}, and {right} on the others"
            problems.add(name, WARN, sentence, "all ranks go as fast as the slowest")
    return problems.findings(answers.there, right if uses_gpus else "CPU, cores for all slots")


def check_own_name(answers: Answers) -> list[Finding]:
    """Checks what the host's own name resolves to: gloo listens there unless `megalite launch` names an interface."""
    problems = Problems("own name")
    remedy = (
        "`megalite launch` copes; for plain deepspeed correct /etc/hosts, or put GLOO_SOCKET_IFNAME into .deepspeed_env"
    )
    for name, facts in answers.there.items() if len(answers.hosts) > 1 else ():
        own = facts["own_name"]
        usable = [address for address in own["addresses"] if address not in own["foreign"]]
        if not own["addresses"]:
            problems.add(name, WARN, "its own name does not resolve", remedy)
        elif not usable:
            problems.add(name, WARN, f"its own name leads to another host ({own['addresses'][0]})", remedy)
        elif usable[0] in own["loopback"]:
            problems.add(name, WARN, f"its own name leads to loopback ({usable[0]})", remedy)
    return problems.findings(answers.there, "leads to an address others can reach")


def check_room(answers: Answers) -> list[Finding]:
    """Checks free bytes and inodes in the folders that ranks write to."""
    run_dir = str(answers.settings.run_dir) if answers.settings.run_dir else None
    findings = []
    for path, enough in {**({run_dir: RUN_ROOM} if run_dir else {}), **ROOM}.items():
        problems = Problems("room")
        remedy = "start the container with --shm-size=16g" if path == SHM else "free some space"
        rooms = {name: facts["folders"][path] for name, facts in answers.there.items()}
        for name, room in rooms.items():
            if room is None:
                problems.add(name, FAIL, f"{path} does not answer", "look at its file system (df, mount)")
            elif room["bytes"] < MIB or not room["files"]:
                problems.add(name, FAIL, f"nothing is free in {path}", remedy)
            elif room["bytes"] < enough:
                problems.add(name, WARN, f"only {gib(room['bytes'])} free in {path}", remedy)
        least = min((room["bytes"] for room in rooms.values() if room), default=0)
        findings += problems.findings(answers.there, f"{gib(least)} or more free in {path}")
    return findings


def check_locks(answers: Answers) -> list[Finding]:
    """Checks for locks without a holder of extensions that ranks compile; the holder may be on another host."""
    problems = Problems("compile locks")
    locks = [(name, lock) for name, facts in answers.there.items() for lock in facts["locks"]]
    held = {lock["path"] for _, lock in locks if lock["holder"]}
    for name, lock in locks:
        path = lock["path"]
        if path in held:
            problems.add(name, WARN, f"{path}: an extension of torch is being compiled", "ranks wait for it")
        else:
            age = duration(max(one["age_s"] for _, one in locks if one["path"] == path))
            sentence = f"ranks would wait for ever for a lock that a dead compiler left {age} ago"
            problems.add(name, FAIL, sentence, f"rm {path}")
    return problems.findings(answers.there, "none left behind") if answers.settings.extensions else []


def check_limits(answers: Answers) -> list[Finding]:
    """Checks how many files a process may open and how much memory it may pin."""
    problems = Problems("limits")
    ranks = sum(host.slots for host in answers.hosts)
    needed = FILES + SOCKETS_PER_RANK * ranks
    for name, facts in answers.there.items():
        files, pinned = facts["limits"]["nofile"], facts["limits"]["memlock"]
        if 0 <= files < needed:  # -1: any number
            sentence = f"a process may open {files} files, and {ranks} ranks can need {needed}"
            problems.add(name, WARN, sentence, "raise nofile in /etc/security/limits.conf")
        if facts["infiniband"] and pinned is not None:
            sentence = f"a process may pin {gib(pinned)}, too little for InfiniBand"
            problems.add(name, WARN, sentence, "set memlock unlimited in /etc/security/limits.conf")
    return problems.findings(answers.there, f"enough open files for {plural(ranks, 'rank')}")


def _listed(versions: dict[str, Any]) -> str:
    return ", ".join(f"{package} {version or '(none)'}" for package, version in versions.items())
