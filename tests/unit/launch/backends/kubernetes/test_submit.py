"""`megalite k8s --submit`: what an API server is sent, and what its refusals become.

No real API server is at hand: tests/helpers/kubernetes_server.py answers the real client over HTTP instead.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from tests.conftest import write_config
from tests.helpers.k8s_command_line import KINDS, Run, command, from_yaml
from tests.helpers.kubernetes_server import ApiServer


@pytest.fixture
def k8s(tiny: dict[str, Any], tmp_path: Path) -> Run:
    return command(write_config(tmp_path / "config.yaml", tiny))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer() as server:
        server.add_claim("runs", "ReadWriteMany")
        monkeypatch.setenv("KUBECONFIG", str(server.write_kubeconfig(tmp_path / "kubeconfig")))
        yield server


@pytest.mark.parametrize("kind", KINDS)
def test_submit_creates_all_objects(k8s: Run, server: ApiServer, kind: str) -> None:
    said = k8s("--submit", "--kind", kind)
    assert f"{server.url} (context here, namespace default) has created them" in said
    made = server.made()
    assert made[0] == ("default", "ConfigMap", "my-run-config") and made[-1][2] == "my-run"
    assert len(made) == (4 if kind == "trainjob" else 3)
    assert list(server.objects.values())[1:] == from_yaml(k8s("--kind", kind, "--namespace", "default"))


def test_submit_goes_where_the_context_or_the_option_says(k8s: Run, server: ApiServer, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig", namespace="team")
    server.add_claim("runs", "ReadWriteMany", namespace="team")
    k8s("--submit", "--kind", "jobset", "--context", "here")
    k8s("--submit", "--kind", "jobset", "--namespace", "default")
    assert {place for place, kind, _ in server.made() if kind == "JobSet"} == {"team", "default"}


@pytest.mark.parametrize("kind", KINDS)
def test_submit_with_dry_run_keeps_nothing(k8s: Run, server: ApiServer, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    said = json.loads(k8s("--submit", "--dry-run", "--kind", kind, "--json", "-o", str(file)))
    assert server.made() == [] and not file.exists()
    assert said["done"][-1] == "dry run: nothing was written or created"
    posts = [request for request in server.requests if request.startswith("POST")]
    assert len(posts) == 3 and all("dryRun=All" in request for request in posts)
    # Trainer refuses a TrainJob whose runtime is not there, and a dry run leaves none
    assert len([notice for notice in said["notices"] if "has not looked at the TrainJob" in notice]) == (
        kind == "trainjob"
    )


def refuse(change: Callable[[ApiServer], Any], told: str, *more: str) -> Any:
    return pytest.param(change, told, more, id=told)


@pytest.mark.parametrize(
    ("change", "told", "more"),
    [
        refuse(
            lambda s: s.forbidden.add(("POST", "trainjobs")), "TrainJob my-run: you may not do that there: trainjobs"
        ),
        refuse(lambda s: s.forbidden.add(("POST", "clustertrainingruntimes")), "--runtime namespace needs no right"),
        refuse(lambda s: s.forbidden.add(("POST", "networkpolicies")), "--no-network-policy leaves it out"),
        refuse(
            lambda s: s.installed.remove("trainer.kubeflow.org/v1alpha1"), "Kubeflow Trainer v2 is not installed there"
        ),
        refuse(
            lambda s: s.installed.remove("jobset.x-k8s.io/v1alpha2"), "the JobSet controller is not", "--kind", "jobset"
        ),
        refuse(lambda s: s.installed.remove("kubeflow.org/v1"), "Training Operator v1 is not", "--kind", "pytorchjob"),
        refuse(
            lambda s: (s.namespaces.clear(), s.add_claim("runs", "ReadWriteMany", namespace="nowhere")),
            "there is no namespace nowhere: create it",
            *("--namespace", "nowhere"),
        ),
        refuse(
            lambda s: s.objects.update({("", "ClusterTrainingRuntime", "default-my-run"): {}}),
            "kubectl delete ClusterTrainingRuntime/default-my-run",
        ),
        refuse(lambda s: s.objects.pop(("default", "PersistentVolumeClaim", "runs")), "no PersistentVolumeClaim runs"),
        refuse(lambda s: s.add_claim("runs", "ReadWriteOnce"), "runs is ReadWriteOnce, so 2 nodes cannot mount it"),
        refuse(
            lambda s: s.add_claim("corpora", "ReadWriteOnce"),
            "claim corpora is ReadWriteOnce",
            "--data-claim",
            "corpora",
        ),
        refuse(lambda s: None, '--context "there" is not in the kubeconfig', "--context", "there"),
    ],
)
def test_what_a_server_refuses_is_one_sentence_and_leaves_nothing(
    k8s: Run, server: ApiServer, change: Callable[[ApiServer], Any], told: str, more: tuple[str, ...]
) -> None:
    """Objects that were created before the refused one are removed again, or the next try would find them."""
    change(server)
    before = server.made()
    with pytest.raises(LaunchError) as raised:
        k8s("--submit", *more)
    assert told in str(raised.value) and "\n" not in str(raised.value)
    assert server.made() == before


def test_claims_that_many_read_and_claims_that_are_hidden(k8s: Run, server: ApiServer) -> None:
    """Data needs only to be read by all nodes; where claims may not be looked at, the run is submitted all the same."""
    server.add_claim("corpora", "ReadOnlyMany")
    k8s("--submit", "--data-claim", "corpora")
    server.forbidden.add(("GET", "persistentvolumeclaims"))
    said = json.loads(k8s("--submit", "--name", "other", "--json"))
    assert any("the claims were not looked at" in notice for notice in said["notices"])
    assert len(server.made()) == 8


def test_one_node_needs_no_shared_claim(k8s: Run, server: ApiServer) -> None:
    server.add_claim("runs", "ReadWriteOnce")
    k8s("--submit", layout=("--nodes", "1", "--gpus-per-node", "4"))
    assert len(server.made()) == 4


def test_submitting_twice_says_how_to_go_on(k8s: Run, server: ApiServer) -> None:
    k8s("--submit", "--kind", "jobset")
    with pytest.raises(LaunchError, match="give another --name, or first kubectl delete ConfigMap/my-run-config"):
        k8s("--submit", "--kind", "jobset")
    assert len(server.made()) == 3  # those of the first


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (None, "there is no kubeconfig at"),
        ("", "cannot be used"),
        ("clusters: [", "cannot be used"),
        ("- 1", "cannot be used"),
        ("apiVersion: v1\nkind: Config\ncurrent-context: gone\ncontexts: []\nclusters: []\nusers: []\n", "be used"),
    ],
)
def test_a_kubeconfig_that_is_none(
    k8s: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: str | None, told: str
) -> None:
    file = tmp_path / "kubeconfig"
    if content is not None:
        file.write_text(content)
    monkeypatch.setenv("KUBECONFIG", str(file))
    with pytest.raises(LaunchError) as raised:
        k8s("--submit")
    assert told in str(raised.value) and "\n" not in str(raised.value)


def test_a_server_that_does_not_know_us_or_is_not_there(k8s: Run, server: ApiServer, tmp_path: Path) -> None:
    server.write_kubeconfig(tmp_path / "kubeconfig", token="expired")
    with pytest.raises(LaunchError, match="does not know you: sign in again"):
        k8s("--submit")
    server.url = "http://127.0.0.1:9"  # nobody listens there
    server.write_kubeconfig(tmp_path / "kubeconfig")
    with pytest.raises(
        LaunchError, match=r"127.0.0.1:9 \(context here.*\) cannot be reached: .*Connection refused"
    ) as raised:
        k8s("--submit")
    assert "\n" not in str(raised.value)


def test_the_server_is_as_strict_as_it_claims(k8s: Run, server: ApiServer) -> None:
    """Through the client as `submit` uses it: a mistyped field, a wrong type, a reference to nothing are refused."""
    from launch.backends.kubernetes.api_server import ClusterError, open_cluster

    cluster = open_cluster(None, None)
    *_, job_set = from_yaml(k8s("--kind", "jobset"))

    def refusal(change: Callable[[Any], Any]) -> str:
        wrong = copy.deepcopy(job_set)
        change(wrong["spec"])
        with pytest.raises(ClusterError) as raised:
            cluster.create(wrong)
        return str(raised.value)

    job = job_set["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert "refused it with 400: strict decoding error" in refusal(lambda spec: spec.update(failurePolicies={}))
    assert "refused it with 422" in refusal(lambda spec: spec["failurePolicy"].update(maxRestarts="3"))
    assert "Not found: config" in refusal(
        lambda spec: spec["replicatedJobs"][0]["template"]["spec"]["template"]["spec"].pop("volumes")
    )
    assert job["template"]["spec"]["volumes"] and server.made() == []
    cluster.create(job_set)
    assert len(server.made()) == 1
