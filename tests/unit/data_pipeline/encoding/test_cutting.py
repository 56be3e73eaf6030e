"""Long documents are cut only where their tokens stay those of the whole document, whatever the tokenizer."""

import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from data_pipeline.document import BadRows, Document, refuse_bad_row
from data_pipeline.encoding import cutting
from data_pipeline.encoding.cutting import CUT_PLACES, cut_document, safe_places
from data_pipeline.errors import DataError

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
GPT_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CODE = Path(cutting.__file__).read_text(encoding="utf-8")
WORDS = [
    *("漢字かな", "ไทย", "текст", "한국어", "'ll", "1984", "x\n///", "https://a.b/c", "/usr/lib/usr", "//d", "e\n\n\n"),
    *("f\tg\r\n", "h", ",", ".", ";", ")", "(", "🙂", ".\n/usr", "of the", "if\nelse"),
]


def byte_level(before: Any = None, **options: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    last = pre_tokenizers.ByteLevel(**{"add_prefix_space": False, **options})
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([before, last]) if before else last
    return trained(tokenizer, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())


def of_regex(pattern: str) -> Tokenizer:
    return byte_level(pre_tokenizers.Split(Regex(pattern), "isolated"), use_regex=False)


def metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    return trained(tokenizer, special_tokens=["<unk>"])


def of_normalizer(*steps: Any) -> Tokenizer:
    """A vocabulary without entries that reach over a space, and no splitting before it, as in Llama 2 and Gemma."""
    tokenizer = metaspace("never")
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


def unigram() -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    options = {"unk_token": "<unk>", "special_tokens": ["<unk>"], "show_progress": False}
    tokenizer.train_from_iterator([CODE], trainers.UnigramTrainer(vocab_size=300, **options))
    return tokenizer


def greedy_token() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken("<end>", lstrip=True, rstrip=True)])
    return tokenizer


def with_one_entry(entry: str, pattern: str) -> Tokenizer:
    """Bytes and one word, which is the only thing that a wrong cut can change."""
    entries = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *(entry[:end] for end in range(2, len(entry) + 1))]
    merges = [(entry[:end], entry[end]) for end in range(1, len(entry))]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(entries)}, merges))
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    return tokenizer


def trained(tokenizer: Tokenizer, **options: Any) -> Tokenizer:
    trainer = trainers.BpeTrainer(vocab_size=700, show_progress=False, **options)
    tokenizer.train_from_iterator([CODE, " ".join(WORDS) * 9], trainer)
    return tokenizer


LINE, SPACE = CUT_PLACES
TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], tuple[cutting.CutPlace, ...]]] = {
    "gpt-2": (byte_level, (LINE, SPACE)),
    "gpt-2 with a prefix space": (lambda: byte_level(add_prefix_space=True), (SPACE,)),
    "llama-3": (lambda: of_regex(LLAMA_3), (LINE, SPACE)),
    "gpt-4o": (lambda: of_regex(GPT_4O), (SPACE,)),  # a slash after a line break belongs to the sign before
    "words over spaces": (lambda: byte_level(use_regex=False), ()),
    "metaspace always": (lambda: metaspace("always"), (SPACE,)),
    "metaspace first": (lambda: metaspace("first"), (SPACE,)),
    "llama-2": (lambda: of_normalizer(normalizers.Prepend("▁")), ()),
    "gemma": (of_normalizer, (SPACE,)),
    "unigram": (unigram, ()),
    "a path after a line break": (lambda: with_one_entry("/usr", GPT_4O), (SPACE,)),
    "a word over a space": (lambda: with_one_entry("ofĠthe", "^$"), (LINE,)),
    "a word over a line": (lambda: with_one_entry("ifĊelse", "^$"), (SPACE,)),
    "a token that takes the space beside it": (greedy_token, ()),
}


@cache
def built(name: str) -> Tokenizer:
    return TOKENIZERS[name][0]()


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_safe_places_of_a_tokenizer_are_known(name: str) -> None:
    """With fewer, documents that can be cut take memory without bound; with more, they get other tokens."""
    assert safe_places(built(name)) == TOKENIZERS[name][1]


def mixed_text(seed: int, tokenizer: Tokenizer) -> str:
    """Entries of the vocabulary and words of many scripts, between them all kinds of white space."""
    draw = random.Random(seed)
    entries = [tokenizer.decode([number]) for number in range(tokenizer.get_vocab_size())]
    parts = [*WORDS * 9, *cutting._WORDS, *entries, "<end>"]
    return "".join(draw.choice(parts) + draw.choice([" ", "\n", "", "  ", "\n\n", "\t", " \n"]) for _ in range(1500))


TEXTS: dict[str, str] = {
    "prose": CODE,
    "no spaces": "ab1" * 3000,
    "one line": " ".join(CODE.split()),
    "chinese": "汉字没有空格也没有换行。" * 700,
    "digits": "0123456789" * 900,
    "white space": " \n" * 4000,
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_the_tokens_are_those_of_the_whole_document(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limits are a thousandth of the real ones, so that a text of 9,000 characters is a long one."""
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 300)
    monkeypatch.setattr(cutting, "_CUT_WINDOW", 60)
    tokenizer, places = built(name), safe_places(built(name))
    count = 0
    texts = TEXTS | {f"mixed {seed}": mixed_text(seed, tokenizer) for seed in range(6)}
    for title, text in texts.items():
        blocks = [text[place : place + 250] for place in range(0, len(text), 250)]
        pieces = list(cut_document(Document("a.txt", blocks), 0, places, refuse_bad_row))
        assert "".join(piece.text for piece in pieces) == text
        assert pieces == list(cut_document(Document("a.txt", [text]), 0, places, refuse_bad_row)), (
            "blocks do not matter"
        )
        ids = [token for piece in pieces for token in tokenizer.encode(piece.text, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids, title
        count += len(pieces)
    assert count > 100 if places else count == len(texts)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", TOKENIZERS)
def test_documents_of_megabytes_keep_their_tokens(name: str) -> None:
    tokenizer, places = built(name), safe_places(built(name))
    for text in (CODE * 400, "ab1" * 700_000, " ".join(CODE.split()) * 600, "汉字没有空格。" * 300_000):
        pieces = list(cut_document(Document("a.txt", [text]), 0, places, refuse_bad_row))
        ids = [token for piece in pieces for token in tokenizer.encode(piece.text, add_special_tokens=False).ids]
        assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_pieces_say_where_their_document_begins_and_ends() -> None:
    paragraph = "def f(x):\n\n    return x  + 1 # some words\n\n\nnext = f(2)\n"
    text = paragraph * (cutting.PIECE_CHARACTERS // len(paragraph) + 500)
    pieces = list(cut_document(Document("a.txt", [text[:7], text[7:]]), 0, CUT_PLACES, refuse_bad_row))
    assert [(piece.begins_document, piece.ends_document) for piece in pieces] == [(True, False), (False, True)]
    assert cutting.PIECE_CHARACTERS - cutting._CUT_WINDOW < len(pieces[0].text) <= cutting.PIECE_CHARACTERS
    assert list(cut_document(Document("a.txt", ["", ""]), 0, CUT_PLACES, refuse_bad_row)) == []


@pytest.mark.parametrize("place", [0, 4_000, 9_000])
def test_a_document_that_cannot_be_cut_is_refused_or_skipped(place: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose beginning is encoded already cannot be left out any more."""
    monkeypatch.setattr(cutting, "PIECE_CHARACTERS", 3_000)
    monkeypatch.setattr(cutting, "_CUT_WINDOW", 200)
    monkeypatch.setattr(cutting, "LONGEST_PIECE", 8_000)
    text = f"{'x' * place} {'x' * 9_000}"
    for blocks in ([text], [text[:2_500], *text[2_500:]]):
        bad_rows = BadRows(skip=True)
        with pytest.raises(DataError, match=r"^a.txt has more than 8,000 characters without a place") as caught:
            list(cut_document(Document("a.txt", blocks), 0, CUT_PLACES, refuse_bad_row))
        assert "\n" not in str(caught.value)
        if place == 4_000:
            with pytest.raises(DataError, match="more than 8,000"):
                list(cut_document(Document("a.txt", blocks), 0, CUT_PLACES, bad_rows))
        else:
            assert list(cut_document(Document("a.txt", blocks), 0, CUT_PLACES, bad_rows)) == [] and bad_rows.count == 1
