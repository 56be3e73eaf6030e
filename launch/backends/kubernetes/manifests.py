"""Renders the Kubernetes objects of a run from `templates.yaml`, and writes them as YAML."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from launch.backends.kubernetes.pod_options import HOME, INSTANCE, Claim, PodUser, Source
from launch.errors import PREEMPTED_CODE, STOPPED_CODE, USER_ERROR_CODE, LaunchError
from launch.runtime.started_modules import RANK
from launch.trainer.start.flags import ALLOW_CHANGE, FORCE, SHARED_RUN_DIR, StartFlags

Manifest = dict[str, Any]  # one Kubernetes object
Kind = Literal["trainjob", "pytorchjob", "jobset"]

GPU = "nvidia.com/gpu"
POD_NETWORK = "eth0"  # a pod's own interface in common container runtimes
KILL_S = 60  # from the end of the grace period until Kubernetes kills the supervisor as well


@dataclass(frozen=True)
class PodJob:
    """One pod per node, all of them alike."""

    kind: Kind
    has_cluster_runtime: bool  # whether the runtime of a TrainJob belongs to the cluster rather than to a namespace
    name: str
    image: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0: on the CPU
    config: str  # YAML, with the paths inside pods
    output: Claim
    data: Claim | None
    namespace: str | None  # None: the default of `kubectl apply`
    limits: dict[str, str]  # resource of a pod besides its GPUs -> quantity
    shared_memory: str | None  # limit of /dev/shm; None: the pod's memory
    pins_memory: bool  # for RDMA
    node_selector: dict[str, str]
    labels: dict[str, str]
    environment: dict[str, Source]
    service_account: str | None
    user: PodUser | None  # None: the image's
    has_network_policy: bool
    restarts: int
    flags: StartFlags
    grace_s: int  # from SIGTERM until remaining ranks are killed


def objects_of(job: PodJob) -> list[Manifest]:
    """Returns the objects of a job in the order of their creation.

    These are its ConfigMap, its NetworkPolicy, its runtime if it is a TrainJob, and the job.
    """
    values = _values(job)
    around = [_filled("$config_map", values)]
    if job.has_network_policy:
        around.append(_filled("$network_policy", values))
    if job.kind == "jobset":
        values["environment"] = [*_filled("$rendezvous", values), *values["environment"]]
        return [*around, _filled("$job_set", values)]
    if job.kind == "pytorchjob":
        values |= _pytorch_job_values(job, values["environment"])
        return [*around, _filled("$pytorch_job", values)]
    is_cluster_wide, namespace = job.has_cluster_runtime, job.namespace
    values |= {
        "runtime_kind": "ClusterTrainingRuntime" if is_cluster_wide else "TrainingRuntime",
        # cluster-wide runtimes share one set of names
        "runtime_name": f"{namespace}-{job.name}" if is_cluster_wide and namespace is not None else job.name,
        "runtime_namespace": None if is_cluster_wide else namespace,
        "runtime_labels": values["labels"] | {"trainer.kubeflow.org/framework": "torch"},
        "job_metadata": _filled("$ancestor_step", values),
    }
    of_train_job = ("image", "command", "environment", "resources")  # Trainer puts these into the runtime's container
    runtime = _filled("$training_runtime", values | dict.fromkeys(of_train_job))
    return [*around, runtime, _filled("$train_job", values)]


def name_of(manifest: Manifest) -> str:
    """Returns kind and name of an object, for messages."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _values(job: PodJob) -> dict[str, Any]:
    """Returns the values of a job for the templates: the fields of PodJob, and what follows from them."""
    variables = {"PYTHONUNBUFFERED": "1"}
    if job.gpus_per_node:
        variables |= {"NCCL_SOCKET_IFNAME": POD_NETWORK, "NCCL_DEBUG": "WARN"}
    else:
        variables["DS_ACCELERATOR"] = "cpu"
    if job.user is not None and not job.user.is_root:
        variables |= {"HOME": HOME, "USER": "megalite"}  # /etc/passwd of the image may not know the user
    for name in variables:
        if "valueFrom" in job.environment.get(name, {}):
            raise LaunchError(f"--secret-env {name}: megalite sets this variable itself: give --env {name}=VALUE")
    environment = {name: {"value": value} for name, value in variables.items()} | job.environment
    limits = ({GPU: str(job.gpus_per_node)} if job.gpus_per_node else {}) | job.limits
    data = job.data
    labels = {"app.kubernetes.io/name": "megalite", INSTANCE: job.name, **job.labels}
    return vars(job) | {
        "labels": labels,
        "pod_selector": {name: labels[name] for name in ("app.kubernetes.io/name", INSTANCE)},
        "environment": [{"name": name, **source} for name, source in environment.items()],
        "resources": {"limits": limits} if limits else None,
        "output_claim": job.output.name,
        "output_path": str(job.output.path),
        "data_volume": data and {"name": "data", "persistentVolumeClaim": {"claimName": data.name}},
        "data_mount": data and {"name": "data", "mountPath": str(data.path)},
        "node_selector": job.node_selector or None,
        "tolerations": [{"key": GPU, "operator": "Exists", "effect": "NoSchedule"}] if job.gpus_per_node else None,
        **_security_values(job),
        "termination_s": job.grace_s + KILL_S,
        "pod_restart_policy": "Never",
        "container_name": "node",
        "ports": None,
        "job_metadata": None,
        "rank_module": RANK,
        "force": FORCE if job.flags.force else None,
        "allow_change": ALLOW_CHANGE if job.flags.allow_change else None,
        "user_error_code": USER_ERROR_CODE,
        "stopped_code": STOPPED_CODE,
        "preempted_code": PREEMPTED_CODE,
    }


def _security_values(job: PodJob) -> dict[str, Any]:
    """Returns what the user of the pods decides: security context, capabilities, home folder, trust in `run_dir`.

    Any user but root gets what the `restricted` Pod Security level asks for. A capability has no effect for one, since
    no container runtime makes it ambient.
    """
    user, seccomp = job.user, {"seccompProfile": {"type": "RuntimeDefault"}}
    if user is None or user.is_root:
        lock = ["IPC_LOCK"] if job.pins_memory else []
        return {
            "pod_security": seccomp if user is None else {"runAsUser": user.uid, "runAsGroup": user.gid, **seccomp},
            "capabilities": ["DAC_OVERRIDE", *lock],  # root owns not every file of the claims
            "home_volume": None,
            "home_mount": None,
            "shared_run_dir": SHARED_RUN_DIR if job.flags.shared_run_dir else None,
        }
    return {
        "pod_security": {
            "runAsNonRoot": True,
            "runAsUser": user.uid,
            "runAsGroup": user.gid,
            "fsGroup": user.gid,  # so that a claim that root owns can be written
            "fsGroupChangePolicy": "OnRootMismatch",  # a large claim is not gone through at every start
            **seccomp,
        },
        "capabilities": None,
        "home_volume": {"name": "home", "emptyDir": {}},
        "home_mount": {"name": "home", "mountPath": HOME},
        "shared_run_dir": SHARED_RUN_DIR,  # the pods' group, which may now write the claim, is nobody else's
    }


def _pytorch_job_values(job: PodJob, environment: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the values that differ for a PyTorchJob: one master, and the other nodes as workers."""
    return {
        "environment": [variable for variable in environment if variable["name"] != "PYTHONUNBUFFERED"],
        "pod_restart_policy": None,  # the operator sets it from the replica spec
        "restart_policy": "OnFailure" if job.restarts else "Never",
        "container_name": "pytorch",
        "ports": [{"name": "pytorchjob-port", "containerPort": 23456}],
        # the operator counts restarts of containers, one per node for each failure, and gives up when it reaches this
        "backoff_limit": job.restarts * job.nodes + 1 if job.restarts else 0,
        "worker_count": job.nodes - 1,
        **({"workers": None} if job.nodes == 1 else {}),
    }


@cache
def _templates() -> dict[str, Any]:
    return yaml.safe_load(Path(__file__).with_name("templates.yaml").read_text(encoding="utf-8"))


def _filled(template: Any, values: Mapping[str, Any]) -> Any:
    """Fills in a template; templates.yaml says how."""
    match template:
        case dict():
            fields = {key: _filled(field, values) for key, field in template.items()}
            return {key: field for key, field in fields.items() if field is not None}
        case list():
            return [item for each in template if (item := _filled(each, values)) is not None]
        case str() if found := re.fullmatch(r"\$(\w+)", template):
            name = found[1]
            return values[name] if name in values else _filled(_templates()[name], values)
        case str():
            return string.Template(template).substitute(values)
    return template


PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
SPECIAL = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # not a string to some YAML readers


class _KubernetesDumper(yaml.SafeDumper):
    """Quotes all text that may be read as a number or bool; PyYAML and kubectl differ about values such as 1e3."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = PLAIN.fullmatch(value) and value.lower() not in SPECIAL
    style = "|" if "\n" in value else "" if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_KubernetesDumper.add_representer(str, _text)
_KubernetesDumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def to_yaml(objects: Sequence[Manifest], heading: str) -> str:
    """Writes a comment, and the objects as one document each."""
    lines = "".join(f"# {line}\n" for line in heading.splitlines())
    return lines + yaml.dump_all(
        objects, Dumper=_KubernetesDumper, sort_keys=False, allow_unicode=True, width=4096, explicit_start=True
    )
