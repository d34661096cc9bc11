"""The text parts of whole checkpoints on two ranks, beside a plain loop of transformers' own multimodal class."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from needed import needs, since

torch = pytest.importorskip("torch")
needs("deepspeed", "transformers", "peft")

from plain_text_loop import FAMILIES, check_whole, on_two_ranks, plain_loop, whole_model
from text_parts import step_examples
from tiny_checkpoints import write_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("alone"), since(transformers="5.23")]
CASES = ["qwen3_5:zero3:full", "gemma3:zero2:full", "qwen3_vl:zero3:lora"]
GRID = itertools.product(FAMILIES, ("zero2", "zero3"), ("full", "lora"))
MORE = sorted({":".join(case) for case in GRID} - {*CASES})
ALONE = {"qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3", "llava", "internvl", "llama4"}
"""Families whose text part has a class of its own."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("text parts 文")


@pytest.fixture(scope="module")
def results(request, environ, folder):
    """What two ranks came to in each case, one after the other."""
    cases = [*CASES, *(MORE if request.config.getoption("--full") else ())]
    for family in sorted({case.partition(":")[0] for case in cases}):
        write_checkpoint(folder / family, family)
    return on_two_ranks(cases, folder, environ)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.full) for case in MORE)])
def test_a_text_part_is_trained_as_a_plain_loop_does(results, folder, case):
    """Losses; then the whole export in the family's own class, and the text model by itself."""
    family, _, method = case.split(":")
    line = results[case]
    losses, trained = plain_loop(folder / family, method)
    assert line["losses"] == pytest.approx(losses, abs=1e-5)
    logits, ids = check_whole(line, folder / family, trained), torch.tensor([step_examples(0)[0]])
    assert ("model-text" in line["folders"]) == (method == "full" and family in ALONE)
    if "model-text" in line["folders"]:
        text = whole_model(Path(line["folders"]["model-text"])).eval()
        assert not any(name.startswith(("visual", "vision", "model.vis")) for name in text.state_dict())
        with torch.no_grad():
            assert torch.allclose(text(input_ids=ids).logits, logits, atol=1e-6)


def test_the_way_is_told(results):
    assert "aren't loaded" in results["qwen3_5:zero3:full"]["note"]
    assert "vision_tower" in results["gemma3:zero2:full"]["note"]
    assert "stay as they are" in results["gemma3:zero2:full"]["note"]


def test_packing_where_examples_stay_apart(results):
    """Linear attention without kernels that take borders mixes what one sequence holds."""
    assert results["gemma3:zero2:full"]["packs"]
    assert results["qwen3_vl:zero3:lora"]["packs"]
    assert not results["qwen3_5:zero3:full"]["packs"]
