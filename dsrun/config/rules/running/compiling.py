"""DS732 to DS739: DeepCompile, which waits for engine.compile()."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import DEEP, OPTIMIZER, PARAMETERS, set_to
from dsrun.config.rules.conditions import Condition
from dsrun.config.rules.examples import ZERO_1, ZERO_2, deep, hf, tensor, zero
from dsrun.config.rules.file.effects import known_keys
from dsrun.config.rules.frame import FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, all_of, excludes, report
from dsrun.config.rules.running.batch import TENSOR

WITHOUT_DEEP = ("deepcompile", "autoep_non_moe")
PASSES = "compile.passes"


def compiles(context: Context) -> bool | None:
    """Whether the code calls engine.compile; None if it isn't known. HF Trainer does for torch_compile."""
    if not context.by_trainer or context.setting.trainer is None:
        return None
    return bool(context.argument("torch_compile"))


def _has_pass(*names: str) -> Condition:
    """One of these passes is asked for."""
    return lambda context: not set(names).isdisjoint(_passes(context))


def _passes(context: Context) -> list[str]:
    passes = context.get(PASSES)
    return [name for name in passes if isinstance(name, str)] if isinstance(passes, list) else []


@rule("DS732", "warning")
@bad({"compile": {"offload_activation": True}}, {"compile": {"deepcompile": False, "passes": ["z3"]}})
@good({"compile": {"deepcompile": False}}, {**deep(passes=["z3"]), **zero(3)})
def compile_details_without_deepcompile(context: Context) -> Iterator[Finding]:
    """engine.compile reads them for DeepCompile only (runtime/engine.py)."""
    if context.get(DEEP) not in (None, False):
        return
    rest = [key for key in known_keys(context, "compile") if key not in WITHOUT_DEEP]
    rest = [
        key for key in rest if context.get(f"compile.{key}") != context.schema.describe(f"compile.{key}")[0]
    ]
    if rest:
        text = f"has no effect while deepcompile is off: {', '.join(rest)}"
        yield Finding("compile", text, f"Set {DEEP} to true, or remove {'them' if len(rest) > 1 else 'it'}.")


@rule("DS733", "note")
@bad({**deep(), **ZERO_2}, hf({"torch_compile": False}, **deep()))
@good({"compile": {"deepcompile": False}}, hf({"torch_compile": True}, **deep()))
def deepcompile_without_compiling(context: Context) -> Iterator[Finding]:
    """Nothing happens before engine.compile(); a line in the log says so (forward in runtime/engine.py)."""
    if not context.flag(DEEP) or compiles(context):
        return
    if compiles(context) is False:
        advice = "Set torch_compile in the TrainingArguments."
        yield Finding(
            DEEP, "has no effect: torch_compile is off, so nothing is compiled", advice, severity="warning"
        )
    else:
        where = (
            "Set torch_compile in the TrainingArguments."
            if context.by_trainer
            else "Call it after deepspeed.initialize."
        )
        yield Finding(DEEP, "acts only after engine.compile()", where)


@rule("DS734", FAILS)
@bad(hf({"torch_compile": True}, _device="cpu", **deep()))
@good(hf({"torch_compile": True}, _device="cuda", **deep()), hf({"torch_compile": True}, **deep()))
def deepcompile_on_the_cpu(context: Context) -> Iterator[Finding]:
    """Its extension is CUDA code (op_builder/dc.py, compile/util.py); it is only built for engine.compile()."""
    if context.flag(DEEP) and context.setting.device == "cpu":
        fix = set_to(context, DEEP, value=False)
        severity = "" if compiles(context) else "warning"
        yield Finding(
            DEEP, "needs GPUs: its extension doesn't build on the CPU", "Set it to false.", fix, severity
        )


@rule("DS735", "warning", since=(0, 18))
@bad(deep(), {**deep(passes=["autosp"]), **ZERO_2})
@good({**deep(), **ZERO_1}, {**deep(passes=["autosp"]), **ZERO_1})
def deepcompile_falls_back() -> Table:
    """If its passes don't match, plain torch.compile is used, with one line in the log.

    Source: get_deepcompile_backend, get_autosp_backend and get_autotp_backend in runtime/engine.py.
    """
    end = ": plain torch.compile is used. "
    return all_of(
        report(
            PASSES,
            f'"autosp" can\'t be combined with ZeRO stage {{stage}}{end}Set zero_optimization.stage to 0 or 1.',
            (_has_pass("autosp"), when.unless(when.below_stage(2))),
        ),
        report(
            PASSES,
            f'"autotp" needs {TENSOR} above 1{end}Set {TENSOR}.',
            (when.unless(_has_pass("autosp")), _has_pass("autotp"), when.unless(when.several(TENSOR))),
        ),
        report(
            DEEP,
            f"needs ZeRO stage 1, 2 or 3{end}Set zero_optimization.stage.",
            (when.unless(_has_pass("autosp", "autotp")), when.at_stage(0)),
        ),
        when=when.on(DEEP),
    )


@rule("DS736", FAILS, since=(0, 19, 6))
@bad(
    hf(
        {"torch_compile": True},
        **tensor(2),
        **zero(2, stage3_gather_16bit_weights_on_model_save=True),
        **deep(passes=["autotp", "z3"]),
    )
)
@good(
    hf({"torch_compile": True}, **deep(passes=["z1", "z3"])),
    {"compile": {"deepcompile": False, "passes": ["autotp", "z3"]}},
)
def passes_cannot_be_combined(context: Context) -> Iterator[Finding]:
    """autotp can't be combined with others (get_deepspeed_compile_backend in runtime/engine.py)."""
    passes = _passes(context)
    others = [name for name in passes if name != "autotp"]
    if context.flag(DEEP) and "autotp" in passes and others:
        severity = "" if compiles(context) else "warning"
        text = f'"autotp" can\'t be combined with {", ".join(others)}'
        yield Finding(PASSES, text, "Keep one of them.", None, severity)


@rule("DS738", "warning")
@bad(
    {**deep(offload_activation=True, offload_parameters=True), **zero(3)},
    {**deep(offload_activation=True, offload_opt_states=True), **zero(3)},
)
@good({**deep(offload_activation=True), **zero(3)}, {**deep(offload_opt_states=True), **zero(3)})
def offloads_that_exclude_each_other(context: Context) -> Iterator[Finding]:
    """engine.compile() refuses them (compile/init_z3.py)."""
    if not context.flag(DEEP) or context.stage != 3:
        return
    on = [
        f"offload_{name}"
        for name in ("activation", "parameters", "opt_states")
        if context.flag(f"compile.offload_{name}")
    ]
    if len(on) > 1:
        text = f"can't combine {', '.join(on)}: engine.compile() fails"
        yield Finding("compile", text, "Keep one of them.")
    elif on == ["offload_opt_states"] and context.text("zero_optimization.offload_optimizer.device") in (
        "cpu",
        "nvme",
    ):
        yield Finding(
            "compile.offload_opt_states",
            "can't be combined with zero_optimization.offload_optimizer: engine.compile() fails",
            "Keep one of the two.",
        )


@rule("DS739", "warning", since=(0, 19, 8))
@bad(
    {"compile": {"autoep_non_moe": True}, **zero(3)},
    {"compile": {"autoep_non_moe": True, "deepcompile": True}, **ZERO_1},
)
@good(
    {"compile": {"autoep_non_moe": True}, **ZERO_2},
    {"compile": {"autoep_non_moe": True}, "expert_parallel": {"comm_backend": "comm"}},
)
def compiling_around_experts() -> Table:
    """engine.compile() refuses these together with autoep_non_moe (compile in runtime/engine.py)."""
    return excludes(
        "compile.autoep_non_moe",
        {
            DEEP: when.on(DEEP),
            "ZeRO stage 3": when.at_stage(3),
            TENSOR: when.several(TENSOR),
            "offload_optimizer": when.is_one_of(f"{OPTIMIZER}.device", "cpu", "nvme"),
            "offload_param": when.is_one_of(f"{PARAMETERS}.device", "cpu", "nvme"),
            'comm_backend "deepep"': when.is_one_of("expert_parallel.comm_backend", "deepep"),
        },
        "can't be combined with {others}: engine.compile() fails. Set it to false, or remove the other.",
    )
