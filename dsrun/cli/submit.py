"""`dsrun submit` (jobs): send a job to Slurm, or write it as a manifest for Kubernetes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.catalog import suggestion
from dsrun.cli.output.results import print_json
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import DsrunError, Problem, raise_all
from dsrun.files import write_atomic
from dsrun.host.hiding import secret_arguments, secrets
from dsrun.options.commands import FinetuneOptions, LaunchOptions, SubmitOptions
from dsrun.options.declare import entries, flag_of
from dsrun.options.layers import Resolved, Source

if TYPE_CHECKING:
    from dsrun.errors import Problem
    from dsrun.jobs.launchers.common.cluster_files import ClusterFile
    from dsrun.jobs.launchers.common.submission import Submission

COMMANDS: dict[str, type[FinetuneOptions | LaunchOptions]] = {
    "finetune": FinetuneOptions,
    "launch": LaunchOptions,
}
"""The commands that can be sent, with their options."""
ELSEWHERE = {
    "cluster": "It goes before the command: dsrun submit --cluster NAME finetune ...",
    "hostfile": "The cluster chooses the hosts.",
    "hosts": "The cluster chooses the hosts.",
    "launcher": "The cluster starts the job.",
    "nodes": "It goes before the command: dsrun submit --nodes N finetune ...",
    "detach": "The queue starts the job without a terminal.",
    "dry_run": "It goes before the command: dsrun submit --dry-run finetune ...",
}
"""Options of the command that the queue decides about, and what to do."""
NAMING = ("devices", "include", "exclude")
"""Options that name devices one by one."""
OF_SLURM = ("partition", "account", "qos")


@dataclass(frozen=True)
class Inner:
    """The command that is sent."""

    context: click.Context
    """The command's own context, for messages."""
    words: tuple[str, ...]
    """Its words as they are typed on the node."""
    target: str
    """MODEL or SCRIPT."""
    requested: Resolved[Any]
    """Its options, FinetuneOptions or LaunchOptions."""
    run_file: Path | None = None
    """The run file among its words."""

    @property
    def options(self) -> FinetuneOptions | LaunchOptions:
        options: FinetuneOptions | LaunchOptions = self.requested.options
        return options

    @property
    def resumes(self) -> bool:
        """Whether it continues a run, and would not start one."""
        return isinstance(self.options, FinetuneOptions) and self.options.resume


@click.command(cls=TableCommand, context_settings={"allow_interspersed_args": False})
@options_of(SubmitOptions)
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(ctx: click.Context, /, words: tuple[str, ...], **values: Any) -> None:
    """Send COMMAND, a `dsrun finetune` or `dsrun launch`, to Slurm's queue, or write it for Kubernetes.

    It is checked here as far as this machine can. On the nodes dsrun finds hosts and GPUs by itself; before the time
    limit it saves a checkpoint and goes into the queue again. Your environment goes along (sbatch --export=ALL), and
    none of it into the script.

    For a cluster of Kubernetes a job's manifest is written, which kubectl sends. Nothing of your environment is
    in it.

    \b
    dsrun submit --nodes 2 --gpus-per-node 8 --time 4:00:00 -- finetune chatglm2-6b --train-file train.jsonl
    dsrun submit --cluster lab --dry-run -- launch train.py --epochs 3
    dsrun submit --cluster k8s --output job.yaml -- finetune chatglm2-6b --train-file /runs/train.jsonl
    """
    from dsrun.jobs.assembly import submit
    from dsrun.jobs.launchers.slurm import batch

    options = given(SubmitOptions, values).options
    inner = _parsed(ctx, words)
    cluster = _cluster_file(options)
    if cluster.launcher == "kubernetes":
        _to_pods(inner, cluster, options)
        return
    if options.output is not None:
        raise click.UsageError("--output is for a manifest of Kubernetes; a script lies in the run's folder.")
    run_dir, words = _run_dir(inner, options.output_dir)
    gpus, ranks, extra = _devices(inner, cluster)
    # All that this machine can see is reported at once: what fails on the nodes may do so after hours in the queue.
    problems = submit.folder_problems(run_dir, resume=_goes_on(inner, run_dir))
    problems += _secrets(inner)
    if not inner.resumes:
        problems += _finetune_problems(inner, gpus=ranks, nodes=options.nodes)
    if not (cluster.container or cluster.python):
        from dsrun.jobs.assembly.finetune.folder import check_packages

        problems += check_packages(scored=False)
    raise_all(problems)
    # Before the user's own words: what follows SCRIPT belongs to the script.
    words = (words[0], *extra, *_variables(cluster), *words[1:])
    submission = _submission(inner, options, cluster, run_dir=run_dir, words=words, gpus=gpus)
    text = batch.script(submission)
    if options.dry_run:
        _show(submission, text, options.as_json)
        return
    sent = submit.send(submission, text, os.environ)
    for note in sent.notes:
        click.echo(f"note: sbatch: {note}", err=True)
    _tell(submission, sent.job_id, options.as_json)


def _parsed(ctx: click.Context, words: tuple[str, ...]) -> Inner:
    """The command as a value: faults in its words are reported now, not by a job hours later."""
    from dsrun.cli import cli
    from dsrun.cli.parsing.run_file import is_run_file, with_run_file

    name = words[0]
    command = cli.get_command(ctx, name) if name in COMMANDS else None
    if command is None:
        near = () if name in cli.list_commands(ctx) else COMMANDS
        hint = suggestion(name, near, f"It sends {' and '.join(COMMANDS)}.")
        raise click.UsageError(f"{name!r} can't be sent. {hint}", ctx)
    # As if it were typed by itself: its own --help is what a slip leads to.
    context = command.make_context(name, list(words[1:]), parent=ctx.find_root())
    requested: Resolved[Any] = given(COMMANDS[name], context.params)
    target, run_file = context.params.get("script"), None
    if name == "finetune":
        typed = context.params["words"]
        target, requested = with_run_file(typed, requested)
        run_file = next((Path(word) for word in typed if is_run_file(word)), None)
    for option, hint in ELSEWHERE.items():
        if requested.said(option):
            flag = flag_of(COMMANDS[name], option)
            raise click.UsageError(f"{flag} can't be sent along. {hint}", context)
    if not target:
        raise click.UsageError("Missing argument 'MODEL'.", context)
    return Inner(context, words, str(target), requested, run_file)


def _finetune_problems(inner: Inner, *, gpus: int | None, nodes: int, files: bool = True) -> list[Problem]:
    """The problems of a fine-tune as far as this machine can tell; of a script nothing is known."""
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly import submit
    from dsrun.jobs.assembly.finetune import FinetuneRequest

    requested = inner.requested
    if not isinstance(requested.options, FinetuneOptions):
        return []
    request = FinetuneRequest(inner.target, requested)
    return submit.finetune_problems(request, detect(os.environ), gpus=gpus, nodes=nodes, files=files)


def _cluster_file(options: SubmitOptions) -> ClusterFile:
    from dsrun.jobs.launchers.common import cluster_files
    from dsrun.jobs.launchers.slurm import batch

    name = options.cluster or entries(SubmitOptions)["cluster"].in_environment(os.environ)
    cluster = cluster_files.load(name) if name else cluster_files.ClusterFile()
    if cluster.launcher not in ("slurm", "kubernetes"):
        raise DsrunError(
            f"starts its jobs with {cluster.launcher}: there is no queue to send to",
            where=str(cluster.path),
            hint="Start it from here: dsrun finetune --hostfile ..., or name another --cluster.",
        )
    changes: dict[str, Any] = {
        "gpus_per_node": options.gpus_per_node, "partition": options.partition, "account": options.account,
        "qos": options.qos,
    }  # fmt: skip
    if options.time_limit is not None:
        changes["time_limit_min"] = batch.time_limit_min(options.time_limit)
    return cluster_files.changed(cluster, changes)


def _goes_on(inner: Inner, run_dir: Path) -> bool:
    """Whether the command continues a run."""
    from dsrun.cli.jobs.running import began

    return inner.resumes or (inner.options.go_on and began(run_dir))


def _submission(
    inner: Inner,
    options: SubmitOptions,
    cluster: ClusterFile,
    *,
    run_dir: Path,
    words: tuple[str, ...],
    gpus: int,
) -> Submission:
    """The submission of a command. words: as they are typed on the node; gpus: of each node."""
    from dsrun.jobs.launchers.common.submission import Submission

    return Submission(
        run_dir=run_dir, command=words, cluster=cluster, nodes=options.nodes, gpus=gpus, job_name=options.job_name,
        cwd=Path.cwd(), again=not (inner.resumes or inner.options.go_on),
    )  # fmt: skip


def _to_pods(inner: Inner, cluster: ClusterFile, options: SubmitOptions) -> None:
    """Write the manifest of a job in Kubernetes; nothing is sent."""
    from dsrun.jobs.launchers.kubernetes import manifest, preflight

    if used := [f"--{name}" for name in OF_SLURM if getattr(options, name) is not None]:
        raise click.UsageError(
            f"{', '.join(used)}: {cluster.name} is a cluster of Kubernetes, and that is Slurm's."
        )
    if getattr(inner.options, "checkpoint", None) is not None:
        raise click.UsageError("--checkpoint: a pod that is started again would go back there each time.")
    output = None if options.dry_run else options.output
    run_dir, words = _run_dir(inner, options.output_dir, preflight.mount_of(cluster))
    gpus, ranks, _ = _devices(inner, cluster)
    problems = preflight.problems(inner.target, inner.options, run_dir, cluster, inner.run_file)
    in_pods = f"Put it into a Secret, and name it in secret_variables of {cluster.path}: it is a variable of the pods"
    problems += _secret_words(inner, "manifest", in_pods)
    if not problems:
        problems = _seen_from_here(inner, run_dir, cluster, gpus=ranks, nodes=options.nodes)
    raise_all(problems)
    pods = manifest.manifest(_submission(inner, options, cluster, run_dir=run_dir, words=words, gpus=gpus))
    text = manifest.render(pods)
    if output is not None:
        write_atomic(output, text, overwrite=False)
    if options.as_json:
        print_json(
            "submit-manifest",
            {"run_dir": str(run_dir), "file": str(output) if output else None, "manifest": pods},
        )
    elif output is None:
        click.echo(text, nl=False)
    from shlex import quote

    click.echo(f"send it: kubectl apply -f {quote(str(output)) if output else '-'}", err=True)


def _seen_from_here(
    inner: Inner, run_dir: Path, cluster: ClusterFile, *, gpus: int | None, nodes: int
) -> list[Problem]:
    """The problems of a job for pods as far as this machine sees: few, where it lacks their volume."""
    from dsrun.jobs.assembly import submit
    from dsrun.jobs.launchers.kubernetes import preflight

    here = preflight.is_here(cluster)
    if not here:
        mount = preflight.mount_of(cluster)
        click.echo(f"note: {mount} is not on this machine: what lies there is not looked at", err=True)
    problems = submit.folder_problems(run_dir, resume=_goes_on(inner, run_dir)) if here else []
    options = inner.options
    if not isinstance(options, FinetuneOptions) or inner.resumes:
        return problems
    if here or not (options.model_path is not None or preflight.is_path(inner.target)):
        problems += _finetune_problems(inner, gpus=gpus, nodes=nodes, files=here)
    return problems


def _run_dir(
    inner: Inner, output_dir: Path | None, parent: Path | None = None
) -> tuple[Path, tuple[str, ...]]:
    """The run's folder, and the words without it: the script says it in one place. parent: where one is made up."""
    words = inner.words
    typed = inner.requested.source("output_dir") == Source.COMMAND_LINE
    if inner.options.output_dir is not None and (typed or output_dir is None):
        if output_dir is not None:
            raise click.UsageError(
                "--output-dir is given twice, before and after the command.", inner.context
            )
        output_dir = inner.options.output_dir
        words = _without(words, "--output-dir")
    elif inner.resumes and output_dir is None:
        raise click.UsageError(
            "--resume continues the run in a folder. Name it: --output-dir RUN", inner.context
        )
    if output_dir is None:
        from dsrun.job.run_folder import stamped

        output_dir = (parent or Path()) / "runs" / stamped(Path(inner.target).name.removesuffix(".py"))
    return output_dir.absolute(), words


def _without(words: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The words without the first time that the option is given, and its value."""
    for place, word in enumerate(words):
        if word == option:
            return words[:place] + words[place + 2 :]
        if word.startswith(f"{option}="):
            return words[:place] + words[place + 1 :]
    return words


def _devices(inner: Inner, cluster: ClusterFile) -> tuple[int, int | None, list[str]]:
    """GPUs of each node, how many of them the job uses, and the words that tell the command where nothing does.

    How many are used is None where the command names them one by one.
    """
    requested = inner.options.gpus
    count = cluster.gpus_per_node or requested
    if count is None:
        raise click.UsageError(
            "How many GPUs of each node? --gpus-per-node N, or gpus_per_node in the cluster's file."
        )
    if requested is not None and requested > count:
        message = f"--gpus {requested} is more than the {count} of a node that are asked for."
        raise click.UsageError(message, inner.context)
    if requested is not None:
        return count, requested, []
    if any(getattr(inner.options, name) is not None for name in NAMING):
        return count, None, []
    return count, count, ["--gpus", str(count)]


def _secrets(inner: Inner) -> list[Problem]:
    """Secrets among the words, which the script would hold."""
    names = [text.partition("=")[::2] for text in inner.options.env if "=" in text]
    hint = "Export it in this shell and leave the value out: sbatch takes the environment along."
    problems = [
        Problem(f"the value of {name} would stand in the script", "--env", hint)
        for name in secrets(dict(names))
    ]
    return problems + _secret_words(
        inner, "script", "Export it in this shell: sbatch takes the environment along"
    )


def _secret_words(inner: Inner, file: str, way: str) -> list[Problem]:
    """Secrets among the words but those of --env. file: what would hold them; way: how they reach the job instead."""
    words = [word for word in inner.words if word.removeprefix("--env=") not in inner.options.env]
    hint = f"{way}, and have it read there; or keep it in a file of yours that is named instead (chmod 600)."
    return [
        Problem(f"what looks like a secret would stand in the {file}, which others can read", name, hint)
        for name in secret_arguments(words)
    ]


def _variables(cluster: ClusterFile) -> list[str]:
    """The cluster's variables that don't reach every rank by themselves."""
    from dsrun.jobs.launchers.common.forwarded_environment import is_forwarded

    return [word for name in cluster.exports if not is_forwarded(name) for word in ("--env", name)]


def _show(submission: Submission, text: str, as_json: bool) -> None:
    from dsrun.jobs.assembly.submit import command as sending

    if as_json:
        print_json(
            "submit-script",
            {"run_dir": str(submission.run_dir), "command": sending(submission), "script": text},
        )
    else:
        click.echo(text, nl=False)


def _tell(submission: Submission, job_id: str, as_json: bool) -> None:
    """Print the job that was sent, and the commands that follow it."""
    from shlex import quote

    from dsrun.job.run_folder import SUBMITTED
    from dsrun.jobs.launchers.slurm.batch import LOG, time_text

    run_dir, cluster = submission.run_dir, submission.cluster
    log = run_dir / "logs" / LOG.replace("%j", job_id)
    if as_json:
        print_json(
            "submit",
            {
                "job_id": job_id,
                "run_dir": str(run_dir),
                "script": str(run_dir / SUBMITTED),
                "log": str(log),
                "nodes": submission.nodes,
                "gpus_per_node": submission.gpus,
                "time_limit_min": cluster.time_limit_min,
            },
        )
        return
    limit = f", at most {time_text(cluster.time_limit_min)}" if cluster.time_limit_min else ""
    nodes = "1 node" if submission.nodes == 1 else f"{submission.nodes} nodes"
    gpus = f", {submission.gpus} GPU{'' if submission.gpus == 1 else 's'} each" if cluster.gres else ""
    click.echo(f"job         {job_id}: {nodes}{gpus}{limit}")
    click.echo(f"run folder  {run_dir}  ({SUBMITTED}, {log.relative_to(run_dir)})")
    click.echo(f"follow it   squeue -j {job_id}; dsrun logs {quote(str(run_dir))} -f")
    click.echo(f"end it      scancel {job_id}")
