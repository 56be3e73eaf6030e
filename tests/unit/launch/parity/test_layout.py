"""Layouts as words, what is legal, and the sample that covers all pairs."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, get_args

import pytest

from launch.errors import LaunchError, sentences_of
from launch.parity.comparison import Deviation
from launch.parity.diagnosis import LayoutResult, diagnose
from launch.parity.layout import AUTO, AUTO_OF_EXPERTS, ParityLayout, auto_layouts, layout_of, parse_layouts
from launch.parity.observations import Quantity
from launch.parity.verify import make_plan
from megalite.config import ConfigError, load_config
from megalite.config.sections import PipelineSchedule, RecomputeMode
from tests.helpers.commands import ROOT
from tests.helpers.odd_sizes import (
    DEALT_TO_TWO,
    DEEP_LAYOUTS,
    LAYOUTS,
    SHARED_BY_TWO,
    SMALL_LAYOUTS,
    TIED,
    Family,
    covering,
    legal_cases,
    legal_layouts,
    pairs_of,
    problem,
)


def test_a_layout_reads_as_it_is_written() -> None:
    few = (
        ParityLayout(pp=2, accumulation=2, schedule="interleaved", chunks=3),
        ParityLayout(pp=2, recompute="full/none"),
    )
    for layout in [*LAYOUTS, *DEEP_LAYOUTS, *few]:
        assert parse_layouts(str(layout)) == [layout]


def test_several_layouts() -> None:
    assert parse_layouts(
        " tp=2 , sequence_parallel ; dp=3,zero=3,recompute=full,accumulation=4;;tp=2,sequence_parallel"
    ) == [ParityLayout(tp=2, sequence_parallel=True), ParityLayout(dp=3, zero=3, recompute="full", accumulation=4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "--layouts is empty"),
        (" ; ,", "--layouts is empty"),
        ("tensor=2", '"tensor=2" is not understood: the words are tp, pp, dp, zero'),
        ("tp2", '"tp2" is not understood: did you mean "tp=2"?'),
        ("tp=two", '"tp=two": tp is a whole number from 1'),
        ("tp=0", "tp is a whole number from 1"),
        ("tp", "tp is a whole number from 1"),
        ("tp=2,tp=4", "gives tp twice"),
        ("dp=2,sequence_parallel", "sequence_parallel cuts nothing without a tp of 2 or more"),
        ("zero=4", "zero is 1, 2 or 3"),
        ("zero=0", "zero is 1, 2 or 3 (stage 0 is served by 1)"),
        ("recompute=some", "recompute is none, selective or full"),
        ("pp=2,recompute=full/some", "or one of them for each stage, as in recompute=full/none"),
        ("pp=2,recompute=full/", "or one of them for each stage, as in recompute=full/none"),
        ("tp=2,sequence_parallel=yes", "sequence_parallel is true or false"),
        ("pp=2,schedule=gpipe", "schedule is one of 1f1b, interleaved, zero-bubble, zb-v, dualpipev"),
    ],
)
def test_words_that_are_not_understood(text: str, said: str) -> None:
    with pytest.raises(LaunchError) as error:
        parse_layouts(text)
    assert said in str(error.value) and "\n" not in str(error.value)


def test_all_mistakes_are_told_at_once_with_what_was_meant() -> None:
    words = "the words are tp, pp, dp, zero, sequence_parallel, recompute, accumulation, schedule, chunks, compile"
    words += ", cp, cp_kind, ep"
    with pytest.raises(LaunchError) as error:
        parse_layouts("tp=2,foo=3;bar;pp=0,recomput=full;dp=2,acumulation=4,sequence_parallel")
    assert sentences_of(error.value) == (
        f'--layouts: "foo=3" is not understood: {words}',
        f'--layouts: "bar" is not understood: {words}',
        '--layouts: "pp=0": pp is a whole number from 1, as in pp=2',
        '--layouts: "recomput=full" is not understood: did you mean "recompute"?',
        '--layouts: "acumulation=4" is not understood: did you mean "accumulation"?',
    )


def test_all_layouts_that_cannot_run_are_told_at_once() -> None:
    config = problem([ParityLayout()]).config
    for text, said in (("tp=16;dp=32;tp=2", "ranks, and 8 fit"), ("tp=3;pp=6;tp=2", "--layouts: ")):
        with pytest.raises(LaunchError) as error:
            make_plan(config, layouts=text)
        assert [said in sentence for sentence in sentences_of(error.value)] == [True, True], text


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (ParityLayout(pp=2, zero=3, schedule="zb-v"), "parallel.zero_stage 3 does not go with pipeline_schedule zb-v"),
        (ParityLayout(pp=2, accumulation=3, schedule="interleaved"), "interleaved takes micro-batches in groups of 2"),
        (ParityLayout(pp=2, accumulation=2, schedule="interleaved", chunks=3), "2 x parallel.pipeline_chunks 3"),
        (ParityLayout(pp=6), "pipeline_parallel_size 6 is larger than model.num_hidden_layers 5"),
        (ParityLayout(tp=3), "num_attention_heads 4 cannot be shared evenly"),
        (ParityLayout(tp=2, sequence_parallel=True), "sequence_length 33 cannot be cut"),
        (ParityLayout(dp=5), "a global batch of 12 cannot be cut into 5 micro-batches"),
        (ParityLayout(pp=3, recompute="full/none"), r"recompute\.mode is a list of length 2, but .* is 3"),
    ],
    ids=str,
)
def test_layouts_that_a_model_cannot_have(layout: ParityLayout, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        layout.config(problem([ParityLayout()]).config)


def test_a_layout_changes_how_a_batch_is_cut_and_not_the_batch() -> None:
    asked = problem([ParityLayout(dp=3, accumulation=2)])
    config = ParityLayout(dp=3, accumulation=2, recompute="full").config(asked.config)
    assert config.training.global_batch_size == asked.config.training.global_batch_size == 12
    assert config.training.micro_batch_size == 2
    assert (config.recompute.mode, config.parallel.data_parallel_size) == ("full", 3)


def test_a_layout_recomputes_what_it_says_on_each_stage() -> None:
    asked, layout = problem([ParityLayout(pp=2)]), ParityLayout(pp=2, recompute="full/none")
    config = layout.config(asked.config)
    assert config.recompute.mode == ("full", "none") and config.recompute.by_stage(2) == ("full", "none")
    assert layout_of(config, 2).recompute == "full/none"


def test_the_sample_holds_every_pair_of_settings() -> None:
    context = ({}, *SHARED_BY_TWO, *DEALT_TO_TWO)
    axes = {"sizes": (1, 2), "replicas": (1, 2, 3), "accumulations": (1, 2, 4), "context": context}
    cases = legal_cases(legal_layouts(**axes, most=6))  # type: ignore[arg-type]
    chosen = covering(legal_cases(SMALL_LAYOUTS))
    assert set().union(*map(pairs_of, chosen)) == set().union(*map(pairs_of, cases))
    assert len(chosen) < len(cases) / 20


def test_the_matrix_is_the_one_that_is_promised() -> None:
    assert {layout.tp for layout in LAYOUTS} == {layout.pp for layout in LAYOUTS} == {1, 2, 4}
    assert {layout.dp for layout in LAYOUTS} == {1, 2, 3}
    assert {layout.zero for layout in LAYOUTS if layout.pp == 1} == {1, 2, 3}
    assert {layout.accumulation for layout in LAYOUTS} == {1, 4}
    assert {layout.recompute for layout in LAYOUTS} == {"none", "selective", "full"}
    assert max(layout.world_size for layout in LAYOUTS) == max(layout.world_size for layout in DEEP_LAYOUTS) == 8
    assert len(LAYOUTS) == len(set(LAYOUTS)) == 867 and len(DEEP_LAYOUTS) == 84


def test_pipelines_that_are_not_in_the_matrix_are_refused_by_a_rule() -> None:
    """On up to eight ranks every schedule runs with every ZeRO stage, or the config says why not."""
    run, refused = set(legal_cases([*LAYOUTS, *DEEP_LAYOUTS])), 0
    configs = {family: family.problem().config for family in {Family.of(*case) for case in run}}
    axes = itertools.product(
        (1, 2), (2, 4), (1, 2), (1, 2, 3), (False, True), get_args(RecomputeMode), get_args(PipelineSchedule), TIED
    )
    for tp, pp, dp, zero, is_cut, recompute, schedule, tied in axes:
        layout = ParityLayout(tp, pp, dp, zero, is_cut, recompute, schedule=schedule)
        layout = replace(layout, accumulation=layout.pieces if layout.pieces == 8 else 4)
        if layout.world_size > 8 or (is_cut and tp == 1) or (layout, tied) in run:
            continue
        with pytest.raises(ConfigError, match=r"parallel\.zero_stage 3 (does not go with|with parallel\.pipeline)"):
            layout.config(configs[Family.of(layout, tied)])
        refused += 1
    assert refused == 240


def test_auto_runs_the_configs_own_layout_first_and_nothing_that_does_not_fit() -> None:
    own = ParityLayout(tp=2, dp=4, zero=3)
    fitting, left_out = auto_layouts(own, most=8)
    assert fitting[0] == own and not left_out
    fitting, left_out = auto_layouts(own, most=2)
    assert all(layout.world_size <= 2 for layout in fitting)
    assert (
        left_out[0] == "tp=2,dp=4,zero=3: needs 8 ranks, 2 fit here" and len(fitting) + len(left_out) == len(AUTO) + 1
    )
    many = ParityLayout(dp=2, accumulation=64)
    assert auto_layouts(many, most=8)[0][0] == ParityLayout(dp=2, accumulation=4)
    assert (
        all(layout.ep == 1 for layout in auto_layouts(own, 8)[0])
        and AUTO_OF_EXPERTS[0] in auto_layouts(own, 8, True)[0]
    )
    axes = {axis for layout in (*AUTO, *AUTO_OF_EXPERTS) for axis in layout.axes}
    assert axes == set(vars(ParityLayout())) - {"chunks", "compile", "cp_kind"}, "auto leaves an axis out"


@pytest.mark.parametrize(
    ("pp", "schedule", "accumulation"),
    [(3, "interleaved", 6), (4, "dualpipev", 8), (2, "dualpipev", 4), (3, "zb-v", 4)],
)
def test_auto_leaves_the_configs_own_schedule_enough_micro_batches(
    pp: int, schedule: PipelineSchedule, accumulation: int
) -> None:
    own = ParityLayout(pp=pp, accumulation=24, schedule=schedule)
    assert auto_layouts(own, most=8)[0][0] == ParityLayout(pp=pp, accumulation=accumulation, schedule=schedule)


def test_an_axis_that_is_off_takes_along_what_needs_it() -> None:
    layout = ParityLayout(tp=2, dp=2, zero=3, sequence_parallel=True)
    assert layout.without("tp") == ParityLayout(dp=2, zero=3)
    assert layout.without("sequence_parallel") == ParityLayout(tp=2, dp=2, zero=3)
    piped = ParityLayout(pp=2, accumulation=4, schedule="interleaved", chunks=3)
    assert piped.without("pp") == ParityLayout(accumulation=4)
    assert piped.without("accumulation") == ParityLayout(pp=2)
    assert piped.without("schedule") == ParityLayout(pp=2, accumulation=4)
    by_stage = ParityLayout(tp=2, pp=2, recompute="full/none")
    assert by_stage.without("pp") == ParityLayout(tp=2), "one process has no stages to list modes for"
    assert by_stage.without("tp") == ParityLayout(pp=2, recompute="full/none")
    assert ParityLayout(tp=2, pp=2, recompute="full").without("pp") == ParityLayout(tp=2, recompute="full")
    assert ParityLayout(pp=2, accumulation=4, schedule="zb-v").without("accumulation").schedule == "zb-v"
    assert ParityLayout(tp=2, compile="blocks").without("compile") == ParityLayout(tp=2, compile="none"), (
        "auto compiles"
    )
    assert ParityLayout(tp=2, compile="none").axes_on == {"tp": 2}
    assert ParityLayout(dp=2, cp=2, ep=4).without("cp") == ParityLayout(dp=2)


def test_a_failure_of_compiled_blocks_with_two_ranks_is_told_apart_from_one_without() -> None:
    """On GPUs `auto` compiles too, so that it would fail as blocks does."""

    def causes(fails: Callable[[ParityLayout], bool]) -> tuple[tuple[str, ...], str]:
        def run(layout: ParityLayout) -> LayoutResult:
            return LayoutResult(layout, "fp32", 1.0, crash="it stops" if fails(layout) else None)

        answer: Any = None  # of no use to ranks that stop
        layout = ParityLayout(tp=2, dp=2, compile="blocks")
        diagnosis = diagnose(run(layout), run, answer, [])
        assert diagnosis.explains(layout)
        return diagnosis.axes, str(diagnosis.smallest)

    assert causes(lambda layout: layout.compile != "none" and layout.tp == 2) == (
        ("tp", "compile"),
        "tp=2,compile=blocks",
    )
    assert causes(lambda layout: layout.tp == 2) == (("tp",), "tp=2,compile=none")


@pytest.mark.parametrize(
    ("wrong", "needs", "said"),
    [
        ({("loss", 1): "step 1"}, ("pp", "accumulation"), "the loss over several does not, but an evaluation's does"),
        (
            {("loss", 1): "step 1", ("evaluation loss", 1): "before training"},
            ("schedule", "accumulation"),
            "does not, nor does an evaluation's: look at what one could take from another",
        ),
        ({("loss", 1): "step 1"}, ("schedule",), "look at the order of its passes and at their messages, not at"),
        ({("loss", 1): "step 1"}, ("tp",), "look at the output head"),
        ({("logits", 1): "logits"}, ("accumulation",), "look at the output head"),
        ({("source loss", 1): "source 1"}, ("dp",), "the loss agrees, that of source 1 does not"),
        (
            {("gradient", 3): "c", ("gradient reduction", 2): "b", ("gradient", 2): "a", ("weight", 1): "w"},
            ("pp",),
            "step 2: gradients agree until then, adamw gradient reduction in step 2 of b does not",
        ),
        ({("weight", 1): "w"}, ("dp",), "update: gradients and their norm agree, the adamw weight does not, most of"),
    ],
)
def test_the_first_difference_says_where_to_look(
    wrong: dict[tuple[str, int], str], needs: tuple[str, ...], said: str
) -> None:
    """Outputs are observed one micro-batch at a time: where they agree, what goes wrong between several is not in the
    head; and what goes wrong in a later step is not said of the first."""
    deviations = tuple(Deviation(Quantity("adamw", *kind), name, 1.0, 0.1) for kind, name in wrong.items())

    def run(layout: ParityLayout) -> LayoutResult:
        fails = all(axis in layout.axes for axis in needs)
        return LayoutResult(layout, "fp32", 1.0, deviations if fails else ())

    answer: Any = None  # asked only about norms
    whole = ParityLayout(tp=2, pp=2, dp=2, accumulation=4, schedule="zb-v")
    diagnosis = diagnose(run(whole), run, answer, [])
    needed = {"accumulation"} if "schedule" in needs else set()  # a schedule is nothing without it
    assert set(diagnosis.axes) == set(needs) - needed and said in diagnosis.sentences[1], diagnosis.sentences


def test_only_a_cut_sequence_is_split_in_shared_memory() -> None:
    words = ["performance.symmetric_memory=true", "parallel.tensor_parallel_size=2", "parallel.sequence_parallel=true"]
    config = load_config(ROOT / "configs" / "quickstart.yaml", words)
    cut = ParityLayout(tp=2, sequence_parallel=True, compile="blocks")
    assert cut.config(config).performance.symmetric_memory
    for layout in (cut.without("sequence_parallel"), cut.without("compile"), ParityLayout()):
        assert not layout.config(config).performance.symmetric_memory
