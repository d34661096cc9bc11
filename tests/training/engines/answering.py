"""One of two ranks: each job's model answers held-out prompts, its weights gathered for every token and gathered once.

The first rank prints a line of JSON for each job.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist


@contextmanager
def gathers():
    """Counts the elements that gathers give this rank while it lasts."""
    from deepspeed.comm import comm

    counts, gather = Counter(), comm.cdb.all_gather_into_tensor

    def counting(output_tensor, *given, **more):
        counts["elements"] += output_tensor.numel()
        return gather(output_tensor, *given, **more)

    comm.cdb.all_gather_into_tensor = counting
    try:
        yield counts
    finally:
        comm.cdb.all_gather_into_tensor = gather


def main(paths: list[str]) -> None:
    from dsrun.job.job import Job
    from dsrun.training import evaluate
    from dsrun.training.data.batches import Examples
    from dsrun.training.engines import deepspeed
    from dsrun.training.models.load import load_model
    from dsrun.training.prepare import prepare, tokenizer_of

    deepspeed.connect()
    for path in paths:
        job = Job.read(Path(path))
        if dist.get_rank() == 0:
            prepare(job, say=lambda text: print(text, file=sys.stderr))
        dist.barrier()
        tokenizer, encoder = tokenizer_of(job)
        model, keep_alive = load_model(job)
        engine = deepspeed.initialize(job, model)
        examples = Examples(Path(job.prepared.eval_rows))

        def loss(engine=engine, job=job, examples=examples, pad_id=tokenizer.pad_token_id):
            return evaluate.evaluation_loss(engine, job, examples, pad_id)

        def divided(model=model):
            return [str(one.ds_status) for one in model.parameters()], [
                one.numel() for one in model.parameters()
            ]

        result = {"weights": sum(one.ds_numel for one in model.parameters())}
        parts = divided()
        for name, room in (("each", False), ("once", True)):
            deepspeed.room_for = lambda *_, room=room: room
            with gathers() as counted:
                answers = evaluate.generate(engine, job, examples, tokenizer, encoder.stop_ids)
            result[name] = {
                "gathered": counted["elements"], "answers": answers, "divided again": divided() == parts,
                "loss": loss(),
            }  # fmt: skip
        result["divided"] = sum(size == 0 for size in parts[1])
        if dist.get_rank() == 0:
            print(json.dumps({"found": result}), flush=True)
        del model, engine, keep_alive


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # as dsrun's own ranks do: threads of torch's sometimes abort a process that ends by itself
