"""A script of accelerate's: its launch config, which becomes the ranks' variables, and what it does on CPU ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dsrun.config.accelerate import findings, variables
from dsrun.config.accelerate import launch as known
from dsrun.config.accelerate.launch import LaunchConfig
from dsrun.config.accelerate.write import fsdp_launch
from dsrun.config.presets.fsdp import FsdpPreset
from dsrun.config.presets.options import Options
from dsrun.config.rules import Setting
from dsrun.config.schemas import schema
from dsrun.config.validation.sources import ConfigText, read
from dsrun.config.validation.validate import RuleSelection
from dsrun.errors import DsrunError, Problem
from dsrun.files import read_json_object
from dsrun.jobs.allocation.allocation import Allocation
from dsrun.jobs.assembly.script.config import parted
from dsrun.jobs.assembly.script.source import HF, ScriptSource
from dsrun.options.commands import LaunchOptions

OPTION = "--accelerate"
OWN = RuleSelection(ignore=("DS686", "DS687", "DS688"), level="warning")
"""dsrun starts the ranks: how accelerate launch would find machines counts for nothing, and paths arrive."""
USES_DEEPSPEED, USES_FSDP = "ACCELERATE_USE_DEEPSPEED", "ACCELERATE_USE_FSDP"
MEETING = ("main_process_ip", "main_process_port", "machine_rank", "rdzv_backend", "same_network")
GLOO = """Say it in the script, or every rank trains on all examples:
    from accelerate import Accelerator, InitProcessGroupKwargs
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])"""


@dataclass(frozen=True)
class AccelerateFile:
    """A launch config as it was read."""

    text: ConfigText
    launch: LaunchConfig
    config: Path | None
    """The DeepSpeed config that it names, where there is such a file."""

    def options(self, launch_options: LaunchOptions) -> dict[str, object]:
        """Options that follow from it where the user says nothing of devices."""
        launch, given = self.launch, (launch_options.gpus, launch_options.devices, launch_options.include)
        if any(option is not None for option in given):
            return {}
        devices = launch.given.get("gpu_ids")
        if isinstance(devices, str) and devices != "all":
            return {"devices": devices}
        return {"gpus": launch.processes // launch.machines} if launch.processes else {}

    def variables(self, config: Path) -> dict[str, str]:
        """The ranks' variables. config: where the ranks find the DeepSpeed config."""
        settings = variables.variables(self.launch)
        return settings | ({variables.CONFIG_FILE: str(config)} if self.config else {})

    def judged(self, setting: Setting) -> tuple[list[Problem], list[str]]:
        """Problems of the file and the config that it names, and remarks on them."""
        target = setting.target if setting.target in schema.FILLING else schema.ACCELERATE
        return parted(findings.validate(self.text, setting, OWN, target=target))


def read_file(path: Path, cwd: Path) -> AccelerateFile:
    """Raises DsrunError where it can't be read, or starts what needs more than variables."""
    from dsrun.config.reading import yaml_document

    text = ConfigText(str(path), read(cwd / path), cwd / path)
    launch = LaunchConfig(yaml_document.read(text.data, text.name).value)
    if launch.kind not in variables.STARTED:
        fault = f"distributed_type is {launch.kind}, and dsrun starts {', '.join(variables.STARTED)}"
        raise DsrunError(fault, where=f"{OPTION} {path}", hint="Start it with accelerate launch.")
    if launch.given.get("fp8_config"):
        hint = "Leave it out, or start it with accelerate launch."
        raise DsrunError("fp8_config is not handed on by dsrun", where=f"{OPTION} {path}", hint=hint)
    named = launch.file if launch.by_deepspeed else None
    config = findings.find(named, text.path)[1] if named else None
    return AccelerateFile(text, launch, config)


def config_of(file: AccelerateFile) -> dict[str, Any] | None:
    """The DeepSpeed config that the file names, which the run folder gets a copy of."""
    return read_json_object(file.config) if file.config else None


def of_preset(config: Mapping[str, Any], file: Path) -> dict[str, str]:
    """The variables by which an Accelerator takes a preset's config."""
    flag = config["zero_optimization"]["stage"] == 3
    section = {known.FILE: str(file), "zero3_init_flag": flag}
    return variables.variables(LaunchConfig({"distributed_type": known.DEEPSPEED, known.SECTION: section}))


def of_fsdp_preset(chosen: FsdpPreset, options: Options) -> dict[str, str]:
    """Variables for a preset of FSDP's: version 2."""
    return variables.variables(LaunchConfig(fsdp_launch(chosen, options, 2)))


def beside(script: Path) -> Iterator[Path]:
    """The launch configs in a script's folder."""
    from dsrun.config.reading import yaml_document

    for path in sorted(script.parent.glob("*.y*ml")):
        try:
            given = yaml_document.read(path.read_bytes(), path.name).value
        except (DsrunError, OSError):
            continue  # not one that accelerate would read
        if {"distributed_type", "num_processes"} <= set(given):
            yield path


def shape_problems(
    file: AccelerateFile, placed: Allocation, *, by_hand: bool
) -> tuple[list[Problem], list[str]]:
    """Whether the job has the file's shape. by_hand: the user named the devices, which then count."""
    launch, notes = file.launch, []
    hosts, ranks = len(placed.hosts), placed.world_size
    if ignored := [key for key in MEETING if launch.given.get(key) is not None and launch.machines > 1]:
        notes.append(
            f"{file.text.name}: dsrun settles {', '.join(ignored)} itself (--master-addr, --master-port)"
        )
    if launch.machines != hosts and not by_hand:
        fault = f"num_machines is {launch.machines}, and the job has {hosts}"
        hint = "Name the hosts: --hosts, --hostfile, dsrun submit --nodes N; or the devices to take here: --gpus N."
        return [Problem(fault, f"{OPTION} {file.text.name}", hint)], notes
    if launch.processes not in (None, ranks):
        notes.append(f"{file.text.name}: num_processes is {launch.processes}, and the job has {ranks} ranks")
    return [], notes


def cpu_problems(source: ScriptSource, env: Mapping[str, str], placed: Allocation) -> list[Problem]:
    """Why CPU ranks would each train on all examples, or without what was asked for (PartialState.__init__ and
    AcceleratorState.__init__ in accelerate/state.py, 1.15).

    env: the ranks' variables.
    """
    if placed.accelerator != "cpu":
        return []
    where, forced = source.accelerator, source.on_cpu or _is_on(env, variables.ON_CPU)
    if _is_on(env, USES_FSDP):
        fault = "accelerate shards on GPUs only: on CPU ranks it trains without FSDP, and says nothing"
        return [Problem(fault, where, "Take GPUs, or DEEPSPEED in place of FSDP.")]
    if not where or source.reader == HF:  # the Trainer makes one of its own: trainer_problems
        return []
    if _is_on(env, USES_DEEPSPEED):
        if forced:
            fault = "accelerate drops DeepSpeed where it is told to use the CPU"
            return [Problem(fault, where, f"Leave out cpu=True and {variables.ON_CPU}.")]
        if placed.world_size > 1 and not source.names_gloo:
            return [Problem("accelerate chooses no backend for CPU ranks", where, GLOO)]
    elif placed.world_size > 1 and not forced:
        fault = (
            "on CPU ranks accelerate doesn't see the other ranks: each would train on all examples, by itself"
        )
        return [
            Problem(
                fault,
                where,
                f"Add --env {variables.ON_CPU}=true, or a launch config (distributed_type: MULTI_CPU).",
            )
        ]
    return []


def trainer_problems(
    source: ScriptSource, trainer: Mapping[str, Any] | None, env: Mapping[str, str], placed: Allocation
) -> list[Problem]:
    """The same of HF Trainer, which sees the other CPU ranks with use_cpu only (_setup_devices in
    transformers/training_args.py).

    trainer: what the script's arguments say to it; None where they are not all that says it.
    """
    alone = placed.world_size == 1 or placed.accelerator != "cpu"
    if alone or trainer is None or source.on_cpu or trainer.get("use_cpu") or _is_on(env, variables.ON_CPU):
        return []
    fault = "on CPU ranks HF Trainer doesn't see the other ranks: each would train on all examples, by itself"
    return [Problem(fault, hint="Add --use_cpu true behind the script.")]


def _is_on(env: Mapping[str, str], name: str) -> bool:
    return env.get(name, "").lower() in known.TRUE


def named_by_hand(options: Sequence[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that --env and the user's environment give."""
    given = dict(text.split("=", 1) for text in options if "=" in text)
    return {**environ, **given}
