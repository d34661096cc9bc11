"""Which config or variables the ranks get: a preset's, a launch config's, or what the script's own arguments name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dsrun.config.presets.build import Options, build_config, render_json
from dsrun.config.presets.fsdp import FsdpPreset
from dsrun.config.presets.preset import load as load_preset
from dsrun.config.presets.preset import second_copy_notes
from dsrun.errors import DsrunError, Problem
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.build.checks import precision
from dsrun.jobs.build.checks.memory_check import AUTO
from dsrun.jobs.build.checks.optimizers import torch_adam, why_torch_adam
from dsrun.jobs.build.script import accelerate, config
from dsrun.jobs.build.script.accelerate import AccelerateFile
from dsrun.jobs.build.script.config import Named
from dsrun.jobs.build.script.draft import ScriptDraft, ScriptRequest
from dsrun.jobs.build.script.source import ACCELERATE, DEEPSPEED, HF, ScriptSource
from dsrun.jobs.spec.job import node_shape
from dsrun.options.commands import LaunchOptions
from dsrun.options.table import Source, flag_of, select

FOR_PRESET = ("micro_batch", "grad_accum", "grad_clip", "precision", "nvme_path", "lr")
"""Options that only --preset has a use for, besides --set."""


def check_options(draft: ScriptDraft) -> None:
    draft.problems += _without_preset(draft.request)


def _without_preset(request: ScriptRequest) -> list[Problem]:
    """Options that say something of a preset's config, where there is no preset."""
    if request.options.preset is not None:
        return []
    names = (*FOR_PRESET, "overrides")
    used = [
        flag_of(LaunchOptions, name) for name in names if request.asked.source(name) == Source.COMMAND_LINE
    ]
    hint = "Name a preset, or write it into the script's own config."
    what = "says something of a preset's config, and there is no --preset"
    return [Problem(what, option, hint) for option in used]


def read_accelerate(draft: ScriptDraft) -> None:
    """The launch config that is named, and the devices that follow from it."""
    path = draft.options.accelerate
    if path is None:
        _note_files_beside(draft)
        return
    if draft.options.preset is not None:
        what = "a launch config and a preset both say how it is trained"
        raise DsrunError(what, where=f"{accelerate.OPTION}, --preset", hint="Leave one of them out.")
    draft.accelerate = accelerate.read_file(path, draft.cwd)
    draft.asked = draft.asked.settled(draft.accelerate.options(draft.options), str(path))
    draft.request = replace(draft.request, asked=draft.asked)


def _note_files_beside(draft: ScriptDraft) -> None:
    if draft.source.reader == ACCELERATE and draft.options.preset is None and not draft.options.module:
        for path in accelerate.beside(draft.cwd / draft.request.script):
            draft.notes.append(
                f"{path.name} lies beside the script, and counts with {accelerate.OPTION} only"
            )


def settle_config(draft: ScriptDraft) -> None:
    """The preset's config, handed over as the script takes it; or the script's own, judged."""
    source, options, request = draft.source, draft.options, draft.request
    named = config.named(draft.args, source, draft.cwd, options.config_option)
    if draft.accelerate is not None:
        _settle_accelerate(draft, draft.accelerate, named)
    elif options.preset is not None and source.reader == ACCELERATE and not source.ways:
        if draft.placed and (fsdp := _fsdp(options.preset)):
            _check_fsdp_options(draft)
            ranks, nodes = node_shape(draft.placed.hosts)
            given = Options(gpus=ranks, nodes=nodes, precision=options.precision)
            draft.env = accelerate.of_fsdp_preset(fsdp, given)
        elif draft.placed:
            draft.config, found, notes = _built(request, source, draft.placed)
            draft.judge(found, notes)
            draft.env = accelerate.of_preset(draft.config, draft.config_file)
    elif options.preset is not None:
        way = config.way_of(source, options.config_option, draft.args, request.script, named)
        draft.args = config.with_config(draft.args, way, str(draft.config_file))
        if draft.placed:
            draft.config, found, notes = _built(request, source, draft.placed)
            draft.judge(found, notes)
    elif named is not None:
        trainer = config.trainer_of(request.args, source)
        setting = config.setting(draft.placed, source.reader, trainer, draft.python)
        draft.judge(*config.judged_file(named, draft.cwd, setting, source.reader))
        if draft.placed and draft.placed.accelerator == "cpu":  # old GPUs are a rule's (DS328)
            own = config.precision_of(named, draft.cwd, trainer)
            found = precision.problems(own, draft.placed.own_machine)
            where, hint = (
                f"{named.option} {named.file}",
                "Enable bf16 there (half the memory), or neither: fp32.",
            )
            draft.judge([replace(problem, where=where, hint=hint) for problem in found], [])


def _fsdp(name: str) -> FsdpPreset | None:
    return None if name == AUTO else load_preset(name).fsdp


def _check_fsdp_options(draft: ScriptDraft) -> None:
    """Raise DsrunError for options that only a DeepSpeed config has a use for."""
    names = [name for name in (*FOR_PRESET, "overrides") if name != "precision"]
    if used := [flag_of(LaunchOptions, name) for name in names if draft.asked.said(name)]:
        what = f"FSDP has no config for {', '.join(used)}: the script says it itself"
        raise DsrunError(what, where=f"--preset {draft.options.preset}", hint="Leave it out.")


def _settle_accelerate(draft: ScriptDraft, file: AccelerateFile, named: Named | None) -> None:
    """The launch config judged, and its variables."""
    if named is not None:
        what = f"the script's arguments name a config, too: {named.option} {named.file}"
        raise DsrunError(what, where=f"{accelerate.OPTION} {file.text.name}", hint="Leave one of them out.")
    if draft.source.reader not in (HF, ACCELERATE):
        draft.notes.append(f"{draft.request.script} makes no Accelerator, as far as its source tells")
    draft.judge(*file.judged(config.setting(draft.placed, draft.source.reader, None, draft.python)))
    draft.env = file.variables(draft.config_file)
    draft.config = accelerate.config_of(file)
    if draft.placed:
        by_hand = any(draft.asked.said(name) for name in ("gpus", "devices", "include"))
        problems, notes = accelerate.shape_problems(file, draft.placed, by_hand=by_hand)
        draft.problems += problems
        draft.notes += notes


def _built(
    request: ScriptRequest, source: ScriptSource, placed: Allocation
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The preset's config in the form for who reads it, what is wrong with it, and what is worth saying."""
    preset, asked = str(request.options.preset), request.options
    if preset == AUTO:
        raise DsrunError(
            "auto needs to know the model, and a script's can't be known",
            where="--preset",
            hint="`dsrun plan MODEL` says which preset fits; name that one.",
        )
    target = source.reader if source.reader in (HF, ACCELERATE) else DEEPSPEED
    precision = asked.precision or (placed.machine.default_precision if target == DEEPSPEED else None)
    ranks, nodes = node_shape(placed.hosts)
    options = select(
        Options,
        asked,
        gpus=ranks,
        nodes=nodes,
        target=target,
        precision=precision,
    )
    built = build_config(preset, options)
    if why_torch_adam(built.ds_config, placed.accelerator):
        overrides = (*asked.overrides, *torch_adam(placed.accelerator))
        built = build_config(preset, replace(options, overrides=overrides))
    notes = [*map(str, built.findings), *second_copy_notes(built.ds_config, ranks * nodes)]
    if target == DEEPSPEED:
        notes.append(_batch_text(built.ds_config))
    trainer = config.trainer_of(request.args, source)
    found: list[Problem] = []
    if target == HF and trainer is not None:
        # What the Trainer would refuse, as its arguments say something else.
        setting = config.setting(placed, target, trainer, None)
        found, _ = config.judged(render_json(built.ds_config).encode(), preset, setting, target)
    return built.ds_config, found, notes


def _batch_text(config: Mapping[str, Any]) -> str:
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    return (
        f"the config says micro batch {micro} x accumulation {accum}: the script's own batches have to be of that size "
        "(--micro-batch, --grad-accum)"
    )
