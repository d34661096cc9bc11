"""A trainer's file as arguments with their places: YAML, JSON, or a script that starts the training."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Any

from dsrun.config import tree
from dsrun.config.reading import yaml_document
from dsrun.errors import DsrunError
from dsrun.files import read_text
from dsrun.trainers import recognise, shell, trainers
from dsrun.trainers.counterparts import Draft, ForeignTrainer, Outcome
from dsrun.trainers.translate import translate

DOCUMENTS, SCRIPTS = (
    (".yaml", ".yml", ".json"),
    (".sh", ".bash", ".slurm", ".sbatch", ".job", ".pbs", ".cmd", ""),
)
"""Endings of files that hold arguments, and of those that hold a command."""
LAUNCHED_BY = (
    "CUDA_VISIBLE_DEVICES",
    "NPROC_PER_NODE",
    "NNODES",
    "NODE_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "FORCE_TORCHRUN",
)
"""Variables that say how ranks are started."""
PLAIN_SHELL = (
    "cd",
    "echo",
    "set",
    "source",
    ".",
    "mkdir",
    "module",
    "conda",
    "pip",
    "ulimit",
    "date",
    "hostname",
    "fi",
    "then",
    "if",
    "else",
    "done",
    "for",
    "do",
    "sleep",
    "wait",
    "exit",
    "nvidia-smi",
    "trap",
    "tee",
)
"""Commands that train nothing and that a run of dsrun's doesn't need, or needs in the same shell."""


@dataclass
class ForeignRun:
    """Arguments of a trainer, wherever they stand."""

    trainer: ForeignTrainer
    given: dict[str, Any]
    lines: Mapping[str, int]
    where: str
    folder: Path
    launched: dict[str, Any] = field(default_factory=dict)
    """The launcher's options, and variables that are like them."""
    notes: list[str] = field(default_factory=list)


def read(path: Path) -> ForeignRun:
    """The training in a file. Raises DsrunError for a file that isn't a trainer's, with what it is."""
    if not path.exists():
        raise DsrunError("no such file", where=str(path))
    text = read_text(path)
    if path.suffix.lower() in DOCUMENTS:
        return _document(path, text)
    if path.suffix.lower() in SCRIPTS or text.startswith("#!"):
        return _script(path, text)
    hint = "It takes a trainer's YAML or JSON, or the shell script that starts it."
    raise DsrunError(f"can't be imported: a {path.suffix} file", where=str(path), hint=hint)


def arguments_of(path: Path, text: str) -> tuple[dict[str, Any], dict[str, int]]:
    """The arguments in a YAML or JSON file, and the line of each. Raises DsrunError where it can't be read."""
    document = yaml_document.read(text, str(path))  # which reads JSON, too
    lines = {
        key: span.key.line
        for key in document.value
        if (span := document.entries.get(tree.join("", key))) and span.key
    }
    return dict(document.value), lines


def _document(path: Path, text: str) -> ForeignRun:
    values, lines = arguments_of(path, text)
    known = recognise.recognised(values)
    what = recognise.other(values)
    if known is None or (
        what and known.name not in ("accelerate",) and "dataset" not in values and "datasets" not in values
    ):
        raise DsrunError(not_a_trainers(values, what), where=str(path), hint=_hint(values, path))
    return ForeignRun(
        known, known.prepare(values), _prepared_lines(known, values, lines), str(path), path.absolute().parent
    )


def _prepared_lines(
    trainer: ForeignTrainer, values: Mapping[str, Any], lines: Mapping[str, int]
) -> dict[str, int]:
    """Lines of arguments as the trainer's table names them: one of a section has the section's."""
    made = trainer.prepare(dict(values))
    return {key: lines.get(key) or lines.get(key.partition(".")[0]) or 0 for key in made}


def not_a_trainers(values: Mapping[str, Any], what: str = "") -> str:
    """What a file is that no trainer reads."""
    if what:
        return f"looks like {what}, not like a training that dsrun reads"
    keys = ", ".join(list(map(str, values))[:4])
    return f"is no file that dsrun knows, with the keys {keys}" if keys else "has no keys"


def _hint(values: Mapping[str, Any], path: Path) -> str:
    if "zero_optimization" in values or "train_micro_batch_size_per_gpu" in values:
        return f"It is a DeepSpeed config: dsrun finetune MODEL --deepspeed {shlex.quote(str(path))}"
    titles = ", ".join(trainer.title for trainer in trainers().values() if trainer.telling)
    return f"It takes files of {titles}, and scripts that start them."


def _script(path: Path, text: str) -> ForeignRun:
    script = shell.read(text)
    if not script.commands:
        raise DsrunError(_no_training(script), where=str(path), hint=_looked_for(script))
    command, *more = script.commands
    run = _of_command(command, path)
    for other in more:
        run.notes.append(
            f"line {other.line} starts another training: {other.program}; import it from a file of its own"
        )
    for line, words in script.others:
        if words.split()[0] not in PLAIN_SHELL:
            run.notes.append(f"line {line} is not taken over: {words}")
    for directive in script.directives:
        run.notes.append(
            f"{directive}: of the queue, for `dsrun submit` (--nodes, --gpus-per-node, --time, --partition)"
        )
    for name in script.documents:
        run.notes.append(f"the script writes {name}: write it once by hand, next to the run file")
    own = {name: value for name, value in command.variables.items() if name in LAUNCHED_BY}
    if "NPROC_PER_NODE" in own:
        run.launched.setdefault("nproc_per_node", own["NPROC_PER_NODE"])
    if "NNODES" in own:
        run.launched.setdefault("nnodes", own["NNODES"])
    run.launched |= own
    if others := [name for name in command.variables if name not in LAUNCHED_BY and name.isupper()]:
        run.notes.append(f"variables {', '.join(others)}: what the ranks need of them is --env NAME=VALUE")
    return run


def _no_training(script: shell.Script) -> str:
    """What a script starts in place of a training that dsrun knows."""
    if started := _own_module(script):
        return f"starts {started[1]}, which is no trainer that dsrun knows (line {started[0]})"
    return "starts no training that dsrun knows"


def _looked_for(script: shell.Script) -> str:
    if started := _own_module(script):
        return (
            f"What it trains stands in its code. dsrun starts it as it is: dsrun launch -m {started[1]} ..."
        )
    return f"It looks for lines that start {', '.join(_programs())}, or python."


def _own_module(script: shell.Script) -> tuple[int, str] | None:
    """The line and the module of the first `python -m MODULE`."""
    for line, words in script.others:
        if found := re.search(r"\bpython[\d.]*\s+-m\s+([\w.]+)", words):
            return line, found[1]
    return None


def _programs() -> list[str]:
    """Programs that start a training."""
    return [*(name for trainer in trainers().values() for name in trainer.starts), *shell.LAUNCHERS]


def _of_command(command: shell.Command, path: Path) -> ForeignRun:
    where = f"{path}:{command.line}"
    words = list(command.words)
    given, loose = shell.own_arguments(words)
    file = next(
        (
            word
            for word in (*loose, given.get("config"))
            if isinstance(word, str) and word.endswith(DOCUMENTS)
        ),
        None,
    )
    base: ForeignRun | None = None
    if command.program == "tune" and file is None and isinstance(recipe := given.get("config"), str):
        raise DsrunError(
            f"names {recipe}, a config of torchtune's own, which isn't here",
            where=where,
            hint=f"Copy it: tune cp {shlex.quote(recipe)} {PurePath(recipe).name}.yaml, and import that file.",
        )
    if file is not None:
        given.pop("config", None)
        found = Draft(next(iter(trainers().values())), {}, folder=path.absolute().parent).find(file)
        if found is None:
            raise DsrunError(
                f"names {file}, which isn't here",
                where=where,
                hint="Copy it beside the script, or import it itself.",
            )
        base = read(found)
        loose = [word for word in loose if word != file]
    given = {key: value for key, value in given.items() if key != "local_rank"}
    trainer = (
        trainers().get(command.trainer) or (base.trainer if base else None) or recognise.recognised(given)
    )
    if trainer is None or (
        not command.trainer and base is None and trainer.name in ("accelerate", "launchers")
    ):
        raise DsrunError(
            f"starts {command.program}, a script of your own: what it trains stands in its code",
            where=where,
            hint=f"dsrun starts it as it is: {_launch(command)}",
        )
    if command.subcommand in ("rlhf", "dpo", "grpo", "kto", "reward", "ppo"):
        given["rlhf_type" if trainer.name == "ms-swift" else "beta"] = command.subcommand
    run = base or ForeignRun(trainer, {}, {}, where, path.absolute().parent)
    own = trainer.prepare(given)
    run.given |= own
    run.lines = {**run.lines, **dict.fromkeys(own, command.line if base is None else 0)}
    run.launched |= command.launched
    run.notes += [f"{where}: {word!r} is no argument" for word in loose if word]
    if isinstance(named := command.launched.get("config_file"), str):
        found = Draft(trainer, {}, folder=path.absolute().parent).find(named)
        if found is None:
            run.notes.append(
                f"accelerate's {named} isn't here: import it itself for its devices and its preset"
            )
        else:
            values, _ = arguments_of(found, read_text(found))
            run.launched = {**trainers()["accelerate"].prepare(values), **run.launched}
    return run


def _launch(command: shell.Command) -> str:
    """`dsrun launch` of a script of the user's own."""
    options = translate(Draft(trainers()["launchers"], command.launched)).options
    flags = [
        f"--{name.replace('_', '-')} {shlex.quote(str(setting.value))}" for name, setting in options.items()
    ]
    rest = shlex.join([command.program, *command.words])
    return " ".join(["dsrun launch", *flags, rest])


def drafted(run: ForeignRun, *, gpus: int | None = None, more: Mapping[str, Any] | None = None) -> Draft:
    """The run of dsrun's that a training comes to. gpus: ranks of the job, where its launcher doesn't say; more:
    arguments that the command line adds. Raises DsrunError with every argument that dsrun has no such job for."""
    launcher = Draft(trainers()["launchers"], run.launched, folder=run.folder, where=run.where)
    translate(launcher)
    draft = Draft(
        run.trainer,
        {**run.given, **(more or {})},
        run.lines,
        run.folder,
        gpus or launcher.gpus,
        run.where,
        notes=list(run.notes),
    )
    draft.options.update(launcher.options)
    if "preset" in launcher.options and run.trainer.name not in ("accelerate", "launchers"):
        draft.notes.append(f"the launcher's preset: {launcher.options['preset'].value}")
    translate(draft)
    for option, setting in launcher.options.items():
        draft.options.setdefault(option, setting)
    draft.outcomes |= {f"{key}": outcome for key, outcome in _renamed(launcher.outcomes.values(), draft)}
    return draft


def _renamed(outcomes: Iterable[Outcome], draft: Draft) -> Iterable[tuple[str, Outcome]]:
    for outcome in outcomes:
        key = outcome.key if outcome.key not in draft.outcomes else f"launcher: {outcome.key}"
        yield key, replace(outcome, key=key)
