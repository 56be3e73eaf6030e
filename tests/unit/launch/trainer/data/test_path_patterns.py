"""A pattern among the paths of `data` means the prepared prefixes that it matches when the run starts, no others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from data_pipeline.errors import DataError
from data_pipeline.storage.indexed import IndexedTokens
from launch.trainer.data.opening import open_data
from launch.trainer.data.path_patterns import with_prefixes
from launch.trainer.start.resume import _check_data
from launch.trainer.start.run_config import load_run_config
from megalite.checkpoint.errors import CheckpointError
from megalite.checkpoint.manifest import Manifest
from tests.conftest import write_config


@pytest.fixture
def web(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with three prefixes, and other files of theirs; the working directory is the one above it."""
    (tmp_path / "web/deep").mkdir(parents=True)
    for name in ("b", "a", "deep/c"):
        copy_of(corpus, tmp_path / "web" / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "web"


def copy_of(corpus: Path, prefix: Path) -> None:
    for ending in (".bin", ".idx", ".meta.json"):
        shutil.copyfile(f"{corpus}{ending}", f"{prefix}{ending}")


@pytest.mark.parametrize(
    ("path", "prefixes"),
    [
        ("web/*", ["web/a", "web/b"]),
        ("web/**/*", ["web/a", "web/b", "web/deep/c"]),
        (["web/[b-z]", "web/*"], ["web/b", "web/a"]),
        (["web/b", "web/?"], ["web/b", "web/a"]),
        (["web/a", "web/z*"], ["web/a", "web/z*"]),
        ("s3://web/*", "s3://web/*"),
        ("web/a", "web/a"),
        (["web/b", "web/b"], ["web/b", "web/b"]),  # of an older run
        (["*", 4], ["*", 4]),
        ({"*": 1}, {"*": 1}),
        (None, None),
    ],
    ids=str,
)
def test_a_pattern_is_the_prefixes_that_match_by_name(path: Any, prefixes: Any, web: Path) -> None:
    given = {
        "path": path,
        "sources": {"x": {"path": path, "weight": 1}, "y": None},
        "validation": {"z": {"path": path}},
    }
    expected = {
        "path": prefixes,
        "sources": {"x": {"path": prefixes, "weight": 1}, "y": None},
        "validation": {"z": {"path": prefixes}},
    }
    assert with_prefixes({"data": given, "run_dir": "a/*"}) == {"data": expected, "run_dir": "a/*"}


def test_a_prefix_named_like_a_pattern_is_itself(web: Path) -> None:
    copy_of(web / "a", web / "[b]")
    assert with_prefixes({"data": {"path": "web/[b]"}}) == {"data": {"path": "web/[b]"}}
    assert with_prefixes({"data": {"path": "web/[[]*"}}) == {"data": {"path": ["web/[b]"]}}


def test_a_run_keeps_the_prefixes_and_refuses_one_that_came_later(web: Path, tiny: dict[str, Any]) -> None:
    """Its order would be another one, so that text would be lost or seen twice; the run's own config goes on."""
    for data in ({"path": "web/*"}, {"sources": {"all": {"path": "web/*", "weight": 1}}}):
        config = load_run_config(write_config(web / "c.yaml", tiny | {"data": data}))
        assert config.data.prefixes == ["web/a", "web/b"]
        first = open_data(config)
        state = {"data_fingerprint": first.training.fingerprint, "seed": 0, "consumed_samples": 4}
        state["data_mix"] = first.mix_facts
        described = config.model_dump(mode="json")
        manifest = Manifest(step=1, tensors={}, files={}, tokenizer=None, config=described, state=state)
        copy_of(web / "a", web / "new")
        again = load_run_config(web / "c.yaml")
        with pytest.raises(CheckpointError, match=r"^at: .*leave out web/new, which it has not read"):
            _check_data(manifest, again, Path("at:"), open_data(again).training)
        kept = load_run_config(write_config(web / "config.yaml", described))
        _check_data(manifest, kept, Path("at:"), open_data(kept).training)
        for ending in (".bin", ".idx", ".meta.json"):
            Path(f"web/new{ending}").unlink()


def test_a_pattern_that_cannot_be_is_one_sentence(web: Path, tiny: dict[str, Any]) -> None:
    nothing = load_run_config(write_config(web / "c.yaml", tiny | {"data": {"path": "web/z*"}}))
    with pytest.raises(DataError, match=r"^no prepared data matches the pattern web/z\*: there is no file /.*/web/z\*"):
        open_data(nothing)
    with pytest.raises(DataError, match=r"^web/\* is a pattern, which only .*: give prefixes, such as web/a, web/b$"):
        IndexedTokens("web/*")
    with pytest.raises(DataError, match="named without an ending: give web/\\*, not"):
        open_data(load_run_config(write_config(web / "c.yaml", tiny | {"data": {"path": "web/*.bin"}})))
