from __future__ import annotations

import json

import pytest

from dsrun.cluster.hostfile import parse


@pytest.fixture
def write(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda text, name="hostfile": (tmp_path / name).write_text(text, encoding="utf-8")


def test_nothing_to_say(dsrun, write):
    write("a slots=4\nb slots=4\n")
    said = dsrun("hosts", "check", "hostfile")
    assert (said.code, said.out, said.err) == (0, "", "dsrun: nothing to say; 2 hosts with 8 slots\n")


def test_errors_as_text(dsrun, write):
    write("a slots=4x\nb slots=4\nip1 slots=4\nb slots=4\n", "a lab's 主机")
    said = dsrun("hosts", "check", "a lab's 主机")
    assert said.code == 1
    blocks = [block.split("\n") for block in said.out.strip().split("\n\n")]
    assert [block[0].partition(": ")[0] for block in blocks] == [
        "a lab's 主机:1  H005  error",
        "a lab's 主机:3  H101  warning",
        "a lab's 主机:4  H009  error",
    ]
    assert blocks[0][1] == "    Write a slots=4"
    assert all(len(block) == 2 and block[1].startswith("    ") for block in blocks)
    assert said.err == "dsrun: 2 errors and 1 warning; accepted: 2 hosts with 8 slots\n"


def test_warnings_and_notes_are_no_failure(dsrun, write):
    write("node_ip slots=1\n")
    said = dsrun("hosts", "check", "hostfile")
    assert said.code == 0
    assert said.err == "dsrun: 1 warning and 1 note; 1 host with 1 slot\n"


def test_json(dsrun, write):
    write("a slots=4\n主 slots=4\n")
    said = dsrun("hosts", "check", "hostfile", "--json")
    assert (said.code, said.err) == (1, "")
    result = json.loads(said.out)
    assert list(result) == ["version", "hosts", "findings"]
    assert result["hosts"] == [{"host": "a", "slots": 4}]
    (finding,) = result["findings"]
    assert list(finding) == ["line", "rule", "severity", "message", "hint"]
    assert (finding["line"], finding["rule"], finding["severity"]) == (2, "H012", "error")
    write("a slots=4\nb slots=4\n")
    said = dsrun("hosts", "check", "hostfile", "--json")
    assert (said.code, json.loads(said.out)["findings"]) == (0, [])


def test_no_file(dsrun, write, tmp_path):
    for name in ("absent", "."):
        said = dsrun("hosts", "check", name)
        assert (said.code, said.out) == (1, "")
        assert f"dsrun: {name}: can't be read" in said.err
        assert "this machine alone" in said.err


def test_control_codes_do_not_reach_the_terminal(dsrun, write):
    write("a\x1b[2J slots=4\n\x07\nb slots=\x1b]0;x\x07\n")
    said = dsrun("hosts", "check", "hostfile")
    assert said.code == 1
    assert said.out.replace("\n", "").isprintable()


def test_expand(dsrun):
    said = dsrun("hosts", "expand", "node[01-02]:8,login1:2")
    assert (said.code, said.out, said.err) == (
        0,
        "node01 slots=8\nnode02 slots=8\nlogin1 slots=2\n",
        "",
    )
    assert dsrun("hosts", "expand", "n[1-2]", "--slots", 4).out == "n1 slots=4\nn2 slots=4\n"


def test_expand_into_a_file(dsrun, write, tmp_path):
    said = dsrun("hosts", "expand", "node[01-16]:8", "-o", "hf")
    assert (said.code, said.out, said.err) == (0, "", "wrote hf\n")
    assert len(parse((tmp_path / "hf").read_text()).entries) == 16
    assert dsrun("hosts", "check", "hf").code == 0
    said = dsrun("hosts", "expand", "n:1", "-o", "hf")
    assert (said.code, len((tmp_path / "hf").read_text().splitlines())) == (1, 16)
    assert dsrun("hosts", "expand", "n:1", "-o", "hf", "--force").code == 0
    assert (tmp_path / "hf").read_text() == "n slots=1\n"


def test_expand_refuses(dsrun):
    said = dsrun("hosts", "expand", "n1,n[3-2]:8")
    assert (said.code, said.out) == (1, "")
    assert "no number of slots" in said.err
    assert "runs backwards" in said.err


def test_usage(dsrun, write):
    assert dsrun("hosts", "check").code == 2
    assert dsrun("hosts", "expand").code == 2
    assert dsrun("hosts", "expand", "n", "--slots", "0").code == 2
    assert dsrun("hosts", "nothing").code == 2
    assert dsrun("hosts", "--help").code == 0


def test_imports_little(imported):
    assert not imported("hosts", "expand", "n:1") & {"torch", "deepspeed", "jinja2", "rich", "psutil", "yaml"}
