"""Talks to an API server through the `kubernetes` client, and explains its refusals in one sentence each.

The client comes with `megalite[k8s]` and is imported only when needed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from launch.backends.kubernetes.manifests import Manifest, PodJob, name_of
from launch.errors import LaunchError

CONTROLLERS = {  # API group -> what installs it
    "jobset.x-k8s.io": "the JobSet controller",
    "trainer.kubeflow.org": "Kubeflow Trainer v2",
    "kubeflow.org": "Kubeflow's Training Operator v1",
}
TIMEOUT_S = (5, 30)  # to connect, and for an answer


class ClusterError(LaunchError):
    """Refusal of an API server; `status` is the HTTP status, None if the server does not answer."""

    def __init__(self, sentence: str, status: int | None) -> None:
        super().__init__(sentence)
        self.status = status


class KubernetesCluster:
    """API server and namespace of a kubeconfig context."""

    def __init__(self, context: str, namespace: str, settings: Any) -> None:
        from kubernetes import client

        self.context, self.namespace, self.server = context, namespace, settings.host
        connection = client.ApiClient(settings)
        self._core, self._custom = client.CoreV1Api(connection), client.CustomObjectsApi(connection)
        self._networking = client.NetworkingV1Api(connection)

    def __str__(self) -> str:
        return f"{self.server} (context {self.context}, namespace {self.namespace})"

    def create(self, manifest: Manifest, *, dry_run: bool = False) -> None:
        """Creates an object; in a dry run the server checks it but stores nothing. Raises ClusterError."""
        # without Strict, a server silently drops fields that it does not know
        options = {"field_validation": "Strict", **({"dry_run": "All"} if dry_run else {})}
        self._call("create", manifest, body=manifest, **options)

    def remove(self, manifest: Manifest) -> None:
        """Deletes an object after another was refused. The first error is the one to report, so this raises none."""
        with suppress(ClusterError):
            self._call("delete", manifest, name=manifest["metadata"]["name"])

    def claim_modes(self, name: str) -> list[str]:
        """Returns the access modes of a PersistentVolumeClaim. Raises ClusterError."""
        read, what = self._core.read_namespaced_persistent_volume_claim, f"PersistentVolumeClaim {name}"
        claim = self._request(read, what, "v1", name=name, namespace=self.namespace)
        return list(claim.spec.access_modes or [])

    def _call(self, verb: str, manifest: Manifest, **arguments: Any) -> None:
        """Calls the client's method for objects of this kind."""
        kind, api_version = manifest["kind"], manifest["apiVersion"]
        place = {} if kind.startswith("Cluster") else {"namespace": self.namespace}
        if kind == "ConfigMap":
            method = getattr(self._core, f"{verb}_namespaced_config_map")
        elif kind == "NetworkPolicy":
            method = getattr(self._networking, f"{verb}_namespaced_network_policy")
        else:
            group, version = api_version.split("/")
            method = getattr(self._custom, f"{verb}_{'namespaced' if place else 'cluster'}_custom_object")
            place |= {"group": group, "version": version, "plural": f"{kind.lower()}s"}
        self._request(method, name_of(manifest), api_version, **place, **arguments)

    def _request(self, method: Callable[..., Any], what: str, api_version: str, **arguments: Any) -> Any:
        from kubernetes.client.exceptions import ApiException
        from urllib3.exceptions import HTTPError

        try:
            return method(**arguments, _request_timeout=TIMEOUT_S)
        except ApiException as error:
            raise ClusterError(f"{what}: {self._meaning(error, what, api_version)}", error.status) from None
        except HTTPError as error:
            reason = getattr(error, "reason", None) or error
            why = str(reason).rpartition(": ")[2] or type(reason).__name__
            raise ClusterError(f"the API server {self} cannot be reached: {why}", None) from None

    def _meaning(self, error: Any, what: str, api_version: str) -> str:
        try:
            status = json.loads(error.body)
            message, details = str(status["message"]), status.get("details") or {}
        except (TypeError, ValueError, KeyError):
            message, details = str(error.body or error.reason), {}
        message = " ".join(message.split())
        group = api_version.partition("/")[0]
        match error.status:
            case 401:
                return f"{self} does not know you: sign in again, or choose another --context"
            case 403 if what.startswith("Cluster"):
                return f"you may not do that there: {message}; --runtime namespace needs no right over the cluster"
            case 403 if what.startswith("NetworkPolicy"):
                return (
                    f"you may not do that there: {message}; --no-network-policy leaves it out, and all pods of the "
                    "cluster can then reach the ranks"
                )
            case 403:
                return f"you may not do that there: {message}"
            case 404 if details.get("kind") == "namespaces":
                return f"there is no namespace {self.namespace}: create it, or name another with --namespace"
            case 404 if group in CONTROLLERS:
                return f"the cluster knows no {api_version}: {CONTROLLERS[group]} is not installed there"
            case 409:
                return f"it is already there: give another --name, or first kubectl delete {what.replace(' ', '/')}"
        return f"the server refused it with {error.status}: {message}"


def open_cluster(context: str | None, namespace: str | None) -> KubernetesCluster:
    """Opens a context of KUBECONFIG or ~/.kube/config, by default the current one.

    Sends nothing. Raises LaunchError.
    """
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
    return KubernetesCluster(chosen["name"], namespace or chosen["context"].get("namespace") or "default", settings)


def check_claims(cluster: KubernetesCluster, job: PodJob) -> list[str]:
    """Checks that the claims exist and that all nodes can mount them; returns notices. Raises LaunchError."""
    for name in dict.fromkeys(claim.name for claim in (job.output, job.data) if claim is not None):
        try:
            modes = cluster.claim_modes(name)
        except ClusterError as error:
            if error.status == 403:
                return [f"the claims were not looked at: {error}"]
            if error.status == 404:
                raise LaunchError(
                    f"there is no PersistentVolumeClaim {name} in namespace {cluster.namespace}, for which pods would "
                    "wait for ever: create it, or name another"
                ) from None
            raise
        is_shared = "ReadWriteMany" in modes or (name != job.output.name and "ReadOnlyMany" in modes)
        if job.nodes > 1 and not is_shared:
            raise LaunchError(
                f"the claim {name} is {' and '.join(modes)}, so {job.nodes} nodes cannot mount it: use one that is "
                "ReadWriteMany"
            )
    return []


def create(cluster: KubernetesCluster, objects: Sequence[Manifest]) -> None:
    """Creates all objects in order. If one is refused, removes the others and raises LaunchError."""
    with ExitStack() as undo:
        for manifest in objects:
            cluster.create(manifest)
            undo.callback(cluster.remove, manifest)
        undo.pop_all()


def check(cluster: KubernetesCluster, objects: Sequence[Manifest]) -> list[str]:
    """Lets the server check all objects in a dry run; returns notices. Raises LaunchError.

    A TrainJob is left out, because Trainer refuses one whose runtime is not stored.
    """
    left_out = []
    for manifest in objects:
        if "runtimeRef" in manifest.get("spec", {}):
            left_out.append(f"the server has not looked at the {manifest['kind']}, whose runtime must be there before")
        else:
            cluster.create(manifest, dry_run=True)
    return left_out
