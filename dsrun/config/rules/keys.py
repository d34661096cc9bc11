"""DS0xx: what the schema says of each key by itself."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.frame import Context, Hit, rule


@rule("DS001", "error")
def unknown_key(context: Context) -> Iterator[Hit]:
    """Ignored at the top and in some fifteen sections, which are read with `get` (runtime/config.py).

    In the others DeepSpeed stops, once the model is loaded (runtime/config_utils.py, extra="forbid").
    """
    return _of(context, "unknown")


@rule("DS002", "error")
def wrong_value(context: Context) -> Iterator[Hit]:
    """A text in place of a number or a flag is converted, taken for true, or fails late, by section.

    A number out of range fails in the optimizer or never (runtime/config.py, runtime/config_utils.py).
    """
    return _of(context, "value")


@rule("DS003", "error")
def auto_that_nobody_fills_in(context: Context) -> Iterator[Hit]:
    """DeepSpeed drops "auto" in silence, so that the default holds (runtime/config_utils.py), or fails on it.

    HF Trainer fills in a fixed list (transformers/integrations/deepspeed.py) and stops at any other
    (accelerate/utils/dataclasses.py).
    """
    return _of(context, "auto")


@rule("DS004", "error")
def removed_key(context: Context) -> Iterator[Hit]:
    """DeepSpeed stops at such a key whatever its value (_reject_removed_config_keys, runtime/config.py)."""
    return _of(context, "removed")


@rule("DS005", "error")
def alias_beside_its_name(context: Context) -> Iterator[Hit]:
    """Both names of one field are a validation error (runtime/zero/config.py).

    bfloat16 beside bf16 is ignored (runtime/precision_config.py).
    """
    return _of(context, "alias")


def _of(context: Context, kind: str) -> Iterator[Hit]:
    for violation in context.violations:
        if violation.kind == kind:
            yield Hit(violation.path, violation.message, violation.suggestion)
