"""Turn a published case into a set-up of the planner, with a note for everything that had to be guessed.

A file of cases is a JSON list; README.md beside this file says what its fields are. A field that is absent is as good
as null. What the planner can't describe (a tensor-parallel run, an optimizer that it doesn't know) gives an
UnreadableError
with the reason, and the case isn't scored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dsrun.errors import DsrunError
from dsrun.models import model_files
from dsrun.models.multimodal import completed
from dsrun.models.text_shape import shape_of
from dsrun.planner import lora, shapes
from dsrun.planner.setup import LOGITS, Setup
from dsrun.planner.shape import Shape

CASES = Path(__file__).with_name("cases.json")
LATER = Path(__file__).with_name("later.json")
"""Cases that were collected when the planner was done: no constant was chosen with them at hand."""
MIXTURES = Path(__file__).with_name("mixtures.json")
"""Cases of mixtures of experts, collected later still: most say only that a run fitted, or that it died."""

# What only the bench needs to know. Bytes a logit in losses that aren't today's transformers': the round middle of
# the range that published runs with the same code imply.
LOGIT_BYTES: dict[str, tuple[float, str]] = {
    "hf_old": (LOGITS["hf-old"], "transformers before 4.45; the planner's own figure"),
    "hf": (LOGITS["hf"], "transformers 5; the planner's own figure"),
    "hf_new": (13, "transformers 4: 12.5-13.5, from runs with and without the fused kernel"),
    "bf16_nocast": (
        12,
        "Qwen-1's own modeling code, which hands 16-bit logits to the loss: 12 are counted under autocast; in bf16",
    ),
    "fp16_nocast": (
        6,
        "the same in fp16 under DeepSpeed, which has no autocast: log-softmax, and two gradients",
    ),
    "mega": (9, "Megatron's and Mosaic's loss: 8-10"),
    "torchtitan": (11, "torchtune's and torchtitan's loss: 10-12"),
    "torchtune": (11, "torchtune's and torchtitan's loss: 10-12"),
    "litgpt_chunk": (6, "LitGPT's loss, in chunks of the sequence: about 6"),
}
FUSED = ("liger", "fused")
OWN_CODE: dict[str, dict[str, Any]] = {"litgpt_chunk": {"inside": None, "fused_qkv": True}}
"""LitGPT's blocks (litgpt/model.py): values are slices of one matrix's output, GELU is torch's own. It trains LoRA in
the weights' precision, ties no output weights to the embedding, and quantizes every matrix, those of the output too,
from fp16 (Lightning's BitsandbytesPrecision). Its rows are older than bitsandbytes 0.43.2."""
OWN_LOOPS = ("mega", "torchtitan", "torchtune", "litgpt_chunk")
"""Losses of projects with a loop of their own, which checkpoints without re-entrance; transformers did with it then."""
LITGPT_DROPOUT = 0.05
"""lora_dropout in its config_hub."""
# What a case doesn't say.
USUAL: dict[str, tuple[int, str]] = {
    "seq_len": (128, "the sources that don't say classify short texts"),
    "lora_r": (8, "PEFT's default (LoraConfig.r)"),
    "reduce_bucket": (500_000_000, "DeepSpeed's default (runtime/zero/config.py)"),
    "sub_group": (1_000_000_000, "DeepSpeed's default (runtime/zero/config.py)"),
    "gpus": (1, ""),
    "micro_batch": (1, ""),
    "ga": (1, ""),
    "nodes": (1, ""),
}

STRATEGIES: dict[str, tuple[str, int]] = {
    "single": ("torch", 0), "ddp": ("torch", 0), "none": ("torch", 0),
    "fsdp": ("fsdp", 0), "fsdp_full_shard": ("fsdp", 0), "fsdp2": ("fsdp", 0),
}  # fmt: skip
FLAT_PARAMETERS = ("fsdp", "fsdp_full_shard")
ZERO = re.compile(r"(?:deepspeed_)?zero_?([0-3])(?:_(?:cpu_)?offload)?")
PRECISIONS = {
    "fp32": "fp32", "tf32": "fp32", "fp16": "fp16", "bf16": "bf16", "amp": "amp",
    "amp_bf16": "amp", "amp_fp16": "amp", "pure_bf16": "pure", "pure_fp16": "pure", "pure": "pure",
}  # fmt: skip
QUANTS = {
    "gptq4": "gptq4", "gptq": "gptq4", "nf4": "nf4", "bnb4": "nf4", "int4": "nf4", "fp4": "nf4", "4bit": "nf4",
    "qlora": "nf4", "int8": "int8", "bnb8": "int8", "8bit": "int8", "llm.int8": "int8",
    "nf4-single": "nf4-single",
}  # fmt: skip
OPTIMIZER_NAMES = {
    "adamw": "adamw", "adam": "adamw", "adamw_torch": "adamw", "fusedadam": "adamw", "cpuadam": "adamw",
    "adamw_8bit": "adamw-8bit", "adamw8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit",
    "lion": "lion", "sgd": "sgd",
}  # fmt: skip


class UnreadableError(Exception):
    """A case that the planner has nothing to say to; the text says why."""


@dataclass(frozen=True, slots=True)
class Read:
    """A case as the planner takes it. notes: what was guessed."""

    setup: Setup
    notes: tuple[str, ...]


def load(path: Path = CASES) -> list[dict[str, Any]]:
    """The cases of a file. Raises SystemExit where it is no list of cases."""
    cases = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(cases, list) or not all(isinstance(case, dict) for case in cases):
        raise SystemExit(f"{path}: not a list of cases")
    return cases


def read(case: Mapping[str, Any]) -> Read:
    """The set-up of a case. Raises UnreadableError."""
    notes: list[str] = []
    if int(case.get("ep") or 1) > 1:
        raise UnreadableError("its experts are divided over ranks, which the planner doesn't model")
    shape = _shape(case, notes)
    engine, stage = _strategy(case, notes)
    with_lora = bool(case.get("lora"))
    precision = _precision(case, engine, with_lora, notes)
    optimizer_device, parameter_device = _devices(case)
    targets = _targets(case, notes) if with_lora else ()
    adapters = lora.lora_weights(shape, _count(case, "lora_r", notes), targets) if with_lora else 0
    quantized = _quantized(case)
    auto = bool(case.get("auto_bucket"))
    square = shape.hidden**2
    setup = Setup(
        shape=shape,
        gpus=_count(case, "gpus", notes),
        nodes=_count(case, "nodes"),
        engine=engine,
        stage=stage,
        optimizer_device=optimizer_device,
        parameter_device=parameter_device if stage == 3 else "gpu",
        precision=precision,
        optimizer=_known(case, "optimizer", OPTIMIZER_NAMES, "adamw", notes),
        method=("qlora" if quantized else "lora") if with_lora else "full",
        adapters=adapters,
        targets=targets,
        copies=2 * shape.embedding if with_lora and case.get("train_emb") else 0,
        quantized=quantized,
        seq_len=_count(case, "seq_len", notes),
        micro_batch=_count(case, "micro_batch", notes),
        grad_accum=_count(case, "ga"),
        checkpointing=int(bool(case.get("grad_ckpt"))),
        flash=bool(case.get("flash_attn", True)),
        variable_lengths=bool(case.get("variable_lengths") or case.get("padded")),
        logits_bytes=_logits(case, notes),
        fused_loss=case.get("logits") in FUSED,
        # transformers' own AdamW, unless the case says that DeepSpeed's was used. FSDP 1 gives torch's optimizers flat
        # parameters, a type of its own that torch steps one by one (optim/optimizer.py: _foreach_supported_types).
        fused_adam=bool(case.get("fused_adam")) or str(case.get("strategy")) in FLAT_PARAMETERS,
        lora_dropout=float(case.get("lora_dropout") or 0.0) if with_lora else 0.0,
        reduce_bucket=square if auto and not case.get("reduce_bucket") else _count(case, "reduce_bucket"),
        overlap_comm=bool(case.get("overlap")),
        sub_group=_count(case, "sub_group"),
        zero_init=case.get("zero_init") is not False,
        flattens_on_gpu=False,  # these runs are older
        reentrant=str(case.get("logits")) not in OWN_LOOPS,
    )
    if case.get("logits") in OWN_CODE:
        setup = _own_code(setup, OWN_CODE[str(case["logits"])])
    return Read(setup, tuple(notes))


def _shape(case: Mapping[str, Any], notes: list[str]) -> Shape:
    if named := case.get("catalogue"):
        return _of_catalogue(str(named), case.get("layers"))
    name, parameters = str(case.get("model")), case.get("params")
    try:
        shape, said = shapes.shape(name, int(float(parameters)) if parameters else None)
    except (DsrunError, ValueError) as error:
        raise UnreadableError(f"no shape for {name}: {error}") from error
    notes.extend(said)
    return shape


def _of_catalogue(name: str, layers: int | None) -> Shape:
    """The shape of a model of `dsrun models`, cut to so many layers."""
    found = model_files.load_model_file(name)
    if not layers:
        return shape_of(found.architecture, name, found.parameters)
    config = completed(found.architecture)
    text = {**config.get("text_config", config), "num_hidden_layers": layers}
    return shape_of({**config, "text_config": text} if "text_config" in config else text, name)


def _own_code(setup: Setup, block: Mapping[str, Any]) -> Setup:
    """LitGPT's way, see OWN_CODE."""
    shape = setup.shape
    if shape.tied:
        shape = replace(shape, tied=False, parameters=shape.parameters + shape.embedding)
    quantized = setup.quantized is not None
    return replace(
        setup,
        shape=replace(shape, block=replace(shape.block, **block)),
        fp32_adapters=False,
        lora_dropout=LITGPT_DROPOUT if setup.method != "full" else 0.0,
        quantized_head=quantized,
        dequantized_twice=quantized,
        keeps_inputs=quantized,
    )


def _strategy(case: Mapping[str, Any], notes: list[str]) -> tuple[str, int]:
    """Engine and ZeRO's stage."""
    zero = ZERO.fullmatch(str(case.get("strategy")).lower().replace("-", "_"))
    if zero:
        return "deepspeed", int(zero[1])
    engine: tuple[str, int] = _known(case, "strategy", STRATEGIES, "single", notes)
    return engine


def _known(
    case: Mapping[str, Any], field: str, known: Mapping[str, Any], usual: str, notes: list[str]
) -> Any:
    value = case.get(field)
    if value is None:
        notes.append(f"{field} taken for {usual}")
        value = usual
    found = known.get(str(value).lower().replace("-", "_"))
    if found is None:
        raise UnreadableError(f"{field} {value!r} is not one that the planner knows")
    return found


def _count(case: Mapping[str, Any], field: str, notes: list[str] | None = None) -> int:
    """A number of the case, or the usual one; a note says so where there are notes."""
    value = case.get(field)
    if value:
        return int(float(value))
    usual = USUAL[field][0]
    if notes is not None:
        notes.append(f"{field} taken for {usual}")
    return usual


def _precision(case: Mapping[str, Any], engine: str, lora: bool, notes: list[str]) -> str:
    """The planner's word: what 16 bits mean depends on who trains."""
    precision = str(_known(case, "precision", PRECISIONS, "bf16", notes))
    if engine == "deepspeed":
        # DeepSpeed keeps a master copy, however the weights were loaded.
        return "bf16" if precision in ("pure", "amp") else precision
    if lora and precision in ("fp16", "bf16"):
        return "pure"  # the frozen weights have no master copy, and nothing else is 16 bits wide
    if engine == "fsdp" and precision in ("fp16", "bf16"):
        return "amp"  # FSDP's mixed precision: fp32 shards, computed with in 16 bits
    return precision


def _devices(case: Mapping[str, Any]) -> tuple[str, str]:
    said = str(case.get("offload") or "none").lower()
    device = "nvme" if "nvme" in said else "cpu"
    if said in ("none", "false"):
        return "gpu", "gpu"
    optimizer, parameters = "opt" in said, "param" in said
    if not (optimizer or parameters):
        raise UnreadableError(f"offload {said!r} is not one that the planner knows")
    return (device if optimizer else "gpu"), (device if parameters else "gpu")


def _quantized(case: Mapping[str, Any]) -> str | None:
    value = case.get("quant")
    if not value or str(value).lower() == "none":
        return None
    if str(value).lower() not in QUANTS:
        raise UnreadableError(f"quant {value!r} is not one that the planner knows")
    return QUANTS[str(value).lower()]


def _logits(case: Mapping[str, Any], notes: list[str]) -> float:
    kind = case.get("logits")
    if kind is None:
        notes.append("logits taken for hf_old")
        kind = "hf_old"
    if kind in FUSED:
        return LOGITS["hf"]
    if kind == "bf16_nocast" and case.get("precision") == "fp16":
        kind = "fp16_nocast"
    if str(kind) not in LOGIT_BYTES:
        notes.append(f"logits {kind!r} is unknown, taken for hf")
        kind = "hf"
    return LOGIT_BYTES[str(kind)][0]


def _targets(case: Mapping[str, Any], notes: list[str]) -> tuple[str, ...] | None:
    """The matrices that LoRA is put on."""
    found, unknown = lora.roles(case.get("lora_targets") or "q_proj,v_proj")
    if unknown:
        notes.append(f"LoRA on {unknown[0]!r}: taken for every matrix of a block")
        return None
    return found
