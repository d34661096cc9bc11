"""Values without an inside: numbers, words and texts, quoted or not, as either dialect has them."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from typing import Any, NoReturn

from dsrun.config.reading.places import MAX_DIGITS, MAX_ODDITIES, Lines, Oddity, Place, UnreadableError, short

_PYTHON: dict[str, bool | None] = {"True": True, "False": False, "None": None}
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "null": None}
_AS_JSON = {"True": "true", "False": "false", "None": "null"}
_PLAIN_STRING = re.compile(r'"([^"\\\x00-\x1f]*)"')
_STRING_PART = {quote: re.compile(rf"(?:[^{quote}\\\n]+|\\[^\n]){{1,1000}}") for quote in "\"'"}
# hjson hands the four characters after \u to int(), which forgives a line break among them.
_HJSON_PART = {
    quote: re.compile(rf"(?:[^{quote}\\\n]+|\\u[^\\\"']{{4}}|\\[^\n]){{1,1000}}") for quote in "\"'"
}
_ESCAPE = re.compile(r"\\(u[\s\S]{4}|[\s\S])")
_BAD_ESCAPE = re.compile(r"""\\(?!["'/bfnrt]|u[0-9a-fA-F]{4})""")
_ESCAPED = {
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
} | {c: c for c in "\"'\\/"}
_FOUR_DIGITS = re.compile(r"u[0-9a-fA-F]{4}")
_CONTROL = re.compile(r"[\x00-\x1f]")
_SURROGATE = re.compile("[\ud800-\udfff]")
_LAX = json.JSONDecoder(strict=False)
_NUMBER = re.compile(r"(-?(?:0|[1-9][0-9]*))(\.[0-9]+)?([eE][-+]?[0-9]+)?")
# hjson's numbers: any decimal digit of Unicode counts after the first one.
_HJSON_NUMBER = re.compile(r"(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?")
_NON_FINITE = re.compile(r"[-+]?(?:nan|inf|infinity)", re.IGNORECASE | re.ASCII)
_BASED_NUMBER = re.compile(r"[-+]?0(?:[xX]_*[0-9a-fA-F][0-9a-fA-F_]*|[oO]_*[0-7][0-7_]*|[bB]_*[01][01_]*)")
_ODD_NUMBER = re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?")
_STOP = re.compile(r"[\r\n,}\]#]|/[/*]")
_LINE_END = re.compile(r"[\r\n]")
_PATHS_SLASH = r"/(?![/*])"
WORD = re.compile(rf"(?:[^\s,:;=(){{}}\[\]\"'#/\x00-\x1f]+|{_PATHS_SLASH}){{1,1000}}")
_ALPHANUMERIC = re.compile(r"\w")


class Scalars(ABC):
    """Reads what has no inside. Offsets go in and out; what was found on the way is noted.

    loose: the unquoted text read last. overflowed: whether a number was too large to hold.
    """

    def __init__(self, lines: Lines, dialect: str, mark: int) -> None:
        self.lines = lines
        self.text = lines.text
        self.hjson = dialect == "hjson"
        self.mark = mark
        self.oddities: list[Oddity] = []
        self.loose: Place | None = None
        self.overflowed = False

    def note(self, kind: str, start: int, end: int, message: str, path: str | None = None) -> None:
        """Keep an oddity; path: the value it is about, the one that is being read if None."""
        if len(self.oddities) < MAX_ODDITIES:
            where = self.path() if path is None else path
            self.oddities.append(Oddity(kind, self.lines.place(start, end), message, where))

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
        stop = self.find(_STOP, pos)
        head = self.text[pos:stop]
        word = head.rstrip()
        if word in _WORDS:
            return _WORDS[word], pos + len(word), stop
        number = head.rstrip(" \t")
        if _HJSON_NUMBER.fullmatch(number):
            return self.hjson_number(number, pos), pos + len(number), stop
        line_end = self.find(_LINE_END, stop)
        text = self.text[pos:line_end]
        end = pos + len(text.rstrip()) if text.strip() else line_end
        self.loose = self.lines.place(pos, end)
        self.note_loose(head.strip(), text.strip(), pos, end)
        return text.strip(), end, line_end

    def find(self, pattern: re.Pattern[str], pos: int) -> int:
        """Where the pattern occurs next; the end of the text if nowhere."""
        found = pattern.search(self.text, pos)
        return found.start() if found else len(self.text)

    def note_loose(self, head: str, text: str, pos: int, end: int) -> None:
        """Note an unquoted text of hjson; `head` is its beginning, up to a comma or the like."""
        read_as = f' (read as the text "{short(text)}")'
        if head in _PYTHON:
            what = f"{head}, which is Python; JSON has {_AS_JSON[head]}{read_as}"
            self.note("python-literal", pos, end, what)
        elif _NON_FINITE.fullmatch(head):
            self.note("non-finite", pos, end, f"{head}, which JSON does not have{read_as}")
        elif _BASED_NUMBER.fullmatch(head) or _ODD_NUMBER.fullmatch(head):
            what = f"{short(head)}, which is no JSON number{read_as}"
            self.note("bad-number", pos, end, what)
        else:
            self.note_text("unquoted-text", text, pos, end)
        self.note_surrogate(text, pos, end)

    def note_text(self, kind: str, text: str, pos: int, end: int) -> None:
        self.note(kind, pos, end, f"the text {short(text)} without quotes")

    def hjson_number(self, text: str, pos: int) -> int | float:
        if not _NUMBER.fullmatch(text):
            what = f"{short(text)}, with digits that JSON does not have"
            self.note("bad-number", pos, pos + len(text), what)
        number = self.number(text, pos)
        if isinstance(number, float) and abs(number) < 1e10 and int(number) == number:
            return int(number)
        return number

    def json_bare(self, pos: int) -> tuple[Any, int, int]:
        word = self.word(pos)
        stop = pos + len(word)
        if word in _WORDS:
            return _WORDS[word], stop, stop
        if _NUMBER.fullmatch(word):
            return self.number(word, pos), stop, stop
        return self.odd_word(word, pos), stop, stop

    def odd_word(self, word: str, pos: int) -> Any:
        """What a word was meant to be that JSON does not have."""
        stop = pos + len(word)
        if word in _PYTHON:
            what = f"{word}, which is Python; JSON has {_AS_JSON[word]}"
            self.note("python-literal", pos, stop, what)
            return _PYTHON[word]
        if _NON_FINITE.fullmatch(word):
            self.note("non-finite", pos, stop, f"{word}, which JSON does not have")
            return float(word)
        if _BASED_NUMBER.fullmatch(word) or _ODD_NUMBER.fullmatch(word):
            return self.odd_number(word, pos)
        self.note_text("unquoted-text", word, pos, stop)
        self.note_surrogate(word, pos, stop)
        return word

    def word(self, pos: int) -> str:
        """The characters up to white space, punctuation or a comment (json dialect)."""
        stop = pos
        while found := WORD.match(self.text, stop):
            stop = found.end()
        word = self.text[pos:stop]
        if not _ALPHANUMERIC.search(word):
            self.refuse(pos, "where a value or key was expected")
        return word

    def number(self, text: str, pos: int) -> int | float:
        """The number that `text` is in Python, infinity if it is too large."""
        value: int | float
        digits = text.lstrip("-+")
        if not digits.isdigit():
            value = float(text)
        elif len(digits) <= MAX_DIGITS:
            return int(text)
        else:
            value = float("-inf" if text.startswith("-") else "inf")
        if abs(value) == float("inf"):
            self.overflowed = True
            whole = f"an integer of {len(digits)} digits"
            what = whole if digits.isdigit() else f"{short(text)}, which is too large for a float"
            self.note("big-number", pos, pos + len(text), what)
        return value

    def odd_number(self, word: str, pos: int) -> int | float:
        self.note("bad-number", pos, pos + len(word), f"{short(word)}, which is no JSON number")
        plain = word.replace("_", "")
        if not _BASED_NUMBER.fullmatch(plain):
            return self.number(plain, pos)
        if len(plain) > MAX_DIGITS:
            self.note("big-number", pos, pos + len(word), f"a number of {len(plain)} digits")
            return float("-inf" if plain.startswith("-") else "inf")
        return int(plain, 0)

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
            what = "a key in single quotes" if key else "a text in single quotes"
            self.note("single-quotes", pos, stop + 1, what)
        self.note_controls(pos, stop)
        value = self.unescaped(pos, stop)
        self.note_surrogate(value, pos, stop + 1)
        return value, stop + 1

    def string_end(self, pos: int) -> int:
        """Where the quote at `pos` is closed, or the line or text ends without that."""
        part = (_HJSON_PART if self.hjson else _STRING_PART)[self.text[pos]]
        pos += 1
        while found := part.match(self.text, pos):
            pos = found.end()
        return pos

    def note_controls(self, pos: int, stop: int) -> None:
        """Control characters between the quotes: json dialect only, hjson never takes them."""
        body = self.text[pos + 1 : stop]
        if self.hjson and _CONTROL.search(body):
            # But inside an escape hjson does not look, see `odd_escapes`.
            body = _ESCAPE.sub(lambda found: "-" * len(found[0]), body)
        for found in _CONTROL.finditer(body):
            at = pos + 1 + found.start()
            code = f"{ord(found[0]):04x}"
            what = f"a control character in a text (U+{code.upper()})"
            if self.hjson:
                raise UnreadableError(at, what, f"write \\u{code}")
            self.note("control-character", at, at + 1, what)
            if len(self.oddities) >= MAX_ODDITIES:
                return

    def note_surrogate(self, value: str, pos: int, stop: int) -> None:
        if value.isascii():
            return
        found = _SURROGATE.search(value)
        if found:
            what = f"half a surrogate pair (\\u{ord(found[0]):04x}), which is no character"
            self.note("lone-surrogate", pos, stop, what)

    def unescaped(self, pos: int, stop: int) -> str:
        """The text between the quotes at `pos` and `stop`."""
        body = self.text[pos + 1 : stop]
        if "\\" not in body:
            return body
        # Without the escaped backslashes each one that is left begins an escape.
        rest = body.replace("\\\\", "")
        if _BAD_ESCAPE.search(rest):
            return self.odd_escapes(pos, body)
        if self.text[pos] == '"' and "\\'" in rest:
            self.note_apostrophes(pos, body)
        parts = (
            part.replace("\\'", "'").replace('\\"', '"').replace('"', '\\"') for part in body.split("\\\\")
        )
        text: str = _LAX.decode('"' + "\\\\".join(parts) + '"')
        return text

    def note_apostrophes(self, pos: int, body: str) -> None:
        for found in _ESCAPE.finditer(body):
            if found[0] == "\\'":
                at = pos + 1 + found.start()
                self.note("bad-escape", at, at + 2, "\\', which JSON does not have")

    def odd_escapes(self, pos: int, body: str) -> str:
        """Escapes one by one: some are wrong, or are such that only hjson reads them.

        After \\u hjson takes whatever int(..., 16) takes, such as "+12a" or "1_23".
        """
        pieces: list[str] = []
        last = high = -1
        done = 0
        for found in _ESCAPE.finditer(body):
            at = pos + 1 + found.start()
            code = self.escape(found[1], at)
            pieces.append(body[done : found.start()])
            done = found.end()
            if high >= 0 and last == found.start() and code & 0xFC00 == 0xDC00:
                code = 0x10000 + ((high - 0xD800) << 10 | (code - 0xDC00))
                pieces.pop()
                pieces.pop()
            high = code if code & 0xFC00 == 0xD800 and found[1][0] == "u" else -1
            last = done
            pieces.append(chr(code))
        return "".join(pieces) + body[done:]

    def escape(self, letters: str, at: int) -> int:
        """The code of the character that an escape stands for."""
        if letters in _ESCAPED:
            return ord(_ESCAPED[letters])
        if letters[0] != "u" or len(letters) < 5:
            self.refuse_escape(letters, at)
        if _FOUR_DIGITS.fullmatch(letters):
            return int(letters[1:], 16)
        # hjson looks for an x in this place only, so that 0x12 is no code.
        if not self.hjson or letters[2] in "xX":
            self.refuse_escape(letters, at)
        try:
            code = int(letters[1:], 16)
        except ValueError:
            self.refuse_escape(letters, at)
        if code < 0:
            self.refuse_escape(letters, at, final=True)
        self.note("bad-escape", at, at + 6, "an escape \\u without four digits")
        return code

    def refuse_escape(self, letters: str, at: int, *, final: bool = False) -> NoReturn:
        what = f"\\{short(letters)}, which is no escape"
        raise UnreadableError(at, what, "write \\\\ for a backslash", final=final)

    def multiline(self, pos: int) -> tuple[str, int]:
        """A text in three single quotes, without the indentation that its first line has."""
        indent = self.indent(pos)
        body = pos + 3
        close = self.text.find("'''", body)
        if close < 0:
            rest = self.text[body:].lstrip(" \t\r")
            what = "the ''' opened here are never closed"
            raise UnreadableError(pos, what, final=not rest)
        self.note("multiline-text", pos, close + 3, "a text in three single quotes")
        first, *others = self.text[body:close].split("\n")
        first = first.lstrip(" \t\r")
        kept = [_unindented(line, indent) for line in others]
        lines = kept if kept and not first else [first, *kept]
        text = "\n".join(lines).replace("\r", "")
        self.note_surrogate(text, pos, close + 3)
        return text.removesuffix("\n"), close + 3

    def indent(self, pos: int) -> int:
        """How many characters hjson takes off the beginning of each line.

        As many as stand before the quotes. On the first line of the text hjson walks on from the
        end of the text (a negative index) until it meets a line feed, and breaks if there is none.
        """
        place = self.lines.place(pos, pos)
        if place.line > 1:
            return place.column - 1
        feeds = self.lines.feeds
        if len(feeds) > 1:
            return pos + self.mark - 1 + len(self.text) - feeds[-2]
        if self.hjson:
            what = "''' in a text of one line, which hjson cannot read"
            raise UnreadableError(pos, what, "write the text in double quotes", final=True)
        return pos


def _unindented(line: str, indent: int) -> str:
    return line[min(len(line) - len(line.lstrip(" \t\r")), indent) :]
