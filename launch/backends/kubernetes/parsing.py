"""Parses what users type about pods: names, quantities, claims, variables. Raises LaunchError with one sentence.

These checks work without a cluster, before anything is written; rules that only an API server knows are left to its dry
run (cluster.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import PurePosixPath

from launch.errors import LaunchError
from launch.runtime.forwarded_environment import is_secret
from megalite.config import Config

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035, for names that become host names
LABEL_1123 = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL_1123}(\.{LABEL_1123})*"
QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
IMAGE = r"[A-Za-z0-9][^\s@]*(@sha256:[0-9a-f]{64})?"
LONGEST_LABEL, LONGEST_SUBDOMAIN, LONGEST_IMAGE = 63, 253, 500
SUFFIX = "-node-0-{}-abcde"  # follows a job's name in its longest derived name, that of a pod

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][-+]?[0-9]{1,2})?")
DECIMAL, BINARY = "kMGTPE", ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
LEAST_BYTES = 2**20

RESERVED = re.compile(r"PET_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT")
TAKEN_PATHS = ("/etc/megalite", "/dev/shm")


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim and its mount path in pods."""

    name: str
    path: PurePosixPath


@dataclass(frozen=True)
class SecretValue:
    """One value of a Secret in the cluster."""

    secret: str
    key: str


@dataclass(frozen=True)
class Resources:
    """Resource limits of a pod besides its GPUs."""

    limits: dict[str, str] = field(default_factory=dict)  # resource -> quantity
    shared_memory: str | None = None  # limit of /dev/shm; None: the pod's memory
    pins_memory: bool = False  # for RDMA


def job_name(name: str | None, config: Config, nodes: int) -> str:
    """Returns the name given, or one derived from the run's folder, after checking it."""
    if name is not None:
        return check_job_name(name, nodes)
    suggestion = suggested_name(config.run_dir.name)
    if not suggestion:
        raise LaunchError(f"run_dir {config.run_dir} gives the job no name: give it one with --name")
    return check_job_name(suggestion, nodes)


def check_job_name(name: str, nodes: int) -> str:
    """Returns `name` if the names of its pods on `nodes` nodes are valid."""
    longest = LONGEST_LABEL - len(SUFFIX.format(nodes - 1))
    if not re.fullmatch(LABEL, name):
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


def namespace_name(name: str) -> str:
    """Returns `name` if it is a valid namespace."""
    if not re.fullmatch(LABEL_1123, name) or len(name) > LONGEST_LABEL:
        raise LaunchError(f'--namespace "{name}" is no namespace: use at most 63 lower-case letters, digits and -')
    return name


def object_name(name: str, option: str, kind: str) -> str:
    """Returns `name` if it is a valid name of an object of this kind, such as a claim or a Secret."""
    if not re.fullmatch(SUBDOMAIN, name) or len(name) > LONGEST_SUBDOMAIN:
        raise LaunchError(f'{option}: "{name}" is no name of a {kind}: it has lower-case letters, digits, - and .')
    return name


def image_name(image: str) -> tuple[str, list[str]]:
    """Returns a valid image, and a notice if its tag does not pin it."""
    if not re.fullmatch(IMAGE, image) or len(image) > LONGEST_IMAGE:
        raise LaunchError(f'--image "{image}" is no image: write it as registry/name:tag')
    _, colon, tag = image.rpartition("/")[2].partition(":")
    if "@sha256:" in image or (colon and tag != "latest"):
        return image, []
    return image, [f"--image {image} can be another image tomorrow, or on another node: give it a tag or a digest"]


def claim(text: str, option: str, default: str) -> Claim:
    """Parses `CLAIM` or `CLAIM:/path`."""
    name, colon, path = text.partition(":")
    object_name(name, option, "PersistentVolumeClaim")
    mount = PurePosixPath(path if colon else default)
    if not mount.is_absolute() or mount == PurePosixPath("/") or ".." in mount.parts or ":" in str(mount):
        raise LaunchError(f'{option} "{text}": write CLAIM:/path, with an absolute path other than /')
    for taken in map(PurePosixPath, TAKEN_PATHS):
        if mount.is_relative_to(taken) or taken.is_relative_to(mount):
            raise LaunchError(f"{option}: {mount} collides with {taken}, which pods need: choose another path")
    return Claim(name, mount)


def amount(quantity: str, option: str) -> Decimal:
    """Returns the value of a Kubernetes quantity such as `8`, `500m` or `64Gi`."""
    found = NUMBER.fullmatch(quantity)
    if not found:
        raise LaunchError(f'{option} "{quantity}" is no quantity: write it as in 8, 500m, 1.5, 64Gi or 64G')
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix == "m":
        number /= 1000
    elif suffix in BINARY:
        number *= 1024 ** (BINARY.index(suffix) + 1)
    elif suffix in DECIMAL:
        number *= 1000 ** (DECIMAL.index(suffix) + 1) if suffix else 1
    else:
        number = number.scaleb(int(suffix[1:]))
    if number <= 0:
        raise LaunchError(f'{option} "{quantity}" must be more than 0')
    return number


def resources(cpu: str | None, memory: str | None, shared_memory: str | None, rdma: str | None) -> Resources:
    """Checks quantities. A memory of `512m`, half a byte, or a plain `64` are mistakes that Kubernetes would accept."""
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
    limits = {name: quantity for name, quantity in (("cpu", cpu), ("memory", memory)) if quantity is not None}
    if rdma is not None:
        limits |= extended_resource(rdma)
    return Resources(limits, shared_memory, rdma is not None)


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


def labels(texts: Sequence[str], option: str) -> dict[str, str]:
    """Parses labels of nodes or objects."""
    found = pairs(texts, option)
    for key, value in found.items():
        prefix, slash, name = key.rpartition("/")
        is_key = re.fullmatch(QUALIFIED, name) and len(name) <= LONGEST_LABEL
        if slash:
            is_key = is_key and re.fullmatch(SUBDOMAIN, prefix) and len(prefix) <= LONGEST_SUBDOMAIN
        if not is_key:
            raise LaunchError(f'{option}: "{key}" is no key of a label: write it as in example.com/gpu or gpu')
        if value and (not re.fullmatch(QUALIFIED, value) or len(value) > LONGEST_LABEL):
            raise LaunchError(
                f'{option}: "{value}" is no value of a label: it has at most 63 letters, digits, -, _ and .'
            )
    return found


def extended_resource(text: str) -> dict[str, str]:
    """Parses `vendor/resource` or `vendor/resource=count`, a resource of a device plugin."""
    name, equals, count = text.partition("=")
    prefix, slash, last = name.partition("/")
    is_name = slash and re.fullmatch(SUBDOMAIN, prefix) and re.fullmatch(QUALIFIED, last)
    if not is_name or (equals and not (count.isdecimal() and int(count) > 0)):
        raise LaunchError(f'--rdma "{text}" is no resource of a node: write it as in rdma/hca_shared_devices_a=1')
    return {name: str(int(count)) if equals else "1"}


def variables(texts: Sequence[str], option: str = "--env") -> dict[str, str]:
    """Parses `NAME=VALUE` texts. Rejects variables that launchers set, and in --env those that look like secrets."""
    found = pairs(texts, option)
    for name, value in found.items():
        if not re.fullmatch(VARIABLE, name):
            raise LaunchError(f'{option}: "{name}" is no name of a variable: it has letters, digits and _')
        if RESERVED.fullmatch(name):
            raise LaunchError(f"{option}: {name} is what the launcher of a pod sets: leave it out")
        if option == "--env" and is_secret(name, value):
            raise LaunchError(
                f"--env {name} would stand in the manifest for all to read: put it into a Secret and give "
                f"--secret-env {name}=SECRET:KEY"
            )
    return found


def secret_variables(texts: Sequence[str]) -> dict[str, SecretValue]:
    """Parses `NAME=SECRET:KEY` texts."""
    found: dict[str, SecretValue] = {}
    for name, source in variables(texts, "--secret-env").items():
        secret, colon, key = source.partition(":")
        if not colon or not re.fullmatch(r"[-._A-Za-z0-9]+", key):
            raise LaunchError(f'--secret-env "{name}=..." is not of the form NAME=SECRET:KEY')
        found[name] = SecretValue(object_name(secret, "--secret-env", "Secret"), key)
    return found
