"""Clusters for tests that must not depend on the machine they run on."""

from __future__ import annotations

from megalite.planner.hardware import Accelerator, Cluster, Link


def cpus(ranks: int, *, nodes: int = 1, memory_gib: float = 4.0) -> Cluster:
    """Nodes with `ranks` ranks each on a slow CPU."""
    core = Accelerator(
        memory_gib=memory_gib,
        peak_tflops={"fp32": 0.05, "bf16": 0.05},
        memory_gb_per_s=10,
        device="cpu",
        launch_us=100,
        intra_node="shared memory",
        inter_node="Ethernet 25",
    )
    return Cluster(
        name="test",
        accelerator_name="core",
        accelerator=core,
        nodes=nodes,
        accelerators_per_node=ranks,
        adapters_per_node=1,
        intra_node=Link(gb_per_s=2),
        inter_node=Link(gb_per_s=3, latency_us=30),
    )
