"""One of two or four ranks: models under FSDP take steps, on the ranks' shares of what one process takes whole.

The first rank prints what came of each case, beside the losses of plain torch.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dsrun.job.job import FsdpSpec
from dsrun.options.table import ComputeOptions, PeftOptions
from dsrun.training.loss import StepTotals, token_mean

MICRO_STEPS, STEPS, SAVED, CLIP, LENGTH, VOCABULARY = 2, 20, 12, 0.5, 12, 90
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 18, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
"""Of which four ranks get unequal rows: 90, 52, 36 and 18 of them."""
KINDS = {
    "llama": {"tie_word_embeddings": True},
    "glm": {"tie_word_embeddings": False},
    "qwen3": {"tie_word_embeddings": False},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False},
}
RATES = {"sgd": 0.5, "adamw": 1e-3}
PLAIN = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
LORA = PeftOptions(method="lora", lora_rank=4, lora_dropout=0.0)


def a_model(kind: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES, **KINDS[kind])
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").train()


def a_job(case: str, folder: Path) -> SimpleNamespace:
    """case: KIND:OPTIMIZER:RANKS THAT SHARE A COPY[:a word, what else is so]."""
    kind, optimizer, shard, *words = case.split(":")
    spec = FsdpSpec(micro_batch=2, grad_accum=MICRO_STEPS, grad_clip=CLIP, shard_ranks=int(shard))
    spec = replace(spec, offload="offload" in words, whole_gradients="whole" in words)
    way = "full" if "recompute" in words else "none"
    params = {"momentum": 0.0} if optimizer == "sgd" else {"weight_decay": 0.1}
    return SimpleNamespace(
        kind=kind, preset="fsdp", run_dir=str(folder), fsdp=spec, world_size=dist.get_world_size(), accelerator="cpu",
        precision="bf16" if "bf16" in words else "fp32", peft=LORA if "lora" in words else PeftOptions(), ds_config={},
        zero_stage=0, grad_accum=MICRO_STEPS, model=SimpleNamespace(source="folder"),
        prepared=SimpleNamespace(model_dir=str(folder)),
        training=SimpleNamespace(
            **vars(ComputeOptions(activation_checkpointing=way)), optimizer=optimizer, optimizer_params=params,
            lr=RATES[optimizer], seed=7, recomputed=1, offloads_activations=False, gradient_checkpointing=way == "full",
        ),
    )  # fmt: skip


def step_batches(step: int) -> list[dict[str, torch.Tensor]]:
    """A step's micro batches, of all ranks; they differ in how many tokens are trained on."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(dist.get_world_size() * MICRO_STEPS):
        ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + number] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def totals(batches: list[dict[str, torch.Tensor]]) -> StepTotals:
    return StepTotals(sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches), len(batches))


def loss_of(model, batch, step: StepTotals) -> torch.Tensor:
    return token_mean(model, batch, step)


def steps(engine, first: int, last: int) -> list[float]:
    losses = []
    for number in range(first, last):
        batches = step_batches(number)
        step, whole = totals(batches), torch.zeros(())
        for batch in batches[dist.get_rank() :: dist.get_world_size()]:
            loss = loss_of(engine, batch, step)
            engine.backward(loss)
            engine.step()
            whole += loss.detach()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses


def plain(model, job) -> list[float]:
    """The same in one process of plain torch."""
    trained = [one for one in model.parameters() if one.requires_grad]
    training = job.training
    optimizer = PLAIN[training.optimizer](trained, lr=training.lr, **training.optimizer_params)
    losses = []
    for number in range(STEPS):
        batches = step_batches(number)
        shares = [loss_of(model, batch, totals(batches)) for batch in batches]
        sum(shares).backward()
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(sum(shares)))
    return losses


def run(case: str) -> dict[str, object]:
    from dsrun.training.engines import fsdp
    from dsrun.training.models import adapters
    from dsrun.training.models.compiled import Compilation, compile_layers
    from dsrun.training.models.load import load_model

    first = dist.get_rank() == 0
    place = [tempfile.mkdtemp() if first else None]
    dist.broadcast_object_list(place)
    folder = Path(str(place[0]))
    job = a_job(case, folder)
    whole = a_model(job.kind)
    if first:
        whole.save_pretrained(folder)
    dist.barrier()

    model, _ = load_model(job)
    if "compile" in case:
        compile_layers(model)
    begun = sum(one.untyped_storage().nbytes() for one in model.parameters() if hasattr(one, "rows"))
    engine = fsdp.initialize(job, model)
    weights = list(model.parameters())
    own = sum(one.to_local().numel() for one in weights) / sum(one.numel() for one in weights)
    result: dict[str, object] = {
        "case": case, "bytes_before": begun, "dtensors": all(isinstance(one, DTensor) for one in weights),
        "own_share": own, "losses": steps(engine, 0, SAVED),
    }  # fmt: skip
    engine.save(folder / "step", SAVED)
    result["losses"] += steps(engine, SAVED, STEPS)
    if "compile" in case:
        list(Compilation().notes())  # raises where nothing is
    result["norm"] = float(engine.gradient_norm())
    result["non_finite"] = engine.non_finite()
    with engine.whole() as answers, torch.no_grad():
        if first:  # no other rank takes part
            result["answer"] = model(input_ids=torch.arange(3, 12)[None]).logits.float().sum().item()
    result["alone"] = answers
    names = [name for name, one in model.named_parameters() if one.requires_grad]
    exported = engine.full_weights(names)

    again, _ = load_model(job)
    if "compile" in case:
        compile_layers(again)
    other = fsdp.initialize(job, again)
    dist.barrier()
    result["resumed_at"] = other.load(folder / "step", {"engine": "fsdp"})
    result["resumed"] = steps(other, SAVED, STEPS)
    if not first:
        return {}

    if job.peft.freezes:
        adapters.put_on(whole, job)
    whole = copy.deepcopy(whole).train()
    result["wanted"] = plain(whole, job)
    state = whole.state_dict()
    result["weights"] = max((exported[name].float() - state[name]).abs().max().item() for name in exported)
    with torch.no_grad():
        result["wanted_answer"] = whole(input_ids=torch.arange(3, 12)[None]).logits.sum().item()
    return result


if __name__ == "__main__":
    from dsrun.training.engines.fsdp import connect

    connect()
    for one in sys.argv[1:]:
        result = run(one)
        if result:
            print(json.dumps(result), flush=True)
    dist.barrier()
    dist.destroy_process_group()
