from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from running import examples

from dsrun.cluster import hostlist
from dsrun.cluster.hostlist import expand
from dsrun.errors import DsrunError

GOOD = {
    "node[01-16]:8": [(f"node{number:02}", 8) for number in range(1, 17)],
    "gpu[1,3-5]:8,login1:2": [("gpu1", 8), ("gpu3", 8), ("gpu4", 8), ("gpu5", 8), ("login1", 2)],
    "b:1,a:2": [("b", 1), ("a", 2)],
    " a:1 , b:2 ": [("a", 1), ("b", 2)],
    "n[9-11]:2": [("n9", 2), ("n10", 2), ("n11", 2)],
    "n[09-11]:2": [("n09", 2), ("n10", 2), ("n11", 2)],
    "n[0-1]:2": [("n0", 2), ("n1", 2)],
    "n[001]:2": [("n001", 2)],
    "n[3,1]:2": [("n3", 2), ("n1", 2)],
    "r[1-2]n[01,03].lab:4": [("r1n01.lab", 4), ("r1n03.lab", 4), ("r2n01.lab", 4), ("r2n03.lab", 4)],
    "n[1][2]:1": [("n12", 1)],
    "10.0.0.[9-10]:8": [("10.0.0.9", 8), ("10.0.0.10", 8)],
    "fe80::1:8": [("fe80::1", 8)],
}


@pytest.mark.parametrize("text", GOOD)
def test_what_a_text_means(text):
    found = expand(text)
    assert [(entry.host, entry.slots) for entry in found] == GOOD[text]
    assert [entry.line for entry in found] == list(range(1, len(found) + 1))


def test_slots_are_not_guessed():
    with pytest.raises(DsrunError, match="'node1': no number of slots\n  Write node1:N"):
        expand("node1,node2:4")
    with pytest.raises(DsrunError, match="no number of slots"):
        expand("fe80:0:0:0:0:0:0:1")
    found = expand("node1,node2:4", default_slots=8)
    assert [(entry.host, entry.slots) for entry in found] == [("node1", 8), ("node2", 4)]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no host is named"),
        ("  ", "no host is named"),
        ("a:1,,b:1", "nothing between two commas"),
        ("a:1,", "at an end"),
        ("n[1-2:8", "a [ without ]"),
        ("n1]:8", "a ] without [ at character 3"),
        ("n[1[2]]:8", "a [ inside brackets at character 4"),
        ("n[]:8", "''"),
        ("n[a-c]:8", "'a-c'"),
        ("n[1-]:8", "'1-'"),
        ("n[-2]:8", "'-2'"),
        ("n[1-2-3]:8", "'1-2-3'"),
        ("n[٤]:8", ""),
        ("n[5-3]:8", "Write 3-5"),
        ("n[9-011]:8", "Write 009-011"),
        ("n[01-100]:8", "Write 001-100"),
        ("n[1-" + "9" * 5000 + "]:8", "more than 18 digits"),
        ("n[1-100001]:8", "100,001 hosts: more than 100,000"),
        ("n[1-100000][1-100000][1-100000]:8", "more than a million million hosts"),
        ("a:1,a:2", "a is named in 'a:1' too"),
        ("n[1-3]:8,n2:8", "n2 is named in 'n[1-3]:8' too"),
        ("n[1,1]:8", "n1 is named twice"),
        ("n[1-2][1,01]:8,n[1-2][1]:8", "named in"),
        ("a:0", "start nothing"),
        ("a:-1", "negative"),
        ("a:1001", "more than 1000"),
        ("a:x", "'x'"),
        ("a:", "''"),
        ("a:8:8", "has a port"),
        (":8", ""),
        ("u@n[1-2]:8", "names a user"),
        ("-o:8", "hyphen"),
        ("a b:8", "' '"),
        ("a\nb:8", ""),
        ("主[1-2]:8", "'主'"),
        ("300.0.0.[1-2]:8", ""),
    ],
)
def test_what_is_refused(text, said):
    with pytest.raises(DsrunError) as raised:
        expand(text)
    assert said in str(raised.value)


def test_all_problems_at_once():
    with pytest.raises(DsrunError) as raised:
        expand("a,n[3-1]:8,b:x,c:8")
    assert len(raised.value.problems) == 3
    with pytest.raises(DsrunError) as raised:
        expand("-a[1-99]:1,b:1,b:1")
    assert len(raised.value.problems) == 2


def test_as_many_as_are_allowed(monkeypatch):
    monkeypatch.setattr(hostlist, "MOST_HOSTS", 50)
    assert len(expand("n[1-50]:8")) == 50
    with pytest.raises(DsrunError, match="51 hosts"):
        expand("n[1-50]:8,m:8")


@given(st.text(st.sampled_from("an01239[]-,:. @=4"), max_size=24) | st.text(max_size=12))
@settings(max_examples=examples(800), deadline=None)
def test_any_text(text):
    try:
        found = expand(text)
    except DsrunError:
        return
    assert len({entry.host for entry in found}) == len(found) > 0
    # Written out one by one, they are the same.
    assert expand(",".join(f"{entry.host}:{entry.slots}" for entry in found)) == found
