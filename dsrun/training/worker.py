"""One rank: `python -m dsrun.training.worker --job RUN/job.json`, started by the `deepspeed` launcher."""

from __future__ import annotations

import argparse
import faulthandler
import logging
import os
import sys
import threading
import time
from pathlib import Path

from dsrun.jobs.job import Job
from dsrun.jobs.layout import SUPERVISOR, whole_checkpoints
from dsrun.training.report import Report


def main() -> None:
    """Parse, redirect this rank's output to logs/rank-N.log, and run."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True, type=Path)
    parser.add_argument(
        "--resume", action="store_true", help="from the newest whole checkpoint, if there is one"
    )
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    job = Job.read(arguments.job)
    run_dir = Path(job.run_dir)
    _redirect_output(run_dir / "logs" / f"rank-{rank}.log")
    faulthandler.enable()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    _end_with_parents()
    report = Report(run_dir, rank)
    try:
        run(job, report, resume=arguments.resume)
    except BaseException as error:
        logging.getLogger(__name__).exception("rank %d failed", rank)
        report.failed(error)
        # A clean shutdown would wait for the other ranks, which wait for this one.
        sys.stderr.flush()
        os._exit(1)
    report.finished()


def run(job: Job, report: Report, *, resume: bool) -> None:
    """Everything that this rank does, from the imports to the last score."""
    report.phase("loading libraries")
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from dsrun.training import cpu_info
    from dsrun.training.loop import Trainer
    from dsrun.training.model import load_model, load_tokenizer
    from dsrun.training.prepare import prepare
    from dsrun.training.prompts import PromptEncoder

    cpu_info.remember()
    deepspeed.init_distributed()
    local_rank = int(os.environ["LOCAL_RANK"])
    get_accelerator().set_device(local_rank)
    torch.manual_seed(job.training.seed)
    report.phase("loading the model")
    if local_rank == 0:
        prepare(job, say=lambda text: report.event("note", text=text))
    torch.distributed.barrier()
    tokenizer = load_tokenizer(job)
    encoder = PromptEncoder(tokenizer, job.model.prompt_format)
    if not tokenizer.chat_template:  # the exported folder then asks the way the model is trained
        tokenizer.chat_template = encoder.format.chat_template
    model, keep_alive = load_model(job)
    report.phase("starting DeepSpeed")
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
        config=job.ds_config,
    )
    if job.zero_stage == 0 and job.precision != "fp32":
        # DeepSpeed has taken a step with empty gradients by now (FP16_Optimizer.initialize_optimizer_states), which
        # would put Adam's bias correction one step ahead of every other stage's.
        engine.optimizer.optimizer.state.clear()
    checkpoints = whole_checkpoints(Path(job.run_dir)) if resume else []
    Trainer(job, engine, tokenizer, encoder.end_ids, report).run(checkpoints[-1] if checkpoints else None)
    del keep_alive
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def _redirect_output(path: Path) -> None:
    """Everything that this process and its children print goes to the rank's own file, unbuffered by line."""
    path.parent.mkdir(exist_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(handle, stream.fileno())
    os.close(handle)


def _end_with_parents() -> None:
    """End this rank when its launcher or dsrun is gone: neither takes its ranks along when it is killed."""
    launcher = os.getppid()
    supervisor = int(os.environ.get(SUPERVISOR, "0"))

    def watch() -> None:
        while os.getppid() == launcher and (not supervisor or _alive(supervisor)):
            time.sleep(1)
        logging.getLogger(__name__).error("the launcher or dsrun is gone; this rank ends too")
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="dsrun-watch").start()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


if __name__ == "__main__":
    main()
