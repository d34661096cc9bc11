"""ms-swift: `swift sft --model ... --dataset ...`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    REFUSED,
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
    images,
    limits,
    named_file,
    packed_step,
    revision,
)

PRESETS = {
    "zero0": "ddp", "zero1": "zero1", "zero2": "zero2", "zero3": "zero3", "zero2_offload": "zero2-offload",
    "zero3_offload": "zero3-offload",
}  # fmt: skip
KIND = ("tuner_type", "train_type", "sft_type")
"""The names that the way of training has had."""


def method(draft: Draft) -> None:
    """The way of training, with the bits that the model is loaded in."""
    kind = str(next((draft.given[key] for key in KIND if is_on(draft.given.get(key))), "lora"))
    if kind not in ("lora", "full"):
        for key in KIND:
            if key in draft.given:
                draft.tell(key, REFUSED, f"{kind}: dsrun trains all weights, LoRA, QLoRA or P-Tuning")
        return
    bits = draft.given.get("quant_bits") or draft.given.get("quantization_bit")
    keys = [key for key in ("quant_bits", "quantization_bit") if is_on(draft.given.get(key))]
    if keys and (kind == "full" or str(bits) != "4"):
        draft.tell(
            keys[0], REFUSED if kind == "full" else DIFFERS, f"{bits} bits: only --method qlora, 4 bits (nf4)"
        )
        keys = []
    draft.put("method", "qlora" if keys else kind, *(key for key in KIND if key in draft.given), *keys)
    lora = {"lora_rank": "lora_rank", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout"}
    for key, option in lora.items():
        if kind == "lora":
            draft.put(option, draft.get(key), key)
        else:
            draft.tell(key, ANYWAY, "counts for LoRA only")
    names = listed(str(draft.given.get("target_modules") or "").replace(" ", ",").strip("[]"))
    target = None if kind != "lora" else "all" if names in ([], ["all-linear"]) else ",".join(names)
    draft.put("lora_target", target, "target_modules")
    start = listed(draft.given.get("adapters"))
    draft.put("adapter", start[0] if start else None, "adapters", text="a new adapter")


def data(draft: Draft) -> None:
    """Data sets with a number of rows behind #; names are ModelScope's unless use_hf says otherwise."""
    for key, option in (("dataset", "train_file"), ("val_dataset", "eval_file")):
        value = draft.given.get(key)
        names = listed(value.replace(" ", ",") if isinstance(value, str) else value)
        if not names:
            continue
        files: list[str] = []
        counts: dict[str, str] = {}
        for name in names:
            path, _, count = name.partition("#")
            hub = not draft.find(path) and "." not in path.rpartition("/")[2]
            if hub and not path.startswith("HF::") and not is_on(draft.given.get("use_hf")):
                draft.notes.append(
                    f"{key}: {path} is a name of ModelScope's: check that the Hub has it, or download it"
                )
            files.append(named_file(draft, path.removeprefix("HF::").removeprefix("MS::").split(":")[0]))
            counts |= {path: count} if count else {}
        draft.put(option, files if option == "train_file" else files[0], key)
        if counts and option == "train_file":
            numbers = set(counts.values())
            if len(numbers) == 1 and len(counts) == len(files):
                draft.put("max_samples", int(numbers.pop()), source=f"{key}: #")
            else:
                draft.notes.append(f"{key}: rows {counts}: --max-samples is one number for all files")
    share = draft.get("split_dataset_ratio")
    draft.put(
        "val_size",
        float(share) if is_on(share) and float(share) > 0 else None,
        "split_dataset_ratio",
        text="none held out",
    )


def columns(draft: Draft) -> None:
    """Columns renamed: {"q": "query"}."""
    value = draft.given.get("columns")
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            value = None
    names: dict[str, Any] = {new: old for old, new in value.items()} if isinstance(value, Mapping) else {}
    draft.put("prompt_column", names.get("query"), "columns")
    draft.put("response_column", names.get("response"), "columns")
    if others := {new: old for new, old in names.items() if new not in ("query", "response")}:
        draft.tell("columns", DIFFERS, f"{others}: rename these in the file")


def lengths(draft: Draft) -> None:
    """max_length, and what a step counts where rows are packed."""
    length = limits(draft, "max_length")
    draft.put(
        "allow_truncation", True, "truncation_strategy", source="longer rows are left out there, and cut here"
    )
    if draft.is_on("packing"):
        packed_step(
            draft, length or 8192, ["packing"], "per_device_train_batch_size", "gradient_accumulation_steps"
        )
    draft.tell(
        "packing", ANYWAY, "rows are packed here, and never see one another"
    ) if "packing" not in draft.outcomes else None
    accumulation = draft.given.get("gradient_accumulation_steps")
    if accumulation is None and "tokens_per_batch" not in draft.options:
        size = int(draft.get("per_device_train_batch_size") or 1)
        draft.put(
            "grad_accum", max(1, 16 // size // draft.gpus), source="as many as make 16 examples a step there"
        )


def model(draft: Draft) -> None:
    """A name is ModelScope's unless use_hf says otherwise."""
    name = draft.model
    if (
        name
        and not name.startswith((".", "/", "modelscope:"))
        and not is_on(draft.given.get("use_hf"))
        and not draft.find(name)
    ):
        draft.model = f"modelscope:{name}"
    draft.tell("use_hf", ANYWAY, "the Hub's names, or modelscope:NAME")


def strategy(draft: Draft) -> None:
    """A name of theirs for a DeepSpeed config is a preset."""
    name = draft.given.get("deepspeed")
    if name in PRESETS:
        draft.put("preset", PRESETS[name], "deepspeed")


def dtype(draft: Draft) -> None:
    """torch_dtype says the precision where neither bf16 nor fp16 does."""
    words = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}
    if not draft.is_on("bf16") and not draft.is_on("fp16"):
        draft.put(
            "precision", words.get(str(draft.given.get("torch_dtype"))), "torch_dtype", text="the model's own"
        )


def kept(draft: Draft) -> None:
    """Loss of every token, or of answers."""
    scale = str(draft.get("loss_scale") or "default")
    if scale == "all":
        draft.put("train_on_prompt", True, "loss_scale")
    else:
        plain = scale in ("default", "last_round")
        text = (
            "answers are trained on" if scale == "default" else f"{scale}: every answer is trained on alike"
        )
        draft.tell("loss_scale", ANYWAY if plain and scale == "default" else DIFFERS, text)


TRAINER = ForeignTrainer(
    "ms-swift",
    "ms-swift",
    (
        settled(model, "use_hf"),
        revision("model_revision"),
        settled(
            method,
            "quant_bits quantization_bit lora_rank lora_alpha lora_dropout target_modules adapters",
            *KIND,
            options="method lora_rank lora_alpha lora_dropout lora_target adapter",
            text="LoRA with 8, 32 and 0.05 is the default there; 8, 16 and 0 here",
            named={
                "tuner_type": "method",
                "train_type": "method",
                "sft_type": "method",
                "quant_bits": "method",
                "quantization_bit": "method",
                "target_modules": "lora_target",
                "adapters": "adapter",
            },
        ),
        settled(
            data,
            "dataset val_dataset split_dataset_ratio",
            options="train_file eval_file val_size max_samples",
            text="A#500 is --max-samples 500",
            named={"dataset": "train_file", "val_dataset": "eval_file", "split_dataset_ratio": "val_size"},
        ),
        settled(
            columns, "columns", options="prompt_column response_column", named={"columns": "prompt_column"}
        ),
        *STEP,
        settled(
            lengths,
            "max_length truncation_strategy packing",
            options="max_length allow_truncation tokens_per_batch",
            text="a step of packed rows is counted in tokens here",
            named={"truncation_strategy": "allow_truncation"},
        ),
        settled(dtype, "torch_dtype", options="precision"),
        settled(kept, "loss_scale", options="train_on_prompt"),
        settled(strategy, "deepspeed", options="preset"),
        same("strict_data", "strict", words=is_on),
        same("attention", "attn_impl", words=attention),
        same("sp", "sequence_parallel_size", words=lambda value: int(value) if int(value) > 1 else None),
        same("thinking", "enable_thinking", words=lambda value: "auto" if is_on(value) else "off"),
        *LORA_VARIANTS,
        differs("system default_system", text="give the rows a column `system`"),
        differs(
            "modules_to_save trainable_parameters* freeze_parameters* target_regex target_parameters "
            "lora_bias lora_dtype",
            text="no other weights are trained beside LoRA's, but new tokens'",
        ),
        differs("new_special_tokens", text="--add-special-tokens"),
        differs(
            "max_model_len rope_scaling model_kwargs max_memory",
            text="the model's config stays as it is",
        ),
        differs(
            "interleave_prob stopping_strategy dataset_shuffle train_dataloader_shuffle val_dataset_shuffle",
            text="rows come in random order; weights: --train-file FILE:2",
        ),
        differs(
            "early_stop_interval router_aux_loss_coef loss_type vit_lr aligner_lr cosine_*",
            text="dsrun has no such thing",
        ),
        refused(
            "advantage_* async_generate center_rewards_coefficient chord_* cliprange* completion_length_limit_scope "
            "decision_* delta discopop_tau ds3_gather_for_generation dynamic_sample epsilon* fipo_* gamma gym_env "
            "importance_sampling_level kl_in_reward lam ld_alpha lmbda local_rollout_* loss_weights "
            "max_completion_length max_resample_times max_turns missing_eos_penalty move_model_batches "
            "multi_turn_scheduler num_generations_eval num_iterations num_mini_batches num_sample_generations "
            "off_policy_* offload_model offload_teacher_model overlong_filter real_tau repetition_max_penalty "
            "repetition_n_grams response_length rlsd_* rollout_* scale_rewards sdar_* seq_kd sft_alpha sleep_level "
            "soft_*_length steps_per_generation structured_outputs_regex sync_ref_model tau_neg tau_pos "
            "top_entropy_quantile use_gym_env use_vllm vf_coef whiten_rewards cached_val_dataset mrl_dims",
            text=NO_RL,
        ),
        differs("label_smoothing", text="label smoothing"),
        differs("max_epochs", text="a run goes to its end: --epochs, --max-steps"),
        differs(
            "preserve_thinking disable_ignore_empty_think",
            text="thoughts go where the chat template has them",
        ),
        differs("is_binary_loss_scale", text="answers are trained on, or not: weight in a message"),
        refused("optimizer callbacks init_strategy", text="code of your own in the trainer"),
        refused("use_swift_lora", text="another kind of LoRA"),
        same("tp", "deepspeed_autotp_size", words=lambda value: int(value) if int(value or 1) > 1 else None),
        anyway(
            "device_groups experts_impl load_from_cache_file local_repo_path offload_optimizer use_flash_ckpt "
            "use_chat_template disable_auto_column_mapping resume_only_model",
            text=SPEED,
        ),
        left_out(
            "eval_metric eval_use_evalscope extra_eval_args min_p", text="evaluations are the held-out file's"
        ),
        refused(
            "rlhf_type ref_* reward_* beta num_generations vllm_mode desirable_weight undesirable_weight "
            "rpo_alpha simpo_* cpo_* teacher_* gkd* ppo_* num_ppo_epochs kl_coef",
            text=NO_RL,
        ),
        refused(
            "galore_* use_galore lisa_* adalora_* vera_* boft_* fourier_* reft_* llamapro_* adapter_act "
            "adapter_length lorap_* bone_* quant_method hqq_*",
            text="another way of training than all weights, LoRA, QLoRA or P-Tuning",
        ),
        refused(
            "task_type num_labels problem_type",
            text="a head for classes: dsrun trains a model that writes the class",
        ),
        refused("streaming cached_dataset* shuffle_buffer_size", text="files are read whole, once"),
        images("freeze_vit freeze_aligner freeze_llm vit_* max_pixels image_* video_*"),
        anyway(
            "template agent_template template_backend response_prefix norm_bbox padding_side padding_free",
            text="the model's own chat template frames prompts",
        ),
        anyway(
            "model_type bnb_4bit_* device_map check_model add_non_thinking_prefix",
            text="by the model's config; what the devices do best",
        ),
        anyway(
            "add_version create_checkpoint_symlink use_logits_to_keep acc_* load_args ignore_args_error "
            "load_data_args dataset_* packing_* lazy_tokenize remove_unused_columns truncation_* "
            "max_shard_size safe_serialization tuner_backend enable_* download_mode data_seed",
            text=SPEED,
        ),
        left_out(
            "swanlab_* wandb_* hub_* use_ray ray_* external_plugins custom_* model_author model_name "
            "zero_hpz_partition_size eval_dataset* eval_limit eval_generation_config vllm_* temperature top_k "
            "top_p max_new_tokens stream stop_words num_beams repetition_penalty logprobs top_logprobs "
            "infer_*",
            text="dsrun has its own way, or none",
        ),
        *RUNNING,
    ),
    model="model",
    telling=(
        "tuner_type",
        "train_type",
        "split_dataset_ratio",
        "quant_bits",
        "target_modules",
        "torch_dtype",
    ),
    starts=("swift", "megatron"),
    prepare=lambda values: {
        ("model" if key == "model_id_or_path" else key): value for key, value in values.items()
    },
)
