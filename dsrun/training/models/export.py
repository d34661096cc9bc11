"""The fine-tuned model as a folder that transformers loads by itself."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.errors import DsrunError, TrainingError
from dsrun.files import make_readable, read_json_object
from dsrun.jobs.spec.export_request import export_folders
from dsrun.jobs.spec.job import Job
from dsrun.jobs.spec.layout import ADAPTER, BEST, MODEL, ORIGINAL
from dsrun.training import finite
from dsrun.training.barrier import barrier
from dsrun.training.disk import reach_disk, refused
from dsrun.training.engines import Engine
from dsrun.training.models.weights import INDEXES, open_shard

TOLD = {ADAPTER: "the adapter by itself", ORIGINAL: "the model in the format that it came in"}
"""Of the folders that are written beside the model."""
SHARD = "5GB"
"""Of the exported weights, at most: the Hub's limit of a file is ten times as much, and one is read at a time."""
ROOM = "Free some room, then write the model from the newest checkpoint: dsrun export {run}"


def export(engine: Engine, tokenizer: Any, end_ids: list[int], job: Job) -> tuple[Path, list[str]]:
    """Write the model into the run's folder: safetensors, config, tokenizer. Every rank takes part; rank 0 writes.

    Returned are the folder to be asked and a line for each other one. Raises as `write_folders` does.
    """
    folders = export_folders(job, Path(job.run_dir))
    write_from(engine, tokenizer, end_ids, job, folders)
    first, *others = folders.items()
    return first[1], [f"{TOLD[kind]}: {folder}" for kind, folder in others]


def export_best(engine: Engine, tokenizer: Any, end_ids: list[int], job: Job) -> Path:
    """Write what is trained by now into best/, in the place of what was there: the whole model, or the adapter."""
    folder = Path(job.run_dir) / BEST
    write_from(engine, tokenizer, end_ids, job, {ADAPTER if job.peft.freezes else MODEL: folder})
    return folder


def write_from(
    engine: Engine, tokenizer: Any, end_ids: list[int], job: Job, folders: Mapping[str, Path]
) -> None:
    """`write_folders` on rank 0, with the weights of all ranks, which wait for it however long it takes."""
    weights = engine.full_weights(trained=job.peft.freezes)
    if dist.get_rank() == 0:
        write_folders(engine.module, weights, tokenizer=tokenizer, end_ids=end_ids, job=job, folders=folders)
    barrier()


def write_folders(
    module: Any,
    weights: dict[str, torch.Tensor],
    *,
    tokenizer: Any,
    end_ids: list[int],
    job: Job,
    folders: Mapping[str, Path],
) -> None:
    """Write a trained model in one process. module: with what is trained on it; its own weights may be others.

    weights: by their names in the module, whole, on the CPU: all of them, or those that are trained beside the model.
    end_ids: the tokens that end a response; they go into the generation config. folders: see `export_folders`.
    Each folder is written beside its place, looked at (`verify`), and only then takes the place of an older one.
    Raises TrainingError where a weight is not finite or the disk refuses, RuntimeError if it is not the whole model.
    """
    _set_ends(module, tokenizer, end_ids)
    if ADAPTER in folders:
        from dsrun.training.models.adapters import write_adapter

        _write(folders[ADAPTER], job, lambda folder: write_adapter(module, weights, tokenizer, job, folder))
    if job.peft.freezes and not folders.keys() <= {ADAPTER}:
        module, weights = _merged(module, weights, job)
    if MODEL in folders:
        _write(folders[MODEL], job, lambda folder: _write_model(module, weights, tokenizer, end_ids, folder))
    if ORIGINAL in folders:
        from dsrun.training.models.chatglm import write_original

        original = Path(job.model.location)
        _write(
            folders[ORIGINAL], job, lambda folder: write_original(weights, module.config, original, folder)
        )


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


def _write(target: Path, job: Job, write: Callable[[Path], None]) -> None:
    """A folder that appears under its name only when it is whole, in the place of an older one.

    Where the disk refuses, what was written by half is removed: nobody could write down what happened.
    """
    temporary, old = (target.parent / f".{target.name}.{word}" for word in ("new", "old"))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in (temporary, old):
            shutil.rmtree(path, ignore_errors=True)
        temporary.mkdir()
        write(temporary)
        make_readable(temporary)
        reach_disk([*(path for path in temporary.rglob("*") if path.is_file()), temporary])
        verify(temporary)
        if target.exists():
            target.rename(old)
        temporary.rename(target)
        reach_disk([target.parent])
    except Exception as error:
        in_words = refused(target, error, ROOM.format(run=shlex.quote(job.run_dir)))
        shutil.rmtree(temporary, ignore_errors=True)
        raise TrainingError(in_words.problems) if isinstance(in_words, DsrunError) else in_words from error
    shutil.rmtree(old, ignore_errors=True)


def verify(folder: Path) -> None:
    """Read a folder's weights as they are on the disk: each file whole, as the index says, every weight finite.

    Raises DsrunError with the file, or TrainingError with the weight.
    """
    found = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        for name, tensor in open_shard(path).items():
            finite.check(tensor, name, str(folder))
            found[name] = path.name
    if not found:
        raise DsrunError("holds no weights", where=str(folder))
    for index, _ in INDEXES:
        if (folder / index).is_file():
            listed = read_json_object(folder / index)["weight_map"]
            if wrong := sorted(name for name, file in listed.items() if found.get(name) != file):
                raise RuntimeError(f"{folder / index} names weights that are not there: {wrong[:5]}")


def _write_model(
    model: Any, weights: dict[str, torch.Tensor], tokenizer: Any, end_ids: list[int], folder: Path
) -> None:
    cached, model.config.use_cache = model.config.use_cache, True
    _set_ends(model, tokenizer, end_ids)
    model.save_pretrained(
        folder, state_dict=dict(weights), max_shard_size=SHARD
    )  # it takes out what it has written
    model.config.use_cache = cached
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
