"""Command-line options of `megalite k8s`, and delivery of the manifests. No torch."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from launch.backends.kubernetes import parsing
from launch.backends.kubernetes.job import Manifest, PodJob, config_in_pods, from_yaml, name_of, to_yaml
from launch.backends.kubernetes.resources import job_set_objects, pytorch_job_objects, train_job_objects
from launch.backends.kubernetes.validate import can_validate, problems
from launch.backends.submission import Delivery, Wording, fit_layout, load_checked_config
from launch.cli.options import ConfigPath, Overrides
from launch.errors import LaunchError

OUTPUT, DATA = "/output", "/data"
NOT_VALIDATED = "NOT VALIDATED: kubeflow-trainer-api is not installed (pip install 'megalite[k8s]')"
IGNORES_EXIT_CODES = (
    "a PyTorchJob does not look at exit codes, so a mistake, or a run that a guard has stopped, is started again until "
    "--restarts are used up; --kind trainjob and jobset know better"
)


class ResourceKind(enum.StrEnum):
    """Kind of the object that runs the pods."""

    TRAINJOB = "trainjob"
    PYTORCHJOB = "pytorchjob"
    JOBSET = "jobset"


class Scope(enum.StrEnum):
    """Visibility of a TrainJob's runtime."""

    CLUSTER = "cluster"
    NAMESPACE = "namespace"


NODES = Wording(
    node="node",
    give_ranks="state parallel.tensor_parallel_size, pipeline_parallel_size and data_parallel_size",
    divide_evenly="choose --nodes, or parallel.data_parallel_size, so that they can",
)


def k8s(
    config_path: ConfigPath,
    overrides: Overrides = None,
    *,
    image: Annotated[str, typer.Option(help="Image that contains megalite.")],
    nodes: Annotated[int, typer.Option(min=1, help="Pods, one per node.")],
    gpus_per_node: Annotated[int, typer.Option(min=0, help="GPUs, and so ranks, per pod; 0: ranks on the CPU.")],
    output_claim: Annotated[
        str | None, typer.Option(metavar="PVC[:/PATH]", help=f"Claim for run_dir, mounted at {OUTPUT}.")
    ] = None,
    data_claim: Annotated[
        str | None,
        typer.Option(metavar="PVC[:/PATH]", help=f"Claim for data.path, mounted at {DATA}; default: the same."),
    ] = None,
    kind: Annotated[
        ResourceKind, typer.Option(help="Kind of job: TrainJob (Trainer v2), PyTorchJob (v1), or JobSet.")
    ] = ResourceKind.TRAINJOB,
    runtime: Annotated[
        Scope, typer.Option(help="Scope of a TrainJob's runtime; `cluster` needs rights over the cluster.")
    ] = Scope.CLUSTER,
    name: Annotated[str | None, typer.Option(help="Name of the job; default: that of the run's folder.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: that of the kubeconfig's context.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores per pod, such as 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory per pod, such as 256Gi; includes /dev/shm.")] = None,
    shared_memory: Annotated[str | None, typer.Option(help="Limit of /dev/shm; default: the pod's memory.")] = None,
    rdma: Annotated[
        str | None, typer.Option(metavar="RESOURCE[=N]", help="RDMA devices per pod; also lets ranks pin memory.")
    ] = None,
    node_selector: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label that nodes must have.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label of all objects and pods.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Variable of all ranks.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option(metavar="K=SECRET:KEY", help="Variable from a Secret of the cluster.")
    ] = None,
    service_account: Annotated[str | None, typer.Option(help="Service account of the pods.")] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="Maximum restarts after failures; docs/launch.md says which count.")
    ] = 5,
    grace: Annotated[int, typer.Option(min=1, help="Seconds that pods have to save after SIGTERM.")] = 300,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write; default: standard output.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace an existing --output file.")] = False,
    submit: Annotated[bool, typer.Option("--submit", help="Create the objects in the cluster.")] = False,
    context: Annotated[
        str | None, typer.Option(help="Context of the kubeconfig for --submit; default: the current one.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run", help="Write nothing; with --submit, the API server checks the objects without storing them."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print objects, notices and actions as JSON.")] = False,
) -> None:
    """Write Kubernetes manifests for a run, or --submit them.

    Relative paths in the config start at the root of the claims. Pods that are asked to end save first, and a failed
    run is restarted if that may help.

    Example: `megalite k8s configs/quickstart.yaml --image registry/megalite:1 --nodes 2 --gpus-per-node 4
    --output-claim runs -o quickstart.k8s.yaml`
    """
    from launch.planning.auto_layout import sizes_in_words

    config = load_checked_config(config_path, overrides)
    if output_claim is None:
        raise LaunchError(
            "no --output-claim is given, and without one checkpoints would be lost with their pods: name a "
            "PersistentVolumeClaim that is ReadWriteMany"
        )
    output_mount = parsing.claim(output_claim, "--output-claim", OUTPUT)
    data = None if data_claim is None else parsing.claim(data_claim, "--data-claim", DATA)
    placed, notices = config_in_pods(config, output_mount, data)
    layout, ranks_per_node, more_notices = fit_layout(config, nodes, gpus_per_node, NODES)
    image, image_notices = parsing.image_name(image)
    if kind is ResourceKind.PYTORCHJOB and restarts:
        notices.append(IGNORES_EXIT_CODES)
    job = PodJob(
        name=parsing.job_name(name, config, nodes),
        namespace=None if namespace is None else parsing.namespace_name(namespace),
        image=image,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        config=placed.to_yaml(),
        output=output_mount,
        data=data,
        resources=parsing.resources(cpu, memory, shared_memory, rdma),
        node_selector=parsing.labels(node_selector or [], "--node-selector"),
        labels=parsing.labels(label or [], "--label"),
        environment=parsing.variables(env or []),
        secrets=parsing.secret_variables(secret_env or []),
        service_account=None
        if service_account is None
        else parsing.object_name(service_account, "--service-account", "ServiceAccount"),
        restarts=restarts,
        grace_s=grace,
    )
    makers: dict[ResourceKind, Callable[[PodJob], list[Manifest]]] = {
        ResourceKind.TRAINJOB: partial(train_job_objects, is_cluster_wide=runtime is Scope.CLUSTER),
        ResourceKind.PYTORCHJOB: pytorch_job_objects,
        ResourceKind.JOBSET: job_set_objects,
    }
    ranks = f"{nodes} node{'s' * (nodes > 1)} x {ranks_per_node} rank{'s' * (ranks_per_node > 1)}"
    heading = f"megalite {version('megalite')}, {config_path}: {ranks}; {sizes_in_words(config, layout)}"
    delivery = Delivery(output, overwrite, submit, dry_run, as_json)
    _deliver(job, makers[kind], heading, [*notices, *more_notices, *image_notices], delivery, context)


def _deliver(
    job: PodJob,
    make: Callable[[PodJob], list[Manifest]],
    heading: str,
    notices: list[str],
    delivery: Delivery,
    context: str | None,
) -> None:
    from launch.backends.kubernetes.cluster import check, check_claims, create, open_cluster

    delivery.check()
    if context is not None and not delivery.submit:
        raise LaunchError("--context belongs to --submit: without it nothing is sent")
    cluster = None
    if delivery.submit:
        cluster = open_cluster(context, job.namespace)
        job = replace(job, namespace=cluster.namespace)
        notices += check_claims(cluster, job)
    objects, checked_by = _validated(make(job))
    text = to_yaml(objects, f"{heading}\n{checked_by}")
    done = delivery.write(text, f"; hand it on with: kubectl apply -f {delivery.file}")
    if cluster is not None and delivery.dry_run:
        notices += check(cluster, objects)
        done.append(f"{cluster} takes them")
    elif cluster is not None:
        create(cluster, objects)
        done.append(f"{cluster} has created them")
    if delivery.dry_run:
        done.append("dry run: nothing was written or created")
    summary = f"{heading}; {checked_by}\nobjects: {', '.join(map(name_of, objects))}"
    facts = {"heading": heading, "validation": checked_by, "objects": objects}
    if checked_by == NOT_VALIDATED and not delivery.as_json:
        notices.append(NOT_VALIDATED)
    delivery.report(text, facts, notices, done, summary)


def _validated(objects: list[Manifest]) -> tuple[list[Manifest], str]:
    """Returns the objects, and a sentence that says what has validated them."""
    if not can_validate():
        return objects, NOT_VALIDATED
    for manifest in from_yaml(to_yaml(objects, "")):  # as they will be read from the file
        if found := problems(manifest):
            raise LaunchError(f"{name_of(manifest)} is not what Kubernetes takes, a defect of megalite: {found[0]}")
    return objects, f"validated by kubeflow-trainer-api {version('kubeflow-trainer-api')}"
