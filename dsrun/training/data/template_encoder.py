"""Conversations as the tokenizer's own chat template writes them.

Each answer is rendered twice: the prompt, as a server sends it, and the answered conversation. The prompt's tokens are
never trained on. All that the template puts behind them is, up to and with the mark that ends the answer. So a line
break, an empty thought or a trimmed text comes out as it will at the server, whatever the family.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from dsrun.data import thoughts
from dsrun.data.chat_templates import CHAT_TEMPLATE, OWN_FORMAT
from dsrun.data.conversations import BadRowError, Conversation, Turn
from dsrun.data.thoughts import OFF, ON, WITH_THOUGHTS, WITHOUT_THOUGHTS
from dsrun.errors import DsrunError
from dsrun.files import read_text
from dsrun.job.job import Job
from dsrun.training.data.prompt_formats import PromptFormat, Question
from dsrun.training.data.prompts import Encoded, Exchange, PromptEncoder, last_texts

PROBE = "dsrun-places-a-text-here"
LEFT_OUT, RESTORED, APART = "thoughts_left_out", "thoughts_restored", "borders_apart"
NOTES = (WITH_THOUGHTS, WITHOUT_THOUGHTS, LEFT_OUT, RESTORED, APART)
"""Keys of the report that count answers: with and without thoughts, where the template knows thoughts; those that lost
theirs to --thinking off; those whose thoughts the template drops or the prompt begins, so that they are written as the
prompt asks; those whose first token would be joined with the prompt's last one in a whole text."""
STAND_IN = "\ue0f0{}\ue0f1"
"""Stands for the text of a special token in the data while the template works with it: no special token has such
letters (of Unicode's private use), and no row may."""
PROBE_CALL = {"type": "function", "function": {"name": "probe", "arguments": {"text": PROBE}}}
BROKEN = (TypeError, ValueError, KeyError, AttributeError, IndexError)
"""Errors of a template, beside Jinja's own, for a message of a form that it wasn't written for."""


class Written(NamedTuple):
    """One answer in its conversation, as the template writes it, with stand-ins."""

    prompt: str
    whole: str
    """The prompt and the model's answer, with the mark that ends it."""
    ended: bool
    """Whether that mark is there; else an end-of-text token has to follow."""
    notes: tuple[str, ...]


class Strips(NamedTuple):
    """Marks that take along the white space on their left, or on their right."""

    left: frozenset[str]
    right: frozenset[str]


class TemplateEncoder(PromptEncoder):
    """Encodes conversations with a tokenizer and its own chat template.

    thinking: "on", "off", or "auto", as each answer has it. arguments: those of the template in each rendering.
    Raises DsrunError for a tokenizer without a template, a template that can't be used, arguments that it doesn't read,
    and thinking that it can't switch.
    """

    def __init__(
        self, tokenizer: Any, thinking: str = thoughts.AUTO, arguments: Mapping[str, Any] | None = None
    ) -> None:
        from jinja2 import TemplateError

        if not tokenizer.chat_template:
            raise DsrunError("the tokenizer has no chat template", hint="Choose another prompt format.")
        self.tokenizer, self.name = tokenizer, CHAT_TEMPLATE
        self.format = PromptFormat(question=("{question}",))
        self.chat_template = tokenizer.chat_template
        self._known = {}
        self._vocabulary = tokenizer.get_vocab()
        try:
            self.facts = thoughts.facts_of(str(tokenizer.get_chat_template()))
        except (TemplateError, ValueError) as error:
            raise DsrunError(f"the chat template can't be used: {error}") from error
        self._arguments = dict(arguments or {})
        thoughts.check_arguments(self.facts, thinking, self._arguments)
        if self.facts.switch in self._arguments:
            thinking = ON if self._arguments[self.facts.switch] else OFF
        self._thinking = thinking
        self._written_before: dict[int, list[Written]] = {}
        self._unusable: DsrunError | None = None
        self._contents_are_lists = self._arguments_are_texts = False
        self._tail = self._following = ""
        added = {str(token): token.special for token in tokenizer.added_tokens_decoder.values()}
        self._set_marks([text for text, special in added.items() if special])
        self.end_ids = self.end_of_text
        self._find_end(list(added))

    def _set_marks(self, marks: Sequence[str]) -> None:
        """The tokens that only the template may write, the longest first."""
        self._marks = sorted(filter(None, marks), key=len, reverse=True)
        self._any_mark = re.compile("|".join(map(re.escape, self._marks)) or "(?!)")
        for cached in ("_numbers", "_plain_marks", "_any_mark_apart", "_marks_divide"):
            self.__dict__.pop(cached, None)

    def _find_end(self, added: Sequence[str]) -> None:
        """Find the mark that ends an answer. Where the template writes no answer behind its prompt, prompts can be made
        all the same, but nothing can be trained on: `_unusable` has the reason."""
        # PROBE is an answer that is easy to find again. As the last one it is followed by the mark that ends it, where
        # there is one; with a question behind it, also by the first mark of the next turn.
        talk = Conversation((Turn("a", PROBE), Turn("b", "c")))
        self._find_forms(talk)
        try:
            prompt = self._rendered(talk, 0, self._switched(talk.turns[0]), answered=False)
            last = self._rendered(talk, 0, self._switched(talk.turns[0]), answered=True)
            between = self._rendered(talk, 1, self._switched(talk.turns[1]), answered=True)
        except BadRowError:
            return  # it refuses so plain a conversation: the rows' own errors will say why
        try:
            spoken = thoughts.continuation(prompt, last, talk.turns[0], self.facts.marks).text
        except BadRowError as error:
            self._unusable = DsrunError(f"a conversation {error}", hint="Name another --chat-template.")
            return
        if PROBE not in spoken:
            end = spoken[-thoughts.EXCERPT_CHARACTERS :]
            what = f"the chat template writes no answer behind its prompt, but {end!r}"
            self._unusable = DsrunError(what, hint="Name another --chat-template.")
            return
        end, after = last.partition(PROBE)[2], between.partition(PROBE)[2]
        # A mark need not be a special token. Even so nobody but the template may write it.
        plain = [text for text in added if text not in self._marks]
        ends = [text for text in plain for part in (end, after) if part.lstrip().startswith(text)]
        self._set_marks([*self._marks, *ends])
        self._tail = end if self._any_mark.search(end) else ""
        if not self._tail and after.startswith(end):
            # Nothing ends the answer but the next turn's first mark, at which a server stops.
            self._following = self._first_mark(after[len(end) :])
        ids = self._exchange(self._written(talk._replace(turns=talk.turns[:1]))).answer
        self.end_ids = ids[-1:]

    def _find_forms(self, talk: Conversation) -> None:
        """Find the forms in which the template takes a message's content, and the arguments of a call.

        Templates of models that see images go through a list of parts; DeepSeek's add the arguments to a text.
        """
        self._contents_are_lists = not self._shows(talk, PROBE)
        self._contents_are_lists &= self._shows(talk, PROBE, _contents_are_lists=True)
        called = Conversation((Turn("a", "", calls=(PROBE_CALL,)),))
        shown = self._shows(called, PROBE) and not self._shows(called, f"': '{PROBE}'")  # as Python writes it
        self._arguments_are_texts = not shown and self._shows(called, PROBE, _arguments_are_texts=True)

    def _shows(self, conversation: Conversation, text: str, **forms: bool) -> bool:
        """Whether a text is in the answered conversation, with the messages in these forms."""
        before = {name: getattr(self, name) for name in forms}
        self.__dict__.update(forms)
        try:
            arguments = self._switched(conversation.turns[0])
            return text in self._rendered(conversation, 0, arguments, answered=True)
        except BadRowError:
            return False
        finally:
            self.__dict__.update(before)

    def _first_mark(self, text: str) -> str:
        """The mark that a text begins with, and the white space before it; empty where it begins with neither."""
        rest = text.lstrip()
        mark = self._any_mark.match(rest)
        return text[: len(text) - len(rest)] + mark.group() if mark else ""

    def _upto_mark(self, text: str) -> str | None:
        """An answer up to the mark that ends it, without the template's text behind it; None: it has no such mark.

        Phi-3's template ends an answer with <|end|>, and the conversation with a line break and the end of text.
        """
        if self._tail and text.endswith(self._tail):
            mark = self._any_mark.search(self._tail)
            return text[: len(text) - len(self._tail) + mark.end()] if mark else None
        return text.rstrip() if text.rstrip().endswith(tuple(self._marks)) else None

    def _mark_of_next(self, conversation: Conversation, number: int, answered: str) -> str:
        """The mark that begins the turn behind an answer. Behind a call it is that of a tool's turn."""
        turn = conversation.turns[number]
        if not turn.calls:
            return self._following
        call = turn.calls[0]
        result = {"role": "tool", "content": PROBE, "name": call["function"]["name"]}
        result |= {"tool_call_id": call["id"]} if "id" in call else {}
        tool_turn = Turn("", "", results=(result,))
        longer = conversation._replace(turns=(*conversation.turns[: number + 1], tool_turn))
        following = self._rendered(longer, number + 1, self._switched(turn), answered=False)
        return self._first_mark(following[len(answered) :]) if following.startswith(answered) else ""

    @property
    def stop_ids(self) -> list[int]:
        """Tokens at which an answer is over: the template's mark, and the end of a text."""
        return list(dict.fromkeys([*self.end_ids, *self.end_of_text]))

    # Texts

    def _switched(self, turn: Turn) -> dict[str, Any]:
        """The template's arguments for an example with this answer."""
        if self.facts.switch is None:
            return self._arguments
        has_thoughts = thoughts.separated(turn, self.facts).thoughts is not None
        on = has_thoughts if self._thinking == thoughts.AUTO else self._thinking == ON
        return {**self._arguments, self.facts.switch: on}

    def _rendered(
        self, conversation: Conversation, number: int, arguments: Mapping[str, Any], *, answered: bool
    ) -> str:
        """The conversation up to a turn's question, or its answer, with stand-ins. Raises BadRowError."""
        from jinja2 import TemplateError

        messages = self._messages(conversation, number, answered=answered)
        tools = [self._protected(tool) for tool in conversation.tools] or None
        try:
            return str(
                self.tokenizer.apply_chat_template(
                    messages, tools=tools, tokenize=False, add_generation_prompt=not answered, **arguments
                )
            )
        except (TemplateError, *BROKEN) as error:
            raise BadRowError(f"is refused by the chat template: {error}") from error

    def _messages(self, conversation: Conversation, number: int, *, answered: bool) -> list[dict[str, Any]]:
        system = self._protected(conversation.system)
        messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        for place, turn in enumerate(conversation.turns[: number + 1]):
            messages += [self._protected(result) for result in turn.results]
            if turn.question or not turn.results:
                whole = Question(turn.question, extra=turn.extra).whole
                messages.append({"role": "user", "content": self._protected(whole)})
            if place < number or answered:
                message = thoughts.answer_message(self._spoken(turn), self.facts)
                messages.append({**self._protected(message, self.facts.marks or ()), "role": "assistant"})
        return [self._in_form(message) for message in messages]

    def _in_form(self, message: dict[str, Any]) -> dict[str, Any]:
        if self._contents_are_lists:
            message = {**message, "content": [{"type": "text", "text": message["content"]}]}
        if self._arguments_are_texts and "tool_calls" in message:
            calls = []
            for call in message["tool_calls"]:
                arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
                calls.append({**call, "function": {**call["function"], "arguments": arguments}})
            message = {**message, "tool_calls": calls}
        return message

    def _spoken(self, turn: Turn) -> Turn:
        """The turn in the template's form: thoughts in a key of their own where it reads one, or knows no marks.

        A template that reads a key need not look for thoughts in the content.
        """
        if self._thinking == OFF:
            return thoughts.separated(turn, self.facts)._replace(thoughts=None)
        apart = self.facts.fields or self.facts.marks is None
        return thoughts.separated(turn, self.facts) if apart else turn

    def _protected(self, value: Any, kept: Sequence[str] = ()) -> Any:
        """A user's value with stand-ins for the marks in its texts, but for those that are kept."""

        def stand_in(mark: re.Match[str]) -> str:
            return mark[0] if mark[0] in kept else STAND_IN.format(self._marks.index(mark[0]))

        if isinstance(value, str):
            if STAND_IN[0] in value:
                letter = f"U+{ord(STAND_IN[0]):04X}"
                raise BadRowError(f"holds a letter of private use that dsrun needs itself: {letter}")
            return self._any_mark.sub(stand_in, value)
        if isinstance(value, Mapping):
            return {key: self._protected(entry, kept) for key, entry in value.items()}
        return [self._protected(entry, kept) for entry in value] if isinstance(value, list) else value

    def _written(self, conversation: Conversation, number: int | None = None) -> Written:
        """The conversation up to a turn's answer (by default the last one's).

        Raises BadRowError, and DsrunError where the template writes no conversation so.
        """
        if self._unusable:
            raise self._unusable
        number = len(conversation.turns) - 1 if number is None else number
        turn = conversation.turns[number]
        self._check_tools(conversation)
        arguments = self._switched(turn)
        prompt = self._rendered(conversation, number, arguments, answered=False)
        answered = self._rendered(conversation, number, arguments, answered=True)
        apart = thoughts.separated(turn, self.facts)
        wanted = None if self._thinking == OFF else apart.thoughts
        # The marks of thoughts stay as they are: the template looks for them.
        kept = self.facts.marks or ()
        answer = self._protected(apart.answer, kept)
        spoken = self._continuation(
            conversation._replace(turns=conversation.turns[: number + 1]), arguments, prompt, answered,
            apart._replace(thoughts=self._protected(wanted, kept), answer=answer),
        )  # fmt: skip
        self._check_rendered(conversation, number, prompt, spoken.text)
        if answer.strip() not in spoken.text:
            left_out = repr(apart.answer[:60])
            raise BadRowError(f"has an answer of which the chat template leaves something out: {left_out}")
        notes = [RESTORED] * spoken.restored
        if self.facts.knows_thoughts:
            notes.append(WITHOUT_THOUGHTS if wanted is None else WITH_THOUGHTS)
            notes += [LEFT_OUT] * (wanted is None and apart.thoughts is not None)
        text = self._upto_mark(spoken.text)
        if text is None:
            mark = self._mark_of_next(conversation, number, answered)
            return Written(prompt, prompt + spoken.text + mark, bool(mark), tuple(notes))
        return Written(prompt, prompt + text, True, tuple(notes))

    def _continuation(
        self, conversation: Conversation, arguments: Mapping[str, Any], prompt: str, answered: str, turn: Turn
    ) -> thoughts.Continuation:
        """The model's part after the prompt. turn: the last one, as `thoughts.continuation` takes it.

        A template may write the turns before in another way once they are answered: Mistral's put the system text into
        a question only while that is the last message. Then the text behind the last question decides. It is looked for
        with another text in that question's place, which stands nowhere else. Raises BadRowError.
        """
        try:
            return thoughts.continuation(prompt, answered, turn, self.facts.marks)
        except BadRowError as error:
            last = conversation.turns[-1]
            if last.results and not last.question:
                *before, result = last.results
                probe = last._replace(results=(*before, {**result, "content": PROBE}))
            else:
                probe = last._replace(question=PROBE, extra="")
            probed = conversation._replace(turns=(*conversation.turns[:-1], probe))
            number = len(conversation.turns) - 1
            prompt_end, answered_end = (
                self._rendered(probed, number, arguments, answered=answered).rpartition(PROBE)[2]
                for answered in (False, True)
            )
            try:
                spoken = thoughts.continuation(prompt_end, answered_end, turn, self.facts.marks)
            except BadRowError:
                raise error from None
            if not prompt.endswith(prompt_end) or turn.answer.strip() not in spoken.text:
                raise
            return spoken

    def _check_tools(self, conversation: Conversation) -> None:
        if not conversation.tools:
            return
        # Of several templates the tokenizer takes another one where there are tools.
        template = self.tokenizer.get_chat_template(tools=list(conversation.tools))
        if "tools" not in thoughts.facts_of(str(template)).variables:
            raise BadRowError("uses tools, which the chat template has no place for")

    def _check_rendered(self, conversation: Conversation, number: int, prompt: str, spoken: str) -> None:
        """Raise BadRowError where the template leaves out a tool's name, a call, or a result."""
        turns = conversation.turns[: number + 1]
        wanted = [str(result["content"]) for turn in turns for result in turn.results]
        wanted += [str(tool["function"].get("name", "")) for tool in conversation.tools]
        calls = [call["function"]["name"] for turn in turns for call in turn.calls]
        missing = [text for text in wanted if not _stands_in(self._protected(text), prompt)]
        missing += [name for name in calls if name not in prompt and name not in spoken]
        if missing:
            left_out = repr(missing[0][:60])
            raise BadRowError(f"uses tools, of which the chat template leaves something out: {left_out}")

    # Ids

    def _ids(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of rendered texts: marks that the template wrote are tokens, those behind stand-ins stay text."""
        if self._marks_divide:
            return [
                [token for part in self._any_mark_apart.split(text) if part for token in self._of_part(part)]
                for text in texts
            ]
        plain = [self._with_letters(text) for text in texts]
        encoded = self.encode_texts(plain, split_special=False)
        return [
            self._with_texts(text, ids) if _STANDING.search(text) else ids
            for text, ids in zip(texts, encoded, strict=True)
        ]

    def _of_part(self, part: str) -> list[int]:
        """Ids of a mark that the template wrote, or of a text between two of them."""
        return [self._vocabulary[part]] if part in self._numbers else self._as_text(self._with_letters(part))

    def _with_letters(self, text: str) -> str:
        """The text with marks in the place of their stand-ins."""
        return _STANDING.sub(lambda stand_in: self._marks[int(stand_in[1])], text)

    def _as_text(self, text: str) -> list[int]:
        """Ids of a text in which no mark is a token."""
        first, *rest = self._split_plain(text)
        return [*self.encode_texts([first])[0], *(token for part in rest for token in self._behind(part))]

    def _split_plain(self, text: str) -> list[str]:
        """The text in parts that hold no mark of `_plain_marks` whole: each is cut behind its first letter."""
        if not any(mark in text for mark in self._plain_marks):
            return [text]
        for mark in self._plain_marks:
            text = text.replace(mark, f"{mark[0]}{STAND_IN[0]}{mark[1:]}")
        return text.split(STAND_IN[0])

    def _behind(self, text: str) -> list[int]:
        """Ids of a text behind another one: at a text's beginning many tokenizers put a space in front.

        Raises BadRowError.
        """
        before, both = self.encode_texts(["\n", f"\n{text}"])
        if both[: len(before)] != before:
            raise BadRowError("holds the text of a special token in a place where it can't stay text")
        return both[len(before) :]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        """The marks that are tokens, with their ids."""
        return {mark: self._vocabulary[mark] for mark in self._marks if mark in self._vocabulary}

    @cached_property
    def _plain_marks(self) -> list[str]:
        """Marks that are tokens, but not special ones: no option of the tokenizer makes text of them."""
        added = self.tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special}
        return [mark for mark in self._marks if mark not in special and len(mark) > 1]

    @cached_property
    def _any_mark_apart(self) -> re.Pattern[str]:
        return re.compile(f"({self._any_mark.pattern})")

    @cached_property
    def _marks_divide(self) -> bool:
        """Whether a text can be encoded in parts, divided by its marks: a part of many texts is then encoded once.

        It can where marks take nothing of their neighbours along, and the parts between them are encoded as whole texts
        are: in byte-level tokenizers, and those of SentencePiece's that put a space in front of each part.
        """
        added = [token for token in self.tokenizer.added_tokens_decoder.values() if str(token)]
        marks = [token for token in added if str(token) in self._numbers]
        others = [str(token) for token in added if str(token) not in self._numbers]
        return (
            bool(marks)
            and len(self._numbers) == len(self._marks)
            and not any(self._strips)
            and not any(token.single_word or token.normalized for token in marks)
            and not any(str(mark) in other for mark in marks for other in others)
            and self._texts_stand_alone
        )

    def _with_texts(self, text: str, ids: Sequence[int]) -> list[int]:
        """The ids of a text, with a mark's letters where a stand-in is. Raises BadRowError where that is impossible.

        ids: those of the text with all marks, the stand-ins' too, as tokens. The text between two marks of the template
        is encoded again where it has a stand-in, with special tokens split; the rest keeps its ids.
        """
        marks = list(re.finditer(f"{_STANDING.pattern}|(?:{self._any_mark.pattern})", text))
        names = [mark[0] if mark[1] is None else self._marks[int(mark[1])] for mark in marks]
        numbers = set(self._numbers.values())
        places = [place for place, token in enumerate(ids) if token in numbers]
        # Marks in the text and their tokens are matched in order: that holds only if there are the same ones.
        if [ids[place] for place in places] != [self._vocabulary.get(name) for name in names]:
            raise BadRowError("holds the text of a special token in a place where it can't stay text")
        written = [(place, mark) for place, mark in zip(places, marks, strict=True) if mark[1] is None]
        result: list[int] = []
        # Up to here: `start` in the ids, `at` in the text. `previous` is the mark before it.
        start = at = 0
        previous = ""
        for place, mark in [*written, (len(ids), None)]:
            end, following = (mark.start(), mark[0]) if mark else (len(text), "")
            between = text[at:end]
            if _STANDING.search(between):
                result += self._letters(between, previous, following)
            else:
                result += ids[start:place]
            result += ids[place : place + 1]
            start, at, previous = place + 1, mark.end() if mark else end, following
        return result

    def _letters(self, text: str, previous: str, following: str) -> list[int]:
        """Ids of a text between two marks, its stand-ins as letters.

        A mark may take the white space beside it along.
        """
        text = self._with_letters(text)
        text = text.lstrip() if previous in self._strips.right else text
        text = text.rstrip() if following in self._strips.left else text
        if not previous or self._texts_stand_alone:
            return self._as_text(text)
        return [token for part in self._split_plain(text) for token in self._behind(part)]

    @cached_property
    def _strips(self) -> Strips:
        added = self.tokenizer.added_tokens_decoder.values()
        left, right = (
            {str(token) for token in added if getattr(token, name)} for name in ("lstrip", "rstrip")
        )
        return Strips(frozenset(left), frozenset(right))

    @cached_property
    def _texts_stand_alone(self) -> bool:
        """Whether a text behind a mark is encoded as a text by itself."""
        mark = self._marks[0]
        (behind,) = self.encode_texts([f"{mark}a"], split_special=False)
        return behind[1:] == self.encode_texts(["a"])[0]

    def _exchange(self, written: Written) -> Exchange:
        """The answer's tokens behind the prompt's own, which are a server's whatever follows. Raises BadRowError."""
        prompt, whole = self._ids([written.prompt, written.whole])
        notes = written.notes
        answer = whole[len(prompt) :]
        if whole[: len(prompt)] != prompt:
            answer = self._continued(prompt, written.whole[len(written.prompt) :])
            notes = (*notes, APART)
        answer = answer if written.ended else [*answer, *self.end_of_text]
        return Exchange(prompt, answer, 1, notes)

    def _continued(self, prompt: Sequence[int], text: str) -> list[int]:
        """Ids of a text that goes on where the prompt ends: of two encodings the first that decodes to it there."""
        plain = self._with_letters(text)
        ways = [self._ids([text])[0]]
        for mark in self._marks[:1]:  # behind a mark no tokenizer puts a space of its own in front
            ways.insert(0, self._ids([mark + text])[0][1:])
        decoded = (self.tokenizer.decode([*prompt, *ids], clean_up_tokenization_spaces=False) for ids in ways)
        return next((ids for ids, back in zip(ways, decoded, strict=True) if back.endswith(plain)), ways[0])

    # Rows

    def ask(self, conversation: Conversation) -> list[int]:
        """Ids that ask for the conversation's last answer, whatever that is. Raises BadRowError.

        With thinking "auto" the template's own default decides whether the model thinks.
        """
        number = len(conversation.turns) - 1
        auto = self._thinking == thoughts.AUTO
        arguments = self._arguments if auto else self._switched(conversation.turns[number])
        return self._ids([self._rendered(conversation, number, arguments, answered=False)])[0]

    def encode_questions(self, questions: Sequence[Question]) -> list[list[int]]:
        """Ids of each question in its frame. Raises BadRowError."""
        return [
            self._prompt(Conversation((Turn(question.text, "", question.extra),), question.system))
            for question in questions
        ]

    def _prompt(self, conversation: Conversation) -> list[int]:
        rendered = self._rendered(conversation, 0, self._switched(conversation.turns[0]), answered=False)
        return self._ids([rendered])[0]

    def _exchanges(self, conversations: Sequence[Conversation]) -> list[Exchange | BadRowError]:
        written = [self._written_or_why(conversation) for conversation in conversations]
        texts = [each for each in written if isinstance(each, Written)]
        exchanges: list[Exchange | BadRowError] = []
        with self._knowing(self._plain(texts)):
            for each in written:
                try:
                    exchanges.append(self._exchange(each) if isinstance(each, Written) else each)
                except BadRowError as error:
                    exchanges.append(error)
        return exchanges

    def _written_or_why(self, conversation: Conversation) -> Written | BadRowError:
        try:
            return self._written(conversation)
        except BadRowError as error:
            return error

    def _plain(self, written: Sequence[Written]) -> Iterator[tuple[str, bool]]:
        """The texts that have to be encoded for these answers, as `_knowing` takes them."""
        for each in written:
            for text in (each.prompt, each.whole):
                if self._marks_divide:
                    parts = self._any_mark_apart.split(text)
                    yield from ((self._with_letters(part), True) for part in parts[::2] if part)
                else:
                    yield self._with_letters(text), False

    def _encode_several(self, conversations: Any, limits: Any) -> Any:
        # What is rendered to encode all at once is not rendered again: templates take most of the time.
        for conversation in conversations:
            try:
                self._written_before[id(conversation)] = self._each_written(conversation)
            except BadRowError:
                continue  # raised again, for its row, by `_join`
        try:
            return super()._encode_several(conversations, limits)
        finally:
            self._written_before = {}

    def _texts(self, conversations: Sequence[Conversation]) -> Iterator[tuple[str, bool]]:
        for conversation in conversations:
            yield from self._plain(self._written_before.get(id(conversation), ()))

    def _each_written(self, conversation: Conversation) -> list[Written]:
        """The conversation up to each answer that is trained on. Raises BadRowError."""
        before = self._written_before.get(id(conversation))
        return before or [
            self._written(conversation, number)
            for number, turn in enumerate(conversation.turns)
            if turn.trained
        ]

    def _join(self, conversation: Conversation) -> list[Encoded]:
        """One sequence, where each answer's own rendering is a beginning of it; else one for each answer."""
        exchanges = [self._exchange(written) for written in self._each_written(conversation)]
        whole = [*exchanges[-1].prompt, *exchanges[-1].answer]
        spans: list[tuple[int, int]] = []
        notes: list[str] = []
        for prompt, answer, _, answer_notes in exchanges:
            begins = [*prompt, *answer]
            if whole[: len(begins)] != begins:
                return [
                    self._sequence(part, exchange)
                    for part, exchange in zip(conversation.each_answer(), exchanges, strict=True)
                ]
            spans.append((max(1, len(prompt)), len(begins)))
            notes += answer_notes
        last = self._sequence(conversation, exchanges[-1])
        return [last._replace(spans=tuple(spans), notes=tuple(notes))]

    def _sequence(self, conversation: Conversation, exchange: Exchange) -> Encoded:
        ids = [*exchange.prompt, *exchange.answer]
        start = len(exchange.prompt)
        return Encoded(
            ids, ((max(1, start), len(ids)),), start, *last_texts(conversation), notes=exchange.notes
        )


_STANDING = re.compile(STAND_IN.format("([0-9]+)"))


def _stands_in(text: str, rendered: str) -> bool:
    """Whether a text is in a rendering, as it is or as JSON writes it."""
    forms = (text.strip(), *(json.dumps(text, ensure_ascii=ascii)[1:-1].strip() for ascii in (True, False)))
    return any(form in rendered for form in forms)


def served_with(job: Job, tokenizer: Any) -> dict[str, Any]:
    """The variables that make the job's chat template ask as in training; the exported one has them as defaults."""
    if not tokenizer.chat_template or job.model.prompt_format not in (CHAT_TEMPLATE, OWN_FORMAT):
        return {}
    path = Path(f"{job.prepared.train_rows}.json")
    counts = json.loads(read_text(path)) if path.is_file() else {}
    return thoughts.serving_arguments(
        str(tokenizer.get_chat_template()), job.model.thinking, job.model.template_args, counts
    )
