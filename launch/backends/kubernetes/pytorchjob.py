"""A PyTorchJob of the Training Operator v1 (kubeflow.org/v1), for clusters that have not moved to Trainer v2.

Its operator sets PET_* variables, MASTER_ADDR and PYTHONUNBUFFERED, and makes workers wait for the master's name. It
knows no exit code under `OnFailure`, which restarts a failed container in its pod: what JobSets tell apart
(restarts.py) it starts again alike. Its other policy, `ExitCode`, counts no restart at all.
"""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.backends.kubernetes.pod import config_map, container, pod_template

CONTAINER = "pytorch"  # the names by which the operator knows container and port
PORT_NAME, PORT = "pytorchjob-port", 23456


def pytorch_job_objects(job: PodJob) -> list[Manifest]:
    """ConfigMap and PyTorchJob: one master, and the other nodes as workers."""
    replicas = {"Master": _replica(job, 1)}
    if job.nodes > 1:
        replicas["Worker"] = _replica(job, job.nodes - 1)
    pytorch_job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": job.metadata(job.name),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": _backoff_limit(job)},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return [config_map(job), pytorch_job]


def _backoff_limit(job: PodJob) -> int:
    """The operator counts restarts of containers, and every failure restarts one on each node; it gives up when the
    limit is reached."""
    return job.restarts * job.nodes + 1 if job.restarts else 0


def _replica(job: PodJob, count: int) -> dict[str, Any]:
    node = container(job, CONTAINER)
    node["env"] = [variable for variable in node["env"] if variable["name"] != "PYTHONUNBUFFERED"]
    node["ports"] = [{"name": PORT_NAME, "containerPort": PORT}]
    template = pod_template(job, node)
    del template["spec"]["restartPolicy"]  # set by the operator from the replica's
    return {"replicas": count, "restartPolicy": "OnFailure" if job.restarts else "Never", "template": template}
