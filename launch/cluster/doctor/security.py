"""Checks what lets other users, or files of theirs, into a run: folders, masks, and the variables of this shell.

Only a run folder in which every user could replace the files is a failure; all other findings are warnings.
"""

from __future__ import annotations

import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from launch.cluster.doctor.findings import FAIL, OK, WARN, Answers, Finding, Problems, Severity
from launch.runtime.forwarded_environment import unread_environment_file, user_environment_files
from launch.runtime.host_probe import PATIENCE_S, within

CHECK = "security"
OTHERS_WRITE = stat.S_IWOTH
PRIVATE_MODE = 0o077  # bits that give a file away
RAY_TOKEN = Path(".ray/auth_token")  # below the home folder


def security_findings(answers: Answers, environment: Mapping[str, str]) -> list[Finding]:
    """Returns the findings about all hosts, and those about this machine's folders and `environment`."""
    problems = Problems(CHECK)
    for name, facts in answers.there.items():
        if not facts["umask"] & OTHERS_WRITE:
            sentence = f"all users may write the files that ranks make (umask {facts['umask']:04o})"
            problems.add(name, WARN, sentence, "umask 022 in a login file there, such as ~/.bashrc")
        if not facts["uid"]:
            problems.add(name, OK, "ranks run as root, as in most containers")
    findings = problems.findings(answers.there, "not root, and other users may not write the files of ranks")
    run_dir = answers.settings.run_dir
    found = None if run_dir is None else within(PATIENCE_S, lambda: problem_of_folder(run_dir), None)
    if found is not None:
        verdict, sentence, remedy = found
        findings.append(Finding(CHECK, verdict, (), sentence, remedy))
    return findings + [Finding(CHECK, WARN, (), *one) for one in problems_of_shell(environment, Path.home())]


def problem_of_folder(folder: Path) -> tuple[Severity, str, str] | None:
    """Returns how all users could change a run folder, how bad that is, and the remedy; None if they cannot.

    Of a folder that is not there yet, the folders that it will be in are looked at. Who may write one without a sticky
    bit may put another folder in place of what it contains.
    """
    for place in (folder, *folder.parents):
        try:
            mode = place.stat().st_mode
        except OSError:
            continue
        if not mode & OTHERS_WRITE:
            continue
        if place == folder:
            verdict = WARN if mode & stat.S_ISVTX else FAIL
            return verdict, f"all users may write the run's folder {place}", f"chmod o-w {place}"
        if not mode & stat.S_ISVTX:
            sentence = f"all users may replace the run's folder {folder}, because they may write {place}"
            return WARN, sentence, f"chmod +t {place}, or another run_dir"
    return None


def problems_of_shell(environment: Mapping[str, str], home: Path) -> list[tuple[str, str]]:
    """Returns what is unsafe in the variables of this shell and in the files that they stand for, with remedies."""
    unread = unread_environment_file(user_environment_files(environment))
    found = [] if unread is None else [unread]
    if environment.get("RAY_ADDRESS") and environment.get("RAY_AUTH_MODE") != "token":
        why = "RAY_ADDRESS names a cluster, and RAY_AUTH_MODE=token is not set, without which Ray lets everybody in"
        found.append((why, "set it where the cluster is started and here"))
    token = Path(environment.get("RAY_AUTH_TOKEN_PATH") or home / RAY_TOKEN)
    with suppress(OSError):
        if token.stat().st_mode & PRIVATE_MODE:
            found.append((f"other users may read Ray's token in {token}", f"chmod 600 {token}"))
    return found
