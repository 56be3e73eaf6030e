"""`megalite k8s`: the words of the command line, and what is said about what was written or sent. No torch."""

from __future__ import annotations

import enum
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from launch.arguments import ConfigPath, Overrides
from launch.backends.kubernetes import words
from launch.backends.kubernetes.checks import check_config, image_of, layout_on, name_of, resources_of
from launch.backends.kubernetes.job import Manifest, PodJob
from launch.backends.kubernetes.jobset import job_set_objects
from launch.backends.kubernetes.paths import config_in_pods
from launch.backends.kubernetes.pytorchjob import pytorch_job_objects
from launch.backends.kubernetes.text import from_yaml, to_yaml
from launch.backends.kubernetes.trainjob import train_job_objects
from launch.backends.kubernetes.validate import can_validate, problems
from launch.errors import LaunchError
from launch.run_config import load_run_config

OUTPUT, DATA = "/output", "/data"
NOT_VALIDATED = "NOT VALIDATED: kubeflow-trainer-api is not installed (pip install 'megalite[k8s]')"


NO_CODES = (
    "a PyTorchJob does not look at exit codes, so a mistake, or a run that a guard has stopped, is started again until "
    "--restarts are used up; --kind trainjob and jobset know better"
)


class Kind(enum.StrEnum):
    """What the run becomes in the cluster."""

    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"
    JOBSET = "jobset"


class Scope(enum.StrEnum):
    """Who sees a TrainJob's runtime."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"


@dataclass(frozen=True)
class Delivery:
    """What is to become of the objects."""

    file: Path | None
    overwrite: bool
    submit: bool
    context: str | None
    dry_run: bool
    as_json: bool


def k8s(
    config_path: ConfigPath,
    overrides: Overrides = None,
    *,
    image: Annotated[str, typer.Option(help="Image with megalite in it.")],
    nodes: Annotated[int, typer.Option(min=1, help="Pods, one per node.")],
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs, and ranks, of a pod; 0: ranks on the CPU.")],
    output_claim: Annotated[
        str | None, typer.Option(metavar="PVC[:/PATH]", help=f"Claim that holds run_dir; seen at {OUTPUT}.")
    ] = None,
    data_claim: Annotated[
        str | None, typer.Option(metavar="PVC[:/PATH]", help=f"Claim with data.path, at {DATA}; default: the same.")
    ] = None,
    kind: Annotated[Kind, typer.Option(help="TrainJob of Trainer v2, PyTorchJob v1, or JobSet.")] = Kind.TRAINJOB,
    runtime: Annotated[
        Scope, typer.Option(help="Of a TrainJob: one that all namespaces see needs rights over the cluster.")
    ] = Scope.CLUSTER,
    name: Annotated[str | None, typer.Option(help="Of the job; default: that of the run's folder.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Default: that of the kubeconfig's context.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores of a pod, as in 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory of a pod, as in 256Gi; /dev/shm is part of it.")] = None,
    shared_memory: Annotated[str | None, typer.Option(help="Limit of /dev/shm; default: the pod's memory.")] = None,
    rdma: Annotated[
        str | None, typer.Option(metavar="RESOURCE[=N]", help="Network devices of a pod; lets ranks pin memory.")
    ] = None,
    node_selector: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label that nodes must have.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label of all objects and pods.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Variable of all ranks.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option(metavar="K=SECRET:KEY", help="Variable from a Secret of the cluster.")
    ] = None,
    service_account: Annotated[str | None, typer.Option(help="That pods run as.")] = None,
    restarts: Annotated[int, typer.Option(min=0, help="After failures; see docs/launch.md for what counts.")] = 5,
    grace: Annotated[int, typer.Option(min=1, help="Seconds that pods which are asked to end have for a save.")] = 300,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to write; default: print.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file of --output.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Create the objects in the cluster.")] = False,
    context: Annotated[str | None, typer.Option(help="Of the kubeconfig, for --submit; default: its current.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; with --submit, the server checks and keeps nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the objects, and what was done, as JSON.")] = False,
) -> None:
    """Write the manifests of a run on Kubernetes, or --submit them.

    Relative paths in the config are taken from the top of the claims. Pods that are asked to end save, and the run
    starts again where that helps.

    Example: `megalite k8s configs/quickstart.yaml --image registry/megalite:1 --nodes 2 --gpus-per-node 4
    --output-claim runs -o quickstart.k8s.yaml`
    """
    from launch.plan.automatic import sizes_in_words

    config = load_run_config(config_path, overrides or [])
    check_config(config)
    if output_claim is None:
        raise LaunchError(
            "no --output-claim is given, and without one checkpoints would be lost with their pods: name a "
            "PersistentVolumeClaim that is ReadWriteMany"
        )
    where = words.claim(output_claim, "--output-claim", OUTPUT)
    data = None if data_claim is None else words.claim(data_claim, "--data-claim", DATA)
    placed, notices = config_in_pods(config, where, data)
    layout, ranks_per_node, more_notices = layout_on(config, nodes, gpus_per_node)
    image, image_notices = image_of(image)
    if kind is Kind.PYTORCHJOB and restarts:
        notices.append(NO_CODES)
    job = PodJob(
        name=name_of(name, config, nodes),
        namespace=None if namespace is None else words.namespace_name(namespace),
        image=image,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        config=placed.to_yaml(),
        output=where,
        data=data,
        resources=resources_of(cpu, memory, shared_memory, rdma),
        node_selector=words.labels(node_selector or [], "--node-selector"),
        labels=words.labels(label or [], "--label"),
        environment=words.variables(env or []),
        secrets=words.secret_variables(secret_env or []),
        service_account=None if service_account is None else words.account_name(service_account),
        restarts=restarts,
        grace_s=grace,
    )
    makers: dict[Kind, Callable[[PodJob], list[Manifest]]] = {
        Kind.TRAINJOB: partial(train_job_objects, is_cluster_wide=runtime is Scope.CLUSTER),
        Kind.PYTORCHJOB: pytorch_job_objects,
        Kind.JOBSET: job_set_objects,
    }
    ranks = f"{nodes} node{'s' * (nodes > 1)} x {ranks_per_node} rank{'s' * (ranks_per_node > 1)}"
    heading = f"megalite {version('megalite')}, {config_path}: {ranks}; {sizes_in_words(config, layout)}"
    delivery = Delivery(output, overwrite, submit, context, dry_run, as_json)
    _deliver(job, makers[kind], heading, [*notices, *more_notices, *image_notices], delivery)


def _deliver(
    job: PodJob, make: Callable[[PodJob], list[Manifest]], heading: str, notices: list[str], delivery: Delivery
) -> None:
    from launch.backends.kubernetes import submit
    from launch.backends.kubernetes.cluster import open_cluster

    if delivery.file is not None and delivery.file.exists() and not delivery.overwrite:
        raise LaunchError(f"{delivery.file} is there already: give --overwrite, or write another file")
    if delivery.context is not None and not delivery.submit:
        raise LaunchError("--context belongs to --submit: without it nothing is sent")
    cluster = None
    if delivery.submit:
        cluster = open_cluster(delivery.context, job.namespace)
        job = replace(job, namespace=cluster.namespace)
        notices += submit.check_claims(cluster, job)
    objects, checked_by = _validated(make(job))
    text = to_yaml(objects, f"{heading}\n{checked_by}")
    done = []
    if delivery.file is not None and not delivery.dry_run:
        delivery.file.write_text(text)
        done.append(f"wrote {delivery.file}; hand it on with: kubectl apply -f {delivery.file}")
    if cluster is not None and delivery.dry_run:
        notices += submit.check(cluster, objects)
        done.append(f"{cluster} takes them")
    elif cluster is not None:
        submit.create(cluster, objects)
        done.append(f"{cluster} has created them")
    if delivery.dry_run:
        done.append("dry run: nothing was written or created")
    _tell(objects, text, heading, checked_by, notices, done, as_json=delivery.as_json)


def _validated(objects: list[Manifest]) -> tuple[list[Manifest], str]:
    """The objects, and a sentence that says what has looked at them."""
    if not can_validate():
        return objects, NOT_VALIDATED
    for manifest in from_yaml(to_yaml(objects, "")):  # as readers of the file will see it
        if found := problems(manifest):
            raise LaunchError(f"{_name(manifest)} is not what Kubernetes takes, a defect of megalite: {found[0]}")
    return objects, f"validated by kubeflow-trainer-api {version('kubeflow-trainer-api')}"


def _tell(
    objects: Sequence[Manifest],
    text: str,
    heading: str,
    checked_by: str,
    notices: Sequence[str],
    done: Sequence[str],
    *,
    as_json: bool,
) -> None:
    if as_json:
        facts = {"heading": heading, "validation": checked_by, "notices": list(notices), "done": list(done)}
        print(json.dumps(facts | {"objects": list(objects)}, indent=2))
        return
    for notice in notices:
        print(f"megalite: {notice}", file=sys.stderr)
    if checked_by == NOT_VALIDATED:
        print(f"megalite: {NOT_VALIDATED}", file=sys.stderr)
    if not done:
        print(text, end="")
        return
    print(f"{heading}; {checked_by}")
    print(f"objects: {', '.join(map(_name, objects))}")
    for sentence in done:
        print(sentence)


def _name(manifest: Manifest) -> str:
    return f"{manifest['kind']} {manifest['metadata']['name']}"
