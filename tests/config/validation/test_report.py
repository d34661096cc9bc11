"""What is written of findings, in each form."""

from __future__ import annotations

import json
import os
from urllib.parse import unquote

import pytest

from dsrun.config.rules import SEVERITIES, Setting, find_rules
from dsrun.config.validation import report
from dsrun.config.validation.validate import validate

TEXT = b"""{
  "zero_optimization": {"stge": 2, "overlap_comm": "true"},
  "fp16": {"enabled": true},
  "train_batch_size": [
    1
  ],
  "elasticity": {"enabled": "no"}
}
"""
BROKEN = b'{\n "a": \n'
NAMES = ["ds.json", "a b/实验#1?.json", "c:d%.json", "/tmp/ds.json", os.fsdecode(b"\xff.json"), "<stdin>"]


@pytest.fixture(params=NAMES)
def results(request):
    return [validate(data, request.param, Setting()) for data in (TEXT, BROKEN)]


def test_sarif(results):
    """The rules of SARIF 2.1.0 for what is used of it (sections 3.11 to 3.30 of the standard)."""
    log = json.loads(report.sarif(results))
    assert log["version"] == "2.1.0"
    assert log["$schema"].endswith("sarif-2.1.0.json")
    (run,) = log["runs"]
    assert set(run) == {"tool", "columnKind", "results"}
    assert run["columnKind"] in ("utf16CodeUnits", "unicodeCodePoints")
    driver = run["tool"]["driver"]
    assert driver["name"] == "dsrun"
    ids = [rule["id"] for rule in driver["rules"]]
    assert ids == [rule.id for rule in find_rules()]
    for rule in driver["rules"]:
        assert rule["defaultConfiguration"]["level"] in ("none", "note", "warning", "error")
        assert all(rule[key]["text"].strip() for key in ("shortDescription", "fullDescription", "help"))
    assert len(run["results"]) == sum(len(result.findings) for result in results) > 3
    for result in run["results"]:
        assert ids[result["ruleIndex"]] == result["ruleId"]
        assert result["level"] in ("none", "note", "warning", "error")
        assert result["message"]["text"]
        (location,) = result["locations"]
        uri = location["physicalLocation"]["artifactLocation"]["uri"]
        assert uri.isascii()
        assert not set(uri) & set(' #?<>"\\^`{|}')
        region = location["physicalLocation"]["region"]
        assert region["startLine"] >= 1
        assert region["startColumn"] >= 1
        assert region["endColumn"] > region["startColumn"]


def test_regions_end_on_their_line():
    for result in (validate(data, "ds.json", Setting()) for data in (TEXT, BROKEN)):
        lines = [*(TEXT if result.document else BROKEN).decode().split("\n"), ""]
        for row in json.loads(report.sarif([result]))["runs"][0]["results"]:
            region = row["locations"][0]["physicalLocation"]["region"]
            assert region["endColumn"] <= max(2, len(lines[region["startLine"] - 1]) + 1)


@pytest.mark.parametrize("name", NAMES)
def test_uri(name):
    log = json.loads(report.sarif([validate(BROKEN, name, Setting())]))
    uri = log["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"]
    assert unquote(uri, errors="surrogateescape").removeprefix("file://") == name
    assert uri.startswith("file:///") == name.startswith("/")


def test_json(results):
    rows = json.loads(report.as_json(results))["findings"]
    assert report.as_json(results).isascii()
    for row in rows:
        assert list(row) == [
            *("file", "line", "column", "path", "rule", "severity", "message", "suggestion", "effect", "fix")
        ]
        assert row["severity"] in SEVERITIES
        assert row["path"].startswith("$")
        assert (row["effect"] is None) == (row["severity"] != "error")
        assert row["fix"] in ("safe", "unsafe", None)


def test_in_the_order_of_the_file():
    rows = json.loads(report.as_json([validate(TEXT, "ds.json", Setting())]))["findings"]
    places = [(row["line"], row["column"]) for row in rows]
    assert places == sorted(places)


def test_github():
    result = validate(b'{"train_batch_size": 1, "100%\\n::error::x": 1}', "a,b:c.json", Setting())
    (line,) = report.github([result]).splitlines()
    assert line.startswith("::warning file=a%2Cb%3Ac.json,line=1,col=25,title=DS001::100%25\\n::error::x: ")
    assert "%0A" in line


def test_text_has_no_control_codes():
    result = validate(b'{"train_batch_size": 1, "\\u001b[2J\\u202e\\ud800": 1}', "a\x1b.json", Setting())
    text = report.text([result])
    assert text.startswith("a\\x1b.json:1:25  $.\\x1b[2J\\u202e\\ud800  DS")
    assert text.encode()


def test_text_has_an_end():
    result = validate(b'{"train_batch_size": 1, "' + b"x" * 100_000 + b'": 1}', "x.json", Setting())
    assert len(report.text([result])) < 10_000
    assert len(json.loads(report.as_json([result]))["findings"][0]["path"]) == 100_002


def test_summary():
    good = validate(b'{"train_batch_size": 1}', "good", Setting())
    bad, worse = (validate(BROKEN, name, Setting()) for name in ("bad", "worse"))
    assert report.summary([good]).endswith("in 1 file")
    assert report.summary([bad, good]) == "1 error in 2 files"
    assert report.summary([bad, worse]) == "2 errors in 2 files"
    assert report.summary([bad, bad]) == "2 errors in 1 file"  # a script with two configs
