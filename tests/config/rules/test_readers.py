"""What the rules of accelerate and Lightning say, to the word."""

import pytest

from dsrun.config.rules import readers
from dsrun.config.rules.frame import Context, Edit, example

ALONE = {"_bare": True, "zero_optimization": {"stage": 2}}
ZERO = "zero_optimization"


def hits(rule, given):
    return list(rule.findings(Context(*example(given))))


@pytest.mark.parametrize(
    ("rule", "given", "verdict", "path", "message", "suggestion", "edit"),
    [
        (
            readers.no_zero_section,
            {"_for": "hf", "_bare": True},
            "error fails",
            ZERO,
            "is missing, and accelerate stops without it",
            'Add zero_optimization: {"stage": 0} to train without ZeRO, or the stage you want.',
            Edit("add", "zero_optimization.stage", 0),
        ),
        (
            readers.accumulation_that_accelerate_counts,
            {"_for": "accelerate", "managed_gradient_accumulation": False},
            "error fails",
            "managed_gradient_accumulation",
            "is false, which accelerate can't work with",
            "Remove it: accelerate counts the passes.",
            Edit("remove", "managed_gradient_accumulation"),
        ),
        (
            readers.buckets_of_no_hidden_size,
            {"_for": "hf", "_model": {"hidden_size": 0}, ZERO: {"stage": 2, "reduce_bucket_size": "auto"}},
            "error fails",
            "zero_optimization.reduce_bucket_size",
            "is \"auto\", worked out from a hidden_size that the model's config doesn't have",
            "Write a number, as DeepSpeed's own 500000000.",
            Edit("replace", "zero_optimization.reduce_bucket_size", 500000000),
        ),
        (
            readers.offload_that_auto_turns_off,
            {"_for": "hf", ZERO: {"stage": 3, "offload_param": {"device": "auto"}}},
            "error differs",
            "zero_optimization.offload_param.device",
            'is "auto", which becomes none: nothing is offloaded',
            "Write cpu, nvme or none.",
            Edit("replace", "zero_optimization.offload_param.device", "cpu"),
        ),
        (
            readers.offload_that_auto_turns_off,
            {"_for": "accelerate", ZERO: {"stage": 2, "offload_optimizer": {"device": "auto"}}},
            "warning ",
            "zero_optimization.offload_optimizer.device",
            'is "auto", which becomes what ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE says, and none without it',
            "Write cpu, nvme or none.",
            Edit("replace", "zero_optimization.offload_optimizer.device", "cpu"),
        ),
        (
            readers.stage_that_accelerate_chooses,
            {"_for": "hf", ZERO: {"stage": "auto"}},
            "note ",
            "zero_optimization.stage",
            'is "auto", which becomes 2, or ACCELERATE_DEEPSPEED_ZERO_STAGE where that is set',
            "Write the stage itself.",
            Edit("replace", "zero_optimization.stage", 2),
        ),
        (
            readers.optimizer_that_accelerate_allows,
            {"_for": "hf", "zero_allow_untested_optimizer": False},
            "note ",
            "zero_allow_untested_optimizer",
            "is false, and accelerate sets it to true: there is no optimizer section",
            "Remove it.",
            Edit("remove", "zero_allow_untested_optimizer"),
        ),
        (
            readers.precision_under_its_old_name,
            {"_for": "hf", "bfloat16": {"enabled": True}},
            "error differs",
            "bfloat16",
            "isn't read by accelerate: the Trainer's bf16 alone decides",
            "Call the section bf16.",
            Edit("rename", "bfloat16", "bf16"),
        ),
        (
            readers.precision_under_its_old_name,
            {"_for": "accelerate", "bfloat16": {"enabled": True}},
            "error differs",
            "bfloat16",
            "isn't read by accelerate: accelerate's mixed_precision alone decides",
            "Call the section bf16.",
            Edit("rename", "bfloat16", "bf16"),
        ),
        (
            readers.auto_that_only_the_trainer_fills_in,
            {"_for": "accelerate", "optimizer": {"type": "Adam", "params": {"betas": "auto"}}},
            "error fails",
            "optimizer.params.betas",
            'is "auto", which only HF Trainer fills in: accelerate.prepare stops',
            "Write the value, as [0.9, 0.999].",
            Edit("replace", "optimizer.params.betas", [0.9, 0.999]),
        ),
        (
            readers.total_of_no_micro_batch,
            {"_for": "accelerate", **ALONE, "train_batch_size": "auto"},
            "error fails",
            "train_batch_size",
            'is "auto", worked out from train_micro_batch_size_per_gpu, which is missing',
            'Add train_micro_batch_size_per_gpu: "auto".',
            Edit("add", "train_micro_batch_size_per_gpu", "auto"),
        ),
        (
            readers.accumulation_that_becomes_1,
            {"_for": "accelerate", **ALONE},
            "warning ",
            "gradient_accumulation_steps",
            "is missing, which is 1, whatever Accelerator is given",
            'Add gradient_accumulation_steps: "auto".',
            Edit("add", "gradient_accumulation_steps", "auto"),
        ),
        (
            readers.clipping_by_default,
            {"_for": "accelerate", **ALONE},
            "note ",
            "gradient_clipping",
            "is missing: DeepSpeed clips at its own 1, and accelerator.clip_grad_norm_ changes nothing",
            "Write the norm to clip at, or 0.",
            None,
        ),
        (
            readers.clipping_by_default,
            {"_for": "accelerate", "_version": "0.18", **ALONE},
            "note ",
            "gradient_clipping",
            "is missing: DeepSpeed clips nothing, and accelerator.clip_grad_norm_ changes nothing",
            "Write the norm to clip at, or 0.",
            None,
        ),
        (
            readers.section_that_wants_a_dummy_in_code,
            {"_for": "accelerate", "scheduler": {"type": "WarmupLR", "params": {}}},
            "note ",
            "scheduler",
            "trains only with accelerate.utils.DummyScheduler in the code: prepare refuses a real one beside it",
            "Make a DummyScheduler, or remove the section.",
            None,
        ),
        (
            readers.section_that_wants_a_dummy_in_code,
            {"_for": "accelerate", "optimizer": {"type": "Adam", "params": {}}},
            "note ",
            "optimizer",
            "trains only with accelerate.utils.DummyOptim in the code: prepare refuses a real one beside it",
            "Make a DummyOptim, or remove the section.",
            None,
        ),
        (
            readers.accumulation_that_lightning_sets,
            {"_for": "lightning", "gradient_accumulation_steps": 4},
            "error fails",
            "gradient_accumulation_steps",
            "may not be in the config: Lightning's Trainer stops at it",
            "Remove it, and say Trainer(accumulate_grad_batches=4).",
            Edit("remove", "gradient_accumulation_steps"),
        ),
        (
            readers.accumulation_that_lightning_sets,
            {"_for": "lightning", "gradient_accumulation_steps": None},
            "error fails",
            "gradient_accumulation_steps",
            "may not be in the config: Lightning's Trainer stops at it",
            "Remove it, and say Trainer(accumulate_grad_batches=...).",
            Edit("remove", "gradient_accumulation_steps"),
        ),
        (
            readers.lightning_on_the_cpu,
            {"_for": "lightning", "_device": "cpu"},
            "error fails",
            ZERO,
            "Lightning's DeepSpeedStrategy runs on CUDA GPUs only",
            "Train on a GPU, or with another strategy.",
            None,
        ),
        (
            readers.optimizer_instead_of_configure_optimizers,
            {"_for": "lightning", "optimizer": {"type": "Adam", "params": {}}},
            "warning ",
            "optimizer",
            "trains in place of what the module's configure_optimizers makes, its scheduler left out too",
            "Remove the section, and make the optimizer in configure_optimizers.",
            None,
        ),
    ],
)
def test_what_a_rule_says(rule, given, verdict, path, message, suggestion, edit):
    (hit,) = hits(rule, given)
    assert (hit.path, hit.message, hit.suggestion) == (path, message, suggestion)
    assert f"{hit.severity} {hit.effect}" == verdict
    assert (hit.fix.edits if hit.fix else ()) == ((edit,) if edit else ())
    assert hits(rule, {**given, "_for": "deepspeed"}) == []


@pytest.mark.parametrize(
    ("rule", "given", "safe"),
    [
        (readers.no_zero_section, {"_for": "hf", "_bare": True}, False),
        (readers.offload_that_auto_turns_off, readers.offload_that_auto_turns_off.bad[0], False),
        (readers.stage_that_accelerate_chooses, readers.stage_that_accelerate_chooses.bad[0], False),
        (readers.buckets_of_no_hidden_size, readers.buckets_of_no_hidden_size.bad[0], False),
        (readers.precision_under_its_old_name, readers.precision_under_its_old_name.bad[0], False),
        (
            readers.auto_that_only_the_trainer_fills_in,
            readers.auto_that_only_the_trainer_fills_in.bad[0],
            False,
        ),
        (readers.optimizer_that_accelerate_allows, readers.optimizer_that_accelerate_allows.bad[0], True),
        (readers.total_of_no_micro_batch, readers.total_of_no_micro_batch.bad[0], True),
        (readers.accumulation_that_becomes_1, readers.accumulation_that_becomes_1.bad[0], True),
        (
            readers.accumulation_that_lightning_sets,
            {"_for": "lightning", "gradient_accumulation_steps": 1},
            True,
        ),
        (
            readers.accumulation_that_lightning_sets,
            {"_for": "lightning", "gradient_accumulation_steps": 2},
            False,
        ),
    ],
)
def test_fixes_that_are_safe(rule, given, safe):
    assert [hit.fix.safe for hit in hits(rule, given)] == [safe]


def test_each_auto_bucket_is_named():
    zero = {"stage": 3, **{path.rpartition(".")[2]: "auto" for path in readers.BUCKETS}}
    found = hits(readers.buckets_of_no_hidden_size, {"_for": "accelerate", "_model": {"hidden_size": 0}, ZERO: zero})
    assert tuple(hit.path for hit in found) == readers.BUCKETS


@pytest.mark.parametrize(
    "given",
    [
        {"bfloat16": {"enabled": True}, "bf16": {"enabled": False}},
        {"bfloat16": {"enabled": "auto"}},
        {"bfloat16": {}},
        {"bfloat16": None},
        {"bfloat16": {"enabled": False}, "_trainer": {}},
    ],
)
def test_old_name_that_decides_nothing(given):
    assert hits(readers.precision_under_its_old_name, {"_for": "hf", **given}) == []


@pytest.mark.parametrize("reader", ["hf", "lightning"])
def test_what_concerns_accelerate_alone(reader):
    given = {"_for": reader, **ALONE, "optimizer": {"type": "Adam", "params": {}}, "train_batch_size": "auto"}
    rules = (
        readers.total_of_no_micro_batch,
        readers.accumulation_that_becomes_1,
        readers.clipping_by_default,
        readers.section_that_wants_a_dummy_in_code,
    )
    assert [hits(rule, given) for rule in rules] == [[]] * 4
