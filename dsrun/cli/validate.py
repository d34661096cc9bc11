"""`dsrun validate`: what is wrong with deepspeed.json files, before a GPU is touched."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from dsrun.errors import DsrunError, Problem

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dsrun.config.rules import Setting
    from dsrun.config.rules.frame import Model
    from dsrun.config.sources import Source
    from dsrun.config.validate import Choice, Verdict

COUNT = click.IntRange(min=1)


@click.command("validate")
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option(
    "--for",
    "target",
    type=click.Choice(["hf", "deepspeed", "accelerate", "lightning"]),
    help='Who reads it. Left out: hf where there is an "auto" (or --arg), else deepspeed.',
)
@click.option(
    "--world-size", type=COUNT, help="All GPUs of the job, or its data-parallel ranks under Megatron."
)
@click.option("--nodes", type=COUNT, help="Machines of the job.")
@click.option("--gpu", metavar="NAME", help="Kind of GPU (v100-32g, a100-80g ...), or cpu.")
@click.option("--model", metavar="MODEL", help="A model's name, or its folder or config.json.")
@click.option("--deepspeed-version", metavar="X.Y", help="0.9 to 0.19; the installed one if left out.")
@click.option(
    "--upgrade-to", metavar="X.Y", help="Judge for that version, and offer what it takes to get there."
)
@click.option(
    "--trainer-args", metavar="FILE", help="TrainingArguments as JSON or YAML, for what must agree."
)
@click.option("--arg", "args", metavar="NAME=VALUE", multiple=True, help="One of them: learning_rate=1e-4.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["text", "json", "github", "sarif"]),
    default="text",
    show_default=True,
)
@click.option("--strict", is_flag=True, help="Exit 1 on warnings too.")
@click.option(
    "--select", metavar="IDS", multiple=True, help="Only these rules, or their beginnings: DS2,DS301."
)
@click.option("--ignore", metavar="IDS", multiple=True, help="All but these rules.")
@click.option("--diff", "show", is_flag=True, help="Show what --fix would change; change nothing.")
@click.option("--fix", is_flag=True, help="Mend what has one right answer, in the file's own layout.")
@click.option("--unsafe-fixes", is_flag=True, help="With --fix or --diff: what may need a second look too.")
def command(files: tuple[str, ...], form: str, **given: Any) -> int:
    """Say everything that is wrong with deepspeed.json files, and what would be right.

    FILE is a deepspeed.json, an accelerate YAML (by its file name), a folder, or - for JSON from a pipe. Exit 1 if
    there is an error. A config's own key "_dsrun_ignore": ["DS203"] silences a rule in it.

    \b
    dsrun validate ds_config.json                         everything at once
    dsrun validate ds_config.json --world-size 8          with the batch sizes for 8 GPUs
    dsrun validate ds_config.json --arg learning_rate=1e-4 --arg bf16=true     beside TrainingArguments
    dsrun validate configs/ --format github --strict      in CI
    dsrun validate ds_config.json --fix                   mend it
    """
    from dsrun.config import sources

    if given["unsafe_fixes"] and not (given["fix"] or given["show"]):
        raise click.UsageError("--unsafe-fixes goes with --fix or --diff.")
    if (given["args"] or given["trainer_args"]) and given["target"] not in (None, "hf"):
        raise click.UsageError("--arg and --trainer-args are HF Trainer's: they go with --for hf.")
    setting, choice = _setting(given), _choice(given["select"], given["ignore"])
    found, problems = sources.gather(files)
    verdicts: list[Verdict] = []
    for source in found:
        judged = _judged(source, setting, choice, given["target"])
        if (given["fix"] or given["show"]) and not source.is_yaml:
            asked = _Mending(source, form, given, problems)
            judged = [_mended(asked, verdict, setting, choice) for verdict in judged]
        verdicts += judged
    _show(verdicts, form, given)
    if problems:
        raise DsrunError(problems)
    counted = ("error", "warning") if given["strict"] else ("error",)
    return int(any(verdict.count(severity) for verdict in verdicts for severity in counted))


def _show(verdicts: Sequence[Verdict], form: str, given: dict[str, Any]) -> None:
    """The findings go to stdout, unless the mended text of a pipe is there."""
    from dsrun.config import report

    piped = given["fix"] and not given["show"] and any(verdict.name == "<stdin>" for verdict in verdicts)
    click.echo(report.FORMATS[form](verdicts), nl=False, err=piped)
    if form == "text" and verdicts:
        click.echo(_summary(verdicts, fixing=given["fix"] or given["show"]), err=True)


def _choice(select: Sequence[str], ignore: Sequence[str]) -> Choice:
    from dsrun.config.rules import find_rules
    from dsrun.config.validate import Choice

    chosen = []
    for option, given in (("--select", select), ("--ignore", ignore)):
        ids = tuple(part.strip().upper() for text in given for part in text.split(",") if part.strip())
        for rule_id in ids:
            if not any(rule.id.startswith(rule_id) for rule in find_rules()):
                raise DsrunError(
                    f"no rule begins with {rule_id}", where=option, hint="`dsrun explain` lists them."
                )
        chosen.append(ids)
    return Choice(*chosen)


def _setting(given: dict[str, Any]) -> Setting:
    import os

    from dsrun.config import schema, trainer_args
    from dsrun.config.rules import Setting
    from dsrun.planner import gpus

    upgrade, asked = given["upgrade_to"], given["deepspeed_version"]
    release = upgrade or asked or _installed()
    if upgrade and asked and schema.version_of(upgrade) < schema.version_of(asked):
        raise DsrunError(
            f"{upgrade} is older than {asked}", where="--upgrade-to", hint="Name the newer one there."
        )
    name = given["gpu"] or ("cpu" if os.environ.get("DS_ACCELERATOR") == "cpu" else None)
    gpu = gpus.load(name) if name not in (None, "cpu") else None
    return Setting(
        world_size=given["world_size"],
        nodes=given["nodes"],
        version=schema.version_of(release) if release else None,
        release=schema.release_of(release) if release else None,
        upgrade_from=(schema.version_of(asked) if asked else schema.oldest()) if upgrade else None,
        device="cuda" if gpu else name,
        bf16=gpu.bf16 if gpu else None,
        gpu_memory_gib=gpu.memory_gib if gpu else None,
        trainer=trainer_args.given(given["trainer_args"], given["args"]),
        model=_model(given["model"]) if given["model"] else None,
    )


def _installed() -> str | None:
    """The installed DeepSpeed's version; None where there is none, or one without a schema.

    Looks for the package's own folder: importlib.metadata takes 40 ms to import.
    """
    import sys

    from dsrun.config import schema

    for entry in sys.path:
        for found in Path(entry or ".").glob("deepspeed-*.dist-info"):
            version = found.name.removesuffix(".dist-info").partition("-")[2]
            try:
                schema.version_of(version)
            except DsrunError:
                return None
            return version
    return None


def _model(name: str) -> Model:
    """What a model file, or a checkpoint's config.json, says of sizes."""
    import os

    from dsrun.config.rules.frame import Model
    from dsrun.jobs import models

    path = Path(name).expanduser()
    config = models.read_config(path) if os.path.lexists(path) else models.load_model_file(name).architecture
    if isinstance(inner := config.get("text_config"), dict):
        config = {**config, **inner}
    sizes = {key: value for key, value in config.items() if isinstance(value, int)}
    hidden, rows = sizes.get("hidden_size"), sizes.get("vocab_size")
    largest = hidden * max(rows, sizes.get("intermediate_size", 0)) if hidden and rows else None
    return Model(hidden or 0, sizes.get("num_attention_heads"), largest, _parameters(config, name))


def _parameters(config: dict[str, Any], name: str) -> int | None:
    """All weights; None for a network that isn't counted (a mixture of experts, a model of images)."""
    from dsrun.planner.shape import from_config

    try:
        return from_config(config, name).parameters
    except DsrunError:
        return None


def _judged(source: Source, setting: Setting, choice: Choice, target: str | None) -> list[Verdict]:
    """The verdicts on a source: a YAML may name a second file."""
    from dsrun.config.validate import validate

    if source.is_yaml:
        from dsrun.config import accelerate_yaml

        return accelerate_yaml.validate(source, setting, choice, target=target)
    return [validate(source.data, source.name, setting, target=target, choice=choice)]


class _Mending(NamedTuple):
    """What is asked for about one source's fixes. problems: gets what stops the writing."""

    source: Source
    form: str
    given: dict[str, Any]
    problems: list[Problem]

    @property
    def piped(self) -> bool:
        """Whether the mended text goes to stdout."""
        return self.source.path is None and not self.given["show"]


def _mended(asked: _Mending, verdict: Verdict, setting: Setting, choice: Choice) -> Verdict:
    """The verdict after its fixes; shows what changes, and writes it unless it was only asked for."""
    from dsrun.config import repair
    from dsrun.config.validate import mended

    after = mended(verdict, setting, choice, unsafe=asked.given["unsafe_fixes"])
    if verdict.document is None or after.document is None or after.document.text == verdict.document.text:
        if asked.piped:
            click.echo(asked.source.data, nl=False)
        return verdict
    changes = repair.diff(verdict.document.text, after.document.text, verdict.name)
    click.echo(changes, nl=False, err=asked.piped or asked.form != "text")
    if asked.given["show"]:
        return verdict
    try:
        _write(asked.source, after.document.text)
    except DsrunError as error:
        asked.problems.extend(error.problems)
        return verdict
    return after


def _write(source: Source, text: str) -> None:
    from dsrun.files import write_atomic

    if source.path is None:
        click.echo(text.encode(), nl=False)  # UTF-8, whatever the terminal's encoding is
    else:
        write_atomic(source.path, text)


def _summary(verdicts: Sequence[Verdict], *, fixing: bool) -> str:
    from dsrun.config import report
    from dsrun.config.validate import fixable

    said = f"dsrun: {report.summary(verdicts)}"
    if len(verdicts) == 1:
        said += f", read as for {verdicts[0].target}"
    safe, unsafe = (0, 0) if fixing else fixable(verdicts)
    if safe:
        said += f"; --fix mends {safe}"
    if unsafe:
        said += f"; --fix --unsafe-fixes {'mends' if not safe else 'another'} {unsafe}"
    return said
