"""The process behind `dsrun finetune --show-examples`: the first training examples, as the model will see them.

`python -m dsrun.training.examples JOB COUNT` makes what the tokenizer needs, reads no more rows than it takes, and
prints the result as JSON in its last line of stdout.
"""

from __future__ import annotations

import contextlib
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from dsrun.data.conversations import columns_of
from dsrun.data.rows import format_of, read_rows
from dsrun.errors import DsrunError
from dsrun.files import json_text
from dsrun.job.job import Job
from dsrun.training.data.tokenizing import Chunk, encode_rows, parts_of
from dsrun.training.prepare import encoder_of, prepare_model

ROWS_AT_ONCE = 16


def main() -> int:
    """Print {"examples": [...], "left_out": [...]}, or {"problems": [...]} for the user."""
    with contextlib.redirect_stdout(sys.stderr):
        try:
            result, code = first_examples(Job.read(Path(sys.argv[1])), int(sys.argv[2])), 0
        except DsrunError as error:
            result, code = {"problems": [vars(problem) for problem in error.problems]}, 1
    sys.stdout.write(json_text(result) + "\n")
    return code


def first_examples(job: Job, count: int) -> dict[str, Any]:
    """The first `count` examples of the first training file, and why rows before them were left out.

    An example has its row's number in the file, its count of tokens, how many of them are trained on, and its text in
    parts.
    Raises DsrunError where there is no example.
    """
    prepare_model(job, lambda text: print(text, file=sys.stderr))  # noqa: T201
    encoder, data = encoder_of(job), job.data
    path = Path(data.train_file)
    data_format = format_of(path, columns_of(data), data.data_format)
    examples: list[dict[str, Any]] = []
    left_out: list[dict[str, Any]] = []
    rows = read_rows(path)
    while len(examples) < count and (chunk := list(islice(rows, ROWS_AT_ONCE))):
        for row in encode_rows(Chunk(0, data_format, chunk), encoder, data):
            if row.reason is not None:
                left_out.append({"row": row.number, "why": str(row.reason)})
            for sequence in row.sequences:
                edges = [place for span in sequence.spans for place in span]
                examples.append(
                    {
                        "row": row.number,
                        "tokens": len(sequence.ids),
                        "trained_on": sum(end - start for start, end in sequence.spans),
                        "parts": parts_of(sequence.ids, edges, encoder.tokenizer),
                    }
                )
    if not examples:
        first = left_out[0]["why"] if left_out else "there is none"
        raise DsrunError(f"no row can be trained on; the first: {first}", where=str(path))
    return {"examples": examples[:count], "left_out": left_out}


if __name__ == "__main__":
    sys.exit(main())
