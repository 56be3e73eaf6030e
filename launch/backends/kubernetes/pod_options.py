"""Checks what users give for pods: names, quantities, claims, variables, paths. Raises LaunchError with one sentence.

These checks work without a cluster, before anything is written; rules that only an API server knows are left to its dry
run (api_server.py).
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path, PurePosixPath
from typing import Any

from launch.conversion.huggingface.folder_lookup import is_hub_id
from launch.errors import LaunchError
from launch.runtime.forwarded_environment import is_secret
from megalite.config import Config
from megalite.config.loading.secrets_in_text import secret_in

LONGEST_LABEL = 63
LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"  # RFC 1123
SUBDOMAIN = rf"{LABEL}(\.{LABEL})*"
QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
UNITS = {  # suffix of a quantity -> factor
    "m": Decimal("0.001"),
    **{unit: Decimal(1000**power) for power, unit in enumerate("kMGTPE", 1)},
    **{f"{unit}i": Decimal(1024**power) for power, unit in enumerate("KMGTPE", 1)},
}
OBJECT_NAME = (rf"(?=.{{1,253}}$){SUBDOMAIN}", "it has lower-case letters, digits, - and .")
FORMS = {  # what a text is to be -> its form, and what to write
    "namespace": (rf"(?=.{{1,63}}$){LABEL}", "use at most 63 lower-case letters, digits and -"),
    "name of a PersistentVolumeClaim": OBJECT_NAME,
    "name of a Secret": OBJECT_NAME,
    "name of a ServiceAccount": OBJECT_NAME,
    "image": (r"(?=.{1,500}$)[A-Za-z0-9][^\s@]*(@sha256:[0-9a-f]{64})?", "write it as registry/name:tag"),
    "key of a label": (
        rf"((?=[^/]{{1,253}}/){SUBDOMAIN}/)?(?=[^/]{{1,63}}$){QUALIFIED}",
        "write it as in example.com/gpu or gpu",
    ),
    "value of a label": (rf"(?=.{{0,63}}$)({QUALIFIED})?", "it has at most 63 letters, digits, -, _ and ."),
    "name of a variable": (r"[A-Za-z_][A-Za-z0-9_]*", "it has letters, digits and _"),
    "quantity": (
        rf"([0-9]+\.?[0-9]*|\.[0-9]+)(?:({'|'.join(UNITS)})|([eE][-+]?[0-9]{{1,2}}))?",
        "write it as in 8, 500m, 1.5, 64Gi or 64G",
    ),
    "resource of a node": (rf"{SUBDOMAIN}/{QUALIFIED}(=0*[1-9][0-9]*)?", "write it as in rdma/hca_shared_devices_a=1"),
    "user": (r"[0-9]{1,10}(:[0-9]{1,10})?", "write UID or UID:GID in numbers, as in 1000:1000; 0 is root"),
}

JOB_NAME = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035, for names that become host names
SUFFIX = "-node-0-{}-abcde"  # follows a job's name in its longest derived name, that of a pod
LEAST_BYTES = 2**20
RESERVED = re.compile(r"PET_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT")
HOME = "/var/lib/megalite"  # empty folder, for caches, of users other than root
TAKEN_PATHS = ("/etc/megalite", "/dev/shm", HOME)
INSTANCE = "app.kubernetes.io/instance"  # label by which a NetworkPolicy finds the pods of a job
LARGEST_ID = 2**31 - 1  # of a user or group, to an API server
Source = dict[str, Any]  # of a variable, as a container has it: {"value": ...} or {"valueFrom": ...}


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim and its mount path in pods."""

    name: str
    path: PurePosixPath


@dataclass(frozen=True)
class PodUser:
    """User and group of the processes in pods, by their numbers."""

    uid: int
    gid: int  # also the group of files on the claims

    @property
    def is_root(self) -> bool:
        return self.uid == 0


DEFAULT_USER = PodUser(1000, 1000)


def check(text: str, what: str, option: str) -> re.Match[str]:
    """Matches a text with the form that FORMS states for `what`, such as an image. Raises LaunchError otherwise."""
    form, advice = FORMS[what]
    match = re.fullmatch(form, text)
    if match is None:
        raise LaunchError(f'{option}: "{text}" is no {what}: {advice}')
    return match


def job_name(name: str | None, run_dir: Path, nodes: int) -> str:
    """Returns the name given, or one derived from the run's folder, if the names of its pods are valid then."""
    if name is None:
        name = suggested_name(run_dir.name)
        if not name:
            raise LaunchError(f"run_dir {run_dir} gives the job no name: give it one with --name")
    longest = LONGEST_LABEL - len(SUFFIX.format(nodes - 1))
    if not re.fullmatch(JOB_NAME, name):
        suggestion = suggested_name(name)
        raise LaunchError(
            f'--name "{name}" is no name for a job: use lower-case letters, digits and -, beginning with a letter'
            + (f', as in "{suggestion}"' if suggestion else "")
        )
    if len(name) > longest:
        raise LaunchError(
            f'--name "{name}" has {len(name)} characters, and the names of its pods, which are longer, may have '
            f"{LONGEST_LABEL}: use at most {longest}"
        )
    return name


def suggested_name(text: str) -> str:
    """Returns the job name closest to `text`; empty if there is none."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-").lstrip("0123456789-")[:40].rstrip("-")


def image_notices(image: str) -> list[str]:
    """Returns a notice if the tag of a valid image does not pin it."""
    check(image, "image", "--image")
    _, colon, tag = image.rpartition("/")[2].partition(":")
    if "@sha256:" in image or (colon and tag != "latest"):
        return []
    return [f"--image {image} can be another image tomorrow, or on another node: give it a tag or a digest"]


def claim(text: str, option: str, default: str) -> Claim:
    """Parses `CLAIM` or `CLAIM:/path`."""
    name, colon, path = text.partition(":")
    check(name, "name of a PersistentVolumeClaim", option)
    mount = PurePosixPath(path if colon else default)
    if not mount.is_absolute() or mount == PurePosixPath("/") or ".." in mount.parts or ":" in str(mount):
        raise LaunchError(f'{option} "{text}": write CLAIM:/path, with an absolute path other than /')
    for taken in map(PurePosixPath, TAKEN_PATHS):
        if mount.is_relative_to(taken) or taken.is_relative_to(mount):
            raise LaunchError(f"{option}: {mount} collides with {taken}, which pods need: choose another path")
    return Claim(name, mount)


def amount(quantity: str, option: str) -> Decimal:
    """Returns the value of a Kubernetes quantity such as `8`, `500m` or `64Gi`."""
    number, unit, exponent = check(quantity, "quantity", option).groups("")
    value = Decimal(number + exponent) * UNITS.get(unit, 1)
    if value <= 0:
        raise LaunchError(f'{option} "{quantity}" must be more than 0')
    return value


def limits(cpu: str | None, memory: str | None, shared_memory: str | None, rdma: str | None) -> dict[str, str]:
    """Returns the limits of a pod besides its GPUs. A memory of `512m`, half a byte, or a plain `64` are mistakes."""
    if cpu is not None and amount(cpu, "--cpu") < Decimal("0.001"):
        raise LaunchError(f'--cpu "{cpu}" is less than a thousandth of a core: write cores, as in 8')
    given = {"--memory": memory, "--shared-memory": shared_memory}
    sizes = {option: amount(text, option) for option, text in given.items() if text is not None}
    for option, size in sizes.items():
        if size < LEAST_BYTES:
            raise LaunchError(f'{option} "{given[option]}" is less than a megabyte: write the unit, as in 64Gi')
    if len(sizes) == 2 and sizes["--shared-memory"] > sizes["--memory"]:
        raise LaunchError(
            f"--shared-memory {shared_memory} is more than --memory {memory}, of which it is a part: raise --memory"
        )
    found = {name: quantity for name, quantity in (("cpu", cpu), ("memory", memory)) if quantity is not None}
    if rdma is not None:
        resource, _, count = check(rdma, "resource of a node", "--rdma")[0].partition("=")
        found[resource] = str(int(count or 1))
    return found


def pairs(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parses `key=value` texts and rejects a repeated key."""
    found: dict[str, str] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise LaunchError(f'{option} "{text}" is not of the form key=value')
        if key in found:
            raise LaunchError(f"{option} names {key} twice: {found[key]} and {value}")
        found[key] = value
    return found


def pod_user(text: str | None, *, pins_memory: bool) -> tuple[PodUser | None, list[str]]:
    """Parses `UID[:GID]`; returns the user, None for that of the image, and notices.

    The default is a user that the `restricted` Pod Security level admits, except for pods that pin memory, which takes
    a capability, and so root.
    """
    if text is None and pins_memory:
        return None, [
            "with --rdma pods run as the image's user with IPC_LOCK, with which root pins memory; the Pod Security "
            "levels restricted and baseline refuse that: --run-as-user 1000 does without, on nodes that do not limit "
            "memlock"
        ]
    if text is None:
        return DEFAULT_USER, [
            f"pods run as user and group {DEFAULT_USER.uid} with an empty home folder {HOME}, which the image and the "
            "claims must admit: name another with --run-as-user UID[:GID]; 0 is root, refused by the Pod Security "
            "level restricted"
        ]
    uid, _, gid = check(text, "user", "--run-as-user")[0].partition(":")
    user = PodUser(int(uid), int(gid or uid))
    if max(user.uid, user.gid) > LARGEST_ID:
        raise LaunchError(f'--run-as-user "{text}": the largest number of a user or group is {LARGEST_ID}')
    if pins_memory and not user.is_root:
        return user, [
            f"user {user.uid} can pin memory for --rdma only on nodes whose container runtime does not limit memlock: "
            "where NCCL cannot register memory, leave --run-as-user out"
        ]
    return user, []


def object_labels(texts: Sequence[str]) -> dict[str, str]:
    """Parses labels of all objects. Rejects the one by which pods of a job know each other, and secrets."""
    found = labels(texts, "--label")
    if INSTANCE in found:
        raise LaunchError(f"--label {INSTANCE}: only pods with this label reach each other: give --name instead")
    for key, value in found.items():
        if (kind := secret_in(value)) is not None:
            raise LaunchError(f"--label {key} holds {kind}, which users of the cluster would see: remove it")
    return found


def labels(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parses labels of nodes or objects."""
    found = pairs(texts, option)
    for key, value in found.items():
        check(key, "key of a label", option)
        check(value, "value of a label", option)
    return found


def variables(plain: Sequence[str], secret: Sequence[str]) -> dict[str, Source]:
    """Parses `NAME=VALUE` texts and `NAME=SECRET:KEY` texts.

    Rejects variables that launchers set, and plain ones that look like secrets.
    """
    values, references = pairs(plain, "--env"), pairs(secret, "--secret-env")
    for option, names in (("--env", values), ("--secret-env", references)):
        for name in names:
            check(name, "name of a variable", option)
            if RESERVED.fullmatch(name):
                raise LaunchError(f"{option}: {name} is what the launcher of a pod sets: leave it out")
    for name, value in values.items():
        if is_secret(name, value):
            raise LaunchError(
                f"--env {name} looks like a secret, and would stand in the manifest for all to read: put it into a "
                f"Secret (kubectl create secret generic SECRET --from-file=KEY=FILE) and give "
                f"--secret-env {name}=SECRET:KEY"
            )
    found: dict[str, Source] = {name: {"value": value} for name, value in values.items()}
    for name, reference in references.items():
        secret_name, colon, key = reference.partition(":")
        if not colon or not re.fullmatch(r"[-._A-Za-z0-9]+", key):
            raise LaunchError(f'--secret-env "{name}=..." is not of the form NAME=SECRET:KEY')
        if name in values:
            raise LaunchError(f"--secret-env {name} is set as a plain variable as well: leave one of them out")
        check(secret_name, "name of a Secret", "--secret-env")
        found[name] = {"valueFrom": {"secretKeyRef": {"name": secret_name, "key": key}}}
    return found


def config_in_pods(config: Config, output: Claim, data: Claim | None) -> tuple[Config, list[str]]:
    """Returns the config with run_dir on the output claim, and notices.

    Relative paths start at the root of a claim: prepared data at the data claim if there is one, all others at the
    output claim. Data at URLs stays there. Raises LaunchError if the run folder would be lost with its pod.
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
    sections = [("data", values["data"])]
    for group in ("sources", "validation"):
        sections += [(f"data.{group}.{name}", one) for name, one in values["data"][group].items()]
    for option, section in sections:
        if section["path"] is not None:
            section["path"] = [
                path if path in config.data.urls else placed(path, f"{option}.path", data or output)
                for path in section["path"]
            ]
    if config.data.cache is not None:
        values["data"]["cache"] = placed(str(config.data.cache), "data.cache", output)
    source = config.training.initialize_from
    if source is not None and not is_hub_id(source):
        values["training"]["initialize_from"] = placed(str(source), "training.initialize_from", output)
    return Config.model_validate(values), notices


def _placed(path: str, option: str, home: Claim) -> PurePosixPath:
    place = PurePosixPath(posixpath.normpath(home.path / path))  # an absolute path stays itself
    if not PurePosixPath(path).is_absolute() and not place.is_relative_to(home.path):
        raise LaunchError(f"{option} {path} leads out of the claim {home.name}: write it without ..")
    return place
