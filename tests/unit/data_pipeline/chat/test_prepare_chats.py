"""`prepare` of conversations: the same bytes for any number of workers, bad rows named or counted, no stale files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.chat import renderer
from data_pipeline.chat.turns import answer_end, opening_notice
from data_pipeline.document import refuse_bad_row
from data_pipeline.errors import DataError
from data_pipeline.prepare import plan
from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.prepare import prepare
from data_pipeline.sources import open_sources
from data_pipeline.storage.file_io import sha256_of_file
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.loss_file import loss_path
from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers.reading import load_tokenizer
from tests.unit.data_pipeline.chat.templates import TEMPLATES, WITHOUT_PROMPT, write_tokenizer
from tests.unit.launch.cli.test_mistakes import command

CHATS = PrepareOptions(append_eos=False, special_tokens="refuse", train_on="all-turns")


def rows(count: int) -> list[dict[str, Any]]:
    return [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "import " * (1 + n % 7)}]}
        for n in range(count)
    ]


def write_rows(path: Path, values: list[object]) -> str:
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return str(path)


@pytest.fixture
def tokenizer(tokenizer_folder: Path, tmp_path: Path) -> Path:
    return write_tokenizer(tokenizer_folder, tmp_path / "tok", TEMPLATES["chatml"])


def test_the_same_bytes_for_any_number_of_workers(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "_SMALLEST_UNIT", 400)
    source = write_rows(tmp_path / "chats.jsonl", rows(60))
    made = [prepare([source], tmp_path / f"out{workers}", tokenizer, CHATS, workers=workers) for workers in (1, 2)]
    assert [summary.document_count for summary in made] == [60, 60] and made[1].workers == 2
    for ending in (".bin", ".idx", ".loss.bin"):
        first, second = (tmp_path / f"out{workers}{ending}" for workers in (1, 2))
        assert first.read_bytes() == second.read_bytes()
    meta, tokens = read_meta(tmp_path / "out1"), IndexedTokens(tmp_path / "out1")
    assert meta is not None and meta.loss_sha256 == sha256_of_file(loss_path(tmp_path / "out1"))
    loss = tokens.read_loss(0, tokens.token_count)
    answers = load_tokenizer(tokenizer / "tokenizer.json").decode(
        tokens.read(0, tokens.token_count)[loss].tolist(), skip_special_tokens=False
    )
    assert answers == "".join("import " * (1 + n % 7) + "<|im_end|>" for n in range(60))
    end = load_tokenizer(tokenizer / "tokenizer.json").token_to_id("<|im_end|>")
    assert meta.end_of_turn_id == end == answer_end(tokenizer)  # an export stops there
    assert prepare([source], tmp_path / "out1", tokenizer, CHATS).reused


def test_a_template_without_a_prompt_for_answers_is_announced(tokenizer: Path, tmp_path: Path) -> None:
    """A model would be asked to go on behind the user's turn, by `generate --chat` and by whoever serves its export."""
    assert opening_notice(tokenizer) is None
    template, prompt, said = tokenizer / "chat_template.jinja", r"'<|im_start|>assistant\n'", list[str]()
    for text in WITHOUT_PROMPT:
        template.write_text(text)
        notice = opening_notice(tokenizer)
        assert notice and notice.startswith(f"{template}: the chat template ignores add_generation_prompt, so that ")
        assert f"{prompt}, with which the template opens one: end it with {{% if add_generation_prompt %}}" in notice
    source = write_rows(tmp_path / "chats.jsonl", rows(2))
    prepare([source], tmp_path / "out", tokenizer, CHATS, workers=1, notice=said.append)
    assert said == [notice]
    template.write_text(text + notice.rpartition("end it with ")[2])
    assert opening_notice(tokenizer) is None, "the remedy is one"


def test_a_bad_row_is_named_or_left_out_and_counted(tokenizer: Path, tmp_path: Path) -> None:
    """Also one that only the template finds; its count is kept with the part, for a run that goes on."""
    good = rows(3)
    source = write_rows(tmp_path / "chats.jsonl", [good[0], {"messages": "hi"}, good[1], forged(), good[2]])
    with pytest.raises(DataError, match=r"chats.jsonl, line 2 has str in 'messages'.*--on-bad-row skip"):
        prepare([source], tmp_path / "out", tokenizer, CHATS)
    only_forged = write_rows(tmp_path / "forged.jsonl", [good[0], forged()])
    with pytest.raises(DataError, match=r"forged.jsonl, line 2, message 1 contains '<\|im_end\|>'.*--on-bad-row skip"):
        prepare([only_forged], tmp_path / "out", tokenizer, CHATS)
    skipping = PrepareOptions(append_eos=False, special_tokens="refuse", train_on="all-turns", skip_bad_rows=True)
    summary = prepare([source], tmp_path / "out", tokenizer, skipping)
    assert (summary.document_count, summary.skipped_rows, len(summary.first_skipped)) == (3, 2, 2)
    assert summary.left_out is not None and summary.left_out.read_text().splitlines() == summary.first_skipped
    assert "chats.jsonl, line 2 has str in" in summary.first_skipped[0]
    tokens = IndexedTokens(tmp_path / "out")
    assert summary.loss_token_count == int(tokens.read_loss(0, tokens.token_count).sum()) > 0
    assert prepare([source], tmp_path / "out", tokenizer, skipping).loss_token_count == summary.loss_token_count
    with pytest.raises(DataError, match="none of the 1 rows can be used"):
        prepare([write_rows(tmp_path / "none.jsonl", [forged()])], tmp_path / "none", tokenizer, skipping)
    assert not list(tmp_path.glob("none.[bil]*")) and not list(tmp_path.glob("*.tmp"))


def test_a_limit_ends_prepare_and_leaves_no_row_out(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """How busy a machine is must not decide what the data is."""
    monkeypatch.setattr(renderer, "PROCESSOR_S", 1.0)
    template = tokenizer / "chat_template.jinja"
    loop = 3 * "{% for a in range(99999) %}" + 3 * "{% endfor %}"
    template.write_text("{% if messages[0].content == '1?' %}" + loop + "{% endif %}" + template.read_text())
    skipping = PrepareOptions(append_eos=False, special_tokens="refuse", train_on="all-turns", skip_bad_rows=True)
    with pytest.raises(DataError, match=r"line 2: .* was given up for its 2 messages.*1 s.*cut the conversation"):
        prepare([write_rows(tmp_path / "c.jsonl", rows(3))], tmp_path / "out", tokenizer, skipping, workers=1)


def forged() -> dict[str, object]:
    return {"prompt": "a<|im_end|>", "completion": "b"}


def test_data_of_another_choice_is_replaced_only_if_asked(tokenizer: Path, tmp_path: Path) -> None:
    """And a mask does not outlive its tokens."""
    source = write_rows(tmp_path / "chats.jsonl", [{"text": "x", **row} for row in rows(3)])
    prepare([source], tmp_path / "out", tokenizer, CHATS)
    last = PrepareOptions(append_eos=False, special_tokens="refuse", train_on="last-turn")
    with pytest.raises(DataError, match="--chat --train-on last-turn"):
        prepare([source], tmp_path / "out", tokenizer, last)
    template = tokenizer / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    with pytest.raises(DataError, match="whose chat template or --chat-date is another one since"):
        prepare([source], tmp_path / "out", tokenizer, CHATS)
    with pytest.raises(DataError, match="no --chat"):
        prepare([source], tmp_path / "out", tokenizer)
    prepare([source], tmp_path / "out", tokenizer, overwrite=True)
    assert not loss_path(tmp_path / "out").exists() and not IndexedTokens(tmp_path / "out").has_loss_mask


def test_conversations_come_from_tables_and_arrays_too(tokenizer: Path, tmp_path: Path) -> None:
    import datasets

    values = rows(5)
    source = write_rows(tmp_path / "chats.jsonl", values)
    (tmp_path / "chats.json").write_text(json.dumps(values))
    datasets.Dataset.from_list([row | {"id": 1} for row in values]).to_parquet(tmp_path / "chats.parquet")
    senders = {"user": "human", "assistant": "gpt"}
    shared = [
        {"conversations": [{"from": senders[one["role"]], "value": one["content"]} for one in row["messages"]]}
        for row in values
    ]
    datasets.Dataset.from_list([row | {"system": ""} for row in shared]).to_parquet(tmp_path / "shared.parquet")
    files = (source, tmp_path / "chats.json", tmp_path / "chats.parquet", tmp_path / "shared.parquet")
    made = [prepare([str(spec)], tmp_path / f"out{number}", tokenizer, CHATS) for number, spec in enumerate(files)]
    assert len({summary.sha256 for summary in made}) == 1
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(DataError, match=r"notes\.txt holds no rows of conversations"):
        prepare([str(tmp_path / "notes.txt")], tmp_path / "out", tokenizer, CHATS)
    masks = [np.fromfile(loss_path(tmp_path / f"out{number}"), np.uint8) for number in range(len(files))]
    assert all(np.array_equal(masks[0], mask) for mask in masks)


def test_a_table_without_conversations_is_refused(tokenizer: Path, tmp_path: Path) -> None:
    """Beside another source it gave no rows, and nothing was said."""
    import datasets

    source, table = write_rows(tmp_path / "chats.jsonl", rows(3)), str(tmp_path / "texts.parquet")
    datasets.Dataset.from_list([{"text": "a", "prompt": "b"}]).to_parquet(table)
    with pytest.raises(DataError, match=r"texts\.parquet has no column of conversations \(it has 'text', 'prompt'\)"):
        prepare([source, table], tmp_path / "out", tokenizer, CHATS, workers=1)


def test_fields_that_only_other_rows_have_are_no_text(tokenizer: Path, tmp_path: Path) -> None:
    """A table gives each object all fields of its column; those a row did not have would carry loss as null."""
    import datasets

    values = []
    for name, argument in (("weather", "city"), ("calculate", "formula")):
        call = {"function": {"name": name, "arguments": {argument: "Paris"}}}
        tool = {"function": {"name": name, "parameters": {"properties": {argument: {"type": "string"}}}}}
        values.append({"messages": [user("?"), {"role": "assistant", "tool_calls": [call]}], "tools": [tool]})
    table = tmp_path / "calls.parquet"
    datasets.Dataset.from_list(values).to_parquet(table)
    assert "null" in json.dumps(datasets.Dataset.from_parquet(str(table))[0])
    in_lines, in_table = (
        [list(document.blocks) for document in source.documents(refuse_bad_row)]
        for spec in (write_rows(tmp_path / "calls.jsonl", values), str(table))
        for source in open_sources([spec], None)
    )
    assert [json.loads(text) for (text,) in in_table] == [json.loads(text) for (text,) in in_lines]


def user(content: str) -> dict[str, object]:
    return {"role": "user", "content": content}


def test_every_row_that_is_left_out_is_listed_with_its_line(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list by part had numbers that begin anew in each, and one of another output stayed beside the new one."""
    monkeypatch.setattr(plan, "_SMALLEST_UNIT", 300)
    values: list[object] = [row if number % 3 else {"messages": number} for number, row in enumerate(rows(30))]
    source, skipping = write_rows(tmp_path / "chats.jsonl", values), replace(CHATS, skip_bad_rows=True)
    summary = prepare([source], tmp_path / "out", tokenizer, skipping, workers=1)
    assert summary.left_out is not None
    listed = [int(line.partition(", line ")[2].split()[0]) for line in summary.left_out.read_text().splitlines()]
    assert listed == list(range(1, 31, 3)) and summary.skipped_rows == 10
    clean = write_rows(tmp_path / "clean.jsonl", list(rows(3)))
    assert prepare([clean], tmp_path / "out", tokenizer, skipping, overwrite=True).left_out is None
    assert not summary.left_out.exists()


def test_shown_conversations_are_what_would_be_written(
    tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A view of its own could show another mask than the one that is trained on."""
    source = write_rows(tmp_path / "chats.jsonl", [rows(5)[2], {"messages": "hi"}, rows(5)[4]])
    words = ["prepare", source, "--chat", "-t", str(tokenizer), "-o", str(tmp_path / "out"), "--on-bad-row", "skip"]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0})
    code, out, err = command([*words, "--show", "5"], monkeypatch, capfd)
    assert code in (0, None) and "1 bad row left out" in err and not list(tmp_path.glob("out*"))
    assert "[[import import import <|im_end|>]]" in out and "2 conversations; what carries loss is in [[ ]]" in out
    code, shown, _ = command([*words, "--show", "5", "--json"], monkeypatch, capfd)
    runs = [run for one in json.loads(shown) for run in one["runs"]]
    assert command(words, monkeypatch, capfd)[0] in (0, None)
    tokens, loaded = IndexedTokens(tmp_path / "out"), load_tokenizer(tokenizer / "tokenizer.json")
    ids, loss = tokens.read(0, tokens.token_count).tolist(), tokens.read_loss(0, tokens.token_count).tolist()
    assert [run["has_loss"] for run in runs for _ in run["tokens"]] == loss
    assert [text for run in runs for text in run["tokens"]] == [
        loaded.decode([number], skip_special_tokens=False) for number in ids
    ]
