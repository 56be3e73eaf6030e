"""`megalite k8s`: what the manifests say, and that a mistake in one, or in what is typed, is caught."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.backends.kubernetes.manifests import to_yaml
from launch.errors import LaunchError
from launch.prediction.memory_check import forecast_memory
from launch.trainer.start.run_config import load_run_config
from megalite.config import resolve_layout
from megalite.config.yaml_text import parse_yaml
from megalite.planner.cost.memory import CPU
from tests.conftest import write_config
from tests.helpers.k8s_command_line import KINDS, LAYOUT, Run, command, from_yaml
from tests.helpers.kubernetes_schema import problems

ALL_OPTIONS = [
    *("--data-claim", "corpora:/mnt/data", "--namespace", "team", "--name", "llama-1b", "--restarts", "3"),
    *("--cpu", "16", "--memory", "256Gi", "--shared-memory", "32Gi", "--rdma", "rdma/hca=2", "--grace", "120"),
    *("--node-selector", "example.com/gpu=h100", "--label", "team=nlp", "--service-account", "trainer"),
    *("--env", "NCCL_DEBUG=INFO", "--env", "LEARNED=1e3", "--env", "PRICE=$name"),
    *("--secret-env", "WANDB_API_KEY=wandb:api-key"),
]


@pytest.fixture
def config(tiny: dict[str, Any], tmp_path: Path) -> Path:
    return write_config(tmp_path / "config.yaml", tiny)


@pytest.fixture
def k8s(config: Path) -> Run:
    return command(config)


def kinds(objects: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in objects}


def test_flags_reach_the_ranks_and_memory_of_a_pod_is_compared(k8s: Run) -> None:
    (*_, job) = from_yaml(k8s("--kind", "jobset", "--force", "--allow-change"))
    (container,) = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    flags = ["--force", "--allow-change", "--shared-run-dir"]
    assert container["command"][-4:] == ["/etc/megalite/config.yaml", *flags]
    on_cpu = ("--gpus-per-node", "0", "--nodes", "1", "--memory", "64Gi", "model.num_hidden_layers=1000")
    large = ("model.hidden_size=4096", "model.intermediate_size=16384")
    refusal = r"needs .*, and the host has 64.0 GiB for its 4 ranks: .*--force starts it all the same"
    with pytest.raises(LaunchError, match=refusal):
        k8s(*on_cpu, *large)
    assert "--force" in k8s(*on_cpu, *large, "--force")


def test_a_pod_is_compared_by_the_malloc_that_torchrun_leaves_as_it_is(k8s: Run, config: Path) -> None:
    """Which needs less than that of `megalite train`: memory between the two is enough."""
    large = ["model.hidden_size=512", "model.intermediate_size=2048", "checkpoint.background=false"]
    large += ["training.global_batch_size=64", "training.micro_batch_size=32", "training.sequence_length=128"]
    found = load_run_config(config, [*LAYOUT, *large])
    tuned, untuned = (
        forecast_memory(found, resolve_layout(found, 4, "cpu"), allocator, 1, 4)
        for allocator in (CPU, replace(CPU, keeps_freed=False))
    )
    assert tuned is not None and untuned is not None and tuned.least > 1.02 * untuned.least
    on_cpu, between = ("--gpus-per-node", "0", "--nodes", "1"), (tuned.least + untuned.least) / 2
    k8s(*on_cpu, "--memory", f"{between / 1024:.0f}Ki", *large)
    with pytest.raises(LaunchError, match="for its 4 ranks"):
        k8s(*on_cpu, "--memory", f"{0.98 * untuned.least / 1024:.0f}Ki", *large)


def test_a_train_job(k8s: Run, config: Path, tmp_path: Path) -> None:
    """Trainer runs `node` of the runtime's job `node`, whose label it looks for, with what the TrainJob says of it."""
    objects = from_yaml(k8s(*ALL_OPTIONS))
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "ClusterTrainingRuntime", "TrainJob"]
    held, _, runtime, job = objects
    assert (runtime["metadata"]["name"], runtime["metadata"].get("namespace")) == ("team-llama-1b", None)
    assert job["metadata"]["namespace"] == held["metadata"]["namespace"] == "team"
    assert job["spec"]["runtimeRef"] == {
        **{"apiGroup": "trainer.kubeflow.org", "kind": "ClusterTrainingRuntime", "name": "team-llama-1b"}
    }
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 2)
    assert trainer["resourcesPerNode"]["limits"] == {
        **{"nvidia.com/gpu": "2", "cpu": "16", "memory": "256Gi", "rdma/hca": "2"}
    }
    assert trainer["command"][:6] == ["megalite", "supervise", "--restarts", "0", "--grace", "120"]
    assert trainer["command"][-3:] == ["-m", "launch.train", "/etc/megalite/config.yaml"]
    env = {each["name"]: each for each in trainer["env"]}
    assert env["NCCL_DEBUG"]["value"] == "INFO" and env["LEARNED"]["value"] == "1e3"
    assert env["PRICE"]["value"] == "$name"  # of the templates' own grammar, but not theirs
    assert env["WANDB_API_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "wandb", "key": "api-key"}
    assert not any(name.startswith("PET_") for name in env)  # Trainer sets them, and refuses ours

    assert runtime["spec"]["mlPolicy"] == {"numNodes": 2, "torch": {}}
    [replicated] = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert (replicated["name"], replicated["replicas"]) == ("node", 1)
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert replicated["template"]["spec"]["template"]["metadata"]["labels"]["team"] == "nlp"
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert (pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == ("Never", 180)
    assert pod["nodeSelector"] == {"example.com/gpu": "h100"} and pod["serviceAccountName"] == "trainer"
    assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    [node] = pod["containers"]
    assert node["name"] == "node"
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in node["volumeMounts"]}
    assert mounted["/dev/shm"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}
    assert mounted["/output"]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert mounted["/mnt/data"]["persistentVolumeClaim"] == {"claimName": "corpora"}
    assert mounted["/etc/megalite"]["configMap"] == {"name": "llama-1b-config"} == {"name": held["metadata"]["name"]}

    (tmp_path / "in_pod.yaml").write_text(held["data"]["config.yaml"])  # what ranks load is the run that was asked for
    seen, here = load_run_config(tmp_path / "in_pod.yaml"), load_run_config(config, LAYOUT)
    assert str(seen.run_dir) == "/output/runs/My_Run" and seen.data.path == ["/mnt/data/text"]
    assert seen.model_copy(update={"run_dir": here.run_dir, "data": here.data}) == here


def test_a_run_needs_no_rights_over_the_cluster(k8s: Run) -> None:
    objects = from_yaml(k8s("--runtime", "namespace", "--namespace", "team"))
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "TrainingRuntime", "TrainJob"]
    assert {each["metadata"]["namespace"] for each in objects} == {"team"}
    assert objects[3]["spec"]["runtimeRef"]["kind"] == "TrainingRuntime"
    assert {each["metadata"]["name"] for each in objects} == {"my-run", "my-run-config"}  # of run_dir runs/My_Run


def test_a_job_set(k8s: Run) -> None:
    """Needs nothing of Kubeflow: its pods learn from their own index and the first pod's name who they are."""
    objects = from_yaml(k8s("--kind", "jobset", "--name", "small"))
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "JobSet"]
    spec = objects[-1]["spec"]
    assert spec["network"] == {"enableDNSHostnames": True, "publishNotReadyAddresses": True}
    [replicated] = spec["replicatedJobs"]
    job = replicated["template"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"], job["backoffLimit"]) == ("Indexed", 2, 2, 0)
    [node] = job["template"]["spec"]["containers"]
    env = {each["name"]: each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"] for each in node["env"]}
    assert env == {
        **{"PET_NNODES": "2", "PET_NPROC_PER_NODE": "2", "PET_MASTER_ADDR": "small-node-0-0.small"},
        **{"PET_NODE_RANK": "metadata.annotations['batch.kubernetes.io/job-completion-index']"},
        **{"PET_MASTER_PORT": "29500", "PYTHONUNBUFFERED": "1", "NCCL_SOCKET_IFNAME": "eth0", "NCCL_DEBUG": "WARN"},
        **{"HOME": "/var/lib/megalite", "USER": "megalite"},
    }
    assert node["image"] == "registry.io/megalite:1" and node["resources"] == {"limits": {"nvidia.com/gpu": "2"}}
    shm = next(volume for volume in job["template"]["spec"]["volumes"] if volume["name"] == "shared-memory")
    assert shm["emptyDir"] == {"medium": "Memory"}


@pytest.mark.parametrize("kind", ["trainjob", "jobset"])
def test_exit_codes_decide_about_restarts(k8s: Run, kind: str) -> None:
    """A mistake (2) and a guard (3) end the run for good; a saved run (75) and an eviction start it again for free."""
    spec = kinds(from_yaml(k8s("--kind", kind, "--restarts", "3")))
    job_set = spec["JobSet"]["spec"] if kind == "jobset" else spec["ClusterTrainingRuntime"]["spec"]["template"]["spec"]
    job = job_set["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"

    def fate(code: int, *, evicted: bool = False) -> str:
        """What the two controllers make of one failed pod, as their sources do it."""
        reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
        for index, rule in enumerate(job["podFailurePolicy"]["rules"]):
            if "onExitCodes" in rule:
                matches = code in rule["onExitCodes"]["values"] and rule["onExitCodes"]["containerName"] == "node"
                words = f"Container node for pod team/a failed with exit code {code} matching"
            else:
                matches = evicted and rule["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
                words = "Pod team/a has condition DisruptionTarget matching"
            if matches:
                reason, message = "PodFailurePolicy", f"{words} {rule['action']} rule at index {index}"
                break
        for rule in job_set["failurePolicy"]["rules"]:
            patterns = rule.get("onJobFailureMessagePatterns", [""])
            if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
                return rule["action"]
        return "RestartJobSet"

    assert job_set["failurePolicy"]["maxRestarts"] == 3
    assert [fate(code) for code in (2, 3)] == ["FailJobSet"] * 2
    assert [fate(code) for code in (1, 86, 137, 23, 32)] == ["RestartJobSet"] * 5
    assert fate(75) == fate(137, evicted=True) == "RestartJobSetAndIgnoreMaxRestarts"
    assert fate(3, evicted=True) == "FailJobSet"


def test_a_pytorch_job(k8s: Run) -> None:
    """One master and the rest workers; the operator counts container restarts, of which a failure costs one a node."""
    objects = from_yaml(k8s("--kind", "pytorchjob", "--restarts", "3", layout=("--nodes", "4", "--gpus-per-node", "1")))
    assert [each["kind"] for each in objects] == ["ConfigMap", "NetworkPolicy", "PyTorchJob"]
    spec = objects[-1]["spec"]
    assert spec["runPolicy"] == {"cleanPodPolicy": "Running", "backoffLimit": 3 * 4 + 1}
    assert spec["nprocPerNode"] == "1"
    replicas = spec["pytorchReplicaSpecs"]
    assert {role: each["replicas"] for role, each in replicas.items()} == {"Master": 1, "Worker": 3}
    assert replicas["Master"]["template"] == replicas["Worker"]["template"]
    assert {each["restartPolicy"] for each in replicas.values()} == {"OnFailure"}
    pod = replicas["Master"]["template"]["spec"]
    assert "restartPolicy" not in pod  # the operator warns about one there
    [container] = pod["containers"]
    assert container["name"] == "pytorch"
    assert container["ports"] == [{"name": "pytorchjob-port", "containerPort": 23456}]
    assert "PYTHONUNBUFFERED" not in {each["name"] for each in container["env"]}  # the operator adds it

    alone = from_yaml(k8s("--kind", "pytorchjob", "--restarts", "0", layout=("--nodes", "1", "--gpus-per-node", "4")))
    assert list(alone[-1]["spec"]["pytorchReplicaSpecs"]) == ["Master"]
    assert alone[-1]["spec"]["pytorchReplicaSpecs"]["Master"]["restartPolicy"] == "Never"


def test_ranks_on_the_cpu(k8s: Run) -> None:
    """For clusters without GPUs: as many ranks as the layout has, shared by the nodes."""
    trainer = kinds(from_yaml(k8s(layout=("--nodes", "2", "--gpus-per-node", "0"))))["TrainJob"]["spec"]["trainer"]
    assert trainer["numProcPerNode"] == 2 and "resourcesPerNode" not in trainer
    env = {each["name"]: each.get("value") for each in trainer["env"]}
    assert env == {"PYTHONUNBUFFERED": "1", "DS_ACCELERATOR": "cpu", "HOME": "/var/lib/megalite", "USER": "megalite"}


def objects_of(k8s: Run, kind: str) -> list[dict[str, Any]]:
    objects = from_yaml(k8s("--kind", kind, *ALL_OPTIONS))
    return objects + from_yaml(k8s("--runtime", "namespace", *ALL_OPTIONS))[2:3] if kind == "trainjob" else objects


def places(value: Any, *path: str | int) -> Iterator[tuple[str | int, ...]]:
    """Every field inside an object."""
    for key, inside in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(value, dict):
            yield (*path, key)
        if isinstance(inside, dict | list):
            yield from places(inside, *path, key)


FREE_KEYS = {"labels", "nodeSelector", "limits", "data", "matchLabels"}  # maps whose keys are anybody's


@pytest.mark.parametrize("kind", KINDS)
def test_every_mistyped_field_is_caught(k8s: Run, kind: str) -> None:
    """Each field of each object in turn gets one letter too many: a server would drop it, or refuse the object."""
    tried = 0
    for manifest in objects_of(k8s, kind):
        assert problems(manifest) == []
        for path in places(manifest):
            if len(path) > 1 and path[-2] in FREE_KEYS:
                continue
            wrong = copy.deepcopy(manifest)
            inside = wrong
            for step in path[:-1]:
                inside = inside[step]
            inside[f"{path[-1]}x"] = inside.pop(path[-1])
            assert problems(wrong), path
            tried += 1
    assert tried > 60


@pytest.mark.parametrize("kind", KINDS)
def test_every_value_of_a_wrong_type_is_caught(k8s: Run, kind: str) -> None:
    """Text where a number belongs, a number where text does, a list where a mapping does."""
    for manifest in objects_of(k8s, kind):
        for path in places(manifest):
            wrong = copy.deepcopy(manifest)
            inside = wrong
            for step in path[:-1]:
                inside = inside[step]
            value = inside[path[-1]]
            if isinstance(value, str) and len(path) > 1 and path[-2] == "limits":
                value = [value]  # a quantity may be a number
            elif isinstance(value, str):
                value = 7
            else:
                value = "7"
            inside[path[-1]] = value
            assert problems(wrong), path


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("more", [(), ("--restarts", "0"), ("--namespace", "team", "--runtime", "namespace")])
@pytest.mark.parametrize("layout", [("2", "2"), ("1", "4"), ("2", "0")])
def test_every_kind_of_manifest_is_valid(k8s: Run, kind: str, more: tuple[str, ...], layout: tuple[str, str]) -> None:
    """What a template leaves out or repeats for one node, on the CPU, or without restarts, is valid too."""
    nodes, gpus = layout
    for manifest in from_yaml(k8s("--kind", kind, *more, layout=("--nodes", nodes, "--gpus-per-node", gpus))):
        assert problems(manifest) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda spec: spec["pytorchReplicaSpecs"]["Master"].update(replicas=2), "Master.replicas must be 1"),
        (lambda spec: spec["pytorchReplicaSpecs"]["Worker"].update(restartPolicy="Sometimes"), "restartPolicy"),
        (lambda spec: spec["pytorchReplicaSpecs"].pop("Master"), "Master"),
        (lambda spec: spec.update(nprocPerNode="two"), "nprocPerNode"),
        (lambda spec: spec["runPolicy"].update(cleanPodPolicy="Some"), "cleanPodPolicy"),
        (
            lambda spec: spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].update(name="node"),
            'must have a container named "pytorch"',
        ),
    ],
)
def test_rules_of_the_training_operator(k8s: Run, change: Callable[[Any], Any], told: str) -> None:
    """Its controller would refuse these; most of them its CRD takes."""
    job = from_yaml(k8s("--kind", "pytorchjob"))[-1]
    change(job["spec"])
    assert told in problems(job)[0]


def test_an_object_of_another_version_is_not_taken(k8s: Run) -> None:
    job = from_yaml(k8s())[-1]
    assert problems(job | {"apiVersion": "trainer.kubeflow.org/v1"}) == [
        "kind: TrainJob of trainer.kubeflow.org/v1 is not known"
    ]
    assert problems(job | {"spec": "all"})


@given(st.dictionaries(st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True), st.text(max_size=12), max_size=5))
def test_yaml_means_the_same_to_every_reader(values: dict[str, str]) -> None:
    """kubectl's YAML is not PyYAML's: to one 1e3 and 0o7 are numbers, to the other `no` is a bool. Text stays text."""
    written = to_yaml([{"data": values}], "two\nlines")
    assert from_yaml(written) == [{"data": values}]
    assert parse_yaml(written)[0] == {"data": values}  # where words are read as YAML 1.2 does


@pytest.mark.parametrize(
    "word", ["1e3", "0o7", "no", "Y", "0x1F", "1_000", "~", "", "null", "1:30", ".5", "2026-01-01"]
)
def test_words_that_readers_differ_about_are_quoted(word: str) -> None:
    assert f'a: "{word}"\n' in to_yaml([{"a": word}], "")


def test_a_mistake_ends_with_exit_code_2(config: Path) -> None:
    line = [Path(sys.executable).parent / "megalite", "k8s", config, "--image", "a:1", "--nodes", "1"]
    done = subprocess.run([*line, "--gpus-per-node", "1"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "megalite: error: no --output-claim is given, and without one checkpoints would be lost with their pods: name "
        "a PersistentVolumeClaim that is ReadWriteMany\n"
    )


def test_what_may_be_meant_is_told(k8s: Run) -> None:
    facts = json.loads(
        k8s("--json", "--image", "megalite", "data.path=/corpora/text", layout=("--nodes", "4", "--gpus-per-node", "1"))
    )
    assert [notice.partition(":")[0] for notice in facts["notices"]] == [
        "data.path /corpora/text is on no claim",
        "tensor parallelism over 2 ranks crosses nodes of 1",
        "--image megalite can be another image tomorrow, or on another node",
        *(user := [facts["notices"][-1].partition(":")[0]]),
    ]
    assert user[0].startswith("pods run as user and group 1000")
    assert facts["validation"].startswith("not validated by an API server") and facts["done"] == []
    assert [each["kind"] for each in facts["objects"]] == [
        "ConfigMap",
        "NetworkPolicy",
        "ClusterTrainingRuntime",
        "TrainJob",
    ]
    for kind, restarts, count in (("pytorchjob", "1", 1), ("pytorchjob", "0", 0), ("jobset", "1", 0)):
        notices = json.loads(k8s("--json", "--kind", kind, "--restarts", restarts))["notices"]
        assert len([notice for notice in notices if "does not look at exit codes" in notice]) == count


def test_data_at_a_url_stays_there_and_its_cache_is_on_the_claim(k8s: Run, tmp_path: Path) -> None:
    """A URL that becomes a folder of the claim; a cache in a pod, which each pod would fill anew."""
    facts = json.loads(k8s("--json", "data.path=s3://bucket/corpora/web", "data.cache=cache"))
    data = parse_yaml(facts["objects"][0]["data"]["config.yaml"])[0]["data"]
    assert data["path"] == ["s3://bucket/corpora/web"] and data["cache"] == "/output/cache"


def test_a_file_is_written_once(k8s: Run, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    assert "nothing was written" in k8s("-o", str(file), "--dry-run") and not file.exists()
    said = k8s("-o", str(file))
    assert f"kubectl apply -f {file}" in said and "not validated by an API server" in said
    assert from_yaml(file.read_text()) == from_yaml(k8s())
    with pytest.raises(LaunchError, match="is there already: give --overwrite"):
        k8s("-o", str(file), "--kind", "jobset")
    k8s("-o", str(file), "--kind", "jobset", "--overwrite")
    assert [each["kind"] for each in from_yaml(file.read_text())] == ["ConfigMap", "NetworkPolicy", "JobSet"]


def test_without_the_extra_manifests_are_written(k8s: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    with_extra = k8s()
    monkeypatch.setitem(sys.modules, "kubernetes", None)  # as where it is not installed
    assert k8s() == with_extra
    with pytest.raises(LaunchError, match=r"pip install 'megalite\[k8s\]'"):
        k8s("--submit")
