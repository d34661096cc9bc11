"""What a rank of a fine-tune does: `python -m dsrun.training.worker --job RUN/job.json`, run by dsrun.jobs.rank."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path
from typing import Any

from dsrun.jobs.job import Job
from dsrun.jobs.layout import whole_checkpoints
from dsrun.training.report import Report


def main() -> None:
    """Parse, and run. dsrun.jobs.rank has prepared the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--job", required=True, type=Path)
    parser.add_argument(
        "--resume", action="store_true", help="from the newest whole checkpoint, if there is one"
    )
    arguments = parser.parse_args()
    rank = int(os.environ["RANK"])
    job = Job.read(arguments.job)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    report = Report(Path(job.run_dir), rank)
    try:
        run(job, report, resume=arguments.resume)
    except BaseException as error:
        logging.getLogger(__name__).exception("rank %d failed", rank)
        report.failed(error)
        # A clean shutdown would wait for the other ranks, which wait for this one.
        sys.stderr.flush()
        os._exit(1)
    if not report.ended:
        report.finished()


def run(job: Job, report: Report, *, resume: bool) -> None:
    """Everything that this rank does, from the imports to the last score."""
    report.phase("loading libraries")
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from dsrun.training import cpu_info, kernels
    from dsrun.training.loop import Trainer
    from dsrun.training.model import load_model, load_tokenizer
    from dsrun.training.optimizers import own_optimizer
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
    attention = kernels.attention_of(job)
    if attention != "sdpa":
        report.event("note", text=f"attention: {attention}")
    model, keep_alive = load_model(job, attention)
    if job.tuning.freezes:
        report.event("note", text=trained_share(model))
    if job.training.liger and (why := kernels.fuse_loss(model)):
        report.event("note", text=f"no fused cross-entropy: {why}")
    report.phase("starting DeepSpeed")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=trained,
        optimizer=own_optimizer(job, trained),
        config=job.ds_config,
    )
    if job.zero_stage == 0 and job.precision != "fp32":
        # DeepSpeed has taken a step with empty gradients by now (FP16_Optimizer.initialize_optimizer_states), which
        # would put Adam's bias correction one step ahead of every other stage's.
        engine.optimizer.optimizer.state.clear()
    checkpoints = whole_checkpoints(Path(job.run_dir)) if resume else []
    Trainer(job, engine, tokenizer, encoder.stop_ids, report).run(checkpoints[-1] if checkpoints else None)
    del keep_alive
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def trained_share(model: Any) -> str:
    """How many of a model's weights are trained, in words."""
    sizes = [(getattr(weight, "ds_numel", weight.numel()), weight) for weight in model.parameters()]
    trained = sum(size for size, weight in sizes if weight.requires_grad)
    # Of a weight in 4 bits, two are in a byte.
    whole = sum(size * (1 if weight.dtype.is_floating_point else 2) for size, weight in sizes)
    return f"training {trained:,} of {whole:,} weights ({trained / whole:.2%})"


if __name__ == "__main__":
    main()
