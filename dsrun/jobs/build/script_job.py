"""Jobs that run a user's own DeepSpeed script: planned (nothing is started or written), and repeated."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from dsrun import __version__
from dsrun.cluster import python_environment
from dsrun.cluster.devices import Machine
from dsrun.cluster.python_environment import PythonEnvironment
from dsrun.config.presets.build import Options, build_config, render_json
from dsrun.config.presets.fsdp import FsdpPreset
from dsrun.config.presets.preset import load as load_preset
from dsrun.errors import DsrunError, Problem, collected
from dsrun.jobs.allocation.allocation import Allocation, in_words
from dsrun.jobs.allocation.request import DeviceRequest
from dsrun.jobs.allocation.reservation import Allocator, Preview
from dsrun.jobs.build import JobDraft, PlannedJob, go_through, script_accelerate, script_config, script_source
from dsrun.jobs.build.checks import precision
from dsrun.jobs.build.checks.memory_check import AUTO
from dsrun.jobs.build.checks.optimizers import torch_adam, why_torch_adam
from dsrun.jobs.build.checks.packages import absent_packages, absent_there, check_operators, check_torch_build
from dsrun.jobs.build.rerun import STAMP
from dsrun.jobs.build.script_accelerate import AccelerateFile
from dsrun.jobs.build.script_config import Named
from dsrun.jobs.build.script_source import ACCELERATE, DEEPSPEED, HF, ScriptSource
from dsrun.jobs.runs.past_runs import Run
from dsrun.jobs.spec import run_folder
from dsrun.jobs.spec.job import ScriptJob, node_shape, read
from dsrun.options import derived
from dsrun.options.commands import LaunchOptions
from dsrun.options.table import Resolved, Source, flag_of, select

LAUNCHER = ("torch", "deepspeed")
"""What DeepSpeed's launcher needs of this Python, whichever runs the script."""
JUDGED = ("torch", "deepspeed", "transformers", "accelerate")
"""Of what a script imports, what is looked for before the start: it may do without others."""
FOR_PRESET = ("micro_batch", "grad_accum", "grad_clip", "precision", "nvme_path", "lr")
"""Options that only --preset has a use for, besides --set."""


@dataclass(frozen=True)
class ScriptRequest:
    """What the user asked for."""

    script: str
    """A file, or a module's name where the options say so."""
    args: tuple[str, ...]
    """What follows it, which is its own."""
    asked: Resolved[LaunchOptions]
    again: bool = False
    """The script was started in that folder before, and is started there again."""

    @property
    def options(self) -> LaunchOptions:
        return self.asked.options


@dataclass(kw_only=True)
class ScriptDraft(JobDraft):
    """A script's job on its way."""

    request: ScriptRequest
    cwd: Path
    """The folder that the script is run in."""
    run_dir: Path
    source: ScriptSource = field(default_factory=ScriptSource)
    args: tuple[str, ...] = ()
    """The script's arguments, with a preset's config among them."""
    config: dict[str, Any] | None = None
    python: PythonEnvironment | None = None
    """The Python of the ranks, where it isn't this one."""
    plain: bool = False
    """It wants no DeepSpeed, as far as its source tells."""
    accelerate: AccelerateFile | None = None
    env: dict[str, str] = field(default_factory=dict)
    """Variables that the ranks get for the script's sake."""

    @property
    def config_file(self) -> Path:
        """Where the ranks find `config`."""
        return self.run_dir / run_folder.CONFIG

    @property
    def options(self) -> LaunchOptions:
        return self.request.options

    def judge(self, found: list[Problem], notes: Sequence[str]) -> None:
        """What is wrong with a config refuses the job, unless it is forced."""
        self.notes += notes
        if self.options.force:
            self.notes += [f"{problem} (started all the same: --force)" for problem in found]
        else:
            self.problems += found


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
    run_dir = (cwd / (request.options.output_dir or _default_run_dir(request))).expanduser().absolute()
    draft = ScriptDraft(
        asked=request.asked, machine=machine, environ=environ, allocator=allocator or Preview(machine, environ),
        request=request, cwd=cwd, run_dir=run_dir, args=request.args,
    )  # fmt: skip
    go_through(draft, STEPS)
    return _finished(draft)


def _check_options(draft: ScriptDraft) -> None:
    draft.problems += _without_preset(draft.request)


def _read_source(draft: ScriptDraft) -> None:
    draft.source = _source(draft.request, draft.cwd)


def _ask_python(draft: ScriptDraft) -> None:
    """The Python that is named, and what is installed there."""
    if draft.options.python is not None:
        # Not resolved: where a link lies says which environment it is.
        path = os.path.normpath(draft.cwd / draft.options.python.expanduser())
        draft.python = python_environment.ask(Path(path), "--python")


def _read_accelerate(draft: ScriptDraft) -> None:
    """The launch config that is named, and the devices that follow from it."""
    path = draft.options.accelerate
    if path is None:
        _note_files_beside(draft)
        return
    if draft.options.preset is not None:
        what = "a launch config and a preset both say how it is trained"
        raise DsrunError(what, where=f"{script_accelerate.OPTION}, --preset", hint="Leave one of them out.")
    draft.accelerate = script_accelerate.read_file(path, draft.cwd)
    draft.asked = draft.asked.settled(draft.accelerate.options(draft.options), str(path))
    draft.request = replace(draft.request, asked=draft.asked)


def _note_files_beside(draft: ScriptDraft) -> None:
    if draft.source.reader == ACCELERATE and draft.options.preset is None and not draft.options.module:
        for path in script_accelerate.beside(draft.cwd / draft.request.script):
            draft.notes.append(
                f"{path.name} lies beside the script, and counts with {script_accelerate.OPTION} only"
            )


def _allocate(draft: ScriptDraft) -> None:
    draft.placed = draft.allocator.allocate(select(DeviceRequest, draft.options))
    draft.notes += draft.placed.notes
    if draft.source.sets_devices and draft.placed.accelerator == "cuda":
        what = (
            "sets CUDA_VISIBLE_DEVICES itself: its ranks may leave the devices that are reserved for this job"
        )
        draft.notes.append(f"{draft.source.sets_devices} {what} ({in_words(draft.placed.hosts)})")


def _settle_config(draft: ScriptDraft) -> None:
    """The preset's config, handed over as the script takes it; or the script's own, judged."""
    source, options, request = draft.source, draft.options, draft.request
    named = script_config.named(draft.args, source, draft.cwd, options.config_option)
    if draft.accelerate is not None:
        _settle_accelerate(draft, draft.accelerate, named)
    elif options.preset is not None and source.reader == ACCELERATE and not source.ways:
        if draft.placed and (fsdp := _fsdp(options.preset)):
            _check_fsdp_options(draft)
            ranks, nodes = node_shape(draft.placed.hosts)
            given = Options(gpus=ranks, nodes=nodes, precision=options.precision)
            draft.env = script_accelerate.of_fsdp_preset(fsdp, given)
        elif draft.placed:
            draft.config, found, notes = _built(request, source, draft.placed)
            draft.judge(found, notes)
            draft.env = script_accelerate.of_preset(draft.config, draft.config_file)
    elif options.preset is not None:
        way = script_config.way_of(source, options.config_option, draft.args, request.script, named)
        draft.args = script_config.with_config(draft.args, way, str(draft.config_file))
        if draft.placed:
            draft.config, found, notes = _built(request, source, draft.placed)
            draft.judge(found, notes)
    elif named is not None:
        trainer = script_config.trainer_of(request.args, source)
        setting = script_config.setting(draft.placed, source.reader, trainer, draft.python)
        draft.judge(*script_config.judged_file(named, draft.cwd, setting, source.reader))


def _fsdp(name: str) -> FsdpPreset | None:
    return None if name == AUTO else load_preset(name).fsdp


def _check_fsdp_options(draft: ScriptDraft) -> None:
    """Raise DsrunError for options that only a DeepSpeed config has a use for."""
    names = [name for name in (*FOR_PRESET, "overrides") if name != "precision"]
    if used := [flag_of(LaunchOptions, name) for name in names if draft.asked.said(name)]:
        what = f"FSDP has no config for {', '.join(used)}: the script says it itself"
        raise DsrunError(what, where=f"--preset {draft.options.preset}", hint="Leave it out.")


def _settle_accelerate(draft: ScriptDraft, file: AccelerateFile, named: Named | None) -> None:
    """The launch config judged, and its variables."""
    if named is not None:
        what = f"the script's arguments name a config, too: {named.option} {named.file}"
        raise DsrunError(
            what, where=f"{script_accelerate.OPTION} {file.text.name}", hint="Leave one of them out."
        )
    if draft.source.reader not in (HF, ACCELERATE):
        draft.notes.append(f"{draft.request.script} makes no Accelerator, as far as its source tells")
    draft.judge(*file.judged(script_config.setting(draft.placed, draft.source.reader, None, draft.python)))
    draft.env = file.variables(draft.config_file)
    draft.config = script_accelerate.config_of(file)
    if draft.placed:
        by_hand = any(draft.asked.said(name) for name in ("gpus", "devices", "include"))
        problems, notes = script_accelerate.shape_problems(file, draft.placed, by_hand=by_hand)
        draft.problems += problems
        draft.notes += notes


def _check_ranks(draft: ScriptDraft) -> None:
    """What the user says of a variable stands before a file's; and what CPU ranks do with them."""
    by_hand = script_accelerate.named_by_hand(draft.options.env, {})
    draft.env = {name: value for name, value in draft.env.items() if name not in by_hand}
    if draft.placed:
        all_of_them = {**draft.environ, **draft.env, **by_hand}
        draft.judge(script_accelerate.cpu_problems(draft.source, all_of_them, draft.placed), [])


def _choose_starter(draft: ScriptDraft) -> None:
    """Whether DeepSpeed's launcher starts the ranks: not those of a script whose source is read, and has none of it.

    Another Python need not have DeepSpeed, and its ranks are processes of their own: they are never started by it.
    """
    source, env = draft.source, draft.env
    named = script_config.named(draft.args, source, draft.cwd, draft.options.config_option)
    by_config = draft.config is not None or named is not None or script_accelerate.USES_DEEPSPEED in env
    wants = source.imports is None or by_config or DEEPSPEED in (source.reader, *source.imports)
    draft.plain = draft.python is not None or not wants
    if not wants and source.reader == HF and draft.placed:  # DeepSpeed would stop at the batch's size (DS615)
        trainer = script_config.trainer_of(draft.request.args, source)
        variables = {**draft.environ, **env, **script_accelerate.named_by_hand(draft.options.env, {})}
        draft.judge(script_accelerate.trainer_problems(source, trainer, variables, draft.placed), [])


def _check_tools(draft: ScriptDraft) -> None:
    if draft.config is not None and draft.placed:
        draft.problems += precision.problems(derived.precision_of(draft.config), draft.placed.own_machine)
        if draft.python is None:  # what another Python has compiled isn't known
            check_operators(draft.config, draft.placed.accelerator, draft.environ)


def _check_folder(draft: ScriptDraft) -> None:
    """The run's folder, and what is installed."""
    with collected(draft.problems):
        draft.problems += (
            _check_again(draft.request, draft.run_dir) if draft.request.again else _check_new(draft.run_dir)
        )
    draft.problems += check_packages(draft)
    draft.problems += check_torch_build(draft.placed, draft.python)


STEPS = (
    _check_options, _ask_python, _read_source, _read_accelerate, _allocate, _settle_config, _check_ranks,
    _choose_starter, _check_tools, _check_folder,
)  # fmt: skip
"""In this order: each knows what those before it found out."""


def _finished(draft: ScriptDraft) -> PlannedJob[ScriptJob]:
    """The job. Raises DsrunError with what is wrong with the draft."""
    if draft.problems or draft.placed is None:
        raise DsrunError(draft.problems)
    options, local_rank = draft.options, draft.options.local_rank
    if local_rank is None:
        file = script_config.argument_file(draft.request.args, draft.source)
        local_rank = file is None and (draft.source.takes_local_rank or not draft.plain)
        if file is not None:
            draft.notes.append(f"the script looks for {file} first: it is given no --local_rank")
    job = ScriptJob(
        run_dir=str(draft.run_dir),
        script=draft.request.script,
        args=draft.args,
        cwd=str(draft.cwd),
        accelerator=draft.placed.accelerator,
        hosts=draft.placed.hosts,
        dsrun_version=__version__,
        module=options.module,
        local_rank=local_rank,
        preset=options.preset,
        ds_config=draft.config,
        env=draft.env,
        plain=draft.plain,
        python=draft.python.executable if draft.python else None,
        launcher=draft.placed.launcher,
    )
    return PlannedJob(job, tuple(draft.notes), draft.asked)


def _without_preset(request: ScriptRequest) -> list[Problem]:
    """Options that say something of a preset's config, where there is no preset."""
    if request.options.preset is not None:
        return []
    names = (*FOR_PRESET, "overrides")
    used = [
        flag_of(LaunchOptions, name) for name in names if request.asked.source(name) == Source.COMMAND_LINE
    ]
    hint = "Name a preset, or write it into the script's own config."
    what = "says something of a preset's config, and there is no --preset"
    return [Problem(what, option, hint) for option in used]


def _source(request: ScriptRequest, cwd: Path) -> ScriptSource:
    """What the script's source tells. Raises DsrunError where there is no script, or none that is Python."""
    if request.options.module:
        path, root = script_source.module_file(request.script, [str(cwd), *sys.path])
        # Of a compiled module nothing is to be read.
        return script_source.of_module(path, root) if path.suffix == ".py" else ScriptSource()
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
    request: ScriptRequest, source: ScriptSource, placed: Allocation
) -> tuple[dict[str, Any], list[Problem], list[str]]:
    """The preset's config in the form for who reads it, what is wrong with it, and what is worth saying."""
    preset, asked = str(request.options.preset), request.options
    if preset == AUTO:
        raise DsrunError(
            "auto needs to know the model, and a script's can't be known",
            where="--preset",
            hint="`dsrun plan MODEL` says which preset fits; name that one.",
        )
    target = source.reader if source.reader in (HF, ACCELERATE) else DEEPSPEED
    precision = asked.precision or (placed.machine.default_precision if target == DEEPSPEED else None)
    ranks, nodes = node_shape(placed.hosts)
    options = select(
        Options,
        asked,
        gpus=ranks,
        nodes=nodes,
        target=target,
        precision=precision,
    )
    built = build_config(preset, options)
    if why_torch_adam(built.ds_config, placed.accelerator):
        overrides = (*asked.overrides, *torch_adam(placed.accelerator))
        built = build_config(preset, replace(options, overrides=overrides))
    notes = list(script_config.texts(built.findings))
    if target == DEEPSPEED:
        notes.append(_batch_text(built.ds_config))
    trainer = script_config.trainer_of(request.args, source)
    found: list[Problem] = []
    if target == HF and trainer is not None:
        # What the Trainer would refuse, as its arguments say something else.
        setting = script_config.setting(placed, target, trainer, None)
        found, _ = script_config.judged(render_json(built.ds_config).encode(), preset, setting, target)
    return built.ds_config, found, notes


def _batch_text(config: Mapping[str, Any]) -> str:
    micro, accum = config.get("train_micro_batch_size_per_gpu"), config.get("gradient_accumulation_steps")
    return (
        f"the config says micro batch {micro} x accumulation {accum}: the script's own batches have to be of that size "
        "(--micro-batch, --grad-accum)"
    )


def _check_new(run_dir: Path) -> list[Problem]:
    """Why the run can't go into this folder. A script's run is not continued from a checkpoint of dsrun's."""
    hint = "Choose another --output-dir."
    return [replace(problem, hint=problem.hint and hint) for problem in run_folder.check_new(run_dir)]


def _check_again(request: ScriptRequest, run_dir: Path) -> list[Problem]:
    """Why the script can't be started again in its folder. Raises DsrunError where the folder's job can't be read."""
    job, where = read(run_dir / run_folder.JOB), str(run_dir)
    if not isinstance(job, ScriptJob) or (job.script, job.module) != (request.script, request.options.module):
        return [Problem(f"is the folder of another run: {job.title}", where, "Choose another --output-dir.")]
    if run_folder.in_use(run_dir):
        return [Problem("is still running", where)]
    if run_folder.describe_state(run_dir) == "finished":
        return [Problem("is finished; there is nothing to continue", where)]
    return []


def check_packages(draft: ScriptDraft) -> list[Problem]:
    """What the ranks need and is not installed: of the script's imports what is judged, and DeepSpeed's launcher."""
    names = [name for name in JUDGED if name in (draft.source.imports or ())]
    names += [ACCELERATE] if draft.accelerate and ACCELERATE not in names else []
    found = [] if draft.plain else absent_packages(LAUNCHER, "launching")
    if draft.python:
        return [*found, *absent_there(names, draft.python)]
    return found or absent_packages(names, "launching")


def _default_run_dir(request: ScriptRequest) -> Path:
    name = request.script.rpartition(".")[2] if request.options.module else Path(request.script).stem
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
    wanted: DeviceRequest | None = None,
    allocator: Allocator | None = None,
) -> PlannedJob[ScriptJob]:
    """The same command of a run again, in a folder of its own: same script, arguments, config and number of ranks.

    output_dir: beside the run unless given; wanted: where it is to run, or as DeviceRequest.or_like has it.
    Raises DsrunError with all the problems where it can't be: of what the script and its data were nothing is known.
    """
    target = (output_dir or _beside(run.path)).expanduser().absolute()
    problems = [*_check_new(target)]
    problems += [] if job.plain else absent_packages(LAUNCHER, "launching")
    if job.python:
        with collected(problems):
            python_environment.ask(Path(job.python), "--python")
    cwd = Path(job.cwd)
    if not cwd.is_dir():
        problems.append(Problem("is gone, and the script was run there", str(cwd)))
    elif not job.module and not (cwd / job.script).is_file():
        problems.append(Problem("is gone", str(cwd / job.script)))
    if problems:
        raise DsrunError(problems)
    placed = (allocator or Preview(machine, environ)).allocate(
        (wanted or DeviceRequest()).or_like(job.hosts, job.launcher)
    )
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
        env={name: value.replace(before, after) for name, value in job.env.items()},
        hosts=placed.hosts,
        launcher=placed.launcher,
        dsrun_version=__version__,
    )
    notes = [*placed.notes]
    if not job.module and run.started and (cwd / job.script).stat().st_mtime > run.started:
        notes.append(f"{job.script} changed after the run was started")
    return PlannedJob(again, tuple(notes))


def _beside(path: Path) -> Path:
    """Beside the run, under its name with another time."""
    return path.with_name(f"{STAMP.sub('', path.name)}-{_now()}")
