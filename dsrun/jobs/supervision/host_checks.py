"""Whether a job's hosts are fit for it: all are asked at once, before anything is started on any of them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import dsrun
from dsrun.cluster import doctor, extensions, probe, ssh
from dsrun.cluster.doctor.check import GREEN, RED, YELLOW, CheckResult, Host, alike
from dsrun.cluster.ssh import HostAnswer
from dsrun.ds_config import nvme_path
from dsrun.errors import DsrunError, Problem
from dsrun.host.hiding import shown
from dsrun.host.system import nearest_there
from dsrun.job.job import AnyJob, HostDevices, Job, ScriptJob
from dsrun.jobs.allocation.allocation import few
from dsrun.jobs.launchers import SLURM
from dsrun.jobs.launchers.common import environment
from dsrun.jobs.supervision.run_options import RunOptions

AskHosts = Callable[[Sequence[str], Mapping[str, Any], float], Sequence[HostAnswer]]
"""Asks hosts for their facts, in their order: (hosts, the probe's options, seconds that each has)."""

TIMEOUT_S = 30.0
BY_HAND = ("manual", "kubernetes")
"""Launchers for clusters on which nobody gets anywhere by himself."""
HASHING_S = 2.0
"""Time for a host to read the data file; if it takes longer, only its size and both ends are compared."""
MOST_ALIKE = 5
"""Texts of one check that are told: a thousand hosts may be off by a thousand different numbers."""
MPI = ("openmpi", "mpich", "impi")
"""Launchers that have ways of their own to the hosts: one that ssh doesn't reach may be fine."""
PLACES = (
    "TORCH_EXTENSIONS_DIR", "DSRUN_CACHE", "XDG_CACHE_HOME", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_HOME", "CUDA_PATH",
    "CXX",
)  # fmt: skip
"""Variables that decide where a job's Python, compilers and operators are found."""
NETWORK = ("GLOO_", "NCCL_")

ALWAYS = frozenset({
    "reachable", "python", "packages", "versions", "ram", "shm", "folder", "room", "quota", "data", "clock",
    "interface",
})  # fmt: skip
ON_GPUS = frozenset({"driver", "gpu-free", "memlock", "ecc", "fabric-manager", "nccl-interface", "nccl-net"})
HERE_ON_GPUS = frozenset({"driver", "memlock", "ecc", "fabric-manager"})
"""The checks that nothing else makes where a job runs on this machine alone."""
OF_PYTHON = frozenset({"python", "packages", "versions"})
"""Checks of a Python other than dsrun's that runs a script; the packages it needs follow from the script's source."""
TO_COMPILE = frozenset({"compiler", "headers", "ninja"})
"""Checks of the doctor that bear on a job: red stops it, yellow is told.

Not among them is what dsrun's agents see to by themselves, as they start: dead locks of builds, names that lead
nowhere, and the way to the first host, which they try for real.
"""
CHUNK = 256
"""Characters that a task of srun says in a line: longer ones than 1024 bytes may be cut (slurm_protocol_defs.h)."""
SAID_BY_TASK = f"""
_text = json.dumps(facts(json.loads(OPTIONS)))
for _at in range(0, len(_text), {CHUNK}):
    print(json.dumps([os.environ.get("SLURMD_NODENAME"), _at, _text[_at : _at + {CHUNK}]]), flush=True)
"""


def checkup(job: AnyJob, options: RunOptions, *, ask: AskHosts | None = None) -> tuple[str, ...]:
    """Remarks on a job's hosts before its start, a line each.

    ask: how hosts are asked, where it isn't the way of the job's launcher. Raises DsrunError with all that stands in
    the way. A job on this machine alone was planned with most of that: what is left is asked where it has GPUs.
    """
    names = [host.host for host in job.hosts]
    if all(map(ssh.is_here, names)):
        return _checkup_here(job, options, ask or ssh.ask) if job.accelerator == "cuda" else ()
    ask = ask or way(job.launcher)
    if ask is None:
        return (f"launcher {job.launcher}: no host is asked what it has",)
    wanted = [(host.host, len(host.devices)) for host in job.hosts]
    hosts = asked(wanted, _options(job, options), options.env, ask)
    notes = []
    if job.launcher in MPI and (silent := [host.name for host in hosts if host.facts is None]):
        notes.append(f"{few(silent)} can't be asked what they have: ssh does not lead there")
        hosts = [host for host in hosts if host.facts is not None]
    problems, more = _judged(job, options, hosts)
    if isinstance(job, ScriptJob) and job.python:
        theirs, others = _judged_python(job.python, wanted, options, ask)
        problems, more = [*problems, *theirs], [*more, *others]
    _refuse(problems)
    return (*notes, *more)


def _checkup_here(job: AnyJob, options: RunOptions, ask: AskHosts) -> tuple[str, ...]:
    """Remarks on this machine's driver and GPUs, which NVML calls fit: CUDA itself fails on them after minutes only."""
    (part,) = job.hosts
    theirs = {"python": job.python} if isinstance(job, ScriptJob) and job.python else {}
    wanted = {**theirs, "port": options.master_port or None}
    (host,) = asked([(part.host, len(part.devices))], wanted, options.env, ask)
    if not host.gpus:  # no nvidia-smi here, as in many containers: nothing is known then
        return ()
    bearing = HERE_ON_GPUS | ({"port"} if options.master_port else set())
    results = [
        # One machine's ranks use no InfiniBand.
        replace(result, colour=YELLOW) if (result.check, result.colour) == ("memlock", RED) else result
        for result in doctor.examine([_narrowed(job, part, host)])
        if result.check in bearing
    ]
    _refuse([Problem(fault, names, fix) for fault, fix, names in _grouped(results, RED)])
    return tuple(fault for fault, _, _ in _grouped(results, YELLOW))


def _refuse(problems: list[Problem]) -> None:
    """Raise DsrunError where there are problems."""
    if problems:
        last = problems[-1]
        problems[-1] = replace(last, hint=f"{last.hint}\n  Or start without this check: --no-check")
        raise DsrunError(problems)


def way(launcher: str) -> AskHosts | None:
    """The way to ask a launcher's hosts; None where there is none."""
    if launcher == SLURM:
        return by_srun
    return None if launcher in BY_HAND else ssh.ask


def asked(
    wanted: Sequence[tuple[str, int | None]],
    options: Mapping[str, Any],
    env: Mapping[str, str],
    ask: AskHosts = ssh.ask,
    timeout_s: float = TIMEOUT_S,
) -> list[Host]:
    """Hosts with what they answered.

    wanted: names and slots, the one where the ranks meet first. options: the probe's, on top of what is the same for
    every job. env: what ranks on all hosts get of the user's variables.
    """
    variables = {**env, **environment.of_checkout(env)}
    everywhere = {
        "python": sys.executable,
        "environ": {name: variables[name] for name in PLACES if variables.get(name)},
        "master": wanted[0][0] if len(wanted) > 1 else None,
    }
    answers = ask([host for host, _ in wanted], {**everywhere, **options}, timeout_s)
    return [
        Host(
            answer.host,
            slots,
            _with(answer.facts, env),
            answer.fault,
            answer.fix,
            asked_at=answer.asked_at,
            answered_at=answer.answered_at,
            first=place == 0,
        )
        for place, (answer, (_, slots)) in enumerate(zip(answers, wanted, strict=True))
    ]


def _with(facts: Mapping[str, Any] | None, env: Mapping[str, str]) -> Mapping[str, Any] | None:
    """Facts with the variables of the network as ranks there will have them."""
    network = shown({name: value for name, value in env.items() if name.startswith(NETWORK)})
    if facts is None or not network or not isinstance(facts.get("variables"), dict):
        return facts
    return {**facts, "variables": {**facts["variables"], **network}}


def _options(job: AnyJob, options: RunOptions) -> dict[str, Any]:
    """The facts about a job that its hosts need to judge whether they are fit for it."""
    return {
        "cwd": str(nearest_there(Path(job.run_dir))),
        "data": job.data.train_file if isinstance(job, Job) else None,
        "nvme": nvme_path(job.ds_config or {}),
        "port": options.master_port or None,
        "hashing_seconds": HASHING_S,
    }


def _judged(job: AnyJob, options: RunOptions, hosts: Sequence[Host]) -> tuple[list[Problem], list[str]]:
    """Problems that stop the job, and remarks that don't."""
    parts = {part.host: part for part in job.hosts}
    bearing = {host.name: _bearing(job, options, host) for host in hosts}
    examined = doctor.examine([_narrowed(job, parts[host.name], host) for host in hosts])
    results = [_in_the_jobs_words(result) for result in examined if result.check in bearing[result.host]]
    odd = {result.host for result in results if result.colour == RED}
    for host in hosts:
        if host.facts is not None:
            results += _devices(job, parts[host.name], host)
            results += () if host.name in odd else _as_here(host)
    problems = [Problem(fault, names, fix) for fault, fix, names in _grouped(results, RED)]
    return problems, [f"{names}: {fault}" for fault, _, names in _grouped(results, YELLOW)]


def _judged_python(
    python: str, wanted: Sequence[tuple[str, int | None]], options: RunOptions, ask: AskHosts
) -> tuple[list[Problem], list[str]]:
    """Whether the Python that runs the script is on every host, with the same packages."""
    hosts = asked(wanted, {"python": python}, options.env, ask)
    answered = [host for host in hosts if host.facts is not None]  # the others were told of already
    results = [result for result in doctor.examine(answered) if result.check in OF_PYTHON]
    odd = [
        result for result in results if not (result.check == "packages" and "not installed" in result.what)
    ]
    problems = [Problem(fault, names, fix) for fault, fix, names in _grouped(odd, RED)]
    return problems, [f"{names}: {fault}" for fault, _, names in _grouped(odd, YELLOW)]


def _grouped(results: Sequence[CheckResult], colour: str) -> Iterator[tuple[str, str, str]]:
    """Results that several hosts share, once each: text, fix, hosts."""
    for check, groups in alike(results, colour).items():
        for group in groups[:MOST_ALIKE]:
            yield group[0].what, group[0].fix, few([result.host for result in group])
        if rest := [result for group in groups[MOST_ALIKE:] for result in group]:
            yield f"{check}: likewise", rest[0].fix, few([result.host for result in rest])


def _bearing(job: AnyJob, options: RunOptions, host: Host) -> set[str]:
    """The checks that bear on a host's part."""
    names = set(ALWAYS)
    if job.accelerator == "cuda":
        # Which of a host's GPUs Slurm gave isn't known here.
        names |= ON_GPUS if job.launcher != SLURM else ON_GPUS - {"gpu-free"}
    if options.master_port:
        names.add("port")
    if nvme_path(job.ds_config or {}):
        names.add("nvme")
    if missing := _missing(job, host):
        names |= TO_COMPILE | (
            {"nvcc", "cuda-parts"} if extensions.with_cuda(missing, job.accelerator) else set()
        )
    if "async_io" in missing:
        names.add("libaio")
    return names


def _missing(job: AnyJob, host: Host) -> list[str]:
    """DeepSpeed's operators that the job needs and the host still has to compile."""
    fact = (host.facts or {}).get("operators")
    built = fact.get("built") if isinstance(fact, dict) else None
    if not isinstance(built, list):
        return []
    return [name for name in extensions.needed(job.ds_config or {}) if name not in built]


def _narrowed(job: AnyJob, part: HostDevices, host: Host) -> Host:
    """A host with only those of its GPUs that the job uses, and none of its operators if one is missing: what it lacks
    for compiling is then what the job fails at."""
    if host.facts is None:
        return host
    facts = dict(host.facts)
    gpus = facts.get("gpus")
    if isinstance(gpus, dict) and isinstance(gpus.get("gpus"), list):
        kept = (
            [] if job.accelerator == "cpu" else [gpu for gpu in gpus["gpus"] if _is_the_jobs(job, part, gpu)]
        )
        uuids = {gpu.get("uuid") for gpu in kept}
        processes = [process for process in gpus.get("processes", ()) if process.get("uuid") in uuids]
        on_bus = 0 if (gpus["gpus"] and not kept) or job.accelerator == "cpu" else gpus.get("on_bus")
        facts["gpus"] = {**gpus, "gpus": kept, "processes": processes, "on_bus": on_bus, "of_driver": None}
        health = facts.get("gpu_health")
        if isinstance(health, dict) and isinstance(health.get("gpus"), list):
            indices = {gpu.get("index") for gpu in kept}
            facts["gpu_health"] = {"gpus": [gpu for gpu in health["gpus"] if gpu.get("index") in indices]}
    if _missing(job, host):
        facts["operators"] = {**facts["operators"], "built": []}
    return replace(host, facts=facts)


def _is_the_jobs(job: AnyJob, part: HostDevices, gpu: Mapping[str, Any]) -> bool:
    """Under Slurm the job's numbers are places among what Slurm gave, and with slices they are dsrun's own."""
    return job.launcher == SLURM or bool(part.visible) or gpu.get("index") in part.devices


def _in_the_jobs_words(result: CheckResult) -> CheckResult:
    """A job writes its folder and compiles what it needs: what is only odd elsewhere stops it.

    Versions that concern some jobs were judged with this one as it was planned.
    """
    if result.check == "versions" and result.colour == YELLOW:
        return replace(result, colour=GREEN)
    stops = result.colour == YELLOW and result.check in ("folder", "libaio")
    return replace(result, colour=RED) if stops else result


def _devices(job: AnyJob, part: HostDevices, host: Host) -> Iterator[CheckResult]:
    """The job's GPUs are there."""
    if job.accelerator == "cpu" or job.launcher == SLURM or part.visible:
        return
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):  # another machine's words
        there = [int(gpu["index"]) for gpu in host["gpus"]["gpus"]]
        if absent := [device for device in part.devices if device not in there]:
            has = f"it has {len(there)} ({', '.join(map(str, there))})" if there else "it has none"
            fault = f"no GPU {', '.join(map(str, absent))}: {has}"
            fix = f"Name others (--devices), or see `nvidia-smi` on {host.name} for the one that is gone."
            yield CheckResult("devices", host.name, RED, fault, fix)


def _as_here(host: Host) -> Iterator[CheckResult]:
    """Its agent and this dsrun understand each other, and its Python reads what this one has planned with."""
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
        version = host["packages"]["dsrun"]
        if version != dsrun.__version__:
            fault = f"dsrun {version or 'is missing'}, and it is {dsrun.__version__} here"
            fix = f"Install dsrun {dsrun.__version__} in its environment, from the same files as here."
            yield CheckResult("dsrun", host.name, RED, fault, fix)
    with contextlib.suppress(AttributeError, LookupError, TypeError, ValueError):
        minor = host.python_minor
        own = f"{sys.version_info.major}.{sys.version_info.minor}"
        if minor != own:
            fix = f"Make its environment again, with Python {own}."
            yield CheckResult("own python", host.name, RED, f"Python {minor}, and it is {own} here", fix)


def by_srun(hosts: Sequence[str], options: Mapping[str, Any], timeout_s: float) -> list[HostAnswer]:
    """The answers of hosts of a Slurm allocation: the probe as one task a node, which gets it on its stdin."""
    words = [
        "srun", "--overlap", "--quiet", "--nodes", str(len(hosts)), "--ntasks", str(len(hosts)),
        "--ntasks-per-node", "1", "--nodelist", ",".join(hosts), "--cpu-bind=none", "--kill-on-bad-exit=0",
        "python3", "-I", "-c", "import sys; exec(sys.stdin.read(), {'__name__': 'probe'})",
    ]  # fmt: skip
    text = probe.script({**options, "seconds": timeout_s}) + SAID_BY_TASK
    asked_at = time.time()
    fault, output = "srun printed nothing about it", ""
    try:
        done = subprocess.run(words, input=text.encode(), capture_output=True, timeout=timeout_s, check=False)
        output = done.stdout.decode(errors="replace")
        if done.returncode:
            message = ssh.last_line(done.stderr.decode(errors="replace"), 300)
            fault = f"srun ended with {done.returncode}, and said: {message}"
    except subprocess.TimeoutExpired as error:
        output = (error.stdout or b"").decode(errors="replace")
        fault = f"no answer within {timeout_s:g} s"
    except OSError as error:
        fault = f"srun can't be started: {error.strerror}"
    texts = _put_together(output)
    answers = []
    for host in hosts:
        answer = (
            ssh.read(host, 0, texts[host].encode(), b"") if host in texts else HostAnswer(host, fault=fault)
        )
        fix = answer.fix or f"Try: srun --overlap --nodes 1 --nodelist {host} hostname"
        answers.append(replace(answer, fix=fix, asked_at=asked_at, answered_at=time.time()))
    return answers


def _put_together(output: str) -> dict[str, str]:
    """Host -> its text, from the pieces that all of them printed in any order."""
    pieces: dict[str, dict[int, str]] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError, TypeError):
            node, at, text = json.loads(line)
            pieces.setdefault(str(node), {})[int(at)] = str(text)
    return {
        node: "".join(text for _, text in sorted(pieces_by_number.items()))
        for node, pieces_by_number in pieces.items()
    }
