"""What is trained beside a model whose own weights stay as they are: LoRA's matrices (PEFT), or P-Tuning's prefix.

LoRA is put into the model's own layers (peft.inject_adapter_in_model) instead of a wrapper around the model, so that
everything that calls or looks into the model goes on as if there were none. What is trained has the job's precision:
DeepSpeed casts every weight of a 16-bit job, and steps on an fp32 copy of what is trained.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from dsrun import __version__
from dsrun.errors import DsrunError, raise_all
from dsrun.job.job import Job
from dsrun.models import adapters as formats
from dsrun.options.table import PeftOptions
from dsrun.training import finite
from dsrun.training.models import prefix_tuning
from dsrun.training.models.weights import Stored, open_shard, problems

NAME = "default"
"""What PEFT calls the one adapter of a model."""
TARGET = "--lora-target"
LAYER = re.compile(r"^.*?\.\d+\.")
"""What stands before a weight's name in its layer: model.layers.3."""
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
            if targets(model, spec.lora_target).parameters:
                problems_of = partial(formats.check_tensors, spec, compiles=job.training.compile)
                raise_all(problems_of(stage=job.zero_stage, fsdp=bool(job.fsdp)))
            add_lora(model, spec)
            if start:
                fill_lora(model, open_shard(start.weights), start.weights)


def _positions(spec: PeftOptions, start: formats.Adapter | None, whole: torch.Tensor | None) -> int:
    """Of the checkpoint, where its config didn't say before."""
    return spec.pre_seq_len if whole is None or (start and start.fields) else len(whole)


def add_lora(model: Any, spec: PeftOptions) -> None:
    """Put LoRA's matrices on the layers that the spec names, and leave nothing else to be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    meant = targets(model, spec.lora_target)
    config = LoraConfig(
        r=spec.lora_rank,
        lora_alpha=_plain(spec.lora_alpha),
        lora_dropout=spec.lora_dropout,
        target_modules=meant.modules,
        **({"target_parameters": meant.parameters} if meant.parameters else {}),
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


class Targets(NamedTuple):
    """What LoRA's matrices are put on, as PEFT's LoraConfig says it."""

    modules: list[str]
    """Last parts of linear layers' names."""
    parameters: list[str]
    """Tensors that no linear layer holds, such as a mixture's experts: their names behind the layer's number."""


def targets(model: Any, wanted: str) -> Targets:
    """What --lora-target means in this model. Raises DsrunError for a name that isn't there.

    `all` leaves out the output's layer and routers, where these are linear layers: who wants them names them.
    """
    output, mixtures = model.get_output_embeddings(), _mixtures(model)
    routers = [router for mixture in mixtures for router in mixture.routers.values()]
    modules, tensors = defaultdict(set), defaultdict(set)  # word -> what it names
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            last = name.rpartition(".")[2]
            modules[last].add(last)
            if not any(module is one for one in (output, *routers)):
                modules[formats.ALL].add(last)
    for mixture in mixtures:
        for name in mixture.tensors:
            tensors[formats.EXPERTS].add(name)
            for word in _endings(name):
                tensors[word].add(name)
        for name, router in mixture.routers.items():
            for word in () if isinstance(router, nn.Linear) else _endings(name):
                tensors[word].add(f"{name}.weight")
    linear = sorted(modules.keys() - {formats.ALL})
    named = [name.strip() for name in wanted.split(",") if name.strip()]
    if wanted == formats.ALL and not modules[formats.ALL]:
        what = f"{type(model).__name__} has no linear layers that LoRA could be put on"
        raise DsrunError(what, where="--method lora", hint="Use --method full.")
    if wrong := [name for name in named if not modules[name] and not tensors[name]]:
        what = f"{', '.join(wrong)}: no linear layer of {type(model).__name__} is called so"
        there = sorted({name for names in tensors.values() for name in names})
        more = f" Of its experts and routers: {', '.join(there)}." if there else ""
        raise DsrunError(what, where=TARGET, hint=f"Its linear layers: {', '.join(linear)}.{more}")
    if not named:
        raise DsrunError("names no layer", where=TARGET, hint="Leave it out for all of them.")
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and any(name in named for name in {*linear} - modules[formats.ALL]):
        what = "the output's weights are the embedding's, which LoRA would change, too"
        raise DsrunError(what, where=TARGET, hint="Leave the output's layer out.")
    return Targets(*(sorted({one for name in named for one in found[name]}) for found in (modules, tensors)))


class ExpertLayer(NamedTuple):
    """The experts of one layer, and what chooses among them; names are those behind the layer's number."""

    tensors: list[str]
    """Names of the tensors that hold a matrix of every expert: [experts, ...]."""
    routers: dict[str, Any]
    """Modules with a weight of a row for each expert."""


def _mixtures(model: Any) -> list[ExpertLayer]:
    """Of each layer that is one. transformers' classes of experts, whatever the family, end in Experts."""
    found = []
    for path, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if not type(module).__name__.endswith("Experts") or not isinstance(count, int):
            continue
        block, _, own = path.rpartition(".")
        behind = LAYER.sub("", path)
        tensors = [
            f"{behind}.{name}"
            for name, weight in module.named_parameters(recurse=False)
            if len(shape_of(weight)) == 3
        ]
        routers = {
            LAYER.sub("", f"{block}.{name}"): beside
            for name, beside in model.get_submodule(block).named_modules()
            if name
            and name.partition(".")[0] != own
            and shape_of(getattr(beside, "weight", None))[:1] == (count,)
        }
        found.append(ExpertLayer(tensors, routers))
    return found


def shape_of(weight: Any) -> tuple[int, ...]:
    """A weight's, whole; ZeRO-3 leaves none to what it has taken apart. Nothing of what is no tensor."""
    return tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))


def _endings(name: str) -> list[str]:
    """What a dotted name may be called: itself, or its last parts."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


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


class Added(NamedTuple):
    """What LoRA adds to one weight."""

    layer: str
    """The name of the module that holds its matrices."""
    scale: float
    """What the product of the matrices counts."""
    transposed: bool = False
    """Whether experts' matrices are [in, out]; a linear layer's are [out, in]."""


def additions(model: Any) -> dict[str, Added]:
    """What LoRA adds to each weight that it is on, by the weight's name in the model without it."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict) and NAME in module.scaling:
            tensor = getattr(module, "parameter_name", "weight")  # of PEFT's wrapper around a tensor
            transposed = getattr(module.get_base_layer(), "is_transposed", False)
            weight = f"{name.replace('.base_layer', '')}.{tensor}"
            found[weight] = Added(name, float(module.scaling[NAME]), transposed)
    return found


@torch.no_grad()
def merged(
    name: str, weight: torch.Tensor, lora: Mapping[str, torch.Tensor], added: Mapping[str, Added]
) -> torch.Tensor:
    """A weight of the base with LoRA's product added: computed in fp32, rounded once, to the base's own type.

    lora: all of it, by their names in the model; added: see `additions`. What LoRA is not on stays as it is.
    """
    if name not in added:
        return weight
    down, up = (lora[f"{added[name].layer}.lora_{part}.{NAME}.weight"] for part in "AB")
    return _merged(weight, down, up, added[name]).to(weight.dtype)


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
    added = _additions_of(model, found, stored)
    state = model.state_dict()
    expected = {f"{PEFT_PREFIX}{one.layer}.lora_{part}.weight" for one in added.values() for part in "AB"}
    wrong = sorted({*(stored.keys() ^ expected), *(added.keys() - state.keys())})
    if wrong or not added:
        what = f"doesn't fit the model: {', '.join(wrong[:3]) or 'it holds no LoRA weights'}"
        raise DsrunError(what, where=str(found.weights), hint="Was it trained on this model?")
    with torch.no_grad():
        for name, one in added.items():
            weight = state[name]
            names = [f"{PEFT_PREFIX}{one.layer}.lora_{part}.weight" for part in "AB"]
            for stored_name in names:
                finite.check(stored[stored_name], stored_name, str(found.weights))
            down, up = (stored[stored_name].to(weight.device) for stored_name in names)
            sides = tuple(weight.shape[-2:])
            if (up.shape[0], down.shape[1]) != (
                sides[::-1] if one.transposed and weight.dim() == 3 else sides
            ):
                what = f"{name}: {up.shape[0]} x {down.shape[1]}, and the model's is {list(weight.shape)}"
                raise DsrunError(what, where=str(found.weights), hint="Was it trained on this model?")
            weight.copy_(_merged(weight, down, up, one))


def _additions_of(model: Any, found: formats.Adapter, stored: Mapping[str, Any]) -> dict[str, Added]:
    """What a stored adapter adds to a plain model's weights.

    The file's names say a linear layer, but not which tensor of a mixture's experts: PEFT's own wrappers say it, around
    a model of shapes alone.
    """
    if formats.names_tensors(found.fields["lora_target"]):
        with torch.device("meta"):
            outline = type(model)(model.config)
            add_lora(outline, PeftOptions(method=formats.LORA, **found.fields))
        return additions(outline)
    count = found.fields["lora_alpha"] / found.fields["lora_rank"]
    pattern = re.compile(re.escape(PEFT_PREFIX) + r"(.+)\.lora_A\.weight")
    layers = [match[1] for name in stored if (match := pattern.fullmatch(name))]
    return {f"{layer}.weight": Added(layer, count) for layer in layers}


def _merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, added: Added) -> torch.Tensor:
    """A weight with LoRA's product added, in fp32.

    A matrix is [out, in], down [rank, in], up [out, rank]. A tensor of experts is [experts, out, in], or the other way
    round; PEFT lays their thin matrices side by side (ParamWrapper in peft/tuners/lora/layer.py): down is
    [experts * rank, in], one expert after the other, up [out, rank * experts], the experts' columns in turn.
    """
    down, up = down.float(), up.float()
    if weight.dim() == 2:
        return weight.float() + added.scale * (up @ down)
    experts = weight.shape[0]
    product = up.unflatten(1, (-1, experts)).permute(2, 0, 1) @ down.unflatten(0, (experts, -1))
    return weight.float() + added.scale * (product.mT if added.transposed else product)


def trained_parts(model: Any) -> str:
    """What of a mixture of experts LoRA is on, in words; nothing of another model."""
    mixtures = _mixtures(model)
    if not mixtures:
        return ""
    parts = sorted({LAYER.sub("", name).removesuffix(".weight") for name in additions(model)})
    tensors = {LAYER.sub("", name).replace(".base_layer", "") for one in mixtures for name in one.tensors}
    if tensors & {*parts}:
        return f": {', '.join(parts)}"
    return f": {', '.join(parts)}; no experts ({TARGET} {formats.ALL},{formats.EXPERTS} trains them, too)"
