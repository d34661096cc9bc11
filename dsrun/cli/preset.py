"""`dsrun preset` (configs): list the presets, or print the deepspeed.json of one."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dsrun.catalog import files
from dsrun.cli.output.columns import echo_folded, indented
from dsrun.cli.output.results import file_of, print_json, write_out
from dsrun.cli.parsing.completion import presets
from dsrun.cli.parsing.options import TableCommand, given, options_of
from dsrun.errors import DsrunError
from dsrun.files import explained, write_all, write_atomic
from dsrun.options.commands import ConfigOptions, PresetOptions
from dsrun.options.declare import flag_of, select
from dsrun.options.layers import Resolved

if TYPE_CHECKING:
    from dsrun.config.presets.build import BuiltConfig, Finding, Options
    from dsrun.config.presets.fsdp import FsdpPreset

AUTO, ACCELERATE = "auto", "accelerate"
YAML = (".yaml", ".yml")
FSDP_OPTIONS = ("gpus", "nodes", "target", "precision", "fsdp_version", "output", "force")
AUTO_OPTIONS = ("seq_len", "activation_checkpointing")
"""Options for NAME auto only."""
MODEL_OPTIONS = ("gpu_memory", "host_memory")
"""Options for --model only."""


@click.command("preset", cls=TableCommand)
@click.argument("name", required=False, shell_complete=presets)
@options_of(PresetOptions)
def command(name: str | None, **values: Any) -> None:
    """Print the deepspeed.json of a preset, or the list of presets.

    NAME is a preset's name, its TOML file, a DeepSpeed config (ds.json), or auto: the fastest preset that fits
    --model. The config goes to stdout, warnings to stderr.

    \b
    dsrun preset                                      what there is
    dsrun preset zero2-offload --gpus 2               print one
    dsrun preset zero2 --model qwen3-8b --gpus 8      as finetune runs it
    dsrun preset zero3 --for hf -o deepspeed.json     for HF Trainer, into a file
    dsrun preset zero3 --for accelerate -o acc.yaml   for accelerate
    dsrun preset fsdp --for accelerate --gpus 8       its YAML for torch's FSDP2
    dsrun preset zero2 --explain                      where each value came from
    dsrun preset zero2 --copy mine                    a copy to edit
    dsrun preset --from ds.json -o presets/mine.toml  a preset of a DeepSpeed config
    dsrun preset auto --model chatglm2-6b --gpus 2    what `dsrun plan` would take
    """
    requested = given(PresetOptions, values)
    options, named = requested.options, set(requested.user)
    if name != AUTO and (used := [option for option in AUTO_OPTIONS if option in named]):
        raise click.UsageError(f"{flag_of(PresetOptions, used[0])} is for NAME auto.")
    if options.model is None and (used := [option for option in MODEL_OPTIONS if option in named]):
        raise click.UsageError(f"{flag_of(PresetOptions, used[0])} is for --model.")
    if options.from_file is not None:
        _from_config(name, options, named)
    elif name is None:
        if named - {"as_json"}:
            raise click.UsageError("These options need a NAME; `dsrun preset` lists them.")
        _list(options.as_json)
    elif options.copy_to is not None:
        if named - {"copy_to", "force"}:
            raise click.UsageError(
                "--copy takes the preset as it is: of the other options only --force is for it."
            )
        _copy(name, options.copy_to, options.force)
    else:
        _build(name, requested)


def _from_config(name: str | None, options: PresetOptions, named: set[str]) -> None:
    """Write the preset that a DeepSpeed config's file comes to."""
    from dsrun.config.presets import from_config
    from dsrun.config.presets.build import Options, build_config

    if name is not None or named - {"from_file", "output", "force"}:
        raise click.UsageError(
            "--from takes the config as it is: of the other options only -o and --force are for it."
        )
    path = Path(str(options.from_file)).expanduser()
    text = from_config.text(path)
    if from_config.is_config(path):
        _say(build_config(str(path.absolute()), Options()).findings)
    write_out(text, file_of(options.output), overwrite=options.force)


def _build(name: str, requested: Resolved[PresetOptions]) -> None:
    from dsrun.cli.jobs.running import tell
    from dsrun.config.presets import preset
    from dsrun.config.presets.build import Options, build_config
    from dsrun.options.commands import FinetuneOptions

    requested = _with_precision(name, requested)
    options = requested.options
    built_options = select(Options, options, origins={})
    if name != AUTO and options.target != "deepspeed" and (fsdp := preset.load(name).fsdp):
        _of_fsdp(fsdp, requested, built_options)
        return
    if requested.said("fsdp_version"):
        raise click.UsageError("--fsdp-version is for a preset of FSDP's with --for accelerate.")
    if name == AUTO:
        built = build_config(*_chosen(requested, built_options))
    elif options.model is not None:
        built = _of_finetune(name, requested)
    else:
        built = build_config(name, built_options)
    _say(built.findings)
    if options.model is None:
        tell(preset.second_copy_notes(built.ds_config, built_options.gpus * built_options.nodes))
    if name != AUTO and options.model is None and (beside := preset.load(name).defaults):
        flags = " ".join(f"{flag_of(FinetuneOptions, key)} {value}" for key, value in beside.items())
        click.echo(f"dsrun: note: dsrun finetune --preset {name} takes {flags}, too", err=True)
    if file := file_of(options.output):
        _write(built, file, built_options, options.force)
    if options.explain:
        _explain(built, options.as_json)
    elif file is None and options.target == ACCELERATE:
        raise click.UsageError("--for accelerate writes two files: name the YAML with -o accelerate.yaml")
    elif file is None:
        click.echo(_text(built), nl=False)


def _with_precision(name: str, requested: Resolved[PresetOptions]) -> Resolved[PresetOptions]:
    """The precision that the named card does best, or those of this machine; where there is none, a line says what is
    written. A preset's own stays, and so does what a model's job or another reader decides."""
    from dsrun.config.presets import preset
    from dsrun.options.derived import precision_of
    from dsrun.options.layers import Source

    options = requested.options
    given = options.precision is not None or any("16.enabled" in text for text in options.overrides)
    if given or options.model is not None or options.target != "deepspeed" or name == AUTO:
        return requested
    chosen = preset.load(name)
    if chosen.fsdp or precision_of(chosen.merged("deepspeed")[0]):
        return requested
    if options.gpu is not None:
        best, where = _best_of(options.gpu), f"--gpu {options.gpu}"
    elif not (best := _best_here()):
        says = "fp16 with its loss scaling, which every GPU runs: no card is named (--gpu a100-80g) or found here"
        echo_folded(f"dsrun: note: {says}", 2, err=True)
        return requested
    else:
        where = "this machine's GPUs"
    return requested.filled(Source.DERIVED, {"precision": best}, where)


def _best_of(gpu: str) -> str:
    """What a kind of GPU computes best in."""
    from dsrun.planner import gpus

    chosen = gpus.load(gpu)
    return "bf16" if chosen.bf16 else "fp16" if chosen.takes_fp16(os.environ) else "fp32"


def _best_here() -> str:
    """What the GPUs of this machine compute best in; empty where there is none."""
    from dsrun.cluster.devices import detect

    machine = detect(os.environ)
    return machine.default_precision if machine.accelerator == "cuda" else ""


def _of_fsdp(fsdp: FsdpPreset, requested: Resolved[PresetOptions], built_options: Options) -> None:
    """Write a preset's FSDP settings for accelerate or HF Trainer: one file."""
    from dsrun.config.accelerate.write import for_fsdp, for_trainer

    options = requested.options
    if unused := [name for name in requested.user if name not in FSDP_OPTIONS]:
        flags = ", ".join(flag_of(PresetOptions, name) for name in unused)
        raise click.UsageError(f"A preset of FSDP's has no use for {flags}.")
    path = file_of(options.output)
    if options.target == ACCELERATE:
        _check_yaml(path)
        text = for_fsdp(fsdp, path, built_options, options.fsdp_version)
    else:
        if requested.said("fsdp_version"):
            raise click.UsageError("--fsdp-version is for --for accelerate: HF Trainer gives up version 1.")
        text = json.dumps(for_trainer(fsdp, built_options), indent=2) + "\n"
    write_out(text, path, overwrite=options.force)


def _of_finetune(name: str, requested: Resolved[PresetOptions]) -> BuiltConfig:
    """The config that `dsrun finetune --preset NAME` runs with the model, on the named devices or those here."""
    from dsrun.cli.jobs.running import tell
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly import plan_target
    from dsrun.jobs.assembly.finetune import FinetuneRequest, config_of
    from dsrun.options.commands import FinetuneOptions
    from dsrun.options.declare import entries
    from dsrun.options.table import OverrideOptions

    options = requested.options
    if options.target != "deepspeed":
        raise click.UsageError("--model is for deepspeed.initialize: HF Trainer fills in its own values.")
    accepted = [*entries(ConfigOptions), *entries(OverrideOptions)]
    values = {name: value for name, value in requested.user.items() if name in accepted}
    values |= {"preset": name, "dry_run": True}  # a config that doesn't fit is printed all the same
    request = FinetuneRequest(str(options.model), Resolved.by_user(FinetuneOptions, values))
    here = plan_target.visible(detect(os.environ), os.environ)
    machine, known = plan_target.named_machine(options, here, options.gpus)
    built, notes = config_of(
        request, machine, os.environ, gpus=options.gpus, nodes=options.nodes, known=known
    )
    tell(notes)
    return built


def _chosen(requested: Resolved[PresetOptions], built_options: Options) -> tuple[str, Options]:
    """The planner's preset for a model, and the options that it was planned with; the reason goes to stderr."""
    from dsrun.cluster.devices import detect
    from dsrun.jobs.assembly.plan_target import visible
    from dsrun.jobs.assembly.planning.search import first_choice

    if requested.options.model is None:
        raise click.UsageError("NAME auto needs --model: `dsrun models` lists those with a name.")
    name, planned, why = first_choice(requested, visible(detect(os.environ), os.environ), built_options)
    click.echo(why, err=True)
    return name, planned


def _list(as_json: bool) -> None:
    from dsrun.config.presets import preset

    rows = []
    for name, path in files("presets").items():
        try:
            file = preset.read(path)
            rows.append({"name": name, "summary": file.summary, "file": str(path)})
        except DsrunError as error:
            for problem in error.problems:
                click.echo(f"dsrun: {problem}", err=True)
    if as_json:
        print_json("presets", {"presets": rows})
        return
    width = max((len(row["name"]) for row in rows), default=0)
    for row in rows:
        echo_folded(f"{row['name']:{width}}  {row['summary']}", width + 2)


def _copy(name: str, folder: str, force: bool) -> None:
    import shlex

    from dsrun.config.presets import from_config, preset

    chosen = preset.load(name)
    target = Path(folder).expanduser() / "presets" / f"{chosen.name}.toml"
    with explained("can't be made", target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
    own = chosen.file.path
    text = from_config.text(own) if from_config.is_config(own) else own.read_text(encoding="utf-8")
    write_atomic(target, text, overwrite=force)
    click.echo(str(target))
    root = str(target.parent.parent.resolve())
    use = f"dsrun preset {shlex.quote(str(target))}"
    if ":" not in root:
        use = f"DSRUN_PATH={shlex.quote(root)} dsrun preset {shlex.quote(chosen.name)}\n  {use}"
    click.echo(
        f"Edit it, then use it by either of:\n  {use}" if "\n" in use else f"Edit it, then:\n  {use}",
        err=True,
    )


def _write(built: BuiltConfig, file: Path, options: Options, force: bool) -> None:
    """The config; for accelerate its YAML, and the config beside it."""
    from dsrun.config.accelerate.write import for_deepspeed

    texts = {file: _text(built)}
    if options.target == ACCELERATE:
        _check_yaml(file)
        config = file.with_suffix(".deepspeed.json")
        texts = {config: _text(built), file: for_deepspeed(built.ds_config, config, file, options)}
    write_all(texts, overwrite=force)
    click.echo(f"wrote {', '.join(map(str, texts))}", err=True)


def _check_yaml(file: Path | None) -> None:
    if file is not None and file.suffix.lower() not in YAML:
        raise click.UsageError(f"accelerate reads YAML by its name: -o {file.with_suffix('.yaml')}")


def _text(built: BuiltConfig) -> str:
    from dsrun.config.presets.build import render_json

    return render_json(built.ds_config)


def _say(findings: Iterable[Finding]) -> None:
    for finding in findings:
        place = f"$.{finding.path}: " if finding.path else ""
        click.echo(f"dsrun: {finding.severity}: {place}{finding.cited}\n  {finding.suggestion}", err=True)


def _explain(built: BuiltConfig, as_json: bool) -> None:
    from dsrun.config.presets.explain import explain

    rows = explain(built)
    if as_json:
        keys = [row.as_dict() for row in rows]
        print_json("preset-explain", {"keys": keys})
        return
    for row in rows:
        click.echo(f"{row.path} = {json.dumps(row.value, ensure_ascii=False)}")
        default = (
            f"; DeepSpeed's own: {json.dumps(row.default, ensure_ascii=False)}" if row.has_default else ""
        )
        click.echo(f"    from {row.origin}{default}")
        if row.does:
            click.echo(indented(row.does))
