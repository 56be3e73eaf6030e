"""A run's objects to a cluster: what has to be there before, then all of them or none."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from launch.backends.kubernetes.cluster import Cluster, ClusterError
from launch.backends.kubernetes.job import Manifest, PodJob
from launch.errors import LaunchError

SHARED = "ReadWriteMany"


def check_claims(cluster: Cluster, job: PodJob) -> list[str]:
    """Raises LaunchError for a claim that is not there, or that several nodes cannot share; what could not be seen."""
    for name in dict.fromkeys(claim.name for claim in (job.output, job.data) if claim is not None):
        try:
            modes = cluster.claim_modes(name)
        except ClusterError as error:
            if error.status == 403:
                return [f"the claims were not looked at: {error}"]
            if error.status == 404:
                raise LaunchError(
                    f"there is no PersistentVolumeClaim {name} in namespace {cluster.namespace}, for which pods would "
                    "wait for ever: create it, or name another"
                ) from None
            raise
        is_shared = SHARED in modes or (name != job.output.name and "ReadOnlyMany" in modes)
        if job.nodes > 1 and not is_shared:
            raise LaunchError(
                f"the claim {name} is {' and '.join(modes)}, so {job.nodes} nodes cannot mount it: use one that is "
                f"{SHARED}"
            )
    return []


def create(cluster: Cluster, objects: Sequence[Manifest]) -> None:
    """All of them, in their order. Raises LaunchError, and then none of them is left."""
    done: list[Manifest] = []
    for manifest in objects:
        try:
            cluster.create(manifest)
        except ClusterError:
            for made in reversed(done):
                with suppress(ClusterError):  # what went wrong first is what helps
                    cluster.remove(made)
            raise
        done.append(manifest)


def check(cluster: Cluster, objects: Sequence[Manifest]) -> list[str]:
    """The server looks at them and keeps nothing; what to tell. Raises LaunchError.

    A TrainJob is left out, because Trainer refuses one whose runtime is not kept.
    """
    left_out = []
    for manifest in objects:
        if "runtimeRef" in manifest.get("spec", {}):
            left_out.append(f"the server has not looked at the {manifest['kind']}, whose runtime must be there before")
        else:
            cluster.create(manifest, dry_run=True)
    return left_out
