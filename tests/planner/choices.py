"""What fields of a Setup may be, for tests that try all of it."""

from __future__ import annotations

ENGINES = ("deepspeed", "fsdp", "torch")
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "pure")
