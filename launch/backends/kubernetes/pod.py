"""What every kind of job starts: one pod per node, in it `torchrun` under a supervisor, the config from a ConfigMap."""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.errors import LaunchError

CONFIG_FOLDER, CONFIG_FILE = "/etc/megalite", "config.yaml"
CONFIG_PATH = f"{CONFIG_FOLDER}/{CONFIG_FILE}"
PORT = 29500
GPU = "nvidia.com/gpu"
POD_NETWORK = "eth0"  # what container runtimes call a pod's own interface
RENDEZVOUS_S = 1800  # nodes get their pods, and pods their image, at different times
KILL_S = 60  # from the end of the grace period until Kubernetes kills the supervisor as well
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def command(job: PodJob) -> list[str]:
    """What runs in each pod. torchrun learns its place from PET_* variables.

    The supervisor never restarts, which is for Kubernetes to do. It hands SIGTERM to the ranks, which torchrun would
    kill 30 s later, gives them `grace_s` to save, and ends with the exit code of the run, which torchrun does not.
    """
    return [
        *("megalite", "supervise", "--restarts", "0", "--grace", str(job.grace_s), "--"),
        *("torchrun", "--max-restarts=0", f"--rdzv-conf=timeout={RENDEZVOUS_S}", "-m", "launch.train", CONFIG_PATH),
    ]


def config_map(job: PodJob) -> Manifest:
    """The config. Immutable, so that no two attempts, and no two pods, can differ in it."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": job.metadata(job.config_name),
        "immutable": True,
        "data": {CONFIG_FILE: job.config},
    }


def rendezvous(job: PodJob, master: str) -> list[dict[str, Any]]:
    """PET_* variables, as Kubeflow Trainer sets them, for pods of an Indexed Job."""
    known = {"NNODES": job.nodes, "NPROC_PER_NODE": job.ranks_per_node, "MASTER_ADDR": master, "MASTER_PORT": PORT}
    index = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [*({"name": f"PET_{name}", "value": str(value)} for name, value in known.items()), index]


def environment(job: PodJob) -> list[dict[str, Any]]:
    """Variables of every rank; those of the user win."""
    wanted = {"PYTHONUNBUFFERED": "1"}
    if job.gpus_per_node:
        wanted |= {"NCCL_SOCKET_IFNAME": POD_NETWORK, "NCCL_DEBUG": "WARN"}
    else:
        wanted["DS_ACCELERATOR"] = "cpu"
    plain = wanted | job.environment
    if both := sorted(plain.keys() & job.secrets):
        raise LaunchError(f"--secret-env {both[0]} is set as a plain variable as well: leave one of them out")
    secrets = [
        {"name": name, "valueFrom": {"secretKeyRef": {"name": source.secret, "key": source.key}}}
        for name, source in job.secrets.items()
    ]
    return [*({"name": name, "value": value} for name, value in plain.items()), *secrets]


def resources(job: PodJob) -> dict[str, Any]:
    """Limits; Kubernetes takes them as requests as well."""
    limits: dict[str, str] = {}
    if job.gpus_per_node:
        limits[GPU] = str(job.gpus_per_node)
    if job.resources.cpu is not None:
        limits["cpu"] = job.resources.cpu
    if job.resources.memory is not None:
        limits["memory"] = job.resources.memory
    if job.resources.rdma is not None:
        name, count = job.resources.rdma
        limits[name] = str(count)
    return {"limits": limits} if limits else {}


def container(job: PodJob, name: str, more_environment: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """The one container of a pod."""
    mounts = [
        {"name": "config", "mountPath": CONFIG_FOLDER, "readOnly": True},
        {"name": "shared-memory", "mountPath": "/dev/shm"},
        {"name": "output", "mountPath": str(job.output.path)},
    ]
    if job.data is not None:
        mounts.append({"name": "data", "mountPath": str(job.data.path)})
    made: dict[str, Any] = {
        "name": name,
        "image": job.image,
        "command": command(job),
        "env": [*(more_environment or []), *environment(job)],
        "volumeMounts": mounts,
    }
    if asked := resources(job):
        made["resources"] = asked
    if job.resources.rdma is not None:
        made["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # verbs pin memory
    return made


def pod_template(job: PodJob, container: dict[str, Any]) -> dict[str, Any]:
    """The pods of all nodes. Restarts are for the Job above to make: one pod alone cannot go on."""
    shared_memory = {"medium": "Memory"}
    if job.resources.shared_memory is not None:
        shared_memory["sizeLimit"] = job.resources.shared_memory
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": job.config_name}},
        {"name": "shared-memory", "emptyDir": shared_memory},
        {"name": "output", "persistentVolumeClaim": {"claimName": job.output.name}},
    ]
    if job.data is not None:
        volumes.append({"name": "data", "persistentVolumeClaim": {"claimName": job.data.name}})
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": job.grace_s + KILL_S,
        "enableServiceLinks": False,  # a Service called "master" would set MASTER_PORT
        "containers": [container],
        "volumes": volumes,
    }
    if job.node_selector:
        spec["nodeSelector"] = job.node_selector
    if job.gpus_per_node:
        spec["tolerations"] = [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}]
    if job.service_account is not None:
        spec["serviceAccountName"] = job.service_account
    return {"metadata": {"labels": job.object_labels()}, "spec": spec}


def indexed_job(job: PodJob, container: dict[str, Any], failure_policy: dict[str, Any]) -> dict[str, Any]:
    """Spec of a Job with one completion per node, all at the same time."""
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": failure_policy,
        "template": pod_template(job, container),
    }
