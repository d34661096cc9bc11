"""Record training steps: requests on stdin, a list; the answers on stdout, likewise, both JSON.

dsrun.planner.trace.request says what a request has; one with `describe`, a config, asks for the sizes of a network. An
answer has `recording` or `described`, or `error` with the reason why there is none. It is written as soon as it is
there, a line each, so that a time limit costs only what is not yet done.
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dsrun.training.tracing import kernels, network
from dsrun.training.tracing.recorder import Recorder
from dsrun.training.tracing.reduction import chosen_layers

LONGEST = 300
"""Characters of a reason."""


def main() -> None:
    """Answer the requests, one after the other."""
    requests, stdout = json.load(sys.stdin), sys.stdout
    for request in requests:
        # Libraries may print; stdout is the answers' alone.
        with contextlib.redirect_stdout(sys.stderr):
            try:
                answer = _answer(request)
            except Exception as error:  # any fault of any model's code is an answer: there is no trace of it
                answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0][:LONGEST]}
        print(json.dumps(answer), file=stdout, flush=True)


def _answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to one request. Layers that don't stand alone are traced all."""
    if "describe" in request:
        with FakeTensorMode():
            return {"described": network.described(request["describe"])}
    try:
        return {"recording": record(request)}
    except Exception:  # a layer may want its place among all of them
        if not request["reduce"]:
            raise
        return {"recording": record({**request, "reduce": False})}


def record(request: Mapping[str, Any]) -> dict[str, Any]:
    """The recording of a request: the layers that were traced, and one list of events with sizes for each point."""
    fake = FakeTensorMode()
    with fake, kernels.as_on_cuda(), network.masks(request):
        model, layers = network.built(request)
        with _replacing_weights():
            network.prepare(model, request)
        weights = _weights(model, layers)
        kinds = network.kinds(layers)
        chosen = chosen_layers(kinds) if request["reduce"] else list(range(len(layers)))
        if len(chosen) < len(layers):
            layers = network.reduce_layers(model, layers, chosen)
        recorders: list[Recorder] = []
        network.mark_layers(layers, recorders)
        known = [*model.parameters(), *model.buffers()]
        for rows, tokens in request["points"]:
            recorder = Recorder(known)
            recorders.append(recorder)
            _step(model, layers, recorder, request, (rows, tokens))
    first = recorders[0]
    if any(other.events != first.events or other.marks != first.marks for other in recorders):
        raise ValueError("the steps at different lengths are not alike")
    return {
        "kinds": kinds,
        "chosen": chosen,
        "weights": weights,
        "events": first.events,
        "marks": first.marks,
        "loss": request["loss"],
        "stream": first.stream[: len(layers)],
        "sizes": [recorder.sizes for recorder in recorders],
    }


def _weights(model: Any, layers: Sequence[Any]) -> list[list[Any]]:
    """[layer or -1, elements, whether it is trained, bytes an element, whether it is quantized] of each weight."""
    owner = {id(weight): number for number, layer in enumerate(layers) for weight in layer.parameters()}
    quantized = {
        id(module.weight) for module in model.modules() if isinstance(module, network.StandInLinear4bit)
    }
    return [
        [
            owner.get(key := id(weight), -1),
            weight.numel(),
            weight.requires_grad,
            weight.element_size(),
            key in quantized,
        ]
        for weight in model.parameters()
    ]


def _step(
    model: Any, layers: Sequence[Any], recorder: Recorder, request: Mapping[str, Any], point: tuple[int, int]
) -> None:
    """One forward and backward pass of (rows, tokens), written down by the recorder."""
    rows, tokens = point
    inputs: dict[str, Any] = {"input_ids": torch.ones(rows, tokens, dtype=torch.long)}
    if request["masked"]:
        # As attention gets it: a mask of padding that is made into it would be looked at for rows without any.
        inputs["attention_mask"] = torch.ones(rows, 1, tokens, tokens, dtype=torch.bool)
    if request["loss"]:
        inputs["labels"] = inputs["input_ids"]
    hooks = [
        weight.register_post_accumulate_grad_hook(_ready(recorder, number, owner))
        for number, owner, weight in _trained(model, layers)
    ]
    gc.disable()  # frees come when the last reference goes, not when cycles happen to be looked for
    try:
        with recorder, _autocast(request):
            loss = _loss(model, inputs, request)
        with recorder:
            recorder.mark("turn", 0)
            loss.backward()
            del loss, inputs
    finally:
        gc.enable()
        for hook in hooks:
            hook.remove()
    recorder.close()
    for weight in model.parameters():
        weight.grad = None


def _loss(model: Any, inputs: Mapping[str, Any], request: Mapping[str, Any]) -> torch.Tensor:
    """A scalar to go back from: the model's own loss, or, where the planner knows it by a formula, the last block's
    output without any."""
    if request["loss"]:
        return model(**inputs).loss
    hidden = model.base_model(**inputs)[0]
    return Ends.apply(hidden)


class Ends(torch.autograd.Function):  # type: ignore[misc]
    """The end of a step without a loss: a gradient as large as what comes in."""

    @staticmethod
    def forward(context: Any, hidden: torch.Tensor) -> torch.Tensor:
        context.like = hidden.shape, hidden.dtype
        return torch.empty((), dtype=hidden.dtype)

    @staticmethod
    def backward(context: Any, *_: torch.Tensor) -> torch.Tensor:
        shape, dtype = context.like
        return torch.empty(shape, dtype=dtype)


def _trained(model: Any, layers: Sequence[Any]) -> Iterator[tuple[int, int, torch.Tensor]]:
    """(Number within its layer, layer or -1, weight) of the weights that are trained."""
    owner = {id(weight): number for number, layer in enumerate(layers) for weight in layer.parameters()}
    counts: dict[int, int] = {}
    for weight in model.parameters():
        if weight.requires_grad:
            layer = owner.get(id(weight), -1)
            counts[layer] = counts.get(layer, -1) + 1
            yield counts[layer], layer, weight


def _ready(recorder: Recorder, number: int, layer: int) -> Any:
    """A hook that marks a weight's gradient when it is there."""

    def mark(weight: torch.Tensor) -> None:
        if weight.grad is not None:
            recorder.mark("gradient", number, layer, recorder.number_of(weight.grad))

    return mark


def _autocast(request: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
    if not request["autocast"]:
        return contextlib.nullcontext()
    return torch.autocast("cpu", dtype=getattr(torch, request["autocast"]))


@contextlib.contextmanager
def _replacing_weights() -> Iterator[None]:
    """While it lasts, Module.to makes new weights: torch would swap fake ones in place, and refuses to."""

    def apply(module: Any, convert: Any, recurse: bool = True) -> Any:
        for child in module.children() if recurse else ():
            apply(child, convert)
        for name, weight in module._parameters.items():
            if weight is not None and (new := convert(weight.data)).dtype != weight.dtype:
                module._parameters[name] = torch.nn.Parameter(new, requires_grad=weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = convert(buffer)
        return module

    original = torch.nn.Module._apply
    torch.nn.Module._apply = apply
    try:
        yield
    finally:
        torch.nn.Module._apply = original


if __name__ == "__main__":
    main()
