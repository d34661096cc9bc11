"""Loading a model: into the ranks that train it, under every ZeRO stage, or whole, to answer or to be merged with.

Every weight goes straight from its mapped shard to its place (see dsrun.training.models.weights). transformers reads
quantised checkpoints, and those whose names only it knows how to change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dsrun.errors import DsrunError, Problem
from dsrun.files import read_json_object
from dsrun.job.job import Job
from dsrun.models import adapters as formats
from dsrun.models import chatglm as original
from dsrun.training import finite
from dsrun.training.engines import backend_of
from dsrun.training.loss import routers_weight
from dsrun.training.models import adapters, prefix_tuning
from dsrun.training.models.chatglm import checked_weights, glm_weights
from dsrun.training.models.kernels import DTYPES, attention_without_packages
from dsrun.training.models.text_part import class_of, ignored, take_text, text_names, towers, whole_class
from dsrun.training.models.tokenizer import is_original
from dsrun.training.models.weights import Skeleton, Stored, listed, mis_shaped
from dsrun.words import size_text

if TYPE_CHECKING:
    from dsrun.training.data.prompts import PromptEncoder

logger = logging.getLogger(__name__)


# To be trained


def load_model(job: Job, attention: str | None = None) -> tuple[Any, Any]:
    """The model in the job's precision, and an object that must stay alive as long as the model (Backend.awareness).

    Every rank gets the whole model on its device. Under ZeRO-3 it gets its part of every weight, which the first rank
    reads; with FSDP it reads its rows of every weight itself.
    attention: transformers' name of an implementation; None: the one that needs no other package. Where the job trains
    an adapter, the model has it, and nothing else has a gradient.
    Raises DsrunError if the checkpoint's keys and shapes are not the model's.
    """
    device, dtype = _device(job), getattr(torch, DTYPES[job.precision])
    keep_alive = None
    if job.peft.method == "qlora":
        model = plain_base(job)
        adapters.quantise(model, device, dtype)
    else:
        model = _read(job, backend_of(job).held_type(job, dtype), device, attention, trains=True)
        # Only now: a skeleton must not be partitioned while it is made.
        keep_alive = backend_of(job).awareness(job)
    take_text(model)
    if job.peft.freezes:
        adapters.put_on(model, job)
    model.config.get_text_config().use_cache = model.config.use_cache = False
    if job.training.recomputed:
        recompute(model, job)
        model.enable_input_require_grads()
    model.train()
    return model, keep_alive


def recompute(model: Any, job: Job) -> None:
    """Compute the activations of one layer in job.training.recomputed again in backward instead of keeping them."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    # Releases before 5.2x know the second name alone, and 6 the first alone.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    # Re-entrant under ZeRO-3: the other way compares the shapes of what was saved with what is computed again, and
    # ZeRO-3 has taken the weights apart by then (DeepSpeed before 0.19.3). Not re-entrant where routers have a loss:
    # a re-entrant layer's first pass has no gradients, and the routers' logits of that pass are what their loss is of.
    enable({"use_reentrant": job.zero_stage == 3 and not routers_weight(model.config)})
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    for number, layer in enumerate(layers):
        layer.gradient_checkpointing = number % job.training.recomputed == 0
        if job.training.offloads_activations:
            layer._gradient_checkpointing_func = partial(_inputs_on_host, layer._gradient_checkpointing_func)


def keep_activations(model: Any) -> None:
    """Undo `recompute`, which rules out the cache of keys and values that answers are made with."""
    disable = getattr(model, "activation_checkpointing_disable", None) or model.gradient_checkpointing_disable
    disable()


def _inputs_on_host(checkpointed: Any, *layer: Any) -> Any:
    """A checkpointed layer whose input waits in pinned memory; the copies wait for no other work on the GPU."""
    with torch.autograd.graph.save_on_cpu(pin_memory=True):
        return checkpointed(*layer)


def _device(job: Job) -> torch.device:
    """The device that the model is read to. Where ranks share it, the whole of it might not fit a GPU."""
    if job.accelerator != "cuda" or not job.parallel.alone:
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def plain_base(job: Job) -> Any:
    """The model as it came, on the CPU and in its own type; in a process that may train with ZeRO-3."""
    with backend_of(job).unaware():
        return _read(job, None, torch.device("cpu"))


def end_ids(encoder: PromptEncoder, model: Any) -> list[int]:
    """The tokens that end an answer: by the prompt format, and by the model's own generation_config.json."""
    config, tokenizer = model.generation_config, encoder.tokenizer
    ends = config.eos_token_id
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    # Without such a file transformers takes the ids from config.json or from the defaults of the model's class, where
    # they may be any word of this vocabulary: of those, special tokens count.
    if config._from_model_config:
        special = {*tokenizer.all_special_ids, *tokenizer.added_tokens_decoder}
        ends = [token for token in ends if token in special]
    return list(dict.fromkeys([*encoder.stop_ids, *ends]))


def outline(job: Job) -> Any:
    """The job's model with its adapter, on the CPU, to be written with weights from elsewhere.

    Where every weight is trained none is read: they have only shapes.
    """
    folder, dtype = Path(job.prepared.model_dir), getattr(torch, DTYPES[job.precision])
    if job.peft.freezes:
        model = _read(job, None, torch.device("cpu"))
        take_text(model)
        adapters.put_on(model, job)
        return model
    from transformers import AutoConfig

    model = Skeleton(AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype).model
    take_text(model)
    _set_generation(model, folder)
    return model


def _read(
    job: Job,
    dtype: torch.dtype | None,
    device: torch.device,
    attention: str | None = None,
    *,
    trains: bool = False,
) -> Any:
    """The job's model. trains: it is divided over the ranks as the job's engine wants it."""
    divided = job if trains else None
    if job.model.source == "chatglm":
        where = Path(job.model.location)
        return _from_chatglm(where, job.model.architecture, dtype, device, attention=attention, job=divided)
    return _from_folder(Path(job.prepared.model_dir), dtype, device, attention=attention, job=divided)


# From a folder. dtype None: the checkpoint's own. job: divides the weights over its ranks; None: they stay whole.


def _from_chatglm(
    folder: Path,
    architecture: Mapping[str, Any],
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    attention: str | None = None,
    job: Job | None = None,
) -> Any:
    """A model from ChatGLM's own format. architecture: GlmConfig's fields."""
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.for_model(**architecture)
    config.architectures = ["GlmForCausalLM"]
    dtype = dtype or next(iter(glm_weights(folder, config).values())).dtype
    skeleton = Skeleton(config, dtype, attn_implementation=attention or attention_without_packages(config))
    _fill(skeleton, checked_weights(folder, skeleton, config), device, job)
    ends = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    skeleton.model.generation_config = GenerationConfig(**ends)
    return skeleton.model


def _from_folder(
    folder: Path,
    dtype: torch.dtype | None,
    device: torch.device,
    *,
    attention: str | None = None,
    job: Job | None = None,
) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    stored: Mapping[str, Stored] = listed(folder)
    dtype = dtype or next(place.dtype for place in stored.values() if place.dtype.is_floating_point)
    if getattr(config, "quantization_config", None) is None:
        skeleton = Skeleton(
            config, dtype, attn_implementation=attention or attention_without_packages(config)
        )
        stored = _used(skeleton, config, stored)
        if wrong := mis_shaped(stored, skeleton.wanted):  # under ZeRO-3 transformers doesn't look
            raise DsrunError([Problem(wrong, str(folder), "Is config.json the checkpoint's own?")])
        if skeleton.fits(stored):
            _fill(skeleton, stored, device, job)
            _set_generation(skeleton.model, folder)
            return skeleton.model
    return _by_transformers(folder, dtype, device, attention or attention_without_packages(config), job)


def _used(skeleton: Skeleton, config: Any, stored: Mapping[str, Stored]) -> Mapping[str, Stored]:
    """The stored weights that a model is made of, by its own names: of a whole checkpoint for its text part alone."""
    left = ignored(type(skeleton.model), stored)
    stored = {name: place for name, place in stored.items() if name not in left}
    if (
        config.get_text_config() is config
        or skeleton.model.config.get_text_config() is not skeleton.model.config
    ):
        return stored
    names = text_names(Skeleton(config, torch.float32, kind=whole_class(config)).model, skeleton.model)
    renamed = {names[name]: place for name, place in stored.items() if name in names}
    return renamed or stored


def whole_checkpoint(folder: Path) -> Any:
    """All of a checkpoint that has more than text, as its own class has it: on the CPU, in the files' own type."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    kind, stored = whole_class(config), listed(folder)
    dtype = next(place.dtype for place in stored.values() if place.dtype.is_floating_point)
    skeleton = Skeleton(config, dtype, kind=kind)
    left = ignored(kind, stored)
    stored = {name: place for name, place in stored.items() if name not in left}
    if skeleton.fits(stored):
        skeleton.fill(stored, torch.device("cpu"))
        return skeleton.model
    model, info = kind.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    _check_loaded(folder, info)
    return model


def towers_note(job: Job, model: Any) -> str:
    """A note on what of a checkpoint is not trained, and the memory that this saves; empty for a model of text alone.

    A weight that is trained has a gradient, and AdamW's two states and fp32 copy; in fp32 it is its own copy.
    """
    if job.model.source == "chatglm":
        return ""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(job.prepared.model_dir)
    if config.get_text_config() is config or (kind := whole_class(config)) is None:
        return ""
    with backend_of(job).unaware():
        whole = Skeleton(config, torch.float32, kind=kind).model
    beside = towers(whole)
    parts = sorted({name.removeprefix("model.").partition(".")[0] for name in beside})
    count, loaded = sum(map(torch.numel, beside.values())), type(model) is kind
    width = getattr(torch, DTYPES[job.precision]).itemsize
    saved = 0 if job.peft.freezes else count * (12 if job.precision == "fp32" else 14)
    size = size_text(saved + (0 if loaded else count * width))
    how = "stay as they are" if loaded else "aren't loaded"
    less = f": {size} less" if saved or not loaded else ""
    return f"the text part is trained; {', '.join(parts)} ({count:,} weights) {how}{less}" if count else ""


def _fill(skeleton: Skeleton, stored: Mapping[str, Stored], device: torch.device, job: Job | None) -> None:
    if job:
        backend_of(job).fill(job, skeleton, stored, device)
    else:
        skeleton.fill(stored, device)


def _set_generation(model: Any, folder: Path) -> None:
    from transformers import GenerationConfig

    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)


def _by_transformers(
    folder: Path, dtype: torch.dtype, device: torch.device, attention: str, job: Job | None
) -> Any:
    """transformers' own loading, divided over a job's ranks as its engine wants it."""
    # A model that answers goes onto a GPU shard by shard; an engine moves its model there itself.
    place = {"device_map": {"": device}} if device.type == "cuda" and job is None else {}
    read = partial(_pretrained, folder, dtype, attention, place)
    if job is None:
        return read()

    def outline() -> Any:
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        return Skeleton(config, dtype, attn_implementation=attention).model

    return backend_of(job).divided(job, read, outline, device)


def _pretrained(folder: Path, dtype: torch.dtype, attention: str, place: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    kind, config = class_of(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    model, info = kind.from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=attention, output_loading_info=True, **place,
    )  # fmt: skip
    _check_loaded(folder, info)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        finite.check(getattr(tensor, "ds_tensor", tensor), name, str(folder))
    return model


def _check_loaded(folder: Path, info: dict[str, Any]) -> None:
    """transformers only warns when weights are missing and goes on with random ones; here that is an error."""
    names = ("missing_keys", "mismatched_keys", "error_msgs", "unexpected_keys")
    keys_by_kind = {name: sorted(str(key) for key in info.get(name) or []) for name in names}
    if unexpected := keys_by_kind.pop("unexpected_keys"):
        logger.warning("weights that the model does not use: %s", ", ".join(unexpected[:10]))
    if wrong := [
        f"{name.replace('_', ' ')}: {', '.join(keys[:5])}" for name, keys in keys_by_kind.items() if keys
    ]:
        what = f"the weights do not fit the config ({'; '.join(wrong)})"
        hint = "The rest of them would be random. Is the download complete, and config.json its own?"
        raise DsrunError(what, where=str(folder), hint=hint)


# To answer


def load_answering(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", adapter: Path | None = None
) -> Any:
    """The model that answers: a model's folder, an adapter's with the model that it names, or both.

    folder: transformers' format or ChatGLM's, or an adapter's folder (adapter is then None). adapter: LoRA's folder, or
    a P-Tuning checkpoint's folder or file, for the model in `folder`. LoRA is merged, in fp32.
    Raises DsrunError where something is missing, or doesn't belong to the other.
    """
    base, stored_adapter, config = folder, None, None
    if adapter is not None:
        stored_adapter = formats.read_adapter(adapter)
    elif (folder / formats.CONFIG).is_file():
        stored_adapter, config = formats.read_adapter(folder), folder / adapters.BASE_CONFIG
        base = _base_folder(stored_adapter, folder)
    model = _load_base(base, dtype, torch.device(device), config)
    if stored_adapter and stored_adapter.method == formats.PREFIX:
        whole = prefix_tuning.read(stored_adapter.weights)
        prefix_tuning.add(model, len(whole), 0.0)
        prefix_tuning.fill(model, whole, stored_adapter.weights)
    elif stored_adapter:
        adapters.merge_into(model, stored_adapter)
    _set_generation(model, folder)
    model.config.use_cache = True
    return model.eval()


def _base_folder(adapter: formats.Adapter, folder: Path) -> Path:
    if adapter.base and (Path(adapter.base) / "config.json").is_file():
        return Path(adapter.base)
    where = str(folder / formats.CONFIG)
    hint = "Put it back, or say where it is now: base_model_name_or_path in that file."
    raise DsrunError(f"the model that it was trained on is not in {adapter.base}", where=where, hint=hint)


def _load_base(folder: Path, dtype: torch.dtype, device: torch.device, config: Path | None) -> Any:
    """A base model. config: the file beside an adapter that has GlmConfig's fields of its base."""
    if not is_original(folder):
        return _from_folder(folder, dtype, device)
    if config is not None and config.is_file():
        return _from_chatglm(folder, read_json_object(config), dtype, device)
    fields = original.glm_fields(read_json_object(folder / "config.json"), folder)
    return _from_chatglm(folder, fields, dtype, device)
