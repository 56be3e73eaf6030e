"""What stands around and in the text of documents, and what a row without one does."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

from data_pipeline.errors import DataError
from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.storage.indexed import IndexedTokens
from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers.training import train_tokenizer

INJECTED = "one <|endoftext|> two"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a tokenizer that has begin and end tokens of its own."""
    monkeypatch.chdir(tmp_path)
    train_tokenizer(["one two <|endoftext|> three " * 9], tmp_path / "tok", 262)
    loaded = Tokenizer.from_file("tok/tokenizer.json")
    loaded.add_special_tokens(["<|begin|>"])
    loaded.add_tokens([AddedToken("<think>", special=False)])
    loaded.save("tok/tokenizer.json")
    Path("tok/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>", "bos_token": "<|begin|>"}')
    return tmp_path


def prepared(specs: list[str], **options: Any) -> list[list[int]]:
    prepare(specs, Path("out"), Path("tok"), PrepareOptions(**options), workers=1, overwrite=True)
    tokens = IndexedTokens(Path("out"))
    return [tokens.document(number).tolist() for number in range(len(tokens))]


def test_special_tokens_in_a_text_stay_become_text_or_are_refused(folder: Path) -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("<think>", INJECTED)))
    tokenizer = Tokenizer.from_file("tok/tokenizer.json")
    end, think = tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<think>")
    assert prepared(["a.jsonl"]) == [[think, end], [*tokenizer.encode(INJECTED).ids, end]]
    kept = read_meta(Path("out"))
    assert kept is not None and (kept.special_tokens, kept.begin_token_id) == ("keep", None)
    marks, text = prepared(["a.jsonl"], special_tokens="as-text")
    assert marks == [think, end] and text.count(end) == 1 and text[-1] == end
    assert tokenizer.decode(text[:-1], skip_special_tokens=False) == INJECTED
    with pytest.raises(DataError, match=r"a.jsonl, line 2 contains the special token '<\|endoftext\|>': take it out"):
        prepared(["a.jsonl"], special_tokens="refuse")
    Path("a.jsonl").write_text('{"text": "<think> clean"}\n')
    assert len(prepared(["a.jsonl"], special_tokens="refuse")) == 1


def test_a_vocabulary_with_the_spelling_of_a_special_token_cannot_write_it_as_text(folder: Path) -> None:
    """A model of SentencePiece holds `</s>` as an entry, which is found without the special tokens too."""
    tokenizer = Tokenizer(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=60, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(["one two </s> three"] * 9, trainer)
    tokenizer.save("tok/tokenizer.json")
    Path("a.txt").write_text("one")
    with pytest.raises(DataError, match=r"no other tokens for the text '.*' than the special token: choose"):
        prepared(["a.txt"], append_eos=False, special_tokens="as-text")


def test_the_begin_token_stands_once_before_every_document(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_pipeline.encoding.cutting.PIECE_CHARACTERS", 100)
    monkeypatch.setattr("data_pipeline.encoding.cutting._CUT_WINDOW", 20)
    Path("long.txt").write_text("one two " * 200)
    Path("short.txt").write_text("one")
    tokenizer = Tokenizer.from_file("tok/tokenizer.json")
    begin, end = tokenizer.token_to_id("<|begin|>"), tokenizer.token_to_id("<|endoftext|>")
    expected = [[begin, *tokenizer.encode(Path(name).read_text()).ids, end] for name in ("long.txt", "short.txt")]
    assert prepared(["long.txt", "short.txt"], begin_token=True) == expected
    meta = read_meta(Path("out"))
    assert meta is not None and meta.begin_token_id == begin
    Path("tok/tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
    with pytest.raises(DataError, match="tokenizer tok names no token that begins a text: set bos_token in its"):
        prepared(["short.txt"], begin_token=True)


def test_a_tokenizer_that_leaves_out_merges_at_random_is_refused(folder: Path) -> None:
    content = json.loads(Path("tok/tokenizer.json").read_text())
    content["model"]["dropout"] = 0.1
    Path("tok/tokenizer.json").write_text(json.dumps(content))
    Path("a.txt").write_text("one")
    with pytest.raises(DataError, match=r"tokenizer tok leaves out merges at random, .*: set dropout"):
        prepared(["a.txt"])


@pytest.mark.parametrize("place", [0, 3, 9])
def test_a_refused_document_of_many_pieces_is_left_out_of_all_parts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """The token is in the first piece, in one in the middle, or in the last, with other documents around."""
    monkeypatch.setattr("data_pipeline.encoding.cutting.PIECE_CHARACTERS", 500)
    monkeypatch.setattr("data_pipeline.encoding.cutting._CUT_WINDOW", 100)
    monkeypatch.setattr("data_pipeline.prepare.plan._SMALLEST_UNIT", 1200)
    words = [f"one two {number} " * 50 for number in range(10)]
    words[place] += INJECTED
    texts = ["one", "three " * 300, "".join(words), "two", INJECTED, "".join(words), "three " * 200]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    Path("clean.jsonl").write_text("".join(json.dumps({"text": texts[kept]}) + "\n" for kept in (0, 1, 3, 6)))
    with pytest.raises(DataError, match=r"line 3 contains the special token '<\|endoftext\|>': take it out"):
        prepared(["a.jsonl"], special_tokens="refuse")
    refuse = PrepareOptions(special_tokens="refuse")
    skip = replace(refuse, skip_bad_rows=True)
    summary = prepare(["a.jsonl"], Path("out"), Path("tok"), skip, workers=1, overwrite=True)
    assert (summary.skipped_rows, summary.document_count) == (3, 4)
    alone = prepare(["clean.jsonl"], Path("clean"), Path("tok"), refuse, workers=1)
    assert summary.sha256 == alone.sha256
    assert Path("out.idx").read_bytes() == Path("clean.idx").read_bytes()


BAD_ROWS = [
    '{"text": ', "[1]", '{"body": "b"}', '{"text": null}', '{"text": "\\ud800"}', '{"text": "' + "x" * 200 + '"}',
]  # fmt: skip


def test_bad_rows_are_left_out_and_counted(folder: Path) -> None:
    from datasets import Dataset

    Path("a.jsonl").write_bytes(
        "\n".join(['{"text": "one"}', *BAD_ROWS, '{"text": "two"}']).encode() + b'\n{"text": "\xe4"}'
    )
    Path("b.csv").write_text("text,id\none,1\nt,w,o\n")
    Dataset.from_dict({"text": ["three", None]}).to_parquet("c.parquet")
    Path("clean.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    specs = ["a.jsonl", "b.csv", "c.parquet"]
    with pytest.raises(
        DataError, match=r"line 2 is not JSON .*, or leave such rows out with --on-bad-row skip"
    ) as said:
        prepared(specs)
    assert "\n" not in str(said.value)
    for name in ("b.csv", "c.parquet"):
        with pytest.raises(DataError, match="leave such rows out with --on-bad-row skip"):
            prepared([name])
    found = prepared(specs, skip_bad_rows=True, longest_row=100)
    summary = prepare(specs, Path("out"), Path("tok"), PrepareOptions(skip_bad_rows=True, longest_row=100))
    assert (summary.reused, summary.skipped_rows, summary.document_count) == (True, 9, 4)
    meta = read_meta(Path("out"))
    assert meta is not None and meta.skipped_rows == 9
    assert found[:2] == prepared(["clean.jsonl"], longest_row=100)
    assert prepare(
        ["clean.jsonl"], Path("out"), Path("tok"), PrepareOptions(skip_bad_rows=True, longest_row=100)
    ).reused


def test_a_run_that_met_a_bad_row_goes_on_without_it(folder: Path) -> None:
    """A row that is found after a night must not cost the night."""
    rows = [json.dumps({"text": f"one two {number} " * 9000}) for number in range(8)]
    Path("a.jsonl").write_text("\n".join([*rows, "{"]))
    reports: list[PrepareProgress] = []
    with pytest.raises(DataError, match="line 9 is not JSON"):
        prepare(["a.jsonl"], Path("out"), Path("tok"), workers=1, progress=reports.append)
    summary = prepare(["a.jsonl"], Path("out"), Path("tok"), PrepareOptions(skip_bad_rows=True), workers=1)
    assert (summary.resumed_parts, summary.skipped_rows) == (reports[-1].parts_done, 1) and summary.resumed_parts > 0
    assert "line 9 is not JSON" in summary.first_skipped[0]
    shares = [report.share for report in reports]
    assert shares == sorted(shares) and 0 < shares[0] < shares[-1] < 1 and reports[-1].seconds_left is not None
    with pytest.raises(DataError, match="line 9 is not JSON"):
        prepare(["a.jsonl"], Path("out"), Path("tok"), workers=1)


def test_parts_that_lack_bad_rows_are_encoded_again_where_none_may_be_left_out(folder: Path) -> None:
    texts = [f"one two {number} " * 9000 for number in range(8)]
    texts[5] = INJECTED
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    refuse = PrepareOptions(special_tokens="refuse")
    skip = replace(refuse, skip_bad_rows=True)

    def stop_after_two(done: PrepareProgress) -> None:
        if done.parts_done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(["a.jsonl"], Path("out"), Path("tok"), skip, workers=1, progress=stop_after_two)
    assert prepare(["a.jsonl"], Path("out"), Path("tok"), refuse, dry_run=True).resumed_parts == 1
    with pytest.raises(DataError, match=r"line 6 contains the special token '<\|endoftext\|>'"):
        prepare(["a.jsonl"], Path("out"), Path("tok"), refuse, workers=1)
    summary = prepare(["a.jsonl"], Path("out"), Path("tok"), skip, workers=1)
    assert (summary.resumed_parts, summary.skipped_rows, summary.document_count) == (2, 1, 7)


FIM = ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"]


def test_documents_are_rearranged_so_that_their_middle_is_last(folder: Path) -> None:
    """Parts and order are read off the tokens; joined, they must be the text again."""
    tokenizer = Tokenizer.from_file("tok/tokenizer.json")
    tokenizer.add_special_tokens(FIM)
    tokenizer.save("tok/tokenizer.json")
    texts = [f"one two {number} three ünïcode" for number in range(400)]
    Path("a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prefix, suffix, middle = map(tokenizer.token_to_id, FIM)
    orders, places = [], set()
    for text, ids in zip(texts, prepared(["a.jsonl"], fill_in_the_middle=0.5, append_eos=False), strict=True):
        if prefix not in ids:
            assert ids == tokenizer.encode(text).ids
            continue
        marks = [ids.index(mark) for mark in (prefix, suffix, middle)]
        assert marks == sorted(marks) and marks[0] == 0
        first, second, third = (
            tokenizer.decode(ids[start + 1 : end]) for start, end in zip(marks, [*marks[1:], len(ids)], strict=True)
        )
        orders.append(marks[1] > 1)
        assert first + third + second == text  # without a first part the third is prefix and middle
        places.add(len(second))
    assert 160 < len(orders) < 240 and 0.35 < sum(orders) / len(orders) < 0.65 and len(places) > 15
    meta = read_meta(Path("out"))
    assert meta is not None and meta.fill_in_the_middle == 0.5


def test_the_arrangement_belongs_to_the_number_of_a_document(folder: Path) -> None:
    """Neither workers nor the length of a chunk may change it."""
    tokenizer = Tokenizer.from_file("tok/tokenizer.json")
    tokenizer.add_special_tokens(FIM)
    tokenizer.save("tok/tokenizer.json")
    Path("a.jsonl").write_text("".join(json.dumps({"text": "one two " * 3}) + "\n" for _ in range(40)))
    alone = prepared(["a.jsonl"], fill_in_the_middle=0.7)
    Path("b.txt").write_text("")
    Path("c.jsonl").write_text(("{\n" + Path("a.jsonl").read_text()) * 2)
    twice = prepared(["b.txt", "c.jsonl"], fill_in_the_middle=0.7, skip_bad_rows=True)
    assert twice[:40] == alone and twice[40:] != alone


def test_a_tokenizer_without_tokens_for_the_middle_is_refused(folder: Path) -> None:
    Path("a.txt").write_text("one")
    with pytest.raises(
        DataError, match="tokenizer tok has no tokens such as <fim_prefix>, <fim_suffix>, <fim_middle>:"
    ):
        prepared(["a.txt"], fill_in_the_middle=0.5)
    tokenizer = Tokenizer.from_file("tok/tokenizer.json")
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    tokenizer.save("tok/tokenizer.json")
    with pytest.raises(DataError, match="tokenizer tok puts a space before every text"):
        prepared(["a.txt"], fill_in_the_middle=0.5)


@pytest.mark.parametrize("scheme", ["never", "always"])
def test_a_vocabulary_of_other_letters_can_have_its_middle_last_too(folder: Path, scheme: str) -> None:
    tokenizer = Tokenizer(models.BPE({"ß": 0, "▁": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(FIM)
    tokenizer.save("tok/tokenizer.json")
    Path("tok/tokenizer_config.json").unlink()
    Path("a.txt").write_text("ßß ß")
    if scheme == "always":
        with pytest.raises(DataError, match="tokenizer tok puts a space before every text"):
            prepared(["a.txt"], fill_in_the_middle=1.0, append_eos=False)
    else:
        assert sorted(prepared(["a.txt"], fill_in_the_middle=1.0, append_eos=False)[0]) == [0, 0, 0, 1, 2, 3, 4]
