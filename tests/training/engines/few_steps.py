"""One of two ranks: optimizers of finetune's take a few steps under presets; the first rank prints what came of it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist

RANKS, EXAMPLES, STEPS, LR, HIDDEN = 2, 4, 4, 1e-2, 16


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    layers = {
        "embed": torch.nn.Embedding(32, HIDDEN), "up": torch.nn.Linear(HIDDEN, 24), "act": torch.nn.Tanh(),
        "down": torch.nn.Linear(24, HIDDEN), "lm_head": torch.nn.Linear(HIDDEN, 32, bias=False),
    }  # fmt: skip
    return torch.nn.Sequential(torch.nn.modules.container.OrderedDict(layers))


def batches() -> list[torch.Tensor]:
    """Of all ranks together, a step each."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 32, (RANKS * EXAMPLES, 6), generator=generator) for _ in range(STEPS)]


def loss_of(logits: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 32), (batch * 7 % 32).reshape(-1))


def train(optimizer: str, preset: str) -> None:
    from dsrun.config.presets.build import Options, build_config
    from dsrun.jobs.assembly.checks.optimizers import with_optimizer
    from dsrun.options.table import ParallelismOptions, PeftOptions
    from dsrun.training.engines import deepspeed

    options = Options(
        gpus=RANKS, precision="fp32", micro_batch=EXAMPLES, lr=LR, grad_clip=0.0,
        overrides=("optimizer.params.torch_adam=true", "optimizer.params.weight_decay=0.1"),
    )  # fmt: skip
    config, params = with_optimizer(build_config(preset, options), optimizer, HIDDEN)
    job = SimpleNamespace(
        training=SimpleNamespace(optimizer=optimizer, optimizer_params=params, lr=LR),
        ds_config=config.ds_config, dp_size=RANKS, world_size=RANKS, grad_accum=1, precision="fp32", accelerator="cpu",
        parallel=ParallelismOptions(), peft=PeftOptions(),
        zero_stage=config.ds_config["zero_optimization"]["stage"],
    )  # fmt: skip
    engine = deepspeed.initialize(job, model())
    losses = []
    for batch in batches():
        own = batch[EXAMPLES * dist.get_rank() :][:EXAMPLES]
        engine.set_learning_rate(LR)
        loss = loss_of(engine(input=own), own) / RANKS
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    if dist.get_rank() == 0:
        result = {"optimizer": optimizer, "preset": preset, "losses": losses, "lr": engine.learning_rate()}
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for pair in sys.argv[1:]:
        train(*pair.split(":"))
    dist.destroy_process_group()
