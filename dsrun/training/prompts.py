"""Prompt formats: how a prompt and its response become token ids.

A format is a function from the prompt's text to segments. A segment is a text, or a `Special`: one token looked
up by name. Texts are encoded segment by segment with special tokens split, so that nothing a user writes can turn
into a role or an end mark.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsrun.errors import DsrunError


class Special(NamedTuple):
    """A special token, by the names it has in different checkpoints; the first that the vocabulary holds counts."""

    names: tuple[str, ...]


Segment = str | Special
BOS = Special(("<bos>",))
"""Stands for the tokenizer's own beginning-of-text token, or for nothing where it has none."""

_GMASK = (Special(("[gMASK]",)), Special(("sop", "<sop>")))


@dataclass(frozen=True)
class PromptFormat:
    """segments: prompt -> segments; response: response -> segments; end: the token that ends a response.

    chat_template: the same frame in Jinja, for an exported tokenizer that has none of its own, so that
    `apply_chat_template` and pipelines ask the way the model was trained. bos, end, gmask: the tokens' texts.
    """

    segments: Callable[[str], list[Segment]]
    chat_template: str
    response: Callable[[str], list[Segment]] = lambda text: [text]
    end: Special | None = None


def _template(user: str, *, before: str = "", assistant: str = "{{ message.content }}", ask: str = "") -> str:
    """A chat template: what stands before the talk, around a user's text, and around an answer."""
    return (
        before
        + "{% for message in messages %}{% if message.role == 'user' %}"
        + user
        + "{% elif message.role == 'assistant' %}"
        + assistant
        + "{{ eos_token }}{% endif %}{% endfor %}"
        + (f"{{% if add_generation_prompt %}}{ask}{{% endif %}}" if ask else "")
    )


def _plain(prompt: str) -> list[Segment]:
    return [BOS, prompt + "\n"]


def _chatglm2(prompt: str) -> list[Segment]:
    return [*_GMASK, f"[Round 1]\n\n问：{prompt}\n\n答："]


def _chatglm3(prompt: str) -> list[Segment]:
    return [*_GMASK, Special(("<|user|>",)), "\n", prompt, Special(("<|assistant|>",))]


def _llama2(prompt: str) -> list[Segment]:
    return [BOS, f"[INST] {prompt} [/INST]"]


def _llama3(prompt: str) -> list[Segment]:
    start, end = Special(("<|start_header_id|>",)), Special(("<|end_header_id|>",))
    return [
        BOS,
        start,
        "user",
        end,
        f"\n\n{prompt}",
        Special(("<|eot_id|>",)),
        start,
        "assistant",
        end,
        "\n\n",
    ]


def _alpaca(prompt: str) -> list[Segment]:
    return [BOS, f"### Instruction:\n{prompt}\n\n### Response:\n"]


FORMATS = {
    "plain": PromptFormat(
        _plain, _template("{{ message.content }}\n", before="{{ bos_token if bos_token else '' }}")
    ),
    "chatglm2": PromptFormat(
        _chatglm2,
        _template(
            "{{ '' if loop.first else '\n\n' }}[Round {{ loop.index0 // 2 + 1 }}]\n\n问：{{ message.content }}\n\n答：",
            before="[gMASK]<sop>",
        ),
    ),
    "chatglm3": PromptFormat(
        _chatglm3,
        _template(
            "<|user|>\n{{ message.content }}",
            before="[gMASK]<sop>",
            assistant="<|assistant|>\n{{ message.content }}",
            ask="<|assistant|>",
        ),
        response=lambda text: ["\n", text],
    ),
    "llama-2": PromptFormat(_llama2, _template("{{ bos_token }}[INST] {{ message.content }} [/INST]")),
    "llama-3": PromptFormat(
        _llama3,
        _template(
            "<|start_header_id|>user<|end_header_id|>\n\n{{ message.content }}<|eot_id|>",
            before="{{ bos_token }}",
            assistant="<|start_header_id|>assistant<|end_header_id|>\n\n{{ message.content }}",
            ask="<|start_header_id|>assistant<|end_header_id|>\n\n",
        ),
        end=Special(("<|eot_id|>",)),
    ),
    "alpaca": PromptFormat(
        _alpaca,
        _template(
            "{{ bos_token if bos_token else '' }}### Instruction:\n{{ message.content }}\n\n### Response:\n"
        ),
    ),
}
CHAT_TEMPLATE = "chat-template"
PLACEHOLDER = "dsrun-places-the-prompt-here"


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
        if name == CHAT_TEMPLATE:
            if not tokenizer.chat_template:
                raise DsrunError("the tokenizer has no chat template", hint="Choose another prompt format.")
            self.format = PromptFormat(lambda prompt: [prompt], tokenizer.chat_template)
        elif name in FORMATS:
            self.format = FORMATS[name]
        else:
            known = ", ".join([*FORMATS, CHAT_TEMPLATE, "auto"])
            raise DsrunError(f"unknown prompt format {name!r}", hint=f"Known: {known}")
        self.end_ids = self._special_ids(self.format.end) if self.format.end else self._eos_ids()

    def _eos_ids(self) -> list[int]:
        if self.tokenizer.eos_token_id is None:
            raise DsrunError("the tokenizer has no end-of-text token, so a response could never end")
        return [self.tokenizer.eos_token_id]

    def _special_ids(self, special: Special) -> list[int]:
        if special is BOS:
            return [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        vocabulary = self.tokenizer.get_vocab()
        for name in special.names:
            if name in vocabulary:
                return [vocabulary[name]]
        raise DsrunError(
            f"the tokenizer has no token {special.names[0]!r}, which the prompt format {self.name} needs",
            hint="The folder's tokenizer is not this model's own.",
        )

    def encode_texts(self, texts: Sequence[str], *, split_special: bool = True) -> list[list[int]]:
        """Ids of each text, without any token added; special tokens in the text stay text."""
        if not texts:
            return []
        encoded = self.tokenizer(
            list(texts), add_special_tokens=False, split_special_tokens=split_special, verbose=False
        )
        return [list(ids) for ids in encoded["input_ids"]]

    def encode_segments(self, rows: Sequence[Sequence[Segment]]) -> list[list[int]]:
        """Ids of each row's segments, one after the other."""
        texts = [segment for row in rows for segment in row if isinstance(segment, str)]
        encoded = iter(self.encode_texts(texts))
        return [
            [
                token
                for segment in row
                for token in (next(encoded) if isinstance(segment, str) else self._special_ids(segment))
            ]
            for row in rows
        ]

    def encode_prompts(self, prompts: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each prompt in its frame, and how many had to be shortened.

        A prompt longer than `limit` tokens (frame included) loses the end of the user's text, never the frame:
        the mark that tells the model to answer stays.
        """
        encoded = self._encode_whole(prompts)
        shortened = 0
        for place, ids in enumerate(encoded):
            if len(ids) > limit:
                encoded[place] = self._fit(prompts[place], len(ids), limit)
                shortened += 1
        return encoded, shortened

    def encode_responses(self, responses: Sequence[str], limit: int) -> tuple[list[list[int]], int]:
        """Ids of each response with its end mark, and how many were cut to `limit` tokens (end mark included)."""
        rows = self.encode_segments([self.format.response(response) for response in responses])
        room = limit - len(self.end_ids)
        cut = sum(len(ids) > room for ids in rows)
        return [ids[:room] + self.end_ids for ids in rows], cut

    def _encode_whole(self, prompts: Sequence[str]) -> list[list[int]]:
        if self.name != CHAT_TEMPLATE:
            return self.encode_segments([self.format.segments(prompt) for prompt in prompts])
        encoded = self.encode_texts([self._in_template(prompt) for prompt in prompts], split_special=False)
        added = self.tokenizer.get_added_vocab()
        for place, prompt in enumerate(prompts):
            if any(token in prompt for token in added):
                encoded[place] = self._around(prompt)
        return encoded

    def _in_template(self, prompt: str) -> str:
        message = {"role": "user", "content": prompt}
        return str(self.tokenizer.apply_chat_template([message], tokenize=False, add_generation_prompt=True))

    def _around(self, prompt: str) -> list[int]:
        """Ids of a prompt that holds the text of a special token: the template's are tokens, the user's stay text."""
        before, found, after = self._in_template(PLACEHOLDER).partition(PLACEHOLDER)
        if not found or PLACEHOLDER in after:
            raise DsrunError(
                "a prompt holds the text of a special token, and the chat template changes what it frames",
                hint="Take such rows out of the data.",
            )
        frame = self.encode_texts([before, after], split_special=False)
        return frame[0] + self.encode_texts([prompt])[0] + frame[1]

    def _fit(self, prompt: str, length: int, limit: int) -> list[int]:
        """The longest beginning of the prompt whose frame and text fit, found by halving."""
        if len(self._encode_whole([""])[0]) > limit:
            raise DsrunError(
                f"the prompt format {self.name} alone takes more than {limit} tokens",
                hint="Raise --max-source-length.",
            )
        low, high = 0, max(1, len(prompt) * limit // length)
        while high < len(prompt) and len(self._encode_whole([prompt[:high]])[0]) <= limit:
            low, high = high, min(len(prompt), high + max(8, high // 8))
        while high - low > 1:
            middle = (low + high) // 2
            if len(self._encode_whole([prompt[:middle]])[0]) <= limit:
                low = middle
            else:
                high = middle
        return self._encode_whole([prompt[:low]])[0]
