"""What a run on Kubernetes is, whatever kind of object it becomes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from launch.backends.kubernetes.words import Claim, SecretValue

Manifest = dict[str, Any]  # one object, as YAML or JSON holds it


@dataclass(frozen=True)
class Resources:
    """What a pod asks for beside its GPUs; None: nothing."""

    cpu: str | None = None
    memory: str | None = None
    shared_memory: str | None = None  # limit of /dev/shm
    rdma: tuple[str, int] | None = None  # name and number of a device plugin's resource


@dataclass(frozen=True)
class PodJob:
    """One pod per node, all of them alike."""

    name: str
    image: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0: on the CPU
    config: str  # YAML, with the paths that pods see
    output: Claim
    data: Claim | None = None
    namespace: str | None = None  # None: that of whoever applies the manifest
    resources: Resources = Resources()
    node_selector: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, SecretValue] = field(default_factory=dict)
    service_account: str | None = None
    restarts: int = 5
    grace_s: int = 300  # from SIGTERM until ranks that still run are killed

    @property
    def config_name(self) -> str:
        """Of the ConfigMap."""
        return f"{self.name}-config"

    def metadata(self, name: str, *, is_cluster_wide: bool = False) -> dict[str, Any]:
        """Of one of its objects."""
        metadata: dict[str, Any] = {"name": name, "labels": self.object_labels()}
        if self.namespace is not None and not is_cluster_wide:
            metadata["namespace"] = self.namespace
        return metadata

    def object_labels(self) -> dict[str, str]:
        """Of all its objects and pods."""
        return {"app.kubernetes.io/name": "megalite", "app.kubernetes.io/instance": self.name, **self.labels}
