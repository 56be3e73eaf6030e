"""What the doctor makes of hand-written answers. What hosts answer: test_host_probe.py, tests/cluster."""

from __future__ import annotations

import copy
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from launch.cluster.doctor.bandwidth_rank import phases
from launch.cluster.doctor.connectivity_checks import addresses, faulty_hosts, shared_findings
from launch.cluster.doctor.findings import HERE, Answers, Finding, Settings, Severity, fold, usual
from launch.cluster.doctor.host_checks import on_gpus, own_findings
from launch.cluster.doctor.link_bandwidth import evaluate
from launch.cluster.doctor.preflight import PreflightReport
from launch.runtime.hostfile import Host
from launch.trainer.start.run_config import load_run_config
from megalite.config import Config
from tests.conftest import write_config
from tests.helpers.commands import command_line

Change = Callable[[Answers], object]
GIB = 1 << 30
RUN = Path("/shared/run")
GOOD: dict[str, Any] = {
    "python": "3.11.7",
    "executable": "/venv/bin/python",
    "cores": 8,
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8", "numpy": "2.4.6"},
    "code": "c0de",
    "infiniband": [],
    "limits": {"nofile": 65536, "memlock": None},
    "folders": {path: {"bytes": 100 * GIB, "files": 1000} for path in ("/dev/shm", "/tmp", str(RUN))},
    "files": {"/data/text.bin": 4000},
    "locks": [],
    "gpus": ["NVIDIA H200"] * 8,
    "gpu_problem": None,
    "uid": 1000,
    "umask": 0o022,
}


def answers_of(count: int, slots: int = 8) -> Answers:
    """Of `count` hosts with which all is well."""
    names = [f"node{number}" for number in range(1, count + 1)]
    ip = {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
    settings = Settings(RUN, (Path("/data/text.bin"),), ("async_io",), on_cpu=False)
    answers = Answers(tuple(Host(name, tuple(range(slots))) for name in names), settings, "/code", copy.deepcopy(GOOD))
    for name in names:
        own = {"addresses": [ip[name]], "loopback": [], "foreign": []}
        more = {"hostname": name, "own_name": own, "interfaces": {"lo": "127.0.0.1", "eth0": ip[name]}}
        answers.facts[name] = copy.deepcopy(GOOD) | more | {"ssh_address": ip[name]}
        answers.clocks[name] = (0.01, 0.001)
        answers.links[name] = {
            other: {"address": ip[other], "source": ip[name], "seconds": 1e-4} for other in names if other != name
        }
    for name in (*names, HERE):
        answers.token_problems[name] = None
        answers.tokens_seen[name] = {*names, HERE}
    return answers


def findings_of(answers: Answers) -> list[Finding]:
    return shared_findings(answers) + own_findings(answers)


def report_of(answers: Answers) -> PreflightReport:
    names = tuple(host.name for host in answers.hosts)
    return PreflightReport(names, tuple(findings_of(answers)), addresses(answers), answers.facts, "cuda", 0.5)


def fact(name: str, host: str = "node2", **values: Any) -> Change:
    """One fact of a host, or keys of one that is a dict, changed."""

    def change(answers: Answers) -> None:
        facts: Any = answers.facts[host]
        if "to" in values:
            facts[name] = values["to"]
        else:
            facts[name] = facts[name] | values

    return change


def cut(*pairs: tuple[str, str]) -> Change:
    def change(answers: Answers) -> None:
        for one, other in pairs:
            answers.links[one][other] = {"problem": "10.0.0.9: no answer"}

    return change


def separated(*hosts: str) -> Change:
    """The run folder of each of these is another one than that of the rest."""

    def change(answers: Answers) -> None:
        for name, seen in answers.tokens_seen.items():
            answers.tokens_seen[name] = {name} if name in hosts else seen - set(hosts)

    return change


def unwritable(answers: Answers) -> None:
    answers.token_problems["node2"] = "Permission denied"
    answers.tokens_seen = {name: seen - {"node2"} for name, seen in answers.tokens_seen.items()}


def unreachable(answers: Answers) -> None:
    del answers.facts["node2"]
    answers.errors["node2"] = "host node2 cannot be reached (No route to host): look whether it is up"


def twice(answers: Answers) -> None:
    answers.facts["node2"] |= {"hostname": "node1", "interfaces": answers.facts["node1"]["interfaces"]}


def pinned(answers: Answers) -> None:
    answers.facts["node2"] |= {"infiniband": ["mlx5_0"], "limits": {"nofile": -1, "memlock": 65536}}


def lock(holder: int | None, age_s: float = 300.0) -> dict[str, Any]:
    return {"path": "/cache/py311/fused_adam/lock", "age_s": age_s, "holder": holder}


FAILURES: list[tuple[str, Change, str, str]] = [  # check, what is wrong with node2 of four, words found, remedy's words
    ("reachable", unreachable, "cannot be reached (No route to host): look whether it is up", ""),
    ("machines", twice, "is the same machine as node1", "name each machine once"),
    ("network", cut(("node2", "node3"), ("node2", "node4")), "to node[3-4] (10.0.0.9: no answer)", "firewall"),
    ("network", cut(("node1", "node2"), ("node2", "node1")), "to node1 and back", "firewall"),
    ("network", cut(("node1", "node2")), "from node1", "firewall"),
    ("run folder", separated("node2"), "does not see in /shared/run what", "mount the same storage at /shared/run"),
    ("run folder", unwritable, "cannot write to /shared/run: Permission denied", "mount"),
    ("data", fact("files", **{"/data/text.bin": None}), "/data/text.bin is not there", "shared storage"),
    ("data", fact("files", **{"/data/text.bin": 3999}), "has 3,999 bytes, and 4,000 on the others", "copy it again"),
    ("python", fact("python", to="3.10.7"), "Python 3.10.7, and 3.11.7 on the others", "alike"),
    ("packages", fact("versions", torch="2.12.0"), "torch 2.12.0, not 2.13.0", "pip install torch==2.13.0"),
    ("packages", fact("versions", numpy=None), "numpy is not installed, not 2.4.6", "pip install numpy==2.4.6"),
    ("code", fact("code", to="0ld"), "other code than elsewhere: launch/x.py, b.py, c.py and 1 more", "same commit"),
    ("code", fact("code", to=""), "megalite is not at /code", "same commit"),
    ("code", fact("code", to=None), "the code at /code cannot be read", "same commit"),
    ("devices", fact("gpus", to=["NVIDIA H200"] * 7), "7 GPUs, and the hostfile's slots need 8", "correct its slots"),
    ("devices", fact("gpu_problem", to="NVML: mismatch"), "NVML: mismatch", "nvidia-smi"),
    ("room", fact("folders", **{"/tmp": {"bytes": 4096, "files": 9}}), "nothing is free in /tmp", "free some"),
    ("room", fact("folders", **{str(RUN): {"bytes": GIB, "files": 0}}), "nothing is free in /shared/run", "free some"),
    ("room", fact("folders", **{str(RUN): None}), "/shared/run does not answer", "look at its file system"),
    ("compile locks", fact("locks", to=[lock(None)]), "compiler left 5 min ago", "rm /cache/py311/fused_adam/lock"),
]
WARNINGS: list[tuple[str, Change, str]] = [
    ("python", fact("python", to="3.11.9"), "Python 3.11.9"),
    ("devices", fact("gpus", to=["NVIDIA H100"] * 8), "NVIDIA H100, and NVIDIA H200 on the others"),
    ("own name", fact("own_name", addresses=["127.0.1.1"], loopback=["127.0.1.1"]), "leads to loopback (127.0.1.1)"),
    ("own name", fact("own_name", addresses=[]), "does not resolve"),
    ("own name", fact("own_name", addresses=["192.0.2.9"], foreign=["192.0.2.9"]), "leads to another host"),
    ("room", fact("folders", **{"/dev/shm": {"bytes": 64 << 20, "files": 9}}), "only 64 MiB free in /dev/shm"),
    ("clock", lambda answers: answers.clocks.update(node2=(-3600.0, 0.1)), "its clock is 3600.0 s behind"),
    ("compile locks", fact("locks", to=[lock(77)]), "is being compiled"),
    ("limits", fact("limits", nofile=256), "may open 256 files, and 32 ranks can need 768"),
    ("limits", pinned, "may pin 0.0625 MiB, too little for InfiniBand"),
]


def test_sixty_four_hosts_with_which_all_is_well_are_one_line_a_check() -> None:
    report = report_of(answers_of(64))
    assert report.passed and not report.failed_hosts
    assert {finding.verdict for finding in report.findings} == {Severity.OK}
    assert all(len(finding.hosts) == 64 for finding in report.findings)
    assert len(report.table().rows) == len(report.findings) <= 16
    assert "64 hosts can train together" in report.conclusion()


@pytest.mark.parametrize(("check", "change", "words", "remedy"), FAILURES)
def test_what_fails_on_one_host_names_it_alone_and_a_remedy(
    check: str, change: Change, words: str, remedy: str
) -> None:
    answers = answers_of(4)
    answers.changed_files["node2"] = ["launch/x.py", "b.py", "c.py", "d.py"]
    change(answers)
    report = report_of(answers)
    (failure,) = report.failures
    assert (failure.check, failure.hosts) == (check, ("node2",))
    assert words in failure.sentence and remedy in failure.remedy and bool(failure.remedy) == bool(remedy)
    assert report.failed_hosts == ["node2"] and report.failures == [failure]
    assert "1 of 4 hosts can NOT train: node2; without it, node[1,3-4] could" in report.conclusion()


@pytest.mark.parametrize(("check", "change", "words"), WARNINGS)
def test_what_a_run_survives_is_a_warning(check: str, change: Change, words: str) -> None:
    answers = answers_of(4)
    change(answers)
    report = report_of(answers)
    (warning,) = [finding for finding in report.findings if finding.verdict != Severity.OK]
    assert (warning.check, warning.hosts, warning.verdict) == (check, ("node2",), Severity.WARN)
    assert words in warning.sentence and warning.remedy
    assert report.passed and "can train together, 1 warning" in report.conclusion()


def test_of_two_hosts_that_differ_this_machine_says_which_is_right() -> None:
    answers = answers_of(2)
    answers.facts["node1"]["code"] = "0ld"
    answers.facts["node1"]["versions"]["torch"] = "2.12.0"
    separated("node1")(answers)
    assert set(report_of(answers).failed_hosts) == {"node1"}
    assert {one.check for one in report_of(answers).failures} == {"code", "packages", "run folder"}


def test_this_machine_may_be_the_one_that_differs() -> None:
    answers = answers_of(2)
    separated(HERE)(answers)
    answers.here = {**answers.here, "code": "mine", "versions": {**answers.here["versions"], "torch": "2.12.0"}}
    report = report_of(answers)
    (failure,) = report.failures
    assert not report.failed_hosts and failure.check == "run folder" and HERE in failure.sentence
    warned = {one.check for one in report.findings if one.verdict == Severity.WARN}
    assert warned == {"code", "packages"}
    assert "2 hosts can NOT train together as it is, 2 warnings" in report.conclusion()


def test_a_folder_shared_by_none_is_everybodys_fault() -> None:
    answers = answers_of(2)
    separated("node1", "node2")(answers)
    assert set(report_of(answers).failed_hosts) == {"node1", "node2"}


def test_without_a_run_folder_the_doctor_says_what_it_did_not_look_at() -> None:
    answers = answers_of(2)
    answers.settings = replace(answers.settings, run_dir=None)
    (finding,) = [one for one in findings_of(answers) if one.check == "run folder"]
    assert finding.verdict == Severity.WARN and "--run-dir" in finding.remedy


def test_a_lock_on_shared_storage_may_be_held_on_another_host() -> None:
    answers = answers_of(2)
    answers.facts["node1"]["locks"], answers.facts["node2"]["locks"] = [lock(None, 5.0)], [lock(4711, 5.2)]
    (finding,) = [one for one in findings_of(answers) if one.check == "compile locks"]
    assert finding.verdict == Severity.WARN and finding.hosts == ("node1", "node2")


@pytest.mark.parametrize(
    ("options", "extensions"),
    [
        ({}, ()),
        ({"zero_optimization": {"overlap_comm": True, "offload_param": {"device": "cpu"}}}, ()),
        ({"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}, ("async_io", "gds")),
        ({"zero_optimization": {"zero_quantized_weights": True, "zero_quantized_gradients": False}}, ("quantizer",)),
        (
            {"zero_optimization": {"zero_quantized_weights": False, "offload_param": {"device": "nvme"}}},
            ("async_io", "gds"),
        ),
    ],
)
def test_locks_are_looked_at_that_ranks_wait_for(
    options: dict[str, Any], extensions: tuple[str, ...], tiny: dict[str, Any]
) -> None:
    """What DeepSpeed compiles in ranks with its own options; without them ranks compile no extension of torch."""
    settings = Settings.of(Config.model_validate(tiny).model_copy(update={"deepspeed": options}))
    assert settings.extensions == extensions
    answers = answers_of(2)
    answers.settings = replace(answers.settings, extensions=settings.extensions)
    assert bool([one for one in findings_of(answers) if one.check == "compile locks"]) == bool(extensions)


def test_the_fault_is_of_whom_fewest_reach() -> None:
    order = ["node1", "node2", "node3", "node4"]
    assert faulty_hosts(order, []) == []
    assert faulty_hosts(order, [("node1", "node2")]) == ["node2"], (
        "of two, the later one: the run can go on with the first"
    )
    assert faulty_hosts(order, [(one, "node1") for one in order[1:]]) == ["node1"], "the master itself may be cut off"
    assert faulty_hosts(order, [("node1", "node3"), ("node2", "node3"), ("node4", "node1")]) == ["node3", "node4"]


def test_hosts_are_reached_where_most_others_reach_them() -> None:
    answers = answers_of(3)
    answers.facts["node1"]["ssh_address"] = "192.168.7.1"  # of a network that only this machine is on
    assert addresses(answers) == {"node1": "10.0.0.1", "node2": "10.0.0.2", "node3": "10.0.0.3"}
    assert addresses(answers_of(1)) == {"node1": "10.0.0.1"}, "nobody else is there to tell"


def test_devices_are_looked_at_where_ranks_use_them() -> None:
    answers = answers_of(2)
    answers.hosts = (Host("node1", (6, 7)), Host("node2", (0, 9)))
    (failure,) = report_of(answers).failures
    assert failure.hosts == ("node2",) and "slots need 10" in failure.sentence
    answers.settings = replace(answers.settings, on_cpu=True)
    assert not on_gpus(answers) and report_of(answers).passed
    answers = answers_of(2, slots=9)
    for facts in answers.facts.values():
        facts.update(gpus=[], versions=facts["versions"] | {"torch": "2.13.0+cpu"})
    answers.here = {**answers.here, "versions": answers.facts["node1"]["versions"]}
    (warning,) = [one for one in findings_of(answers) if one.verdict != Severity.OK]
    assert warning.check == "devices" and warning.sentence == "9 ranks share 8 cores"


def test_a_layout_that_does_not_fit_all_slots_is_found_before_a_rank_is_started(
    tiny: dict[str, Any], tmp_path: Path
) -> None:
    tiny["parallel"] = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    config = load_run_config(write_config(tmp_path / "tiny.yaml", tiny))
    for slots, verdict in ((2, Severity.OK), (3, Severity.FAIL)):
        answers = answers_of(2, slots)
        answers.settings = replace(answers.settings, layout_of=config)
        (finding,) = [one for one in findings_of(answers) if one.check == "layout"]
        assert finding.verdict == verdict, finding


def test_the_most_common_value_is_right() -> None:
    assert usual({"a": 1, "b": 2, "c": 2}) == 2
    assert usual({"a": 1, "b": 2}) == 1 and usual({"a": 1, "b": 2}, here=2) == 2
    assert usual({"a": None, "b": None, "c": "there"}) == "there", "what is missing is nobody's standard"
    assert usual({"a": None}, here="mine") == "mine"


def test_names_are_folded() -> None:
    assert fold(["node1", "node2", "node3", "node5", "login"]) == "node[1-3,5], login"
    assert fold(["gpu-08", "gpu-09", "gpu-10", "gpu-011"]) == "gpu-[08-10,011]"
    assert fold(["n9", "n10"]) == "n[9-10]"
    assert fold(["10.0.0.1", "10.0.0.2"]) == "10.0.0.[1-2]"
    assert fold(["n1.rack2.local", "n2.rack2.local", "n3.rack4.local"]) == "n[1-2].rack2.local, n3.rack4.local"
    assert fold(["node7"]) == "node7" and fold([]) == ""


def test_a_report_is_read_by_programs_too() -> None:
    answers = answers_of(2)
    unreachable(answers)
    told = json.loads(json.dumps(report_of(answers).as_json()))
    assert told["passed"] is False and told["failed_hosts"] == ["node2"]
    (failure,) = [finding for finding in told["findings"] if finding["verdict"] == "FAIL"]
    assert failure["hosts"] == ["node2"] and failure["check"] == "reachable"


def test_a_link_slower_than_half_the_others_is_named() -> None:
    whole = {"latency_s": 1e-4, "bytes": 8e6, "seconds": 0.02}
    link = {"latency_s": 1e-4, "bytes": 16e6, "seconds": 0.01 + 5e-5}
    fine = {"backend": "gloo", "all_reduce": whole, "link": link}
    results = {"node1": fine, "node2": {**fine, "link": {**link, "seconds": 0.021}}, "node3": fine}
    links = evaluate(("node1", "node2", "node3"), results, 1.0)
    assert [(link.source, link.target) for link in links.links if link.is_outlier] == [("node2", "node3")]
    assert links.links[0].gigabytes_per_s == pytest.approx(1.6)
    assert links.all_reduce_gigabytes_per_s == pytest.approx(4 / 3 * 0.4)


@pytest.mark.parametrize("size", range(2, 10))
def test_each_link_of_the_ring_is_measured_once_and_no_host_has_two_at_a_time(size: int) -> None:
    measured = [link for phase in phases(size) for link in phase]
    assert sorted(measured) == [(rank, (rank + 1) % size) for rank in range(size)]
    for phase in phases(size):
        busy = [rank for link in phase for rank in link]
        assert len(busy) == len(set(busy))
    assert len(phases(size)) <= 3, "64 hosts take as long as four"


def test_a_table_fits_a_narrow_terminal() -> None:
    from rich.console import Console

    answers = answers_of(4)
    fact("versions", torch="2.12.0")(answers)
    for width in (80, 160):
        console = Console(width=width, record=True, file=io.StringIO())
        report_of(answers).table().print(console)
        assert max(map(len, console.export_text().splitlines())) <= width


def test_without_a_hostfile_this_machine_is_looked_at(tiny: dict[str, Any], tmp_path: Path) -> None:
    """What a newcomer asks first; no ssh and no sshd is needed, and nothing is left behind."""
    path = str(write_config(tmp_path / "tiny.yaml", tiny))
    of_cpu = {"DS_ACCELERATOR": "cpu", "PATH": str(tmp_path)}
    done = command_line("doctor", path, "--json", env=of_cpu)
    told = json.loads(done.stdout)
    found = {one["check"]: one["verdict"] for one in told["findings"]}
    assert done.returncode == 0 and told["passed"] and told["device"] == "cpu", told
    assert {"layout", "run folder", "data", "python", "packages", "code", "devices", "room"} <= found.keys()
    assert (
        not found.keys() & {"reachable", "clock", "network", "machines"}
        and not Config.model_validate(tiny).run_dir.exists()
    )
    alone = command_line("doctor", env=of_cpu)
    assert alone.returncode == 0 and "1 host can train" in alone.stdout and "hostfile" not in alone.stdout
    missing = command_line("doctor", path, "data.path=/nowhere/text", env=of_cpu)
    assert missing.returncode == 1 and "megalite prepare" in missing.stdout
