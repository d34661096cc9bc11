"""torchtune: `tune run RECIPE --config FILE.yaml`. A section's arguments stand as SECTION.ARGUMENT in the table."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    REFUSED,
    SAME,
    Draft,
    ForeignTrainer,
    UnlikeError,
    anyway,
    differs,
    is_on,
    left_out,
    refused,
    same,
    settled,
)
from dsrun.trainers.tables.hf import IMAGES, LOADING, LOGGED, NO_RL, OPTIMIZERS, SPEED, named_file, recompute

REFERENCE = re.compile(r"\$\{([\w.]+)\}")
COMPONENT = "_component_"
DATASETS = {
    "alpaca_dataset": "tatsu-lab/alpaca",
    "alpaca_cleaned_dataset": "yahma/alpaca-cleaned",
    "samsum_dataset": "Samsung/samsum",
    "slimorca_dataset": "Open-Orca/SlimOrca-Dedup",
    "grammar_dataset": "liweili/c4_200m",
    "cnn_dailymail_articles_dataset": "ccdv/cnn_dailymail",
    "wikitext_dataset": "EleutherAI/wikitext_document_level",
}
"""Builders of data sets -> the set of the Hub that they load."""
OPTIMIZER_NAMES = {
    "adamw": "adamw", "adam": "adamw", "sgd": "sgd", "pagedadamw8bit": "adamw-8bit", "adamw8bit": "adamw-8bit",
    "pagedadamw": "adamw",
}  # fmt: skip


def flat(values: dict[str, Any]) -> dict[str, Any]:
    """Sections' arguments as SECTION.ARGUMENT, with ${name} filled in."""
    made: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            made |= {f"{key}.{name}": inner for name, inner in value.items()} or {key: {}}
        else:
            made[key] = value
    for key, value in made.items():
        if isinstance(value, str):
            made[key] = REFERENCE.sub(lambda name: str(made.get(name[1], name[0])), value)
    return made


def component(draft: Draft, section: str) -> str:
    """The last part of a section's component."""
    return str(draft.given.get(f"{section}.{COMPONENT}") or "").rpartition(".")[2]


def model(draft: Draft) -> None:
    """The folder of the checkpoint is the model; its builder says whether LoRA is trained."""
    name = component(draft, "model")
    folder = draft.given.get("checkpointer.checkpoint_dir")
    if is_on(folder):
        text = str(folder).rstrip("/").removesuffix("/original")
        found = draft.find(text)
        draft.model = str(found.absolute()) if found else text
        draft.tell("checkpointer.checkpoint_dir", SAME, "model")
        if not found:
            draft.notes.append(
                f"model: {text} isn't here: the Hugging Face folder, or OWNER/{PurePath(text).name} of the Hub"
            )
    kind = (
        "qlora"
        if name.startswith("qlora") or draft.is_on("model.quantize_base")
        else "lora"
        if name.startswith("lora")
        else "full"
    )
    key = f"model.{COMPONENT}"
    if name.startswith(("dora", "lora_clip")) or draft.is_on("model.use_dora"):
        draft.tell(key, REFUSED, "DoRA: dsrun trains plain LoRA")
    elif "vision" in name or "clip" in name or "flamingo" in name:
        draft.tell(key, REFUSED, IMAGES)
    elif any(word in name for word in ("classifier", "reward")):
        draft.tell(key, REFUSED, NO_RL)
    else:
        draft.put("method", kind, key)
    _lora(draft, kind)


def _lora(draft: Draft, kind: str) -> None:
    for name, default in (("lora_rank", 8), ("lora_alpha", 16.0), ("lora_dropout", 0.0)):
        key = f"model.{name}"
        value = draft.given.get(key)
        draft.put(
            name,
            (default if value is None else value) if kind != "full" else None,
            key,
            text="counts for LoRA only",
        )
    modules = draft.given.get("model.lora_attn_modules")
    names = [*(modules or ())] if isinstance(modules, (list, tuple)) else []
    words = {"output_proj": "o_proj"}
    chosen = [words.get(str(name), str(name)) for name in names]
    chosen += ["gate_proj", "up_proj", "down_proj"] if draft.is_on("model.apply_lora_to_mlp") else []
    draft.put(
        "lora_target",
        ",".join(chosen) if chosen and kind != "full" else None,
        "model.lora_attn_modules",
        "model.apply_lora_to_mlp",
    )
    if draft.is_on("model.apply_lora_to_output"):
        draft.tell("model.apply_lora_to_output", DIFFERS, "the output layer gets no LoRA")


def data(draft: Draft) -> None:
    """A builder's own set of the Hub, or the file that `source` and `data_files` name."""
    name, source, files = (
        component(draft, "dataset"),
        draft.given.get("dataset.source"),
        draft.given.get("dataset.data_files"),
    )
    keys = [
        f"dataset.{key}" for key in (COMPONENT, "source", "data_files") if f"dataset.{key}" in draft.given
    ]
    if "preference" in name or "hh_rlhf" in name or "stack_exchange_paired" in name:
        draft.tell(f"dataset.{COMPONENT}", REFUSED, NO_RL)
        return
    if "multimodal" in name or "cauldron" in name or "vqa" in name:
        draft.tell(f"dataset.{COMPONENT}", REFUSED, IMAGES)
        return
    if is_on(files):
        chosen = [files] if isinstance(files, str) else list(files or ())
        draft.put("train_file", [named_file(draft, str(file)) for file in chosen], *keys)
    elif is_on(source) and source not in ("json", "csv", "text"):
        draft.put("train_file", [named_file(draft, str(source))], *keys)
    elif name in DATASETS:
        draft.put("train_file", [f"hf:{DATASETS[name]}"], *keys)
    else:
        draft.tell(
            f"dataset.{COMPONENT}",
            DIFFERS,
            f"{name or 'no data set is named'}: name its rows, train_file = [...]",
        )
    column = draft.given.get("dataset.column")
    if name.startswith("text_completion") and column:
        draft.put("text_column", column, "dataset.column")
    mapped = draft.given.get("dataset.column_map")
    if isinstance(mapped, Mapping) and mapped.get("input") and mapped.get("output"):
        draft.put("prompt_column", mapped["input"], "dataset.column_map")
        draft.put("response_column", mapped["output"], "dataset.column_map")


def step(draft: Draft) -> None:
    """Batch, optimizer, schedule and lengths."""
    draft.put("micro_batch", draft.given.get("batch_size"), "batch_size")
    name = component(draft, "optimizer")
    chosen = OPTIMIZER_NAMES.get(name.lower()) or OPTIMIZERS.get(name.lower())
    key = f"optimizer.{COMPONENT}"
    if chosen:
        draft.put("optimizer", chosen, key)
    elif name:
        draft.tell(key, REFUSED, f"{name}: dsrun has {', '.join(dict.fromkeys(OPTIMIZERS.values()))}")
    decay = draft.given.get("optimizer.weight_decay")
    torchs = 0.01 if name == "AdamW" else None
    draft.put(
        "weight_decay",
        torchs if decay is None else decay,
        "optimizer.weight_decay",
        source="torch's own default of AdamW" if decay is None else "",
    )
    betas = draft.given.get("optimizer.betas")
    if isinstance(betas, (list, tuple)) and len(betas) == 2:
        draft.put("adam_beta1", betas[0], "optimizer.betas")
        draft.put("adam_beta2", betas[1], "optimizer.betas")
    schedule = component(draft, "lr_scheduler")
    kind = next(
        (word for word in ("cosine", "linear", "constant") if word in schedule),
        None if schedule else "constant",
    )
    key = f"lr_scheduler.{COMPONENT}"
    if kind:
        draft.put("lr_schedule", kind, key)
    else:
        draft.tell(key, DIFFERS, f"{schedule}: dsrun has linear, cosine and constant, and takes cosine here")
    draft.put(
        "warmup_steps",
        int(draft.given.get("lr_scheduler.num_warmup_steps") or 0),
        "lr_scheduler.num_warmup_steps",
    )
    length = draft.given.get("tokenizer.max_seq_len")
    draft.put("max_length", length, "tokenizer.max_seq_len", text="what 99 % of the rows need")
    if is_on(length):
        draft.put("allow_truncation", True, source="longer rows are cut there, too")


def order(draft: Draft) -> None:
    """Rows come in random order here."""
    shuffled = draft.given.get("shuffle") is not False
    draft.tell("shuffle", ANYWAY if shuffled else DIFFERS, "rows come in random order")


def precision(value: Any) -> str:
    """A dtype's name."""
    words = {"bf16": "bf16", "fp16": "fp16", "fp32": "fp32"}
    if value not in words:
        raise UnlikeError("dsrun has bf16, fp16 and fp32")
    return words[value]


TRAINER = ForeignTrainer(
    "torchtune",
    "torchtune",
    (
        settled(
            model,
            "model.lora_* model.apply_lora_to_* model.quantize_base checkpointer.checkpoint_dir",
            f"model.{COMPONENT}",
            options="method lora_rank lora_alpha lora_dropout lora_target",
            text="the builder of the model says what is trained",
            named={"model._component_": "method", "model.lora_attn_modules": "lora_target"},
        ),
        settled(
            data,
            "dataset.source dataset.data_files dataset.column dataset.column_map",
            f"dataset.{COMPONENT}",
            options="train_file text_column prompt_column response_column",
            named={
                "dataset._component_": "train_file",
                "dataset.source": "train_file",
                "dataset.data_files": "train_file",
                "dataset.column": "text_column",
            },
        ),
        settled(
            step,
            "batch_size optimizer.weight_decay optimizer.betas lr_scheduler.num_warmup_steps "
            "tokenizer.max_seq_len",
            f"optimizer.{COMPONENT}",
            f"lr_scheduler.{COMPONENT}",
            options="micro_batch optimizer weight_decay lr_schedule warmup_steps max_length",
            text="constant without lr_scheduler; torch's weight decay of 0.01",
            named={
                "batch_size": "micro_batch",
                "optimizer._component_": "optimizer",
                "optimizer.weight_decay": "weight_decay",
                "lr_scheduler._component_": "lr_schedule",
                "lr_scheduler.num_warmup_steps": "warmup_steps",
                "tokenizer.max_seq_len": "max_length",
            },
        ),
        same("grad_accum", "gradient_accumulation_steps"),
        same("lr", "optimizer.lr"),
        same("adam_epsilon", "optimizer.eps"),
        same("momentum", "optimizer.momentum"),
        same("epochs", "epochs"),
        same("grad_clip", "clip_grad_norm", text="never clipped there where it isn't given", empty=0.0),
        same("seed", "seed"),
        same("precision", "dtype", words=precision),
        same("activation_checkpointing", "enable_activation_checkpointing", words=recompute),
        same("compile", "compile", words=is_on),
        same("output_dir", "output_dir"),
        same(
            "tp",
            "tensor_parallel_dim",
            words=lambda value: int(value) if is_on(value) and int(value) > 1 else None,
        ),
        same("train_on_prompt", "dataset.train_on_input", words=is_on),
        differs("max_steps_per_epoch", text="--max-steps is for the whole run"),
        settled(order, "shuffle"),
        differs(
            "tokenizer.prompt_template dataset.new_system_prompt dataset.prompt_template",
            text="the model's own chat template frames prompts",
        ),
        differs(
            "dataset.packed",
            text="a step counts packed rows there, examples here; they are packed here anyway",
        ),
        differs(
            "optimizer.* lr_scheduler.* model.* custom_sharded_layers ac_mode ac_option",
            text="dsrun has no such argument",
        ),
        refused(
            "tasks limit enable_kv_cache max_seq_length max_new_tokens teacher_* prompt* include",
            text="not a fine-tune",
        ),
        refused("quantizer* fake_quant_*", text="training for quantised weights"),
        refused("ref_checkpointer* reward* kl_*", text=NO_RL),
        refused("tensor_parallel_plan*", text="say it as --tp"),
        anyway(
            "model.lora_* tokenizer.* checkpointer.* loss.* loss",
            text="by the model's own folder, and the mean over target tokens",
        ),
        anyway(
            "fsdp_* optimizer_in_bwd enable_activation_offloading enable_async_checkpointing low_cpu_ram "
            "device cudnn_deterministic_mode compile_*",
            text=SPEED,
        ),
        anyway("metric_logger.* log_* profiler.* profiler", text=LOGGED),
        anyway(
            "resume_from_checkpoint save_adapter_weights_only",
            text="a run goes on by `dsrun resume RUN`",
        ),
        anyway(
            "collate_fn dataset.* dataset dataset_val* batch_size_val run_val_every_n_steps",
            text=LOADING,
        ),
        left_out("optimizer.fused", text=SPEED),
    ),
    telling=(
        f"model.{COMPONENT}",
        f"checkpointer.{COMPONENT}",
        f"tokenizer.{COMPONENT}",
        f"dataset.{COMPONENT}",
    ),
    starts=("tune",),
    prepare=flat,
)
