"""dsrun's training examples, token by token, beside what transformers makes of each family's chat template.

    python bench/chat_text.py [--trl DIR] [--templates DIR] [--family NAME]... [--output docs/reference/chat-text.md]

--trl: the folder of the templates that TRL ships (chat_templates in its package), taken from the installed package
unless given. --templates: a folder with a NAME.jinja for families that TRL has none of. Templates are read where they
are and never copied. A family that neither folder has is written here, in the form that was published.

The reference is apply_chat_template, rendered for each answer twice: as a server asks, and answered. A cell is "equal",
or has letters for differences, each of which is checked here; anything else is printed in full, and the exit status is
1. Tokenizers are made here: letters, bytes, and each family's added tokens with the flags that they have.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import logging
import platform
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

CHECKOUT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(CHECKOUT))

from dsrun.data.conversations import FORMATS, BadRowError, Columns  # noqa: E402
from dsrun.errors import DsrunError  # noqa: E402
from dsrun.training.data.prompts import Encoded, Limits, encoder_for  # noqa: E402

WIDE = Limits(100_000, 100_000)
HOLDER = "¤"
"""Stands in a text where the text of a special token will be."""
THOUGHT = "<think>\nbecause\n</think>\n\n"
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Its name."}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "get_weather", "arguments": {"city": "Paris"}},
}
RESULT = {"role": "tool", "name": "get_weather", "tool_call_id": "abcdefghi", "content": "20 degrees"}

# Families

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (  # earlier thoughts go, the last answer has some, and the prompt begins one
    "{% set last = messages | length - 1 %}{% for m in messages %}"
    "{% set text = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in text %}{% set thought = text.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if m.role == 'assistant' and loop.index0 == last %}"
    "{% set text = '<think>\n' ~ thought ~ '\n</think>\n\n' ~ text %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
ALWAYS_THINKING = (  # no answer of a rendered conversation has thoughts, and the prompt begins one
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set text = text.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
GLM = (
    "[gMASK]<sop>{% for m in messages %}{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
GLM_0414 = (  # system texts first; what it has no role for it leaves out
    "[gMASK]<sop>{% for m in messages if m.role == 'system' %}{{ '<|system|>\n' ~ m.content }}{% endfor %}"
    "{% for m in messages if m.role in ['user', 'assistant', 'observation'] %}"
    "{{ '<|' ~ m.role ~ '|>\n' ~ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LLAMA_2 = (
    "{% set system = messages[0].content if messages[0].role == 'system' else '' %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set lead = '' %}"
    "{% if system and loop.index0 == 1 %}{% set lead = '<<SYS>>\n' ~ system ~ '\n<</SYS>>\n\n' %}{% endif %}"
    "{{ bos_token ~ '[INST] ' ~ (lead ~ m.content).strip() ~ ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' ~ m.content.strip() ~ ' ' ~ eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' ~ m.content ~ ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ m.content ~ eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
PHI_4 = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '<|im_sep|>' ~ m.content ~ '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}"
)
MINICPM = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<用户>' ~ m.content.strip() ~ '<AI>' }}"
    "{% else %}{{ m.content.strip() }}{% endif %}{% endfor %}"
)

QWEN = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|im_start|>",
    "<|object_ref_start|>",
    "<|vision_start|>",
    "<|image_pad|>",
)
QWEN_PLAIN = ("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|repo_name|>")
QWEN3_PLAIN = (*QWEN_PLAIN, "<tool_response>", "</tool_response>", "<think>", "</think>")
DEEPSEEK = ("<｜end▁of▁sentence｜>", "<｜begin▁of▁sentence｜>")
DEEPSEEK_PLAIN = (
    "<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>", "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>",
    "<｜tool▁output▁end｜>", "<｜tool▁sep｜>",
)  # fmt: skip
GLM_TOKENS = (
    "<|endoftext|>", "[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>", "<|system|>", "<|user|>", "<|assistant|>",
    "<|observation|>",
)  # fmt: skip
GLM_45_PLAIN = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<arg_key>",
    "</arg_key>", "<arg_value>", "</arg_value>",
)  # fmt: skip
LLAMA_3 = (
    "<|eot_id|>", "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>",
    "<|python_tag|>",
)  # fmt: skip
SENTENCEPIECE = ("</s>", "<s>", "<unk>")
MISTRAL_TOKENS = (
    *SENTENCEPIECE, "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]",
)  # fmt: skip
GEMMA = ("<eos>", "<bos>", "<pad>", "<unk>", "<start_of_turn>", "<end_of_turn>")
PHI_3 = ("<|endoftext|>", "<s>", "<|assistant|>", "<|user|>", "<|system|>", "<|end|>")
HARMONY = (
    "<|return|>", "<|startoftext|>", "<|endoftext|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>",
    "<|constrain|>", "<|call|>",
)  # fmt: skip


MARK = re.compile(
    r"<[|｜][^<>{}'\" |｜]+[|｜]?>|<[^<>{}'\" |｜]+[|｜]>|</?(?:start|end)_of_\w+>|</?s>|\[/?[A-Z_]{3,}\]"
)
"""Text that looks like a special token in a template."""


class Family(NamedTuple):
    """A family of models: its template, and its tokenizer's added tokens as they were published."""

    trl: str = ""
    """The name of its template in TRL; empty: TRL has none."""
    own: str = ""
    """A template of the same form, for where none is to be had."""
    special: tuple[str, ...] = ()
    """Tokens with `special: true`, the end of a text first."""
    plain: tuple[str, ...] = ()
    """Added tokens with `special: false`."""
    bos: str | None = None
    strips: tuple[str, ...] = ()
    """Tokens that take the white space behind them along (`rstrip: true`)."""
    pieces: bool = False
    """Words begin with "▁", as in SentencePiece's models, and so does each text behind an added token."""
    thoughts: str = ""
    """Place where the template takes thoughts: a key of the message, or "content"."""
    switch: str = ""
    """Its variable that turns thinking on and off."""
    format: str = "chat-template"


FAMILIES = {
    "ChatGLM2": Family(
        special=(*SENTENCEPIECE, "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop"), pieces=True, format="chatglm2"
    ),
    "ChatGLM3": Family(
        special=(*SENTENCEPIECE, "[MASK]", "[gMASK]", "[sMASK]", "sop", "eop", *GLM_TOKENS[6:]),
        pieces=True, format="chatglm3",
    ),
    "GLM-4": Family(own=GLM, special=GLM_TOKENS),
    "GLM-4-0414": Family(own=GLM_0414, special=GLM_TOKENS),
    "GLM-4.5": Family(
        "glm4moe", special=(*GLM_TOKENS, "/nothink"), plain=GLM_45_PLAIN, thoughts="reasoning_content",
        switch="enable_thinking",
    ),
    "Qwen2.5": Family("qwen2_5", CHATML, QWEN, QWEN_PLAIN),
    "Qwen3": Family("qwen3", "", QWEN, QWEN3_PLAIN, thoughts="reasoning_content", switch="enable_thinking"),
    "Qwen3-Instruct-2507": Family("qwen3_instruct_2507", CHATML, QWEN, QWEN3_PLAIN),
    "Qwen3-Thinking-2507": Family("", THINKING, QWEN, QWEN3_PLAIN, thoughts="reasoning_content"),
    "QwQ": Family("", ALWAYS_THINKING, QWEN, QWEN3_PLAIN, thoughts="content"),
    "R1-Distill-Qwen": Family(
        "deepseek_r1_distill", "", DEEPSEEK, (*DEEPSEEK_PLAIN[:2], "<|EOT|>", "<think>", "</think>"), DEEPSEEK[1],
        thoughts="content",
    ),
    "R1-Distill-Llama": Family(
        "deepseek_r1_distill", "", (*DEEPSEEK, *LLAMA_3[2:]), (*DEEPSEEK_PLAIN[:2], "<think>", "</think>"), DEEPSEEK[1],
        thoughts="content",
    ),
    "Llama-2": Family("", LLAMA_2, SENTENCEPIECE, bos="<s>", pieces=True),
    "Llama-3": Family("llama3", "", LLAMA_3, bos="<|begin_of_text|>"),
    "Llama-3.1": Family("llama3_1", "", LLAMA_3, bos="<|begin_of_text|>"),
    "Mistral-v0.1": Family("", MISTRAL, SENTENCEPIECE, bos="<s>", pieces=True),
    "Mistral-v0.3": Family("", MISTRAL, MISTRAL_TOKENS, bos="<s>", pieces=True),
    "Mistral-Nemo": Family("", MISTRAL.replace(" ~ m.content ~ ' [", "~ m.content ~ '["), MISTRAL_TOKENS, bos="<s>"),
    "Gemma-2": Family("gemma", "", GEMMA, bos="<bos>", pieces=False),
    "Gemma-3": Family("gemma3", "", GEMMA, bos="<bos>", pieces=False),
    "Phi-3": Family("phi3", "", PHI_3, bos="<s>", strips=PHI_3[2:], pieces=True),
    "Phi-4": Family(
        "", PHI_4, ("<|im_end|>", "<|endoftext|>", "<|im_start|>", "<|im_sep|>"), strips=("<|im_start|>", "<|im_sep|>")
    ),
    "InternLM2": Family(
        "", "{{ bos_token }}" + CHATML,
        (*SENTENCEPIECE, "<|im_start|>", "<|im_end|>", "<|action_start|>", "<|action_end|>"), bos="<s>", pieces=True,
    ),
    "MiniCPM": Family("", MINICPM, SENTENCEPIECE, ("<用户>", "<AI>"), bos="<s>", pieces=True),
    "gpt-oss": Family("gptoss", "", HARMONY, thoughts="thinking"),
    "DeepSeek-V3": Family("deepseekv3", "", DEEPSEEK, DEEPSEEK_PLAIN, DEEPSEEK[1], thoughts="content"),
}  # fmt: skip


def tokenizer_of(family: Family, template: str | None) -> Any:
    """A tokenizer of letters and bytes, with the family's added tokens. No version of a library changes its ids."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    added = [
        AddedToken(text, special=text in family.special, normalized=False, rstrip=text in family.strips)
        for text in (*family.special, *family.plain)
    ]
    if family.pieces:
        names = [
            *family.special[:3],
            "▁",
            *map(chr, range(33, 127)),
            *(f"<0x{byte:02X}>" for byte in range(256)),
        ]
        vocabulary = {name: number for number, name in enumerate(dict.fromkeys(names))}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        vocabulary = {letter: number for number, letter in enumerate([*letters, "ĊĊ"])}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("Ċ", "Ċ")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(added)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=family.special[0], pad_token=family.special[0], bos_token=family.bos,
        additional_special_tokens=[text for text in family.special[1:] if text != family.bos],
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    made.chat_template = template
    return made


# Cases


class Case(NamedTuple):
    """A row of a data file, and how it is trained on."""

    messages: list[dict[str, Any]]
    thinking: str = "auto"
    tools: list[dict[str, Any]] | None = None
    specials: bool = False
    """Whether HOLDER stands for the texts of all special tokens."""


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


TITLE = "## Losses, beside TRL"
"""A section of the page that bench/trl_losses.py makes, and that stays."""
CASES = {
    "one turn": Case([user("Who are you?"), assistant("A model.\n\nOf letters.")]),
    "three turns": Case(
        [user("one"), assistant("first"), user("two"), assistant("second"), user("three"), assistant("third")]
    ),
    "system": Case(
        [{"role": "system", "content": "Be brief."}, user("q"), assistant("a"), user("r"), assistant("b")]
    ),
    "thoughts": Case([user("2 + 2?"), assistant(THOUGHT + "four")]),
    "earlier thoughts": Case(
        [
            user("2 + 2?"),
            assistant(THOUGHT + "four"),
            user("and 2?"),
            assistant(THOUGHT.replace("bec", "bec") + "six"),
        ]
    ),
    "reasoning_content": Case([user("2 + 2?"), assistant("four", reasoning_content="because")]),
    "tools": Case(
        [
            user("What is the weather?"),
            assistant("", tool_calls=[CALL]),
            RESULT,
            assistant("It is warm."),
        ],
        tools=[TOOL],
    ),
    "special tokens in texts": Case(
        [user(f"say {HOLDER}, please"), assistant(f"no{HOLDER}thing")], specials=True
    ),
    "--thinking on": Case([user("2 + 2?"), assistant("four")], "on"),
    "--thinking off": Case([user("2 + 2?"), assistant(THOUGHT + "four")], "off"),
}

DIFFERENCES = {
    "A": "An example for each answer, because the conversation as it goes on is not what the model said: the template "
    "drops earlier thoughts, or writes the system text or the end mark elsewhere. Each is compared by itself.",
    "B": "What the template writes behind the end mark is not trained on: the end of the whole conversation, which a "
    "server never sees.",
    "M": "The template writes nothing that ends an answer. The mark that the next turn begins with does, as servers of "
    "these models stop at it.",
    "E": "The same, and the next turn begins with no mark either, or there can be none: the end of text follows.",
    "T": "The template leaves the thoughts of an answered conversation out, or the prompt begins one that isn't there. "
    "The prompt is the server's; behind it stand the thoughts, their closing mark and the answer as the template "
    "writes it.",
    "Q": "The answered conversation has other words before the last question: the system text stands in a question "
    "only while that is the last message. The prompt is the server's, what follows the question is the rendering's.",
    "K": "Thoughts are moved into the message's key, or the place in the content, where the template looks for them.",
    "P": "The template takes a content as a list of parts, and is given one.",
    "S": "The texts of special tokens stay text, where transformers would make tokens of them. All else is equal.",
    "D": "The template's rendering has a token across the border between prompt and answer. A server ends the prompt "
    "before it, so the answer begins there; the text is the same.",
}


# The reference


class RefusedError(Exception):
    """The published form has no place for the row."""


class Asked(NamedTuple):
    """An answer, as the published form has it."""

    prompt: list[int]
    answered: list[int]
    following: list[int]
    """Text that begins the next message."""
    thoughts: str
    """Thoughts before the answer, which have to be in an example."""
    question: str
    """The text of the message before."""


class Published:
    """A template as transformers renders it."""

    def __init__(self, name: str, family: Family, tokenizer: Any) -> None:
        self.name, self.family, self.tokenizer = name, family, tokenizer
        self.wire = False
        self.forms: frozenset[str] = frozenset()
        """Letters of DIFFERENCES: how messages are given otherwise than the row has them."""

    def answers(self, case: Case) -> list[Asked]:
        """Each answer of a case. Raises RefusedError."""
        messages = [self._message(message, case.thinking) for message in case.messages]
        found = []
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            thoughts = _thoughts_of(case.messages[number])
            on = bool(thoughts and self.family.thoughts) if case.thinking == "auto" else case.thinking == "on"
            options = {self.family.switch: on} if self.family.switch else {}
            options["tools"] = case.tools
            more = (
                {"role": "tool", "content": "x", "tool_call_id": "abcdefghi"}
                if "tool_calls" in message
                else user("x")
            )
            found.append(
                Asked(
                    self.rendered(messages[:number], add_generation_prompt=True, **options),
                    self.rendered(messages[: number + 1], **options),
                    self._following(messages[: number + 1], more, options),
                    "" if case.thinking == "off" or not self.family.thoughts else thoughts,
                    str(case.messages[number - 1]["content"]),
                )
            )
        return found

    def rendered(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Ids of a rendering. Raises RefusedError."""
        try:
            return list(self.tokenizer.apply_chat_template(messages, return_dict=False, **options))
        except Exception as error:  # a template may raise anything
            if not self.wire:  # arguments as a text, and no content, as they come over the wire
                self.wire = True
                try:
                    return self.rendered([_wire(message) for message in messages], **options)
                finally:
                    self.wire = False
            raise RefusedError(str(error)) from error

    def _following(
        self, messages: list[dict[str, Any]], more: dict[str, Any], options: Mapping[str, Any]
    ) -> list[int]:
        """What one more message begins with, behind an answer without thoughts, which stays as it is."""
        *before, last = messages
        plain = {key: text for key, text in last.items() if key not in ("reasoning_content", "thinking")}
        if isinstance(plain["content"], str):
            plain["content"] = plain["content"].removeprefix(THOUGHT)
        try:
            answered, longer = (self.rendered([*before, plain, *rest], **options) for rest in ([], [more]))
        except RefusedError:
            return []
        return longer[len(answered) :][:3] if longer[: len(answered)] == answered else []

    def _message(self, message: Mapping[str, Any], thinking: str) -> dict[str, Any]:
        """The message with its thoughts where the template looks for them."""
        thoughts, key = _thoughts_of(message), self.family.thoughts
        given = dict(message)
        if thoughts:
            inline = "reasoning_content" not in given
            answer = given["content"].removeprefix(THOUGHT)
            if thinking == "off" and key:
                given = assistant(answer)
            elif "K" in self.forms and key and key != "content":
                given = assistant(answer, **{key: thoughts})
            elif "K" in self.forms and key:
                given = assistant(THOUGHT + answer)
            elif not inline and key in ("", "content"):
                raise RefusedError("no place for thoughts")
        if "P" in self.forms:
            given["content"] = [{"type": "text", "text": given["content"]}]
        return given


class ChatGLM(Published):
    """The form that ChatGLM2 and ChatGLM3 were published with, which is no template."""

    def answers(self, case: Case) -> list[Asked]:
        """Answers as by a template."""
        if (
            case.tools
            or case.thinking != "auto"
            or any("reasoning_content" in each for each in case.messages)
        ):
            raise RefusedError("no place for it")
        second = self.family.format == "chatglm2"
        found = []
        for number, message in enumerate(case.messages):
            if message["role"] == "assistant":
                parts = self._second if second else self._third
                prompt = parts(case.messages[:number])
                answer = (
                    self.ids(message["content"])
                    if second
                    else [*self.ids("\n"), *self.ids(message["content"])]
                )
                end = [self.id("</s>")] if second else []
                following = [] if second else [self.id("<|user|>")]
                found.append(
                    Asked(
                        prompt,
                        [*prompt, *answer, *end],
                        following,
                        "",
                        str(case.messages[number - 1]["content"]),
                    )
                )
        return found

    def ids(self, text: str) -> list[int]:
        """A text by itself, as each is encoded: with a "▁" of its own, and nothing special in it."""
        return list(self.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    def id(self, token: str) -> int:
        return int(self.tokenizer.convert_tokens_to_ids(token))

    def _second(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        text, number = "", 0
        for message in messages:
            if message["role"] == "system":
                text = message["content"] + "\n\n"
            elif message["role"] == "user":
                number += 1
                text += f"[Round {number}]\n\n问：{message['content']}\n\n答："
            else:
                text += message["content"] + "\n\n"
        return [self.id("[gMASK]"), self.id("sop"), *self.ids(text)]

    def _third(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        ids = [self.id("[gMASK]"), self.id("sop")]
        for message in messages:
            ids += [self.id(f"<|{message['role']}|>"), *self.ids("\n"), *self.ids(message["content"])]
        return [*ids, self.id("<|assistant|>")]


def _wire(message: Mapping[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message["tool_calls"]
    ]
    return {**message, "content": message["content"] or None, "tool_calls": calls}


def _thoughts_of(message: Mapping[str, Any]) -> str:
    if "reasoning_content" in message:
        return str(message["reasoning_content"])
    return "because" if THOUGHT in str(message["content"]) else ""


# The comparison


class UnexplainedError(Exception):
    """A difference that is none of DIFFERENCES."""


class Judge:
    """A family's examples beside the published form."""

    def __init__(self, name: str, family: Family, template: str | None) -> None:
        self.family = family
        self.tokenizer = tokenizer_of(family, template)
        made = ChatGLM if family.format != "chat-template" else Published
        self.published = made(name, family, self.tokenizer)

    def cell(self, case: Case) -> tuple[str, frozenset[str], str]:
        """Cell of the table, the letters in it, and the reason where it is refused. Raises UnexplainedError."""
        hostile = "".join(self.family.special)
        try:
            examples = self._examples(case, hostile)
        except (BadRowError, DsrunError) as error:
            self._check_refused(case, str(error))
            return "refused", frozenset(), str(error)
        first: Exception | None = None
        for forms in (
            frozenset(),
            *map(frozenset, ("K", "P", "KP")),
        ):  # as the row is, then as the template may want it
            self.published.forms = forms
            try:
                answers = self.published.answers(case)
                if case.specials:
                    answers = [self._with_letters(asked, hostile) for asked in answers]
                letters = (
                    frozenset(self._compared(examples, answers)) | forms | frozenset("S" * case.specials)
                )
                return " ".join(["equal", *sorted(letters)]), letters, ""
            except (RefusedError, UnexplainedError) as error:
                first = first or error
        raise UnexplainedError(first)

    def _examples(self, case: Case, hostile: str) -> list[Encoded]:
        encoder = encoder_for(self.tokenizer, self.family.format, thinking=case.thinking)
        text = json.dumps({"messages": case.messages, "tools": case.tools}, ensure_ascii=False)
        row = json.loads(text.replace(HOLDER, json.dumps(hostile)[1:-1]))
        (made,) = encoder.encode_conversations(
            [FORMATS["messages"].read(row, Columns("prompt", "response"))], WIDE
        )
        if isinstance(made, BadRowError):
            raise made
        return made

    def _with_letters(self, asked: Asked, hostile: str) -> Asked:
        """The reference with the letters of special tokens where HOLDER's are."""
        plain = self.tokenizer(
            ["a" + HOLDER, "a" + hostile], add_special_tokens=False, split_special_tokens=True
        )
        (_, *holder), (_, *letters) = (
            [token for token in ids if token != self._gap] for ids in plain["input_ids"]
        )
        return asked._replace(
            **{name: _replaced(getattr(asked, name), holder, letters) for name in ("prompt", "answered")}
        )

    @property
    def _gap(self) -> int | None:
        """The id of a word's beginning, which every text gets."""
        return int(self.tokenizer.convert_tokens_to_ids("▁")) if self.family.pieces else None

    def _compared(self, examples: Sequence[Encoded], answers: Sequence[Asked]) -> Iterator[str]:
        spans = [(example, span) for example in examples for span in example.spans]
        if len(spans) != len(answers):
            raise UnexplainedError(f"{len(spans)} answers are trained on, of {len(answers)}")
        if len(examples) > 1:
            yield self._apart(examples)
        for (example, (start, stop)), asked in zip(spans, answers, strict=True):
            if example.ids[:start] != asked.prompt:
                raise UnexplainedError(
                    f"prompt {self._text(example.ids[:start])} for {self._text(asked.prompt)}"
                )
            yield from self._answer(example.ids[:stop], start, asked)

    def _apart(self, examples: Sequence[Encoded]) -> str:
        """Examples of their own are needed where no later one begins as an earlier one."""
        together = all(
            later.ids[: len(earlier.ids)] == earlier.ids for earlier, later in itertools.pairwise(examples)
        )
        if together:
            raise UnexplainedError(f"{len(examples)} examples where one would do")
        return "A"

    def _answer(self, ids: list[int], start: int, asked: Asked) -> Iterator[str]:
        """The differences of one answer. ids: the prompt and the answer."""
        whole = asked.answered
        begins = whole[:start] == asked.prompt and asked.thoughts in self._raw(whole[start:])
        if begins and ids == whole[: len(ids)]:
            if not self._ends(ids):
                raise UnexplainedError(f"ends with {self._text(ids[-3:])}, which is no mark")
            if self._raw(whole[len(ids) :]).strip():
                yield "B"
            return
        if begins and self._same(ids[:-1], whole):
            yield self._mark(ids[-1], asked)
            return
        text, rendered = self._raw(ids), self._raw(whole)
        if begins or self._raw(whole[: start + 1]).startswith(self._raw(asked.prompt)):
            if rendered.startswith(text) and not rendered[len(text) :].strip():
                yield "D"
                return
        elif _tail(text, asked.question) == _tail(rendered, asked.question).rstrip():
            yield "Q"
            return
        yield self._restored(start, ids, asked)

    def _restored(self, start: int, ids: list[int], asked: Asked) -> str:
        """Thoughts put back: the prompt's own opening, the thoughts, the closing mark, and the answer as rendered."""
        prompt, rendered = self._raw(asked.prompt), self._raw(asked.answered)
        spoken = self._raw(ids[start:])
        opened = prompt.rstrip().endswith("<think>")
        before, closed, answer = spoken.partition("</think>")
        base = prompt.rstrip().removesuffix("<think>") if opened else prompt
        shown = rendered.removeprefix(base).rpartition("</think>")[2].strip()
        if not (
            rendered.startswith(base)
            and closed
            and before.strip() == ("" if opened else "<think>\n") + asked.thoughts
            and answer.strip() == shown
        ):
            raise UnexplainedError(f"{self._text(ids)} for {self._text(asked.answered)}")
        return "T"

    def _mark(self, token: int, asked: Asked) -> str:
        """Mark that ends an answer behind which the template writes none."""
        if token in asked.following[:2]:
            return "M"
        if token == self.tokenizer.eos_token_id:
            return "E"
        raise UnexplainedError(f"ends with {self._text([token])}; next is {self._text(asked.following)}")

    def _same(self, ids: list[int], whole: list[int]) -> bool:
        """Whether all of a rendering is there, but for white space at its end."""
        return ids == whole[: len(ids)] and not self._raw(whole[len(ids) :]).strip()

    def _ends(self, ids: list[int]) -> bool:
        return self.tokenizer.convert_ids_to_tokens(ids[-1]) in {*self.family.special, *self.family.plain}

    def _check_refused(self, case: Case, why: str) -> None:
        """Raise UnexplainedError where the published form has a place for what dsrun refuses."""
        self.published.forms = frozenset("K" if self.family.thoughts not in ("", "content") else "")
        if case.thinking != "auto" and not self.family.switch:
            messages = [user("q")]
            if self.family.format != "chat-template":
                return  # a form of its own, that has no variables
            off, on = (
                self.published.rendered(
                    messages, add_generation_prompt=True, enable_thinking=value, thinking=value
                )
                for value in (False, True)
            )
            if off == on:
                return
        try:
            answers = self.published.answers(case)
        except RefusedError:
            return
        texts = [self._raw(asked.answered) for asked in answers]
        if any(
            asked.thoughts and asked.thoughts not in text for asked, text in zip(answers, texts, strict=True)
        ):
            return
        if case.tools and not all(
            "get_weather" in text and ("20 degrees" in text or number == 0) and "Paris" in text
            for number, text in enumerate(texts)
        ):
            return
        raise UnexplainedError(f"refused: {why}")

    def _raw(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def _text(self, ids: Sequence[int]) -> str:
        return repr(self._raw(ids)[-300:])


def _tail(text: str, question: str) -> str:
    """Text behind the last question."""
    return text.rpartition(question)[2]


def _replaced(ids: Sequence[int], part: Sequence[int], by: Sequence[int]) -> list[int]:
    found: list[int] = []
    place = 0
    while place < len(ids):
        if list(ids[place : place + len(part)]) == list(part):
            found += by
            place += len(part)
        else:
            found.append(ids[place])
            place += 1
    return found


# All that TRL ships


def survey(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Table for each of TRL's templates but those of its own training."""
    templates = {
        path.stem: path.read_text(encoding="utf-8")
        for path in sorted(folder.glob("*.jinja"))
        if not path.stem.endswith("_training")
    }
    return table({name: (guessed(text), text, "") for name, text in templates.items()})


def guessed(template: str) -> Family:
    """A family for a template that nothing but its text is known of: what looks like a mark is a token."""
    marks = dict.fromkeys(MARK.findall(template))
    special = [mark for mark in marks if "think" not in mark]
    plain = [mark for mark in ("<think>", "</think>", "<tool_call>", "</tool_call>") if mark in template]
    keys = [
        name for name in ("reasoning_content", "reasoning", "thinking") if re.search(rf"\W{name}\W", template)
    ]
    thoughts = "content" if "</think>" in template else ""
    return Family(
        own=template, special=("<end>", "<bos>", *special), plain=tuple(plain), bos="<bos>",
        thoughts=keys[0] if keys else thoughts, switch="enable_thinking" if "enable_thinking" in template else "",
    )  # fmt: skip


# The page


def template_of(
    name: str, family: Family, trl: Path | None, templates: Path | None
) -> tuple[str | None, str]:
    """A family's template, and where it is from."""
    if family.format != "chat-template":
        return None, f"dsrun's format {family.format}"
    given = templates / f"{name.lower()}.jinja" if templates else None
    if given and given.is_file():
        return _read(given, "a published file")
    file = trl / f"{family.trl}.jinja" if trl and family.trl else None
    if file and file.is_file():
        return _read(file, f"TRL's {family.trl}")
    if not family.own:
        raise SystemExit(f"{name}: TRL's folder is needed, which --trl names (pip install trl --no-deps)")
    return family.own, "own template of the same form"


def _read(path: Path, source: str) -> tuple[str, str]:
    text = path.read_text(encoding="utf-8")
    return text, f"{source}, {hashlib.sha256(text.encode()).hexdigest()[:8]}"


def trl_folder() -> Path | None:
    """The templates of an installed TRL, which isn't imported."""
    spec = importlib.util.find_spec("trl")
    return Path(spec.origin).parent / "chat_templates" if spec and spec.origin else None


def table(
    families: Mapping[str, tuple[Family, str | None, str]],
) -> tuple[list[str], list[str], list[str]]:
    """The lines of a table, why rows are refused, and the cells that are neither equal nor explained.

    families: each with its template, and what stands in the last column.
    """
    lines, reasons, wrong = [], dict[str, dict[str, list[str]]](), []
    for name, (family, template, source) in families.items():
        judge = Judge(name, family, template)
        cells = []
        for title, case in CASES.items():
            try:
                cell, _, why = judge.cell(case)
            except UnexplainedError as error:
                cell, why = "**differs**", ""
                wrong.append(f"{name}, {title}: {error}")
            if why:
                reasons.setdefault(why.splitlines()[0], {}).setdefault(title, []).append(name)
            cells.append(cell)
        lines.append(f"| {' | '.join([name, *cells, *[source] * bool(source)])} |")
    told = [
        f"- {why}. " + "; ".join(f"*{title}*: {', '.join(names)}" for title, names in where.items())
        for why, where in reasons.items()
    ]
    return lines, told, wrong


def page(
    lines: list[str], reasons: list[str], surveyed: tuple[list[str], list[str], list[str]] | None
) -> str:
    names = ("transformers", "tokenizers", "jinja2")
    versions = ", ".join(f"{name} {version(name)}" for name in names)
    text = [
        "# What is trained on, beside what transformers renders",
        "",
        f"Made by `python bench/chat_text.py` on {date.today()}: {versions}, Python {platform.python_version()}.",
        "",
        "An example's prompt is compared with `apply_chat_template(..., add_generation_prompt=True)`, and all of it "
        "with the beginning of the answered conversation, token by token. *Equal* says that both are the same, but for "
        "white space behind the end mark. Letters are differences, each checked by the script, which ends with 1 where "
        "anything else differs. A template with a switch for thinking is asked with it on where the answer has "
        "thoughts that it knows, and off where not. ChatGLM2 and ChatGLM3 have no template: dsrun's own formats are "
        "compared with their published form, which the script writes.",
        "",
        f"| | {' | '.join(CASES)} | template |",
        f"| --- |{' --- |' * (len(CASES) + 1)}",
        *lines,
        "",
        "Tokenizers are made by the script: letters and bytes, two line breaks as one token, and each family's added "
        "tokens with their `special` and `rstrip` flags as published. Behind a template's source stand the first "
        "digits of its SHA-256.",
        "",
        "## The letters",
        "",
        *(f"- **{letter}** {what}" for letter, what in sorted(DIFFERENCES.items())),
        "",
        "## Why rows are refused",
        "",
        "The script checks that the published form has no place for them either: it raises, leaves the text out, or "
        "has no variable that changes the prompt.",
        "",
        *reasons,
        "",
    ]
    if surveyed:
        rows, refusals, _ = surveyed
        refused = sum(row.count("| refused ") for row in rows)
        text += [
            "## Every template that TRL ships",
            "",
            f"{len(rows)} templates, {len(rows) * len(CASES)} rows, compared in the same way: "
            f"{len(rows) * len(CASES) - refused} give examples, {refused} are refused. Special tokens are guessed "
            "from a template's text.",
            "",
            f"| | {' | '.join(CASES)} |",
            f"| --- |{' --- |' * len(CASES)}",
            *rows,
            "",
            "Refused:",
            "",
            *refusals,
            "",
        ]
    return "\n".join(text)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trl", type=Path, default=trl_folder(), metavar="DIR")
    parser.add_argument("--templates", type=Path, metavar="DIR")
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--output", type=Path)
    given = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    families = {name: family for name, family in FAMILIES.items() if name in (given.family or FAMILIES)}
    lines, reasons, wrong = table(
        {
            name: (family, *template_of(name, family, given.trl, given.templates))
            for name, family in families.items()
        }
    )
    surveyed = survey(given.trl) if given.trl and not given.family else None
    text = page(lines, reasons, surveyed)
    if given.output:
        before = given.output.read_text(encoding="utf-8") if given.output.is_file() else ""
        kept = before[before.index(TITLE) :] if TITLE in before else ""
        given.output.write_text(f"{text}\n{kept}" if kept else text, encoding="utf-8")
    else:
        print(text)
    wrong += surveyed[2] if surveyed else []
    print(*wrong, sep="\n", file=sys.stderr, end="\n" * bool(wrong))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
