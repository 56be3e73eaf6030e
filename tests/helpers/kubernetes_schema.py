"""Validates Kubernetes objects by the models of kubeflow-trainer-api, like an API server with strict validation.

The models check types but ignore unknown fields, so an object is parsed and written again: what is then missing or
different is a mistake. Rules that only a server knows (between fields, quotas, webhooks) are not known here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, ValidationError, model_validator

from launch.backends.kubernetes.manifests import Manifest

CONTAINER = "pytorch"  # the name that the Training Operator requires


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ReplicaSpec(_Strict):
    """Pods of one role, as the Training Operator checks them."""

    replicas: Annotated[StrictInt, Field(ge=1)]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: dict[str, Any]


class ReplicaSpecs(_Strict):
    """One master, and workers if there are several nodes."""

    Master: ReplicaSpec
    Worker: ReplicaSpec | None = None

    @model_validator(mode="after")
    def _one_master(self) -> Self:
        if self.Master.replicas != 1:
            raise ValueError("Master.replicas must be 1")
        return self


class RunPolicy(_Strict):
    """Limits of the job, and cleanup after it."""

    cleanPodPolicy: Literal["All", "Running", "None"] | None = None
    ttlSecondsAfterFinished: Annotated[StrictInt, Field(ge=0)] | None = None
    activeDeadlineSeconds: Annotated[StrictInt, Field(ge=1)] | None = None
    backoffLimit: Annotated[StrictInt, Field(ge=0)] | None = None
    suspend: bool | None = None


class PyTorchJobSpec(_Strict):
    """Spec of a PyTorchJob."""

    nprocPerNode: Annotated[StrictStr, Field(pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")] | None = None
    runPolicy: RunPolicy | None = None
    pytorchReplicaSpecs: ReplicaSpecs


class PyTorchJob(_Strict):
    """A PyTorchJob, for which kubeflow-trainer-api has no model."""

    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: dict[str, Any]
    spec: PyTorchJobSpec


MODELS = {
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): "TrainerV1alpha1ClusterTrainingRuntime",
}
PYTORCH_JOB = ("kubeflow.org/v1", "PyTorchJob")
NETWORK_POLICY = ("networking.k8s.io/v1", "NetworkPolicy")
METADATA, POD_TEMPLATE = "IoK8sApimachineryPkgApisMetaV1ObjectMeta", "IoK8sApiCoreV1PodTemplateSpec"


def problems(manifest: Manifest) -> list[str]:
    """Returns the problems of an object, each with its position."""
    kind = (manifest.get("apiVersion"), manifest.get("kind"))
    if kind == PYTORCH_JOB:
        return _problems_of_pytorch_job(manifest)
    if kind == NETWORK_POLICY:
        return _problems_of_network_policy(manifest)
    if kind not in MODELS:
        return [f"kind: {kind[1]} of {kind[0]} is not known"]
    return _round_trip(MODELS[kind], manifest, "")


def _problems_of_network_policy(manifest: Manifest) -> list[str]:
    """Uses the models of the `kubernetes` client, since kubeflow-trainer-api has none of this kind."""
    from kubernetes.client import ApiClient

    client = ApiClient()
    try:
        policy = client._ApiClient__deserialize(manifest, "V1NetworkPolicy")
    except (AttributeError, TypeError, ValueError) as error:
        return [f"the object has not the shape of V1NetworkPolicy: {error}"]
    return list(_differences(manifest, client.sanitize_for_serialization(policy), ""))


def _problems_of_pytorch_job(manifest: Manifest) -> list[str]:
    try:
        PyTorchJob.model_validate(manifest)
    except ValidationError as error:
        return _sentences(error, "")
    found = _round_trip(METADATA, manifest["metadata"], "metadata")
    for role, replica in manifest["spec"]["pytorchReplicaSpecs"].items():
        where = f"spec.pytorchReplicaSpecs.{role}.template"
        template_problems = _round_trip(POD_TEMPLATE, replica["template"], where)
        containers = [] if template_problems else replica["template"].get("spec", {}).get("containers", [])
        if not template_problems and CONTAINER not in {container["name"] for container in containers}:
            template_problems = [f'{where}.spec must have a container named "{CONTAINER}"']
        found += template_problems
    return found


def _round_trip(model: str, given: dict[str, Any], where: str) -> list[str]:
    from kubeflow_trainer_api import models

    try:
        kept = getattr(models, model).from_dict(given).to_dict()
    except ValidationError as error:
        return _sentences(error, where)
    except (
        AttributeError,
        KeyError,
        TypeError,
        ValueError,
    ) as error:  # text in place of a mapping, malformed quantities
        return [f"{where or 'the object'} has not the shape of {model}: {str(error).partition(chr(10))[0]}"]
    return list(_differences(given, kept, where))


def _sentences(error: ValidationError, where: str) -> list[str]:
    return [
        f"{'.'.join(filter(None, [where, *map(str, problem['loc'])]))}: {problem['msg']}" for problem in error.errors()
    ]


def _differences(given: Any, kept: Any, where: str) -> Iterator[str]:
    if isinstance(given, dict) and isinstance(kept, dict):
        for name, value in given.items():
            place = f"{where}.{name}" if where else str(name)
            if name not in kept:
                yield f"{place}: there is no such field"
            else:
                yield from _differences(value, kept[name], place)
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for index, (value, other) in enumerate(zip(given, kept, strict=True)):
            yield from _differences(value, other, f"{where}[{index}]")
    elif given != kept or type(given) is not type(kept):
        yield f"{where}: {given!r} is not what such a field holds"
