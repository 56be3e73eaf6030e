"""Conversations as a model will read them: rendered, cut into tokens, and with the tokens that carry loss marked."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from data_pipeline.chat.encoder import ChatEncoder
from data_pipeline.document import BadRows
from data_pipeline.encoding.encoders import loaded_tokenizer
from data_pipeline.errors import DataError
from data_pipeline.prepare.plan import PreparationPlan
from data_pipeline.prepare.units import unit_pieces


@dataclass(frozen=True)
class TokenRun:
    """Tokens in a row that all carry loss, or of which none does."""

    has_loss: bool
    text: str  # of all its tokens
    tokens: list[str]  # the text of each; a part of a character is shown as U+FFFD


@dataclass(frozen=True)
class ShownConversation:
    """One conversation: the texts of its tokens, in order."""

    where: str  # file and line, or row
    runs: list[TokenRun]

    def count(self, *, has_loss: bool | None = None) -> int:
        """Returns the number of its tokens, or of those that carry loss."""
        return sum(len(run.tokens) for run in self.runs if has_loss is None or run.has_loss == has_loss)


def shown_conversations(job: PreparationPlan, count: int, bad_rows: BadRows) -> Iterator[ShownConversation]:
    """Yields the first conversations of a job, encoded as it would encode them. Raises DataError as it would."""
    encoder = job.encoder
    assert isinstance(encoder, ChatEncoder), "only for jobs with train_on"
    tokenizer = loaded_tokenizer(encoder.tokenizer, False).tokenizer

    def text_of(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=False)

    pieces = (piece for unit in job.units for piece in unit_pieces(job.sources, job.places, unit, 0, bad_rows))
    for piece in pieces:
        if count == 0:
            return
        try:
            ids, loss = encoder.encode(piece)
        except DataError as error:
            bad_rows(error)
            continue
        assert loss is not None, "conversations have a mask"
        runs = []
        for carries, group in groupby(zip(loss.tolist(), map(int, ids), strict=True), lambda one: one[0]):
            numbers = [number for _, number in group]
            runs.append(TokenRun(bool(carries), text_of(numbers), [text_of([one]) for one in numbers]))
        yield ShownConversation(piece.where, runs)
        count -= 1
