"""A JobSet (jobset.x-k8s.io/v1alpha2): needs its controller, nothing of Kubeflow."""

from __future__ import annotations

from typing import Any

from launch.backends.kubernetes.job import Manifest, PodJob
from launch.backends.kubernetes.pod import config_map, container, indexed_job, rendezvous
from launch.backends.kubernetes.restarts import job_set_failure_policy, pod_failure_policy

NODE = "node"  # of the one replicated job and its container


def job_set_spec(job: PodJob, container: dict[str, Any], labels: dict[str, str] | None = None) -> dict[str, Any]:
    """One Job whose pods find each other by name, also before they are ready: <job>-node-0-<index>.<job>"""
    template: dict[str, Any] = {"spec": indexed_job(job, container, pod_failure_policy(NODE))}
    if labels is not None:
        template["metadata"] = {"labels": labels}
    return {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "failurePolicy": job_set_failure_policy(job.restarts),
        "replicatedJobs": [{"name": NODE, "replicas": 1, "template": template}],
    }


def job_set_objects(job: PodJob) -> list[Manifest]:
    """ConfigMap and JobSet."""
    variables = rendezvous(job, master=f"{job.name}-{NODE}-0-0.{job.name}")
    job_set = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": job.metadata(job.name),
        "spec": job_set_spec(job, container(job, NODE, variables)),
    }
    return [config_map(job), job_set]
