"""`megalite evaluate`: the loss that transformers gives text, and the loss that a run gives its held-out samples."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from data_pipeline.prepare.prepare import prepare
from data_pipeline.tokenizers.training import train_tokenizer
from launch.cli.app import main
from launch.errors import USER_ERRORS, LaunchError
from launch.inference.command_options import EvaluateOptions, ModelPlacement
from launch.inference.evaluate import Evaluation, evaluate
from launch.inference.generate import generate
from launch.inference.session import load
from tests.helpers.commands import metrics
from tests.helpers.hub_models import HubModel
from tests.helpers.rank_pool import run_ranks
from tests.helpers.warm_runs import train

pytestmark = pytest.mark.usefixtures("one_thread")

SOURCES = "def f(x): return x\nimport this\n" * 40 + "naïve 漢字 🙂\n" * 5 + "".join(map(chr, range(32, 127)))
LENGTH = 16


def speaking(folder: Path, model_type: str, **switches: Any) -> Path:
    """A small random model, saved by transformers beside a tokenizer of all bytes."""
    tokenizer = train_tokenizer([SOURCES], folder / "tokenizer", 280)
    sizes = {"vocab_size": 280, "eos_token_id": 0, "bos_token_id": 0, **switches}
    hub = HubModel(model_type, model_type, sizes).save(folder / "hf")
    for path in tokenizer.glob("token*"):
        (hub / path.name).write_bytes(path.read_bytes())
    return hub


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a window and a cap of the logits, which the loss has to know."""
    return speaking(tmp_path_factory.mktemp("gemma"), "gemma2", final_logit_softcapping=3.0, num_key_value_heads=1)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Documents of many lengths, one of a single token and two that share a length."""
    folder = tmp_path_factory.mktemp("texts")
    documents = [SOURCES[:250], "naïve 漢字 🙂 " * 5, "a", "import this\n", "import this\n", SOURCES[300:370]]
    for number, document in enumerate(documents):
        (folder / f"{number}.txt").write_text(document, encoding="utf-8")
    lines = folder / "more.jsonl"
    lines.write_text("".join(json.dumps({"content": document}) + "\n" for document in documents[:2]))
    return [str(folder / "*.txt"), str(lines)]


def documents_of(texts: list[str]) -> list[str]:
    folder = Path(texts[1]).parent
    files = [path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.txt"))]
    return files + [json.loads(line)["content"] for line in Path(texts[1]).read_text().splitlines()]


def of_the_guide(folder: Path, documents: list[str], length: int, stride: int) -> tuple[float, int]:
    """Summed loss and number of tokens, by the loop of transformers' guide to perplexity; its windows hold the last
    target too, so they are one token longer than what our model reads."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    total, count = 0.0, 0
    for document in documents:
        ids = tokenizer(document, return_tensors="pt").input_ids
        previous_end = 0
        for begin in range(0, ids.shape[1], stride):
            end = min(begin + length + 1, ids.shape[1])
            targets = ids[:, begin:end].clone()
            targets[:, : max(0, previous_end - begin)] = -100
            valid = int((targets[:, 1:] != -100).sum())
            if valid:
                with torch.no_grad():
                    total += float(model(ids[:, begin:end], labels=targets).loss) * valid
                count += valid
            previous_end = end
            if end == ids.shape[1]:
                break
    return total, count


def evaluated(options: EvaluateOptions, rank: int = 0) -> Evaluation:
    return evaluate(options, load(options.place, rank), lambda score: None)


def evaluated_on_rank(rank: int, options: EvaluateOptions) -> Evaluation:
    return evaluated(options, rank)


@pytest.mark.parametrize("stride", [None, 5])
def test_text_has_the_loss_that_transformers_gives_it(hub: Path, texts: list[str], stride: int | None) -> None:
    options = EvaluateOptions(ModelPlacement(str(hub)), texts, [], "content", sequence_length=LENGTH, stride=stride)
    ours, documents = evaluated(options), documents_of(texts)
    total, count = of_the_guide(hub, documents, LENGTH, stride or LENGTH)
    assert (ours.tokens, ours.documents) == (count, len(documents))
    assert ours.loss == pytest.approx(total / count, rel=1e-5)  # fp32 against float64
    assert ours.perplexity == pytest.approx(math.exp(total / count), rel=1e-5 * total / count)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hub)
    firsts = [tokenizer.decode(tokenizer(document).input_ids[:1]) for document in documents]
    size = sum(len(document.encode()) - len(first.encode()) for document, first in zip(documents, firsts, strict=True))
    assert ours.bits_per_byte == pytest.approx(total / math.log(2) / size, rel=1e-5)


def test_ranks_together_get_the_same_loss(hub: Path, texts: list[str]) -> None:
    """More ranks than key/value heads, and a vocabulary of which each has a part."""
    place = ModelPlacement(str(hub), tensor_parallel_size=2)
    options = EvaluateOptions(place, texts, [], "content", sequence_length=LENGTH, stride=7)
    total, count = of_the_guide(hub, documents_of(texts), LENGTH, 7)
    for ours in run_ranks(evaluated_on_rank, 2, options):
        assert ours.tokens == count and ours.loss == pytest.approx(total / count, rel=1e-5)


@pytest.mark.parametrize("document_mask", [True, False])
def test_a_run_is_evaluated_on_its_own_samples(tiny: dict[str, Any], tmp_path: Path, document_mask: bool) -> None:
    """The number in the run's metrics at its last step, to the rounding of another order of sums; from whichever
    command: for the run, for its data by name, for its split as a whole."""
    tiny["data"]["document_mask"] = document_mask
    tiny["training"] |= {"seed": 3, "evaluation": {"interval": 2, "samples": 6}, "micro_batch_size": 1}
    train(tmp_path / "session", tiny, world_size=2)
    recorded = metrics(tiny["run_dir"])[-1]["evaluation_loss"]
    place = ModelPlacement(tiny["run_dir"])
    own = evaluated(EvaluateOptions(place, [], []))
    assert own.samples == 6 and own.sequence_length == 32 and own.bits_per_byte is None
    assert own.loss == pytest.approx(recorded, rel=1e-6)
    assert evaluated(EvaluateOptions(place, [], list(map(str, [tiny["data"]["path"]])))).loss == own.loss
    whole = evaluated(EvaluateOptions(place, [], [], samples=own.samples_per_epoch))
    assert whole.tokens > own.tokens and whole.loss != own.loss
    with pytest.raises(LaunchError, match=f"has {own.samples_per_epoch} of 32 tokens: give at most that"):
        evaluated(EvaluateOptions(place, [], [], samples=own.samples_per_epoch + 1))
    if document_mask:  # text too, with the tokenizer that prepared the data
        made = generate(tiny["run_dir"], "import ", max_new_tokens=5)
        assert made.prompt_tokens >= 1 and 1 <= made.new_tokens <= 5
        assert evaluated(EvaluateOptions(place, [__file__], [])).bits_per_byte
    trained_on = evaluated(EvaluateOptions(place, [], [], split="train"))
    assert trained_on.samples_per_epoch > own.samples_per_epoch and trained_on.loss != own.loss


@pytest.mark.parametrize("has_validation", [False, True], ids=["sources", "validation"])
def test_each_set_of_a_run_on_a_mix_has_the_loss_of_its_metrics(
    tiny: dict[str, Any],
    corpus: Path,
    tmp_path: Path,
    has_validation: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    text = tiny["data"].pop("path")
    other, tests = tmp_path / "tests", Path(__file__).parents[3]
    prepare(
        [str(path) for path in sorted((tests / "helpers").glob("*.py"))], other, corpus.parent / "tokenizer", workers=1
    )
    tiny["data"]["sources"] = {"text": {"path": text, "weight": 1}, "tests": {"path": str(other), "weight": 1}}
    # sets have other numbers of targets, so that a mean of means is wrong
    tiny["data"] |= {"document_mask": True, "held_out_fraction": 0.3}
    if has_validation:
        tiny["data"]["validation"] = {"prose": {"source": "text"}, "all_tests": {"path": str(other), "samples": 2}}
    tiny["training"] |= {"steps": 2, "evaluation": {"interval": 2, "samples": 4}}
    train(tmp_path / "session", tiny, world_size=1)
    recorded = metrics(tiny["run_dir"])[-1]
    found = evaluated(EvaluateOptions(ModelPlacement(tiny["run_dir"]), [], []))
    assert found.sets is not None
    assert {one.name: one.loss for one in found.sets} == pytest.approx(recorded["evaluation_losses"], rel=1e-6)
    assert found.loss == pytest.approx(recorded["evaluation_loss"], rel=1e-6)
    assert found.tokens == sum(one.tokens for one in found.sets)
    assert found.samples == sum(one.samples for one in found.sets) == (6 if has_validation else 8)
    code, out, _ = command(["evaluate", tiny["run_dir"], "--split", "train", "--samples", "1"], monkeypatch, capfd)
    *each, whole = out.splitlines()
    assert not code and sorted(line.partition(": loss ")[0] for line in each) == ["tests", "text"]
    assert all("of 1 of " in line for line in each) and whole.startswith("loss ") and "of 2 of " in whole


def test_prepared_data_for_a_model_that_is_no_runs(hub: Path, texts: list[str], tmp_path: Path) -> None:
    """All samples of a split, each document seen by itself: here one sample that holds all documents."""
    documents = documents_of(texts)[:3]
    for number, document in enumerate(documents):
        (tmp_path / f"{number}.txt").write_text(document)
    summary = prepare([str(tmp_path / "*.txt")], tmp_path / "data", hub.parent / "tokenizer", workers=1)
    data, length = [str(tmp_path / "data")], summary.token_count - 1
    place = ModelPlacement(str(hub))
    ours = evaluated(EvaluateOptions(place, [], data, "", "train", 0.0, sequence_length=length))
    assert ours.samples == ours.samples_per_epoch == 1
    total, count = of_the_guide(hub, [document + "<|endoftext|>" for document in documents], length, length)
    assert ours.tokens == count and ours.loss == pytest.approx(total / count, rel=1e-5)
    shorter = evaluated(EvaluateOptions(place, [], data, "", "train", 0.0))
    assert shorter.sequence_length == 64 and shorter.samples == shorter.samples_per_epoch > 1


def command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[object, str, str]:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr(sys, "argv", ["megalite", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    out, err = capfd.readouterr()
    return stopped.value.code, out, err


def test_the_command_prints_a_sentence_and_json(
    hub: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["evaluate", str(hub), "--text", texts[0], "--sequence-length", "16", "--stride", "8"]
    code, out, _ = command(words, monkeypatch, capfd)
    assert not code and out.startswith("loss ") and "bits per byte" in out and "tokens/s" in out
    code, out, _ = command([*words, "--json"], monkeypatch, capfd)
    made = json.loads(out)
    assert not code and made["documents"] == 6 and made["stride"] == 8 and made["tokens_per_second"] > 0


MISTAKES: dict[str, tuple[list[str], str]] = {
    "nothing to score": ([], "give --text FILE, or --data PREFIX"),
    "two things to score": (["--text", "x.txt", "--data", "x"], "give one of them"),
    "stride of prepared data": (["--data", "x", "--stride", "3"], "--stride belongs to --text"),
    "split of text": (["--text", "x.txt", "--split", "train"], "--split belongs to --data"),
    "stride beyond the window": (["--text", __file__, "--sequence-length", "4", "--stride", "5"], "at most"),
    "no such text": (["--text", "nowhere.txt"], "nowhere.txt"),
    "no such data": (["--data", "nowhere"], "nowhere"),
    "ranks that do not fit": (["--text", __file__, "--tensor-parallel-size", "3"], "--tensor-parallel-size 3"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_before_any_rank_starts(
    hub: Path, mistake: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    words, says = MISTAKES[mistake]
    code, out, err = command(["evaluate", str(hub), *words], monkeypatch, capfd)
    assert code == 2 and not out and says in err
    assert err.startswith("megalite: error: ") and err.count("\n") == 1, err


def test_learned_positions_and_single_tokens_have_their_sentence(tmp_path: Path) -> None:
    folder = speaking(tmp_path, "gpt2")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(USER_ERRORS, match="learned 64 positions"):
        evaluated(EvaluateOptions(ModelPlacement(str(folder)), [str(tmp_path / "a.txt")], [], sequence_length=65))
    with pytest.raises(USER_ERRORS, match="no document has the two tokens"):
        evaluated(EvaluateOptions(ModelPlacement(str(folder)), [str(tmp_path / "a.txt")], []))


def test_data_of_another_tokenizer_is_refused(corpus: Path, hub: Path) -> None:
    with pytest.raises(USER_ERRORS, match="another tokenizer"):
        evaluated(EvaluateOptions(ModelPlacement(str(hub)), [], [str(corpus)]))
