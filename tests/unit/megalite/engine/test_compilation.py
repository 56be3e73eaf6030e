"""The folder in which compiled code is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from megalite.engine.compilation import keep_compiled_code

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for variable in (VARIABLE, "TRITON_CACHE_DIR"):
        monkeypatch.setenv(variable, "")  # so that it is restored
        monkeypatch.delenv(variable)


@pytest.mark.parametrize("is_named_by_torch", [True, False])
def test_code_is_kept_in_the_users_cache(is_named_by_torch: bool, tmp_path: Path) -> None:
    """Also where torch has named its temporary folder, as it does when dynamo is imported."""
    if is_named_by_torch:
        os.environ[VARIABLE] = default_cache_dir()
    assert keep_compiled_code() == tmp_path / "megalite" / "compiled" / "inductor"
    assert os.environ["TRITON_CACHE_DIR"] == f"{tmp_path}/megalite/compiled/triton"


def test_a_folder_that_the_user_names_is_used(tmp_path: Path) -> None:
    os.environ[VARIABLE] = str(tmp_path / "mine")
    assert keep_compiled_code() == tmp_path / "mine"
