"""The devices of a fine-tune, how a step is divided by them, and what they compute with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError, Findings
from dsrun.jobs.assembly.checks import kernels, precision, recomputing, tiles
from dsrun.jobs.assembly.finetune.stages import Requested, S, WithDevices, layered
from dsrun.options import derived
from dsrun.options.layers import Layer, Source
from dsrun.options.table import MICRO_BATCH_MEAN


def choose_precision(requested: S, machine: Machine, findings: Findings) -> S:
    """The precision that the devices do best, unless another one is given. machine: with the job's devices alone."""
    requested = layered(
        requested, Layer(Source.DERIVED, {"precision": machine.default_precision}, "what the devices do best")
    )
    findings.problems.extend(precision.problems(requested.options.precision, machine))
    findings.notes.extend(precision.notes(requested.options.precision, machine))
    return requested


def choose_kernels(placed: WithDevices, findings: Findings) -> WithDevices:
    """Attention, the fused loss and what is computed again, by the devices and the network.

    Raises DsrunError where some are asked for and can't be.
    """
    allocation, options = placed.allocation, placed.options
    devices = kernels.devices_of(placed.machine, allocation.devices, known=allocation.known)
    findings.problems.extend(recomputing.problems(placed.resolved, devices.accelerator, placed.architecture))
    chosen = kernels.chosen(
        options, devices, placed.network, str(options.precision), official=options.official
    )
    findings.problems.extend(tiles.problems(options, placed.network))
    findings.problems.extend(precision.fp8_device_problems(options.fp8, devices))
    return choose_tiles(replace(placed, kernels=chosen), findings)


def choose_tiles(placed: WithDevices, findings: Findings) -> WithDevices:
    """Tokens of a tile, by the lengths and the vocabulary; a line where nobody asked for it."""
    options, shape = placed.options, placed.shape
    tokens = placed.longest_example // options.sp
    tile = tiles.settled(
        options, tokens=tokens, vocabulary=shape.vocab if shape else 0, network=placed.network,
        fused_loss=placed.kernels.fused_loss,
    )  # fmt: skip
    if options.tile_tokens is None and tile:
        findings.notes.append(
            f"loss and MLPs take {tile} tokens at a time: logits of {tokens} are large ({tiles.FLAG} 0: all at once)"
        )
    return layered(placed, Layer.settled({"tile_tokens": tile}, f"logits of {tokens} tokens"))


def split(requested: S) -> S:
    """The optimizer step over the devices. Raises DsrunError where it can't be divided by them."""
    resolved, ranks = requested.resolved, requested.shares
    if tokens := requested.options.tokens_per_batch:
        check_token_batch(requested)
        return layered(requested, derived.by_tokens(resolved, tokens, requested.longest_example, ranks))
    fixed = requested.options.loss == MICRO_BATCH_MEAN
    return layered(requested, derived.by_devices(resolved, ranks, fixed_micro_batch=fixed))


def smaller(requested: S) -> Iterator[S]:
    """The request with the same step, as `split` has divided it, in ever smaller micro batches."""
    resolved, ranks = requested.resolved, requested.shares
    if tokens := requested.options.tokens_per_batch:
        layers = derived.smaller_token_batches(resolved, tokens, requested.longest_example, ranks)
    else:
        layers = derived.smaller_micro_batches(resolved, ranks)
    return (layered(requested, layer) for layer in layers)


def larger(requested: S) -> Iterator[S]:
    """The same step, as `split` has divided it, in larger micro batches, where nobody has given one."""
    if requested.options.tokens_per_batch:
        return iter(())
    return (
        layered(requested, layer)
        for layer in derived.larger_micro_batches(requested.resolved, requested.shares)
    )


def check_token_batch(requested: Requested) -> None:
    """Refuse a budget of tokens for what depends on how many micro batches a step has."""
    if requested.architecture.get("output_router_logits"):
        fault = (
            "the routers' loss is a mean over a step's micro batches, of which each step has another number"
        )
        hint = "Leave it out, or set output_router_logits to false in the model's config.json."
        raise DsrunError(fault, where="--tokens-per-batch", hint=hint)
