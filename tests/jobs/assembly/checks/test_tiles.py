"""--tile-tokens: by length and vocabulary where nobody says, and what can't be is refused before the start."""

import json

import pytest

from dsrun.jobs.assembly.checks.tiles import problems, settled
from dsrun.options.table import ComputeOptions

ANY = ComputeOptions()
LONG = {"tokens": 131072, "vocabulary": 128256, "network": "llama"}
PLAN = ("plan", "llama-3.1-8b", "--gpu", "a100-80g", "--gpus", 8, "--no-liger", "--json")


@pytest.mark.parametrize(
    ("changes", "tiles"),
    [
        ({}, True),
        ({"tokens": 4096}, False),
        ({"tokens": 8372}, True),  # times the vocabulary, in fp32: 4 GiB
        ({"tokens": 8371}, False),
        ({"vocabulary": 4000}, False),
        ({"network": "gemma2"}, False),
        ({"network": None}, False),
        ({"fused_loss": True}, False),
    ],
)
def test_where_nobody_says(changes, tiles):
    assert settled(ANY, **{**LONG, **changes}) == (4096 if tiles else 0)


@pytest.mark.parametrize("said", [0, 512])
def test_what_is_said_counts(said):
    assert settled(ComputeOptions(tile_tokens=said), **LONG) == said
    assert settled(ComputeOptions(tile_tokens=said), **{**LONG, "tokens": 9}) == said


def test_another_loss_is_refused():
    assert not list(problems(ANY, "gemma2"))
    assert not list(problems(ComputeOptions(tile_tokens=0), "gemma2"))
    (found,) = problems(ComputeOptions(tile_tokens=512), "gemma2")
    assert "--tile-tokens 512" in str(found) and "gemma2" in str(found)


def test_a_finetune_knows_them_and_the_preset_brings_them(dsrun, tmp_path):
    """Whose options give way to those that are said."""
    words = ("finetune", "llama-tiny", "--output-dir", tmp_path / "run", "--dry-run", "--json")

    def training(*more):
        said = dsrun(*words, *more)
        assert said.code == 0, said.err
        found = json.loads(said.out)["job"]["training"]
        return found["tile_tokens"], found["activation_checkpointing"]

    assert training() == (0, "none")
    assert training("--tile-tokens", 16) == (16, "none")
    assert training("--preset", "long-context") == (4096, "full")
    assert training("--preset", "long-context", "--activation-checkpointing", "none") == (4096, "none")


def test_a_preset_says_what_else_it_brings(dsrun):
    assert "--tile-tokens 4096" in dsrun("preset", "long-context").err


def test_a_hundred_thousand_tokens_are_planned_in_tiles(dsrun):
    def logits(*more):
        found = json.loads(dsrun(*PLAN, "--seq-len", 100_000, "--preset", "zero3", *more).out)
        return found["plans"][0]["gpu"]["terms"]["logits"]

    assert logits() == logits("--tile-tokens", 4096) < logits("--tile-tokens", 0) / 14
