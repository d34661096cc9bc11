"""What finetune takes, and plan plans for, where nobody says anything."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "preset": "zero2",
    "prompt_column": "content",
    "response_column": "summary",
    "max_source_length": 64,
    "max_target_length": 64,
    "micro_batch": 4,
    "grad_accum": 1,
    "lr": 1e-4,
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "epochs": 3.0,
    "seed": 42,
    "eval_steps": None,
    "save_steps": 1000,
    "keep_checkpoints": 2,
    "generate_rows": 100,
    "score_before": False,
    "gradient_checkpointing": False,
}
"""What is taken where neither the user nor the model file says anything: the field's values for ChatGLM2."""
