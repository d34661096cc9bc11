"""Jobs that run a user's own script, of DeepSpeed's or not: planned; nothing is started or written."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from dsrun import __version__
from dsrun.cluster.devices import Machine
from dsrun.errors import DsrunError, Findings
from dsrun.job.job import ScriptJob
from dsrun.jobs.allocation.allocation import Allocation, in_words
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.assembly import PlannedJob
from dsrun.jobs.assembly.script import config, settle, source
from dsrun.jobs.assembly.script.names import check_names
from dsrun.jobs.assembly.script.source import ScriptSource
from dsrun.jobs.assembly.script.stages import KnownScript, RankInputs, ScriptRequest, default_run_dir
from dsrun.jobs.assembly.script.start import ask_python, check_folder, check_ranks, check_tools, is_plain
from dsrun.options.commands import LaunchOptions
from dsrun.options.declare import flag_of, select
from dsrun.words import listed

CONFIGS = (".json", ".yaml", ".yml", ".toml", ".hjson")
"""Endings of what is handed to a script."""
STARTERS = re.compile(r"python[\d.]*|deepspeed|torchrun|accelerate|mpirun|srun")
"""Programs that start scripts elsewhere."""
BEFORE = ("dry_run", "detach", "gpus", "devices", "hosts", "hostfile", "nodes", "preset")
"""Options that say how the ranks are started, as fields of LaunchOptions."""


def plan(
    request: ScriptRequest,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    allocator: Allocator | None = None,
    cwd: Path | None = None,
) -> PlannedJob[ScriptJob]:
    """Check everything and return the job. Raises DsrunError with all the problems that can be found together.

    allocator: chooses the devices; unless given, they are not locked. cwd: the folder that the script is run in,
    this one unless given.
    """
    cwd = (cwd or Path.cwd()).absolute()
    run_dir = (cwd / (request.options.output_dir or default_run_dir(request))).expanduser().absolute()
    allocator, findings = allocator or Preview(machine, environ), Findings(settle.without_preset(request))
    python = findings.attempt(ask_python, request.options, cwd)
    script = KnownScript(request=request, environ=environ, cwd=cwd, run_dir=run_dir, python=python)
    if text := findings.attempt(_source, request, cwd):
        script = replace(script, source=text)
        findings.notes.extend(_own_options(request, cwd))
    if (file := request.options.accelerate) is None:
        findings.notes.extend(settle.files_beside(script))
    else:
        script = findings.attempt(settle.read_accelerate, script, file) or script
    placed = findings.attempt(_allocated, script, allocator, findings)
    args = findings.attempt(settle.with_preset, script)
    inputs = RankInputs(args=request.args if args is None else args)
    if args is not None:
        inputs = findings.attempt(settle.settle_config, script, args, placed, findings) or inputs
    inputs = check_ranks(script, inputs, placed, findings)
    plain = is_plain(script, inputs, placed, findings)
    if inputs.config is not None and placed:
        findings.attempt(check_tools, script, inputs.config, placed, findings)
    check_folder(script, placed, findings, plain=plain)
    findings.attempt(check_names, script, findings)
    if findings.problems or placed is None:
        raise DsrunError(findings.problems)
    return _finished(script, inputs, placed, findings, plain=plain)


def _allocated(script: KnownScript, allocator: Allocator, findings: Findings) -> Allocation:
    placed = allocator.allocate(select(DeviceRequest, script.options))
    findings.notes.extend(placed.notes)
    if script.source.sets_devices and placed.accelerator == "cuda":
        fault = (
            "sets CUDA_VISIBLE_DEVICES itself: its ranks may leave the devices that are reserved for this job"
        )
        findings.notes.append(f"{script.source.sets_devices} {fault} ({in_words(placed.hosts)})")
    return placed


def _finished(
    script: KnownScript, inputs: RankInputs, placed: Allocation, findings: Findings, *, plain: bool
) -> PlannedJob[ScriptJob]:
    request, options, local_rank = script.request, script.options, script.options.local_rank
    if local_rank is None:
        file = config.argument_file(request.args, script.source)
        local_rank = file is None and (script.source.takes_local_rank or not plain)
        if file is not None:
            findings.notes.append(f"the script looks for {file} first: it is given no --local_rank")
    job = ScriptJob(
        run_dir=str(script.run_dir), script=request.script, args=inputs.args, cwd=str(script.cwd),
        accelerator=placed.accelerator, hosts=placed.hosts, dsrun_version=__version__, module=options.module,
        local_rank=local_rank, preset=options.preset, ds_config=inputs.config, env=dict(inputs.env), plain=plain,
        python=script.python.executable if script.python else None, launcher=placed.launcher,
    )  # fmt: skip
    return PlannedJob(job, tuple(findings.notes), request.resolved)


def _source(request: ScriptRequest, cwd: Path) -> ScriptSource:
    """The facts in the script's source. Raises DsrunError where there is no script, or none that is Python."""
    if request.options.module:
        path, root = source.module_file(request.script, [str(cwd), *sys.path])
        # Of a compiled module nothing is to be read.
        return source.of_module(path, root) if path.suffix == ".py" else ScriptSource()
    path = cwd / request.script
    if not path.exists():
        raise DsrunError("no such file", where=request.script, hint=_like(path, request.script))
    if not path.is_file():
        hint = "Name the script in it, or run it as a module: -m NAME"
        raise DsrunError("is not a file", where=request.script, hint=hint)
    if (
        path.suffix.lower() in CONFIGS
    ):  # JSON is often Python, too: its ranks would start, do nothing and end well
        hint = "The script comes first, and its config behind it: train.py --deepspeed_config ds.json"
        raise DsrunError(f"is a {path.suffix} file, not a script", where=request.script, hint=hint)
    try:
        return source.of_script(path)
    except DsrunError as error:
        # As the user wrote it.
        raise DsrunError(
            replace(problem, where=problem.where.replace(str(path), request.script, 1))
            for problem in error.problems
        ) from error


def _like(path: Path, name: str) -> str:
    from dsrun.catalog import suggestion

    if STARTERS.fullmatch(name):
        return "Leave it out: dsrun starts the ranks itself. The script comes first."
    near = [file_name.name for file_name in path.parent.glob("*.py")] if path.parent.is_dir() else []
    top = name.partition(".")[0]
    if not name.endswith(".py") and top.isidentifier() and importlib.util.find_spec(top):
        return "A module is run with -m."
    return suggestion(path.name, near, "") or "Check the path."


def _own_options(request: ScriptRequest, cwd: Path) -> list[str]:
    """A note where options of dsrun stand behind the script, whose text has no such word."""
    options = {flag: name for name in BEFORE if (flag := flag_of(LaunchOptions, name)) in request.args}
    if not options or request.options.module:
        return []
    text = (cwd / request.script).read_text(encoding="utf-8", errors="replace")
    strange = [flag for flag, name in options.items() if name not in text and flag not in text]
    if not strange:
        return []
    fault = f"{listed(strange)}: behind {request.script}, so given to the script"
    return [f"{fault}; dsrun's own options stand before it"]
