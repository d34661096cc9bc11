"""Sections of a DeepSpeed config that finetune's own loop doesn't do: refused, as they would do harm or nothing.

DeepSpeed takes most of them without a word. What each would need of the loop, the model or the data is said here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsrun.config import tree
from dsrun.errors import Problem

Config = Mapping[str, Any]


@dataclass(frozen=True)
class Technique:
    """A section, or a key of one."""

    path: str
    """Dotted, as --set takes it."""
    asked: Callable[[Any], bool]
    """Whether a value asks for it."""
    why: str
    """The need that finetune doesn't meet, as the end of "is ..., which"."""
    instead: str


def _more_than_one(value: Any) -> bool:
    return isinstance(value, int) and value > 1


def _enabled(section: Any) -> bool:
    return isinstance(section, Mapping) and section.get("enabled") is True


def _does_something(section: Any) -> bool:
    return isinstance(section, Mapping) and any(value not in (False, None, 0) for value in section.values())


OWN_SCRIPT = "Leave it out, or train with a script of your own under `dsrun launch`."
TECHNIQUES = (
    Technique(
        "tensor_parallel.autotp_size", _more_than_one,
        "needs ranks of one group to train on the same examples, and patterns for the model's layers",
        "Take --tp, which sees to both.",
    ),
    Technique(
        "tensor_parallel.tp.tp_size", _more_than_one,
        "needs ranks of one group to train on the same examples, and patterns for the model's layers",
        "Take --tp, which sees to both.",
    ),
    Technique(
        "sequence_parallel_size", _more_than_one,
        "changes nothing by itself: every sequence has to be divided, and attention to gather it",
        "Take --sp, which sees to both.",
    ),
    Technique(
        "pipeline", bool, "is read for a PipelineModule alone; finetune makes one under --pp, and divides it by layers",
        "Take --pp, and --activation-checkpointing.",
    ),
    Technique(
        "compile.deepcompile", bool, "acts after engine.compile() alone, which finetune doesn't call",
        "Leave it out: --compile compiles each layer.",
    ),
    Technique(
        "expert_parallel", _enabled,
        "needs checkpoints and exports with the experts of all ranks, and for transformers 5.23 another table of "
        "recorded outputs",
        "Take --ep, which sees to both.",
    ),
    Technique(
        "zero_optimization.zenflow", bool,
        "trains on transposed matrices at stage 2 from the first step on, and sets gradient_accumulation_steps to its "
        "update_interval (DeepSpeed 0.19.8)",
        "Leave it out.",
    ),
    Technique(
        "data_efficiency", _enabled, "takes DeepSpeed's own data loader; finetune samples and packs by itself",
        "Leave it out.",
    ),
    Technique(
        "hybrid_engine", _enabled, "is for training with answers that the model generates; finetune has none",
        "Leave it out.",
    ),
    Technique(
        "activation_checkpointing", _does_something,
        "is read by code that calls deepspeed.checkpointing; transformers' models don't",
        "Take --activation-checkpointing (full, selective, offload), and remove the section.",
    ),
    Technique(
        "checkpoint.load_universal", bool, "finetune needs nowhere: it reads its checkpoints on any number of ranks",
        "Leave it out: `dsrun resume RUN --gpus N`.",
    ),
)  # fmt: skip


def refusals(ds_config: Config, where: str) -> list[Problem]:
    """A problem for each that a config asks for. where: the preset's name or file."""
    return [
        Problem(f"{technique.path} {technique.why}", where, technique.instead)
        for technique in TECHNIQUES
        if technique.asked(tree.get(ds_config, technique.path))
    ]
