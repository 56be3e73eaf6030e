"""The page of `megalite plan --html`, as headless Chromium lays it out without a network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import pytest

from launch.errors import LaunchError
from launch.planning.report.memory_figure import memory_figure
from launch.planning.report.page import assumptions_of, write_report
from launch.planning.report.timeline_figure import box_id, sample_of, timeline_figure, timeline_of
from launch.planning.report.waterfall_figure import REMEDIES, USEFUL, waterfall_caption
from megalite.config import Config, ModelConfig
from megalite.config.data import DataConfig
from megalite.config.sections import TrainingConfig
from megalite.planner.cost.memory import CUDA, StageMemory, memory_of
from megalite.planner.cost.step_time import step_time
from megalite.planner.forecast import forecast_of
from megalite.planner.hardware import Cluster, ClusterFile, cluster_of
from megalite.planner.search import LayoutCandidate, SearchResult
from megalite.planner.workload import ParallelLayout, TrainingWorkload
from megalite.units import about, duration, gib, percent, seconds
from tests.helpers.browser import Box, Seen, look_at, photograph, why_no_browser
from tests.helpers.machines import cpus

MODEL = ModelConfig(
    vocab_size=128_256,
    hidden_size=8192,
    intermediate_size=28_672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
    max_position_embeddings=8192,
)
DEEP = MODEL.model_copy(update={"num_hidden_layers": 128, "layer_types": ("full_attention",) * 128})
TINY = ModelConfig(vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
HOSTILE = "</title><script>document.title = 'taken'</script> \"quoted\" & <b>bold</b>"
PIXEL = 0.6  # coordinates are written with two decimals; the figure is scaled by nothing at these widths


def config_of(model: ModelConfig, sequences: int) -> Config:
    training = {"global_batch_size": sequences, "micro_batch_size": 1, "sequence_length": 4096, "steps": 100_000}
    return Config(run_dir=Path("x"), model=model, data=DataConfig(path=["x"]), training=TrainingConfig(**training))


def plan(model: ModelConfig, nodes: int, sequences: int, *layouts: ParallelLayout) -> SearchResult:
    """As `search` would find it, with these layouts."""
    cluster = cluster_of(ClusterFile(accelerator="H100", nodes=nodes), "test")
    jobs = [TrainingWorkload(model, layout, sequence_length=4096, global_batch_size=sequences) for layout in layouts]
    found = [LayoutCandidate(job, memory_of(job), step_time(job, cluster)) for job in jobs]
    return SearchResult(cluster, tuple(found), ())


@pytest.fixture(scope="module")
def llama() -> SearchResult:
    """A 70B model on 128 accelerators; the pipeline comes first, whatever is faster."""
    first = ParallelLayout(8, 8, 2, sequence_parallel=True)
    others = [replace(first, pipeline_parallel_size=4, data_parallel_size=4), replace(first, recompute="full")]
    result = plan(MODEL, 16, 64, first, *others)
    return replace(result, candidates=tuple(sorted(result.candidates, key=lambda one: one.layout != first)))


@pytest.fixture(scope="module")
def page(llama: SearchResult, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("report") / "plan.html"
    write_report(path, llama, llama.cluster, "a 70B model on 128 accelerators", config_of(MODEL, 64), 2.5)
    return path


@pytest.fixture(scope="session")
def browser() -> None:
    """Skips, and says why, where there is no browser."""
    if reason := why_no_browser():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def seen(browser: None, page: Path) -> Seen:
    return look_at(page)


def parts_of(seen: Seen, prefix: str) -> Iterator[tuple[str, Box]]:
    return ((id_, box) for id_, box in seen.elements.items() if id_.startswith(prefix))


@pytest.mark.slow
def test_bars_of_memory_are_stacked_and_as_high_as_their_bytes(seen: Seen, llama: SearchResult) -> None:
    limit = seen.elements["memory-limit"]
    ground = max(box.bottom for _, box in parts_of(seen, "memory-stage-"))
    pixels_per_byte = (ground - limit.y) / llama.cluster.memory_bytes
    assert pixels_per_byte > 0
    stages = llama.candidates[0].memory
    drawn_names = [*dict.fromkeys(name for stage in stages for name in stage.parts)]
    drawn_names.sort(key=("allocator", "context").__contains__)
    for stage in stages:
        below = ground
        in_order = sorted(stage.parts.items(), key=lambda part: drawn_names.index(part[0]))
        for name, size in in_order:
            box = seen.elements.get(f"memory-stage-{stage.stage}-{name.replace(' ', '-')}")
            if box is None:  # a part that no stage has
                assert size == 0
                continue
            assert box.height == pytest.approx(size * pixels_per_byte, abs=PIXEL)
            assert box.bottom == pytest.approx(below, abs=PIXEL)
            assert gib(size) in box.text and name in box.text
            below = box.y
        assert ground - below == pytest.approx(stage.total * pixels_per_byte, abs=2 * PIXEL)
    columns = [seen.elements[f"memory-stage-{stage}-weights"] for stage in range(8)]
    assert all(one.right < other.x for one, other in pairwise(columns))


@pytest.mark.slow
def test_a_small_model_is_drawn_in_its_own_scale(browser: None, small_page: Path) -> None:
    """Against the limit of a large accelerator its bars would be lines; they are mostly what CUDA itself takes."""
    seen = look_at(small_page)
    bars = [box for _, box in parts_of(seen, "memory-stage-0-")]
    assert sum(box.height for box in bars) > 200
    assert "memory-limit" not in seen.elements
    assert any(box.text.endswith("79.1 GiB, far above") for box in seen.texts)
    assert any(box.text == "GiB per accelerator" for box in seen.texts)


@pytest.mark.slow
def test_the_ranking_has_a_row_and_a_bar_for_each_layout(seen: Seen, llama: SearchResult) -> None:
    rows = [seen.elements[f"ranking-{number}"] for number in (1, 2, 3)]
    assert all(one.bottom <= other.y + 1 for one, other in pairwise(rows))
    bars = [seen.elements[f"ranking-{number}-time"] for number in (1, 2, 3)]
    for bar, other in combinations(range(3), 2):
        times = [llama.candidates[number].time.seconds for number in (bar, other)]
        assert bars[bar].width / bars[other].width == pytest.approx(times[0] / times[1], rel=0.02)
    for row, candidate in zip(rows, llama.candidates, strict=True):
        assert seconds(candidate.time.seconds) in row.text


@pytest.mark.slow
def test_the_waterfall_climbs_to_the_total(seen: Seen, llama: SearchResult) -> None:
    time = llama.candidates[0].time
    total = seen.elements["waterfall-total"]
    end = total.x
    for name, value in time.parts.items():
        if value == 0:
            continue
        box = seen.elements[f"waterfall-{name.replace(' ', '-')}"]
        assert box.x == pytest.approx(end, abs=PIXEL)
        assert box.width == pytest.approx(max(1.0, value / time.seconds * total.width), abs=PIXEL)
        assert seconds(value) in box.text and percent(value / time.seconds) in box.text
        end += value / time.seconds * total.width
    assert end == pytest.approx(total.right, abs=PIXEL)
    assert [box.y for _, box in parts_of(seen, "waterfall-")] == sorted(
        box.y for _, box in parts_of(seen, "waterfall-")
    )


@pytest.mark.slow
def test_the_timeline_shows_every_piece_of_work_at_its_time(seen: Seen, llama: SearchResult) -> None:
    timeline = timeline_of(llama.candidates[0])
    assert timeline.stages == 8 and timeline.micro_batches == 32
    boxes = {box_id(work): seen.elements[box_id(work)] for work in timeline.work}
    assert len(boxes) == 2 * 8 * 32
    left = min(box.x for box in boxes.values())
    pixels_per_s = (max(box.right for box in boxes.values()) - left) / timeline.makespan_s
    rows: dict[int, set[float]] = {}
    for work in timeline.work:
        box = boxes[box_id(work)]
        assert box.x - left == pytest.approx(work.start_s * pixels_per_s, abs=PIXEL)
        assert box.width == pytest.approx((work.end_s - work.start_s) * pixels_per_s, abs=PIXEL)
        rows.setdefault(work.stage, set()).add(round(box.y))
    assert [len(heights) for heights in rows.values()] == [1] * 8
    assert [min(rows[stage]) for stage in range(8)] == sorted(min(heights) for heights in rows.values())
    forward, backward = (seen.elements[f"timeline-stage-0-{kind}-0"] for kind in ("forward", "backward"))
    assert forward.fill != backward.fill


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 4), ("zb-v", 2), ("dualpipev", 2)])
def test_chunks_of_a_stage_are_drawn_below_each_other(schedule: Any, chunks: int) -> None:
    layout = ParallelLayout(8, 4, 4, chunks, sequence_parallel=True, pipeline_schedule=schedule)
    timeline = timeline_of(plan(MODEL, 16, 32, layout).candidates[0])
    boxes = {id_: node for node in timeline_figure(timeline)[0].iter("rect") if (id_ := node.get("id"))}
    assert set(boxes) == {box_id(work) for work in timeline.work} and len(boxes) == len(timeline.work)
    for stage in range(4):
        mine = [work for work in timeline.work if work.stage == stage]
        heights = {(work.chunk, float(boxes[box_id(work)].get("y", ""))) for work in mine}
        assert [chunk for chunk, _ in sorted(heights, key=lambda pair: pair[1])] == list(range(chunks))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["goodput-interval", "goodput-gpus"])
def test_goodput_curves_lie_in_their_band(seen: Seen, name: str) -> None:
    drawing, curve, band = (seen.elements[id_] for id_ in (name, f"{name}-line", f"{name}-band"))
    assert curve.width > 0.8 * drawing.width and curve.height > 5
    assert band.y <= curve.y + 2 and band.bottom >= curve.bottom - 2 and band.height > curve.height
    dot = seen.elements[f"{name}-marked"]
    assert dot.x > curve.x and dot.right < curve.right
    if name == "goodput-interval":  # its best is the top of the curve
        assert dot.y + dot.height / 2 == pytest.approx(curve.y + 1.25, abs=1.5)
    titles = [box.text for id_, box in parts_of(seen, f"{name}-") if id_.removeprefix(f"{name}-").isdigit()]
    assert len(titles) > 5 and all("goodput" in title and "%" in title for title in titles)


@pytest.fixture
def small_page(tmp_path: Path) -> Path:
    """A model that takes MiB of one accelerator with a long name, alone in its node."""
    layout = ParallelLayout(1, 1, 1, micro_batch_size=4)
    result = plan(TINY, 1, 4, layout, replace(layout, micro_batch_size=1))
    named = {"accelerators_per_node": 1, "accelerator_name": "a processor with a very long name, 128 cores"}
    path = tmp_path / "small.html"
    write_report(path, result, result.cluster.model_copy(update=named), "small", config_of(TINY, 4))
    return path


@pytest.mark.slow
@pytest.mark.parametrize(("fixture", "width"), [("page", 1120), ("page", 1280), ("small_page", 1120), ("page", 500)])
def test_labels_are_legible(browser: None, request: pytest.FixtureRequest, fixture: str, width: int) -> None:
    """None lies on another or outside its drawing, and nothing must be scrolled sideways."""
    seen = look_at(request.getfixturevalue(fixture), (width, 3200))
    assert seen.width <= width and all(width < 640 and 'class="wide"' in part[:20] for part in seen.cut)
    by_drawing: dict[str, list[Box]] = {}
    for text in seen.texts:
        by_drawing.setdefault(text.drawing, []).append(text)
    drawings = {"memory", "waterfall"} | ({"timeline"} if fixture == "page" else set())
    shown = {f"narrow-{name}" for name in drawings} if width < 640 else drawings
    assert set(by_drawing) == shown | {"goodput-interval", "goodput-gpus"}
    for name, texts in by_drawing.items():
        around = seen.elements[name]
        for text in texts:
            assert text.x >= around.x - 1 and text.right <= around.right + 1, (name, text)
            assert text.y >= around.y - 1 and text.bottom <= around.bottom + 1, (name, text)
            assert text.height >= 11, (name, text)
        clashes = [(one.text, other.text) for one, other in combinations(texts, 2) if one.overlaps(other)]
        assert clashes == [], name


@pytest.mark.slow
@pytest.mark.parametrize("dark", [False, True])
def test_it_is_not_blank_and_its_console_is_quiet(browser: None, page: Path, tmp_path: Path, dark: bool) -> None:
    from matplotlib.image import imread

    picture = tmp_path / "page.png"
    assert photograph(page, picture, dark=dark) == []
    pixels = imread(picture)[:, :, :3]
    assert pixels.shape[:2] == (3200, 1120)
    background = pixels[2, 2]
    assert background.mean() < 0.2 if dark else background.mean() > 0.95
    drawn = abs(pixels - background).max(axis=2) > 0.1
    assert 0.03 < drawn.mean() < 0.6
    for top in range(0, 2400, 400):  # everywhere is something
        assert drawn[top : top + 400].mean() > 0.01, top


@pytest.mark.slow
def test_what_a_network_would_bring_shows_in_the_console(browser: None, page: Path, tmp_path: Path) -> None:
    """The quiet console of the page proves something: it would say so."""
    spoiled = tmp_path / "spoiled.html"
    image = '<img src="https://example.org/logo.png">'
    spoiled.write_text(page.read_text(encoding="utf-8").replace("<main>", f"<main>{image}"), encoding="utf-8")
    said = photograph(spoiled, tmp_path / "spoiled.png")
    assert len(said) == 1 and "Content Security Policy" in said[0]


@pytest.mark.slow
def test_what_users_wrote_is_text(browser: None, llama: SearchResult, tmp_path: Path) -> None:
    accelerator = llama.cluster.accelerator.model_copy(update={"source": HOSTILE, "calibrated_on": HOSTILE})
    cluster = llama.cluster.model_copy(update={"accelerator": accelerator, "accelerator_name": HOSTILE})
    path = tmp_path / "hostile.html"
    write_report(path, llama, cluster, HOSTILE, config_of(MODEL, 64))
    seen = look_at(path)
    assert seen.scripts == 0
    assert seen.words.startswith(HOSTILE) and seen.words.count("<b>bold</b>") >= 4
    assert photograph(path, tmp_path / "hostile.png") == []


@pytest.mark.slow
def test_a_page_of_many_stages_and_micro_batches_stays_small_and_says_what_it_left_out(
    browser: None, tmp_path: Path
) -> None:
    result = plan(DEEP, 128, 1024, ParallelLayout(8, 64, 2, sequence_parallel=True))
    path = tmp_path / "large.html"
    write_report(path, result, result.cluster, "large", config_of(DEEP, 1024))
    assert path.stat().st_size < 1_000_000
    timeline = timeline_of(result.candidates[0])
    assert (timeline.stages, timeline.micro_batches) == (64, 512)
    sample = sample_of(timeline)
    seen = look_at(path)
    assert "Sampled: only the start, a piece of the middle and the end" in seen.words
    assert f"Of 64 stages {len(sample.stages)} are drawn" in seen.words
    drawn = dict(parts_of(seen, "timeline-stage-"))
    warm_up, end = "timeline-stage-0-backward-0", "timeline-stage-0-backward-511"
    assert {"timeline-stage-0-forward-0", "timeline-stage-63-forward-0", warm_up, end} <= set(drawn)
    middle = [id_ for id_ in drawn if id_.endswith("-256")]
    assert middle and drawn[warm_up].right < min(drawn[id_].x for id_ in middle)
    assert max(drawn[id_].right for id_ in middle) < drawn[end].x
    assert len([id_ for id_, _ in parts_of(seen, "memory-stage-") if id_.endswith("-weights")]) == 64
    assert seen.cut == []


@pytest.mark.parametrize("full", [0.9, 0.93, 0.95, 0.98, 1.0, 1.02, 1.1])
def test_the_total_of_a_bar_is_not_written_across_the_limit(full: float) -> None:
    limit = 80 * 2**30
    drawn, _ = memory_figure([StageMemory(0, {"weights": full * limit})], limit)
    line = next(float(node.get("y1", "")) for node in drawn.iter("line") if node.get("id") == "memory-limit")
    total = next(node for node in drawn.iter("text") if node.text == f"{full * 80:.1f}")
    bottom = float(total.get("y", ""))
    assert bottom < line - 2 or bottom - 10 > line + 2


def test_nothing_comes_from_elsewhere(page: Path) -> None:
    source = page.read_text(encoding="utf-8")
    assert not any(word in source for word in ("<script", "<link", "<img", "src=", "href=", "url(", "@import"))
    assert len(source) < 400_000


def test_assumptions_name_the_constant_the_rate_and_its_band(page: Path, llama: SearchResult) -> None:
    winner = llama.candidates[0]
    assumptions = assumptions_of(winner, llama.cluster, forecast_of(config_of(MODEL, 64), winner.job, 1.0, 8))
    said = {what: f"{value} {source}" for what, value, source in assumptions}
    constant = next(words for what, words in said.items() if what.startswith("calibrated constant"))
    accelerator = llama.cluster.accelerator
    assert f"{accelerator.efficiency:g} of 989" in constant and accelerator.calibrated_on in constant
    memory = next(words for what, words in said.items() if "allocator" in what)
    assert memory.startswith(f"{percent(CUDA.fragments)} of tensors")
    assert said["failures per 1,000 node-days"].startswith("4; published: 2 to 14")
    source = page.read_text(encoding="utf-8")
    assert all(what in source for what in said)


def test_every_part_of_a_step_is_known_to_the_waterfall(llama: SearchResult) -> None:
    """A part that it does not know would be drawn as a loss without a remedy."""
    for candidate in llama.candidates:
        assert set(candidate.time.parts) <= {*USEFUL, *REMEDIES}
    assert set(REMEDIES) <= set(llama.candidates[0].time.parts)


@pytest.mark.parametrize(
    ("model", "layout", "sequences"),
    [(MODEL, ParallelLayout(8, 1, 1), 4), (MODEL, ParallelLayout(1, 1, 5), 5)],
    ids=["one stage", "part of a node"],
)
def test_other_shapes_of_plans_are_drawn(
    model: ModelConfig, layout: ParallelLayout, sequences: int, tmp_path: Path
) -> None:
    result = plan(model, 4, sequences, layout)
    write_report(tmp_path / "plan.html", result, result.cluster, "plan", config_of(model, sequences))
    source = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert source.count("<svg") == 2 * 2 + 2 + 2  # two figures at both widths, two curves, the bars of one row
    assert "Pipeline timeline" not in source, "one stage waits for nobody"


def test_no_remedy_is_named_that_the_layout_cannot_have(llama: SearchResult) -> None:
    """Sequence parallelism divides norms and activations only over tensor-parallel ranks."""
    time = replace(llama.candidates[0].time, parts={"matrix products": 1.0, "memory-bound": 0.5})
    assert "sequence_parallel" in waterfall_caption(time, tensor_parallel_size=2)
    alone = waterfall_caption(time, tensor_parallel_size=1)
    assert "sequence_parallel" not in alone and alone.endswith("memory-bound with 500 ms.")


def test_the_page_says_how_long_and_how_much(page: Path, llama: SearchResult) -> None:
    winner = llama.candidates[0]
    length = forecast_of(config_of(MODEL, 64), winner.job, winner.time.seconds, 8).length
    source = page.read_text(encoding="utf-8")
    assert f"<b>{duration(length.wall_s)}</b><span>expected for 100,000 steps</span>" in source
    assert f"<b>{length.price(2.5):,.0f}</b><span>price, at 2.5 an accelerator-hour</span>" in source
    assert f"{length.accelerator_hours:,.0f} accelerator-hours" in source and "(checkpoint.interval auto)" in source


def test_a_cpu_has_no_utilization_and_no_three_digits(tmp_path: Path) -> None:
    """Its peak is measured, so a share of it would say nothing; its efficiency is a guess."""
    config, cluster = config_of(TINY, 4), cpus(1)
    job = TrainingWorkload(TINY, ParallelLayout(), sequence_length=512, global_batch_size=4, dtype="fp32")
    guessed = cluster.accelerator.model_copy(update={"calibrated_on": "a guess: calibrate it"})
    cluster = cluster.model_copy(update={"accelerator": guessed})
    found = LayoutCandidate(job, memory_of(job), step_time(job, cluster))
    assert found.time.model_flops_utilization is None
    write_report(tmp_path / "plan.html", SearchResult(cluster, (found,), ()), cluster, "plan", config)
    source = (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert "model FLOPs utilization" not in source
    assert f"<b>{about(found.time.seconds)}</b><span>per optimizer step</span>" in source and "roughly" in source
    assert "a guess: calibrate it" in source and "fitted on a guess" not in source


def test_a_folder_that_is_not_there_is_one_sentence(llama: SearchResult, tmp_path: Path) -> None:
    cluster: Cluster = llama.cluster
    with pytest.raises(LaunchError, match=r"nowhere/plan.html cannot be written: No such file or directory; give"):
        write_report(tmp_path / "nowhere" / "plan.html", llama, cluster, "plan", config_of(MODEL, 64))
