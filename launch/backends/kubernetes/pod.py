"""Pod template of all kinds of jobs: one pod per node with `torchrun` under a supervisor, config from a ConfigMap."""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.errors import PREEMPTED_CODE, STOPPED_CODE, USER_ERROR_CODE, LaunchError
from launch.runtime.modules import RANK

CONFIG_FOLDER, CONFIG_FILE = "/etc/megalite", "config.yaml"
CONFIG_PATH = f"{CONFIG_FOLDER}/{CONFIG_FILE}"
PORT = 29500
GPU = "nvidia.com/gpu"
POD_NETWORK = "eth0"  # a pod's own interface in common container runtimes
RENDEZVOUS_S = 1800  # pods are scheduled, and images pulled, at different times
KILL_S = 60  # from the end of the grace period until Kubernetes kills the supervisor as well
INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def command(job: PodJob) -> list[str]:
    """Returns the command of each pod. torchrun reads its node rank from PET_* variables.

    The supervisor never restarts; Kubernetes does. It forwards SIGTERM to the ranks, which torchrun would kill 30 s
    later, gives them `grace_s` to save, and ends with the exit code of the run, which torchrun does not.
    """
    return [
        *("megalite", "supervise", "--restarts", "0", "--grace", str(job.grace_s), "--"),
        *("torchrun", "--max-restarts=0", f"--rdzv-conf=timeout={RENDEZVOUS_S}", "-m", RANK, CONFIG_PATH),
    ]


def config_map(job: PodJob) -> Manifest:
    """Returns the ConfigMap with the config. It is immutable, so that all attempts and pods use the same."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": job.metadata(job.config_name),
        "immutable": True,
        "data": {CONFIG_FILE: job.config},
    }


def rendezvous(job: PodJob, master: str) -> list[dict[str, Any]]:
    """Returns PET_* variables, as Kubeflow Trainer sets them, for pods of an Indexed Job."""
    known = {"NNODES": job.nodes, "NPROC_PER_NODE": job.ranks_per_node, "MASTER_ADDR": master, "MASTER_PORT": PORT}
    index = {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": INDEX}}}
    return [*({"name": f"PET_{name}", "value": str(value)} for name, value in known.items()), index]


def environment(job: PodJob) -> list[dict[str, Any]]:
    """Returns the variables of every rank; those of the user take precedence."""
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
    """Returns the resource limits, which Kubernetes uses as requests too."""
    limits = ({GPU: str(job.gpus_per_node)} if job.gpus_per_node else {}) | job.resources.limits
    return {"limits": limits} if limits else {}


def container(job: PodJob, name: str, more_environment: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """Returns the only container of a pod."""
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
    if job.resources.pins_memory:
        made["securityContext"] = {"capabilities": {"add": ["IPC_LOCK"]}}  # RDMA verbs pin memory
    return made


def pod_template(job: PodJob, container: dict[str, Any]) -> dict[str, Any]:
    """Returns the pod template of all nodes. Only the Job restarts them, since a single pod cannot continue alone."""
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
    """Returns the spec of a Job with one completion per node, all in parallel."""
    return {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": 0,
        "podFailurePolicy": failure_policy,
        "template": pod_template(job, container),
    }


FINAL_CODES = [USER_ERROR_CODE, STOPPED_CODE]  # in ascending order, as Kubernetes requires


def pod_failure_policy(container: str) -> dict[str, Any]:
    """Returns the rules of a Job that put exit codes and evictions of pods into its failure reason."""

    def on_exit_codes(*codes: int) -> dict[str, Any]:
        condition = {"containerName": container, "operator": "In", "values": list(codes)}
        return {"action": "FailJob", "onExitCodes": condition}

    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    return {"rules": [on_exit_codes(*FINAL_CODES), on_exit_codes(PREEMPTED_CODE), evicted]}


def job_set_failure_policy(restarts: int) -> dict[str, Any]:
    """Returns the rules of a JobSet over such Jobs. The first match applies; without one, a restart is counted."""
    codes = "|".join(map(str, FINAL_CODES))
    return {
        "maxRestarts": restarts,
        "rules": [
            {
                "name": "mistakeOrGuard",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [f"exit code ({codes}) matching"],
            },
            {
                "name": "askedToEndOrEvicted",
                "action": "RestartJobSetAndIgnoreMaxRestarts",
                "onJobFailureReasons": ["PodFailurePolicy"],
            },
        ],
    }
