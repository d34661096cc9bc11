"""Sending a job to Slurm's queue: what is looked at on the login node, the files that are made, the call of sbatch."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dsrun.cluster.devices import Machine
from dsrun.config.presets.build import build_config
from dsrun.config.presets.preset import load
from dsrun.config.presets.sources import draft as draft_config
from dsrun.errors import DsrunError, Findings, Problem
from dsrun.files import explained, write_atomic
from dsrun.job import run_folder
from dsrun.jobs.allocation.allocation import unnamed_hosts
from dsrun.jobs.assembly.checks.memory_check import AUTO
from dsrun.jobs.assembly.finetune import FinetuneRequest
from dsrun.jobs.assembly.finetune.config import config_options, settled_fsdp, untrainable
from dsrun.jobs.assembly.finetune.data import check_data
from dsrun.jobs.assembly.finetune.devices import split
from dsrun.jobs.assembly.finetune.model import begin
from dsrun.jobs.assembly.finetune.stages import Requested, Strategy, WithModel
from dsrun.jobs.assembly.finetune.tokenizer import choose_tokenizer
from dsrun.jobs.launchers.common.submission import Submission


@dataclass(frozen=True)
class Sent:
    """A job in the queue. notes: what sbatch said besides."""

    job_id: str
    notes: tuple[str, ...]


def folder_problems(run_dir: Path, *, resume: bool) -> list[Problem]:
    """Why no job can be sent into this folder; empty if one can. Says the same as dsrun will on the node."""
    if resume:
        return run_folder.check_unfinished(run_dir)
    if (run_dir / run_folder.SUBMITTED).exists() and not (run_dir / run_folder.JOB).exists():
        hint = f"It waits in the queue, or was removed from it. Choose another --output-dir, or remove {run_dir}."
        return [Problem("a job was sent from here already", str(run_dir), hint)]
    return run_folder.check_new(run_dir)


def finetune_problems(
    request: FinetuneRequest, machine: Machine, *, gpus: int | None, nodes: int, files: bool = True
) -> list[Problem]:
    """Problems of a fine-tune, as far as a machine without its GPUs can tell: model, data, config.

    machine: this one, whose devices say nothing. gpus: of each node, None where their number isn't known. files:
    whether this machine sees the data. Whether it fits is asked by the job itself.
    """
    findings = Findings()
    requested, holds = begin(request.on(machine, {}), findings)
    if files:
        if isinstance(requested, WithModel):
            requested = choose_tokenizer(requested, findings)
        findings.attempt(check_data, requested, findings)
    if holds and requested.options.preset != AUTO:  # auto is chosen on the node, by its GPUs
        hosts = unnamed_hosts(gpus, nodes) if gpus else ()
        findings.attempt(_check_config, replace(requested, hosts=hosts), findings)
    return findings.problems


def _check_config(requested: Requested, findings: Findings) -> None:
    """Raise DsrunError where the preset and the options can't be trained with."""
    strategy = Strategy(requested.options.preset)
    # The rules count ranks; without a number only the preset and the options by themselves can be judged.
    requested = split(requested) if requested.hosts else requested
    if chosen := load(strategy.preset).fsdp:
        settled_fsdp(requested, strategy, chosen, findings)
        return
    options = config_options(requested, strategy)
    if not requested.hosts:
        draft_config(strategy.preset, replace(options, global_batch=None))
        return
    findings.problems.extend(untrainable(requested, strategy.preset, draft_config(strategy.preset, options)))
    build_config(strategy.preset, options)


def command(submission: Submission) -> list[str]:
    """The command that sends the script."""
    return ["sbatch", "--parsable", str(submission.run_dir / run_folder.SUBMITTED)]


def send(submission: Submission, text: str, environ: Mapping[str, str]) -> Sent:
    """Write the script into the run's folder and send it.

    Raises DsrunError where there is no sbatch, or with sbatch's own words where it refuses; the folder is then as it
    was.
    """
    program = shutil.which("sbatch", path=environ.get("PATH"))
    if program is None:
        raise DsrunError(
            "there is no sbatch on PATH",
            hint="Slurm's commands are on the cluster's login nodes (`module load slurm` on some). "
            "--dry-run prints the script.",
        )
    with _written(submission.run_dir, text):
        words = [program, *command(submission)[1:]]
        with explained("can't be started", program):
            done = subprocess.run(
                words, env=dict(environ), cwd=submission.cwd, stdin=subprocess.DEVNULL, capture_output=True,
                text=True, errors="replace", check=False,
            )  # fmt: skip
        if done.returncode != 0:
            output = _said(done.stderr) or _said(done.stdout) or [f"ended with code {done.returncode}"]
            raise DsrunError("; ".join(output), where="sbatch", hint="Nothing was sent.")
    lines = done.stdout.split()
    match = re.fullmatch(r"([0-9]+)(?:;\S+)?", lines[-1]) if lines else None
    if match is None:
        fault = f"took the script and answered {done.stdout!r}, which is no job's id"
        raise DsrunError(fault, where="sbatch", hint="Look for the job: squeue --me")
    return Sent(match[1], tuple(_said(done.stderr)))


def _said(text: str) -> list[str]:
    """sbatch's lines without what every one begins with."""
    lines = (re.sub(r"^sbatch: (error: )?", "", line).strip() for line in text.splitlines())
    return [line for line in lines if line]


@contextlib.contextmanager
def _written(run_dir: Path, text: str) -> Iterator[None]:
    """The script and the folder for Slurm's log, which Slurm doesn't make; taken back if the body raises."""
    script, logs = run_dir / run_folder.SUBMITTED, run_dir / run_folder.LOGS
    before = script.read_text(encoding="utf-8") if script.exists() else None
    made = [path for path in (logs, *logs.parents) if not path.exists()]
    try:
        with explained("can't be made", run_dir):
            logs.mkdir(parents=True, exist_ok=True)
        write_atomic(script, text)
        yield
    except BaseException:
        _take_back(script, before, made)
        raise


def _take_back(script: Path, before: str | None, made: Sequence[Path]) -> None:
    with contextlib.suppress(OSError, DsrunError):
        if before is None:
            script.unlink(missing_ok=True)
        else:
            write_atomic(script, before)
    for folder in made:  # the innermost first; one that somebody else uses by now is not empty
        with contextlib.suppress(OSError):
            folder.rmdir()
