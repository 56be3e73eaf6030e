"""A tokenizer's folder has one reading, transformers', and its rules are a stranger's program that gets limits."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_pipeline.encoding import piece_limits
from data_pipeline.errors import DataError
from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.prepare import prepare
from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers import reading as tokenizer_reading
from data_pipeline.tokenizers.reading import HubTokenizer, encoded, inspect_tokenizer, is_harmless
from launch.conversion.huggingface.folder_lookup import fetched_folder

Files = dict[str, Any]
TOKENS = ("<tool>", "<|endoftext|>", "it", "été", "<a b>", "\n\n")
NAMES = ("tokenizer_config.json", "added_tokens.json", "special_tokens_map.json", "config.json")


def flags(content: str, **others: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("lstrip", "rstrip", "normalized", "single_word", "special"), False)
    return {"content": content, **plain, **others}


def folder_with(trained: Path, folder: Path, files: Files, rules: Files | None = None) -> Path:
    """A folder with the tokenizer.json that was trained, its rules changed, and other files beside it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    content = json.loads((trained / "tokenizer.json").read_text()) | (rules or {})
    for name, written in ({"tokenizer.json": content} | files).items():
        (folder / name).write_text(json.dumps(written))
    return folder


added = st.builds(
    flags,
    st.sampled_from(TOKENS),
    **{name: st.booleans() for name in ("lstrip", "rstrip", "normalized", "single_word", "special")},
)
configs = st.fixed_dictionaries(
    {},
    optional={
        "tokenizer_class": st.sampled_from(
            ["PreTrainedTokenizerFast", "GPT2Tokenizer", "LlamaTokenizer", "Qwen2TokenizerFast", "Unknown"]
        ),
        "eos_token": st.sampled_from(TOKENS),
        "bos_token": st.sampled_from(TOKENS),
        "added_tokens_decoder": st.dictionaries(st.sampled_from(["0", "600", "601", "7"]), added, max_size=3),
        "additional_special_tokens": st.lists(st.sampled_from(TOKENS), max_size=2, unique=True),
        "extra_special_tokens": st.lists(st.sampled_from(TOKENS), max_size=2, unique=True),
        "add_prefix_space": st.booleans(),
        "split_special_tokens": st.booleans(),
        "add_bos_token": st.booleans(),
        "model_max_length": st.sampled_from([2, 10**9]),
        "auto_map": st.just({"AutoTokenizer": ["remote.Tokenizer", None]}),
    },
)
folders = st.fixed_dictionaries(
    {},
    optional={
        "tokenizer_config.json": configs,
        "added_tokens.json": st.dictionaries(st.sampled_from(TOKENS), st.sampled_from([600, 601]), max_size=2),
        "special_tokens_map.json": st.fixed_dictionaries({}, optional={"eos_token": st.sampled_from(TOKENS)}),
        "config.json": st.sampled_from([{"model_type": "llama"}, {"model_type": "gpt2"}, {}]),
    },
)
RULES: list[Files] = [
    {},
    {"normalizer": {"type": "NFC"}},
    {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}},
]
texts = st.lists(st.sampled_from([*TOKENS, " ", "  ", "a", "it's", "Hello", "\n"]), max_size=12).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(files=folders, rules=st.sampled_from(RULES), text=texts)
def test_ids_and_end_token_are_those_of_transformers_or_the_folder_is_refused(
    files: Files, rules: Files, text: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A model would be trained on other ids than it is asked with, without a word."""
    from transformers import AutoTokenizer

    folder = folder_with(tokenizer_folder, tmp_path / "tokenizer", files, rules)
    try:
        read = inspect_tokenizer(folder)
    except DataError as error:
        assert str(folder) in str(error) and "\n" not in str(error) and files
        return
    theirs = AutoTokenizer.from_pretrained(folder)
    assert encoded(read.load(), text).ids == theirs(text, add_special_tokens=False)["input_ids"]
    assert (read.eos_token_id, read.bos_token_id) == (theirs.eos_token_id, theirs.bos_token_id)
    assert read.vocab_size == max(theirs.get_vocab().values()) + 1
    with HubTokenizer(folder) as asked:
        assert asked.ids(text) == theirs(text)["input_ids"]


OTHERS: dict[str, tuple[Files, Files]] = {
    "a token of the config": ({"tokenizer_config.json": {
        "tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>",
        "added_tokens_decoder": {"0": flags("<|endoftext|>", special=True), "600": flags("<tool>")},
    }}, {}),
    "an end token of the map": ({
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"},
        "special_tokens_map.json": {"eos_token": "<tool>"},
    }, {}),
    "rules of another kind": ({
        "tokenizer_config.json": {"eos_token": "<|endoftext|>"},
    }, {"normalizer": {"type": "NFC"}}),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS)
def test_what_is_prepared_is_what_transformers_makes(case: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    folder, text = folder_with(tokenizer_folder, tmp_path / "tok", *OTHERS[case]), "before <tool> after"
    (tmp_path / "text.txt").write_text(text)
    prepare([str(tmp_path / "text.txt")], tmp_path / "out", folder, workers=1)
    theirs, meta = AutoTokenizer.from_pretrained(folder), read_meta(tmp_path / "out")
    wanted = [*theirs(text, add_special_tokens=False)["input_ids"], theirs.eos_token_id]
    assert np.fromfile(tmp_path / "out.bin", np.uint16).tolist() == wanted
    assert meta is not None and (meta.vocab_size, meta.eos_token_id) == (len(theirs), theirs.eos_token_id)


def test_a_file_that_changes_ids_makes_another_tokenizer(tokenizer_folder: Path, tmp_path: Path) -> None:
    """Its digest is that of tokenizer.json as long as nothing beside it makes a difference, as in older versions."""
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    plain = inspect_tokenizer(tokenizer_folder).sha256
    folder = folder_with(tokenizer_folder, tmp_path / "tok", {"tokenizer_config.json": config})
    (folder / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    assert inspect_tokenizer(folder).sha256 == plain
    (folder / "config.json").write_text('{"model_type": "llama"}')  # transformers is asked, and agrees
    assert inspect_tokenizer(folder).sha256 == plain
    digests = {plain}
    for number in (600, 700):
        (folder / "added_tokens.json").write_text(json.dumps({f"<tool{number}>": 600}))
        digests.add(inspect_tokenizer(folder).sha256)
    assert len(digests) == 3


def replaced(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


LONGER = [replaced({"String": "☃"}, "☄" * 1000), replaced({"String": "☄"}, "xy" * 500)]
MILLION_FOLD = {"normalizer": {"type": "Sequence", "normalizers": LONGER}}
QUADRATIC = {"normalizer": replaced({"Regex": "☃*(?<=b)"}, "c")}
BACKTRACKING = {"pre_tokenizer": split("(a|aa|a?a)+$")}
HARM: dict[str, tuple[Files, str, str]] = {
    "time": (QUADRATIC, "☃" * 20_000, "took more than 1 s"),
    "memory": (MILLION_FOLD, "☃" * 300, "took more than 0.3 GB of memory"),
    "a regular expression": (BACKTRACKING, "a" * 100 + "b", "retry-limit-in-match over"),
}


@pytest.fixture(params=HARM)
def harm(
    request: pytest.FixtureRequest, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, str]:
    """The folder of a tokenizer, a text at which it does harm, and what is said of it. Limits are small."""
    rules, text, says = HARM[request.param]
    for module in (tokenizer_reading, piece_limits):
        if request.param == "memory":
            monkeypatch.setattr(module, "MEMORY_BYTES", 1 << 29)
        elif request.param == "time":
            monkeypatch.setattr(module, "CHARACTERS_PER_S", 1 << 20)
            monkeypatch.setattr(piece_limits, "PROCESSOR_S", 1.0)
    config = {"tokenizer_config.json": {"eos_token": "<|endoftext|>"}}
    return folder_with(tokenizer_folder, tmp_path / "tok", config, rules), text, says


def test_a_text_at_which_a_tokenizer_does_harm_is_named(
    harm: tuple[Path, str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It would fill the memory, take for ever, or end the command in a Rust backtrace."""
    folder, text, says = harm
    assert not is_harmless(folder / "tokenizer.json")
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in ("fine", text, "fine")))
    options = PrepareOptions(skip_bad_rows=True)  # a limit does not decide which rows are left out
    with pytest.raises(DataError, match=says) as caught:
        prepare([str(tmp_path / "rows.jsonl")], tmp_path / "out", folder, options, workers=1)
    message = str(caught.value)
    assert "rows.jsonl, line 2: " in message and "\n" not in message and "not usable" in message
    assert f"{len(text):,} characters" in message
    assert capfd.readouterr().err == ""


def test_a_prompt_at_which_a_tokenizer_does_harm_ends_no_command(
    harm: tuple[Path, str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, text, _ = harm
    with HubTokenizer(folder) as tokenizer:
        assert tokenizer.decode(tokenizer.ids("fine")) == "fine"
        monkeypatch.setattr(tokenizer_reading, "PROCESSOR_S", 1.0)  # a slow machine takes longer to load it
        with pytest.raises(DataError, match=r"is not usable") as caught:
            tokenizer.ids(text)
    assert str(folder) in str(caught.value) and "\n" not in str(caught.value)


_SPECIAL = flags("<x>", special=True)
MISSTATED: dict[str, tuple[Files, Files, str]] = {
    "an id behind a gap": ({"added_tokens.json": {"<pad>": 9640}}, {}, "added_tokens.json gives '<pad>' the id 9640,"),
    "an id of another token": (
        {"tokenizer_config.json": {"added_tokens_decoder": {"5": _SPECIAL}}}, {}, "_config.json gives '<x>' the id 5,"
    ),
    "a huge id": ({}, {"added_tokens": [_SPECIAL | {"id": 3_000_000_000}]}, "json gives '<x>' the id 3000000000, and"),
    "an id as text": ({"added_tokens.json": {"<a>": "600"}}, {}, "added_tokens.json has str as the id of '<a>'"),
    "no id": ({"tokenizer_config.json": {"added_tokens_decoder": {"a": _SPECIAL}}}, {}, "has 'a' in 'added_tokens_dec"),
    "two end tokens": ({"tokenizer_config.json": {"eos_token": ["it"]}}, {}, "_config.json has list in 'eos_token'"),
    "a program": (
        {"tokenizer_config.json": {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}},
        {}, "'auto_map' in its tokenizer_config.json",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISSTATED)
def test_a_stated_id_that_transformers_does_not_give_is_refused(
    case: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """A pretrained model would be trained with another row of its embedding for the token, without a word."""
    files, rules, sentence = MISSTATED[case]
    with pytest.raises(DataError, match=re.escape(sentence)) as caught:
        inspect_tokenizer(folder_with(tokenizer_folder, tmp_path / "tok", files, rules))
    assert str(tmp_path / "tok") in str(caught.value)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "model.safetensors"])
def test_a_pointer_of_git_lfs_is_named(name: str, tmp_path: Path) -> None:
    """JSON's and safetensors' own words for it advise to train another tokenizer, or to distrust the weights."""
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12\n")
    look = fetched_folder if name.startswith("model") else inspect_tokenizer
    with pytest.raises(DataError, match=f"{name} is a pointer of Git LFS, not the file itself: run `git lfs pull`"):
        look(tmp_path)
