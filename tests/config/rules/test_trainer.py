"""The table of HF Trainer's defaults is transformers' own."""

from __future__ import annotations

import dataclasses
import enum

import pytest

from dsrun.config import trainer_args
from dsrun.config.trainer_args import Arguments


def test_defaults_are_those_of_training_arguments():
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = {
        field.name: getattr(field.default, "value", field.default) for field in dataclasses.fields(arguments)
    }
    assert {name: theirs[name] for name in trainer_args.DEFAULTS} == trainer_args.DEFAULTS


def test_arguments():
    class Kind(enum.Enum):
        SGD = "sgd"

    arguments = Arguments({"optim": Kind.SGD, "max_grad_norm": None, "fsdp": ""})
    assert (arguments["optim"], arguments["max_grad_norm"], arguments["nothing"]) == ("sgd", 1.0, None)
    assert arguments.asked("optim")
    assert not arguments.asked("max_grad_norm")


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1),
        ({"warmup_steps": 1}, 1),
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 0.1, "max_steps": 31}, 4),
        ({"warmup_ratio": 0.5, "max_steps": 10}, 5),
        ({"warmup_steps": 0.1}, None),
    ],
)
def test_warmup(given, steps):
    found = Arguments(given).warmup()
    assert found == steps if steps else found is trainer_args.tree.MISSING
