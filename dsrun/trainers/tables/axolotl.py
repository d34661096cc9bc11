"""axolotl: `axolotl train FILE.yaml`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    LEFT_OUT,
    REFUSED,
    SAME,
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
from dsrun.trainers.tables.hf import (
    FP8,
    LOADING,
    LOGGED,
    LORA_VARIANTS,
    NO_RL,
    OWN_TEMPLATE,
    SPEED,
    attention,
    evaluation,
    images,
    limits,
    named_file,
    optimizer,
    packed_step,
    precision,
    recompute,
    revision,
    saving,
    schedule,
    strategy,
    whole_steps,
)

NAMES = re.compile(r"[\w.]+")
SPLIT_SHARE = re.compile(r"(?P<split>[\w.-]+)\[(?P<range>[^\]]*)\]")
TYPES = {
    "alpaca": "alpaca",
    "sharegpt": "sharegpt",
    "completion": "text",
    "pretrain": "text",
    "chat_template": "messages",
}
"""Kinds of data sets that dsrun has a format for."""


def method(draft: Draft) -> None:
    """adapter, with the bits that the model is loaded in."""
    adapter, bits = draft.given.get("adapter"), ("load_in_4bit", "load_in_8bit")
    if adapter not in (None, "", "lora", "qlora"):
        draft.tell("adapter", REFUSED, f"{adapter}: dsrun trains all weights, LoRA, QLoRA or P-Tuning")
        return
    four, eight = (draft.is_on(key) for key in bits)
    way = "qlora" if adapter == "qlora" or (adapter == "lora" and four) else (adapter or "full")
    draft.put(
        "method",
        way,
        "adapter",
        *(("load_in_4bit",) if four else ()),
        source="" if adapter else "no adapter: all weights",
    )
    if adapter is None and (four or eight):
        draft.tell(bits[0] if four else bits[1], REFUSED, "weights in few bits can't be trained whole")
    elif eight and way != "qlora":
        draft.tell(
            "load_in_8bit", DIFFERS, "8 bits: --method qlora has 4 (nf4), lora keeps the weights in 16"
        )
    for key in bits:
        if key not in draft.outcomes:
            draft.tell(key, ANYWAY, "qlora loads 4 bits" if way == "qlora" else "is off")
    draft.tell("adapter", SAME, "method")


def lora(draft: Draft) -> None:
    """LoRA's own arguments."""
    keys = (
        "lora_r",
        "lora_alpha",
        "lora_dropout",
        "lora_target_linear",
        "lora_target_modules",
        "lora_model_dir",
    )
    if not is_on(draft.given.get("adapter")):
        for key in keys:
            draft.tell(key, ANYWAY, "counts with an adapter only")
        return
    draft.put("lora_rank", draft.given.get("lora_r"), "lora_r")
    draft.put("lora_alpha", draft.given.get("lora_alpha"), "lora_alpha")
    draft.put("lora_dropout", draft.get("lora_dropout"), "lora_dropout")
    _target(draft)
    start = draft.given.get("lora_model_dir")
    found = draft.find(str(start)) if start else None
    draft.put("adapter", str(found.absolute()) if found else start, "lora_model_dir", text="a new adapter")


def _target(draft: Draft) -> None:
    value = draft.given.get("lora_target_modules")
    names = [value] if isinstance(value, str) else list(value or ())
    linear = draft.is_on("lora_target_linear")
    if names == ["all-linear"] or linear:
        draft.put("lora_target", "all", "lora_target_linear")
        draft.tell("lora_target_modules", ANYWAY, "among all linear layers")
    elif names and all(NAMES.fullmatch(str(name)) for name in names):
        draft.put(
            "lora_target", ",".join(str(name).rpartition(".")[2] for name in names), "lora_target_modules"
        )
        draft.tell("lora_target_linear", ANYWAY, "is off")
    elif names:
        kind = DIFFERS
        draft.tell(
            "lora_target_modules",
            kind,
            "a pattern: --lora-target takes names, and stays at all linear layers",
        )
        draft.tell("lora_target_linear", ANYWAY, "all linear layers")
    else:
        draft.tell("lora_target_modules", ANYWAY, "is empty")
        draft.tell("lora_target_linear", ANYWAY, "is off")


BUILDERS = ("json", "csv", "parquet", "text")
"""Names of `load_dataset` that are no data set: the files stand under data_files."""


def data(draft: Draft) -> None:
    """`datasets` and `test_datasets`: files or sets of the Hub, and what a row of them is."""
    for key, option in (
        ("datasets", "train_file"),
        ("test_datasets", "eval_file"),
        ("pretraining_dataset", "train_file"),
    ):
        value = draft.given.get(key)
        entries = [value] if isinstance(value, (Mapping, str)) else list(value or ())
        files = [name for entry in entries for name in _files(draft, key, entry)]
        if not files or draft.outcomes.get(key) is not None:
            continue
        draft.put(option, files if option == "train_file" else files[0], key)
        if len(files) > 1 and {"prompt_column", "text_column"} & draft.options.keys():
            draft.notes.append(
                f"{key}: one of them names columns, and dsrun reads those of all files: give all the same"
            )
        if option == "eval_file" and len(files) > 1:
            draft.tell(key, DIFFERS, f"dsrun has one held-out file: {', '.join(files[1:])} left out")
        if key == "pretraining_dataset":
            draft.put("data_format", "text", key)


def _files(draft: Draft, key: str, entry: Any) -> list[str]:
    if isinstance(entry, str):
        return [named_file(draft, entry)]
    if not isinstance(entry, Mapping) or not entry.get("path"):
        draft.tell(key, DIFFERS, f"{entry}: names no path; say it with {'train_file'} = [...]")
        return []
    kind = entry.get("type")
    if isinstance(kind, str) and (fault := _other_kind(kind)):
        draft.tell(key, REFUSED, f"{entry['path']}: type {kind}: {fault}")
        return []
    parts = entry.get("data_files")
    files = [parts] if isinstance(parts, str) else list(map(str, parts or ()))
    if files and entry["path"] in BUILDERS:
        _rows(draft, key, entry)
        return [named_file(draft, file) for file in files]
    if files:
        draft.notes.append(
            f"{key}: {entry['path']}: data_files {', '.join(files)}: download them, and name each"
        )
    name = named_file(draft, str(entry["path"]))
    if name.startswith("hf:"):
        name += f"/{entry['name']}" if entry.get("name") else ""
        name += _split(str(entry.get("split") or "train"))
    _rows(draft, key, entry)
    return [name]


def _split(split: str) -> str:
    """A split of the Hub's; a part of one in brackets goes to `datasets` as it is."""
    return "" if split == "train" else f"#{split}"


def _other_kind(kind: str) -> str:
    if kind.split(".", maxsplit=1)[0].split(":", maxsplit=1)[0] in (
        *TYPES,
        "input_output",
        "pygmalion",
        "context_qa",
        "summarizetldr",
        "jeopardy",
    ):
        return ""
    if kind.startswith(
        ("llama3.ultra", "chatml.", "bradley_terry", "stepwise", "kto", "orpo", "rwd", "ebft")
    ):
        return NO_RL
    return "a form of rows that dsrun doesn't read: write them as messages"


def _rows(draft: Draft, key: str, entry: Mapping[str, Any]) -> None:
    """What a row is: dsrun tells it by the columns; columns of other names are said."""
    kind = entry.get("type")
    if isinstance(kind, Mapping):
        prompt, response = kind.get("field_instruction"), kind.get("field_output")
        if prompt and response and not is_on(kind.get("field_input")):
            draft.put("prompt_column", prompt, source=f"{key}: type")
            draft.put("response_column", response, source=f"{key}: type")
        if others := {
            name: value for name, value in kind.items() if name not in ("field_instruction", "field_output")
        }:
            draft.notes.append(
                f"{key}: {entry['path']}: the prompt's frame is the chat template's here, not {others}"
            )
    field = entry.get("field")
    if isinstance(kind, str) and kind.startswith("completion"):
        draft.put("text_column", field or "text", source=f"{key}: type completion")
    column = entry.get("field_messages")
    if column and column not in ("messages", "conversations", "conversation"):
        draft.notes.append(f"{key}: {entry['path']}: messages stand in column {column!r}; call it messages")
    if (shards := entry.get("shards")) and entry.get("shards_idx") is None:
        draft.notes.append(
            f"{key}: {entry['path']}: the first of {shards} parts there, all rows here (--max-samples takes fewer)"
        )
    read = {"path", "type", "split", "name", "field", "field_messages", "data_files", "ds_type", "shards"}
    if more := {name: value for name, value in entry.items() if name not in read and is_on(value)}:
        draft.notes.append(
            f"{key}: {entry['path']}: dsrun reads the roles of messages by itself, without {more}"
        )


def lengths(draft: Draft) -> None:
    """sequence_len, and what a step counts where rows are packed."""
    length = limits(draft, "sequence_len")
    draft.put("allow_truncation", True, source="longer rows are left out there, and cut here")
    accumulation = "gradient_accumulation_steps"
    if draft.is_on("sample_packing"):
        packed_step(draft, length, ["sample_packing"], "micro_batch_size", accumulation)
    else:
        draft.put("micro_batch", draft.get("micro_batch_size"), "micro_batch_size")
        draft.put("grad_accum", draft.get(accumulation), accumulation)
        draft.tell(
            "sample_packing",
            ANYWAY,
            "rows are packed here, and never see one another: the losses are those without",
        )


def batch(draft: Draft) -> None:
    """batch_size, the older word for all examples of a step."""
    if is_on(draft.given.get("batch_size")):
        draft.options.pop("grad_accum", None)
        draft.put("global_batch", draft.given["batch_size"], "batch_size")


def special_tokens(draft: Draft) -> None:
    """A padding token is the tokenizer's affair; others change what is trained."""
    value = draft.given.get("special_tokens")
    value = value if isinstance(value, Mapping) else {}
    others = {name: token for name, token in value.items() if name != "pad_token" and is_on(token)}
    if others:
        draft.tell("special_tokens", DIFFERS, f"{others}: the tokenizer's own special tokens are used")
    else:
        draft.tell("special_tokens", ANYWAY, "rows are packed, or padded with a token that isn't trained on")
    tokens = draft.given.get("tokens")
    draft.put("add_special_tokens", [",".join(map(str, tokens))] if tokens else None, "tokens", text="none")


def steps(draft: Draft) -> None:
    """Schedule, optimizer, checkpoints and evaluation, under the Trainer's names or axolotl's."""
    schedule(draft, "lr_scheduler")
    optimizer(draft, "optimizer")
    for key, per in (("saves_per_epoch", "--save-steps"), ("evals_per_epoch", "--eval-steps")):
        draft.tell(
            key,
            LEFT_OUT if is_on(draft.given.get(key)) else ANYWAY,
            f"times an epoch: {per} counts steps" if is_on(draft.given.get(key)) else "is off",
        )
    if is_on(draft.given.get("save_steps")):
        saving(draft)
    evaluation(draft)
    precision(draft) if not draft.is_on("bfloat16") else draft.put("precision", "bf16", "bfloat16")


def trackers(draft: Draft) -> None:
    """Where curves are shown: each tracker has its own keys."""
    names: list[str] = []
    projects = {
        "wandb": "wandb_project",
        "swanlab": "swanlab_project",
        "mlflow": "mlflow_experiment_name",
        "trackio": "trackio_project_name",
    }
    for name, project in projects.items():
        if is_on(draft.given.get(project)) or is_on(draft.given.get(f"use_{name}")):
            names.append(name)
            draft.put("log_project", draft.given.get(project), project)
            draft.tell(f"use_{name}", SAME, "log")
    if is_on(draft.given.get("use_tensorboard")):
        names.append("tensorboard")
        draft.tell("use_tensorboard", SAME, "log")
    if names:
        draft.put("log", names, source="the file's trackers")


def template(draft: Draft) -> None:
    """A named template there is a list of theirs; the model's own is taken here."""
    name = draft.given.get("chat_template")
    file = draft.given.get("chat_template_jinja")
    if is_on(file):
        found = draft.find(str(file)) if len(str(file)) < 200 else None
        if found:
            draft.put("chat_template", str(found.absolute()), "chat_template_jinja")
        else:
            draft.tell(
                "chat_template_jinja",
                DIFFERS,
                "a template in the file: write it into one of its own, --chat-template FILE",
            )
    if name in (None, "tokenizer_default", "jinja") or str(name).startswith("tokenizer_default"):
        draft.tell("chat_template", ANYWAY, "the model's own chat template")
    else:
        draft.tell("chat_template", LEFT_OUT, f"{name}: {OWN_TEMPLATE}")


EXPERTS = "ExpertParallelPlugin"
"""The plugin that divides experts over ranks."""


def plugins(draft: Draft) -> None:
    """Plugins by their last name: some only compute faster, others train otherwise."""
    value = draft.given.get("plugins")
    names = [str(name).rpartition(".")[2] for name in ([value] if isinstance(value, str) else value or ())]
    plain = {"CutCrossEntropyPlugin", "LigerPlugin", "KernelsPlugin", "SwanLabPlugin", "LMEvalPlugin"}
    others = [name for name in names if name not in plain | {EXPERTS}]
    if EXPERTS in names and (
        draft.is_on("adapter") or draft.is_on("fsdp_config") or draft.is_on("fsdp_version")
    ):
        draft.tell(
            "plugins",
            REFUSED,
            f"{EXPERTS}: --ep divides experts whose weights are all trained, not under FSDP",
        )
    elif others:
        draft.tell("plugins", REFUSED, f"{', '.join(others)}: another way of training")
    else:
        draft.tell(
            "plugins",
            ANYWAY,
            "dsrun's loss takes its tokens in tiles, and liger-kernel where GPU and model have it",
        )


TRAINER = ForeignTrainer(
    "axolotl",
    "axolotl",
    (
        settled(
            method,
            "adapter load_in_4bit load_in_8bit",
            options="method",
            text="of few bits only 4 (nf4)",
        ),
        settled(
            lora,
            "lora_r lora_alpha lora_dropout lora_target_linear lora_target_modules lora_model_dir",
            options="lora_rank lora_alpha lora_dropout lora_target adapter",
            text="names, not patterns",
            named={
                "lora_r": "lora_rank",
                "lora_target_linear": "lora_target",
                "lora_target_modules": "lora_target",
                "lora_model_dir": "adapter",
            },
        ),
        settled(
            data,
            "datasets test_datasets pretraining_dataset",
            options="train_file eval_file data_format",
            text="files and sets of the Hub; what a row is, its columns say",
            named={
                "datasets": "train_file",
                "test_datasets": "eval_file",
                "pretraining_dataset": "train_file",
            },
        ),
        same(
            "val_size",
            "val_set_size",
            words=lambda value: value if is_on(value) and float(value) > 0 else None,
        ),
        settled(
            lengths,
            "sequence_len sample_packing micro_batch_size gradient_accumulation_steps",
            options="max_length tokens_per_batch micro_batch grad_accum",
            text="a step of packed rows is counted in tokens here",
            named={
                "sequence_len": "max_length",
                "micro_batch_size": "micro_batch",
                "gradient_accumulation_steps": "grad_accum",
            },
        ),
        settled(batch, "batch_size", options="global_batch"),
        same("epochs", "num_epochs"),
        same("max_steps", "max_steps", words=whole_steps),
        same("lr", "learning_rate"),
        settled(
            steps,
            "lr_scheduler warmup_ratio warmup_steps optimizer optim_args bf16 fp16 bfloat16 saves_per_epoch "
            "evals_per_epoch save_strategy save_steps save_total_limit eval_strategy evaluation_strategy "
            "eval_steps",
            options="lr_schedule warmup_ratio warmup_steps optimizer precision save_steps eval_steps",
            named={
                "lr_scheduler": "lr_schedule",
                "bf16": "precision",
                "fp16": "precision",
                "bfloat16": "precision",
                "saves_per_epoch": "save_steps",
                "evals_per_epoch": "eval_steps",
            },
        ),
        same("weight_decay", "weight_decay"),
        same("adam_beta1", "adam_beta1"),
        same("adam_beta2", "adam_beta2"),
        same("adam_epsilon", "adam_epsilon adam_eps"),
        same("grad_clip", "max_grad_norm"),
        same("seed", "seed"),
        same("train_on_prompt", "train_on_inputs", words=is_on),
        same("activation_checkpointing", "gradient_checkpointing", words=recompute),
        same("attention", "attn_implementation", words=attention),
        same("tp", "tensor_parallel_size", words=lambda value: int(value) if is_on(value) else None),
        same(
            "sp",
            "context_parallel_size sequence_parallel_degree",
            words=lambda value: int(value) if is_on(value) else None,
        ),
        same("compile", "torch_compile", words=lambda value: value is True or value == "true"),
        same("keep_best", "load_best_model_at_end", words=is_on),
        settled(strategy, "deepspeed fsdp fsdp_config", options="preset"),
        same("output_dir", "output_dir"),
        settled(
            trackers,
            "wandb_project swanlab_project mlflow_experiment_name trackio_project_name use_wandb use_swanlab "
            "use_mlflow use_trackio use_tensorboard",
            options="log log_project",
            named={
                "wandb_project": "log_project",
                "swanlab_project": "log_project",
                "mlflow_experiment_name": "log_project",
                "trackio_project_name": "log_project",
                "use_wandb": "log",
                "use_swanlab": "log",
                "use_mlflow": "log",
                "use_trackio": "log",
                "use_tensorboard": "log",
            },
        ),
        settled(template, "chat_template chat_template_jinja", options="chat_template"),
        settled(special_tokens, "special_tokens tokens", options="add_special_tokens"),
        settled(plugins, "plugins"),
        FP8,
        *LORA_VARIANTS,
        differs(
            "lora_modules_to_save lora_target_parameters",
            text="no other weights are trained beside LoRA's, but new tokens'",
        ),
        differs("lora_fan_in_fan_out peft peft_* lora_*_pattern", text="PEFT's other settings"),
        differs(
            "eot_tokens chat_template_kwargs",
            text="what ends an answer is the chat template's; --template-arg gives it a variable",
        ),
        differs("default_system_message", text="give the rows a column `system`"),
        differs(
            "cosine_* lr_scheduler_kwargs lr_quadratic_warmup lr_div_factor eta_min jagged_* relora_prune_*",
            text="linear and cosine end at 0",
        ),
        differs("embedding_lr* lr_groups", text="one learning rate for all weights"),
        differs("neftune_noise_alpha noisy_embedding_alpha", text="noise on the embeddings"),
        differs("use_eaft eaft_* chunked_cross_entropy*", text="another loss, or its way"),
        differs(
            "curriculum_sampling sample_packing_sequentially group_by_length shuffle_merged_datasets "
            "shuffle_before_merging_datasets multipack_real_batches",
            text="rows come in random order",
        ),
        differs("unfrozen_parameters", text="all weights are trained, or an adapter"),
        differs(
            "dataset_exact_deduplication min_sample_len excess_length_strategy dataset_shard_* "
            "skip_prepare_dataset",
            text="do it with the files first",
        ),
        differs(
            "overrides_of_model_config model_config model_kwargs overrides_of_model_kwargs rope_scaling "
            "added_tokens_overrides resize_token_embeddings_to_32x shrink_embeddings mean_resizing_embeddings "
            "fix_untrained_tokens embeddings_skip_upcast fp32_norm* scaling_softmax*",
            text="the model's config and tokenizer stay as they are",
        ),
        differs("early_stopping_patience", text="a run goes to its end; --keep-best keeps the best model"),
        differs("adam_beta3 adam_epsilon2 dion_* grokfast_*", text="of optimizers that dsrun doesn't have"),
        same("ep", "expert_parallel_size", words=whole_steps, only_given=True),
        differs(
            "expert_parallel_* expert_backend dp_shard_size dp_replicate_size",
            text="ranks that share experts: --ep; weights: --preset fsdp-hybrid, zero3-hpz",
        ),
        refused(
            "rl trl vllm reward_model process_reward_model center_rewards_coefficient rl_beta dpo_* kto_* "
            "orpo_* cpo_* simpo_* rpo_* ebft precompute_ref_log_probs nemo_gym_* hatchery max_prompt_len",
            text=NO_RL,
        ),
        refused(
            "num_labels",
            text="a head for classes: dsrun trains a model that writes the class (docs/howto/classification.md)",
        ),
        refused(
            "relora relora_* lisa_* reinit_weights mora spectrum_* dense_mixer gptq gptq_* "
            "model_quantization_config* quantization qat fp8_config kd_* diffusion qgalore_* recipe "
            "llmcompressor use_onebitllms use_pose pose_* s2_attention nvfp4_* nonexpert_quantization "
            "save_compressed",
            text="another way of training than all weights, LoRA, QLoRA or P-Tuning",
        ),
        left_out(
            "push_dataset_to_hub streaming streaming_* pretrain_multipack_* pretraining_sample_concatenation",
            text="rows are read whole, once, and prepared in dsrun's cache",
        ),
        refused("optim_target_modules trainer_cls", text="another trainer, or optimizer, of your own"),
        images("processor_type processor_kwargs image_* freeze_mm_modules"),
        anyway(
            "trust_remote_code model_type type_of_model tokenizer_type tokenizer_* is_*_model base_model_* "
            "cls_model_config",
            text="transformers' own classes are taken, by the model's config",
        ),
        anyway(
            "dataset_* dataloader_* remove_unused_columns accelerator_config preprocess_iterable "
            "is_preprocess",
            text=LOADING,
        ),
        anyway(
            "logging_steps include_tkps include_tokens_per_second total_*tokens eval_table_size debug strict "
            "profiler_* use_otel_metrics otel_*",
            text=LOGGED,
        ),
        anyway(
            "eval_sample_packing pad_to_* sample_packing_* batch_flattening max_packed_sequence_len",
            text="rows are packed by dsrun's own way, and kept apart",
        ),
        anyway(
            "eval_batch_size eval_sequence_len eval_max_new_tokens eval_causal_lm_metrics do_causal_lm_eval "
            "do_bench_eval bench_* lm_eval_* metric_for_best_model greater_is_better generate_samples "
            "num_generation_samples generation_*",
            text="held-out rows: their loss, and answers that are scored (--generate-rows)",
        ),
        anyway(
            "resume_from_checkpoint auto_resume_from_checkpoints dynamic_checkpoint",
            text="a run goes on by `dsrun resume RUN`",
        ),
        anyway(
            "save_only_model save_safetensors save_first_step",
            text="checkpoints are whole, the model is safetensors",
        ),
        anyway(
            "tf32 gradient_checkpointing_kwargs activation_offloading layer_offloading "
            "selective_checkpointing flash_* xformers_attention sdp_attention sdpa_varlen eager_attention "
            "flex_* sage_attention cut_cross_entropy liger_* lora_*_kernel lora_on_cpu use_kernels "
            "use_scattermoe use_sonicmoe use_dsv4_kernels use_glm_dsa_kernels dsv4_* moe_* fused_attn_kernel "
            "experts_implementation llama4_linearized_experts gemma4_* tiled_mlp* low_cpu_mem_usage "
            "torch_compile_* gc_* torch_empty_cache_steps torchdistx_path experimental_skip_move_to_device "
            "device_map device max_memory gpu_memory_limit deepcompile fsdp_version "
            "fsdp_final_state_dict_type peft_autocast_adapter_dtype heads_k_stride ring_attn_func "
            "qlora_sharded_model_loading large_head_attention ple_cpu_offload float16 float32 torch_dtype "
            "full_finetune auto_find_batch_size",
            text=SPEED,
        ),
        left_out(
            "wandb_* swanlab_* mlflow_* trackio_* comet_* use_comet hf_mlflow_log_artifacts",
            text="the tracker's own variables",
        ),
        left_out(
            "hub_* hf_use_auth_token",
            text="the model is pushed by `dsrun finetune --push OWNER/NAME`",
        ),
        revision("revision_of_model", "model_revision"),
        left_out(
            "ddp* local_rank world_size capabilities env_capabilities axolotl_config_path "
            "num_dataset_shards_to_save role_boundaries shuffle_* gradio_* merge_lora merge_method",
            text="dsrun's engine has its own way",
        ),
        left_out("loss_watchdog_*", text="a loss that isn't finite ends a run"),
        left_out("use_ray ray_* resources_per_worker", text="Ray's; hosts are --hosts, or `dsrun submit`"),
        differs(
            "quantize_moe_experts bnb_config_kwargs",
            text="QLoRA here quantises linear layers, and leaves experts in 16 bits",
        ),
    ),
    model="base_model",
    telling=(
        "base_model",
        "sequence_len",
        "val_set_size",
        "micro_batch_size",
        "sample_packing",
        "adapter",
        "dataset_prepared_path",
    ),
    starts=("axolotl",),
)
