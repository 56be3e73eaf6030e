"""Objects of the three kinds of jobs: JobSet, PyTorchJob of the Training Operator v1, and TrainJob of Trainer v2.

The Training Operator sets PET_* variables, MASTER_ADDR and PYTHONUNBUFFERED, and makes workers wait for the master's
name. Its policy `OnFailure` restarts a failed container whatever its exit code, which the rules of JobSets distinguish
(pod.py). Its other policy, `ExitCode`, counts no restarts.
"""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.backends.kubernetes.pod import (
    config_map,
    container,
    indexed_job,
    job_set_failure_policy,
    pod_failure_policy,
    pod_template,
    rendezvous,
)

NODE = "node"  # name of the only replicated job and of its container


def job_set_spec(job: PodJob, container: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """Returns a JobSet spec with one Job, whose pods resolve <job>-node-0-<index>.<job> even before they are ready."""
    template: dict[str, Any] = {"spec": indexed_job(job, container, pod_failure_policy(NODE))}
    if labels is not None:
        template["metadata"] = {"labels": labels}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": job_set_failure_policy(job.restarts),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def job_set_objects(job: PodJob) -> list[Manifest]:
    """Returns ConfigMap and JobSet."""
    variables = rendezvous(job, master=f"{job.name}-{NODE}-0-0.{job.name}")
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job.metadata(job.name),
        "spec": job_set_spec(job, container(job, NODE, variables)),
    }
    return [config_map(job), job_set]


CONTAINER = "pytorch"  # names that the operator requires of container and port
PORT_NAME, PORT = "pytorchjob-port", 23456


def pytorch_job_objects(job: PodJob) -> list[Manifest]:
    """Returns ConfigMap and PyTorchJob: one master, and the other nodes as workers."""
    replicas = {"Master": _replica(job, 1)}
    if job.nodes > 1:
        replicas["Worker"] = _replica(job, job.nodes - 1)
    # the operator counts restarts of containers, one per node for each failure, and gives up when it reaches the limit
    backoff_limit = job.restarts * job.nodes + 1 if job.restarts else 0
    pytorch_job = {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": job.metadata(job.name),
        "spec": {
            "nprocPerNode": str(job.ranks_per_node),
            "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": backoff_limit},
            "pytorchReplicaSpecs": replicas,
        },
    }
    return [config_map(job), pytorch_job]


def _replica(job: PodJob, count: int) -> dict[str, Any]:
    node = container(job, CONTAINER)
    node["env"] = [variable for variable in node["env"] if variable["name"] != "PYTHONUNBUFFERED"]
    node["ports"] = [{"name": PORT_NAME, "containerPort": PORT}]
    template = pod_template(job, node)
    del template["spec"]["restartPolicy"]  # the operator sets it from the replica spec
    return {"replicas": count, "restartPolicy": "OnFailure" if job.restarts else "Never", "template": template}


API_VERSION = "trainer.kubeflow.org/v1alpha1"
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # marks the job of the ranks for Trainer


def train_job_objects(job: PodJob, *, is_cluster_wide: bool = True) -> list[Manifest]:
    """Returns ConfigMap, runtime and TrainJob, in the order that Trainer requires."""
    kind = "ClusterTrainingRuntime" if is_cluster_wide else "TrainingRuntime"
    # cluster-wide runtimes share one set of names
    name = f"{job.namespace}-{job.name}" if is_cluster_wide and job.namespace is not None else job.name
    node = container(job, NODE)
    trainer: dict[str, Any] = {"numNodes": job.nodes, "numProcPerNode": job.ranks_per_node}
    trainer |= {field: node.pop(field) for field in ("image", "command", "env")}
    if "resources" in node:
        trainer["resourcesPerNode"] = node.pop("resources")
    metadata = job.metadata(name, is_cluster_wide=is_cluster_wide)
    metadata["labels"] |= {"trainer.kubeflow.org/framework": "torch"}
    runtime = {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": metadata,
        "spec": {
            "mlPolicy": {"numNodes": job.nodes, "torch": {}},
            "template": {"spec": job_set_spec(job, node, STEP)},
        },
    }
    train_job = {
        "apiVersion": API_VERSION,
        "kind": "TrainJob",
        "metadata": job.metadata(job.name),
        "spec": {"runtimeRef": {"apiGroup": "trainer.kubeflow.org", "kind": kind, "name": name}, "trainer": trainer},
    }
    return [config_map(job), runtime, train_job]
