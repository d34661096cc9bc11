"""Loading the model into the ranks, under every ZeRO stage."""

from __future__ import annotations

import logging
from typing import Any

from dsrun.errors import DsrunError
from dsrun.jobs.job import Job

logger = logging.getLogger(__name__)
DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def load_tokenizer(job: Job) -> Any:
    """The tokenizer of the prepared model folder; pads with the end token where it has no pad token."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job.prepared.model_dir, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(job: Job) -> tuple[Any, Any]:
    """The model in the job's precision, and an object that must stay alive as long as the model.

    Under ZeRO-3 transformers looks for a living HfDeepSpeedConfig and then partitions every parameter as it is
    made (zero.Init), so that no rank ever holds the whole model; `None` otherwise.
    Raises DsrunError if the checkpoint's keys are not the model's.
    """
    import torch
    from transformers import AutoModelForCausalLM

    keep_alive = None
    if job.zero_stage == 3:
        from transformers.integrations import HfDeepSpeedConfig

        keep_alive = HfDeepSpeedConfig(job.ds_config)
    model, info = AutoModelForCausalLM.from_pretrained(
        job.prepared.model_dir,
        dtype=getattr(torch, DTYPES[job.precision]),
        attn_implementation="sdpa",
        output_loading_info=True,
    )
    _check_loaded(job, info)
    model.config.use_cache = False
    if job.training.gradient_checkpointing:
        # Recomputing without re-entrance compares tensor shapes, and ZeRO-3 has taken the weights apart by then.
        model.gradient_checkpointing_enable({"use_reentrant": job.zero_stage == 3})
        model.enable_input_require_grads()
    model.train()
    return model, keep_alive


def _check_loaded(job: Job, info: dict[str, Any]) -> None:
    """transformers only warns when weights are missing and goes on with random ones; here that is an error."""
    faults = {
        name: sorted(str(key) for key in info.get(name) or [])
        for name in ("missing_keys", "mismatched_keys", "error_msgs")
    }
    wrong = [f"{name.replace('_', ' ')}: {', '.join(keys[:5])}" for name, keys in faults.items() if keys]
    if wrong:
        raise DsrunError(
            f"the weights do not fit the config ({'; '.join(wrong)})",
            where=job.prepared.model_dir,
            hint="Training would start from random weights. Is the download complete, and config.json its own?",
        )
    unexpected = sorted(str(key) for key in info.get("unexpected_keys") or [])
    if unexpected:
        logger.warning("weights that the model does not use: %s", ", ".join(unexpected[:10]))
