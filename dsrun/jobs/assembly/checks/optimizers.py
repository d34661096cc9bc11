"""The optimizer of a fine-tune, and what of it can be checked before anything starts.

adamw is DeepSpeed's own, from the preset, and so is muon, which has to see whole matrices: ZeRO makes them whole for it
(runtime/zero/muon). The others step each weight by itself. DeepSpeed can't make them from its config on every device:
the ranks make them and hand them over. The config then has no optimizer section; what stood there (learning rate,
weight decay, what else it takes) is in the job.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dsrun import packages
from dsrun.config import tree
from dsrun.ds_config import offload_sections, zero_stage
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.derived import scheduled_rate
from dsrun.options.layers import Resolved, Source
from dsrun.options.optimizers import (
    ADAM_TAKES,
    ADAMW,
    ADAMW_8BIT,
    MUON,
    OPTIMIZERS,
    TYPES,
    WHICH_ADAM,
    made_by_ranks,
)
from dsrun.options.table import CONFIG, LR_SCHEDULES
from dsrun.versions import version

if TYPE_CHECKING:
    from dsrun.config.presets.build import BuiltConfig

SECTION, SCHEDULER = "optimizer", "scheduler"
UNTESTED = "zero_allow_untested_optimizer"
"""Without it DeepSpeed takes no optimizer under ZeRO that it does not know (runtime/zero/utils.py)."""
ANY = ("lr", "weight_decay")
"""Parameters of every optimizer: from the section of another one only these are taken over."""
MUON_RMS = 0.2
"""Muon's update of a matrix with c columns has an RMS of 1/sqrt(c); times this and sqrt(c) it is AdamW's, so that one
learning rate serves both (arXiv:2502.16982, eq. 4)."""
TORCH_ADAM = "optimizer.params.torch_adam=true"
"""--set's text for torch's own AdamW, in place of DeepSpeed's fused one."""
FUSED = "optimizer.params.fused=true"
"""--set's text for torch's AdamW in one kernel."""
NOTHING_COMPILED = "nothing to compile"
"""Why it takes that one's place where both would do."""
FIRST_ON_CPU = (2, 4)
"""torch's first release with that kernel for CPUs."""


def refusals(ds_config: Mapping[str, Any], accelerator: str, preset: str, name: str) -> list[Problem]:
    """Why a config can't be trained with an optimizer here; the config still has its optimizer section."""
    if name in (ADAMW, CONFIG):
        return []
    option = f"--optimizer {name}"
    if name == ADAMW_8BIT and accelerator != "cuda":
        fault = "needs an NVIDIA GPU, and this job trains on CPUs"
        return [Problem(fault, option, "Leave it out: --optimizer adamw.")]
    problems, stage = [], zero_stage(ds_config)
    if offloads(ds_config):
        fault = f"preset {preset} keeps the optimizer in host memory, where only DeepSpeed's own Adam steps"
        problems.append(Problem(fault, option, "Take a preset without offload, or --optimizer adamw."))
    elif not stage and half(ds_config):
        # There an optimizer of the job's own gets another wrapper (_configure_fp16_optimizer in runtime/engine.py:
        # FP16_UnfusedOptimizer), with other loss scaling.
        fault = f"preset {preset} has no ZeRO, which in 16 bits steps only DeepSpeed's own Adam alike"
        problems.append(
            Problem(fault, option, "Take zero1, which needs no more memory on any number of GPUs.")
        )
    elif name == MUON and stage == 3:
        fault = f"preset {preset} divides each matrix, which Muon needs whole"  # reduce_scatter, runtime/zero/stage3.py
        problems.append(Problem(fault, option, "Take zero2, or --optimizer adamw."))
    if name == MUON and ds_config.get("gradient_clipping"):
        fault = "clips what Muon has made of the gradient, whose norm says nothing"
        problems.append(Problem(fault, "--grad-clip", "Leave it out, or --grad-clip 0."))
    if name == MUON and SCHEDULER in ds_config:
        fault = "a scheduler of the config's sets one learning rate for all weights, and Muon has two"
        problems.append(Problem(fault, option, "Take --lr-schedule cosine."))
    package = OPTIMIZERS[name].package
    if not problems and package and packages.installed_version(package) is None:
        return [
            Problem(f"needs {package}, which is not installed", option, f"Install it: pip install {package}")
        ]
    return problems


def with_optimizer(
    config: BuiltConfig,
    name: str,
    hidden: int | None,
    muon_lr: float | None = None,
    own: Mapping[str, Any] | None = None,
) -> tuple[BuiltConfig, dict[str, Any]]:
    """The config that steps with an optimizer, and what the ranks make theirs with, where it is theirs.

    hidden: the model's width, where it is known. muon_lr: --muon-lr. own: arguments that stand apart from the config's
    section (dsrun.options.optimizers.apart). Raises DsrunError where the config's section is
    another's, and this one has no way to do what it says.
    """
    section = config.ds_config.get(SECTION) or {}
    of_muon = str(section.get("type", "")).lower() == MUON
    if muon_lr is not None and (name != MUON or of_muon):
        why = (
            "the config's optimizer section is Muon's, and says its rates itself"
            if of_muon
            else f"is for {MUON}"
        )
        hint = (
            "--set optimizer.params.muon_lr=..." if of_muon else f"Take --optimizer {MUON}, or leave it out."
        )
        raise DsrunError(why, where="--muon-lr", hint=hint)
    if made_by_ranks(name):
        config, made = taken_out(config, name)
        return config, {**made, **(own or {})}
    if name == MUON and not of_muon:
        params = section.get("params", {})
        lr = params["lr"]
        rate = muon_lr or (lr * MUON_RMS * math.sqrt(hidden) if hidden else None)
        matrices = {"muon_lr": rate, "adam_lr": lr} if rate else {}
        kept = {
            key: params[key] for key in (*ADAM_TAKES, "torch_adam") if key in params
        }  # of the AdamW beside it
        muon = {"type": "Muon", "params": {**kept, "momentum": 0.95, **matrices, **(own or {})}}
        return replace(config, ds_config={**config.ds_config, SECTION: muon}), {}
    if own:  # Muon's, in a section that is its own
        params = {**section.get("params", {}), **own}
        return replace(config, ds_config={**config.ds_config, SECTION: {**section, "params": params}}), {}
    kind = section.get("type")
    if name == ADAMW and kind is not None and TYPES.get(str(kind).lower()) != ADAMW:
        hint = "Leave the option out, or take a preset with AdamW."
        raise DsrunError(f"the config's optimizer.type is {kind}", where="--optimizer adamw", hint=hint)
    return config, {}


def planned(name: str) -> str:
    """The optimizer as the planner knows it: what a config brings is taken for AdamW, which keeps the most."""
    return ADAMW if name == CONFIG else name


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer, or the weights that it steps, are kept outside the GPU."""
    return any(section.get("device") not in (None, "none") for section in offload_sections(ds_config))


def half(ds_config: Mapping[str, Any]) -> bool:
    """Whether it trains in 16 bits."""
    return any(tree.get(ds_config, f"{name}.enabled") is True for name in ("bf16", "fp16"))


def check_schedule(ds_config: Mapping[str, Any], resolved: Resolved[FinetuneOptions]) -> None:
    """Raise DsrunError where the config's scheduler is to decide (--lr-schedule config) and there is none, or where an
    option says what it says otherwise.
    """
    if resolved.options.lr_schedule != CONFIG:
        return
    if SCHEDULER not in ds_config:
        hint = f"Take one of {', '.join(name for name in LR_SCHEDULES if name != CONFIG)}."
        raise DsrunError("the config has no scheduler section", where="--lr-schedule config", hint=hint)
    raise_all(_contradictions(ds_config, resolved))


def _contradictions(ds_config: Mapping[str, Any], resolved: Resolved[FinetuneOptions]) -> Iterator[Problem]:
    """Options of the user's that the config's scheduler leaves no room for."""
    kind = ds_config[SCHEDULER]["type"]
    rate = scheduled_rate(ds_config)
    if rate and rate[1] != resolved.options.lr:
        yield Problem(
            f"--lr is {resolved.options.lr:g}, and the scheduler of the config, {kind}, has {rate[0]} {rate[1]:g}",
            str(resolved.origins["lr"]),
            f"Say it there: --set {SCHEDULER}.params.{rate[0]}={resolved.options.lr:g}, or take --lr-schedule cosine.",
        )
    own = resolved.source("lr_schedule")
    for name in ("warmup_steps", "warmup_ratio"):
        if getattr(resolved.options, name) is not None and resolved.source(name) >= max(own, Source.RUN_FILE):
            flag = flag_of(FinetuneOptions, name)
            yield Problem(
                f"{flag} is for dsrun's own schedules, and the config's scheduler, {kind}, decides",
                str(resolved.origins[name]),
                f"Say it there (--set {SCHEDULER}.params.warmup_num_steps=...), or take --lr-schedule cosine.",
            )


def taken_out(config: BuiltConfig, name: str) -> tuple[BuiltConfig, dict[str, Any]]:
    """The config without its optimizer section, and that section's numbers for the optimizer that the ranks make.

    Raises DsrunError where the section says what that optimizer has no way to do.
    """
    option, chosen = f"--optimizer {name}", OPTIMIZERS[name]
    section = config.ds_config.get(SECTION) or {}
    params = section.get("params", {})
    kind = str(section.get("type", ""))
    same = TYPES.get(kind.lower()) == name.removesuffix("-8bit")
    if name == ADAMW_8BIT and not same:
        raise DsrunError(
            f"the config's optimizer.type is {kind or 'missing'}, not AdamW",
            where=option,
            hint="Leave one out.",
        )
    others = sorted(set(params) - {*chosen.takes, *WHICH_ADAM}) if same else []
    if others or params.get("adam_w_mode") is False:
        wrong = ", ".join(others or ["adam_w_mode=false"])
        raise DsrunError(
            f"has no parameter like the config's {wrong}",
            where=option,
            hint=f"It takes {', '.join(chosen.takes)}.",
        )
    kept = [key for key in (chosen.takes if same else ANY) if key in params]
    rest = {key: value for key, value in config.ds_config.items() if key != SECTION}
    findings = [finding for finding in config.findings if not tree.under(finding.path, SECTION)]
    changed = replace(config, ds_config={**rest, UNTESTED: True}, findings=findings)
    return changed, {**chosen.defaults, **{key: params[key] for key in kept}}


def why_torch_adam(ds_config: Mapping[str, Any], accelerator: str) -> str:
    """Why torch's own AdamW takes the place of DeepSpeed's fused one; empty where it doesn't.

    Both compute the same in one kernel, and DeepSpeed's takes a minute to compile, on GPUs with nvcc only. Nothing
    changes where the config says which it is to be, or what only DeepSpeed's takes.
    """
    from dsrun.cluster import extensions

    if "fused_adam" not in extensions.needed(ds_config):
        return ""
    takes_all = ds_config["optimizer"].get("params", {}).keys() <= set(ADAM_TAKES)
    if not takes_all or accelerator not in {"cpu", "cuda"}:
        return ""
    # Without ZeRO it gets another wrapper in 16 bits (see `refusals`), whose scaling of fp16's losses is another one.
    unlike = not zero_stage(ds_config) and tree.get(ds_config, "fp16.enabled") is True
    return extensions.nvcc_fault(os.environ) if unlike and accelerator == "cuda" else NOTHING_COMPILED


def torch_adam(accelerator: str) -> tuple[str, ...]:
    """--set's texts for torch's own AdamW, in one kernel: that takes no temporary copy of the weights, and on a CPU a
    tenth of the time. DeepSpeed hands `fused` over (runtime/engine.py, _configure_basic_optimizer).
    """
    there = packages.installed_version("torch")
    has_kernel = accelerator == "cuda" or (there is not None and version(there) >= FIRST_ON_CPU)
    return (TORCH_ADAM, FUSED) if has_kernel else (TORCH_ADAM,)
