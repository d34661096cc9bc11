"""The set-ups that a plan judges: the batch, the lengths and the method, divided as each preset's ds_config says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from dsrun import catalog, packages
from dsrun.config.presets.options import Options
from dsrun.config.presets.preset import load
from dsrun.config.presets.sources import strategy
from dsrun.errors import DsrunError
from dsrun.jobs.assembly.plan_target import PlanTarget
from dsrun.models.adapters import PREFIX, names_tensors
from dsrun.models.liger import CHUNK_TOKENS
from dsrun.options.commands import PlanOptions
from dsrun.options.optimizers import ADAMW, MUON
from dsrun.options.table import NO_FP8, PeftOptions
from dsrun.planner import lora
from dsrun.planner.plan import MemoryBudget
from dsrun.planner.setup import DEVICES, Setup, batch_fields, fsdp_fields, zero_fields
from dsrun.planner.shape import Shape
from dsrun.versions import version

if TYPE_CHECKING:
    from dsrun.job.job import FsdpSpec

PRESETS = "presets"
FREES_INPUTS = (0, 43, 2)
"""The bitsandbytes whose 4-bit matrices no longer keep their inputs (bitsandbytes#1270)."""
NOWHERE = "/nvme"
"""The folder that stands in a config which is only planned with."""
NO_4_BIT_SHARDS = "finetune doesn't train 4-bit weights that ranks share (ZeRO-3, FSDP)"
Divided = tuple[dict[str, dict[str, Any]], dict[str, str]]
"""Preset -> what its ds_config gives a Setup; and preset -> why it was left out."""


def base_setup(
    shape: Shape,
    room: MemoryBudget,
    options: PlanOptions,
    precision: str,
    *,
    peft: PeftOptions | None = None,
    flash: bool = True,
    fused_loss: bool = False,
    example: int = 0,
) -> Setup:
    """The set-up that every preset is planned with: the batch, the lengths, the method.

    peft: a job's, in place of the options'. flash, fused_loss: the kernels (assembly.checks.kernels). example: mean
    tokens of one, where they were measured.
    """
    return Setup(
        shape=shape,
        gpus=room.ranks,
        nodes=room.nodes,
        precision=precision,
        optimizer=options.optimizer,
        seq_len=seq_len_of(options),
        micro_batch=options.micro_batch,
        grad_accum=options.micro_steps,
        fp8=options.fp8 if options.compile and options.fp8 != NO_FP8 else "",
        checkpointing=options.recomputed,
        activations_device="cpu" if options.offloads_activations else "gpu",
        async_save=options.async_save,
        variable_lengths=not options.packing,
        flash=flash,
        fused_loss=fused_loss,
        fused_tokens=CHUNK_TOKENS,
        tile=options.tile_tokens or 0,
        example=example if options.packing else 0,
        **peft_fields(peft or options, shape),
    )


def peft_fields(peft: PeftOptions, shape: Shape) -> dict[str, Any]:
    """The method in the fields of a Setup. A prefix is planned as that many weights of LoRA's, on no matrix."""
    if not peft.freezes:
        return {}
    if peft.method == PREFIX:
        weights = peft.pre_seq_len * shape.layers * 2 * shape.kv_width
        return {"method": "lora", "adapters": weights, "targets": ()}
    targets, unknown = lora.roles(peft.lora_target)
    if unknown:  # a module of some network's own name: all matrices are more than it is
        targets = None
    return {
        "method": peft.method,
        "adapters": lora.lora_weights(shape, peft.lora_rank, targets)
        + (lora.expert_weights(shape, peft.lora_rank) if names_tensors(peft.lora_target) else 0),
        "targets": targets,
        "lora_dropout": peft.lora_dropout,
        "quantized": "nf4" if peft.method == "qlora" else None,
        "keeps_inputs": peft.method == "qlora" and _keeps_inputs(),
    }


def _keeps_inputs() -> bool:
    """Whether the bitsandbytes that is installed here keeps the inputs of 4-bit matrices; without one: no."""
    return () < version(packages.installed_version("bitsandbytes") or "") < FREES_INPUTS


def presets_for(optimizer: str, base: Setup, room: MemoryBudget) -> list[str]:
    """The presets that an optimizer trains under (jobs.assembly.checks.optimizers refuses the others)."""
    if base.engine == "fsdp":
        return [name for name in catalog.files(PRESETS) if load(name).fsdp]
    names = all_presets(room.nodes)
    if optimizer == ADAMW:
        return names
    fields, _ = preset_fields(names, room, base)
    most = 2 if optimizer == MUON else 3
    least = 0 if base.precision == "fp32" else 1
    return [
        name
        for name, division in fields.items()
        if division["optimizer_device"] == division["parameter_device"] == "gpu"
        and least <= division["stage"] <= most
    ]


def seq_len_of(options: PlanOptions) -> int:
    """Tokens of the longest example."""
    return options.seq_len or options.longest_example


def preset_fields(
    names: Iterable[str],
    room: MemoryBudget,
    base: Setup,
    *,
    overrides: tuple[str, ...] = (),
    shards_4_bits: bool = False,
) -> Divided:
    """Fields of a Setup from each preset's finished ds_config, the least divided first; presets left out, and why.

    shards_4_bits: also those whose ranks share 4-bit weights, which other trainers do and dsrun's doesn't.
    """
    fields: dict[str, dict[str, Any]] = {}
    skipped: dict[str, str] = {}
    options = Options(
        gpus=room.gpus,
        nodes=room.nodes,
        precision=base.precision,
        micro_batch=base.micro_batch,
        grad_accum=base.grad_accum,
        nvme_path=NOWHERE,
        overrides=overrides,
        largest_parameter=base.shape.largest,
    )
    for name in names:
        try:
            division = _fields_of(name, options, room, base)
        except DsrunError as error:
            skipped[name] = str(error.problems[0])
            continue
        if "nvme" in (division["optimizer_device"], division["parameter_device"]) and room.nvme_bytes is None:
            skipped[name] = "no NVMe disk is named (--nvme 2TB)"
        elif base.quantized and not shards_4_bits and base.changed(**division).sharded:
            skipped[name] = NO_4_BIT_SHARDS
        else:
            fields[name] = division
    return dict(sorted(fields.items(), key=lambda item: _division(item[1]))), skipped


def _fields_of(name: str, options: Options, room: MemoryBudget, base: Setup) -> dict[str, Any]:
    """Fields of a Setup from one preset. Raises DsrunError where it can't be read, or doesn't fit these hosts."""
    chosen = load(name).fsdp
    if chosen is None:
        return zero_fields(strategy(name, options))
    from dsrun.job.job import HostDevices
    from dsrun.jobs.assembly import fsdp

    if base.precision == "fp16" or base.optimizer not in fsdp.ABLE:
        fault = base.precision if base.precision == "fp16" else base.optimizer
        raise DsrunError(f"FSDP doesn't train with {fault}")
    hosts = [HostDevices(str(number), tuple(range(room.gpus))) for number in range(room.nodes)]
    spec = fsdp.spec_of(
        chosen,
        name,
        hosts,
        batch=(base.micro_batch, base.grad_accum),
        grad_clip=0.0,
        freezes=base.method != "full",
    )
    return fsdp_fields(
        base,
        replicas=room.ranks // spec.shard_ranks,
        offload=spec.offload,
        whole_gradients=spec.whole_gradients,
    )


def default_precision(where: PlanTarget) -> str:
    """The precision in which finetune would train there."""
    none = where.room.accelerator == "cpu" or not (where.bf16 or where.fp16)
    return "fp32" if none else "bf16" if where.bf16 else "fp16"


def all_presets(nodes: int = 1) -> list[str]:
    """The name of every preset that is chosen from where none is named: DeepSpeed's, without options of their own,
    which are tried with all; none that rounds what ranks send one another.

    Another engine is taken where it is asked for: how fast FSDP is beside DeepSpeed was not measured. On one host those
    are left out that differ from another one on several.
    """
    presets = {name: load(name) for name in catalog.files(PRESETS)}
    return [
        name
        for name, preset in presets.items()
        if not (preset.fsdp or preset.defaults or preset.rounds) and (nodes > 1 or not preset.for_hosts)
    ]


def _division(fields: Mapping[str, Any]) -> tuple[int, int]:
    """Sort key by stage, then by how much is offloaded: the order in which people try presets."""
    offload = DEVICES.index(fields["optimizer_device"]) + DEVICES.index(fields["parameter_device"])
    return fields["stage"], offload


def of_job(ds_config: Mapping[str, Any], base: Setup, fsdp: FsdpSpec | None = None) -> Setup:
    """A set-up divided as a finished ds_config says, with its batch and precision; or as FSDP does."""
    if fsdp is None:
        return base.changed(**zero_fields(ds_config), **batch_fields(ds_config))
    divided = fsdp_fields(
        base,
        replicas=base.gpus // fsdp.shard_ranks,
        offload=fsdp.offload,
        whole_gradients=fsdp.whole_gradients,
    )
    return base.changed(**divided, micro_batch=fsdp.micro_batch, grad_accum=fsdp.grad_accum)
