"""`dsrun preset`: the list of presets, or the deepspeed.json of one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.errors import DsrunError

if TYPE_CHECKING:
    from dsrun.config.build import BuiltConfig, Finding, Options

COUNT = click.IntRange(min=1)
AUTO = "auto"
FOR_AUTO = ("model", "gpu", "gpu_memory", "host_memory", "seq_len", "gradient_checkpointing")
"""The options that only NAME auto has a use for."""


@click.command("preset")
@click.argument("name", required=False)
@click.option("--gpus", type=COUNT, default=1, show_default=True, help="GPUs per node.")
@click.option("--nodes", type=COUNT, default=1, show_default=True, help="Number of nodes.")
@click.option(
    "--precision",
    type=click.Choice(["fp16", "bf16", "fp32"]),
    help="fp16, or HF Trainer's choice, if left out.",
)
@click.option("--micro-batch", type=COUNT, help="Samples a GPU takes at a time.")
@click.option("--grad-accum", type=COUNT, help="Passes whose gradients are added up before a step.")
@click.option(
    "--grad-clip", type=click.FloatRange(min=0), help="Largest gradient norm; 0 turns clipping off."
)
@click.option(
    "--for",
    "target",
    type=click.Choice(["deepspeed", "hf"]),
    default="deepspeed",
    show_default=True,
    help='Who reads it: deepspeed.initialize (numbers only), or HF Trainer ("auto" where it fills in).',
)
@click.option("--model", metavar="MODEL", help="For NAME auto: the model, as `dsrun plan` takes it.")
@click.option("--gpu", metavar="KIND", help="For NAME auto: kind of GPU.  [default: this machine's]")
@click.option("--gpu-memory", metavar="SIZE", help="For NAME auto: memory of each GPU, as 32GiB.")
@click.option("--host-memory", metavar="SIZE", help="For NAME auto: memory of each node, as 256GiB.")
@click.option("--seq-len", type=COUNT, help="For NAME auto: tokens of a row.  [default: the model file's]")
@click.option("--gradient-checkpointing", is_flag=True, help="For NAME auto: plan with it.")
@click.option("--nvme-path", metavar="DIR", help="Folder on a local NVMe disk.  [env: DSRUN_NVME_PATH]")
@click.option(
    "--set", "overrides", metavar="KEY=VALUE", multiple=True, help="Set a key: zero_optimization.stage=1."
)
@click.option("--explain", is_flag=True, help="Each value: where it came from and what it does.")
@click.option(
    "--copy", "copy_to", metavar="DIR", help="Copy the preset's own file to DIR/presets, to edit it."
)
@click.option("-o", "--output", metavar="FILE", help="Write the config to a file.")
@click.option("--force", is_flag=True, help="Let -o and --copy replace a file.")
@click.option("--json", "as_json", is_flag=True, help="The list or the explanation as JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    name: str | None,
    target: str,
    overrides: tuple[str, ...],
    explain: bool,
    copy_to: str | None,
    output: str | None,
    force: bool,
    as_json: bool,
    **values: Any,
) -> None:
    """Print the deepspeed.json of a preset, or the list of presets.

    NAME is a preset's name, the path of a TOML file, or auto: the fastest preset that fits --model. The config goes
    to stdout, warnings to stderr.

    \b
    dsrun preset                                      what there is
    dsrun preset zero2-offload --gpus 2               print one
    dsrun preset zero3 --for hf -o deepspeed.json     for HF Trainer, into a file
    dsrun preset zero2 --explain                      where each value came from
    dsrun preset zero2 --copy mine                    a copy to edit
    dsrun preset auto --model chatglm2-6b --gpus 2    what `dsrun plan` would take
    """
    given = _given(ctx)
    wish = {option: values.pop(option) for option in FOR_AUTO}
    if name != AUTO and any(wish.values()):
        option = next(option for option, value in wish.items() if value)
        raise click.UsageError(f"--{option.replace('_', '-')} goes with NAME auto.")
    if name is None:
        if given - {"as_json"}:
            raise click.UsageError("These options need a NAME; `dsrun preset` lists them.")
        _list(as_json)
    elif copy_to is not None:
        if given - {"name", "copy_to", "force"}:
            raise click.UsageError(
                "--copy takes the preset as it is: no other option but --force goes with it."
            )
        _copy(name, copy_to, force)
    else:
        from dsrun.config.build import Options, build_config

        options = Options(target=target, overrides=overrides, **values)
        if name == AUTO:
            name, options = _chosen(wish, options)
        built = build_config(name, options)
        _say(built.findings)
        to_stdout = output in (None, "-", "/dev/stdout")
        if output is not None and not to_stdout:
            _write(built, output, force)
        if explain:
            _explain(built, as_json)
        elif to_stdout:
            click.echo(_text(built), nl=False)


def _chosen(wish: dict[str, Any], options: Options) -> tuple[str, Options]:
    """The planner's preset for a model, said to stderr, and the options that it was planned with."""
    import os

    from dsrun.cluster.devices import detect
    from dsrun.jobs.places import visible
    from dsrun.jobs.planning import first_choice

    if wish["model"] is None:
        raise click.UsageError("NAME auto needs --model: `dsrun models` lists those with a name.")
    name, planned, why = first_choice(wish, options, visible(detect(os.environ), os.environ))
    click.echo(why, err=True)
    return name, planned


def _given(ctx: click.Context) -> set[str]:
    """The parameters that stand on the command line."""
    default = click.core.ParameterSource.DEFAULT
    return {
        name
        for name, value in ctx.params.items()
        if value is not None and ctx.get_parameter_source(name) != default
    }


def _list(as_json: bool) -> None:
    from dsrun.catalog import files
    from dsrun.config import preset

    rows = []
    for name, path in files("presets").items():
        try:
            file = preset.read(path)
            rows.append({"name": name, "summary": file.summary, "file": str(path)})
        except DsrunError as error:
            click.echo(f"dsrun: {error}", err=True)
    if as_json:
        click.echo(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        click.echo(f"{row['name']:{width}}  {row['summary']}")


def _copy(name: str, folder: str, force: bool) -> None:
    import shlex

    from dsrun.config import preset
    from dsrun.files import write_atomic

    chosen = preset.load(name)
    target = Path(folder).expanduser() / "presets" / f"{chosen.name}.toml"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DsrunError(f"can't be made: {error.strerror}", where=str(target.parent)) from error
    write_atomic(target, chosen.file.path.read_text(encoding="utf-8"), overwrite=force)
    click.echo(str(target))
    root = str(target.parent.parent.resolve())
    use = f"dsrun preset {shlex.quote(str(target))}"
    if ":" not in root:
        use = f"DSRUN_PATH={shlex.quote(root)} dsrun preset {shlex.quote(chosen.name)}\n  {use}"
    click.echo(
        f"Edit it, then use it by either of:\n  {use}" if "\n" in use else f"Edit it, then:\n  {use}",
        err=True,
    )


def _write(built: BuiltConfig, output: str, force: bool) -> None:
    from dsrun.files import write_atomic

    write_atomic(Path(output).expanduser(), _text(built), overwrite=force)
    click.echo(f"wrote {output}", err=True)


def _text(built: BuiltConfig) -> str:
    from dsrun.config.build import render_json

    return render_json(built.ds_config)


def _say(findings: Iterable[Finding]) -> None:
    for finding in findings:
        rule = f" [{finding.rule}]" if finding.rule else ""
        place = f"$.{finding.path}: " if finding.path else ""
        click.echo(
            f"dsrun: {finding.severity}: {place}{finding.message}{rule}\n  {finding.suggestion}", err=True
        )


def _explain(built: BuiltConfig, as_json: bool) -> None:
    import shutil
    import textwrap

    from dsrun.config.explain import explain

    rows = explain(built)
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2, ensure_ascii=False))
        return
    width = min(shutil.get_terminal_size((100, 24)).columns, 110)
    for row in rows:
        click.echo(f"{row.path} = {json.dumps(row.value, ensure_ascii=False)}")
        default = (
            f"; DeepSpeed's own: {json.dumps(row.default, ensure_ascii=False)}" if row.has_default else ""
        )
        click.echo(f"    from {row.origin}{default}")
        if row.does:
            click.echo(textwrap.fill(row.does, width, initial_indent="    ", subsequent_indent="    "))
