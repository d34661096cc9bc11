"""What finetune's own loop doesn't do is refused, and what changes nothing is not."""

import pytest

from dsrun.jobs.assembly.checks.techniques import TECHNIQUES, refusals

ASKED = {
    "tensor_parallel.autotp_size": {"tensor_parallel": {"autotp_size": 2}},
    "tensor_parallel.tp.tp_size": {"tensor_parallel": {"tp": {"tp_size": 2}}},
    "sequence_parallel_size": {"sequence_parallel_size": 2},
    "pipeline": {"pipeline": {"stages": 2}},
    "compile.deepcompile": {"compile": {"deepcompile": True}},
    "expert_parallel": {"expert_parallel": {"enabled": True, "autoep_size": 2}},
    "zero_optimization.zenflow": {"zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "step"}}},
    "data_efficiency": {"data_efficiency": {"enabled": True}},
    "hybrid_engine": {"hybrid_engine": {"enabled": True}},
    "activation_checkpointing": {"activation_checkpointing": {"cpu_checkpointing": True}},
    "checkpoint.load_universal": {"checkpoint": {"load_universal": True}},
}


def test_every_technique_is_tried():
    assert set(ASKED) == {found.path for found in TECHNIQUES}


@pytest.mark.parametrize("path", ASKED)
def test_what_is_asked_for_is_refused_by_its_name(path):
    (problem,) = refusals(ASKED[path], "lab.json")
    assert path in str(problem)


@pytest.mark.parametrize(
    "config",
    [
        {}, {"tensor_parallel": {"autotp_size": 1}}, {"sequence_parallel_size": 1}, {"pipeline": {}},
        {"expert_parallel": {"enabled": False, "autoep_size": 2}}, {"zero_optimization": {"stage": 2}},
        {"data_efficiency": {"enabled": False}}, {"hybrid_engine": {"max_out_tokens": 512}},
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"checkpoint": {"load_universal": False}}, {"compile": {"deepcompile": False}},
    ],
)  # fmt: skip
def test_what_changes_nothing_is_not(config):
    assert refusals(config, "lab.json") == []
