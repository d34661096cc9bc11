"""DS230 and DS231: old names of offload and of gathering."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.common import GATHER, OLD_GATHER, ZERO, removal, written
from dsrun.config.rules.examples import CPU, SAVED_3, zero
from dsrun.config.rules.frame import REFUSED, Context, Edit, Finding, Fix, bad, good, rule

OLD_FLAGS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


@rule("DS230", "warning")
@bad(zero(2, cpu_offload=True), zero(3, cpu_offload_param=True))
@good(CPU, SAVED_3)
def old_offload_keys(context: Context) -> Iterator[Finding]:
    """The old flags still work, with a warning in the log; pinned memory's has no effect (runtime/zero/config.py).

    What they become is in _process_deprecated_field of runtime/config_utils.py.
    """
    for key, new in OLD_FLAGS.items():
        path = f"{ZERO}.{key}"
        value = context.flag(path)
        if value is None or context.has(f"{ZERO}.{new}"):
            continue
        edits = (Edit("remove", path), *([Edit("add", f"{ZERO}.{new}", {"device": "cpu"})] if value else []))
        advice = f'Write {new}: {{"device": "cpu"}}.' if value else "Remove it."
        # false is left over: there is nothing to write in its place.
        severity = "" if value else "note"
        yield Finding(path, f"is the old form of {new}", advice, Fix(edits), severity=severity)
    path = f"{ZERO}.cpu_offload_use_pin_memory"
    if context.flag(path) is not None:
        advice = "Remove it; offload_optimizer and offload_param have pin_memory, which is true by default."
        yield Finding(
            path, "is an old key that has no effect", advice, removal(context, path), severity="note"
        )
    if context.flag(OLD_GATHER) is not None and not context.has(GATHER):
        name = GATHER.rpartition(".")[2]
        fix = Fix((Edit("rename", OLD_GATHER, name),))
        yield Finding(OLD_GATHER, f"is the old name of {name}", f"Rename it to {name}.", fix)


@rule("DS231", REFUSED)
@bad(
    zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
    zero(3, cpu_offload_param=False, offload_param={"device": "cpu"}),
)
@good(CPU, zero(2, cpu_offload=True))
def old_and_new_key_together(context: Context) -> Iterator[Finding]:
    """Using both forms of one setting stops the start, whatever the values (runtime/config_utils.py)."""
    pairs = {f"{ZERO}.{old}": f"{ZERO}.{new}" for old, new in OLD_FLAGS.items()} | {OLD_GATHER: GATHER}
    for old, new in pairs.items():
        if context.has(old) and context.has(new) and not context.is_auto(old) and not context.is_auto(new):
            name = written(context, new).rpartition(".")[2]
            yield Finding(
                old,
                f"is set together with {name}, its new form",
                f"Keep {name} only.",
                removal(context, old, safe=False),
            )
