"""Rules of expert parallelism: how the experts of a layer are dealt over replicas."""

from __future__ import annotations

from collections.abc import Iterator

from megalite.config.config import Config
from megalite.units import plural


def problems_with_experts(config: Config, data_parallel_size: int | None) -> Iterator[str]:
    """Yields a sentence for each broken rule."""
    parallel, experts = config.parallel, config.model.num_experts
    ep = parallel.expert_parallel_size
    if ep == 1:
        return
    option = f"parallel.expert_parallel_size {ep}"
    if experts is None:
        yield f"{option} deals out experts, but model.num_experts is null: use 1, or set num_experts"
        return
    if not any(map(config.model.has_experts, range(config.model.num_hidden_layers))):
        yield f"{option} deals out experts, but model.mlp_only_layers names every layer: use 1"
    replicas = None if data_parallel_size is None else data_parallel_size * parallel.context_parallel_size
    if experts % ep or (replicas or ep) % ep:
        what = f"model.num_experts {experts}"
        if replicas is not None:
            what += f" and the {plural(replicas, 'replica')} (data-parallel x context-parallel size)"
        fitting = [size for size in range(1, experts + 1) if not experts % size and not (replicas or size) % size]
        nearest = sorted({max(n for n in fitting if n <= ep), min((n for n in fitting if n > ep), default=1)} - {1})
        sizes = " or ".join(map(str, nearest)) or "1"
        yield f"{option} must divide {what}: use an expert_parallel_size of {sizes}"
    if parallel.zero_stage == 3 and ("parallel", "zero_stage") not in config.unresolved_options:
        yield (
            f"{option} does not go with parallel.zero_stage 3, which cuts each weight over all replicas, where now "
            "some hold other experts: use zero_stage 1 or 2"
        )
    if config.optimizer.name == "muon":
        yield (
            f"{option} does not go with optimizer.name muon, which gathers whole matrices from all replicas: use adamw "
            "or sgd, or expert_parallel_size 1"
        )
