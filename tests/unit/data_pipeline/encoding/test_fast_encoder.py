"""The fast encoder writes the bytes of the exact one, or is refused with the place where it would not."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from data_pipeline.encoding import character_probe, fast_encoder
from data_pipeline.encoding.cutting import TextPiece
from data_pipeline.encoding.encoders import SpecialTokens, TextEncoder
from data_pipeline.encoding.fill_in_the_middle import FillInTheMiddle
from data_pipeline.errors import DataError
from data_pipeline.prepare import encoder_check
from data_pipeline.prepare.plan import PrepareOptions
from data_pipeline.prepare.prepare import PrepareProgress, prepare
from data_pipeline.sources import open_sources
from data_pipeline.storage.meta import read_meta
from data_pipeline.tokenizers.reading import inspect_tokenizer
from data_pipeline.tokenizers.training import train_tokenizer
from tests.unit.data_pipeline.encoding.test_cutting import CODE, TEXTS, built, byte_level, mixed_text

pytest.importorskip("gigatoken", reason="the extra [fast] is not installed")


def byte_fallback(pre_tokenizer: Any, *steps: Any) -> Tokenizer:
    """Letters and a few words, and a token for each byte of what else a text holds, as SentencePiece's BPE has."""
    entries = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz_(),.:漢é"]
    merges = [("t", "h"), ("▁", "th"), ("▁th", "e"), ("i", "n"), ("▁", "i"), ("▁i", "n"), ("▁", "▁"), ("e", "▁")]
    entries += ["".join(pair) for pair in merges]
    vocabulary = {entry: number for number, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.add_special_tokens([AddedToken("<unk>", normalized=False)])
    tokenizer.pre_tokenizer = pre_tokenizer
    if steps:
        tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def composing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


BUILT = ("gpt-2", "gpt-2 with a prefix space", "llama-3", "gpt-4o", "a token that takes the space beside it")
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    **{name: partial(built, name) for name in BUILT},
    "gpt-2 of composed characters": composing,
    "metaspace always": lambda: byte_fallback(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "metaspace first": lambda: byte_fallback(pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
    "llama-2": lambda: byte_fallback(None, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")),
    "gemma": lambda: byte_fallback(
        pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "▁")
    ),
}  # fmt: skip


def saved(tokenizer: Tokenizer, folder: Path) -> Path:
    """Saves a tokenizer with the special tokens that a document and its parts need; returns its folder."""
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.add_special_tokens(["<end>", "<begin>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"])
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"eos_token": "<end>", "bos_token": "<begin>"}')
    return folder


USUAL = ("gpt-2", "llama-3", "llama-2")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.exhaustive) for name in TOKENIZERS]
)
def test_every_choice_gives_the_tokens_of_the_exact_encoder(name: str, tmp_path: Path) -> None:
    """gigatoken matches special tokens by itself, so each choice about them is made anew, as are FIM's parts."""
    tokenizer = TOKENIZERS[name]()
    file = inspect_tokenizer(saved(tokenizer, tmp_path / "tok"))
    arrangement = FillInTheMiddle(1.0, 1, 2, 3)
    texts = [*TEXTS.values(), *(mixed_text(seed, tokenizer) for seed in range(3)), "<end>a<think> b <begin>", " <end> "]
    choices: list[tuple[SpecialTokens, FillInTheMiddle | None]]
    choices = [("keep", None), ("as-text", None), ("as-text", arrangement)]
    parting = character_probe.parting_characters(file.path.read_bytes())
    for special, middle in choices:
        exact = TextEncoder(file, file.bos_token_id, file.eos_token_id, special, middle)
        fast = replace(exact, fast_except=parting)
        for number, text in enumerate(texts):
            for begins, ends in ((True, True), (False, False)):
                piece = TextPiece(text, begins, ends, number, "a.txt")
                np.testing.assert_array_equal(fast.encode(piece).ids, exact.encode(piece).ids, f"{special} {text[:40]}")
    refusing = TextEncoder(file, None, None, "refuse", arrangement, parting)
    with pytest.raises(DataError, match=r"a.txt contains the special token '<end>': take it out, or choose"):
        refusing.encode(TextPiece("one <end>", True, False, 0, "a.txt"))
    assert len(refusing.encode(TextPiece("one <think>", True, True, 0, "a.txt")).ids) > 3, "marks of FIM are no text"


PARTING = cache(character_probe.parting_characters)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a tokenizer and rows of text."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(encoder_check, "parting_characters", PARTING)  # of one tokenizer they are always the same
    train_tokenizer([CODE], tmp_path / "tok", 400)
    monkeypatch.setattr("data_pipeline.prepare.plan._SMALLEST_UNIT", 1 << 13)
    lines = [json.dumps({"text": text}) for text in (*TEXTS.values(), *CODE.split("\n\n"))]
    Path("rows.jsonl").write_text("\n".join(lines))
    return tmp_path


def written(output: str, **options: Any) -> list[bytes]:
    prepare(["rows.jsonl"], Path(output), Path("tok"), PrepareOptions(**options), workers=1)
    return [Path(f"{output}{ending}").read_bytes() for ending in (".bin", ".idx")]


def test_both_encoders_write_the_same_files_and_know_each_other(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one has begun or finished is good for the other: the digest of the job does not name the encoder."""
    expected = written("exact")
    assert written("fast", encoder="fast") == expected
    exact, fast = read_meta(Path("exact")), read_meta(Path("fast"))
    assert exact is not None and fast is not None and exact.job_sha256 == fast.job_sha256
    assert exact.gigatoken is None and fast.gigatoken is not None
    assert replace(fast, gigatoken=None) == exact, "a run cannot tell them apart"
    assert prepare(["rows.jsonl"], Path("fast"), Path("tok"), PrepareOptions(), workers=1).reused

    def stop(progress: PrepareProgress) -> None:
        if progress.parts_done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(["rows.jsonl"], Path("half"), Path("tok"), PrepareOptions(), workers=1, progress=stop)
    options = PrepareOptions(encoder="fast")
    summary = prepare(["rows.jsonl"], Path("half"), Path("tok"), options, workers=1)
    assert summary.resumed_parts == 3
    assert [Path(f"half{ending}").read_bytes() for ending in (".bin", ".idx")] == expected


def test_the_tokenizer_is_loaded_anew_before_it_fills_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_encoder, "CHARACTERS_PER_LOAD", 1000)
    tokenizer = fast_encoder.FastTokenizer(Path("tok/tokenizer.json").read_bytes())
    first = tokenizer._loaded
    ids = [tokenizer.ids("a word " * 100).tolist() for _ in range(3)]
    assert tokenizer._loaded is not first and ids[0] == ids[1] == ids[2]


def checked(tokenizer: Tokenizer, sources: list[str]) -> TextEncoder:
    tokenizer.save("tok/tokenizer.json")
    exact = TextEncoder(inspect_tokenizer(Path("tok")), None, None, "keep")
    return encoder_check.fast_encoder(exact, open_sources(sources, "text"))


def test_a_tokenizer_that_the_fast_encoder_reads_wrongly_is_refused(folder: Path) -> None:
    """gigatoken 0.10 splits words where ByteLevel is told not to, and takes tokens of whole words inside words."""
    with pytest.raises(DataError, match=r"^gigatoken splits or normalizes words at '.*' in another way .* exact$"):
        checked(byte_level(use_regex=False), ["rows.jsonl"])
    words = byte_level()
    words.add_tokens([AddedToken("word", single_word=True, special=False)])
    with pytest.raises(
        DataError, match="gives added tokens other tokens than the tokenizer tok has for it, at 'awordb"
    ):
        checked(words, ["rows.jsonl"])
    with pytest.raises(DataError, match=r"^gigatoken cannot read the tokenizer \(Unsupported model type .*\): "):
        checked(built("unigram"), ["rows.jsonl"])


def test_texts_with_a_letter_that_one_library_does_not_know_are_encoded_exactly(folder: Path) -> None:
    """U+A7CF and U+16EBB are letters since Unicode 17: a word that ends before them is one token more or less."""
    words = ['one "\ua7cf", two', 'one "\U00016ebb", two']
    tokenizer = train_tokenizer([*words * 50, CODE], folder / "newer", 900) / "tokenizer.json"
    encoder = checked(Tokenizer.from_file(str(tokenizer)), ["rows.jsonl"])
    alone = fast_encoder.FastTokenizer(tokenizer.read_bytes())
    exact = Tokenizer.from_file(str(tokenizer))
    for text in (*words, "no such letter, but \u00e9 and \u6f22"):
        assert encoder.ids(text).tolist() == exact.encode(text).ids
    if all(alone.ids(text).tolist() == exact.encode(text).ids for text in words):
        pytest.skip("both libraries know the same Unicode")


@pytest.mark.parametrize("name", ["gpt-2", pytest.param("metaspace always", marks=pytest.mark.exhaustive)])
def test_each_character_that_parts_the_libraries_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe's own entries must show a character that is taken for a sign, and no other."""
    content = TOKENIZERS[name]().to_str().encode()
    before = character_probe.parting_characters(content)
    right = fast_encoder.FastTokenizer.ids
    monkeypatch.setattr(
        fast_encoder.FastTokenizer, "ids", lambda self, text: right(self, text.replace("Ж", "№").replace("λ", "Λ"))
    )
    after = character_probe.parting_characters(content)
    new = [
        one
        for one in map(chr, range(0x3000))
        if character_probe.holds_any(one, after) and not character_probe.holds_any(one, before)
    ]
    assert new == ["λ", "Ж", "Ӂ", "Ӝ"], "the last two are spelled with the second"
    assert not character_probe.holds_any("plain text", after) and character_probe.holds_any("a\U000f0000", after)
    assert character_probe.holds_any("ends with λ", after) and not character_probe.holds_any("漢字 é 😀 한글", after)


def test_a_difference_in_the_users_own_text_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference is planted, because the texts of the check itself find all those that are known."""
    right = fast_encoder.FastTokenizer.ids

    def wrong(self: fast_encoder.FastTokenizer, text: str) -> NDArray[np.uint32]:
        ids = right(self, text)
        return ids[::-1] if text == "ab1" * 3000 else ids

    monkeypatch.setattr(fast_encoder.FastTokenizer, "ids", wrong)
    with pytest.raises(
        DataError, match=r"gives the text of rows.jsonl, line 2 other tokens than .*, at 'ab1ab1"
    ) as caught:
        prepare(["rows.jsonl"], Path("out"), Path("tok"), PrepareOptions(encoder="fast"), workers=1)
    assert "\n" not in str(caught.value)
    assert not list(folder.glob("out*")), "nothing is written"


@pytest.mark.parametrize("skips", [False, True])
def test_a_text_on_which_the_fast_encoder_breaks_ends_the_run(
    skips: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be a traceback, and must not be a bad row: the exact encoder knows the text."""

    class PanicError(BaseException):
        """As pyo3 raises it."""

    class Breaking(NamedTuple):
        whole: Any

        def encode(self, text: str) -> Any:
            if text == "ab1" * 3000:
                raise PanicError("index out of bounds")
            return self.whole.encode(text)

    load = fast_encoder.FastTokenizer._load

    def load_breaking(self: fast_encoder.FastTokenizer) -> None:
        load(self)
        self._loaded = Breaking(self._loaded)

    fast_encoder.fast_tokenizer.cache_clear()
    monkeypatch.setattr(fast_encoder.FastTokenizer, "_load", load_breaking)
    monkeypatch.setattr(encoder_check, "sample", lambda sources: [])
    options = PrepareOptions(encoder="fast", skip_bad_rows=skips)
    with pytest.raises(
        DataError, match=r"^rows.jsonl, line 2: gigatoken cannot encode it \(index out of bounds\): .* exact$"
    ):
        prepare(["rows.jsonl"], Path("out"), Path("tok"), options, workers=1)
    fast_encoder.fast_tokenizer.cache_clear()


def test_the_sample_takes_from_all_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One large file among small ones must not be all that is compared, nor may small ones leave the sample small."""
    monkeypatch.setattr(encoder_check, "SAMPLE_CHARACTERS", 10_000)
    monkeypatch.setattr(encoder_check, "_SMALLEST_SHARE", 100)
    for number in range(40):
        Path(f"{number:02}.txt").write_text(f"{number} " * (3 if number % 2 else 5000))
    taken = list(encoder_check.sample(open_sources(["*.txt"], "text")))
    assert sum(len(text) for _, text in taken) == 10_000
    assert {where for where, _ in taken} == {f"the text of {number:02}.txt" for number in range(40)}
    few = list(encoder_check.sample(open_sources(["01.txt", "03.txt"], "text")))
    assert [text for _, text in few] == ["1 " * 3, "3 " * 3]
    monkeypatch.setattr(encoder_check, "_SMALLEST_SHARE", 1000)
    many = [
        int(where.removeprefix("the text of ")[:2])
        for where, _ in encoder_check.sample(open_sources(["*.txt"], "text"))
    ]
    assert min(many) < 5 and max(many) > 30, "of more sources than shares, some from everywhere"


def test_gigatoken_that_is_missing_is_said_before_anything_is_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_pipeline.encoding.fast_encoder.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"--encoder fast needs gigatoken, .*: pip install 'megalite\[fast\]', or"):
        written("out", encoder="fast")
