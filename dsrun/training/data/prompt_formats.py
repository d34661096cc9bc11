"""Prompt formats, each described once: the ids to train on and the chat template both come from the description.

A format's parts are segments. A segment is a text, or a `Special`: one token looked up by name. Every text is encoded
by itself, which with SentencePiece models gives each a "▁" of its own. A chat template's text is encoded whole: there
only the beginning and what follows a special token get a "▁", so the template writes the others itself, as a space.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from string import Formatter
from typing import NamedTuple


class Special(NamedTuple):
    """A special token, by its names in different checkpoints: the first one in the vocabulary counts."""

    names: tuple[str, ...]


Segment = str | Special
BOS = Special(("<bos>",))
"""Stands for the tokenizer's own beginning-of-text token, or for nothing where it has none."""


class Question(NamedTuple):
    """A user's turn in its place."""

    text: str
    number: int = 0
    """The number of its turn, from 0."""
    system: str = ""
    """The conversation's system text, with its first question only."""
    extra: str = ""
    """A text that the question is about; a format without a place for it puts it on the next line."""

    @property
    def whole(self) -> str:
        """The question's text with `extra`."""
        return f"{self.text}\n{self.extra}" if self.extra else self.text

    def cut(self, characters: int) -> Question:
        """The question with only this many characters, from its beginning."""
        return self._replace(
            text=self.text[:characters], extra=self.extra[: max(0, characters - len(self.text))]
        )


@dataclass(frozen=True)
class PromptFormat:
    """The way to write a conversation. In its texts, names in braces stand for what differs."""

    question: tuple[Segment, ...]
    """A user's turn: {question}, {round} (its number from 1), and {before}, see system and between."""
    start: tuple[Segment, ...] = ()
    """Segments in front of everything."""
    system: str | tuple[Segment, ...] = ()
    """The system text ({text}): a text is the first question's {before}, segments stand in front of that question."""
    between: str = ""
    """The {before} of later questions."""
    extra: str = "\n{extra}"
    """The text that adds a question's `extra` to it."""
    ask: tuple[Segment, ...] = ()
    """Segments behind the question, which ask for the answer."""
    answer: tuple[Segment, ...] = ("{answer}",)
    end: Special | None = None
    """The token that ends an answer; None: the tokenizer's end-of-text token."""
    stops: tuple[Special, ...] = ()
    """Tokens that end an answer beside the end mark, when the model writes them."""
    inside: bool = False
    """Earlier answers are part of the next question's text, so that only a sequence's last one can be trained on."""
    open_ends: bool = False
    """An answer that is not the last has no end mark: the next question's first token ends it."""

    def segments(self, question: Question) -> list[Segment]:
        """A question, up to where its answer begins."""
        extra = self.extra.format(extra=question.extra) if question.extra else ""
        apart: tuple[Segment, ...] = ()
        before = self.between if question.number else ""
        if isinstance(self.system, tuple):
            apart = self.system if question.system else ()
        elif question.system:
            before = self.system.format(text=question.system)
        start = () if question.number else self.start
        parts = (*start, *apart, *self.question, *self.ask)
        text, number = question.text + extra, question.number + 1
        return _filled(parts, text=question.system, question=text, round=number, before=before)

    def response(self, answer: str) -> list[Segment]:
        """An answer without its end mark."""
        return _filled(self.answer, answer=answer)

    def chat_template(self, gap: str = "") -> str:
        """The format in Jinja, for `apply_chat_template`, pipelines, and an exported tokenizer without a template.

        gap: the beginning of a text that follows another one, " " for tokenizers that put a "▁" in front of each.
        """
        before = json.dumps(self.between, ensure_ascii=False)
        system = ""
        if isinstance(self.system, str):
            before = (
                f"({_expression(self.system, text='system')} if system else '') if loop.first else {before}"
            )
        else:
            system = f"{{% if system %}}{_jinja(self.system, gap, text='system')}{{% endif %}}"
        content = "message.content"
        question = _jinja(self.question, gap, question=content, round="loop.index0 // 2 + 1", before=before)
        ask = _jinja(self.ask, gap)
        follows = isinstance((self.ask or self.question)[-1], str) and not self.inside
        answer = _jinja(self.answer, gap, follows=follows, answer=content)
        end = self.end.names[-1] if self.end else "{{ eos_token }}"
        if self.inside or self.open_ends:
            end = f"{{% if loop.last %}}{end}{{% endif %}}"
        return (
            "{% if messages and messages[0].role == 'system' %}"
            "{% set system = messages[0].content %}{% set messages = messages[1:] %}"
            "{% else %}{% set system = '' %}{% endif %}"
            f"{_jinja(self.start, gap)}{system}"
            f"{{% for message in messages %}}{{% if message.role == 'user' %}}{question}"
            f"{{% elif message.role == 'assistant' %}}{ask}{answer}{end}{{% endif %}}{{% endfor %}}"
            + (f"{{% if add_generation_prompt %}}{ask}{{% endif %}}" if ask else "")
        )


def _filled(segments: tuple[Segment, ...], **values: str | int) -> list[Segment]:
    return [segment.format(**values) if isinstance(segment, str) else segment for segment in segments]


def _jinja(segments: tuple[Segment, ...], gap: str, *, follows: bool = False, **values: str) -> str:
    """Segments in Jinja. follows: whether a text stands before them; values: expressions for the names in braces."""
    template = ""
    for segment in segments:
        if isinstance(segment, str):
            template += f"{{{{ {_expression((gap if follows else '') + segment, **values)} }}}}"
        else:
            template += "{{ bos_token if bos_token else '' }}" if segment is BOS else segment.names[-1]
        follows = isinstance(segment, str)
    return template


def _expression(text: str, /, **values: str) -> str:
    """A text as a Jinja expression. Literals are quoted: Jinja drops line breaks around blocks otherwise."""
    parts = []
    for literal, name, *_ in Formatter().parse(text):
        parts += [json.dumps(literal, ensure_ascii=False)] if literal else []
        parts += [f"({values[name]})"] if name else []
    return " ~ ".join(parts)


_GMASK = (Special(("[gMASK]",)), Special(("sop", "<sop>")))
_SYSTEM, _USER, _ASSISTANT, _OBSERVATION = (
    Special((f"<|{name}|>",)) for name in ("system", "user", "assistant", "observation")
)
_START, _END, _EOT = (Special((f"<|{name}|>",)) for name in ("start_header_id", "end_header_id", "eot_id"))
_ROLES = PromptFormat(
    start=_GMASK,
    system=(_SYSTEM, "\n", "{text}"),
    question=(_USER, "\n", "{question}"),
    ask=(_ASSISTANT,),
    answer=("\n", "{answer}"),
    open_ends=True,
    stops=(_USER, _OBSERVATION),
)
FORMATS = {
    "plain": PromptFormat(start=(BOS,), system="{text}\n", question=("{before}{question}\n",)),
    "chatglm2": PromptFormat(
        start=_GMASK,
        system="{text}\n\n",
        between="\n\n",
        question=("{before}[Round {round}]\n\n问：{question}\n\n答：",),
        inside=True,
    ),
    "chatglm3": _ROLES,
    "glm-4": _ROLES,
    "llama-2": PromptFormat(
        system="<<SYS>>\n{text}\n<</SYS>>\n\n", question=(BOS, "[INST] {before}{question} [/INST]")
    ),
    "llama-3": PromptFormat(
        start=(BOS,),
        system=(_START, "system", _END, "\n\n{text}", _EOT),
        question=(_START, "user", _END, "\n\n{question}", _EOT),
        ask=(_START, "assistant", _END, "\n\n"),
        end=_EOT,
    ),
    "alpaca": PromptFormat(
        start=(BOS,),
        system="{text}\n\n",
        question=("{before}### Instruction:\n{question}\n\n### Response:\n",),
        extra="\n\n### Input:\n{extra}",
    ),
}
"""Name in model files -> the prompt format. A new format is a new entry, which the tests take from here."""
