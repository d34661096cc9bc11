"""Turn a published case into a set-up of the planner, with a note for everything that had to be guessed.

A file of cases is a JSON list; README.md beside this file says what its fields are. A field that is absent is as good
as null. What the planner can't describe (a tensor-parallel run, an optimizer that it doesn't know) gives an
UnreadableError with the reason, and the case isn't scored.
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
from dsrun.planner import lora, shapes, trainers
from dsrun.planner.setup import LOGITS, Setup
from dsrun.planner.shape import Shape
from published import words
from published.words import UnknownWordError, UnreadableError

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
    "swift": (LOGITS["hf"], "ms-swift from version 3 on: transformers' own"),
    "hf_new": (
        14,
        "transformers 4 from 4.45 on, counted: the 16-bit logits, an fp32 copy, one without each row's last token, "
        "and its log-softmax; 13 for one row, whose cut is a view: 12.5-13.5, from runs with and without the fused "
        "kernel",
    ),
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
VIEWED: dict[str, float] = {"hf_new": 13}
"""Bytes a logit where a micro batch is one row, of which the last token is cut off without a copy."""
OLD = ("hf_old", "hf_new", "bf16_nocast")
"""Losses of times when attention that makes its scores took 16 bytes of each in a block that was computed again."""
SCORES_THEN = 16.0
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
    "ep": (1, ""),
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
BITSANDBYTES = ("nf4", "nf4-single", "int8")
"""Quantized weights beside which PEFT's prepare_model_for_kbit_training makes the others fp32."""
OPTIMIZER_NAMES = {
    "adamw": "adamw", "adam": "adamw", "adamw_torch": "adamw", "fusedadam": "adamw", "cpuadam": "adamw",
    "adamw_torch_fused": "adamw", "adamw_8bit": "adamw-8bit", "adamw8bit": "adamw-8bit",
    "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "adamw-8bit",
    "lion": "lion", "sgd": "sgd",
}  # fmt: skip


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
    """The set-up of a case. Raises UnreadableError, for a word that isn't in the language an UnknownWordError."""
    notes: list[str] = []
    words.check(case, notes)
    if (words.number(case, "tp") or 1) > 1:
        raise UnreadableError(
            "its matrices are divided over ranks beside its experts, which dsrun doesn't do"
        )
    shape = _shape(case, notes)
    engine, stage = _strategy(case, notes)
    with_lora = bool(words.switch(case, "lora"))
    precision = _precision(case, engine, with_lora, notes)
    optimizer_device, parameter_device = _devices(case)
    targets, ends = _targets(case) if with_lora else ((), 0)
    rank = _count(case, "lora_r", notes) if with_lora else 0
    adapters = lora.lora_weights(shape, rank, targets) + rank * ends * (shape.hidden + shape.vocab)
    quantized = _quantized(case)
    auto = bool(words.switch(case, "auto_bucket"))
    square = shape.hidden**2
    setup = Setup(
        shape=shape,
        gpus=_count(case, "gpus", notes),
        nodes=_count(case, "nodes"),
        ep=_count(case, "ep"),
        engine=engine,
        stage=stage,
        optimizer_device=optimizer_device,
        parameter_device=parameter_device if stage == 3 else "gpu",
        precision=precision,
        optimizer=_known(case, "optimizer", OPTIMIZER_NAMES, "adamw", notes),
        method=("qlora" if quantized else "lora") if with_lora else "full",
        adapters=adapters,
        targets=targets,
        copies=2 * shape.embedding if with_lora and words.switch(case, "train_emb") else 0,
        quantized=quantized,
        seq_len=_count(case, "seq_len", notes),
        micro_batch=_count(case, "micro_batch", notes),
        grad_accum=_count(case, "ga"),
        checkpointing=_recomputed(case),
        flash=words.switch(case, "flash_attn") is not False,
        variable_lengths=bool(words.switch(case, "variable_lengths") or words.switch(case, "padded")),
        logits_bytes=_logits(case, notes),
        fused_loss=case.get("logits") in FUSED,
        # transformers' own AdamW, unless the case says that DeepSpeed's was used. Where FSDP 1 gives torch's optimizers
        # flat parameters, these are a type of their own that torch steps one by one (optim/optimizer.py:
        # _foreach_supported_types); accelerate doesn't since 2023 (use_orig_params).
        fused_adam=any(words.switch(case, field) for field in ("fused_adam", "flat_parameters"))
        or case.get("optimizer") == "adamw_torch_fused",
        looped_experts=shape.experts is not None and case.get("logits") in OLD,
        scores_bytes=SCORES_THEN if case.get("logits") in OLD else None,
        lora_dropout=words.number(case, "lora_dropout") or 0.0 if with_lora else 0.0,
        reduce_bucket=square if auto and not case.get("reduce_bucket") else _count(case, "reduce_bucket"),
        overlap_comm=stage == 3 if (overlap := words.switch(case, "overlap")) is None else overlap,
        sub_group=_count(case, "sub_group"),
        zero_init=words.switch(case, "zero_init") is not False,
        flattens_on_gpu=False,  # these runs are older
        reentrant=str(case.get("logits")) not in OWN_LOOPS,
    )
    if words.switch(case, "attention_dropout") is not None:
        block = replace(shape.block, attention_dropout=bool(words.switch(case, "attention_dropout")))
        setup = replace(setup, shape=replace(shape, block=block))
    setup = replace(setup, **_casts(case, setup))
    if case.get("logits") in OWN_CODE:
        setup = _own_code(setup, OWN_CODE[str(case["logits"])])
    return Read(setup, tuple(notes))


WIDE_THEN = ("llama", "granite")
"""Networks whose published runs with LoRA, sharded, of the time of transformers 4, have an fp32 residual stream
(README.md beside this file)."""
MIXED = ("bf16", "amp", "amp_bf16")
"""Precisions in which weights are cast as they are used, where adapters are trained."""


def _casts(case: Mapping[str, Any], setup: Setup) -> dict[str, bool]:
    """What is fp32 beside the adapters, as the case says, or its trainer does by default."""
    trainer = _trainer(case)
    kbit = words.switch(case, "kbit_casts")
    if kbit is None and trainer is not None:
        kbit = trainer.value("kbit_casts")
    of_then = case.get("logits") in ("hf_old", "hf_new")
    mixed = str(case.get("precision") or "bf16").lower() in MIXED
    usual = mixed and of_then and setup.sharded and setup.method != "full" and _network(case) in WIDE_THEN
    wide = words.switch(case, "fp32_stream")
    return {
        "kbit_casts": bool(kbit) and str(setup.quantized) in BITSANDBYTES,
        "fp32_stream": usual if wide is None else wide,
    }


def _network(case: Mapping[str, Any]) -> str:
    """The model_type of a case's model; empty for one without a shape of its own."""
    fields = shapes.find(str(case.get("model"))) or {}
    return str(fields.get("config", {}).get("model_type", fields.get("like", "")))


def _trainer(case: Mapping[str, Any]) -> trainers.TrainerDefaults | None:
    """Who trained: as the case says, or whose repository its source is. Raises UnknownWordError."""
    name = case.get("trainer")
    if name is None:
        return trainers.of_source(str(case.get("source") or ""))
    try:
        return trainers.load(str(name))
    except DsrunError:
        raise UnknownWordError("trainer", name, "is no file of presets/trainers") from None


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
        raise UnknownWordError(field, value)
    return found


def _count(case: Mapping[str, Any], field: str, notes: list[str] | None = None) -> int:
    """A number of the case, or the usual one; a note says so where there are notes."""
    value = words.number(case, field)
    if value:
        return int(value)
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


OFFLOADED = {
    "opt": "optimizer", "optimizer": "optimizer", "param": "parameters", "params": "parameters",
    "parameters": "parameters", "cpu": "cpu", "nvme": "nvme", "disk": "nvme",
}  # fmt: skip
"""The words of an `offload`, with anything that is no letter between them."""


def _devices(case: Mapping[str, Any]) -> tuple[str, str]:
    """The places of the optimizer's states and of the weights."""
    said = str(case.get("offload") or "none").lower()
    if said in ("none", "false"):
        by_name = str(case.get("strategy")).lower().endswith("offload") and case.get("offload") is None
        return ("cpu" if by_name else "gpu"), "gpu"
    found = {OFFLOADED.get(word) for word in re.findall(r"\w+", said)}
    if None in found or not found & {"optimizer", "parameters"}:
        raise UnknownWordError("offload", case["offload"])
    device = "nvme" if "nvme" in found else "cpu"
    return (device if "optimizer" in found else "gpu"), (device if "parameters" in found else "gpu")


RECOMPUTED = {"full": 1, "none": 0}


def _recomputed(case: Mapping[str, Any]) -> int:
    """Setup.checkpointing: a switch, a number (every n-th block), or a word."""
    value = case.get("grad_ckpt")
    if isinstance(value, int):
        return int(value)
    known = {**RECOMPUTED, **dict.fromkeys(words.TRUE, 1), **dict.fromkeys(words.FALSE, 0)}
    word = "none" if value is None else str(value).lower()
    if word not in known:
        raise UnknownWordError("grad_ckpt", value, "is no way to recompute that the planner knows")
    return known[word]


def _quantized(case: Mapping[str, Any]) -> str | None:
    value = case.get("quant")
    if not value or str(value).lower() == "none":
        return None
    if str(value).lower() not in QUANTS:
        raise UnknownWordError("quant", value)
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
        raise UnknownWordError("logits", kind)
    if words.number(case, "micro_batch") == 1 and kind in VIEWED:
        return VIEWED[str(kind)]
    return LOGIT_BYTES[str(kind)][0]


ENDS = ("lm_head", "output_layer", "embed_out", "embed_tokens", "wte", "word_embeddings")
"""LoRA's targets outside the blocks: a vocabulary wide."""


GROUPS = {
    "linear": ("all-linear",), "attention": ("q", "k", "v", "o"), "attn": ("q", "k", "v", "o"),
    "mlp": ("gate", "up", "down"),
}  # fmt: skip
"""Words for several of a block's matrices."""


def _targets(case: Mapping[str, Any]) -> tuple[tuple[str, ...] | None, int]:
    """The matrices of a block that LoRA is put on, and the number of those outside the blocks."""
    named = case.get("lora_targets") or "q_proj,v_proj"
    if not isinstance(named, str | list) or not all(isinstance(name, str) for name in named):
        raise UnknownWordError("lora_targets", named)
    words_of = named.split(",") if isinstance(named, str) else named
    expanded = [each for word in words_of for each in GROUPS.get(word.strip().lower(), (word,))]
    found, others = lora.roles(expanded)
    if unknown := [name for name in others if name not in ENDS]:
        raise UnknownWordError("lora_targets", unknown[0], "is no matrix that the planner knows")
    return found, len(others)
