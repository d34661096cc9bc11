"""DS502 to DS509 and DS543: tensor parallelism."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from dsrun.config.rules import conditions as when
from dsrun.config.rules.common import above_1, divisors, heads_beside, set_to
from dsrun.config.rules.examples import tensor
from dsrun.config.rules.file.effects import known_keys
from dsrun.config.rules.frame import DIFFERS, FAILS, Context, Finding, bad, good, rule
from dsrun.config.rules.kinds import Table, needs, remove, report
from dsrun.config.rules.running.batch import TENSOR

TP = "tensor_parallel"
INNER = f"{TP}.tp.tp_size"
PARTS = f"{TP}.partition_config"
EXPERTS = "expert_parallel"
HEAD = f"{TP}.vocab_parallel_lm_head"
SERVED = "inference.tensor_parallel.tp_size"


@rule("DS502", FAILS)
@bad(tensor(2, tp={"tp_size": 4}), tensor(4, tp={"tp_size": 2}))
@good(tensor(2, tp={"tp_size": 2}), tensor(2, tp={"tp_size": 1}))
def two_tensor_parallel_sizes() -> Table:
    """tp.tp_size must be 1 or the same (_apply_autotp_partitioning in runtime/engine.py)."""

    def differs(context: Context) -> bool:
        return context.integer(INNER) not in (None, 1, context.integer(TENSOR))

    text = "{value} differs from autotp_size {size}. Remove it: autotp_size is enough."
    return report(INNER, text, (when.several(TENSOR), differs), remove(INNER, safe=False), size=TENSOR)


@rule("DS503", DIFFERS)
@bad(tensor(1, tp={"tp_size": 2}), tensor(0, tp={"tp_size": 4}))
@good(tensor(2, tp={"tp_size": 2}), {"tensor_parallel": {"tp": {"tp_size": 1}}})
def tensor_parallelism_is_off(context: Context) -> Iterator[Finding]:
    """The model is split only for autotp_size above 1 (runtime/engine.py).

    Without autotp_size the code may have set it by deepspeed.tp_model_init (runtime/tensor_parallel/init_utils.py).
    """
    size, inner = context.integer(TENSOR), context.integer(INNER)
    if inner is None or inner <= 1 or (size or 0) > 1 or (size is None and context.has(TENSOR)):
        return
    fix = set_to(context, TENSOR, inner)
    text = (
        f"{inner} has no effect: autotp_size is {size}"
        if size is not None
        else f"{inner} has no effect without autotp_size"
    )
    yield Finding(
        INNER, text, f"Set {TENSOR} to {inner}.", fix, severity="" if size is not None else "warning"
    )


@rule("DS504", "warning")
@bad(tensor(1, preset_model="llama"), {"tensor_parallel": {"partition_config": {"strict_mode": True}}})
@good(tensor(2, preset_model="llama"), tensor(1))
def tensor_parallel_details_without_a_size(context: Context) -> Iterator[Finding]:
    """The section isn't read unless autotp_size is above 1 (runtime/engine.py)."""
    if context.has(TENSOR) and (context.integer(TENSOR) is None or above_1(context, TENSOR)):
        return
    rest = [
        key
        for key in known_keys(context, TP)
        if key not in ("autotp_size", "tp") and context.get(f"{TP}.{key}")
    ]
    preset = context.text(f"{EXPERTS}.preset_model")
    if rest and not (rest == ["preset_model"] and preset):
        yield Finding(
            TP,
            f"is off unless autotp_size is above 1, so these have no effect: {', '.join(rest)}",
            f"Set {TENSOR} to the number of GPUs that share a model, or remove the section.",
        )


@rule("DS505", "warning")
@bad({"_model": {"attention_heads": 9}, **tensor(2)}, {"_model": {"attention_heads": 2}, **tensor(4)})
@good({"_model": {"attention_heads": 4}, **tensor(4)}, {"_model": {"attention_heads": 9}, **tensor(1)})
def heads_split_unevenly(context: Context) -> Iterator[Finding]:
    """AutoTP then gives GPUs unequal shares of the attention, or none (get_shard_size in module_inject/tp_shard.py)."""
    if heads := heads_beside(context, TENSOR):
        yield Finding(
            TENSOR,
            f"{heads} attention heads aren't divisible by {context.integer(TENSOR)}: the GPUs get unequal shares",
            f"Use a divisor of the heads: {divisors(heads, ' or ')}.",
        )


@rule("DS506", "warning")
@bad(tensor(2, preset_model="llama", partition_config={"use_default_specs": False}))
@good(
    tensor(2, preset_model="llama", partition_config={"use_default_specs": True}),
    tensor(2, preset_model="llama", partition_config={"strict_mode": True}),
)
def preset_replaced_by_partition_config() -> Table:
    """A partition_config without the default specs replaces the preset.

    Source: get_partition_config_object in runtime/tensor_parallel/config.py.
    """
    path = f"{TP}.preset_model"
    text = '"{value}" has no effect: partition_config.use_default_specs is false. Remove one of the two.'
    return report(path, text, (lambda context: context.text(path), when.off(f"{PARTS}.use_default_specs")))


@rule("DS507", "warning")
@bad(
    tensor(2, partition_config={"layer_specs": [{"partition_type": "row"}]}),
    tensor(2, partition_config={"layer_specs": [{"patterns": [], "partition_type": "row"}]}),
)
@good(
    tensor(2, partition_config={"layer_specs": [{"patterns": [".*o_proj.*"]}]}),
    tensor(2, partition_config={"layer_specs": []}),
)
def layer_spec_without_patterns(context: Context) -> Iterator[Finding]:
    """A spec applies to the parameters that its patterns match (TPLayerSpec in module_inject/autotp_config.py)."""
    for index, spec in enumerate(_specs(context)):
        if not spec.get("patterns"):
            path = f"{PARTS}.layer_specs.{index}"
            yield Finding(
                path,
                "has no patterns, so it matches no layer",
                'Add "patterns": regular expressions of names.',
            )


@rule("DS508", FAILS)
@bad(tensor(2, partition_config={"layer_specs": [{"patterns": [".*(q_proj"]}]}))
@good(
    tensor(2, partition_config={"layer_specs": [{"patterns": [".*(q_proj)"]}]}),
    tensor(1, partition_config={"layer_specs": [{"patterns": [".*(q_proj"]}]}),
)
def invalid_regular_expression(context: Context) -> Iterator[Finding]:
    """The patterns are passed to Python's re (TPLayerSpec.matches in module_inject/autotp_config.py)."""
    if not above_1(context, TENSOR):
        return
    for index, spec in enumerate(_specs(context)):
        patterns = spec.get("patterns")
        for pattern in patterns if isinstance(patterns, list) else ():
            try:
                re.compile(pattern)
            except (re.error, TypeError) as error:
                path = f"{PARTS}.layer_specs.{index}.patterns"
                text = f'"{pattern}" is not a regular expression: {error}'
                yield Finding(
                    path, text, "Use the syntax of Python's re; a literal bracket needs a backslash."
                )


@rule("DS509", FAILS, since=(0, 19, 8))
@bad(tensor(2, vocab_parallel_ce_backend="liger", vocab_parallel_lm_head=False))
@good(
    tensor(2, vocab_parallel_ce_backend="torch", vocab_parallel_lm_head=False),
    tensor(2, vocab_parallel_ce_backend="liger", vocab_parallel_lm_head=True),
)
def vocab_parallel_loss_without_its_head() -> Table:
    """Liger's loss needs a head that is split by the vocabulary (finalize_autotp in runtime/engine.py)."""
    path = f"{TP}.vocab_parallel_ce_backend"
    text = f"vocab_parallel_lm_head, which is false. Set {HEAD} to true."
    return needs(path, text, (when.several(TENSOR), when.off(HEAD)), given="liger")


@rule("DS543", "note")
@bad(
    {"inference": {"tensor_parallel": {"tp_size": 2}}},
    {"_for": "accelerate", "inference": {"tensor_parallel": {"tp_size": 4}}},
)
@good({"inference": {"tensor_parallel": {"tp_size": 1}}}, tensor(2))
def inference_block_in_training() -> Table:
    """Only transformers reads it, while loading weights (transformers/integrations/deepspeed.py)."""
    text = f"{{value}} doesn't split the model in training. Set {TENSOR} to {{value}} for that."
    return report(SERVED, text, when.several(SERVED))


def _specs(context: Context) -> list[dict[str, Any]]:
    specs = context.get(f"{PARTS}.layer_specs")
    return [spec for spec in specs if isinstance(spec, dict)] if isinstance(specs, list) else []
