"""Values that fields of a Setup may have, for tests that try all of them."""

from __future__ import annotations

ENGINES = ("deepspeed", "fsdp", "torch")
PRECISIONS = ("fp32", "fp16", "bf16", "amp", "pure")
