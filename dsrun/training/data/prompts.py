"""Conversations as token ids, with one tokenizer in one prompt format.

Texts are encoded segment by segment with special tokens split, so that nothing a user writes can turn into a role or
an end mark.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsrun.data.chat_templates import CHAT_TEMPLATE
from dsrun.data.conversations import BadRowError, Conversation, Turn
from dsrun.errors import DsrunError
from dsrun.training.data.prompt_formats import (
    BOS,
    FORMATS,
    PromptFormat,
    Question,
    Segment,
    Special,
)

PLACEHOLDER = "dsrun-places-a-text-here-"


class Encoded(NamedTuple):
    """One sequence to train on."""

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    """Where each part that is trained on begins and ends (in tokens)."""
    prompt_tokens: int
    """Those before the last answer."""
    question: str | None
    """The last one's text; None in plain text, which has neither."""
    answer: str | None
    shortened: bool = False
    """The question's text lost its end."""
    cut: bool = False
    """The answer lost its end."""
    dropped: int = 0
    """Turns at the beginning that were left out to fit."""


class Limits(NamedTuple):
    """In tokens; a conversation of several turns has both together."""

    source: int
    """Of a question in its frame."""
    target: int
    """Of an answer with its end mark."""

    @property
    def both(self) -> int:
        """Tokens of a whole sequence."""
        return self.source + self.target


class PromptEncoder:
    """Turns conversations into ids with one tokenizer and one format.

    name: a key of FORMATS, "chat-template" (the tokenizer's own) or "auto" (its own if it has one, else "plain").
    Raises DsrunError for an unknown name, a missing chat template or a special token that the vocabulary lacks.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        self.tokenizer = tokenizer
        if name == "auto":
            name = CHAT_TEMPLATE if tokenizer.chat_template else "plain"
        self.name = name
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._added: dict[str, int] = tokenizer.get_added_vocab()
        if name == CHAT_TEMPLATE:
            if not tokenizer.chat_template:
                raise DsrunError("the tokenizer has no chat template", hint="Choose another prompt format.")
            self.format = PromptFormat(question=("{question}",))
        elif name in FORMATS:
            self.format = FORMATS[name]
        else:
            known = ", ".join([*FORMATS, CHAT_TEMPLATE, "auto"])
            raise DsrunError(f"unknown prompt format {name!r}", hint=f"Known: {known}")
        self.end_ids = self._special_ids(self.format.end) if self.format.end else self.end_of_text
        if name == CHAT_TEMPLATE:
            self.end_ids = self._template_end() or self.end_ids
        self._known: dict[tuple[str, bool], list[int]] = {}
        ((first, *_),) = self.encode_texts(["a"])
        gap = " " if str(tokenizer.convert_ids_to_tokens(first)).startswith("▁") else ""
        self.chat_template = (
            tokenizer.chat_template if name == CHAT_TEMPLATE else self.format.chat_template(gap)
        )

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which an answer is over: its end mark, and what may come in its place."""
        found = [name for special in self.format.stops for name in special.names if name in self._vocabulary]
        stops = [*self.end_ids, *(self._vocabulary[name] for name in found)]
        return list(dict.fromkeys([*stops, *self.end_of_text])) if self.name == CHAT_TEMPLATE else stops

    @property
    def end_of_text(self) -> list[int]:
        """The token that ends a text. Raises DsrunError where there is none."""
        if self.tokenizer.eos_token_id is None:
            raise DsrunError("the tokenizer has no end-of-text token, so a response could never end")
        return [self.tokenizer.eos_token_id]

    def _template_end(self) -> list[int]:
        """The token that the chat template writes behind an answer, which ends it there; none where it writes text."""
        from jinja2 import TemplateError

        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": PLACEHOLDER}]
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except TemplateError:
            return []
        after = text.rpartition(PLACEHOLDER)[2]
        mark = next((token for token in self._added if after.startswith(token)), None)
        return [] if mark is None else [self._added[mark]]

    def _special_ids(self, special: Special) -> list[int]:
        if special is BOS:
            return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        for name in special.names:
            if name in self._vocabulary:
                return [self._vocabulary[name]]
        raise DsrunError(
            f"the tokenizer has no token {special.names[0]!r}, which the prompt format {self.name} needs",
            hint="The folder's tokenizer is not this model's own.",
        )

    # Texts

    def encode_texts(self, texts: Sequence[str], *, split_special: bool = True) -> list[list[int]]:
        """Ids of each text, without any token added; special tokens in the text stay text."""
        new = list(dict.fromkeys(text for text in texts if (text, split_special) not in self._known))
        if not new:
            return [self._known[text, split_special] for text in texts]
        encoded = self.tokenizer(
            new, add_special_tokens=False, split_special_tokens=split_special, verbose=False,
            return_attention_mask=False, return_token_type_ids=False,
        )  # fmt: skip
        found = dict(zip(new, encoded["input_ids"], strict=True))
        return [list(found[text] if text in found else self._known[text, split_special]) for text in texts]

    @contextmanager
    def _knowing(self, texts: Iterable[tuple[str, bool]]) -> Iterator[None]:
        """Encode texts all at once, which takes a fraction of one by one, and know them for a while."""
        try:
            for split_special, chosen in itertools.groupby(
                sorted(set(texts), key=operator.itemgetter(1)), operator.itemgetter(1)
            ):
                part = [text for text, _ in chosen]
                encoded = self.encode_texts(part, split_special=split_special)
                self._known |= {(text, split_special): ids for text, ids in zip(part, encoded, strict=True)}
            yield
        finally:
            self._known = {}

    def encode_segments(self, rows: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Ids of each row's segments, one after the other."""
        segments = list(dict.fromkeys(segment for row in rows for segment in row))
        texts = [segment for segment in segments if isinstance(segment, str)]
        encoded: dict[Segment, list[int]] = dict(zip(texts, self.encode_texts(texts), strict=True))
        encoded |= {
            special: self._special_ids(special) for special in segments if isinstance(special, Special)
        }
        return [[token for segment in row for token in encoded[segment]] for row in rows]

    # A question and its answer

    def ask(self, conversation: Conversation) -> list[int]:
        """Ids that ask for the conversation's last answer, whatever that is. Raises BadRowError."""
        if self.name != CHAT_TEMPLATE:
            found = self._join_segments(conversation)
            return found.ids[: found.prompt_tokens]
        return self._encode_messages(_dialogs(conversation)[-1:])[0]

    def _encode_answers(self, answers: Sequence[str]) -> list[list[int]]:
        return self.encode_segments([self.format.response(answer) for answer in answers])

    def encode_questions(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of each question in its frame. Raises BadRowError."""
        if self.name != CHAT_TEMPLATE:
            return self.encode_segments([self.format.segments(question) for question in questions])
        return self._encode_messages([_messages((), question) for question in questions])

    def _fit(self, question: Question, length: int, limit: int) -> list[int]:
        """The longest beginning of the question whose frame and text fit, found by halving."""

        def encoded(characters: int) -> list[int]:
            return self.encode_questions([question.cut(characters)])[0]

        if len(encoded(0)) > limit:
            bare = question.cut(0)._replace(system="")
            if question.system and len(self.encode_questions([bare])[0]) <= limit:
                raise BadRowError(f"has a system text that leaves no room for a question: {limit} tokens")
            raise DsrunError(
                f"the prompt format {self.name} alone takes more than {limit} tokens",
                hint="Raise --max-source-length.",
            )
        whole = len(question.text) + len(question.extra)
        low, high = 0, max(1, whole * limit // length)
        while high < whole and len(encoded(high)) <= limit:
            low, high = high, min(whole, high + max(8, high // 8))
        while high - low > 1:
            middle = (low + high) // 2
            if len(encoded(middle)) <= limit:
                low = middle
            else:
                high = middle
        return encoded(low)

    # Conversations

    def encode_conversations(
        self, conversations: Sequence[Conversation], limits: Limits, *, train_on_prompt: bool = False
    ) -> list[list[Encoded] | BadRowError]:
        """The sequences of each conversation, or why there is none.

        - One turn: the question is cut to limits.source tokens and the answer to limits.target, then without
          its end mark. What a question loses
          is the end of the user's text, never the frame: the mark that tells the model to answer stays.
        - Several turns: the oldest are left out until the rest has no more than both limits together; what is one turn
          then is cut as one.
        - A conversation is one sequence in which every answer is trained on. Where the format puts earlier answers into
          the next question's text, or a chat template writes them in another way once the conversation goes on, each
          answer gets its own sequence.
        """
        found: list[list[Encoded] | BadRowError] = [[] for _ in conversations]
        parts = [
            (place, part)
            for place, one in enumerate(conversations)
            for part in (one.each_answer() if self.format.inside else [one.upto_trained])
        ]
        single = [(place, part) for place, part in parts if len(part.turns) == 1]
        several = [(place, part) for place, part in parts if len(part.turns) > 1]
        for group, encode in ((single, self._encode_single), (several, self._encode_several)):
            encoded = encode([part for _, part in group], limits)
            for (place, _), sequences in zip(group, encoded, strict=True):
                before = found[place]
                if isinstance(sequences, BadRowError):
                    found[place] = sequences
                elif isinstance(before, list):
                    before += sequences
        if train_on_prompt:
            found = [
                row if isinstance(row, BadRowError) else [_whole(sequence) for sequence in row]
                for row in found
            ]
        return found

    def _encode_single(
        self, conversations: Sequence[Conversation], limits: Limits
    ) -> list[list[Encoded] | BadRowError]:
        """Conversations of one turn."""
        questions = [_question(conversation, 0) for conversation in conversations]
        turns = [conversation.turns[0] for conversation in conversations]
        prompts = self._encoded_or_why(questions)
        answers = self._encode_answers([turn.answer for turn in turns])
        room = limits.target - len(self.end_ids)
        found: list[list[Encoded] | BadRowError] = []
        for question, turn, prompt, answer in zip(questions, turns, prompts, answers, strict=True):
            try:
                if isinstance(prompt, BadRowError):
                    raise prompt
                shortened = len(prompt) > limits.source
                ids = self._fit(question, len(prompt), limits.source) if shortened else prompt
            except BadRowError as error:
                found.append(error)
                continue
            start = len(ids)
            cut = len(answer) > room
            # A response that is cut is not over, and what is trained on must not say so.
            ids = [*ids, *(answer[: limits.target] if cut else [*answer, *self.end_ids])]
            spans = ((max(1, start), len(ids)),)
            found.append([Encoded(ids, spans, start, question.whole, turn.answer, shortened, cut)])
        return found

    def _encoded_or_why(self, questions: Sequence[Question]) -> list[list[int] | BadRowError]:
        """All at once; where one of them can't be encoded, one by one."""
        try:
            return list(self.encode_questions(questions))
        except BadRowError as error:
            if len(questions) == 1:
                return [error]
        return [found for question in questions for found in self._encoded_or_why([question])]

    def _encode_several(
        self, conversations: Sequence[Conversation], limits: Limits
    ) -> list[list[Encoded] | BadRowError]:
        """Conversations of more than one turn."""
        with self._knowing(text for one in conversations for text in self._texts(one)):
            return [self._encode_one(one, limits) for one in conversations]

    def _texts(self, conversation: Conversation) -> list[tuple[str, bool]]:
        """What `_join` encodes of a conversation, each with whether special tokens in it are text."""
        questions, answers = self._parts(conversation)
        rendered: list[tuple[str, bool]] = []
        if self.name == CHAT_TEMPLATE:
            try:
                questions, rendered = [], [(self._rendered(one), False) for one in _dialogs(conversation)]
            except BadRowError:
                return []
        segments = itertools.chain(*questions, *answers)
        return [*rendered, *((segment, True) for segment in segments if isinstance(segment, str))]

    def _parts(self, conversation: Conversation) -> tuple[list[list[Segment]], list[list[Segment]]]:
        """Each question's segments, and each answer's; one of both where the last question holds all before it."""
        turns = conversation.turns
        questions = [self.format.segments(_question(conversation, number)) for number in range(len(turns))]
        answers = [self.format.response(turn.answer) for turn in turns]
        if self.format.inside:
            before = itertools.chain.from_iterable(map(operator.add, questions, [*answers[:-1], []]))
            return [_merged(before)], answers[-1:]
        return questions, answers

    def _encode_one(self, conversation: Conversation, limits: Limits) -> list[Encoded] | BadRowError:
        if len(conversation.turns) == 1:
            return self._encode_single([conversation], limits)[0]
        try:
            whole = self._join(conversation)
            if whole is None:
                parts = [self._encode_one(part, limits) for part in conversation.each_answer()]
                bad = next((part for part in parts if isinstance(part, BadRowError)), None)
                return bad or [sequence for part in parts if isinstance(part, list) for sequence in part]
            if len(whole.ids) <= limits.both:
                return [whole]
            last = len(conversation.turns) - 1
            places = range(1, last)
            first = 1 + bisect_left(places, 1, key=lambda place: self._has_room(conversation, place, limits))
            rest = conversation._replace(turns=conversation.turns[first:])
            if first == last:
                (found,) = self._encode_single([rest], limits)
                if isinstance(found, BadRowError):
                    return found
                return [sequence._replace(dropped=first) for sequence in found]
            shorter = self._join(rest)
            return [] if shorter is None else [shorter._replace(dropped=first)]
        except BadRowError as error:
            return error

    def _has_room(self, conversation: Conversation, first: int, limits: Limits) -> int:
        """Whether the conversation fits from this turn on."""
        rest = self._join(conversation._replace(turns=conversation.turns[first:]))
        return int(rest is not None and len(rest.ids) <= limits.both)

    def _join(self, conversation: Conversation) -> Encoded | None:
        """A conversation as one sequence; None where the chat template does not let its answers stand in one."""
        by_template = self.name == CHAT_TEMPLATE
        return self._join_by_template(conversation) if by_template else self._join_segments(conversation)

    def _join_segments(self, conversation: Conversation) -> Encoded:
        questions, answers = self._parts(conversation)
        encoded = self.encode_segments([*questions, *answers])
        count = len(questions)
        turns = conversation.turns[-count:]
        ids, spans, start = [], [], 0
        for turn, question, answer, over in zip(
            turns, encoded[:count], encoded[count:], [*[False] * (count - 1), True], strict=True
        ):
            ids += question
            start = len(ids)
            ids += answer
            if over or not self.format.open_ends:
                ids += self.end_ids
            if turn.trained:
                # An answer without an end mark is over where the next question's first token comes.
                spans.append((max(1, start), len(ids) + (not over and self.format.open_ends)))
        return Encoded(ids, tuple(spans), start, *_last(conversation))

    def _join_by_template(self, conversation: Conversation) -> Encoded | None:
        """With the tokenizer's own template: what it makes of more turns must begin with what it made of fewer."""
        asked = self._encode_messages(_dialogs(conversation))
        answers = self._encode_answers(
            [conversation.turns[number].answer for number in _places(conversation)]
        )
        whole, spans = asked[-1], []
        for prompt, answer in zip(asked[:-1], answers[:-1], strict=True):
            start = len(prompt)
            end = start + len(answer)
            over = set(whole[end : end + 1]) & self._marks
            if whole[:start] != prompt or whole[start:end] != answer or not over:
                return None
            spans.append((max(1, start), end + 1))
        ids = [*whole, *answers[-1], *self.end_ids]
        spans.append((max(1, len(whole)), len(ids)))
        return Encoded(ids, tuple(spans), len(whole), *_last(conversation))

    @property
    def _marks(self) -> set[int]:
        """Tokens that can end an answer: the end mark, and any that no text holds."""
        return {*self.end_ids, *self._added.values()}

    # The tokenizer's own chat template

    def _encode_messages(self, dialogs: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        """Ids of dialogs that wait for an answer, as the tokenizer's own template asks. Raises BadRowError."""
        encoded = self.encode_texts([self._rendered(messages) for messages in dialogs], split_special=False)
        for place, messages in enumerate(dialogs):
            if any(token in message["content"] for message in messages for token in self._added):
                encoded[place] = self._around(messages)
        return encoded

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        from jinja2 import TemplateError

        try:
            return str(
                self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            )
        except TemplateError as error:
            raise BadRowError(f"is refused by the chat template: {error}") from error

    def _around(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a dialog that holds the text of a special token: the template's are tokens, the user's stay text."""
        names = [f"{PLACEHOLDER}{place}-" for place in range(len(messages))]
        rest = self._rendered(
            [{**message, "content": name} for message, name in zip(messages, names, strict=True)]
        )
        ids: list[int] = []
        for name, message in zip(names, messages, strict=True):
            before, found, rest = rest.partition(name)
            if not found or name in rest:
                raise BadRowError(
                    "holds the text of a special token: the chat template changes what it frames, so it can't stay text"
                )
            ids += self.encode_texts([before], split_special=False)[0] if before else []
            ids += self.encode_texts([message["content"]])[0]
        return ids + (self.encode_texts([rest], split_special=False)[0] if rest else [])


def _question(conversation: Conversation, number: int) -> Question:
    turn = conversation.turns[number]
    return Question(turn.question, number, "" if number else conversation.system, turn.extra)


def _last(conversation: Conversation) -> tuple[str, str]:
    """The last question's whole text, and its answer."""
    turn = conversation.turns[-1]
    return Question(turn.question, extra=turn.extra).whole, turn.answer


def _messages(before: Sequence[Turn], question: Question, system: str = "") -> list[dict[str, str]]:
    system = system or question.system
    messages = [{"role": "system", "content": system}] if system else []
    for turn in before:
        asked = Question(turn.question, extra=turn.extra).whole
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": turn.answer}]
    return [*messages, {"role": "user", "content": question.whole}]


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Texts that follow one another as one."""
    found: list[Segment] = []
    for segment in segments:
        if found and isinstance(segment, str) and isinstance(found[-1], str):
            found[-1] += segment
        else:
            found.append(segment)
    return found


def _places(conversation: Conversation) -> list[int]:
    """The turns whose answers are trained on, and the last one."""
    last = len(conversation.turns) - 1
    return [number for number, turn in enumerate(conversation.turns) if turn.trained or number == last]


def _dialogs(conversation: Conversation) -> list[list[dict[str, str]]]:
    """The conversation up to each of these answers, as messages."""
    return [
        _messages(conversation.turns[:number], _question(conversation, number), conversation.system)
        for number in _places(conversation)
    ]


def _whole(sequence: Encoded) -> Encoded:
    """All of it trained on. A sequence's first token has nothing that it could be told from."""
    return sequence._replace(spans=((1, len(sequence.ids)),))
