"""The list of other tools' keys: none is DeepSpeed's own, and each says where to go instead."""

from __future__ import annotations

from functools import lru_cache

import pytest
from running import each

from dsrun.config.schemas import foreign, names, schema

PATHS, NAMES = foreign._known()
EVERYWHERE = {**PATHS, **NAMES}


@lru_cache(maxsize=1)
def own_names():
    """Every key of every known DeepSpeed, aliases included."""

    def walk(node):
        for key, below in node.get("properties", {}).items():
            yield key
            yield from walk(below)

    return {key for version in schema.versions() for key in walk(schema.load(version).root)}


def test_there_are_names():
    assert len(NAMES) > 250
    assert len(PATHS) > 8


def test_a_name_is_no_key_of_deepspeed():
    assert not NAMES.keys() & own_names()


def test_a_name_hides_no_misspelling():
    """A key one letter away from one of DeepSpeed's top level is a slip, not another tool's key."""
    top = schema.load().root["properties"]
    assert not [(name, key) for name in NAMES for key in top if names.alike(name, key) > 0.94]


def test_a_path_is_no_key_of_deepspeed():
    versions = list(map(schema.load, schema.versions()))
    assert not [path for path in PATHS for known in versions if known.node(path) is not None]


def test_entries():
    each(sorted(EVERYWHERE), check_entry)


def check_entry(key):
    known = EVERYWHERE[key]
    assert known.advice.endswith(".")
    assert known.advice[0].isupper()
    assert known.whose.split()[0] in ("a", "an")
    assert known.file
    if known.to:
        head = known.to.rpartition(".params.")[0] or known.to
        assert schema.load().node(known.to) is not None or schema.load().node(head) is not None
        assert known.to.rpartition(".")[2] in known.advice


def test_advice_from_the_place():
    assert foreign.lookup("zero_stage") == foreign.Foreign(
        "a setting of accelerate",
        "Write zero_optimization.stage.",
        "an accelerate config",
        "zero_optimization.stage",
    )


def test_own_words_beside_the_place():
    known = foreign.lookup("vocab_size")
    assert known.advice == "Remove it: it belongs to the model. DeepSpeed only checks vocabulary_size."
    assert known.to == "vocabulary_size"


def test_plain_advice_has_no_place():
    known = foreign.lookup("mixed_precision")
    assert (known.advice, known.to) == ("Write bf16.enabled or fp16.enabled.", "")
    assert (known.whose, known.file) == ("a setting of accelerate", "an accelerate config")


@pytest.mark.parametrize("path", ["max_grad_norm", "max-grad-norm", "training.args.max_grad_norm"])
def test_found_by_its_name_anywhere(path):
    assert foreign.lookup(path).to == "gradient_clipping"


def test_a_path_goes_before_a_name():
    assert foreign.lookup("tensor_parallel.tp_size").to == "tensor_parallel.autotp_size"
    assert foreign.lookup("seed").whose == "a setting of HF's TrainingArguments"


@pytest.mark.parametrize("path", ["data_sampling.seed", "zero_optimization.tp_size", "gradient_clipping", ""])
def test_unknown(path):
    assert foreign.lookup(path) is None


@pytest.mark.parametrize("key", ["stage", "gradient_accumulation_steps", "lr", "betas", "zero_optimization"])
def test_deepspeed_own(key):
    assert foreign.lookup(key) is None


def test_every_training_argument_is_known():
    transformers = pytest.importorskip("transformers")
    import dataclasses

    fields = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    assert {name for name in fields if foreign.lookup(name) is None} <= own_names()


def test_every_field_of_accelerates_plugin_is_known():
    utils = pytest.importorskip("accelerate.utils")
    import dataclasses

    fields = {field.name for field in dataclasses.fields(utils.DeepSpeedPlugin)}
    assert {name for name in fields if foreign.lookup(name) is None} <= own_names()
