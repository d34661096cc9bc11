"""From what the user says to plans: the model's shape, the room there is, every preset's division of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsrun import catalog, packages
from dsrun.cluster.devices import Machine
from dsrun.config.presets.options import Options, with_environment
from dsrun.config.presets.preset import load
from dsrun.config.presets.sources import strategy
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.jobs.build.plan_target import USUAL_GPU, PlanTarget, target
from dsrun.models import model_files, resolve, trainable
from dsrun.models.adapters import PREFIX
from dsrun.options import derived
from dsrun.options.commands import PlanOptions, PresetOptions
from dsrun.options.groups import PeftOptions
from dsrun.options.optimizers import ADAMW, MUON
from dsrun.options.table import Resolved, Source, entries, flag_of, select
from dsrun.planner import lora, shapes
from dsrun.planner.plan import FITS, MOST_ROWS, OUT, MemoryBudget, Plan, fastest, ranked
from dsrun.planner.setup import DEVICES, Setup, batch_fields, fsdp_fields, zero_fields
from dsrun.planner.shape import Shape, from_config, from_numbers
from dsrun.planner.speed import slow_network
from dsrun.versions import version

if TYPE_CHECKING:
    from dsrun.data.sequence_lengths import SequenceLengths
    from dsrun.jobs.spec.job import FsdpSpec
    from dsrun.planner.advice import Advice

NUMBERS = ("params", "hidden", "layers", "intermediate", "heads", "kv_heads", "vocab")
PRESETS = "presets"
RECOMPUTED = (0, 2, 1)
"""What a plan tries of activation checkpointing (Setup.checkpointing): nothing, every second layer, every layer."""
FASTER = 1.25
"""From how many times as fast on a small change is worth a word."""
LOGITS_SHARE = 0.1
"""Share of a card from which on the logits are worth a word."""
FREES_INPUTS = (0, 43, 2)
"""The bitsandbytes whose 4-bit matrices no longer keep their inputs (bitsandbytes#1270)."""
NOWHERE = "/nvme"
"""The folder that stands in a config which is only planned with."""


@dataclass(frozen=True)
class PlanSubject:
    """The model that is planned for. defaults: its file's own training values; folder: its own, where it has one;
    architecture: its config, empty where only numbers are known."""

    name: str
    shape: Shape
    defaults: Mapping[str, Any]
    folder: Path | None = None
    architecture: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RankedPlans:
    """Plans, the best first. skipped: presets that could not be planned, and why. advice: where none fits."""

    plans: list[Plan]
    skipped: dict[str, str]
    advice: Advice | None


Divided = tuple[dict[str, dict[str, Any]], dict[str, str]]
"""Preset -> what its ds_config gives a Setup; and preset -> why it was left out."""


def subject(model: str | None, options: PlanOptions | None = None) -> PlanSubject:
    """The model: a name from `dsrun models`, a folder or config.json, or --params and the options beside it.

    Raises DsrunError for a model that is unknown, or that the planner doesn't describe.
    """
    said = {name: getattr(options, name) for name in NUMBERS} if options else {}
    numbers = {name: value for name, value in said.items() if value is not None}
    if model is None:
        if "params" not in numbers:
            raise DsrunError("no model is named", hint="Name one (`dsrun models`), or give --params 6.2e9.")
        parameters = numbers.pop("params")
        shape = from_numbers(parameters, **numbers)
        return PlanSubject(f"{parameters / 1e9:.4g}e9 parameters", shape, {})
    if numbers:
        names = ", ".join(flag_of(PlanOptions, name) for name in numbers)
        raise DsrunError(f"{model} says what {names} would say", hint="Name a model, or give its numbers.")
    path = Path(model).expanduser()
    if path.suffix == ".gguf":
        raise DsrunError(
            "is a GGUF file: its shape is not read",
            where=model,
            hint="Give its numbers: --params 1.1e9 --hidden 2048",
        )
    try:
        config, where, named = resolve.config_of(model)
    except DsrunError:
        # A name of a released network, without its config: its shape is known.
        if (fields := shapes.find(model)) is None or path.exists():
            raise
        shape, _ = shapes.shape(model, None)
        return PlanSubject(model, shape, {}, architecture={"model_type": "llama", **fields.get("config", {})})
    if named:
        shape = from_config(config, where, named.parameters)
        return PlanSubject(named.name, shape, named.defaults, architecture=config)
    trainable.check(config, where, training=False)
    folder = path if path.is_dir() else path.parent if path.is_file() else None
    name = folder.name if folder and path.is_dir() else path.name
    return PlanSubject(name, from_config(config, where), {}, folder, config)


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
    """What every preset is planned with: the batch, the lengths, the method.

    peft: a job's, in place of the options'. flash, fused_loss: the kernels (jobs.build.checks.kernels). example: mean
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
        checkpointing=options.recomputed,
        activations_device="cpu" if options.offloads_activations else "gpu",
        variable_lengths=not options.packing,
        flash=flash,
        fused_loss=fused_loss,
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
        "adapters": lora.lora_weights(shape, peft.lora_rank, targets),
        "targets": targets,
        "lora_dropout": peft.lora_dropout,
        "quantized": "nf4" if peft.method == "qlora" else None,
        "keeps_inputs": peft.method == "qlora" and _keeps_inputs(),
    }


def _keeps_inputs() -> bool:
    """Whether the bitsandbytes that is installed here keeps the inputs of 4-bit matrices; without one: no."""
    return () < version(packages.installed_version("bitsandbytes") or "") < FREES_INPUTS


def presets_for(optimizer: str, base: Setup, room: MemoryBudget) -> list[str]:
    """The presets that an optimizer trains under (jobs.build.checks.optimizers refuses the others)."""
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
        for name, found in fields.items()
        if found["optimizer_device"] == found["parameter_device"] == "gpu" and least <= found["stage"] <= most
    ]


def seq_len_of(options: PlanOptions) -> int:
    """Tokens of the longest example."""
    return options.seq_len or options.max_source_length + options.max_target_length


def preset_fields(
    names: Iterable[str], room: MemoryBudget, base: Setup, *, overrides: tuple[str, ...] = ()
) -> Divided:
    """What each preset's finished ds_config gives a Setup, the least divided first; what was left out, and why."""
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
            found = _fields_of(name, options, room, base)
        except DsrunError as error:
            skipped[name] = str(error.problems[0])
            continue
        if "nvme" in (found["optimizer_device"], found["parameter_device"]) and room.nvme_bytes is None:
            skipped[name] = "no NVMe disk is named (--nvme 2TB)"
        elif base.quantized and not base.changed(**found).takes_4_bits:
            skipped[name] = "4-bit weights under ZeRO-3 and FSDP are not modelled"
        else:
            fields[name] = found
    return dict(sorted(fields.items(), key=lambda item: _division(item[1]))), skipped


def _fields_of(name: str, options: Options, room: MemoryBudget, base: Setup) -> dict[str, Any]:
    """What one preset gives a Setup. Raises DsrunError where it can't be read, or doesn't fit these hosts."""
    chosen = load(name).fsdp
    if chosen is None:
        return zero_fields(strategy(name, options))
    from dsrun.jobs.build import fsdp
    from dsrun.jobs.spec.job import HostDevices

    if base.precision == "fp16" or base.optimizer not in fsdp.ABLE:
        what = base.precision if base.precision == "fp16" else base.optimizer
        raise DsrunError(f"FSDP doesn't train with {what}")
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


def answer(
    base: Setup,
    where: PlanTarget,
    presets: Iterable[str],
    *,
    recomputed: Sequence[int] = (),
    batches: Sequence[tuple[int, int]] = (),
    overrides: tuple[str, ...] = (),
    never: Collection[str] = (),
    divided: Divided | None = None,
) -> RankedPlans:
    """Every preset's best plan, ranked, and advice where none fits.

    recomputed: Setup.checkpointing's values to try, batches: (micro batch, accumulation); none: the base's. overrides:
    --set's texts. never: kinds of change that are not advised. divided: what preset_fields says, where it is known.
    """
    fields, skipped = divided or preset_fields(presets, where.room, base, overrides=overrides)
    tried = [
        base.changed(checkpointing=again, micro_batch=micro, grad_accum=accum)
        for again in recomputed or (base.checkpointing,)
        for micro, accum in batches or ((base.micro_batch, base.grad_accum),)
    ]
    plans = ranked(
        fastest(name, (setup.changed(**found) for setup in tried), where.room)
        for name, found in fields.items()
    )
    advice = None
    if plans and plans[0].verdict == OUT:
        if not (where.bf16 or where.fp16):
            never = {*never, "precision"}
        from dsrun.planner.advice import advise

        advice = advise(plans[0], fields, where.room, bf16=where.bf16, never=never)
    return RankedPlans(plans, skipped, advice)


def with_model(asked: Resolved[PlanOptions], what: PlanSubject) -> Resolved[PlanOptions]:
    """The options with what the model's file says of fine-tuning it."""
    own = {name: value for name, value in what.defaults.items() if name in entries(PlanOptions)}
    own.pop("activation_checkpointing", None)  # it is searched
    return asked.filled(Source.MODEL_FILE, own, model_files.file_label(what.name))


def batches(
    asked: Resolved[PlanOptions], ranks: int
) -> tuple[Resolved[PlanOptions], list[tuple[int, int]], list[str]]:
    """The options with finetune's split of a step, the (micro batch, accumulation) that may take its place, and notes.

    All of them take the same examples a step. Where nobody said how many and the ranks can't share them equally, the
    nearest number is planned. Raises DsrunError where what is asked for can't be divided.
    """
    notes: list[str] = []
    options = asked.options
    if tokens := options.tokens_per_batch:
        longest = options.max_source_length + options.max_target_length
        asked = derived.by_tokens(asked, tokens, longest, ranks)
        sizes = range(asked.options.micro_batch, 0, -1)
        return asked, [(size, derived.accumulation(tokens, longest, ranks, size)) for size in sizes], notes
    parts = asked.said("micro_batch") or asked.said("grad_accum")
    if not asked.said("global_batch") and not asked.said("grad_accum"):
        unit = ranks * (options.micro_batch if parts else 1)
        near = max(1, round(options.global_batch / unit)) * unit
        if near != options.global_batch:
            flag = flag_of(PlanOptions, "global_batch")
            notes.append(
                f"{options.global_batch} examples a step can't be split by {ranks} ranks and what is asked: {near} "
                f"are planned. dsrun finetune takes them with {flag} {near}."
            )
            asked = asked.settled({"global_batch": near}, f"{ranks} ranks")
    asked = derived.by_devices(asked, ranks)
    options = asked.options
    if parts:
        return asked, [(options.micro_batch, options.micro_steps)], notes
    share = options.global_batch // ranks
    return asked, [(size, share // size) for size in _divisors(share)], notes


def _divisors(share: int) -> list[int]:
    """Micro batches that a rank's share of a step can be taken in, the largest first."""
    return [size for size in range(min(share, MOST_ROWS), 0, -1) if share % size == 0]


def faster(
    base: Setup,
    found: RankedPlans,
    again: Callable[[Setup], RankedPlans],
    *,
    batch: bool = False,
    checkpointing: bool = False,
) -> list[str]:
    """Small changes with which a plan that fits would be much faster, a line each.

    again: the plans of another base. batch, checkpointing: whether the user fixed how a step is split, and what is
    computed again, so that no plan was made with anything else.
    """
    if not found.plans or found.plans[0].verdict == OUT:
        return []
    first = found.plans[0]
    kinds = [
        {"a fused loss (--liger, with liger-kernel)": base.changed(fused_loss=True)},
        {"flash attention (--attention flash, or sdpa)": base.changed(flash=True)},
        {"--packing": base.changed(variable_lengths=False)},
    ]
    if batch:
        kinds.append(_other_splits(base))
    if checkpointing:
        ways = {"none": 0, "full": 1}
        kinds.append(
            {f"--activation-checkpointing {way}": base.changed(checkpointing=n) for way, n in ways.items()}
        )
    lines = []
    for kind in kinds:
        tried = [(text, again(setup).plans[0]) for text, setup in kind.items() if setup != base]
        fitting = [(plan.seconds_per_token, text, plan) for text, plan in tried if plan.verdict != OUT]
        seconds, text, plan = min(fitting, key=lambda one: one[0], default=(math.inf, "", first))
        if first.seconds_per_token > FASTER * seconds:
            gain = first.seconds_per_token / seconds
            lines.append(f"With {text} {title(plan)} would fit, {gain:.1f} times as fast.")
    return lines


def _other_splits(base: Setup) -> dict[str, Setup]:
    """Words -> the base with another micro batch and as many examples a step."""
    share = base.micro_batch * base.grad_accum
    sizes = [size for size in _divisors(share) if size != base.micro_batch]
    return {
        f"--micro-batch {size} --grad-accum {share // size}": base.changed(
            micro_batch=size, grad_accum=share // size
        )
        for size in sizes
    }


def title(plan: Plan) -> str:
    """A plan in few words: preset, micro batch x accumulation, checkpointing."""
    return f"{plan.preset} with {plan.setup.micro_batch} x {plan.setup.grad_accum}{recomputing(plan.setup)}"


def recomputing(setup: Setup) -> str:
    """What of the activations is computed again, as the end of a list; empty where nothing is."""
    if not setup.checkpointing:
        return ""
    blocks = "" if setup.checkpointing == 1 else f" of one layer in {setup.checkpointing}"
    return f", activation checkpointing{blocks}" + ", offloaded" * (setup.activations_device == "cpu")


def default_precision(where: PlanTarget) -> str:
    """What finetune would train in there."""
    none = where.room.accelerator == "cpu" or not (where.bf16 or where.fp16)
    return "fp32" if none else "bf16" if where.bf16 else "fp16"


def first_choice(
    asked: Resolved[PresetOptions], machine: Machine, built: Options
) -> tuple[str, Options, str]:
    """The fastest preset that fits a model, the config's options it was planned with, and a line that says why.

    Raises DsrunError where nothing fits.
    """
    options = asked.options
    what = subject(options.model)
    own = {name: value for name, value in asked.user.items() if name in entries(PlanOptions)}
    own |= {"nvme": "1000TiB"} if with_environment(built)[0].nvme_path else {}
    to_plan = with_model(Resolved.by_user(PlanOptions, own), what).options
    where = target(to_plan, machine)
    precision = options.precision or default_precision(where)
    if not asked.said("activation_checkpointing"):
        own_way = what.defaults.get("activation_checkpointing", to_plan.activation_checkpointing)
        to_plan = replace(to_plan, activation_checkpointing=own_way)
    base = base_setup(what.shape, where.room, to_plan, precision)
    found = answer(base, where, all_presets(where.room.nodes), overrides=options.overrides)
    best, why = best_of(found)
    planned = replace(
        built,
        precision=precision,
        micro_batch=to_plan.micro_batch,
        grad_accum=to_plan.micro_steps,
        overrides=(*_planned_sizes(best.preset, built), *options.overrides),
    )
    batch_said = f"rows of {base.seq_len} tokens, micro batch {base.micro_batch}, {precision}"
    batch_said += recomputing(base)
    return best.preset, planned, f"{why}; {batch_said}"


SIZES = (
    "reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
)  # fmt: skip
"""Keys that a plan depends on and that HF Trainer fills in by itself where they are "auto"."""


def _planned_sizes(preset: str, options: Options) -> tuple[str, ...]:
    """--set texts that keep the bucket sizes a plan assumed, for a reader that would choose others."""
    if options.target != "hf":
        return ()
    read = strategy(preset, replace(options, nvme_path=options.nvme_path or NOWHERE))
    plain = strategy(preset, replace(options, target="deepspeed", nvme_path=options.nvme_path or NOWHERE))
    zero, numbers = read["zero_optimization"], plain["zero_optimization"]
    return tuple(f"zero_optimization.{key}={numbers[key]}" for key in SIZES if zero.get(key) == "auto")


def best_of(found: RankedPlans, *, force: bool = False) -> tuple[Plan, str]:
    """The first plan and a line that says why it is. Raises DsrunError where none fits, unless it is forced."""
    if not found.plans:
        raise DsrunError([Problem(why, f"preset {name}") for name, why in found.skipped.items()])
    best = found.plans[0]
    if best.verdict == OUT and force:
        return best, f"preset {best.preset}: none fits, and it comes nearest ({best.reason})"
    if best.verdict == OUT:
        raise DsrunError(
            f"no preset fits: {best.preset} comes nearest ({best.reason})", hint=advice_text(found.advice)
        )
    running = sum(plan.verdict != OUT for plan in found.plans)
    many = f"the fastest of {running} presets that fit" if running > 1 else "the only preset that fits"
    tight = "" if best.verdict == FITS else ", tightly"
    return best, f"preset {best.preset}: {many}{tight} ({best.reason})"


def advice_text(found: Advice | None) -> str:
    """Advice in one line."""
    if found is None:
        return "Nothing that dsrun knows makes it fit here."
    return f"It fits with: {'; '.join(step.text for step in found.steps)}."


def notes(what: PlanSubject, where: PlanTarget, found: RankedPlans) -> list[str]:
    """What is worth knowing beside the numbers."""
    lines = [*where.notes]
    if where.room.accelerator == "cpu":
        lines.append(
            "This is for CPUs. Name a GPU with --gpu, as rtx-4090, a100-80g or h100-80g, and how many with --gpus."
        )
    if where.hardware_assumed:
        lines.append(f"Speed is that of {USUAL_GPU}: name the GPU with --gpu for its own.")
    if what.shape.assumed:
        lines.append(f"Assumed for the model: {', '.join(what.shape.assumed)}.")
    if found.plans and found.plans[0].setup.precision == "bf16" and not where.bf16:
        own = "--precision fp16" if where.fp16 else "--precision fp32: DeepSpeed refuses fp16 on them"
        lines.append(f"These GPUs have no bf16: at best it is emulated. Theirs is {own}.")
    limit = what.shape.positions
    length = found.plans[0].setup.seq_len if found.plans else 0
    if limit and length > limit:
        lines.append(f"Rows of {length} tokens are longer than the model's {limit} positions.")
    if where.room.host_bytes is None and found.plans:
        lines.append("Host memory is not judged: no --host-memory was named.")
    if where.room.nodes > 1 and where.network_assumed:
        rate = 8 * where.room.hardware.network_gb_s
        lines.append(f"{rate:.0f} Gbit/s between nodes are assumed: say --network for theirs.")
    for plan in found.plans:
        if warning := slow_network(plan.setup, where.room.hardware):
            lines.append(f"{plan.preset}: {warning}")
    if found.plans and found.plans[0].gpu.terms["logits"] > LOGITS_SHARE * where.room.gpu_bytes:
        size = found.plans[0].gpu.terms["logits"] / 2**30
        lines.append(
            f"The logits take {size:.1f} GiB: a fused cross-entropy (Liger) would save nearly all of it."
        )
    if found.plans and found.plans[0].setup.keeps_inputs:
        newer = ".".join(map(str, FREES_INPUTS))
        lines.append(f"The bitsandbytes here keeps the inputs of 4-bit matrices; {newer} and later don't.")
    if found.plans:
        seconds = f"a factor of {found.plans[0].speed.uncertain:g}"
        lines.append(f"Memory is good to about 8 %, seconds to {seconds}; the order of presets is surer.")
    return lines


def measured(what: PlanSubject, options: PlanOptions) -> tuple[SequenceLengths, tuple[int, int] | None]:
    """The lengths of --train-file's examples, and finetune's limits for them; None where nothing is to be cut.

    Raises DsrunError where there is no tokenizer, or no example.
    """
    from dsrun.data.conversations import columns_of
    from dsrun.data.data_file import check_data_file
    from dsrun.data.hub_data import local_file
    from dsrun.data.sequence_lengths import example_lengths, fitting, measure
    from dsrun.jobs.spec.job import DataSpec

    path = local_file(Path(str(options.train_file)).expanduser(), "--train-file")
    raise_all(check_data_file(path, columns_of(options), options.data_format))
    data = select(DataSpec, options, train_file=str(path), eval_file=None)
    folder = _tokenizer_folder(what, options)
    examples = example_lengths(data, folder)
    return measure(data, folder), fitting(examples, what.shape.positions) if examples else None


def _tokenizer_folder(what: PlanSubject, options: PlanOptions) -> Path:
    if options.model_path:
        return options.model_path.expanduser()
    if what.folder is not None:
        return what.folder
    from dsrun.data.cache import cache_root

    for folder in sorted((cache_root() / "models").glob(f"{what.name}-*")):
        if (folder / "tokenizer.json").is_file():
            return folder
    raise DsrunError(
        f"the tokenizer of {what.name} is not on this machine",
        where="--train-file",
        hint="Name its folder with --model-path, or give the length of an example: --seq-len TOKENS",
    )


@dataclass(frozen=True)
class Cost:
    """Hours and money. epoch_*: of one pass over the train file; None where none was given. price: of all GPUs."""

    seconds_per_million_tokens: float
    price_per_million_tokens: float | None = None
    epoch_examples: int | None = None
    epoch_tokens: float | None = None
    epoch_steps: int | None = None
    epoch_hours: float | None = None
    epoch_price: float | None = None


def cost(plan: Plan, lengths: SequenceLengths | None, price: float | None) -> Cost:
    """What a plan's training takes. price: of a GPU for an hour.

    Packed sequences are taken for full; padded examples cost their batch's longest, which a row of the plan is.
    """
    setup, million = plan.setup, 1e6 * plan.seconds_per_token
    per_hour = None if price is None else price * setup.gpus
    found = Cost(million, None if per_hour is None else per_hour * million / 3600)
    if lengths is None:
        return found
    tokens = lengths.rows * lengths.mean
    rows = lengths.rows if setup.variable_lengths else tokens / setup.seq_len
    steps = max(1, math.ceil(rows / (setup.micro_batch * setup.grad_accum * setup.gpus)))
    hours = steps * plan.speed.seconds_per_step / 3600
    return replace(
        found, epoch_examples=lengths.rows, epoch_tokens=tokens, epoch_steps=steps, epoch_hours=hours,
        epoch_price=None if per_hour is None else per_hour * hours,
    )  # fmt: skip


def all_presets(nodes: int = 1) -> list[str]:
    """The name of every preset that is chosen from where none is named: DeepSpeed's, without options of their own,
    which are tried with all.

    Another engine is taken where it is asked for: how fast FSDP is beside DeepSpeed was not measured. On one host those
    are left out that differ from another one on several.
    """
    found = {name: load(name) for name in catalog.files(PRESETS)}
    return [
        name
        for name, one in found.items()
        if not one.fsdp and not one.defaults and (nodes > 1 or not one.for_hosts)
    ]


def _division(fields: Mapping[str, Any]) -> tuple[int, int]:
    """By stage, then by how much is offloaded: the order in which the field tries presets."""
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
