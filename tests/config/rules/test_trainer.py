"""What the rules of HF Trainer say, and that the table of its defaults is transformers' own."""

import dataclasses
import enum

import pytest

from dsrun.config import trainer_args
from dsrun.config.rules import trainer
from dsrun.config.rules.frame import Context, example
from dsrun.config.trainer_args import Arguments

OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
ALONE = {"_bare": True, "zero_optimization": {"stage": 2}}


def said(rule, given):
    """Each finding as (severity, effect, path, message, suggestion)."""
    found = list(rule.findings(Context(*example({"_for": "hf", **given}))))
    return [(hit.severity, hit.effect, hit.path, hit.message, hit.suggestion) for hit in found]


def fixes(rule, given):
    found = list(rule.findings(Context(*example({"_for": "hf", **given}))))
    return [(hit.fix.edits, hit.fix.safe) for hit in found]


def adam(**params):
    return {"optimizer": {"type": "AdamW", "params": params}}


def warmup(kind, **params):
    return {"scheduler": {"type": kind, "params": params}}


def test_defaults_are_those_of_training_arguments():
    arguments = pytest.importorskip("transformers").TrainingArguments
    theirs = {
        field.name: getattr(field.default, "value", field.default) for field in dataclasses.fields(arguments)
    }
    assert {name: theirs[name] for name in trainer_args.DEFAULTS} == trainer_args.DEFAULTS


def test_arguments():
    class Kind(enum.Enum):
        SGD = "sgd"

    arguments = Arguments({"optim": Kind.SGD, "max_grad_norm": None, "fsdp": ""})
    assert (arguments["optim"], arguments["max_grad_norm"], arguments["nothing"]) == ("sgd", 1.0, None)
    assert arguments.asked("optim")
    assert not arguments.asked("max_grad_norm")


@pytest.mark.parametrize(
    ("given", "steps"),
    [
        ({}, 1),
        ({"warmup_steps": 1}, 1),
        ({"warmup_steps": 7}, 7),
        ({"warmup_steps": 0.1, "max_steps": 31}, 4),
        ({"warmup_ratio": 0.5, "max_steps": 10}, 5),
        ({"warmup_steps": 0.1}, None),
    ],
)
def test_warmup(given, steps):
    found = Arguments(given).warmup()
    assert found == steps if steps else found is trainer_args.tree.MISSING


@pytest.mark.parametrize(
    ("config", "arguments", "path", "message", "suggestion"),
    [
        (
            {"gradient_clipping": 0.5},
            {},
            "gradient_clipping",
            "is 0.5, and the Trainer's max_grad_norm is 1.0",
            'Write "auto", or set max_grad_norm to 0.5.',
        ),
        (
            {"train_batch_size": 64},
            {"per_device_train_batch_size": 2},
            "train_batch_size",
            "is 64, and TrainingArguments makes it 8 "
            "(GPUs x per_device_train_batch_size x gradient_accumulation_steps)",
            'Write "auto", or set gradient_accumulation_steps to 8.',
        ),
        (
            {"train_batch_size": 16},
            {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
            "train_batch_size",
            "is 16, and TrainingArguments makes it 32 "
            "(GPUs x per_device_train_batch_size x gradient_accumulation_steps)",
            'Write "auto", or set gradient_accumulation_steps to 2.',
        ),
        (
            {"train_batch_size": 12},
            {"per_device_train_batch_size": 2},
            "train_batch_size",
            "is 12, and TrainingArguments makes it 8 "
            "(GPUs x per_device_train_batch_size x gradient_accumulation_steps)",
            'Write "auto".',
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            {},
            "train_micro_batch_size_per_gpu",
            "is 4, and the Trainer's per_device_train_batch_size is 8",
            'Write "auto", or set per_device_train_batch_size to 4.',
        ),
        (
            adam(lr="1e-3"),
            {"learning_rate": 0.001},
            "optimizer.params.lr",
            'is "1e-3", and the Trainer\'s learning_rate is 0.001',
            'Write "auto".',
        ),
        (
            adam(betas=[0.9, 0.95]),
            {"adam_beta1": 0.8},
            "optimizer.params.betas",
            "is [0.9, 0.95], and TrainingArguments makes it [0.8, 0.999] (adam_beta1, adam_beta2)",
            'Write "auto".',
        ),
        (
            adam(eps=1e-6),
            {},
            "optimizer.params.eps",
            "is 1e-06, and the Trainer's adam_epsilon is 1e-08",
            'Write "auto", or set adam_epsilon to 1e-06.',
        ),
        (
            adam(weight_decay=0.1),
            {},
            "optimizer.params.weight_decay",
            "is 0.1, and the Trainer's weight_decay is 0.0",
            'Write "auto", or set weight_decay to 0.1.',
        ),
        (
            warmup("WarmupLR", warmup_max_lr=0.1),
            {},
            "scheduler.params.warmup_max_lr",
            "is 0.1, and the Trainer's learning_rate is 5e-05",
            'Write "auto", or set learning_rate to 0.1.',
        ),
        (
            warmup("WarmupLR", warmup_num_steps=10),
            {"warmup_steps": 5},
            "scheduler.params.warmup_num_steps",
            "is 10, and the Trainer's warmup_steps is 5",
            'Write "auto", or set warmup_steps to 10.',
        ),
        (
            warmup("WarmupDecayLR", total_num_steps=1000),
            {"max_steps": 1},
            "scheduler.params.total_num_steps",
            "is 1000, and the Trainer's max_steps is 1",
            'Write "auto", or set max_steps to 1000.',
        ),
        (
            {"fp16": {"enabled": False}},
            {"fp16_full_eval": True},
            "fp16.enabled",
            "is false, and TrainingArguments makes it true (fp16 or fp16_full_eval)",
            'Write "auto", or set fp16 to false.',
        ),
        (
            {"bf16": {"enabled": "true"}},
            {"bf16": True},
            "bf16.enabled",
            'is "true", and TrainingArguments makes it true (bf16 or bf16_full_eval)',
            'Write "auto".',
        ),
    ],
)
def test_unlike_the_training_argument(config, arguments, path, message, suggestion):
    given = {"_trainer": arguments, **config}
    assert said(trainer.unlike_the_training_argument, given) == [
        ("error", "fails", path, message, suggestion)
    ]
    assert fixes(trainer.unlike_the_training_argument, given) == [((("replace", path, "auto"),), False)]


@pytest.mark.parametrize(
    ("config", "arguments"),
    [
        ({"gradient_clipping": True}, {}),
        ({"gradient_clipping": None}, {}),
        (adam(betas=["auto", 0.9]), {}),
        (adam(betas="auto"), {"adam_beta1": 0.1}),
        (warmup("WarmupDecayLR", total_num_steps=1000), {}),
        (warmup("WarmupDecayLR", total_num_steps=1000), {"max_steps": 0}),
        ({"fp16": {"enabled": True}}, {"bf16": True}),
        ({"fp16": {"enabled": True}}, {"fp16": True}),
    ],
)
def test_like_the_training_argument(config, arguments):
    assert said(trainer.unlike_the_training_argument, {"_trainer": arguments, **config}) == []


def test_both_precisions_are_compared_where_they_do_not_clash():
    given = {"_trainer": {"bf16": True, "fp16": True}, "fp16": {"enabled": False}, "bf16": {"enabled": False}}
    assert [hit[2] for hit in said(trainer.unlike_the_training_argument, given)] == [
        "fp16.enabled",
        "bf16.enabled",
    ]


def test_has_to_equal_the_training_argument():
    given = {
        "gradient_clipping": 0.5,
        "train_batch_size": 8,
        **adam(lr=1e-4, eps=1e-8),
        **warmup("WarmupDecayLR", total_num_steps=9),
    }
    start = "the Trainer stops unless its arguments say the same: "
    advice = 'Write "auto", and the Trainer fills in its own.'
    assert said(trainer.has_to_equal_the_training_argument, given) == [
        (
            "note",
            "",
            "train_batch_size",
            f"{start}train_batch_size 8 = GPUs x per_device_train_batch_size x gradient_accumulation_steps, "
            "gradient_clipping 0.5 = max_grad_norm (1.0 by default)",
            advice,
        ),
        ("note", "", "optimizer.params.lr", f"{start}lr 0.0001 = learning_rate (5e-05 by default)", advice),
        ("note", "", "scheduler.params.total_num_steps", f"{start}total_num_steps 9 = max_steps", advice),
    ]
    first = fixes(trainer.has_to_equal_the_training_argument, given)[0]
    assert first == (
        (("replace", "train_batch_size", "auto"), ("replace", "gradient_clipping", "auto")),
        False,
    )


@pytest.mark.parametrize(("mine", "other"), [("fp16", "bf16"), ("bf16", "fp16")])
def test_precision_of_the_other_kind(mine, other):
    for written in (True, "True"):
        given = {"_trainer": {other: True}, mine: {"enabled": written}}
        assert said(trainer.precision_of_the_other_kind, given) == [
            (
                "error",
                "fails",
                f"{mine}.enabled",
                f"is true, and the Trainer is asked for {other}",
                f'Write "auto", or train with {mine} in TrainingArguments and without {other}.',
            )
        ]
        assert fixes(trainer.precision_of_the_other_kind, given) == [
            ((("replace", f"{mine}.enabled", "auto"),), False)
        ]
    assert said(trainer.precision_of_the_other_kind, {"_trainer": {}, mine: {"enabled": True}}) == []
    both = {"_trainer": {other: True, mine: True}, mine: {"enabled": True}}
    assert said(trainer.precision_of_the_other_kind, both) == []


@pytest.mark.parametrize(
    ("given", "severity", "path", "message", "suggestion"),
    [
        (
            ALONE,
            "warning",
            "gradient_clipping",
            "is missing: DeepSpeed takes 1 in place of the Trainer's max_grad_norm",
            'Add gradient_clipping: "auto".',
        ),
        (
            {**ALONE, "_trainer": {"max_grad_norm": 0.3}},
            "error",
            "gradient_clipping",
            "is missing: DeepSpeed takes 1 in place of the Trainer's max_grad_norm 0.3",
            'Add gradient_clipping: "auto".',
        ),
        (
            {**ALONE, "_version": "0.18", "_trainer": {}},
            "error",
            "gradient_clipping",
            "is missing: DeepSpeed takes 0 in place of the Trainer's max_grad_norm 1.0",
            'Add gradient_clipping: "auto".',
        ),
        (
            adam(weight_decay="auto"),
            "warning",
            "optimizer.params",
            "lacks lr, betas and eps: DeepSpeed takes 0.001 in place of the Trainer's learning_rate, "
            "[0.9, 0.999] in place of the Trainer's adam_beta1, adam_beta2 "
            "and 1e-08 in place of the Trainer's adam_epsilon",
            'Add lr, betas and eps: "auto".',
        ),
        (
            {"optimizer": {"type": "Adagrad", "params": {}}, "_trainer": {"learning_rate": 0.001}},
            "error",
            "optimizer.params",
            "lacks lr: DeepSpeed takes 0.01 in place of the Trainer's learning_rate 0.001",
            'Add lr: "auto".',
        ),
        (
            {**warmup("WarmupDecayLR", total_num_steps="auto"), "_trainer": {"learning_rate": 0.1}},
            "error",
            "scheduler.params",
            "lacks warmup_num_steps and warmup_max_lr: DeepSpeed takes 1000 in place of the Trainer's "
            "warmup_steps 1 and 0.001 in place of the Trainer's learning_rate 0.1",
            'Add warmup_num_steps and warmup_max_lr: "auto".',
        ),
        (
            {**warmup("WarmupCosineLR", total_num_steps="auto"), "_trainer": {"warmup_steps": 999}},
            "error",
            "scheduler.params",
            "lacks warmup_num_steps: DeepSpeed takes 1000 in place of the Trainer's warmup_steps 999",
            'Add warmup_num_steps: "auto".',
        ),
    ],
)
def test_argument_whose_key_is_missing(given, severity, path, message, suggestion):
    effect = "differs" if severity == "error" else ""
    assert said(trainer.argument_whose_key_is_missing, given) == [
        (severity, effect, path, message, suggestion)
    ]
    assert all(safe for _, safe in fixes(trainer.argument_whose_key_is_missing, given))


@pytest.mark.parametrize(
    "given",
    [
        {"optimizer": {"type": "Adagrad", "params": {}}, "_trainer": {"learning_rate": 0.01}},
        {
            "optimizer": {"type": "Lion", "params": {}},
            "_trainer": {"learning_rate": 0.001, "weight_decay": 1},
        },
        {"optimizer": {"type": "Muon", "params": {"muon_lr": 0.1}}, "_trainer": {}},
        {**adam(), **warmup("OneCycle"), "_trainer": {}},
        {**adam(), **warmup("LRRangeTest"), "_trainer": {}},
        {**adam(), **warmup("WarmupDecayLR", warmup_max_lr="auto", warmup_num_steps="auto"), "_trainer": {}},
        {"optimizer": {"params": {}}, "_trainer": {}},
        {**warmup("WarmupLR"), "_trainer": {"warmup_steps": 0.5}},
    ],
)
def test_nothing_is_lost_without_the_key(given):
    assert said(trainer.argument_whose_key_is_missing, given) == []


@pytest.mark.parametrize("params", [{}, {"warmup_num_steps": 1}])
def test_a_schedule_without_a_rate_leaves_the_optimizers(params):
    given = {**adam(), **warmup("WarmupLR", **params), "_trainer": {"warmup_steps": 1000}}
    assert [hit[2] for hit in said(trainer.argument_whose_key_is_missing, given)] == ["optimizer.params"]


def test_edits_add_each_key():
    assert fixes(
        trainer.argument_whose_key_is_missing, {"_trainer": {"weight_decay": 1}, **adam(lr="auto")}
    ) == [((("add", "optimizer.params.weight_decay", "auto"),), True)]


@pytest.mark.parametrize(
    ("given", "arguments", "severity", "effect", "told"),
    [
        ({"train_micro_batch_size_per_gpu": "auto"}, None, "warning", "", "whatever the Trainer accumulates"),
        ({"train_micro_batch_size_per_gpu": "auto"}, 2, "error", "differs", "and the Trainer accumulates 2"),
        ({"train_batch_size": "auto"}, 2, "error", "differs", "and the Trainer accumulates 2"),
        (
            {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"},
            3,
            "error",
            "fails",
            "and the Trainer accumulates 3",
        ),
    ],
)
def test_accumulation_that_deepspeed_is_not_told(given, arguments, severity, effect, told):
    given = {
        **ALONE,
        **given,
        **({} if arguments is None else {"_trainer": {trainer.ACCUMULATION: arguments}}),
    }
    assert said(trainer.accumulation_that_deepspeed_is_not_told, given) == [
        (
            severity,
            effect,
            trainer.ACCUMULATION,
            f"is missing: DeepSpeed is told 1, {told}",
            f'Add {trainer.ACCUMULATION}: "auto".',
        )
    ]
    assert fixes(trainer.accumulation_that_deepspeed_is_not_told, given) == [
        ((("add", trainer.ACCUMULATION, "auto"),), True)
    ]
    assert said(trainer.accumulation_that_deepspeed_is_not_told, {**given, "_for": "accelerate"}) == []


def test_no_batch_size_at_all_is_another_rules():
    assert said(trainer.accumulation_that_deepspeed_is_not_told, ALONE) == []


@pytest.mark.parametrize(
    ("kind", "optim", "replaced"),
    [
        ("AdamW", "sgd", True),
        ("Adam", "adamw_torch", False),
        ("adamw", "paged_adamw_32bit", False),
        ("AdamW", "galore_adamw", True),
        ("Lion", "lion_32bit", False),
        ("Lion", "adamw_torch", True),
        ("Lion", "adamw_torch_fused", False),
    ],
)
def test_optim_replaced_by_the_config(kind, optim, replaced):
    given = {"optimizer": {"type": kind, "params": {}}, "_trainer": {"optim": optim}}
    expected = (
        "warning",
        "",
        "optimizer",
        f"{kind} trains, and the Trainer's optim {optim} is ignored",
        f"Remove the section to train with {optim}, or leave optim out.",
    )
    assert said(trainer.optim_replaced_by_the_config, given) == [expected] * replaced
    edits = ((("remove", "optimizer", None),), False)
    assert fixes(trainer.optim_replaced_by_the_config, given) == [edits] * replaced


@pytest.mark.parametrize(
    ("kind", "asked", "replaced"),
    [
        ("WarmupLR", "cosine", True),
        ("WarmupCosineLR", "cosine", False),
        ("WarmupCosineLR", "constant_with_warmup", True),
        ("WarmupLR", "constant_with_warmup", False),
        ("WarmupLR", "polynomial", True),
        ("WarmupCosineLR", "linear", False),
    ],
)
def test_schedule_replaced_by_the_config(kind, asked, replaced):
    given = {**warmup(kind), "_trainer": {"lr_scheduler_type": asked}}
    expected = (
        "warning",
        "",
        "scheduler",
        f"{kind} runs, and the Trainer's lr_scheduler_type {asked} is ignored",
        f"Remove the section to train with {asked}, or leave lr_scheduler_type out.",
    )
    assert said(trainer.schedule_replaced_by_the_config, given) == [expected] * replaced
    edits = ((("remove", "scheduler", None),), False)
    assert fixes(trainer.schedule_replaced_by_the_config, given) == [edits] * replaced


@pytest.mark.parametrize(
    ("optim", "effect", "end"),
    [
        ("sgd", "differs", "without a word"),
        ("adafactor", "fails", "and fails at the first step"),
        ("adamw_bnb_8bit", "differs", "without a word"),
        *((kept, None, None) for kept in trainer.KEPT),
    ],
)
def test_optim_that_becomes_adam(optim, effect, end):
    found = said(trainer.optim_that_becomes_adam, {"_trainer": {"optim": optim}, **OFFLOAD})
    path = "zero_optimization.offload_optimizer.device"
    text = f"with offload the Trainer's optim {optim} becomes DeepSpeed's CPU Adam, {end}"
    advice = "Set zero_force_ds_cpu_optimizer to false to keep it, or train with optim adamw_torch."
    assert found == ([("error", effect, path, text, advice)] if effect else [])


def test_nvme_is_offload_too():
    zero = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}}
    assert said(trainer.optim_that_becomes_adam, {"_trainer": {"optim": "sgd"}, **zero})


@pytest.mark.parametrize(
    ("rule", "given", "path", "message", "suggestion"),
    [
        (
            trainer.fsdp_beside_deepspeed,
            {"_trainer": {"fsdp": "full_shard"}},
            "zero_optimization",
            'and the Trainer\'s fsdp "full_shard" exclude each other',
            "Leave fsdp out.",
        ),
        (
            trainer.best_model_without_its_checkpoint,
            {"_trainer": {"save_only_model": True, "load_best_model_at_end": True}},
            "zero_optimization",
            "save_only_model and load_best_model_at_end exclude each other under DeepSpeed",
            "Leave one of the two out.",
        ),
        (
            trainer.evaluation_alone_below_stage_3,
            {"_trainer": {"do_eval": True}},
            "zero_optimization.stage",
            "2 can't evaluate alone, and the Trainer is asked for do_eval without do_train",
            "Set the stage to 3, or evaluate without DeepSpeed.",
        ),
        (
            trainer.batch_size_search_at_stage_3,
            {"_trainer": {"auto_find_batch_size": True}, "zero_optimization": {"stage": 3}},
            "zero_optimization.stage",
            "3 and the Trainer's auto_find_batch_size exclude each other",
            "Set the batch size yourself, or the stage to 2.",
        ),
        (
            trainer.ranks_on_the_cpu_that_are_not_counted,
            {"_trainer": {"use_cpu": False}, "_device": "cpu", "_world_size": 2},
            "train_batch_size",
            "is worked out for 1 rank, and there are 2 on the CPU",
            "Set use_cpu in TrainingArguments.",
        ),
    ],
)
def test_arguments_that_do_not_go_with_deepspeed(rule, given, path, message, suggestion):
    assert said(rule, given) == [("error", "fails", path, message, suggestion)]
    assert said(rule, {**given, "_for": "accelerate"}) == []


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_autocast_of_low_precision_weights(precision):
    given = {"_trainer": {precision: True}, "torch_autocast": {"enabled": True}}
    assert said(trainer.autocast_of_low_precision_weights, given) == [
        (
            "warning",
            "",
            "torch_autocast",
            f"has little left to do: the Trainer's {precision} makes the weights 16 bit",
            f"Leave {precision} out of TrainingArguments, or remove torch_autocast.",
        )
    ]


@pytest.mark.parametrize(("flag", "op"), [(None, "add"), (False, "replace")])
def test_tensor_parallel_weights_stay_in_pieces(flag, op):
    zero = {"stage": 2, **({} if flag is None else {"stage3_gather_16bit_weights_on_model_save": flag})}
    given = {"tensor_parallel": {"autotp_size": 2}, "zero_optimization": zero}
    path = trainer.GATHER
    assert said(trainer.tensor_parallel_weights_stay_in_pieces, given) == [
        (
            "warning",
            "",
            path,
            "is off: the parts of 2 GPUs are not put together, and saving gives no model file",
            "Set it to true; with tensor parallelism it acts at every stage.",
        )
    ]
    assert fixes(trainer.tensor_parallel_weights_stay_in_pieces, given) == [(((op, path, True),), True)]
