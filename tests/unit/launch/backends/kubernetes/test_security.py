"""What the pods of `megalite k8s` may do: the rules of Kubernetes' Pod Security levels, each written out, and who may
reach them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import write_config
from tests.helpers.k8s_command_line import KINDS, Run, command, from_yaml

Pod = dict[str, Any]
BASELINE_CAPABILITIES = {
    *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD", "NET_BIND_SERVICE", "SETFCAP"),
    *("SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
}
RESTRICTED_VOLUMES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret")
}
SAFE_SYSCTLS = {"net.ipv4.ip_unprivileged_port_start", "net.ipv4.ping_group_range", "net.ipv4.tcp_keepalive_time"}


@pytest.fixture
def k8s(tiny: dict[str, Any], tmp_path: Path) -> Run:
    return command(write_config(tmp_path / "config.yaml", tiny))


def containers(pod: Pod) -> list[dict[str, Any]]:
    return [each for field in ("containers", "initContainers", "ephemeralContainers") for each in pod.get(field, [])]


def contexts(pod: Pod) -> list[dict[str, Any]]:
    """The security contexts of the pod and its containers."""
    return [pod.get("securityContext", {}), *(each.get("securityContext", {}) for each in containers(pod))]


def of_containers(pod: Pod) -> list[dict[str, Any]]:
    return contexts(pod)[1:]


def added(pod: Pod) -> set[str]:
    return {each for context in of_containers(pod) for each in context.get("capabilities", {}).get("add", [])}


def effective(pod: Pod, field: str) -> list[Any]:
    """The value of each container, which the pod's stands in for."""
    return [context.get(field, contexts(pod)[0].get(field)) for context in of_containers(pod)]


# https://kubernetes.io/docs/concepts/security/pod-security-standards/: rule -> whether a pod keeps it, and a change of
# the pod and the security context of its container that breaks it, so that no rule is one that everything keeps
Rule = tuple[Callable[[Pod], bool], Callable[[Pod, dict[str, Any]], Any]]
BASELINE: dict[str, Rule] = {
    "no host processes": (
        lambda pod: not any(each.get("windowsOptions", {}).get("hostProcess") for each in contexts(pod)),
        lambda pod, _: pod["securityContext"].update(windowsOptions={"hostProcess": True}),
    ),
    "no namespaces of the host": (
        lambda pod: not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")),
        lambda pod, _: pod.update(hostNetwork=True),
    ),
    "no privileged containers": (
        lambda pod: not any(each.get("privileged") for each in of_containers(pod)),
        lambda _, context: context.update(privileged=True),
    ),
    "only harmless capabilities": (
        lambda pod: added(pod) <= BASELINE_CAPABILITIES,
        lambda _, context: context["capabilities"].update(add=["IPC_LOCK"]),
    ),
    "no folders of the host": (
        lambda pod: not any("hostPath" in volume for volume in pod["volumes"]),
        lambda pod, _: pod["volumes"].append({"name": "root", "hostPath": {"path": "/"}}),
    ),
    "no ports of the host": (
        lambda pod: not any(port.get("hostPort") for each in containers(pod) for port in each.get("ports", [])),
        lambda pod, _: pod["containers"][0].update(ports=[{"containerPort": 1, "hostPort": 1}]),
    ),
    "no probes of other hosts": (
        lambda pod: "host" not in str([each.get(name) for each in containers(pod) for name in ("livenessProbe",)]),
        lambda pod, _: pod["containers"][0].update(livenessProbe={"tcpSocket": {"host": "other", "port": 1}}),
    ),
    "AppArmor stays on": (
        lambda pod: not any(each.get("appArmorProfile", {}).get("type") == "Unconfined" for each in contexts(pod)),
        lambda _, context: context.update(appArmorProfile={"type": "Unconfined"}),
    ),
    "no other SELinux user or role": (
        lambda pod: not any({"user", "role"} & each.get("seLinuxOptions", {}).keys() for each in contexts(pod)),
        lambda _, context: context.update(seLinuxOptions={"user": "system_u"}),
    ),
    "/proc stays masked": (
        lambda pod: {each.get("procMount", "Default") for each in of_containers(pod)} == {"Default"},
        lambda _, context: context.update(procMount="Unmasked"),
    ),
    "seccomp stays on": (
        lambda pod: not any(each.get("seccompProfile", {}).get("type") == "Unconfined" for each in contexts(pod)),
        lambda _, context: context.update(seccompProfile={"type": "Unconfined"}),
    ),
    "only safe kernel parameters": (
        lambda pod: {each["name"] for each in contexts(pod)[0].get("sysctls", [])} <= SAFE_SYSCTLS,
        lambda pod, _: pod["securityContext"].update(sysctls=[{"name": "kernel.shm_rmid_forced", "value": "0"}]),
    ),
}
RESTRICTED: dict[str, Rule] = {
    "only volumes of these kinds": (
        lambda pod: all(volume.keys() - {"name"} <= RESTRICTED_VOLUMES for volume in pod["volumes"]),
        lambda pod, _: pod["volumes"].append({"name": "share", "nfs": {"server": "a", "path": "/"}}),
    ),
    "no privilege escalation": (
        lambda pod: all(each.get("allowPrivilegeEscalation") is False for each in of_containers(pod)),
        lambda _, context: context.pop("allowPrivilegeEscalation"),
    ),
    "not root": (
        lambda pod: all(value is True for value in effective(pod, "runAsNonRoot")),
        lambda pod, _: pod["securityContext"].pop("runAsNonRoot"),
    ),
    "not user 0": (
        lambda pod: all(each.get("runAsUser") != 0 for each in contexts(pod)),
        lambda pod, _: pod["securityContext"].update(runAsUser=0),
    ),
    "a seccomp profile": (
        lambda pod: all(
            (value or {}).get("type") in ("RuntimeDefault", "Localhost") for value in effective(pod, "seccompProfile")
        ),
        lambda pod, _: pod["securityContext"].pop("seccompProfile"),
    ),
    "all capabilities dropped": (
        lambda pod: all("ALL" in each.get("capabilities", {}).get("drop", []) for each in of_containers(pod)),
        lambda _, context: context["capabilities"].pop("drop"),
    ),
    "no capability added but to bind ports": (
        lambda pod: added(pod) <= {"NET_BIND_SERVICE"},
        lambda _, context: context["capabilities"].update(add=["CHOWN"]),
    ),
}
RULES = BASELINE | RESTRICTED


def templates(value: Any) -> Iterator[dict[str, Any]]:
    """All pod templates inside an object."""
    if isinstance(value, dict) and "containers" in value.get("spec", {}):
        yield value
    elif isinstance(value, dict | list):
        for inside in value.values() if isinstance(value, dict) else value:
            yield from templates(inside)


def pods_of(k8s: Run, kind: str, *more: str) -> list[Pod]:
    pods = [template["spec"] for template in templates(from_yaml(k8s("--kind", kind, *more)))]
    assert len(pods) == (2 if kind == "pytorchjob" else 1)
    return pods


def broken(pod: Pod) -> set[str]:
    return {name for name, (is_kept, _) in RULES.items() if not is_kept(pod)}


def test_pods_keep_each_rule_of_the_restricted_level(k8s: Run) -> None:
    """The changed pods show that each rule can be broken, and that this test would see it."""
    for kind, data in product(KINDS, ([], ["--data-claim", "corpora"])):
        for pod in pods_of(k8s, kind, *data, "--service-account", "trainer"):
            assert broken(pod) == set(), kind
            assert pod["automountServiceAccountToken"] is False, "nothing in a pod asks the API server"
            for name, (_, change) in RULES.items():
                changed = copy.deepcopy(pod)
                change(changed, changed["containers"][0]["securityContext"])
                assert name in broken(changed)


@pytest.mark.parametrize(
    ("more", "told", "rules"),
    [
        (["--run-as-user", "0"], "", {"not root", "not user 0", "no capability added but to bind ports"}),
        (
            ["--rdma", "rdma/hca"],
            "restricted and baseline refuse that",
            {"not root", "only harmless capabilities", "no capability added but to bind ports"},
        ),
        (["--rdma", "rdma/hca", "--run-as-user", "7:8"], "user 7 can pin memory for --rdma only on nodes", set()),
    ],
    ids=["root", "rdma", "rdma without root"],
)
def test_what_root_and_pinned_memory_cost(k8s: Run, more: list[str], told: str, rules: set[str]) -> None:
    """Capabilities of a container have no effect for users other than root, so IPC_LOCK is added for root alone."""
    for kind in KINDS:
        for pod in pods_of(k8s, kind, *more):
            assert broken(pod) == rules
            assert ("IPC_LOCK" in added(pod)) == (more == ["--rdma", "rdma/hca"])
            assert ("fsGroup" in pod["securityContext"]) == (not rules)
    assert told in k8s("--json", *more)


def test_a_user_other_than_root_has_a_home_and_can_write_claims(k8s: Run) -> None:
    """/root, or the / of a user that the image does not know, takes no caches of compilers and downloads."""
    for kind in KINDS:
        assert "--shared-run-dir" in k8s("--kind", kind), "Kubernetes lets the group of the pods write a claim"
        for pod in pods_of(k8s, kind, "--run-as-user", "7:8"):
            ids = {name: pod["securityContext"][name] for name in ("runAsUser", "runAsGroup", "fsGroup")}
            assert ids == {"runAsUser": 7, "runAsGroup": 8, "fsGroup": 8}
            (home,) = (each for each in pod["containers"][0]["volumeMounts"] if each["name"] == "home")
            assert {"name": "home", "emptyDir": {}} in pod["volumes"] and home["mountPath"] == "/var/lib/megalite"
    environment = {each["name"]: each for each in from_yaml(k8s())[-1]["spec"]["trainer"]["env"]}
    assert environment["HOME"] == {"name": "HOME", "value": "/var/lib/megalite"}
    as_root = k8s("--run-as-user", "0", "--json")
    assert '"HOME"' not in as_root, "root keeps that of the image"
    assert "--shared-run-dir" not in as_root


@pytest.mark.parametrize("kind", KINDS)
def test_only_pods_of_the_same_job_reach_a_pod(k8s: Run, kind: str) -> None:
    """The meeting point of ranks has no encryption. Nothing is said of egress, so names and storage stay reachable."""
    objects = from_yaml(k8s("--kind", kind, "--name", "mine", "--label", "app.kubernetes.io/name=llama"))
    (policy,) = (each["spec"] for each in objects if each["kind"] == "NetworkPolicy")
    assert policy["policyTypes"] == ["Ingress"] and "egress" not in policy
    ((peers,),) = [[rule["from"] for rule in policy["ingress"]]]
    assert all(rule.keys() == {"from"} for rule in policy["ingress"]), "all ports"
    selected = policy["podSelector"]["matchLabels"]
    assert peers == [{"podSelector": {"matchLabels": selected}}], "and of this namespace"
    assert selected["app.kubernetes.io/instance"] == "mine"

    def is_selected(job: str, *more: str) -> bool:
        found = list(templates(from_yaml(k8s("--kind", kind, "--name", job, *more))))
        return all(selected.items() <= template["metadata"]["labels"].items() for template in found)

    label = ("--label", "app.kubernetes.io/name=llama")
    assert is_selected("mine", *label) and not is_selected("other", *label)
    without = from_yaml(k8s("--kind", kind, "--no-network-policy"))
    assert "NetworkPolicy" not in {each["kind"] for each in without}
