"""DS10x: how many samples a step sees, and over how many GPUs they are spread."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from dsrun.config import tree
from dsrun.config.fix import Edit, Fix
from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import divisors
from dsrun.config.rules.examples import ZERO_1, hf, tensor
from dsrun.config.rules.frame import DIFFERS, FAILS, REFUSED, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, groups, report
from dsrun.config.schemas import schema

TOTAL = "train_batch_size"
MICRO = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TENSOR = "tensor_parallel.autotp_size"
SEQUENCE = "sequence_parallel_size"
DATA = "data_parallel_size"


def model_parallel_size(config: Mapping[str, Any]) -> int:
    """The number by which DeepSpeed divides the GPUs before it checks the batch: sequence_parallel_size, or 1.

    Tensor parallelism isn't counted: the check comes before its groups are made (runtime/config.py).
    """
    value = tree.get(config, SEQUENCE)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 1 else 1


@rule("DS101", REFUSED)
@bad(
    {"_bare": True, "train_batch_size": 3},
    {"_world_size": 3, "train_batch_size": 10, "train_micro_batch_size_per_gpu": 2},
)
@good(
    {"_bare": True, "train_batch_size": 4},
    {"_bare": True, "train_batch_size": 8, "gradient_accumulation_steps": 2},
)
def batch_sizes_do_not_match(context: Context) -> Iterator[Finding]:
    """The total must be micro batch x accumulation x data-parallel ranks, or the start fails.

    A missing one is computed by integer division, then checked in the same way (_set_batch_related_parameters and
    _batch_assertion in runtime/config.py).
    """
    ranks = _ranks(context)
    parts = _parts(context)
    total = context.integer(TOTAL)
    if total is None or ranks is None or parts is None or total < 1:
        return
    micro, accumulation = parts[MICRO], parts[ACCUMULATION]
    # Where both parts are given, the total has to be their product. Where DeepSpeed works one out, it has to divide.
    unit = ranks * (micro or 1) * (accumulation or 1)
    exact = micro is not None and accumulation is not None
    if total == unit if exact else total % unit == 0:
        return
    advice = _legal(total, micro, ranks, unit, exact)
    product = _product(parts, f"{ranks} ranks")
    if exact and not context.has(ACCUMULATION):
        product = product.replace(
            f"{ACCUMULATION} 1", f"{ACCUMULATION} 1 (accelerate's, where the key is missing)"
        )
    text = f"{total} doesn't match {product}" if exact else f"{total} is not a multiple of {product}"
    text += f" = {unit}" if micro or accumulation else ""
    yield Finding(TOTAL, text, advice)


def _legal(total: int, micro: int | None, ranks: int, unit: int, exact: bool) -> str:
    """The advice for a total that doesn't fit: totals and accumulations that do. exact: both parts are given."""
    if not exact:
        return _nearest(total, unit)
    per_step = (micro or 1) * ranks
    if total % per_step == 0:
        return f"Set {TOTAL} to {unit}, or {ACCUMULATION} to {total // per_step}."
    lower = total // per_step
    near = " or ".join(
        f"{steps * per_step} ({ACCUMULATION} {steps})" for steps in (lower, lower + 1) if steps
    )
    return f"Set {TOTAL} to {unit}, or the nearest to {total}: {near}."


def _nearest(total: int, unit: int) -> str:
    lower = total // unit * unit
    if lower:
        return f"The nearest valid values are {lower} and {lower + unit}."
    return f"The nearest valid value is {unit}."


def _parts(context: Context) -> dict[str, int | None] | None:
    """Micro batch and accumulation, None for the one DeepSpeed works out; None where one isn't a number above 0.

    accelerate takes one step of accumulation where the key is missing (DeepSpeedPlugin.__post_init__ in
    accelerate/utils/dataclasses.py).
    """
    parts = {path: context.integer(path) for path in (MICRO, ACCUMULATION)}
    if any((value or 0) < 1 and context.get(path) is not None for path, value in parts.items()):
        return None
    if context.target in schema.FILLING and not context.has(ACCUMULATION):
        parts[ACCUMULATION] = 1
    return parts


def _product(parts: Mapping[str, int | None], *more: str) -> str:
    return " x ".join([*(f"{path} {value}" for path, value in parts.items() if value is not None), *more])


def _ranks(context: Context) -> int | None:
    """Data-parallel ranks as DeepSpeed counts them; None where that isn't known or no whole number."""
    size = model_parallel_size(context.plain)
    if context.world_size is None or context.world_size % size:
        return None
    return context.world_size // size


@rule("DS102", REFUSED)
@bad({"_bare": True}, {"_bare": True, "gradient_accumulation_steps": 2})
@good({"_bare": True, "train_batch_size": 4}, {"_bare": True, "train_micro_batch_size_per_gpu": 1})
def no_batch_size(context: Context) -> Iterator[Finding]:
    """Without a total or a micro batch the start fails (_set_batch_related_parameters, runtime/config.py).

    Lightning fills in the DataLoader's (_format_batch_size_and_grad_accum_config, its strategies/deepspeed.py);
    HF Trainer and accelerate fill in existing keys and add none (transformers/integrations/deepspeed.py).
    """
    if context.target == "lightning" or any(context.get(path) is not None for path in (TOTAL, MICRO)):
        return
    if context.target in schema.FILLING:
        keys = [path for path in (TOTAL, MICRO, ACCUMULATION) if context.get(path) is None]
        fix = Fix(tuple(Edit("add", path, schema.AUTO) for path in keys))
        yield Finding(MICRO, "there is no batch size", f'Set {" and ".join(keys)} to "auto".', fix)
    else:
        yield Finding(MICRO, "there is no batch size", f"Set {MICRO}, for example to 4, or {TOTAL}.")


@rule("DS103", FAILS)
@bad(tensor(3), {"_world_size": 2, **tensor(4)})
@good(tensor(4), {"_world_size": 3, **tensor(3)})
def tensor_parallel_groups() -> Table:
    """Groups of autotp_size must divide the GPUs evenly: an assertion (_init_tp_mesh_device, utils/groups.py)."""
    text = "groups of {value} don't divide {gpus} GPUs. Valid sizes: {sizes}."
    return groups(TENSOR, text, when.several(TENSOR))


@rule("DS104", REFUSED)
@bad(
    {"_world_size": None, "train_batch_size": 10, "train_micro_batch_size_per_gpu": 4},
    {"_world_size": None, "_bare": True, "train_batch_size": 3, "gradient_accumulation_steps": 2},
)
@good(
    {"_world_size": None, "train_batch_size": 12, "train_micro_batch_size_per_gpu": 4},
    {"_world_size": None, "_bare": True, "train_batch_size": 4, "gradient_accumulation_steps": 2},
)
def batch_size_fits_no_number_of_gpus(context: Context) -> Iterator[Finding]:
    """A total that isn't a multiple of micro batch x accumulation is refused on any number of GPUs.

    Source: _batch_assertion in runtime/config.py.
    """
    total, parts = context.integer(TOTAL), _parts(context)
    if context.world_size is not None or total is None or parts is None:
        return
    unit = (parts[MICRO] or 1) * (parts[ACCUMULATION] or 1)
    if total > 0 and total % unit:
        text = f"{total} is not a multiple of {_product(parts)}"
        text += "" if None in parts.values() else f" = {unit}"
        yield Finding(TOTAL, f"{text}, so no number of GPUs works", _nearest(total, unit))


@rule("DS105", "note")
@bad(
    {
        "_world_size": None,
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": 1,
    }
)
@good(
    {"_world_size": None, "train_batch_size": 16, "train_micro_batch_size_per_gpu": 2},
    {"_world_size": None, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4},
)
def batch_size_fits_one_number_of_gpus(context: Context) -> Iterator[Finding]:
    """Three fixed numbers agree on one number of GPUs only (_batch_assertion in runtime/config.py)."""
    total, parts = context.integer(TOTAL), _parts(context)
    if context.world_size is not None or total is None or parts is None or context.has(SEQUENCE):
        return
    unit = (parts[MICRO] or 0) * (parts[ACCUMULATION] or 0)
    if unit > 0 and total > 0 and total % unit == 0:
        gpus = total // unit
        yield Finding(
            TOTAL,
            f"{total} = {_product(parts)} x {gpus} GPUs: it starts on no other number",
            f"Leave {TOTAL} out: it then follows the number of GPUs.",
        )


@rule("DS106", "warning", since=(0, 15))
@bad({"sequence_parallel_size": 2}, {"sequence_parallel_size": 3, "_world_size": None})
@good({"sequence_parallel_size": 1}, {"sequence_parallel_size": 2, "data_parallel_size": 2})
def sequence_parallel_size_alone(context: Context) -> Iterator[Finding]:
    """The batch is counted for the GPUs divided by it (DeepSpeedConfig.__init__ in runtime/config.py).

    Groups are made only with data_parallel_size (deepspeed/__init__.py), or by code that passes
    an mpu: ALST's own examples (UlyssesSPAttentionHF in runtime/sequence_parallel/ulysses_sp.py), and accelerate for
    ParallelismConfig(sp_size=...) (accelerate/accelerator.py). A size that doesn't divide the GPUs is wrong with both.
    """
    size, world = context.integer(SEQUENCE) or 1, context.world_size
    if size < 2 or context.has(DATA):
        return
    if world and world % size:
        text = f"{size} doesn't divide the {world} GPUs: DeepSpeed computes the batch with {world / size:g} ranks"
        advice = f"Valid sizes: {divisors(world)}."
        yield Finding(SEQUENCE, text, advice, severity="error", effect=DIFFERS)
        return
    counted = (
        f", and train_batch_size counts {world // size} of the {world} GPUs, though all see other rows"
        if world
        else ""
    )
    text = f"{size} acts only through an mpu passed to deepspeed.initialize; without one no sequence is split"
    advice = (
        f"Pass the mpu, or have DeepSpeed make the groups with {DATA}{f' {world // size}' if world else ''}."
    )
    if context.target in schema.FILLING:
        advice = f"accelerate passes one for ParallelismConfig(sp_size={size}); without that, remove it."
    yield Finding(SEQUENCE, f"{text}{counted}", advice)


@rule("DS107", FAILS, since=(0, 15))
@bad(
    {"sequence_parallel_size": 2, "data_parallel_size": 1},
    {"sequence_parallel_size": 4, "data_parallel_size": 2},
)
@good(
    {"sequence_parallel_size": 2, "data_parallel_size": 2},
    {"sequence_parallel_size": 4, "data_parallel_size": 2, "_world_size": None},
)
def parallel_sizes_do_not_match_gpus(context: Context) -> Iterator[Finding]:
    """A mesh larger than the job is refused; in a smaller one the remaining ranks have no group.

    Source: initialize in deepspeed/__init__.py, initialize_mesh_device in comm/comm.py.
    """
    sequence, data, world = context.integer(SEQUENCE), context.integer(DATA), context.world_size
    if sequence and data and world is not None and sequence * data != world:
        near = (
            f"Set {DATA} to {world // sequence}."
            if world % sequence == 0
            else f"Their product must be {world}."
        )
        yield Finding(
            DATA,
            f"{SEQUENCE} {sequence} x {DATA} {data} = {sequence * data}, but there are {world} GPUs",
            near,
        )


@rule("DS108", "warning", since=(0, 15))
@bad({"sequence_parallel_size": 2, "data_parallel_size": 2})
@good({"sequence_parallel_size": 1, "data_parallel_size": 4})
def sequences_are_split_in_code_only() -> Table:
    """The two sizes make the groups, and the batch is counted for them (deepspeed/__init__.py, runtime/config.py).

    That doesn't split any sequence: attention has to be DistributedAttention (sequence/layer.py).
    """
    text = (
        "{value} makes groups but doesn't split sequences by itself. "
        "Use DistributedAttention in the model, and give each GPU its part of the sequence; or remove both sizes."
    )
    return report(SEQUENCE, text, (when.several(SEQUENCE), lambda context: context.integer(DATA)))


@rule("DS109", "warning", since=(0, 16, 4))
@bad({"train_batch_size": 8, **tensor(2)}, hf(**tensor(2), **ZERO_1))
@good({"train_batch_size": 8, **tensor(1)})
def batch_counts_tensor_parallel_gpus(context: Context) -> Iterator[Finding]:
    """All GPUs are counted, although those of a tensor-parallel group get the same samples (runtime/config.py)."""
    size, total = context.integer(TENSOR) or 1, context.integer(TOTAL)
    if size < 2:
        return
    seen = (
        f"a step sees {total // size} samples, not {total}"
        if total
        else f"a step sees 1 of every {size} samples that are counted"
    )
    yield Finding(
        TOTAL if total else TENSOR,
        f"DeepSpeed counts every GPU, but groups of {size} share their samples: {seen}",
        f"Use {size} times the batch size or the accumulation steps that you would use without it.",
        severity="" if total else "note",
    )
