"""What is trained beside a model whose own weights stay as they are: LoRA's matrices (PEFT), or P-Tuning's prefix.

LoRA is put into the model's own layers (peft.inject_adapter_in_model) instead of a wrapper around the model, so that
everything that calls or looks into the model goes on as if there were none. What is trained has the job's precision:
DeepSpeed casts every weight of a 16-bit job, and steps on an fp32 copy of what is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsrun import __version__
from dsrun.errors import DsrunError, raise_all
from dsrun.jobs.spec.job import Job
from dsrun.models import adapters as formats
from dsrun.options.groups import PeftOptions
from dsrun.training import finite
from dsrun.training.models import prefix_tuning
from dsrun.training.models.weights import Stored, open_shard, problems

NAME = "default"
"""What PEFT calls the one adapter of a model."""
PEFT_PREFIX = "base_model.model."
"""What the names in PEFT's files begin with."""
BASE_CONFIG = "base_config.json"
"""Beside an adapter: the transformers config of a model that came in ChatGLM's own format."""


# Before training


def put_on(model: Any, job: Job) -> None:
    """Freeze the model, and add what is trained: the same numbers on every rank, whatever the division.

    Raises DsrunError where the model has no such layers, or the adapter that is gone on with is another model's.
    """
    spec = job.peft
    start = formats.read_adapter(Path(spec.adapter)) if spec.adapter else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        if spec.method == formats.PREFIX:
            whole = prefix_tuning.read(start.weights) if start else None
            positions = _positions(spec, start, whole)
            prefix_tuning.add(model, positions, spec.prefix_dropout)
            if whole is not None and start:
                prefix_tuning.fill(model, whole, start.weights)
        else:
            add_lora(model, spec)
            if start:
                fill_lora(model, open_shard(start.weights), start.weights)


def _positions(spec: PeftOptions, start: formats.Adapter | None, whole: torch.Tensor | None) -> int:
    """Of the checkpoint, where its config didn't say before."""
    return spec.pre_seq_len if whole is None or (start and start.fields) else len(whole)


def add_lora(model: Any, spec: PeftOptions) -> None:
    """Put LoRA's matrices on the layers that the spec names, and leave nothing else to be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=_plain(spec.lora_alpha),
        lora_dropout=spec.lora_dropout,
        target_modules=targets(model, spec.lora_target),
        bias="none",
        task_type="CAUSAL_LM",
    )
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_lora(name))
    model.train(model.training)


def _plain(number: float) -> float:
    """PEFT's configs say 16, not 16.0."""
    return int(number) if float(number).is_integer() else number


def targets(model: Any, wanted: str) -> list[str]:
    """The last parts of the names of the linear layers that are meant. Raises DsrunError for one that isn't there."""
    output = model.get_output_embeddings()
    linear = [
        (name.rpartition(".")[2], module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    there = {name for name, _ in linear}
    inner = {name for name, module in linear if module is not output}
    if wanted == "all":
        if not inner:
            what = f"{type(model).__name__} has no linear layers that LoRA could be put on"
            raise DsrunError(what, where="--method lora", hint="Use --method full.")
        return sorted(inner)
    named = [name.strip() for name in wanted.split(",") if name.strip()]
    if wrong := [name for name in named if name not in there]:
        what = f"{', '.join(wrong)}: no linear layer of {type(model).__name__} is called so"
        raise DsrunError(what, where="--lora-target", hint=f"Its linear layers: {', '.join(sorted(there))}.")
    if not named:
        raise DsrunError("names no layer", where="--lora-target", hint="Leave it out for all of them.")
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and any(name in named for name in there - inner):
        what = "the output's weights are the embedding's, which LoRA would change, too"
        raise DsrunError(what, where="--lora-target", hint="Leave the output's layer out.")
    return sorted(named)


def _is_lora(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def peft_name(name: str) -> str:
    """How PEFT's files call a weight of LoRA's."""
    return PEFT_PREFIX + name.replace(f".{NAME}.", ".")


@torch.no_grad()
def fill_lora(model: Any, stored: Mapping[str, torch.Tensor], where: Path) -> None:
    """Set LoRA's weights, all of them. Raises DsrunError where there are others in the file than in the model."""
    wanted = {peft_name(name): weight for name, weight in model.named_parameters() if _is_lora(name)}
    found = {name: Stored(where, name, tuple(one.shape), one.dtype) for name, one in stored.items()}
    shapes = {name: tuple(weight.shape) for name, weight in wanted.items()}
    raise_all(problems(found, shapes, {}, str(where), hint="Was it trained on this model?"))
    for name, weight in wanted.items():
        finite.check(stored[name], name, str(where))
        weight.copy_(stored[name])


def quantise(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """QLoRA's base (arXiv:2305.14314): every linear layer but the output's in 4 bits (nf4), their scales in 8.

    model: on the CPU, where the mapped files are its memory; layer by layer it goes to the device.
    """
    import bitsandbytes as bnb

    output = model.get_output_embeddings()
    for path, layer in list(model.named_modules()):
        if not isinstance(layer, nn.Linear) or layer is output:
            continue
        bias = layer.bias is not None
        small = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, bias, dtype, compress_statistics=True, quant_type="nf4",
            device="meta",
        )  # fmt: skip
        small.weight = bnb.nn.Params4bit(
            layer.weight.data, requires_grad=False, compress_statistics=True, quant_type="nf4"
        )
        if bias:
            small.bias = nn.Parameter(layer.bias.data.to(dtype), requires_grad=False)
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, small.to(device))
        layer.weight = None
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            parameter.data = parameter.data.to(dtype)
    model.to(device)
    model.is_loaded_in_4bit = True  # by which PEFT knows which of its layers to take


# After training


def scales(model: Any) -> dict[str, float]:
    """LoRA's layers by their names, and what the product of their matrices counts."""
    return {
        name: float(module.scaling[NAME])
        for name, module in model.named_modules()
        if isinstance(getattr(module, "scaling", None), dict) and NAME in module.scaling
    }


@torch.no_grad()
def merged(
    name: str, weight: torch.Tensor, lora: Mapping[str, torch.Tensor], counts: Mapping[str, float]
) -> torch.Tensor:
    """A weight of the base with LoRA's product added: computed in fp32, rounded once, to the base's own type.

    lora: all of it, by their names in the model; counts: see `scales`. What LoRA is not on stays as it is.
    """
    layer = name.removesuffix(".weight")
    if layer == name or layer not in counts:
        return weight
    down, up = (lora[f"{layer}.lora_{part}.{NAME}.weight"] for part in "AB")
    return _merged(weight, down, up, counts[layer]).to(weight.dtype)


def source_of(job: Job) -> str:
    """Where the model that an adapter belongs to is."""
    return job.model.location if job.model.source == "chatglm" else job.prepared.model_dir


def write_adapter(
    model: Any, trained: Mapping[str, torch.Tensor], tokenizer: Any, job: Job, folder: Path
) -> None:
    """An adapter's folder: LoRA's as PEFT writes it, a prefix as ChatGLM2's script does; the tokenizer beside it.

    trained: the trained weights by their names in the model.
    """
    if job.peft.method == formats.PREFIX:
        config: dict[str, Any] = {
            "adapter_type": formats.PREFIX,
            "base_model_name_or_path": source_of(job),
            "pre_seq_len": prefix_tuning.write(trained, folder),
            "prefix_projection": False,
            "dsrun_version": __version__,
        }
        (folder / formats.CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    else:
        from safetensors.torch import save_file

        stored = {peft_name(name): weight.contiguous() for name, weight in trained.items()}
        save_file(stored, folder / formats.WEIGHTS[0], {"format": "pt"})
        peft_config = model.peft_config[NAME]
        peft_config.base_model_name_or_path = source_of(job)
        peft_config.inference_mode = True
        peft_config.save_pretrained(folder)
        peft_config.inference_mode = False
    if job.model.source == "chatglm":
        config = {**job.model.architecture}
        (folder / BASE_CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
    tokenizer.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)


def merge_into(model: Any, found: formats.Adapter) -> None:
    """Add an adapter of plain LoRA to a model's weights."""
    stored = open_shard(found.weights)
    count = found.fields["lora_alpha"] / found.fields["lora_rank"]
    pattern = re.compile(re.escape(PEFT_PREFIX) + r"(.+)\.lora_A\.weight")
    layers = [match[1] for name in stored if (match := pattern.fullmatch(name))]
    state = model.state_dict()
    expected = {f"{PEFT_PREFIX}{layer}.lora_{part}.weight" for layer in layers for part in "AB"}
    absent = {f"{layer}.weight" for layer in layers} - state.keys()
    wrong = sorted({*(stored.keys() ^ expected), *absent})
    if wrong or not layers:
        what = f"doesn't fit the model: {', '.join(wrong[:3]) or 'it holds no LoRA weights'}"
        raise DsrunError(what, where=str(found.weights), hint="Was it trained on this model?")
    with torch.no_grad():
        for layer in layers:
            weight = state[f"{layer}.weight"]
            names = [f"{PEFT_PREFIX}{layer}.lora_{part}.weight" for part in "AB"]
            for name in names:
                finite.check(stored[name], name, str(found.weights))
            down, up = (stored[name].to(weight.device) for name in names)
            if (up.shape[0], down.shape[1]) != tuple(weight.shape):
                what = f"{layer}: {up.shape[0]} x {down.shape[1]}, and the model's is {list(weight.shape)}"
                raise DsrunError(what, where=str(found.weights), hint="Was it trained on this model?")
            weight.copy_(_merged(weight, down, up, count))


def _merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, count: float) -> torch.Tensor:
    """A layer's matrix with LoRA's product added, in fp32. weight: [out, in]; down: [rank, in]; up: [out, rank]."""
    return weight.float() + count * (up.float() @ down.float())
