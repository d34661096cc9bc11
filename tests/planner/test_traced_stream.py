"""The residual stream's width, as torch's type promotion makes it in each network's own class, beside the formula's."""

from __future__ import annotations

import json

import pytest
from test_activations import CONFIGS, EAGER, config, setup

from dsrun.planner.lora import lora_weights
from dsrun.planner.trace.request import request_of

STREAMS = {
    "16 bits": ({}, 2),
    "autocast over fp32 weights": ({"precision": "amp"}, 4),
    "autocast, fp32 embedding": ({"fp32_stream": True}, 4),
    "4-bit matrices, fp32 otherwise": ({"method": "qlora", "quantized": "nf4", "kbit_casts": True}, 4),
    "4-bit matrices": ({"method": "qlora", "quantized": "nf4"}, 2),
    "FSDP's mixed precision": ({"engine": "fsdp", "gpus": 2, "precision": "amp"}, 2),
    "fp32": ({"precision": "fp32"}, 4),
}
OFTEN = ("llama", "mistral")
"""Networks of which published runs seemed to differ; they are compared in every lane."""


CONV1D = ("gpt2",)
"""Networks without linear layers."""
GROUPED_IN_16_BITS = tuple(name for name in CONFIGS if setup(name).shape.experts)
"""Mixtures, whose grouped products torch describes for bf16 alone."""


def traceable(family, fields):
    """Whether torch and PEFT have such a training."""
    in_fp32 = fields.get("precision") == "fp32" or "kbit_casts" in fields
    return not (("method" in fields and family in CONV1D) or (in_fp32 and family in GROUPED_IN_16_BITS))


@pytest.mark.parametrize(
    ("family", "way"),
    [
        (family, way) if family in OFTEN else pytest.param(family, way, marks=pytest.mark.full)
        for way, (fields, _) in STREAMS.items()
        for family in CONFIGS
        if traceable(family, fields)
    ],
)
def test_the_stream_is_as_wide_as_the_trace_says(family, way):
    """Each block's input, that of the first one included."""
    process = pytest.importorskip("dsrun.training.tracing.process")
    fields, width = STREAMS[way]
    asked = setup(family).changed(seq_len=64, **fields)
    if asked.method != "full":
        asked = asked.changed(adapters=lora_weights(asked.shape, 8))
    assert asked.stream_bytes == width
    made = request_of(asked, config(family), {"rank": 8, "target": "all", "dropout": 0.0})
    recorded = process.record(json.loads(json.dumps({**made, "flash": family not in EAGER})))
    assert recorded["stream"] == [width] * len(recorded["chosen"])
