"""Decides where a run starts, and loads it: from scratch, given weights, or the run's newest complete checkpoint.

No torch at import.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.errors import first_names
from data_pipeline.samples.mix import MixedSamples
from data_pipeline.samples.samples import Samples
from data_pipeline.storage.paths import decimal_size
from launch.conversion.huggingface.checkpoint_tokenizer import KEPT, find_tokenizer, is_same_tokenizer
from launch.conversion.huggingface.folder_lookup import BASE_MODEL, ENDS_OF_TURNS, is_hub_model, lasting_place
from launch.errors import LaunchError
from launch.runtime.logs import get_logger
from launch.runtime.rank_environment import Rank
from launch.trainer.data.opening import RunData
from launch.trainer.data.run_mix import NEW_RUN, DataPosition, check_past, mixed
from launch.trainer.data.run_stages import check_past_batches
from launch.trainer.run_tokenizer import check_kept, check_room_for, choose_tokenizer
from launch.trainer.start.config_changes import OptionChange, changes_since, check_changes, saved_model
from launch.trainer.start.flags import NO_FLAGS, StartFlags
from launch.trainer.start.run_config import checkpoint_at, reads_the_length, refuse_other_model
from megalite.checkpoint.durable_files import remove
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.foreign_folders import foreign_checkpoint
from megalite.checkpoint.huggingface.tokenizer_folder import TOKENIZER, check_tokenizer_links, tokenizer_files
from megalite.checkpoint.manifest import Manifest, adapter_of, find_latest, read_manifest
from megalite.checkpoint.retention import clean_up
from megalite.config import Config, ResolvedLayout
from megalite.config.errors import shown
from megalite.config.model import DROPOUTS
from megalite.config.rules.rules import check_counted_length
from megalite.training.state import TrainState

if TYPE_CHECKING:
    from launch.conversion.huggingface.model_folder import ModelFolder
    from megalite.engine.engine import Engine
    from megalite.tracing.activity import Activity

log = get_logger(__name__)
IMPORTED = "hugging_face"  # the key under which launch/conversion/huggingface keeps it
SHAPELESS_OPTIONS = {"initializer_range", "model_type", *DROPOUTS}


@dataclass(frozen=True)
class Start:
    """The weights and the step that the run starts from."""

    checkpoint: Path | None = None
    manifest: Manifest | None = None  # of `checkpoint`
    is_resume: bool = False  # the run's own checkpoint, state included; otherwise only weights are loaded
    notices: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()  # why newer checkpoints than `checkpoint` cannot be used
    hub: ModelFolder | None = None  # instead of a checkpoint; with neither, weights are initialized
    base_model: str | None = None  # the Hugging Face model that the run began with, however often it was resumed
    tokenizer: Path | None = None  # folder of the model's tokenizer, of which the run keeps a copy; None: there is none
    changes: tuple[OptionChange, ...] = ()  # of the config since the checkpoint of a resume
    ends_of_turns: tuple[int | None, ...] = ()  # of the conversations and documents of the data

    @property
    def step(self) -> int:
        """Number of steps already done."""
        return self.manifest.step if self.is_resume and self.manifest else 0

    @property
    def lacks_evaluation(self) -> bool:
        """True if a resume goes on from a step that has not been evaluated, or was cut off in it."""
        return self.is_resume and self.manifest is not None and self.manifest.evaluation_loss is None

    @property
    def consumed_samples(self) -> int:
        """Samples that those steps took from the data."""
        return int(self.manifest.state.get("consumed_samples", 0)) if self.is_resume and self.manifest else 0

    @property
    def followed(self) -> DataPosition:
        """Position of the run, and the mix of data that it has followed."""
        return DataPosition.of(self.manifest.state) if self.is_resume and self.manifest else NEW_RUN

    @property
    def loading(self) -> str:
        """Names what is loaded, with its size."""
        if self.manifest is None or self.checkpoint is None:
            return "initializing the weights" if self.hub is None else f"loading the weights of {self.hub.folder}"
        size = sum(file.size for file in self.manifest.files.values())
        return f"loading {self.checkpoint}, {decimal_size(size)}"

    def counted(self, config: Config, samples_per_epoch: int, *, is_certain: bool = True) -> Config:
        """Returns `config` with a length that counts `training.tokens` from this start on, and the data's epoch.

        Raises ConfigError if the schedule does not fit into that length, unless the run may start elsewhere.
        """
        tokens_seen = self.manifest.state.get("tokens_seen", 0) if self.is_resume and self.manifest else 0
        counted = config.counted_from(self.step, int(tokens_seen), samples_per_epoch)
        if is_certain:
            check_counted_length(counted)
        return counted

    @property
    def inherited(self) -> dict[str, Any]:
        """Special tokens and generation config of the Hugging Face model that this run, or the run that wrote its
        checkpoint, was initialized from; the place of that of this run; and the tokens that end answers and documents,
        once the weights have been trained on some."""
        saved = self.manifest.config if self.manifest else {}
        found = {
            IMPORTED: self.hub.carried() if self.hub is not None else saved.get(IMPORTED),
            BASE_MODEL: self.base_model,
            ENDS_OF_TURNS: list(dict.fromkeys([*self.ends_of_turns, *(saved.get(ENDS_OF_TURNS) or [])])),
        }
        return {key: value for key, value in found.items() if value}


@dataclass(frozen=True)
class RunSetup:
    """The configuration, layout, data and start from which this rank builds the engine of a run."""

    config: Config
    layout: ResolvedLayout
    rank: Rank
    data: RunData
    start: Start


def checkpoints_of(config: Config) -> Path:
    """Returns the folder of the run's checkpoints."""
    return config.run_dir / "checkpoints"


def exports_of(config: Config) -> Path:
    """Returns the parent of the run's Hugging Face folders, each named as its checkpoint."""
    return config.run_dir / "hugging_face"


def clear_exports(config: Config) -> None:
    """Removes what interrupted exports and deletions left; call it before a run starts."""
    from megalite.checkpoint.atomic_folder import recover  # pulls in torch

    root = exports_of(config)
    if root.is_dir():
        recover(root)
        for hidden in root.glob(".step_*.deleted"):
            remove(hidden)


def agree_on_start(config: Config, rank: Rank, data: RunData, activity: Activity, flags: StartFlags) -> Start:
    """Finds where the run starts, equal on all ranks; verifies the digests of the checkpoint's files. Collective."""
    from megalite.checkpoint.intact_checkpoint import check_intact, newest_intact
    from megalite.distributed.agreement import is_same_on_all_ranks
    from megalite.tracing.activity import Phase

    activity.begin_phase(Phase.LOADING)
    root = checkpoints_of(config)
    notices: list[str] = []
    if rank.rank == 0:  # before any rank looks for a start
        left_over = clean_up(root) if root.is_dir() else []
        notices += [f"removed {path}, left over from an interrupted save" for path in left_over]
        clear_exports(config)
    if not is_same_on_all_ranks(data.training.fingerprint):  # others wait here for rank 0's preparation
        raise LaunchError("the ranks do not see the same data: it must be on storage that all hosts share")
    own, skipped = newest_intact(root, progress=activity.progress)
    if own is None:
        if rank.rank == 0:
            fetch_from_mirror(config, activity.progress)
        own, skipped = newest_intact(root, progress=activity.progress)
    start = find_start(config, data, own, skipped, flags)
    if start.checkpoint is not None and not start.is_resume:  # of another run; our own has been looked at
        check_intact(start.checkpoint, activity.progress)
    if not is_same_on_all_ranks(start.hub.fingerprint if start.hub is not None else None):
        raise LaunchError(
            f"the ranks do not see the same model: training.initialize_from {config.training.initialize_from} must be "
            "equal on all hosts"
        )
    return replace(start, notices=(*notices, *start.notices))


def load_state(engine: Engine, setup: RunSetup) -> TrainState:
    """Loads weights, and on a resume the optimizer, into the engine; returns the state of the run."""
    from megalite.checkpoint.engine_state import load_engine
    from megalite.checkpoint.merged_reader import MergedReader
    from megalite.checkpoint.reader import CheckpointReader

    start, data = setup.start, setup.data
    known: dict[str, Any] = {
        "data_fingerprint": data.training.fingerprint,
        "data_content": data.training.content_digest,
        "data_mix": data.mix_facts,
    }
    if start.hub is not None:
        load_engine(engine, start.hub.reader, weights_only=True)
    elif start.checkpoint is not None and not start.is_resume:
        load_engine(engine, MergedReader(start.checkpoint), weights_only=True)
    elif start.checkpoint is not None and start.manifest is not None:
        load_engine(engine, CheckpointReader(start.checkpoint), weights_only=False)
        return TrainState.model_validate(start.manifest.state).model_copy(update=known)
    return TrainState(**known, seed=setup.config.training.seed)


def fetch_from_mirror(config: Config, progress: Callable[[], None]) -> None:
    """Downloads the newest checkpoint of the run's mirror, if it has one, when `run_dir` has no intact checkpoint.

    Call it on one rank.

    Raises LaunchError if the mirror belongs to another run, StorageError if it does not answer.
    """
    mirror = config.checkpoint.mirror
    if mirror is None:
        return
    from megalite.checkpoint.remote.transfer import fetch_newest, newest_on_mirror

    if not config.checkpoint.resume:
        if newest_on_mirror(mirror) is not None:
            raise LaunchError(
                f"{mirror} already holds checkpoints, and checkpoint.resume is false: choose another mirror"
            )
        return

    def report(sentence: str) -> None:
        log.info(sentence)
        progress()

    fetch_newest(mirror, checkpoints_of(config), report, warn=log.warning)


def find_start(
    config: Config, data: RunData, own: Path | None, skipped: Sequence[str], flags: StartFlags = NO_FLAGS
) -> Start:
    """Finds where the run starts; `own` is its own newest checkpoint, `skipped` why newer ones cannot be used.

    Raises CheckpointError, FamilyError or LaunchError, one sentence each, if the checkpoint or model does not belong to
    this config, if an option has changed that needs permission, or if there are checkpoints and none is intact: the run
    must not start from the beginning then.
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
        _check_model(manifest, config, own)
        _check_data(manifest, config, own, data.training)
        _check_optimizer(manifest, config, own)
        _check_adapter(manifest, config, own)
        check_kept(manifest, own, config)
        changes = changes_since(manifest, config)
        check_changes(changes, own, allow_change=flags.allow_change)
        base = manifest.config.get(BASE_MODEL)
        start = Start(own, manifest, True, passed_over=tuple(skipped), base_model=base, changes=changes)
    else:
        if config.checkpoint.resume and (foreign := foreign_checkpoint(config.run_dir)):
            raise CheckpointError(
                f"run_dir {config.run_dir} holds {foreign[0]}, which is not resumed here: {foreign[1]}, with another "
                "run_dir; or choose another run_dir to start from the beginning"
            )
        source = config.training.initialize_from
        start = Start() if source is None else _start_from(source, config, data)
    return _with_tokenizer(start, config, data)


def _start_from(source: Path, config: Config, data: RunData) -> Start:
    if is_hub_model(source):
        from launch.conversion.huggingface.model_folder import open_model_folder  # pulls in torch

        hub = open_model_folder(source)
        refuse_other_model(config.model, hub.model, type(hub.model).model_fields, f"{hub.folder}/config.json")
        hub.check_tokenizer(config.data.prefixes[0], data.tokenizer, data.tokenizer_sha256)
        check_tokenizer_links(tokenizer_files(hub.folder))
        return Start(hub=hub, base_model=lasting_place(source))
    weights = checkpoint_at(source)
    manifest = read_manifest(weights)
    _check_model(manifest, config, weights)
    check_tokenizer(manifest, weights, config.data.prefixes[0], data.tokenizer, data.tokenizer_sha256)
    return Start(weights, manifest, passed_over=tuple(find_latest(source)[1]))


def _with_tokenizer(start: Start, config: Config, data: RunData) -> Start:
    """Adds the tokenizer of the run: on a resume its own, else that of the weights it starts from, else the data's."""
    manifest, kept, first = start.manifest, config.run_dir / KEPT, None
    if start.is_resume and tokenizer_files(kept):
        first = kept
    elif start.hub is not None:
        first = start.hub.folder
    elif manifest is not None and start.checkpoint is not None:
        first = find_tokenizer(manifest, start.checkpoint).folder
    wanted = manifest.tokenizer_sha256 if start.is_resume and manifest is not None else data.tokenizer_sha256
    tokenizer, notice = choose_tokenizer(config, data, first, wanted)
    if tokenizer is not None:
        check_room_for(config, tokenizer)
    notices = (*start.notices, *filter(None, [notice]))
    return replace(start, tokenizer=tokenizer, notices=notices, ends_of_turns=data.ends_of_turns)


def _check_model(manifest: Manifest, config: Config, folder: Path) -> None:
    saved, ours = saved_model(manifest), config.model.model_dump(mode="json")
    free = SHAPELESS_OPTIONS if reads_the_length(config.model) else {*SHAPELESS_OPTIONS, "max_position_embeddings"}
    for name, value in ours.items():
        if name not in free and name in saved and saved[name] != value:
            raise CheckpointError(
                f"{folder} is of another model: its model.{name} is {saved[name]}, this config's is {value}"
            )


def check_tokenizer(
    manifest: Manifest, folder: Path, data: Path | str, prepared_with: str | None, sha256: str | None
) -> None:
    """Raises LaunchError if `data` was prepared with another tokenizer than the checkpoint's."""
    known = manifest.tokenizer_sha256
    if known is None or sha256 in (None, known):
        return
    own = find_tokenizer(manifest, folder).folder
    if prepared_with and own is not None and is_same_tokenizer(Path(prepared_with), sha256, own / TOKENIZER):
        return
    raise LaunchError(
        f"{data} was prepared with another tokenizer ({prepared_with}) than what {folder} was trained on "
        f"({manifest.tokenizer}), so its ids mean other text to this model: prepare it again with that one"
    )


def _check_data(manifest: Manifest, config: Config, folder: Path, training: Samples) -> None:
    anew = advice = "start another run_dir with training.initialize_from to go on with its weights"
    check_past_batches(manifest, config, folder, anew)
    if added := _added_prefixes(manifest, config):
        advice = f"leave out {first_names(added)}, which it has not read (a pattern matches more now?), or {advice}"
    is_mixed = isinstance(training, MixedSamples) or bool(manifest.state.get("data_mix"))
    if not is_mixed and manifest.state.get("data_fingerprint") != training.fingerprint:
        known = [
            one for one in changes_since(manifest, config) if one.option.startswith(("data.", "training.sequence"))
        ]
        differs = ", ".join(map(str, known)) or "with the same options, but other documents"
        raise CheckpointError(
            f"{folder} was trained on other data ({differs}), so the samples it has seen are not known here: {advice}"
        )
    content = manifest.state.get("data_content")
    if not is_mixed and content and training.content_digest not in ("", content):
        raise CheckpointError(
            f"{folder} was trained on other tokens than data.path holds now, in documents of the same lengths: {advice}"
        )
    if manifest.state.get("seed") != config.training.seed:
        raise CheckpointError(
            f"{folder} was trained with training.seed {manifest.state.get('seed')}, this config has "
            f"{config.training.seed}, which orders the data differently: {anew}"
        )
    if is_mixed:
        followed = DataPosition.of(manifest.state)
        if isinstance(training, MixedSamples):
            training = mixed(config, training.sources, followed)
        check_past(training, followed, folder, advice)


def _check_optimizer(manifest: Manifest, config: Config, folder: Path) -> None:
    optimizer = manifest.config.get("optimizer", {}).get("name")
    if optimizer != config.optimizer.name:
        raise CheckpointError(
            f"{folder} was trained with optimizer.name {optimizer}, whose state {config.optimizer.name} cannot use: "
            "keep it, or start another run_dir with training.initialize_from"
        )


def _check_adapter(manifest: Manifest, config: Config, folder: Path) -> None:
    saved = adapter_of(manifest, folder)
    if saved.projections == config.adapter.projections:  # whatever their order
        saved = saved.model_copy(update={"targets": config.adapter.targets})
    for option, before in saved:
        if (now := getattr(config.adapter, option)) != before:
            raise CheckpointError(
                f"{folder} was trained with adapter.{option} {shown(before)}, this config has {shown(now)}, with which "
                "its trained matrices mean something else or do not fit: set it back, or start another run_dir with "
                "training.initialize_from, which begins with them merged into the model"
            )


def _added_prefixes(manifest: Manifest, config: Config) -> list[str]:
    """Returns prefixes that were added to `data.path`, or to a source, of which all others have been read."""
    data = manifest.config.get("data") or {}
    sources = data.get("sources") or {}
    texts = [
        (data.get("path"), config.data.path),
        *((sources.get(name, {}).get("path"), source.path) for name, source in config.data.sources.items()),
    ]
    changed = ((before, now) for before, now in texts if before and now and set(before) < set(now))
    return [prefix for before, now in changed for prefix in now if prefix not in before]
