"""The DeepSpeed configs that stand in scripts: a dict in Python's source, a here-document of a shell's.

Each becomes a text with the config at its own lines and, of a dict, its own columns, so that what is found in it is
shown where it stands. Nothing is run: a value that only the run knows becomes a placeholder, as of a template.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Collection, Iterator

from dsrun.errors import DsrunError

PYTHON, SHELL = (".py",), (".sh", ".bash", ".slurm", ".sbatch")
HEREDOC = re.compile(r"<<-?[ \t]*(['\"]?)(\w+)\1[^\n]*\n(.*?)^[ \t]*\2[ \t]*$", re.DOTALL | re.MULTILINE)

SHELL_LINE = re.compile(
    r"^\s*(?:#SBATCH\b|export\s|(?:\w+=\S*\s+)*(?:deepspeed|torchrun|accelerate|srun|mpirun|python3?|bash|cat)\s)|<<-?\s*['\"]?\w",
    re.MULTILINE,
)
"""A line that only a shell's script has."""
PYTHON_LINE = re.compile(r"^(?:import|from)\s+\w", re.MULTILINE)
YAML_LINE = re.compile(r"---.*|-(?:\s.*)?|%\w.*|\.\.\.|([\"']?)[\w.-]+\1\s*:(?:\s.*)?|[\]}].*")
"""A line without indentation, as a YAML has them."""


def suffix_of(text: str) -> str:
    """The ending of a name that a text without one would have, by its lines: .yaml, .py, .sh, or .json."""
    text = text.lstrip("\ufeff \t\r\n")
    first, _, _ = text.partition("\n")
    if first.startswith("#!"):
        return PYTHON[0] if "python" in first else SHELL[0]
    outer = [line for line in text.splitlines() if line.strip() and line[0] not in " \t#"]
    if text[:1] in ("{", "[", '"', "/") or not outer:
        return ".json"
    if all(YAML_LINE.fullmatch(line) for line in outer):
        return ".yaml"
    if PYTHON_LINE.search(text) or _is_python(text):
        return PYTHON[0]
    return SHELL[0] if SHELL_LINE.search(text) else ".json"


def _is_python(text: str) -> bool:
    """Whether a text is Python that gives something a name."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, (ast.Assign, ast.FunctionDef, ast.ClassDef)) for node in tree.body)


def configs_of_python(text: str, telling: Collection[str]) -> Iterator[str]:
    """The dicts with one of some keys, as JSON. Raises DsrunError where the text is no Python."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        raise DsrunError(f"is not Python: {error}") from error
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Dict) and any(
            isinstance(key, ast.Constant) and key.value in telling for key in node.keys
        ):
            yield _Writer().written(node)
        else:
            waiting += ast.iter_child_nodes(node)


def configs_of_shell(text: str, telling: Collection[str]) -> Iterator[str]:
    """The here-documents that have one of some keys in quotation marks, at their lines."""
    for found in HEREDOC.finditer(text):
        content = found[3]
        if any(f'"{key}"' in content for key in telling):
            yield "\n" * text.count("\n", 0, found.start(3)) + content


class _Writer:
    """Writes a dict as JSON, each part at its line and column where there is room."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.line, self.column = 1, 0

    def written(self, node: ast.Dict) -> str:
        self._value(node)
        return "".join(self.parts)

    def _put(self, text: str, line: int, column: int) -> None:
        if line > self.line:
            self.parts.append("\n" * (line - self.line))
            self.line, self.column = line, 0
        if line == self.line and column > self.column:
            self.parts.append(" " * (column - self.column))
            self.column = column
        self.parts.append(text)
        self.column += len(text)

    def _value(self, node: ast.expr) -> None:
        line, column = node.lineno, node.col_offset
        if isinstance(node, ast.Dict):
            self._put("{", line, column)
            for number, (key, value) in enumerate(zip(node.keys, node.values, strict=True)):
                name = key.value if isinstance(key, ast.Constant) else None
                at = key or value
                self._put(", " if number else "", self.line, 0)
                # What is spread into the dict may be any key: as of a template, only single keys are judged.
                self._put(json.dumps(str(name) if name is not None else OPEN_KEY), at.lineno, at.col_offset)
                self._put(": ", self.line, 0)
                self._value(value) if name is not None else self._put('"<spread>"', self.line, 0)
            self._put("}", node.end_lineno or line, (node.end_col_offset or column + 1) - 1)
        elif isinstance(node, (ast.List, ast.Tuple)):
            self._put("[", line, column)
            for number, item in enumerate(node.elts):
                self._put(", " if number else "", self.line, 0)
                self._value(item)
            self._put("]", node.end_lineno or line, (node.end_col_offset or column + 1) - 1)
        else:
            self._put(_literal(node), line, column)


OPEN_KEY = "train_batch_size"


def _literal(node: ast.expr) -> str:
    """A constant as JSON; a placeholder for anything that only the run knows."""
    try:
        return json.dumps(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, MemoryError):
        return json.dumps(f"<{re.sub('[<>]', '', ast.unparse(node))[:40]}>")
