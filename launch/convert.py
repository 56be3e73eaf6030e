"""`megalite import` and `megalite export`: a Hugging Face folder becomes a checkpoint, and a checkpoint such a folder.

Tensors are renamed and copied one by one; no layout, rank or launcher is involved. The result appears under its name
only after our serial model and transformers' have given the same logits on it.
"""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from data_pipeline.tokenizer import inspect_tokenizer
from launch.errors import LaunchError
from launch.transformers_model import load_transformers_model, local_folder
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.files import digest, sync
from megalite.checkpoint.hugging_face import (
    HuggingFaceFolder,
    copy_tokenizer,
    new_folder,
    tokenizer_files,
    write_configs,
    write_weights,
)
from megalite.checkpoint.manifest import Slices
from megalite.checkpoint.reader import CheckpointReader, open_checkpoint
from megalite.checkpoint.writer import write_single
from megalite.config import ModelConfig, describe_validation_error
from megalite.parallel.collectives import TensorParallel
from megalite.parallel.layers import LayerSpec, SerialModel
from megalite.parallel.loss import head_logits
from models.decoder import decoder_layers
from models.families import family, hf_config, model_config
from models.families.base import DERIVED_TENSORS, TOKEN_IDS

Read = Callable[[str, Slices], Tensor]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE = 1e-5  # of the logits' standard deviation, in fp32; both models run the same operations
ROUNDING_FACTOR = 3  # times what transformers differs from itself
VALIDATION_TOKENS = (2, 64)
TIED = {"lm_head.weight": "model.embed_tokens.weight"}  # all families spell these alike


@dataclass(frozen=True)
class ConvertSummary:
    """What was converted, and how far our logits and transformers' are apart."""

    source: str
    target: str
    model_type: str
    tensors: int
    parameters: int
    dtype: str  # of the Hugging Face side
    logit_difference: float | None  # largest, over the logits' standard deviation; None where nothing was validated
    notices: tuple[str, ...] = ()


def import_hugging_face(hf_dir: str | Path, checkpoint: Path, *, validate: bool = True) -> ConvertSummary:
    """Writes the checkpoint folder `checkpoint`: the weights of a Hugging Face folder or hub id, at step 0."""
    if checkpoint.exists() and not (checkpoint.is_dir() and not any(checkpoint.iterdir())):
        raise CheckpointError(f"{checkpoint}: is there already and not empty: choose another name")
    source = HuggingFaceFolder(local_folder(hf_dir))
    model = _model_of(model_config(source.config), str(source.folder / "config.json"))
    described = family(model.model_type)
    described.check(model)
    shapes = global_shapes(model)
    names = described.hub_names(shapes)
    source.account(
        {names[name]: shape for name, shape in shapes.items()},
        copies=TIED if model.tie_word_embeddings else {},
        ignored=lambda name: name.endswith(DERIVED_TENSORS),
    )
    dtype = _dtype_name(source.dtypes)
    # beside `model`, because nothing but an export has a use for it
    kept = {"config": described.carried(source.config), "generation_config": source.generation_config, "dtype": dtype}
    with _new_checkpoint(checkpoint) as written:
        write_single(
            written,
            ((name, source.read(hub_name)) for name, hub_name in names.items()),
            step=0,
            config={"model": model.model_dump(mode="json"), "hugging_face": kept},
            tokenizer=str(source.folder.resolve()) if tokenizer_files(source.folder) else None,
            state={},
        )
        difference = compare_logits(model, CheckpointReader(written).read, source.folder) if validate else None
    return _summary(source.folder, checkpoint, model, shapes, dtype, difference)


@contextmanager
def _new_checkpoint(checkpoint: Path) -> Iterator[Path]:
    """Where to write a checkpoint that becomes `checkpoint` when the block ends, and nothing when it raises."""
    folder = checkpoint.resolve()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{folder.name}.", dir=folder.parent) as temporary:
            written = Path(temporary) / folder.name
            yield written
            written.rename(folder)
            sync(folder.parent)
    except OSError as error:
        raise CheckpointError(f"{checkpoint}: cannot be written: {error.strerror or error}") from None


def export_hugging_face(
    checkpoint: Path, hf_dir: Path, *, dtype: str | None = None, overwrite: bool = False, validate: bool = True
) -> ConvertSummary:
    """Writes the Hugging Face folder `hf_dir` from a checkpoint, or the newest of a run.

    dtype: fp32, bf16 or fp16; by default that of the imported folder, or of the run.
    """
    reader = open_checkpoint(checkpoint)
    config = reader.manifest.config
    model = _model_of(config.get("model"), str(reader.folder))
    shapes = global_shapes(model)
    if reader.manifest.tensors != shapes:
        differing = min(shapes.items() ^ reader.manifest.tensors.items())[0]
        raise CheckpointError(f"{reader.folder}: its tensors are not those of its model: {differing}")
    kept = config.get("hugging_face") or {}
    dtype = dtype or kept.get("dtype") or config.get("precision", {}).get("dtype", "fp32")
    if dtype not in DTYPES:
        raise LaunchError(f"dtype {dtype!r} is none of {', '.join(DTYPES)}")
    canonical = {hub: name for name, hub in family(model.model_type).hub_names(shapes).items()}
    tokenizer, notices = _tokenizer_of(reader)
    carried = kept.get("config") or _token_ids(tokenizer)
    described = hf_config(model, dtype, carried)
    generation = kept.get("generation_config") or {key: described[key] for key in TOKEN_IDS}
    with new_folder(hf_dir, overwrite) as folder:
        write_configs(folder, described, generation)
        copy_tokenizer(tokenizer, folder)
        write_weights(
            folder,
            {hub: shapes[name] for hub, name in canonical.items()},
            lambda hub, source: reader.read(canonical[hub], source),
            DTYPES[dtype],
        )
        difference = compare_logits(model, _rounded(reader.read, DTYPES[dtype]), folder) if validate else None
    return _summary(reader.folder, hf_dir, model, shapes, dtype, difference, notices)


def _model_of(options: Any, where: str) -> ModelConfig:
    try:
        return ModelConfig.model_validate(options)
    except ValidationError as error:
        raise CheckpointError(f"{where}: {describe_validation_error(error, ModelConfig)}") from None


def _dtype_name(stored: set[torch.dtype]) -> str:
    """The one dtype of a folder; fp32, which holds them all, where there are several."""
    (dtype,) = stored if len(stored) == 1 else {torch.float32}
    return next(name for name, value in DTYPES.items() if value == dtype)


def _tokenizer_of(reader: CheckpointReader) -> tuple[list[Path], tuple[str, ...]]:
    """The files of a checkpoint's tokenizer, and what to say where there are none.

    Raises CheckpointError where another tokenizer lies there now.
    """
    known = reader.manifest.tokenizer
    if known is None:
        return [], ("the checkpoint knows no tokenizer, so the folder has none",)
    files = tokenizer_files(Path(known))
    expected = reader.manifest.tokenizer_sha256
    if files and expected and all(digest(path).sha256 != expected for path in files if path.name == "tokenizer.json"):
        raise CheckpointError(
            f"{known}: its tokenizer.json is not the one {reader.folder} was trained with, it was retrained or "
            "replaced since: give the old one back"
        )
    return files, () if files else (f"the tokenizer is no longer in {known}, so the folder has none",)


def _token_ids(tokenizer: list[Path]) -> dict[str, Any]:
    """The end token of a run's own tokenizer: generation stops there."""
    path = next((path for path in tokenizer if path.name == "tokenizer.json"), None)
    return {} if path is None else {"eos_token_id": inspect_tokenizer(path).eos_token_id}


def _summary(
    source: Path,
    target: Path,
    model: ModelConfig,
    shapes: Mapping[str, tuple[int, ...]],
    dtype: str,
    difference: float | None,
    notices: tuple[str, ...] = (),
) -> ConvertSummary:
    parameters = sum(torch.Size(shape).numel() for shape in shapes.values())
    return ConvertSummary(
        str(source), str(target), model.model_type, len(shapes), parameters, dtype, difference, notices
    )


def global_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every weight of `model`; nothing is allocated."""
    with torch.device("meta"):
        layers = [_named_layer(spec, TensorParallel()) for spec in decoder_layers(model)]
    parameters = (parameter for layer in layers for parameter in layer.parameters())
    return {piece.name: piece.shape for parameter in parameters for piece in parameter.shard.pieces()}  # type: ignore[attr-defined]


def serial_model(model: ModelConfig, tp: TensorParallel, read: Read) -> SerialModel:
    """The decoder with this rank's slices of the global weights that `read` gives."""

    @torch.no_grad()
    def filled_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
        layer = _named_layer(spec, tp)
        for parameter in layer.parameters():
            parameter.zero_()  # padding
            for piece in parameter.shard.pieces():  # type: ignore[attr-defined]
                parameter[piece.target].copy_(read(piece.name, piece.source))
        return layer

    return SerialModel(decoder_layers(model), tp, filled_layer).eval()


def _named_layer(spec: LayerSpec, tp: TensorParallel) -> nn.Module:
    """A layer without values whose shards know their names."""
    layer = spec.build(tp)
    for path, parameter in layer.named_parameters():
        parameter.shard = dataclasses.replace(parameter.shard, name=f"{spec.name}.{path}")  # type: ignore[attr-defined]
    return layer


def _rounded(read: Read, dtype: torch.dtype) -> Read:
    return lambda name, source: read(name, source).to(dtype)


@torch.no_grad()
def compare_logits(model: ModelConfig, read: Read, hf_dir: Path) -> float:
    """The largest difference of our logits and transformers', over their standard deviation.

    Names and shapes can all be right and the numbers wrong, so this is what says that a conversion is right.
    """
    batch, seq = VALIDATION_TOKENS
    shape = (batch, min(seq, model.max_position_embeddings))
    tokens = torch.randint(model.vocab_size, shape, generator=torch.Generator().manual_seed(0))
    hidden, weight = serial_model(model, TensorParallel(), read)(tokens)
    ours = head_logits(hidden, weight, model.vocab_size, TensorParallel())
    del weight
    transformers_model = load_transformers_model(hf_dir, torch.float32)
    theirs = transformers_model(tokens).logits
    difference = _spread_apart(ours, theirs)
    allowed = TOLERANCE
    if difference > TOLERANCE:  # rounding alone in a model of 32 layers: its own two ways to attend are as far apart
        transformers_model.set_attn_implementation("eager")
        allowed = max(TOLERANCE, ROUNDING_FACTOR * _spread_apart(transformers_model(tokens).logits, theirs))
    if not difference <= allowed:  # NaN is not
        raise LaunchError(
            f"{model.model_type}: our decoder's logits and transformers' are {difference:.1e} of their spread apart, "
            f"more than {allowed:.1e}: the conversion would change the model, so nothing was written"
        )
    return difference


def _spread_apart(logits: Tensor, others: Tensor) -> float:
    return float((logits - others).abs().max() / others.std())
