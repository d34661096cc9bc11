"""One of several ranks that train jobs one after the other, and note what of each job's settings was at work:

torchrun --nproc_per_node N pairs_ranks.py JOB.json [JOB.json ...]

Beside each job.json the first rank writes seen.json: how often activations were computed again, attention went this way
or that, and tiles were taken. A job that fails ends all; its folder has failed.txt then.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from parallelism_ranks import connect, train

SEEN: Counter[str] = Counter()


def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose calls are counted."""

    def count(*given: Any, **named: Any) -> Any:
        SEEN[name] += 1
        return function(*given, **named)

    return count


def watch() -> None:
    """Count from now on."""
    import torch
    from torch.utils import checkpoint
    from transformers.models.llama import modeling_llama

    from dsrun.training.models import tiling, varlen

    generator = "_checkpoint_without_reentrant_generator"
    setattr(checkpoint, generator, counted("recomputed", getattr(checkpoint, generator)))
    checkpoint.CheckpointFunction.apply = counted("recomputed", checkpoint.CheckpointFunction.apply)
    attend = torch.nn.functional.scaled_dot_product_attention
    torch.nn.functional.scaled_dot_product_attention = counted("sdpa", attend)
    modeling_llama.eager_attention_forward = counted("eager", modeling_llama.eager_attention_forward)
    varlen.attend = counted("varlen", varlen.attend)
    tiling._in_tiles = counted("tiles", tiling._in_tiles)


def main(paths: list[str]) -> None:
    import torch.distributed as dist

    connect(paths[0])
    watch()
    for path in map(Path, paths):
        SEEN.clear()
        try:
            train(str(path))
        except BaseException:
            (path.parent / "failed.txt").write_text(traceback.format_exc(), encoding="utf-8")
            raise
        if dist.get_rank() == 0:
            (path.parent / "seen.json").write_text(json.dumps(SEEN), encoding="utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
