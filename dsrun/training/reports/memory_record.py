"""What a rank's GPU held when it ran out of memory: a record by owner in the run folder.

torch's allocator keeps the Python calls behind each block that is in use (about 2 us an allocation, by torch's own
documentation), and nothing of blocks that were freed. As a rank fails, the tensors that have a name are looked up by
their addresses: weights and gradients by the model, states by the optimizer, activations by the graph that hangs on the
tensors of the calls that failed. What is left is told by its calls (dsrun/job/memory_division.py).
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Protocol

import torch

from dsrun.errors import DsrunError
from dsrun.files import json_text, write_atomic
from dsrun.job import memory_division
from dsrun.job.layout import memory_file
from dsrun.job.memory_division import ACTIVATIONS, BUCKETS, GRADIENTS, STATES, WEIGHTS, KnownTensor
from dsrun.training.reports.report import Report
from dsrun.words import GIB

DEEPEST = 4
"""Containers within containers in which an optimizer's tensors are looked for."""
MOST_NODES = 1_000_000
"""Steps of a graph that are looked through."""
NUMBERED = re.compile(r"^(.*?\.\d+)(?:\.|$)")
"""A layer in a parameter's name: up to its first number."""


class DeviceAllocator(Protocol):
    """What is asked of torch's allocator of a device."""

    device: torch.device

    def record(self) -> None:
        """From now on keep the calls behind each block that is in use."""

    def snapshot(self) -> Mapping[str, Any]:
        """Its state, as torch.cuda.memory._snapshot has it."""

    def free_and_total(self) -> tuple[int, int]:
        """Bytes of the device that are free, and all there are."""


class CudaAllocator:
    """torch's own."""

    def __init__(self) -> None:
        self.device = torch.device("cuda", torch.cuda.current_device())

    def record(self) -> None:
        """See DeviceAllocator."""
        torch.cuda.memory._record_memory_history("state", context="state", stacks="python")

    def snapshot(self) -> Mapping[str, Any]:
        """See DeviceAllocator."""
        taken: Mapping[str, Any] = torch.cuda.memory._snapshot()
        return taken

    def free_and_total(self) -> tuple[int, int]:
        """See DeviceAllocator."""
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free), int(total)


def allocator() -> DeviceAllocator | None:
    """The allocator of this rank's GPU; None on a CPU, where memory has no owner that could be asked."""
    return CudaAllocator() if torch.cuda.is_available() and torch.cuda.is_initialized() else None


@dataclass
class Held:
    """The things of a rank whose tensors have names; None before they are made."""

    model: Any = None
    engine: Any = None


@contextmanager
def kept(report: Report) -> Iterator[Held]:
    """Write the record of a GPU that runs out of memory inside, before the error goes on."""
    held, path = Held(), report.run_dir / memory_file(report.rank)
    path.unlink(missing_ok=True)  # an earlier attempt's
    source = allocator()
    if source:
        try:
            source.record()
        except (
            RuntimeError,
            TypeError,
            AttributeError,
        ):  # another release's allocator, or another platform's
            logging.getLogger(__name__).exception(
                "what the GPU holds won't be known by the calls that took it"
            )
    try:
        yield held
    except torch.OutOfMemoryError as error:
        if source:
            _write(report, source, held, error)
        raise


def _write(report: Report, source: DeviceAllocator, held: Held, error: BaseException) -> None:
    """Write the record. Whatever goes wrong with it is logged: the error itself has to be told."""
    try:
        modules = dict(held.model.named_modules()) if held.model is not None else {}
        free, total = source.free_and_total()
        tensors = [*known_tensors(held), *saved_tensors(held, error.__traceback__)]
        here = [
            KnownTensor(owner, part, *place)
            for owner, part, tensor in tensors
            if (place := _place(tensor, source.device))
        ]
        division = memory_division.divide(
            source.snapshot(), source.device.index or 0, here, rank=report.rank, when=report.doing,
            failed_in=failed_in(modules, error.__traceback__), total_gib=total / GIB, free_gib=free / GIB,
        )  # fmt: skip
        text = json_text(asdict(division), indent=2) + "\n"
        write_atomic(report.run_dir / memory_file(report.rank), text, overwrite=True)
    except (DsrunError, OSError, RuntimeError, AttributeError, TypeError, ValueError, KeyError):
        logging.getLogger(__name__).exception("what the GPU held can't be written down")


def _place(tensor: Any, device: torch.device) -> tuple[int, int] | None:
    """Address and bytes of a tensor on a device; None for one elsewhere, or without content."""
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's
    if local.device.type != device.type or not local.numel():
        return None
    return int(local.data_ptr()), int(local.numel() * local.element_size())


Named = tuple[str, str, Any]
"""Owner, part, tensor."""


def known_tensors(held: Held) -> Iterator[Named]:
    """The tensors of a model and its optimizer, each with its owner and layer."""
    if held.model is None:
        return
    model = getattr(held.engine, "module", None) or held.model
    layers: dict[int, str] = {}
    for name, weight in (*model.named_parameters(), *_of_fsdp(model, "sharded_param")):
        layers[id(weight)] = layer = layer_of(name)
        yield WEIGHTS, layer, weight
        if (shard := getattr(weight, "ds_tensor", None)) is not None:  # a rank's part under ZeRO-3
            yield WEIGHTS, layer, shard
        if weight.grad is not None:
            yield GRADIENTS, layer, weight.grad
    for name, buffer in model.named_buffers():
        yield WEIGHTS, layer_of(name), buffer
    optimizer, seen = getattr(held.engine, "optimizer", None), set[int]()
    while optimizer is not None and id(optimizer) not in seen:
        seen.add(id(optimizer))
        yield from _optimizer_tensors(optimizer, layers)
        optimizer = getattr(optimizer, "optimizer", None)  # DeepSpeed's stand around torch's


def _optimizer_tensors(optimizer: Any, layers: Mapping[int, str]) -> Iterator[Named]:
    """An optimizer's states, the copies that it steps with their gradients, and what DeepSpeed's keeps beside them."""
    for weight, states in getattr(optimizer, "state", {}).items():
        for name, state in states.items() if isinstance(states, Mapping) else ():
            if torch.is_tensor(state):
                yield STATES, layers.get(id(weight), str(name)), state
    for group in getattr(optimizer, "param_groups", ()):
        for weight in group["params"]:
            if id(weight) not in layers:
                yield STATES, "copies that the optimizer steps", weight
                if weight.grad is not None:
                    yield GRADIENTS, "of these copies", weight.grad
    for name, value in vars(optimizer).items():
        owner = GRADIENTS if "grad" in name else BUCKETS if re.search("bucket|ipg|reduc", name) else STATES
        for tensor in _tensors_in(value, DEEPEST, set()):
            if id(tensor) not in layers:
                yield owner, name.strip("_"), tensor


def _tensors_in(value: Any, depth: int, seen: set[int]) -> Iterator[Any]:
    """The tensors in containers, and in DeepSpeed's own small objects."""
    if torch.is_tensor(value):
        yield value
        return
    if depth == 0 or id(value) in seen or isinstance(value, torch.nn.Module | torch.optim.Optimizer):
        return
    seen.add(id(value))
    inside: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inside = list(value.values())
    elif isinstance(value, list | tuple | set):
        inside = list(value)
    elif type(value).__module__.startswith("deepspeed.runtime.zero"):
        inside = list(getattr(value, "__dict__", {}).values())
    for one in inside:
        yield from _tensors_in(one, depth - 1, seen)


def layer_of(name: str) -> str:
    """The layer that a parameter is in: its name up to the first number, or its module's."""
    numbered = NUMBERED.match(name)
    return numbered[1] if numbered else name.rpartition(".")[0] or name


def _frames(trace: TracebackType | None) -> Iterator[tuple[Any, int]]:
    """The calls of a traceback with their lines, the outermost first."""
    while trace:
        yield trace.tb_frame, trace.tb_lineno
        trace = trace.tb_next


def failed_in(modules: Mapping[str, Any], trace: TracebackType | None) -> str:
    """The innermost module of a model that a traceback passes, and the place in the code."""
    names = {id(module): name for name, module in modules.items()}
    inner, calls = "", []
    for frame, line in _frames(trace):
        inner = names.get(id(frame.f_locals.get("self")), "") or inner
        calls.append(memory_division.StackCall(frame.f_code.co_filename, line, frame.f_code.co_name))
    place = memory_division.place_of(calls[::-1])
    return f"{inner} ({place})" if inner and place else inner or place


def saved_tensors(held: Held, trace: TracebackType | None) -> Iterator[Named]:
    """What backward would have needed: the tensors that the graph has saved, each with the layer of the step of the
    graph that uses it.

    The graph is found by the tensors of the calls that failed. A step with a weight of a layer is that layer's; one
    without is of the layer that its output goes to. What hooks have put away (checkpoints, offloaded activations) is
    not asked for, since that would compute it again.
    """
    if held.model is None:
        return
    model = getattr(held.engine, "module", None) or held.model
    layers = {
        id(weight): layer_of(name)
        for name, weight in (*model.named_parameters(), *_of_fsdp(model, "_unsharded_param"))
    }
    roots = [
        value.grad_fn
        for frame, _ in _frames(trace)
        for value in list(frame.f_locals.values())
        if torch.is_tensor(value) and value.grad_fn is not None
    ]
    seen = set[Any]()
    waiting = [(root, "") for root in roots]
    while waiting and len(seen) < MOST_NODES:
        node, layer = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        following = [one for one, _ in node.next_functions if one is not None]
        own = (layers.get(id(getattr(one, "variable", None))) for one in _through_views(following))
        layer = next(filter(None, own), layer)
        for tensor in _saved(node):
            if id(tensor) not in layers:
                yield ACTIVATIONS, layer, tensor
        waiting += [(one, layer) for one in following]


def _of_fsdp(model: Any, form: str) -> Iterator[tuple[str, Any]]:
    """The weights of a form that FSDP keeps, with their names: the model shows either shards or gathered weights, the
    optimizer steps the former, and the graph has the latter."""
    names = {id(module): name for name, module in model.named_modules()}
    for module in model.modules():
        state = module._get_fsdp_state() if hasattr(module, "_get_fsdp_state") else None
        for weight in getattr(getattr(state, "_fsdp_param_group", None), "fsdp_params", ()):
            place = weight._module_info
            if (tensor := getattr(weight, form, None)) is not None:
                yield f"{names.get(id(place.module), '')}.{place.param_name}", tensor


def _through_views(nodes: Iterable[Any]) -> Iterator[Any]:
    """Steps of a graph, and those before them with nothing else: a weight comes transposed."""
    for node in nodes:
        yield node
        before = [one for one, _ in node.next_functions if one is not None]
        if len(before) == 1:
            yield before[0]


def _saved(node: Any) -> Iterator[Any]:
    """The tensors that a step of a graph has saved; none where this torch doesn't show them (before 2.9)."""
    for name in dir(node):
        if name.startswith("_raw_saved"):
            raw = getattr(node, name)
            for one in raw if isinstance(raw, list | tuple) else [raw]:
                tensor = getattr(one, "data", None)
                if torch.is_tensor(tensor):
                    yield tensor
