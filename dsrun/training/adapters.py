"""What is trained beside a model whose own weights stay as they are: LoRA's matrices (PEFT), or P-Tuning's prefix.

LoRA is put into the model's own layers (peft.inject_adapter_in_model) instead of a wrapper around the model, so that
everything that calls or looks into the model goes on as if there were none. What is trained has the job's precision:
DeepSpeed casts every weight of a 16-bit job, and steps on an fp32 copy of what is trained.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dsrun import __version__
from dsrun.errors import DsrunError, Problem
from dsrun.jobs import adapters as formats
from dsrun.jobs import chatglm
from dsrun.jobs.job import Job, TuningSpec
from dsrun.training import ptuning
from dsrun.training.weights import Skeleton, listed, open_shard

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
    spec = job.tuning
    start = formats.read_adapter(Path(spec.adapter)) if spec.adapter else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        if spec.method == formats.PREFIX:
            whole = ptuning.read(start.weights) if start else None
            positions = _positions(spec, start, whole)
            ptuning.add(model, positions, spec.prefix_dropout)
            if whole is not None and start:
                ptuning.fill(model, whole, start.weights)
        else:
            add_lora(model, spec)
            if start:
                fill_lora(model, open_shard(start.weights), start.weights)


def _positions(spec: TuningSpec, start: formats.Adapter | None, whole: torch.Tensor | None) -> int:
    """Of the checkpoint, where its config didn't say before."""
    return spec.pre_seq_len if whole is None or (start and start.fields) else len(whole)


def add_lora(model: Any, spec: TuningSpec) -> None:
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
    problems = []
    hint = "Was it trained on this model?"
    if missing := sorted(wanted.keys() - stored.keys()):
        problems.append(Problem(f"lacks {len(missing)} weights: {', '.join(missing[:3])}", str(where), hint))
    if foreign := sorted(stored.keys() - wanted.keys()):
        what = f"holds {len(foreign)} weights that the model has no place for: {', '.join(foreign[:3])}"
        problems.append(Problem(what, str(where), hint))
    shapes = [
        f"{name} has shape {list(stored[name].shape)}, this model's is {list(weight.shape)}"
        for name, weight in wanted.items()
        if name in stored and stored[name].shape != weight.shape
    ]
    if shapes:
        problems.append(Problem("; ".join(shapes[:3]), str(where), hint))
    if problems:
        raise DsrunError(problems)
    for name, weight in wanted.items():
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
def merge(
    base: dict[str, torch.Tensor], lora: Mapping[str, torch.Tensor], counts: Mapping[str, float]
) -> None:
    """Add LoRA's products to the base's matrices: computed in fp32, rounded once, to the base's own type.

    base: the model's state dict; lora: by their names in the model; counts: see `scales`.
    """
    for layer, count in counts.items():
        down, up = (lora[f"{layer}.lora_{part}.{NAME}.weight"].float() for part in "AB")
        name = f"{layer}.weight"
        base[name] = (base[name].float() + count * (up @ down)).to(base[name].dtype)


def source_of(job: Job) -> str:
    """Where the model that an adapter belongs to is."""
    return job.model.location if job.model.source == "chatglm" else job.prepared.model_dir


def plain_base(job: Job) -> Any:
    """The model as it came, on the CPU and in its own type; in a process that may train with ZeRO-3."""
    with _unaware_of_zero3():
        if job.model.source == "chatglm":
            return _from_chatglm(Path(job.model.location), job.model.architecture, None, torch.device("cpu"))
        return _from_folder(Path(job.prepared.model_dir), None, torch.device("cpu"))


def write_adapter(
    model: Any, trained: Mapping[str, torch.Tensor], tokenizer: Any, job: Job, folder: Path
) -> None:
    """An adapter's folder: LoRA's as PEFT writes it, a prefix as ChatGLM2's script does; the tokenizer beside it.

    trained: the trained weights by their names in the model.
    """
    if job.tuning.method == formats.PREFIX:
        config: dict[str, Any] = {
            "adapter_type": formats.PREFIX,
            "base_model_name_or_path": source_of(job),
            "pre_seq_len": ptuning.write(trained, folder),
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


@contextmanager
def _unaware_of_zero3() -> Iterator[None]:
    """While it lasts transformers makes models that are not partitioned."""
    from transformers.integrations import deepspeed as known

    remembered = known._hf_deepspeed_config_weak_ref
    known.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        if remembered is not None and (config := remembered()) is not None:
            known.set_hf_deepspeed_config(config)


# To be asked


def load_answering(
    folder: Path, *, dtype: torch.dtype, device: torch.device | str = "cpu", adapter: Path | None = None
) -> Any:
    """The model that answers: a model's folder, an adapter's with the model that it names, or both.

    folder: transformers' format or ChatGLM's, or an adapter's folder (adapter is then None). adapter: LoRA's folder, or
    a P-Tuning checkpoint's folder or file, for the model in `folder`. LoRA is merged, in fp32.
    Raises DsrunError where something is missing, or doesn't belong to the other.
    """
    given, wanted = Path(folder), torch.device(device)
    found: formats.Adapter | None
    if adapter is None and (given / formats.CONFIG).is_file():
        found = formats.read_adapter(given)
        model = _load_base(_base_folder(found, given), dtype, wanted, given / BASE_CONFIG)
        told = given
    else:
        found = formats.read_adapter(Path(adapter)) if adapter else None
        model, told = _load_base(given, dtype, wanted, None), given
    if found and found.method == formats.PREFIX:
        whole = ptuning.read(found.weights)
        ptuning.add(model, len(whole), 0.0)
        ptuning.fill(model, whole, found.weights)
    elif found:
        _merge_into(model, found)
    if (told / "generation_config.json").is_file():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(told)
    model.config.use_cache = True
    return model.eval()


def answering_tokenizer(folder: Path) -> Any:
    """The tokenizer of a folder as `load_answering` takes it, padding on the left."""
    from transformers import AutoTokenizer

    given = Path(folder)
    if (given / "config.json").is_file() and _is_original(given):
        from dsrun.training.tokenizer import folder_tokenizer

        chatglm.check_tokenizer(given)
        tokenizer = folder_tokenizer(given, chatglm.prompt_format(given, None))
        tokenizer.padding_side = "left"
    else:
        tokenizer = AutoTokenizer.from_pretrained(given, padding_side="left", trust_remote_code=False)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _base_folder(found: formats.Adapter, folder: Path) -> Path:
    if found.base and (Path(found.base) / "config.json").is_file():
        return Path(found.base)
    where = str(folder / formats.CONFIG)
    hint = "Put it back, or say where it is now: base_model_name_or_path in that file."
    raise DsrunError(f"the model that it was trained on is not in {found.base}", where=where, hint=hint)


def _load_base(folder: Path, dtype: torch.dtype, device: torch.device, config: Path | None) -> Any:
    if not _is_original(folder):
        return _from_folder(folder, dtype, device)
    if config is not None and config.is_file():
        return _from_chatglm(folder, _read(config), dtype, device)
    return _from_chatglm(folder, chatglm.glm_fields(_read(folder / "config.json"), folder), dtype, device)


def _is_original(folder: Path) -> bool:
    """Whether a model's folder is in ChatGLM's own format."""
    return _read(folder / "config.json").get("model_type") == chatglm.MODEL_TYPE


def _read(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DsrunError(f"can't be read: {error}", where=str(path)) from error
    if not isinstance(config, dict):
        raise DsrunError("is not a model's config", where=str(path))
    return config


def _from_chatglm(
    folder: Path, architecture: Mapping[str, Any], dtype: torch.dtype | None, device: torch.device
) -> Any:
    from transformers import AutoConfig

    from dsrun.training.chatglm import checked_weights, glm_weights

    config = AutoConfig.for_model(**architecture)
    config.architectures = ["GlmForCausalLM"]
    if dtype is None:
        dtype = next(iter(glm_weights(folder, config).values())).dtype
    skeleton = Skeleton(config, dtype, attn_implementation="sdpa")
    skeleton.fill(checked_weights(folder, skeleton, config), device)
    return skeleton.model


def _from_folder(folder: Path, dtype: torch.dtype | None, device: torch.device) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    stored = listed(folder)
    dtype = dtype or next(one.dtype for one in stored.values() if one.dtype.is_floating_point)
    if getattr(config, "quantization_config", None) is None:
        skeleton = Skeleton(config, dtype, attn_implementation="sdpa")
        if skeleton.fits(stored):
            skeleton.fill(stored, device)
            if (folder / "generation_config.json").is_file():
                skeleton.model.generation_config = GenerationConfig.from_pretrained(folder)
            return skeleton.model
    # Names that only transformers knows how to change, or quantised weights; onto a GPU shard by shard.
    place = {"device_map": {"": device}} if device.type == "cuda" else {}
    model, info = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", output_loading_info=True, trust_remote_code=False,
        **place,
    )  # fmt: skip
    faults = ("missing_keys", "mismatched_keys", "error_msgs")
    if wrong := [
        f"{name.replace('_', ' ')}: {', '.join(sorted(map(str, keys))[:5])}"
        for name in faults
        if (keys := info.get(name))
    ]:  # transformers would go on with random ones
        hint = "Is the folder complete, and config.json its own?"
        raise DsrunError(
            f"the weights do not fit the config ({'; '.join(wrong)})", where=str(folder), hint=hint
        )
    return model


def _merge_into(model: Any, found: formats.Adapter) -> None:
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
            down, up = (
                stored[f"{PEFT_PREFIX}{layer}.lora_{part}.weight"].to(weight.device, torch.float32)
                for part in "AB"
            )
            if (up.shape[0], down.shape[1]) != tuple(weight.shape):
                what = f"{layer}: {up.shape[0]} x {down.shape[1]}, and the model's is {list(weight.shape)}"
                raise DsrunError(what, where=str(found.weights), hint="Was it trained on this model?")
            weight.copy_(weight.float() + count * (up @ down))
