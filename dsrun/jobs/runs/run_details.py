"""One run in full, for machines: what `dsrun show --json` prints, and what pages and tables are made from."""

from __future__ import annotations

from dataclasses import asdict
from shlex import join
from typing import Any

from dsrun.host.hiding import shown_arguments
from dsrun.job.checkpoints import states, step_of
from dsrun.job.job import Job, ScriptJob
from dsrun.job.layout import NOT_FINITE
from dsrun.job.run_folder import COMMAND, CONFIG, LOGS, PREPARE_LOG
from dsrun.jobs.runs.past_runs import Run


def next_commands(run: Run, path: str = "") -> dict[str, str]:
    """Commands that suit a run in this state, by their purpose. path: as they name its folder, if not whole."""
    path = path or str(run.path)
    if run.alive:
        return {"follow": join(["dsrun", "logs", "-f", path]), "stop": join(["dsrun", "stop", path])}
    again = {"repeat": join(["dsrun", "rerun", path])}
    if run.state == "finished" or run.script:
        answers = run.model or (run.path / "adapter").is_dir()
        return ({"ask": join(["dsrun", "chat", path])} if answers and not run.script else {}) | again
    export = {"export": join(["dsrun", "export", path])} if run.checkpoints and not run.model else {}
    if NOT_FINITE in run.why:  # the same steps with the same learning rate would end there again
        return {**export, **again}
    return {"continue": join(["dsrun", "resume", path]), **export, **again}


def value(run: Run) -> dict[str, Any]:
    """Everything, for machines: bytes, seconds, times since 1970."""
    job = run.script or run.job
    return {
        "path": run.path,
        "state": run.state,
        "why": run.why or None,
        "problems": run.problems,
        "diagnosis": run.diagnosis or None,
        "preset": job.preset,
        "accelerator": job.accelerator,
        "host": run.host,
        "hosts": [asdict(host) for host in job.hosts],
        "ranks": job.world_size,
        "dsrun_version": job.dsrun_version,
        "started": run.started,
        "seconds": run.seconds,
        **(_of_script(run, run.script) if run.script else _of_fine_tune(run, run.job)),
        "places": {name: place for name, place in places(run).items() if place},
        "commands": next_commands(run),
    }


def _of_fine_tune(run: Run, job: Job) -> dict[str, Any]:
    last = run.metrics_end
    return {
        "model": {"name": job.model.name, "source": job.model.source, "location": job.model.location},
        "data": asdict(job.data),
        "training": asdict(job.training),
        "peft": asdict(job.peft),
        "parallel": asdict(job.parallel),
        "zero_stage": None if job.fsdp else job.zero_stage,
        "fsdp": job.fsdp and asdict(job.fsdp),
        "precision": job.precision,
        "micro_batch": job.micro_batch,
        "grad_accum": job.grad_accum,
        "launches": len(run.launches),
        "steps": max(run.losses, default=0),
        "total_steps": run.total_steps,
        "checkpoints": [
            {
                "step": step_of(checkpoint.folder),
                "path": checkpoint.folder,
                "state": checkpoint.state,
                "damaged": checkpoint.damaged,
            }
            for checkpoint in states(run.path)
        ],
        "loss": ends_of(run.losses),
        "eval_losses": [{"step": step, "loss": loss} for step, loss in run.eval_losses.items()],
        "scores": run.scores,
        "skipped_steps": last.get("skipped"),
        "tokens_per_second": run.tokens_per_second,
        "health": run.health and asdict(run.health),
        "predicted": job.prediction,
        "measured": run.peaks,
        "rank_0_memory_bytes": last.get("memory_bytes"),
    }


def _of_script(run: Run, job: ScriptJob) -> dict[str, Any]:
    return {
        "script": job.script,
        "module": job.module,
        "args": shown_arguments(job.args),
        "cwd": job.cwd,
        "python": job.python,
        "launcher": job.launcher,
        "restarts": run.restarts,
    }


def ends_of(curve: dict[int, float]) -> dict[str, float] | None:
    """The first and the last value of a curve."""
    return {"first": curve[min(curve)], "last": curve[max(curve)]} if curve else None


def places(run: Run) -> dict[str, Any]:
    """Paths of the things in a run's folder that are there."""
    names = {
        "logs": LOGS, "preparing": PREPARE_LOG, "config": CONFIG, "command": COMMAND, "picture": "loss.png",
        "rows": "data.json", "adapter": "adapter", "answers": "generated_predictions.jsonl",
    }  # fmt: skip
    return {
        "model": run.model,
        "checkpoints": run.checkpoints,
        **{name: run.path / file for name, file in names.items() if (run.path / file).exists()},
    }
