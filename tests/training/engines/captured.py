"""One of two ranks: checkpoints saved at once, and of the same step captured and written two steps later.

The first rank prints, for each case, the digests of all files of both, and the losses of runs resumed from each.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from token_steps import model

from dsrun.options.table import NO_FP8

RANKS, SAVED, STEPS, LR, CLIP = 2, 2, 4, 1e-2, 0.5


def a_job(preset: str, precision: str, folder: Path) -> SimpleNamespace:
    from dsrun.config.presets.build import Options, build_config
    from dsrun.job.job import FsdpSpec
    from dsrun.options.table import ParallelismOptions, PeftOptions

    fsdp, config = None, {}
    if preset.startswith("fsdp"):
        copies = 2 if preset == "fsdp-hybrid" else 1
        fsdp = FsdpSpec(micro_batch=2, grad_accum=1, grad_clip=CLIP, shard_ranks=RANKS // copies)
    else:
        options = Options(
            gpus=RANKS, precision=precision, micro_batch=2, grad_accum=1, lr=LR, grad_clip=CLIP,
            overrides=("optimizer.params.torch_adam=true",),
        )  # fmt: skip
        config = build_config(preset, options).ds_config
    return SimpleNamespace(
        training=SimpleNamespace(
            optimizer="adamw", lr=LR, optimizer_params={"weight_decay": 0.1}, keep_checkpoints=9, async_save=True,
            fp8="rowwise" if preset == "fsdp-fp8" else NO_FP8,
        ),
        fsdp=fsdp, ds_config=config, world_size=RANKS, dp_size=RANKS, grad_accum=1, precision=precision,
        accelerator="cpu", zero_stage=config.get("zero_optimization", {}).get("stage", 0), peft=PeftOptions(),
        parallel=ParallelismOptions(), run_dir=str(folder), preset=preset,
    )  # fmt: skip


def steps(engine: Any, numbers: range) -> list[float]:
    losses = []
    for step in numbers:
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(3, 64, (RANKS * 2, 8), generator=generator)[2 * dist.get_rank() :][:2]
        loss = engine(input_ids=ids, labels=ids, use_cache=False).loss / RANKS
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone().float()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def digests(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def weights_of(job: SimpleNamespace, folder: Path) -> dict[str, str]:
    """The trained weights in a checkpoint, with their types."""
    from dsrun.training.engines import backend_of

    return {name: str(weight.dtype) for name, weight in backend_of(job).trained_weights(folder).items()}


def case(preset: str, precision: str, folder: Path) -> None:
    from dsrun.training import checkpoint
    from dsrun.training.engines import backend_of
    from dsrun.training.models.float8 import take_float8

    at_once, beside = (a_job(preset, precision, folder / name) for name in ("at once", "beside"))

    def started() -> Any:
        made = model()
        if not at_once.fsdp and precision == "bf16":
            made = made.to(torch.bfloat16)
        if at_once.training.fp8 != NO_FP8:
            take_float8(made, at_once)
        return backend_of(at_once).initialize(at_once, made)

    engine = started()
    steps(engine, range(SAVED))
    saved = checkpoint.save(engine, at_once, SAVED)
    pending = checkpoint.PendingSave(engine, beside, SAVED)
    marked_early = (pending.folder / "complete").exists()
    losses = steps(engine, range(SAVED, STEPS))
    pending.finish()
    resumed = {}
    for name, at in (("at once", saved), ("beside", pending.folder)):
        again = started()
        begun = checkpoint.load(again, at)
        resumed[name] = steps(again, range(begun, STEPS))
    if dist.get_rank() == 0:
        result = {
            "case": f"{preset}:{precision}", "saved": digests(saved), "beside": digests(pending.folder),
            "losses": losses, "resumed": resumed, "marked_early": marked_early, "weights": weights_of(at_once, saved),
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    dist.barrier()


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for words in sys.argv[2:]:
        preset, precision = words.split(":")
        case(preset, precision, Path(sys.argv[1], words.replace(":", "-")))
    dist.destroy_process_group()
