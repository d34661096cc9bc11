"""The model that is traced: transformers' own class for a config, on fake tensors, changed as training changes it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from dsrun.options.table import PeftOptions
from dsrun.training.models.adapters import add_lora
from dsrun.training.models.layers import layers_of
from dsrun.training.models.text_part import take_text, towers


class FrozenMatrix(torch.autograd.Function):  # type: ignore[misc]
    """A product with a quantized matrix: made 16 bits wide for forward, and again for backward.

    Nothing of it is kept in between, as in bitsandbytes' MatMul4Bit (autograd/_functions.py).
    """

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        context.weight = weight
        return nn.functional.linear(inputs, torch.empty_like(weight, dtype=inputs.dtype))

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        (gradient,) = gradients
        return gradient @ torch.empty_like(context.weight, dtype=gradient.dtype), None


class StandInLinear4bit(nn.Linear):  # type: ignore[misc]
    """bitsandbytes' Linear4bit as far as memory goes. The weight keeps its shape: the planner counts its bits."""

    compute_dtype: torch.dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        output = FrozenMatrix.apply(inputs.to(self.compute_dtype), self.weight)
        if self.bias is not None:
            output = output + self.bias
        return output.to(
            inputs.dtype
        ).clone()  # PEFT does so (tuners/lora/bnb.py), against a fault of autograd's with views


def built(request: Mapping[str, Any]) -> tuple[Any, list[Any]]:
    """The model of a request, and its layers. To be called under the fake mode.

    Raises ValueError for a config that transformers has no causal language model for.
    """
    config = _config(request["config"])
    config._attn_implementation = "eager"
    if request["flash"]:
        config.get_text_config()._attn_implementation = "sdpa"  # a tower's class may have none
    config.use_cache = config.get_text_config().use_cache = False
    model = _model(config, request["weights"])
    model.train()
    take_text(model)
    return model, text_layers(model)


def text_layers(model: Any) -> list[Any]:
    """The layers of a model's text part: its towers have some of their own."""
    inside = {id(module) for module in (model.get_decoder() if towers(model) else model).modules()}
    return [layer for layer in layers_of(model) if id(layer) in inside]


def described(values: Mapping[str, Any]) -> dict[str, Any]:
    """The sizes of a network by the planner's names (dsrun.planner.shape.Shape). To be called under the fake mode."""
    config = _config(values)
    model = _model(config, "bfloat16")
    text = config.get_text_config()
    fields = text.to_dict()  # the attribute of a size that a layer may have for itself can't be asked for

    def size(*names: str, default: int = 1) -> int:
        own = (fields.get(text.attribute_map.get(name, name)) for name in names)
        value = next(filter(None, own), default)
        return max(value) if isinstance(value, list) else int(value)

    embedding = model.get_input_embeddings().weight
    heads = size("num_attention_heads")
    return {
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "frozen": sum(weight.numel() for weight in towers(model).values()),
        "layers": len(text_layers(model)),
        "hidden": embedding.shape[1],
        "intermediate": size("intermediate_size", "ffn_hidden_size", default=4 * embedding.shape[1]),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", default=heads),
        "head_dim": size("head_dim", default=max(1, embedding.shape[1] // heads)),
        "vocab": embedding.shape[0],
        "tied": model.get_output_embeddings().weight is embedding,
        "positions": size("max_position_embeddings", default=0) or None,
    }


def _config(values: Mapping[str, Any]) -> Any:
    """transformers' config of a config.json, without the code that a repository would bring."""
    from transformers import AutoConfig

    own = ("auto_map", "dtype", "torch_dtype")
    # From a file, in which it takes lists for tuples and {"__float__": "Infinity"} for a number.
    with tempfile.TemporaryDirectory() as folder:
        kept = {key: value for key, value in values.items() if key not in own}
        Path(folder, "config.json").write_text(json.dumps(kept), encoding="utf-8")
        return AutoConfig.from_pretrained(folder)


def _model(config: Any, dtype: str) -> Any:
    """The causal language model of a config; nothing is initialized, since there are no data."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    model.tie_weights()
    return model


@contextmanager
def masks(request: Mapping[str, Any]) -> Iterator[None]:
    """While it lasts a request whose rows fill their places has no masks.

    Of tensors without data transformers can't see that nothing is masked, and would make one.
    """
    from transformers import AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    own = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    if request["flash"] and not request["masked"]:
        AttentionMaskInterface.register("sdpa", _no_mask)
    try:
        yield
    finally:
        AttentionMaskInterface.register("sdpa", own)


def _no_mask(*_: Any, **__: Any) -> None:
    """The mask of a row that fills its place: none, attention is causal by itself."""


def kinds(layers: Sequence[Any]) -> list[int]:
    """A number for each layer: equal ones for layers that compute the same with tensors of the same shapes."""
    known: dict[Any, int] = {}
    return [known.setdefault(_signature(layer), len(known)) for layer in layers]


def _signature(layer: Any) -> Any:
    """What a layer's computation depends on: its modules' classes and plain attributes, and its tensors' shapes."""
    modules = []
    for name, module in layer.named_modules():
        plain = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, (bool, int, float, str)) and not key.startswith("_") and key != "layer_idx"
        }
        modules.append((name, type(module), tuple(sorted((key, str(value)) for key, value in plain.items()))))
    shapes = tuple((name, tuple(weight.shape), weight.dtype) for name, weight in layer.named_parameters())
    return tuple(modules), shapes


def reduce_layers(model: Any, layers: Sequence[Any], chosen: Sequence[int]) -> list[Any]:
    """Leave only the chosen layers in the model, and their entries in the config's lists of all layers.

    Raises ValueError where the layers aren't in one list.
    """
    owner = next(
        (
            (module, name)
            for module in model.modules()
            for name, child in module.named_children()
            if isinstance(child, nn.ModuleList) and len(child) == len(layers) and child[0] is layers[0]
        ),
        None,
    )
    if owner is None:
        raise ValueError("the layers are in no list of their own")
    kept = [layers[number] for number in chosen]
    setattr(owner[0], owner[1], nn.ModuleList(kept))
    config = model.config.get_text_config()
    for key, value in list(vars(config).items()):
        if isinstance(value, list) and len(value) == len(layers):
            setattr(config, key, [value[number] for number in chosen])
    config.num_hidden_layers = len(kept)
    return kept


def prepare(model: Any, request: Mapping[str, Any]) -> None:
    """Freeze, quantize and cast what the request says, add LoRA's matrices, and switch on checkpointing."""
    lora, dtype = request.get("lora"), getattr(torch, request["weights"])
    if request["method"] == "qlora":
        _quantize(model, dtype)
    if request["fp32_frozen"]:
        _widen(model)
    if request["fp32_embedding"]:
        model.get_input_embeddings().float()
        model.tie_weights()
    if lora:
        add_lora(model, PeftOptions(method="lora", **{f"lora_{key}": value for key, value in lora.items()}))
        model.train()
        _cast_adapters(
            model, torch.float32 if request["fp32_adapters"] else getattr(torch, request["weights"])
        )
    if request["checkpointing"]:
        enable = (
            getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        )
        enable({"use_reentrant": request["reentrant"]})
        if lora:
            model.enable_input_require_grads()
        for number, layer in enumerate(text_layers(model)):
            layer.gradient_checkpointing = number % request["checkpointing"] == 0


def _cast_adapters(model: Any, dtype: torch.dtype) -> None:
    """Give LoRA's matrices a precision: PEFT makes them fp32 (autocast_adapter_dtype), DeepSpeed casts them."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if weight.requires_grad:
                setattr(module, name, nn.Parameter(weight.data.to(dtype)))


def _widen(model: Any) -> None:
    """PEFT's prepare_model_for_kbit_training: what is not quantized becomes fp32."""
    for module in model.modules():
        for name, weight in module.named_parameters(recurse=False):
            if not isinstance(module, StandInLinear4bit):
                setattr(module, name, nn.Parameter(weight.data.float(), requires_grad=False))
    model.tie_weights()


def _quantize(model: Any, dtype: torch.dtype) -> None:
    """Put the stand-in, which computes in a type, in the place of every linear layer but the output's."""
    output = model.get_output_embeddings()
    for module in model.modules():
        if type(module) is nn.Linear and module is not output:
            module.__class__ = StandInLinear4bit
            module.compute_dtype = dtype


def mark_layers(layers: Sequence[Any], recorders: list[Any]) -> None:
    """Let each layer put marks into the recorder at hand, the last of `recorders`, when it is called."""
    for number, layer in enumerate(layers):
        kind = type(layer)
        # A subclass, since checkpointing is in the class's own __call__, around what hooks of modules would see.
        layer.__class__ = type(kind.__name__, (kind,), {"__call__": _marked(kind, number, recorders)})


def _marked(kind: Any, number: int, recorders: list[Any]) -> Any:
    """A layer's __call__ with marks before and behind it, and in backward."""

    def call(layer: Any, *inputs: Any, **more: Any) -> Any:
        recorder = recorders[-1]
        if number == 0:
            _mark_gradient(recorder, (inputs, more), -1)
        recorder.mark("forward", number)
        tensors = (tensor for tensor in tree_leaves((inputs, more)) if isinstance(tensor, torch.Tensor))
        recorder.stream += [next(tensors).element_size()]
        output = kind.__call__(layer, *inputs, **more)
        recorder.mark("after", number)
        _mark_gradient(recorder, output, number)
        return output

    return call


def _mark_gradient(recorder: Any, tree: Any, number: int) -> None:
    """Put a mark where the gradient of the first tensor in a tree is there, if it gets one."""
    for tensor in tree_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            if tensor.requires_grad:
                # A hook of the tensor itself would keep it until then.
                node = tensor.grad_fn
                register = tensor.register_hook if node is None else node.register_prehook
                register(lambda _: recorder.mark("backward", number))
            return
