"""Arguments of the optimizer as options: what reaches DeepSpeed's config, and what the ranks' own optimizer."""

from __future__ import annotations

import pytest

from dsrun.options.commands import FinetuneOptions
from dsrun.options.optimizers import OPTIMIZERS, PARAMS, apart, argument_problems, texts_for_config

DECAY = f"{PARAMS}weight_decay=0.1"


def test_deepspeeds_own_gets_them_by_its_config():
    options = FinetuneOptions(weight_decay=0.1, adam_beta2=0.95, overrides=("gradient_clipping=2",))
    assert texts_for_config(options) == ("gradient_clipping=2", DECAY, f"{PARAMS}betas=[0.9, 0.95]")
    assert apart(options) == {}
    assert argument_problems(options) == []


@pytest.mark.parametrize("name", [name for name, one in OPTIMIZERS.items() if one.made_by])
def test_the_ranks_own_gets_them_apart(name):
    """--set's too: the config's section is AdamW's, by which momentum would be judged."""
    arguments = {
        "momentum": {"momentum": 0.5},
        "betas": {"adam_beta1": 0.8, "adam_beta2": 0.7},
        "weight_decay": {"weight_decay": 0.3},
    }
    for argument in set(arguments) & set(OPTIMIZERS[name].takes):
        options = FinetuneOptions(optimizer=name, **arguments[argument])
        values = [*arguments[argument].values()]
        assert apart(options) == {argument: values if argument == "betas" else values[0]}
        assert texts_for_config(options) == ()
        assert argument_problems(options) == []
    by_set = FinetuneOptions(optimizer=name, overrides=(DECAY, "gradient_clipping=2"))
    assert apart(by_set) == {"weight_decay": 0.1}
    assert texts_for_config(by_set) == ("gradient_clipping=2",)


def test_muons_momentum_stands_apart_of_the_adamw_beside_it():
    options = FinetuneOptions(optimizer="muon", momentum=0.8, weight_decay=0.1)
    assert apart(options) == {"momentum": 0.8}
    assert texts_for_config(options) == (DECAY,)


def test_one_beta_of_lion_goes_with_lions_other():
    assert apart(FinetuneOptions(optimizer="lion", adam_beta2=0.98)) == {"betas": [0.9, 0.98]}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"momentum": 0.5}, "adamw has no momentum"),
        ({"optimizer": "sgd", "adam_beta1": 0.8}, "sgd has no betas"),
        ({"weight_decay": 0.2, "overrides": (DECAY,)}, "says another"),
        ({"optimizer": "sgd", "weight_decay": 0.2, "overrides": (DECAY,)}, "says another"),
    ],
)
def test_what_can_not_be_is_said(options, says):
    (problem,) = argument_problems(FinetuneOptions(**options))
    assert says in problem.what


def test_the_same_value_twice_is_no_contradiction():
    assert argument_problems(FinetuneOptions(weight_decay=0.1, overrides=(DECAY,))) == []
