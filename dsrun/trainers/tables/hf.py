"""TrainingArguments, which most trainers build on: what each of them is here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dsrun.trainers.counterparts import (
    ANYWAY,
    DIFFERS,
    LEFT_OUT,
    REFUSED,
    SAME,
    Draft,
    Row,
    anyway,
    differs,
    is_on,
    left_out,
    refused,
    same,
    settled,
)

SCHEDULES = {
    "linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant",
}  # fmt: skip
OPTIMIZERS = {
    "adamw": "adamw", "adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw_hf": "adamw",
    "adamw_apex_fused": "adamw", "adamw_anyprecision": "adamw", "paged_adamw": "adamw", "paged_adamw_32bit": "adamw",
    "adamw_8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit", "adamw_torch_8bit": "adamw-8bit",
    "paged_adamw_8bit": "adamw-8bit", "sgd": "sgd", "lion_32bit": "lion", "paged_lion_32bit": "lion", "muon": "muon",
}  # fmt: skip
"""Names of optimizers -> --optimizer. Paging is how states wait in host memory, not another optimizer."""
NEAREST = {"adamw_torch_4bit": "adamw-8bit", "lion_8bit": "lion"}
"""Optimizers whose states have other bits than any of dsrun's."""
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
IMAGES = "dsrun trains text models: no images, videos or sounds"
NO_RL = "dsrun does supervised fine-tuning and pre-training: no preferences, rewards or reinforcement"
OWN_TEMPLATE = "the model's own chat template frames prompts; --chat-template FILE takes another"
LOGGED = "dsrun logs every step, in metrics.jsonl"
LOADING = "how rows are read: dsrun prepares them once, with all cores, and keeps them in its cache"
SPEED = "how fast it computes, not what"
REPOSITORY = re.compile(r"(modelscope:)?[\w.-]+/[\w.-]+")
"""A model that a hub has, without a revision."""


BY_MODEL = ("llama-factory", "ms-swift")
"""Trainers that compute in the precision of the model's config where neither bf16 nor fp16 is on."""


def revision(*keys: str) -> Row:
    """A branch, tag or commit of the model's repository: here it stands behind the repository's name."""

    def behind_the_name(draft: Draft) -> None:
        key = next((key for key in keys if is_on(draft.given.get(key))), None)
        name = draft.model or ""
        if key and REPOSITORY.fullmatch(name) and not draft.find(name):
            draft.model = f"{name}@{draft.given[key]}"
            draft.tell(key, SAME, "model")
        elif key:
            draft.tell(key, ANYWAY, "of a repository; the model is a folder")

    return settled(behind_the_name, *keys, text="MODEL@REVISION, for a repository")


def precision(draft: Draft) -> None:
    """bf16 and fp16; without either the Trainer computes in fp32."""
    for key, words in (("bf16", "bf16"), ("fp16", "fp16")):
        if draft.is_on(key) and draft.get(key) != "auto":
            draft.put("precision", words, "bf16", "fp16")
            return
    off = "fp32" if draft.get("bf16") != "auto" and draft.trainer.name not in BY_MODEL else None
    draft.put("precision", off, "bf16", "fp16", text="" if off else "what the devices do best, as dsrun does")


def schedule(draft: Draft, key: str = "lr_scheduler_type") -> None:
    """The learning rate on the way: warm-up is 0 there unless it is given, and "constant" has none."""
    name = str(draft.get(key) or "linear")
    kind = SCHEDULES.get(name)
    if kind is None:
        draft.tell(key, DIFFERS, f"{name}: dsrun has linear, cosine and constant, and takes cosine here")
    else:
        draft.put("lr_schedule", kind, key)
    steps, share = draft.get("warmup_steps"), draft.get("warmup_ratio")
    keys = ("warmup_ratio", "warmup_steps")
    if name == "constant":
        draft.put("warmup_steps", 0, *keys, source=f"{key}: constant has no warm-up")
    elif _number(steps) >= 1:
        draft.put("warmup_steps", int(_number(steps)), *keys)
    else:
        draft.put("warmup_ratio", _number(steps) or _number(share), *keys)


def _number(value: Any) -> float:
    try:
        return float(value or 0)
    except (TypeError, ValueError):
        return 0.0


def optimizer(draft: Draft, key: str = "optim") -> None:
    """The optimizer, and the arguments that its class has other defaults for than dsrun."""
    name = draft.get(key)
    name = str(name) if is_on(name) else "adamw_torch"
    chosen = OPTIMIZERS.get(name)
    if name in NEAREST:
        draft.put("optimizer", NEAREST[name], key)
        draft.tell(key, DIFFERS, f"{name}: {NEAREST[name]} in its place, whose states have more bits")
    elif chosen is None:
        draft.tell(key, REFUSED, f"{name}: dsrun has {', '.join(dict.fromkeys(OPTIMIZERS.values()))}")
    elif chosen != "adamw" or key in draft.given:
        draft.put("optimizer", chosen, key)
    if chosen == "sgd":
        draft.put("momentum", 0.0, source="torch's own default of SGD")
    if "optim_args" in draft.given:
        kind = DIFFERS if draft.is_on("optim_args") else ANYWAY
        draft.tell(
            "optim_args", kind, "arguments of the optimizer: --weight-decay, --adam-beta1 and their like"
        )


def saving(draft: Draft) -> None:
    """Checkpoints: by steps here, the newest two."""
    strategy, steps = str(draft.get("save_strategy") or "steps"), draft.get("save_steps")
    if strategy not in ("steps", "SaveStrategy.STEPS"):
        draft.tell(
            "save_strategy",
            LEFT_OUT,
            f"{strategy}: checkpoints come by steps (--save-steps), and a run ends with its model",
        )
        draft.tell("save_steps", ANYWAY, f"counts only where save_strategy is steps, and it is {strategy}")
    else:
        draft.tell("save_strategy", ANYWAY, "checkpoints come by steps")
        if 0 < _number(steps) < 1:
            draft.tell("save_steps", LEFT_OUT, "a share of the steps: --save-steps is a number of them")
        else:
            draft.put("save_steps", steps, "save_steps")
    draft.put(
        "keep_checkpoints",
        draft.given.get("save_total_limit"),
        "save_total_limit",
        text="the newest two stay",
    )


def evaluation(draft: Draft) -> None:
    """When the held-out rows are looked at."""
    strategy = draft.get("eval_strategy") or draft.get("evaluation_strategy") or "no"
    keys = [
        key for key in ("eval_strategy", "evaluation_strategy", "eval_steps", "do_eval") if key in draft.given
    ]
    steps = draft.given.get("eval_steps")
    if str(strategy) == "steps" and is_on(steps) and _number(steps) >= 1:
        draft.put("eval_steps", int(_number(steps)), "eval_steps")
    for key in keys:
        if key not in draft.outcomes:
            draft.tell(
                key,
                ANYWAY,
                "where there are held-out rows, their loss is taken a few times a run (--eval-steps)",
            )


def reporting(draft: Draft) -> None:
    """Where curves are shown."""
    value = draft.given.get("report_to")
    names = [value] if isinstance(value, str) else list(value or ())
    known = [name for name in names if name in TRACKERS]
    others = [name for name in names if name not in TRACKERS and name not in ("none", "all")]
    if others:
        draft.tell("report_to", LEFT_OUT, f"{', '.join(map(str, others))}: dsrun has {', '.join(TRACKERS)}")
    elif "all" in names:
        draft.tell(
            "report_to", LEFT_OUT, "all: name a tracker with --log; the run folder has the curves anyway"
        )
    if known:
        draft.put("log", known, "report_to")
    elif not others and "all" not in names:
        draft.tell("report_to", ANYWAY, "no tracker unless --log names one")


def strategy(draft: Draft) -> None:
    """How the model is divided: a DeepSpeed config, FSDP, or plain data parallelism."""
    config, fsdp = draft.given.get("deepspeed"), draft.given.get("fsdp")
    wrapped = draft.given.get("fsdp_config")
    if is_on(config):
        _config(draft, config)
    elif is_on(fsdp) or is_on(wrapped):
        words = f"{fsdp} {wrapped}"
        preset = "fsdp-offload" if "offload_params': True" in words or "offload" in str(fsdp) else "fsdp"
        draft.put(
            "preset", preset, "fsdp", "fsdp_config", text="FSDP2; the sharding's other settings are dsrun's"
        )
    for key in ("deepspeed", "fsdp", "fsdp_config"):
        if key not in draft.outcomes:
            draft.tell(key, ANYWAY, "is off")


def _config(draft: Draft, config: Any) -> None:
    if not isinstance(config, str):
        draft.tell(
            "deepspeed",
            DIFFERS,
            "a config inside the file: write it into one of its own, and take --preset ds.json",
        )
        return
    if path := draft.find(config):
        draft.put("preset", str(path.absolute()), "deepspeed")
        return
    named = _preset_named(config)
    if named:
        draft.put("preset", named, "deepspeed", text=f"{config} isn't here: the preset of its name")
    else:
        draft.tell(
            "deepspeed",
            DIFFERS,
            f"{config} isn't here: name it with --preset FILE, or take a preset of dsrun's",
        )


def _preset_named(name: str) -> str | None:
    """The preset that a config's name means, as trainers ship them: zero2, ds_z3_offload_config.json."""
    words = Path(name).stem.lower().replace("-", "_")
    stage = next((stage for stage in "3210" if f"zero{stage}" in words or f"_z{stage}" in f"_{words}"), None)
    if stage is None:
        return None
    offload = "_offload" in words or "cpuoffload" in words
    return {"0": "ddp", "1": "zero1"}.get(stage, f"zero{stage}{'-offload' if offload else ''}")


def _fp8(draft: Draft) -> None:
    """Products in fp8, by torchao with one scale a tensor there: dsrun has them under FSDP."""
    sharded = is_on(draft.given.get("fsdp")) or is_on(draft.given.get("fsdp_config"))
    if not draft.is_on("fp8"):
        for key in FP8_KEYS:
            draft.tell(key, ANYWAY, "is off")
    elif sharded:
        draft.put("fp8", "tensorwise", "fp8")
        draft.tell("fp8_backend", ANYWAY, "torchao")
        gathered = draft.is_on("fp8_enable_fsdp_float8_all_gather")
        text = "weights are gathered in 16 bits"
        draft.tell("fp8_enable_fsdp_float8_all_gather", LEFT_OUT if gathered else ANYWAY, text)
    else:
        draft.tell("fp8", REFUSED, "fp8: dsrun has it under FSDP only (--preset fsdp --fp8 tensorwise)")


def whole_steps(value: Any) -> int | None:
    """max_steps: -1 is none there."""
    return int(value) if _number(value) > 0 else None


def recompute(value: Any) -> str:
    """Whether backward computes the layers again."""
    if value == "offload":
        return "offload"
    return "full" if is_on(value) else "none"


def minutes(value: Any) -> int:
    """Seconds as minutes, at least one."""
    return max(1, round(_number(value) / 60))


def attention(value: Any) -> str | None:
    """An attention's name. Of the faster ones dsrun takes what is there: the result is the same."""
    return {"eager": "eager", "disabled": "eager", "sdpa": "sdpa"}.get(str(value))


DATA_SUFFIXES = (".json", ".jsonl", ".csv", ".tsv", ".parquet", ".txt")
HELD_OUT = re.compile(r"(?:^|[-._ ])(?:test(?:ing)?|eval(?:uation)?|dev|val(?:id(?:ation)?)?)(?:[-._ ]|$)")


def named_file(draft: Draft, name: str) -> str:
    """A data file or a set of the Hub as --train-file takes it."""
    if name.startswith("hf:"):
        return name
    suffixed = Path(name).suffix.lower() in DATA_SUFFIXES
    path = draft.find(name) if suffixed or name.startswith((".", "/", "~")) else None
    if path and path.is_file():
        return str(path.absolute())
    if suffixed or name.startswith((".", "/", "~")):
        return name
    return f"hf:{name}"


def named_files(draft: Draft, name: str) -> list[str]:
    """The files of a set that `load_dataset` is given: a folder of that name is nearer than the Hub."""
    for folder in (Path.cwd() / name, draft.folder / name):
        if folder.is_dir() and (files := [path for path in sorted(folder.iterdir()) if _trains(path)]):
            return [str(path.absolute()) for path in files]
    return [named_file(draft, name)]


def _trains(path: Path) -> bool:
    """Whether `load_dataset` reads a folder's file as its split `train`: by the words in the name."""
    return path.suffix.lower() in DATA_SUFFIXES and not HELD_OUT.search(path.name)


STEP: tuple[Row, ...] = (
    same("micro_batch", "per_device_train_batch_size"),
    same("grad_accum", "gradient_accumulation_steps"),
    same("lr", "learning_rate"),
    same("epochs", "num_train_epochs"),
    same("max_steps", "max_steps", words=whole_steps),
    settled(
        schedule,
        "lr_scheduler_type warmup_ratio warmup_steps",
        options="lr_schedule warmup_ratio warmup_steps",
        text="warm-up 0 there, 0.03 here",
        named={"lr_scheduler_type": "lr_schedule"},
    ),
    settled(optimizer, "optim optim_args", options="optimizer momentum", named={"optim": "optimizer"}),
    same("weight_decay", "weight_decay"),
    same("adam_beta1", "adam_beta1"),
    same("adam_beta2", "adam_beta2"),
    same("adam_epsilon", "adam_epsilon"),
    same("grad_clip", "max_grad_norm", empty=0.0),  # without a number nothing is clipped
    same("seed", "seed", text="it decides the order of the rows"),
    settled(precision, "bf16 fp16", options="precision", text="fp32 there without either"),
)
RUNNING: tuple[Row, ...] = (
    same(
        "activation_checkpointing",
        "gradient_checkpointing activation_checkpointing",
        words=recompute,
    ),
    settled(
        saving,
        "save_strategy save_steps save_total_limit",
        options="save_steps keep_checkpoints",
        text="all checkpoints stay there, the newest two here",
        named={"save_total_limit": "keep_checkpoints"},
    ),
    settled(evaluation, "eval_strategy evaluation_strategy eval_steps do_eval", options="eval_steps"),
    same(
        "keep_best",
        "load_best_model_at_end",
        words=is_on,
        text="the best model lies beside the last one",
    ),
    settled(reporting, "report_to", options="log"),
    settled(strategy, "deepspeed fsdp fsdp_config", options="preset"),
    same("output_dir", "output_dir"),
    same("timeout", "ddp_timeout", words=minutes, text="minutes, not seconds", only_given=True),
    same(
        "liger",
        "use_liger_kernel enable_liger_kernel",
        words=lambda value: True if is_on(value) else None,
    ),
    same("compile", "torch_compile", words=is_on),
    differs("neftune_noise_alpha", text="noise on the embeddings"),
    differs("label_smoothing_factor", text="label smoothing"),
    differs("data_seed", text="--seed decides the order of the rows, too"),
    differs(
        "train_sampling_strategy group_by_length",
        text="rows come in random order; packing leaves no padding",
    ),
    differs("lr_scheduler_kwargs", text="arguments of the schedule: linear and cosine end at 0"),
    differs("auto_find_batch_size", text="dsrun lowers the micro batch before the start, by the plan"),
    differs(
        "full_determinism",
        text="not promised: reruns here have the same data order, not the same rounding",
    ),
    left_out("liger_kernel_config", text="liger-kernel's parts are chosen by the model"),
    refused("parallelism_config", text="say it as --tp, --sp or --pp"),
    differs(
        "use_cpu",
        text="CPU ranks are taken where there is no GPU (CUDA_VISIBLE_DEVICES= on a machine with some)",
    ),
    refused("optim_target_modules", text="an optimizer that treats layers otherwise"),
    refused("do_predict", text="answers of a trained model: dsrun evaluate"),
    anyway("do_train", text="finetune trains"),
    anyway(
        "resume_from_checkpoint ignore_data_skip auto_resume_from_checkpoints",
        text="a run goes on by `dsrun resume RUN`",
    ),
    anyway("overwrite_output_dir", text="a run gets a folder of its own"),
    anyway(
        "save_only_model save_safetensors save_on_each_node enable_jit_checkpoint",
        text="checkpoints are whole, the model is safetensors",
    ),
    anyway(
        "logging_* log_* disable_tqdm include_num_input_tokens_seen include_tokens_per_second "
        "include_effective_tokens_per_second skip_memory_metrics",
        text=LOGGED,
    ),
    anyway(
        "per_device_eval_batch_size eval_accumulation_steps eval_delay eval_on_start batch_eval_metrics "
        "eval_do_concat_batches eval_use_gather_object prediction_loss_only include_for_metrics "
        "metric_for_best_model greater_is_better bf16_full_eval fp16_full_eval",
        text="held-out rows are evaluated in the step's own batches, by their loss",
    ),
    anyway(
        "predict_with_generate generation_*",
        text="--generate-rows held-out prompts are answered and scored",
    ),
    anyway(
        "dataloader_* preprocessing_* dataset_num_proc remove_unused_columns label_names "
        "length_column_name sortish_sampler accelerator_config",
        text=LOADING,
    ),
    anyway(
        "average_tokens_across_devices",
        text="a step's loss is the mean over all its target tokens",
    ),
    anyway(
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs use_cache tf32 "
        "torch_empty_cache_steps torch_compile_*",
        text=SPEED,
    ),
    left_out(
        "ddp_* local_rank debug restore_callback_states_from_checkpoint",
        text="dsrun's engine has its own way",
    ),
    left_out("push_to_hub* hub_*", text="the model is pushed by `dsrun finetune --push OWNER/NAME`"),
    left_out(
        "run_name project trackio_*",
        text="the run's folder gives the name; --log-project the project",
    ),
)
"""Arguments of the Trainer; `RUNNING` has those that don't decide what a step computes."""
LORA_VARIANTS: tuple[Row, ...] = (
    refused("use_dora peft_use_dora", text="DoRA: dsrun trains plain LoRA"),
    differs(
        "use_rslora peft_use_rslora",
        text="rank-stabilised scale: say it as --lora-alpha alpha * sqrt(rank)",
    ),
    refused("loraplus_* lorap_*", text="LoRA+: one learning rate for both matrices here"),
    refused(
        "pissa_* lora_ga_* init_weights peft_init_lora_weights",
        text="another start of LoRA's matrices",
    ),
)
"""Kinds of LoRA."""
FP8_KEYS = ("fp8", "fp8_backend", "fp8_enable_fsdp_float8_all_gather")
FP8 = settled(_fp8, " ".join(FP8_KEYS), options="fp8", text="under FSDP only")


def images(*keys: str) -> Row:
    """Arguments of models that see or hear."""
    return refused(*keys, text=IMAGES)


def limits(draft: Draft, *keys: str) -> int | None:
    """The examples' limit in tokens, by the first of these arguments that the file has, else by the trainer's default;
    it is written as --max-length."""
    for key in sorted(keys, key=lambda key: draft.given.get(key) is None):
        value = draft.get(key)
        if is_on(value):
            draft.put("max_length", int(_number(value)), key)
            return int(_number(value))
    for key in keys:
        draft.tell(key, ANYWAY, "is off: dsrun takes what 99 % of the rows need")
    return None


def packed_step(draft: Draft, length: int | None, keys: Iterable[str], micro: str, accumulation: str) -> None:
    """A step that counts packed sequences there: as many tokens here, which is what decides a step's size."""
    sizes = [int(_number(draft.get(key)) or 1) for key in (micro, accumulation)]
    if length is None:
        return
    tokens = sizes[0] * sizes[1] * length * draft.gpus
    for option in ("micro_batch", "grad_accum"):
        draft.options.pop(option, None)
    of = f"{sizes[0]} x {sizes[1]} packed sequences of {length} tokens, on {draft.gpus} GPU{'s' * (draft.gpus > 1)}"
    draft.put("tokens_per_batch", tokens, micro, accumulation, *keys, source=of)
    draft.notes.append(
        f"a step there is {of}: {tokens:,} tokens. On other numbers of GPUs: --gpus of this command."
    )
