"""Fixes in the text of a config: each edit in many layouts, and random texts and edits."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess

import pytest
from running import examples

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.reading.document import read
from dsrun.config.validation import edits
from dsrun.config.validation.edits import REWRITABLE, in_place, patch, plain_json

hypothesis = pytest.importorskip("hypothesis")
given, st = hypothesis.given, hypothesis.strategies

TWO = '{\n  "a": 1,\n  "b": {\n    "c": "x",\n    "d": [1, 2]\n  },\n  "e": true\n}\n'
FOUR = TWO.replace("  ", "    ")
TABS = TWO.replace("  ", "\t")
CRLF = TWO.replace("\n", "\r\n")
LINE = '{"a": 1, "b": {"c": "x", "d": [1, 2]}, "e": true}'
TIGHT = '{"a":1,"b":{"c":"x","d":[1,2]},"e":true}'
WIDE = '{ "a": 1, "b": { "c": "x", "d": [ 1, 2 ] }, "e": true }'
NOTED = """{
  # the first
  "a": 1, // one
  "b": { /* b */
    "c": "x", # why c
    # about d
    "d": [1, 2] /* the end of b */
    # after d
  },
  "e": true # why e
  // the end
}
"""
HJSON = """{
  // the first
  a: 1
  b: {
    c: x
    d: [1, 2]
  }
  e: true # why e
}
"""
BARE = "a: 1\nb: {\n  c: x\n}\ne: true\n"


def fixed(text, *changes, dialect="hjson", done=True):
    """The text after one fix of these edits."""
    fix = Fix(tuple(Edit(*change) for change in changes))
    document = read(text, "x.json", dialect)
    result = edits.fixed(document, [fix], dialect)
    assert (result.text != text) is done
    return result.text


def same_in(text, before, after, *changes, dialect="hjson"):
    """That the edits change nothing but `before`, to `after`."""
    assert text.count(before) == 1
    assert fixed(text, *changes, dialect=dialect) == text.replace(before, after)


LAYOUTS = {
    "two": TWO,
    "four": FOUR,
    "tabs": TABS,
    "crlf": CRLF,
    "line": LINE,
    "tight": TIGHT,
    "wide": WIDE,
    "noted": NOTED,
    "hjson": HJSON,
}
JSON_LAYOUTS = {name: text for name, text in LAYOUTS.items() if name != "hjson"}
layouts = pytest.mark.parametrize("text", LAYOUTS.values(), ids=LAYOUTS)
dialects = pytest.mark.parametrize("dialect", ["hjson", "json"])


# ---------------------------------------------------------------- replace


@layouts
@pytest.mark.parametrize("value", [2, -1.5, 1e-05, None, False, "auto", "ä \"q\" 'p'\n", [], {}])
def test_replace_changes_the_value_alone(text, value):
    sign = '"a":' if '"a"' in text else "a:"
    blank = "" if text == TIGHT else " "
    shown = json.dumps(value, ensure_ascii=False)
    same_in(text, f"{sign}{blank}1", f"{sign}{blank}{shown}", ("replace", "a", value))


@layouts
def test_replace_in_a_list(text):
    before = "[ 1, 2 ]" if text == WIDE else "[1,2]" if text == TIGHT else "[1, 2]"
    same_in(text, before, before.replace("2", "0.5"), ("replace", "b.d.1", 0.5))


@layouts
def test_other_edits_in_a_list_are_left(text):
    for change in [
        ("remove", "b.d.0"),
        ("rename", "b.d.0", "x"),
        ("move", "b.d.0", "x"),
        ("add", "b.d.2", 3),
    ]:
        fixed(text, change, done=False)
    for path in ["b.d.2", "b.d.x", "b.d.-1", "b.d.01", "a.0", "b.d.0.x"]:
        fixed(text, ("replace", path, 3), done=False)


@pytest.mark.parametrize(
    ("text", "value", "after"),
    [
        ('{\n  "a": true\n}', {"x": 1, "y": {}}, '{\n  "a": {\n    "x": 1,\n    "y": {}\n  }\n}'),
        ('{\n\t"b": {\n\t\t"a": 1\n\t}\n}', {"x": 1}, '{\n\t"b": {\n\t\t"a": {\n\t\t\t"x": 1\n\t\t}\n\t}\n}'),
        ('{\r\n "a": 1\r\n}', {"x": 1}, '{\r\n "a": {\r\n  "x": 1\r\n }\r\n}'),
        ('{"a": 1}', {"x": [1, {}]}, '{"a": {"x": [1, {}]}}'),
        ('{"a":1}', {"x": 1, "y": 2}, '{"a":{"x":1,"y":2}}'),
        ('{\n  "a": 1\n}', [0.9, 0.999], '{\n  "a": [0.9, 0.999]\n}'),
        ('{\n  "a": [\n    1,\n    2\n  ]\n}', [3, 4], '{\n  "a": [3, 4]\n}'),
        ('{\n  "a": {"z": 1}\n}', {"x": 1}, '{\n  "a": {"x": 1}\n}'),
        ('{\n  "a": 1\n}', [{"x": 1}], '{\n  "a": [\n    {\n      "x": 1\n    }\n  ]\n}'),
    ],
)
@dialects
def test_replace_by_what_has_an_inside(text, value, after, dialect):
    path = "b.a" if '"b"' in text else "a"
    assert fixed(text, ("replace", path, value), dialect=dialect) == after


@pytest.mark.parametrize(
    ("before", "value", "after"),
    [
        ("{\n  a: True,\n  b: 1\n}", True, "{\n  a: true,\n  b: 1\n}"),
        ("{\n  b: 1,\n  a: True\n}", True, "{\n  b: 1,\n  a: true\n}"),
        ("{\n  b: 1,\n  a: True, # why\n}", True, "{\n  b: 1,\n  a: true # why\n}"),
        ("{\n  a: True # why\n  b: 1\n}", True, "{\n  a: true # why\n  b: 1\n}"),
        ("{\n  a: adam\n}", "adamw", '{\n  a: "adamw"\n}'),
        ("{\n  a: adam\n}", "true", '{\n  a: "true"\n}'),
        ("{\n  a: adam,\n  b: 1\n}", "adamw", '{\n  a: "adamw",\n  b: 1\n}'),
        ("{\n  a: /local_nvme\n}", "/other", '{\n  a: "/other"\n}'),
        ("{\n  a: http://x\n}", 1, "{\n  a: 1\n}"),
        ("{'a': 'x', 'b': 1}", "y", "{'a': \"y\", 'b': 1}"),
        ("{'a': 'x', 'b': 1}", "it's", "{'a': \"it's\", 'b': 1}"),
        ("a: '''\n  x\n  '''\nb: 1", "y", 'a: "y"\nb: 1'),
    ],
)
def test_replace_in_hjson(before, value, after):
    assert fixed(before, ("replace", "a", value)) == after


def test_what_json_cannot_hold_is_left():
    for value in [float("nan"), float("inf"), {1}, 10**5000, {1: 2}, [float("nan")]]:
        fixed(TWO, ("replace", "a", value), done=False)
        fixed(TWO, ("add", "new.x", value), done=False)


# ---------------------------------------------------------------- remove


@pytest.mark.parametrize(
    ("text", "path", "after"),
    [
        (TWO, "a", TWO.replace('  "a": 1,\n', "")),
        (TWO, "e", '{\n  "a": 1,\n  "b": {\n    "c": "x",\n    "d": [1, 2]\n  }\n}\n'),
        (TWO, "b", '{\n  "a": 1,\n  "e": true\n}\n'),
        (TWO, "b.c", TWO.replace('    "c": "x",\n', "")),
        (TWO, "b.d", TWO.replace(',\n    "d": [1, 2]', "")),
        (CRLF, "a", CRLF.replace('  "a": 1,\r\n', "")),
        (CRLF, "e", CRLF.replace(',\r\n  "e": true', "")),
        (TABS, "b.d", TABS.replace(',\n\t\t"d": [1, 2]', "")),
        (LINE, "a", '{"b": {"c": "x", "d": [1, 2]}, "e": true}'),
        (LINE, "b", '{"a": 1, "e": true}'),
        (LINE, "e", '{"a": 1, "b": {"c": "x", "d": [1, 2]}}'),
        (TIGHT, "a", '{"b":{"c":"x","d":[1,2]},"e":true}'),
        (TIGHT, "e", '{"a":1,"b":{"c":"x","d":[1,2]}}'),
        (WIDE, "a", '{ "b": { "c": "x", "d": [ 1, 2 ] }, "e": true }'),
        (WIDE, "e", '{ "a": 1, "b": { "c": "x", "d": [ 1, 2 ] } }'),
        (NOTED, "a", NOTED.replace('  "a": 1, // one\n', "")),
        (NOTED, "b.c", NOTED.replace('    "c": "x", # why c\n', "")),
        (NOTED, "b.d", NOTED.replace('    "d": [1, 2] /* the end of b */\n', "").replace('"x",', '"x"')),
        (NOTED, "e", NOTED.replace('  "e": true # why e\n', "").replace("},\n", "}\n")),
        ('{"a": {"b": 1}}', "a.b", '{"a": {}}'),
        ('{\n  "a": {\n    "b": 1\n  }\n}', "a.b", '{\n  "a": {}\n}'),
        ('{\n  "a": 1\n}\n', "a", "{}\n"),
        ('{\n  # why\n  "a": 1\n}\n', "a", "{\n  # why\n}\n"),
        ('{"a": 1,\n "b": 2}', "b", '{"a": 1}'),
        ('{"a": 1,\n "b": 2}', "a", '{\n "b": 2}'),
        ('{"a": 1, // x\n "b": 2}', "b", '{"a": 1 // x\n }'),
        ('{"a": 1, /* b is */ "b": 2}', "a", '{/* b is */ "b": 2}'),
        ('{"a": 1, /* b is */ "b": 2}', "b", '{"a": 1 /* b is */}'),
        ('{"a": 1, "b": 2 /* b */}', "b", '{"a": 1}'),
        ('{\n  "a": 1\n  , "b": 2\n  , "c": 3\n}', "b", '{\n  "a": 1\n  , "c": 3\n}'),
        ('{\n  "a": 1\n  , "b": 2\n  , "c": 3\n}', "c", '{\n  "a": 1\n  , "b": 2\n}'),
        ('{\n  "a": 1, "b": 2,\n  "c": 3\n}', "b", '{\n  "a": 1,\n  "c": 3\n}'),
        ('{\n  "a": 1, "b": 2,\n  "c": 3\n}', "a", '{\n  "b": 2,\n  "c": 3\n}'),
    ],
)
@dialects
def test_remove(text, path, after, dialect):
    assert fixed(text, ("remove", path), dialect=dialect) == after


@pytest.mark.parametrize(
    ("text", "path", "after"),
    [
        (HJSON, "a", HJSON.replace("  a: 1\n", "")),
        (HJSON, "b", HJSON.replace("  b: {\n    c: x\n    d: [1, 2]\n  }\n", "")),
        (HJSON, "b.c", HJSON.replace("    c: x\n", "")),
        (HJSON, "e", HJSON.replace("  e: true # why e\n", "")),
        (BARE, "a", "\nb: {\n  c: x\n}\ne: true\n"),
        (BARE, "e", "a: 1\nb: {\n  c: x\n}\n"),
        (BARE, "b.c", "a: 1\nb: {}\ne: true\n"),
        ('{\n  "a": 1,\n  "b": 2,\n}', "b", '{\n  "a": 1,\n}'),
        ('{"a": x\n "b": 2}', "b", '{"a": x\n }'),
    ],
)
def test_remove_in_hjson(text, path, after):
    assert fixed(text, ("remove", path)) == after


def test_remove_leaves_a_trailing_comma_to_the_rule_about_it():
    text = '{\n  "a": 1,\n  "b": 2,\n}'
    assert fixed(text, ("remove", "b"), dialect="json") == '{\n  "a": 1,\n}'
    assert fixed(text, ("remove", "a"), dialect="json") == '{\n  "b": 2,\n}'


# ---------------------------------------------------------------- rename


@layouts
def test_rename_changes_the_key_alone(text):
    quote = "" if text == HJSON else '"'
    same_in(text, f"{quote}c{quote}:", f"{quote}new_c{quote}:", ("rename", "b.c", "new_c"))
    same_in(text, f"{quote}b{quote}:", f"{quote}new_b{quote}:", ("rename", "b", "new_b"))


def test_rename_keeps_the_quotes():
    assert fixed("{'a': 1, b: 2}", ("rename", "a", "x")) == '{"x": 1, b: 2}'
    assert fixed("{'a': 1, b: 2}", ("rename", "b", "x")) == "{'a': 1, x: 2}"
    assert fixed("{'a': 1, b: 2}", ("rename", "a", "it's")) == '{"it\'s": 1, b: 2}'
    assert fixed("{'a': 1, b: 2}", ("rename", "b", "x y")) == "{'a': 1, \"x y\": 2}"


@layouts
def test_rename_to_a_key_that_is_there_or_cannot_be_is_left(text):
    for value in ["e", "b", "x.y"]:
        fixed(text, ("rename", "a", value), done=False)


# ---------------------------------------------------------------- add


@pytest.mark.parametrize(
    ("text", "path", "value", "after"),
    [
        (TWO, "f", 1, TWO.replace("true", 'true,\n  "f": 1')),
        (FOUR, "f", 1, FOUR.replace("true", 'true,\n    "f": 1')),
        (TABS, "b.f", {"g": 1}, TABS.replace("2]", '2],\n\t\t"f": {\n\t\t\t"g": 1\n\t\t}')),
        (CRLF, "b.f", "auto", CRLF.replace("2]", '2],\r\n    "f": "auto"')),
        (
            CRLF,
            "f.g.h",
            1,
            CRLF.replace("true", 'true,\r\n  "f": {\r\n    "g": {\r\n      "h": 1\r\n    }\r\n  }'),
        ),
        (LINE, "f", 1, '{"a": 1, "b": {"c": "x", "d": [1, 2]}, "e": true, "f": 1}'),
        (LINE, "b.f.g", [1, 2], '{"a": 1, "b": {"c": "x", "d": [1, 2], "f": {"g": [1, 2]}}, "e": true}'),
        (TIGHT, "b.f.g", [1, 2], '{"a":1,"b":{"c":"x","d":[1,2],"f":{"g":[1, 2]}},"e":true}'),
        (WIDE, "f", 1, '{ "a": 1, "b": { "c": "x", "d": [ 1, 2 ] }, "e": true, "f": 1 }'),
        (NOTED, "f", 1, NOTED.replace("true # why e\n", 'true, # why e\n  "f": 1\n')),
        (NOTED, "b.f", 1, NOTED.replace("2] /* the end of b */\n", '2], /* the end of b */\n    "f": 1\n')),
        ("{}", "f", 1, '{\n  "f": 1\n}'),
        ("{ }\n", "f.g", 1, '{\n  "f": {\n    "g": 1\n  }\n}\n'),
        ("{\n}\n", "f", 1, '{\n  "f": 1\n}\n'),
        ('{"a": {}}', "a.f", 1, '{"a": {"f": 1}}'),
        ('{\n    "a": {}\n}', "a.f", 1, '{\n    "a": {\n        "f": 1\n    }\n}'),
        ('{\n\t"a": {\n\t\t# none\n\t}\n}', "a.f", 1, '{\n\t"a": {\n\t\t# none\n\t\t"f": 1\n\t}\n}'),
        ('{"a": 1,\n "b": 2}', "f", 1, '{"a": 1,\n "b": 2,\n "f": 1}'),
        ('{\n  "a": 1, "b": 2\n}', "f", 1, '{\n  "a": 1, "b": 2, "f": 1\n}'),
        ('{\n  "a": 1,\n}', "f", 1, '{\n  "a": 1,\n  "f": 1\n}'),
        ('{"a": 1,}', "f", 1, '{"a": 1, "f": 1,}'),
        ('{\n  "a" : 1\n}', "f", 1, '{\n  "a" : 1,\n  "f" : 1\n}'),
        ('{"a": 1 /* two\nlines */}', "f", 1, '{"a": 1, "f": 1 /* two\nlines */}'),
    ],
)
@dialects
def test_add(text, path, value, after, dialect):
    assert fixed(text, ("add", path, value), dialect=dialect) == after


@pytest.mark.parametrize(
    ("text", "path", "value", "after"),
    [
        (HJSON, "f", 1, HJSON.replace("# why e\n", '# why e\n  "f": 1\n')),
        (HJSON, "b.f", "auto", HJSON.replace("2]\n", '2]\n    "f": "auto"\n')),
        (
            HJSON,
            "f",
            {"g": 1, "h": 2},
            HJSON.replace("why e\n", 'why e\n  "f": {\n    "g": 1,\n    "h": 2\n  }\n'),
        ),
        (BARE, "f", 1, BARE + '"f": 1\n'),
        (BARE, "b.f", 1, BARE.replace("x\n", 'x\n  "f": 1\n')),
        ("a: x", "f", 1, 'a: x\n"f": 1'),
        ("{'a': 1, 'b': 2}", "f", 1, "{'a': 1, 'b': 2, \"f\": 1}"),
        ('{\n  "a": 1,\n  "b": x\n}', "f", 1, '{\n  "a": 1,\n  "b": x\n  "f": 1\n}'),
        ('{"a": x\n}', "f", 1, '{"a": x\n  "f": 1\n}'),
        ("{\n  a: 1,\n  b: 2\n}", "f g", 1, '{\n  a: 1,\n  b: 2,\n  "f g": 1\n}'),
    ],
)
def test_add_in_hjson(text, path, value, after):
    assert fixed(text, ("add", path, value)) == after


@layouts
def test_add_where_something_is_in_the_way_is_left(text):
    for path in ["a", "b", "b.c", "a.x", "b.c.x", "b.d.x"]:
        fixed(text, ("add", path, 1), done=False)


# ---------------------------------------------------------------- move


@pytest.mark.parametrize(
    ("text", "path", "target", "after"),
    [
        (
            TWO,
            "a",
            "b.new",
            '{\n  "b": {\n    "c": "x",\n    "d": [1, 2],\n    "new": 1\n  },\n  "e": true\n}\n',
        ),
        (
            TWO,
            "b.d",
            "f.g",
            '{\n  "a": 1,\n  "b": {\n    "c": "x"\n  },\n  "e": true,\n  "f": {\n    "g": [1, 2]\n  }\n}\n',
        ),
        (LINE, "a", "b.a", '{"b": {"c": "x", "d": [1, 2], "a": 1}, "e": true}'),
        (LINE, "b.c", "f.g.c", '{"a": 1, "b": {"d": [1, 2]}, "e": true, "f": {"g": {"c": "x"}}}'),
        (TIGHT, "b.c", "c", '{"a":1,"b":{"d":[1,2]},"e":true,"c":"x"}'),
        (
            NOTED,
            "b.c",
            "c",
            NOTED.replace('    "c": "x", # why c\n', "").replace(
                "true # why e\n", 'true, # why e\n  "c": "x"\n'
            ),
        ),
        (
            '{\n  "x": {\n    "a": { # why\n      "b": 1 // one\n    }\n  },\n  "y": 1\n}\n',
            "x.a",
            "a",
            '{\n  "x": {},\n  "y": 1,\n  "a": { # why\n    "b": 1 // one\n  }\n}\n',
        ),
        (
            '{\r\n\t"a": {\r\n\t\t"b": [\r\n\t\t\t1\r\n\t\t]\r\n\t}\r\n}',
            "a.b",
            "b",
            '{\r\n\t"a": {},\r\n\t"b": [\r\n\t\t1\r\n\t]\r\n}',
        ),
        ('{\n  "a": 1\n}', "a", "b.c", '{\n  "b": {\n    "c": 1\n  }\n}'),
        ('{\n  "a": 1\n}', "a", "a.b", '{\n  "a": {\n    "b": 1\n  }\n}'),
    ],
)
@dialects
def test_move(text, path, target, after, dialect):
    assert fixed(text, ("move", path, target), dialect=dialect) == after


def test_move_in_hjson():
    after = HJSON.replace("    c: x\n", "").replace("# why e\n", '# why e\n  "c": x\n')
    assert fixed(HJSON, ("move", "b.c", "c")) == after


@layouts
def test_move_onto_something_is_left(text):
    for target in ["e", "b.c", "e.x", "b.d.x"]:
        fixed(text, ("move", "a", target), done=False)


# ---------------------------------------------------------------- several


def test_a_fix_is_done_as_a_whole_or_not_at_all():
    fixed(TWO, ("replace", "a", 2), ("remove", "nothing"), done=False)
    after = fixed(TWO, ("replace", "a", 2), ("remove", "b"), ("add", "b", 3))
    assert after == '{\n  "a": 2,\n  "e": true,\n  "b": 3\n}\n'


def test_fixes_that_meet_wait_for_the_next_round():
    fixes = [
        Fix((Edit("replace", "b.c", "y"),)),
        Fix((Edit("remove", "b"),)),
        Fix((Edit("move", "e", "b.c.x"),)),
        Fix((Edit("rename", "a", "z"),)),
        Fix((Edit("add", "z", 3),)),
        Fix((Edit("add", "f.g", 3),)),
        Fix((Edit("add", "f.h", 3),)),
        Fix((Edit("replace", "b.c", "y"),)),
    ]
    text = edits.fixed(read(TWO, "x", "json"), fixes, "json").text
    assert json.loads(text) == {"z": 1, "b": {"c": "y", "d": [1, 2]}, "e": True, "f": {"g": 3, "h": 3}}


@pytest.mark.parametrize(
    "change",
    [
        (),
        (("replace", "nothing", 1),),
        (("remove", "nothing"),),
        (("replace", "", 1),),
        (("remove", ""),),
        (("replace", "a", 1),),
        (("add", ".", 1), ("add", "..", 1), ("remove", "a.")),
    ],
)
@layouts
def test_what_says_nothing_is_left(text, change):
    fixed(text, *change, done=False)


@pytest.mark.parametrize("text", ["[1, 2]", "3", '"x"', "x"])
def test_what_is_no_object_is_left(text):
    fixed(text, ("add", "a", 1), done=False)
    fixed(text, ("replace", "0", 1), done=False)


def test_doubled_and_dotted_keys():
    doubled = '{"a": 1, "a": 2}'
    assert fixed(doubled, ("replace", "a", 3)) == '{"a": 1, "a": 3}'
    fixed(doubled, ("remove", "a"), done=False)
    fixed('{"a": {"b": 1}, "a.b": 2}', ("replace", "a.b", 3), done=False)


def test_true_is_not_one():
    assert fixed('{"a": 1}', ("replace", "a", True)) == '{"a": true}'
    assert fixed('{"a": 1}', ("replace", "a", 1.0)) == '{"a": 1.0}'


def test_the_document_stays_as_it_is():
    document = read(TWO, "x", "json")
    value = copy.deepcopy(document.value)
    assert edits.fixed(document, [Fix((Edit("replace", "b.c", 1),))], "json") != document
    assert (document.text, document.value) == (TWO, value)


def test_a_byte_order_mark_is_no_part_of_the_text():
    result = edits.fixed(
        read(b"\xef\xbb\xbf" + TWO.encode(), "x", "json"), [Fix((Edit("replace", "a", 5),))], "json"
    )
    assert result.text == TWO.replace("1,\n", "5,\n")


def test_what_is_nested_too_deep_is_left():
    for depth in (102, 5000):
        path = ".".join(["f"] * depth)
        fixed(TWO, ("add", path, 1), done=False)
        fixed(TWO, ("move", "a", path), done=False)


def test_there_is_an_end_to_a_round():
    text = json.dumps({f"k{i}": i for i in range(1000)}, indent=1)
    fixes = [Fix((Edit("remove", f"k{i}"),)) for i in range(1000)]
    after = json.loads(edits.fixed(read(text, "x", "json"), fixes, "json").text)
    assert len(after) == 1000 - edits.MAX_READ // len(text)


# ---------------------------------------------------------------- patch


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (TWO, FOUR),
        (TWO, TWO.replace("1,", "2,")),
        (TWO, TWO.rstrip("\n")),
        (LINE, LINE + "\n"),
        (LINE, TIGHT),
        (CRLF, CRLF.replace("true", "false")),
        ("a\u2028b\x0cc\n", "a\u2028b\x0cd\n"),
    ],
)
@pytest.mark.parametrize("name", ["dir/a.json", "a lab's/实验 1.json"])
@pytest.mark.parametrize("program", ["patch", "git"])
def test_patch_and_git_take_the_patch(tmp_path, before, after, name, program):
    if shutil.which(program) is None:
        pytest.skip(f"{program} is not installed")
    text = patch(before, after, name)
    path = tmp_path / name
    path.parent.mkdir()
    path.write_bytes(before.encode())
    command = ["patch", "-p1"] if program == "patch" else ["git", "apply", "--whitespace=nowarn", "-"]
    subprocess.run(command, input=text.encode(), cwd=tmp_path, check=True)
    assert path.read_bytes() == after.encode()
    assert list(path.parent.iterdir()) == [path]


def test_no_patch_of_what_is_the_same():
    assert patch(TWO, TWO, "x") == ""


@pytest.mark.parametrize(
    ("text", "after", "written"),
    [
        (TWO, FOUR, True),
        ("{'a': true,}", '{"a": true}', True),
        (NOTED, NOTED.replace("1,", "2,"), False),
        (NOTED, TWO, False),
        (BARE, TWO, False),
        ("{'a': 1}", "{'a': 2}", False),
        ("{\n  a: Adam W\n}", '{\n  a: "AdamW"\n}', False),
    ],
)
def test_only_plain_json_is_written_over(text, after, written):
    assert in_place(read(text, "x", "hjson"), read(after, "x", "hjson")) is written


# ---------------------------------------------------------------- plain JSON


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (TWO, TWO),
        ('{"a": [1, 2,], "b": {"c": 1,},}', '{"a": [1, 2], "b": {"c": 1}}'),
        ('{\n  "a": 1\n  "b": [1 2]\n}', '{\n  "a": 1,\n  "b": [1, 2]\n}'),
        ('{"a": True, "b": [False, None]}', '{"a": true, "b": [false, null]}'),
        ("{'a': 'it\\'s \"x\"\\n', 'b': '\t'}", '{"a": "it\'s \\"x\\"\\n", "b": "\\t"}'),
        ("{a: adam, b-c: /local}", '{"a": "adam", "b-c": "/local"}'),
        ('{"a": "it\\\'s"}', '{"a": "it\'s"}'),
        ('{"a": "x\ty"}', '{"a": "x\\ty"}'),
        ('{"a": 0x10, "b": +1, "c": .5, "d": 1_000}', '{"a": 16, "b": 1, "c": 0.5, "d": 1000}'),
        ("a: 1\nb: {c: x}\n", '{\n"a": 1,\n"b": {"c": "x"}\n}\n'),
        ("\ufeff{'a': 1}", '{"a": 1}'),
        ('{"a": 1, "a": True}', '{"a": 1, "a": true}'),
        ('{"a": NaN,}', '{"a": NaN}'),
        ("{'a': True, 'a': 1}", '{"a": true, "a": 1}'),
        ("{\r\n  a: 1\r\n  b: 2,\r\n}", '{\r\n  "a": 1,\r\n  "b": 2\r\n}'),
        ("{\n  a: 1 # why\n  b: 2 // why\n}", '{\n  "a": 1, # why\n  "b": 2 // why\n}'),
    ],
)
@dialects
def test_plain_json(text, after, dialect):
    try:
        document = read(text, "x", dialect)
    except Exception:
        document = read(text, "x", "json")
    assert plain_json(document) == after
    left = {issue.kind for issue in read(after, "x", "json").issues}
    assert not left & REWRITABLE


@pytest.mark.parametrize(
    ("text", "after"),
    [
        (
            "{ # one\n  # two\n  'a': 1 // three\n  /* four\n  */\n  b: /* five */ 2\n}",
            '{\n  "a": 1,\n  "b": 2\n}',
        ),
        ("# one\r\n{\r\n  'a': 1, // two\r\n}\r\n# three", '{\r\n  "a": 1\r\n}\r\n'),
        ("// one\na: 1 # two\n", '{\n"a": 1\n}\n'),
    ],
)
def test_comments_are_dropped_on_demand(text, after):
    plain = plain_json(read(text, "x", "json"), drop_comments=True)
    assert plain == after
    json.loads(plain)


def test_many_slips():
    text = "{\n" + "\n".join(f"'k{i}': True # {i}" for i in range(300)) + "\n}"
    plain = plain_json(read(text, "x", "json"), drop_comments=True)
    assert json.loads(plain) == {f"k{i}": True for i in range(300)}


@pytest.mark.parametrize("text", ["a: Adam W\nb: 1", "a: {b: x y}\n}"])
def test_what_only_hjson_reads_is_not_made_plain(text):
    assert plain_json(read(text, "x", "hjson")) is None


# ---------------------------------------------------------------- at random

KEYS = ["a", "b", "stage", "type", "fp16", "0", "x y", "it's", "ä"]
LEAVES = (
    st.none()
    | st.booleans()
    | st.integers(-5, 10**12)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.sampled_from(["auto", "", "cpu, x", "q}", "True # no", 'q"q', "it's", "# no", "}", "//", "\n", "ä"])
)
VALUES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=3),
    max_leaves=6,
)
CONFIGS = st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=5)


BARE = ["auto", "cpu, x", "q}", "True # no"]


class Layout:
    """Writes a value with blanks, comments, commas and quotes as `draw` has it."""

    def __init__(self, draw, dialect):
        self.draw = draw
        self.dialect = dialect
        self.newline = draw(st.sampled_from(["\n", "\r\n"]))
        self.unit = draw(st.sampled_from(["  ", "    ", "\t"]))
        self.colon = draw(st.sampled_from([": ", ":", " : "]))
        self.noted = draw(st.booleans())
        self.commas = dialect == "json" or draw(st.booleans())
        self.loose = dialect == "hjson" and draw(st.booleans())

    def chance(self):
        return self.draw(st.integers(0, 3)) == 0

    def comment(self, texts=("# no", " // , }", " /* { */", "/*\n*/")):
        return self.draw(st.sampled_from(texts)) if self.noted and self.chance() else ""

    def key(self, name):
        return (
            name if self.loose and name.isalnum() and self.chance() else json.dumps(name, ensure_ascii=False)
        )

    def text(self, value, indent=""):
        if not isinstance(value, (dict, list)) or not value:
            return json.dumps(value)
        flat = self.chance()
        below = indent + self.unit
        items = value.items() if isinstance(value, dict) else enumerate(value)
        rows = [
            (self.key(key) + self.colon if isinstance(value, dict) else "") + self.text(item, below)
            for key, item in items
        ]
        opening, closing = "{}" if isinstance(value, dict) else "[]"
        if flat:
            return opening + self.draw(st.sampled_from([", ", ",", " , "])).join(rows) + closing
        out = opening + self.comment()
        for number, row in enumerate(rows):
            own = self.comment(("# own", "// own\n", "/* own */"))
            out += self.newline + (below + own + self.newline if own else "") + below + row
            last = number == len(rows) - 1
            item = list(value.values())[number] if isinstance(value, dict) else value[number]
            if self.loose and item in BARE and self.chance():
                out = out[: -len(row)] + row.replace(json.dumps(item), item)
                continue
            if not last:
                out += "," if self.commas or not self.chance() else ""
            out += self.comment()
        return out + self.newline + indent + closing


def paths(value):
    return [path for path, _ in tree.leaves(value)] or ["a"]


def some_edit(draw, value):
    known = paths(value)
    known += [path.rpartition(".")[0] for path in known if "." in path]
    new = st.lists(st.sampled_from(KEYS), min_size=1, max_size=3).map(".".join)
    path = draw(st.sampled_from(known) | new)
    op = draw(st.sampled_from(["replace", "remove", "rename", "move", "add"]))
    if op == "rename":
        return Edit(op, path, draw(st.sampled_from(KEYS)))
    if op == "move":
        section = draw(st.sampled_from(known))
        return Edit(op, path, draw(new | new.map(lambda name: f"{section}.{name}")))
    if op == "add":
        return Edit(op, draw(new), draw(VALUES))
    return Edit(op, path, draw(VALUES) if op == "replace" else None)


def equal(one, other):
    if isinstance(one, dict):
        return (
            isinstance(other, dict)
            and one.keys() == other.keys()
            and all(equal(one[k], other[k]) for k in one)
        )
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(equal, one, other))
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def untouched(value, edit):
    """The keys of the root that an edit has nothing to do with."""
    names = {edit.path.split(".")[0]}
    if edit.op == "rename" and "." not in edit.path:
        names.add(edit.value)
    if edit.op == "move":
        names.add(edit.value.split(".")[0])
    return [key for key in value if key not in names]


def test_an_edit_reaches_into_a_list_in_the_text_and_in_the_value():
    edit = Edit("replace", "a.0.b", [])
    assert edits.apply({"a": [{"b": 1}, 2]}, (edit,)) == {"a": [{"b": []}, 2]}
    assert (
        edits.fixed(read('{"a": [{"b": 1}, 2]}', "x", "json"), [Fix((edit,))], "json").text
        == '{"a": [{"b": []}, 2]}'
    )
    for path in ("a.2", "a.00", "a.x", "a.1.b", "b.0"):
        assert edits.apply({"a": [1, 2]}, (Edit("replace", path, 5),)) == {"a": [1, 2]}


@hypothesis.settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), config=CONFIGS, dialect=st.sampled_from(["json", "hjson"]))
def test_random_edits(data, config, dialect):
    text = Layout(data.draw, dialect).text(config)
    document = read(text, "x", dialect)
    assert equal(document.value, config)
    edit = some_edit(data.draw, config)
    after = edits.fixed(document, [Fix((edit,))], dialect)
    if after.text != document.text:
        assert equal(after.value, edits.apply(config, (edit,)))
    for key in config:
        if key in untouched(config, edit):
            old, new = (found.entries[key].whole for found in (document, after))
            assert after.text[new.start : new.end] == text[old.start : old.end]


@hypothesis.settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), config=CONFIGS, dialect=st.sampled_from(["json", "hjson"]))
def test_what_can_be_done_is_done(data, config, dialect):
    """A single edit is left only if its path isn't there, or its target is, or is in the way."""
    text = Layout(data.draw, dialect).text(config)
    edit = some_edit(data.draw, config)
    result = edits.fixed(read(text, "x", dialect), [Fix((edit,))], dialect)
    there = tree.get(config, edit.path, tree.MISSING) is not tree.MISSING
    section = edit.path.rpartition(".")[0]
    target = {
        "add": edit.path,
        "move": edit.value,
        "rename": f"{section}.{edit.value}" if section else edit.value,
    }
    wanted = edits.apply(copy.deepcopy(config), (edit,))
    blocked = False
    if edit.op in target:
        way = target[edit.op].split(".")
        without = (
            config if edit.op == "add" else edits.apply(copy.deepcopy(config), (Edit("remove", edit.path),))
        )
        blocked = tree.get(config, target[edit.op], tree.MISSING) is not tree.MISSING or any(
            not isinstance(tree.get(without, ".".join(way[:depth]), {}), dict) for depth in range(1, len(way))
        )
    if (there or edit.op == "add") and not blocked and not equal(wanted, config):
        assert result.text != text, (text, edit)


@hypothesis.settings(max_examples=examples(300), deadline=None)
@given(
    text=st.text(alphabet=" \n\r\t{}[]:,\"'#/*a1-.eT\\", max_size=40),
    path=st.sampled_from(["a", "a.a", "1", "a.0"]),
)
def test_nothing_raises(text, path):
    for dialect in ("hjson", "json"):
        try:
            document = read(text, "x", dialect)
        except Exception:
            continue
        for edit in [
            ("remove", path),
            ("replace", path, 5),
            ("rename", path, "b"),
            ("add", "a.b", 1),
            ("move", path, "b.c"),
        ]:
            edits.fixed(document, [Fix((Edit(*edit),))], dialect)
        for drop in (False, True):
            plain = plain_json(document, drop_comments=drop)
            if plain is not None:
                assert not {issue.kind for issue in read(plain, "x", "json").issues} & REWRITABLE


def kept(document, edit):
    """How far the text has to stay from its beginning and from its end, for an edit in one place."""
    end = len(document.text)
    entry = document.entries.get(edit.path)
    if edit.op == "replace":
        return entry.value.start, end - entry.value.end
    if edit.op == "rename":
        return entry.key.start, end - entry.key.end
    section = edit.path.rpartition(".")[0]
    while edit.op == "add" and section not in document.entries:
        section = section.rpartition(".")[0]
    value = tree.get(document.value, section) if section else document.value
    home = document.entries[section].value
    places = [document.entries[f"{section}.{key}" if section else key].whole for key in value]
    before = [place.end for place in places if entry is None or place.end <= entry.whole.start]
    after = [place.start for place in places if entry and place.start >= entry.whole.end]
    return max([home.start + 1, *before]), end - min([home.end - 1, *after])


@hypothesis.settings(max_examples=examples(400), deadline=None)
@given(data=st.data(), config=CONFIGS, dialect=st.sampled_from(["json", "hjson"]))
def test_what_stands_before_and_after_stays(data, config, dialect):
    """And comments on lines of their own stay wherever they are."""
    document = read(Layout(data.draw, dialect).text(config), "x", dialect)
    edit = some_edit(data.draw, config)
    result = edits.fixed(document, [Fix((edit,))], dialect)
    if result.text == document.text or edit.op == "move":
        return
    head, tail = kept(document, edit)
    assert result.text[:head] == document.text[:head]
    assert result.text[len(result.text) - tail :] == document.text[len(document.text) - tail :]
    if edit.op == "remove":
        whole = document.entries[edit.path].whole
        around = document.text[: whole.start] + document.text[whole.end :]
        assert result.text.count("own") == around.count("own")
