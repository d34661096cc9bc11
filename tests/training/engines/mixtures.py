"""One of some ranks: mixtures of experts take a few steps under presets; the first rank prints what came of it."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef

from dsrun.options.table import ComputeOptions, ParallelismOptions, PeftOptions
from dsrun.training.loss import StepTotals, token_mean
from dsrun.training.models.experts import ExpertLoad
from dsrun.training.models.export import shards

STEPS, LR, LENGTH, VOCABULARY = 4, 0.1, 12, 64
TOTAL = 4
"""Micro batches of a step, over all ranks."""
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 64,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "num_experts_per_tok": 2,
}  # fmt: skip
LORA = PeftOptions(method="lora", lora_rank=2, lora_alpha=4.0, lora_target="all,experts")
ROUTED = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
KINDS = {
    "mixtral": {"num_local_experts": 4, **ROUTED},
    "qwen3_moe": {
        "num_experts": 4, "moe_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [], **ROUTED},
    "qwen2_moe": {
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "decoder_sparse_step": 1,
        "mlp_only_layers": [], **ROUTED},
    "qwen3_5_moe_text": {
        "num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 16, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"]},
    "deepseek_v2": {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 2, "routed_scaling_factor": 1.0},
    "deepseek_v3": {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "n_group": 2, "topk_group": 1, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 2, "routed_scaling_factor": 2.5},
    "glm4_moe": {
        "n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 24, "first_k_dense_replace": 1,
        "n_group": 1, "topk_group": 1, "use_qk_norm": True},
}  # fmt: skip


def model(kind: str) -> torch.nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**SIZES, **KINDS[kind]}, use_cache=False)
    made = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for (
        name,
        weight,
    ) in made.named_parameters():  # some families begin with routers of zeros, which choose by chance
        if name.endswith("gate.weight"):
            torch.nn.init.normal_(weight, std=0.5)
    return made.train()


def with_lora(made: torch.nn.Module) -> torch.nn.Module:
    """The model with LoRA on attention and experts, of which no part is zero."""
    from dsrun.training.models.adapters import add_lora

    torch.manual_seed(1)
    add_lora(made, LORA)
    for weight in made.parameters():
        if weight.requires_grad:
            torch.nn.init.normal_(weight, std=0.2)
    return made


def step_batches(step: int) -> list[dict[str, torch.Tensor]]:
    """A step's micro batches, of all ranks; they differ in how many tokens are trained on."""
    generator = torch.Generator().manual_seed(step)
    made = []
    for number in range(TOTAL):
        ids = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        labels = ids.clone()
        labels[:, : 1 + 2 * number] = -100
        made.append({"input_ids": ids, "labels": labels})
    return made


def target_tokens(batches: list[dict[str, torch.Tensor]]) -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)


def undivided_unseen(job: SimpleNamespace, engine: object) -> list[str]:
    """Other divisions than the engine has, for which it is taken all the same."""
    from dsrun.errors import TrainingError
    from dsrun.training.engines import zero

    unseen = []
    others: list[dict[str, object]] = [{"world_size": 2 * job.world_size}]
    others += [{"zero_stage": 5 - job.zero_stage}] * (job.zero_stage > 1)
    others += [{"parallel": ParallelismOptions(ep=ep)} for ep in (1, 4)] * (job.parallel.ep > 1)
    for other in others:
        try:
            zero.engaged(SimpleNamespace(**{**vars(job), **other}), engine)
            unseen.append(str(other))
        except TrainingError:
            continue
    return unseen


class SavedWeights:
    """The bytes of experts' tensors, whole, that autograd keeps from forward to backward."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.sizes = {
            4 * getattr(weight, "ds_numel", weight.numel())
            for weight in model.parameters()
            if len(getattr(weight, "ds_shape", weight.shape)) == 3
        }
        self.storages: list[tuple[StorageWeakRef, int]] = []

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() in self.sizes:
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return tensor

    def alive(self) -> int:
        """The bytes that are still there. What was let go of is forgotten."""
        kept = {reference.cdata: size for reference, size in self.storages if not reference.expired()}
        self.storages.clear()
        return sum(kept.values())


class Sent:
    """Counts the all-to-alls of rows (not of their numbers), through torch's function for them."""

    def __init__(self) -> None:
        self.count = 0
        self._send = dist.all_to_all_single
        dist.all_to_all_single = self

    def __call__(self, output: torch.Tensor, **more: object) -> object:
        self.count += output.is_floating_point()
        return self._send(output=output, **more)


def train(kind: str, preset: str, way: str) -> None:
    from dsrun.config.presets.build import Options, build_config
    from dsrun.jobs.assembly.checks.optimizers import with_optimizer
    from dsrun.jobs.assembly.checks.parallelism import with_section
    from dsrun.training.engines import deepspeed
    from dsrun.training.models.load import recompute

    ranks = dist.get_world_size()
    divided, _, checkpointing = way.rpartition("+")
    parallel = ParallelismOptions(ep=int(divided.removeprefix("ep") or 1))
    overrides = ["zero_optimization.stage3_param_persistence_threshold=0"] if preset == "zero3" else []
    options = Options(
        gpus=ranks, precision="fp32", micro_batch=2, grad_accum=TOTAL // ranks, lr=LR, grad_clip=0.0,
        overrides=tuple(overrides),
    )  # fmt: skip
    config, params = with_optimizer(build_config(preset, options), "sgd", SIZES["hidden_size"])
    job = SimpleNamespace(
        training=ComputeOptions(activation_checkpointing={"lora": "full"}.get(checkpointing, checkpointing)),
        ds_config=with_section(config.ds_config, kind, parallel, freezes=False), dp_size=ranks, world_size=ranks,
        grad_accum=TOTAL // ranks, precision="fp32", accelerator="cpu",
        zero_stage=config.ds_config["zero_optimization"]["stage"], parallel=parallel,
        peft=LORA if way == "lora" else PeftOptions(),
    )  # fmt: skip
    made = with_lora(model(kind)) if way == "lora" else model(kind)
    if job.training.recomputed:
        recompute(made, job)
        made.enable_input_require_grads()
    job.training = SimpleNamespace(optimizer="sgd", optimizer_params=params, lr=LR)
    engine = deepspeed.initialize(job, made)
    unseen = undivided_unseen(job, engine._engine)
    load = ExpertLoad(engine.module, engine.device)
    losses, told, kept = [], [], []
    saved, sent = SavedWeights(engine.module), Sent()
    for step in range(STEPS):
        batches = step_batches(step)
        totals = StepTotals(target_tokens(batches), len(batches))
        engine.set_learning_rate(LR)
        whole = torch.zeros(())
        for batch in batches[dist.get_rank() :: ranks]:
            with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
                loss = token_mean(engine, batch, totals)
            kept.append(saved.alive())
            whole += loss.detach()
            engine.backward(loss)
            engine.step()
        sums = torch.cat([whole[None], load.taken()])
        dist.all_reduce(sums)
        loss, *routed = sums.tolist()
        losses.append(loss)
        told.append(load.metrics(routed, len(batches)))
    weights = engine.full_weights([name for names in shards(engine.outline) for name in names])
    if dist.get_rank() == 0:
        sums = {
            name: [float(one.double().sum()), float(one.double().norm())] for name, one in weights.items()
        }
        result = {
            "case": f"{kind}:{preset}:{way}",
            "losses": losses,
            "told": told,
            "weights": sums,
            "unseen": unseen,
            "kept": max(kept),
            "sent": sent.count,
        }
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    from dsrun.training.engines.deepspeed import connect

    connect()
    for case in sys.argv[1:]:
        train(*case.split(":"))
    dist.destroy_process_group()
