"""`megalite generate`: transformers' greedy tokens on any number of ranks, and text as one wants to read it."""

from __future__ import annotations

import io
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers

from data_pipeline.tokenizers.training import train_tokenizer
from launch.cli.app import main
from launch.conversion.huggingface.importing import import_hugging_face
from launch.errors import USER_ERRORS
from launch.inference import session as inference
from launch.inference.command_options import GenerateOptions, ModelPlacement
from launch.inference.generate import CUT_CHARACTER, TextStream, generate, generations, run
from launch.inference.session import load
from launch.inference.stored_model import open_stored
from megalite.parallel.mesh import Mesh
from models.generation import Sampling
from models.generation import generate as generate_tokens
from tests.helpers.canaries import loaded_from, plant
from tests.helpers.hub_models import HUB_MODELS, HubModel
from tests.helpers.process_table import listening
from tests.helpers.rank_pool import run_ranks

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT, NEW = 11, 14  # tokens: more than any window, and so many that they pass the length of the first training
FIRST_OF_FAMILY = {model.model_type: model.name for model in reversed(HUB_MODELS)}


def prompt_of(model: HubModel) -> list[int]:
    return [int(token) for token in np.random.default_rng(len(model.name)).integers(3, 131, PROMPT)]


def of_transformers(model: HubModel, **options: Any) -> tuple[list[int], np.ndarray]:
    """New tokens, and logits `[NEW, vocab]`, of its `generate`; of a new model, because angles that depend on the
    length would stay those of an earlier text."""
    theirs, ids = model.build(), torch.tensor([prompt_of(model)])
    theirs.generation_config.eos_token_id = None
    is_longrope = "longrope" in str(model.switches.get("rope_scaling"))
    made = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW,
        do_sample=False,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
        # where longrope changes all angles, its Phi-3 computes what it has cached again; its Llama forgets to
        use_cache=model.model_type == "phi3" or not is_longrope,
        **options,
    )
    return made.sequences[0, PROMPT:].tolist(), torch.cat(made.logits).numpy()


@dataclass(frozen=True)
class Made:
    """What one rank of ours makes of a prompt."""

    greedy: list[int]
    logits: np.ndarray  # [NEW, vocab] of the next token, behind given ones

    @classmethod
    def by(cls, folder: str, prompt: list[int], given: list[int], rank: int, tp: int) -> Made:
        loaded = load(ModelPlacement(folder, tensor_parallel_size=tp), rank)
        coming, seen = iter(given), list[torch.Tensor]()

        def as_given(logits: torch.Tensor) -> int:
            seen.append(logits)
            return next(coming)

        def tokens(choose: Callable[[torch.Tensor], int]) -> list[int]:
            return list(generate_tokens(loaded.module, loaded.stored.model, loaded.tp, prompt, choose, NEW))

        assert tokens(as_given) == given
        return cls(tokens(partial(Sampling().choose, generator=torch.Generator())), torch.stack(seen).numpy())


def made_on_rank(rank: int, folders: list[str], prompts: list[list[int]], given: list[list[int]]) -> list[Made]:
    return [Made.by(folder, *tokens, rank, 2) for folder, *tokens in zip(folders, prompts, given, strict=True)]


@pytest.fixture(scope="module")
def varied() -> dict[str, tuple[list[int], np.ndarray]]:
    """Tokens of transformers' and the logits they were chosen from, none of them twice: greedy text of a random model
    soon repeats itself, and looks into few corners of what is remembered."""
    return {model.name: of_transformers(model, no_repeat_ngram_size=1) for model in HUB_MODELS}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Every model, as transformers saves it."""
    place = tmp_path_factory.mktemp("hub")
    return {model.name: str(model.save(place / model.name)) for model in HUB_MODELS}


@pytest.fixture(scope="module")
def on_two_ranks(
    folders: dict[str, str], varied: dict[str, tuple[list[int], np.ndarray]], pytestconfig: pytest.Config
) -> dict[str, list[Made]]:
    """What each rank makes of the first model of each family and of some drawn anew each time, with `--exhaustive` of
    each model; one start of two ranks for all."""
    drawn = random.SystemRandom().sample(HUB_MODELS, len(HUB_MODELS) if pytestconfig.getoption("--exhaustive") else 6)
    models = [model for model in HUB_MODELS if model in drawn or FIRST_OF_FAMILY[model.model_type] == model.name]
    prompts, given = [prompt_of(model) for model in models], [varied[model.name][0] for model in models]
    ranks = run_ranks(made_on_rank, 2, [folders[model.name] for model in models], prompts, given)
    return {model.name: [of_rank[number] for of_rank in ranks] for number, model in enumerate(models)}


@pytest.mark.parametrize("model", HUB_MODELS, ids=str)
def test_tokens_are_transformers_own_on_one_rank_and_on_two(
    model: HubModel,
    folders: dict[str, str],
    varied: dict[str, tuple[list[int], np.ndarray]],
    on_two_ranks: dict[str, list[Made]],
) -> None:
    """Catches a cache that is rotated, masked or cut wrongly: behind the window, behind the length of the first
    training, with fewer key/value heads than ranks."""
    given, logits = varied[model.name]
    alone = Made.by(folders[model.name], prompt_of(model), given, 0, 1)
    is_first = FIRST_OF_FAMILY[model.model_type] == model.name
    greedy = of_transformers(model)[0] if is_first else alone.greedy
    for made in (alone, *on_two_ranks.get(model.name, [])):
        assert made.greedy == greedy
        # 2e-5: rounding of fp32, which a cache sums in another order; a window off by one shows by 4e-3 and more
        assert np.abs(made.logits - logits).max() <= 2e-5 * logits.std()


def drawn_on_rank(rank: int, folder: str) -> list[str]:
    place = ModelPlacement(folder, tensor_parallel_size=2)
    options = GenerateOptions(place, ["x", "def f"], 12, temperature=1.3, top_k=40, top_p=0.95, seed=5)
    return [made.completion for made in generations(options, load(place, rank), lambda text: None)]


def test_drawn_text_is_the_same_on_any_number_of_ranks(spoken: Path) -> None:
    """Ranks that drew different tokens would wait for each other for ever, or go on from different texts."""
    options: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.3, "top_k": 40, "top_p": 0.95}
    alone = [generate(spoken, prompt, seed=seed, **options).completion for prompt, seed in (("x", 5), ("def f", 6))]
    assert run_ranks(drawn_on_rank, 2, str(spoken)) == [alone, alone]


@pytest.fixture(scope="module")
def spoken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose tokenizer speaks text of all bytes."""
    place = tmp_path_factory.mktemp("spoken")
    tokenizer = train_tokenizer(["def f(x): return x\n" * 50 + "".join(map(chr, range(32, 127)))], place / "tok", 270)
    sizes = {"vocab_size": 270, "bos_token_id": None, "eos_token_id": 0, "num_key_value_heads": 1}
    folder = HubModel("spoken", "llama", sizes).save(place / "hf")
    for path in tokenizer.glob("token*"):
        (folder / path.name).write_bytes(path.read_bytes())
    return folder


def their_completion(folder: Path, ids: list[int], **options: Any) -> list[int]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    output = model.generate(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), pad_token_id=0, **options)
    return [int(token) for token in output[0, len(ids) :]]


def test_text_is_transformers_own_from_a_folder_and_from_a_checkpoint(spoken: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(spoken)
    tokens = their_completion(spoken, tokenizer("def f").input_ids, max_new_tokens=12, do_sample=False)
    made = generate(spoken, "def f", max_new_tokens=12)
    assert made.completion == tokenizer.decode(tokens) and made.text == "def f" + made.completion
    assert (made.new_tokens, made.prompt_tokens) == (12, len(tokenizer("def f").input_ids))
    import_hugging_face(spoken, tmp_path / "checkpoint", validate=False)
    assert generate(tmp_path / "checkpoint", "def f", max_new_tokens=12) == made
    weights = max(tmp_path.glob("checkpoint/*.safetensors"), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(USER_ERRORS, match=rf"{weights.name} has changed since it was written: its digest differs"):
        generate(tmp_path / "checkpoint", "def f", max_new_tokens=12)


@pytest.mark.parametrize("where", ["generation_config.json", "config.json", "tokenizer_config.json"])
def test_a_text_ends_where_transformers_ends_it(spoken: Path, tmp_path: Path, where: str) -> None:
    """The end token, one or several, that the first of three files names; it is no text."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in spoken.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("def f").input_ids
    plain = their_completion(spoken, ids, max_new_tokens=9, do_sample=False)
    end = plain[5]
    for name in ("generation_config.json", "config.json"):
        values = json.loads((folder / name).read_text()) | {"eos_token_id": None}
        (folder / name).write_text(json.dumps(values | ({"eos_token_id": [3, end]} if name == where else {})))
    if where == "config.json":
        (folder / "generation_config.json").unlink()  # transformers looks at the other file only where this is not
    if where == "tokenizer_config.json":
        (folder / where).write_text(json.dumps({"eos_token": tokenizer.convert_ids_to_tokens(end)}))
    made = generate(folder, "def f", max_new_tokens=9)
    assert made.stopped_by == "end_token"
    stop = plain.index(end) + 1
    assert made.new_tokens == stop
    assert made.completion == tokenizer.decode(plain[: stop - 1])
    if where != "tokenizer_config.json":  # transformers' generate does not look there
        assert their_completion(folder, ids, max_new_tokens=9, do_sample=False) == plain[:stop]


def test_a_chat_goes_through_the_template_and_ends_as_it_says(
    spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Catches an answer that goes on behind the end of its turn, because the model's files name another token."""
    folder = tmp_path / "hf"
    folder.mkdir()
    for path in spoken.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    template = "{% for m in messages %}[{{ m.role }}]{{ m.content }}END{% endfor %}{% if add_generation_prompt %}[you]"
    (folder / "chat_template.jinja").write_text(template + "{% endif %}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "def"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    expected = their_completion(folder, ids, max_new_tokens=8, do_sample=False)
    made = generate(folder, "def", max_new_tokens=8, chat=True)
    assert made.completion == tokenizer.decode(expected) and made.prompt_tokens == len(ids)
    assert made.stopped_by == "max_new_tokens"
    with pytest.raises(USER_ERRORS, match="chat template"):
        generate(spoken, "def", chat=True)

    options = GenerateOptions(ModelPlacement(str(folder)), ["def", "x"], 8, chat=True)
    first, second = generations(options, loaded := load(options.place), lambda text: None)
    said = [*chat, {"role": "assistant", "content": first.completion}, {"role": "user", "content": "x"}]
    ids = tokenizer.apply_chat_template(said, add_generation_prompt=True)["input_ids"]
    answer = tokenizer.decode(their_completion(folder, ids, max_new_tokens=8, do_sample=False))
    assert first == made and (second.completion, second.prompt_tokens) == (answer, len(ids))
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"def\n \nx")))  # typed: the same conversation
    assert list(generations(replace(options, prompts=[]), loaded, lambda text: None)) == [first, second]

    with monkeypatch.context() as patch:  # a turn that may be too long says so, and the turns after it do not
        patch.setattr("launch.inference.generate.generate_tokens", lambda *_: iter(expected[:1]))
        _, second = generations(options, loaded, lambda text: None)
        room = loaded.stored.model.max_position_embeddings + 1 - second.prompt_tokens
        for new, warnings in ((room, 0), (room + 1, 1)):
            asked = replace(options, prompts=["def", "x", "y"][: 2 + warnings], max_new_tokens=new)
            capfd.readouterr()
            list(generations(asked, loaded, lambda text: None))
            assert capfd.readouterr().err.count("new ones are more than the") == warnings
    end = next(token for token in expected if expected.index(token) > 2)
    values = json.loads((folder / "tokenizer.json").read_text())
    content = tokenizer.convert_ids_to_tokens(end)
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    values["added_tokens"].append({"id": end, "content": content, **plain})
    (folder / "tokenizer.json").write_text(json.dumps(values))
    (folder / "chat_template.jinja").write_text(template.replace("END", content) + "{% endif %}")
    ids = transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(chat, add_generation_prompt=True)
    expected = their_completion(folder, ids["input_ids"], max_new_tokens=40, do_sample=False)
    made = generate(folder, "def", max_new_tokens=40, chat=True)
    stop = expected.index(end)
    assert (made.stopped_by, made.new_tokens) == ("end_token", stop + 1)
    assert made.completion == tokenizer.decode(expected[:stop])


def test_sampling_repeats_with_its_seed_and_differs_among_prompts(spoken: Path) -> None:
    options = GenerateOptions(ModelPlacement(str(spoken)), ["x", "x"], 12, temperature=1.5, top_k=50, top_p=0.9, seed=3)
    first, second = generations(options, load(options.place), lambda text: None)
    assert first.completion != second.completion
    assert generate(spoken, "x", max_new_tokens=12, temperature=1.5, top_k=50, top_p=0.9, seed=3) == first
    assert generate(spoken, "x", max_new_tokens=12, temperature=1.5, top_k=50, top_p=0.9, seed=4) == second


def test_half_precision_computes_in_it(spoken: Path) -> None:
    options = GenerateOptions(ModelPlacement(str(spoken), dtype="bf16"), ["def f"], 5)
    loaded = load(options.place)
    assert {parameter.dtype for parameter in loaded.module.parameters()} == {torch.bfloat16}
    (made,) = generations(options, loaded, lambda text: None)
    assert made.new_tokens == 5


def sentencepiece_like() -> Any:
    """Spaces are parts of words, and the first one of a decoded text is dropped: as Llama 2."""
    words = {word: number for number, word in enumerate(("<unk>", "▁Hello", "▁world", "▁you", "!", "s"))}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="<unk>"))
    model.decoder = tokenizers.decoders.Metaspace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model)


def test_a_stream_keeps_the_space_before_a_word() -> None:
    tokenizer = sentencepiece_like()
    stream = TextStream(tokenizer, [1])
    pieces = [stream.add(token) for token in (2, 5, 4, 3)]
    assert pieces == [" world", "s", "!", " you"] and stream.rest() == ""


def test_a_stream_waits_for_whole_characters(spoken: Path) -> None:
    """Characters of two to four bytes, each byte a token, and at the end one that is never finished."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(spoken)
    text = "naïve 漢字 🙂 e\u0301 x"
    prompt, tokens = tokenizer("def").input_ids, tokenizer(text).input_ids
    stream = TextStream(tokenizer, prompt)
    pieces = [stream.add(token) for token in tokens]
    assert "".join(pieces) == text and not any(CUT_CHARACTER in piece for piece in pieces)
    assert sum(map(bool, pieces)) >= len(text) - 2, "a character comes with its last byte"
    assert stream.add(tokenizer("漢").input_ids[0]) == "" and stream.rest() == CUT_CHARACTER


def command(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> tuple[str, str]:
    monkeypatch.setattr(sys, "argv", ["megalite", *arguments])
    capfd.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main()
    assert not stopped.value.code
    return capfd.readouterr()


def test_the_command_prints_text_and_json(
    spoken: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    words = ["generate", str(spoken), "--prompt", "def f", "-p", "return", "--max-new-tokens", "7"]
    expected = [generate(spoken, prompt, max_new_tokens=7) for prompt in ("def f", "return")]
    out, err = command(words, monkeypatch, capfd)
    assert out == "".join(f"{one.text}\n" for one in expected)
    assert err.count("7 made") == 2 and "tokens/s" in err
    out, err = command([*words, "--json"], monkeypatch, capfd)
    made = json.loads(out)["generations"]
    assert [one["completion"] for one in made] == [one.completion for one in expected]
    assert made[0]["tokens_per_second"] > 0 and "made" not in err


@pytest.mark.slow
def test_the_command_starts_ranks(
    spoken: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """More ranks than key/value heads; rank 0 alone speaks, no rank listens for other hosts, and modules of a
    downloaded folder stay unloaded."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(plant(tmp_path))
    is_over, heard = threading.Event(), set[str]()

    def watch() -> None:
        while not is_over.wait(0.02):
            heard.update(listening(os.getpid()))

    watcher = threading.Thread(target=watch)
    watcher.start()
    words = ["generate", str(spoken), "--prompt", "def f", "--max-new-tokens", "7", "--tensor-parallel-size", "2"]
    try:
        out, err = command(words, monkeypatch, capfd)
    finally:
        is_over.set()
        watcher.join()
    assert heard == {"127.0.0.1"}
    assert out == generate(spoken, "def f", max_new_tokens=7).text + "\n"
    assert "starting 2 ranks on cpu" in err and err.count("7 made") == 1
    assert loaded_from(tmp_path) == []


def test_ranks_are_given_prompts_of_any_length(spoken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument of a process is at most 128 KB long, and JSON makes six bytes of a letter's two."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    seen: list[Any] = []

    def listen(mesh: Mesh, environment: dict[str, str], arguments: list[str], module: str) -> int:
        subprocess.run(["true", *arguments], check=True)
        seen.append(json.loads(Path(arguments[0]).read_text()))
        return 0

    monkeypatch.setattr(inference, "start_local_ranks", listen)
    run(GenerateOptions(ModelPlacement(str(spoken), tensor_parallel_size=2), ["я" * 25_000]))
    assert seen[0]["prompts"] == ["я" * 25_000]


def test_a_text_too_long_for_the_model_is_said_before_it_is_made(
    spoken: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Such a text may take minutes, and is rubbish from that length on."""
    stored = open_stored(spoken)
    room = stored.model.max_position_embeddings + 1 - len(stored.loaded_tokenizer.ids("def f"))

    def read_weights(*_: object) -> None:
        raise InterruptedError

    monkeypatch.setattr(inference, "load", read_weights)
    for new, said in ((room, 0), (room + 1, 1)):
        with pytest.raises(InterruptedError):
            run(GenerateOptions(ModelPlacement(str(spoken)), ["def f"], new))
        err = capfd.readouterr().err
        assert err.count("\n") == said == err.count(f"up to {new} new ones are more than"), err
    assert f"this model is meant for: ask for {room} new ones" in err


def without_tokenizer(folder: Path, spoken: Path) -> Path:
    folder.mkdir()
    for path in spoken.iterdir():
        if not path.name.startswith("token"):
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "temperature": ({"temperature": -1.0}, "temperature"),
    "too small a temperature": ({"temperature": 1e-42}, "temperature"),
    "nothing is drawn": ({"top_k": 5}, "set temperature above 0"),
    "top_p": ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
    "bytes that are no text": ({"prompt": "a\udcff"}, "not UTF-8"),
    "no new tokens": ({"max_new_tokens": 0}, "max_new_tokens"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(spoken: Path, mistake: str) -> None:
    options, says = MISTAKES[mistake]
    with pytest.raises(USER_ERRORS, match=says) as caught:
        generate(spoken, **{"prompt": "x", **options})
    assert "\n" not in str(caught.value)


PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "heads that do not divide": ({"tensor_parallel_size": 3}, "--tensor-parallel-size 3 .* use "),
    "half precision of a CPU": ({"dtype": "fp16"}, "needs a GPU"),
    "no GPU": ({"device": "cuda"}, "this machine has 0"),
    "dtype": ({"dtype": "int8"}, "fp32, bf16, fp16"),
}


@pytest.mark.parametrize("mistake", PLACES)
def test_a_place_that_cannot_be_is_one_sentence(spoken: Path, mistake: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    options, says = PLACES[mistake]
    with pytest.raises(USER_ERRORS, match=says):
        load(ModelPlacement(str(spoken), **options))


def test_a_model_without_a_tokenizer_or_with_anothers_says_so(spoken: Path, tmp_path: Path) -> None:
    bare = without_tokenizer(tmp_path / "bare", spoken)
    with pytest.raises(USER_ERRORS, match="tokenizer"):
        generate(bare, "x")
    import_hugging_face(bare, tmp_path / "checkpoint", validate=False)
    with pytest.raises(USER_ERRORS, match="knows no tokenizer"):
        generate(tmp_path / "checkpoint", "x")
    small = HubModel("small", "llama").save(tmp_path / "small")  # 131 tokens
    for path in spoken.glob("token*"):
        (small / path.name).write_bytes(path.read_bytes())
    with pytest.raises(USER_ERRORS, match="another model's tokenizer"):
        generate(small, "def f(x): return x")
    assert open_stored(small).model.vocab_size == 131
    (small / "tokenizer.json").write_text("{}")  # of which transformers says KeyError: 'added_tokens'
    with pytest.raises(USER_ERRORS, match=r"tokenizer.json is not a tokenizer that `tokenizers` can load"):
        generate(small, "x")
