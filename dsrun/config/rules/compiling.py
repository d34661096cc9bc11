"""DS732 to DS739: DeepCompile, which waits for engine.compile()."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.batch import TENSOR
from dsrun.config.rules.common import DEEP, above_1, setting
from dsrun.config.rules.effects import known_keys
from dsrun.config.rules.examples import CPU, ZERO_1, ZERO_2, deep, hf, tensor, zero
from dsrun.config.rules.frame import FAILS, Context, Hit, rule

WITHOUT_DEEP = ("deepcompile", "autoep_non_moe")


def compiles(context: Context) -> bool | None:
    """Whether the code calls engine.compile; None if it isn't known. HF Trainer does for torch_compile."""
    if not context.by_trainer or context.setting.trainer is None:
        return None
    return bool(context.argument("torch_compile"))


@rule(
    "DS732",
    "warning",
    bad=[
        {"compile": {"offload_activation": True}},
        {"compile": {"deepcompile": False, "passes": ["z3"]}},
        {"compile": {"free_activation_threshold": 1}},
    ],
    good=[
        {"compile": {"deepcompile": False}},
        {**deep(passes=["z3"]), **zero(3)},
        {"compile": {"double_buffer": False, "deepcompile": True}, **zero(3)},
        {"compile": {"debug_log": False}},
        {"compile": {"autoep_non_moe": True}},
    ],
)
def compile_details_without_deepcompile(context: Context) -> Iterator[Hit]:
    """engine.compile looks at them for DeepCompile only (runtime/engine.py)."""
    if context.get(DEEP) not in (None, False):
        return
    rest = [key for key in known_keys(context, "compile") if key not in WITHOUT_DEEP]
    rest = [
        key for key in rest if context.get(f"compile.{key}") != context.schema.describe(f"compile.{key}")[0]
    ]
    if rest:
        text = f"has no effect while deepcompile is off: {', '.join(rest)}"
        yield Hit("compile", text, f"Set {DEEP} to true, or remove {'them' if len(rest) > 1 else 'it'}.")


@rule(
    "DS733",
    "note",
    bad=[{**deep(), **ZERO_2}, hf({"torch_compile": False}, **deep()), hf(**deep())],
    good=[{"compile": {"deepcompile": False}}, hf({"torch_compile": True}, **deep())],
)
def deepcompile_without_compiling(context: Context) -> Iterator[Hit]:
    """Nothing happens before engine.compile(); the log has a line of it (forward in runtime/engine.py)."""
    if not context.flag(DEEP) or compiles(context):
        return
    if compiles(context) is False:
        advice = "Set torch_compile in the TrainingArguments."
        yield Hit(
            DEEP, "has no effect: torch_compile is off, so nothing is compiled", advice, severity="warning"
        )
    else:
        where = (
            "Set torch_compile in the TrainingArguments."
            if context.by_trainer
            else "Call it after deepspeed.initialize."
        )
        yield Hit(DEEP, "acts only after engine.compile()", where)


@rule(
    "DS734",
    "error",
    FAILS,
    bad=hf({"torch_compile": True}, _device="cpu", **deep()),
    good=[
        hf({"torch_compile": True}, _device="cuda", **deep()),
        hf({"torch_compile": True}, **deep()),
        {"_device": "cpu", "compile": {"deepcompile": False}},
    ],
)
def deepcompile_on_the_cpu(context: Context) -> Iterator[Hit]:
    """Its extension is CUDA code (op_builder/dc.py, compile/util.py); without engine.compile() nothing asks for it."""
    if context.flag(DEEP) and context.setting.device == "cpu":
        fix = setting(context, DEEP, value=False)
        severity = None if compiles(context) else "warning"
        yield Hit(
            DEEP, "needs GPUs: its extension doesn't build on the CPU", "Set it to false.", fix, severity
        )


@rule(
    "DS735",
    "warning",
    bad=[deep(), {**deep(passes=["autosp"]), **ZERO_2}, {**deep(passes=["autotp"]), **ZERO_2}],
    good=[
        {**deep(), **ZERO_1},
        {**deep(passes=["autosp"]), **ZERO_1},
        deep(passes=["autosp"]),
        {**deep(passes=["autotp"]), **tensor(2)},
        {"compile": {"deepcompile": False}},
    ],
    since=(0, 18),
)
def deepcompile_that_falls_back(context: Context) -> Iterator[Hit]:
    """Where its passes don't fit, plain torch.compile takes over, with one line in the log.

    Source: get_deepcompile_backend, get_autosp_backend and get_autotp_backend in runtime/engine.py.
    """
    if not context.flag(DEEP):
        return
    passes = _passes(context)
    end = "torch.compile takes over"
    if "autosp" in passes:
        if context.stage >= 2:
            text = f'"autosp" doesn\'t go with ZeRO stage {context.stage}: {end}'
            yield Hit("compile.passes", text, "Set zero_optimization.stage to 0 or 1.")
    elif "autotp" in passes:
        if not above_1(context, TENSOR):
            text = f'"autotp" needs tensor_parallel.autotp_size above 1: {end}'
            yield Hit("compile.passes", text, "Set tensor_parallel.autotp_size.")
    elif context.stage == 0:
        yield Hit(
            DEEP, f"needs ZeRO stage 1, 2 or 3, and this is stage 0: {end}", "Set zero_optimization.stage."
        )


@rule(
    "DS736",
    "error",
    FAILS,
    bad=hf(
        {"torch_compile": True},
        **tensor(2),
        **zero(2, stage3_gather_16bit_weights_on_model_save=True),
        **deep(passes=["autotp", "z3"]),
    ),
    good=[
        hf({"torch_compile": True}, **deep(passes=["z1", "z3"])),
        {"compile": {"deepcompile": False, "passes": ["autotp", "z3"]}},
        {**deep(passes=["autotp"]), **tensor(2)},
    ],
    since=(0, 18),
)
def passes_that_do_not_mix(context: Context) -> Iterator[Hit]:
    """autotp stands alone (get_deepspeed_compile_backend in runtime/engine.py)."""
    passes = _passes(context)
    others = [name for name in passes if name != "autotp"]
    if context.flag(DEEP) and "autotp" in passes and others:
        severity = None if compiles(context) else "warning"
        text = f'"autotp" can\'t be combined with {", ".join(others)}'
        yield Hit("compile.passes", text, "Keep one of them.", None, severity)


@rule(
    "DS738",
    "warning",
    bad=[
        {**deep(offload_activation=True, offload_parameters=True), **zero(3)},
        {**deep(offload_activation=True, offload_opt_states=True), **zero(3)},
        {**deep(offload_parameters=True, offload_opt_states=True), **zero(3)},
        {**deep(offload_opt_states=True), **zero(3, offload_optimizer={"device": "cpu"})},
    ],
    good=[
        {**deep(offload_activation=True), **zero(3)},
        {**deep(offload_opt_states=True), **zero(3)},
        {**deep(offload_parameters=True), **zero(3, offload_optimizer={"device": "cpu"})},
        {
            "compile": {"deepcompile": False, "offload_activation": True, "offload_parameters": True},
            **zero(3),
        },
    ],
)
def offloads_that_exclude_each_other(context: Context) -> Iterator[Hit]:
    """engine.compile() stops at them (compile/init_z3.py)."""
    if not context.flag(DEEP) or context.stage != 3:
        return
    on = [
        f"offload_{name}"
        for name in ("activation", "parameters", "opt_states")
        if context.flag(f"compile.offload_{name}")
    ]
    if len(on) > 1:
        text = f"can't have {', '.join(on)} together: engine.compile() fails"
        yield Hit("compile", text, "Keep one of them.")
    elif on == ["offload_opt_states"] and context.text("zero_optimization.offload_optimizer.device") in (
        "cpu",
        "nvme",
    ):
        yield Hit(
            "compile.offload_opt_states",
            "doesn't go with zero_optimization.offload_optimizer: engine.compile() fails",
            "Keep one of the two.",
        )


@rule(
    "DS739",
    "warning",
    bad=[
        {"compile": {"autoep_non_moe": True}, **zero(3)},
        {"compile": {"autoep_non_moe": True, "deepcompile": True}, **ZERO_1},
        {"compile": {"autoep_non_moe": True}, **tensor(2)},
        {"compile": {"autoep_non_moe": True}, **CPU},
        {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "deepep"}},
    ],
    good=[
        {"compile": {"autoep_non_moe": True}, **ZERO_2},
        {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "comm"}},
        {"compile": {"autoep_non_moe": True}, **zero(2, offload_optimizer={"device": "none"})},
        {"compile": {"autoep_non_moe": False}, **zero(3)},
    ],
    since=(0, 19),
)
def compiling_around_experts(context: Context) -> Iterator[Hit]:
    """engine.compile() refuses these beside autoep_non_moe (compile in runtime/engine.py)."""
    if not context.flag("compile.autoep_non_moe"):
        return
    against = {
        DEEP: context.flag(DEEP),
        "ZeRO stage 3": context.stage == 3,
        "tensor_parallel.autotp_size": above_1(context, TENSOR),
        "offload_optimizer": context.text("zero_optimization.offload_optimizer.device") in ("cpu", "nvme"),
        "offload_param": context.text("zero_optimization.offload_param.device") in ("cpu", "nvme"),
        'comm_backend "deepep"': context.text("expert_parallel.comm_backend") == "deepep",
    }
    if found := [name for name, there in against.items() if there]:
        text = f"doesn't go with {', '.join(found)}: engine.compile() fails"
        yield Hit("compile.autoep_non_moe", text, "Set it to false, or do without the other.")


def _passes(context: Context) -> list[str]:
    passes = context.get("compile.passes")
    return [name for name in passes if isinstance(name, str)] if isinstance(passes, list) else []
