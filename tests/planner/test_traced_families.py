"""The peak by trace and by formula, for a model of each network that ships, in each of the ways of bench/traces.py."""

from __future__ import annotations

import json

import pytest
import traces

from dsrun.planner.gpu_memory import gpu_memory
from dsrun.planner.trace.replay import replay
from dsrun.planner.trace.request import TracedModel, request_of
from dsrun.planner.trace.schedule import actions

NETWORKS = {config["model_type"]: config for _, config in traces.released()}
OFTEN = {("llama", "full, recomputed"), ("deepseek_v2", "LoRA, recomputed"), ("qwen3", "ZeRO-2, recomputed")}
"""What is compared in every lane."""


def test_most_networks_are_there():
    assert len(NETWORKS) >= 16
    assert {"llama", "mixtral", "deepseek_v3", "glm4_moe"} <= NETWORKS.keys()


@pytest.mark.parametrize(
    ("family", "way"),
    [
        pytest.param(family, way, marks=[] if (family, way) in OFTEN else pytest.mark.full)
        for family in NETWORKS
        for way in traces.WAYS
    ],
)
def test_trace_and_formula_agree(family, way):
    """Within 2 %, and LoRA's weights to the last one but for a mixture's shared experts."""
    process = pytest.importorskip("dsrun.training.tracing.process")
    config = NETWORKS[family]
    setup = traces.setup_of(config, traces.WAYS[way])
    made = json.loads(json.dumps(request_of(setup, config, traces.tracer_for(config).lora)))
    model = TracedModel.of(made, {"recording": process.record(made)})
    model.check(setup)
    traced = replay(actions(setup, model.recording, model.events)).allocated
    assert traced == pytest.approx(gpu_memory(setup).allocated, rel=0.02)
    if setup.method != "full" and (setup.shape.experts is None or setup.shape.latent):
        assert sum(weight.elements for weight in model.recording.weights if weight.trained) == setup.adapters
