"""Packages that this machine lacks, and wheels that bring them where no index can be reached.

`python -m benchmarks.gpu_day.wheels` (`make gpu-wheels`) collects into .wheels/ what megalite needs to train, in the
versions of this environment, for one Python: without torch and all that it brings, and without what a run can do
without. There, `python -m benchmarks.gpu_day` finds the folder. Standard library alone, and `packaging` where it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.store import ROOT, WORK

WHEELS = ROOT / ".wheels"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
SITE = WORK / f"site-{HERE}"  # where they are installed: beside .wheels/, which is to stay small
MOST_BYTES = 60 * 2**20
TORCH = "torch"
# imported only by what asks for them: a data set of the hub, compressed text, a dashboard, a drawing of the loss
OPTIONAL = ("datasets", "pyarrow", "wandb", "matplotlib")
SOURCE_ONLY = ("deepspeed",)  # the index has no wheel; without operators built ahead, its own is pure Python
OLDEST_GLIBC, NEWEST_GLIBC = 5, 28  # minor versions: 2.28 is in every distribution since 2019
Metadata = Callable[[str], "tuple[str, list[str]] | None"]  # version and requirements of a package, if it is there


@dataclass(frozen=True)
class Needed:
    """A requirement: a name, which versions will do, and who asks."""

    name: str
    specifier: str = ""
    asked_by: str = "megalite"

    def __str__(self) -> str:
        return f"{self.name}{self.specifier}"


@dataclass
class Lack:
    """Packages that are missing or too old, and those of them that wheels would bring."""

    missing: dict[str, Needed] = field(default_factory=dict)
    wheels: dict[str, Path] = field(default_factory=dict)

    @property
    def without_wheel(self) -> list[Needed]:
        return [needed for name, needed in self.missing.items() if name not in self.wheels]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(root: Path = ROOT) -> list[str]:
    """Reads the project's requirements from pyproject.toml; the project need not be installed."""
    return list(_project(root)["dependencies"])


def of_float8(root: Path = ROOT) -> list[str]:
    """Reads the requirements of the extra `float8`: carried and installed where they can be, but no part needs them."""
    return list(_project(root)["optional-dependencies"]["float8"])


def _project(root: Path) -> dict[str, Any]:
    values = tomllib.loads((root / "pyproject.toml").read_text())
    return dict(values["project"])


def lacking(wheels: Path = WHEELS, look: Metadata | None = None) -> Lack:
    """Walks through what the project needs, and what that needs in turn; torch's own needs are its installer's."""
    look = look or _installed
    carried = {canonical(path.name.partition("-")[0]): path for path in sorted(wheels.glob("*.whl"))}
    lack, walked = Lack(), set[str]()
    todo = [needed for text in declared() if (needed := parse(text)) is not None]
    while todo:
        needed = todo.pop(0)
        if needed.name in OPTIONAL:
            continue
        found = look(needed.name)
        if found is None or not satisfies(found[0], needed.specifier):
            lack.missing.setdefault(needed.name, needed)
            found = _of_wheel(carried[needed.name]) if needed.name in carried else None
            if found is not None and satisfies(found[0], needed.specifier):
                lack.wheels[needed.name] = carried[needed.name]
        if found is not None and needed.name not in walked and needed.name != TORCH:
            walked.add(needed.name)
            todo += [one for text in found[1] if (one := parse(text, needed.name)) is not None]
    for extra in filter(None, map(parse, of_float8())):
        if extra.name in carried and look(extra.name) is None:
            lack.wheels[extra.name] = carried[extra.name]
    return lack


def parse(text: str, asked_by: str = "megalite", environment: dict[str, str] | None = None) -> Needed | None:
    """A line of requirements; None where its marker leaves it out. Markers need `packaging`, or pip's copy of it; where
    there is neither, lines with a marker are left out: of what megalite needs, they are about other systems."""
    packaging = _packaging()
    if packaging is None:
        found = re.match(r"\s*([A-Za-z0-9._-]+)", text)
        return Needed(canonical(found[1]), asked_by=asked_by) if found and ";" not in text else None
    one = packaging.requirements.Requirement(text)
    if one.marker is not None and not one.marker.evaluate({"extra": "", **(environment or {})}):
        return None
    return Needed(canonical(one.name), str(one.specifier), asked_by)


def satisfies(version: str, specifier: str) -> bool:
    packaging = _packaging()
    if packaging is None or not specifier:
        return True
    return bool(packaging.specifiers.SpecifierSet(specifier).contains(version, prereleases=True))


def _packaging() -> Any:
    try:
        import packaging.requirements
        import packaging.specifiers
    except ImportError:
        try:
            import pip._vendor.packaging.requirements
            import pip._vendor.packaging.specifiers
        except ImportError:
            return None
        return pip._vendor.packaging
    return packaging


def _installed(name: str) -> tuple[str, list[str]] | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return found.version, list(found.requires or [])


def _of_wheel(path: Path) -> tuple[str, list[str]]:
    with zipfile.ZipFile(path) as archive:
        name = next(name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        told = HeaderParser().parsestr(archive.read(name).decode())
    return told["Version"], told.get_all("Requires-Dist") or []


def install_command(lack: Lack, into: Path) -> list[str]:
    """The one pip command: nothing is fetched, and what is there as it is needed is not shadowed by another version."""
    folders = dict.fromkeys(str(path.parent) for path in lack.wheels.values())
    options = ["--no-index", *(word for folder in folders for word in ("--find-links", folder)), "--no-deps"]
    options += ["--disable-pip-version-check", "--upgrade", "--target", str(into)]
    return [sys.executable, "-m", "pip", "install", *options, *lack.wheels]


def wanted(python: str) -> dict[str, str]:
    """Name -> version of all that is to be carried to a machine with torch and this Python, as it is here.

    Raises LookupError where a package is needed there that is not here.
    """
    environment = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux"}
    found: dict[str, str] = {}
    extras = [text for text in of_float8() if (one := parse(text)) is not None and _installed(one.name) is not None]
    todo = [one for text in [*declared(), *extras] if (one := parse(text, environment=environment)) is not None]
    while todo:
        needed = todo.pop()
        if needed.name in found or needed.name in (TORCH, *OPTIONAL):
            continue
        here = _installed(needed.name)
        if here is None:
            raise LookupError(f"{needed}, which {needed.asked_by} needs, is not installed here: run `make install`")
        found[needed.name] = here[0]
        todo += [one for text in here[1] if (one := parse(text, needed.name, environment)) is not None]
    return dict(sorted(found.items()))


def collect(python: str, machine: str, into: Path, say: Callable[[str], None]) -> int:
    """Fills the folder; returns its wheels' bytes. Raises CalledProcessError, LookupError or ValueError."""
    pins = wanted(python)
    into.mkdir(parents=True, exist_ok=True)
    new = into / ".new"
    shutil.rmtree(new, ignore_errors=True)
    platforms = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, OLDEST_GLIBC - 1, -1)]
    platforms += [f"{name}_{machine}" for name in ("manylinux2014", "manylinux2010", "manylinux1")]
    ready = [f"{name}=={version}" for name, version in pins.items() if name not in SOURCE_ONLY]
    say(f"{len(ready)} wheels for Python {python} on {machine} ...")
    options = ["--no-deps", "--disable-pip-version-check", "--quiet"]
    kind = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    kind += [word for platform in platforms for word in ("--platform", platform)]
    _pip(["download", *options, *kind, "--dest", str(new), *ready])
    for name in SOURCE_ONLY:
        kept = [path for path in into.glob(f"{name}-{pins[name]}-*.whl") if path.name.endswith("-none-any.whl")]
        if kept:
            shutil.copy2(kept[0], new)
            continue
        say(f"building {name} {pins[name]} without its operators ...")
        build = ["--no-build-isolation", "--wheel-dir", str(new), f"{name}=={pins[name]}"]
        _pip(["wheel", *options, *build], {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"})
    if bound := [path.name for name in SOURCE_ONLY for path in new.glob(f"{name}-*") if "-none-any" not in path.name]:
        raise ValueError(f"{bound[0]} is bound to this machine's Python: it cannot be carried")
    for path in into.glob("*.whl"):  # of other versions, or another Python
        path.unlink()
    for path in new.iterdir():
        path.replace(into / path.name)
    new.rmdir()
    return sum(path.stat().st_size for path in into.glob("*.whl"))


def _pip(words: Sequence[str], more: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", *words]
    done = subprocess.run(command, env=os.environ | (more or {}), capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or [done.stderr.strip()[-500:]]
        raise ValueError(f"pip {words[0]} failed: {errors[0].removeprefix('ERROR: ')}")


def largest(paths: Iterable[Path], count: int = 5) -> str:
    by_size = sorted(paths, key=lambda path: -path.stat().st_size)[:count]
    return ", ".join(f"{path.name.partition('-')[0]} {path.stat().st_size / 2**20:.1f}" for path in by_size)


def main() -> int:
    """`make gpu-wheels`."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_day.wheels", description=__doc__)
    parser.add_argument("--python", default=HERE, metavar="3.N", help=f"of the machine they go to; default: {HERE}")
    parser.add_argument("--machine", default="x86_64", choices=("x86_64", "aarch64"), help="its processor")
    parser.add_argument("--into", type=Path, default=WHEELS, help="default: .wheels")
    options = parser.parse_args()
    if not re.fullmatch(r"3\.\d+", options.python):
        parser.error(f"--python {options.python}: give a version such as 3.12")
    try:
        size = collect(options.python, options.machine, options.into, lambda line: print(line, flush=True))
    except (LookupError, ValueError, OSError) as error:
        print(f"gpu-wheels: error: {error}", file=sys.stderr)
        return 2
    found = sorted(options.into.glob("*.whl"))
    told = f"{len(found)} wheels, {size / 2**20:.1f} MiB in {options.into} (MiB: {largest(found)})"
    if size > MOST_BYTES:
        print(f"gpu-wheels: error: {told}: more than {MOST_BYTES >> 20} MiB", file=sys.stderr)
        return 1
    print(f"gpu-wheels: {told}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
