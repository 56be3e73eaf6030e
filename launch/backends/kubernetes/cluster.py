"""An API server through the `kubernetes` client, and what its refusals mean, one sentence each.

Nothing here imports the client before it is needed: it comes with `megalite[k8s]`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.backends.kubernetes.job import Manifest
from launch.errors import LaunchError

PLURALS = {  # as the address of an object has them, and whether it lies in a namespace
    "JobSet": ("jobsets", True),
    "TrainJob": ("trainjobs", True),
    "TrainingRuntime": ("trainingruntimes", True),
    "ClusterTrainingRuntime": ("clustertrainingruntimes", False),
    "PyTorchJob": ("pytorchjobs", True),
}
CONTROLLERS = {  # what makes an API server know a group of objects
    "jobset.x-k8s.io": "the JobSet controller",
    "trainer.kubeflow.org": "Kubeflow Trainer v2",
    "kubeflow.org": "Kubeflow's Training Operator v1",
}
TIMEOUT_S = (5, 30)  # to connect, and for an answer


class ClusterError(LaunchError):
    """What an API server refuses; `status` is that of HTTP, None where it does not answer."""

    def __init__(self, sentence: str, status: int | None) -> None:
        super().__init__(sentence)
        self.status = status


class Cluster:
    """What a context of a kubeconfig stands for, and the namespace that is meant there."""

    def __init__(self, context: str, namespace: str, settings: Any) -> None:
        from kubernetes import client

        self.context, self.namespace, self.server = context, namespace, settings.host
        connection = client.ApiClient(settings)
        self._core, self._custom = client.CoreV1Api(connection), client.CustomObjectsApi(connection)

    def __str__(self) -> str:
        return f"{self.server} (context {self.context}, namespace {self.namespace})"

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> None:
        """Raises ClusterError. `dry_run`: the server looks at it and keeps nothing."""
        # without Strict, a server drops the fields that it does not know and says nothing
        options: dict[str, Any] = {"field_validation": "Strict", "_request_timeout": TIMEOUT_S}
        if dry_run:
            options["dry_run"] = "All"
        with self._answering(_name(manifest), manifest["apiVersion"]):
            if manifest["kind"] == "ConfigMap":
                self._core.create_namespaced_config_map(self.namespace, manifest, **options)
                return
            group, version, plural, is_namespaced = _address(manifest)
            if is_namespaced:
                self._custom.create_namespaced_custom_object(
                    group, version, self.namespace, plural, manifest, **options
                )
            else:
                self._custom.create_cluster_custom_object(group, version, plural, manifest, **options)

    def remove(self, manifest: Manifest) -> None:
        """Raises ClusterError."""
        name = manifest["metadata"]["name"]
        with self._answering(_name(manifest), manifest["apiVersion"]):
            if manifest["kind"] == "ConfigMap":
                self._core.delete_namespaced_config_map(name, self.namespace, _request_timeout=TIMEOUT_S)
                return
            group, version, plural, is_namespaced = _address(manifest)
            place = (group, version, self.namespace, plural) if is_namespaced else (group, version, plural)
            delete = "delete_namespaced_custom_object" if is_namespaced else "delete_cluster_custom_object"
            getattr(self._custom, delete)(*place, name, _request_timeout=TIMEOUT_S)

    def claim_modes(self, name: str) -> list[str]:
        """How a PersistentVolumeClaim can be mounted. Raises ClusterError."""
        with self._answering(f"PersistentVolumeClaim {name}", "v1"):
            claim = self._core.read_namespaced_persistent_volume_claim(name, self.namespace, _request_timeout=TIMEOUT_S)
            return list(claim.spec.access_modes or [])

    @contextmanager
    def _answering(self, what: str, api_version: str) -> Iterator[None]:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            yield
        except ApiException as error:
            raise ClusterError(f"{what}: {self._meaning(error, what, api_version)}", error.status) from None
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            why = str(reason).rpartition(": ")[2] or type(reason).__name__
            raise ClusterError(f"the API server {self} cannot be reached: {why}", None) from None

    def _meaning(self, error: Any, what: str, api_version: str) -> str:
        message, named = _answer(error)
        group = api_version.partition("/")[0]
        match error.status:
            case 401:
                return f"{self} does not know you: sign in again, or choose another --context"
            case 403 if what.startswith("Cluster"):
                return f"you may not do that there: {message}; --runtime namespace needs no right over the cluster"
            case 403:
                return f"you may not do that there: {message}"
            case 404 if named == "namespaces":
                return f"there is no namespace {self.namespace}: create it, or name another with --namespace"
            case 404 if group in CONTROLLERS:
                return f"the cluster knows no {api_version}: {CONTROLLERS[group]} is not installed there"
            case 409:
                return f"it is already there: give another --name, or first kubectl delete {what.replace(' ', '/')}"
        return f"the server refused it with {error.status}: {message}"


def open_cluster(context: str | None, namespace: str | None) -> Cluster:
    """What KUBECONFIG, or ~/.kube/config, says where it is not given; nothing is sent yet. Raises LaunchError."""
    try:
        from kubernetes import client, config
    except ImportError:
        raise LaunchError("--submit needs the kubernetes client: pip install 'megalite[k8s]'") from None
    import yaml

    path = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if not any(Path(each).expanduser().is_file() for each in path.split(os.pathsep)):
        raise LaunchError(
            f"there is no kubeconfig at {path}, so no API server is known: set KUBECONFIG, or write the manifest with "
            "--output and hand it on"
        )
    settings = client.Configuration()
    settings.retries = 0
    try:
        known, current = config.list_kube_config_contexts(path)
        chosen = current if context is None else {each["name"]: each for each in known}.get(context)
        if chosen is None:
            names = ", ".join(each["name"] for each in known)
            raise LaunchError(f'--context "{context}" is not in the kubeconfig {path}, which has {names}')
        config.load_kube_config(path, context=chosen["name"], client_configuration=settings)
    except (config.ConfigException, yaml.YAMLError, AttributeError, TypeError) as error:
        raise LaunchError(f"the kubeconfig {path} cannot be used: {' '.join(str(error).split())}") from None
    return Cluster(chosen["name"], namespace or chosen["context"].get("namespace") or "default", settings)


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"


def _address(manifest: Manifest) -> tuple[str, str, str, bool]:
    group, version = manifest["apiVersion"].split("/")
    return group, version, *PLURALS[manifest["kind"]]


def _answer(error: Any) -> tuple[str, str | None]:
    """The server's own words, and the kind of object that they are about."""
    try:
        status = json.loads(error.body)
        return " ".join(str(status["message"]).split()), (status.get("details") or {}).get("kind")
    except (TypeError, ValueError, KeyError):
        return " ".join(str(error.body or error.reason).split()), None
