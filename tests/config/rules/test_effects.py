# ruff: noqa: E501 - texts stand here as they are shown
"""Keys without effect: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.rules import effects, run
from dsrun.config.rules.frame import Rule, example

OWN = {rule.id for rule in vars(effects).values() if isinstance(rule, Rule)}


class Said(NamedTuple):
    """A finding; fix is (edits, safe)."""

    rule: str
    severity: str
    effect: str
    path: str
    message: str
    suggestion: str
    fix: tuple | None = None


CASES = [
    (
        {"zero_optimization": True, "allgather_size": 500000000},
        [
            Said(
                "DS011",
                "warning",
                "",
                "allgather_size",
                "is deprecated",
                'Replace it: use zero_optimization.allgather_bucket_size; read only with the old "zero_optimization": true.',
            ),
        ],
    ),
    (
        {"allgather_size": 1},
        [
            Said(
                "DS011",
                "warning",
                "",
                "allgather_size",
                "is deprecated",
                'Replace it: use zero_optimization.allgather_bucket_size; read only with the old "zero_optimization": true.',
            ),
        ],
    ),
    (
        {"disable_allgather": True},
        [
            Said(
                "DS012",
                "warning",
                "",
                "disable_allgather",
                "has no effect",
                "Remove it. DeepSpeed reads this key and never uses it.",
                ((("remove", "disable_allgather", None),), True),
            ),
        ],
    ),
    (
        {"pipeline": {"stages": 2}},
        [
            Said(
                "DS012",
                "warning",
                "",
                "pipeline.stages",
                "has no effect",
                "Remove it. The pipeline engine takes the number of stages from PipelineModule(num_stages=...).",
                ((("remove", "pipeline.stages", None),), True),
            ),
        ],
    ),
    (
        {"pipeline": {"partition": "uniform", "grad_partitioned": True}},
        [
            Said(
                "DS012",
                "warning",
                "",
                "pipeline.partition",
                "has no effect",
                "Remove it. The pipeline engine takes the method from PipelineModule(partition_method=...).",
                ((("remove", "pipeline.partition", None),), True),
            ),
        ],
    ),
    (
        {"zero_optimization.stage": 3},
        [
            Said(
                "DS013",
                "error",
                "differs",
                "zero_optimization.stage",
                "is one key with dots in its name: DeepSpeed ignores it in silence",
                'Write sections inside each other: {"zero_optimization": {"stage": 3}}.',
            ),
        ],
    ),
    (
        {"zero_optimization": {"stage": 2, "offload_optimizer.device": "cpu"}},
        [
            Said(
                "DS013",
                "error",
                "refused",
                "zero_optimization.offload_optimizer.device",
                "is one key with dots in its name: DeepSpeed stops at it",
                'Write sections inside each other: {"offload_optimizer": {"device": "cpu"}}.',
            ),
        ],
    ),
    (
        {"tensorboard": {"output_path": "runs"}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "tensorboard",
                "is off without enabled, and so without effect: output_path",
                "Set tensorboard.enabled to true, or remove the section.",
                ((("add", "tensorboard.enabled", True),), False),
            ),
        ],
    ),
    (
        {"flops_profiler": {"profile_step": 5}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "flops_profiler",
                "is off without enabled, and so without effect: profile_step",
                "Set flops_profiler.enabled to true, or remove the section.",
                ((("add", "flops_profiler.enabled", True),), False),
            ),
        ],
    ),
    (
        {"hybrid_engine": {"max_out_tokens": 256}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "hybrid_engine",
                "is off without enabled, and so without effect: max_out_tokens",
                "Set hybrid_engine.enabled to true, or remove the section.",
                ((("add", "hybrid_engine.enabled", True),), False),
            ),
        ],
    ),
    (
        {"data_efficiency": {"data_routing": {"random_ltd": {"total_layer_num": 2}}}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "data_efficiency.data_routing.random_ltd",
                "is off without enabled, and so without effect: total_layer_num",
                "Set data_efficiency.data_routing.random_ltd.enabled to true, or remove the section.",
                ((("add", "data_efficiency.data_routing.random_ltd.enabled", True),), False),
            ),
        ],
    ),
    (
        {"deepspeed": {"zero_optimization": {"stage": 2}, "train_micro_batch_size_per_gpu": 1}},
        [
            Said(
                "DS015",
                "warning",
                "",
                "deepspeed",
                "holds 2 of DeepSpeed's own keys (zero_optimization, train_micro_batch_size_per_gpu)",
                "Move them to the top level: DeepSpeed looks for them there.",
                (
                    (
                        ("move", "deepspeed.zero_optimization", "zero_optimization"),
                        (
                            "move",
                            "deepspeed.train_micro_batch_size_per_gpu",
                            "train_micro_batch_size_per_gpu",
                        ),
                    ),
                    False,
                ),
            ),
        ],
    ),
    (
        {"ds_config": {"bf16": {"enabled": True}, "steps_per_print": 10}},
        [
            Said(
                "DS015",
                "warning",
                "",
                "ds_config",
                "holds 2 of DeepSpeed's own keys (bf16, steps_per_print)",
                "Move them to the top level: DeepSpeed looks for them there.",
                (
                    (
                        ("move", "ds_config.bf16", "bf16"),
                        ("move", "ds_config.steps_per_print", "steps_per_print"),
                    ),
                    False,
                ),
            ),
        ],
    ),
    (
        {
            "_bare": True,
            "_for": "hf",
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "num_hidden_layers": 2,
        },
        [
            Said(
                "DS016",
                "warning",
                "",
                "architectures",
                "none of DeepSpeed's keys is here: it looks like a model's config.json",
                "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization.",
            ),
        ],
    ),
    (
        {"_bare": True, "compute_environment": "LOCAL_MACHINE", "num_processes": 2},
        [
            Said(
                "DS016",
                "warning",
                "",
                "compute_environment",
                "none of DeepSpeed's keys is here: it looks like an accelerate config",
                "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization.",
            ),
        ],
    ),
    (
        {"_bare": True, "_for": "lightning"},
        [
            Said(
                "DS016",
                "warning",
                "",
                "",
                "there is nothing in it that DeepSpeed could read",
                "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization.",
            ),
        ],
    ),
    (
        {"_bare": True, "_for": "lightning", "_comment": "to be filled in"},
        [
            Said(
                "DS016",
                "warning",
                "",
                "",
                "there is nothing in it that DeepSpeed could read",
                "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization.",
            ),
        ],
    ),
    (
        {"tensorboard": {"enabled": True, "output_path": "~/runs"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "tensorboard.output_path",
                'is "~/runs", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True, "output_path": "${HOME}/runs"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "csv_monitor.output_path",
                'is "${HOME}/runs", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True, "output_path": "logs/$JOB"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "csv_monitor.output_path",
                'is "logs/$JOB", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"wandb": {"enabled": True, "project": "{{ project }}"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "wandb.project",
                'is "{{ project }}", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"wandb": {"enabled": True, "team": "<your team>"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "wandb.team",
                'is "<your team>", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"zero_optimization.offload_optimizer.device": "cpu"},
        [
            Said(
                "DS013",
                "error",
                "differs",
                "zero_optimization.offload_optimizer.device",
                "is one key with dots in its name: DeepSpeed ignores it in silence",
                'Write sections inside each other: {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}.',
            ),
        ],
    ),
    (
        {"tensorboard": {"enabled": False, "output_path": "runs", "_why": "x"}},
        [
            Said(
                "DS014",
                "note",
                "",
                "tensorboard",
                "is off (enabled is false), and so without effect: output_path",
                "Set tensorboard.enabled to true, or remove the section.",
            ),
        ],
    ),
    ({"bf16": {"loss": 1}}, []),
    ({"csv_monitor": {"_note": "x", "enabled": False}}, []),
    (
        {"expert_parallel": {"autoep_size": 1}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "expert_parallel",
                "is off without enabled, and so without effect: autoep_size",
                "Set expert_parallel.enabled to true, or remove the section.",
                ((("add", "expert_parallel.enabled", True),), False),
            ),
        ],
    ),
    (
        {"autotuning": {"fast": False}},
        [
            Said(
                "DS014",
                "warning",
                "",
                "autotuning",
                "is off without enabled, and so without effect: fast",
                "Set autotuning.enabled to true, or remove the section.",
                ((("add", "autotuning.enabled", True),), False),
            ),
        ],
    ),
    ({"outer": {"steps_per_print": 1}}, []),
    (
        {"outer": {"steps_per_print": 1, "dump_state": True, "bf16": {}, "fp16": {}}},
        [
            Said(
                "DS015",
                "warning",
                "",
                "outer",
                "holds 4 of DeepSpeed's own keys (steps_per_print, dump_state, bf16)",
                "Move them to the top level: DeepSpeed looks for them there.",
                (
                    (
                        ("move", "outer.steps_per_print", "steps_per_print"),
                        ("move", "outer.dump_state", "dump_state"),
                        ("move", "outer.bf16", "bf16"),
                        ("move", "outer.fp16", "fp16"),
                    ),
                    False,
                ),
            ),
        ],
    ),
    ({"_bare": True, "_for": "lightning", "architectures": ["X"]}, []),
    (
        {"_bare": True, "_for": "lightning", "output_dir": "x", "learning_rate": 1, "num_hidden_layers": 2},
        [
            Said(
                "DS016",
                "warning",
                "",
                "output_dir",
                "none of DeepSpeed's keys is here: it looks like HF's TrainingArguments",
                "A deepspeed.json has keys such as train_micro_batch_size_per_gpu and zero_optimization.",
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True, "output_path": "~"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "csv_monitor.output_path",
                'is "~", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True, "job_name": "a <b>"}},
        [
            Said(
                "DS017",
                "warning",
                "",
                "csv_monitor.job_name",
                'is "a <b>", which nobody fills in',
                "Write the value itself.",
            ),
        ],
    ),
    ({"csv_monitor": {"enabled": True, "job_name": "~you/a"}}, []),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "$TMP/nv"}}}, []),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True}}, []),
    ({"zero_optimization": {"stage": 3, "stage3_gather_fp16_weights_on_model_save": True}}, []),
    ({"zero_optimization": {"stage": 1, "allgather_bucket_size": 500000000}}, []),
    ({"zero_optimization": {"stage": 1}}, []),
    ({"pipeline": {"activation_checkpoint_interval": 1}}, []),
    ({"pipeline": {"pipe_partitioned": False}}, []),
    ({"zero_optimization": {"stage": 3}}, []),
    ({"_zero_optimization.stage": 3}, []),
    ({"tensorboard": {"enabled": True, "output_path": "runs"}}, []),
    ({"flops_profiler": {}}, []),
    ({"csv_monitor": {"enabled": False}}, []),
    ({"fp16": {"loss_scale": 0}}, []),
    ({"comms_logger": {"verbose": True}}, []),
    ({"zero_optimization": {"stage": 2}, "steps_per_print": 10}, []),
    ({"_old": {"bf16": {"enabled": True}, "steps_per_print": 10}}, []),
    ({"steps_per_print": 10}, []),
    ({"_bare": True, "_for": "lightning", "wall_clock_breakdown": True}, []),
    ({"tensorboard": {"enabled": True, "output_path": "runs/a~b"}}, []),
    ({"wandb": {"enabled": True, "project": "cost in $"}}, []),
    ({"_comment": "${HOME} and <this> are free here"}, []),
]


def said(given):
    """What this module's rules say of a config, as Said."""
    for found in run(*example(given)):
        if found.rule in OWN:
            fix = found.fix and (tuple(tuple(edit) for edit in found.fix.edits), found.fix.safe)
            yield Said(
                found.rule, found.severity, found.effect, found.path, found.message, found.suggestion, fix
            )


@pytest.mark.parametrize(("given", "expected"), CASES)
def test_said(given, expected):
    assert list(said(given)) == expected


def test_every_rule_is_seen():
    assert {found.rule for _, expected in CASES for found in expected} == OWN
