"""The search between versions that are right and wrong: packages, releases, and what can't be told."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import tomllib

from dsrun import versions
from dsrun.bisect import environments
from dsrun.bisect.environments import Beside, Environment, Fresh
from dsrun.bisect.probes import CommandProbe, ProbeOutcome, ValidateProbe
from dsrun.bisect.releases import releases_of
from dsrun.bisect.report import entry, specifier
from dsrun.bisect.search import RIGHT, UNTOLD, WRONG, Bisection
from dsrun.config.schemas import schema
from dsrun.errors import DsrunError

RELEASES = {
    "a": [f"1.{number}" for number in range(20)],
    "b": [f"2.{number}" for number in range(9)],
    "c": ["3.0", "3.1"],
}
GOOD = {"a": "1.2", "b": "2.1", "c": "3.0"}
BAD = {"a": "1.18", "b": "2.7", "c": "3.1"}


def minor(version):
    return int(version.split(".")[1])


def searched(wrong, good=GOOD, bad=BAD):
    asked = []

    def ask(versions):
        asked.append(dict(versions))
        return wrong(versions)

    return Bisection(good, bad, RELEASES.__getitem__, ask).answer(), asked


@pytest.mark.parametrize("first", range(3, 19))
def test_one_package_and_its_release(first):
    answer, asked = searched(lambda versions: WRONG if minor(versions["a"]) >= first else RIGHT)
    (culprit,) = answer.culprits
    assert (culprit.package, culprit.last_right, culprit.first_wrong) == ("a", f"1.{first - 1}", f"1.{first}")
    assert answer.others == {"b": "2.1", "c": "3.0"}
    assert len(asked) == answer.tried <= 9


def test_it_takes_two_packages_together():
    answer, _ = searched(
        lambda versions: WRONG if minor(versions["a"]) >= 7 and minor(versions["b"]) >= 4 else RIGHT
    )
    assert [(each.package, each.last_right, each.first_wrong) for each in answer.culprits] == [
        ("a", "1.6", "1.7"),
        ("b", "2.3", "2.4"),
    ]
    assert answer.others == {"c": "3.0"}


def test_the_wrong_one_may_be_older():
    answer, _ = searched(
        lambda versions: WRONG if minor(versions["a"]) <= 5 else RIGHT, {"a": "1.18"}, {"a": "1.2"}
    )
    (culprit,) = answer.culprits
    assert (culprit.last_right, culprit.first_wrong) == ("1.6", "1.5")
    assert specifier(culprit, {"a": "1.18"}, {"a": "1.2"}) == ">=1.2,<=1.5"


def test_releases_that_cannot_be_told_are_passed_over():
    def outcome(versions):
        number = minor(versions["a"])
        return UNTOLD if 8 <= number <= 11 else WRONG if number >= 10 else RIGHT

    answer, _ = searched(outcome)
    (culprit,) = answer.culprits
    assert (culprit.last_right, culprit.first_wrong) == ("1.7", "1.12")
    assert culprit.untold == ("1.8", "1.9", "1.10", "1.11")


@pytest.mark.parametrize("outcome", [RIGHT, WRONG, UNTOLD])
def test_versions_that_are_not_what_they_are_said_to_be(outcome):
    with pytest.raises(DsrunError, match="should be"):
        searched(lambda _: outcome)


def test_packages_without_releases_between():
    answer, _ = searched(lambda versions: WRONG if versions["c"] == "3.1" else RIGHT)
    assert [(each.package, each.first_wrong) for each in answer.culprits] == [("c", "3.1")]


# Probes


def here(**variables):
    return Environment(sys.executable, {**variables})


@pytest.mark.parametrize(
    ("code", "says", "outcome", "said"),
    [
        ("pass", "", RIGHT, ""),
        ("raise ValueError('no such thing')", "", WRONG, "ValueError: no such thing"),
        ("raise ValueError('no such thing')", "no such", WRONG, "ValueError: no such thing"),
        ("raise ValueError('no such thing')", "another", UNTOLD, "ValueError: no such thing"),
        ("raise SystemExit(125)", "", UNTOLD, ""),
        ("import time; time.sleep(60)", "", WRONG, "not done within 1 s"),
    ],
)
def test_a_command(tmp_path, code, says, outcome, said):
    seconds = 1 if "sleep" in code else 60
    found = CommandProbe(("python", "-c", code), tmp_path, seconds, says).outcome(here(), {"a": "1.2"})
    assert (found.outcome, found.said) == (outcome, said)
    assert (tmp_path / "a-1.2.log").is_file()


def test_a_program_that_is_not_there(tmp_path):
    found = CommandProbe((str(tmp_path / "nothing"),), tmp_path).outcome(here(), {"a": "1"})
    assert found.outcome == UNTOLD


def test_a_config(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 8, "nebula": {"enabled": false}}', encoding="utf-8")
    probe = ValidateProbe(str(file), tmp_path)
    environment = Environment(sys.executable, dict(os.environ))
    assert probe.outcome(environment, {"deepspeed": "0.19.6"}).outcome == RIGHT
    found = probe.outcome(environment, {"deepspeed": "0.19.7"})
    assert found.outcome == WRONG
    assert found.said.startswith("DS004  error: was removed")


# Environments


@pytest.fixture
def installs(monkeypatch):
    """The commands that would have installed; those that name a version "9" fail."""
    commands = []

    def run(command):
        commands.append(command)
        if command[-1].endswith("==9"):
            raise DsrunError("can't be installed", where=command[-1])
        if "--target" in command:
            Path(command[command.index("--target") + 1]).mkdir(parents=True)
        elif "venv" in command:
            Path(command[-1]).mkdir(parents=True)

    monkeypatch.setattr(environments, "run", run)
    return commands


def test_versions_beside_the_installed_ones_are_kept(tmp_path, installs):
    made = Beside(tmp_path).made({"a": "1", "b": "2"})
    paths = made.variables["PYTHONPATH"].split(":")
    assert paths[:2] == [str(tmp_path / "a-1"), str(tmp_path / "b-2")]
    Beside(tmp_path).made({"a": "1", "b": "3"})
    assert [command[-1] for command in installs] == ["a==1", "b==2", "b==3"]
    assert all("--no-deps" in command for command in installs)


def test_an_installation_that_was_broken_off_is_made_again(tmp_path, installs):
    (tmp_path / "a-1").mkdir()
    Beside(tmp_path).made({"a": "1"})
    assert len(installs) == 1


def test_a_fresh_environment_has_what_the_versions_require(tmp_path, installs):
    made = Fresh(tmp_path, ("pytest",)).made({"a": "1"})
    assert installs[-1][-2:] == ["a==1", "pytest"]
    assert made.python.startswith(str(tmp_path))
    assert "PYTHONPATH" not in made.variables


def test_releases_of_a_package_with_data():
    known = releases_of("deepspeed")
    assert known.index("0.19.7") == known.index("0.19.6") + 1


# The command


def test_the_command(dsrun, tmp_path, monkeypatch):
    from dsrun.cli import bisect as command

    def asked(_probe, _makes, found):
        wrong = schema.numbers(found["deepspeed"]) >= (0, 19, 6)
        return ProbeOutcome(WRONG, "ValueError: no") if wrong else ProbeOutcome(RIGHT)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "_asked", asked)
    pins = ("--good", "deepspeed==0.18.9,torch==2.9", "--bad", "deepspeed==0.19.8,torch==2.9")
    said = dsrun("bisect", *pins, "--validate", "ds.json", "--json")
    found = json.loads(said.out)
    assert said.code == 0
    assert [(each["last_right"], each["first_wrong"]) for each in found["culprits"]] == [("0.19.5", "0.19.6")]
    assert found["others"] == {"torch": "2.9"}
    assert found["says"] == "ValueError: no"
    text = dsrun("bisect", *pins, "--", "python", "train.py").out
    assert text.startswith("deepspeed 0.19.6 is wrong, 0.19.5 is right\nBeside torch 2.9.")
    assert 'deepspeed = ">=0.19.6,<=0.19.8"' in text


@pytest.mark.parametrize(
    ("words", "fault"),
    [
        (("--good", "a==1", "--bad", "b==1", "--steps"), "only one of --good and --bad names a, b"),
        (("--good", "a", "--bad", "a==1", "--steps"), "'a' names no version"),
        (("--good", "a==1", "--bad", "a==2"), "Name one probe"),
        (("--good", "a==1", "--bad", "a==2", "--steps", "--", "true"), "Name one probe"),
    ],
)
def test_lines_that_are_refused(dsrun, tmp_path, monkeypatch, words, fault):
    monkeypatch.chdir(tmp_path)
    said = dsrun("bisect", *words)
    assert said.code in (1, 2)
    assert fault in said.err


def test_the_entry_is_one_that_the_table_takes():
    text = entry(
        Bisection(
            {"deepspeed": "0.18.9"},
            {"deepspeed": "0.19.8"},
            releases_of,
            lambda found: WRONG if found["deepspeed"] > "0.19.2" else RIGHT,
        ).answer(),
        {"deepspeed": "0.18.9"},
        {"deepspeed": "0.19.8"},
        'it says "no"',
        "python x.py",
    )
    (table,) = tomllib.loads(text).values()
    assert list(versions._wrong(table)) == []
    assert table["deepspeed"] == ">=0.19.3,<=0.19.8"
