"""Rows of data files into one Arrow file of token ids, by several processes, with a report on the data."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TextIO

from dsrun.data.conversations import (
    TEXT,
    BadRowError,
    Conversation,
    EmptyRowError,
    Row,
    TextDocument,
    columns_of,
    content_of,
)
from dsrun.data.rows import about_how_many, format_of, read_rows
from dsrun.data.thoughts import WITH_THOUGHTS, WITHOUT_THOUGHTS
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import explained, json_text
from dsrun.job.job import DataSpec
from dsrun.training.data.documents import encode_documents
from dsrun.training.data.prompts import Encoded, Limits
from dsrun.training.data.template_encoder import APART, LEFT_OUT, NOTES, RESTORED
from dsrun.words import marked

if TYPE_CHECKING:
    from hashlib import _Hash

CHUNK_ROWS = 2048
PROGRESS_S = 2.0
MOST_LISTED, MOST_SHOWN = 1000, 20
"""Left-out rows that the report lists, and those that the error shows where --strict-data stops."""
PERCENTILES = (50, 90, 95, 99)
MOST_BINS = 24
"""Bins of the histogram of lengths."""
THREADS = "TOKENIZERS_PARALLELISM"
COUNTS = (
    "conversations", "documents", "windows", "sequences_apart", "unanswered", "prompts_shortened", "responses_cut",
    "conversations_shortened", "turns_dropped", "truncated", *NOTES,
)  # fmt: skip
"""Keys of the report's counts. Of `truncated` the report has the share."""


class DataFile(NamedTuple):
    """A file of rows."""

    path: Path
    weight: float = 1.0
    """The number of times that its rows are in one pass over the data."""


class Chunk(NamedTuple):
    """Rows of one file as they were read."""

    file: int
    """The file's number."""
    data_format: str
    """A key of dsrun.data.conversations.FORMATS."""
    rows: list[tuple[int, Row]]
    """The rows with their numbers in the file."""


@dataclass
class Done:
    """A chunk in ids."""

    file: int
    """As in Chunk."""
    read: int
    """Rows that were read."""
    batch: bytes = b""
    """An Arrow stream; empty where no row was good."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each sequence."""
    targets: int = 0
    """Tokens that are trained on."""
    left_out: list[tuple[int, str, str, bool]] = field(default_factory=list)
    """Left-out rows: number, reason, the kind of reason, whether the row is merely empty."""
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    """Counts, by the names in COUNTS."""
    system_texts: set[str] = field(default_factory=set)
    """System texts of the conversations, "" for those without one; two at most, which is enough to see that they
    differ."""


def _schema(weights: Sequence[float] = ()) -> Any:
    import pyarrow as pa

    # A list of 32-bit offsets holds 2**31 tokens, which a large data set has.
    metadata = {"weights": json.dumps(list(weights))} if any(weight != 1 for weight in weights) else None
    return pa.schema(
        [
            ("input_ids", pa.large_list(pa.int32())), ("spans", pa.list_(pa.int32())), ("prompt_tokens", pa.int32()),
            ("file", pa.int16()), ("prompt", pa.string()), ("response", pa.string()),
        ],
        metadata=metadata,
    )  # fmt: skip


def tokenise(
    sources: Path | Sequence[DataFile],
    data: DataSpec,
    encoder: Any,
    target: Path,
    *,
    processes: int = 1,
    say: Callable[[str], None] | None = None,
    check: Callable[[list[str]], None] | None = None,
) -> dict[str, Any]:
    """Encode files' rows into an Arrow file; returns a report, which is also written beside it, as TARGET.json.

    Columns: input_ids (list of int32), prompt_tokens (tokens before the last response), spans (begin, end, begin, ...
    of the parts that are trained on; null where that is the last response alone), file (its number), prompt and
    response (texts of the last ones). The schema's metadata hold the files' weights where they differ from 1. Rows that
    can't be trained on are left out, counted, and listed in TARGET.bad.jsonl; with data.strict_data they raise
    DsrunError.

    check: called before anything is kept, with the SHA-256 of each file as it was read; it may raise.
    Raises DsrunError, too, where a file was changed in the meantime.
    """
    import pyarrow as pa

    files = [DataFile(sources)] if isinstance(sources, Path) else list(sources)
    before = [_version(file.path) for file in files]
    digests = [hashlib.sha256() for _ in files]
    columns = columns_of(data)
    formats = [format_of(file.path, columns, data.data_format) for file in files]
    if data.official and TEXT in formats:
        raise DsrunError("has prompts and responses, no plain text", where="--official", hint="Leave it out.")
    report = _Report(files, formats, data, say or (lambda _: None))
    target.parent.mkdir(parents=True, exist_ok=True)
    schema = _schema([file.weight for file in files])
    with ExitStack() as stack:
        name = _temporary(target.parent, stack)
        bad = stack.enter_context(_temporary(target.parent, stack).open("w", encoding="utf-8"))
        with pa.OSFile(str(name), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
            for done in _encoded(_chunks(files, formats, digests), encoder, data, processes):
                if done.lengths:
                    writer.write_batch(pa.ipc.read_record_batch(pa.py_buffer(done.batch), _schema()))
                report.add(done, bad)
        _check_versions(files, before)
        if check:
            check([digest.hexdigest() for digest in digests])
        content = report.whole(target, samples(name, encoder.tokenizer) if report.lengths else [])
        # The rows get their name last: where they are, everybody takes the report and the list to be there, too.
        bad.close()
        if content["bad_rows_file"]:
            Path(bad.name).replace(content["bad_rows_file"])
        Path(f"{target}.json").write_text(json_text(content, indent=2), encoding="utf-8")
        name.replace(target)
    return content


def _temporary(folder: Path, stack: ExitStack) -> Path:
    handle, name = tempfile.mkstemp(prefix=".rows-", dir=folder)
    os.close(handle)
    stack.callback(Path(name).unlink, missing_ok=True)
    return Path(name)


def _version(path: Path) -> tuple[int, int, int]:
    """A file's state, which differs once it was written to or replaced."""
    with explained("can't be read", path):
        stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns


def _check_versions(files: Sequence[DataFile], before: Sequence[tuple[int, int, int]]) -> None:
    """Raise DsrunError for files that were changed while they were read."""
    hint = "Start again once nothing writes to it any more."
    raise_all(
        Problem("was changed while it was read", str(file.path), hint)
        for file, version in zip(files, before, strict=True)
        if _version(file.path) != version
    )


def _chunks(files: Sequence[DataFile], formats: Sequence[str], digests: Sequence[_Hash]) -> Iterator[Chunk]:
    for number, (file, data_format, digest) in enumerate(zip(files, formats, digests, strict=True)):
        rows: list[tuple[int, Row]] = []
        for row in read_rows(file.path, digest):
            rows.append(row)
            if len(rows) == CHUNK_ROWS:
                yield Chunk(number, data_format, rows)
                rows = []
        if rows:
            yield Chunk(number, data_format, rows)


# In one process or several

_work: tuple[Any, DataSpec] | None = None
"""The encoder and data of a process in the pool."""


def _prepare(encoder: Any, data: DataSpec) -> None:
    """Begin a process of the pool. It is forked, so that the encoder, which can't be pickled, comes along."""
    global _work  # noqa: PLW0603
    _work = (encoder, data)


def _encoded(chunks: Iterable[Chunk], encoder: Any, data: DataSpec, processes: int) -> Iterator[Done]:
    """The chunks in ids, in their order. No more are read ahead than keep the processes busy."""
    if processes <= 1:
        yield from (encode_chunk(chunk, encoder, data) for chunk in chunks)
        return
    import multiprocessing
    from concurrent.futures import Future, ProcessPoolExecutor
    from concurrent.futures.process import BrokenProcessPool

    threads = os.environ.get(THREADS)
    os.environ[THREADS] = "false"  # a tokenizer's own threads: there are as many processes as cores
    waiting: deque[Future[Done]] = deque()
    try:
        with ProcessPoolExecutor(
            processes, multiprocessing.get_context("fork"), initializer=_prepare, initargs=(encoder, data)
        ) as pool:
            try:
                # Results are taken in the order of the chunks, so that the file doesn't depend on who was quicker. With
                # two chunks a process in waiting nobody idles, and memory doesn't grow with the file.
                for chunk in chunks:
                    waiting.append(pool.submit(_encode_here, chunk))
                    if len(waiting) > 2 * processes:
                        yield waiting.popleft().result()
                while waiting:
                    yield waiting.popleft().result()
            finally:
                pool.shutdown(cancel_futures=True)
    except BrokenProcessPool as error:
        hint = "Is the machine's memory full?"
        raise DsrunError("a process that tokenised was ended from outside", hint=hint) from error
    finally:
        del os.environ[THREADS]
        os.environ |= {} if threads is None else {THREADS: threads}


def _encode_here(chunk: Chunk) -> Done:
    if _work is None:
        raise RuntimeError("this process was not made to tokenise")
    return encode_chunk(chunk, *_work)


class EncodedRow(NamedTuple):
    """A row in ids."""

    number: int
    """The row's number in its file."""
    content: Conversation | TextDocument | None
    """None for a row that holds neither."""
    sequences: list[Encoded]
    reason: BadRowError | None = None
    """The reason why there are no sequences."""


def encode_rows(chunk: Chunk, encoder: Any, data: DataSpec) -> list[EncodedRow]:
    """The rows of a chunk in ids, in the order of the file."""
    columns = columns_of(data)
    rows: dict[int, EncodedRow] = {}
    for number, row in chunk.rows:
        try:
            rows[number] = EncodedRow(number, content_of(row, chunk.data_format, columns), [])
        except BadRowError as error:
            rows[number] = EncodedRow(number, None, [], error)
    contents: list[Any] = [row.content for row in rows.values() if row.content is not None]
    limits = Limits(data.max_source_length, data.max_target_length, shared=data.max_length is not None)
    encoded: Iterable[list[Encoded] | BadRowError]
    if chunk.data_format == TEXT:
        encoded = encode_documents(encoder, contents, limits)
    else:
        encoded = encoder.encode_conversations(contents, limits, train_on_prompt=data.train_on_prompt)
    results = iter(encoded)
    for entry in [entry for entry in rows.values() if entry.content is not None]:
        match next(results):
            case BadRowError() as reason:
                rows[entry.number] = entry._replace(reason=reason)
            case sequences:
                rows[entry.number] = entry._replace(sequences=sequences)
    return list(rows.values())


def encode_chunk(chunk: Chunk, encoder: Any, data: DataSpec) -> Done:
    """A chunk in ids, with its counts and the rows that were left out."""
    done = Done(chunk.file, len(chunk.rows))
    sequences: list[Encoded] = []
    for row in encode_rows(chunk, encoder, data):
        if row.reason is not None:
            empty = isinstance(row.reason, EmptyRowError)
            done.left_out.append((row.number, str(row.reason), row.reason.kind, empty))
        elif row.content is not None:
            sequences += row.sequences
            _count(done, row.content, len(row.sequences))
    for sequence in sequences:
        done.lengths.append(len(sequence.ids))
        done.targets += sum(end - start for start, end in sequence.spans)
        done.counts["prompts_shortened"] += sequence.shortened
        done.counts["responses_cut"] += sequence.cut
        done.counts["turns_dropped"] += sequence.dropped
        done.counts["conversations_shortened"] += sequence.dropped > 0
        done.counts["truncated"] += sequence.shortened or sequence.cut or sequence.dropped > 0
        for note in sequence.notes:
            done.counts[note] += 1
    if sequences:
        done.batch = _batch(sequences, chunk.file)
    return done


def _count(done: Done, content: Conversation | TextDocument, sequences: int) -> None:
    """Count a row that became as many sequences."""
    if isinstance(content, TextDocument):
        done.counts["documents"] += content.ends
        done.counts["windows"] += sequences
        return
    done.counts["conversations"] += 1
    done.counts["unanswered"] += content.unanswered
    done.counts["sequences_apart"] += sequences - 1
    if len(done.system_texts) < 2:
        done.system_texts.add(content.system)


def _batch(sequences: Sequence[Encoded], file: int) -> bytes:
    import numpy as np
    import pyarrow as pa

    schema = _schema()
    ids = np.concatenate([np.asarray(sequence.ids, dtype=np.int32) for sequence in sequences])
    offsets = np.concatenate([[0], np.cumsum([len(sequence.ids) for sequence in sequences])])
    # Most sequences have one span, from the prompt's end to their own: it follows from the other columns.
    spans = [
        None
        if sequence.spans == ((sequence.prompt_tokens, len(sequence.ids)),)
        else [place for span in sequence.spans for place in span]
        for sequence in sequences
    ]
    columns = [
        pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(ids)),
        pa.array(spans, schema.field("spans").type),
        pa.array([sequence.prompt_tokens for sequence in sequences], pa.int32()),
        pa.array([file] * len(sequences), pa.int16()),
        pa.array([sequence.question for sequence in sequences], pa.string()),
        pa.array([sequence.answer for sequence in sequences], pa.string()),
    ]
    return bytes(pa.record_batch(columns, schema=schema).serialize())


# The report


class _Report:
    """The report, which counts while rows are tokenised, and shows the progress now and then."""

    def __init__(
        self, files: Sequence[DataFile], formats: Sequence[str], data: DataSpec, say: Callable[[str], None]
    ) -> None:
        self._files, self._data, self._say = files, data, say
        self._of_file: list[dict[str, Any]] = [
            {"file": str(file.path), "format": kind, "weight": file.weight, "rows": 0, "tokens": 0, "left_out": 0}
            for file, kind in zip(files, formats, strict=True)
        ]  # fmt: skip
        self.lengths: list[int] = []
        self._read = self._targets = self._left_out = self._empty = 0
        self._why: Counter[str] = Counter()
        self._counts = dict.fromkeys(COUNTS, 0)
        self._system_texts: set[str] = set()
        self._listed: list[dict[str, Any]] = []
        self._began = self._shown = time.monotonic()
        expected = [about_how_many(file.path) for file in files]
        self._expected = None if None in expected else sum(count or 0 for count in expected)

    def add(self, done: Done, bad: TextIO) -> None:
        """Count a chunk, and list its left-out rows. Raises DsrunError where none may be left out."""
        counted = self._of_file[done.file]
        counted["rows"] += len(done.lengths)
        counted["tokens"] += sum(done.lengths)
        counted["left_out"] += len(done.left_out)
        self.lengths += done.lengths
        self._read += done.read
        self._targets += done.targets
        for name in COUNTS:
            self._counts[name] += done.counts[name]
        if len(self._system_texts) < 2:
            self._system_texts |= done.system_texts
        for number, why, kind, empty in done.left_out:
            entry = {"file": counted["file"], "row": number, "why": why}
            bad.write(json.dumps(entry, ensure_ascii=False) + "\n")
            self._why[kind] += 1
            self._empty += empty
            self._left_out += 1
            if len(self._listed) < MOST_LISTED:
                self._listed.append(entry)
        if self._data.strict_data and self._left_out >= MOST_SHOWN:
            self._refuse()
        self._progress()

    def _refuse(self) -> None:
        """Raise DsrunError with the first rows that would be left out."""
        shown = self._listed[:MOST_SHOWN]
        problems = [Problem(entry["why"], f"{entry['file']}:{entry['row']}") for entry in shown]
        hint = "Fix them, or leave them out of the training: without --strict-data."
        raise DsrunError([*problems[:-1], Problem(problems[-1].what, problems[-1].where, hint)])

    def _progress(self) -> None:
        now = time.monotonic()
        if now - self._shown >= PROGRESS_S:
            rate = self._read / (now - self._began)
            share = f" ({min(1, self._read / self._expected):.0%})" if self._expected else ""
            self._say(f"tokenised {self._read:,} rows{share}, {rate:,.0f} a second")
            self._shown = now

    def whole(self, target: Path, samples: list[dict[str, Any]]) -> dict[str, Any]:
        """The report. Raises DsrunError where there is no row, or where rows were left out and may not be."""
        if self._data.strict_data and self._left_out:
            self._refuse()
        if not self.lengths:
            first = self._listed[0]["why"] if self._listed else "there is none"
            plain = all(file["format"] == TEXT for file in self._of_file)
            what = "a text" if plain else "both a prompt and a response"
            what = f"no row has {what}; the first: {first}"
            raise DsrunError(what, where=", ".join(str(file.path) for file in self._files))
        ordered = sorted(self.lengths)
        count, tokens = len(ordered), sum(ordered)
        return {
            "file": str(self._files[0].path),
            "files": self._of_file,
            "read": self._read,
            "rows": count,
            "rows_per_epoch": sum(int(Fraction(str(file["weight"])) * file["rows"]) for file in self._of_file),
            "empty": self._empty,
            "bad": self._left_out - self._empty,
            "dropped": dict(self._why.most_common()),
            "bad_rows": self._listed,
            "bad_rows_file": f"{target}.bad.jsonl" if self._left_out else None,
            **self._counts,
            "truncated": self._counts["truncated"] / count,
            "tokens": tokens,
            "target_tokens": self._targets,
            "trained_on": self._trained_on(),
            "system": next(iter(self._system_texts)) or None if len(self._system_texts) == 1 else None,
            "mean": round(tokens / count, 1),
            "percentiles": {str(share): ordered[(count - 1) * share // 100] for share in PERCENTILES},
            "longest": ordered[-1],
            "histogram": histogram(ordered),
            "seconds": round(time.monotonic() - self._began, 1),
            "samples": samples,
        }  # fmt: skip

    def _trained_on(self) -> str:
        kinds = {file["format"] == TEXT for file in self._of_file}
        answers = "prompts and responses" if self._data.train_on_prompt else "responses"
        return " and ".join([*([answers] if False in kinds else []), *(["text"] if True in kinds else [])])


def histogram(ordered: Sequence[int]) -> dict[str, Any]:
    """The counts of rows by length, in bins of `width` tokens, from 1 up to the longest. ordered: the shortest
    first."""
    width = max(1, -(-ordered[-1] // MOST_BINS))
    counts = [0] * (-(-ordered[-1] // width))
    for length in ordered:
        counts[max(0, length - 1) // width] += 1
    return {"width": width, "counts": counts}


def samples(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """The first, the middle and the last row of an Arrow file: ids, labels (null: not trained on), text in parts.

    A part has "trained" and its text, special tokens written out.
    """
    import pyarrow as pa

    # Not dsrun.training.data.batches.Examples, which would import torch: seconds, and nothing here needs it.
    with pa.ipc.open_file(pa.memory_map(str(path))) as table:
        rows = table.read_all()
    shown = []
    for row in sorted({0, len(rows) // 2, len(rows) - 1}):
        ids = rows["input_ids"][row].as_py()
        spans = rows["spans"][row].as_py() or [rows["prompt_tokens"][row].as_py(), len(ids)]
        pairs = _alternating(spans, len(ids))
        labels = [
            token
            for start, end, trained in pairs
            for token in (ids if trained else [None] * len(ids))[start:end]
        ]
        shown.append({"row": row, "ids": ids, "labels": labels, "parts": parts_of(ids, spans, tokenizer)})
    return shown


def _alternating(spans: Sequence[int], length: int) -> list[tuple[int, int, bool]]:
    """Begin and end of each part of a sequence, and whether it is trained on. spans: begin, end, begin, ..."""
    edges = [0, *spans, length]
    return [(edges[place], edges[place + 1], place % 2 == 1) for place in range(len(edges) - 1)]


def parts_of(ids: Sequence[int], spans: Sequence[int], tokenizer: Any) -> list[dict[str, Any]]:
    """A sequence decoded from its very ids, in parts: {"trained": ..., "text": ...}. spans: begin, end, begin, ..."""
    return [
        {"trained": trained, "text": tokenizer.decode(ids[start:end], skip_special_tokens=False)}
        for start, end, trained in _alternating(spans, len(ids))
        if end > start
    ]


def describe(report: dict[str, Any]) -> str:
    """The report in a line."""
    return "; ".join(lines(report)[:-1])


def lines(report: dict[str, Any]) -> list[str]:
    """The report in a few lines: the data, what was cut, what was left out, and the first row."""
    kinds: dict[str, None] = dict.fromkeys(file["format"] for file in report["files"])
    where = f" of {len(report['files'])} files" if len(report["files"]) > 1 else ""
    marks = report["percentiles"]
    texts = [
        f"{report['rows']:,} rows{where} ({', '.join(kinds)}), {report['tokens']:,} tokens, "
        f"{report['target_tokens']:,} of them trained on ({report['trained_on']})",
        f"a row has {marks['50']} tokens in the median, 95 % up to {marks['95']}, the longest {report['longest']}",
    ]
    if report["documents"]:
        texts.append(f"{report['documents']:,} documents in {report['windows']:,} windows, nothing cut off")
    if report["rows_per_epoch"] != report["rows"]:
        weights = ", ".join(f"{Path(file['file']).name} x {file['weight']:g}" for file in report["files"])
        texts.append(f"an epoch has {report['rows_per_epoch']:,} rows: {weights}")
    cut = [
        f"{report[key]:,} {words}"
        for key, words in (
            ("prompts_shortened", "prompts shortened"),
            ("responses_cut", "responses cut"),
            ("conversations_shortened", "conversations without their first turns"),
        )
        if report[key]
    ]
    if cut:
        texts.append(f"{report['truncated']:.1%} truncated: {', '.join(cut)}")
    if report["sequences_apart"]:
        texts.append(
            f"{report['conversations']:,} conversations: each answer is a row, with all turns before it"
        )
    texts += _of_thoughts(report)
    if report["unanswered"]:
        texts.append(f"{report['unanswered']:,} last questions without an answer left off")
    if report["dropped"]:
        whys = ", ".join(f"{count:,} {why}" for why, count in list(report["dropped"].items())[:5])
        count = report["bad"] + report["empty"]
        texts.append(f"{count:,} rows left out ({whys}), listed in {report['bad_rows_file']}")
    return [*texts, *(f"row {sample['row'] + 1}: {marked(sample)}" for sample in report["samples"][:1])]


def _of_thoughts(report: Mapping[str, Any]) -> list[str]:
    """Lines on what the chat template made of thoughts, and of the border between prompt and answer."""
    with_thoughts, without = report[WITH_THOUGHTS], report[WITHOUT_THOUGHTS]
    texts = []
    if with_thoughts or without:
        texts.append(f"{with_thoughts:,} answers with thoughts, {without:,} without")
    if report[LEFT_OUT]:
        texts.append(f"thoughts of {report[LEFT_OUT]:,} answers left out: --thinking off")
    if report[RESTORED]:
        texts.append(
            f"{report[RESTORED]:,} answers go on from the thought that the prompt begins, "
            "which the chat template leaves out of an answered conversation"
        )
    if report[APART]:
        texts.append(
            f"{report[APART]:,} answers begin with a token that a tokenizer would join with the prompt's last one: "
            "kept apart, as a server has them"
        )
    return texts
