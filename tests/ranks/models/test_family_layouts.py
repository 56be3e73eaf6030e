"""Every family on real ranks: logits, loss and gradients of a training step as transformers computes them.

One launch of ranks solves the problems of all models one after the other, because a launch costs more than a problem.
Catches what a family's layout on disk, its options in config.json, or the decoder's own code for it get wrong under
tensor, sequence or pipeline parallelism. Tolerances are those of `megalite verify`: a loss within 2e-5, logits and
each gradient within 1e-5 of its largest entry.
"""

from __future__ import annotations

import dataclasses
import random
import traceback
from collections.abc import Mapping, Sequence
from functools import cache

import pytest
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st

from launch.parity.diagnosis import LayoutResult
from launch.parity.layout import ParityLayout
from launch.parity.observations import ArrayBlock
from launch.parity.problem import Dtype, ParityProblem, Training
from launch.parity.verify import Session
from megalite.config import ModelConfig
from models.families import FAMILIES, model_config
from tests.helpers.hub_models import HUB_MODELS, HubModel, hub_models
from tests.helpers.odd_sizes import explain, problem, references_of
from tests.helpers.rank_pool import run_fresh_ranks

ALL_AT_ONCE = ParityLayout(tp=2, pp=2, sequence_parallel=True)
LAYOUTS = (ParityLayout(), ParityLayout(tp=2), ParityLayout(pp=2), ParityLayout(tp=2, pp=2), ALL_AT_ONCE)
FIRST_OF_EACH = [next(model.name for model in HUB_MODELS if model.model_type == family) for family in FAMILIES]
SEQUENCE = 36  # longer than every window and original length, and cut by two ranks
# gloo keeps threads that poll for every process group of every engine: with a thousand of them ranks hardly advance
MODELS_PER_LAUNCH = 6
TIMEOUT_S = 800.0  # one launch runs all models; a busy machine takes minutes


pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.timeout(900),  # the first test of a launch waits for all of it
]

Task = tuple[ParityProblem, tuple[Training, ...]]


def solve_all(rank: int, layout: ParityLayout, tasks: Sequence[Task]) -> list[list[ArrayBlock] | str]:
    """What this rank observes of each task, or the traceback of what it raised."""
    from launch.parity.rank import solve  # DeepSpeed: only ranks need it

    found: list[list[ArrayBlock] | str] = []
    for asked, trainings in tasks:
        try:
            found.append(solve(rank, asked, layout, trainings))
        except Exception:
            found.append(traceback.format_exc())
    return found


def session_of(hub_model: HubModel, dtype: Dtype = "fp32") -> Session:
    """What transformers computes of one step, on packed documents and on whole sequences."""
    model = ModelConfig.model_validate(model_config(hub_model.config().to_diff_dict()))
    sequence = min(SEQUENCE, model.max_position_embeddings)
    values = model.model_dump(mode="json")
    asked = problem(LAYOUTS, model=values, sequence=sequence, steps=1, precision={"dtype": dtype})
    return Session(references_of(asked, dtype), TIMEOUT_S)


def run(layout: ParityLayout, sessions: Mapping[str, Session]) -> dict[str, LayoutResult | str]:
    """A verdict on each, or a traceback where ranks did not finish."""
    verdicts: dict[str, LayoutResult | str] = {}
    names = list(sessions)
    for first in range(0, len(names), MODELS_PER_LAUNCH):
        launched = {name: sessions[name] for name in names[first : first + MODELS_PER_LAUNCH]}
        tasks = [(session.references.problem, session.references.trainings) for session in launched.values()]
        ranks = run_fresh_ranks(solve_all, layout.world_size, layout, tasks, timeout_s=TIMEOUT_S)
        for (name, session), *blocks in zip(launched.items(), *ranks, strict=True):
            crash = next((found for found in blocks if isinstance(found, str)), None)
            verdicts[name] = crash or session.compared(layout, blocks, 0.0)
    return verdicts


def assert_passes(verdict: LayoutResult | str) -> None:
    assert isinstance(verdict, LayoutResult), verdict
    assert verdict.passed, explain(verdict)


@cache
def session_of_listed(name: str, dtype: Dtype) -> Session:
    return session_of(next(model for model in HUB_MODELS if model.name == name), dtype)


@cache
def verdicts(layout: ParityLayout, names: tuple[str, ...], dtype: Dtype = "fp32") -> dict[str, LayoutResult | str]:
    """One launch, whichever of its tests asks first."""
    return run(layout, {name: session_of_listed(name, dtype) for name in names})


ROUNDED_ANEW = ("qwen3", "gemma2", "gpt2", "qwen3_moe")  # each rounds something that no other does
MORE_ROUNDED = ("gemma3", "phi3-longrope", "olmo2", "gpt_neox")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [*ROUNDED_ANEW, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in MORE_ROUNDED)]
)
def test_bf16_is_as_near_to_float64_as_transformers(name: str) -> None:
    """Catches a factor, a norm or a router that is rounded where transformers does not round it."""
    launched = ROUNDED_ANEW if name in ROUNDED_ANEW else MORE_ROUNDED
    verdict = verdicts(ParityLayout(tp=2), launched, "bf16")[name]
    assert_passes(verdict)
    assert isinstance(verdict, LayoutResult)
    judged = {finding.name for finding in verdict.deviations if finding.quantity.kind == "gradient"}
    assert len(judged) > 10, "hardly any gradient is more than noise, so nothing was verified"


EVERY_NAME = tuple(model.name for model in HUB_MODELS)


@pytest.mark.slow
def test_all_axes_together_compute_what_transformers_computes() -> None:
    """A Llama and one model of five other families, drawn anew each time; `test_every_layout_...` has all models on all
    layouts. Those of one process are compared in tests/unit/models/families/test_families.py."""
    drawn = random.SystemRandom().sample(FIRST_OF_EACH[1:], MODELS_PER_LAUNCH - 1)
    for name, verdict in verdicts(ALL_AT_ONCE, (FIRST_OF_EACH[0], *drawn)).items():
        print(f"{name}:")
        assert_passes(verdict)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", EVERY_NAME)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_layout_computes_what_transformers_computes(layout: ParityLayout, name: str) -> None:
    assert_passes(verdicts(layout, EVERY_NAME)[name])


def _with_gradients(model: HubModel) -> HubModel:
    """In a window of one token queries and keys have no gradient but rounding, of which nothing can be asked."""
    switches = model.switches | ({"sliding_window": 2} if model.switches.get("sliding_window") == 1 else {})
    return dataclasses.replace(model, switches=switches)


one_of_each_family = st.tuples(*(hub_models(family).map(_with_gradients) for family in FAMILIES))


def check_drawn(models: Sequence[HubModel], layout: ParityLayout) -> None:
    """All of them in one launch, and so nothing is shrunk: the names say what was drawn."""
    sessions = {f"{model.model_type} {model.switches}": session_of(model) for model in models}
    for name, verdict in run(layout, sessions).items():
        note(f"{layout} {name}")
        assert_passes(verdict)


some_families = st.lists(
    st.sampled_from(list(FAMILIES)).flatmap(hub_models).map(_with_gradients), min_size=4, max_size=4
)


@pytest.mark.slow
@settings(max_examples=2, phases=[Phase.generate])  # the first one is always the simplest
@given(some_families)
def test_any_switches_of_some_families(models: list[HubModel]) -> None:
    check_drawn(models, ParityLayout(tp=2, sequence_parallel=True))


@pytest.mark.exhaustive
@pytest.mark.timeout(3600)
@settings(max_examples=25, phases=[Phase.generate])
@given(one_of_each_family, st.sampled_from(LAYOUTS))
def test_many_switches_of_every_family(models: tuple[HubModel, ...], layout: ParityLayout) -> None:
    check_drawn(models, layout)
