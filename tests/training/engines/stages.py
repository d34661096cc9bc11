"""One of two or four ranks: models in two pipeline stages take a few steps; the first rank prints what came of it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist

from dsrun.options.table import ComputeOptions, ParallelismOptions
from dsrun.training.loss import StepTotals

STAGES, MICRO_STEPS, STEPS, SAVED, LR, CLIP, VOCABULARY = 2, 2, 4, 2, 0.1, 0.5, 64
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
KINDS = ("llama", "mistral", "qwen2", "qwen3", "glm")


def model(kind: str, *, tied: bool) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    more = {"sliding_window": None} if kind == "mistral" else {}
    config = AutoConfig.for_model(kind, **SIZES, **more, tie_word_embeddings=tied, use_cache=False)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def step_batches(step: int, shares: int) -> list[dict[str, torch.Tensor]]:
    """A step's micro batches, of all shares; they differ in examples, in length and in what is trained on."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(shares * MICRO_STEPS):
        rows, length = (2, 9 + 2 * number) if number % 2 else (3, 12)
        ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + number] = -100
        labels[0, -2:] = -100  # as padding has it
        made.append({"input_ids": ids, "labels": labels})
    return made


def target_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def a_job(preset: str, way: str, folder: Path) -> SimpleNamespace:
    from dsrun.config.presets.build import Options, build_config
    from dsrun.jobs.assembly.checks.optimizers import with_optimizer

    ranks = dist.get_world_size()
    options = Options(
        gpus=ranks,
        precision="fp32",
        micro_batch=3,
        grad_accum=MICRO_STEPS,
        lr=LR,
        grad_clip=CLIP,
        group=STAGES,
    )
    config, params = with_optimizer(build_config(preset, options), "sgd", SIZES["hidden_size"])
    compute = ComputeOptions(activation_checkpointing=way)
    training = SimpleNamespace(
        optimizer="sgd", optimizer_params=params, lr=LR, recomputed=compute.recomputed,
        offloads_activations=False,
    )  # fmt: skip
    return SimpleNamespace(
        training=training, ds_config=config.ds_config, world_size=ranks, dp_size=ranks // STAGES,
        dp_index=lambda rank: rank % (ranks // STAGES), grad_accum=MICRO_STEPS, precision="fp32", accelerator="cpu",
        zero_stage=config.ds_config["zero_optimization"]["stage"], parallel=ParallelismOptions(pp=STAGES),
        peft=SimpleNamespace(freezes=False), prepared=SimpleNamespace(model_dir=str(folder)),
        model=SimpleNamespace(architecture={"num_hidden_layers": SIZES["num_hidden_layers"]}),
    )  # fmt: skip


def started(job: SimpleNamespace, kind: str, *, tied: bool):
    from dsrun.training.engines import pipeline
    from dsrun.training.models.load import recompute

    made = model(kind, tied=tied)
    if job.training.recomputed:
        recompute(made, job)
        made.enable_input_require_grads()
    return pipeline.initialize(job, made)


def steps(engine, job: SimpleNamespace, numbers: range) -> tuple[list[float], list[float]]:
    losses, norms = [], []
    for step in numbers:
        batches = step_batches(step, job.dp_size)
        totals = StepTotals(target_tokens(batches), len(batches))
        engine.set_learning_rate(LR)
        loss = engine.take_step(batches[job.dp_index(dist.get_rank()) :: job.dp_size], totals, None)
        dist.all_reduce(loss)
        losses.append(float(loss))
        norms.append(float(engine.gradient_norm()))
    return losses, norms


def evaluated(engine, job: SimpleNamespace) -> float:
    batches = step_batches(99, job.dp_size)
    engine.eval()
    with torch.no_grad():
        total = sum(
            float(engine(**batch, num_items_in_batch=target_tokens(batches), use_cache=False).loss)
            for batch in batches[job.dp_index(dist.get_rank()) :: job.dp_size]
        )
    engine.train()
    summed = torch.tensor(total)
    dist.all_reduce(summed)
    return float(summed) / STAGES


def train(kind: str, preset: str, way: str, tied: bool, folder: Path) -> None:
    from dsrun.training.engines import pipeline
    from dsrun.training.models.export import shards

    job = a_job(preset, way, folder)
    engine = started(job, kind, tied=tied)
    losses, norms = steps(engine, job, range(SAVED))
    at = folder / f"{kind}-{preset}-{way}-{tied}"
    engine.save(at, SAVED)
    dist.barrier()
    written_by = {path.name: pipeline.rank_of(job, path) for path in at.glob("*")}
    evaluation = evaluated(engine, job)
    more, more_norms = steps(engine, job, range(SAVED, STEPS))
    weights = engine.full_weights([name for names in shards(engine.module) for name in names])
    non_finite = engine.non_finite()
    again = started(job, kind, tied=tied)
    begun = again.load(at, pipeline.layout(job))
    resumed, _ = steps(again, job, range(begun, STEPS))
    again._names[next(iter(again._names))].data.flatten()[0] = float("nan")
    places = [None] * job.world_size
    dist.all_gather_object(places, [place for place, _ in pipeline._own_layers(engine._engine.module)])
    if dist.get_rank() == 0:
        stored = pipeline.trained_weights(at)
        torch.save(weights, at / "weights.pt")
        result = {
            "case": f"{kind}:{preset}:{way}:{int(tied)}", "losses": losses + more, "norms": norms + more_norms,
            "evaluation": evaluation, "resumed": resumed, "weights": str(at / "weights.pt"),
            "stored": sorted(stored), "written_by": written_by, "places": places, "own": len(engine._names),
            "non_finite": non_finite,
        }  # fmt: skip
        print(json.dumps(result), flush=True)
    assert again.non_finite() is not None
    dist.barrier()


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    where = Path(sys.argv[1])
    for case in sys.argv[2:]:
        kind, preset, way, tied = case.split(":")
        train(kind, preset, way, tied == "1", where)
    dist.destroy_process_group()
