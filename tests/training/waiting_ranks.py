"""One of two ranks: the second comes late to every exchange; the first prints what each waited, a step a line."""

from __future__ import annotations

import json
import time

import torch
import torch.distributed as dist

from dsrun.training.waiting import WaitClock

STEPS, LATE_S = 6, 0.2

if __name__ == "__main__":
    dist.init_process_group("gloo")
    dist.barrier()
    clock = WaitClock(torch.device("cpu")).start()
    for step in range(STEPS):
        began = time.perf_counter()
        if dist.get_rank() == 1:
            time.sleep(LATE_S)
        dist.all_reduce(torch.ones(4))
        dist.all_reduce(torch.ones(4), async_op=True).wait()
        seconds, waited = time.perf_counter() - began, [None, None]
        dist.all_gather_object(waited, clock.taken())
        clock.taken()
        if dist.get_rank() == 0:
            print(json.dumps({"step": step, "seconds": seconds, "waited": waited}), flush=True)
    clock.stop()
    dist.destroy_process_group()
