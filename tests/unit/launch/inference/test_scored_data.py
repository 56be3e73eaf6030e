"""The samples that `megalite evaluate` scores: packed as the run packs its own data, and said where they are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from launch.errors import USER_ERRORS
from launch.inference.command_options import EvaluateOptions, ModelPlacement
from launch.inference.scored_data import Prepared, scored_data
from launch.inference.stored_model import StoredModel
from launch.trainer.data.packing import pack_data
from megalite.config import Config


@pytest.fixture
def stored(tiny: dict[str, Any], corpus: Path, tmp_path: Path) -> StoredModel:
    """The model of a run on a copy of the corpus, so that nobody else's plans lie beside it."""
    for ending in (".bin", ".idx"):
        for name in ("own", "other"):
            (tmp_path / f"{name}{ending}").write_bytes(Path(f"{corpus}{ending}").read_bytes())
    tiny["data"] |= {"path": str(tmp_path / "own"), "document_mask": True, "packing": "best_fit"}
    config = Config.model_validate(tiny)
    assert config.model is not None
    return StoredModel(tmp_path, config.model, cast(Any, None), {}, config.model_dump(mode="json"), None)


def prepared(stored: StoredModel, data: list[str], **options: Any) -> Prepared:
    (found,) = scored_data(EvaluateOptions(ModelPlacement("model"), [], data, **options), stored)
    assert isinstance(found, Prepared) and found.name == ""
    return found


def test_a_best_fit_run_is_evaluated_on_other_data_and_lengths_without_a_plan(
    stored: StoredModel, tiny: dict[str, Any], tmp_path: Path
) -> None:
    own = [str(tmp_path / "own")]
    for data in ([], own):
        with pytest.raises(USER_ERRORS, match="write it with `megalite data pack"):
            prepared(stored, data)
    pack_data(Config.model_validate(tiny), lambda sentence: None)
    for split in (None, "train"):
        packed = prepared(stored, own, split=split)
        assert packed.samples.packing_rule.startswith("best-fit") and "packed concat" not in (packed.notice or "")
    others: list[tuple[list[str], dict[str, Any]]] = [
        ([str(tmp_path / "other")], {}),
        ([*own, str(tmp_path / "other")], {}),
        (own, {"sequence_length": 24}),
        (own, {"held_out_fraction": 0.2}),
    ]
    for data, options in others:
        other = prepared(stored, data, **options)
        assert other.samples.sample(0).tokens.shape == (options.get("sequence_length", 32) + 1,)
        assert other.notice is not None and other.notice.startswith("the run packs best_fit, for its own data, ")
        assert "these samples are packed concat, which cuts documents" in other.notice


def test_data_at_a_url_is_evaluated_from_a_copy(
    tiny: dict[str, Any], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The samples of another place, or of the run's own data where other data is asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tiny["data"] |= {"path": f"file://{corpus}"}
    far, here = (
        StoredModel(tmp_path, config.model, cast(Any, None), {}, config.model_dump(mode="json"), None)
        for config in (Config.model_validate(tiny), Config.model_validate(tiny | {"data": {"path": "data/nowhere"}}))
    )
    expected = prepared(here, [str(corpus)], held_out_fraction=0.3).samples
    for found in (prepared(far, []), prepared(here, [f"file://{corpus}"], held_out_fraction=0.3)):
        assert found.samples.fingerprint == expected.fingerprint
        assert found.samples.sample(1).tokens.tolist() == expected.sample(1).tokens.tolist()
    assert list((tmp_path / "cache").glob("megalite/data/text-*/text.bin"))
