"""How long the rows of a data file are, in a model's own tokens, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.jobs.job import DataSpec
from dsrun.rows import format_of, read_rows
from dsrun.talks import BadRowError, Columns, Talk, talk_of

SPECIALS = 4
"""Tokens that a prompt format puts around a prompt, about: a begin mark, the roles, an end mark."""
CHUNK = 512
MOST_ROWS = 20_000
"""Rows that are measured: a longer file is sampled evenly."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row, all its prompts and responses together, as training would cut them.

    rows: measured; mean, median, p95, longest: tokens. cut: share of rows that are longer than the limits.
    """

    rows: int
    mean: float
    median: int
    p95: int
    longest: int
    cut: float


def measure(data: DataSpec, tokenizer_dir: Path) -> Lengths:
    """The lengths of the training files with the tokenizer of a folder (tokenizer.json or tokenizer.model).

    Rows that can't be read, or lack a column, are left out, as training does. Raises DsrunError where there is no
    tokenizer, or no row.
    """
    encode = _tokenizer(tokenizer_dir)
    source, target = data.max_source_length, data.max_target_length
    whole: list[int] = []
    cut = 0
    for talks in _chunks(data):
        questions, answers = _counted(talks, encode)
        for talk in talks:
            wanted = [(next(questions) + SPECIALS, next(answers) + 1) for _ in talk.rounds]
            if len(wanted) > 1:
                cut += sum(map(sum, wanted)) > source + target
                whole.append(min(sum(map(sum, wanted)), source + target))
            else:
                ((prompt, response),) = wanted
                cut += prompt > source or response > target
                whole.append(min(prompt, source) + min(response, target))
    if not whole:
        columns = f"{data.prompt_column} and {data.response_column}"
        raise DsrunError(f"has no row with {columns}", where=data.train_file)
    whole.sort()
    count = len(whole)
    return Lengths(
        count, sum(whole) / count, whole[count // 2], whole[count * 95 // 100], whole[-1], cut / count
    )  # fmt: skip


def _counted(
    talks: Sequence[Talk], encode: Callable[[Sequence[str]], list[int]]
) -> tuple[Iterator[int], ...]:
    """Tokens of every question (its first with the system's text) and of every answer, in the order of the talks."""
    questions = [
        f"{'' if number else talk.system}{spoken.question}{spoken.extra}"
        for talk in talks
        for number, spoken in enumerate(talk.rounds)
    ]
    answers = [spoken.answer for talk in talks for spoken in talk.rounds]
    return iter(encode(questions)), iter(encode(answers))


def _chunks(data: DataSpec) -> Iterable[list[Talk]]:
    """Talks, some hundred at a time; of many an even sample."""
    columns = Columns(data.prompt_column, data.response_column, data.history_column)
    talks: list[Talk] = []
    for path in map(Path, data.train_files):
        data_format = format_of(path, columns, data.data_format)
        for _, row in read_rows(path):
            with suppress(BadRowError):
                talks.append(talk_of(row, data_format, columns))
    step = max(1, -(-len(talks) // MOST_ROWS))
    talks = talks[::step]
    for start in range(0, len(talks), CHUNK):
        yield talks[start : start + CHUNK]


def _tokenizer(folder: Path) -> Callable[[Sequence[str]], list[int]]:
    """A function from texts to their numbers of tokens."""
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
            return [len(found.ids) for found in fast.encode_batch(list(texts), add_special_tokens=False)]

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
    return DsrunError(
        f"measuring a file needs {package}",
        where="--train-file",
        hint="Install it: pip install 'dsrun[train]'",
    )
