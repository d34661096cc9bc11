"""Values without an inside, in either dialect: numbers, words and texts, quoted or not."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, NoReturn

from dsrun.config.reading.places import MAX_DIGITS, Lines, Span, SyntaxIssue, UnreadableError, short

_PYTHON: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_PLAIN_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')
_STRING_PART = {quote: re.compile(rf"(?:[^{quote}\\\n]+|\\[^\n]){{1,1000}}") for quote in "\"'"}
_ESCAPE = re.compile(r"""\\(["'\\/bfnrt]|u[0-9a-fA-F]{4})?|\"""")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LAX = json.JSONDecoder(strict=False)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_NON_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_BASED_NUMBER = re.compile(
    r"[-+]?0(?:[xX]_*[0-9a-fA-F][0-9a-fA-F_]{0,999}|[oO]_*[0-7][0-7_]{0,999}|[bB]_*[01][01_]{0,999})"
)
_ODD_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_STOP = re.compile(r"[\r\n,}\]#]|/[/*]")
_LINE_END = re.compile(r"[\r\n]")
WORD = re.compile(r"(?:[^\s,:;=(){}\[\]\"'#/\x00-\x1f]+|/(?![/*])){1,1000}")
_ALPHANUMERIC = re.compile(r"\w")


class ScalarParser(ABC):
    """A reader of values without an inside. Offsets go in and out; issues on the way are noted.

    loose: the unquoted text read last. overflowed: whether a number was too large to hold.
    """

    def __init__(self, lines: Lines, dialect: str, most_issues: int) -> None:
        self.lines = lines
        self.text = lines.text
        self.hjson = dialect == "hjson"
        self.most_issues = most_issues
        self.issues: list[SyntaxIssue] = []
        self.loose: Span | None = None
        self.overflowed = False

    def note(self, kind: str, start: int, end: int, message: str, path: str | None = None) -> None:
        """Keep an issue; path: the value it is about, the one that is being read if None."""
        if len(self.issues) < self.most_issues:
            where = self.path() if path is None else path
            self.issues.append(SyntaxIssue(kind, self.lines.place(start, end), message, where))

    @abstractmethod
    def path(self) -> str:
        """The path of the value that is being read."""

    @abstractmethod
    def refuse(self, pos: int, where: str) -> NoReturn:
        """Raise UnreadableError for the character at `pos`."""

    def refuse_quote(self, pos: int, stop: int) -> NoReturn:
        quote = "double" if self.text[pos] == '"' else "single"
        until = "on its line" if "\n" in self.text[stop : stop + 2] else "before the text ends"
        raise UnreadableError(pos, f"the {quote} quote opened here is not closed {until}")

    # -- values without an inside

    def scalar(self, pos: int) -> tuple[Any, int, int]:
        """A text, number or word at `pos`: its value, where it ends, where to read on."""
        text = self.text
        if text.startswith("'''", pos):
            value, stop = self.multiline(pos)
            return value, stop, stop
        if text[pos : pos + 1] in ('"', "'"):
            value, stop = self.quoted(pos)
            return value, stop, stop
        if text[pos : pos + 1] in ("", "{", "}", "[", "]", ",", ":"):
            self.refuse(pos, "where a value was expected")
        return self.hjson_bare(pos) if self.hjson else self.json_bare(pos)

    def hjson_bare(self, pos: int) -> tuple[Any, int, int]:
        """Without quotes hjson reads a word or number if it fills the space up to a comma, closer,
        comment or line end. Else all up to the line end is a text, commas and closers included.
        """
        # Both ends are needed: `stop`, up to which it may be a word or number, and then the line's end, up to which it
        # is a text. The text after `stop` is looked at only where nothing before it was a value.
        stop = self.find(_STOP, pos)
        head = self.text[pos:stop]
        word = head.rstrip()
        if word in _WORDS:
            return _WORDS[word], pos + len(word), stop
        number = head.rstrip(" \t")
        if _NUMBER.fullmatch(number):
            value = self.number(number, pos)
            # hjson gives 1.0 back as the integer 1, but leaves large floats alone.
            whole = isinstance(value, float) and abs(value) < 1e10 and int(value) == value
            return int(value) if whole else value, pos + len(number), stop
        line_end = self.find(_LINE_END, stop)
        text = self.text[pos:line_end].strip()
        end = pos + len(self.text[pos:line_end].rstrip()) if text else line_end
        self.loose = self.lines.place(pos, end)
        kind, message = _unquoted(head.strip(), text)
        message += "" if kind == "unquoted-text" else f' (read as the text "{short(text)}")'
        self.note(kind, pos, end, message)
        self.note_surrogate(text, pos, end)
        return text, end, line_end

    def find(self, pattern: re.Pattern[str], pos: int) -> int:
        """The offset of the pattern's next match; the end of the text without one."""
        match = pattern.search(self.text, pos)
        return match.start() if match else len(self.text)

    def json_bare(self, pos: int) -> tuple[Any, int, int]:
        """A word or number; what JSON doesn't have is read as it was meant."""
        word = self.word(pos)
        stop = pos + len(word)
        if word in _WORDS:
            return _WORDS[word], stop, stop
        if _NUMBER.fullmatch(word):
            return self.number(word, pos), stop, stop
        kind, message = _unquoted(word, word)
        self.note(kind, pos, stop, message)
        self.note_surrogate(word, pos, stop)
        value: Any = word
        if kind == "python-literal":
            value = _PYTHON[word]
        elif kind == "non-finite":
            value = float(word)
        elif kind == "bad-number":
            plain = word.replace("_", "")
            value = int(plain, 0) if _BASED_NUMBER.fullmatch(plain) else self.number(plain, pos)
        return value, stop, stop

    def word(self, pos: int) -> str:
        """The characters up to white space, punctuation or a comment (json dialect)."""
        stop = pos
        while match := WORD.match(self.text, stop):
            stop = match.end()
        word = self.text[pos:stop]
        if not _ALPHANUMERIC.search(word):
            self.refuse(pos, "where a value or key was expected")
        return word

    def number(self, text: str, pos: int) -> int | float:
        """The number in a text as Python reads it, infinity if it is too large."""
        digits = text.lstrip("-+")
        if digits.isdigit() and len(digits) <= MAX_DIGITS:
            return int(text)
        value = float(text)
        if abs(value) == float("inf") or digits.isdigit():
            self.overflowed = True
            whole = f"an integer of {len(digits)} digits"
            message = whole if digits.isdigit() else f"{short(text)}, which is too large for a float"
            self.note("big-number", pos, pos + len(text), message)
        return value

    # -- texts in quotes

    def quoted(self, pos: int, *, key: bool = False) -> tuple[str, int]:
        """The text in the quotes at `pos`, and where it ends."""
        plain = _PLAIN_STRING.match(self.text, pos)
        if plain is not None:
            self.note_surrogate(plain[1], pos, plain.end())
            return plain[1], plain.end()
        stop = self.string_end(pos)
        quote = self.text[pos]
        if stop == len(self.text) or self.text[stop] != quote:
            self.refuse_quote(pos, stop)
        if quote == "'":
            message = "a key in single quotes" if key else "a text in single quotes"
            self.note("single-quotes", pos, stop + 1, message)
        self.note_controls(pos, stop)
        value = self.unescaped(pos, stop)
        self.note_surrogate(value, pos, stop + 1)
        return value, stop + 1

    def string_end(self, pos: int) -> int:
        """The offset where the quote at `pos` is closed, or where the line or text ends without that."""
        part = _STRING_PART[self.text[pos]]
        pos += 1
        while match := part.match(self.text, pos):
            pos = match.end()
        return pos

    def note_controls(self, pos: int, stop: int) -> None:
        """Control characters between the quotes, which hjson never takes."""
        for match in _CONTROL.finditer(self.text, pos + 1, stop):
            code = f"{ord(match[0]):04X}"
            message = f"a control character in a text (U+{code})"
            if self.hjson:
                raise UnreadableError(match.start(), message, f"write \\u{code.lower()}")
            self.note("control-character", match.start(), match.end(), message)

    def note_surrogate(self, value: str, pos: int, stop: int) -> None:
        if value.isascii():
            return
        match = _SURROGATE.search(value)
        if match:
            message = f"half a surrogate pair (\\u{ord(match[0]):04x}), which is not a character"
            self.note("lone-surrogate", pos, stop, message)

    def unescaped(self, pos: int, stop: int) -> str:
        """The text between the quotes at `pos` and `stop`."""
        body, quote = self.text[pos + 1 : stop], self.text[pos]

        def as_json(match: re.Match[str]) -> str:
            if match[0] == '"':
                return '\\"'
            at = pos + 1 + match.start()
            if not match[1]:
                letters = body[match.end() : match.end() + (5 if body[match.end()] == "u" else 1)]
                message = f"\\{short(letters)}, which is not an escape sequence"
                raise UnreadableError(at, message, "write \\\\ for a backslash")
            if match[1] == "'" and quote == '"':
                self.note("bad-escape", at, at + 2, "\\', which JSON does not have")
            return "'" if match[1] == "'" else match[0]

        text: str = _LAX.decode('"' + _ESCAPE.sub(as_json, body) + '"')
        return text

    def multiline(self, pos: int) -> tuple[str, int]:
        """A text in three single quotes, without the indentation that its first line has."""
        indent = self.indent(pos)
        body = pos + 3
        close = self.text.find("'''", body)
        if close < 0:
            rest = self.text[body:].lstrip(" \t\r")
            message = "the ''' opened here are never closed"
            raise UnreadableError(pos, message, final=not rest)
        self.note("multiline-text", pos, close + 3, "a text in three single quotes")
        first, *others = self.text[body:close].split("\n")
        first = first.lstrip(" \t\r")
        body_lines = [_unindented(line, indent) for line in others]
        lines = body_lines if body_lines and not first else [first, *body_lines]
        text = "\n".join(lines).replace("\r", "")
        self.note_surrogate(text, pos, close + 3)
        return text.removesuffix("\n"), close + 3

    def indent(self, pos: int) -> int:
        """Characters that hjson takes off the beginning of each line: as many as stand before the quotes."""
        if self.hjson and len(self.lines.feeds) == 1:
            message = "''' in a text of one line, which hjson cannot read"
            raise UnreadableError(pos, message, "write the text in double quotes", final=True)
        return self.lines.place(pos, pos).column - 1


def _unquoted(word: str, text: str) -> tuple[str, str]:
    """The kind of syntax issue that a value without quotes is, and what stands there."""
    if word in _PYTHON:
        return "python-literal", f"Python's {word} for JSON's {json.dumps(_PYTHON[word])}"
    if _NON_FINITE.fullmatch(word):
        return "non-finite", f"{word}, which JSON does not have"
    if _BASED_NUMBER.fullmatch(word) or _ODD_NUMBER.fullmatch(word):
        return "bad-number", f"{short(word)}, which is not a JSON number"
    return "unquoted-text", f"the text {short(text)} without quotes"


def _unindented(line: str, indent: int) -> str:
    return line[min(len(line) - len(line.lstrip(" \t\r")), indent) :]
