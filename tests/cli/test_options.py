"""Click's options, as they are made from the table: the short help, the whole, and what is refused."""

from __future__ import annotations

import re

import click
import pytest
from click.testing import CliRunner

from dsrun.cli import finetune, resume
from dsrun.cli.parsing.options import SHORT_FROM, TableCommand, given, options_of
from dsrun.options.commands import FinetuneOptions, LaunchOptions, PlanOptions
from dsrun.options.declare import entries
from dsrun.options.layers import Source, problems_of
from dsrun.trainers import other_names
from dsrun.trainers.other_names import OTHER_NAMES

SCREEN = 69
"""Lines that finetune's short help may have."""
FLAG = re.compile(r"^  (?:-\w, )?(--[\w-]+)", re.MULTILINE)
TABLE = entries(FinetuneOptions)


@pytest.fixture
def show():
    """`show(command, *args)`: what a command prints in a terminal of 80 columns."""

    def run(command, *args):
        done = CliRunner().invoke(command, [*args], terminal_width=80, prog_name="dsrun")
        assert done.exit_code == 0, done.output
        return done.output

    return run


def sections(text):
    """Heading -> its lines."""
    found = {}
    for line in text.splitlines():
        if re.fullmatch(r"[A-Z][^:]*:", line):
            found[line[:-1]] = []
        elif found and line.startswith("  "):
            found[[*found][-1]].append(line)
    return {title: "\n".join(lines) for title, lines in found.items()}


def test_the_short_help_fits_a_screen(show):
    text = show(finetune.command, "--help")
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, sections(text)["Training"].splitlines())) <= 80
    common = {entry.flag for entry in TABLE.values() if entry.option.common}
    assert set(FLAG.findall(text)) == {*common, "--help-all", "--help"}
    assert f"{len(TABLE) - len(common)} more options" in text


def test_the_whole_help_has_every_option_once_in_its_group(show):
    found = sections(show(finetune.command, "--help-all"))
    groups = {title: FLAG.findall(text) for title, text in found.items() if title != "Help"}
    expected = {}
    for entry in TABLE.values():
        expected.setdefault(entry.group, []).append(entry.flag)
    assert groups == expected
    assert [*found][-1] == "Help"


def test_defaults_are_shown(show):
    text = " ".join(show(finetune.command, "--help-all").split())
    for entry in TABLE.values():
        assert f"[default: {entry.default_words}]" in text or not entry.default_words, entry.name
    assert "[default: zero2]" not in text, "a preset's default is the model's"


def test_a_command_with_few_options_shows_them_all(show):
    assert len(resume.command.params) <= SHORT_FROM
    text = show(resume.command, "--help")
    assert "--wait-timeout" in text
    assert "--help-all" not in text


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("--lr", "nan"), ("--lr", "inf"), ("--lr", "0"), ("--epochs", "nan"), ("--grad-clip", "-1"),
        ("--lora-dropout", "1"), ("--gpus", "0"), ("--master-port", "65536"), ("--precision", "int8"),
        ("--seed", "1.5"),
    ],
)  # fmt: skip
def test_a_value_out_of_range_is_wrong_usage(flag, text):
    done = CliRunner().invoke(finetune.command, ["llama-tiny", flag, text])
    assert done.exit_code == 2
    assert flag in done.output


@pytest.mark.parametrize(
    "entry", [one for one in TABLE.values() if one.kind in (int, float)], ids=lambda one: one.name
)
def test_click_and_the_table_refuse_the_same_numbers(entry):
    """A run file is told by the table what the command line is told by click."""
    limits = {getattr(entry.option, name) for name in ("at_least", "above", "at_most", "below")} - {None}
    param = next(one for one in finetune.command.params if one.name == entry.name)
    for number in sorted({*limits, *(limit + step for limit in limits for step in (-1, 1)), 7}):
        value = entry.kind(number)
        wrong = bool([*problems_of(TABLE, Source.RUN_FILE, {entry.name: value}, "run.toml")])
        try:
            param.type.convert(str(value), param, None)
        except click.BadParameter:
            assert wrong, value
        else:
            assert not wrong, value


def test_what_is_given_is_what_stands_on_the_command_line():
    said = {}

    @click.command(cls=TableCommand)
    @options_of(PlanOptions)
    def command(**values):
        said["asked"] = given(PlanOptions, values)

    args = ["--micro-batch", "2", "--params", "6.2B", "--preset", "zero2", "--preset", "ddp", "--no-packing"]
    assert CliRunner().invoke(command, args, catch_exceptions=False).exit_code == 0
    assert said["asked"].user == {
        "micro_batch": 2, "params": 6.2e9, "presets": ("zero2", "ddp"), "packing": False
    }  # fmt: skip
    assert said["asked"].source("lora_rank") is Source.BUILT_IN


def test_one_thing_said_twice_is_wrong_usage():
    done = CliRunner().invoke(finetune.command, ["llama-tiny", "--epochs", "1", "--max-steps", "3"])
    assert done.exit_code == 2
    assert "--epochs" in done.output
    assert "--max-steps" in done.output


def test_an_option_of_another_trainer_is_answered_with_ours():
    for typed, ours in (
        ("--learning-rate", "--lr"),
        ("--num_train_epochs", "--epochs"),
        ("--max_steps", "--max-steps"),
    ):
        done = CliRunner().invoke(finetune.command, ["llama-tiny", typed, "3"])
        assert done.exit_code == 2
        assert f"Did you mean '{ours}'?" in done.output


def test_resume_says_that_a_run_goes_on_as_it_began():
    for typed in ("--lr", "--learning-rate", "--train-file"):
        done = CliRunner().invoke(resume.command, ["run", typed, "3"])
        assert done.exit_code == 2
        assert "as it began" in done.output
    assert "as it began" not in CliRunner().invoke(resume.command, ["run", "--nonsense"]).output


def test_every_other_name_leads_to_an_option():
    assert set(OTHER_NAMES.values()) <= {*TABLE, *entries(LaunchOptions)}
    assert not set(OTHER_NAMES) & set(TABLE)


@pytest.mark.parametrize(
    ("option", "field"),
    [
        ("--learning-rate", "lr"), ("--cutoff_len", "max_length"), ("--sequence_len", "max_length"),
        ("--lora_r", "lora_rank"),
        ("--num_train_epochs", "epochs"), ("--tuner_type", "method"), ("--val_dataset", "eval_file"),
        ("--optim", "optimizer"),
        ("--save_total_limit", "keep_checkpoints"), ("--nproc_per_node", "gpus"), ("--dataset_name", "train_file"),
        ("--gradient_checkpointing", "activation_checkpointing"), ("--per_device_train_batch_size", "micro_batch"),
    ],
)  # fmt: skip
def test_an_unknown_option_is_answered_from_the_trainers_tables(option, field):
    assert other_names.ours(option, TABLE) == field


def test_an_option_without_a_counterpart_is_answered_with_why():
    assert "an optimizer that dsrun doesn't have" in other_names.why_none("--use_galore")
    done = CliRunner().invoke(finetune.command, ["m", "--pissa_init"])
    assert "another start of LoRA's matrices" in done.output
    assert other_names.why_none("--epochz") == ""


@pytest.mark.parametrize(
    ("words", "kind"), [(("--lr", "1e-3x"), "number"), (("--max-steps", "many"), "whole number")]
)
def test_a_number_that_is_none_is_called_so(words, kind):
    done = CliRunner().invoke(finetune.command, ["m", *words])
    assert f"'{words[1]}' is not a valid {kind}." in done.output
