"""Jobs that run a user's own DeepSpeed script: planned (nothing is started or written), repeated, carried out."""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun import __version__
from dsrun.cluster import extensions
from dsrun.cluster.devices import Machine
from dsrun.config.build import Options, build_config, render_json
from dsrun.errors import DsrunError, Problem, collected
from dsrun.jobs import run, run_folder, script_config, script_source
from dsrun.jobs.cache import cache_root
from dsrun.jobs.claims import Look, Take
from dsrun.jobs.fitting import AUTO
from dsrun.jobs.job import ScriptJob, read
from dsrun.jobs.placed import Placed, Wanted, in_words
from dsrun.jobs.repeat import STAMP
from dsrun.jobs.runs import Run
from dsrun.jobs.script_source import DEEPSPEED, HF, Source

PACKAGES = ("torch", "deepspeed")
FOR_PRESET = ("micro_batch", "grad_accum", "grad_clip", "precision", "nvme_path", "lr")
"""Fields of Options that only --preset has a use for."""


@dataclass(frozen=True)
class Request:
    """What the user gave.

    script: a file, or a module's name where `module` is set; args: what follows it. local_rank: whether it gets
    --local_rank=N first; None: as the script can take it. config_option: how it takes a config, said by hand.
    given: the other options by name, only those that were given; overrides: texts of --set. again: the script was
    started in that folder before, and is started there again.
    """

    script: str
    args: tuple[str, ...] = ()
    module: bool = False
    local_rank: bool | None = None
    config_option: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    again: bool = False


@dataclass(frozen=True)
class Planned:
    """A job that passed every check, and what is worth saying about it. notes: lines for the user."""

    job: ScriptJob
    notes: tuple[str, ...]


def plan(
    request: Request,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    force: bool = False,
    take: Take | None = None,
    cwd: Path | None = None,
) -> Planned:
    """Check everything and return the job. Raises DsrunError with all the problems that can be found together.

    force: what is wrong with the config is a note, not a problem. take: takes the devices; unless given, they are
    chosen and not held. cwd: the folder that the script is run in, this one unless given.
    """
    given, cwd = request.given, (cwd or Path.cwd()).absolute()
    problems: list[Problem] = []
    notes: list[str] = []
    run_dir = (cwd / (given.get("output_dir") or _default_run_dir(request))).expanduser().absolute()
    source, placed, config = Source(), None, None
    args = request.args
    preset = given.get("preset")
    problems += _without_preset(request)
    with collected(problems):
        source = _source(request, cwd)
    with collected(problems):
        placed = (take or Look(machine, environ))(Wanted.of(given))
        notes += placed.notes
    already = script_config.named(args, source, cwd, request.config_option)
    with collected(problems):
        if preset is not None:
            way = script_config.way_of(source, request.config_option, args, request.script, already)
            args = script_config.with_config(args, way, str(run_dir / run_folder.CONFIG))
            if placed:
                config, found, said = _built(request, source, placed)
                notes += said
                _add(found, problems, notes, force=force)
        elif already is not None:
            setting = script_config.setting(
                placed, source.reader, script_config.trainer_of(request.args, source)
            )
            found, said = script_config.judged_file(already, cwd, setting, source.reader)
            notes += said
            _add(found, problems, notes, force=force)
    with collected(problems):
        if config is not None and placed:
            _check_operators(config, placed.accelerator, environ)
    with collected(problems):
        problems += _check_again(request, run_dir) if request.again else _check_new(run_dir)
    problems += check_packages()
    if problems or placed is None:
        raise DsrunError(problems)
    local_rank = request.local_rank
    if local_rank is None:
        file = script_config.argument_file(request.args, source)
        local_rank = file is None
        if file is not None:
            notes.append(f"the script looks for {file} in the first place: it is given no --local_rank")
    return Planned(
        ScriptJob(
            run_dir=str(run_dir),
            script=request.script,
            args=args,
            cwd=str(cwd),
            accelerator=placed.accelerator,
            hosts=placed.hosts,
            dsrun_version=__version__,
            module=request.module,
            local_rank=local_rank,
            preset=preset,
            ds_config=config,
            launcher=placed.launcher,
        ),
        tuple(notes),
    )


def _add(found: list[Problem], problems: list[Problem], notes: list[str], *, force: bool) -> None:
    """What is wrong with a config refuses the job, unless it is forced."""
    if force:
        notes += [f"{problem} (started all the same: --force)" for problem in found]
    elif found:
        problems += found


def _without_preset(request: Request) -> list[Problem]:
    """Options that say something of a preset's config, where there is no preset."""
    if request.given.get("preset") is not None:
        return []
    used = [f"--{name.replace('_', '-')}" for name in FOR_PRESET if request.given.get(name) is not None]
    used += ["--set"] if request.overrides else []
    hint = "Name a preset, or write it into the script's own config."
    what = "says something of a preset's config, and there is no --preset"
    return [Problem(what, option, hint) for option in used]


def _source(request: Request, cwd: Path) -> Source:
    """What the script's source tells. Raises DsrunError where there is no script, or none that is Python."""
    if request.module:
        path, root = script_source.module_file(request.script, [str(cwd), *sys.path])
        # Of a compiled module nothing is to be read.
        return script_source.of_module(path, root) if path.suffix == ".py" else Source()
    path = cwd / request.script
    if not path.exists():
        raise DsrunError("no such file", where=request.script, hint=_like(path, request.script))
    if not path.is_file():
        hint = "Name the script in it, or run it as a module: -m NAME"
        raise DsrunError("is not a file", where=request.script, hint=hint)
    try:
        return script_source.of_script(path)
    except DsrunError as error:
        # As the user wrote it.
        raise DsrunError(
            replace(problem, where=problem.where.replace(str(path), request.script, 1))
            for problem in error.problems
        ) from error


def _like(path: Path, said: str) -> str:
    from dsrun.catalog import suggestion

    near = [one.name for one in path.parent.glob("*.py")] if path.parent.is_dir() else []
    top = said.partition(".")[0]
    if not said.endswith(".py") and top.isidentifier() and importlib.util.find_spec(top):
        return "A module is run with -m."
    return suggestion(path.name, near, "")


def _built(
    request: Request, source: Source, placed: Placed
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The preset's config in the form for who reads it, what is wrong with it, and what is worth saying."""
    preset, given = str(request.given["preset"]), request.given
    if preset == AUTO:
        raise DsrunError(
            "auto needs to know the model, and a script's can't be known",
            where="--preset",
            hint="`dsrun plan MODEL` says which preset fits; name that one.",
        )
    target = HF if source.reader == HF else DEEPSPEED
    precision = given.get("precision") or (placed.machine.default_precision if target == DEEPSPEED else None)
    counts = {len(host.devices) for host in placed.hosts}
    wishes: dict[str, Any] = {name: given.get(name) for name in FOR_PRESET}
    options = Options(
        gpus=placed.world_size // len(placed.hosts) if len(counts) == 1 else placed.world_size,
        nodes=len(placed.hosts) if len(counts) == 1 else 1,
        target=target,
        overrides=request.overrides,
        **{**wishes, "precision": precision},
    )
    built = build_config(preset, options)
    if _needs_nvcc(built.ds_config, placed.accelerator):
        overrides = (*request.overrides, "optimizer.params.torch_adam=true")
        built = build_config(preset, replace(options, overrides=overrides))
    notes = list(script_config.texts(built.findings))
    if target == DEEPSPEED:
        notes.append(_batch_text(built.ds_config))
    trainer = script_config.trainer_of(request.args, source)
    found: list[Problem] = []
    if target == HF and trainer is not None:
        # What the Trainer would refuse, as its arguments say something else.
        setting = script_config.setting(placed, target, trainer)
        found, _ = script_config.judged(render_json(built.ds_config).encode(), preset, setting, target)
    return built.ds_config, found, notes


def _needs_nvcc(config: Mapping[str, Any], accelerator: str) -> bool:
    """Whether DeepSpeed's fused Adam would have to be compiled, and can't be."""
    return (
        accelerator == "cuda"
        and not extensions.has_nvcc()
        and extensions.needed(config, "cuda") == ["fused_adam"]
    )


def _batch_text(config: Mapping[str, Any]) -> str:
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    return (
        f"the config says micro batch {micro} x accumulation {accum}: the script's own batches have to be of that size "
        "(--micro-batch, --grad-accum)"
    )


def _check_operators(config: Mapping[str, Any], accelerator: str, environ: Mapping[str, str]) -> None:
    names = extensions.needed(config, accelerator)
    missing = extensions.missing(names, extensions.folder(environ, cache_root()))
    if missing:
        extensions.check_tools(missing, accelerator)


def _check_new(run_dir: Path) -> list[Problem]:
    """Why the run can't go into this folder. A script's run is not continued from a checkpoint of dsrun's."""
    hint = "Choose another --output-dir."
    return [replace(problem, hint=problem.hint and hint) for problem in run_folder.check_new(run_dir)]


def _check_again(request: Request, run_dir: Path) -> list[Problem]:
    """Why the script can't be started again in its folder. Raises DsrunError where the folder's job can't be read."""
    job, where = read(run_dir / run_folder.JOB), str(run_dir)
    if not isinstance(job, ScriptJob) or (job.script, job.module) != (request.script, request.module):
        return [Problem(f"is the folder of another run: {job.title}", where, "Choose another --output-dir.")]
    if run_folder.in_use(run_dir):
        return [Problem("is still running", where)]
    if run_folder.describe_state(run_dir) == "finished":
        return [Problem("is finished; there is nothing to continue", where)]
    return []


def check_packages() -> list[Problem]:
    """What a script's ranks need and is not installed."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if not absent:
        return []
    return [Problem(f"launching needs {', '.join(absent)}", hint="Install it: pip install 'dsrun[train]'")]


def _default_run_dir(request: Request) -> Path:
    name = request.script.rpartition(".")[2] if request.module else Path(request.script).stem
    return Path("runs") / f"{name}-{_now()}"


def _now() -> str:
    return datetime.now().strftime("%Y%m%d-%H%M%S")


def repeated(
    run: Run,
    job: ScriptJob,
    machine: Machine,
    environ: Mapping[str, str],
    *,
    output_dir: Path | None = None,
    wanted: Wanted | None = None,
    take: Take | None = None,
) -> Planned:
    """The same command of a run again, in a folder of its own: same script, arguments, config and number of ranks.

    output_dir: beside the run unless given; wanted: where it is to run, unless the user says so as Wanted.or_as has it.
    Raises DsrunError with all the problems where it can't be: of what the script and its data were nothing is known.
    """
    target = (output_dir or _beside(run.path)).expanduser().absolute()
    problems = [*_check_new(target), *check_packages()]
    cwd = Path(job.cwd)
    if not cwd.is_dir():
        problems.append(Problem("is gone, and the script was run there", str(cwd)))
    elif not job.module and not (cwd / job.script).is_file():
        problems.append(Problem("is gone", str(cwd / job.script)))
    if problems:
        raise DsrunError(problems)
    placed = (take or Look(machine, environ))((wanted or Wanted()).or_as(job.hosts, job.launcher))
    if placed.accelerator != job.accelerator:
        what = f"the run was on {job.accelerator}, and here it is {placed.accelerator}"
        raise DsrunError(what, hint="Repeat it where it ran, with the same torch and DS_ACCELERATOR.")
    if placed.world_size != job.world_size:
        what = f"the run had {job.world_size} ranks, and {placed.world_size} devices are named"
        raise DsrunError(f"{what} ({in_words(placed.hosts)})")
    # A preset's config lies in the run's folder, and the arguments name it there.
    before, after = (str(folder / run_folder.CONFIG) for folder in (Path(job.run_dir), target))
    args = tuple(word.replace(before, after) if job.ds_config is not None else word for word in job.args)
    again = replace(
        job,
        run_dir=str(target),
        args=args,
        hosts=placed.hosts,
        launcher=placed.launcher,
        dsrun_version=__version__,
    )
    notes = [*placed.notes]
    if not job.module and run.started and (cwd / job.script).stat().st_mtime > run.started:
        notes.append(f"{job.script} changed after the run was started")
    return Planned(again, tuple(notes))


def _beside(path: Path) -> Path:
    """Beside the run, under its name with another time."""
    return path.with_name(f"{STAMP.sub('', path.name)}-{_now()}")


def carry_out(
    job: ScriptJob,
    machine: Machine,
    environ: Mapping[str, str],
    say: Callable[[str], None],
    view: AbstractContextManager[Callable[[], bool]],
    *,
    going: run.Going,
) -> dict[str, Any]:
    """Run the script on all ranks to its end, and say what is known of it: run_dir, ranks, seconds, logs.

    view: a ScriptView. Raises DsrunError if it fails, KeyboardInterrupt or TerminatedError if it was ended; the folder
    tells in every case.
    """
    run_dir, began = Path(job.run_dir), time.time()
    with run.started(job, machine, environ, resume=False):
        run.go_on(job, environ, say, lambda: view, resume=False, going=going)
        restarts = json.loads((run_dir / run_folder.STATE).read_text(encoding="utf-8")).get("restarts", 0)
        result = {
            "run_dir": job.run_dir,
            "ranks": job.world_size,
            "seconds": time.time() - began,
            "restarts": restarts,
            "logs": str(run_dir / run_folder.LOGS),
        }
        run_folder.write_state(run_dir, "finished", result=result)
        return result
