"""Where a run starts: fresh, from given weights, or from its own newest complete checkpoint. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from launch.data import RunData
from launch.errors import LaunchError
from launch.hub_folder import is_hub_model
from launch.run_config import checkpoint_at, reads_the_length, refuse_other_model
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest, read_manifest
from megalite.checkpoint.retention import clean_up
from megalite.config import Config, ModelConfig
from megalite.config.model import DROPOUTS

if TYPE_CHECKING:
    from launch.hub_model import HubModel

IMPORTED = "hugging_face"  # the key under which launch/convert.py keeps it
NOT_OF_THE_SHAPE = {"initializer_range", "model_type", *DROPOUTS}


@dataclass(frozen=True)
class Start:
    """What the run starts from."""

    checkpoint: Path | None = None
    manifest: Manifest | None = None  # of `checkpoint`
    is_resume: bool = False  # the run's own checkpoint: its state goes on; else only weights are taken
    notices: tuple[str, ...] = ()
    hub: HubModel | None = None  # instead of a checkpoint; with neither, weights are fresh

    @property
    def step(self) -> int:
        """Steps already done."""
        return self.manifest.step if self.is_resume and self.manifest else 0

    @property
    def inherited(self) -> dict[str, Any]:
        """What a Hugging Face model carries through all runs that start from it: special tokens, generation config."""
        if self.hub is not None:
            return {IMPORTED: self.hub.carried}
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


def find_start(config: Config, data: RunData, own: Path | None, skipped: Sequence[str]) -> Start:
    """Where the run starts; `own` is its own newest checkpoint, `skipped` why newer ones are not taken.

    Raises CheckpointError, FamilyError or LaunchError, one sentence, where what it would start from does not belong to
    this config, or where there are checkpoints and none is whole: starting anew is not what anybody wants then.
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
        _same_data(manifest, config, own, data.training.fingerprint)
        _same_course(manifest, config, own)
        said = f"resuming from {own} (step {manifest.step})"
        return Start(own, manifest, True, (*(f"passed over: {why}" for why in skipped), said))
    source = config.training.initialize_from
    return Start() if source is None else _start_from(source, config, data)


def _start_from(source: Path, config: Config, data: RunData) -> Start:
    from launch.hub_model import open_hub_model  # pulls in torch
    from megalite.checkpoint.hugging_face import check_tokenizer_links, tokenizer_files

    if is_hub_model(source):
        hub = open_hub_model(source)
        refuse_other_model(config.model, hub.model, type(hub.model).model_fields, f"{hub.folder}/config.json")
        hub.check_tokenizer(Path(config.data.path[0]), data.tokenizer, data.tokenizer_sha256)
        check_tokenizer_links(tokenizer_files(hub.folder))  # they are copied once the engine is built
        return Start(hub=hub, notices=(f"taking the weights of {hub.folder}",))
    weights = checkpoint_at(source)
    manifest = read_manifest(weights)
    _same_model(manifest, config, weights)
    _same_words(manifest, config, weights, data)
    return Start(weights, manifest, notices=(f"taking the weights of {weights}",))


def _same_model(manifest: Manifest, config: Config, folder: Path) -> None:
    saved, ours = manifest.config.get("model", {}), config.model.model_dump(mode="json")
    with suppress(ValidationError):  # one of an older version lacks options, which then are plain
        saved = ModelConfig.model_validate(saved).model_dump(mode="json")
    free = NOT_OF_THE_SHAPE if reads_the_length(config.model) else {*NOT_OF_THE_SHAPE, "max_position_embeddings"}
    for name, value in ours.items():
        if name not in free and name in saved and saved[name] != value:
            raise CheckpointError(
                f"{folder} is of another model: its model.{name} is {saved[name]}, this config's is {value}"
            )


def _same_words(manifest: Manifest, config: Config, folder: Path, data: RunData) -> None:
    from launch.hub_model import TOKENIZER, is_same_tokenizer

    known, ours = manifest.tokenizer_sha256, data.tokenizer_sha256
    if known is None or ours in (None, known):
        return
    if data.tokenizer and manifest.tokenizer:
        own = Path(manifest.tokenizer) / TOKENIZER
        if own.is_file() and is_same_tokenizer(Path(data.tokenizer), ours, own):
            return
    raise LaunchError(
        f"{config.data.path[0]} was prepared with another tokenizer ({data.tokenizer}) than what {folder} was trained "
        f"on ({manifest.tokenizer}), so its ids mean other text to this model: prepare it again with that one"
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
