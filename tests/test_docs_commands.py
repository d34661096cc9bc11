"""The commands that pages show: each is one that dsrun has, and those that take nothing else are run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
from running import each

from dsrun.cli import cli

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted(
    path
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"))
    if not path.name.endswith(".zh.md")  # these have the same blocks: tests/test_docs.py
)
SPAN = re.compile(r"`dsrun ([a-z][^`\n]*)`")
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS = {"|", ";", "&&", "||", "<", ">", ">>", "2>", "&"}
NESTED = {"submit"}
"""Commands that take another one, behind `--`."""
RUN = {"completion", "explain", "models", "plan", "preset", "schema"}
"""Commands that need no machine; run where everything that they name is there."""
NEEDS = re.compile(
    r"FOLDER|NAME|runs/|\.toml$|\.jsonl$|\.json$|\.yaml$|^/|^Qwen/|--install|--copy|calibrate|--measure|our-|mine|zero2-small"
)


def commands(path: Path) -> Iterator[list[str]]:
    """The words of each dsrun command in a page's blocks, without what the shell takes of them."""
    for block in BLOCK.findall(path.read_text(encoding="utf-8")):
        text = re.sub(r"<<'END'\n.*?\nEND\n", "\n", block.replace("\\\n", " "), flags=re.DOTALL)
        for line in text.splitlines():
            yield from split(words_of(line))


def words_of(line: str) -> list[str]:
    """A line as the shell divides it; a variable, or N, is taken for a number."""
    lexer = shlex.shlex(re.sub(r"(^|\s)#.*|\$\(.*?\)", "", line), posix=True, punctuation_chars="|;<>&")
    lexer.whitespace_split, lexer.commenters = True, ""
    return ["8" if word == "N" or word.startswith("$") else word for word in lexer]


def split(words: list[str]) -> Iterator[list[str]]:
    """The dsrun commands in a line."""
    found: list[str] | None = None
    for word in [*words, ";"]:
        if word in ENDS:
            if found:
                yield found
            found = None
        elif found is not None:
            found.append(word)
        elif word == "dsrun" or word.endswith("/dsrun"):
            found = []


def named(path: Path) -> Iterator[list[str]]:
    """Commands in a line of text, whose words may be left out."""
    text = re.sub(r"^```.*?^```", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for span in SPAN.findall(text):
        if not re.search(r"\.\.\.|\[|\||--help|\(", span):
            yield words_of(span.partition(";")[0])


ALL = [(path, words) for path in PAGES for words in commands(path)]


def parse(words: list[str]) -> None:
    """Raises click.UsageError where dsrun would not take the words."""
    context = click.Context(cli, info_name="dsrun")
    command: click.Command = cli
    rest = list(words)
    while isinstance(command, click.Group):
        if rest[0].startswith("-"):
            command.make_context("dsrun", rest, resilient_parsing=True)
            return
        name = rest.pop(0)
        found = command.get_command(context, name)
        assert found is not None, f"no such command: {name}"
        command = found
    with command.make_context(words[0], list(rest), parent=context) as made:
        inner = made.params.get("words") if words[0] in NESTED else None
    if inner:
        parse(list(inner))


def test_there_are_commands():
    assert len(ALL) > 130


def test_every_command_is_one_that_dsrun_has():
    each(
        ALL,
        lambda case: parse(case[1]),
        lambda case: f"{case[0].relative_to(ROOT)}: dsrun {shlex.join(case[1])}",
    )


def test_so_are_those_in_the_text():
    found = [(path, words) for path in PAGES for words in named(path)]
    assert len(found) > 200

    def check(case):
        try:
            parse(case[1])
        except (click.MissingParameter, click.BadOptionUsage):
            pass  # `dsrun show` is about the command, `dsrun launch --python` about the option
        except (click.BadParameter, click.UsageError) as error:
            if "NAME" not in " ".join(case[1]) and "Missing" not in error.message:
                raise

    each(found, check, lambda case: f"{case[0].relative_to(ROOT)}: dsrun {shlex.join(case[1])}")


def test_those_that_need_no_machine_run(dsrun, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    runnable = [case for case in ALL if case[1][0] in RUN and not any(map(NEEDS.search, case[1]))]
    assert len(runnable) >= 10

    def check(case):
        said = dsrun(*case[1])
        nothing_fits = case[1][0] == "plan" and "Nothing fits" in said.out
        assert said.code == 0 or nothing_fits, said.err
        assert said.out or any(tmp_path.iterdir())

    each(runnable, check, lambda case: f"{case[0].relative_to(ROOT)}: dsrun {shlex.join(case[1])}")


def test_the_commands_in_the_readmes_table_run(dsrun, tmp_path, monkeypatch):
    """Each runs where its files are; other tests run those that take a real model or a GPU, with small ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    Path("ds_config.json").write_text('{"train_batch_size": 4, "gradient_cliping": 1.0}')
    Path("ds.json").write_text('{"train_batch_size": 4}')
    Path("train.py").write_text(
        "import deepspeed\nimport argparse\ndeepspeed.add_config_arguments(argparse.ArgumentParser())\n"
    )
    Path("slurm-77.out").write_text("slurmstepd: error: Detected 1 oom_kill event in StepId=77.0.\n")
    shown = {words[0]: words[1:] for words in named(ROOT / "README.md") if len(words) > 1}
    said = {
        "preset": ('"zero_optimization"', 0),
        "validate": ("gradient_clipping", 1),
        "plan": ("fits", 0),
        "launch": ("train.py", 0),
        "diagnose": ("oom", 0),
    }
    assert shown.keys() == {*said, "finetune"}
    for name, (text, code) in said.items():
        more = ("--dry-run",) if name == "launch" else ()
        answer = dsrun(name, *more, *shown[name])
        assert answer.code == code, answer.err
        assert text in answer.out
