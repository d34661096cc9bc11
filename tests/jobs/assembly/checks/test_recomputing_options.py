"""--activation-checkpointing: what can't be is refused before the start."""

import pytest

from dsrun.jobs.assembly.checks.recomputing import problems
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved


def wrong(accelerator, architecture=None, **values):
    asked = Resolved.by_user(FinetuneOptions, values)
    return "\n".join(map(str, problems(asked, accelerator, architecture)))


@pytest.mark.parametrize(
    ("accelerator", "values", "model_type"),
    [
        ("cpu", {}, "llama"),
        ("cpu", {"activation_checkpointing": "full"}, "glm"),
        ("cpu", {"activation_checkpointing": "selective", "recompute_every": 3}, "qwen3_moe"),
        ("cuda", {"activation_checkpointing": "offload"}, "mixtral"),
        (None, {"activation_checkpointing": "offload"}, None),
    ],
)
def test_what_can_be(accelerator, values, model_type):
    assert wrong(accelerator, {"model_type": model_type}, **values) == ""


def test_cpu_ranks_have_nothing_to_offload_to():
    assert "--activation-checkpointing full" in wrong("cpu", activation_checkpointing="offload")


@pytest.mark.parametrize("way", ["none", "full", "offload"])
def test_the_number_is_for_selective(way):
    assert "selective" in wrong("cuda", activation_checkpointing=way, recompute_every=3)


def test_a_class_without_it():
    pytest.importorskip("transformers")
    said = wrong("cuda", {"model_type": "ctrl"}, activation_checkpointing="full")
    assert "ctrl" in said
