"""What a host answers the doctor, asked of this machine; and the command's own mistakes."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from launch.cli.app import main
from launch.cluster.doctor.findings import Settings, Severity
from launch.cluster.doctor.preflight import clock_of, preflight
from launch.cluster.ssh import agent
from launch.cluster.ssh.connection import HostConnection, connect_all
from launch.runtime import gpu_probe
from launch.runtime import host_probe as asked
from launch.runtime.hostfile import Host
from launch.runtime.started_modules import INSTALLATION


def ask(**more: Any) -> dict[str, Any]:
    question: dict[str, Any] = {"root": str(INSTALLATION), "packages": ["torch", "megalite", "no-such-package"]}
    return asked.facts(
        **{**question, "python_path": [], "folders": [], "files": [], "caches": [], "extensions": [], **more}
    )


def test_the_facts_are_those_of_this_machine(tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "missing" / "deep"
    there.write_bytes(b"12345")
    found = ask(files=[str(there), str(missing)], folders=[str(missing), "/dev/shm"])
    assert found["executable"] == sys.executable and found["cores"] == len(os.sched_getaffinity(0))
    assert found["versions"]["torch"] and found["versions"]["no-such-package"] is None
    assert found["files"] == {str(there): 5, str(missing): None}
    assert found["memory_bytes"] == asked.host_memory_bytes(), "what its cgroup allows, and not what the machine has"
    assert found["has_bf16_units"] is asked.has_bf16_units()
    free = os.statvfs(tmp_path)
    assert found["folders"][str(missing)]["bytes"] == pytest.approx(free.f_bavail * free.f_frsize, rel=0.05)
    assert found["interfaces"]["lo"] == "127.0.0.1"
    assert json.loads(json.dumps(found)) == found, "it travels as JSON"


def test_a_file_that_differs_changes_the_digest_of_the_code(tmp_path: Path) -> None:
    (tmp_path / "launch" / "doctor").mkdir(parents=True)
    file = tmp_path / "launch" / "doctor" / "x.py"
    file.write_text("a = 1\n")
    (tmp_path / "launch" / "notes.txt").write_text("not code")
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "other.py").write_text("not ours")
    before = asked.code_digest(asked.file_digests(str(tmp_path)))
    (tmp_path / "launch" / "notes.txt").write_text("changed")
    (tmp_path / "runs" / "other.py").write_text("changed")
    assert asked.code_digest(asked.file_digests(str(tmp_path))) == before
    file.write_text("a = 2\n")
    assert asked.code_digest(asked.file_digests(str(tmp_path))) != before
    assert ask(root=str(tmp_path / "nowhere"))["code"] == ""
    assert ask()["code"] == asked.code_digest(asked.file_digests(str(INSTALLATION))) != ""


@pytest.mark.parametrize("depth", ["fused_adam", "py311_cu130/fused_adam"])
def test_a_lock_is_stale_once_its_holder_is_dead(tmp_path: Path, depth: str) -> None:
    """As torch takes it: the file is made, kept open, and removed by nobody when the process is killed.

    Locks of extensions that only other programs build are not looked at: for one `launch` has refused all hosts.
    """
    lock_file = tmp_path / depth / "lock"
    lock_file.parent.mkdir(parents=True)
    take = f"from torch.utils.file_baton import FileBaton as B; B({str(lock_file)!r}).try_acquire()"
    command = [sys.executable, "-c", f"{take} and print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"\n"
        assert (
            asked.compile_locks([str(tmp_path)], []) == asked.compile_locks([str(tmp_path)], ["shm_comm", "adam"]) == []
        )
        (found,) = asked.compile_locks([str(tmp_path)], ["async_io", "fused_adam"])
        assert found["holder"] == holder.pid and found["path"] == str(lock_file)
        holder.kill()
        holder.wait()
        (found,) = asked.compile_locks([str(tmp_path)], ["fused_adam"])
        assert found["holder"] is None and 0 <= found["age_s"] < 60


def test_a_lock_that_leads_elsewhere_or_belongs_to_others_is_seen_and_stays(tmp_path: Path) -> None:
    """Torch waits for it like for any other; but what it names may be a file of this user that nobody may remove."""
    cache, other = tmp_path / "cache", tmp_path / "other program"
    for folder in (cache / "own", cache / "linked", cache / "foreign", other):
        folder.mkdir(parents=True)
    (other / "lock").write_text("precious")
    (cache / "own" / "lock").touch()
    (cache / "linked" / "lock").symlink_to(other / "lock")
    (cache / "folder").symlink_to(other)
    (cache / "foreign" / "lock").touch()
    if os.geteuid() == 0:
        os.chown(cache / "foreign" / "lock", 65534, 65534)
    found = {lock["path"]: lock["is_own"] for lock in asked.compile_locks([str(cache)], ["*"])}
    is_own = {cache / "own": True, cache / "linked": False, other: False, cache / "foreign": os.geteuid() != 0}
    assert found == {str(folder / "lock"): owned for folder, owned in is_own.items()}
    removed = {path for path in found if asked.remove_lock(path)["removed"]}
    assert str(cache / "own" / "lock") in removed and str(cache / "linked" / "lock") not in removed
    assert (cache / "foreign" / "lock").exists() == (os.geteuid() == 0)
    assert not asked.remove_lock(str(cache / "folder" / "lock"))["removed"]


def test_hosts_greet_each_other_and_nobody_else_is_taken_for_them() -> None:
    first, second = asked.listen("one")["port"], asked.listen("another")["port"]
    try:
        targets = {
            name: {"addresses": ["127.0.0.9", "127.0.0.1"], "port": port, "greeting": "one"}
            for name, port in {"right": first, "wrong": second, "deaf": asked.free_port()["port"]}.items()
        }
        found = asked.connect(targets, patience_s=2.0)
    finally:
        asked.stop_listening()
    assert found["right"]["address"] == "127.0.0.9" and 0 < found["right"]["seconds"] < 2
    assert "somebody else answers" in found["wrong"]["problem"]
    assert "Connection refused" in found["deaf"]["problem"]
    time.sleep(0.1)
    assert "problem" in asked.connect({"right": targets["right"]}, patience_s=2.0)["right"], "nobody listens any more"


def test_tokens_are_seen_and_leave_no_trace(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "new"
    wrote = asked.write_token(str(folder), "token", "node1")
    assert wrote == {"made": [str(tmp_path / "runs"), str(folder)], "problem": None}
    texts = {"token": "node1", "other": "node2"}
    assert asked.read_tokens(str(folder), texts, wait_s=0.0) == {"found": ["token"]}
    assert asked.read_tokens(str(folder), {"token": "node2"}, wait_s=0.0) == {"found": []}, "what it holds counts"
    asked.remove_token(str(folder), "token", wrote["made"])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    assert "Not a directory" in asked.write_token(str(tmp_path / "file" / "run"), "token", "x")["problem"]


def test_what_hangs_does_not_hang_the_doctor() -> None:
    began = time.monotonic()
    assert asked.within(0.1, lambda: time.sleep(5), "slow") == "slow"
    assert asked.within(0.1, Path("/no/such/file").stat, "refused") == "refused"
    assert time.monotonic() - began < 2


def test_a_program_has_its_limit() -> None:
    began = time.monotonic()
    command = [sys.executable, "-c", "import time; print('hi', flush=True); time.sleep(60)"]
    late = asked.run_program(command, {}, "/", 1.0)
    assert late == {"code": -9, "said": "hi\n"} and time.monotonic() - began < 10


@pytest.mark.parametrize("sent", [asked, gpu_probe])
def test_what_is_sent_to_hosts_needs_an_old_python_alone(sent: ModuleType) -> None:
    """Standard library, the grammar of 3.8, and no name that what is sent with it has as well."""
    tree = ast.parse(inspect.getsource(sent), feature_version=(3, 8))
    imported = {
        name.split(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
    for other in {asked, gpu_probe, agent} - {sent}:
        own, theirs = (
            {name for name, value in vars(one).items() if not name.startswith("__") and not inspect.ismodule(value)}
            for one in (sent, other)
        )
        assert not {name for name in own & theirs if vars(sent)[name] is not vars(other)[name]}


def test_a_host_that_is_lost_while_it_is_asked_is_a_finding_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shells of this machine instead of ssh; node2's has heard enough when it is to look for tokens."""
    ssh = tmp_path / "ssh"
    ssh.write_text(
        "#!/bin/sh\n"
        "for command; do host=$name name=$command; done\n"
        'if test "$host" != node2; then exec sh -c "$command"; fi\n'
        'sed -u "/.action.: .read_tokens/Q" | sh -c "$command"\n'
    )
    ssh.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    hosts = tuple(Host(name, (0,)) for name in ("node1", "node2", "node3"))
    run = tmp_path / "runs" / "new"
    connections, errors = connect_all([host.name for host in hosts])
    try:
        assert not errors
        report = preflight(connections, errors, hosts, Settings(run))
        assert connections["node1"].ask("ping") == {}, "whoever asked goes on using the connections"
    finally:
        for connection in connections.values():
            connection.close()
    lost = [finding for finding in report.findings if finding.check == "reachable" and finding.verdict == Severity.FAIL]
    assert [finding.hosts for finding in lost] == [("node2",)]
    first = next(failure for failure in report.failures if "node3" in failure.hosts)
    assert first.check == "machines", "node3 is node1, which all of them are"
    assert set(report.addresses) == {"node1", "node3"} and "node1" not in report.failed_hosts
    assert not run.parent.exists()


def test_how_far_a_clock_is_ahead() -> None:
    class Ahead(HostConnection):
        def __init__(self) -> None:
            self.delays_s = [0.3, 0.0]  # the answer that comes sooner tells it better

        def ask(self, action: str, *, timeout_s: float = 10.0, **arguments: object) -> dict[str, Any]:
            theirs = time.time() + 100.0
            time.sleep(self.delays_s.pop(0))
            return {"time": theirs}

    ahead, give_or_take = clock_of(Ahead())
    assert ahead == pytest.approx(100.0, abs=0.1) and give_or_take < 0.1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--hostfile", "missing"], "hostfile missing does not exist"),
        (["--hostfile", "hosts", "--include", "node3"], "host 'node3' is not in the hostfile"),
        (["--hostfile", "hosts", "--run-dir", "run", "tiny.yaml"], "drop one of them"),
        (["--hostfile", "hosts", "missing.yaml"], "missing.yaml"),
        (["missing.yaml"], "missing.yaml"),
        (["--include", "node1"], "--include is about the hosts of a hostfile: name it with --hostfile"),
        (["--bandwidth"], "--bandwidth is about the hosts of a hostfile: name it with --hostfile"),
    ],
)
def test_mistakes_are_one_sentence_before_any_host_is_asked(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))  # no ssh
    Path("hosts").write_text("node1 slots=2\nnode2 slots=2\n")
    monkeypatch.setattr(sys, "argv", ["megalite", "doctor", *words])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
