"""DS606 to DS615: arguments of HF Trainer's that DeepSpeed replaces, refuses or never sees."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config import schema
from dsrun.config.rules.batch import TENSOR, TOTAL
from dsrun.config.rules.common import GATHER, ZERO, removal, setting
from dsrun.config.rules.examples import CPU, SAVED_3, hf, made, tensor, zero
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Hit, rule
from dsrun.config.rules.trainer import AUTOS, known_arguments
from dsrun.config.schema import shorten

OFFLOAD = f"{ZERO}.offload_optimizer.device"


@rule(
    "DS606",
    "warning",
    bad=[hf({"optim": "adafactor"}, **AUTOS), hf({"optim": "sgd"}, **AUTOS)],
    good=[
        hf({"optim": "adamw_torch"}, **AUTOS),
        hf({"optim": "adagrad"}, **made("Adagrad", lr="auto")),
        hf({}, **made("Lion", lr="auto")),
        hf({"optim": "adafactor"}),
    ],
)
def optim_replaced_by_the_config(context: Context) -> Iterator[Hit]:
    """An optimizer in the config is the one that trains; args.optim isn't looked at (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = known_arguments(context), context.text("optimizer.type")
    if arguments is None or kind is None or not arguments.asked("optim"):
        return
    optim, family = arguments["optim"], "adam" if kind.lower().startswith("adam") else kind.lower()
    if not optim.removeprefix("paged_").startswith(family):
        yield Hit(
            "optimizer",
            f"{kind} trains, and the Trainer's optim {optim} is ignored",
            f"Remove the section to train with {optim}, or leave optim out.",
            removal(context, "optimizer", safe=False),
        )


SAME_SCHEDULE = {
    "linear": "WarmupDecayLR",
    "cosine": "WarmupCosineLR",
    "constant_with_warmup": "WarmupLR",
}
"""lr_scheduler_type -> the scheduler of DeepSpeed's that does the same."""


@rule(
    "DS607",
    "warning",
    bad=hf(
        {"lr_scheduler_type": "cosine", "warmup_steps": 1000},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
    ),
    good=[
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
        hf(
            {},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": "auto", "warmup_max_lr": "auto"}},
        ),
        hf({"lr_scheduler_type": "cosine"}),
    ],
)
def schedule_replaced_by_the_config(context: Context) -> Iterator[Hit]:
    """A scheduler in the config is the one that runs; lr_scheduler_type isn't looked at (deepspeed_optim_sched,
    transformers/integrations/deepspeed.py).
    """
    arguments, kind = known_arguments(context), context.text("scheduler.type")
    if arguments is None or kind is None or not arguments.asked("lr_scheduler_type"):
        return
    asked = arguments["lr_scheduler_type"]
    if SAME_SCHEDULE.get(asked) != kind:
        yield Hit(
            "scheduler",
            f"{kind} runs, and the Trainer's lr_scheduler_type {asked} is ignored",
            f"Remove the section to train with {asked}, or leave lr_scheduler_type out.",
            removal(context, "scheduler", safe=False),
        )


KEPT = ("adamw_torch", "adamw_torch_fused", "paged_adamw_32bit", "adagrad", "lion_32bit", "paged_lion_32bit")
"""Values of optim that accelerate has a CPU optimizer of DeepSpeed's for."""


@rule(
    "DS608",
    "error",
    DIFFERS,
    bad=[hf({"optim": "sgd"}, **CPU), hf({"optim": "adafactor"}, **CPU)],
    good=[
        hf({"optim": "adagrad"}, **CPU),
        hf({}, **CPU),
        hf({"optim": "sgd"}, **zero(2, offload_optimizer={"device": "none"})),
        hf({"optim": "sgd"}),
        hf({"optim": "sgd"}, **CPU, zero_force_ds_cpu_optimizer=False),
        hf({"optim": "sgd"}, **CPU, **AUTOS),
    ],
)
def optim_that_becomes_adam(context: Context) -> Iterator[Hit]:
    """With offload accelerate trades the Trainer's optimizer for DeepSpeedCPUAdam, Adagrad and Lion apart.

    Source: map_pytorch_optim_to_deepspeed in accelerate/utils/deepspeed.py. Adafactor's learning rate of None then
    fails in the first step (ops/adam/cpu_adam.py).
    """
    arguments = known_arguments(context)
    if arguments is None or context.has("optimizer") or context.text(OFFLOAD) not in ("cpu", "nvme"):
        return
    optim = arguments["optim"]
    if optim not in KEPT and context.flag("zero_force_ds_cpu_optimizer") is not False:
        fails = optim == "adafactor"
        text = "and fails at the first step" if fails else "without a word"
        yield Hit(
            OFFLOAD,
            f"with offload the Trainer's optim {optim} becomes DeepSpeed's CPU Adam, {text}",
            "Set zero_force_ds_cpu_optimizer to false to keep it, or train with optim adamw_torch.",
            effect=FAILS if fails else DIFFERS,
        )


@rule(
    "DS610",
    "error",
    FAILS,
    bad=hf({"fsdp": "full_shard"}),
    good=[hf({"fsdp": ""}), hf({})],
)
def fsdp_beside_deepspeed(context: Context) -> Iterator[Hit]:
    """Either shards the model; the Trainer refuses both (Trainer.__init__, transformers/trainer.py)."""
    arguments = known_arguments(context)
    if arguments and arguments["fsdp"]:
        yield Hit(
            ZERO, f"and the Trainer's fsdp {shorten(arguments['fsdp'])} exclude each other", "Leave fsdp out."
        )


@rule(
    "DS611",
    "error",
    FAILS,
    bad=hf({"save_only_model": True, "load_best_model_at_end": True}),
    good=[hf({"save_only_model": True}), hf({"load_best_model_at_end": True})],
)
def best_model_without_its_checkpoint(context: Context) -> Iterator[Hit]:
    """Loading the best model takes DeepSpeed's own checkpoint, which save_only_model leaves out.

    Source: create_accelerator_and_postprocess in transformers/trainer.py.
    """
    arguments = known_arguments(context)
    if arguments and arguments["save_only_model"] and arguments["load_best_model_at_end"]:
        text = "save_only_model and load_best_model_at_end exclude each other under DeepSpeed"
        yield Hit(ZERO, text, "Leave one of the two out.")


@rule(
    "DS612",
    "error",
    FAILS,
    bad=[hf({"do_eval": True}), hf({"do_eval": True, "do_train": False}, **zero(0))],
    good=[
        hf({"do_eval": True, "do_train": True}),
        hf({"do_eval": True, "eval_strategy": "steps"}),
        hf({"do_train": False}),
        hf({"do_eval": True}, **SAVED_3),
    ],
)
def evaluation_alone_below_stage_3(context: Context) -> Iterator[Hit]:
    """Evaluating without training first is ZeRO inference, and that is stage 3's (deepspeed_init,
    transformers/integrations/deepspeed.py).
    """
    arguments = known_arguments(context)
    if arguments is None or context.stage == 3 or arguments["do_train"] or not arguments["do_eval"]:
        return
    if arguments["eval_strategy"] == "no":
        text = f"{context.stage} can't evaluate alone, and the Trainer is asked for do_eval without do_train"
        yield Hit(f"{ZERO}.stage", text, "Set the stage to 3, or evaluate without DeepSpeed.")


@rule(
    "DS613",
    "error",
    FAILS,
    bad=hf({"auto_find_batch_size": True}, **SAVED_3),
    good=[hf({"auto_find_batch_size": True}), hf({}, **SAVED_3)],
)
def batch_size_search_at_stage_3(context: Context) -> Iterator[Hit]:
    """The Trainer refuses auto_find_batch_size at stage 3 (create_accelerator_and_postprocess,
    transformers/trainer.py).
    """
    arguments = known_arguments(context)
    if arguments and context.stage == 3 and arguments["auto_find_batch_size"]:
        text = "3 and the Trainer's auto_find_batch_size exclude each other"
        yield Hit(f"{ZERO}.stage", text, "Set the batch size yourself, or the stage to 2.")


@rule(
    "DS614",
    "warning",
    since=(0, 17),
    bad=[
        hf({"bf16": True}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        hf({"fp16": True}, torch_autocast={"enabled": True, "dtype": "float16"}),
    ],
    good=[
        hf({}, torch_autocast={"enabled": True, "dtype": "bfloat16"}),
        hf({"bf16": True}, torch_autocast={"enabled": False}),
    ],
)
def autocast_of_low_precision_weights(context: Context) -> Iterator[Hit]:
    """The argument turns the weights themselves to 16 bit, which autocast is there to avoid (set_mixed_precision,
    accelerate/utils/dataclasses.py).
    """
    arguments = known_arguments(context)
    if arguments is None or not context.flag("torch_autocast.enabled"):
        return
    if asked := [name for name in ("bf16", "fp16") if arguments[name]]:
        text = f"has little left to do: the Trainer's {asked[0]} makes the weights 16 bit"
        yield Hit(
            "torch_autocast", text, f"Leave {asked[0]} out of TrainingArguments, or remove torch_autocast."
        )


@rule(
    "DS615",
    "error",
    FAILS,
    bad=hf({"use_cpu": False}, _device="cpu", _world_size=2),
    good=[
        hf({"use_cpu": True}, _device="cpu", _world_size=2),
        hf({"use_cpu": False}, _device="cpu", _world_size=1),
        hf({}, _device="cpu", _world_size=2),
        hf({"use_cpu": False}, _device="cuda", _world_size=2),
    ],
)
def ranks_on_the_cpu_that_are_not_counted(context: Context) -> Iterator[Hit]:
    """Without use_cpu each rank takes itself for the only one, and the batch no longer agrees.

    Source: _setup_devices in transformers/training_args.py, _batch_assertion in runtime/config.py.
    """
    world = context.world_size or 1
    if (
        context.by_trainer
        and context.setting.device == "cpu"
        and world > 1
        and context.argument("use_cpu") is False
    ):
        text = f"is worked out for 1 rank, and there are {world} on the CPU"
        yield Hit(TOTAL, text, "Set use_cpu in TrainingArguments.")


@rule(
    "DS609",
    "warning",
    since=(0, 16),
    bad=[hf(**tensor(2)), {"_for": "accelerate", **tensor(2), **zero(0)}],
    good=[
        hf(**tensor(1)),
        hf(**tensor(2), **zero(2, stage3_gather_16bit_weights_on_model_save=True)),
        hf(**tensor(2), **zero(3)),
        tensor(2),
    ],
)
def tensor_parallel_weights_stay_in_pieces(context: Context) -> Iterator[Hit]:
    """With AutoTP saving asks for the gather flag at every stage, whatever its name says (get_state_dict in
    accelerate/accelerator.py); the Trainer then leaves ZeRO's checkpoint in place of model.safetensors.
    """
    size = context.integer(TENSOR) or 1
    if context.target in schema.FILLING and size > 1 and context.stage < 3 and not context.flag(GATHER):
        yield Hit(
            GATHER,
            f"is off: the parts of {size} GPUs are not put together, and saving gives no model file",
            "Set it to true; with tensor parallelism it acts at every stage.",
            setting(context, GATHER, value=True, safe=True),
        )
