"""Prompt formats: how a talk becomes token ids.

A format is a function from a question to segments. A segment is a text, or a `Special`: one token looked up by name.
Texts are encoded segment by segment with special tokens split, so that nothing a user writes can turn into a role or
an end mark. Every segment is encoded by itself, which with SentencePiece models gives each a "▁" of its own.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from dsrun.errors import DsrunError
from dsrun.talks import BadRowError, Round, Talk


class Special(NamedTuple):
    """A special token, by the names it has in different checkpoints; the first that the vocabulary holds counts."""

    names: tuple[str, ...]


Segment = str | Special
BOS = Special(("<bos>",))
"""Stands for the tokenizer's own beginning-of-text token, or for nothing where it has none."""


class Ask(NamedTuple):
    """A question in its place. number: of its round, from 0. system: of the talk, with its first question only.

    extra: what the question is about; a format that has no place for it puts it on the next line.
    """

    text: str
    number: int = 0
    system: str = ""
    extra: str = ""

    @property
    def question(self) -> str:
        """The text and what it is about."""
        return f"{self.text}\n{self.extra}" if self.extra else self.text

    def cut(self, characters: int) -> Ask:
        """The question with only so many characters, from its beginning."""
        return self._replace(
            text=self.text[:characters], extra=self.extra[: max(0, characters - len(self.text))]
        )


@dataclass(frozen=True)
class PromptFormat:
    """segments: question -> segments; response: answer -> segments; end: the token that ends an answer.

    inside: earlier answers are part of the next question's text, so that only a sequence's last one can be trained on.
    open_ends: an answer that is not the last has no end mark, the next question's first token ends it. stops: tokens
    that end an answer beside the end mark.
    chat_template: the same frame in Jinja, for an exported tokenizer that has none of its own, so that
    `apply_chat_template` and pipelines ask the way the model was trained.
    """

    segments: Callable[[Ask], list[Segment]]
    chat_template: str
    response: Callable[[str], list[Segment]] = lambda text: [text]
    end: Special | None = None
    inside: bool = False
    open_ends: bool = False
    stops: tuple[Special, ...] = ()


_NO_GAP, _GAP = "{% set gap = '' %}", "{% set gap = ' ' %}"


def _template(
    user: str,
    *,
    before: str = "",
    assistant: str = "{{ gap + message.content }}",
    ask: str = "",
    end: str = "{{ eos_token }}",
) -> str:
    """A chat template: what stands before the talk, around a user's text, around an answer and behind it.

    The first message's text, where it is the system's, is taken out of the talk and has the name `system`. `gap` stands
    where a text begins that is encoded by itself: it is the space that SentencePiece models put in front of each.
    """
    return (
        _NO_GAP + "{% if messages and messages[0].role == 'system' %}"
        "{% set system = messages[0].content %}{% set messages = messages[1:] %}"
        "{% else %}{% set system = '' %}{% endif %}"
        + before
        + "{% for message in messages %}{% if message.role == 'user' %}"
        + user
        + "{% elif message.role == 'assistant' %}"
        + assistant
        + end
        + "{% endif %}{% endfor %}"
        + (f"{{% if add_generation_prompt %}}{ask}{{% endif %}}" if ask else "")
    )


_TEMPLATE_BOS = "{{ bos_token if bos_token else '' }}"
_TEMPLATE_LAST = "{% if loop.last %}{{ eos_token }}{% endif %}"


def _plain(ask: Ask) -> list[Segment]:
    system = f"{ask.system}\n" if ask.system else ""
    return [*([BOS] if ask.number == 0 else []), f"{system}{ask.question}\n"]


_GMASK = (Special(("[gMASK]",)), Special(("sop", "<sop>")))
_SYSTEM, _USER, _ASSISTANT, _OBSERVATION = (
    Special((f"<|{name}|>",)) for name in ("system", "user", "assistant", "observation")
)


def _chatglm2(ask: Ask) -> list[Segment]:
    text = f"[Round {ask.number + 1}]\n\n问：{ask.question}\n\n答："
    if ask.number:
        return [f"\n\n{text}"]
    return [*_GMASK, f"{ask.system}\n\n{text}" if ask.system else text]


def _roles(ask: Ask) -> list[Segment]:
    before: list[Segment] = [] if ask.number else [*_GMASK]
    if ask.system:
        before += [_SYSTEM, "\n", ask.system]
    return [*before, _USER, "\n", ask.question, _ASSISTANT]


_ROLES_TEMPLATE = _template(
    "<|user|>{{ '\n' + gap + message.content }}",
    before="[gMASK]<sop>{% if system %}<|system|>{{ '\n' + gap + system }}{% endif %}",
    assistant="<|assistant|>{{ '\n' + gap + message.content }}",
    ask="<|assistant|>",
    end=_TEMPLATE_LAST,
)

_ROLES_FORMAT = PromptFormat(
    _roles,
    _ROLES_TEMPLATE,
    response=lambda text: ["\n", text],
    open_ends=True,
    stops=(_USER, _OBSERVATION),
)


def _llama2(ask: Ask) -> list[Segment]:
    system = f"<<SYS>>\n{ask.system}\n<</SYS>>\n\n" if ask.system else ""
    return [BOS, f"[INST] {system}{ask.question} [/INST]"]


_START, _END, _EOT = (Special((f"<|{name}|>",)) for name in ("start_header_id", "end_header_id", "eot_id"))


def _llama3(ask: Ask) -> list[Segment]:
    system: list[Segment] = [_START, "system", _END, f"\n\n{ask.system}", _EOT] if ask.system else []
    user: list[Segment] = [_START, "user", _END, f"\n\n{ask.question}", _EOT]
    return [*([] if ask.number else [BOS]), *system, *user, _START, "assistant", _END, "\n\n"]


def _alpaca(ask: Ask) -> list[Segment]:
    system = f"{ask.system}\n\n" if ask.system else ""
    extra = f"\n\n### Input:\n{ask.extra}" if ask.extra else ""
    text = f"{system}### Instruction:\n{ask.text}{extra}\n\n### Response:\n"
    return [text] if ask.number else [BOS, text]


FORMATS = {
    "plain": PromptFormat(
        _plain,
        _template(
            "{{ message.content }}\n", before=_TEMPLATE_BOS + "{% if system %}{{ system + '\n' }}{% endif %}"
        ),
    ),
    "chatglm2": PromptFormat(
        _chatglm2,
        _template(
            "{{ '' if loop.first else '\n\n' }}[Round {{ loop.index0 // 2 + 1 }}]\n\n问：{{ message.content }}\n\n答：",
            before="[gMASK]<sop>{% if system %}{{ system + '\n\n' }}{% endif %}",
            assistant="{{ message.content }}",
            end=_TEMPLATE_LAST,
        ),
        inside=True,
    ),
    "chatglm3": _ROLES_FORMAT,
    "glm-4": _ROLES_FORMAT,
    "llama-2": PromptFormat(
        _llama2,
        _template(
            "{{ bos_token }}[INST] {% if loop.first and system %}"
            "{{ '<<SYS>>\n' + system + '\n<</SYS>>\n\n' }}{% endif %}{{ message.content }} [/INST]",
        ),
    ),
    "llama-3": PromptFormat(
        _llama3,
        _template(
            "<|start_header_id|>user<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
            before="{{ bos_token }}{% if system %}<|start_header_id|>system<|end_header_id|>"
            "{{ '\n\n' + system }}<|eot_id|>{% endif %}",
            assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{{ gap + message.content }}",
            ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
            end="<|eot_id|>",
        ),
        end=_EOT,
    ),
    "alpaca": PromptFormat(
        _alpaca,
        _template(
            "### Instruction:\n{{ message.content }}\n\n### Response:\n",
            before=_TEMPLATE_BOS + "{% if system %}{{ system + '\n\n' }}{% endif %}",
        ),
    ),
}
CHAT_TEMPLATE = "chat-template"
PLACEHOLDER = "dsrun-places-a-text-here-"


class Encoded(NamedTuple):
    """One sequence to train on.

    spans: where what is trained on begins and ends (in tokens). prompt_tokens: those before the last answer.
    shortened: the question's text was; cut: the answer was; dropped: rounds that were left out to fit.
    """

    ids: list[int]
    spans: tuple[tuple[int, int], ...]
    prompt_tokens: int
    question: str
    answer: str
    shortened: bool = False
    cut: bool = False
    dropped: int = 0


class Limits(NamedTuple):
    """Tokens of a question in its frame, and of an answer with its end mark; a talk has both together."""

    source: int
    target: int

    @property
    def both(self) -> int:
        """Tokens of a whole sequence."""
        return self.source + self.target


class PromptEncoder:
    """Turns rows into ids with one tokenizer and one format.

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
            self.format = PromptFormat(lambda ask: [ask.question], tokenizer.chat_template)
        elif name in FORMATS:
            self.format = FORMATS[name]
        else:
            known = ", ".join([*FORMATS, CHAT_TEMPLATE, "auto"])
            raise DsrunError(f"unknown prompt format {name!r}", hint=f"Known: {known}")
        self.end_ids = self._special_ids(self.format.end) if self.format.end else self._eos_ids()
        self._known: dict[tuple[str, bool], list[int]] = {}
        ((first, *_),) = self.encode_texts(["a"])
        if str(tokenizer.convert_ids_to_tokens(first)).startswith("▁"):
            template = self.format.chat_template.replace(_NO_GAP, _GAP)
            self.format = replace(self.format, chat_template=template)

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which an answer is over: its end mark, and what may come in its place."""
        found = [name for special in self.format.stops for name in special.names if name in self._vocabulary]
        return [*self.end_ids, *(self._vocabulary[name] for name in found)]

    def _eos_ids(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise DsrunError("the tokenizer has no end-of-text token, so a response could never end")
        return [self.tokenizer.eos_token_id]

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
                sorted(set(texts), key=itemgetter(1)), itemgetter(1)
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

    def encode_prompts(self, prompts: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each prompt in its frame, and how many had to be shortened.

        A prompt longer than `limit` tokens (frame included) loses the end of the user's text, never the frame:
        the mark that tells the model to answer stays.
        """
        asks = [Ask(prompt) for prompt in prompts]
        encoded = self._encode_asks(asks)
        long = [place for place, ids in enumerate(encoded) if len(ids) > limit]
        for place in long:
            encoded[place] = self._fit(asks[place], len(encoded[place]), limit)
        return encoded, len(long)

    def encode_responses(self, responses: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each response with its end mark, and how many were cut to `limit` tokens (end mark included)."""
        rows = self._encode_answers(responses)
        room = limit - len(self.end_ids)
        return [ids[:room] + self.end_ids for ids in rows], sum(len(ids) > room for ids in rows)

    def _encode_answers(self, answers: Sequence[str]) -> list[list[int]]:
        return self.encode_segments([self.format.response(answer) for answer in answers])

    def _encode_asks(self, asks: Sequence[Ask]) -> list[list[int]]:
        if self.name != CHAT_TEMPLATE:
            return self.encode_segments([self.format.segments(ask) for ask in asks])
        return self._encode_messages([_messages((), ask) for ask in asks])

    def _fit(self, ask: Ask, length: int, limit: int) -> list[int]:
        """The longest beginning of the question whose frame and text fit, found by halving."""

        def encoded(characters: int) -> list[int]:
            return self._encode_asks([ask.cut(characters)])[0]

        if len(encoded(0)) > limit:
            if ask.system and len(self._encode_asks([ask.cut(0)._replace(system="")])[0]) <= limit:
                raise BadRowError(f"has a system text that leaves no room for a question: {limit} tokens")
            raise DsrunError(
                f"the prompt format {self.name} alone takes more than {limit} tokens",
                hint="Raise --max-source-length.",
            )
        whole = len(ask.text) + len(ask.extra)
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

    # Talks

    def encode_talks(
        self, talks: Sequence[Talk], limits: Limits, *, train_on_prompt: bool = False
    ) -> list[list[Encoded] | BadRowError]:
        """The sequences of each talk, or why there is none.

        One round: the question is cut to limits.source and the answer to limits.target. More rounds: the oldest are
        left out until the rest has no more than both together; what is one round then is cut as one. A talk is one
        sequence in which every answer is trained on; where the format puts earlier answers into the next question's
        text, or a chat template writes them in another way once the talk goes on, each answer gets its own sequence.
        """
        found: list[list[Encoded] | BadRowError] = [[] for _ in talks]
        parts: list[tuple[int, Talk]] = []
        for place, talk in enumerate(talks):
            apart = self.format.inside
            parts += [(place, part) for part in (talk.each_answer() if apart else [talk.upto_trained])]
        single = [(place, part) for place, part in parts if len(part.rounds) == 1]
        several = [(place, part) for place, part in parts if len(part.rounds) > 1]
        for group, encode in ((single, self._encode_rounds), (several, self._encode_several)):
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

    def _encode_rounds(self, talks: Sequence[Talk], limits: Limits) -> list[list[Encoded] | BadRowError]:
        """Talks of one round."""
        asks = [_ask(talk, 0) for talk in talks]
        rounds = [talk.rounds[0] for talk in talks]
        prompts = self._tried(lambda chosen: self._encode_asks([asks[place] for place in chosen]), len(asks))
        answers = self._encode_answers([spoken.answer for spoken in rounds])
        room = limits.target - len(self.end_ids)
        found: list[list[Encoded] | BadRowError] = []
        for ask, spoken, prompt, answer in zip(asks, rounds, prompts, answers, strict=True):
            if isinstance(prompt, BadRowError):
                found.append(prompt)
                continue
            shortened = len(prompt) > limits.source
            try:
                ids = self._fit(ask, len(prompt), limits.source) if shortened else prompt
            except BadRowError as error:
                found.append(error)
                continue
            start, cut = len(ids), len(answer) > room
            ids = [*ids, *(answer[:room] if cut else answer), *self.end_ids]
            spans = ((max(1, start), len(ids)),)
            found.append([Encoded(ids, spans, start, ask.question, spoken.answer, shortened, cut)])
        return found

    @staticmethod
    def _tried(
        encode: Callable[[Sequence[int]], list[list[int]]], count: int
    ) -> list[list[int] | BadRowError]:
        """All at once; where one of them can't be encoded, one by one."""
        try:
            return list(encode(range(count)))
        except BadRowError:
            found: list[list[int] | BadRowError] = []
            for place in range(count):
                try:
                    found += encode([place])
                except BadRowError as error:
                    found.append(error)
            return found

    def _encode_several(self, talks: Sequence[Talk], limits: Limits) -> list[list[Encoded] | BadRowError]:
        """Talks of more than one round."""
        with self._knowing(text for talk in talks for text in self._texts(talk)):
            return [self._encode_talk(talk, limits) for talk in talks]

    def _texts(self, talk: Talk) -> list[tuple[str, bool]]:
        """What `_join` encodes of a talk, each with whether special tokens in it are text."""
        answers = [self.format.response(spoken.answer) for spoken in talk.rounds]
        if self.name == CHAT_TEMPLATE:
            try:
                rendered = [(self._rendered(messages), False) for messages in _dialogs(talk)]
            except BadRowError:
                return []
            return [
                *rendered,
                *((text, True) for answer in answers for text in answer if isinstance(text, str)),
            ]
        if self.format.inside:
            segments = [*self._inside(talk), *answers[-1]]
        else:
            questions = [self.format.segments(_ask(talk, number)) for number in range(len(talk.rounds))]
            segments = [segment for part in (*questions, *answers) for segment in part]
        return [(segment, True) for segment in segments if isinstance(segment, str)]

    def _inside(self, talk: Talk) -> list[Segment]:
        """The last question's segments, with all that was said before it in their text."""
        found: list[Segment] = []
        for number, spoken in enumerate(talk.rounds):
            found += self.format.segments(_ask(talk, number))
            if number < len(talk.rounds) - 1:
                found += self.format.response(spoken.answer)
        return _merged(found)

    def _encode_talk(self, talk: Talk, limits: Limits) -> list[Encoded] | BadRowError:
        if len(talk.rounds) == 1:
            return self._encode_rounds([talk], limits)[0]
        try:
            whole = self._join(talk)
            if whole is None:
                parts = [self._encode_talk(part, limits) for part in talk.each_answer()]
                bad = next((part for part in parts if isinstance(part, BadRowError)), None)
                return bad or [sequence for part in parts if isinstance(part, list) for sequence in part]
            if len(whole.ids) <= limits.both:
                return [whole]
            last = len(talk.rounds) - 1
            places = range(1, last)
            first = 1 + bisect_left(places, 1, key=lambda place: self._has_room(talk, place, limits))
            rest = talk._replace(rounds=talk.rounds[first:])
            if first == last:
                (found,) = self._encode_rounds([rest], limits)
                if isinstance(found, BadRowError):
                    return found
                return [sequence._replace(dropped=first) for sequence in found]
            shorter = self._join(rest)
            return [] if shorter is None else [shorter._replace(dropped=first)]
        except BadRowError as error:
            return error

    def _has_room(self, talk: Talk, first: int, limits: Limits) -> int:
        """Whether the talk fits from this round on."""
        rest = self._join(talk._replace(rounds=talk.rounds[first:]))
        return int(rest is not None and len(rest.ids) <= limits.both)

    def _join(self, talk: Talk) -> Encoded | None:
        """A talk as one sequence; None where the chat template does not let its answers stand in one."""
        if self.name == CHAT_TEMPLATE:
            return self._join_by_template(talk)
        last = talk.rounds[-1]
        if self.format.inside:
            prompt, answer = self.encode_segments([self._inside(talk), self.format.response(last.answer)])
            ids = [*prompt, *answer, *self.end_ids]
            question = _ask(talk, len(talk.rounds) - 1).question
            return Encoded(ids, ((len(prompt), len(ids)),), len(prompt), question, last.answer)
        asks = [_ask(talk, number) for number in range(len(talk.rounds))]
        questions = [self.format.segments(ask) for ask in asks]
        answers = [self.format.response(spoken.answer) for spoken in talk.rounds]
        encoded = self.encode_segments([*questions, *answers])
        ids, spans, start = [], [], 0
        for number, spoken in enumerate(talk.rounds):
            over = number == len(asks) - 1
            ids += encoded[number]
            start = len(ids)
            ids += encoded[len(asks) + number]
            if over or not self.format.open_ends:
                ids += self.end_ids
            if spoken.trained:
                # An answer without an end mark is over where the next question's first token comes.
                spans.append((max(1, start), len(ids) + (not over and self.format.open_ends)))
        return Encoded(ids, tuple(spans), start, asks[-1].question, last.answer)

    def _join_by_template(self, talk: Talk) -> Encoded | None:
        """With the tokenizer's own template: what it makes of the talk must begin with what it made of it before."""
        asked = self._encode_messages(_dialogs(talk))
        answers = self._encode_answers([talk.rounds[number].answer for number in _places(talk)])
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
        last = talk.rounds[-1]
        question = _ask(talk, len(talk.rounds) - 1).question
        return Encoded(ids, tuple(spans), len(whole), question, last.answer)

    @property
    def _marks(self) -> set[int]:
        """Tokens that can end an answer: the end mark, and any that no text holds."""
        return {*self.end_ids, *self._added.values()}

    # The tokenizer's own chat template

    def _encode_messages(self, dialogs: Sequence[list[dict[str, str]]]) -> list[list[int]]:
        """Ids of talks that wait for an answer, as the tokenizer's own template asks. Raises BadRowError."""
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
        """Ids of a talk that holds the text of a special token: the template's are tokens, the user's stay text."""
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


def _ask(talk: Talk, number: int) -> Ask:
    spoken = talk.rounds[number]
    return Ask(spoken.question, number, "" if number else talk.system, spoken.extra)


def _messages(before: Sequence[Round], ask: Ask, system: str = "") -> list[dict[str, str]]:
    system = system or ask.system
    messages = [{"role": "system", "content": system}] if system else []
    for spoken in before:
        question = Ask(spoken.question, extra=spoken.extra).question
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": spoken.answer}]
    return [*messages, {"role": "user", "content": ask.question}]


def _merged(segments: Iterable[Segment]) -> list[Segment]:
    """Texts that follow one another as one."""
    found: list[Segment] = []
    for segment in segments:
        if found and isinstance(segment, str) and isinstance(found[-1], str):
            found[-1] += segment
        else:
            found.append(segment)
    return found


def _places(talk: Talk) -> list[int]:
    """The rounds whose answers are trained on, and the last one."""
    last = len(talk.rounds) - 1
    return [number for number, spoken in enumerate(talk.rounds) if spoken.trained or number == last]


def _dialogs(talk: Talk) -> list[list[dict[str, str]]]:
    """The talk up to each of these answers, as messages."""
    return [_messages(talk.rounds[:number], _ask(talk, number), talk.system) for number in _places(talk)]


def _whole(sequence: Encoded) -> Encoded:
    """All of it trained on. A sequence's first token has nothing that it could be told from."""
    return sequence._replace(spans=((1, len(sequence.ids)),))
