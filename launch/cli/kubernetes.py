"""The command `megalite k8s`, and delivery of its manifests; launch/backends/kubernetes renders them. No torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import typer

from launch.backends.job_generation import Delivery, fit_layout, load_checked_config
from launch.backends.kubernetes import pod_options
from launch.backends.kubernetes.manifests import Kind, PodJob, name_of, objects_of, to_yaml
from launch.cli.options import AllowChange, ConfigPath, Force, OutputFile, Overrides, OverwriteFile, SharedRunDir
from launch.errors import LaunchError
from launch.trainer.start.flags import StartFlags
from megalite.config import Config, ResolvedLayout
from megalite.config.versions import own_version
from megalite.units import plural

OUTPUT, DATA = "/output", "/data"
NOT_VALIDATED = "not validated by an API server; --submit --dry-run, or kubectl apply --dry-run=server, asks one"
IGNORES_EXIT_CODES = (
    "a PyTorchJob does not look at exit codes, so a mistake, or a run that a guard has stopped, is started again until "
    "--restarts are used up; --kind trainjob and jobset know better"
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
        Kind, typer.Option(help="Kind of job: TrainJob (Trainer v2), PyTorchJob (v1), or JobSet.")
    ] = "trainjob",
    runtime: Annotated[
        Literal["cluster", "namespace"],
        typer.Option(help="Scope of a TrainJob's runtime; `cluster` needs rights over the cluster."),
    ] = "cluster",
    name: Annotated[str | None, typer.Option(help="Name of the job; default: that of the run's folder.")] = None,
    namespace: Annotated[str | None, typer.Option(help="Namespace; default: that of the kubeconfig's context.")] = None,
    cpu: Annotated[str | None, typer.Option(help="Cores per pod, such as 16.")] = None,
    memory: Annotated[str | None, typer.Option(help="Memory per pod, such as 256Gi; includes /dev/shm.")] = None,
    shared_memory: Annotated[str | None, typer.Option(help="Limit of /dev/shm; default: the pod's memory.")] = None,
    rdma: Annotated[
        str | None,
        typer.Option(metavar="RESOURCE[=N]", help="RDMA devices per pod; also lets root's ranks pin memory."),
    ] = None,
    node_selector: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label that nodes must have.")] = None,
    label: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Label of all objects and pods.")] = None,
    env: Annotated[list[str] | None, typer.Option(metavar="K=V", help="Variable of all ranks.")] = None,
    secret_env: Annotated[
        list[str] | None, typer.Option(metavar="K=SECRET:KEY", help="Variable from a Secret of the cluster.")
    ] = None,
    service_account: Annotated[
        str | None, typer.Option(help="Service account of the pods, which get no token for the API server.")
    ] = None,
    run_as_user: Annotated[
        str | None,
        typer.Option(metavar="UID[:GID]", help="User of the ranks; 0: root; default: 1000, with --rdma the image's."),
    ] = None,
    network_policy: Annotated[
        bool, typer.Option(help="A NetworkPolicy, by which only pods of this job reach the ranks.")
    ] = True,
    restarts: Annotated[
        int, typer.Option(min=0, help="Maximum restarts after failures; docs/launch.md says which count.")
    ] = 5,
    grace: Annotated[int, typer.Option(min=1, help="Seconds that pods have to save after SIGTERM.")] = 300,
    output: OutputFile = None,
    overwrite: OverwriteFile = False,
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
    force: Force = False,
    allow_change: AllowChange = False,
    shared_run_dir: SharedRunDir = False,
) -> None:
    """Write Kubernetes manifests for a run, or --submit them.

    Relative paths in the config start at the root of the claims. Pods that are asked to end save first, and a failed
    run is restarted if that may help.

    Example: `megalite k8s configs/quickstart.yaml --image registry/megalite:1 --nodes 2 --gpus-per-node 4
    --output-claim runs -o quickstart.k8s.yaml`
    """
    from launch.prediction.auto_layout import format_sizes

    config = load_checked_config(config_path, overrides)
    if output_claim is None:
        raise LaunchError(
            "no --output-claim is given, and without one checkpoints would be lost with their pods: name a "
            "PersistentVolumeClaim that is ReadWriteMany"
        )
    output_mount = pod_options.claim(output_claim, "--output-claim", OUTPUT)
    data = None if data_claim is None else pod_options.claim(data_claim, "--data-claim", DATA)
    if namespace is not None:
        pod_options.check(namespace, "namespace", "--namespace")
    if service_account is not None:
        pod_options.check(service_account, "name of a ServiceAccount", "--service-account")
    if context is not None and not submit:
        raise LaunchError("--context belongs to --submit: without it nothing is sent")
    placed, notices = pod_options.config_in_pods(config, output_mount, data)
    if kind == "pytorchjob" and restarts:
        notices.append(IGNORES_EXIT_CODES)
    layout, ranks_per_node, more_notices = fit_layout(config, nodes, gpus_per_node)
    user, user_notices = pod_options.pod_user(run_as_user, pins_memory=rdma is not None)
    notices += [*more_notices, *pod_options.image_notices(image), *user_notices]
    job = PodJob(
        kind=kind,
        has_cluster_runtime=runtime == "cluster",
        name=pod_options.job_name(name, config.run_dir, nodes),
        namespace=namespace,
        image=image,
        nodes=nodes,
        ranks_per_node=ranks_per_node,
        gpus_per_node=gpus_per_node,
        config=placed.to_yaml(),
        output=output_mount,
        data=data,
        limits=pod_options.limits(cpu, memory, shared_memory, rdma),
        shared_memory=shared_memory,
        pins_memory=rdma is not None,
        node_selector=pod_options.labels(node_selector or [], "--node-selector"),
        labels=pod_options.object_labels(label or []),
        environment=pod_options.variables(env or [], secret_env or []),
        service_account=service_account,
        user=user,
        has_network_policy=network_policy,
        restarts=restarts,
        flags=StartFlags(force, allow_change, shared_run_dir),
        grace_s=grace,
    )
    if memory is not None and not (gpus_per_node or force or config.unresolved_options):
        _check_memory(config, layout, int(pod_options.amount(memory, "--memory")), ranks_per_node)
    ranks = f"{plural(nodes, 'node')} x {plural(ranks_per_node, 'rank')}"
    heading = f"megalite {own_version()}, {config_path}: {ranks}; {format_sizes(config, layout)}"
    delivery = Delivery(output, overwrite, submit, dry_run, as_json)
    _deliver(job, heading, notices, delivery, context)


def _check_memory(config: Config, layout: ResolvedLayout, available: int, ranks: int) -> None:
    """Raises LaunchError where the CPU ranks of a pod cannot fit its memory."""
    from launch.prediction.auto_layout import hosts_cluster
    from launch.prediction.memory_check import forecast_memory, refuse_what_cannot_fit
    from launch.prediction.this_machine import UNMEASURED
    from megalite.planner.cost.memory import CPU
    from megalite.planner.hardware import Cluster

    # torchrun starts them, which leaves malloc as it is
    forecast = forecast_memory(config, layout, replace(CPU, keeps_freed=False), available, ranks)
    slots = [ranks] * (layout.world_size // ranks)

    def machine() -> Cluster:
        return hosts_cluster(slots, layout.world_size, "cpu", [], UNMEASURED)

    refuse_what_cannot_fit(config, layout, forecast, machine, ranks)


def _deliver(job: PodJob, heading: str, notices: list[str], delivery: Delivery, context: str | None) -> None:
    from launch.backends.kubernetes.api_server import check, check_claims, create, open_cluster

    delivery.check()
    cluster, unchecked = None, []
    if delivery.submit:
        cluster = open_cluster(context, job.namespace)
        job = replace(job, namespace=cluster.namespace)
        notices += check_claims(cluster, job)
    objects = objects_of(job)
    text = to_yaml(objects, heading)
    done = []
    if cluster is not None and delivery.dry_run:
        unchecked = check(cluster, objects)
        notices += unchecked
        done.append(f"{cluster} takes them")
    elif cluster is not None:
        create(cluster, objects)
        done.append(f"{cluster} has created them")
    done += delivery.write(text, f"; hand it on with: kubectl apply -f {delivery.file}")
    if delivery.dry_run:
        done.append("dry run: nothing was written or created")
    but = " except the TrainJob" if unchecked else ""
    validation = NOT_VALIDATED if cluster is None else f"validated by the API server{but}"
    facts = {"heading": heading, "validation": validation, "objects": objects}
    summary = f"{heading}; {validation}\nobjects: {', '.join(map(name_of, objects))}"
    delivery.report(text, facts, notices, done, summary)
