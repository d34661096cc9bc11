"""Adapters, trained beside a model whose own weights stay as they are: LoRA's matrices (PEFT), or P-Tuning's prefix.

LoRA is put into the model's own layers (peft.inject_adapter_in_model) instead of a wrapper around the model, so that
everything that calls or looks into the model goes on as if there were none. Trained weights have the job's precision:
DeepSpeed casts every weight of a 16-bit job, and steps an fp32 copy of the trained ones.
"""

from __future__ import annotations

import ast
import functools
import inspect
import json
import re
import textwrap
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from dsrun import __version__
from dsrun.errors import DsrunError, raise_all
from dsrun.job.job import Job
from dsrun.models import adapters as formats
from dsrun.options.table import PeftOptions
from dsrun.training import finite
from dsrun.training.models import prefix_tuning
from dsrun.training.models.text_part import text_path, towers
from dsrun.training.models.weights import Stored, open_shard, problems

NAME = "default"
"""PEFT's name for the one adapter of a model."""
TARGET = "--lora-target"
LAYER = re.compile(r"^.*?\.\d+\.")
"""The part of a weight's name before its name in the layer: model.layers.3."""
PEFT_PREFIX = "base_model.model."
"""The beginning of the names in PEFT's files."""
BASE_CONFIG = "base_config.json"
"""A file beside an adapter: the transformers config of a model that came in ChatGLM's own format."""


# Before training


def put_on(model: Any, job: Job) -> None:
    """Freeze the model, and add the adapter: the same numbers on every rank, whatever the division.

    Raises DsrunError where the model has no such layers, or where the adapter to start from is another model's.
    """
    spec = job.peft
    start = formats.read_adapter(Path(spec.adapter)) if spec.adapter else None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.training.seed)
        if spec.method == formats.PREFIX:
            whole = prefix_tuning.read(start.weights) if start else None
            # A checkpoint without a config, such as ChatGLM2's own, tells the length of its prefix only now.
            unknown = whole is not None and not (start and start.fields)
            positions = len(whole) if whole is not None and unknown else spec.pre_seq_len
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


def add_lora(model: Any, spec: PeftOptions) -> None:
    """Put LoRA's matrices on the layers that the spec names, and leave nothing else to be trained."""
    from peft import LoraConfig, inject_adapter_in_model

    chosen = targets(model, spec.lora_target)
    alpha = (
        int(spec.lora_alpha) if float(spec.lora_alpha).is_integer() else spec.lora_alpha
    )  # 16, not 16.0, in files
    # The names of a tower's layers are often those of the text part's.
    modules = formats.inside(text_path(model), chosen.modules) if towers(model) else chosen.modules
    config = LoraConfig(
        r=spec.lora_rank, lora_alpha=alpha, lora_dropout=spec.lora_dropout, target_modules=modules,
        bias="none", task_type="CAUSAL_LM",
        **({"target_parameters": chosen.parameters} if chosen.parameters else {}),
    )  # fmt: skip
    model.requires_grad_(False)
    inject_adapter_in_model(config, model, adapter_name=NAME)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_is_lora(name))
    model.train(model.training)


class Targets(NamedTuple):
    """The parts of a model that LoRA's matrices are put on, as PEFT's LoraConfig names them."""

    modules: list[str]
    """Last parts of linear layers' names."""
    parameters: list[str]
    """Tensors that no linear layer holds, such as a mixture's experts: their names behind the layer's number."""


def linear_layers(model: Any) -> list[nn.Linear]:
    """The linear layers of a model that LoRA is put on by default: all but the output's, routers, and those that are
    passed by."""
    output = model.get_output_embeddings()
    left_out = [output, *(router for mixture in _mixtures(model) for router in mixture.routers.values())]
    left_out += passed_by(model).values()
    linear = (module for module in model.modules() if isinstance(module, nn.Linear))
    return [module for module in linear if not any(module is other for other in left_out)]


def passed_by(model: Any) -> dict[str, nn.Linear]:
    """The linear layers, by name, whose weight another module's code takes for itself, without a call of the layer.

    What LoRA adds to such a layer would be computed nowhere: Mamba's fused kernels take `self.out_proj.weight`. PEFT
    refuses these layers where it knows the family (_check_lora_target_modules_mamba in peft/tuners/tuners_utils.py).
    """
    return {
        f"{path}.{child}" if path else child: layer
        for path, module in model.named_modules()
        for child, layer in module.named_children()
        if isinstance(layer, nn.Linear) and child in _weights_taken(cast(Any, type(module)))
    }


@functools.cache
def _weights_taken(kind: Any) -> frozenset[str]:
    """The names of the children whose weight the class's forward passes on: `self.NAME.weight`, but no more than its
    dtype, device or shape. Empty where the class has no source."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return frozenset()
    looked_at = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    weights = (
        node.value for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "weight" and id(node) not in looked_at
    )  # fmt: skip
    return frozenset(
        layer.attr for layer in weights
        if isinstance(layer, ast.Attribute) and isinstance(layer.value, ast.Name) and layer.value.id == "self"
    )  # fmt: skip


def targets(model: Any, wanted: str) -> Targets:
    """The parts of this model that --lora-target means. Raises DsrunError for a name that isn't there.

    `all` leaves out the output's layer and routers, where these are linear layers: who wants them names them. A layer
    that is passed by is refused by its name.
    """
    mixtures, usual = _mixtures(model), {id(layer) for layer in linear_layers(model)}
    inside = f"{text_path(model)}." if towers(model) else ""
    modules, tensors = (
        defaultdict(set),
        defaultdict(set),
    )  # a word of the option -> the names that it stands for
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.startswith(inside):
            last = name.rpartition(".")[2]
            modules[last].add(last)
            if id(module) in usual:
                modules[formats.ALL].add(last)
    # Experts and some routers are bare tensors, which PEFT takes by their whole names behind the layer's number; users
    # may write any last parts of such a name.
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
        others = sorted({name for names in tensors.values() for name in names})
        more = f" Of its experts and routers: {', '.join(others)}." if others else ""
        raise DsrunError(what, where=TARGET, hint=f"Its linear layers: {', '.join(linear)}.{more}")
    useless = {name.rpartition(".")[2] for name in passed_by(model)}
    if wrong := [name for name in named if name in useless]:
        what = f"{', '.join(wrong)}: {type(model).__name__}'s kernels take this weight without LoRA's part"
        raise DsrunError(what, where=TARGET, hint="Leave it out; `all` does.")
    if not named:
        raise DsrunError("names no layer", where=TARGET, hint="Leave it out for all of them.")
    taken = {
        name
        for name in sorted({part for word in named for part in modules[word]})
        if _experts_name(model, name)
    }
    if asked := sorted(taken & {*named}):
        what = f"{', '.join(asked)}: PEFT takes the name for that of {type(model).__name__}'s experts"
        raise DsrunError(
            what, where=TARGET, hint="Leave it out; experts stands for all of the experts' matrices."
        )
    modules[formats.ALL] -= taken
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    if tied and any(name in named for name in {*linear} - modules[formats.ALL]):
        what = "the output's weights are the embedding's, which LoRA would change, too"
        raise DsrunError(what, where=TARGET, hint="Leave the output's layer out.")
    return Targets(
        *(sorted({part for word in named for part in parts[word]}) for parts in (modules, tensors))
    )


def _experts_name(model: Any, name: str) -> bool:
    """Whether PEFT puts LoRA on a mixture's experts where a layer's name is given, as transformers 4 meant it.

    It then leaves out the layers that are called so, dense and shared experts' ones (_convert_peft_config_moe).
    """
    from peft import LoraConfig

    try:
        from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
    except ImportError:  # PEFT before it knew transformers 5
        return False
    config = LoraConfig(target_modules=[name])
    try:
        convert_peft_config_for_transformers(config, model, None)
    except ValueError:  # one of two matrices that lie in one tensor
        return True
    return name not in config.target_modules


class ExpertLayer(NamedTuple):
    """The experts of one layer, and the routers that choose among them; names are those behind the layer's number."""

    tensors: list[str]
    """Names of the tensors that hold a matrix of every expert: [experts, ...]."""
    routers: dict[str, Any]
    """Modules with a weight of a row for each expert."""


def _mixtures(model: Any) -> list[ExpertLayer]:
    """A model's layers of experts. In every family transformers' classes of experts end in Experts."""
    mixtures = []
    for path, module in model.named_modules():
        count = getattr(module, "num_experts", None)
        if not type(module).__name__.endswith("Experts") or not isinstance(count, int):
            continue
        block, _, attribute = path.rpartition(".")
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
            and name.partition(".")[0] != attribute
            and shape_of(getattr(beside, "weight", None))[:1] == (count,)
        }
        mixtures.append(ExpertLayer(tensors, routers))
    return mixtures


def shape_of(weight: Any) -> tuple[int, ...]:
    """A weight's whole shape, also of one that ZeRO-3 has taken apart; () for what is no tensor."""
    return tuple(getattr(weight, "ds_shape", getattr(weight, "shape", ())))


def _endings(name: str) -> list[str]:
    """The words for a dotted name: itself, and its last parts."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def _is_lora(name: str) -> bool:
    return ".lora_A." in name or ".lora_B." in name


def peft_name(name: str) -> str:
    """The name of a weight of LoRA's in PEFT's files."""
    return PEFT_PREFIX + name.replace(f".{NAME}.", ".")


@torch.no_grad()
def fill_lora(model: Any, stored: Mapping[str, torch.Tensor], where: Path) -> None:
    """Set all of LoRA's weights. Raises DsrunError where the file has others than the model."""
    wanted = {peft_name(name): weight for name, weight in model.named_parameters() if _is_lora(name)}
    places = {name: Stored(where, name, tuple(tensor.shape), tensor.dtype) for name, tensor in stored.items()}
    shapes = {name: tuple(weight.shape) for name, weight in wanted.items()}
    raise_all(problems(places, shapes, {}, str(where), hint="Was it trained on this model?"))
    for name, weight in wanted.items():
        finite.check(stored[name], name, str(where))
        weight.copy_(stored[name])


def quantise(model: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Make QLoRA's base (arXiv:2305.14314): every linear layer but the output's in 4 bits (nf4), their scales in 8.

    model: on the CPU, where the mapped files are its memory; it goes to the device layer by layer.
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
    """LoRA's addition to one weight."""

    layer: str
    """The name of the module that holds its matrices."""
    scale: float
    """The factor of the matrices' product."""
    transposed: bool = False
    """Whether experts' matrices are [in, out]; a linear layer's are [out, in]."""


def additions(model: Any) -> dict[str, Added]:
    """LoRA's addition to each weight that it is on, by the weight's name in the model without it."""
    added = {}
    for name, module in model.named_modules():
        if isinstance(getattr(module, "scaling", None), dict) and NAME in module.scaling:
            tensor = getattr(module, "parameter_name", "weight")  # of PEFT's wrapper around a tensor
            transposed = getattr(module.get_base_layer(), "is_transposed", False)
            weight = f"{name.replace('.base_layer', '')}.{tensor}"
            added[weight] = Added(name, float(module.scaling[NAME]), transposed)
    return added


@torch.no_grad()
def merged(
    name: str, weight: torch.Tensor, lora: Mapping[str, torch.Tensor], added: Mapping[str, Added]
) -> torch.Tensor:
    """A weight of the base with LoRA's product added: computed in fp32, rounded once, to the base's own type.

    lora: all of LoRA's weights, by their names in the model; added: see `additions`. Other weights stay as they are.
    """
    if name not in added:
        return weight
    down, up = (lora[f"{added[name].layer}.lora_{part}.{NAME}.weight"] for part in "AB")
    return _merged(weight, down, up, added[name]).to(weight.dtype)


def source_of(job: Job) -> str:
    """The folder of the model that an adapter belongs to."""
    return job.model.location if job.model.source == "chatglm" else job.prepared.model_dir


def write_adapter(
    model: Any, trained: Mapping[str, torch.Tensor], tokenizer: Any, job: Job, folder: Path
) -> None:
    """Write an adapter's folder: LoRA's as PEFT writes it, a prefix as ChatGLM2's script does; and the tokenizer.

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


def merge_into(model: Any, adapter: formats.Adapter) -> None:
    """Add an adapter of plain LoRA to a model's weights."""
    stored = open_shard(adapter.weights)
    added = _additions_of(model, adapter, stored)
    state = model.state_dict()
    names_of = {
        name: [f"{PEFT_PREFIX}{addition.layer}.lora_{part}.weight" for part in "AB"]
        for name, addition in added.items()
    }
    expected = {stored_name for names in names_of.values() for stored_name in names}
    wrong = sorted({*(stored.keys() ^ expected), *(added.keys() - state.keys())})
    if wrong or not added:
        what = f"doesn't fit the model: {', '.join(wrong[:3]) or 'it holds no LoRA weights'}"
        raise DsrunError(what, where=str(adapter.weights), hint="Was it trained on this model?")
    with torch.no_grad():
        for name, addition in added.items():
            weight = state[name]
            for stored_name in names_of[name]:
                finite.check(stored[stored_name], stored_name, str(adapter.weights))
            down, up = (stored[stored_name].to(weight.device) for stored_name in names_of[name])
            sides = tuple(weight.shape[-2:])
            sides = sides[::-1] if addition.transposed and weight.dim() == 3 else sides
            if (up.shape[0], down.shape[1]) != sides:
                what = f"{name}: {up.shape[0]} x {down.shape[1]}, and the model's is {list(weight.shape)}"
                raise DsrunError(what, where=str(adapter.weights), hint="Was it trained on this model?")
            weight.copy_(_merged(weight, down, up, addition))


def _additions_of(model: Any, adapter: formats.Adapter, stored: Mapping[str, Any]) -> dict[str, Added]:
    """A stored adapter's additions to a plain model's weights.

    The file's names tell a linear layer, but not which tensor of a mixture's experts. PEFT's own wrappers tell it: they
    are put around a model that has only shapes.
    """
    if formats.names_tensors(adapter.fields["lora_target"]):
        with torch.device("meta"):
            outline = type(model)(model.config)
            add_lora(outline, PeftOptions(method=formats.LORA, **adapter.fields))
        return additions(outline)
    scale = adapter.fields["lora_alpha"] / adapter.fields["lora_rank"]
    pattern = re.compile(re.escape(PEFT_PREFIX) + r"(.+)\.lora_A\.weight")
    layers = [match[1] for name in stored if (match := pattern.fullmatch(name))]
    return {f"{layer}.weight": Added(layer, scale) for layer in layers}


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
    """The parts of a mixture of experts that LoRA is on, in words; empty for another model."""
    mixtures = _mixtures(model)
    if not mixtures:
        return ""
    parts = sorted({LAYER.sub("", name).removesuffix(".weight") for name in additions(model)})
    tensors = {LAYER.sub("", name).replace(".base_layer", "") for layer in mixtures for name in layer.tensors}
    if tensors & {*parts}:
        return f": {', '.join(parts)}"
    return f": {', '.join(parts)}; no experts ({TARGET} {formats.ALL},{formats.EXPERTS} trains them, too)"
