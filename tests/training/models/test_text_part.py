"""Models with towers: what is their text part, and whether it can be trained as a causal model at all."""

from __future__ import annotations

import pytest
from needed import needs, since

torch = pytest.importorskip("torch")
needs("transformers")

from tiny_checkpoints import tiny_config

from dsrun.training.data.packing import sees_later
from dsrun.training.models.text_part import class_of, take_text, towers

pytestmark = since(transformers="5.23")


def model(family):
    kind, config = class_of(tiny_config(family))
    torch.manual_seed(0)
    made = kind._from_config(config, dtype=torch.float32)
    take_text(made)
    return made


@pytest.mark.parametrize(("family", "later"), [("gemma3", False), ("qwen3_vl", False), ("paligemma", True)])
def test_a_prefix_model_is_told_from_a_causal_one(family, later):
    """PaliGemma's tokens see those after them, and would read the answers."""
    made = model(family)
    assert towers(made)
    assert sees_later(made) == later
    assert made.training, "as it was"


def test_towers_stay_as_they_are():
    made = model("llava")
    assert not any(weight.requires_grad for weight in towers(made).values())
    trained = [name for name, weight in made.named_parameters() if weight.requires_grad]
    assert trained
    assert all("vision" not in name and "projector" not in name for name in trained)


def test_a_module_without_a_config_has_none():
    assert towers(torch.nn.Linear(2, 2)) == {}
