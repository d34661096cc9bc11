"""The fine-tuned model as a folder that transformers loads by itself."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from dsrun.errors import DsrunError, TrainingError
from dsrun.files import WEIGHT_FILE_BYTES, make_readable, read_json_object
from dsrun.job.export_request import export_folders
from dsrun.job.job import Job
from dsrun.job.layout import ADAPTER, BEST, MODEL, ORIGINAL, TEXT_MODEL
from dsrun.models.transformers_code import TEXT_CONFIG
from dsrun.training import finite
from dsrun.training.disk import reach_disk, refused
from dsrun.training.engines import Engine
from dsrun.training.engines.optimizers import elements
from dsrun.training.models.checkpoint_parts import Composed, by_itself, copy_rest, has_more, with_the_rest
from dsrun.training.models.text_part import text_path, towers
from dsrun.training.models.weights import INDEXES, give_back, open_shard, weight_files, write_index
from dsrun.training.ranks.barrier import barrier

BESIDE = {
    ADAPTER: "the adapter by itself", ORIGINAL: "the model in the format that it came in",
    TEXT_MODEL: "the text model by itself",
}  # fmt: skip
"""The folders that are written beside the model, in words."""
SHARD_BYTES = WEIGHT_FILE_BYTES
"""The largest file of exported weights. One is in memory at a time."""
UNDIVIDED_BYTES = 1 << 60
"""A size of shards with which save_pretrained divides nothing."""
SINGLE, EXTRA = "model.safetensors", "model-aside.safetensors"
"""The file of a model's weights where there is but one, and that of weights which its class leaves aside."""
LAYER = re.compile(r".*?\.\d+\.")
Weights = Callable[[Sequence[str]], dict[str, torch.Tensor]]
"""Weights by their names in the module, whole, on the CPU."""
ROOM = "Free some room, then write the model from the newest checkpoint: dsrun export {run}"


def export(engine: Engine, tokenizer: Any, end_ids: list[int], job: Job) -> tuple[Path, list[str]]:
    """Write the model into the run's folder: safetensors, config, tokenizer. Every rank takes part; rank 0 writes.

    Returns the model's folder and a line for each other one. Raises as `write_folders` does.
    """
    folders = export_folders(job, Path(job.run_dir))
    write_from(engine, tokenizer, end_ids, job, folders)
    first, *others = folders.items()
    return first[1], [f"{BESIDE[kind]}: {folder}" for kind, folder in others]


def export_best(engine: Engine, tokenizer: Any, end_ids: list[int], job: Job) -> Path:
    """Write the weights of the moment into best/, in the place of earlier ones: the whole model, or the adapter."""
    folder = Path(job.run_dir) / BEST
    write_from(engine, tokenizer, end_ids, job, {ADAPTER if job.peft.freezes else MODEL: folder})
    return folder


def write_from(
    engine: Engine, tokenizer: Any, end_ids: list[int], job: Job, folders: Mapping[str, Path]
) -> None:
    """`write_folders` on rank 0, with the weights of all ranks, which wait for it however long it takes."""

    def gathered(names: Sequence[str]) -> dict[str, torch.Tensor]:
        barrier()  # rank 0 may have written the shard before for longer than a collective waits
        return engine.full_weights(names)

    parts = shards(engine.outline, trained=job.peft.freezes)
    if dist.get_rank() == 0:
        write_folders(
            engine.outline, gathered, tokenizer=tokenizer, end_ids=end_ids, job=job, folders=folders
        )
    else:
        for names in parts * _passes(job, folders):
            gathered(names)
            give_back()
    barrier()


def _passes(job: Job, folders: Mapping[str, Path]) -> int:
    """How often `write_folders` asks for all weights: once for each folder that it writes them into shard by shard.

    What is trained beside a model is small, and asked for once.
    """
    return 1 if job.peft.freezes else max(1, len(folders.keys() & {MODEL, TEXT_MODEL}))


def shards(module: Any, *, trained: bool = False) -> list[list[str]]:
    """The names of a model's weights in shards of SHARD_BYTES at most, tied weights under their first name.

    Towers are left out: they are written as they came. trained: only the weights that have gradients, in one shard.
    """
    beside = towers(module)
    parameters = [(name, weight) for name, weight in module.named_parameters() if name not in beside]
    tensors = [(name, weight) for name, weight in parameters if weight.requires_grad or not trained]
    if trained:
        return [[name for name, _ in tensors]]
    saved = module.state_dict(keep_vars=True).keys()
    inside = f"{text_path(module)}." if beside else ""
    buffers = ((name, buffer) for name, buffer in module.named_buffers() if name in saved)
    tensors += [(name, buffer) for name, buffer in buffers if name.startswith(inside)]
    names: list[list[str]] = [[]]
    room = SHARD_BYTES
    # A layer is not divided unless it alone is larger than a shard: for some models transformers makes one weight of a
    # file from several of a layer.
    for layer in _by_layer(tensors).values():
        fits = sum(layer.values()) <= SHARD_BYTES
        for unit in [layer] if fits else [{name: size} for name, size in layer.items()]:
            size = sum(unit.values())
            if names[-1] and size > room:
                names.append([])
                room = SHARD_BYTES
            names[-1] += unit
            room -= size
    return names


def _by_layer(tensors: Iterable[tuple[str, Any]]) -> dict[str, dict[str, int]]:
    """Bytes of each weight, by its numbered layer ("model.layers.3."), or by its own name where it has none."""
    layers: dict[str, dict[str, int]] = {}
    for name, tensor in tensors:
        layer = LAYER.match(name)
        size = elements(tensor) * tensor.element_size()
        layers.setdefault(layer[0] if layer else name, {})[name] = size
    return layers


def write_folders(
    module: Any,
    weights: Weights,
    *,
    tokenizer: Any,
    end_ids: list[int],
    job: Job,
    folders: Mapping[str, Path],
) -> None:
    """Write a trained model in one process. module: the model with its adapter; its own values don't matter.

    weights: called for each of `shards(module)` in turn, as often as `_passes` says, or once for the adapter's.
    end_ids: the tokens that end a response; they go into the generation config. folders: see `export_folders`.
    Each folder is written beside its place, looked at (`verify`), and only then takes the place of an older one.
    Raises TrainingError where a weight is not finite or the disk refuses, RuntimeError if it is not the whole model.
    """
    _set_ends(module, tokenizer, end_ids)
    if job.peft.freezes:
        (names,) = shards(module, trained=True)
        trained = weights(names)
        if ADAPTER in folders:
            from dsrun.training.models.adapters import write_adapter

            _write(
                folders[ADAPTER], job, lambda folder: write_adapter(module, trained, tokenizer, job, folder)
            )
        if folders.keys() <= {ADAPTER}:
            return
        module, weights = _merged(module, trained, job)
    if MODEL in folders and has_more(job):
        checkpoint, source = with_the_rest(module, weights, job, shards), Path(job.prepared.model_dir)
        _write(
            folders[MODEL], job, lambda folder: _write_whole(checkpoint, tokenizer, end_ids, folder, source)
        )
    elif MODEL in folders:
        plain = Composed(module, shards(module), weights)
        _write(folders[MODEL], job, lambda folder: _write_model(plain, tokenizer, end_ids, folder))
    if TEXT_MODEL in folders:
        text = by_itself(module, weights, job, shards)
        _write(folders[TEXT_MODEL], job, lambda folder: _write_model(text, tokenizer, end_ids, folder))
    if ORIGINAL in folders:
        from dsrun.training.models.chatglm import write_original

        original = Path(job.model.location)
        whole: dict[str, torch.Tensor] = {}
        if MODEL in folders:  # written just now: mapped from there, and not gathered a second time
            for path in weight_files(folders[MODEL]):
                whole |= open_shard(path)
        else:
            for names in shards(module):
                whole |= weights(names)
        _write(folders[ORIGINAL], job, lambda folder: write_original(whole, module.config, original, folder))


def _merged(module: Any, trained: Mapping[str, torch.Tensor], job: Job) -> tuple[Any, Weights]:
    """The model as it came, and its weights with LoRA's added.

    The weights are read again from the model's own folder: so they have their own type, and QLoRA's are not rounded.
    """
    from dsrun.training.models.adapters import additions, merged
    from dsrun.training.models.load import plain_base

    base, added = plain_base(job), additions(module)
    base.generation_config = module.generation_config
    state = base.state_dict()
    return base, lambda names: {name: merged(name, state[name], trained, added) for name in names}


def _write(target: Path, job: Job, write: Callable[[Path], None]) -> None:
    """Write a folder that appears under its name only when it is whole, in the place of an older one.

    Where the disk refuses, the half-written folder is removed: else nobody could write down what happened.
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
        # Two renames, for a folder can't take the place of another one: the moment without either is short, and both
        # are there under their other names.
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
    files = {}
    for path in sorted([*folder.glob("*.safetensors"), *folder.glob("*.bin")]):
        for name, tensor in open_shard(path).items():
            finite.check(tensor, name, str(folder))
            files[name] = path.name
    if not files:
        raise DsrunError("holds no weights", where=str(folder))
    for index, _ in INDEXES:
        if (folder / index).is_file():
            listed = read_json_object(folder / index)["weight_map"]
            if wrong := sorted(name for name, file in listed.items() if files.get(name) != file):
                raise RuntimeError(f"{folder / index} names weights that are not there: {wrong[:5]}")


def _write_whole(composed: Composed, tokenizer: Any, end_ids: list[int], folder: Path, source: Path) -> None:
    """Write all of a checkpoint that has more than text. source: the folder that it came from."""
    _write_model(composed, tokenizer, end_ids, folder)
    if aside := copy_rest(source, composed.model, folder):
        add_shard(folder, aside)


def _write_model(composed: Composed, tokenizer: Any, end_ids: list[int], folder: Path) -> None:
    """Write the folder that transformers loads, with one shard of the weights in memory at a time.

    Each shard is written by transformers' own save_pretrained, as a whole model would be: under the names that files
    have, which aren't always the module's (those of mixtures of experts).
    """
    model, weights = composed.model, composed.weights
    cached, model.config.use_cache = getattr(model.config, "use_cache", True), True
    model.config.get_text_config().use_cache = True
    _set_ends(model, tokenizer, end_ids)
    parts, part = composed.shards, folder / ".part"
    placed: dict[str, str] = {}
    total, dtype = 0, None
    part.mkdir(parents=True)
    for number, names in enumerate(parts, 1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors" if len(parts) > 1 else SINGLE
        model.save_pretrained(part, state_dict=weights(names), max_shard_size=UNDIVIDED_BYTES)
        (part / SINGLE).rename(folder / name)
        written = open_shard(folder / name)
        _check_written(folder / name, written, model, names)
        placed |= dict.fromkeys(written, name)
        dtype = dtype or next((each.dtype for each in written.values() if each.is_floating_point()), None)
        total += sum(tensor.nbytes for tensor in written.values())
        give_back()  # half of the model was seen to stay in holes between weights that were gathered
    if len(parts) > 1:
        write_index(folder, placed, total)
    for path in part.iterdir():  # the configs
        path.rename(folder / path.name)
    part.rmdir()
    model.config.use_cache = cached
    tokenizer.save_pretrained(folder)
    if dtype is not None:
        _correct_config(folder / "config.json", dtype)


def add_shard(folder: Path, weights: Mapping[str, torch.Tensor]) -> None:
    """Add a shard to a folder of weights, in its index, too; one that holds a single file gets an index."""
    from safetensors.torch import save_file

    placed: dict[str, str] = {}
    total = 0
    for path in [*weight_files(folder), folder / EXTRA]:
        if path.name == EXTRA:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, path, {"format": "pt"})
        content = open_shard(path)
        placed |= dict.fromkeys(content, path.name)
        total += sum(tensor.nbytes for tensor in content.values())
    write_index(folder, placed, total)


def _set_ends(model: Any, tokenizer: Any, end_ids: list[int]) -> None:
    model.generation_config.eos_token_id = end_ids
    model.generation_config.pad_token_id = tokenizer.pad_token_id


def _correct_config(path: Path, dtype: torch.dtype) -> None:
    """Correct a config that transformers wrote. dtype: the type in the files; FSDP's module holds fp32 weights."""
    config = json.loads(path.read_text(encoding="utf-8"))
    config["dtype"] = str(dtype).removeprefix("torch.")
    for part in (config, config.get(TEXT_CONFIG)):
        if isinstance(part, dict):
            _add_rope(part)
    path.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _add_rope(config: dict[str, Any]) -> None:
    """Add the rotary positions to a config in the words of transformers 4."""
    # transformers 4 and programs of its time know no rope_parameters, and would silently take 10000 for the base: the
    # rotary positions go where they look, too.
    rope = config.get("rope_parameters")
    if (
        isinstance(rope, dict) and "rope_theta" in rope
    ):  # else there are none, or a table for each kind of layer
        outer = {name: rope[name] for name in ("rope_theta", "partial_rotary_factor") if name in rope}
        config |= outer
        if rope.get("rope_type", "default") != "default":
            config["rope_scaling"] = {name: value for name, value in rope.items() if name not in outer}


def _check_written(path: Path, written: Mapping[str, torch.Tensor], model: Any, names: Sequence[str]) -> None:
    """Raise RuntimeError where a shard has not as many elements as the model: partitioned weights are saved empty.

    Elements are counted, for names and shapes may be others in the file than in the module.
    """
    state = model.state_dict(keep_vars=True)
    wanted = sum(elements(state[name]) for name in names)
    if not wanted or wanted != sum(map(torch.numel, written.values())):
        wrong = [
            name for name in names if name not in written or written[name].numel() != elements(state[name])
        ]
        raise RuntimeError(f"the export in {path} is not the whole model: {wrong[:5]}")
