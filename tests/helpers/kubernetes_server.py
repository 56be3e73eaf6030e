"""A small Kubernetes API server on this machine: real HTTP for the real client, and objects looked at as strictly as a
real one looks at them. It stores, and makes nothing of what it stores.

What it knows: bearer tokens, namespaces, groups that are not installed, rights, `dryRun=All`, `fieldValidation=Strict`,
duplicates, claims, and what the webhooks of JobSet and Trainer want of references between objects.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.helpers.kubernetes_schema import problems

GROUPS = {  # group/version -> plural -> kind, and whether it lies in a namespace
    "v1": {"configmaps": ("ConfigMap", True), "persistentvolumeclaims": ("PersistentVolumeClaim", True)},
    "jobset.x-k8s.io/v1alpha2": {"jobsets": ("JobSet", True)},
    "networking.k8s.io/v1": {"networkpolicies": ("NetworkPolicy", True)},
    "kubeflow.org/v1": {"pytorchjobs": ("PyTorchJob", True)},
    "trainer.kubeflow.org/v1alpha1": {
        "trainjobs": ("TrainJob", True),
        "trainingruntimes": ("TrainingRuntime", True),
        "clustertrainingruntimes": ("ClusterTrainingRuntime", False),
    },
}
TOKEN = "let-me-in"


class Refusal(Exception):
    """An answer that is no success."""

    def __init__(self, code: int, reason: str, message: str, **details: str) -> None:
        super().__init__(message)
        self.code = code
        self.status = {
            **{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": code},
            **{"reason": reason, "message": message, "details": details},
        }


class ApiServer:
    """`with ApiServer() as server:`; what it holds is in `objects`, by namespace (empty: none), kind and name."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.namespaces = {"default", "team"}
        self.installed = set(GROUPS)
        self.forbidden: set[tuple[str, str]] = set()  # method and plural
        self.requests: list[str] = []
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def add_claim(self, name: str, *modes: str, namespace: str = "default") -> None:
        """A PersistentVolumeClaim that is there already."""
        claim = {
            **{"apiVersion": "v1", "kind": "PersistentVolumeClaim"},
            **{"metadata": {"name": name, "namespace": namespace}, "spec": {"accessModes": list(modes)}},
        }
        self.objects[namespace, "PersistentVolumeClaim", name] = claim

    def made(self) -> list[tuple[str, str, str]]:
        """What clients have created, in its order."""
        return [key for key in self.objects if key[1] != "PersistentVolumeClaim"]

    def write_kubeconfig(self, path: Path, *, token: str = TOKEN, namespace: str | None = None) -> Path:
        """As a user has it, with this server in its only context, "here"."""
        context = {"cluster": "here", "user": "me"} | ({"namespace": namespace} if namespace else {})
        config = {
            **{"apiVersion": "v1", "kind": "Config", "current-context": "here"},
            "clusters": [{"name": "here", "cluster": {"server": self.url}}],
            "users": [{"name": "me", "user": {"token": token}}],
            "contexts": [{"name": "here", "context": context}],
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def answer(self, method: str, path: str, query: dict[str, list[str]], token: str, body: Any) -> dict[str, Any]:
        """One request. Raises Refusal, or LookupError for an address that is not known."""
        if token != f"Bearer {TOKEN}":
            raise Refusal(401, "Unauthorized", "Unauthorized")
        kind, namespace, plural, name = self._place(path)
        if (method, plural) in self.forbidden:
            what = f'{plural} is forbidden: User "me" cannot {method.lower()} resource "{plural}"'
            raise Refusal(403, "Forbidden", what, kind=plural)
        if method == "POST":
            return self._create(kind, namespace, plural, query, body)
        key = (namespace, kind, name)
        if key not in self.objects:
            raise Refusal(404, "NotFound", f'{plural} "{name}" not found', kind=plural, name=name)
        return self.objects.pop(key) if method == "DELETE" else self.objects[key]

    def _place(self, path: str) -> tuple[str, str, str, str]:
        words = path.strip("/").split("/")
        group = "v1" if words[0] == "api" else "/".join(words[1:3])
        if group not in self.installed:
            raise LookupError(group)
        rest = words[2:] if words[0] == "api" else words[3:]
        namespace, rest = (rest[1], rest[2:]) if rest[0] == "namespaces" else ("", rest)
        kind, is_namespaced = GROUPS[group][rest[0]]
        if is_namespaced != bool(namespace):
            raise LookupError(path)
        return kind, namespace, rest[0], rest[1] if len(rest) > 1 else ""

    def _create(self, kind: str, namespace: str, plural: str, query: dict[str, list[str]], body: Any) -> dict[str, Any]:
        if namespace and namespace not in self.namespaces:
            raise Refusal(404, "NotFound", f'namespaces "{namespace}" not found', kind="namespaces", name=namespace)
        if body.get("kind") != kind or body["metadata"].get("namespace", namespace) != namespace:
            raise Refusal(400, "BadRequest", "the object in the request is of another kind or namespace")
        name = body["metadata"]["name"]
        found = problems(body)
        unknown = [each for each in found if each.endswith("there is no such field")]
        if unknown and query.get("fieldValidation") == ["Strict"]:
            raise Refusal(400, "BadRequest", f'strict decoding error: unknown field "{unknown[0].partition(":")[0]}"')
        found = [each for each in found if each not in unknown] + list(self._wrong_references(namespace, body))
        if found:
            message = f'{kind} "{name}" is invalid: {found[0]}'
            raise Refusal(422, "Invalid", message, kind=kind, name=name)
        key = (namespace, kind, name)
        if key in self.objects:
            raise Refusal(409, "AlreadyExists", f'{plural} "{name}" already exists', kind=plural, name=name)
        if query.get("dryRun") != ["All"]:
            self.objects[key] = body
        return body

    def _wrong_references(self, namespace: str, body: dict[str, Any]) -> Iterator[str]:
        for spec in _pod_specs(body):
            volumes = [volume["name"] for volume in spec.get("volumes", [])]
            for container in spec["containers"]:
                mounts = container.get("volumeMounts", [])
                for mount in mounts:
                    if mount["name"] not in volumes:
                        yield f"spec.containers.volumeMounts: Not found: {mount['name']}"
                if len({mount["mountPath"] for mount in mounts}) < len(mounts):
                    yield "spec.containers.volumeMounts: mountPath must be unique"
            if len(set(volumes)) < len(volumes):
                yield "spec.volumes: Duplicate value"
        reference = body.get("spec", {}).get("runtimeRef")
        if reference is not None:
            place = "" if reference["kind"] == "ClusterTrainingRuntime" else namespace
            if (place, reference["kind"], reference["name"]) not in self.objects:
                yield "spec.runtimeRef: specified trainingRuntime must be created before the TrainJob is created"


def _pod_specs(value: Any) -> Iterator[dict[str, Any]]:
    """All pod specs inside an object."""
    if isinstance(value, dict):
        if "containers" in value:
            yield value
        for inside in value.values():
            yield from _pod_specs(inside)
    elif isinstance(value, list):
        for inside in value:
            yield from _pod_specs(inside)


def _handler(server: ApiServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self._answer()

        do_GET = do_DELETE = do_POST

        def _answer(self) -> None:
            address = urlsplit(self.path)
            server.requests.append(f"{self.command} {self.path}")
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "null")
            try:
                token = self.headers.get("Authorization", "")
                found = server.answer(self.command, address.path, parse_qs(address.query), token, body)
                code, content = 201 if self.command == "POST" else 200, json.dumps(found)
            except Refusal as refusal:
                code, content = refusal.code, json.dumps(refusal.status)
            except LookupError:
                code, content = 404, "404 page not found\n"
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if content.startswith("404") else "application/json")
            self.send_header("Content-Length", str(len(content.encode())))
            self.end_headers()
            self.wfile.write(content.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Not to the console."""

    return Handler
