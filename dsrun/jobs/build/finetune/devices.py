"""The devices of a fine-tune, how a step is divided by them, and what they compute with."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.cluster.devices import Machine, free_first
from dsrun.errors import DsrunError
from dsrun.jobs.allocation.allocation import Allocation, HostAllocation
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.build.checks import kernels, precision, recomputing, tiles
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.spec.job import HostDevices, world_size_of
from dsrun.models import resolve
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.groups import MICRO_BATCH_MEAN
from dsrun.options.table import Resolved, Source, select


def allocate(draft: Draft) -> None:
    """The devices of every host, and the precision that they do best."""
    draft.placed = draft.allocator.allocate(select(DeviceRequest, draft.options))
    draft.machine, draft.hosts = draft.placed.machine, draft.placed.hosts
    draft.notes += draft.placed.notes


def choose_precision(draft: Draft) -> None:
    machine = draft.placed.own_machine if draft.placed else draft.machine
    draft.asked = draft.asked.filled(
        Source.DERIVED, {"precision": machine.default_precision}, "what the devices do best"
    )
    draft.problems += precision.problems(draft.options.precision, machine)
    draft.notes += precision.notes(draft.options.precision, machine)


def choose_kernels(draft: Draft) -> None:
    """Attention, the fused loss and what is computed again, by the devices and the network."""
    if draft.model and draft.placed:
        devices = kernels.devices_of(draft.machine, draft.placed.devices, known=draft.placed.known)
        architecture = resolve.architecture(draft.model)
        draft.problems += recomputing.problems(draft.asked, devices.accelerator, architecture)
        draft.kernels = kernels.chosen(
            draft.options,
            devices,
            draft.network,
            str(draft.options.precision),
            official=draft.options.official,
        )
        draft.problems += tiles.problems(draft.options, draft.network)
        choose_tiles(draft)


def choose_tiles(draft: Draft) -> None:
    """Tokens of a tile, by the lengths and the vocabulary; a line where nobody asked for it."""
    options, shape = draft.options, draft.shape
    tokens = longest_example(draft) // options.sp
    tile = tiles.settled(
        options, tokens=tokens, vocabulary=shape.vocab if shape else 0, network=draft.network,
        fused_loss=draft.kernels.fused_loss,
    )  # fmt: skip
    if options.tile_tokens is None and tile:
        draft.notes.append(
            f"loss and MLPs take {tile} tokens at a time: logits of {tokens} are large ({tiles.FLAG} 0: all at once)"
        )
    draft.asked = draft.asked.settled({"tile_tokens": tile}, f"logits of {tokens} tokens")


def divide(draft: Draft, hosts: tuple[HostDevices, ...]) -> None:
    """The optimizer step over these devices. Raises DsrunError where it can't be divided by them."""
    draft.hosts = hosts
    draft.asked = split(draft)


def split(draft: Draft) -> Resolved[FinetuneOptions]:
    """The options with the step divided over the devices. Raises DsrunError as `divide` does."""
    if tokens := draft.options.tokens_per_batch:
        check_token_batch(draft)
        layer = derived.by_tokens(draft.asked, tokens, longest_example(draft), share_count(draft))
        return draft.asked.with_layers(layer)
    fixed = draft.options.loss == MICRO_BATCH_MEAN
    return draft.asked.with_layers(
        derived.by_devices(draft.asked, share_count(draft), fixed_micro_batch=fixed)
    )


def smaller(draft: Draft) -> Iterator[Resolved[FinetuneOptions]]:
    """The same step, as `split` has divided it, in ever smaller micro batches."""
    ranks = share_count(draft)
    if tokens := draft.options.tokens_per_batch:
        layers = derived.smaller_token_batches(draft.asked, tokens, longest_example(draft), ranks)
    else:
        layers = derived.smaller_micro_batches(draft.asked, ranks)
    return (draft.asked.with_layers(layer) for layer in layers)


def longest_example(draft: Draft) -> int:
    """Tokens, at most."""
    return draft.options.max_source_length + draft.options.max_target_length


def check_token_batch(draft: Draft) -> None:
    """Refuse a budget of tokens for what depends on how many micro batches a step has."""
    if draft.model and resolve.architecture(draft.model).get("output_router_logits"):
        what = (
            "the routers' loss is a mean over a step's micro batches, of which each step has another number"
        )
        hint = "Leave it out, or set output_router_logits to false in the model's config.json."
        raise DsrunError(what, where="--tokens-per-batch", hint=hint)


def unnamed_hosts(gpus: int, nodes: int) -> tuple[HostDevices, ...]:
    """Hosts with `gpus` devices each, of which nothing else is known."""
    return tuple(HostDevices(f"host{number}", tuple(range(gpus))) for number in range(nodes))


def alike(machine: Machine, gpus: int, nodes: int) -> Allocation:
    """`gpus` devices of each of so many hosts that are like this machine."""
    chosen = free_first(machine, gpus, {})
    hosts = unnamed_hosts(gpus, nodes)
    return Allocation(
        tuple(HostAllocation(host, machine, chosen, asked=False) for host in hosts),
        machine.accelerator,
        launcher="",
    )


def share_count(draft: Draft) -> int:
    """Data-parallel ranks; 1 where the devices can't be had, which is said already."""
    return max(1, world_size_of(draft.hosts) // draft.parallel.group)
