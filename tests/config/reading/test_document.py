from __future__ import annotations

import json
from typing import Any

import pytest
from running import examples

from dsrun.config.reading.document import Document, read
from dsrun.config.reading.excerpt import excerpt
from dsrun.config.reading.places import MAX_BYTES, MAX_DEPTH, MAX_ISSUES, MAX_VALUES
from dsrun.errors import DsrunError

hypothesis = pytest.importorskip("hypothesis")
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

DIALECTS = ("hjson", "json")
INF = float("inf")
QUICK = settings(max_examples=examples(200), deadline=None, suppress_health_check=list(HealthCheck))
# json reads these as well, so they do not make a text anything but JSON.
HARMLESS = {"non-finite", "duplicate-key", "big-number", "lone-surrogate"}


def seen(document: Document) -> list[tuple[str, str, str]]:
    """(kind, line:column, text) of each issue."""
    return [
        (o.kind, f"{o.place.line}:{o.place.column}", document.text[o.place.start : o.place.end])
        for o in document.issues
    ]


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
    assert document.issues == ()
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


# ---------------------------------------------------------------- issues


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
        ("json", '["a\tb"]', ["a\tb"], [("control-character", "1:4", "\t")]),
        ("both", '["\\ud83d\\ude00", "\\ud83d"]', ["\U0001f600", "\ud83d"], [
            ("lone-surrogate", "1:18", '"\\ud83d"')]),
        ("both", '["\\\'"]', ["'"], [("bad-escape", "1:3", "\\'")]),
    ],
)  # fmt: skip
def test_syntax_issues(dialect: str, text: str, value: Any, expected: list[tuple[str, str, str]]) -> None:
    for each in DIALECTS if dialect == "both" else (dialect,):
        document = read(text, "ds.json", each)
        assert repr(document.value) == repr(value)
        assert sorted(seen(document)) == sorted(expected)
        starts = [o.place.start for o in document.issues]
        assert starts == sorted(starts)


@pytest.mark.parametrize(
    ("dialect", "text", "kind", "word", "path"),
    [
        ("json", '{"z": {"a": 1 /* x */}}', "comment", "comment", "z"),
        ("json", '{"z": {"a": 1,}}', "trailing-comma", "brace", "z"),
        ("json", '{"z": [1,]}', "trailing-comma", "bracket", "z"),
        ("json", '{"z": [0, True]}', "python-literal", "true", "z.1"),
        ("hjson", '{"a": True,\n}', "python-literal", '"True,"', "a"),
        ("json", '{"z": {\n"stage": 1, "b": 2,\n"stage": 2}}', "duplicate-key", "line 2", "z.stage"),
        ("json", '{"z": 1e400}', "big-number", "1e400", "z"),
        ("json", '{"z": "\x1b"}', "control-character", "U+001B", "z"),
    ],
)
def test_an_issue_has_a_path_and_says_what_stands_there(dialect, text, kind, word, path) -> None:
    (issue,) = read(text, "ds.json", dialect).issues
    assert (issue.kind, issue.path) == (kind, path)
    assert word in issue.message


def test_of_a_key_written_twice_only_the_last_value_has_entries() -> None:
    document = read('{"a": {"x": 1, "y": 2}, "a": {"y": 3}}', "ds.json", "json")
    assert set(document.entries) == {"", "a", "a.y"}
    assert document.text[document.entries["a.y"].value.start] == "3"


def test_the_list_of_issues_has_an_end() -> None:
    document = read("[" + "True, # x\n" * 1000 + "1]", "ds.json", "json")
    assert len(document.issues) == MAX_ISSUES
    assert document.value == [True] * 1000 + [1]


def test_an_empty_key_does_not_hide_the_root() -> None:
    document = read('{"": 1}', "ds.json", "json")
    assert document.entries[""].value.end == len(document.text)


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("dialect", "data", "place", "word"),
    [
        ("both", "", ":1:1", "empty"),
        ("both", b"\xef\xbb\xbf \n", ":1:1", "empty"),
        ("json", "# x", ":1:4", "ends"),
        ("both", '{\n  "a": [1, 2', ":2:13", "line 2, column 8"),
        ("both", '{"a": 1\n', ":2:1", "line 1, column 1"),
        ("both", '{"a": [1\n}', ":2:1", "line 1, column 7"),
        ("both", '{"a": "x\n}', ":1:7", "line"),
        ("both", "{'a", ":1:2", "single quote"),
        ("both", '{"a\\', ":1:2", "double quote"),
        ("both", '{\n/* "a": 1}', ":2:1", "/*"),
        ("both", "{\na: '''x}", ":2:4", "'''"),
        ("hjson", "{a: '''x'''}", ":1:5", "'''"),
        ("both", '{"a" 1}', ":1:5", "colon"),
        ("both", "[1,,2]", ":1:4", ","),
        ("both", "{}}", ":1:3", "}"),
        ("both", '{"a": }', ":1:7", "value"),
        ("json", "[\u00a01]", ":1:2", "U+00A0"),
        ("hjson", '["a\tb"]', ":1:4", "U+0009"),
        ("both", '["C:\\data"]', ":1:5", "\\d"),
        ("both", '["\\u+12a"]', ":1:3", "\\u+12a"),
        ("both", b"{\n\0}", ":2:1", "NUL"),
        ("both", b'{\n"\xe9"}', ":2:2", "0xe9"),
        ("both", "{}".encode("utf-16"), "", "UTF-16"),
        ("both", "{}".encode("utf-32"), "", "UTF-32"),
        ("both", "[" * 100_000, ":1:101", str(MAX_DEPTH)),
        ("both", b" " * (MAX_BYTES + 1), "", "4,194,305"),
        ("both", f"[{'1,' * 50_000}1]", ":1:100002", "50,000"),
    ],
)
def test_errors(dialect: str, data: bytes | str, place: str, word: str) -> None:
    for each in DIALECTS if dialect == "both" else (dialect,):
        with pytest.raises(DsrunError) as caught:
            read(data, "ds.json", each)
        (problem,) = caught.value.problems
        assert problem.where == f"ds.json{place}"
        assert word in problem.what


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
        assert document.issues == ()
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
    *('\\"', "\\'", "\\u0041", "\\ud83d", "\\ude00"),
    *("\u00a0", "\x0b", "\x01", "\ufeff", "é", "\u0131nf"),
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


@settings(QUICK, max_examples=examples(500))
@given(mangled())
def test_the_hjson_dialect_is_that_of_hjson(text: str) -> None:
    """The same value, and an error where hjson has one, but for what document.py leaves out on purpose."""
    hjson = pytest.importorskip("hjson")
    document = outcome(text, "hjson")
    if "'''" in text.partition("\n")[0] or (document is None and "\\u" in text):
        return
    if not text.strip(" \t\r\n"):
        assert document is None
        return
    try:
        value = hjson.loads(text, object_pairs_hook=dict)
    except Exception:
        assert document is None or "big-number" in {o.kind for o in document.issues}
    else:
        assert document is not None
        assert repr(document.value) == repr(value)


def is_harmless(document: Document) -> bool:
    """Whether json would read it too, going by the issues."""
    for issue in document.issues:
        text = document.text[issue.place.start : issue.place.end]
        if issue.kind not in HARMLESS:
            return False
        if issue.kind == "non-finite" and text not in ("NaN", "Infinity", "-Infinity"):
            return False
        if issue.kind == "big-number" and text.lstrip("-").isdigit():
            return False
    return True


@settings(QUICK, max_examples=examples(500))
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
            places = [o.place for o in document.issues]
            places += [place for entry in document.entries.values() for place in (entry.value, entry.whole)]
            assert all(excerpt(document.text, place) for place in places)


# Each was slow or large in some reader: many places on one line, many short matches, many rounds.
HOSTILE = [
    *("{", "]", '"', "'", ",", "\n", "\r", "#", "#\n", "/*", "/**/", "\\", "1", "-", "_", "é"),
    *('{"a":', "[],", '"a":1,', "a: b\n", "'''a''',", "\\u0041", "\x01", "/a", "True,", "\\u+12a"),
]


@pytest.mark.parametrize(("before", "after"), [("", ""), ('{"a":[', "]}"), ("['", "']")])
def test_large_texts_come_to_an_end(before: str, after: str) -> None:
    """No timing here: a reader that is quadratic would hang."""
    for unit in HOSTILE:
        text = before + unit * (examples(MAX_BYTES // 32) // len(unit)) + after
        for dialect in DIALECTS:
            document = outcome(text, dialect)
            assert document is None or len(document.entries) <= MAX_VALUES + 1


# ---------------------------------------------------------------- excerpts


def shown(text: str, path: str | None = None) -> list[str]:
    """The excerpt of a value, or else of the first issue."""
    document = read(text, "ds.json", "json")
    place = document.issues[0].place if path is None else document.entries[path].whole
    return excerpt(document.text, place).split("\n")


def test_excerpt() -> None:
    text = PLAIN.replace("\n", "\r\n")
    assert shown(text, "zero_optimization.stage") == ['4 |     "stage": 3', "  |     ^^^^^^^^^^"]


def test_excerpt_keeps_tabs_and_knows_wide_characters() -> None:
    assert shown('{\n\t"名前": True}') == ['2 | \t"名前": True}', "  | \t        ^^^^"]


def test_excerpt_of_a_value_of_many_lines_marks_the_first() -> None:
    assert shown('{"a": [\n1]}', "a") == ['1 | {"a": [', "  |  ^^^^^^"]


def test_excerpt_cuts_long_lines_around_the_place() -> None:
    line, marks = shown("[" + "1234567, " * 200 + "True" + ", 1" * 300 + "]")
    assert len(line) <= 120
    assert line[4] == line[-1] == "…"
    assert line[marks.index("^") : marks.rindex("^") + 1] == "True"


def test_excerpt_shows_no_escape_codes() -> None:
    assert "\x1b" not in "".join(shown('["\x1b[31m"]'))
