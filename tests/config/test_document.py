from __future__ import annotations

import json
from typing import Any

import pytest

from dsrun.config.document import (
    MAX_BYTES,
    MAX_DEPTH,
    MAX_ODDITIES,
    MAX_VALUES,
    Document,
    excerpt,
    read,
)
from dsrun.errors import DsrunError

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DIALECTS = ("hjson", "json")
INF = float("inf")
QUICK = settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
# json reads these as well, so they do not make a text anything but JSON.
HARMLESS = {"non-finite", "duplicate-key", "big-number", "lone-surrogate"}


def seen(document: Document) -> list[tuple[str, str, str]]:
    """(kind, line:column, text) of each oddity."""
    return [
        (o.kind, f"{o.place.line}:{o.place.column}", document.text[o.place.start : o.place.end])
        for o in document.oddities
    ]


def refused(data: bytes | str, dialect: str) -> str:
    with pytest.raises(DsrunError) as caught:
        read(data, "ds.json", dialect)
    (problem,) = caught.value.problems
    return f"{problem.where}: {problem.what}"


# ---------------------------------------------------------------- the plain case

PLAIN = """{
  "train_batch_size": "auto",
  "zero_optimization": {
    "stage": 3
  },
  "optimizer": {"params": {"betas": [0.9, 0.999]}}
}
"""


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("data", [PLAIN, PLAIN.encode(), PLAIN.replace("\n", "\r\n")])
def test_every_value_has_its_place(data: bytes | str, dialect: str) -> None:
    document = read(data, "ds.json", dialect)
    assert document.value == json.loads(PLAIN)
    assert document.oddities == ()
    assert list(document.entries) == [
        "",
        "train_batch_size",
        "zero_optimization.stage",
        "zero_optimization",
        "optimizer.params.betas.0",
        "optimizer.params.betas.1",
        "optimizer.params.betas",
        "optimizer.params",
        "optimizer",
    ]
    stage = document.entries["zero_optimization.stage"]
    assert stage.key is not None
    assert (stage.key.line, stage.key.column) == (4, 5)
    assert (stage.value.line, stage.value.column) == (4, 14)
    assert document.text[stage.key.start : stage.key.end] == '"stage"'
    assert document.text[stage.value.start : stage.value.end] == "3"
    assert document.text[stage.whole.start : stage.whole.end] == '"stage": 3'
    beta = document.entries["optimizer.params.betas.1"]
    assert beta.key is None
    assert beta.whole == beta.value
    assert document.entries[""].key is None


def test_an_unknown_dialect_is_a_mistake_of_the_caller() -> None:
    with pytest.raises(ValueError, match="yaml"):
        read("{}", "ds.json", "yaml")


# ---------------------------------------------------------------- oddities


@pytest.mark.parametrize(
    ("dialect", "text", "value", "expected"),
    [
        ("both", '{ # one\n"a": 1, // two\n/* three\n*/ "b": 2}', {"a": 1, "b": 2}, [
            ("comment", "1:3", "# one"), ("comment", "2:9", "// two"), ("comment", "3:1", "/* three\n*/")]),
        ("both", '{"a": [1, 2,],\n}', {"a": [1, 2]}, [
            ("trailing-comma", "1:12", ","), ("trailing-comma", "1:14", ",")]),
        ("both", '{"a": "x"\n "b": 2}', {"a": "x", "b": 2}, [("missing-comma", "1:10", "")]),
        ("json", '{"a": 1 "b": 2}', {"a": 1, "b": 2}, [("missing-comma", "1:8", "")]),
        ("both", '{\n  stage: 3}', {"stage": 3}, [("unquoted-key", "2:3", "stage")]),
        ("json", '{"a": auto, "b": /data/x}', {"a": "auto", "b": "/data/x"}, [
            ("unquoted-text", "1:7", "auto"), ("unquoted-text", "1:18", "/data/x")]),
        ("hjson", '{"a": auto, # x\n}', {"a": "auto, # x"}, [("unquoted-text", "1:7", "auto, # x")]),
        ("both", "{'a': 'it\\'s \"so\"'}", {"a": 'it\'s "so"'}, [
            ("single-quotes", "1:2", "'a'"), ("single-quotes", "1:7", "'it\\'s \"so\"'")]),
        ("both", "{\n  \"a\": '''\n  x\n   y\n  '''}", {"a": "x\ny"}, [
            ("multiline-text", "2:8", "'''\n  x\n   y\n  '''")]),
        ("json", '{"a": True, "b": [None, False]}', {"a": True, "b": [None, False]}, [
            ("python-literal", "1:7", "True"), ("python-literal", "1:19", "None"),
            ("python-literal", "1:25", "False")]),
        ("hjson", '{"a": True,\n"b": None\n}', {"a": "True,", "b": "None"}, [
            ("python-literal", "1:7", "True,"), ("python-literal", "2:6", "None")]),
        ("json", "[-Infinity, inf]", [-INF, INF], [
            ("non-finite", "1:2", "-Infinity"), ("non-finite", "1:13", "inf")]),
        ("hjson", "[Infinity,\n1]", ["Infinity,", 1], [("non-finite", "1:2", "Infinity,")]),
        ("both", '"a": 1,\n"b": 2', {"a": 1, "b": 2}, [("no-braces", "1:1", "")]),
        ("hjson", "# nothing\n", {}, [("comment", "1:1", "# nothing"), ("no-braces", "2:1", "")]),
        ("both", '{"a": 1,\n"a": 2}', {"a": 2}, [("duplicate-key", "2:1", '"a"')]),
        ("both", "\ufeff{}", {}, [("bom", "1:1", "")]),
        ("both", '{"a": -1e999}', {"a": -INF}, [("big-number", "1:7", "-1e999")]),
        ("both", f"[{'9' * 4301}]", [INF], [("big-number", "1:2", "9" * 4301)]),
        ("both", f"[{'9' * 4000}]", [10**4000 - 1], []),
        ("json", "[007, +5, 0x1F, .5, 1., 1_000]", [7, 5, 31, 0.5, 1.0, 1000], [
            ("bad-number", "1:2", "007"), ("bad-number", "1:7", "+5"), ("bad-number", "1:11", "0x1F"),
            ("bad-number", "1:17", ".5"), ("bad-number", "1:21", "1."), ("bad-number", "1:25", "1_000")]),
        ("hjson", "[007\n]", ["007"], [("bad-number", "1:2", "007")]),
        ("hjson", "[1.0, 1e5, -0.0, 1e10, 0.5]", [1, 100000, 0, 1e10, 0.5], []),
        ("hjson", "[1\u0663]", [13], [("bad-number", "1:2", "1\u0663")]),
        ("json", '["a\tb"]', ["a\tb"], [("control-character", "1:4", "\t")]),
        ("both", '["\\ud83d\\ude00", "\\ud83d"]', ["\U0001f600", "\ud83d"], [
            ("lone-surrogate", "1:18", '"\\ud83d"')]),
        ("both", '["\\\'"]', ["'"], [("bad-escape", "1:3", "\\'")]),
        ("hjson", '["\\u+12a\\u1_2a"]', ["\u012a\u012a"], [
            ("bad-escape", "1:3", "\\u+12a"), ("bad-escape", "1:9", "\\u1_2a")]),
    ],
)  # fmt: skip
def test_oddities(dialect: str, text: str, value: Any, expected: list[tuple[str, str, str]]) -> None:
    for each in DIALECTS if dialect == "both" else (dialect,):
        document = read(text, "ds.json", each)
        assert repr(document.value) == repr(value)
        assert sorted(seen(document)) == sorted(expected)
        starts = [o.place.start for o in document.oddities]
        assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("dialect", "text", "message", "path"),
    [
        ("json", '{"z": {"a": 1 /* x */}}', "a comment", "z"),
        ("json", '{"z": {"a": 1,}}', "a comma before the closing brace", "z"),
        ("json", '{"z": [1,]}', "a comma before the closing bracket", "z"),
        ("json", '{"z": [0, True]}', "True, which is Python; JSON has true", "z.1"),
        ("hjson", "a: True,", 'True, which is Python; JSON has true (read as the text "True,")', "a"),
        (
            "json",
            '{"z": {\n"stage": 1, "b": 2,\n"stage": 2}}',
            "the key stage a second time (first at line 2)",
            "z.stage",
        ),
        ("json", '{"z": 1e400}', "1e400, which is too large for a float", "z"),
        ("json", '{"z": "\x1b"}', "a control character in a text (U+001B)", "z"),
    ],
)
def test_what_an_oddity_says(dialect: str, text: str, message: str, path: str) -> None:
    assert (message, path) in [(o.message, o.path) for o in read(text, "ds.json", dialect).oddities]


def test_of_a_key_written_twice_only_the_last_value_has_entries() -> None:
    document = read('{"a": {"x": 1, "y": 2}, "a": {"y": 3}}', "ds.json", "json")
    assert set(document.entries) == {"", "a", "a.y"}
    assert document.text[document.entries["a.y"].value.start] == "3"


def test_no_more_than_so_many_oddities() -> None:
    document = read("[" + "True, # x\n" * 1000 + "1]", "ds.json", "json")
    assert len(document.oddities) == MAX_ODDITIES
    assert document.value == [True] * 1000 + [1]


def test_an_empty_key_does_not_hide_the_root() -> None:
    document = read('{"": 1}', "ds.json", "json")
    assert document.entries[""].value.end == len(document.text)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dialect", "data", "expected"),
    [
        ("both", "", "ds.json:1:1: the file is empty"),
        ("both", b"\xef\xbb\xbf \n", "ds.json:1:1: the file is empty"),
        ("json", "# x", "ds.json:1:4: the text ends where a value or key was expected"),
        (
            "both",
            '{\n  "a": [1, 2',
            "ds.json:2:13: the text ends, but the [ opened at line 2, column 8 is never closed",
        ),
        (
            "both",
            '{"a": 1\n',
            "ds.json:2:1: the text ends, but the { opened at line 1, column 1 is never closed",
        ),
        (
            "both",
            '{"a": [1\n}',
            "ds.json:2:1: unexpected }: the [ opened at line 1, column 7 is not closed yet",
        ),
        ("both", '{"a": "x\n}', "ds.json:1:7: the double quote opened here is not closed on its line"),
        ("both", "{'a", "ds.json:1:2: the single quote opened here is not closed before the text ends"),
        ("both", '{"a\\', "ds.json:1:2: the double quote opened here is not closed before the text ends"),
        ("both", '{\n/* "a": 1}', "ds.json:2:1: the comment that /* opens is never closed"),
        ("both", "{\na: '''x}", "ds.json:2:4: the ''' opened here are never closed"),
        ("hjson", "{a: '''x'''}", "ds.json:1:5: ''' in a text of one line, which hjson cannot read"),
        ("both", '{"a" 1}', "ds.json:1:5: no colon after the key a"),
        ("both", "[1,,2]", "ds.json:1:4: unexpected , where a value or key was expected"),
        ("both", "{}}", "ds.json:1:3: unexpected } after the end of the value"),
        ("both", '{"a": }', "ds.json:1:7: unexpected } where a value was expected"),
        (
            "json",
            "[\u00a01]",
            "ds.json:1:2: unexpected no-break space (U+00A0) where a value or key was expected",
        ),
        ("hjson", '["a\tb"]', "ds.json:1:4: a control character in a text (U+0009)"),
        ("both", '["C:\\data"]', "ds.json:1:5: \\d, which is no escape"),
        ("json", '["\\u+12a"]', "ds.json:1:3: \\u+12a, which is no escape"),
        ("both", b"{\n\0}", "ds.json:2:1: a NUL byte: this is not a text file"),
        ("both", b'{\n"\xe9"}', "ds.json:2:2: the file is not UTF-8: byte 0xe9 at offset 3"),
        ("both", "{}".encode("utf-16"), "ds.json: the file is UTF-16, not UTF-8"),
        ("both", "{}".encode("utf-32"), "ds.json: the file is UTF-32, not UTF-8"),
        ("both", "[" * 100_000, f"ds.json:1:101: nested deeper than {MAX_DEPTH} levels"),
        ("both", b" " * (MAX_BYTES + 1), "ds.json: the file is larger than 4 MiB (4,194,305 bytes)"),
        ("both", f"[{'1,' * 50_000}1]", "ds.json:1:100002: more than 50,000 values"),
    ],
)
def test_errors(dialect: str, data: bytes | str, expected: str) -> None:
    for each in DIALECTS if dialect == "both" else (dialect,):
        assert refused(data, each) == expected


def test_the_error_names_the_text_that_took_the_brace() -> None:
    with pytest.raises(DsrunError) as caught:
        read('{"a": True}', "ds.json", "hjson")
    assert "to the end of its line: True} (line 1)" in caught.value.problems[0].hint


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_deepest_nesting_that_is_read(dialect: str) -> None:
    text = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    assert json.dumps(read(text, "ds.json", dialect).value) == text
    assert len(read(f"[{'1,' * (MAX_VALUES - 2)}1]", "ds.json", dialect).value) == MAX_VALUES - 1


# ---------------------------------------------------------------- against hjson and json

names = st.text(st.sampled_from("abz_ é名\"'\\"), min_size=1, max_size=6)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | names
    | st.sampled_from(["auto", "true", "#", "//", "5e8", "\U0001f600", "\n"])
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=15,
)
sections = st.dictionaries(names, values, max_size=5) | st.lists(values, max_size=4)


@QUICK
@given(sections, st.sampled_from([None, 0, 2, "\t"]), st.booleans())
def test_json_is_read_in_both_dialects(value: Any, indent: Any, escaped: bool) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=escaped)
    for dialect in DIALECTS:
        document = read(text, "ds.json", dialect)
        assert document.value == value
        assert document.oddities == ()
        todo = [("", value)]
        while todo:
            path, inner = todo.pop()
            place = document.entries[path].value
            assert json.loads(text[place.start : place.end]) == inner
            before = text[: place.start]
            assert place.line == before.count("\n") + 1
            assert place.column == len(before) - before.rfind("\n")
            items = dict(enumerate(inner)) if isinstance(inner, list) else inner
            for key, item in items.items() if isinstance(items, dict) else ():
                todo.append((f"{path}.{key}" if path else str(key), item))


TOKENS = [
    *"{}[],:\"'#/\\\n\t a10.-",
    *("'''", "\r\n", "\r", "//", "/*", "*/", '"b"', "key", "k: v\n", '"k":', "{}", "[]", '{"a":'),
    *("true", "True", "True,", "null", "null ", "None", "NaN", "Infinity", "-Infinity", "inf"),
    *("1.0", "1e5", "1e-5", "01", "+1", "0x1F", "1e999", "-0.0", "5.", "1_0", "9" * 4301),
    *('\\"', "\\'", "\\u0041", "\\ud83d", "\\ude00", "\\u+12a", "\\u1_2a", "\\u-001", "\\u\n123"),
    *("\u00a0", "\u0663", "\x0b", "\x01", "\ufeff", "é", "\u0131nf"),
]
TEXTS = [
    "",
    '{"a": {"b": [1, 2.5, "x"]}, "c": true}',
    "{\n  # c\n  a: 1\n  b: text, more\n  c: [1\n 2, 3,]\n}\n",
    "a: 1\nb: '''\n  x\n   y\n  '''\nc: {d: 'e'}\n",
    "{\n  k:\n    '''  one\r\n  two'''\n}\n",
]


@st.composite
def mangled(draw: Any) -> str:
    """A text that has been written into at a few places, or nothing but tokens."""
    text: str = draw(st.sampled_from(TEXTS))
    for token in draw(st.lists(st.sampled_from(TOKENS), min_size=1, max_size=8)):
        start = draw(st.integers(0, len(text)))
        text = text[:start] + token + text[start + draw(st.sampled_from([0, 0, 1, 2])) :]
    return text


def outcome(text: str, dialect: str) -> Document | None:
    try:
        return read(text, "ds.json", dialect)
    except DsrunError:
        return None


@settings(QUICK, max_examples=500)
@given(mangled())
def test_the_hjson_dialect_is_that_of_hjson(text: str) -> None:
    """The same value, and an error where hjson has one. Except: an empty text is an error here,
    and a number too large to hold is infinity here."""
    hjson = pytest.importorskip("hjson")
    document = outcome(text, "hjson")
    if not text.strip(" \t\r\n"):
        assert document is None
        return
    try:
        value = hjson.loads(text, object_pairs_hook=dict)
    except Exception:
        assert document is None or "big-number" in {o.kind for o in document.oddities}
    else:
        assert document is not None
        assert repr(document.value) == repr(value)


def is_harmless(document: Document) -> bool:
    """Whether json would read it too, going by the oddities."""
    for oddity in document.oddities:
        text = document.text[oddity.place.start : oddity.place.end]
        if oddity.kind not in HARMLESS:
            return False
        if oddity.kind == "non-finite" and text not in ("NaN", "Infinity", "-Infinity"):
            return False
        if oddity.kind == "big-number" and text.lstrip("-").isdigit():
            return False
    return True


@settings(QUICK, max_examples=500)
@given(mangled())
def test_the_json_dialect_is_that_of_json(text: str) -> None:
    document = outcome(text, "json")
    try:
        value = json.loads(text)
    except ValueError:
        assert document is None or not is_harmless(document)
    else:
        assert document is not None
        assert is_harmless(document)
        assert repr(document.value) == repr(value)


@QUICK
@given(st.binary(max_size=60) | mangled().map(lambda text: text.encode("utf-8", "replace")))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for dialect in DIALECTS:
        try:
            document = read(data, "ds.json", dialect)
        except DsrunError as error:
            assert error.problems[0].what
        else:
            places = [o.place for o in document.oddities]
            places += [place for entry in document.entries.values() for place in (entry.value, entry.whole)]
            assert all(excerpt(document, place) for place in places)


# Each was slow or large in some reader: many places on one line, many short matches, many rounds.
HOSTILE = [
    *("{", "]", '"', "'", ",", "\n", "\r", "#", "#\n", "/*", "/**/", "\\", "1", "-", "_", "é"),
    *('{"a":', "[],", '"a":1,', "a: b\n", "'''a''',", "\\u0041", "\x01", "/a", "True,", "\\u+12a"),
]


@pytest.mark.parametrize(("before", "after"), [("", ""), ('{"a":[', "]}"), ("['", "']")])
def test_large_texts_come_to_an_end(before: str, after: str) -> None:
    """No timing here: a reader that is quadratic would hang."""
    for unit in HOSTILE:
        text = before + unit * ((MAX_BYTES // 32) // len(unit)) + after
        for dialect in DIALECTS:
            document = outcome(text, dialect)
            assert document is None or len(document.entries) <= MAX_VALUES + 1


# ---------------------------------------------------------------- excerpts


def test_excerpt_shows_the_lines_around() -> None:
    document = read(PLAIN.replace("\n", "\r\n"), "ds.json", "json")
    place = document.entries["zero_optimization.stage"].whole
    assert excerpt(document, place).split("\n") == [
        '3 |   "zero_optimization": {',
        '4 |     "stage": 3',
        "  |     ^^^^^^^^^^",
        "5 |   },",
    ]
    assert excerpt(document, place, 0).split("\n") == ['4 |     "stage": 3', "  |     ^^^^^^^^^^"]


def test_excerpt_keeps_tabs_and_knows_wide_characters() -> None:
    document = read('{\n\t"名前": True}', "ds.json", "json")
    assert excerpt(document, document.oddities[0].place, 0).split("\n") == [
        '2 | \t"名前": True}',
        "  | \t        ^^^^",
    ]


def test_excerpt_of_a_value_of_many_lines_marks_the_first() -> None:
    document = read('{"a": [\n1]}', "ds.json", "json")
    assert excerpt(document, document.entries["a"].value, 0).split("\n") == ['1 | {"a": [', "  |       ^"]


def test_excerpt_cuts_long_lines_around_the_place() -> None:
    document = read("[" + "1234567, " * 200 + "True" + ", 1" * 300 + "]", "ds.json", "json")
    line, marks = excerpt(document, document.oddities[0].place).split("\n")
    assert len(line) <= 120
    assert line[4] == line[-1] == "…"
    assert line[marks.index("^") : marks.rindex("^") + 1] == "True"


def test_excerpt_shows_no_escape_codes() -> None:
    document = read('["\x1b[31m"]', "ds.json", "json")
    assert "\x1b" not in excerpt(document, document.oddities[0].place)
