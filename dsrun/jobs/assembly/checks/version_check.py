"""Whether what is installed is known to go wrong with a fine-tune (presets/versions/)."""

from __future__ import annotations

from dsrun import versions
from dsrun.errors import Problem, raise_all
from dsrun.job.job import Job
from dsrun.models import resolve


def check(job: Job, *, resumes: bool = False, force: bool = False) -> tuple[str, ...]:
    """Remarks on the installed versions, a line each.

    Raises DsrunError where the job would stop, or train on wrong gradients, because of them, unless that is forced.
    """
    problems, notes = [], []
    for match in versions.judge(versions.installed(), circumstances(job, resumes=resumes)):
        combination = match.combination
        hint = f"{combination.do} More: dsrun explain {combination.name}"
        if match.certain and match.severity == versions.ERROR and not force:
            problems.append(Problem(str(match), hint=f"{hint} Or start it all the same: --force"))
        elif match.certain and match.severity != versions.NOTE:
            notes.append(f"{match}. {hint}")
    raise_all(problems)
    return tuple(notes)


def circumstances(job: Job, *, resumes: bool) -> versions.Circumstances:
    """The facts about a job that versions' conditions need, all of which is known of a fine-tune."""
    zero = job.ds_config.get("zero_optimization", {})
    schedule = job.ds_config.get("scheduler", {}).get("params", {})
    return versions.Circumstances(
        stage=job.zero_stage,
        precision=job.precision,
        loop="dsrun",
        accumulates=job.grad_accum > 1,
        several_ranks=job.world_size > 1,
        gpus=job.accelerator == "cuda",
        overlap_comm=bool(zero.get("overlap_comm")),
        expert_parallel=False,  # --ep gets round what is known of it (training/engines/expert_parallel.py)
        peft=job.peft.freezes,
        fp32_adapter=job.peft.freezes,
        modules_to_save=False,
        quantized=job.peft.method == "qlora",
        checkpointing=job.training.recomputed > 0,
        reentrant=job.zero_stage == 3 and not resolve.architecture(job.model).get("output_router_logits"),
        reuses_modules=False,
        resumes=resumes,
        python_writer=isinstance(job.ds_config.get("checkpoint", {}).get("writer"), dict),
        zero_warmup=schedule.get("warmup_num_steps") == 0,
        remote_code=False,
        own_loss=False,
        own_zero_init=False,
    )
