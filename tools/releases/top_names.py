"""The names of a file at the left margin, without parsing it: for files of which no more is kept.

The models of transformers are a gigabyte of Python over its releases. Of those that are seldom trained the names are
kept, which its lazy modules export, and not what their classes have.
"""

from __future__ import annotations

import ast
import contextlib
import re

from tools.releases.names import CLASS, FUNCTION, VALUE, Definition, FileNames, read

LINE = re.compile(
    r"^(?:class (?P<class>\w+)|(?:async )?def (?P<def>\w+)|(?P<value>[A-Za-z]\w*)(?:: [^=\n]+)? = "
    r"|(?P<import>from \.[\w.]* import (?:\([^)]*\)|[^\n(]+)))",
    re.MULTILINE,
)
EXPORTED = re.compile(r"^__all__(?:: [^=\n]+)? (\+?=) (\[[^\]]*\]|\([^)]*\))", re.MULTILINE)
REQUIRED = re.compile(
    r"^@requires\((?:[^()]|\([^()]*\))*\)\n(?:@[^\n]*\n|[ )][^\n]*\n)*(?:class|def) (\w+)", re.MULTILINE
)


def read_top(text: str) -> FileNames:
    """The names that stand at the left margin, with imports from the same package, `__all__` and @requires."""
    found = FileNames()
    for each in LINE.finditer(text):
        if each["import"]:
            for name, definitions in read(each["import"]).names.items():
                found.names.setdefault(name, []).extend(definitions)
            continue
        kind = CLASS if each["class"] else FUNCTION if each["def"] else VALUE
        name = each["class"] or each["def"] or each["value"]
        found.names.setdefault(name, [Definition(kind)])
    for each in EXPORTED.finditer(text):
        with contextlib.suppress(ValueError, SyntaxError):  # a list of more than texts
            found.exported = [*(found.exported or ()), *ast.literal_eval(each[2])]
    found.required = REQUIRED.findall(text)
    return found
