"""Looks the versions in a constraints file up among known vulnerabilities: `make audit`.

Exit codes: 0 none is known, 1 some are, 2 not all could be looked up. pip-audit itself ends with 0 for a package that
its database does not have, which would be all of them behind an index that passes no advisories on.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

PIP_AUDIT = Path(sys.executable).with_name("pip-audit")
OPTIONS = ("--disable-pip", "--no-deps", "--progress-spinner=off", "--format=json")  # the file is complete
KNOWN, UNKNOWN = 1, 2


def main(constraints: str) -> int:
    """Prints what is known about the packages of a file; returns the exit code."""
    done = subprocess.run([PIP_AUDIT, *OPTIONS, "-r", constraints], capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        sys.stderr.write(f"make audit: nothing could be looked up: is PyPI reachable from here? ({reason})\n")
        return UNKNOWN
    lines, code = findings(packages, constraints)
    (sys.stderr if code else sys.stdout).write("\n".join([*lines, ""]))
    return code


def findings(packages: list[dict[str, Any]], constraints: str) -> tuple[list[str], int]:
    """Returns the lines to print about pip-audit's `dependencies`, and the exit code."""
    lines = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in packages
        for flaw in package.get("vulns", ())
    ]
    left_out = [package["name"] for package in packages if "skip_reason" in package]
    if lines:
        lines.append(f"make audit: raise these in pyproject.toml, then run `make constraints`: {constraints}")
    if left_out:
        which = "none of them" if len(left_out) == len(packages) else f"not {', '.join(left_out)}"
        lines.append(
            f"make audit: of the {len(packages)} packages in {constraints}, {which} could be looked up: run it where "
            "PyPI itself is reached, not a copy of it"
        )
    if not lines:
        return [f"{constraints}: no vulnerability of its {len(packages)} packages is known"], 0
    return lines, UNKNOWN if left_out else KNOWN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
