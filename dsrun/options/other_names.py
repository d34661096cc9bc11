"""Other trainers' and launchers' names for options of dsrun: an unknown option is answered with ours."""

from __future__ import annotations

from collections.abc import Iterable

OTHER_NAMES = {
    # TrainingArguments, LLaMA-Factory, ms-swift
    "batch_size": "global_batch",
    "cutoff_len": "max_length",
    "data": "train_file",
    "data_path": "train_file",
    "dataset": "train_file",
    "finetuning_type": "method",
    "gradient_accumulation_steps": "grad_accum",
    "gradient_checkpointing": "activation_checkpointing",
    "learning_rate": "lr",
    "lora_r": "lora_rank",
    "lr_scheduler_type": "lr_schedule",
    "max_grad_norm": "grad_clip",
    "max_seq_length": "max_length",
    "model_name_or_path": "model_path",
    "num_epochs": "epochs",
    "num_train_epochs": "epochs",
    "optim": "optimizer",
    "per_device_train_batch_size": "micro_batch",
    "quantization_bit": "method",
    "report_to": "log",
    "tensorboard": "log",
    "wandb": "log",
    "resume_from_checkpoint": "resume",
    "save_total_limit": "keep_checkpoints",
    "train_batch_size": "global_batch",
    "train_type": "method",
    "val_dataset": "eval_file",
    "validation_file": "eval_file",
    # deepspeed, torchrun, accelerate
    "bf16": "precision",
    "fp16": "precision",
    "gpu_ids": "devices",
    "main_process_port": "master_port",
    "mixed_precision": "precision",
    "nnodes": "nodes",
    "nproc_per_node": "gpus",
    "num_gpus": "gpus",
    "num_machines": "nodes",
    "num_nodes": "nodes",
    "num_processes": "gpus",
    "tensor_parallel_size": "tp",
}
"""Their name, with underscores, -> the name of a field in dsrun/options."""


def ours(option: str, fields: Iterable[str]) -> str | None:
    """The field of a command that an unknown option means; None where no tool has an option of that name."""
    name = option.lstrip("-").replace("-", "_")
    field = OTHER_NAMES.get(name, name)
    return field if field in fields else None
