"""Warns of data some of whose samples hold no target that carries loss: steps that read them learn nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from data_pipeline.errors import DataError
from data_pipeline.samples.samples import Samples

LOOKED_AT = 1024  # samples of a split at most: the first ones of a computed permutation, so the share is that of all
FEWEST = 32  # of each of many texts, of which fewer are looked at


def notices_of_targets(texts: Mapping[str, Samples], too_long: str) -> Iterator[str]:
    """Yields a notice for each text some of whose samples hold no target that carries loss; "" names one without name.

    Raises DataError if no sample of any text holds one. Reads the marks of loss, and no tokens.
    """
    at_most = max(FEWEST, LOOKED_AT // max(1, len(texts)))
    found = {name: _without_targets(samples, at_most) for name, samples in texts.items()}
    notices = list[str]()
    for name, (without, looked_at) in found.items():
        if without:
            samples = texts[name]
            first = "" if looked_at == samples.samples_per_epoch else "first "
            cause = f": {_cause(too_long, samples.sequence_length)}" if samples.has_loss_mask else ""
            notices.append(
                f"{name and f'{name}: '}{without:,} of the {first}{looked_at:,} samples of the {samples.split} split "
                f"hold no token that carries loss, so nothing is learned from them{cause}"
            )
    if found and all(without == texts[name].samples_per_epoch for name, (without, _) in found.items()):
        raise DataError("; ".join(notices))
    yield from notices


def notices_of_evaluation(samples: Samples, count: int) -> Iterator[str]:
    """Yields notices about the first `count` samples of a validation set, that they are read again or have no loss."""
    if notice := samples.notice():
        yield notice
    if count > (there := samples.samples_per_epoch):
        yield (
            f"an evaluation reads {count:,} samples, but the {samples.split} split has {there:,}, so each is read "
            f"{count / there:.3g} times: ask for at most {there:,} (training.evaluation.samples, `samples` of a set in "
            "data.validation, or `megalite evaluate --samples`)"
        )
    without, looked_at = _without_targets(samples, min(count, LOOKED_AT))
    if without == looked_at:
        yield f"the {count:,} samples of the evaluation hold no token that carries loss: it has none"


def _without_targets(samples: Samples, at_most: int) -> tuple[int, int]:
    """Returns how many of the first samples hold no target that carries loss, and how many were looked at."""
    looked_at = min(samples.samples_per_epoch, at_most)
    return sum(samples.count_valid_targets(k) == 0 for k in range(looked_at)), looked_at


def _cause(too_long: str, sequence_length: int) -> str:
    if too_long != "cut":
        return "their conversations mark no answer"
    return (
        f"data.too_long cut cuts conversations of more than {sequence_length + 1:,} tokens, so that an answer lies in "
        "another sample than its prompt; raise training.sequence_length, or set data.too_long skip"
    )
