"""Which optimizer a fine-tune steps with, and what of that can be checked before anything starts.

adamw is DeepSpeed's own, from the preset. adamw-8bit is bitsandbytes', which keeps both moments in a byte each (2 bytes
a weight for 8): DeepSpeed can't make it from its config, so that the ranks make it and hand it over. The config then
has no optimizer section; what stood there (learning rate, betas, eps, weight decay) is in the job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dsrun.config import tree
from dsrun.config.build import BuiltConfig
from dsrun.errors import DsrunError, Problem
from dsrun.options.commands import FinetuneOptions
from dsrun.options.derived import scheduled_rate
from dsrun.options.groups import CONFIG, LR_SCHEDULES, OPTIMIZERS
from dsrun.options.table import Resolved, Source, flag_of

ADAMW, ADAMW_8BIT = OPTIMIZERS
OPTION = "--optimizer adamw-8bit"
PACKAGE = "bitsandbytes"
SECTION, SCHEDULER = "optimizer", "scheduler"
UNTESTED = "zero_allow_untested_optimizer"
"""Without it DeepSpeed takes no optimizer under ZeRO that it does not know (runtime/zero/utils.py)."""
KEPT = ("lr", "betas", "eps", "weight_decay")
OWN = ("torch_adam", "adam_w_mode")
"""Parameters that only say which Adam of DeepSpeed's it is."""


def installed(package: str) -> str | None:
    """The version of an installed package; None where it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def refusals(ds_config: Mapping[str, Any], accelerator: str, preset: str) -> list[Problem]:
    """Why a config can't be trained with the 8-bit optimizer here; the config still has its optimizer section."""
    if accelerator != "cuda":
        return [
            Problem(
                "needs an NVIDIA GPU, and this job trains on CPUs", OPTION, "Leave it out: --optimizer adamw."
            )
        ]
    found = []
    if offloads(ds_config):
        what = f"preset {preset} keeps the optimizer in host memory, where only DeepSpeed's own Adam steps"
        found.append(Problem(what, OPTION, "Take a preset without offload, or --optimizer adamw."))
    elif not tree.get(ds_config, "zero_optimization.stage", 0) and half(ds_config):
        # There an optimizer of the job's own gets another wrapper (_configure_fp16_optimizer in runtime/engine.py:
        # FP16_UnfusedOptimizer), with other loss scaling.
        what = f"preset {preset} has no ZeRO, which in 16 bits steps only DeepSpeed's own Adam alike"
        found.append(Problem(what, OPTION, "Take zero1, which needs no more memory on any number of GPUs."))
    if found:
        return found
    if installed(PACKAGE) is None:
        return [
            Problem(f"needs {PACKAGE}, which is not installed", OPTION, f"Install it: pip install {PACKAGE}")
        ]
    return []


def offloads(ds_config: Mapping[str, Any]) -> bool:
    """Whether the optimizer, or the weights that it steps, are kept outside the GPU."""
    sections = ("offload_optimizer", "offload_param")
    found = [(tree.get(ds_config, f"zero_optimization.{name}") or {}).get("device") for name in sections]
    return any(device not in (None, "none") for device in found)


def half(ds_config: Mapping[str, Any]) -> bool:
    """Whether it trains in 16 bits."""
    return any(tree.get(ds_config, f"{name}.enabled") is True for name in ("bf16", "fp16"))


def check_schedule(ds_config: Mapping[str, Any], asked: Resolved[FinetuneOptions]) -> None:
    """Raise DsrunError where the config's scheduler is to decide (--lr-schedule config) and there is none, or where an
    option says what it says otherwise.
    """
    if asked.options.lr_schedule != CONFIG:
        return
    if SCHEDULER not in ds_config:
        hint = f"Take one of {', '.join(name for name in LR_SCHEDULES if name != CONFIG)}."
        raise DsrunError("the config has no scheduler section", where="--lr-schedule config", hint=hint)
    if problems := list(_contradictions(ds_config, asked)):
        raise DsrunError(problems)


def _contradictions(ds_config: Mapping[str, Any], asked: Resolved[FinetuneOptions]) -> Iterator[Problem]:
    """Options of the user's that the config's scheduler leaves no room for."""
    kind = ds_config[SCHEDULER]["type"]
    rate = scheduled_rate(ds_config)
    if rate and rate[1] != asked.options.lr:
        yield Problem(
            f"--lr is {asked.options.lr:g}, and the scheduler of the config, {kind}, has {rate[0]} {rate[1]:g}",
            str(asked.origins["lr"]),
            f"Say it there: --set {SCHEDULER}.params.{rate[0]}={asked.options.lr:g}, or take --lr-schedule cosine.",
        )
    own = asked.source("lr_schedule")
    for name in ("warmup_steps", "warmup_ratio"):
        if getattr(asked.options, name) is not None and asked.source(name) >= max(own, Source.RUN_FILE):
            flag = flag_of(FinetuneOptions, name)
            yield Problem(
                f"{flag} is for dsrun's own schedules, and the config's scheduler, {kind}, decides",
                str(asked.origins[name]),
                f"Say it there (--set {SCHEDULER}.params.warmup_num_steps=...), or take --lr-schedule cosine.",
            )


def taken_out(config: BuiltConfig) -> tuple[BuiltConfig, dict[str, Any]]:
    """The config without its optimizer section, and that section's numbers for the optimizer that the ranks make.

    Raises DsrunError where the section says what the 8-bit AdamW has no way to do.
    """
    section = config.ds_config.get(SECTION) or {}
    params = section.get("params", {})
    kind = str(section.get("type", ""))
    others = sorted(set(params) - {*KEPT, *OWN})
    if kind.lower() not in ("adam", "adamw"):
        raise DsrunError(
            f"the config's optimizer.type is {kind or 'missing'}, not AdamW",
            where=OPTION,
            hint="Leave one out.",
        )
    if others or params.get("adam_w_mode") is False:
        wrong = ", ".join(others or ["adam_w_mode=false"])
        raise DsrunError(
            f"has no parameter like the config's {wrong}", where=OPTION, hint=f"It takes {', '.join(KEPT)}."
        )
    rest = {key: value for key, value in config.ds_config.items() if key != SECTION}
    findings = [found for found in config.findings if not tree.under(found.path, SECTION)]
    changed = replace(config, ds_config={**rest, UNTESTED: True}, findings=findings)
    return changed, {name: params[name] for name in KEPT if name in params}
