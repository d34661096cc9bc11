"""The DeepSpeed config of a fine-tune, and whether it fits the devices."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from dsrun.config import tree
from dsrun.config.presets.build import BuiltConfig, Options, build_config
from dsrun.config.presets.fsdp import HOST, FsdpPreset
from dsrun.config.presets.preset import load, second_copy_notes
from dsrun.config.presets.preset_options import by_preset
from dsrun.config.presets.sources import draft as unchecked_config
from dsrun.data.conversations import AUTO
from dsrun.ds_config import zero_stage
from dsrun.errors import DsrunError, Findings, Problem, raise_all
from dsrun.job.job import node_shape, world_size_of
from dsrun.jobs.assembly import fsdp, plan_target
from dsrun.jobs.assembly.checks import (
    compiling,
    kernels,
    memory_check,
    optimizers,
    parallelism,
    precision,
    techniques,
)
from dsrun.jobs.assembly.checks.communication import OVERLAP, rounding_problems, why_overlap
from dsrun.jobs.assembly.checks.optimizers import NOTHING_COMPILED, TORCH_ADAM, torch_adam, why_torch_adam
from dsrun.jobs.assembly.finetune import layout
from dsrun.jobs.assembly.finetune.devices import larger, smaller, split
from dsrun.jobs.assembly.finetune.stages import Requested, S, Strategy, WithConfig, WithDevices, layered
from dsrun.jobs.assembly.planning import search
from dsrun.jobs.launchers import ON_THIS_MACHINE
from dsrun.models import peft_methods, resolve
from dsrun.models.adapters import EXPERTS_NOTE, names_tensors
from dsrun.options import derived
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import select
from dsrun.options.layers import Layer, Source
from dsrun.options.optimizers import (
    ADAMW,
    FLAGS,
    PARAMS,
    apart,
    argument_problems,
    given_arguments,
    texts_for_config,
)
from dsrun.options.table import AUTO_LAYOUT, CONFIG, NO_FP8, recomputing
from dsrun.planner import gpus
from dsrun.planner.buckets import Size
from dsrun.planner.plan import FITS, OUT, Plan
from dsrun.words import size_text


def settle_config(placed: WithDevices, findings: Findings, *, held_out: bool) -> WithConfig[WithDevices]:
    """The preset, chosen if it is left to dsrun; the DeepSpeed config; and whether it fits.

    held_out: there are held-out examples. Raises DsrunError where it can't be.
    """
    if placed.options.layout == AUTO_LAYOUT:
        layer = layout.by_layout(placed, memory_request(placed) if placed.allocation.known else None)
        placed = layered(placed, layer)
        findings.notes.append(layer.note)
    preset = placed.options.preset
    if preset == AUTO or left_to_the_planner(placed):
        placed, preset = _choose(placed, findings)
        placed = layered(placed, *by_preset(preset))
    placed = _compiled(placed, preset, findings)
    placed, strategy = _divided(placed, preset, findings)
    strategy = replace(strategy, sizes=_sizes(placed, strategy))
    made = checked_config(placed, strategy, findings)
    return fit_memory(made, findings, held_out=held_out) if placed.allocation.known else made


def _compiled(placed: WithDevices, preset: str, findings: Findings) -> WithDevices:
    """Compiled layers, where nobody has said and they were measured to pay on the job's GPUs. Other hosts' compilers
    are not looked at."""
    here = placed.allocation.known and placed.launcher == ON_THIS_MACHINE
    if not here or placed.machine.accelerator != "cuda" or placed.resolved.source("compile") > Source.DERIVED:
        return placed
    fsdp_preset = bool(load(preset).fsdp)
    config = {} if fsdp_preset else unchecked_config(preset, config_options(split(placed), Strategy(preset)))
    chosen = placed.allocation.devices
    layer = compiling.measured_default(
        placed.options, gpu_names={gpu.name for gpu in placed.machine.gpus if gpu.index in chosen}, fsdp=fsdp_preset,
        ds_config=config, environ=placed.environ,
    )  # fmt: skip
    if not layer.values or list(
        peft_methods.check_experts(placed.peft, compiles=True, stage=0, fsdp=fsdp_preset)
    ):
        return placed
    findings.notes.append(layer.note)
    return layered(placed, layer)


def config_anywhere(requested: S, findings: Findings) -> WithConfig[S] | None:
    """The config as far as it is known without the model or the devices; None where the preset is not chosen yet.

    Raises DsrunError where it can't be, wherever it is to run.
    """
    if requested.options.layout == AUTO_LAYOUT:
        layout.by_layout(requested, None)  # which says what is missing
    if (preset := requested.options.preset) == AUTO:
        return None
    requested, strategy = _divided(requested, preset, findings)
    return checked_config(requested, strategy, findings)


def _divided(requested: S, preset: str, findings: Findings) -> tuple[S, Strategy]:
    """The step over the devices, and what these want of the preset."""
    requested = split(requested)
    findings.notes.extend(parallelism.idle(requested.parallel.pp, requested.options.micro_steps))
    strategy, accelerator = Strategy(preset), requested.machine.accelerator
    if load(preset).fsdp:
        return requested, strategy
    config = unchecked_config(preset, config_options(requested, strategy))
    if requested.options.optimizer == ADAMW and (why := why_torch_adam(config, accelerator)):
        strategy = replace(strategy, overrides=dict.fromkeys(torch_adam(accelerator), why))
        if why != NOTHING_COMPILED:
            findings.notes.append(
                f"{why}, so torch's AdamW takes the place of DeepSpeed's fused one ({TORCH_ADAM})"
            )
    options = config_options(requested, strategy)
    config, own = unchecked_config(preset, options), requested.options.overrides
    if why := why_overlap(config, preset, accelerator, options.world_size, own):
        strategy = replace(strategy, overrides={**strategy.overrides, OVERLAP: why})
    return requested, strategy


def left_to_the_planner(placed: WithDevices) -> bool:
    """Whether the planner chooses though nobody asked it to: no user, lab or recipe names a preset, it knows the
    network, and the job's GPUs have been asked. The model file's preset is one that is likely to run anywhere."""
    if placed.resolved.source("preset") > Source.MODEL_FILE or not placed.allocation.known:
        return False
    if placed.machine.accelerator != "cuda" or not placed.parallel.alone or placed.shape is None:
        return False
    own = load(placed.options.preset)
    return own.shipped and not own.defaults and not own.fsdp


def _choose(placed: WithDevices, findings: Findings) -> tuple[WithDevices, str]:
    """The fastest that fits, of what nobody has given: the preset, the split of a step, what backward computes again.

    Where none fits, a model file's preset stays, and the check of memory says what would help; --preset auto raises
    DsrunError, unless it is forced.
    """
    named = placed.options.preset
    hint = "Name a preset: `dsrun preset` lists them."
    if named == AUTO and not placed.allocation.known:
        raise DsrunError("can't choose: the hosts are not asked", where="--preset auto", hint=hint)
    if named == AUTO and not placed.parallel.alone:
        fault = f"can't choose under {placed.parallel.words}: `dsrun plan --layouts` compares them"
        raise DsrunError(fault, where="--preset auto", hint=hint)
    whole = split(placed)
    splits = {step.options.micro_batch: step for step in (whole, *larger(whole), *smaller(whole))}
    fixed = placed.resolved.source("activation_checkpointing") > Source.MODEL_FILE
    on_gpus = placed.machine.accelerator == "cuda"
    plans = memory_check.planned(
        memory_request(whole), placed.machine, placed.options.overrides, nvme=placed.options.nvme_path is not None,
        recomputed=() if fixed or not on_gpus else search.RECOMPUTED,
        batches=[(step.options.micro_batch, step.options.micro_steps) for step in splits.values()],
    )  # fmt: skip
    if named != AUTO and (not plans.plans or search.settled(plans.plans).verdict == OUT):
        return placed, named
    best, why = search.best_of(plans, force=placed.forced)
    step = splits[best.setup.micro_batch]
    chosen: dict[str, Any] = {} if named == AUTO else {"preset": best.preset}
    if best.setup.checkpointing != placed.options.recomputed:
        chosen |= recomputing(best.setup.checkpointing)
    step = layered(step, Layer.settled(chosen, "the fastest by the plan that fits the devices"))
    parts = f"micro batch {step.options.micro_batch} x accumulation {step.options.grad_accum}"
    again = {0: "nothing computed again", 1: "all layers computed again"}
    layers = again.get(best.setup.checkpointing, f"one layer in {best.setup.checkpointing} computed again")
    unknown = [gpu.name for gpu in placed.allocation.own_machine.gpus if not gpus.recognise(gpu.name)]
    speeds = f"; {unknown[0]} is planned as {plan_target.USUAL_GPU}" if on_gpus and unknown else ""
    findings.notes.append(f"{why}; {parts}, {layers}: {search.beside(best, plans.plans, named)}{speeds}")
    return step, best.preset


def _fit_micro_batch(made: WithConfig[WithDevices], findings: Findings) -> WithConfig[WithDevices]:
    """The config with the largest micro batch that fits, and more of them, where the step would run out of memory.

    Not where it was asked for, nor where nothing helps: then the job is refused as it stands.
    """
    memory, before = _memory(made), made.before.options
    if before.force or findings.problems or memory is None or memory[0].verdict != OUT:
        return made
    for placed in smaller(made.before):
        # Findings of its own, and dropped: they are those of the whole step once more.
        less = checked_config(placed, made.strategy, Findings())
        fits, now = _memory(less), placed.options
        if fits and fits[0].verdict != OUT:
            findings.notes.append(
                f"micro batch {now.micro_batch} x accumulation {now.grad_accum}, the same {_step(now)} "
                f"a step: with {before.micro_batch} x {before.grad_accum} it runs out of memory ({memory[0].reason})"
            )
            return less
    return made


def _step(options: FinetuneOptions) -> str:
    tokens = options.tokens_per_batch
    return f"{tokens} tokens" if tokens else f"{options.global_batch} examples"


def _memory(made: WithConfig[WithDevices]) -> tuple[Plan, dict[str, float | str]] | None:
    """The job's plan on its devices, and the prediction; None where the planner doesn't know the network."""
    request, preset = memory_request(made.before), made.strategy.preset
    return memory_check.check(request, made.config.ds_config, preset, made.before.machine, made.fsdp)


def checked_config(requested: S, strategy: Strategy, findings: Findings) -> WithConfig[S]:
    """The DeepSpeed config, and what can be said against it without knowing how much memory there is.

    Raises DsrunError where there can't be one. With FSDP it is empty, and has what takes its place.
    """
    preset, peft, options = strategy.preset, requested.peft, requested.options
    check_experts = partial(peft_methods.check_experts, peft, compiles=options.compile)
    if chosen := load(preset).fsdp:
        findings.problems.extend(check_experts(stage=0, fsdp=True))
        return settled_fsdp(requested, strategy, chosen, findings)
    unchecked = unchecked_config(preset, config_options(requested, strategy))
    raise_all([*untrainable(requested, preset, unchecked), *argument_problems(options)])
    built = build_config(preset, config_options(requested, strategy))
    own = {
        text.partition("=")[0]: f"{Source.DERIVED.words}: {why}" for text, why in strategy.overrides.items()
    }
    own |= {f"{PARAMS}{name}": FLAGS[name] for name in given_arguments(options)}
    config = with_sizes(replace(built, origins={**built.origins, **own}), strategy.sizes)
    accelerator, shape = requested.machine.accelerator, requested.shape
    findings.problems.extend(peft_methods.check_device(peft, accelerator, config.ds_config))
    rounds = rounding_problems(
        config.ds_config, preset, accelerator=accelerator, hosts=requested.hosts, shape=shape,
        precision=options.precision, parallel=requested.parallel, overrides=options.overrides,
    )  # fmt: skip
    findings.problems.extend(rounds)
    findings.problems.extend(check_experts(stage=zero_stage(config.ds_config), fsdp=False))
    if peft.method in ("lora", "qlora") and names_tensors(peft.lora_target):
        findings.notes.append(EXPERTS_NOTE)
    findings.notes.extend(second_copy_notes(config.ds_config, world_size_of(requested.hosts)))
    raise_all(optimizers.refusals(config.ds_config, accelerator, preset, options.optimizer))
    config, params = optimizers.with_optimizer(
        config, options.optimizer, shape.hidden if shape else None, options.muon_lr, apart(options)
    )
    optimizers.check_schedule(config.ds_config, requested.resolved)
    if setup := parallel_setup(requested, preset, unchecked):
        findings.notes.extend(parallelism.notes(setup))
        divided = parallelism.with_section(
            config.ds_config, setup.network, requested.parallel, freezes=peft.freezes
        )
        config = replace(config, ds_config=divided)
    return WithConfig(requested, strategy, config, params)


def with_sizes(config: BuiltConfig, sizes: Mapping[str, Size]) -> BuiltConfig:
    """The config with these sizes, and why they are so. Keys that it doesn't have stay out."""
    there = {path: size for path, size in sizes.items() if path in config.origins}
    if not there:
        return config
    made = copy.deepcopy(config.ds_config)
    for path, size in there.items():
        tree.put(made, path, size.elements)
    origins = {path: f"{Source.DERIVED.words}: {size.why}" for path, size in there.items()}
    return replace(config, ds_config=made, origins={**config.origins, **origins})


def untrainable(requested: Requested, preset: str, ds_config: Mapping[str, Any]) -> list[Problem]:
    """Problems with what a config, or the rest of the strategy, asks for and finetune doesn't do."""
    return [*techniques.refusals(ds_config, preset), *_uncomputable(requested, preset, ds_config)]


def _uncomputable(requested: Requested, preset: str, ds_config: Mapping[str, Any]) -> list[Problem]:
    """Why --compile or --fp8 can't be, or the ranks' work on the same examples. ds_config: empty with FSDP."""
    setup = parallel_setup(requested, preset, ds_config)
    environ = requested.environ if requested.launcher == ON_THIS_MACHINE else None
    accelerator, stage = requested.machine.accelerator, zero_stage(ds_config)
    refused = [
        *compiling.problems(requested.options, accelerator=accelerator, stage=stage, environ=environ),
        *precision.fp8_problems(requested.options, fsdp=bool(load(preset).fsdp)),
    ]
    return [*refused, *(parallelism.refusals(setup) if setup else [])]


def parallel_setup(
    requested: Requested, preset: str, ds_config: Mapping[str, Any]
) -> parallelism.ParallelSetup | None:
    """The facts that decide whether its kind of parallelism works; None where there is data parallelism alone."""
    if requested.parallel.alone:
        return None
    options = requested.options
    return parallelism.setup_of(
        requested.parallel, requested.hosts, ds_config, options, options, method=options.method,
        precision=options.precision, fsdp=bool(load(preset).fsdp), architecture=requested.architecture,
    )  # fmt: skip


def settled_fsdp(requested: S, strategy: Strategy, chosen: FsdpPreset, findings: Findings) -> WithConfig[S]:
    """FSDP's settings, which take a config's place. Raises DsrunError with all that FSDP can't do."""
    preset, options = strategy.preset, requested.options
    refused = [*fsdp.refusals(chosen, preset, requested.resolved), *argument_problems(options)]
    raise_all([*refused, *_uncomputable(requested, preset, {})])
    spec = fsdp.spec_of(
        chosen, preset, requested.hosts, batch=(options.micro_batch, options.micro_steps),
        grad_clip=options.grad_clip, freezes=requested.peft.freezes,
    )  # fmt: skip
    if chosen.shard_over == HOST and len(requested.hosts) == 1:
        findings.notes.append(f"preset {preset} on one host has one copy of the model, as fsdp has")
    params = {**fsdp.optimizer_params(chosen, options.optimizer), **given_arguments(options)}
    return WithConfig(requested, strategy, BuiltConfig({}, {}, []), params, spec)


def config_options(requested: Requested, strategy: Strategy) -> Options:
    """Options with which the preset's config is built."""
    ranks, nodes = node_shape(requested.hosts) if requested.hosts else (1, 1)
    origins = {name: str(origin) for name, origin in requested.resolved.origins.items()}
    options, shape = requested.options, requested.shape
    # A rank may start in another folder than the command.
    nvme = None if options.nvme_path is None else str(Path(options.nvme_path).absolute())
    return select(
        Options, options, nvme_path=nvme, gpus=ranks, nodes=nodes, target="deepspeed", origins=origins,
        largest_parameter=shape.largest if shape else None, own_schedule=options.lr_schedule != CONFIG,
        group=requested.parallel.group, overrides=(*texts_for_config(options), *strategy.overrides),
    )  # fmt: skip


def _sizes(placed: WithDevices, strategy: Strategy) -> dict[str, Size]:
    """Buckets of the planner's sizes, in the place of a shipped preset's; what somebody says stays."""
    chosen = load(strategy.preset)
    known = placed.allocation.known and placed.machine.accelerator == "cuda"
    if chosen.fsdp or not chosen.shipped or not known:
        return {}
    config = unchecked_config(strategy.preset, config_options(placed, strategy))
    sizes = memory_check.sizes(memory_request(placed), config, placed.machine)
    given = {text.partition("=")[0] for text in placed.options.overrides}
    return {path: size for path, size in sizes.items() if path not in given}


def fit_memory(
    made: WithConfig[WithDevices], findings: Findings, *, held_out: bool
) -> WithConfig[WithDevices]:
    """With what the job is predicted to take, in smaller micro batches if it must be.

    Raises DsrunError where that is too much. held_out: there are held-out examples.
    """
    made = _fit_micro_batch(made, findings)
    placed, preset = made.before, made.strategy.preset
    request, memory = memory_request(placed), _memory(made)
    if placed.options.compile:
        findings.notes.append(compiling.NOT_MODELLED)
    elif placed.options.fp8 != NO_FP8:
        findings.notes.append(precision.UNCOMPILED)
    devices = kernels.devices_of(placed.machine, placed.allocation.devices, known=placed.allocation.known)
    if note := kernels.states_note(placed.architecture, devices):
        findings.notes.append(note)
    if memory is None:
        why = f"the planner doesn't know the shape of {request.name}"
        if not request.modelled(placed.machine):
            why = f"under {placed.parallel.words} that of CPU ranks isn't modelled"
        findings.notes.append(f"memory is not predicted: {why}")
        if placed.kernels.missing:
            findings.notes.append(kernels.missing_note(placed.network, None))
        return made
    planned, prediction = memory
    if copied := planned.host.terms.get("checkpoint_copy"):
        findings.notes.append(
            f"--async-save: a checkpoint takes {size_text(round(copied))} of each node's memory while it is written"
        )
    if placed.kernels.missing:
        findings.notes.append(kernels.missing_note(placed.network, planned.setup))
    if held_out and placed.machine.accelerator == "cuda":
        placed = _answer_fewer(placed, planned, request.room(placed.machine).gpu_bytes, findings)
    made = replace(made, before=placed, prediction=prediction)
    if planned.verdict == FITS:
        return made
    if planned.verdict == OUT and not placed.forced:
        raise DsrunError([memory_check.refusal(planned, placed.machine, request)])
    if planned.verdict == OUT:
        says = f"preset {preset} will run out of memory ({planned.reason}): without --force it is not started"
    else:
        says = f"preset {preset} is {planned.verdict} ({planned.reason})"
    findings.notes.append(says)
    return made


def _answer_fewer(placed: WithDevices, planned: Plan, gpu_bytes: float, findings: Findings) -> WithDevices:
    """Fewer held-out prompts where each of their tokens would gather the weights anew."""
    if not memory_check.answers_from_partitions(planned, gpu_bytes):
        return placed
    before = placed.options.generate_rows
    placed = layered(placed, derived.by_partitions(placed.resolved, placed.shares))
    if (now := placed.options.generate_rows) != before:
        findings.notes.append(
            f"{now} held-out prompts are answered, and not {before}: the weights don't fit a GPU whole, so each token "
            f"gathers them anew (dsrun evaluate RUN answers more, with the exported model)"
        )
    return placed


def memory_request(placed: WithDevices) -> memory_check.MemoryRequest:
    """The job's demands on its devices."""
    options = placed.options
    return memory_check.MemoryRequest(
        architecture=placed.architecture, name=placed.model.name, devices=placed.allocation.devices,
        nodes=len(placed.hosts), precision=str(options.precision), seq_len=placed.longest_example + options.official,
        micro_batch=options.micro_batch, grad_accum=options.micro_steps, compute=options, peft=placed.peft,
        optimizer=options.optimizer, fused_loss=placed.kernels.fused_loss, parallel=placed.parallel,
        async_save=options.async_save,
        folder=resolve.folder_of(placed.model),
    )  # fmt: skip
