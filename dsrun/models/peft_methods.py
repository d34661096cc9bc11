"""PEFT methods: LoRA, QLoRA and P-Tuning v2; which options, adapters and devices each of them takes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from dsrun.ds_config import zero_stage
from dsrun.errors import Problem, raise_all
from dsrun.models.adapters import ALL, LORA, PREFIX, Adapter, check_tensors, names_tensors, read_adapter
from dsrun.options.commands import FinetuneOptions
from dsrun.options.declare import flag_of
from dsrun.options.layers import Layer, Resolved, Source
from dsrun.options.table import PeftOptions
from dsrun.packages import install

OPTIONS = {
    "lora_rank": ("lora", "qlora"),
    "lora_alpha": ("lora", "qlora"),
    "lora_dropout": ("lora", "qlora"),
    "lora_target": ("lora", "qlora"),
    "pre_seq_len": ("ptuning",),
    "prefix_dropout": ("ptuning",),
    "adapter": ("lora", "qlora", "ptuning"),
}
"""Option -> the methods that read it."""
LLAMAS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")
LINEAR = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), LLAMAS),
    "glm": ("q_proj", "k_proj", "v_proj", "o_proj", "gate_up_proj", "down_proj", "lm_head"),
}
"""model_type -> the names of its linear layers. Those of other models are known once they are loaded."""


def by_adapter(known: Resolved[FinetuneOptions]) -> list[Layer]:
    """The options that an adapter which is trained on decides: method, rank, length of the prefix.

    Raises DsrunError where the user's options differ, or are for another method.
    """
    if known.options.adapter is None:
        raise_all(_without_effect(known))
        return []
    path = Path(known.options.adapter).expanduser().absolute()
    adapter = read_adapter(path)
    method = known.options.method if known.said("method") else adapter.method
    problems = [*_of_another_kind(known, adapter, path, method)] or [*_contradictions(known, adapter, path)]
    layers = [Layer(Source.COMMAND_LINE, {"adapter": str(path)})]
    if not problems:
        # As strong as a run file: the adapter's rank and length are facts, and a user's other value was refused above.
        values = {"method": method, **adapter.fields}
        layers.append(Layer(Source.RUN_FILE, values, f"the adapter {path}", through="adapter"))
    raise_all([*problems, *_without_effect(known.with_layers(*layers))])
    return layers


def _contradictions(known: Resolved[FinetuneOptions], adapter: Adapter, path: Path) -> Iterator[Problem]:
    """Options that the user gives and the adapter was made with other values of."""
    for name, adapters_value in adapter.fields.items():
        given = getattr(known.options, name)
        if known.said(name) and given != adapters_value and name != "lora_dropout":
            message = f"is {given}, but the adapter in {path} was made with {adapters_value}"
            yield Problem(message, option(name), "Leave it out.")


def _of_another_kind(
    known: Resolved[FinetuneOptions], adapter: Adapter, path: Path, method: str
) -> Iterator[Problem]:
    """The problem of a method that can't train on with the adapter."""
    if adapter.method != ("lora" if method == "qlora" else method):
        message = f"is {'LoRA' if adapter.method == LORA else 'P-Tuning v2'}, but --method is {method}"
        yield Problem(message, str(path), f"Leave --method out, or say {adapter.method}.")
    if adapter.method == PREFIX and not adapter.fields and known.said("pre_seq_len"):
        message = "is given, but the adapter has its own length"
        yield Problem(message, option("pre_seq_len"), "Leave it out.")


def _without_effect(known: Resolved[FinetuneOptions]) -> Iterator[Problem]:
    """Options that the user gives and the method doesn't read."""
    method = known.options.method
    for name, methods in OPTIONS.items():
        if known.said(name) and known.origins[name].through != "adapter" and method not in methods:
            hint = f"It is for --method {' or '.join(methods)}."
            yield Problem(f"has no effect with --method {method}", option(name), hint)


def option(name: str) -> str:
    """The flag of an option."""
    return flag_of(PeftOptions, name)


def check_targets(peft: PeftOptions, architecture: Mapping[str, Any]) -> list[Problem]:
    """Layers of --lora-target that the model lacks. architecture: its config, as far as it is known."""
    linear = LINEAR.get(str(architecture.get("model_type")))
    if peft.method not in OPTIONS["lora_target"] or peft.lora_target == ALL or linear is None:
        return []
    named = [name.strip() for name in peft.lora_target.split(",") if name.strip()]
    if wrong := [name for name in named if name not in (ALL, *linear)]:
        hint = f"Its linear layers: {', '.join(linear)}."
        return [Problem(f"the model has no {' and no '.join(wrong)}", option("lora_target"), hint)]
    return []


def check_experts(peft: PeftOptions, *, stage: int, fsdp: bool, compiles: bool) -> list[Problem]:
    """The problems of a --lora-target that surely means a mixture's experts; the ranks look at other names."""
    if peft.method not in OPTIONS["lora_target"] or not names_tensors(peft.lora_target):
        return []
    return check_tensors(peft, stage=stage, fsdp=fsdp, compiles=compiles)


def check_export(peft: PeftOptions, wanted: str) -> list[Problem]:
    """The problem of --export-format with this method."""
    where = "--export-format"
    if wanted == "adapter" and not peft.freezes:
        hint = "Adapters come from --method lora, qlora or ptuning."
        return [Problem("is adapter, but a full fine-tune makes none", where, hint)]
    if wanted == "chatglm" and peft.method == PREFIX:
        hint = "Leave it out: the adapter is in the layout of ChatGLM2's own P-Tuning checkpoints."
        return [Problem("a prefix can't be merged into the weights, so no model is written", where, hint)]
    return []


def check_attention(peft: PeftOptions, wanted: str) -> list[Problem]:
    """The problem of --attention with this method."""
    if peft.method != PREFIX or wanted in ("auto", "sdpa"):
        return []
    message = f"is {wanted}, but --method ptuning needs sdpa, into which it puts its prefix"
    return [Problem(message, "--attention", "Leave it out.")]


def check_device(peft: PeftOptions, accelerator: str, ds_config: Mapping[str, Any] | None) -> list[Problem]:
    """The problems of the method with a device and a ds_config. ds_config: None where there is none yet."""
    if peft.method != "qlora":
        return []
    problems, where = [], "--method qlora"
    if accelerator != "cuda":
        # On a CPU bitsandbytes (0.50) repacks the weights when it generates, and the next training step gets wrong
        # gradients through them (nn/modules.py, Linear4bit.forward: packing_format_for_cpu).
        slow = (
            "needs a CUDA GPU: on a CPU 4-bit weights are slow, and gradients are wrong after an evaluation"
        )
        problems.append(Problem(slow, where, "Use --method lora here."))
    elif importlib.util.find_spec("bitsandbytes") is None:
        problems.append(Problem("needs bitsandbytes", where, f"Install it: {install('bitsandbytes')}"))
    if ds_config and zero_stage(ds_config) == 3:
        sharded = "does not work with ZeRO-3, which shards the bytes of a 4-bit weight but not their scales"
        hint = "Use a preset of ZeRO-1 or 2, or --method lora with this one."
        problems.append(Problem(sharded, where, hint))
    return problems


def check_packages(peft: PeftOptions) -> list[Problem]:
    """Packages that the method imports and that are missing; `check_device` looks for bitsandbytes."""
    if peft.method in ("lora", "qlora") and importlib.util.find_spec("peft") is None:
        return [Problem("needs peft", f"--method {peft.method}", f"Install it: {install('peft')}")]
    return []
