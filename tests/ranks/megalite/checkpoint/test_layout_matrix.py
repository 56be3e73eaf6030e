"""A checkpoint written on any layout goes on, on any other, as if nothing had happened.

The default run resumes on each of thirteen layouts its own checkpoint and those of two others, drawn anew each time;
`--exhaustive` has all pairs.

The model's head is tied: with pipeline stages the weight lies on two of them, without on one. Three steps after the
resume, each loss and gradient norm is held against the run that was never interrupted. fp32 sums in another order:
2e-5 relative, by promise. Where either side computes in bf16 its numbers are bf16's: 2e-2; but on every layout that
computes in fp32 the numbers after one checkpoint must be equal within 2e-5, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from megalite.checkpoint.engine_state import load_engine
from megalite.checkpoint.reader import CheckpointReader
from tests.helpers.engine_cases import Case, engine_of, trained_steps
from tests.helpers.rank_pool import run_ranks
from tests.helpers.saving import save

pytestmark = pytest.mark.slow

LAYOUTS = {
    "serial": Case(zero=0),
    "tp2-sequence": Case(tp=2, sequence_parallel=True),
    "tp4": Case(tp=4),
    "pp2": Case(pp=2),
    "dp3-zero1": Case(dp=3, micro_batch=2),
    "dp2-zero2": Case(dp=2, zero=2),
    "dp3-zero3": Case(dp=3, zero=3, micro_batch=2),
    "tp2-dp2-zero3": Case(tp=2, dp=2, zero=3),
    "tp2-pp2-dp2": Case(tp=2, pp=2, dp=2, zero=2, micro_batch=1, schedule="zb-v"),
    "pp2-dp3-bf16": Case(pp=2, dp=3, micro_batch=1, dtype="bf16", schedule="zero-bubble"),
    "pp2-interleaved": Case(pp=2, micro_batch=1, schedule="interleaved"),
    "tp2-cp2-sequence": Case(tp=2, cp=2, cp_kind="all_gather", sequence_parallel=True),
    "cp4-zero2": Case(cp=4, cp_kind="ulysses", zero=2, micro_batch=2),
}
STEPS, SAVED_AT, BATCH, SEQUENCE = 5, 2, 6, 36
FP32, BF16 = 2e-5, 2e-2
Numbers = list[tuple[float, float]]
OF_A_LAYER = {
    "input_layernorm": (48,),
    "self_attn.q_proj": (48, 48),
    "self_attn.k_proj": (24, 48),
    "self_attn.v_proj": (24, 48),
    "self_attn.o_proj": (48, 48),
    "post_attention_layernorm": (48,),
    "mlp.gate_proj": (101, 48),
    "mlp.up_proj": (101, 48),
    "mlp.down_proj": (48, 101),
}


def layout(name: str) -> Case:
    """The same run on one of the layouts: same model, batch and number of steps."""
    model = {"tie_word_embeddings": True}
    return dataclasses.replace(LAYOUTS[name], steps=STEPS, global_batch=BATCH, sequence=SEQUENCE, model=model)


def uninterrupted(rank: int, case: Case, root: Path) -> Numbers:
    """All steps in one go, saving on the way, in the background."""
    engine = engine_of(case)
    numbers = trained_steps(engine, case, 0, SAVED_AT)
    saved = save(engine, root, SAVED_AT, background=True)
    assert saved.failure is None
    return numbers + trained_steps(engine, case, SAVED_AT, STEPS)


def resumed(rank: int, case: Case, folders: dict[str, Path]) -> dict[str, Numbers]:
    """The steps after each checkpoint, one after the other in an engine that started from other weights."""
    engine = engine_of(dataclasses.replace(case, seed=case.seed + 1))
    found = {}
    for source, folder in folders.items():
        load_engine(engine, CheckpointReader(folder), weights_only=False)
        found[source] = trained_steps(engine, case, SAVED_AT, STEPS)
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Numbers]]:
    """Each layout's checkpoint, and what its run did."""
    runs = {}
    for name in LAYOUTS:
        root = tmp_path_factory.mktemp(name)
        numbers = run_ranks(uninterrupted, layout(name).world_size, layout(name), root)[0]
        runs[name] = (root / f"step_{SAVED_AT:08d}", numbers)
    return runs


def sources_of(target: str, places: Iterable[int]) -> list[str]:
    """Layouts by how many places behind `target` they stand in LAYOUTS."""
    names = list(LAYOUTS)
    return [names[(names.index(target) + place) % len(names)] for place in places]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize(
    "places", [None, pytest.param(range(len(LAYOUTS)), marks=pytest.mark.exhaustive)], ids=["some", "all"]
)
def test_every_layouts_checkpoint_goes_on(
    saved: dict[str, tuple[Path, Numbers]], target: str, places: Sequence[int] | None
) -> None:
    case = layout(target)
    drawn = random.SystemRandom().sample(range(1, len(LAYOUTS)), 2)
    names = sources_of(target, places or (0, *drawn))  # its own first, into a new engine
    found = run_ranks(resumed, case.world_size, case, {name: saved[name][0] for name in names})
    for source in names:
        whole = saved[source][1][SAVED_AT:]
        for rank, of_rank in enumerate(found):
            if source == target:
                assert of_rank[source] == whole, f"{source} on itself, rank {rank}: not equal to the bit"
                continue
            tolerance = BF16 if "bf16" in (layout(source).dtype, case.dtype) else FP32
            assert of_rank[source] == [pytest.approx(step, rel=tolerance) for step in whole], (
                f"{source} -> {target}, rank {rank}"
            )


def test_fp32_layouts_agree_on_what_follows_a_bf16_checkpoint(saved: dict[str, tuple[Path, Numbers]]) -> None:
    """Nothing is lost by the way through bf16's files: its fp32 masters are what all layouts read."""
    folders = {"pp2-dp3-bf16": saved["pp2-dp3-bf16"][0]}
    found = [
        run_ranks(resumed, layout(name).world_size, layout(name), folders)[0]["pp2-dp3-bf16"]
        for name in ("serial", "tp2-dp2-zero3")
    ]
    assert found[1] == [pytest.approx(step, rel=FP32) for step in found[0]]


def test_every_layout_writes_what_older_versions_wrote(saved: dict[str, tuple[Path, Numbers]]) -> None:
    """Names, shapes and moments are those of the engine on DeepSpeed's pipelines, whose checkpoints must go on.

    The copy of a tied head is not among them, and the reader refuses a number that is missing or stored twice.
    """
    tensors = {f"model.layers.{i}.{name}.weight": shape for i in range(5) for name, shape in OF_A_LAYER.items()}
    tensors |= {"model.embed_tokens.weight": (131, 48), "model.norm.weight": (48,)}
    for name, (folder, _) in saved.items():
        reader = CheckpointReader(folder)
        manifest = reader.manifest
        assert manifest.tensors == tensors, name
        assert (manifest.version, manifest.optimizer_steps) == (2, SAVED_AT), name
        assert manifest.moments == ("exp_avg", "exp_avg_sq"), name
        for tensor, shape in tensors.items():
            for kind in ("weight", *manifest.moments):
                assert reader.read(tensor, kind=kind).shape == shape, f"{name}: {kind} of {tensor}"
