"""Versions that don't go together: the tables that ship, and how versions and a job are judged by them."""

from __future__ import annotations

import pytest

from dsrun import versions
from dsrun.cluster import probe
from dsrun.config.rules import find_rules
from dsrun.errors import DsrunError
from dsrun.versions import ERROR, NOTE, WARNING, Circumstances, judge, meets, version

SHIPPED = versions.combinations()


def names(found, *, certain=None):
    return {match.combination.name for match in found if certain in (None, match.certain)}


def named(found, name):
    (match,) = [match for match in found if match.combination.name == name]
    return match


def test_what_ships_has_links_and_words():
    assert len(SHIPPED) >= 36
    rules = {rule.id for rule in find_rules()} | {""}
    for combination in SHIPPED.values():
        assert all(source.startswith("https://") for source in combination.sources), combination
        assert combination.when or not combination.conditions, combination
        assert combination.rule in rules


def test_the_probe_looks_for_every_package_that_is_judged():
    assert set(versions.PACKAGES) <= set(probe.PACKAGES)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.13.0+cpu", (2, 13, 0)),
        ("580.95.05", (580, 95, 5)),
        ("2.8.0rc1", (2, 8, 0)),
        ("", ()),
        ("x", ()),
        ("13", (13,)),
    ],
)
def test_versions(text, numbers):
    assert version(text) == numbers


@pytest.mark.parametrize(
    ("text", "wanted", "right"),
    [
        ("0.18.1", ">=0.17.6,<0.18.3", True),
        ("0.18.3", ">=0.17.6,<0.18.3", False),
        ("0.17.6", ">=0.17.6,<0.18.3", True),
        ("2.6.0+cu126", "==2.6.*", True),
        ("2.61", "==2.6.*", False),
        ("5.1", "==5.1.0", True),
        ("5.1.1", "==5.1.0", False),
        ("5.1.1", "!=5.1.0", True),
        ("0.14.4", "<0.14.4", False),
        ("0.14.4.1", "<=0.14.4", False),
        ("2.10", ">2.9", True),
        ("6.18.44-fc", "<5.5", False),
    ],
)
def test_specifiers(text, wanted, right):
    assert meets(text, wanted) is right


def test_conditions_decide_how_certain_it_is():
    old, name = {"deepspeed": "0.18.1"}, "zero2-small-gradients"
    match = named(judge(old, Circumstances(stage=2)), name)
    assert match.certain and match.severity == ERROR
    assert "0.18.1" in str(match) and "gradients" in str(match)
    assert name not in names(judge(old, Circumstances(stage=3)))
    unsure = named(judge(old), name)
    assert not unsure.certain and unsure.severity == WARNING


def test_a_list_of_conditions_is_any_of_them():
    old = {"deepspeed": "0.16.4", "transformers": "4.47.0"}
    like = {"loop": "hf", "accumulates": True}
    assert "no-sync" in names(judge(old, Circumstances(stage=3, **like)), certain=True)
    assert "no-sync" not in names(judge(old, Circumstances(stage=1, **like)))
    assert "no-sync" not in names(judge({**old, "transformers": "4.47.1"}, Circumstances(stage=3, **like)))


def test_every_package_has_to_be_there():
    assert "numpy-2" in names(judge({"deepspeed": "0.13.0", "numpy": "2.0.1"}))
    assert "numpy-2" not in names(judge({"deepspeed": "0.13.0"}))
    assert "numpy-2" not in names(judge({"deepspeed": "0.13.0", "numpy": "1.26.4"}))


def test_the_worst_comes_first():
    found = judge({"deepspeed": "0.13.0", "numpy": "2.1", "torch": "2.6.0"})
    assert found[0].severity == ERROR and found[0].certain
    places = [list(versions.SEVERITIES).index(match.severity) for match in found]
    assert places == sorted(places) and NOTE in versions.SEVERITIES


@pytest.mark.parametrize(
    ("name", "cured"),
    [
        ("zero2-small-gradients", True),
        ("transformers-510", True),
        ("timeout-10-minutes", False),
        ("writer-cannot-reload", False),
    ],
)
def test_what_only_began_with_a_release_is_not_cured_by_versions(name, cured):
    assert SHIPPED[name].cured_by_versions is cured


def test_what_is_installed(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    for folder, name in (
        (first, "deepspeed-0.18.1.dist-info"), (first, "flash_attn-2.8.0.post1.dist-info"), (first, "x-1.0.dist-info"),
        (second, "deepspeed-0.9.0.dist-info"), (second, "torch-2.6.0+cu126.dist-info"),
    ):  # fmt: skip
        (folder / name).mkdir(parents=True)
    found = versions.installed([str(first), str(second), str(tmp_path / "none")])
    assert found.pop("linux")
    assert found == {"deepspeed": "0.18.1", "flash-attn": "2.8.0.post1", "torch": "2.6.0+cu126"}


def test_versions_as_they_are_given():
    found = versions.given(["deepspeed==0.19.4, transformers==5.1", "Flash_Attn=2.8.0"], "--with")
    assert found == {"deepspeed": "0.19.4", "transformers": "5.1", "flash-attn": "2.8.0"}


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("deepspeed", "names no version"),
        ("deepspeed>=0.19", "names no version"),
        ("deepspede==0.19.4", "'deepspeed'"),
        ("requests==2", "Those that are judged"),
        ("torch==2.6,torch==2.7", "twice"),
    ],
)
def test_versions_that_say_nothing(text, word):
    with pytest.raises(DsrunError) as caught:
        versions.given([text], "--with")
    assert word in str(caught.value.problems[0])


TABLE = """
[labx]
deepspeed = "{spec}"
severity = "{severity}"
{more}
happens = "stops"
do = "Don't."
sources = ["https://labx.example/1"]
basis = "tried"
"""


@pytest.fixture
def lab(tmp_path, monkeypatch):
    """`lab(...)`: a lab's own table on $DSRUN_PATH."""

    def put(spec="<99", severity="error", more=""):
        folder = tmp_path / "presets" / "versions"
        folder.mkdir(parents=True)
        (folder / "labx.toml").write_text(TABLE.format(spec=spec, severity=severity, more=more))
        monkeypatch.setenv("DSRUN_PATH", str(tmp_path))

    return put


def test_a_labs_own(lab):
    lab(more="if = { stage = 1 }")
    assert "labx" in names(judge({"deepspeed": "0.19.8"}, Circumstances(stage=1)), certain=True)
    assert set(SHIPPED) < set(versions.combinations())


@pytest.mark.parametrize(
    ("wrong", "word"),
    [
        ({"spec": "abc"}, "pip"),
        ({"severity": "bad"}, "One of"),
        ({"more": "if = { stages = 1 }"}, "'stage'"),
        ({"more": 'tourch = "<2"'}, "'torch'"),
    ],
)
def test_a_wrong_table_is_reported_with_its_file(lab, wrong, word):
    lab(**wrong)
    with pytest.raises(DsrunError) as caught:
        versions.combinations()
    said = str(caught.value)
    assert "labx" in said and word in said and "presets/versions" in said
