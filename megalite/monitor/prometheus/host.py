"""The metrics that one host serves: its port, and its GPUs, held by the first rank there."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack

import torch
import torch.distributed as dist

from megalite.config import Config
from megalite.distributed.agreement import from_all_ranks
from megalite.distributed.hosts import this_host
from megalite.distributed.rank_admission import is_loopback_address
from megalite.monitor.observer import Nonfatal
from megalite.monitor.prometheus.endpoint import TARGETS, Endpoint, Rendering, write_targets
from megalite.monitor.prometheus.families import OF_GPUS, rendered
from megalite.monitor.prometheus.gpu_sampler import GpuSampler, dcgm_answers


class HostMetrics:
    """The port and the GPUs of one host while it is open."""

    def __init__(self, config: Config, nonfatal: Nonfatal, tell: Callable[[str], None]) -> None:
        """`tell` takes a sentence. Raises ImportError without prometheus_client, OSError where no port is free."""
        from prometheus_client import CollectorRegistry

        options, self.registry = config.monitor.prometheus, CollectorRegistry()
        self.gpus: GpuSampler | None = None
        can_read = torch.cuda.is_available() and importlib.util.find_spec("pynvml") is not None
        if options.gpus is True or (options.gpus == "auto" and can_read and not dcgm_answers()):
            import pynvml

            self.gpus = gpus = GpuSampler(pynvml, tell)
            self.registry.register(Rendering(lambda: rendered(OF_GPUS, gpus.values), nonfatal))
        # the port first, and only where GPUs can be had: what fails leaves neither a port nor a thread behind
        self.endpoint = Endpoint(options, self.registry, tell) if options.enabled else None
        if self.gpus is not None:
            self.gpus.start()

    def close(self) -> None:
        """Stops listening and reading."""
        with ExitStack() as stack:
            for part in (self.gpus, self.endpoint):
                if part is not None:
                    stack.callback(part.close)


def open_host_metrics(config: Config, nonfatal: Nonfatal, tell: Callable[[str], None]) -> HostMetrics | None:
    """Opens the metrics of this rank's host if it is the first one there and the config asks for them; rank 0 writes
    where all hosts serve theirs.

    Collective where the config asks for metrics. What fails is left out.
    """
    options = config.monitor.prometheus
    if not (options.enabled or options.textfile):
        return None
    rank, opened = dist.get_rank(), None
    hosts = from_all_ranks(this_host(), tuple[str, str])
    if hosts.index(hosts[rank]) == rank:
        with nonfatal("Prometheus"):
            opened = HostMetrics(config, nonfatal, tell)
    own = opened.endpoint.target if opened is not None and opened.endpoint is not None else None
    targets = [target for target in from_all_ranks(own, str | None) if target is not None]
    if rank == 0 and targets:
        with nonfatal(TARGETS):
            write_targets(config.run_dir, targets)
        tell(f"metrics for Prometheus: {', '.join(f'http://{target}/metrics' for target in dict.fromkeys(targets))}")
        if len({*hosts}) > 1 and is_loopback_address(options.host):
            tell(
                f"only programs of the same host reach metrics at {options.host}: for a Prometheus elsewhere set "
                "monitor.prometheus.host to 0.0.0.0, on a network that you trust"
            )
    return opened
