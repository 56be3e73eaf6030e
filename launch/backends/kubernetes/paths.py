"""From a config as it is written to the one that pods read: paths of this machine become paths on their claims."""

from __future__ import annotations

import posixpath
from pathlib import PurePosixPath

from launch.backends.kubernetes.words import Claim
from launch.errors import LaunchError
from launch.hub_folder import is_hub_id
from megalite.config import Config


def config_in_pods(config: Config, output: Claim, data: Claim | None) -> tuple[Config, list[str]]:
    """The config with run_dir on the output claim, and what to tell.

    Relative paths are taken from the top of a claim: `data.path` from that of the data claim if there is one, all
    others from that of the output claim. Raises LaunchError where the run folder would be lost with its pod.
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
