"""LLaMA-Factory: `llamafactory-cli train FILE.yaml`."""

from __future__ import annotations

from typing import Any

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    LEFT_OUT,
    REFUSED,
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
from dsrun.trainers.datasets import of_llama_factory
from dsrun.trainers.tables.hf import (
    FP8,
    LORA_VARIANTS,
    NO_RL,
    OWN_TEMPLATE,
    RUNNING,
    SPEED,
    STEP,
    attention,
    images,
    limits,
    packed_step,
    revision,
)


def stage(draft: Draft) -> None:
    """sft and pt are the data's affair here; the others are other kinds of training."""
    value = str(draft.get("stage") or "sft")
    if value not in ("sft", "pt"):
        draft.tell("stage", REFUSED, f"{value}: {NO_RL}")
        return
    draft.tell("stage", ANYWAY, "rows with answers are fine-tuning, rows of text are pre-training")
    if value == "pt":
        draft.put("data_format", "text", "stage")


def method(draft: Draft) -> None:
    """What is trained: finetuning_type with the bits that the model is loaded in."""
    kind, bits = str(draft.get("finetuning_type") or "lora"), draft.given.get("quantization_bit")
    keys = ("finetuning_type", "quantization_bit")
    if kind not in ("lora", "full"):
        draft.tell("finetuning_type", REFUSED, f"{kind}: dsrun trains all weights, LoRA, QLoRA or P-Tuning")
        return
    if is_on(bits) and kind == "full":
        draft.tell("quantization_bit", REFUSED, "weights in few bits can't be trained whole")
    elif (
        is_on(bits)
        and str(bits) == "4"
        and str(draft.get("quantization_method") or "bnb").lower() in ("bnb", "bitsandbytes")
    ):
        draft.put("method", "qlora", *keys)
        draft.tell("quantization_method", ANYWAY, "bitsandbytes' nf4")
    else:
        draft.put("method", kind, "finetuning_type")
        if is_on(bits):
            draft.tell(
                "quantization_bit",
                DIFFERS,
                f"{bits} bits: --method qlora has 4 (nf4), lora keeps the weights in 16",
            )


def adapter(draft: Draft) -> None:
    """LoRA's own arguments; alpha is twice the rank where it isn't given."""
    if str(draft.get("finetuning_type") or "lora") != "lora":
        for key in ("lora_rank", "lora_alpha", "lora_dropout", "lora_target", "adapter_name_or_path"):
            draft.tell(key, ANYWAY, "counts for LoRA only")
        return
    rank = draft.get("lora_rank") or 8
    draft.put("lora_rank", rank, "lora_rank")
    alpha = draft.given.get("lora_alpha")
    draft.put(
        "lora_alpha",
        float(alpha or 2 * int(rank)),
        "lora_alpha",
        source="" if alpha else "twice the rank there",
    )
    draft.put("lora_dropout", draft.get("lora_dropout"), "lora_dropout")
    target = draft.get("lora_target")
    target = ",".join(target) if isinstance(target, list) else str(target)
    draft.put("lora_target", target, "lora_target")
    if start := draft.given.get("adapter_name_or_path"):
        found = draft.find(str(start))
        draft.put("adapter", str(found.absolute()) if found else str(start), "adapter_name_or_path")


def recomputing(draft: Draft) -> None:
    """Gradient checkpointing is on there unless it is switched off."""
    off = draft.is_on("disable_gradient_checkpointing")
    way = "none" if off else "full"
    draft.put(
        "activation_checkpointing",
        way,
        "disable_gradient_checkpointing",
        source="" if off else "on there by itself",
    )
    for key in ("gradient_checkpointing", "use_reentrant_gc", "use_unsloth_gc"):
        draft.tell(key, ANYWAY, SPEED)


def lengths(draft: Draft) -> None:
    """cutoff_len, and what a step counts where rows are packed."""
    length = limits(draft, "cutoff_len")
    draft.put("allow_truncation", True, source="longer rows are cut there, too")
    packs = draft.is_on("packing") or draft.is_on("neat_packing") or str(draft.get("stage")) == "pt"
    if packs and draft.given.get("packing") is not False:
        keys = [key for key in ("packing", "neat_packing") if key in draft.given]
        packed_step(draft, length, keys, "per_device_train_batch_size", "gradient_accumulation_steps")
    for key in ("packing", "neat_packing"):
        if key not in draft.outcomes:
            draft.tell(
                key, ANYWAY, "rows are packed here, and never see one another: the losses are those without"
            )


def template(draft: Draft) -> None:
    """The prompt's frame: a list of names there, the model's own chat template here."""
    draft.tell("template", LEFT_OUT, OWN_TEMPLATE)
    if (thinking := draft.given.get("enable_thinking")) is not None:
        draft.put("thinking", "auto" if is_on(thinking) else "off", "enable_thinking")


def own_optimizers(draft: Draft) -> None:
    """use_muon is an optimizer of dsrun's, too."""
    if draft.is_on("use_muon"):
        draft.put("optimizer", "muon", "use_muon")
        draft.put("grad_clip", 0.0, source="Muon's update isn't clipped here")


def tokens(value: Any) -> list[str]:
    """New tokens, one option each."""
    names = [name.strip() for name in value.split(",")] if isinstance(value, str) else list(value)
    if not names:
        raise UnlikeError("names no token")
    return [",".join(map(str, names))]


def swanlab(draft: Draft) -> None:
    """SwanLab beside the trackers of report_to."""
    if draft.is_on("use_swanlab"):
        before = draft.options.get("log")
        draft.put("log", [*(before.value if before else []), "swanlab"], "use_swanlab")
        draft.put("log_project", draft.given.get("swanlab_project"), "swanlab_project")


TRAINER = ForeignTrainer(
    "llama-factory",
    "LLaMA-Factory",
    (
        settled(
            stage,
            "stage",
            options="data_format",
            text="rows with answers are fine-tuning, rows with a `text` are pre-training; no rm, ppo, dpo, kto",
        ),
        settled(
            method,
            "finetuning_type quantization_bit quantization_method",
            options="method",
            text="LoRA is the default there, all weights here; of few bits only bitsandbytes' 4 (nf4)",
        ),
        settled(
            adapter,
            "lora_rank lora_alpha lora_dropout lora_target adapter_name_or_path",
            options="lora_rank lora_alpha lora_dropout lora_target adapter",
            text="alpha is twice the rank there, 16 here",
            named={"adapter_name_or_path": "adapter"},
        ),
        settled(
            of_llama_factory,
            "dataset eval_dataset dataset_dir",
            options="train_file eval_file",
            text="files by their paths, not entries of dataset_info.json",
            named={"dataset": "train_file", "eval_dataset": "eval_file"},
        ),
        same("val_size", "val_size", words=lambda value: value if is_on(value) else None),
        same("max_samples", "max_samples"),
        *STEP,
        settled(
            lengths,
            "cutoff_len packing neat_packing",
            options="max_length tokens_per_batch",
            text="the same limit; a step of packed rows is counted in tokens here",
            named={"cutoff_len": "max_length"},
        ),
        settled(
            template,
            "template enable_thinking",
            options="thinking chat_template",
            text="there a list of names, here the model's own chat template",
            named={"template": "chat_template", "enable_thinking": "thinking"},
        ),
        settled(
            recomputing,
            "disable_gradient_checkpointing gradient_checkpointing use_reentrant_gc use_unsloth_gc",
            options="activation_checkpointing",
            text="on there by itself",
        ),
        settled(own_optimizers, "use_muon", options="optimizer"),
        settled(
            swanlab,
            "use_swanlab swanlab_project",
            options="log log_project",
            named={"use_swanlab": "log", "swanlab_project": "log_project"},
        ),
        same("train_on_prompt", "train_on_prompt", words=is_on),
        same("attention", "flash_attn", words=attention),
        same("add_special_tokens", "add_special_tokens", words=tokens),
        anyway("plot_loss", text="loss.png is always there"),
        *LORA_VARIANTS,
        differs(
            "mask_history",
            text="every answer of a conversation is trained on; weight: 0 in a message leaves one out",
        ),
        differs("add_tokens", text="tokens that aren't special: --add-special-tokens has special ones"),
        differs("default_system", text="give the rows a column `system`"),
        differs("interleave_probs mix_strategy", text="weights of files: --train-file FILE:2"),
        differs("disable_shuffling", text="rows come in random order"),
        differs(
            "rope_scaling model_max_length shift_attn",
            text="the model's positions stay as its config has them",
        ),
        differs(
            "resize_vocab new_special_tokens_config init_special_tokens",
            text="--add-special-tokens grows the embeddings, to their mean",
        ),
        differs("pure_bf16 upcast_layernorm", text="weights are kept in fp32 by the optimizer"),
        differs("additional_target", text="no other modules are trained beside LoRA's, but new tokens'"),
        differs("create_new_adapter adapter_folder", text="--adapter goes on with one adapter"),
        differs("split_special_tokens", text="special tokens in your data stay text, as there with true"),
        differs(
            "use_dft_loss use_eaft_loss use_asft_loss asft_alpha eaft_alpha dft_alpha",
            text="another loss",
        ),
        differs("moe_aux_loss_coef", text="a mixture's router loss is the model's own"),
        differs("early_stopping_steps", text="a run goes to its end; --keep-best keeps the best model"),
        differs("tool_format", text="what the chat template writes"),
        refused(
            "use_galore galore_* use_apollo apollo_* use_badam badam_* use_adam_mini",
            text="an optimizer that dsrun doesn't have",
        ),
        refused(
            "use_llama_pro freeze_trainable_* freeze_extra_modules mixture_of_depths oft_* module_dropout",
            text="another way of training than all weights, LoRA, QLoRA or P-Tuning",
        ),
        FP8,
        refused(
            "use_mca tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size "
            "sequence_parallel context_parallel_size *_parallel_size virtual_pipeline_* recompute_granularity "
            "moe_grouped_gemm moe_token_dispatcher_type overlap_* bias_activation_fusion apply_rope_fusion "
            "use_distributed_optimizer",
            text="Megatron's engine: here --tp, --sp, --pp, --ep",
        ),
        refused("use_unsloth", text="unsloth's engine: DeepSpeed or FSDP here"),
        refused("use_kt kt_* cpu_infer chunk_size", text="KTransformers' engine"),
        refused("tokenized_path", text="rows that are tokenised already: name the file of their texts"),
        refused("train_from_scratch", text="a model of random weights is a model file (presets/models)"),
        refused("streaming buffer_size", text="files are read whole, once; of the Hub name a split"),
        refused("reward_model* ref_model* pref_* ppo_* kto_* dpo_* simpo_* ld_alpha", text=NO_RL),
        images(
            "image_* video_* audio_* use_audio_in_video crop_to_patches media_dir freeze_vision_tower "
            "freeze_multi_modal_projector freeze_language_model",
        ),
        anyway(
            "trust_remote_code",
            text="code of a repository is never run; what transformers has needs none",
        ),
        anyway(
            "overwrite_cache preprocessing_* cache_dir download_mode data_shared_file_system tokenized_* "
            "use_fast_tokenizer low_cpu_mem_usage",
            text="prepared rows are kept in a cache by their content",
        ),
        anyway("ignore_pad_token_for_loss block_diag_attn batch_size mode seed_*", text="dsrun does so"),
        anyway(
            "double_quantization quantization_type quantization_device_map use_v1_kernels device_map "
            "compute_dtype upcast_lmhead_output",
            text=SPEED,
        ),
        left_out(
            "eval_on_each_dataset compute_accuracy print_param_status n_shot task task_dir lang save_dir",
            text="evaluations here are the held-out file's loss and scores",
        ),
        revision("model_revision"),
        left_out("*_hub_token swanlab_*", text="the packages' own variables"),
        left_out("export_*", text="the model is exported at the end; others by `dsrun export`"),
        left_out(
            "infer_* vllm_* sglang_* max_new_tokens max_length temperature top_k top_p do_sample num_beams "
            "eval_num_beams repetition_penalty length_penalty skip_special_tokens use_kv_cache offload_folder",
            text="how answers are generated: options of `dsrun chat` and `evaluate`",
        ),
        left_out(
            "ray_* placement_strategy resources_per_worker",
            text="Ray's; hosts are --hosts, or `dsrun submit`",
        ),
        *RUNNING,
    ),
    model="model_name_or_path",
    telling=("finetuning_type", "stage", "template", "cutoff_len", "dataset_dir", "lora_target", "plot_loss"),
    starts=("llamafactory-cli", "lmf"),
)
