"""How long the rows of a data file are, in a model's own tokens, without torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dsrun.errors import DsrunError
from dsrun.jobs.job import DataSpec
from dsrun.rows import read_rows, texts_of

SPECIALS = 4
"""Tokens that a prompt format puts around a prompt, about: a begin mark, the roles, an end mark."""
CHUNK = 512
MOST_ROWS = 20_000
"""Rows that are measured: a longer file is sampled evenly."""


@dataclass(frozen=True)
class Lengths:
    """Tokens of a row, prompt and response together, as training would cut them.

    rows: measured; mean, median, p95, longest: tokens. cut: share of rows that are longer than the limits.
    """

    rows: int
    mean: float
    median: int
    p95: int
    longest: int
    cut: float


def measure(data: DataSpec, tokenizer_dir: Path) -> Lengths:
    """The lengths of a training file with the tokenizer of a folder (tokenizer.json or tokenizer.model).

    Rows that can't be read, or lack a column, are left out, as training does. Raises DsrunError where there is no
    tokenizer, or no row.
    """
    encode = _tokenizer(tokenizer_dir)
    limits = (data.max_source_length, data.max_target_length)
    whole: list[int] = []
    cut = 0
    for prompts, responses in _chunks(data):
        for prompt, response in zip(encode(prompts), encode(responses), strict=True):
            wanted = (prompt + SPECIALS, response + 1)
            cut += any(length > limit for length, limit in zip(wanted, limits, strict=True))
            whole.append(sum(map(min, wanted, limits)))
    if not whole:
        columns = f"{data.prompt_column} and {data.response_column}"
        raise DsrunError(f"has no row with {columns}", where=data.train_file)
    whole.sort()
    count = len(whole)
    return Lengths(
        count, sum(whole) / count, whole[count // 2], whole[count * 95 // 100], whole[-1], cut / count
    )  # fmt: skip


def _chunks(data: DataSpec) -> Iterable[tuple[list[str], list[str]]]:
    """Prompts and responses, some hundred at a time; of a long file an even sample."""
    path = Path(data.train_file)
    columns = (data.prompt_column, data.response_column)
    rows = [texts for _, row in read_rows(path) if (texts := texts_of(row, columns)) is not None]
    step = max(1, -(-len(rows) // MOST_ROWS))
    rows = rows[::step]
    for start in range(0, len(rows), CHUNK):
        part = rows[start : start + CHUNK]
        yield [prompt for prompt, _ in part], [response for _, response in part]


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
