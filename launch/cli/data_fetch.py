"""The command `megalite data fetch`: a line of progress around `launch.trainer.data.remote_data`."""

from __future__ import annotations

from launch.cli.options import AsJson, ConfigPath, Overrides
from launch.errors import LaunchError
from launch.output import print_json, spinner
from launch.runtime.printing import say
from launch.trainer.start.run_config import load_run_config


def fetch(config_path: ConfigPath, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Copy the data of a run that lies at URLs to this host, into `data.cache`, and compare every digest.

    A run does it by itself, while its accelerators wait. Where all hosts share `data.cache`, one of them is enough.
    What is there already is not copied again.

    Example: `megalite data fetch configs/far.yaml data.path=s3://bucket/corpora/web`
    """
    from launch.trainer.data.remote_data import copies_here

    config = load_run_config(config_path, overrides or [])
    if not config.data.urls:
        raise LaunchError(f"{config_path} names no data at a URL, so that there is nothing to copy: start the run")
    with spinner("looking for the data", is_shown=not as_json) as describe:
        places = copies_here(config.data, config.training.sequence_length, may_fetch=True, tell=describe)
    if as_json:
        print_json(places)
        return
    for url, prefix in places.items():
        say(f"{url} is copied to {prefix}, and its digests are right")
