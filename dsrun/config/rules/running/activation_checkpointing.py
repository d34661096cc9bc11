"""DS730 and DS731: activation checkpointing, which waits for the training code."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import removal
from dsrun.config.rules.examples import hf
from dsrun.config.rules.file.effects import known_keys
from dsrun.config.rules.frame import Context, Finding, bad, good, rule

ACTIVATIONS = "activation_checkpointing"


@rule("DS730", "warning")
@bad(
    {"activation_checkpointing": {"partition_activations": True}},
    hf(activation_checkpointing={"cpu_checkpointing": True}),
)
@good(
    {"activation_checkpointing": {"partition_activations": False, "number_checkpoints": None}},
    {"_for": "lightning", "activation_checkpointing": {"partition_activations": True}},
)
def activation_checkpointing_needs_code(context: Context) -> Iterator[Finding]:
    """It needs a call of deepspeed.checkpointing.configure (runtime/activation_checkpointing/checkpointing.py).

    HF Trainer never calls it: a model's own checkpointing ignores the section. Lightning does. Elsewhere the code may,
    and this is a note.
    """
    rest = [key for key in known_keys(context, ACTIVATIONS) if context.get(f"{ACTIVATIONS}.{key}")]
    if not rest or context.target == "lightning":
        return
    if context.by_trainer:
        yield Finding(
            ACTIVATIONS,
            f"has no effect under HF Trainer: {', '.join(rest)}",
            "Remove it, and set gradient_checkpointing in the TrainingArguments.",
            removal(context, ACTIVATIONS, safe=False),
        )
    else:
        yield Finding(
            ACTIVATIONS,
            f"acts only if the code calls deepspeed.checkpointing.configure: {', '.join(rest)}",
            "Call it with this config, and wrap the layers in deepspeed.checkpointing.checkpoint.",
            severity="note",
        )


@rule("DS731", "warning")
@bad(
    {"activation_checkpointing": {"contiguous_memory_optimization": True, "number_checkpoints": 4}},
    {"activation_checkpointing": {"contiguous_memory_optimization": True, "partition_activations": True}},
)
@good(
    {
        "activation_checkpointing": {
            "contiguous_memory_optimization": True,
            "partition_activations": True,
            "number_checkpoints": 4,
        }
    },
    {"activation_checkpointing": {"contiguous_memory_optimization": False}},
)
def contiguous_activations(context: Context) -> Iterator[Finding]:
    """configure() stops without the other two (runtime/activation_checkpointing/checkpointing.py)."""
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
        yield Finding(path, text, "Set what is missing, or set it to false.")
