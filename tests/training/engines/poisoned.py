"""One of two ranks: a gradient that is no number comes from one rank in one step; the first rank prints what it did.

Each argument is PRESET:PRECISION:VALUE:CLIP. The line has the digests of all trained weights before and after the bad
step, and the losses.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from captured import a_job
from token_steps import model

GOOD, MICRO = 2, 2


def digest(engine: Any) -> str:
    names = [name for name, weight in engine.module.named_parameters() if weight.requires_grad]
    weights = engine.full_weights(names)
    whole = hashlib.sha256()
    for name in sorted(weights):
        whole.update(weights[name].float().numpy().tobytes())
    return whole.hexdigest()


def step(engine: Any, number: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(3, 64, (4, 8), generator=generator)[2 * dist.get_rank() :][:2]
    loss = engine(input_ids=ids, labels=ids, use_cache=False).loss / 2
    engine.backward(loss * (factor if dist.get_rank() == 1 else 1.0))
    engine.step()


def case(text: str) -> None:
    from dsrun.training.engines import backend_of

    preset, precision, value, clip = text.split(":")
    job = a_job(preset, precision, Path())
    if job.fsdp:
        from dataclasses import replace

        job.fsdp = replace(job.fsdp, grad_clip=float(clip))
    else:
        job.ds_config["gradient_clipping"] = float(clip)
    made = model()
    if not job.fsdp and precision != "fp32":
        made = made.to({"bf16": torch.bfloat16, "fp16": torch.float16}[precision])
    engine = backend_of(job).initialize(job, made)
    for number in range(GOOD):
        step(engine, number)
    before, skipped = digest(engine), engine.skipped_steps()
    step(engine, GOOD, float(value))
    after, more, norm = digest(engine), engine.skipped_steps(), engine.gradient_norm()
    step(engine, GOOD + 1)
    result = {
        "case": text, "same": before == after, "skipped": more - skipped, "norm": str(norm and float(norm)),
        "goes_on": digest(engine) != after, "not_finite": engine.non_finite(),
    }  # fmt: skip
    if dist.get_rank() == 0:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for text in sys.argv[1:]:
        case(text)
    dist.destroy_process_group()
