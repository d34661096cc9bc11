"""One of four ranks on two hosts, as it is told: a model takes steps under zero3 and zero3-hpz; the first prints."""

from __future__ import annotations

import json
import sys
from collections import Counter
from types import SimpleNamespace

import torch
import torch.distributed as dist

RANKS, HOSTS, EXAMPLES, STEPS, LR = 4, 2, 2, 5, 0.3
AT_ONCE = tuple(
    f"zero_optimization.{name}=0"
    for name in (
        "stage3_param_persistence_threshold", "stage3_max_reuse_distance", "stage3_max_live_parameters",
        "stage3_prefetch_bucket_size",
    )
)  # fmt: skip
"""Weights are released after each use: what stays gathered is not fetched from anywhere."""
OTHER_SIZES = (
    "zero_optimization.reduce_bucket_size=3000", "zero_optimization.stage3_prefetch_bucket_size=7000",
    *AT_ONCE[:3],
)  # fmt: skip


def model(*, frozen: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=2,
        use_cache=False,
    )  # fmt: skip
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    for name, weight in made.named_parameters():
        weight.requires_grad = not frozen or "proj" not in name
    return made


def train(preset: str, way: str) -> None:
    import deepspeed

    from dsrun.config.presets.build import Options, build_config
    from dsrun.jobs.assembly.checks.optimizers import with_optimizer
    from dsrun.options.table import ParallelismOptions, PeftOptions
    from dsrun.training.engines import deepspeed as backend

    options = Options(
        gpus=RANKS // HOSTS, nodes=HOSTS, precision="fp32", micro_batch=EXAMPLES, lr=LR, grad_clip=0.5,
        overrides=OTHER_SIZES if way == "sizes" else AT_ONCE,
    )  # fmt: skip
    config, params = with_optimizer(build_config(preset, options), "sgd", 32)
    job = SimpleNamespace(
        training=SimpleNamespace(optimizer="sgd", optimizer_params=params, lr=LR), ds_config=config.ds_config,
        dp_size=RANKS, world_size=RANKS, grad_accum=1, precision="fp32", accelerator="cpu", zero_stage=3,
        parallel=ParallelismOptions(), peft=PeftOptions(),
    )  # fmt: skip
    gathers: Counter[int] = Counter()
    partitioned = deepspeed.runtime.zero.partition_parameters
    own = partitioned._dist_allgather_fn

    def counted(part: torch.Tensor, whole: torch.Tensor, group: object = None):
        gathers[dist.get_world_size(group)] += 1
        return own(part, whole, group)

    partitioned._dist_allgather_fn = counted
    engine = backend.initialize(job, model(frozen=way == "frozen"))
    losses = []
    copies = 0
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        ids = torch.randint(1, 64, (RANKS * EXAMPLES, 9), generator=generator)
        ids = ids[EXAMPLES * dist.get_rank() :][:EXAMPLES]
        loss = engine(input_ids=ids, labels=ids).loss / RANKS
        copies += sum(one.ds_secondary_tensor is not None for one in engine.module.parameters())
        engine.backward(loss)
        engine.step()
        whole = loss.detach().clone()
        dist.all_reduce(whole)
        losses.append(float(whole))
    engine.eval()
    with torch.no_grad():
        evaluation = float(engine(input_ids=torch.arange(1, 10)[None], labels=torch.arange(1, 10)[None]).loss)
    weights = engine.full_weights([name for name, _ in engine.module.named_parameters()])
    partitioned._dist_allgather_fn = own
    if dist.get_rank() == 0:
        total = sum(float(one.double().abs().sum()) for one in weights.values())
        result = {
            "case": f"{preset}:{way}", "losses": losses, "evaluation": evaluation, "weights": total,
            "gathers": dict(gathers), "copies": copies,
            "size": config.ds_config["zero_optimization"].get("zero_hpz_partition_size", 1),
        }  # fmt: skip
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for case in sys.argv[1:]:
        train(*case.split(":"))
    dist.barrier()
    dist.destroy_process_group()
