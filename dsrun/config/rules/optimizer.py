"""DS4xx: the optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from dsrun.config.rules.frame import Context, Hit, rule

# runtime/config.py names these as optimizers that went with the compression code.
GONE = {"onebitadam": "Adam", "zerooneadam": "Adam", "onebitlamb": "Lamb"}


@rule("DS401", "error")
def clipping_in_optimizer(context: Context) -> Iterator[Hit]:
    """max_grad_norm is refused here, even 0 (_configure_basic_optimizer in runtime/engine.py)."""
    if context.has("optimizer.params.max_grad_norm"):
        yield Hit(
            "optimizer.params.max_grad_norm",
            "DeepSpeed refuses it here",
            "Clip with the top-level gradient_clipping.",
        )


@rule("DS402", "error")
def removed_optimizer(context: Context) -> Iterator[Hit]:
    """DeepSpeed finds no such optimizer and stops (_configure_basic_optimizer, runtime/engine.py)."""
    name = context.text("optimizer.type")
    if name and name.lower() in GONE:
        yield Hit("optimizer.type", f"{name} was removed from DeepSpeed", f"Take {GONE[name.lower()]}.")
