"""Objects against the models of kubeflow-trainer-api, as strictly as an API server with strict field validation.

Those models check types but pass over fields that they do not know, so an object is read and written again: what is
then gone, or different, is a mistake. What only a server knows (rules between fields, quotas, other webhooks) is not
checked here.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from launch.backends.kubernetes.job import Manifest
from launch.backends.kubernetes.pytorchjob_schema import PyTorchJob

MODELS = {
    ("v1", "ConfigMap"): "IoK8sApiCoreV1ConfigMap",
    ("jobset.x-k8s.io/v1alpha2", "JobSet"): "JobsetV1alpha2JobSet",
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): "TrainerV1alpha1TrainJob",
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): "TrainerV1alpha1TrainingRuntime",
    ("trainer.kubeflow.org/v1alpha1", "ClusterTrainingRuntime"): "TrainerV1alpha1ClusterTrainingRuntime",
}
PYTORCH_JOB = ("kubeflow.org/v1", "PyTorchJob")
METADATA, POD_TEMPLATE = "IoK8sApimachineryPkgApisMetaV1ObjectMeta", "IoK8sApiCoreV1PodTemplateSpec"


def can_validate() -> bool:
    """Whether `megalite[k8s]` is installed."""
    return importlib.util.find_spec("kubeflow_trainer_api") is not None


def problems(manifest: Manifest) -> list[str]:
    """What is wrong with an object, each with its place in it."""
    kind = (manifest.get("apiVersion"), manifest.get("kind"))
    if kind == PYTORCH_JOB:
        return _problems_of_pytorch_job(manifest)
    if kind not in MODELS:
        return [f"kind: {kind[1]} of {kind[0]} is not known"]
    return _round_trip(MODELS[kind], manifest, "")


def _problems_of_pytorch_job(manifest: Manifest) -> list[str]:
    try:
        PyTorchJob.model_validate(manifest)
    except ValidationError as error:
        return _sentences(error, "")
    found = _round_trip(METADATA, manifest["metadata"], "metadata")
    for role, replica in manifest["spec"]["pytorchReplicaSpecs"].items():
        found += _round_trip(POD_TEMPLATE, replica["template"], f"spec.pytorchReplicaSpecs.{role}.template")
    return found


def _round_trip(model: str, given: dict[str, Any], where: str) -> list[str]:
    from kubeflow_trainer_api import models

    try:
        kept = getattr(models, model).from_dict(given).to_dict()
    except ValidationError as error:
        return _sentences(error, where)
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # text where a mapping belongs, odd quantities
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
