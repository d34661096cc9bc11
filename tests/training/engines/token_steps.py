"""One of two ranks: a few steps by a budget of tokens under presets; the first rank prints their losses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

RANKS, STEPS, TOKENS, ROOM, LR, SEED, CLIP = 2, 5, 40, 14, 1e-2, 5, 0.5
"""ROOM: of a micro batch. The examples are so short and the room so small that steps have other numbers of micro-steps
than one another, and some ranks nothing in one."""
LENGTHS = [(4, 10), (3, 10), (2, 11), (4, 9), (5, 9), (6, 8), (2, 12), (1, 13), (1, 2), (2, 2), (3, 3)]


def examples(folder: Path) -> Any:
    import pyarrow as pa

    from dsrun.training.data.batches import Examples

    names = ("input_ids", "prompt_tokens", "prompt", "response")
    ids = [
        [(7 * number + 3 * token) % 60 + 1 for token in range(sum(one))] for number, one in enumerate(LENGTHS)
    ]
    columns = [
        pa.array(ids, pa.list_(pa.int32())), pa.array([one[0] for one in LENGTHS], pa.int32()),
        pa.array(["q"] * len(LENGTHS)), pa.array(["a"] * len(LENGTHS)),
    ]  # fmt: skip
    table = pa.table(dict(zip(names, columns, strict=True)))
    path = folder / f"examples-{dist.get_rank() if dist.is_initialized() else 'alone'}.arrow"
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return Examples(path)


def model() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def train(preset: str, folder: Path) -> None:
    from dsrun.config.presets.build import Options, build_config
    from dsrun.job.job import FsdpSpec
    from dsrun.options.table import ParallelismOptions, PeftOptions
    from dsrun.training import loop
    from dsrun.training.data.ahead import made_ahead
    from dsrun.training.data.packing import packing_for
    from dsrun.training.data.token_budget import TokenPlan
    from dsrun.training.engines import backend_of
    from dsrun.training.loss_check import LossCheck
    from dsrun.training.models.experts import ExpertLoad

    sharded, config = None, {}
    if preset.startswith("fsdp"):
        sharded = FsdpSpec(
            micro_batch=1,
            grad_accum=2,
            grad_clip=CLIP,
            shard_ranks=RANKS,
            whole_gradients=preset == "fsdp-whole",
        )
    else:
        options = Options(
            gpus=RANKS, precision="fp32", micro_batch=1, grad_accum=2, lr=LR, grad_clip=CLIP,
            overrides=("optimizer.params.torch_adam=true", "optimizer.params.weight_decay=0.1"),
        )  # fmt: skip
        config = build_config(preset, options).ds_config
    job = SimpleNamespace(
        training=SimpleNamespace(
            optimizer="adamw", lr=LR, lr_schedule="constant", warmup_steps=0, seed=SEED, loss="token-mean",
            tokens_per_batch=TOKENS, save_steps=99, optimizer_params={"weight_decay": 0.1},
        ),
        fsdp=sharded,
        ds_config=config, world_size=RANKS, dp_size=RANKS, grad_accum=2, precision="fp32", accelerator="cpu",
        zero_stage=config.get("zero_optimization", {}).get("stage", 0), peft=PeftOptions(),
        parallel=ParallelismOptions(),
    )  # fmt: skip
    lines: list[dict[str, Any]] = []
    trainer = loop.Trainer.__new__(loop.Trainer)
    trainer.job, trainer.engine, trainer.rank, trainer.total_steps = (
        job,
        backend_of(job).initialize(job, model()),
        dist.get_rank(),
        STEPS,
    )
    trainer.dp_index, trainer.train_examples = trainer.rank, examples(folder)
    trainer.tokenizer = SimpleNamespace(pad_token_id=0)
    trainer.packing = packing_for(trainer.engine)
    trainer.plan = TokenPlan(
        trainer.train_examples, SEED, RANKS, tokens=TOKENS, room=ROOM, packing=trainer.packing
    )
    trainer.report = SimpleNamespace(metrics=lambda **fields: lines.append(fields))
    trainer.requests, trainer.loss_check = loop.Requests(folder), LossCheck(job)
    trainer.experts = ExpertLoad(trainer.engine.module, trainer.engine.device)
    made = made_ahead(trainer._make, range(STEPS), trainer.engine.device)
    counts = [len(trainer.plan.step(step, 0).micro_batches) for step in range(STEPS)]
    idle = sum(
        not some
        for rank in range(RANKS)
        for step in range(STEPS)
        for some in trainer.plan.step(step, rank).micro_batches
    )
    for step in range(STEPS):
        trainer._step(step, made)
    if dist.get_rank() == 0:
        result = {
            "preset": preset,
            "losses": [line["loss"] for line in lines],
            "counts": counts,
            "idle": idle,
        }
        print(json.dumps(result | {"norms": [line["grad_norm"] for line in lines]}), flush=True)


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for name in sys.argv[2:]:
        train(name, Path(sys.argv[1]))
    dist.destroy_process_group()
