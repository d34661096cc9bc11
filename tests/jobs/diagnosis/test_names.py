"""Names and numbers of the line that shows a cause, and what the program itself says, are in the answer."""

from __future__ import annotations

import re

import pytest
from running import each

from dsrun.jobs.diagnosis import names, own_words
from dsrun.jobs.diagnosis.diagnosis import in_words
from dsrun.jobs.diagnosis.log_files import LogSource
from dsrun.jobs.diagnosis.names import Name
from dsrun.jobs.diagnosis.reading.log_lines import peeled
from dsrun.jobs.diagnosis.signatures import HARMLESS, SignatureIndex, find_signatures
from dsrun.jobs.diagnosis.verdict import judge

ALL = find_signatures()
INDEX = SignatureIndex(ALL)
QUOTED = re.compile(r"(?<!\w)(['\"`])([\w./:@-]{2,60})\1(?!\w)")
"""A quoted name, found in another way than names.py does."""
TYPES = {"int", "str", "float", "dict", "list", "tuple", "bool", "None", "type"}


def lines_of(text):
    return [peeled(0, number, line) for number, line in enumerate(text.split("\n"), 1)]


def answer(text, environ=()):
    return in_words(judge(lines_of(text), INDEX), [LogSource("train.log", None)], dict(environ))


def test_the_answer_has_each_name_that_the_deciding_line_quotes():
    def check(case):
        _, example = case
        found = answer(example)
        if found.line is None:
            return
        told = " ".join([found.summary, found.next_step, *(name["value"] for name in found.names)])
        quoted = {hit[2] for hit in QUOTED.finditer(found.line)} - TYPES
        missing = [name for name in quoted if name not in told]
        assert not missing, (missing, found.summary)

    cases = [(one.id, text) for one in ALL.values() if one.kind != HARMLESS for text in one.examples]
    each(cases, check, lambda case: case[0])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "KeyError: \"Column actions not in the dataset. Current columns: ['action', 'state']\"",
            [Name("list", "['action', 'state']")],
        ),
        ("got an unexpected keyword argument 'beta'", [Name("argument", "beta")]),
        ("failed to connect to node-1:29500 (errno 110)", [Name("address", "node-1:29500"), Name("errno", "110")]),
        ("port 22: no route to 10.0.0.7", [Name("port", "22"), Name("address", "10.0.0.7")]),
        ("size mismatch for a.b: torch.Size([32000, 64])", [Name("shape", "torch.Size([32000, 64])")]),
        ("needs foo>=2.4.1, found foo 2.1.0", [Name("release", "foo>=2.4.1"), Name("version", "2.1.0")]),
        ("supports sm_80 sm_90", [Name("architecture", "sm_80"), Name("architecture", "sm_90")]),
        ("set NCCL_P2P_DISABLE or pass --no-p2p", [Name("name", "NCCL_P2P_DISABLE"), Name("name", "--no-p2p")]),
        ("no such folder: /data/glm/own", [Name("path", "/data/glm/own")]),
        ("Tried to allocate 2.50 GiB", [Name("size", "2.50 GiB")]),
    ],
)  # fmt: skip
def test_readers_by_the_word_before_or_the_form(line, expected):
    found = names.names_in(line)
    assert [name for name in expected if name in found] == expected, found


def test_places_in_source_code_and_addresses_in_memory_are_no_names():
    assert names.names_in("[ProcessGroupNCCL.cpp:1785] at 0x7f70d245340f (pid: 1754335)") == []


def test_no_secret_is_a_name():
    found = names.names_in("token 'hf_abcdefghijklmnopqrstuvwxyzABCDEF' is refused")
    assert not any("abcdefghij" in name.value for name in found)


def test_near_names_are_offered():
    text = (
        "KeyError: \"Column inputs not in the dataset. Current columns in the dataset: ['input', 'label']\""
    )
    assert names.near(text) == ("inputs", ["input"])
    assert "Is input meant, where inputs is asked for?" in answer(text).summary
    assert "inputs 相近的有：input" in answer(text, {"LANG": "zh_CN.UTF-8"}.items()).summary
    assert names.near("Column total not in the dataset. Current columns: ['input', 'label']")[1] == []


@pytest.mark.parametrize(
    ("text", "quote"),
    [
        (
            "MyError: broken beyond words\nPossible Cause: the card is lost",
            "Possible Cause: the card is lost",
        ),
        ("MyError: broken beyond words\nSolution: restart the agent", "Solution: restart the agent"),
        ("RuntimeError: odd. Please raise frob_size above 4.", "Please raise frob_size above 4."),
        ("RuntimeError: odd value\nHint: look at frob_size", "Hint: look at frob_size"),
        ("RuntimeError: 数值异常\n解决方法：重启服务", "解决方法: 重启服务"),
    ],
)
def test_what_the_program_says_itself_is_quoted(text, quote):
    found = answer(text)
    assert found.quotes == (quote,)
    assert quote in found.next_step or found.cause is not None


def test_source_code_near_by_is_no_advice():
    lines = lines_of(
        "RuntimeError: odd\n    solution = solve(x)\n    # hint: none\n    raise ValueError('Please do')"
    )
    assert own_words.quotes(lines[0], "RuntimeError: odd", lines) == ()


@pytest.mark.parametrize(
    "line", ["[ERROR] frob of 3 went wrong", "frob: Error: not quite", "worker exited with code 7"]
)
def test_a_line_of_a_failure_is_shown_where_no_cause_is_known(line):
    found = answer(f"starting\n{line}\nbye")
    assert found.cause is None
    assert line in found.lines[0]
    assert "No failure was found" not in found.summary
    assert "No failure was found" in answer("starting\nworker exited with code 0\nbye").summary
