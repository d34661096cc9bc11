"""The memory of a GPU that ran out, divided by owner: weights, gradients, optimizer states, activations, logits ...

Made of a snapshot of torch's allocator (torch/cuda/memory.py, `_snapshot`): segments, the blocks in them, and of each
block the calls that allocated it, the innermost first. A block that holds a tensor which is known by name belongs to
that tensor's owner; any other to the owner that its calls show. A rank divides its own memory as it fails, with names;
`dsrun diagnose` that of a foreign snapshot, by the calls alone.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from dsrun.words import GIB

WEIGHTS, GRADIENTS, STATES = "weights", "gradients", "optimizer states"
ACTIVATIONS, LOGITS, BUCKETS, GATHERED = "activations", "logits", "buckets", "gathered weights"
STEP, CACHE, OUTPUTS, INPUTS, UNKNOWN = (
    "the step's temporaries",
    "KV cache",
    "kept outputs",
    "inputs",
    "not told",
)
MOST_PARTS = 6
"""Parts of an owner that are listed, the largest."""
ACTIVE = "active"
"""Start of the states of blocks that are in use; "inactive" ones are holes."""


class KnownTensor(NamedTuple):
    """A tensor that is known by name."""

    owner: str
    part: str
    """The layer, or whatever it is a part of."""
    address: int
    size: int
    """Bytes."""


@dataclass(frozen=True)
class MemoryPart:
    """A part of what an owner has: a layer, or a place in the code."""

    name: str
    gib: float


@dataclass(frozen=True)
class OwnedMemory:
    """What one owner has of a GPU's or a host's memory."""

    owner: str
    gib: float
    planned_gib: float | None = None
    """What the plan had for it; None where there is no plan."""
    parts: Sequence[MemoryPart] = ()
    """Its largest parts: layers, or places in the code."""


@dataclass(frozen=True, kw_only=True)
class MemoryDivision:
    """Memory that ran out, by owner."""

    place: str
    """ "gpu", or "host"."""
    rank: int | None = None
    device: int | None = None
    """The GPU's index, as the process counts."""
    when: str = ""
    """What the job was doing."""
    failed_in: str = ""
    """The module, or the place in the code, whose allocation failed."""
    requested_gib: float | None = None
    total_gib: float | None = None
    """The GPU's whole memory."""
    free_gib: float | None = None
    """Memory that nobody had."""
    others_gib: float | None = None
    """Memory of other processes, and of CUDA itself."""
    reserved_gib: float | None = None
    """Memory that torch's allocator had taken."""
    allocated_gib: float | None = None
    """Memory of it that was in use."""
    holes_gib: float | None = None
    """The rest of it."""
    largest_hole_gib: float | None = None
    later: int = 0
    """Allocations and frees between the failure and the snapshot, which then shows a later state."""
    owners: Sequence[OwnedMemory] = ()
    """The owners of what was in use, the largest first; of a host's memory the ranks."""
    planned: Sequence[MemoryPart] = ()
    """The plan's terms for a host, the largest first."""


class OwnerRule(NamedTuple):
    """Calls that show an owner."""

    owner: str
    calls: re.Pattern[str]
    """Of a call as FILE:FUNCTION."""
    within: re.Pattern[str] | None
    """Of a call further out, which has to be there as well."""


def _rule(owner: str, *calls: str, within: str = "") -> OwnerRule:
    return OwnerRule(owner, re.compile("|".join(calls)), re.compile(within) if within else None)


RULES = (
    _rule(CACHE, r"/cache_utils\.py:", r"/vllm/.*:\w*(?:kv_cache|allocate_kv)", r"/sglang/.*memory_pool\.py:"),
    _rule(LOGITS, r"/functional\.py:(?:cross_entropy|log_softmax|nll_loss|kl_div)$", r"/loss_utils\.py:",
          r"/modules/loss\.py:", r"/dsrun/training/(?:loss|models/tiling)\.py:",
          r"cross_entropy\w*\.py:", r":\w*(?:log_?softmax|logprobs?|log_probs|entropy)\w*$"),
    _rule(STATES, r"/optim/.*:_init_group$", r"/bitsandbytes/optim/.*:(?:init_state|get_state_buffer)",
          r"/deepspeed/.*:(?:initialize_optimizer_states|_create_fp32\w*|create_fp32\w*)$",
          r"/zero/stage_1_and_2\.py:__init__$", r"/deepspeed/runtime/(?:bf16_|fp16/).*:__init__$",
          r"/deepspeed/ops/.*:(?:step|__init__)$", r"/apex/optimizers/.*:step$"),
    _rule(STEP, r"/optim/.*:(?:\w*step\w*|_(?:single|multi)_tensor_\w+|_fused_\w+|adamw?|sgd)$",
          r"/optimization\.py:step$",
          r"/deepspeed/runtime/.*:(?:step|_optimizer_step|unscale_\w+|\w*grad_norm\w*)$", r":clip_grad_\w+$"),
    _rule(WEIGHTS, r"/deepspeed/runtime/.*:\w*flatten\w*$", within=r"/zero/stage_1_and_2\.py:__init__$"),
    _rule(BUCKETS, r"/zero/stage3\.py:_setup_for_real_optimizer$",
          r"/deepspeed/runtime/.*:\w*(?:ipg|bucket|reduce|average|flatten|gradients?)\w*$",
          r"/coalesced_collectives\.py:", r"/parallel/distributed\.py:(?:__init__|_ddp_init_helper|_build\w*)$",
          r"/fsdp/.*:\w*reduce\w*$", r"/megatron/.*param_and_grad_buffer\.py:"),
    _rule(WEIGHTS, r"/partition_parameters\.py:(?:__init__|_post_init_method|_zero_init\w*|_?partition\w*)$",
          r"/(?:core_model_loading|big_modeling)\.py:", r"/safetensors/",
          r"/accelerate/utils/modeling\.py:", r"/torch/serialization\.py:",
          r"/bitsandbytes/nn/.*:(?:_quantize|cuda|to)$", r"/model_loader/",
          r"/peft/(?!.*:(?:forward|_call)).*:(?:__init__|update_layer|inject_adapter|_create_and_replace)$",
          r"/nn/modules/module\.py:(?:to|cuda|_apply|convert|half|bfloat16|float|to_empty|load_state_dict|_load\w+)$",
          r"/nn/modules/.*:__init__$",
          r":(?:from_pretrained|_configure_distributed_model|_broadcast_model|_?load_\w+|_init_weights)$",
          r"/zero/.*:(?:defragment|_create_fp16_partitions\w*)$"),
    _rule(GATHERED, r"/partition_parameters\.py:", r"/partitioned_param_coordinator\.py:", r"/parameter_offload\.py:",
          r"/fsdp/.*:\w*(?:all_gather|unshard)\w*$", r"/_flat_param\.py:"),
    _rule(OUTPUTS, r"/trainer_pt_utils\.py:", r"/accelerate/utils/operations\.py:\w*(?:gather|pad|concat)\w*$"),
    _rule(INPUTS, r"/dsrun/training/data/", r":(?:_prepare_inputs?|send_to_device|pin_memory|\w*collat\w*)$"),
    _rule(GRADIENTS, r":_engine_run_backward$", r":backward$",
          r":torch::autograd::(?:Engine|AccumulateGrad|generated)"),
)  # fmt: skip
"""Owners by the calls of an allocation, the first that fits a call; from the innermost call outwards."""
FORWARD = "forward"
"""Name of the functions that compute a module: what they make, and nothing inside claims, are activations."""
MODEL_FILE = re.compile(r"/modeling_\w+\.py$")
LINEAR = re.compile(r"/nn/modules/linear\.py$|/lora/layer\.py$")
LIBRARY = re.compile(
    r"/torch/|/(?:site|dist)-packages/(?:deepspeed|accelerate)/|^<|^\?\?|\.(?:cpp|h|cu|so)\b|/python3[\d.]*/\w+\.py$"
)
"""Files whose calls are no place worth naming."""


class StackCall(NamedTuple):
    """A call of a block's stack."""

    file: str
    line: int
    function: str

    @property
    def text(self) -> str:
        """File and function, as a rule's patterns have it."""
        return f"{self.file}:{self.function}"


def calls_of(frames: Any) -> tuple[StackCall, ...]:
    """The calls of a snapshot's stack, the innermost first; what is no call is left out."""
    if not isinstance(frames, list | tuple):
        return ()
    return tuple(
        StackCall(
            str(frame.get("filename", "")).replace("\\", "/"),
            _whole(frame.get("line")),
            str(frame.get("name", "")),
        )
        for frame in frames
        if isinstance(frame, Mapping)
    )


def owner_of(calls: Sequence[StackCall]) -> str:
    """The owner of what these calls allocated."""
    for number, call in enumerate(calls):
        for rule in RULES:
            if rule.calls.search(call.text) and (
                rule.within is None or any(rule.within.search(outer.text) for outer in calls[number + 1 :])
            ):
                return rule.owner
        if call.function == FORWARD:
            return LOGITS if _is_head(calls, number) else ACTIVATIONS
    return UNKNOWN


def _is_head(calls: Sequence[StackCall], innermost: int) -> bool:
    """Whether a model's outermost module computes with a linear layer of its own: from hidden states to logits."""
    models = [call for call in calls[innermost:] if call.function == FORWARD and MODEL_FILE.search(call.file)]
    return len(models) == 1 and any(LINEAR.search(call.file) for call in calls[innermost:])


def place_of(calls: Sequence[StackCall]) -> str:
    """The innermost call outside of torch, as FILE:LINE FUNCTION; empty without any."""
    call = next((call for call in calls if not LIBRARY.search(call.file)), None)
    call = call or next((call for call in calls if call.file.endswith(".py")), None)
    return f"{call.file.rpartition('/')[2]}:{call.line} {call.function}" if call else ""


class _Stacks:
    """Owner and place of stacks: many blocks have the same one."""

    def __init__(self) -> None:
        self._known: dict[tuple[StackCall, ...], tuple[str, str]] = {}

    def of(self, frames: Any) -> tuple[str, str]:
        calls = calls_of(frames)
        if calls not in self._known:
            self._known[calls] = owner_of(calls), place_of(calls)
        return self._known[calls]


def divide(
    snapshot: Mapping[str, Any], device: int, known: Iterable[KnownTensor] = (), **facts: Any
) -> MemoryDivision:
    """A device's memory by owner. facts: further fields of the division.

    Raises KeyError, TypeError or ValueError for what is no snapshot.
    """
    tensors = sorted(known, key=lambda tensor: tensor.address)
    starts = [tensor.address for tensor in tensors]
    stacks, sizes = _Stacks(), defaultdict[tuple[str, str], int](int)
    reserved = allocated = largest = 0
    has_stacks = any(block.get("frames") for segment in snapshot["segments"] for block in segment["blocks"])
    for segment in snapshot["segments"]:
        if _whole(segment.get("device", 0)) != device:
            continue
        reserved += _whole(segment["total_size"])
        for address, block in _placed(segment):
            size = _whole(block["size"])
            if not str(block["state"]).startswith(ACTIVE):
                largest = max(largest, size)
                continue
            allocated += size
            inside = tensors[bisect_left(starts, address) : bisect_right(starts, address + size - 1)]
            owner, place = stacks.of(block.get("frames") or _older(block))
            # That a graph has saved a tensor doesn't say what it is (logits, a gathered weight): its calls may.
            if inside and (inside[0].owner != ACTIVATIONS or owner in (ACTIVATIONS, UNKNOWN)):
                _give(inside, size, sizes)
                continue
            if owner == UNKNOWN and not place and has_stacks:
                owner = GRADIENTS  # backward runs in threads of its own, which have no calls of Python's
            sizes[owner, place] += size
    return MemoryDivision(
        place="gpu", device=device, reserved_gib=reserved / GIB, allocated_gib=allocated / GIB,
        holes_gib=(reserved - allocated) / GIB, largest_hole_gib=largest / GIB, owners=_owners(sizes), **facts,
    )  # fmt: skip


def _placed(segment: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """The blocks of a segment with their addresses, which torch before 2.1 leaves out."""
    address = _whole(segment.get("address", 0))
    for block in segment["blocks"]:
        yield _whole(block.get("address", address)), block
        address += _whole(block["size"])


def _older(block: Mapping[str, Any]) -> Any:
    """The stack of a block in a snapshot of torch before 2.1."""
    history = block.get("history")
    return history[0].get("frames") if history else None


def _give(inside: Sequence[KnownTensor], size: int, sizes: dict[tuple[str, str], int]) -> None:
    """Divide a block among the tensors in it. What is left (rounding, a buffer's unused end) goes to the largest."""
    seen, left = set(), size
    for tensor in sorted(
        inside, key=lambda tensor: tensor.size
    ):  # a flat buffer only gets what no view of it has
        if (tensor.address, tensor.size) not in seen:
            seen.add((tensor.address, tensor.size))
            share = min(tensor.size, left)
            sizes[tensor.owner, tensor.part] += share
            left -= share
    largest = max(inside, key=lambda tensor: tensor.size)
    sizes[largest.owner, largest.part] += left


def _owners(sizes: Mapping[tuple[str, str], int]) -> tuple[OwnedMemory, ...]:
    """Owners with their parts, the largest first."""
    by_owner = defaultdict[str, dict[str, int]](dict)
    for (owner, part), size in sizes.items():
        by_owner[owner][part] = size
    owned = [
        OwnedMemory(owner, sum(parts.values()) / GIB, None, _largest(parts))
        for owner, parts in by_owner.items()
    ]
    return tuple(sorted(owned, key=lambda one: -one.gib))


def _largest(parts: Mapping[str, int]) -> tuple[MemoryPart, ...]:
    named = sorted((item for item in parts.items() if all(item)), key=lambda item: -item[1])
    return tuple(MemoryPart(name, size / GIB) for name, size in named[:MOST_PARTS])


def _whole(value: Any) -> int:
    if type(value) is not int:
        raise TypeError(f"{value!r} in place of a whole number")
    return value


PLANNED = {
    WEIGHTS: ("weights", "adapters", "secondary"),
    GRADIENTS: ("gradients", "carried", "gradient_shard", "fp32_gradients"),
    STATES: ("master", "moments"),
    ACTIVATIONS: ("activations", "layer", "scores", "dequantized", "fp8_casts", "exchanged"),
    LOGITS: ("logits", "dequantized_head"),
    BUCKETS: ("buckets", "reduce_bucket", "reduce_copy", "offload_scratch"),
    GATHERED: ("gathered", "viewed", "experts"),
    STEP: ("step",),
}
"""Owner -> the plan's terms (planner/terms.py) that it has."""


def beside_plan(owners: Iterable[OwnedMemory], terms: Mapping[str, float]) -> tuple[OwnedMemory, ...]:
    """Owners with what the plan has for each, in its terms' bytes."""
    planned = (
        {owner: sum(terms.get(name, 0.0) for name in names) / GIB for owner, names in PLANNED.items()}
        if terms
        else {}
    )
    return tuple(OwnedMemory(one.owner, one.gib, planned.get(one.owner), one.parts) for one in owners)
