"""Properties of a run on Kubernetes that all kinds of jobs share, its config in pods, and YAML output."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import yaml

from launch.backends.kubernetes.parsing import Claim, Resources, SecretValue
from launch.errors import LaunchError
from launch.huggingface.hub_folder import is_hub_id
from megalite.config import Config


def config_in_pods(config: Config, output: Claim, data: Claim | None) -> tuple[Config, list[str]]:
    """Returns the config with run_dir on the output claim, and notices.

    Relative paths start at the root of a claim: `data.path` at the data claim if there is one, all others at the output
    claim. Raises LaunchError if the run folder would be lost with its pod.
    """
    if data is not None and data.path == output.path:
        raise LaunchError(
            f"--data-claim and --output-claim are both seen at {data.path}: give one of them another path"
        )
    claims = [output] if data is None else [output, data]
    notices = []

    def placed(path: str, option: str, home: Claim) -> str:
        place = _placed(path, option, home)
        if not any(place.is_relative_to(claim.path) for claim in claims):
            notices.append(f"{option} {place} is on no claim: every pod must have it in its image")
        return str(place)

    run_dir = _placed(str(config.run_dir), "run_dir", output)
    if not run_dir.is_relative_to(output.path):
        raise LaunchError(
            f"run_dir {run_dir} is not on the claim {output.name}, which pods see at {output.path}, so checkpoints "
            f"would be lost with a pod: write it relative to the claim, as in run_dir=runs/{run_dir.name}"
        )
    values = config.model_dump(mode="json")
    values["run_dir"] = str(run_dir)
    values["data"]["path"] = [placed(path, "data.path", data or output) for path in config.data.path]
    source = config.training.initialize_from
    if source is not None and not is_hub_id(source):
        values["training"]["initialize_from"] = placed(str(source), "training.initialize_from", output)
    return Config.model_validate(values), notices


def _placed(path: str, option: str, home: Claim) -> PurePosixPath:
    place = PurePosixPath(posixpath.normpath(home.path / path))  # an absolute path stays itself
    if not PurePosixPath(path).is_absolute() and not place.is_relative_to(home.path):
        raise LaunchError(f"{option} {path} leads out of the claim {home.name}: write it without ..")
    return place


Manifest = dict[str, Any]  # one Kubernetes object


def name_of(manifest: Manifest) -> str:
    """Returns kind and name of an object, for messages."""
    return f"{manifest['kind']} {manifest['metadata']['name']}"


@dataclass(frozen=True)
class PodJob:
    """One pod per node, all of them alike."""

    name: str
    image: str
    nodes: int
    ranks_per_node: int
    gpus_per_node: int  # 0: on the CPU
    config: str  # YAML, with the paths inside pods
    output: Claim
    data: Claim | None = None
    namespace: str | None = None  # None: the default of `kubectl apply`
    resources: Resources = field(default_factory=Resources)
    node_selector: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    secrets: dict[str, SecretValue] = field(default_factory=dict)
    service_account: str | None = None
    restarts: int = 5
    grace_s: int = 300  # from SIGTERM until remaining ranks are killed

    @property
    def config_name(self) -> str:
        """The name of the ConfigMap."""
        return f"{self.name}-config"

    def metadata(self, name: str, *, is_cluster_wide: bool = False) -> dict[str, Any]:
        """Returns the metadata of one of the objects."""
        metadata: dict[str, Any] = {"name": name, "labels": self.object_labels()}
        if self.namespace is not None and not is_cluster_wide:
            metadata["namespace"] = self.namespace
        return metadata

    def object_labels(self) -> dict[str, str]:
        """Returns the labels of all objects and pods."""
        return {"app.kubernetes.io/name": "megalite", "app.kubernetes.io/instance": self.name, **self.labels}


PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9./_-]*")
SPECIAL = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}  # not a string to some YAML readers


class _KubernetesDumper(yaml.SafeDumper):
    """Quotes all text that may be read as a number or bool; PyYAML and kubectl differ about values such as 1e3."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    is_plain = PLAIN.fullmatch(value) and value.lower() not in SPECIAL
    style = "|" if "\n" in value else "" if is_plain else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_KubernetesDumper.add_representer(str, _text)
_KubernetesDumper.ignore_aliases = lambda *_: True  # type: ignore[method-assign]


def to_yaml(objects: Sequence[Manifest], heading: str) -> str:
    """Writes a comment, and the objects as one document each."""
    lines = "".join(f"# {line}\n" for line in heading.splitlines())
    return lines + yaml.dump_all(
        objects, Dumper=_KubernetesDumper, sort_keys=False, allow_unicode=True, width=4096, explicit_start=True
    )


def from_yaml(text: str) -> list[Manifest]:
    """Reads objects back."""
    return list(yaml.safe_load_all(text))
