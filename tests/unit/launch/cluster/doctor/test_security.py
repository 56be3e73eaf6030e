"""The doctor's line on security, with real files, modes and owners."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from launch.cluster.doctor.findings import Severity
from launch.cluster.doctor.security import problem_of_folder, problems_of_shell, security_findings
from launch.runtime import host_probe
from launch.runtime.forwarded_environment import user_environment_files
from tests.unit.launch.cluster.doctor.test_doctor import answers_of, fact


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home and a current folder where all is well."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_hosts_with_an_open_mask_are_warned_about_and_root_is_told(home: Path) -> None:
    answers = answers_of(3)
    (fine,) = security_findings(answers, {})
    assert (fine.check, fine.verdict, fine.hosts) == ("security", Severity.OK, ("node1", "node2", "node3"))
    fact("umask", to=0)(answers)
    fact("umask", host="node3", to=0o020)(answers)
    fact("uid", host="node1", to=0)(answers)
    found = {one.hosts: one for one in security_findings(answers, {})}
    assert found["node2",].verdict == Severity.WARN and "umask 0000" in found["node2",].sentence
    assert found["node3",].verdict == Severity.WARN and "umask 0020" in found["node3",].sentence
    assert found["node1",].verdict == Severity.OK and "root" in found["node1",].sentence
    assert all(not one.remedy for one in found.values() if one.verdict == Severity.OK), "nothing is to be done there"


def test_the_mask_is_read_and_stays_as_it_is() -> None:
    before = os.umask(0o027)
    try:
        assert host_probe.umask() == 0o027 == os.umask(0o027)
    finally:
        os.umask(before)


@pytest.mark.parametrize(
    ("run", "parent", "verdict", "told"),
    [
        (0o755, 0o755, None, ""),
        (0o770, 0o755, None, ""),
        (0o755, 0o1777, None, ""),
        (None, 0o1777, None, ""),
        (0o777, 0o755, Severity.FAIL, "may write the run's folder"),
        (0o1777, 0o755, Severity.WARN, "may write the run's folder"),
        (0o700, 0o777, Severity.WARN, "may replace the run's folder"),
        (None, 0o777, Severity.WARN, "may replace the run's folder"),
    ],
)
def test_a_run_folder_that_others_can_change(
    tmp_path: Path, run: int | None, parent: int, verdict: Severity | None, told: str
) -> None:
    """A folder in a world-writable one without a sticky bit can be renamed by anybody, whatever its own mode."""
    folder = tmp_path / "shared" / "runs" / "mine"
    folder.parent.mkdir(parents=True)
    if run is not None:
        folder.mkdir()
        folder.chmod(run)
    folder.parent.parent.chmod(parent)
    found = problem_of_folder(folder)
    assert (found and found[0]) == verdict
    if found is not None:
        assert told in found[1] and str(folder) in found[1] and "chmod" in found[2]


def token(mode: int) -> Callable[[Path], object]:
    def write(home: Path) -> None:
        (home / ".ray").mkdir()
        (home / ".ray" / "auth_token").write_text("a" * 64)
        (home / ".ray" / "auth_token").chmod(mode)

    return write


@pytest.mark.parametrize(
    ("prepare", "variables", "told"),
    [
        (lambda home: None, {}, []),
        (token(0o600), {"RAY_ADDRESS": "head:6379", "RAY_AUTH_MODE": "token"}, []),
        (token(0o644), {}, ["other users may read Ray's token"]),
        (lambda home: None, {"RAY_ADDRESS": "head:6379"}, ["RAY_AUTH_MODE=token is not set"]),
        (lambda home: None, {"RAY_ADDRESS": "auto", "RAY_AUTH_MODE": "disabled"}, ["RAY_AUTH_MODE=token is not set"]),
    ],
    ids=["nothing", "safe", "token", "cluster", "disabled"],
)
def test_ray_of_this_shell(
    home: Path, prepare: Callable[[Path], object], variables: dict[str, str], told: list[str]
) -> None:
    """Ray writes its token with the umask, so for all users of the machine."""
    prepare(home)
    found = problems_of_shell(variables, home)
    assert len(found) == len(told) and all(words in sentence for words, (sentence, _) in zip(told, found, strict=True))


def test_a_deepspeed_env_that_is_not_read_is_told(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = home / "downloaded_model"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / ".deepspeed_env").write_text("LD_PRELOAD=evil.so\n")
    is_read = folder / ".deepspeed_env" in user_environment_files({})
    assert len(problems_of_shell({}, home)) == (not is_read)
    assert not problems_of_shell({"DS_ENV_FILE": str(folder / ".deepspeed_env")}, home), "named, so it is read"
