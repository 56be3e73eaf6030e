"""A TrainJob of Kubeflow Trainer v2 (trainer.kubeflow.org/v1alpha1) with a runtime of its own.

The runtime says how pods are made: volumes, shared memory, what a failure means. The TrainJob says what runs in them.
Trainer's torch plugin sets the PET_* variables and makes a JobSet of both.
"""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.backends.kubernetes.jobset import NODE, job_set_spec
from launch.backends.kubernetes.pod import config_map, container

API_VERSION = "trainer.kubeflow.org/v1alpha1"
STEP = {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}  # by which Trainer knows the job of the ranks


def train_job_objects(job: PodJob, *, is_cluster_wide: bool = True) -> list[Manifest]:
    """ConfigMap, runtime and TrainJob, in the order in which Trainer wants them."""
    kind = "ClusterTrainingRuntime" if is_cluster_wide else "TrainingRuntime"
    # runtimes of all namespaces share their names
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
