"""What of a model is trained: LoRA, QLoRA, P-Tuning v2, or all of it. Options become a TuningSpec, and are judged."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError, Problem
from dsrun.jobs.adapters import LORA, PREFIX, read_adapter
from dsrun.jobs.job import TuningSpec
from dsrun.planner.setup import lora_weights
from dsrun.planner.shape import Shape

OPTIONS = {
    "lora_rank": ("lora", "qlora"),
    "lora_alpha": ("lora", "qlora"),
    "lora_dropout": ("lora", "qlora"),
    "lora_target": ("lora", "qlora"),
    "pre_seq_len": ("ptuning",),
    "prefix_dropout": ("ptuning",),
    "adapter": ("lora", "qlora", "ptuning"),
}
"""Option -> the methods that it goes with."""


LLAMAS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
LINEAR = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMAS),
    "glm": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
}
"""model_type -> what its linear layers are called. Other models' are known when they are loaded."""


def with_adapter(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """The options with what the adapter that is gone on with says of itself.

    Raises DsrunError where an option says something else, or doesn't go with the method.
    """
    given = dict(given)
    problems: list[Problem] = []
    if "adapter" in given:
        path = Path(given["adapter"]).expanduser().absolute()
        found = read_adapter(path)
        given["adapter"] = str(path)
        method = given.setdefault("method", found.method)
        if found.method != ("lora" if method == "qlora" else method):
            what = f"is {'LoRA' if found.method == LORA else 'P-Tuning v2'}, and --method is {method}"
            problems.append(Problem(what, str(path), f"Leave --method out, or say {found.method}."))
        if found.method == PREFIX and not found.fields and "pre_seq_len" in given:
            what = "is what the checkpoint has, whose length is found out when it is read"
            problems.append(Problem(what, option("pre_seq_len"), "Leave it out."))
        for name, own in found.fields.items() if not problems else ():
            changeable = name == "lora_dropout"
            if name in given and given[name] != own and not changeable:
                what = f"is {given[name]}, and the adapter in {path} was made with {own}"
                problems.append(Problem(what, option(name), "Leave it out."))
            given.setdefault(name, own)
    method = given.get("method", "full")
    for name, methods in OPTIONS.items():
        if name in given and method not in methods:
            hint = f"It goes with --method {' or '.join(methods)}."
            problems.append(Problem(f"says nothing to --method {method}", option(name), hint))
    if problems:
        raise DsrunError(problems)
    return given


def option(name: str) -> str:
    """How the command line calls a value."""
    return "--" + name.replace("_", "-")


def spec_of(settings: Any) -> TuningSpec:
    """settings: values by name (dsrun.jobs.finetune.Settings)."""
    return TuningSpec(
        method=settings["method"],
        lora_rank=int(settings["lora_rank"]),
        lora_alpha=float(settings["lora_alpha"]),
        lora_dropout=float(settings["lora_dropout"]),
        lora_target=settings["lora_target"],
        pre_seq_len=int(settings["pre_seq_len"]),
        prefix_dropout=float(settings["prefix_dropout"]),
        adapter=settings["adapter"],
    )


def check_targets(tuning: TuningSpec, architecture: Mapping[str, Any]) -> list[Problem]:
    """What of --lora-target the model has no layers for. architecture: its config, as far as it is known."""
    there = LINEAR.get(str(architecture.get("model_type")))
    if tuning.method not in OPTIONS["lora_target"] or tuning.lora_target == "all" or there is None:
        return []
    named = [name.strip() for name in tuning.lora_target.split(",") if name.strip()]
    if wrong := [name for name in named if name not in there]:
        hint = f"Its linear layers: {', '.join(there)}."
        return [Problem(f"the model has no {' and no '.join(wrong)}", option("lora_target"), hint)]
    return []


def check_export(tuning: TuningSpec, wanted: str) -> list[Problem]:
    """What doesn't go together of the method and --export-format."""
    where = "--export-format"
    if wanted == "adapter" and not tuning.freezes:
        hint = "It goes with --method lora, qlora or ptuning."
        return [Problem("is adapter, and a full fine-tune makes none", where, hint)]
    if wanted == "chatglm" and tuning.method == PREFIX:
        hint = "Leave it out: the adapter is in the layout of ChatGLM2's own P-Tuning checkpoints."
        return [Problem("a prefix can't be merged into the weights, so no model is written", where, hint)]
    return []


def check_attention(tuning: TuningSpec, wanted: str) -> list[Problem]:
    """What doesn't go together of the method and --attention."""
    if tuning.method != PREFIX or wanted in ("auto", "sdpa"):
        return []
    what = f"is {wanted}, and --method ptuning computes with sdpa, into which it puts its prefix"
    return [Problem(what, "--attention", "Leave it out.")]


def check_place(tuning: TuningSpec, accelerator: str, ds_config: Mapping[str, Any] | None) -> list[Problem]:
    """What the method needs and isn't there. ds_config: None where there is none yet."""
    if tuning.method != "qlora":
        return []
    problems = []
    if accelerator != "cuda":
        # On a CPU bitsandbytes (0.50) packs weights anew when it answers, and a training step after that gets
        # wrong gradients through them (nn/modules.py, Linear4bit.forward: packing_format_for_cpu).
        what = "needs a CUDA GPU: on a CPU 4-bit weights are slow, and an evaluation spoils the gradients after it"
        problems.append(Problem(what, "--method qlora", "Use --method lora here."))
    elif importlib.util.find_spec("bitsandbytes") is None:
        problems.append(
            Problem("needs bitsandbytes", "--method qlora", "Install it: pip install bitsandbytes")
        )
    if ds_config and int(ds_config.get("zero_optimization", {}).get("stage", 0)) == 3:
        what = (
            "does not go with ZeRO-3: a 4-bit weight is a row of bytes with scales of its own beside it, and ZeRO-3 "
            "cuts the one apart and not the other"
        )
        problems.append(
            Problem(what, "--method qlora", "Use a preset of ZeRO-1 or 2, or --method lora with this one.")
        )
    return problems


def check_packages(tuning: TuningSpec) -> list[Problem]:
    """What the method imports and isn't installed; bitsandbytes is `check_place`'s."""
    if tuning.method in ("lora", "qlora") and importlib.util.find_spec("peft") is None:
        return [Problem("needs peft", f"--method {tuning.method}", "Install it: pip install 'dsrun[train]'")]
    return []


def planned_fields(tuning: TuningSpec, shape: Shape) -> dict[str, Any]:
    """The method in the fields of a planner's Setup. A prefix is planned as so many weights of LoRA's."""
    if not tuning.freezes:
        return {}
    if tuning.method == PREFIX:
        return {"method": "lora", "adapters": tuning.pre_seq_len * shape.layers * 2 * shape.kv_width}
    adapters = lora_weights(shape, tuning.lora_rank)  # of chosen layers it is fewer
    return {
        "method": tuning.method,
        "adapters": adapters,
        "quantized": "nf4" if tuning.method == "qlora" else None,
    }
