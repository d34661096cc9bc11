"""Loading the model into the ranks, under every ZeRO stage."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
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


def load_model(job: Job, attention: str = "sdpa") -> tuple[Any, Any]:
    """The model in the job's precision, and an object that must stay alive as long as the model.

    Every weight goes straight from its mapped shard to where it belongs: to the rank's device, or under ZeRO-3 into
    the ranks' parts of it, read by the first rank alone. The object is the HfDeepSpeedConfig by which transformers
    knows of ZeRO-3; `None` otherwise. attention: transformers' name of an implementation.
    Where the job trains an adapter it is there, and nothing else has a gradient.
    Raises DsrunError if the checkpoint's keys and shapes are not the model's.
    """
    model, keep_alive = _load_quantised(job) if job.tuning.method == "qlora" else _load_whole(job, attention)
    if job.tuning.freezes:
        from dsrun.training.adapters import put_on

        put_on(model, job)
    model.config.use_cache = False
    if job.training.gradient_checkpointing:
        # Recomputing without re-entrance compares tensor shapes, and ZeRO-3 has taken the weights apart by then.
        model.gradient_checkpointing_enable({"use_reentrant": job.zero_stage == 3})
        model.enable_input_require_grads()
    model.train()
    return model, keep_alive


def _load_quantised(job: Job) -> tuple[Any, Any]:
    import torch

    from dsrun.training.adapters import plain_base, quantise

    model = plain_base(job)
    quantise(model, _device(job), getattr(torch, DTYPES[job.precision]))
    return model, None


def _load_whole(job: Job, attention: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig

    from dsrun.training.weights import Skeleton

    dtype = getattr(torch, DTYPES[job.precision])
    folder = Path(job.prepared.model_dir)
    config = AutoConfig.from_pretrained(folder)
    skeleton, stored = None, None
    if getattr(config, "quantization_config", None) is None:
        skeleton = Skeleton(config, dtype, attn_implementation=attention)
        stored = _stored(job, folder, skeleton, config)
    if skeleton is None or stored is None:
        model, keep_alive = _load_otherwise(job, dtype, attention)
    else:
        model = skeleton.model
        if job.zero_stage == 3:
            first = torch.distributed.get_rank() == 0
            skeleton.fill_partitioned(stored, _device(job), job.ds_config, reads=first)
        else:
            skeleton.fill(stored, _device(job))
        _set_generation(model, folder)
        keep_alive = _zero3_config(job)
    return model, keep_alive


def _device(job: Job) -> Any:
    import torch

    return (
        torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        if job.accelerator == "cuda"
        else torch.device("cpu")
    )


def _stored(job: Job, folder: Path, skeleton: Any, config: Any) -> Any:
    """Where each weight lies; None where names differ in a way that only transformers knows."""
    from dsrun.training.weights import listed, mis_shaped

    if job.model.source == "chatglm":
        from dsrun.training.chatglm import checked_weights

        return checked_weights(Path(job.model.location), skeleton, config)
    stored = listed(folder)
    if wrong := mis_shaped(stored, skeleton.wanted):  # under ZeRO-3 transformers doesn't look
        raise DsrunError([Problem(wrong, str(folder), "Is config.json the checkpoint's own?")])
    return stored if skeleton.fits(stored) else None


def _zero3_config(job: Job) -> Any:
    if job.zero_stage < 3:
        return None
    from transformers.integrations import HfDeepSpeedConfig

    return HfDeepSpeedConfig(job.ds_config)


def _set_generation(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _load_otherwise(job: Job, dtype: Any, attention: str) -> tuple[Any, Any]:
    """transformers' own loading, for checkpoints with other names than the model's, or quantised ones.

    Under ZeRO-3 it looks for a living HfDeepSpeedConfig and then partitions every parameter as it is made.
    """
    from transformers import AutoModelForCausalLM

    keep_alive = _zero3_config(job)
    model, info = AutoModelForCausalLM.from_pretrained(
        job.prepared.model_dir, dtype=dtype, attn_implementation=attention, output_loading_info=True
    )
    _check_loaded(job, info)
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
