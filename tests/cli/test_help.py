"""`dsrun --help`: every command in its group, without importing any of them."""

from __future__ import annotations

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner
from needed import since

from dsrun.cli import GROUPS, cli, module_of

LISTED = """
import sys
from dsrun.cli import cli, module_of
cli.main(["--help"], standalone_mode=False)
print(*sys.modules, file=sys.stderr)
"""
FREE = {"dsrun.cli", "dsrun.errors"}


def test_no_module_of_dsrun_is_imported_for_the_list():
    found = subprocess.run([sys.executable, "-c", LISTED], capture_output=True, text=True, check=True)
    assert {name for name in found.stderr.split() if name.startswith("dsrun.")} == FREE
    assert "fine-tune a model" in found.stdout


def test_every_command_stands_in_a_group():
    context = click.Context(cli)
    formatter = click.HelpFormatter(width=200)
    cli.format_commands(context, formatter)
    lines = formatter.getvalue().splitlines()
    assert [line for line in lines if line and line[0] != " "] == [
        f"{group.capitalize()}:" for group in GROUPS
    ]
    shown = [line.split()[0] for line in lines if line.startswith("  ")]
    assert sorted(shown) == cli.list_commands(context)
    assert len(shown) > 15


@pytest.mark.parametrize("name", cli.list_commands(click.Context(cli)))
def test_a_module_is_named_as_its_command(name):
    assert cli.get_command(click.Context(cli), name)
    assert sys.modules[f"dsrun.cli.{module_of(name)}"].__doc__.startswith(f"`dsrun {name}` (")


@pytest.mark.parametrize("name", ["", *cli.list_commands(click.Context(cli))])
def test_help_fits_80_columns(name):
    """Lines fit, except a command that is to be copied, which stays on its line."""
    text = (
        CliRunner()
        .invoke(cli, [name, "--help"] if name else ["--help"], terminal_width=80, prog_name="dsrun")
        .output
    )
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert [line for line in wide if not line.startswith("  dsrun ") or "   " in line.strip()] == []


@pytest.mark.parametrize(
    ("words", "usage"), [(["logs", "--rank"], "dsrun logs"), (["hosts", "check", "--nodes"], "")]
)
def test_an_option_without_its_argument_has_a_usage_line(dsrun, words, usage):
    said = dsrun(*words)
    assert said.code == 2
    assert f"Usage: {usage}" in said.err


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (["finetune", "chatglm2-tiny", "--dry-run", "--sp", "9" * 20], 2, "--sp"),
        (
            ["finetune", "llama-tiny", "--dry-run", "--method", "lora", "--adapter", "a" * 300],
            1,
            "no such folder or file",
        ),
    ],
)
def test_what_is_far_too_large_or_long_is_no_bug(dsrun, words, code, told):
    said = dsrun(*words)
    assert said.code == code
    assert told in said.err and "internal error" not in said.err


def test_an_unknown_command_is_wrong_usage(dsrun):
    assert dsrun("fintune").code == 2


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["finetun", "chatglm2-tiny"], "finetune"), (["valdate"], "validate"), (["finetune", "--gpu", "2"], "--gpus"),
        pytest.param(["hosts", "chek"], "check", marks=since(click="8.5")),
    ],
)  # fmt: skip
def test_a_near_miss_is_answered_with_the_right_name(dsrun, words, near):
    said = dsrun(*words)
    assert said.code == 2
    assert near in said.err.partition("Error: ")[2]


def test_what_is_near_nothing(dsrun):
    assert "Did you mean" not in dsrun("xyzzy").err
