"""The fine-tuned model as a folder that transformers loads by itself."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.files import make_readable

MODEL = "model"


def gather_weights(engine: Any, zero_stage: int) -> dict[str, torch.Tensor]:
    """Every weight and saved buffer, whole and on the CPU, on rank 0; an empty dict on the other ranks.

    Under ZeRO-3 one parameter at a time is gathered on every rank, so that no device needs room for two.
    """
    module, first = engine.module, dist.get_rank() == 0
    if zero_stage < 3:
        return {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()} if first else {}
    import deepspeed

    weights: dict[str, torch.Tensor] = {}
    shared: dict[int, torch.Tensor] = {}  # tied weights: one tensor under several names
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if id(parameter) not in shared:
            with deepspeed.zero.GatheredParameters([parameter]):
                whole = parameter.detach().cpu().clone() if first else torch.empty(0)
            shared[id(parameter)] = whole
        if first:
            weights[name] = shared[id(parameter)]
    if first:
        saved = module.state_dict().keys() - weights.keys()
        weights |= {name: tensor.detach().cpu() for name, tensor in module.named_buffers() if name in saved}
    return weights


def export(engine: Any, tokenizer: Any, end_ids: list[int], zero_stage: int, run_dir: Path) -> Path:
    """Write run_dir/model: safetensors, config, tokenizer. Every rank takes part; rank 0 writes.

    end_ids: the tokens that end a response; they go into the generation config.

    Raises RuntimeError if what was written is not the whole model.
    """
    weights = gather_weights(engine, zero_stage)
    target = run_dir / MODEL
    if dist.get_rank() == 0:
        temporary = run_dir / f".{MODEL}.new"
        shutil.rmtree(temporary, ignore_errors=True)
        model = engine.module
        model.config.use_cache = True
        model.generation_config.eos_token_id = end_ids
        model.generation_config.pad_token_id = tokenizer.pad_token_id
        model.save_pretrained(temporary, state_dict=weights)
        model.config.use_cache = False
        tokenizer.save_pretrained(temporary)
        _check_written(temporary, weights)
        make_readable(temporary)
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    dist.barrier()
    return target


def _check_written(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    """Compare names and shapes in the files with the model's: partitioned weights are saved as empty ones."""
    from safetensors import safe_open

    written: dict[str, list[int]] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            written |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    pointers = {tensor.data_ptr() for name, tensor in weights.items() if name in written}
    wrong = [
        name
        for name, tensor in weights.items()
        if (written[name] != list(tensor.shape) if name in written else tensor.data_ptr() not in pointers)
    ]
    if wrong or not written:
        raise RuntimeError(f"the export in {folder} is not the whole model: {wrong[:5]}")
