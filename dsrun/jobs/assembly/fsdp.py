"""A fine-tune under a preset of FSDP's: what it comes to on the job's hosts, and what FSDP can't do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dsrun.config.presets.fsdp import HOST, FsdpPreset
from dsrun.errors import DsrunError, Problem
from dsrun.job.job import FsdpSpec, HostDevices, world_size_of
from dsrun.options.commands import FinetuneOptions
from dsrun.options.layers import Resolved, Source
from dsrun.options.optimizers import OPTIMIZERS
from dsrun.options.table import CONFIG

ABLE = tuple(name for name, optimizer in OPTIMIZERS.items() if optimizer.fsdp)
"""The optimizers that step sharded weights."""


def spec_of(
    chosen: FsdpPreset,
    preset: str,
    hosts: Sequence[HostDevices],
    *,
    batch: tuple[int, int],
    grad_clip: float,
    freezes: bool,
) -> FsdpSpec:
    """FSDP's settings from a preset on these hosts. batch: micro batch and accumulation; freezes: an adapter is
    trained.

    Raises DsrunError where the hosts can't share the model as the preset says.
    """
    micro_batch, grad_accum = batch
    return FsdpSpec(
        micro_batch=micro_batch,
        grad_accum=grad_accum,
        grad_clip=grad_clip,
        shard_ranks=_shard_ranks(chosen, preset, hosts),
        offload=chosen.offload,
        whole_gradients=grad_accum > 1 and (chosen.whole_gradients or freezes),
    )


def _shard_ranks(chosen: FsdpPreset, preset: str, hosts: Sequence[HostDevices]) -> int:
    where, counts = f"preset {preset}", sorted({len(host.devices) for host in hosts}) or [1]
    if chosen.shard_over == HOST and len(counts) > 1:
        fault = (
            f"divides the model over the devices of each host, and hosts have {counts[0]} and {counts[-1]}"
        )
        raise DsrunError(fault, where=where, hint="Use as many on each (--gpus), or take --preset fsdp.")
    return chosen.shard_ranks(world_size_of(hosts) or 1, counts[0], where)


def optimizer_params(chosen: FsdpPreset, name: str) -> dict[str, Any]:
    """Arguments of the optimizer's class beside the learning rate."""
    defaults = {key: value for key, value in OPTIMIZERS[name].defaults.items() if key != "lr"}
    return {**defaults, **chosen.optimizer}


def refusals(chosen: FsdpPreset, preset: str, resolved: Resolved[FinetuneOptions]) -> list[Problem]:
    """Problems of options, and of the preset's own optimizer table, that FSDP can't follow."""
    return [*_options(preset, resolved), *_parameters(chosen, preset, resolved.options.optimizer)]


def _options(preset: str, resolved: Resolved[FinetuneOptions]) -> Iterator[Problem]:
    options, other = resolved.options, "Leave it out, or take --preset zero3."
    if options.overrides:
        fault = f"sets keys of DeepSpeed's config, and preset {preset} is trained with FSDP"
        yield Problem(fault, f"--set {options.overrides[0]}", other)
    if options.nvme_path is not None and resolved.source("nvme_path") > Source.ENVIRONMENT:
        fault = f"is for DeepSpeed's offload, and preset {preset} is trained with FSDP"
        yield Problem(fault, "--nvme-path", "Leave it out, or take --preset zero3-nvme.")
    if options.muon_lr is not None:
        yield Problem("is for muon, which needs whole matrices", "--muon-lr", other.replace("zero3", "zero2"))
    if options.precision == "fp16":
        fault = "is fp16, whose loss scaling FSDP doesn't have here"
        yield Problem(
            fault, "--precision", "Take bf16, or fp32 where the GPUs have no bf16; zero3 trains in fp16."
        )
    if options.optimizer not in ABLE:
        name = "the config's own" if options.optimizer == CONFIG else options.optimizer
        why = "needs whole matrices" if name == "muon" else "can't step weights that are sharded by FSDP"
        hint = f"Take one of {', '.join(ABLE)}, or --preset zero2."
        yield Problem(f"{name} {why}", "--optimizer", hint)
    if options.lr_schedule == CONFIG:
        yield Problem("is DeepSpeed's config's, and FSDP has none", "--lr-schedule config", "Take cosine.")
    if options.method == "qlora":
        yield Problem("its 4-bit weights can't be sharded", "--method qlora", "Take lora, or --preset zero2.")


def _parameters(chosen: FsdpPreset, preset: str, optimizer: str) -> Iterator[Problem]:
    if optimizer not in ABLE:
        return
    takes = [name for name in OPTIMIZERS[optimizer].takes if name != "lr"]
    for name in chosen.optimizer:
        if name == "lr":
            yield Problem(
                "the learning rate is an option", f"preset {preset}: fsdp.optimizer.lr", "Say it with --lr."
            )
        elif name not in takes:
            hint = f"It takes {', '.join(takes)}."
            yield Problem(f"{optimizer} has no {name}", f"preset {preset}: fsdp.optimizer", hint)


def another_engine(before: str, after: str, run_dir: str) -> DsrunError:
    """A run is to go on with the other engine's preset."""
    return DsrunError(
        f"the run trains with preset {before}, and {after} is another engine's, which can't read its checkpoints",
        where=run_dir,
        hint=f"Leave --preset out, or export the model and train that: dsrun export {run_dir}.",
    )
