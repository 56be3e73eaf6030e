"""The findings of a page in sentences, which come before its figures."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from launch.inspection.page.page_data import PageData, not_negative
from launch.inspection.run_files import number
from launch.inspection.step_explanation import advice
from launch.prediction.prediction import format_error, format_rough_error
from megalite.checkpoint.manifest import printable
from megalite.config.loading.secrets_in_text import without_secrets
from megalite.monitor.steps.parts import PARTS, communication_share
from megalite.monitor.steps.predicted_parts import beside_prediction
from megalite.monitor.steps.slow_ranks import IN_A_ROW, WINDOW
from megalite.units import percent, plural, seconds

NAMED = 4  # largest parts of a step
LONGEST = 1000  # characters of a sentence
WORTH = 0.02  # of the measured step, from which on a wrongly predicted part is named


def sentences_of(found: PageData) -> list[str]:
    """Returns the findings, the most important first; then what the page lacks."""
    status = found.status
    said = [f"{str(status.state).capitalize()}: {status.reason}."]
    if not len(found.history.steps):
        said.append("No step is on record: there is nothing to draw yet.")
    said += [*_step(found), *_slow_ranks(found), *_prediction(found)]
    if found.explanation is not None:
        said.append(f"In step {found.explanation.step:,} {advice(found.explanation)}.")
    if status.steps_at_risk and not status.state.is_healthy:
        said.append(f"{plural(status.steps_at_risk, 'step')} after the last checkpoint have to be done again.")
    said += [f"Not on this page: {problem}." for problem in found.problems]
    return [without_secrets(sentence[:LONGEST]) for sentence in said]


def _step(found: PageData) -> Iterator[str]:
    """Yields what dominated the steps."""
    parts = found.parts_s
    wall = sum(parts.values())
    if wall <= 0:
        if len(found.history.steps):
            yield "This run did not record what its steps spent their time on."
        return
    largest = sorted(parts, key=lambda name: -parts[name])[:NAMED]
    named = ", ".join(f"{PARTS[name]} {percent(parts[name] / wall)}" for name in largest)
    yield (
        f"A step took {seconds(wall)} on average and went into {named}; "
        f"{percent(communication_share(dict(parts)))} of it is communication."
    )


def _slow_ranks(found: PageData) -> Iterator[str]:
    slow = found.history.files.slow_ranks
    for event in slow[:NAMED]:
        sentence = event.get("sentence")
        yield printable(sentence) if isinstance(sentence, str) else f"Rank {event.get('rank')} is slow."
    mesh = found.mesh
    has_peers = mesh is not None and mesh.world_size > mesh.pipeline_parallel_size
    session = found.history.files.session  # in which ranks are compared anew
    resumed_at = (number(session[0].get("step")) if session else None) or 0.0
    compared = int(np.count_nonzero(found.history.steps > resumed_at))
    if not slow and found.parts_s and has_peers and compared >= IN_A_ROW * WINDOW:
        yield "No rank is slower than the others of its stage."


def _prediction(found: PageData) -> Iterator[str]:
    """Yields how far the prediction was off: of the whole step, and of the part that it missed most."""
    prediction, measured_s = found.receipt.prediction, found.receipt.measured.step_time_s
    predicted_s = prediction.step_time_s
    if predicted_s is None or predicted_s <= 0:
        problem = prediction.problem
        yield "There is no prediction of the step time" + (f": {printable(problem)}." if problem else ".")
        return
    if measured_s is not None and measured_s > 0:
        words = format_rough_error if prediction.rough else format_error
        sentence = f"The plan said {seconds(predicted_s)} a step, it took {seconds(measured_s)}"
        yield f"{sentence} ({words(predicted_s, measured_s)}).{_worst_part(found)}"
    if published := found.receipt.published:
        yield printable(published[:1].upper() + published[1:]) + "."


def _worst_part(found: PageData) -> str:
    predicted_s = not_negative(found.receipt.prediction.parts_s)
    pairs = beside_prediction(predicted_s, found.parts_s) if found.parts_s else []
    off = [(pair.measured_s - (pair.predicted_s or 0.0), pair) for pair in pairs if pair.predicted_s is not None]
    if not off:
        return ""
    difference, worst = max(off, key=lambda one: abs(one[0]))
    if abs(difference) < WORTH * sum(found.parts_s.values()):
        return ""
    return (
        f" Furthest off: {worst.name}, predicted {seconds(worst.predicted_s or 0.0)}, "
        f"measured {seconds(worst.measured_s)}."
    )
