"""PyTorchJob v1 as Training Operator 1.9 takes it: no package has models of it, and its operator makes no new version.

Only the fields that a run can want; anything else is refused. Metadata and pod templates are for kubeflow-trainer-api's
models to check (validate.py). The rules are those of the operator's own webhook.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StrictInt, StrictStr, model_validator

from launch.backends.kubernetes.pytorchjob import CONTAINER


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Container(BaseModel):
    """What the operator itself wants of it."""

    name: StrictStr
    image: Annotated[StrictStr, Field(min_length=1)]


class PodSpec(BaseModel):
    """What the operator itself wants of it."""

    containers: list[Container]

    @model_validator(mode="after")
    def _has_its_container(self) -> Self:
        if CONTAINER not in {each.name for each in self.containers}:
            raise ValueError(f'must have a container named "{CONTAINER}"')
        return self


class PodTemplate(BaseModel):
    """What the operator itself wants of it."""

    spec: PodSpec


class ReplicaSpec(_Strict):
    """Pods of one role."""

    replicas: Annotated[StrictInt, Field(ge=1)]
    restartPolicy: Literal["Always", "OnFailure", "Never", "ExitCode"]
    template: PodTemplate


class ReplicaSpecs(_Strict):
    """The master, and workers where there are several nodes."""

    Master: ReplicaSpec
    Worker: ReplicaSpec | None = None

    @model_validator(mode="after")
    def _one_master(self) -> Self:
        if self.Master.replicas != 1:
            raise ValueError("Master.replicas must be 1")
        return self


class RunPolicy(_Strict):
    """When the job ends and what it leaves."""

    cleanPodPolicy: Literal["All", "Running", "None"] | None = None
    ttlSecondsAfterFinished: Annotated[StrictInt, Field(ge=0)] | None = None
    activeDeadlineSeconds: Annotated[StrictInt, Field(ge=1)] | None = None
    backoffLimit: Annotated[StrictInt, Field(ge=0)] | None = None
    suspend: bool | None = None


class PyTorchJobSpec(_Strict):
    """What is wanted."""

    nprocPerNode: Annotated[StrictStr, Field(pattern=r"^(auto|cpu|gpu|[1-9][0-9]*)$")] | None = None
    runPolicy: RunPolicy | None = None
    pytorchReplicaSpecs: ReplicaSpecs


class PyTorchJob(_Strict):
    """The whole object."""

    apiVersion: Literal["kubeflow.org/v1"]
    kind: Literal["PyTorchJob"]
    metadata: dict[str, Any]
    spec: PyTorchJobSpec
