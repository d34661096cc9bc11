"""TRL: `trl sft --model_name_or_path ...`, or a YAML with the same arguments."""

from __future__ import annotations

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    Draft,
    ForeignTrainer,
    anyway,
    differs,
    is_on,
    left_out,
    refused,
    same,
    settled,
)
from dsrun.trainers.datasets import listed
from dsrun.trainers.tables.hf import (
    LORA_VARIANTS,
    NO_RL,
    RUNNING,
    SPEED,
    STEP,
    attention,
    limits,
    named_file,
    named_files,
    packed_step,
    revision,
)

WHOLE = (
    "rows of `messages` are trained on whole in TRL unless assistant_only_loss is on, prompts and roles too; here "
    "answers alone are. --train-on-prompt trains prompts, too."
)
LORA = {"lora_r": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}


def method(draft: Draft) -> None:
    """use_peft, with the bits that the model is loaded in."""
    peft, four = draft.is_on("use_peft"), draft.is_on("load_in_4bit")
    draft.put(
        "method",
        "qlora" if peft and four else "lora" if peft else "full",
        "use_peft",
        *(("load_in_4bit",) if peft and four else ()),
    )
    for key in ("load_in_4bit", "load_in_8bit"):
        if key not in draft.outcomes:
            on = draft.is_on(key)
            draft.tell(
                key, DIFFERS if on else ANYWAY, "weights stay in 16 bits, but with qlora" if on else "is off"
            )
    for key, option in LORA.items():
        if peft:
            draft.put(option, draft.get(key), key)
        else:
            draft.tell(key, ANYWAY, "counts with use_peft only")
    names = listed(draft.given.get("lora_target_modules"))
    target = ",".join(names) if names and names != ["all-linear"] else "all"
    draft.put("lora_target", target if peft else None, "lora_target_modules", text="all linear layers")


def data(draft: Draft) -> None:
    """A set of the Hub, or files."""
    hub, files = draft.given.get("dataset_name"), listed(draft.given.get("train_file"))
    if is_on(hub):
        config = draft.given.get("dataset_config") or draft.given.get("dataset_config_name")
        split = draft.given.get("dataset_train_split")
        files = named_files(draft, str(hub))
        if files[0].startswith("hf:"):
            files[0] += f"/{config}" if is_on(config) else ""
            files[0] += f"#{split}" if is_on(split) and split != "train" else ""
        draft.put(
            "train_file",
            files,
            "dataset_name",
            *(
                key
                for key in ("dataset_config", "dataset_config_name", "dataset_train_split")
                if key in draft.given
            ),
        )
    elif files:
        draft.put("train_file", [named_file(draft, file) for file in files], "train_file")
    tests = draft.given.get("dataset_test_split")
    if (
        is_on(hub)
        and "dataset_test_split" in draft.given
        and is_on(tests)
        and str(draft.get("eval_strategy") or "no") != "no"
    ):
        draft.put("eval_file", f"{named_file(draft, str(hub))}#{tests}", "dataset_test_split")
    elif "dataset_test_split" in draft.given:
        draft.tell("dataset_test_split", ANYWAY, "counts where eval_strategy asks for it")
    held_out = draft.given.get("validation_file")
    draft.put(
        "eval_file",
        named_file(draft, str(held_out)) if is_on(held_out) else None,
        *(("validation_file",) if held_out else ()),
    )
    share = draft.given.get("validation_split_percentage")
    draft.put(
        "val_size",
        float(share) / 100 if share else None,
        *(("validation_split_percentage",) if share else ()),
    )


def lengths(draft: Draft) -> None:
    """max_length, and what a step counts where rows are packed."""
    length = limits(draft, "max_length", "max_seq_length", "block_size")
    draft.put("allow_truncation", True, source="longer rows are cut there, too")
    if draft.is_on("packing"):
        packed_step(draft, length, ["packing"], "per_device_train_batch_size", "gradient_accumulation_steps")
    else:
        draft.tell(
            "packing", ANYWAY, "rows are packed here, and never see one another: the losses are those without"
        )


def trained_on(draft: Draft) -> None:
    """TRL's two switches for answers alone: one for prompts with completions (on), one for messages (off)."""
    for key, on_by_itself in (("completion_only_loss", True), ("assistant_only_loss", False)):
        value = draft.given.get(key)
        whole = value is not None and not draft.is_on(key)
        if whole and on_by_itself:
            draft.put("train_on_prompt", True, key)
        elif value is not None:
            draft.tell(
                key, ANYWAY if not whole else DIFFERS, WHOLE if whole else "answers alone are trained on"
            )
    told = "assistant_only_loss" in draft.given or "train_on_prompt" in draft.options
    if draft.trainer.name == "trl" and not told:
        draft.notes.append(WHOLE)


def precision(draft: Draft) -> None:
    """bf16 is on in TRL unless fp16 is, or it is switched off."""
    if draft.trainer.name == "trl" and draft.given.get("bf16") is None and not draft.is_on("fp16"):
        draft.put("precision", "bf16", source="on there by itself")


TRAINER = ForeignTrainer(
    "trl",
    "TRL",
    (
        settled(
            method,
            "use_peft load_in_4bit load_in_8bit lora_target_modules",
            *LORA,
            options="method lora_rank lora_alpha lora_dropout lora_target",
            text="LoRA has 16, 32 and 0.05 there; 8, 16 and 0 here",
            named={
                "use_peft": "method",
                "load_in_4bit": "method",
                "lora_r": "lora_rank",
                "lora_target_modules": "lora_target",
            },
        ),
        settled(
            data,
            "dataset_name dataset_config dataset_config_name dataset_train_split dataset_test_split "
            "train_file validation_file validation_split_percentage",
            options="train_file eval_file val_size",
            text="files, or hf:OWNER/NAME/SUBSET#SPLIT",
            named={
                "dataset_name": "train_file",
                "dataset_config": "train_file",
                "dataset_train_split": "train_file",
                "dataset_test_split": "eval_file",
                "validation_file": "eval_file",
                "validation_split_percentage": "val_size",
            },
        ),
        same("val_size", "test_split_size"),
        same("max_samples", "max_train_samples"),
        *STEP,
        settled(precision, "bf16", options="precision"),
        settled(
            lengths,
            "max_length max_seq_length block_size packing",
            options="max_length tokens_per_batch",
            text="a step of packed rows is counted in tokens here",
            named={"max_seq_length": "max_length", "block_size": "max_length"},
        ),
        same("text_column", "dataset_text_field", words=lambda value: value if value != "text" else None),
        same("attention", "attn_implementation", words=attention),
        same("chat_template", "chat_template_path"),
        *LORA_VARIANTS,
        settled(
            trained_on,
            "completion_only_loss assistant_only_loss",
            options="train_on_prompt",
            text="messages are trained on whole there, unless assistant_only_loss says otherwise; answers alone here",
        ),
        differs(
            "lora_modules_to_save lora_target_parameters additional_trainable_*",
            text="no other weights are trained beside LoRA's, but new tokens'",
        ),
        differs("eos_token pad_token tokenizer_name", text="the model's own tokenizer says it"),
        differs(
            "truncation_mode loss_type router_aux_loss_coef model_init_kwargs config_* dataset_kwargs shuffle_dataset",
            text="the end is cut, rows come in random order, and the loss is the mean over target tokens",
        ),
        revision("model_revision"),
        differs("datasets dataset_streaming streaming", text="name the files: --train-file"),
        refused("model_adapter_name ref_* reward_* beta precompute_ref_*", text=NO_RL),
        anyway(
            "trust_remote_code revision use_fast_tokenizer cache_dir overwrite_cache "
            "keep_linebreaks low_cpu_mem_usage dtype torch_dtype use_bnb_nested_quant bnb_4bit_* "
            "lora_task_type packing_strategy padding_free eval_packing pad_to_multiple_of "
            "activation_offloading max_eval_samples ignore_verifications gradient_checkpointing_kwargs",
            text=SPEED,
        ),
        left_out(
            "host port vllm_* enforce_eager kv_cache_dtype gpu_memory_utilization enable_prefix_caching "
            "max_model_len data_parallel_size tensor_parallel_size distributed_executor_backend "
            "speculative_config model token use_auth_token config accelerate_config",
            text="of other commands of TRL's",
        ),
        *RUNNING,
    ),
    model="model_name_or_path",
    telling=(
        "use_peft",
        "dataset_name",
        "dataset_text_field",
        "lora_r",
        "dataset_train_split",
    ),
    starts=("trl",),
)
