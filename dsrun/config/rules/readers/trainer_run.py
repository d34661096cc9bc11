"""DS606 to DS615 and DS617: arguments of HF Trainer's that DeepSpeed replaces, refuses or never sees."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import GATHER, ZERO, removal, set_to
from dsrun.config.rules.examples import CPU, SAVED_3, hf, made, tensor, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.readers.trainer import AUTOS, known_arguments
from dsrun.config.rules.running.batch import TENSOR, TOTAL
from dsrun.config.schemas import schema
from dsrun.config.schemas.schema import shorten

OFFLOAD = f"{ZERO}.offload_optimizer.device"


@rule("DS606", "warning")
@bad(hf({"optim": "adafactor"}, **AUTOS), hf({"optim": "sgd"}, **AUTOS))
@good(hf({"optim": "adamw_torch"}, **AUTOS), hf({"optim": "adagrad"}, **made("Adagrad", lr="auto")))
def optim_replaced_by_the_config(context: Context) -> Iterator[Finding]:
    """An optimizer in the config replaces args.optim (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = known_arguments(context), context.text("optimizer.type")
    if arguments is None or kind is None or not arguments.changed("optim"):
        return
    optim, family = arguments["optim"], "adam" if kind.lower().startswith("adam") else kind.lower()
    if not optim.removeprefix("paged_").startswith(family):
        yield Finding(
            "optimizer",
            f"{kind} is used, and the Trainer's optim {optim} is ignored",
            f"Remove the section to train with {optim}, or leave optim out.",
            removal(context, "optimizer", safe=False),
        )


SAME_SCHEDULE = {"linear": "WarmupDecayLR", "cosine": "WarmupCosineLR", "constant_with_warmup": "WarmupLR"}
"""lr_scheduler_type -> the scheduler of DeepSpeed's that does the same."""


@rule("DS607", "warning")
@bad(
    hf(
        {"lr_scheduler_type": "cosine", "warmup_steps": 1000},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    )
)
@good(
    hf(
        {"lr_scheduler_type": "cosine"},
        scheduler={
            "type": "WarmupCosineLR",
            "params": {"total_num_steps": "auto", "warmup_num_steps": "auto"},
        },
    ),
    hf(
        {"lr_scheduler_type": "constant_with_warmup"},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    ),
)
def schedule_replaced_by_the_config(context: Context) -> Iterator[Finding]:
    """A scheduler in the config replaces lr_scheduler_type (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = known_arguments(context), context.text("scheduler.type")
    if arguments is None or kind is None or not arguments.changed("lr_scheduler_type"):
        return
    schedule = arguments["lr_scheduler_type"]
    if SAME_SCHEDULE.get(schedule) != kind:
        yield Finding(
            "scheduler",
            f"{kind} is used, and the Trainer's lr_scheduler_type {schedule} is ignored",
            f"Remove the section to train with {schedule}, or leave lr_scheduler_type out.",
            removal(context, "scheduler", safe=False),
        )


KEPT = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "adagrad", "lion_32bit", "paged_lion_32bit")
"""Values of optim that accelerate has a CPU optimizer of DeepSpeed's for."""


@rule("DS608", DIFFERS)
@bad(hf({"optim": "sgd"}, **CPU), hf({"optim": "adafactor"}, **CPU))
@good(hf({"optim": "adagrad"}, **CPU), hf({}, **CPU))
def optim_becomes_cpu_adam(context: Context) -> Iterator[Finding]:
    """With offload accelerate replaces the Trainer's optimizer by DeepSpeedCPUAdam, except for Adagrad and Lion.

    Source: map_pytorch_optim_to_deepspeed in accelerate/utils/deepspeed.py. Adafactor's learning rate of None then
    fails in the first step (ops/adam/cpu_adam.py).
    """
    arguments = known_arguments(context)
    if arguments is None or context.has("optimizer") or context.text(OFFLOAD) not in ("cpu", "nvme"):
        return
    optim = arguments["optim"]
    if optim not in KEPT and context.flag("zero_force_ds_cpu_optimizer") is not False:
        fails = optim == "adafactor"
        text = "and fails at the first step" if fails else "silently"
        yield Finding(
            OFFLOAD,
            f"with offload the Trainer's optim {optim} becomes DeepSpeed's CPU Adam, {text}",
            "Set zero_force_ds_cpu_optimizer to false to keep it, or train with optim adamw_torch.",
            effect=FAILS if fails else DIFFERS,
        )


@rule("DS610", FAILS)
@bad(hf({"fsdp": "full_shard"}))
@good(hf({"fsdp": ""}), hf({}))
def fsdp_beside_deepspeed(context: Context) -> Iterator[Finding]:
    """Both shard the model; the Trainer refuses the combination (Trainer.__init__, transformers/trainer.py)."""
    arguments = known_arguments(context)
    if arguments and arguments["fsdp"]:
        yield Finding(
            ZERO, f"can't be combined with the Trainer's fsdp {shorten(arguments['fsdp'])}", "Leave fsdp out."
        )


@rule("DS611", FAILS)
@bad(hf({"save_only_model": True, "load_best_model_at_end": True}))
@good(hf({"save_only_model": True}), hf({"load_best_model_at_end": True}))
def best_model_without_its_checkpoint(context: Context) -> Iterator[Finding]:
    """Loading the best model needs DeepSpeed's own checkpoint, which save_only_model leaves out.

    Source: create_accelerator_and_postprocess in transformers/trainer.py.
    """
    arguments = known_arguments(context)
    if arguments and arguments["save_only_model"] and arguments["load_best_model_at_end"]:
        text = "save_only_model and load_best_model_at_end exclude each other under DeepSpeed"
        yield Finding(ZERO, text, "Leave one of the two out.")


@rule("DS612", FAILS)
@bad(hf({"do_eval": True}), hf({"do_eval": True, "do_train": False}, **zero(0)))
@good(hf({"do_eval": True, "do_train": True}), hf({"do_eval": True, "eval_strategy": "steps"}))
def evaluation_only_below_stage_3(context: Context) -> Iterator[Finding]:
    """Evaluating without training first is ZeRO inference, which needs stage 3 (deepspeed_init,
    transformers/integrations/deepspeed.py).
    """
    arguments = known_arguments(context)
    if arguments is None or context.stage >= 3 or arguments["do_train"] or not arguments["do_eval"]:
        return
    if arguments["eval_strategy"] == "no":
        text = f"{context.stage} can't evaluate without training, but do_eval is set without do_train"
        yield Finding(f"{ZERO}.stage", text, "Set the stage to 3, or evaluate without DeepSpeed.")


@rule("DS613", FAILS)
@bad(hf({"auto_find_batch_size": True}, **SAVED_3))
@good(hf({"auto_find_batch_size": True}), hf({}, **SAVED_3))
def batch_size_search_at_stage_3(context: Context) -> Iterator[Finding]:
    """The Trainer refuses auto_find_batch_size at stage 3 (create_accelerator_and_postprocess,
    transformers/trainer.py).
    """
    arguments = known_arguments(context)
    if arguments and context.stage == 3 and arguments["auto_find_batch_size"]:
        text = "3 can't be combined with the Trainer's auto_find_batch_size"
        yield Finding(f"{ZERO}.stage", text, "Set the batch size yourself, or the stage to 2.")


@rule("DS614", "warning", since=(0, 17, 2))
@bad(
    hf({"bf16": True}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    hf({"fp16": True}, torch_autocast={"enabled": True, "dtype": "float16"}),
)
@good(
    hf({}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
    hf({"bf16": True}, torch_autocast={"enabled": False}),
)
def autocast_of_low_precision_weights(context: Context) -> Iterator[Finding]:
    """The argument turns the weights themselves to 16 bit, which autocast is there to avoid (set_mixed_precision,
    accelerate/utils/dataclasses.py).
    """
    arguments = known_arguments(context)
    if arguments is None or not context.flag("torch_autocast.enabled"):
        return
    if asked := [name for name in ("bf16", "fp16") if arguments[name]]:
        text = f"has almost no effect: the Trainer's {asked[0]} makes the weights 16-bit"
        yield Finding(
            "torch_autocast", text, f"Leave {asked[0]} out of TrainingArguments, or remove torch_autocast."
        )


@rule("DS615", FAILS)
@bad(hf({"use_cpu": False}, _device="cpu", _world_size=2))
@good(
    hf({"use_cpu": True}, _device="cpu", _world_size=2), hf({"use_cpu": False}, _device="cpu", _world_size=1)
)
def cpu_ranks_not_counted(context: Context) -> Iterator[Finding]:
    """Without use_cpu each rank thinks it is the only one, and the batch sizes no longer match.

    Source: _setup_devices in transformers/training_args.py, _batch_assertion in runtime/config.py.
    """
    world = context.world_size or 1
    if (
        context.by_trainer
        and context.setting.device == "cpu"
        and world > 1
        and context.argument("use_cpu") is False
    ):
        text = f"is computed for 1 rank, but there are {world} on the CPU"
        yield Finding(TOTAL, text, "Set use_cpu in TrainingArguments.")


@rule("DS617", "warning")
@bad(hf({"save_on_each_node": True}, checkpoint={"use_node_local_storage": False}))
@good(
    hf({"save_on_each_node": True}, checkpoint={"use_node_local_storage": True}),
    hf({"save_on_each_node": False}, checkpoint={"use_node_local_storage": False}),
)
def storage_replaced_by_save_on_each_node(context: Context) -> Iterator[Finding]:
    """With the argument the Trainer writes true over it (trainer_config_process in
    transformers/integrations/deepspeed.py).
    """
    path = "checkpoint.use_node_local_storage"
    if known_arguments(context) and context.argument("save_on_each_node") and context.flag(path) is False:
        text = "is false, but the Trainer's save_on_each_node makes it true"
        yield Finding(path, text, "Leave save_on_each_node out, or write true.")


@rule("DS609", "warning", since=(0, 16, 4))
@bad(hf(**tensor(2)), {"_for": "accelerate", **tensor(2), **zero(0)})
@good(hf(**tensor(1)), hf(**tensor(2), **zero(2, stage3_gather_16bit_weights_on_model_save=True)))
def tensor_parallel_weights_stay_sharded(context: Context) -> Iterator[Finding]:
    """With AutoTP saving needs the gather flag at every stage, despite its name (get_state_dict in
    accelerate/accelerator.py); the Trainer then leaves ZeRO's checkpoint in place of model.safetensors.
    """
    size = context.integer(TENSOR) or 1
    if context.target in schema.FILLING and size > 1 and context.stage < 3 and not context.flag(GATHER):
        yield Finding(
            GATHER,
            f"is off: the parts on {size} GPUs are not merged, and saving gives no model file",
            "Set it to true; with tensor parallelism it acts at every stage.",
            set_to(context, GATHER, value=True, safe=True),
        )
