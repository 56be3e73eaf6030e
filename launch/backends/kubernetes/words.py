"""What users type about pods, as checked values: names, quantities, claims, variables. LaunchError, one sentence."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import PurePosixPath

from launch.errors import LaunchError
from launch.secret_names import is_secret

LABEL = r"[a-z]([-a-z0-9]*[a-z0-9])?"  # RFC 1035, as names that become a host's name must be
LABEL_1123 = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
SUBDOMAIN = rf"{LABEL_1123}(\.{LABEL_1123})*"
QUALIFIED = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
IMAGE = r"[A-Za-z0-9][^\s@]*(@sha256:[0-9a-f]{64})?"
LONGEST_LABEL, LONGEST_SUBDOMAIN, LONGEST_IMAGE = 63, 253, 500
SUFFIX = "-node-0-{}-abcde"  # behind a job's name in the longest name that is made of it, that of a pod

NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][-+]?[0-9]{1,2})?")
DECIMAL, BINARY = "kMGTPE", ("Ki", "Mi", "Gi", "Ti", "Pi", "Ei")
LEAST_BYTES = 2**20

RESERVED = re.compile(r"PET_.*|RANK|LOCAL_RANK|WORLD_SIZE|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT")
TAKEN_PATHS = ("/etc/megalite", "/dev/shm")


@dataclass(frozen=True)
class Claim:
    """A PersistentVolumeClaim, and where pods see it."""

    name: str
    path: PurePosixPath


@dataclass(frozen=True)
class SecretValue:
    """One value of a Secret of the cluster."""

    secret: str
    key: str


def job_name(word: str, nodes: int, option: str = "--name") -> str:
    """A name whose pods on `nodes` nodes have names that Kubernetes takes."""
    longest = LONGEST_LABEL - len(SUFFIX.format(nodes - 1))
    if not re.fullmatch(LABEL, word):
        raise LaunchError(
            f'{option} "{word}" is no name for a job: use lower-case letters, digits and -, beginning with a letter'
            + (f', as in "{suggestion}"' if (suggestion := suggested_name(word)) else "")
        )
    if len(word) > longest:
        raise LaunchError(
            f'{option} "{word}" has {len(word)} characters, and the names of its pods, which are longer, may have '
            f"{LONGEST_LABEL}: use at most {longest}"
        )
    return word


def suggested_name(word: str) -> str:
    """The nearest name that a job can have; empty where there is none."""
    return re.sub(r"[^a-z0-9]+", "-", word.lower()).strip("-").lstrip("0123456789-")[:40].rstrip("-")


def namespace_name(word: str) -> str:
    """A namespace."""
    if not re.fullmatch(LABEL_1123, word) or len(word) > LONGEST_LABEL:
        raise LaunchError(f'--namespace "{word}" is no namespace: use at most 63 lower-case letters, digits and -')
    return word


def object_name(word: str, option: str, kind: str) -> str:
    """The name of something that is in the cluster already."""
    if not re.fullmatch(SUBDOMAIN, word) or len(word) > LONGEST_SUBDOMAIN:
        raise LaunchError(f'{option}: "{word}" is no name of a {kind}: it has lower-case letters, digits, - and .')
    return word


def account_name(word: str) -> str:
    """A ServiceAccount."""
    return object_name(word, "--service-account", "ServiceAccount")


def image_name(word: str) -> str:
    """An image as a container runtime takes it."""
    if not re.fullmatch(IMAGE, word) or len(word) > LONGEST_IMAGE:
        raise LaunchError(f'--image "{word}" is no image: write it as registry/name:tag')
    return word


def is_floating(image: str) -> bool:
    """Whether nodes may have other images under that name."""
    if "@sha256:" in image:
        return False
    _, colon, tag = image.rpartition("/")[2].partition(":")
    return not colon or tag == "latest"


def claim(word: str, option: str, default: str) -> Claim:
    """`CLAIM` or `CLAIM:/path`."""
    name, colon, path = word.partition(":")
    object_name(name, option, "PersistentVolumeClaim")
    place = PurePosixPath(path if colon else default)
    if not place.is_absolute() or place == PurePosixPath("/") or ".." in place.parts or ":" in str(place):
        raise LaunchError(f'{option} "{word}": write CLAIM:/path, with an absolute path other than /')
    for taken in map(PurePosixPath, TAKEN_PATHS):
        if place.is_relative_to(taken) or taken.is_relative_to(place):
            raise LaunchError(f"{option}: {place} collides with {taken}, which pods need: choose another path")
    return Claim(name, place)


def amount(word: str, option: str) -> Decimal:
    """What a Kubernetes quantity such as `8`, `500m` or `64Gi` stands for."""
    found = NUMBER.fullmatch(word)
    if not found:
        raise LaunchError(f'{option} "{word}" is no quantity: write it as in 8, 500m, 1.5, 64Gi or 64G')
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
        raise LaunchError(f'{option} "{word}" must be more than 0')
    return number


def memory_quantity(word: str, option: str) -> str:
    """A quantity of bytes. `512m`, half a byte, and a plain `64` are mistakes that Kubernetes would take."""
    if amount(word, option) < LEAST_BYTES:
        raise LaunchError(f'{option} "{word}" is less than a megabyte: write the unit, as in 64Gi')
    return word


def cpu_quantity(word: str) -> str:
    """A number of cores."""
    if amount(word, "--cpu") < Decimal("0.001"):
        raise LaunchError(f'--cpu "{word}" is less than a thousandth of a core: write cores, as in 8')
    return word


def pairs(words: Sequence[str], option: str) -> dict[str, str]:
    """`key=value` each, no key twice."""
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise LaunchError(f'{option} "{word}" is not of the form key=value')
        if key in found:
            raise LaunchError(f"{option} names {key} twice: {found[key]} and {value}")
        found[key] = value
    return found


def labels(words: Sequence[str], option: str) -> dict[str, str]:
    """Labels, as nodes and objects have them."""
    found = pairs(words, option)
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


def extended_resource(word: str) -> tuple[str, int]:
    """`vendor/resource` or `vendor/resource=count`, as device plugins offer them."""
    name, equals, count = word.partition("=")
    prefix, slash, last = name.partition("/")
    is_name = slash and re.fullmatch(SUBDOMAIN, prefix) and re.fullmatch(QUALIFIED, last)
    if not is_name or (equals and not (count.isdecimal() and int(count) > 0)):
        raise LaunchError(f'--rdma "{word}" is no resource of a node: write it as in rdma/hca_shared_devices_a=1')
    return name, int(count) if equals else 1


def variables(words: Sequence[str]) -> dict[str, str]:
    """`--env NAME=VALUE`. Refuses what launchers set, and what looks like a secret."""
    found = pairs(words, "--env")
    for name, value in found.items():
        _check_variable(name, "--env")
        if is_secret(name, value):
            raise LaunchError(
                f"--env {name} would stand in the manifest for all to read: put it into a Secret and give "
                f"--secret-env {name}=SECRET:KEY"
            )
    return found


def secret_variables(words: Sequence[str]) -> dict[str, SecretValue]:
    """`--secret-env NAME=SECRET:KEY`."""
    found: dict[str, SecretValue] = {}
    for name, source in pairs(words, "--secret-env").items():
        _check_variable(name, "--secret-env")
        secret, colon, key = source.partition(":")
        if not colon or not re.fullmatch(r"[-._A-Za-z0-9]+", key):
            raise LaunchError(f'--secret-env "{name}=..." is not of the form NAME=SECRET:KEY')
        found[name] = SecretValue(object_name(secret, "--secret-env", "Secret"), key)
    return found


def _check_variable(name: str, option: str) -> None:
    if not re.fullmatch(VARIABLE, name):
        raise LaunchError(f'{option}: "{name}" is no name of a variable: it has letters, digits and _')
    if RESERVED.fullmatch(name):
        raise LaunchError(f"{option}: {name} is what the launcher of a pod sets: leave it out")
