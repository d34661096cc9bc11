"""Inside the pods of a job of Kubeflow's, which all run the same dsrun command: the first plans and leads the job; in
every other one the command becomes dsrun's agent, which waits for the first to say in the run folder how to reach it.

The operator tells a pod its place: RANK and WORLD_SIZE count pods here (manifest.py), PET_NODE_RANK and PET_NNODES in a
TrainJob (train_job.py).
"""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from dsrun.errors import DsrunError
from dsrun.job.run_folder import CONTROL, record_of
from dsrun.jobs.launchers.common.agent_command import agent_command

WAIT_S = 3600.0
"""How long the first pod may take until it has a plan: it may start later, and download a model first."""
AGAIN_S = 120.0
"""How long it may take to start the job again after it failed (--max-restarts)."""
CALL_S = 20.0
LOOK_S = 0.5
PLACES = (("RANK", "WORLD_SIZE"), ("PET_NODE_RANK", "PET_NNODES"))
"""Variables with a pod's place: the training operator's, and Kubeflow Trainer's."""
GOING = ("preparing", "running")
"""States of a run that goes on."""


@dataclass(frozen=True)
class Pod:
    """This pod's place in its job."""

    number: int
    names: tuple[str, ...]
    """Names of all pods, in their order."""


def is_pod(environ: Mapping[str, str]) -> bool:
    """Whether the operator has told this process its place."""
    return any(set(names) <= set(environ) for names in PLACES)


def place_variables(environ: Mapping[str, str]) -> tuple[str, str]:
    """The variables that tell this pod's number and how many there are."""
    return next(names for names in PLACES if set(names) <= set(environ))


def this_pod(environ: Mapping[str, str]) -> Pod:
    """This pod's place. Raises DsrunError outside of a pod."""
    if not is_pod(environ):
        raise DsrunError(
            "--launcher kubernetes: RANK and WORLD_SIZE are not set, so this isn't a pod of a PyTorchJob or TrainJob",
            hint="The command belongs in a manifest, which `dsrun submit --cluster NAME -- finetune ...` writes.",
        )
    names = place_variables(environ)
    rank, size = (environ[name] for name in names)
    if not all(re.fullmatch("[0-9]{1,5}", text, re.ASCII) for text in (rank, size)) or int(rank) >= int(size):
        raise DsrunError(
            f"{names[0]}={rank}, {names[1]}={size}: no such place in a job",
            hint="The training operator sets them.",
        )
    own = environ.get("HOSTNAME") or socket.gethostname()
    if names == PLACES[1]:
        match = re.fullmatch(r"(.+-node-0)-[0-9]+", own)
        name = match[1] if match else "pod"
        return Pod(int(rank), tuple(f"{name}-{number}" for number in range(int(size))))
    match = re.fullmatch(r"(.+)-(?:master|worker)-[0-9]+", own)
    name = match[1] if match else "pod"
    return Pod(
        int(rank), (f"{name}-master-0", *(f"{name}-worker-{number}" for number in range(int(size) - 1)))
    )


def become_agent(environ: Mapping[str, str], run_dir: Path | None) -> None:
    """Be the job's agent until it ends, and exit, in every pod but the first. Raises DsrunError outside of a pod."""
    pod = this_pod(environ)
    if run_dir is None:
        hint = "Name it on the volume that they share: --output-dir /runs/NAME"
        raise DsrunError("--launcher kubernetes: the pods meet in the run's folder", hint=hint)
    if pod.number:
        sys.exit(_serve(run_dir.expanduser().absolute(), environ))


def _serve(run_dir: Path, environ: Mapping[str, str]) -> int:
    """Run an agent for each time that the first pod starts the job; the last one's exit code."""
    control = run_dir / CONTROL
    words = [*agent_command(environ), "--control", str(control), "--node-from", place_variables(environ)[0]]
    code = _agent([*words, "--wait", str(WAIT_S)], run_dir)
    until = time.monotonic() + AGAIN_S
    while _state(run_dir) in GOING and time.monotonic() < until:
        if control.exists():
            code = _agent([*words, "--wait", str(CALL_S)], run_dir)
            until = time.monotonic() + AGAIN_S
        time.sleep(LOOK_S)
    return code


def _state(run_dir: Path) -> str:
    """The run's state, from the first pod. Its lock shows nothing: some file systems keep locks within a host."""
    return str(record_of(run_dir).get("state", ""))


def _agent(words: Sequence[str], run_dir: Path) -> int:
    """Run an agent to its end. Exits where this pod was told to end.

    All pods of a job are told so at once, and the first may want a checkpoint first: while the run goes on, its end
    is left to the first pod, unless the signal comes again. Kubernetes waits only so long (grace_s).
    """
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, note)
    process = subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True)
    while process.poll() is None:
        if signals and (len(signals) > 1 or _state(run_dir) not in GOING):
            process.terminate()
        time.sleep(LOOK_S)
    if signals:
        sys.exit(128 + signals[0])
    return process.returncode
