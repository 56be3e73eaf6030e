"""Writes the plans of best-fit packing, by which samples are cut: for `megalite data pack` and runs without one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from data_pipeline.errors import DataError
from data_pipeline.ownership import make_folder, only_we_write
from data_pipeline.samples.corpus_checks import content_digests, matching_meta
from data_pipeline.samples.packing_plan import PackingPlan, PackingRequest, write_plan
from data_pipeline.samples.token_stream import Split
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.paths import user_path
from launch.errors import LaunchError
from megalite.config import Config
from megalite.config.data import DataConfig
from megalite.config.user_folders import may_be_written


@dataclass(frozen=True)
class PackedSplit:
    """One split of one prepared corpus, and its plan."""

    prefix: Path
    split: Split
    path: Path  # of the plan
    tokens: int  # of the split
    pieces: int
    samples: int  # per epoch
    filled: float | None  # share of the samples that is text; None without samples
    is_reused: bool


def pack_data(config: Config, describe: Callable[[str], None]) -> list[PackedSplit]:
    """Writes the plans of a run's data that are not there yet, or were made of something else."""
    if config.data.packing != "best_fit":
        raise LaunchError(
            f"data.packing is {config.data.packing}, which needs no plan: give data.packing=best_fit, or start the run"
        )
    packed = []
    for prefix in config.data.all_prefixes:
        describe(f"reading the index of {prefix}")
        corpus = IndexedTokens(prefix)
        index_sha256 = content_digests([corpus], [matching_meta(corpus)])[0][-1]
        leaves_out_longer = corpus.has_loss_mask and config.data.too_long == "skip"
        for split, fraction in packed_splits(prefix, config.data):
            describe(f"packing the {split} split of {prefix}, {len(corpus):,} documents")
            request = PackingRequest(
                corpus,
                index_sha256,
                config.training.sequence_length,
                split,
                fraction,
                leaves_out_longer,
                plan_cache(config.data),
            )
            packed.append(_packed_split(request))
    return packed


def packed_splits(prefix: str, data: DataConfig) -> list[tuple[Split, float]]:
    """Returns the splits of a prefix that a run may read and has plans of, with their held-out fractions."""
    splits = list[tuple[Split, float]]()
    if prefix in data.prefixes:
        splits.append(("train", data.held_out_fraction))
        if data.held_out_fraction:
            splits.append(("held_out", data.held_out_fraction))
    if any(prefix in (one.path or []) for one in data.validation.values()):
        splits.append(("train", 0.0))  # all documents of a validation set are evaluated on
    return list(dict.fromkeys(splits))


def plan_cache(data: DataConfig) -> Path | None:
    """Returns the folder for plans of corpora in folders that may not be written: `data.cache`, if it is set."""
    return None if data.cache is None else user_path(str(data.cache)).absolute()


def _path_to_write(request: PackingRequest) -> Path:
    """Returns the file for a new plan, beside the tokens where that may be. Raises LaunchError if there is no place."""
    folder, own = request.corpus.prefix.absolute().parent, request.path_in_cache
    if may_be_written(folder):
        return request.path
    if own is None:
        raise LaunchError(
            f"the plan of {request.corpus.prefix} cannot be written beside it, {folder} is not writable: set "
            "data.cache to a folder of yours, where the plan is kept and looked for then"
        )
    make_folder(own.parent, 0o755)
    if not only_we_write(own.parent):
        raise LaunchError(f"others can write {own.parent}, where plans of yours would lie: choose another data.cache")
    return own


def _packed_split(request: PackingRequest) -> PackedSplit:
    try:
        plan, is_reused = PackingPlan(request), True
    except DataError:  # missing, damaged, or of an older index: all are mended by a new one
        plan, is_reused = write_plan(request, _path_to_write(request)), False
    slots = plan.bin_count * (request.sequence_length + 1)
    return PackedSplit(
        prefix=request.corpus.prefix,
        split=request.split,
        path=request.path,
        tokens=plan.token_count,
        pieces=plan.piece_count,
        samples=plan.bin_count,
        filled=plan.placed_tokens / slots if slots else None,
        is_reused=is_reused,
    )
