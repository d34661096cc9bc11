from __future__ import annotations

import pytest
from running import each

from dsrun import versions
from dsrun.config.rules import find_rules
from dsrun.config.rules.chinese import explanations
from dsrun.config.schemas import schema


def test_the_list(dsrun):
    said = dsrun("explain")
    assert said.code == 0
    assert len(said.out.splitlines()) == len(find_rules())
    (rule,) = [rule for rule in find_rules() if rule.id == "DS203"]
    assert f"DS203  warning  {rule.about}\n" in said.out


def test_every_rule(dsrun):
    def check(rule):
        said = dsrun("explain", rule.id.lower())
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"{rule.id} ({rule.severity}): {rule.about}\n")
        assert said.out.count("\nWrong:  ") == len(rule.bad)
        assert said.out.count("\nRight:  ") == len(rule.good)
        assert said.out.count("\n  $") >= len(rule.bad), "each wrong example is shown with what is said of it"
        assert f"--ignore {rule.id}" in said.out

    each(find_rules(), check, lambda rule: rule.id)


def test_in_chinese_where_the_language_is(dsrun, monkeypatch):
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    said = dsrun("explain", "DS221")
    one = explanations()["DS221"]
    assert (
        said.out.startswith(f"DS221 (error): {one.title}\n")
        and one.means in said.out
        and one.next in said.out
    )
    assert "Wrong:" in said.out
    monkeypatch.setenv("LC_ALL", "C")
    assert one.title not in dsrun("explain", "DS221").out


def test_every_key(dsrun):
    def check(path):
        said = dsrun("explain", path)
        assert (said.code, said.err) == (0, "")
        assert said.out.startswith(f"{path}: ")

    each(schema.load().paths, check)


def test_every_combination_of_versions(dsrun):
    def check(combination):
        said = dsrun("explain", combination.name)
        assert (said.code, said.err) == (0, "")
        assert combination.do in said.out and combination.sources[0] in said.out

    each(versions.combinations().values(), check, lambda combination: combination.name)


def test_the_list_of_versions(dsrun):
    said = dsrun("explain", "versions")
    assert said.code == 0 and len(said.out.splitlines()) == len(versions.combinations())


def test_versions_and_a_signature_of_one_name_are_both_shown(dsrun):
    said = dsrun("explain", "no-sync").out
    assert "transformers <4.47.1" in said and "In a log:" in said


def test_a_key(dsrun):
    said = dsrun("explain", "$.zero_optimization.overlap_comm")
    assert said.out.startswith("zero_optimization.overlap_comm: true or false")
    assert "null" in said.out


@pytest.mark.parametrize(
    ("what", "word"),
    [
        ("DS999", "DS999"),
        ("overlap_comm", "zero_optimization.overlap_comm"),
        ("zero_optimization.stge", "zero_optimization.stage?"),
        ("", "neither"),
        ("foo", "dsrun explain signatures"),
        ("x" * 10_000, "xxx"),
        ("a.b.\n.\ud800", "a.b."),
    ],
)
def test_what_is_not_there(dsrun, what, word):
    said = dsrun("explain", what)
    assert (said.code, said.out) == (1, "")
    assert word in said.err


def test_wrong_usage(dsrun):
    assert dsrun("explain", "DS203", "DS204").code == 2


def test_nothing_heavy_is_imported(imported):
    found = imported("explain", "DS203")
    assert not found & {"torch", "deepspeed", "transformers", "yaml", "jinja2", "rich"}


def test_names_of_libraries(dsrun):
    said = dsrun("explain", "peft.prepare_model_for_int8_training")
    assert (said.code, said.err) == (0, "")
    assert said.out.startswith(
        "peft.prepare_model_for_int8_training: function, in peft\n\nReleases:    0.2.0 to 0.9.0\n"
    )
    assert "\nGone since:  0.10.0\n" in said.out
    assert "\nInstead:     prepare_model_for_kbit_training (its deprecation says so)\n" in said.out
    assert "\nImported by: trl " in said.out
    said = dsrun("explain", "peft.LoraConfig", "--parameter", "use_dora")
    assert said.out.startswith("peft.LoraConfig(use_dora=): parameter of peft.LoraConfig, in peft\n")
    assert "\nReleases:    0.9.0 and newer\n" in said.out
    said = dsrun("explain", "peft.LoraConfigs")
    assert "no release of peft that was read has it" in said.out
    assert "Did you mean LoraConfig" in said.out


def test_a_parameter_of_nothing(dsrun):
    said = dsrun("explain", "numpy.array", "--parameter", "dtype")
    assert said.code == 1
    assert "there are no data of numpy.array" in said.err
