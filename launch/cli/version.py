"""The option --version: the versions that a report of a defect needs. No torch here."""

from __future__ import annotations

import platform

import typer

from launch.runtime.checkout import git_state
from launch.runtime.printing import say
from launch.runtime.started_modules import INSTALLATION

PACKAGES = ("torch", "deepspeed", "transformers", "numpy")


def show_version(is_given: bool) -> None:
    """Prints the versions of megalite and of what it runs on, and ends the command."""
    if not is_given:
        return
    from megalite.config.versions import installed_version, own_version  # imports email

    state, checkout = git_state(), ""
    if state is not None:
        checkout = f" (commit {state['commit'][:12]}{', with changes' * state['changed']}, in {INSTALLATION})"
    lines = [f"megalite {own_version()}{checkout}"]
    lines += [f"{name} {installed_version(name) or 'is not installed'}" for name in PACKAGES]
    say(*lines, f"python {platform.python_version()}", platform.platform(), sep="\n")
    raise typer.Exit
