"""The table of HF Trainer's defaults is transformers' own."""

from __future__ import annotations

import dataclasses
import enum

import pytest
from needed import since

from dsrun.config import trainer_args
from dsrun.config.trainer_args import Arguments
from dsrun.errors import DsrunError


@since(torch="2.8")  # transformers takes the fused AdamW from that one on
def test_defaults_are_those_of_training_arguments():
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = {
        field.name: getattr(field.default, "value", field.default) for field in dataclasses.fields(arguments)
    }
    assert {name: theirs[name] for name in trainer_args.DEFAULTS} == trainer_args.DEFAULTS


@since(transformers="5.8")  # the newest optimizer
def test_choices_are_those_of_transformers():
    args = pytest.importorskip("transformers.training_args")
    kinds = {"optim": args.OptimizerNames, "lr_scheduler_type": args.SchedulerType}
    theirs = {name: {item.value for item in kind} for name, kind in kinds.items()}
    assert {name: set(choices) for name, choices in trainer_args.CHOICES.items()} == theirs


@pytest.mark.parametrize(
    ("pairs", "where", "hint"),
    [
        (["bf16=maybe"], "bf16", "true or false"),
        (["do_eval=2"], "do_eval", "true or false"),
        (["learning_rate=fast"], "learning_rate", "5e-05"),
        (["max_grad_norm=true"], "max_grad_norm", "1.0"),
        (["max_steps=1.5"], "max_steps", "-1"),
        (["per_device_train_batch_size=0"], "per_device_train_batch_size", "8"),
        (["gradient_accumulation_steps=-1"], "gradient_accumulation_steps", "1"),
        (["lr_scheduler_type=cosin"], "lr_scheduler_type", "'cosine'?"),
        (["optim=7"], "optim", "adamw_torch_fused"),
        (["bf16=1", "fp16=true"], "fp16", "one"),
        (["fp16_full_eval=true", "bf16_full_eval=true"], "fp16_full_eval", "one"),
    ],
)
def test_values_that_the_trainer_refuses(pairs, where, hint):
    with pytest.raises(DsrunError) as caught:
        trainer_args.given(None, pairs)
    (problem,) = caught.value.problems
    assert problem.where == where
    assert hint in problem.hint


def test_values_that_the_trainer_takes():
    pairs = [
        *("bf16=True", "fp16=false", "bf16_full_eval=0", "do_train=none", "max_steps=-1", "warmup_steps=0.1"),
        *(
            "per_device_train_batch_size=1",
            "gradient_accumulation_steps=1",
            "learning_rate=1",
            "optim=adamw_hf",
        ),
        *("lr_scheduler_type=cosine", "eval_strategy=no", "fsdp=full_shard"),
    ]
    result = trainer_args.given(None, pairs)
    assert result["learning_rate"] == 1
    assert result["do_train"] is None


def test_arguments():
    class Kind(enum.Enum):
        SGD = "sgd"

    arguments = Arguments({"optim": Kind.SGD, "max_grad_norm": None, "fsdp": ""})
    assert (arguments["optim"], arguments["max_grad_norm"], arguments["nothing"]) == ("sgd", 1.0, None)
    assert arguments.changed("optim")
    assert not arguments.changed("max_grad_norm")


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
    result = Arguments(given).warmup()
    assert result == steps if steps else result is trainer_args.tree.MISSING
