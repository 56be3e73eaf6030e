"""Renders a conversation, and finds the stretches of its text that a model must produce: the assistant's turns.

A template with {% generation %} says so itself. With any other, the text before an answer must be what the template
makes of the messages before it, with the prompt for an answer, and the text after it what it makes of the messages up
to it, as far as the token that ends the turn. A template that writes earlier turns differently once others follow,
such as one that takes away old reasoning, is refused: a model would be trained on prompts that it never sees.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import date
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal, NamedTuple

from data_pipeline.chat.conversation import ASSISTANT, CALL_FIELDS, REASONING_FIELDS, USER, Conversation, Message
from data_pipeline.chat.renderer import (
    ChatPart,
    Rendered,
    TemplateBroken,
    TemplateLimit,
    TemplateProcess,
    TemplateRefusal,
)
from data_pipeline.chat.template import ChatTemplate, chat_template_of
from data_pipeline.errors import DataError, DataLimitError
from data_pipeline.tokenizers.reading import HubTokenizer

TrainOn = Literal["all-turns", "last-turn"]
"""all-turns: every message of the assistant carries loss; last-turn: those after the last message of the user."""

_MARK = "put {% generation %} and {% endgeneration %} around what the assistant writes, its end token included"

_BESIDE_CONTENT = (CALL_FIELDS, REASONING_FIELDS)

_SAID = {"content": "x"}  # in conversations that try out a template


def answer_end(folder: Path) -> int | None:
    """Returns the token by which the chat template in a tokenizer's folder ends an answer; None if there is none."""
    with _turns_of(folder) as (turns, tokenizer):
        end = turns.end_of_turn() if turns else None
        return next((number for number, (content, _) in tokenizer.added.items() if content == end), None)


def opening_notice(folder: Path) -> str | None:
    """Returns the notice about the chat template in a tokenizer's folder that `TurnFinder.opening_notice` returns."""
    with _turns_of(folder) as (turns, _):
        return turns.opening_notice() if turns else None


@contextmanager
def _turns_of(folder: Path) -> Iterator[tuple["TurnFinder | None", HubTokenizer]]:
    with HubTokenizer(folder) as tokenizer:
        if tokenizer.templates is None:
            yield None, tokenizer
            return
        special = [content for content, is_special in tokenizer.added.values() if is_special]
        turns = TurnFinder(chat_template_of(tokenizer, date.today().isoformat()), special, "all-turns")
        try:
            yield turns, tokenizer
        finally:
            turns.process.close()


class Turns(NamedTuple):
    """A conversation as text."""

    text: str
    trained: list[tuple[int, int]]  # begin and end of each stretch that carries loss, in characters


class TurnFinder:
    """Finds turns with one template. `end_tokens` are the spellings of its tokenizer's special tokens."""

    def __init__(self, template: ChatTemplate, end_tokens: Sequence[str], train_on: TrainOn) -> None:
        self.template, self.train_on = template, train_on
        self._end_tokens = tuple(sorted(end_tokens, key=len, reverse=True))
        self.process = TemplateProcess(template)

    def find(self, conversation: Conversation, where: str) -> Turns:
        """Renders a conversation. Raises DataError if its template refuses it, or leaves open what carries loss."""
        first = conversation.prompt_messages
        if self.train_on == "last-turn":
            roles = [message["role"] for message in conversation.messages]
            first = max([first, *(number for number, role in enumerate(roles, start=1) if role == USER)])
        self._check_written(conversation, first, where)
        if self.template.marks_generation(conversation.tools is not None):
            return self._marked(conversation, first, where)
        return self._by_prefixes(conversation, first, where)

    def check_template(self) -> None:
        """Raises DataError for a template that is broken, or does not end for two short messages."""
        try:
            self.process.render([{"role": role, **_SAID} for role in (USER, ASSISTANT)], [ChatPart(2, False)])
        except (TemplateBroken, TemplateLimit) as error:
            raise self._unusable(error) from None
        except TemplateRefusal:
            pass  # of this conversation

    def _unusable(self, error: TemplateRefusal) -> DataLimitError:
        return DataLimitError(
            f"{self.template.place()}: the chat template cannot be used, {error}: correct it, or take it from the "
            "model's source"
        )

    def around_answers(self) -> list[tuple[str, str]]:
        """Returns pairs of texts: what the second has beyond the first is a turn of another, or an answer's prompt.

        It is the prompt in the last pair. A turn that the template refuses is left out: no conversation has one.
        """
        user, system, tool = ({"role": role, **_SAID} for role in (USER, "system", "tool"))
        call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {}}}
        calling = {"role": ASSISTANT, "content": "", "tool_calls": [call]}
        result = tool | {"tool_call_id": call["id"], "name": "f"}
        return [
            *self._beyond([system, user], ChatPart(2, False), None),
            *self._beyond([user, calling, result], ChatPart(3, False), ChatPart(2, False)),
            *self._beyond([user], ChatPart(1, False), None),
            *(self._beyond([user], ChatPart(1, True), ChatPart(1, False)) or [("", "")]),
        ]

    def _beyond(self, messages: list[Message], part: ChatPart, before: ChatPart | None) -> list[tuple[str, str]]:
        try:
            after, *first = self.process.render(messages, [part, before] if before else [part])
        except TemplateRefusal:
            return []
        return [(first[0].text if first else "", after.text)]

    def end_of_turn(self) -> str | None:
        """Returns the special token by which the template ends an answer; None if it writes none, or takes no answer.

        It is the first, where a conversation ends by one more.
        """
        try:
            chat = [{"role": role, **_SAID} for role in (USER, ASSISTANT)]
            text = self.process.render(chat, [ChatPart(2, False)])[0].text
        except TemplateRefusal:
            return None
        end = self._end_of_turn(text, 0)
        return None if end is None else self._token_at_end(text[:end])

    def opening_notice(self) -> str | None:
        """Returns a notice about a template that opens an answer, and has no prompt for one: a model that is asked by
        it must write the opening itself. None for any other."""
        said = _mark(1, "content")
        chat = [{"role": USER, **_SAID}, {"role": ASSISTANT, "content": said}]
        try:
            parts = [ChatPart(1, True), ChatPart(1, False), ChatPart(2, False)]
            asked, alone, answer = self.process.render(chat, parts)
        except TemplateRefusal:
            return None
        opening, *written = answer.text.removeprefix(asked.text).split(said)
        if asked.text != alone.text or not answer.text.startswith(asked.text) or not written or not opening.strip():
            return None
        return (
            f"{self.template.place()}: the chat template ignores add_generation_prompt, so that a model is asked for "
            f"an answer without {opening!r}, with which the template opens one: end it with "
            f"{{% if add_generation_prompt %}}{{{{ {opening!r} }}}}{{% endif %}}"
        )

    def text_of(self, conversation: Conversation, where: str) -> str:
        """Returns the whole of a conversation as text."""
        return self._render(conversation, [ChatPart(len(conversation.messages), False)], where)[0].text

    def _check_written(self, conversation: Conversation, first: int, where: str) -> None:
        """Raises DataError for calls of tools, or for reasoning of an answer from number `first` on, that the template
        leaves out: an answer would be trained as if it were another, or empty. Marks at the ends of these show it."""
        messages = list(conversation.messages)
        asked: list[tuple[int, tuple[str, ...]]] = []  # a message, and fields of which the template must write one
        for number in _answers(conversation, 0):
            calls, reasoning = ([name for name in names if messages[number].get(name)] for names in _BESIDE_CONTENT)
            text = ["content"] if str(messages[number].get("content", "")).strip() and (calls or reasoning) else []
            groups = [calls, reasoning, text] if number >= first else [calls]
            asked += [(number, tuple(names)) for names in groups if names]
            changed = {
                name: _with_mark(messages[number][name], _mark(number, name)) for name in (*calls, *reasoning, *text)
            }
            messages[number] = messages[number] | changed
        if not asked:
            return
        try:
            parts = [ChatPart(number + 1, False) for number, _ in asked]
            made = self.process.render(messages, parts, conversation.tools)
        except TemplateRefusal:
            return  # it takes no other names, or refuses the conversation itself and is asked again
        for (number, names), shown in zip(asked, made, strict=True):
            of = messages[number]
            counts = {name: len(of[name]) if isinstance(of[name], list) else 1 for name in names}
            if not any(shown.text.count(_mark(number, name)) >= count for name, count in counts.items()):
                raise DataError(
                    f"{where}: the chat template of {self.template.folder} does not write {names[0]} of message "
                    f"{number + 1}, or not all of it, so that a model would learn an answer without it: give a "
                    "template that does, or leave the conversation out"
                )

    def _marked(self, conversation: Conversation, first: int, where: str) -> Turns:
        """Takes the stretches that the template marks, from the message number `first` on."""
        whole = ChatPart(len(conversation.messages), False)
        before = [ChatPart(first, False)] if first else []
        answers = _answers(conversation, first)
        made = self._render(conversation, [whole, *before, *_around(answers)], where)
        text, marked = made[0]
        around = made[1 + len(before) :]
        begin = len(made[1].text) if before else 0
        if before and not text.startswith(made[1].text):
            raise self._rewritten(first, where)
        trained = [(low, high) for low, high in marked if low >= begin and high > low]
        for low, high in trained:
            ends = text[low:high].rstrip().endswith(self._end_tokens)
            follows = (low, high) == trained[-1] or text[high:].lstrip().startswith(self._end_tokens)
            if not ends and follows:
                raise DataError(
                    f"{where}: the chat template of {self.template.folder} leaves the token that ends a turn out of "
                    "its {% generation %} block, so that a model would not learn to end: move "
                    "{% endgeneration %} behind it"
                )
        self._check_marks(answers, [*(made[1:2] if before else [Rendered("", [])]), *around, made[0]], where)
        return Turns(text, trained)

    def _check_marks(self, answers: list[int], made: list[Rendered], where: str) -> None:
        """Raises DataError for loss on the prompt of an answer, or on a message of another.

        `made` are the conversation before the answers, before and after each of them, and the whole.
        """
        for number, before, prompt in zip([*answers, None], made[0::2], made[1::2], strict=True):
            if len(_marks(prompt)) > len(_marks(before)):
                place = where if number is None else f"{where}, before message {number + 1}"
                raise self._marks_too_much("what is no answer of the assistant", place)
        for number, prompt, answer in zip(answers, made[1::2], made[2::2], strict=False):
            begin = common_length(prompt.text, answer.text)
            if any(low < begin for low, _ in _marks(answer)[len(_marks(prompt)) :]):
                raise self._marks_too_much("the prompt of an answer", f"{where}, message {number + 1}")

    def _marks_too_much(self, what: str, where: str) -> DataError:
        return DataError(
            f"{where}: the chat template of {self.template.folder} has {what} inside its {{% generation %}} block, so "
            "that a model would learn to write it: begin the block where the answer begins, with nothing that the "
            "template writes for add_generation_prompt"
        )

    def _by_prefixes(self, conversation: Conversation, first: int, where: str) -> Turns:
        messages = conversation.messages
        answers = _answers(conversation, first)
        (text, _), *parts = self._render(conversation, [ChatPart(len(messages), False), *_around(answers)], where)
        trained = []
        for number, prompt, answer in zip(answers, parts[0::2], parts[1::2], strict=True):
            begin = len(prompt.text)
            end = self._end_of_turn(answer.text, begin)
            if end is None and answer.text.startswith(prompt.text):
                raise DataError(
                    f"{where}, message {number + 1}: the chat template of {self.template.folder} writes no special "
                    "token at the end of an assistant's turn, so that a model would not learn to end: add "
                    f"{{{{ eos_token }}}} there; or, if an added token ends it, in {answer.text.rstrip()[-16:]!r}, "
                    'which is not marked special in tokenizer.json, set "special" to true for it'
                )
            if end is None or not text.startswith(prompt.text) or not text.startswith(answer.text[:end]):
                raise self._rewritten(number + 1, where)
            if not answer.text[begin:end].removesuffix(self._token_at_end(answer.text[:end])).strip():
                raise DataError(
                    f"{where}, message {number + 1}: the chat template of {self.template.folder} writes nothing of "
                    "this answer, so that a model would learn to answer nothing: leave the conversation out"
                )
            trained.append((begin, end))
        return Turns(text, trained)

    def _end_of_turn(self, text: str, begin: int) -> int | None:
        """Returns where the turn at the end of `text` ends: behind the first of the special tokens that close it."""
        end = None
        while (rest := text.rstrip()).endswith(self._end_tokens):
            text = rest[: -len(self._token_at_end(rest))]
            if len(text) < begin:
                break
            end = len(rest)
        return end

    def _token_at_end(self, text: str) -> str:
        return next(token for token in self._end_tokens if text.endswith(token))

    def _render(self, conversation: Conversation, renderings: list[ChatPart], where: str) -> list[Rendered]:
        try:
            return self.process.render(conversation.messages, renderings, conversation.tools)
        except TemplateBroken as error:
            raise self._unusable(error) from None
        except TemplateLimit as error:
            raise DataLimitError(
                f"{where}: the chat template of {self.template.folder} was given up for its "
                f"{len(conversation.messages)} messages, {error} ({len(renderings)} renderings, more with more turns): "
                "cut the conversation, run fewer --workers, or see what the template does"
            ) from None
        except TemplateRefusal as error:
            raise DataError(f"{where}: the chat template of {self.template.folder} does not take it: {error}") from None

    def _rewritten(self, message: int, where: str) -> DataError:
        fewer = "" if self.train_on == "last-turn" else ", or train on last turns alone (--train-on last-turn)"
        return DataError(
            f"{where}, message {message}: the chat template of {self.template.folder} writes the conversation up to it "
            f"differently alone and with what follows, so that it is not known what the assistant must produce: {_MARK}"
            f"{fewer}"
        )


def _answers(conversation: Conversation, first: int) -> list[int]:
    """Returns the places of the assistant's messages from number `first` on."""
    return [n for n, message in enumerate(conversation.messages) if n >= first and message["role"] == ASSISTANT]


def _around(answers: list[int]) -> list[ChatPart]:
    """Returns the conversation as the prompt of each answer, and up to the answer."""
    return [part for number in answers for part in (ChatPart(number, True), ChatPart(number + 1, False))]


def _mark(number: int, field: str) -> str:
    """Returns letters that stand in no other message, nor in another field of it."""
    return f"zq{number}{field.replace('_', '')}qz"


def _with_mark(value: Any, mark: str) -> Any:
    """Returns a text, or the names of called functions, with a mark behind it."""
    if isinstance(value, list):
        return [_with_mark(one, mark) for one in value]
    if isinstance(value, dict):
        return {name: _with_mark(v, mark) if name in ("function", "name") else v for name, v in value.items()}
    return value + mark if isinstance(value, str) else value


def _marks(made: Rendered) -> list[tuple[int, int]]:
    return [(low, high) for low, high in made.generated if high > low]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns how many elements two sequences begin with alike."""
    if other[: len(one)] == one:  # as a prompt and its answer nearly always do: not one by one
        return len(one)
    return len(commonprefix([list(one), list(other)]))  # noqa: RUF071 - these are no paths
