"""What `dsrun diagnose` says of the messages that libraries hold: of each `raise` and `assert` with a text, as a bare
line and with the frames of a traceback, and of each warning, which is no failure.

    python bench/diagnosis_raised.py SITE_PACKAGES/deepspeed SITE_PACKAGES/transformers ...

Nobody chose these messages for being known. What is named is counted, not what is right: nobody has judged them. A
value that a message is filled with stands as a number, a path or a word, by the name of what fills it.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from dsrun.jobs.diagnosis.reading.log_lines import peeled, pieces  # noqa: E402
from dsrun.jobs.diagnosis.signatures import SignatureIndex, find_signatures  # noqa: E402
from dsrun.jobs.diagnosis.verdict import judge  # noqa: E402

LEFT_OUT = re.compile(r"/(?:tests?|testing|test_utils|examples|_tools|benchmark)/")
FEWEST_CHARACTERS = 8
WARNS = {"warn", "warning", "warning_once", "warning_rank0"}
FRAMES = (
    'Traceback (most recent call last):\n  File "/home/u/train.py", line 90, in main\n    run(args)\n'
    '  File "/opt/env/lib/python3.11/site-packages/{path}", line {line}, in f\n    raise {type}(\n'
)
VALUES = (
    (r"num|size|len\(|count|rank|index|dim|degree|world|step|shape|gpus|bits", "8"),
    (r"path|file|dir|folder", "/data/run/x1"),
    (r"version", "2.1.0"),
    (r"dtype", "torch.float32"),
    (r"device", "cuda:0"),
    (r"type\(|__class__|cls", "<class 'list'>"),
)


class Message(NamedTuple):
    """One text of a library."""

    path: str
    line: int
    type: str
    """Empty for a warning."""
    text: str


def filled(value: ast.expr) -> str:
    said = ast.unparse(value)
    plain = re.sub(r"\W", "_", said.split(".")[-1])[:16].strip("_") or "x"
    return next((text for pattern, text in VALUES if re.search(pattern, said.lower())), plain)


def text_of(value: ast.expr) -> str | None:
    """A literal, an f-string, or some of them added; None of what is computed otherwise."""
    if isinstance(value, ast.Constant):
        return value.value if isinstance(value.value, str) else None
    if isinstance(value, ast.JoinedStr):
        parts = value.values
        return "".join(str(p.value) if isinstance(p, ast.Constant) else filled(p.value) for p in parts)  # type: ignore[attr-defined]
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        sides = [text_of(side) or filled(side) for side in (value.left, value.right)]
        return "".join(sides) if any(map(text_of, (value.left, value.right))) else None
    return None


def name_of(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def messages(path: Path, shown: str) -> Iterator[Message]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8", errors="replace"))):
        match node:
            case ast.Raise(exc=ast.Call(func=function, args=[first, *_])):
                kind, text = name_of(function), text_of(first)
            case ast.Assert(msg=ast.expr() as said):
                kind, text = "AssertionError", text_of(said)
            case ast.Expr(value=ast.Call(func=function, args=[first, *_])) if name_of(function) in WARNS:
                kind, text = "", text_of(first)
            case _:
                continue
        if text and len(text) >= FEWEST_CHARACTERS:
            yield Message(shown, node.lineno, kind, text)


def is_named(text: str, index: SignatureIndex) -> bool:
    lines = enumerate(text.split("\n"), 1)
    return (
        judge([peeled(0, at, part) for at, line in lines for part in pieces(line)], index).cause is not None
    )


def row(package: Path, index: SignatureIndex) -> str:
    files = [path for path in sorted(package.rglob("*.py")) if not LEFT_OUT.search(str(path))]
    found = [one for path in files for one in messages(path, path.as_posix().rpartition("site-packages/")[2])]
    found = list({(one.type, one.text): one for one in found}.values())
    raised = [one for one in found if one.type]
    warned = [one for one in found if not one.type]
    bare = sum(is_named(f"{one.type}: {one.text}", index) for one in raised)
    framed = sum(is_named(f"{FRAMES.format(**one._asdict())}{one.type}: {one.text}", index) for one in raised)
    noise = sum(is_named(one.text, index) for one in warned)
    shares = [f"{count / max(1, len(raised)):.0%}" for count in (bare, framed)]
    name = package.as_posix().rpartition("site-packages/")[2]
    return f"| {name} | {len(raised)} | {' | '.join(shares)} | {len(warned)} | {noise} |"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", type=Path, nargs="+", metavar="FOLDER")
    given = parser.parse_args()
    index = SignatureIndex(find_signatures())
    print("| package | raised | named from the bare line | with frames | warnings | of them named |")
    print("| --- | --- | --- | --- | --- | --- |")
    for package in given.packages:
        print(row(package, index), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
