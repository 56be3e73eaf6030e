"""The checks of a run before its ranks start, for `megalite train`, its dry run and what starts ranks elsewhere.

In: a config and the flags of the start. Out: the run as it would start, or one sentence: ConfigError, DataError,
CheckpointError, FamilyError or LaunchError. No torch at import.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from launch.conversion.huggingface.checkpoint_tokenizer import changed_since
from launch.conversion.huggingface.folder_lookup import is_hub_id
from launch.errors import LaunchError
from launch.prediction.memory_check import MemoryForecast, forecast_memory, refuse_what_cannot_fit
from launch.prediction.this_machine import UNMEASURED, cpu_memory, describe_machine
from launch.runtime.devices import Device, gpu_count, gpu_memory_bytes, why_no_gpu
from launch.runtime.host_probe import host_memory_bytes
from launch.runtime.local_ranks import rank_settings
from launch.runtime.logs import get_logger
from launch.trainer.data.opening import RunData, open_data
from launch.trainer.data.remote_data import find_or_fetch_copies, with_copies
from launch.trainer.start.flags import StartFlags
from launch.trainer.start.resume import Start, checkpoints_of, find_start
from launch.trainer.start.run_folder import check_run_folder
from megalite.checkpoint.manifest import find_latest, step_folders
from megalite.config import Config, ConfigError, ResolvedLayout, resolve_layout, wanted_world_size
from megalite.config.rules.adapters import OF_FEED_FORWARD, projections_of_attention
from megalite.config.rules.float8 import check_float8_package
from megalite.config.rules.known_bad import check_known_bad, installed_versions
from megalite.monitor.requirements import check_monitoring, check_textfile
from megalite.planner.cost.memory import CUDA
from models.families import family

log = get_logger(__name__)


@dataclass(frozen=True)
class RunPosition:
    """A run's data and where it starts."""

    config: Config  # counts its length from `start`
    data: RunData
    start: Start

    @property
    def is_complete(self) -> bool:
        """True if nothing is left to train, nor to evaluate after the last step."""
        is_cut = self.start.step == self.config.total_steps and self.data.validation and self.start.lacks_evaluation
        return self.start.step >= self.config.total_steps and not is_cut


@dataclass(frozen=True)
class CheckedRun:
    """A run on this machine that has passed all checks before its ranks."""

    position: RunPosition
    layout: ResolvedLayout
    device: Device
    environment: dict[str, str]  # to set for each rank
    environment_in_words: str
    memory: MemoryForecast | None  # None if it is not known
    overrides: Sequence[str]  # options of a layout that was auto
    notices: Sequence[str]

    @property
    def config(self) -> Config:
        """The config with its layout; it counts its length from the start."""
        return self.position.config


def check_start(config: Config, flags: StartFlags, *, is_dry: bool = False) -> CheckedRun:
    """Makes every check of a run on this machine. With `is_dry` nothing is created or changed, and no
    weights, no checkpoint and no data are downloaded."""
    config, overrides, notices = choose_layout(config)
    layout, device = resolve(config)
    position = find_position(config, flags, is_dry=is_dry)
    environment, in_words = rank_settings(config.launch, layout.world_size, device == "cuda")
    on_cpu = device == "cpu"
    available = host_memory_bytes() if on_cpu else gpu_memory_bytes()
    memory = None
    if available is not None:
        allocator = cpu_memory(os.environ | environment) if on_cpu else CUDA
        memory = forecast_memory(config, layout, allocator, available, layout.world_size)
    if not (flags.force or position.is_complete):
        refuse_what_cannot_fit(
            config,
            layout,
            memory,
            lambda: describe_machine(layout.world_size, on_cpu=on_cpu, limits=UNMEASURED).cluster,
            layout.world_size,
            host_memory_bytes(),
        )
    return CheckedRun(position, layout, device, environment, in_words, memory, overrides, notices)


def find_position(config: Config, flags: StartFlags, *, is_dry: bool = False) -> RunPosition:
    """Checks the run's folder, its data and its checkpoint, as rank 0 of the run does. Creates no folder."""
    check_run_folder(config, shared=flags.shared_run_dir)
    return position_without_lock(config, flags, may_download=not is_dry)


def position_without_lock(config: Config, flags: StartFlags, *, may_download: bool = True) -> RunPosition:
    """Checks a run's data and checkpoint, and leaves its folder to another run that may use it now."""
    root, source = checkpoints_of(config), config.training.initialize_from
    length = config.training.sequence_length
    places = find_or_fetch_copies(config.data, length, may_fetch=may_download, tell=log.info)
    data = open_data(config.model_copy(update={"data": with_copies(config.data, places)}))
    own, skipped = find_latest(root) if step_folders(root) else (None, [])
    is_remote = own is None and not skipped and source is not None and is_hub_id(source)
    if is_remote and not may_download:
        start = Start(notices=(f"the weights of {source} are downloaded when the run starts",))
    else:
        start = find_start(config, data, own, skipped, flags)
    if start.tokenizer is not None:
        prefix, sha256 = config.data.prefixes[0], data.tokenizer_sha256
        if notice := changed_since(start.tokenizer, prefix, sha256, all_files=data.tokenizer_files):
            log.warning(notice)
    may_be_on_mirror = own is None and config.checkpoint.mirror is not None
    if may_be_on_mirror and not may_download:
        later = f"the run resumes from {config.checkpoint.mirror} if that has a checkpoint: a dry run does not look"
        start = replace(start, notices=(*start.notices, later))
    config = start.counted(config, data.training.samples_per_epoch, is_certain=not may_be_on_mirror)
    return RunPosition(config, data.from_position(config, start.followed), start)


def resolve(config: Config) -> tuple[ResolvedLayout, Device]:
    """Resolves the layout for this machine. Raises ConfigError or LaunchError if it does not fit."""
    gpus = gpu_count()
    device: Device = "cuda" if gpus else "cpu"
    if not gpus and os.environ.get("DS_ACCELERATOR") == "cuda":
        reason = f" ({why})" if (why := why_no_gpu()) else ""
        raise LaunchError(
            f"DS_ACCELERATOR is cuda, and there is no GPU here that may be used{reason}: set it to cpu, or unset it"
        )
    check_run(config)
    check_textfile(config.monitor.prometheus)
    world_size = wanted_world_size(config, gpus or None)
    if gpus and world_size > gpus:
        raise LaunchError(
            f"the layout needs {world_size} GPUs and this machine has {gpus}: use a smaller layout, a hostfile "
            "(deepspeed --hostfile), or set DS_ACCELERATOR=cpu to run on the CPU"
        )
    layout = resolve_layout(config, world_size, device)
    check_known_bad(config, layout, installed_versions(), device)
    return layout, device


def check_run(config: Config) -> None:
    """Checks what does not depend on the machine. Raises FamilyError, StorageError or ConfigError."""
    family(config.model.model_type).check(config.model)
    check_monitoring(config.monitor)
    check_float8_package(config)
    _check_adapter_exports(config)
    if config.checkpoint.mirror is not None:
        from megalite.checkpoint.remote.storage import check_url  # pulls in fsspec

        check_url(config.checkpoint.mirror)


def _check_adapter_exports(config: Config) -> None:
    """Raises ConfigError if the run is to export adapters for which a PEFT folder of this family has no place."""
    described, export = family(config.model.model_type), config.checkpoint.export_hf
    has = [*projections_of_attention(config.model), *OF_FEED_FORWARD]
    if not config.model.gated_mlp:
        has.remove("gate_proj")
    adapted = [name for name in config.adapter.projections if name in has]
    refused = [name for name in adapted if not described.has_own_tensor(name)]
    if refused and export != "off":
        left = ", ".join(name for name in adapted if name not in refused)
        raise ConfigError(
            f"checkpoint.export_hf {export} writes adapters for peft, and a {described.model_type} model holds "
            f"{', '.join(refused)} fused with others or transposed, so that they have no place there: set export_hf "
            "off and use `megalite export --merge` after training"
            + (f", or set adapter.targets [{left}]" if left else "")
        )


def choose_layout(config: Config) -> tuple[Config, list[str], list[str]]:
    """Resolves options that are `auto` for this machine.

    Returns the config, the same choice as overrides, and a notice of what was chosen and why. Raises LaunchError or
    ConfigError if no layout fits.
    """
    if not config.unresolved_options | config.open_options:
        return config, [], []
    from launch.prediction.auto_layout import choose_here

    check_run(config)
    chosen = choose_here(config, "cuda" if gpu_count() else "cpu")
    return config.with_resolved(chosen.options), chosen.overrides, [chosen.sentence]
