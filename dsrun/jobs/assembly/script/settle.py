"""The config or variables that the ranks get: a preset's, a launch config's, or what the script's own arguments
name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from dsrun.config.presets.build import Options, build_config, render_json
from dsrun.config.presets.preset import load as load_preset
from dsrun.config.presets.preset import second_copy_notes
from dsrun.errors import DsrunError, Findings, Problem
from dsrun.job.job import node_shape
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly.checks import precision
from dsrun.jobs.assembly.checks.memory_check import AUTO
from dsrun.jobs.assembly.checks.optimizers import torch_adam, why_torch_adam
from dsrun.jobs.assembly.script import accelerate, config
from dsrun.jobs.assembly.script.accelerate import AccelerateFile
from dsrun.jobs.assembly.script.config import Named
from dsrun.jobs.assembly.script.source import ACCELERATE, DEEPSPEED, HF, ScriptSource
from dsrun.jobs.assembly.script.stages import KnownScript, RankInputs, ScriptRequest, judge
from dsrun.options.commands import LaunchOptions
from dsrun.options.declare import flag_of, select
from dsrun.options.layers import Source

FOR_PRESET = ("micro_batch", "grad_accum", "grad_clip", "precision", "nvme_path", "lr")
"""Options that only --preset has a use for, besides --set."""


def without_preset(request: ScriptRequest) -> list[Problem]:
    """Options that say something of a preset's config, where there is no preset."""
    if request.options.preset is not None:
        return []
    names = (*FOR_PRESET, "overrides")
    used = [
        flag_of(LaunchOptions, name) for name in names if request.resolved.source(name) == Source.COMMAND_LINE
    ]
    hint = "Name a preset, or write it into the script's own config."
    fault = "says something of a preset's config, and there is no --preset"
    return [Problem(fault, option, hint) for option in used]


def read_accelerate(script: KnownScript, path: Path) -> KnownScript:
    """With the launch config that is named, and the devices that follow from it."""
    if script.options.preset is not None:
        fault = "a launch config and a preset both say how it is trained"
        raise DsrunError(fault, where=f"{accelerate.OPTION}, --preset", hint="Leave one of them out.")
    file = accelerate.read_file(path, script.cwd)
    resolved = script.request.resolved.settled(file.options(script.options), str(path))
    return replace(script, accelerate=file, request=replace(script.request, resolved=resolved))


def files_beside(script: KnownScript) -> list[str]:
    """A line for each launch config that lies beside the script and is not named."""
    options = script.options
    if script.source.reader != ACCELERATE or options.preset is not None or options.module:
        return []
    counts = f"lies beside the script, and counts with {accelerate.OPTION} only"
    return [f"{path.name} {counts}" for path in accelerate.beside(script.cwd / script.request.script)]


def named_config(script: KnownScript, args: tuple[str, ...]) -> Named | None:
    """The config that the script's arguments name."""
    return config.named(args, script.source, script.cwd, script.options.config_option)


def with_preset(script: KnownScript) -> tuple[str, ...]:
    """The script's arguments, with a preset's config as the script takes it: an Accelerator takes variables."""
    source, request, by_hand = script.source, script.request, script.options.config_option
    by_variables = source.reader == ACCELERATE and not source.ways
    if script.accelerate is not None or script.options.preset is None or by_variables:
        return request.args
    way = config.way_of(source, by_hand, request.args, request.script, named_config(script, request.args))
    return config.with_config(request.args, way, str(script.config_file))


def settle_config(
    script: KnownScript, args: tuple[str, ...], placed: Allocation | None, findings: Findings
) -> RankInputs:
    """The preset's config or variables, or the launch config's; or the script's own config, judged.

    args: with a preset's config among them; placed: None where the devices can't be had, so that nothing is built.
    """
    source, options, inputs = script.source, script.options, RankInputs(args=args)
    named = named_config(script, script.request.args)
    if script.accelerate is not None:
        return _settle_accelerate(script, script.accelerate, named, placed, findings)
    if options.preset is None:
        if named is not None:
            _judge_own(script, named, placed, findings)
        return inputs
    if placed is None:
        return inputs
    by_variables = source.reader == ACCELERATE and not source.ways
    if by_variables and options.preset != AUTO and (fsdp := load_preset(options.preset).fsdp):
        _check_fsdp_options(script)
        ranks, nodes = node_shape(placed.hosts)
        given = Options(gpus=ranks, nodes=nodes, precision=options.precision)
        return replace(inputs, env=accelerate.of_fsdp_preset(fsdp, given))
    built, problems, notes = _built(script.request, source, placed)
    findings.notes.extend(notes)
    judge(options, problems, findings)
    env = accelerate.of_preset(built, script.config_file) if by_variables else {}
    return replace(inputs, config=built, env=env)


def _judge_own(script: KnownScript, named: Named, placed: Allocation | None, findings: Findings) -> None:
    """Whether the config that the arguments name can be trained with there."""
    source, options = script.source, script.options
    trainer = config.trainer_of(script.request.args, source)
    setting = config.setting(placed, source.reader, trainer, script.python)
    problems, notes = config.judged_file(named, script.cwd, setting, source.reader)
    findings.notes.extend(notes)
    judge(options, problems, findings)
    if placed and placed.accelerator == "cpu":  # old GPUs are a rule's (DS328)
        own = config.precision_of(named, script.cwd, trainer)
        where, hint = f"{named.option} {named.file}", "Enable bf16 there (half the memory), or neither: fp32."
        problems = precision.problems(own, placed.own_machine)
        judge(options, [replace(problem, where=where, hint=hint) for problem in problems], findings)


def _check_fsdp_options(script: KnownScript) -> None:
    """Raise DsrunError for options that only a DeepSpeed config has a use for."""
    names = [name for name in (*FOR_PRESET, "overrides") if name != "precision"]
    if used := [flag_of(LaunchOptions, name) for name in names if script.request.resolved.said(name)]:
        fault = f"FSDP has no config for {', '.join(used)}: the script says it itself"
        raise DsrunError(fault, where=f"--preset {script.options.preset}", hint="Leave it out.")


def _settle_accelerate(
    script: KnownScript,
    file: AccelerateFile,
    named: Named | None,
    placed: Allocation | None,
    findings: Findings,
) -> RankInputs:
    """The launch config judged, and its variables."""
    if named is not None:
        fault = f"the script's arguments name a config, too: {named.option} {named.file}"
        raise DsrunError(fault, where=f"{accelerate.OPTION} {file.text.name}", hint="Leave one of them out.")
    reader = script.source.reader
    if reader not in (HF, ACCELERATE):
        findings.notes.append(f"{script.request.script} makes no Accelerator, as far as its source tells")
    problems, notes = file.judged(config.setting(placed, reader, None, script.python))
    findings.notes.extend(notes)
    judge(script.options, problems, findings)
    env, own = file.variables(script.config_file), accelerate.config_of(file)
    if placed:
        by_hand = any(script.request.resolved.said(name) for name in ("gpus", "devices", "include"))
        problems, notes = accelerate.shape_problems(file, placed, by_hand=by_hand)
        findings.problems.extend(problems)
        findings.notes.extend(notes)
    return RankInputs(args=script.request.args, config=own, env=env)


def _built(
    request: ScriptRequest, source: ScriptSource, placed: Allocation
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The preset's config in the form for who reads it, what is wrong with it, and what is worth saying."""
    preset, requested = str(request.options.preset), request.options
    if preset == AUTO:
        raise DsrunError(
            "auto needs to know the model, and a script's can't be known",
            where="--preset",
            hint="`dsrun plan MODEL` says which preset fits; name that one.",
        )
    target = source.reader if source.reader in (HF, ACCELERATE) else DEEPSPEED
    precision = requested.precision or (placed.machine.default_precision if target == DEEPSPEED else None)
    ranks, nodes = node_shape(placed.hosts)
    options = select(Options, requested, gpus=ranks, nodes=nodes, target=target, precision=precision)
    built = build_config(preset, options)
    if why_torch_adam(built.ds_config, placed.accelerator):
        overrides = (*requested.overrides, *torch_adam(placed.accelerator))
        built = build_config(preset, replace(options, overrides=overrides))
    notes = [*map(str, built.findings), *second_copy_notes(built.ds_config, ranks * nodes)]
    if target == DEEPSPEED:
        notes.append(_batch_text(built.ds_config))
    trainer = config.trainer_of(request.args, source)
    problems: list[Problem] = []
    if target == HF and trainer is not None:
        # What the Trainer would refuse, as its arguments say something else.
        setting = config.setting(placed, target, trainer, None)
        problems, _ = config.judged(render_json(built.ds_config).encode(), preset, setting, target)
    return built.ds_config, problems, notes


def _batch_text(config: Mapping[str, Any]) -> str:
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    return (
        f"the config says micro batch {micro} x accumulation {accum}: the script's own batches have to be of that size "
        "(--micro-batch, --grad-accum)"
    )
