"""The 16-bit types that DeepSpeed trains in on this CPU, as a JSON list: `python -m dsrun.training.engines.cpu_types`.

DeepSpeed refuses fp16 where oneDNN has no kernels for it (accelerator/cpu_accelerator.py, is_fp16_supported).
"""

from __future__ import annotations

import json
import sys


def main() -> int:
    """Ask torch what DeepSpeed will ask it."""
    import torch

    mkldnn = torch.ops.mkldnn
    known = {"fp16": mkldnn._is_mkldnn_fp16_supported(), "bf16": True}
    sys.stdout.write(json.dumps([name for name, there in known.items() if there]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
