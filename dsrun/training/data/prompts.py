"""Conversations as token ids, with one tokenizer in one prompt format.

Texts are encoded segment by segment with special tokens split, so that nothing a user writes can turn into a role or
an end mark.
"""

from __future__ import annotations

import itertools
import operator
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from dsrun.data.chat_templates import CHAT_TEMPLATE, OWN_FORMAT
from dsrun.data.conversations import BadRowError, Conversation
from dsrun.data.thoughts import AUTO, not_a_template
from dsrun.errors import DsrunError
from dsrun.training.data.prompt_formats import (
    BOS,
    FORMATS,
    Question,
    Segment,
    Special,
)


class Encoded(NamedTuple):
    """One sequence to train on."""

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    """Begin and end of each part that is trained on, in tokens."""
    prompt_tokens: int
    """Tokens before the last answer."""
    question: str | None
    """The last question's text; None in plain text, which has no answer either."""
    answer: str | None
    shortened: bool = False
    """The question's text lost its end."""
    cut: bool = False
    """The answer lost its end."""
    dropped: int = 0
    """Turns at the beginning that were left out to fit."""
    notes: tuple[str, ...] = ()
    """Names in dsrun.training.data.template_encoder.NOTES, one for each time that it is to be counted."""


class Exchange(NamedTuple):
    """A prompt and its answer in ids."""

    prompt: list[int]
    answer: list[int]
    """The answer with its end mark."""
    ends: int
    """Tokens of that mark."""
    notes: tuple[str, ...] = ()
    """As in Encoded."""


class Limits(NamedTuple):
    """Limits in tokens; a conversation of several turns has both together."""

    source: int
    """Tokens of a question in its frame."""
    target: int
    """Tokens of an answer with its end mark."""
    shared: bool = False
    """Whether a question may take what its answer leaves, and an answer what its question leaves."""

    def of(self, prompt: int, answer: int) -> Limits:
        """The limits of an exchange with as many tokens. Where both are too long, each keeps its own limit."""
        if not self.shared:
            return self
        source = max(self.source, self.both - answer)
        return Limits(source, max(self.target, self.both - min(prompt, source)))

    @property
    def both(self) -> int:
        """Tokens of a whole sequence."""
        return self.source + self.target


class PromptEncoder:
    """Encodes conversations with one tokenizer in one of FORMATS.

    Raises DsrunError for an unknown name or a special token that the vocabulary lacks. `encoder_for` makes the encoder
    of any name.
    """

    def __init__(self, tokenizer: Any, name: str) -> None:
        if name not in FORMATS:
            known = ", ".join([*FORMATS, CHAT_TEMPLATE, "auto"])
            raise DsrunError(f"unknown prompt format {name!r}", hint=f"Known: {known}")
        self.tokenizer, self.name, self.format = tokenizer, name, FORMATS[name]
        self._vocabulary: dict[str, int] = tokenizer.get_vocab()
        self._known: dict[tuple[str, bool], list[int]] = {}
        self.end_ids = self._special_ids(self.format.end) if self.format.end else self.end_of_text
        ((first, *_),) = self.encode_texts(["a"])
        gap = " " if str(tokenizer.convert_ids_to_tokens(first)).startswith("▁") else ""
        self.chat_template = self.format.chat_template(gap)

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which an answer is over: its end mark, and what may come in its place."""
        names = [name for special in self.format.stops for name in special.names if name in self._vocabulary]
        return list(dict.fromkeys([*self.end_ids, *(self._vocabulary[name] for name in names)]))

    @property
    def end_of_text(self) -> list[int]:
        """The token that ends a text. Raises DsrunError where there is none."""
        if self.tokenizer.eos_token_id is None:
            raise DsrunError("the tokenizer has no end-of-text token, so a response could never end")
        return [self.tokenizer.eos_token_id]

    def _special_ids(self, special: Special) -> list[int]:
        if special is BOS:
            return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        for name in special.names:
            if name in self._vocabulary:
                return [self._vocabulary[name]]
        what = f"the tokenizer has no token {special.names[0]!r}, which the prompt format {self.name} needs"
        raise DsrunError(what, hint="The folder's tokenizer is not this model's own.")

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
        fresh = dict(zip(new, encoded["input_ids"], strict=True))
        return [list(fresh[text] if text in fresh else self._known[text, split_special]) for text in texts]

    @contextmanager
    def _knowing(self, texts: Iterable[tuple[str, bool]]) -> Iterator[None]:
        """Encode texts all at once, which takes a fraction of the time, and remember them for a while."""
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
        encoded |= {mark: self._special_ids(mark) for mark in segments if isinstance(mark, Special)}
        return [[token for segment in row for token in encoded[segment]] for row in rows]

    # A question and its answer

    def ask(self, conversation: Conversation) -> list[int]:
        """Ids that ask for the conversation's last answer, whatever that is. Raises BadRowError."""
        whole = self._join_segments(conversation)
        return whole.ids[: whole.prompt_tokens]

    def encode_questions(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of each question in its frame."""
        return self.encode_segments([self.format.segments(question) for question in questions])

    def _prompt(self, conversation: Conversation) -> list[int]:
        """Ids that ask for the answer of a conversation of one turn. Raises BadRowError."""
        return self.encode_questions([_question(conversation, 0)])[0]

    def _exchanges(self, conversations: Sequence[Conversation]) -> list[Exchange | BadRowError]:
        """The exchange of each conversation of one turn, or the reason why it has none."""
        prompts = self.encode_questions([_question(conversation, 0) for conversation in conversations])
        answers = self.encode_segments([self.format.response(each.turns[0].answer) for each in conversations])
        return [
            Exchange(prompt, [*answer, *self.end_ids], len(self.end_ids))
            if conversation.is_plain
            else self._not_plain(conversation)
            for conversation, prompt, answer in zip(conversations, prompts, answers, strict=True)
        ]

    def _not_plain(self, conversation: Conversation) -> BadRowError:
        apart = any(turn.thoughts is not None for turn in conversation.turns)
        kind = "has thoughts apart from its answer" if apart else "uses tools"
        return BadRowError(f"{kind}, which the prompt format {self.name} has no words for")

    def _fit(self, conversation: Conversation, length: int, limit: int) -> list[int]:
        """The longest beginning of the question whose frame and text fit, found by halving.

        length: tokens of the whole prompt. Raises BadRowError where a system text takes all the room, and DsrunError
        where the frame does.
        """
        turn = conversation.turns[0]
        question = Question(turn.question, extra=turn.extra)

        def shortened(characters: int) -> Conversation:
            shorter = question.cut(characters)
            return conversation._replace(turns=(turn._replace(question=shorter.text, extra=shorter.extra),))

        def encoded(characters: int) -> list[int]:
            return self._prompt(shortened(characters))

        if len(encoded(0)) > limit:
            if conversation.system and len(self._prompt(shortened(0)._replace(system=""))) <= limit:
                raise BadRowError(f"has a system text that leaves no room for a question: {limit} tokens")
            if conversation.tools:
                raise BadRowError(f"has tools that leave no room for a question: {limit} tokens")
            hint = "Raise --max-length, or --max-source-length where it is given."
            raise DsrunError(f"the prompt format {self.name} alone takes more than {limit} tokens", hint=hint)
        # A guess by the share of tokens that may stay, since an encoding is dear. It is raised until it no longer fits;
        # then the place between the last that fits and the first that doesn't is halved.
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
        """The sequences of each conversation, or the reason why there is none.

        - One turn: the question is cut to limits.source tokens, the answer to limits.target. A question loses the end
        of the user's text, never its frame: the mark that tells the model to answer stays. A cut answer has no end
        mark. - Several turns: the oldest are left out until the rest has no more than both limits together. A rest of
        one turn is cut as such. - A conversation is one sequence in which every answer is trained on. Each answer gets
        its own sequence where the format puts earlier answers into the next question's text, or where a chat template
        writes them in another way once the conversation goes on.
        """
        rows: list[list[Encoded] | BadRowError] = [[] for _ in conversations]
        parts = [
            (place, part)
            for place, whole in enumerate(conversations)
            for part in (whole.each_answer() if self.format.inside else [whole.upto_trained])
        ]
        single = [(place, part) for place, part in parts if len(part.turns) == 1]
        several = [(place, part) for place, part in parts if len(part.turns) > 1]
        for group, encode in ((single, self._encode_single), (several, self._encode_several)):
            encoded = encode([part for _, part in group], limits)
            for (place, _), sequences in zip(group, encoded, strict=True):
                before = rows[place]
                if isinstance(sequences, BadRowError):
                    rows[place] = sequences
                elif isinstance(before, list):
                    before += sequences
        if not train_on_prompt:
            return rows
        # A sequence's first token follows from nothing: it is never trained on.
        return [
            row
            if isinstance(row, BadRowError)
            else [sequence._replace(spans=((1, len(sequence.ids)),)) for sequence in row]
            for row in rows
        ]

    def _encode_single(
        self, conversations: Sequence[Conversation], limits: Limits
    ) -> list[list[Encoded] | BadRowError]:
        """The sequence of each conversation of one turn."""
        rows: list[list[Encoded] | BadRowError] = []
        for conversation, exchange in zip(conversations, self._exchanges(conversations), strict=True):
            try:
                rows.append([self._within(conversation, exchange, limits)])
            except BadRowError as error:
                rows.append(error)
        return rows

    def _within(
        self, conversation: Conversation, exchange: Exchange | BadRowError, limits: Limits
    ) -> Encoded:
        """An exchange with what goes over the limits cut off. Raises BadRowError."""
        if isinstance(exchange, BadRowError):
            raise exchange
        prompt, answer = exchange.prompt, exchange.answer
        limits = limits.of(len(prompt), len(answer))
        shortened = len(prompt) > limits.source
        if shortened:
            prompt = self._fit(conversation, len(prompt), limits.source)
        # A cut answer is not over: trained with its end mark, the model would learn to stop in the middle.
        cut = len(answer) > limits.target
        if cut:
            answer = answer[: len(answer) - exchange.ends][: limits.target]
        ids = [*prompt, *answer]
        spans = ((max(1, len(prompt)), len(ids)),)
        return Encoded(
            ids, spans, len(prompt), *last_texts(conversation), shortened, cut, notes=exchange.notes
        )

    def _encode_several(
        self, conversations: Sequence[Conversation], limits: Limits
    ) -> list[list[Encoded] | BadRowError]:
        """The sequences of each conversation of more than one turn."""
        with self._knowing(self._texts(conversations)):
            return [self._encode_one(each, limits) for each in conversations]

    def _texts(self, conversations: Sequence[Conversation]) -> Iterator[tuple[str, bool]]:
        """The texts that `_join` encodes, each with whether special tokens in it are text."""
        for conversation in conversations:
            questions, answers = self._parts(conversation)
            segments = itertools.chain(*questions, *answers)
            yield from ((segment, True) for segment in segments if isinstance(segment, str))

    def _parts(self, conversation: Conversation) -> tuple[list[list[Segment]], list[list[Segment]]]:
        """The segments of each question and each answer; of one pair where the last question holds all before it."""
        turns = conversation.turns
        questions = [self.format.segments(_question(conversation, number)) for number in range(len(turns))]
        answers = [self.format.response(turn.answer) for turn in turns]
        if self.format.inside:
            before = itertools.chain.from_iterable(map(operator.add, questions, [*answers[:-1], []]))
            return [_merged(before)], answers[-1:]
        return questions, answers

    def _encode_one(self, conversation: Conversation, limits: Limits) -> list[Encoded] | BadRowError:
        """The sequences of a conversation of more than one turn, or the reason why there is none."""
        try:
            joined = self._join(conversation)
            parts = [conversation] if len(joined) == 1 else conversation.each_answer()
            sequences: list[Encoded] = []
            for part, whole in zip(parts, joined, strict=True):
                if len(part.turns) == 1:
                    exchange = Exchange(
                        whole.ids[: whole.prompt_tokens], whole.ids[whole.prompt_tokens :],
                        len(self.end_ids), whole.notes,
                    )  # fmt: skip
                    sequences.append(self._within(part, exchange, limits))
                elif len(whole.ids) <= limits.both:
                    sequences.append(whole)
                else:
                    sequences += self._without_oldest(part, limits)
        except BadRowError as error:
            return error
        return sequences

    def _without_oldest(self, conversation: Conversation, limits: Limits) -> list[Encoded]:
        """A conversation without its oldest turns: from the first turn on from which it fits. Raises BadRowError."""
        last = len(conversation.turns) - 1
        # A tool's result is no beginning: it belongs to the turn before.
        places = [place for place in range(1, last + 1) if not conversation.turns[place].results]
        inner = [place for place in places if place < last]
        # The later the beginning, the shorter the rest: the first place that has room is found by bisection. The last
        # turn alone is another matter, for it can be cut.
        first = bisect_left(inner, 1, key=lambda place: self._has_room(conversation, place, limits))
        if first == len(inner):
            if last not in places:
                raise BadRowError("is too long: what tools gave back can't be left out")
            (row,) = self._encode_single([conversation._replace(turns=conversation.turns[last:])], limits)
            if isinstance(row, BadRowError):
                raise row
            return [sequence._replace(dropped=last) for sequence in row]
        dropped = inner[first]
        rest = conversation._replace(turns=conversation.turns[dropped:])
        return [sequence._replace(dropped=dropped) for sequence in self._join(rest)]

    def _has_room(self, conversation: Conversation, first: int, limits: Limits) -> int:
        """1 where the conversation fits from this turn on, else 0: a key to bisect by."""
        rest = self._join(conversation._replace(turns=conversation.turns[first:]))
        return int(all(len(sequence.ids) <= limits.both for sequence in rest))

    def _join(self, conversation: Conversation) -> list[Encoded]:
        """A conversation as one sequence, or as one for each answer. Raises BadRowError."""
        if not conversation.is_plain:
            raise self._not_plain(conversation)
        return [self._join_segments(conversation)]

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
        return Encoded(ids, tuple(spans), start, *last_texts(conversation))


def _question(conversation: Conversation, number: int) -> Question:
    turn = conversation.turns[number]
    return Question(turn.question, number, "" if number else conversation.system, turn.extra)


def last_texts(conversation: Conversation) -> tuple[str, str]:
    """The last question's whole text, and its answer."""
    turn = conversation.turns[-1]
    return Question(turn.question, extra=turn.extra).whole, turn.answer


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """The segments, with texts that follow one another made one."""
    merged: list[Segment] = []
    for segment in segments:
        if merged and isinstance(segment, str) and isinstance(merged[-1], str):
            merged[-1] += segment
        else:
            merged.append(segment)
    return merged


def encoder_for(
    tokenizer: Any, name: str, thinking: str = AUTO, arguments: Mapping[str, Any] | None = None
) -> PromptEncoder:
    """The encoder of a prompt format.

    name: a key of FORMATS, "chat-template" (the tokenizer's own) or "auto" (its own if it has one, else "plain").
    thinking, arguments: those of TemplateEncoder. Raises DsrunError as the encoders do, and for either of the two with
    a format that has no use for them.
    """
    from dsrun.training.data.template_encoder import TemplateEncoder

    if name == CHAT_TEMPLATE or (name == OWN_FORMAT and tokenizer.chat_template):
        return TemplateEncoder(tokenizer, thinking, arguments)
    name = "plain" if name == OWN_FORMAT else name
    if thinking != AUTO or arguments:
        raise not_a_template(name, arguments or {})
    return PromptEncoder(tokenizer, name)
