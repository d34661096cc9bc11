"""What an assertion without a message asserts: the expression of the code that raised it, and what its form says.

Python prints no more than "AssertionError" then, while the frame above it has the line of code.
"""

from __future__ import annotations

import ast
import re
from typing import NamedTuple

from dsrun.jobs.diagnosis.reading.tracebacks import RaisedException

LONGEST = 160
"""Longest expression that is quoted, in characters."""
ASSERT = re.compile(r"\bassert\b\s?(?P<code>\S.{0,400})", re.S)
NEGATED: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Eq: ("isn't equal to", "不等于"), ast.NotEq: ("is equal to", "等于"),
    ast.Lt: ("isn't below", "不小于"), ast.LtE: ("is above (or not a number)", "大于（或不是数）"),
    ast.Gt: ("isn't above (or not a number)", "不大于（或不是数）"),
    ast.GtE: ("is below (or not a number)", "小于（或不是数）"),
    ast.Is: ("isn't", "不是"), ast.IsNot: ("is", "是"),
    ast.In: ("isn't in", "不在其中："), ast.NotIn: ("is in", "在其中："),
}  # fmt: skip
"""What holds where a comparison doesn't, in English and Chinese."""


class Assertion(NamedTuple):
    """An assertion that failed."""

    code: str
    """The expression that has to be true."""
    fact: str = ""
    """What its form says was so instead; empty where it says nothing."""
    fact_zh: str = ""


def assertion(raised: RaisedException) -> Assertion | None:
    """The assertion that raised an exception without a message of its own; None for others."""
    frame = raised.raiser
    if raised.name != "AssertionError" or raised.message.strip() or frame is None:
        return None
    hit = ASSERT.search(frame.code)
    read = _read(hit["code"].strip()) if hit else None
    return read if read and read.code else None


def _read(code: str) -> Assertion:
    """An assertion by its source, which may be cut at the end of its line."""
    try:
        statement = ast.parse(f"assert {code}").body[0]
    except (SyntaxError, ValueError):
        return Assertion(code.rstrip("\\( ")[:LONGEST])
    if not isinstance(statement, ast.Assert):
        return Assertion(code[:LONGEST])
    fact, fact_zh = _fact(statement.test)
    return Assertion(
        (ast.get_source_segment(f"assert {code}", statement.test) or code)[:LONGEST], fact, fact_zh
    )


def _fact(test: ast.expr) -> tuple[str, str]:
    """What holds where an expression isn't true, by its form."""
    match test:
        case ast.Compare(
            left=ast.BinOp(left=whole, op=ast.Mod(), right=part),
            ops=[ast.Eq()],
            comparators=[ast.Constant(value=0)],
        ):
            first, second = ast.unparse(whole), ast.unparse(part)
            return f"`{first}` isn't a multiple of `{second}`", f"`{first}` 不是 `{second}` 的倍数"
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            relation, relation_zh = NEGATED[type(op)]
            first, second = ast.unparse(left), ast.unparse(right)
            return f"`{first}` {relation} `{second}`", f"`{first}` {relation_zh} `{second}`"
        case ast.Call(func=ast.Name(id="isinstance"), args=[value, kind]):
            first, second = ast.unparse(value), ast.unparse(kind)
            return f"`{first}` is of another type than `{second}`", f"`{first}` 的类型不是 `{second}`"
        case ast.Call(func=function, args=[path]) if ast.unparse(function).endswith(
            (".exists", ".isfile", ".isdir")
        ):
            return f"the path `{ast.unparse(path)}` isn't there", f"路径 `{ast.unparse(path)}` 不存在"
        case ast.UnaryOp(op=ast.Not(), operand=value):
            return f"`{ast.unparse(value)}` is true", f"`{ast.unparse(value)}` 为真"
    return "", ""
