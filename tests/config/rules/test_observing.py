# ruff: noqa: E501 - texts stand here as they are shown
"""Monitors and profilers: what exactly is said of a config, and that nothing is said of its right neighbour."""

from __future__ import annotations

from typing import NamedTuple

import pytest

from dsrun.config.rules import observing, run
from dsrun.config.rules.frame import Rule, example

OWN = {rule.id for rule in vars(observing).values() if isinstance(rule, Rule)}


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
        {"tensorboard": {"enabled": True}},
        [
            Said(
                "DS710",
                "note",
                "",
                "tensorboard",
                "needs the package tensorboard, or the start fails",
                "Install it where the first rank runs: pip install tensorboard.",
            ),
            Said(
                "DS712",
                "note",
                "",
                "tensorboard.output_path",
                "is empty: every run writes to ./DeepSpeedJobName",
                "Set it to a folder of the run.",
            ),
        ],
    ),
    (
        {"wandb": {"enabled": True}},
        [
            Said(
                "DS710",
                "note",
                "",
                "wandb",
                "needs the package wandb, or the start fails",
                "Install it where the first rank runs: pip install wandb.",
            ),
        ],
    ),
    (
        {"comet": {"enabled": True}},
        [
            Said(
                "DS710",
                "note",
                "",
                "comet",
                "needs the package comet_ml, or the start fails",
                "Install it where the first rank runs: pip install comet_ml.",
            ),
        ],
    ),
    (
        {"comet": {"enabled": False, "api_key": "abc"}},
        [
            Said(
                "DS711",
                "warning",
                "",
                "comet.api_key",
                "is a secret in a file that others read",
                "Remove it, and export COMET_API_KEY.",
                ((("remove", "comet.api_key", None),), False),
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True}},
        [
            Said(
                "DS712",
                "note",
                "",
                "csv_monitor.output_path",
                "is empty: every run writes to ./DeepSpeedJobName",
                "Set it to a folder of the run.",
            ),
        ],
    ),
    (
        {"tensorboard": {"enabled": True, "output_path": "", "job_name": "mine"}},
        [
            Said(
                "DS710",
                "note",
                "",
                "tensorboard",
                "needs the package tensorboard, or the start fails",
                "Install it where the first rank runs: pip install tensorboard.",
            ),
            Said(
                "DS712",
                "note",
                "",
                "tensorboard.output_path",
                "is empty: every run writes to ./mine",
                "Set it to a folder of the run.",
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": False}},
        [
            Said(
                "DS713",
                "warning",
                "",
                "comms_logger",
                "is on, though enabled is false: the section alone turns it on, and every operation waits for the GPU",
                "Remove the section to turn it off.",
                ((("remove", "comms_logger", None),), True),
            ),
        ],
    ),
    (
        {"comms_logger": {"verbose": True}},
        [
            Said(
                "DS713",
                "warning",
                "",
                "comms_logger",
                "is on, though enabled is missing: the section alone turns it on, and every operation waits for the GPU",
                "Remove the section to turn it off.",
                ((("remove", "comms_logger", None),), False),
            ),
        ],
    ),
    (
        {"comms_logger": {}},
        [
            Said(
                "DS713",
                "warning",
                "",
                "comms_logger",
                "is on, though enabled is missing: the section alone turns it on, and every operation waits for the GPU",
                "Remove the section to turn it off.",
                ((("remove", "comms_logger", None),), False),
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": True, "prof_all": False}},
        [
            Said(
                "DS714",
                "warning",
                "",
                "comms_logger.prof_ops",
                "is empty and prof_all is false: nothing is logged",
                "Set prof_all to true, or name operations.",
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": []}},
        [
            Said(
                "DS714",
                "warning",
                "",
                "comms_logger.prof_ops",
                "is empty and prof_all is false: nothing is logged",
                "Set prof_all to true, or name operations.",
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["allreduce"]}},
        [
            Said(
                "DS714",
                "warning",
                "",
                "comms_logger.prof_ops",
                '"allreduce" is no operation: nothing is logged for it',
                "Did you mean all_reduce?",
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce", "ring"]}},
        [
            Said(
                "DS714",
                "warning",
                "",
                "comms_logger.prof_ops",
                '"ring" is no operation: nothing is logged for it',
                "There are: all_gather, all_gather_into_tensor, all_gather_object, all_reduce, all_reduce_coalesced, all_to_all, all_to_all_single, barrier, batch_isend_irecv, broadcast, broadcast_object_list, gather, inference_all_reduce, irecv, isend, log_summary_barrier, monitored_barrier, recv, reduce, reduce_scatter, reduce_scatter_tensor, scatter, send.",
            ),
        ],
    ),
    (
        {"wall_clock_breakdown": True},
        [
            Said(
                "DS715",
                "note",
                "",
                "wall_clock_breakdown",
                "makes each step wait for the GPU several times",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"memory_breakdown": True},
        [
            Said(
                "DS715",
                "note",
                "",
                "memory_breakdown",
                "prints the memory several times a step",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"flops_profiler": {"enabled": True}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 5}, "flops_profiler": {"enabled": True, "profile_step": 5}},
        [
            Said(
                "DS716",
                "warning",
                "",
                "flops_profiler.profile_step",
                "5 is never reached: max_steps is 5, and the first step is 0",
                "Set it to at most 4.",
            ),
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 1}, "flops_profiler": {"enabled": True}},
        [
            Said(
                "DS716",
                "warning",
                "",
                "flops_profiler.profile_step",
                "1 is never reached: max_steps is 1, and the first step is 0",
                "Set it to at most 0.",
            ),
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "steps_per_print": 10},
        [
            Said(
                "DS717",
                "note",
                "",
                "steps_per_print",
                "10 has no effect: accelerate turns DeepSpeed's own printing off",
                "Set logging_steps in the TrainingArguments instead.",
                ((("remove", "steps_per_print", None),), True),
            ),
        ],
    ),
    (
        {"_for": "accelerate", "steps_per_print": 2000},
        [
            Said(
                "DS717",
                "note",
                "",
                "steps_per_print",
                "2000 has no effect: accelerate turns DeepSpeed's own printing off",
                "Print in the code instead.",
                ((("remove", "steps_per_print", None),), True),
            ),
        ],
    ),
    (
        {"vocabulary_size": 50257},
        [
            Said(
                "DS718",
                "note",
                "",
                "vocabulary_size",
                "50257 is no multiple of 8, as tensor cores like it",
                "Pad the model's embedding to 50264; this key changes nothing.",
            ),
        ],
    ),
    (
        {"wall_clock_breakdown": "true"},
        [
            Said(
                "DS719",
                "error",
                "refused",
                "wall_clock_breakdown",
                'is "true", a text, and DeepSpeed stops at it',
                "Write true or false.",
            ),
            Said(
                "DS715",
                "note",
                "",
                "wall_clock_breakdown",
                "makes each step wait for the GPU several times",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"flops_profiler": {"enabled": "true"}},
        [
            Said(
                "DS719",
                "error",
                "refused",
                "flops_profiler.enabled",
                'is "true", a text, and DeepSpeed stops at it',
                "Write true or false.",
            ),
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "end_profile_step": 9}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 10",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "start_profile_step": 5, "end_profile_step": 5}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS721",
                "warning",
                "",
                "autotuning.end_profile_step",
                "5 leaves no step to measure after start_profile_step 5",
                "Set it to 7 or more.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "start_profile_step": 6}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS721",
                "warning",
                "",
                "autotuning.end_profile_step",
                "5 leaves no step to measure after start_profile_step 6",
                "Set it to 8 or more.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "end_profile_step": 3}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 4",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS721",
                "warning",
                "",
                "autotuning.end_profile_step",
                "3 leaves no step to measure after start_profile_step 3",
                "Set it to 5 or more.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "min_train_batch_size": 64, "max_train_batch_size": 32}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS722",
                "warning",
                "",
                "autotuning.min_train_batch_size",
                "64 is above max_train_batch_size 32",
                "Set it to at most 32.",
            ),
        ],
    ),
    (
        {
            "autotuning": {
                "enabled": True,
                "min_train_micro_batch_size_per_gpu": 8,
                "max_train_micro_batch_size_per_gpu": 4,
            }
        },
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS722",
                "warning",
                "",
                "autotuning.min_train_micro_batch_size_per_gpu",
                "8 is above max_train_micro_batch_size_per_gpu 4",
                "Set it to at most 4.",
            ),
        ],
    ),
    (
        {"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["zzz"]}},
        [
            Said(
                "DS714",
                "warning",
                "",
                "comms_logger.prof_ops",
                '"zzz" is no operation: nothing is logged for it',
                "There are: all_gather, all_gather_into_tensor, all_gather_object, all_reduce, all_reduce_coalesced, all_to_all, all_to_all_single, barrier, batch_isend_irecv, broadcast, broadcast_object_list, gather, inference_all_reduce, irecv, isend, log_summary_barrier, monitored_barrier, recv, reduce, reduce_scatter, reduce_scatter_tensor, scatter, send.",
            ),
        ],
    ),
    (
        {"csv_monitor": {"enabled": True, "job_name": "x"}},
        [
            Said(
                "DS712",
                "note",
                "",
                "csv_monitor.output_path",
                "is empty: every run writes to ./x",
                "Set it to a folder of the run.",
            ),
        ],
    ),
    (
        {"vocabulary_size": 1},
        [
            Said(
                "DS718",
                "note",
                "",
                "vocabulary_size",
                "1 is no multiple of 8, as tensor cores like it",
                "Pad the model's embedding to 8; this key changes nothing.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 3}, "flops_profiler": {"enabled": True, "profile_step": 7}},
        [
            Said(
                "DS716",
                "warning",
                "",
                "flops_profiler.profile_step",
                "7 is never reached: max_steps is 3, and the first step is 0",
                "Set it to at most 2.",
            ),
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 1}, "flops_profiler": {"enabled": True, "profile_step": 0}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "start_profile_step": 2, "end_profile_step": 1}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 2",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
            Said(
                "DS721",
                "warning",
                "",
                "autotuning.end_profile_step",
                "1 leaves no step to measure after start_profile_step 2",
                "Set it to 4 or more.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {}, "flops_profiler": {"enabled": True}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {
            "tensorboard": {"enabled": True, "output_path": "a"},
            "csv_monitor": {"enabled": True, "output_path": "b"},
        },
        [
            Said(
                "DS710",
                "note",
                "",
                "tensorboard",
                "needs the package tensorboard, or the start fails",
                "Install it where the first rank runs: pip install tensorboard.",
            ),
        ],
    ),
    ({"tensorboard": {"enabled": False}}, []),
    ({"csv_monitor": {"enabled": True, "output_path": "logs"}}, []),
    (
        {"comet": {"enabled": True, "project": "mine"}},
        [
            Said(
                "DS710",
                "note",
                "",
                "comet",
                "needs the package comet_ml, or the start fails",
                "Install it where the first rank runs: pip install comet_ml.",
            ),
        ],
    ),
    ({"comet": {"api_key": ""}}, []),
    ({"comet": {"api_key": None}}, []),
    ({"csv_monitor": {"enabled": False}}, []),
    ({"comms_logger": {"enabled": True}}, []),
    ({"_comms_logger": {"enabled": False}}, []),
    ({"comms_logger": {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"]}}, []),
    ({"comms_logger": {"enabled": True, "prof_all": True, "prof_ops": []}}, []),
    ({"comms_logger": {"enabled": True, "prof_ops": ["allreduce"]}}, []),
    ({"wall_clock_breakdown": False}, []),
    ({"memory_breakdown": False}, []),
    ({"flops_profiler": {"enabled": False}}, []),
    (
        {"_for": "hf", "_trainer": {"max_steps": 5}, "flops_profiler": {"enabled": True, "profile_step": 4}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 2}, "flops_profiler": {"enabled": True}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": -1}, "flops_profiler": {"enabled": True, "profile_step": 5}},
        [
            Said(
                "DS715",
                "note",
                "",
                "flops_profiler.enabled",
                "turns wall_clock_breakdown on too, for the whole run",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"_for": "hf", "_trainer": {"max_steps": 5}, "flops_profiler": {"enabled": False, "profile_step": 5}},
        [],
    ),
    ({"steps_per_print": 10}, []),
    ({"_for": "lightning", "steps_per_print": 10}, []),
    ({"_for": "hf", "wall_clock_breakdown": False}, []),
    ({"vocabulary_size": 50264}, []),
    ({"vocabulary_size": None}, []),
    (
        {"wall_clock_breakdown": 1},
        [
            Said(
                "DS715",
                "note",
                "",
                "wall_clock_breakdown",
                "makes each step wait for the GPU several times",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    (
        {"memory_breakdown": "true"},
        [
            Said(
                "DS715",
                "note",
                "",
                "memory_breakdown",
                "prints the memory several times a step",
                "Set it to false for the runs whose speed counts.",
            ),
        ],
    ),
    ({"autotuning": {"enabled": False}}, []),
    ({"autotuning": {"enabled": False, "end_profile_step": 9}}, []),
    ({"autotuning": {"enabled": False, "start_profile_step": 9}}, []),
    (
        {"autotuning": {"enabled": True, "start_profile_step": 4}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "end_profile_step": 4}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 5",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "min_train_batch_size": 32, "max_train_batch_size": 32}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
    (
        {"autotuning": {"enabled": True, "min_train_batch_size": 32}},
        [
            Said(
                "DS720",
                "warning",
                "",
                "autotuning.enabled",
                "ends every run after step 6",
                "Start with deepspeed --autotuning tune (or run), and remove it from the config that trains.",
            ),
        ],
    ),
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
