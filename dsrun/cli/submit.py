"""`dsrun submit`: a fine-tune or a script, through Slurm's queue, or as a manifest for Kubernetes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

if TYPE_CHECKING:
    from dsrun.errors import Problem
    from dsrun.jobs.sites import Site
    from dsrun.jobs.slurm import Submission

FILE = click.Path(path_type=Path)
POSITIVE = click.IntRange(min=1)
COMMANDS = ("finetune", "launch")
ELSEWHERE = {
    "cluster": "It goes before the command: dsrun submit --cluster NAME finetune ...",
    "hostfile": "The cluster chooses the hosts.",
    "hosts": "The cluster chooses the hosts.",
    "launcher": "The cluster starts the job.",
    "nodes": "It goes before the command: dsrun submit --nodes N finetune ...",
    "dry_run": "It goes before the command: dsrun submit --dry-run finetune ...",
}
"""Options of the command that the queue decides about, and what to do."""
NAMING = ("devices", "include", "exclude")
"""Options that name devices one by one."""
OF_SLURM = ("partition", "account", "qos")


@click.command(context_settings={"allow_interspersed_args": False})
@click.option("--cluster", help="A file of launch/clusters, by name or path.  [default: $DSRUN_CLUSTER]")
@click.option("--nodes", type=POSITIVE, default=1, help="How many nodes.  [default: 1]")
@click.option("--gpus-per-node", type=POSITIVE, help="GPUs of each node.  [default: the cluster's]")
@click.option("--time", "time_limit", help="Time limit: 90 (minutes), 2:00:00 or 1-12 (days-hours).")
@click.option("--partition", help="Partition, or several: a,b.  [default: the cluster's, else Slurm's]")
@click.option("--account", help="Account that is charged.  [default: the cluster's, else Slurm's]")
@click.option("--qos", help="Quality of service.  [default: the cluster's, else Slurm's]")
@click.option("--job-name", help="Name in the queue.  [default: the run folder's]")
@click.option("--output-dir", type=FILE, help="The run's folder.  [default: runs/NAME-TIME]")
@click.option("--output", type=FILE, help="Kubernetes: the manifest's file.  [default: stdout]")
@click.option("--dry-run", is_flag=True, help="Print the script or manifest; send and write nothing.")
@click.option("--json", "as_json", is_flag=True, help="Print the result (or the dry run) as JSON.")
@click.argument("words", metavar="COMMAND...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(
    ctx: click.Context,
    /,
    words: tuple[str, ...],
    *,
    cluster: str | None,
    time_limit: str | None,
    output_dir: Path | None,
    output: Path | None,
    dry_run: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Send COMMAND, a `dsrun finetune` or `dsrun launch`, to Slurm's queue, or write it for Kubernetes.

    It is checked here as far as this machine can. On the nodes dsrun finds hosts and GPUs by itself; before the time
    limit it saves a checkpoint and goes into the queue again. Your environment goes along (sbatch --export=ALL), and
    none of it into the script.

    For a cluster of Kubernetes a PyTorchJob's manifest is written, which kubectl sends. Nothing of your environment is
    in it.

    \b
    dsrun submit --nodes 2 --gpus-per-node 8 --time 4:00:00 -- finetune chatglm2-6b --train-file train.jsonl
    dsrun submit --cluster lab --dry-run -- launch train.py --epochs 3
    dsrun submit --cluster k8s --output job.yaml -- finetune chatglm2-6b --train-file /runs/train.jsonl
    """
    from dsrun.errors import DsrunError
    from dsrun.jobs import slurm, submit

    inner = _parsed(ctx, words)
    site = _site(cluster, time_limit, options)
    if site.launcher == "kubernetes":
        _to_pods(inner, words, site, output_dir, options, output=None if dry_run else output, as_json=as_json)
        return
    if output is not None:
        raise click.UsageError("--output is for a manifest of Kubernetes; a script lies in the run's folder.")
    run_dir, words = _run_dir(inner, words, output_dir)
    given = _given(inner)
    gpus, ranks, extra = _devices(inner, given, site)
    problems = submit.folder_problems(run_dir, resume=_goes_on(given, run_dir))
    problems += _secrets(given)
    if words[0] == "finetune" and "resume" not in given:
        problems += submit.finetune_problems(
            inner.params["model"], given, inner.params["overrides"], gpus=ranks, nodes=options["nodes"]
        )
    if not (site.container or site.python):
        from dsrun.jobs.finetune import check_packages

        problems += check_packages()
    if problems:
        raise DsrunError(problems)
    submission = slurm.Submission(
        run_dir=run_dir,
        command=(words[0], *extra, *_variables(inner, site), *words[1:]),
        site=site,
        nodes=options["nodes"],
        gpus=gpus,
        job_name=options["job_name"] or _job_name(run_dir),
        cwd=Path.cwd(),
        python=_python(),
        again=not {"resume", "go_on"} & set(given),
    )
    text = slurm.script(submission)
    if dry_run:
        _show(submission, text, as_json)
        return
    sent = submit.send(submission, text, os.environ)
    for note in sent.notes:
        click.echo(f"note: sbatch: {note}", err=True)
    _tell(submission, sent.job_id, as_json)


def _parsed(ctx: click.Context, words: tuple[str, ...]) -> click.Context:
    """The command's own context: what is wrong with its words is said now, not by a job hours later."""
    from dsrun.catalog import suggestion
    from dsrun.cli import cli

    name = words[0]
    found = cli.get_command(ctx, name) if name in COMMANDS else None
    if found is None:
        near = () if name in cli.list_commands(ctx) else COMMANDS
        hint = suggestion(name, near, f"It sends {' and '.join(COMMANDS)}.")
        raise click.UsageError(f"{name!r} can't be sent. {hint}", ctx)
    inner = found.make_context(name, list(words[1:]), parent=ctx)
    for param in inner.command.params:
        if param.name in ELSEWHERE and _is_given(inner, param.name):
            raise click.UsageError(f"{param.opts[0]} can't be sent along. {ELSEWHERE[param.name]}", inner)
    return inner


def _is_given(inner: click.Context, name: str) -> bool:
    return name in inner.params and inner.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _given(inner: click.Context) -> dict[str, Any]:
    """The command's options that were given."""
    made = ("more_files", "weights")  # of what --train-file was given
    return {name: value for name, value in inner.params.items() if name in made or _is_given(inner, name)}


def _site(cluster: str | None, time_limit: str | None, options: dict[str, Any]) -> Site:
    from dsrun.errors import DsrunError
    from dsrun.jobs import sites, slurm

    name = cluster or os.environ.get("DSRUN_CLUSTER")
    site = sites.load(name) if name else sites.Site()
    if site.launcher not in ("slurm", "kubernetes"):
        raise DsrunError(
            f"starts its jobs with {site.launcher}: there is no queue to send to",
            where=str(site.path),
            hint="Start it from here: dsrun finetune --hostfile ..., or name another --cluster.",
        )
    asked = {name: options[name] for name in ("gpus_per_node", "partition", "account", "qos")}
    if time_limit is not None:
        asked["time_limit_min"] = slurm.time_limit_min(time_limit)
    return sites.changed(site, asked)


def _goes_on(given: dict[str, Any], run_dir: Path) -> bool:
    """Whether the command continues a run."""
    from dsrun.cli._running import began

    return "resume" in given or ("go_on" in given and began(run_dir))


def _to_pods(
    inner: click.Context,
    words: tuple[str, ...],
    site: Site,
    output_dir: Path | None,
    options: dict[str, Any],
    *,
    output: Path | None,
    as_json: bool,
) -> None:
    """Write the manifest of a job in Kubernetes; nothing is sent."""
    from dsrun.errors import DsrunError
    from dsrun.files import write_atomic
    from dsrun.jobs import manifests
    from dsrun.jobs.launchers import kubernetes

    if used := [f"--{name}" for name in OF_SLURM if options[name] is not None]:
        raise click.UsageError(
            f"{', '.join(used)}: {site.name} is a cluster of Kubernetes, and that is Slurm's."
        )
    run_dir, words = _run_dir(inner, words, output_dir, manifests.mount_of(site))
    given = _given(inner)
    gpus, ranks, _ = _devices(inner, given, site)
    problems = manifests.problems(inner.params, given, run_dir, site)
    if not problems:
        problems = _seen_from_here(inner, given, run_dir, site, gpus=ranks, nodes=options["nodes"])
    if problems:
        raise DsrunError(problems)
    job = manifests.PodJob(
        run_dir=run_dir,
        command=words,
        site=site,
        nodes=options["nodes"],
        gpus=gpus,
        name=options["job_name"] or "",
        cwd=Path.cwd(),
        again=not {"resume", "go_on"} & set(given),
    )
    made = manifests.manifest(job)
    text = kubernetes.render(made)
    if output is not None:
        write_atomic(output, text, overwrite=False)
    if as_json:
        _json({"run_dir": str(run_dir), "file": str(output) if output else None, "manifest": made})
    elif output is None:
        click.echo(text, nl=False)
    from shlex import quote

    click.echo(f"send it: kubectl apply -f {quote(str(output)) if output else '-'}", err=True)


def _seen_from_here(
    inner: click.Context, given: dict[str, Any], run_dir: Path, site: Site, **size: Any
) -> list[Problem]:
    """What is wrong with a job for pods as far as this machine sees: not much, where it has not got their volume.

    size: the GPUs of each pod that are used, and the number of pods, as submit.finetune_problems has it.
    """
    from dsrun.jobs import manifests, submit

    here = manifests.is_here(site)
    if not here:
        mount = manifests.mount_of(site)
        click.echo(f"note: {mount} is not on this machine: what lies there is not looked at", err=True)
    problems = submit.folder_problems(run_dir, resume=_goes_on(given, run_dir)) if here else []
    model = inner.params.get("model")
    if model is None or "resume" in given:
        return problems
    if here or not ("model_path" in given or manifests.is_path(model)):
        overrides = inner.params["overrides"]
        problems += submit.finetune_problems(model, given, overrides, **size, files=here)
    return problems


def _run_dir(
    inner: click.Context, words: tuple[str, ...], output_dir: Path | None, parent: Path | None = None
) -> tuple[Path, tuple[str, ...]]:
    """The run's folder, and the words without it: the script says it in one place. parent: where one is made up."""
    if _is_given(inner, "output_dir"):
        if output_dir is not None:
            raise click.UsageError("--output-dir is given twice, before and after the command.", inner)
        output_dir = inner.params["output_dir"]
        words = _without(words, "--output-dir")
    elif _is_given(inner, "resume") and output_dir is None:
        raise click.UsageError("--resume continues the run in a folder. Name it: --output-dir RUN", inner)
    if output_dir is None:
        from datetime import datetime

        name = Path(str(inner.params.get("model") or inner.params.get("script") or words[0])).name
        output_dir = (
            (parent or Path()) / "runs" / f"{name.removesuffix('.py')}-{datetime.now():%Y%m%d-%H%M%S}"
        )
    return output_dir.absolute(), words


def _without(words: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The words without the first time that the option is given, and its value."""
    for place, word in enumerate(words):
        if word == option:
            return words[:place] + words[place + 2 :]
        if word.startswith(f"{option}="):
            return words[:place] + words[place + 1 :]
    return words


def _devices(inner: click.Context, given: dict[str, Any], site: Site) -> tuple[int, int | None, list[str]]:
    """GPUs of each node, how many of them the job uses, and the words that tell the command where nothing does.

    How many are used is None where the command names them one by one.
    """
    wanted = given.get("gpus")
    count = site.gpus_per_node or wanted
    if count is None:
        raise click.UsageError(
            "How many GPUs of each node? --gpus-per-node N, or gpus_per_node in the cluster's file.",
            inner.parent,
        )
    if wanted is not None and wanted > count:
        raise click.UsageError(
            f"--gpus {wanted} is more than the {count} of a node that are asked for.", inner
        )
    if wanted is not None:
        return count, wanted, []
    if any(name in given for name in NAMING):
        return count, None, []
    return count, count, ["--gpus", str(count)] if "gpus" in inner.params else []


def _secrets(given: dict[str, Any]) -> list[Problem]:
    """Secrets among the words, which the script would hold."""
    from dsrun.errors import Problem
    from dsrun.jobs.travel import is_secret

    names = [text.partition("=")[0] for text in given.get("env", ()) if "=" in text]
    hint = "Export it in this shell and leave the value out: sbatch takes the environment along."
    return [
        Problem(f"the value of {name} would stand in the script", "--env", hint)
        for name in names
        if is_secret(name)
    ]


def _variables(inner: click.Context, site: Site) -> list[str]:
    """The site's variables that don't reach every rank by themselves."""
    from dsrun.jobs.travel import travels

    names = [name for name in site.exports if not travels(name)] if "env" in inner.params else []
    return [word for name in names for word in ("--env", name)]


def _job_name(run_dir: Path) -> str:
    import re

    return re.sub(r"[^\w.+-]+", "-", run_dir.name).strip("-._+")[:64] or "dsrun"


def _python() -> str:
    import sys

    return sys.executable


def _show(submission: Submission, text: str, as_json: bool) -> None:
    from dsrun.jobs.submit import command as sending

    if as_json:
        _json({"run_dir": str(submission.run_dir), "command": sending(submission), "script": text})
    else:
        click.echo(text, nl=False)


def _tell(submission: Submission, job_id: str, as_json: bool) -> None:
    """What was sent, and how to follow it."""
    from shlex import quote

    from dsrun.jobs.run_folder import SUBMITTED
    from dsrun.jobs.slurm import LOG, time_text

    run_dir, site = submission.run_dir, submission.site
    log = run_dir / "logs" / LOG.replace("%j", job_id)
    if as_json:
        _json(
            {
                "job_id": job_id,
                "run_dir": str(run_dir),
                "script": str(run_dir / SUBMITTED),
                "log": str(log),
                "nodes": submission.nodes,
                "gpus_per_node": submission.gpus,
                "time_limit_min": site.time_limit_min,
            }
        )
        return
    limit = f", at most {time_text(site.time_limit_min)}" if site.time_limit_min else ""
    nodes = "1 node" if submission.nodes == 1 else f"{submission.nodes} nodes"
    gpus = f", {submission.gpus} GPU{'' if submission.gpus == 1 else 's'} each" if site.gres else ""
    click.echo(f"job         {job_id}: {nodes}{gpus}{limit}")
    click.echo(f"run folder  {run_dir}  ({SUBMITTED}, {log.relative_to(run_dir)})")
    click.echo(f"follow it   squeue -j {job_id}; dsrun logs {quote(str(run_dir))} -f")
    click.echo(f"end it      scancel {job_id}")


def _json(value: dict[str, Any]) -> None:
    import json

    click.echo(json.dumps(value, ensure_ascii=False, indent=2))
