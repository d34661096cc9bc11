"""Lengths of a data file's rows, in a model's own tokens, without torch."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from dsrun.data import thoughts
from dsrun.data.chat_templates import folder_template, rendered
from dsrun.data.conversations import BadRowError, Conversation, TextDocument, Turn, columns_of, content_of
from dsrun.data.rows import format_of, read_rows
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.job.job import DataSpec

SPECIALS = 4
"""Tokens that a prompt format adds to a prompt, about: a start token, the roles, an end token."""
CHUNK = 512
FRAME = 16
"""Tokens that a prompt format adds to a prompt, at most: enough for every format."""
COVERED_SHARE = 0.99
MOST_CUT = 0.05
"""Share of examples that limits may cut. Where it would be more, the user has to say that this is meant."""
LIMIT_STEP = 64
QUESTION, ANSWER = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
TOOL = {"type": "function", "function": {"name": "a", "description": "a", "parameters": {"type": "object"}}}
MOST_ROWS = 20_000
"""Rows of a sample, at most: a longer file is measured by an even sample."""


@dataclass(frozen=True)
class SequenceLengths:
    """Statistics of examples' lengths: tokens of all their prompts and responses, as training would cut them."""

    rows: int
    """How many rows were measured."""
    mean: float
    median: int
    p95: int
    longest: int
    cut: float
    """Share of rows that are longer than the limits."""
    percentiles: tuple[int, ...] = ()
    """Tokens of the shortest row, of that which 1 % are no longer than, and so on to the longest: 101 numbers."""


def measure(data: DataSpec, tokenizer_dir: Path) -> SequenceLengths:
    """Measure the training files with a folder's tokenizer (tokenizer.json or tokenizer.model).

    Rows that can't be read, or lack a column, are left out, as training does. Raises DsrunError where there is no
    tokenizer, or no row.
    """
    encode = _tokenizer(tokenizer_dir)
    source, target = data.max_source_length, data.max_target_length
    lengths: list[int] = []
    cut = 0
    for contents in _chunks(data):
        conversations = [content for content in contents if isinstance(content, Conversation)]
        texts = encode([content.text for content in contents if isinstance(content, TextDocument)])
        lengths += [length for tokens in texts for length in _windows(tokens + 1, source + target)]
        questions, answers = _counted(conversations, encode)
        for conversation in conversations:
            wanted = [(next(questions) + SPECIALS, next(answers) + 1) for _ in conversation.turns]
            if len(wanted) > 1 or data.max_length:
                cut += sum(map(sum, wanted)) > source + target
                lengths.append(min(sum(map(sum, wanted)), source + target))
            else:
                ((prompt, response),) = wanted
                cut += prompt > source or response > target
                lengths.append(min(prompt, source) + min(response, target))
    if not lengths:
        columns = f"{data.prompt_column} and {data.response_column}, or {data.text_column}"
        raise DsrunError(f"has no row with {columns}", where=data.train_file)
    lengths.sort()
    count = len(lengths)
    return SequenceLengths(
        count, sum(lengths) / count, lengths[count // 2], lengths[count * 95 // 100], lengths[-1], cut / count,
        tuple(lengths[(count - 1) * percent // 100] for percent in range(101)),
    )  # fmt: skip


class ExampleLength(NamedTuple):
    """Tokens of an example."""

    prompt: int
    """Tokens of all that stands before the last response."""
    response: int
    """Tokens of the last response with its end mark."""
    turns: int = 1

    def cut(self, source: int, target: int, *, shared: bool = False) -> bool:
        """Whether these limits shorten the example. Several turns share their sum (dsrun/training/data/prompts.py), and
        so do prompt and response where one limit is given for both (shared)."""
        if self.turns > 1 or shared:
            return self.prompt + self.response > source + target
        return self.prompt > source or self.response > target


def example_lengths(data: DataSpec, tokenizer_dir: Path, chat_template: str = "") -> list[ExampleLength]:
    """The length of each training example, or of an even sample of many; without documents, which are never cut.

    chat_template: one that takes the place of the folder's. Rows that can't be read are left out, as training does.
    Raises DsrunError where there is no tokenizer.
    """
    encode = _tokenizer(tokenizer_dir)
    frames = _frames(tokenizer_dir, encode, chat_template)
    lengths = []
    for contents in _chunks(data):
        conversations = [content for content in contents if isinstance(content, Conversation)]
        questions, answers = _counted(conversations, encode)
        for conversation in conversations:
            pairs = [
                (next(questions) + frames.question, next(answers) + frames.answer) for _ in conversation.turns
            ]
            *_, (_, last) = pairs
            prompt = sum(map(sum, pairs)) - last + frames.tools * bool(conversation.tools)
            lengths.append(ExampleLength(prompt, last, len(pairs)))
    return lengths


def fitting(lengths: Sequence[ExampleLength], positions: int | None) -> tuple[int, int]:
    """Limits of prompt and response that COVERED_SHARE of the examples keep to, as far as the model's positions go.

    Where the two are too long for the model, the response gets the positions that the prompt leaves, and at least half.
    """
    rare = (1 - COVERED_SHARE) / 2  # an example may be too long in either part
    place = math.ceil(len(lengths) * (1 - rare)) - 1
    source = _rounded(sorted(length.prompt for length in lengths)[place])
    target = _rounded(sorted(length.response for length in lengths)[place])
    if positions is not None and source + target > positions:
        target = min(target, max(positions // 2, positions - source))
        source = positions - target
    return source, target


def fitting_together(lengths: Sequence[ExampleLength]) -> int:
    """The limit of prompt and response together that COVERED_SHARE of the examples keep to."""
    place = math.ceil(len(lengths) * COVERED_SHARE) - 1
    return _rounded(sorted(length.prompt + length.response for length in lengths)[place])


def divided(longest: int, lengths: Sequence[ExampleLength]) -> tuple[int, int]:
    """The parts of a limit that prompt and response share.

    They hold where both are too long; the second is also how long an answer may get in an evaluation. So the response
    gets what COVERED_SHARE of the responses need, from what the prompts leave or from its half. Without examples both
    get a half.
    """
    half = longest // 2
    if not lengths:
        return longest - half, half
    place = math.ceil(len(lengths) * (1 - (1 - COVERED_SHARE) / 2)) - 1
    prompt = sorted(length.prompt for length in lengths)[place]
    response = _rounded(sorted(length.response for length in lengths)[place])
    target = min(response, max(half, longest - prompt))
    return longest - target, target


def _rounded(tokens: int) -> int:
    return -(-tokens // LIMIT_STEP) * LIMIT_STEP


class Frames(NamedTuple):
    """Tokens that a chat template writes itself."""

    question: int = FRAME
    answer: int = 1
    """Tokens around an answer, its end mark among them."""
    tools: int = 0
    """Tokens around the tools of a conversation: what they are, and how they are called."""


def _frames(folder: Path, encode: Callable[[Sequence[str]], list[int]], chat_template: str) -> Frames:
    """The tokens that the chat template adds; the usual number without a template that can be rendered here."""
    try:
        template = chat_template or folder_template(folder)
        if template is None:
            return Frames()
        prompt = rendered(template, [QUESTION])
        answered = rendered(template, [QUESTION, ANSWER], answered=True)
        answer = thoughts.continuation(prompt, answered, Turn("", ""), thoughts.marks_in(template)).text
        question, whole = encode([prompt, answer])
        frames = Frames(max(FRAME, question), max(1, whole - 1))
    except Exception:  # a template may do anything, and may need what only transformers gives it
        return Frames()
    try:
        (with_tools,) = encode([rendered(template, [QUESTION], tools=[TOOL])])
    except Exception:  # it may refuse tools in this form; the other figures stand
        return frames
    return frames._replace(tools=max(0, with_tools - question))


def _counted(
    conversations: Sequence[Conversation], encode: Callable[[Sequence[str]], list[int]]
) -> tuple[Iterator[int], ...]:
    """Tokens of each question and of each answer, in order. A first question has the system text and the tools."""
    questions, answers = [], []
    for conversation in conversations:
        before = conversation.system + "".join(map(json_text, conversation.tools))
        for turn in conversation.turns:
            results = "".join(str(result["content"]) for result in turn.results)
            questions.append(f"{before}{results}{turn.question}{turn.extra}")
            answers.append(f"{turn.thoughts or ''}{turn.answer}{''.join(map(json_text, turn.calls))}")
            before = ""
    return iter(encode(questions)), iter(encode(answers))


def _windows(tokens: int, longest: int) -> list[int]:
    """The lengths of a document's windows, as training divides it."""
    return [min(longest, tokens - first) for first in range(0, tokens - 1, longest - 1)]


def _chunks(data: DataSpec) -> Iterable[list[Conversation | TextDocument]]:
    """Conversations and documents, CHUNK at a time; of many an even sample."""
    columns = columns_of(data)
    conversations: list[Conversation | TextDocument] = []
    number, step = 0, 1
    for path in map(Path, data.train_files):
        data_format = format_of(path, columns, data.data_format)
        for _, row in read_rows(path):
            number += 1
            if (number - 1) % step:
                continue
            with suppress(BadRowError):
                conversations.append(content_of(row, data_format, columns))
            # The file's length isn't known before its end, and the sample is to be even: whenever it is full, every
            # second row of it goes, and from here on only every second is taken.
            if len(conversations) > MOST_ROWS:
                del conversations[1::2]
                step *= 2
    for start in range(0, len(conversations), CHUNK):
        yield conversations[start : start + CHUNK]


def _tokenizer(folder: Path) -> Callable[[Sequence[str]], list[int]]:
    """A function that counts the tokens of texts. Raises DsrunError where the folder has no tokenizer to read."""
    if (folder / "tokenizer.json").is_file():
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        try:
            from tokenizers import Tokenizer
        except ModuleNotFoundError:
            raise _missing("tokenizers") from None
        try:
            fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # the library raises bare Exception for a file that it can't read
            raise DsrunError(f"can't be read: {error}", where=str(folder / "tokenizer.json")) from error

        def count(texts: Sequence[str]) -> list[int]:
            return [
                len(encoding.ids) for encoding in fast.encode_batch(list(texts), add_special_tokens=False)
            ]

        return count
    if (folder / "tokenizer.model").is_file():
        try:
            from sentencepiece import SentencePieceProcessor
        except ModuleNotFoundError:
            raise _missing("sentencepiece") from None
        try:
            pieces = SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
        except (RuntimeError, OSError) as error:
            raise DsrunError(f"can't be read: {error}", where=str(folder / "tokenizer.model")) from error
        return lambda texts: [len(ids) for ids in pieces.encode(list(texts))]
    raise DsrunError(
        "holds no tokenizer.json and no tokenizer.model",
        where=str(folder),
        hint="Give the length of a row instead: --seq-len TOKENS",
    )


def _missing(package: str) -> DsrunError:
    from dsrun.packages import install

    return DsrunError(
        f"measuring a file needs {package}", where="--train-file", hint=f"Install it: {install(package)}"
    )
