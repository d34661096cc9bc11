"""The fine-tuned model as a folder that transformers loads by itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.files import make_readable
from dsrun.jobs.spec.job import Job
from dsrun.training.barrier import barrier
from dsrun.training.engines import Engine

MODEL, ORIGINAL, ADAPTER = "model", "model-chatglm", "adapter"


def export(engine: Engine, tokenizer: Any, end_ids: list[int], job: Job) -> tuple[Path, list[str]]:
    """Write the model into the run's folder: safetensors, config, tokenizer. Every rank takes part; rank 0 writes.

    end_ids: the tokens that end a response; they go into the generation config. Returned are the folder to be asked
    and a line for each other one. The first is model/: the trained model, or the one that LoRA was trained on with it
    merged. Beside it is model-chatglm/ where the job wants ChatGLM's original format, too, and adapter/ where it trains
    one: the first itself where nothing is merged.
    Raises RuntimeError if what was written is not the whole model.
    """
    run_dir, first, module = Path(job.run_dir), dist.get_rank() == 0, engine.module
    weights = engine.full_weights(trained=job.peft.freezes)
    told = []
    if job.peft.freezes:
        from dsrun.training.models.adapters import write_adapter

        if first:
            _set_ends(module, tokenizer, end_ids)
            _write(run_dir / ADAPTER, lambda folder: write_adapter(module, weights, tokenizer, job, folder))
        if job.peft.method == "ptuning" or job.training.export_format == "adapter":
            barrier()
            return run_dir / ADAPTER, []
        told.append(f"the adapter by itself: {run_dir / ADAPTER}")
        if first:
            module, weights = _merged(module, weights, job)
    if first:
        _write(run_dir / MODEL, lambda folder: _write_model(module, weights, tokenizer, end_ids, folder))
    if job.training.export_format == "chatglm":
        from dsrun.training.models.chatglm import write_original

        told.append(f"the model in the format that it came in: {run_dir / ORIGINAL}")
        if first:
            original = Path(job.model.location)
            _write(
                run_dir / ORIGINAL, lambda folder: write_original(weights, module.config, original, folder)
            )
    barrier()
    return run_dir / MODEL, told


def _merged(module: Any, trained: dict[str, torch.Tensor], job: Job) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model as it came, and its weights with LoRA's added.

    They are read again where they came from: so they have the type that they came in, and QLoRA's are no rounded ones.
    """
    from dsrun.training.models.adapters import merge, scales
    from dsrun.training.models.load import plain_base

    base = plain_base(job)
    base.generation_config = module.generation_config
    weights = dict(base.state_dict())
    merge(weights, trained, scales(module))
    return base, weights


def _write(target: Path, write: Callable[[Path], None]) -> None:
    """A folder that appears under its name only when it is complete, in the place of an older one."""
    temporary = target.parent / f".{target.name}.new"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    write(temporary)
    make_readable(temporary)
    shutil.rmtree(target, ignore_errors=True)
    temporary.rename(target)


def _write_model(
    model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, end_ids: list[int], folder: Path
) -> None:
    model.config.use_cache = True
    _set_ends(model, tokenizer, end_ids)
    model.save_pretrained(folder, state_dict=dict(weights))  # it takes out what it has written
    model.config.use_cache = False
    tokenizer.save_pretrained(folder)
    _repeat_positions(folder / "config.json")
    _check_written(folder, weights)


def _set_ends(model: Any, tokenizer: Any, end_ids: list[int]) -> None:
    model.generation_config.eos_token_id = end_ids
    model.generation_config.pad_token_id = tokenizer.pad_token_id


def _repeat_positions(path: Path) -> None:
    """Say the rotary positions where transformers 4 and programs of its time look, too.

    They know no rope_parameters, and would silently take 10000 for the base.
    """
    config = json.loads(path.read_text(encoding="utf-8"))
    rope = config.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:  # none, or a table for each kind of layer
        return
    outer = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    config |= outer
    if rope.get("rope_type", "default") != "default":
        config["rope_scaling"] = {name: value for name, value in rope.items() if name not in outer}
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
