"""DS730 and DS731: activation checkpointing, which waits for the training code."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import removal
from dsrun.config.rules.effects import known_keys
from dsrun.config.rules.examples import hf
from dsrun.config.rules.frame import Context, Hit, rule

ACTIVATIONS = "activation_checkpointing"


@rule(
    "DS730",
    "note",
    bad=[
        {"activation_checkpointing": {"partition_activations": True}},
        hf(activation_checkpointing={"cpu_checkpointing": True}),
        {"_for": "accelerate", "activation_checkpointing": {"number_checkpoints": 4}},
    ],
    good=[
        {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
        {"_for": "lightning", "activation_checkpointing": {"partition_activations": True}},
        {"activation_checkpointing": {}},
    ],
)
def activation_checkpointing_without_its_call(context: Context) -> Iterator[Hit]:
    """It waits for deepspeed.checkpointing.configure (runtime/activation_checkpointing/checkpointing.py).

    HF Trainer never calls it: a model's own checkpointing knows nothing of the section. Lightning does.
    """
    rest = [key for key in known_keys(context, ACTIVATIONS) if context.get(f"{ACTIVATIONS}.{key}")]
    if not rest or context.target == "lightning":
        return
    if context.by_trainer:
        yield Hit(
            ACTIVATIONS,
            f"has no effect under HF Trainer: {', '.join(rest)}",
            "Remove it, and set gradient_checkpointing in the TrainingArguments.",
            removal(context, ACTIVATIONS),
            severity="warning",
        )
    else:
        yield Hit(
            ACTIVATIONS,
            f"acts only if the code calls deepspeed.checkpointing.configure: {', '.join(rest)}",
            "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
        )


@rule(
    "DS731",
    "warning",
    bad=[
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
        {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
    ],
    good=[
        {
            "activation_checkpointing": {
                "contiguous_memory_optimization": True,
                "partition_activations": True,
                "number_checkpoints": 4,
            }
        },
        {"activation_checkpointing": {"contiguous_memory_optimization": False}},
        hf(activation_checkpointing={"contiguous_memory_optimization": True}),
    ],
)
def contiguous_activations(context: Context) -> Iterator[Hit]:
    """configure() stops without the two others (runtime/activation_checkpointing/checkpointing.py)."""
    path = f"{ACTIVATIONS}.contiguous_memory_optimization"
    if not context.flag(path) or context.by_trainer:
        return
    missing = []
    if not context.flag(f"{ACTIVATIONS}.partition_activations"):
        missing.append("partition_activations")
    if context.get(f"{ACTIVATIONS}.number_checkpoints") is None:
        missing.append("number_checkpoints")
    if missing:
        text = f"needs {' and '.join(missing)}, or deepspeed.checkpointing.configure fails"
        yield Hit(path, text, "Set what is missing, or set it to false.")
