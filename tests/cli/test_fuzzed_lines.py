"""Command lines that nobody would type: each ends as the page of exit codes says, and never with an internal error.

Options and their values are drawn from the commands themselves, so that a new one is drawn without a word here.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import click
import pytest

from dsrun.cli import cli

SEED = 20261123
LINES, ALL_LINES = 100, 1000
NUMBERS = (
    "0",
    "1",
    "-1",
    "2",
    "7",
    "1.5",
    "1e-5",
    "1e308",
    "nan",
    "inf",
    "99999999999999999999",
    "-0",
    "0x10",
)
TEXTS = (
    "", " ", "a", "zero2", "auto", "all", "cpu", "fp16", "chat-template", "a" * 300, "数据", "a b'c\"d", "$(id)",
    "../..", "/dev/null", "/", "here.json", "here.jsonl", "https://user:pw@host/x", "-x", "--", "a=b",
    "zero_optimization.stage=2", "=", "{}", "[1]", "null", "\udc80", "32GiB", "1,2,,3", "node[1-3]", "2:30:00",
)  # fmt: skip
MODELS = ("llama-tiny", "chatglm2-tiny", "qwen3-8b", "nothing", "here", "here.json", "llama-3-8b", "")
ARGUMENTS = {
    "preset": ("zero2", "zero3-offload", "auto", "fsdp", "nothing"), "plan": MODELS, "finetune": MODELS,
    "validate": ("here.json", "here.jsonl", "here", "nothing.json", "-"), "convert": ("here.json", "here.yaml", "here"),
    "diff": ("here.json", "nothing.json"), "explain": ("zero_optimization.stage", "nccl", "nothing", "a" * 300),
    "launch": ("here.py", "json.tool", "here.json", "nothing.py"), "diagnose": ("here.log", "here.json", "nothing"),
    "show": ("here", "nothing"), "runs": ("here", ".", "nothing"), "logs": ("here", "nothing"), "compare": ("here",),
    "models": (), "schema": (), "hosts": ("check", "here.json", "nothing"), "submit": ("launch", "here.py", "finetune"),
    "report": ("here", "nothing"), "export": ("here", "nothing"), "resume": ("here", "nothing"), "rerun": ("here",),
}  # fmt: skip
ALWAYS = {
    "finetune": ("--dry-run",), "launch": ("--dry-run",), "submit": ("--dry-run",), "rerun": ("--dry-run",),
    "resume": ("--dry-run",), "report": ("-o", "report.html"), "export": ("-o", "exported"),
}  # fmt: skip
"""Options with which nothing is started. report and export find no run that they could work on."""
LEFT_OUT = {
    "--detach",
    "--follow",
    "-f",
    "--wait",
    "--smoke",
    "--measure",
    "--help",
    "--help-all",
    "--hostfile",
    "--cluster",
}
"""Options that wait, start processes, or go over ssh."""


def lines(count: int) -> list[list[str]]:
    """Command lines, the same in every run."""
    draw = random.Random(SEED)
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in ARGUMENTS}
    return [line(draw, *draw.choice(list(commands.items()))) for _ in range(count)]


def line(draw: random.Random, name: str, command: click.Command) -> list[str]:
    """One line. Most values are of their option's type, so that a line comes further than to the first wrong one."""
    options = [
        one for one in command.params if isinstance(one, click.Option) and not LEFT_OUT & set(one.opts)
    ]
    words = draw.choices(ARGUMENTS[name], k=draw.choice((0, 1, 1, 1, 2))) if ARGUMENTS[name] else []
    for option in draw.sample(options, min(len(options), draw.randint(0, 5))):
        words.append(draw.choice([*option.opts, *option.secondary_opts]))
        if not option.is_flag and draw.random() > 0.03:
            words.append(draw.choice(fitting(option) if draw.random() < 0.75 else (*NUMBERS, *TEXTS)))
    return [name, *words, *ALWAYS.get(name, ())]


def fitting(option: click.Option) -> tuple[str, ...]:
    """Values of an option's type."""
    kind = option.type
    if isinstance(kind, click.Choice):
        return tuple(map(str, kind.choices))
    if isinstance(kind, click.types.IntParamType):
        return ("1", "2", "7", "64")
    if isinstance(kind, click.types.FloatParamType):
        return ("0.1", "1", "1e-5", "100")
    return ("here.json", "here.jsonl", "here", "zero2", "auto", "32GiB", "2", "a=1", "numeric")


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a file of each kind, and nothing else around it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DSRUN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}
    (tmp_path / "here.json").write_text(json.dumps(config))
    (tmp_path / "here.jsonl").write_text('{"content": "q", "summary": "a"}\n' * 4)
    (tmp_path / "here.yaml").write_text("distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: 2\n")
    (tmp_path / "here.py").write_text("print('hello')\n")
    (tmp_path / "here.log").write_text("RuntimeError: CUDA out of memory\n")
    (tmp_path / "here").mkdir()
    return tmp_path


def drawn() -> list:
    everything = lines(ALL_LINES)
    return [
        pytest.param(words, id=str(number), marks=[pytest.mark.full] if number >= LINES else [])
        for number, words in enumerate(everything)
    ]


@pytest.mark.parametrize("words", drawn())
def test_a_line_ends_as_documented(words, here, dsrun, monkeypatch):
    with Path(os.devnull).open(encoding="utf-8") as nothing:
        monkeypatch.setattr("sys.stdin", nothing)
        done = dsrun(*words)
    assert "internal error" not in done.err, (words, done.err[-2000:])
    assert done.code in {0, 1, 2} or (words[0], done.code) == ("diagnose", 3), (words, done.err[-500:])
