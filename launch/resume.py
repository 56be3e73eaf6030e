"""Where a run starts: fresh, from given weights, or from its own newest complete checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import LaunchError
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest, find_latest, read_manifest
from megalite.checkpoint.retention import clean_up
from megalite.config import Config
from megalite.config.model import DROPOUTS

IMPORTED = "hugging_face"  # the key under which launch/convert.py keeps it
NOT_OF_THE_SHAPE = {"initializer_range", "max_position_embeddings", "model_type", *DROPOUTS}


@dataclass(frozen=True)
class Start:
    """What the run starts from."""

    checkpoint: Path | None  # None: fresh weights
    manifest: Manifest | None
    is_resume: bool  # the run's own checkpoint: its state goes on; else only weights are taken
    notices: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        """Steps already done."""
        return self.manifest.step if self.is_resume and self.manifest else 0

    @property
    def inherited(self) -> dict[str, Any]:
        """What an imported model carries through all runs that start from it: special tokens, generation settings."""
        kept = self.manifest.config.get(IMPORTED) if self.manifest else None
        return {IMPORTED: kept} if kept else {}


def checkpoints_of(config: Config) -> Path:
    """Folder of the run's checkpoints."""
    return config.run_dir / "checkpoints"


def clear_checkpoints(config: Config) -> tuple[str, ...]:
    """On one rank, before any looks for a start: removes what interrupted saves left. Returns what to tell."""
    root = checkpoints_of(config)
    left_over = clean_up(root) if root.is_dir() else []
    return tuple(f"removed {path}, left over from an interrupted save" for path in left_over)


def fetch_from_mirror(config: Config, progress: Callable[[], None]) -> None:
    """On one rank, where `run_dir` has no intact checkpoint: gets the mirror's newest one, if there is a mirror.

    Raises LaunchError where the mirror is another run's, StorageError where it does not answer.
    """
    mirror = config.checkpoint.mirror
    if mirror is None:
        return
    from megalite.checkpoint.transfer import fetch_newest, newest_on_mirror

    if not config.checkpoint.resume:
        if newest_on_mirror(mirror)[0] is not None:
            raise LaunchError(
                f"{mirror} already holds checkpoints, and checkpoint.resume is false: choose another mirror"
            )
        return

    def tell(sentence: str) -> None:
        print(f"megalite: {sentence}", flush=True)
        progress()

    fetch_newest(mirror, checkpoints_of(config), tell)


def find_start(config: Config, data_fingerprint: str, own: Path | None, skipped: Sequence[str]) -> Start:
    """Where the run starts; `own` is its own newest checkpoint, `skipped` why newer ones are not taken.

    Raises CheckpointError or LaunchError, one sentence, where a checkpoint does not belong to this config, or where
    there are some and none is whole: starting anew is not what anybody wants then.
    """
    if own is None and skipped:
        raise CheckpointError(
            f"{checkpoints_of(config)} holds no checkpoint that can be used, the newest because of this: {skipped[0]}; "
            "move them away to start from the beginning"
        )
    if own is not None:
        if not config.checkpoint.resume:
            raise LaunchError(
                f"{own.parent} already holds checkpoints, and checkpoint.resume is false: choose another run_dir, or "
                "remove them"
            )
        manifest = read_manifest(own)
        _same_model(manifest, config, own)
        _same_data(manifest, config, own, data_fingerprint)
        _same_course(manifest, config, own)
        said = f"resuming from {own} (step {manifest.step})"
        return Start(own, manifest, True, (*(f"passed over: {why}" for why in skipped), said))
    source = config.training.initialize_from
    if source is None:
        return Start(None, None, False)
    weights, reasons = find_latest(source)
    if weights is None:
        why = reasons[0] if reasons else f"{source}: there is no such checkpoint folder"
        raise CheckpointError(f"training.initialize_from: {why}")
    manifest = read_manifest(weights)
    _same_model(manifest, config, weights)
    return Start(weights, manifest, False, (f"taking the weights of {weights}",))


def _same_model(manifest: Manifest, config: Config, folder: Path) -> None:
    saved, ours = manifest.config.get("model", {}), config.model.model_dump(mode="json")
    for name, value in ours.items():
        if name not in NOT_OF_THE_SHAPE and name in saved and saved[name] != value:
            raise CheckpointError(
                f"{folder} is of another model: its model.{name} is {saved[name]}, this config's is {value}"
            )


def _same_data(manifest: Manifest, config: Config, folder: Path, fingerprint: str) -> None:
    advice = "start another run_dir with training.initialize_from to go on with its weights"
    if manifest.state.get("data_fingerprint") != fingerprint:
        raise CheckpointError(
            f"{folder} was trained on other data (or another sequence_length or held_out_fraction), so the samples it "
            f"has seen are not known here: {advice}"
        )
    if manifest.state.get("seed") != config.training.seed:
        raise CheckpointError(
            f"{folder} was trained with training.seed {manifest.state.get('seed')}, this config has "
            f"{config.training.seed}, which orders the data differently: {advice}"
        )


def _same_course(manifest: Manifest, config: Config, folder: Path) -> None:
    optimizer = manifest.config.get("optimizer", {}).get("name")
    if optimizer != config.optimizer.name:
        raise CheckpointError(
            f"{folder} was trained with optimizer.name {optimizer}, whose state {config.optimizer.name} cannot use: "
            "keep it, or start another run_dir with training.initialize_from"
        )
    batch_size = manifest.config.get("training", {}).get("global_batch_size")
    if config.training.tokens is not None and batch_size != config.training.global_batch_size:
        raise CheckpointError(
            f"{folder} counts its steps in batches of {batch_size} samples, this config in batches of "
            f"{config.training.global_batch_size}, so training.tokens would end elsewhere: give training.steps instead"
        )
