"""Thoughts that stand before an answer: what a chat template knows of them, and what a model has to say after a prompt.

A server renders the conversation so far with `add_generation_prompt`, and the model goes on from there. What it should
go on with is what the same template makes of the answered conversation. For most templates the prompt is the beginning
of that text, and the answer is the rest. Reasoning models differ: a prompt may open a thought, or close an empty one,
that the answered text has not, because the template leaves thoughts out of what was said before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from dsrun.data.chat_templates import environment
from dsrun.data.conversations import THOUGHTS, BadRowError, Turn
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.words import listed

AUTO, ON, OFF = CHOICES = ("auto", "on", "off")
"""Thinking as the rows have it, always, or never."""
WITH_THOUGHTS, WITHOUT_THOUGHTS = "answers_with_thoughts", "answers_without_thoughts"
"""Keys of the report that count answers, where the template knows thoughts."""
FILLED_VARIABLES = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message",
    "bos_token", "eos_token", "pad_token", "unk_token", "raise_exception", "strftime_now",
})  # fmt: skip
"""Variables of a template that transformers itself fills, or that hold the conversation."""
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch thinking on and off: Qwen3, GLM-4.5, SmolLM3; DeepSeek-V3.1, Granite."""
EXCERPT_CHARACTERS = 120
"""Length of the excerpts in a message that compares two texts."""


class ThoughtMarks(NamedTuple):
    """The texts around thoughts."""

    open: str
    close: str


USUAL_MARKS = ThoughtMarks("<think>", "</think>")


class TemplateFacts(NamedTuple):
    """Facts about thoughts in a chat template, from its source."""

    switch: str | None
    """The variable that switches thinking on and off; None where the template has none."""
    fields: tuple[str, ...]
    """The keys of a message from which the template takes thoughts."""
    marks: ThoughtMarks | None
    """The marks that it writes around thoughts, or looks for in a content; None where it has none."""
    variables: frozenset[str]
    """All variables that can be given to it."""

    @property
    def knows_thoughts(self) -> bool:
        """Whether the template treats thoughts unlike other text."""
        return bool(self.fields or self.marks)


@lru_cache(maxsize=8)
def facts_of(template: str) -> TemplateFacts:
    """Facts from a template's syntax tree, and from the texts in it. Raises jinja2.TemplateSyntaxError."""
    from jinja2 import meta, nodes

    tree = environment().parse(template)
    variables = frozenset(meta.find_undeclared_variables(tree))
    constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
    keys = {node.attr for node in tree.find_all(nodes.Getattr)}
    keys |= {node.arg.value for node in tree.find_all(nodes.Getitem) if isinstance(node.arg, nodes.Const)}
    keys |= {
        call.args[0].value  # message.get("reasoning")
        for call in tree.find_all(nodes.Call)
        if isinstance(call.node, nodes.Getattr) and call.node.attr == "get"
        if call.args and isinstance(call.args[0], nodes.Const)
    }
    switch = next((name for name in SWITCHES if name in variables), None)
    fields = tuple(name for name in THOUGHTS if name in keys)
    # Not the source itself: a comment may speak of thoughts that the template does nothing with.
    written = [*constants, *(node.data for node in tree.find_all(nodes.TemplateData))]
    return TemplateFacts(switch, fields, _marks("\n".join(written)), variables)


def _marks(texts: str) -> ThoughtMarks | None:
    """The pair of marks that a template closes thoughts with: <think>, [THINK], <seed:think>."""
    closing = re.search(r"([<\[])/([\w:]*think)([>\]])", texts, re.IGNORECASE)
    if closing is None:
        return None
    before, name, behind = closing.groups()
    return ThoughtMarks(f"{before}{name}{behind}", closing.group())


def marks_in(template: str | Mapping[str, str] | None) -> ThoughtMarks | None:
    """The marks of a template that may be missing or broken, or be several by name, of which the default one counts."""
    from jinja2 import TemplateSyntaxError

    if isinstance(template, Mapping):
        template = template.get("default")
    try:
        return facts_of(template).marks if template else None
    except TemplateSyntaxError:
        return None


def split(text: str, marks: ThoughtMarks) -> tuple[str | None, str]:
    """The thoughts at the beginning of an answer (None: there are none) and what follows them.

    The opening mark may be missing, as in rows that go on from a prompt which holds it. Raises BadRowError for thoughts
    that don't end.
    """
    thoughts, closed, rest = text.partition(marks.close)
    opened = thoughts.lstrip().startswith(marks.open)
    if not closed:
        if opened:
            raise BadRowError(f"has thoughts that don't end: no {marks.close}")
        return None, text
    if not opened and marks.open in thoughts:  # somewhere inside the answer, where it is a text like others
        return None, text
    return thoughts.replace(marks.open, "", 1).strip(), rest.lstrip()


def visible(text: str, marks: ThoughtMarks | None) -> str:
    """A model's answer without its thoughts, finished or not."""
    if marks is None:
        return text
    before, closed, rest = text.partition(marks.close)
    if closed:
        return rest.strip()
    return "" if before.lstrip().startswith(marks.open) else text


def begun(prompt: str, answer: str, marks: ThoughtMarks | None) -> str:
    """A model's answer with the opening mark in front where that stands at the end of its prompt.

    prompt: the prompt, or its last part.
    """
    if marks is None or not prompt.rstrip().endswith(marks.open):
        return answer
    return f"{marks.open}\n{answer.lstrip()}"


def separated(turn: Turn, facts: TemplateFacts) -> Turn:
    """The turn with its thoughts apart from its answer, where the template knows thoughts.

    An empty thought counts as none: so a template writes an answer without thoughts.
    """
    if not facts.knows_thoughts or turn.thoughts is not None:
        return turn
    thoughts, answer = split(turn.answer, facts.marks or USUAL_MARKS)
    return turn if thoughts is None else turn._replace(thoughts=thoughts or None, answer=answer)


def answer_message(turn: Turn, facts: TemplateFacts) -> dict[str, Any]:
    """The assistant's message as the template takes it.

    Thoughts stand in the keys that it reads, else in the content between its marks. Raises BadRowError for thoughts
    that it has no place for.
    """
    message: dict[str, Any] = {"role": "assistant", "content": turn.answer}
    if turn.calls:
        message["tool_calls"] = list(turn.calls)
    if turn.thoughts is None:
        return message
    if facts.fields:
        return {**message, **dict.fromkeys(facts.fields, turn.thoughts)}
    if facts.marks is None:
        raise BadRowError("has thoughts apart from its answer, which the chat template has no place for")
    return {**message, "content": thought_block(turn.thoughts, facts.marks) + turn.answer}


def thought_block(thoughts: str, marks: ThoughtMarks, gap: str = "\n") -> str:
    """Thoughts between their marks, with the line breaks that models write around them."""
    return f"{marks.open}{gap}{thoughts}{gap}{marks.close}{gap}{gap}"


class Continuation(NamedTuple):
    """The text that a model has to say after a prompt."""

    text: str
    restored: bool = False
    """Whether thoughts were put back, or taken out: the template leaves those of an answered conversation out, or
    always writes some. The text here has them as the prompt asks."""


def continuation(prompt: str, answered: str, turn: Turn, marks: ThoughtMarks | None) -> Continuation:
    """The text that follows `prompt` so that the conversation is answered as in `answered`.

    Both are renderings of one conversation by one template. turn: the last turn, with its thoughts apart; they have to
    be in the text. Raises BadRowError with both renderings where they can't be reconciled.
    """
    wanted = (turn.thoughts or "").strip()
    written = answered[len(prompt) :]
    # That the thoughts are somewhere in the text is not enough: short ones may stand in the answer as well.
    has_thoughts = not wanted or written.count(wanted) > turn.answer.count(wanted)
    if answered.startswith(prompt) and has_thoughts:
        return Continuation(written)
    if answered.startswith(prompt) and marks is None:
        raise BadRowError("has thoughts that the chat template leaves out of an answered conversation")
    begun = _thought_at_end(prompt, marks)
    base = prompt[: begun.start()] if begun else prompt
    # A prompt that closes an empty thought has no place for thoughts that this answer has.
    if marks is None or not answered.startswith(base) or (begun and begun["closed"] and wanted):
        raise _irreconcilable(prompt, answered)
    # The two agree up to the thought that the prompt begins, and the rendering lost that thought. So the thought is
    # written as the prompt opens it, and the rest as rendered. An empty thought in the rendering goes: else the answer
    # would have two.
    written = answered[len(base) :]
    before, closed, rest = written.partition(marks.close)
    empty = not before.strip() or before.lstrip().startswith(marks.open)
    shown = (rest if closed and empty else written).lstrip()
    if begun is None:
        return Continuation(thought_block(wanted, marks) + shown, restored=True)
    if begun["closed"]:
        return Continuation(shown, restored=True)
    gap = begun["gap"]
    return Continuation(f"{wanted}{gap}{marks.close}{gap}{gap}{shown}", restored=True)


def _thought_at_end(prompt: str, marks: ThoughtMarks | None) -> re.Match[str] | None:
    """The thought that a prompt begins at its end, or an empty one that it closes there."""
    if marks is None:
        return None
    opening, closing = map(re.escape, marks)
    return re.search(rf"{opening}(?P<gap>\s*)(?P<closed>{closing}\s*)?\Z", prompt)


def _irreconcilable(prompt: str, answered: str) -> BadRowError:
    same = next(
        (place for place, (left, right) in enumerate(zip(prompt, answered, strict=False)) if left != right),
        min(len(prompt), len(answered)),
    )
    start = max(0, same - EXCERPT_CHARACTERS // 2)
    excerpts = [text[start : start + EXCERPT_CHARACTERS] for text in (prompt, answered)]
    return BadRowError(
        "can't be framed by the chat template, whose answered conversation doesn't begin with its prompt: "
        f"{excerpts[0]!r} is asked, and {excerpts[1]!r} answered"
    )


def template_arguments(texts: Sequence[str]) -> dict[str, Any]:
    """The values of --template-arg, each NAME=VALUE. A value is read as JSON, or else is a text. Raises DsrunError."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            hint = "As in --template-arg enable_thinking=false"
            raise DsrunError(f"is no NAME=VALUE: {text!r}", where="--template-arg", hint=hint)
        try:
            values[name] = json.loads(value)
        except ValueError:
            values[name] = value
    return values


def not_a_template(prompt_format: str, arguments: Mapping[str, Any]) -> DsrunError:
    """The error of --thinking or --template-arg beside a prompt format of dsrun's own."""
    return DsrunError(
        f"is for a chat template, and the prompt format is {prompt_format}",
        where="--template-arg" if arguments else "--thinking",
        hint="Leave it out, or name a template: --chat-template FILE.",
    )


def check_arguments(facts: TemplateFacts, thinking: str, arguments: Mapping[str, Any]) -> None:
    """Raise DsrunError for arguments that the template doesn't read, and for --thinking where it has no switch."""
    readable = sorted(facts.variables - FILLED_VARIABLES)
    reads = f"It reads {listed(readable)}." if readable else "It reads none: leave it out."
    problems = [
        Problem(f"the chat template has no variable {name!r}", "--template-arg", reads)
        for name in arguments
        if name not in readable
    ]
    if thinking != AUTO and facts.switch is None:
        always = (
            "it has no variable that switches thoughts" if facts.knows_thoughts else "it knows no thoughts"
        )
        message = f"the chat template can't turn thinking {thinking}: {always}"
        problems.append(Problem(message, "--thinking", f"Leave it out: --thinking {AUTO} follows the rows."))
    elif thinking != AUTO and facts.switch in arguments:
        message = f"says the same as --template-arg {facts.switch}"
        problems.append(Problem(message, "--thinking", "Give one of the two."))
    raise_all(problems)


def serving_arguments(
    template: str, thinking: str, arguments: Mapping[str, Any], counts: Mapping[str, int]
) -> dict[str, Any]:
    """The arguments with which a server has to render the template, so that prompts look as in training.

    counts: answers with and without thoughts in the training rows, by WITH_THOUGHTS and WITHOUT_THOUGHTS. Where rows
    were of both kinds, the switch is left to whoever asks.
    """
    facts = facts_of(template)
    chosen = dict(arguments)
    if facts.switch is None or facts.switch in chosen:
        return chosen
    with_thoughts, without = counts.get(WITH_THOUGHTS, 0), counts.get(WITHOUT_THOUGHTS, 0)
    if thinking != AUTO:
        chosen[facts.switch] = thinking == ON
    elif bool(with_thoughts) != bool(without):
        chosen[facts.switch] = bool(with_thoughts)
    return chosen


def with_defaults(template: str, arguments: Mapping[str, Any]) -> str:
    """The template with these values as defaults, for a server that gives none. They print nothing."""
    if not arguments:
        return template
    head = "".join(
        # Jinja reads a value of JSON as Python writes it: True, None, 'text'.
        f"{{% if {name} is not defined %}}{{% set {name} = {value!r} %}}{{% endif %}}"
        for name, value in arguments.items()
    )
    # Something is printed between, if only '': with trim_blocks the last block would swallow a line break at the
    # template's beginning.
    return f"{head}{{{{ '' }}}}{template}"
