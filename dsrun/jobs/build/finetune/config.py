"""The DeepSpeed config of a fine-tune, and whether it fits the devices."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from dsrun.config import tree
from dsrun.config.presets.build import BuiltConfig, Options, build_config
from dsrun.config.presets.fsdp import HOST, FsdpPreset
from dsrun.config.presets.preset import load, second_copy_notes
from dsrun.config.presets.preset_options import by_preset
from dsrun.config.presets.sources import draft as unchecked_config
from dsrun.data.conversations import AUTO
from dsrun.ds_config import zero_stage
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.jobs.build import fsdp
from dsrun.jobs.build.checks import compiling, memory_check, optimizers, parallelism, techniques
from dsrun.jobs.build.checks.optimizers import TORCH_ADAM, torch_adam, why_torch_adam
from dsrun.jobs.build.checks.overlap import OVERLAP, why_overlap
from dsrun.jobs.build.finetune.devices import divide, share_count, smaller, split
from dsrun.jobs.build.finetune.draft import Draft
from dsrun.jobs.build.finetune.layout import choose_layout
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.jobs.spec.job import node_shape, world_size_of
from dsrun.models import peft_methods, resolve
from dsrun.models.adapters import EXPERTS_NOTE, names_tensors
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.groups import AUTO_LAYOUT, CONFIG
from dsrun.options.optimizers import ADAMW
from dsrun.options.table import Resolved, Source, select
from dsrun.planner.buckets import Size
from dsrun.planner.plan import FITS, OUT, Plan


def settle_config(draft: Draft) -> None:
    """The preset, chosen if it is left to dsrun; the DeepSpeed config; and whether it fits."""
    if draft.preset is None:
        return  # it can't be read, which is said already
    if draft.options.layout == AUTO_LAYOUT:
        choose_layout(draft, memory_request(draft))
    if draft.preset == AUTO:
        _choose_preset(draft)
        if draft.preset == AUTO:
            return  # nothing is known to choose by, which is said already
    divide(draft, draft.hosts)
    draft.notes += parallelism.idle(draft.parallel.pp, draft.options.micro_steps)
    take_torch_adam(draft)
    take_overlap(draft)
    take_sizes(draft)
    draft.config = checked_config(draft)
    if draft.model and draft.placed and draft.placed.known:
        fit_memory(draft)


def _choose_preset(draft: Draft) -> None:
    """--preset auto: the fastest that fits; where none does, the fastest for the largest micro batch with which one
    does."""
    if draft.model is None or draft.placed is None:
        return
    hint = "Name a preset: `dsrun preset` lists them."
    if not draft.placed.known:
        raise DsrunError("can't choose: the hosts are not asked", where="--preset auto", hint=hint)
    if draft.parallel.group > 1:
        raise DsrunError(
            f"can't choose under {draft.parallel.words}: `dsrun plan --layouts` compares them",
            where="--preset auto",
            hint=hint,
        )
    whole = split(draft)
    splits = () if draft.options.force else (whole, *smaller(replace(draft, asked=whole)))
    for one in splits:
        with suppress(DsrunError):  # for the whole one it is raised below
            _take_preset(draft, one, force=False)
            return
    _take_preset(draft, whole, force=draft.forced)


def _take_preset(draft: Draft, asked: Resolved[FinetuneOptions], *, force: bool) -> None:
    """The fastest preset that fits with this split of a step. Raises DsrunError where none does, unless forced."""
    if (request := memory_request(replace(draft, asked=asked))) is None:
        return
    nvme = draft.options.nvme_path is not None
    draft.preset, why = memory_check.chosen_preset(
        request, draft.machine, draft.options.overrides, nvme=nvme, force=force
    )
    draft.notes.append(why)
    draft.asked = draft.asked.with_layers(*by_preset(draft.preset))


def _fit_micro_batch(draft: Draft) -> None:
    """Where the step runs out of memory, the largest micro batch with which it doesn't, and more of them.

    Not where it was asked for, nor where nothing helps: then the job is refused as it stands.
    """
    planned = _planned(draft)
    if draft.options.force or draft.problems or planned is None or planned.verdict != OUT:
        return
    for asked in smaller(draft):
        less = replace(draft, asked=asked, problems=[])
        less.config = checked_config(less)
        fits = _planned(less)
        if fits and fits.verdict != OUT:
            before, now = draft.options, asked.options
            draft.notes.append(
                f"micro batch {now.micro_batch} x accumulation {now.grad_accum}, the same {_step(now)} "
                f"a step: with {before.micro_batch} x {before.grad_accum} it runs out of memory ({planned.reason})"
            )
            draft.asked, draft.config, draft.fsdp = asked, less.config, less.fsdp
            return


def _step(options: FinetuneOptions) -> str:
    tokens = options.tokens_per_batch
    return f"{tokens} tokens" if tokens else f"{options.global_batch} examples"


def _planned(draft: Draft) -> Plan | None:
    """What the job takes on its devices; None where the planner doesn't know the network."""
    request, config = memory_request(draft), draft.config
    if request is None or config is None:
        return None
    found = memory_check.check(request, config.ds_config, str(draft.preset), draft.machine, draft.fsdp)
    return found[0] if found else None


def checked_config(draft: Draft) -> BuiltConfig:
    """The DeepSpeed config, and what can be said against it without knowing how much memory there is.

    With FSDP it is empty, and the draft gets what takes its place.
    """
    check_experts = partial(peft_methods.check_experts, draft.peft, compiles=draft.options.compile)
    if chosen := load(str(draft.preset)).fsdp:
        draft.problems += check_experts(stage=0, fsdp=True)
        settle_fsdp(draft, chosen)
        return BuiltConfig({}, {}, [])
    unchecked = unchecked_config(str(draft.preset), config_options(draft))
    raise_all(untrainable(draft, unchecked))
    built = build_config(str(draft.preset), config_options(draft))
    own = {
        text.partition("=")[0]: f"{Source.DERIVED.words}: {why}" for text, why in draft.own_overrides.items()
    }
    config = with_sizes(replace(built, origins={**built.origins, **own}), draft.sizes)
    accelerator = draft.machine.accelerator
    draft.problems += peft_methods.check_device(draft.peft, accelerator, config.ds_config)
    draft.problems += check_experts(stage=zero_stage(config.ds_config), fsdp=False)
    if draft.peft.method in ("lora", "qlora") and names_tensors(draft.peft.lora_target):
        draft.notes += [note for note in (EXPERTS_NOTE,) if note not in draft.notes]
    copies = second_copy_notes(config.ds_config, world_size_of(draft.hosts))
    draft.notes += [note for note in copies if note not in draft.notes]
    optimizer, shape = draft.options.optimizer, draft.shape
    raise_all(optimizers.refusals(config.ds_config, accelerator, str(draft.preset), optimizer))
    config, draft.optimizer_params = optimizers.with_optimizer(
        config, optimizer, shape.hidden if shape else None, draft.options.muon_lr
    )
    optimizers.check_schedule(config.ds_config, draft.asked)
    setup = parallel_setup(draft, unchecked)
    if setup is None:
        return config
    draft.notes += [note for note in parallelism.notes(setup) if note not in draft.notes]
    divided = parallelism.with_section(
        config.ds_config, setup.network, draft.parallel, freezes=draft.peft.freezes
    )
    return replace(config, ds_config=divided)


def with_sizes(config: BuiltConfig, sizes: Mapping[str, Size]) -> BuiltConfig:
    """The config with these sizes, and why they are so. Keys that it doesn't have stay out."""
    there = {path: one for path, one in sizes.items() if path in config.origins}
    if not there:
        return config
    made = copy.deepcopy(config.ds_config)
    for path, one in there.items():
        tree.put(made, path, one.elements)
    origins = {path: f"{Source.DERIVED.words}: {one.why}" for path, one in there.items()}
    return replace(config, ds_config=made, origins={**config.origins, **origins})


def untrainable(draft: Draft, ds_config: Mapping[str, Any]) -> list[Problem]:
    """What of a config, or of the ranks' work on the same examples, finetune doesn't do."""
    setup = parallel_setup(draft, ds_config)
    refused = [*techniques.refusals(ds_config, str(draft.preset)), *_uncompilable(draft, ds_config)]
    return [*refused, *(parallelism.refusals(setup) if setup else [])]


def _uncompilable(draft: Draft, ds_config: Mapping[str, Any]) -> Iterator[Problem]:
    """Why --compile can't be. ds_config: empty with FSDP."""
    here = draft.placed is not None and draft.placed.launcher == ON_THIS_MACHINE
    yield from compiling.problems(
        draft.options,
        accelerator=draft.machine.accelerator,
        stage=zero_stage(ds_config),
        environ=draft.environ if here else None,
    )


def parallel_setup(draft: Draft, ds_config: Mapping[str, Any]) -> parallelism.ParallelSetup | None:
    """What decides whether its kind of parallelism works; None where every rank has examples of its own."""
    if draft.parallel.group == 1:
        return None
    options = draft.options
    return parallelism.setup_of(
        draft.parallel, draft.hosts, ds_config, options, options, method=options.method, precision=options.precision,
        fsdp=bool(load(str(draft.preset)).fsdp),
        architecture=resolve.architecture(draft.model) if draft.model else {},
    )  # fmt: skip


def settle_fsdp(draft: Draft, chosen: FsdpPreset) -> None:
    """Raises DsrunError with all that FSDP can't do."""
    preset, options = str(draft.preset), draft.options
    setup = parallel_setup(draft, {})
    refused = [*fsdp.refusals(chosen, preset, draft.asked), *_uncompilable(draft, {})]
    raise_all([*refused, *(parallelism.refusals(setup) if setup else [])])
    draft.optimizer_params = fsdp.optimizer_params(chosen, options.optimizer)
    draft.fsdp = fsdp.spec_of(
        chosen, preset, draft.hosts, batch=(options.micro_batch, options.micro_steps),
        grad_clip=options.grad_clip, freezes=draft.peft.freezes,
    )  # fmt: skip
    if chosen.shard_over == HOST and len(draft.hosts) == 1:
        draft.notes.append(f"preset {preset} on one host has one copy of the model, as fsdp has")


def config_options(draft: Draft) -> Options:
    ranks, nodes = node_shape(draft.hosts) if draft.hosts else (1, 1)
    origins = {name: str(origin) for name, origin in draft.asked.origins.items()}
    largest = draft.shape.largest if draft.shape else None
    return select(
        Options, draft.options, gpus=ranks, nodes=nodes, target="deepspeed", origins=origins,
        largest_parameter=largest, own_schedule=draft.options.lr_schedule != CONFIG, group=draft.parallel.group,
        overrides=(*draft.options.overrides, *draft.own_overrides),
    )  # fmt: skip


def take_torch_adam(draft: Draft) -> None:
    """torch's AdamW where DeepSpeed's can't be compiled, or needn't be."""
    if why := _why_torch_adam(draft):
        draft.own_overrides = {
            **draft.own_overrides,
            **dict.fromkeys(torch_adam(draft.machine.accelerator), why),
        }
        if draft.machine.accelerator == "cuda":
            draft.notes.append(
                f"{why}, so torch's AdamW takes the place of DeepSpeed's fused one ({TORCH_ADAM})"
            )


def take_overlap(draft: Draft) -> None:
    """overlap_comm at ZeRO-1 and 2, where DeepSpeed does it right."""
    if load(str(draft.preset)).fsdp:
        return
    options = config_options(draft)
    config = unchecked_config(str(draft.preset), options)
    if why := why_overlap(
        config, str(draft.preset), draft.machine.accelerator, options.world_size, draft.options.overrides
    ):
        draft.own_overrides = {**draft.own_overrides, OVERLAP: why}


def take_sizes(draft: Draft) -> None:
    """Buckets of the planner's sizes, in the place of a shipped preset's; what somebody says stays."""
    chosen, request = load(str(draft.preset)), memory_request(draft)
    known = draft.placed is not None and draft.placed.known and draft.machine.accelerator == "cuda"
    if chosen.fsdp or not chosen.shipped or request is None or not known:
        return
    config = unchecked_config(str(draft.preset), config_options(draft))
    sizes = memory_check.sizes(request, config, draft.machine)
    said = {text.partition("=")[0] for text in draft.options.overrides}
    draft.sizes = {path: one for path, one in sizes.items() if path not in said}


def _why_torch_adam(draft: Draft) -> str:
    if draft.options.optimizer != ADAMW or load(str(draft.preset)).fsdp:
        return ""
    config = unchecked_config(str(draft.preset), config_options(draft))
    return why_torch_adam(config, draft.machine.accelerator)


def fit_memory(draft: Draft) -> None:
    """What the job is predicted to take, in smaller micro batches if it must be; a problem if that is too much."""
    _fit_micro_batch(draft)
    request, config, preset = memory_request(draft), draft.config, str(draft.preset)
    if request is None or config is None:
        return
    found = memory_check.check(request, config.ds_config, preset, draft.machine, draft.fsdp)
    if draft.options.compile:
        draft.notes.append(compiling.NOT_MODELLED)
    if found is None:
        why = f"the planner doesn't know the shape of {request.name}"
        if not request.modelled(draft.machine):
            why = f"under {draft.parallel.words} that of CPU ranks isn't modelled"
        draft.notes.append(f"memory is not predicted: {why}")
        return
    planned, draft.prediction = found
    if draft.machine.accelerator == "cuda":
        _answer_fewer(draft, planned, request.room(draft.machine).gpu_bytes)
    if planned.verdict == FITS:
        return
    if planned.verdict == OUT and not draft.forced:
        raise DsrunError([memory_check.refusal(planned, draft.machine, request)])
    if planned.verdict == OUT:
        says = f"preset {preset} will run out of memory ({planned.reason}): without --force it is not started"
    else:
        says = f"preset {preset} is {planned.verdict} ({planned.reason})"
    draft.notes.append(says)


def _answer_fewer(draft: Draft, planned: Plan, gpu_bytes: float) -> None:
    """Fewer held-out prompts where each of their tokens would gather the weights anew."""
    answers = draft.files is not None and draft.files.evaluation is not None
    if not answers or not memory_check.answers_from_partitions(planned, gpu_bytes):
        return
    before = draft.options.generate_rows
    draft.asked = draft.asked.with_layers(derived.by_partitions(draft.asked, share_count(draft)))
    if (now := draft.options.generate_rows) != before:
        draft.notes.append(
            f"{now} held-out prompts are answered, and not {before}: the weights don't fit a GPU whole, so each token "
            f"gathers them anew (dsrun evaluate RUN answers more, with the exported model)"
        )


def memory_request(draft: Draft) -> memory_check.MemoryRequest | None:
    if draft.model is None or draft.placed is None:
        return None
    options = draft.options
    return memory_check.MemoryRequest(
        architecture=resolve.architecture(draft.model),
        name=draft.model.name,
        devices=draft.placed.devices,
        nodes=len(draft.placed.hosts),
        precision=str(options.precision),
        seq_len=options.max_source_length + options.max_target_length + options.official,
        micro_batch=options.micro_batch,
        grad_accum=options.micro_steps,
        compute=options,
        peft=draft.peft,
        optimizer=options.optimizer,
        fused_loss=draft.kernels.fused_loss,
        parallel=draft.parallel,
    )
