"""Values of a Setup's fields, for tests that try them all."""

from __future__ import annotations

ENGINES = ("deepspeed", "fsdp", "torch")
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "pure")
