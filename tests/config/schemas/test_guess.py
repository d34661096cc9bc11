"""What a key that DeepSpeed hasn't got was meant to be, and which of its fixes may be made unasked."""

from __future__ import annotations

import pytest

from dsrun.config import tree
from dsrun.config.schemas import schema
from dsrun.config.schemas import violations as schema_violations
from dsrun.config.validation import edits

ZERO = "zero_optimization"


def advised(config, target="deepspeed"):
    """path -> (what is advised, the fix) of every key that is none of DeepSpeed's."""
    violations = schema_violations.check(schema.load(), config, target)
    return {
        violation.path: (violation.suggestion, violation.fix)
        for violation in violations
        if violation.kind in ("unknown", "foreign", "removed")
    }


def of(path, value):
    config = {}
    tree.put(config, path, value)
    return advised(config)[path]


def in_words(path, fix):
    """("gradient_clipping", "safe"): where the fix leads, "" for a key taken out; (None, None) without one."""
    if fix is None:
        return None, None
    (edit,) = fix.edits
    section = path.rpartition(".")[0]
    ahead = f"{section}." if section else ""
    to = {"rename": f"{ahead}{edit.value}", "move": edit.value, "remove": ""}[edit.op]
    assert edit.path == path
    return to, "safe" if fix.safe else "unsafe"


TYPOS = [
    ("gradient_cliping", 1.0, "gradient_clipping"),
    ("gradient_acumulation_steps", 2, "gradient_accumulation_steps"),
    ("train_batchsize", 8, "train_batch_size"),
    ("train_micro_batch_size_per_gpus", 8, "train_micro_batch_size_per_gpu"),
    ("steps_per_prints", 8, "steps_per_print"),
    ("zero_optimisation", {"stage": 2}, ZERO),
    ("optimzer", {"type": "Adam"}, "optimizer"),
    ("schedular", {"type": "WarmupLR"}, "scheduler"),
    ("wall_clock_breakdwon", True, "wall_clock_breakdown"),
    ("activation_checkpoint", {"profile": True}, "activation_checkpointing"),
    ("dsable_allgather", True, "disable_allgather"),
    ("flops_profile", {"enabled": True}, "flops_profiler"),
    (f"{ZERO}.offload_optimzer", {"device": "cpu"}, f"{ZERO}.offload_optimizer"),
    (f"{ZERO}.stge", 2, f"{ZERO}.stage"),
    (f"{ZERO}.overlap_com", True, f"{ZERO}.overlap_comm"),
    (f"{ZERO}.contigous_gradients", True, f"{ZERO}.contiguous_gradients"),
    (f"{ZERO}.reduce_bucketsize", 5, f"{ZERO}.reduce_bucket_size"),
    (f"{ZERO}.stage3_max_live_params", 5, f"{ZERO}.stage3_max_live_parameters"),
    (f"{ZERO}.zero_quantized_weight", True, f"{ZERO}.zero_quantized_weights"),
    (f"{ZERO}.offload_param.devices", "cpu", f"{ZERO}.offload_param.device"),
    (f"{ZERO}.offload_optimizer.devices", "cpu", f"{ZERO}.offload_optimizer.device"),
    ("bf16.enable", True, "bf16.enabled"),
    ("hybrid_engine.enable", True, "hybrid_engine.enabled"),
    ("fp16.enabeld", True, "fp16.enabled"),
    ("fp16.loss_scales", 0, "fp16.loss_scale"),
]


@pytest.mark.parametrize(("path", "value", "meant"), TYPOS)
def test_a_slip_is_put_right_unasked(path, value, meant):
    advice, fix = of(path, value)
    assert meant in advice
    assert in_words(path, fix) == (meant, "safe")


ASKED = [
    (f"{ZERO}.comm_overlap", True, f"{ZERO}.overlap_comm"),
    ("optimizer_offload", {"device": "cpu"}, f"{ZERO}.offload_optimizer"),
    ("optim_offload", {"device": "cpu"}, f"{ZERO}.offload_optimizer"),
    ("params_offload", {"device": "cpu"}, f"{ZERO}.offload_param"),
    (f"{ZERO}.optimizer_offload", {"device": "cpu"}, f"{ZERO}.offload_optimizer"),
    ("zero", {"stage": 2}, ZERO),
    ("zero", {"overlap_comm": True, "stage": "auto"}, ZERO),
    ("zero", {}, ZERO),
    ("ds_zero", {"stage": 2, "overlap_comm": True}, ZERO),
    ("zero_config", {"stage": 3}, ZERO),
    ("sharding", {"stage": 3, "contiguous_gradients": True, "other": 1}, ZERO),
    ("wandb_config", {"enabled": True}, "wandb"),
    ("tensorboard_config", {"enabled": True}, "tensorboard"),
    ("checkpointing", {"partition_activations": True}, "activation_checkpointing"),
    ("half", {"enabled": True, "loss_scale": 0}, "fp16"),
    ("float16", {"enabled": True}, "fp16"),
    ("bfloat", {"enabled": True}, "bf16"),
    ("bfp16", {"enabled": True}, "bf16"),
    ("gas", 4, "gradient_accumulation_steps"),
    ("ga_steps", 4, "gradient_accumulation_steps"),
    ("grad_accum", 4, "gradient_accumulation_steps"),
    ("micro_batch", 4, "train_micro_batch_size_per_gpu"),
    ("micro_batch_size", 4, "train_micro_batch_size_per_gpu"),
    ("mbs", 4, "train_micro_batch_size_per_gpu"),
    ("grad_clip", 1.0, "gradient_clipping"),
    ("clip_grad_norm", 1.0, "gradient_clipping"),
    ("print_steps", 10, "steps_per_print"),
    ("wd", 0.1, "optimizer.params.weight_decay"),
    ("stage", 2, f"{ZERO}.stage"),
    ("lr", 0.1, "optimizer.params.lr"),
    ("loss_scale", 0, "fp16.loss_scale"),
]


@pytest.mark.parametrize(("path", "value", "meant"), ASKED)
def test_a_guess_is_written_only_when_asked(path, value, meant):
    advice, fix = of(path, value)
    assert meant in advice
    assert in_words(path, fix) == (meant, "unsafe")


UNFIXED = [
    ("postscale_gradients", True, "prescale_gradients, which is the opposite"),
    ("enable_allgather", True, "disable_allgather, which is the opposite"),
    ("fp16.max_loss_scale", 1, "fp16.min_loss_scale, which is the opposite"),
    ("fp16.disabled", True, "fp16.enabled, which is the opposite"),
    (f"{ZERO}.no_overlap_comm", True, f"{ZERO}.overlap_comm, which is the opposite"),
    ("checkpointing", True, "checkpoint or activation_checkpointing"),
    (
        "expert_parallel.expert_w",
        "w",
        " or ".join(f"expert_parallel.expert_w{number}" for number in (3, 1, 2)),
    ),
    ("offload", True, f"{ZERO}.offload_optimizer?"),
    ("offload", "cpu", f"{ZERO}.offload_optimizer?"),
    (f"{ZERO}.offload", True, f"{ZERO}.offload_optimizer?"),
    (f"{ZERO}.offload", "cpu", f"{ZERO}.offload_optimizer?"),
    ("half", True, "fp16"),
    ("fp32", {"enabled": True}, "fp32"),
    ("beta1", 0.9, "betas: [0.9, 0.95] in optimizer.params"),
    ("moe", {"enabled": True}, "deepspeed.moe.layer.MoE"),
    ("data_impl", "mmap", "the training script"),
    ("gradient_checkpoint", True, "gradient_checkpointing_enable()"),
    ("allreduce_always_fp32", True, "communication_data_type: fp32"),
    ("cpu_offload_params", True, f"{ZERO}.offload_param.device: cpu"),
    (f"{ZERO}.cpu_offload_params", True, f"{ZERO}.offload_param.device: cpu"),
    ("bf16.$schema", "x", "top level"),
    ("备注", "x", "underscore"),
    ("说明", {"a": 1}, "underscore"),
    ("optimizer.备注", "x", "underscore"),
    ("my_thing", {"enabled": True}, "underscore"),
]


@pytest.mark.parametrize(("path", "value", "advice"), UNFIXED)
def test_advice_without_a_fix(path, value, advice):
    text, fix = of(path, value)
    assert advice in text
    assert fix is None


def test_a_section_by_its_own_name_inside_itself():
    advice, fix = of("fp16.fp16", True)
    assert advice.startswith("fp16 takes: enabled, auto_cast, loss_scale")
    assert in_words("fp16.fp16", fix) == ("", "unsafe")


@pytest.mark.parametrize(
    ("path", "value", "advice", "safety"),
    [
        ("bf16.loss_scale", 0, "bf16 needs no loss scale", "safe"),
        ("bfloat16.loss_scale", 0, "bf16 needs no loss scale", "safe"),
        ("bf16.hysteresis", 2, "bf16 needs no loss scale", "safe"),
        ("bf16.auto_cast", True, "at fp16.auto_cast only", "unsafe"),
        (f"{ZERO}.offload_param.fast_init", True, f"at {ZERO}.offload_optimizer.fast_init only", "unsafe"),
    ],
)
def test_a_key_of_the_section_beside_may_be_taken_out(path, value, advice, safety):
    text, fix = of(path, value)
    assert advice in text
    assert in_words(path, fix) == ("", safety)


@pytest.mark.parametrize(
    ("config", "path", "advice"),
    [
        ({"gradient_cliping": 1.0, "gradient_clipping": 0.5}, "gradient_cliping", "gradient_clipping"),
        ({"gradient_cliping": 1.0, "gradient_clippin": 0.5}, "gradient_cliping", "gradient_clippin"),
        ({"gradient_cliping": 1.0, "gradient_clippin": 0.5}, "gradient_clippin", "gradient_cliping"),
        ({"gradient_cliping": 1.0, "max_grad_norm": 0.5}, "gradient_cliping", "max_grad_norm"),
        ({"gas": 1, "gradient_accumulation_steps": 2}, "gas", "gradient_accumulation_steps"),
        ({"bfloat": {"enabled": True}, "bfloat16": {"enabled": True}}, "bfloat", "bfloat16"),
        ({"stage": 2, ZERO: {"stage": 3}}, "stage", f"{ZERO}.stage"),
        ({ZERO: {"stge": 2, "stage": 3}}, f"{ZERO}.stge", "stage"),
    ],
)
def test_no_fix_where_the_place_is_taken(config, path, advice):
    text, fix = advised(config)[path]
    assert text.startswith(f"{advice} ")
    assert fix is None


def test_a_key_moves_into_a_section_that_is_there():
    config = {"opt_level": "O2"}
    advice, fix = advised(config)["opt_level"]
    assert "msamp.opt_level" in advice
    assert fix is None
    _, fix = advised({**config, "msamp": {"enabled": True}})["opt_level"]
    assert in_words("opt_level", fix) == ("msamp.opt_level", "unsafe")


def test_a_section_that_moved_as_a_whole_stays():
    old = {"enabled": True, "schedule_type": "fixed_linear", "schedule_config": {"total_curriculum_step": 9}}
    advice, fix = advised({"curriculum_learning": old})["curriculum_learning"]
    assert "data_efficiency.data_sampling.curriculum_learning" in advice
    assert fix is None


def test_parts_of_it_are_not_scattered():
    inner = {"enabled": True, "schedule_type": "fixed_linear", "schedule_config": {}}
    config = {"data_efficiency": {"data_sampling": {"curriculum_learning": inner}}}
    assert not [path for path, (_, fix) in advised(config).items() if fix]


@pytest.mark.parametrize(("path", "value"), [(path, value) for path, value, _ in TYPOS])
def test_after_a_safe_fix_the_key_is_known(path, value):
    config = {}
    tree.put(config, path, value)
    _, fix = advised(config)[path]
    assert path not in advised(edits.apply(config, fix.edits))
