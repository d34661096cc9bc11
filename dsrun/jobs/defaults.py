"""What finetune takes, and plan plans for, where nobody says anything."""

from __future__ import annotations

from typing import Any

DEFAULTS: dict[str, Any] = {
    "preset": "zero2",
    "prompt_column": "content",
    "response_column": "summary",
    "history_column": "history",
    "data_format": "auto",
    "train_on_prompt": False,
    "strict_data": False,
    "official": False,
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
    "packing": True,
    "export_format": "transformers",
    "method": "full",
    # The rank is PEFT's default, and so is no dropout; alpha twice the rank is the field's habit.
    "lora_rank": 8,
    "lora_alpha": 16.0,
    "lora_dropout": 0.0,
    "lora_target": "all",
    # ChatGLM2's ptuning/train.sh and, for the dropout, its prefix encoder.
    "pre_seq_len": 128,
    "prefix_dropout": 0.1,
    "adapter": None,
    "optimizer": "adamw",
    "liger": None,
    "attention": "auto",
    "compute_metrics": False,
}
"""What is taken where neither the user nor the model file says anything: the field's values for ChatGLM2."""

METHODS: dict[str, dict[str, Any]] = {
    "full": {},
    # Of QLoRA's paper up to 13B (arXiv:2305.14314, B.2), and of LoRA's for GPT-2 and GPT-3 (arXiv:2106.09685, D).
    "lora": {"lr": 2e-4},
    "qlora": {"lr": 2e-4},
    # ChatGLM2's ptuning/train.sh.
    "ptuning": {"lr": 2e-2},
}
"""Methods, and what each takes where the user says nothing else."""

OFFICIAL: dict[str, Any] = {
    "max_source_length": 64,
    "max_target_length": 64,
    "micro_batch": 4,
    "grad_accum": 1,
    "grad_clip": 0.0,
    "lr": 1e-4,
    "lr_schedule": "linear",
    "warmup_steps": 0,
    "max_steps": 5000,
    "seed": 42,
    "save_steps": 1000,
    "gradient_checkpointing": True,
    "packing": False,
}
"""What --official takes where the user says nothing else: ChatGLM2's ptuning/ds_train_finetune.sh, and what the Trainer
does where that is silent."""

OFFICIAL_PTUNING: dict[str, Any] = {
    **OFFICIAL,
    "micro_batch": 1,
    "grad_accum": 16,
    "lr": 2e-2,
    "max_steps": 3000,
}
"""The same with P-Tuning: ChatGLM2's ptuning/train.sh. Its 4-bit weights are not repeated."""
